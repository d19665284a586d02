"""The changelog of a release: fragments go above the newest section, below the introduction, and are gone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_release_moves_the_fragments_into_the_changelog(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "changelog", tmp_path / "scripts")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\nIntroduction.\n\n## 0.1.0 (2026-01-01)\n\nOld.\n")
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "README.md").write_text("How to write one.\n")
    (tmp_path / "changelog.d" / "one.fixed.md").write_text("A fault is mended.\n")

    subprocess.run([tmp_path / "scripts" / "changelog", "0.2.0"], check=True, timeout=60)

    parts = (tmp_path / "CHANGELOG.md").read_text().split("\n## ")
    assert [part.split(" ")[0] for part in parts[1:]] == ["0.2.0", "0.1.0"]
    assert "Introduction." in parts[0]
    assert "### Fixed\n\n- A fault is mended." in parts[1]
    assert [path.name for path in (tmp_path / "changelog.d").iterdir()] == ["README.md"]

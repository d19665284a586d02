"""Fragments of the changelog are named alike, and scripts/nightly changelog makes the changelog of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
FRAGMENTS = sorted((ROOT / "changelog.d").glob("*.*.md"))


def changelog(root: Path, *arguments: str) -> str:
    command = [str(root / "scripts" / "steps" / "changelog"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_fragments_are_named_for_what_they_are_and_are_one_paragraph_each() -> None:
    wrong = [
        path.name
        for path in FRAGMENTS
        if not re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed)\.md", path.name)
        or any(not line or line.startswith(("#", "-", " ")) for line in path.read_text().splitlines())
    ]
    assert wrong == []


def test_every_fragment_is_in_the_changelog() -> None:
    printed = changelog(ROOT)
    assert [path.name for path in FRAGMENTS if f"- {path.read_text().splitlines()[0]}\n" not in printed] == []


def test_a_release_takes_the_fragments_into_the_file_above_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "scripts" / "steps").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "steps" / "changelog", tmp_path / "scripts" / "steps")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\nIntroduction.\n")
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "README.md").write_text("How to write one.\n")
    (tmp_path / "changelog.d" / "one.added.md").write_text("One thing,\nin two lines.\n")
    changelog(tmp_path, "1.0.0")
    (tmp_path / "changelog.d" / "two.fixed.md").write_text("Another.\n")
    changelog(tmp_path, "1.1.0")
    written = re.sub(r"\(\d{4}-\d\d-\d\d\)", "(day)", (tmp_path / "CHANGELOG.md").read_text())
    assert written.replace("\n\n\n", "\n\n") == (
        "# Changelog\n\nIntroduction.\n\n## 1.1.0 (day)\n\n### Fixed\n\n- Another.\n\n"
        "## 1.0.0 (day)\n\n### Added\n\n- One thing,\n  in two lines.\n\n"
    )
    assert [path.name for path in (tmp_path / "changelog.d").iterdir()] == ["README.md"]


def test_a_section_that_is_not_released_yet_gets_its_day_and_the_fragments(tmp_path: Path) -> None:
    (tmp_path / "scripts" / "steps").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "steps" / "changelog", tmp_path / "scripts" / "steps")
    first = "## 1.0.0 (not released yet)\n\nThe first.\n\n### Bus\n\n- Words.\n"
    page = f"# Changelog\n\nIntroduction.\n\n{first}\n## 0.9.0 (day)\n\nOld.\n"
    (tmp_path / "CHANGELOG.md").write_text(page)
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "one.added.md").write_text("One thing,\nin two lines.\n")
    changelog(tmp_path, "1.0.0")
    written = re.sub(r"\(\d{4}-\d\d-\d\d\)", "(today)", (tmp_path / "CHANGELOG.md").read_text())
    assert written == page.replace("(not released yet)", "(today)").replace(
        "- Words.\n", "- Words.\n\n### Added\n\n- One thing,\n  in two lines.\n"
    )
    assert list((tmp_path / "changelog.d").iterdir()) == []

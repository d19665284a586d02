"""The commit that `berth --version` states: of our checkout alone, or as pip recorded it."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from berth import version as module
from berth.version import commit, version

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The file that pip wrote when it installed berth."""
    found: dict[str, str | None] = {"direct_url.json": None}

    class Installed:
        version = "7.8"

        def read_text(self, name: str) -> str | None:
            return found[name]

    monkeypatch.setattr(metadata, "distribution", lambda _: Installed())
    return found


def test_what_pip_has_installed_from_a_repository_is_known(recorded: dict[str, str | None]) -> None:
    recorded["direct_url.json"] = f'{{"url": "https://x", "vcs_info": {{"vcs": "git", "commit_id": "{COMMIT}"}}}}'
    assert version().startswith(f"7.8 ({COMMIT[:8]}, Python 3.")


@pytest.mark.usefixtures("recorded")
def test_the_commit_of_our_checkout_is_known_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        settings = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        done = subprocess.run(["git", "-C", str(tmp_path), *settings, *arguments], capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    monkeypatch.setattr(module, "HERE", tmp_path)
    assert commit() == git("rev-parse", "HEAD")[:8]
    packages = tmp_path / "venv" / "lib"
    packages.mkdir(parents=True)
    monkeypatch.setattr(module, "HERE", packages)
    assert commit() == "", "a virtualenv in a clone"


@pytest.mark.usefixtures("recorded")
def test_without_git_the_version_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(module, "HERE", tmp_path)
    assert version().startswith("7.8 (Python 3."), "no commit there"
    monkeypatch.setenv("PATH", "")
    assert version().startswith("7.8 (Python 3."), "no git"

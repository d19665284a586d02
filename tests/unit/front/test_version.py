"""The commit that `berth --version` states: of our checkout alone, read without git's program."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from berth import version as module
from berth.version import commit_of, installed_commit, version

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


def checkout(directory: Path, head: str = f"{COMMIT}\n", name: str = "berth", **files: str) -> Path:
    """A checkout with these files of its repository."""
    directory.mkdir(exist_ok=True)
    (directory / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    for path, text in {"HEAD": head, **files}.items():
        file = directory / ".git" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory


@pytest.mark.parametrize(
    "files",
    [
        {"head": f"{COMMIT}\n"},
        {"head": "ref: refs/heads/main\n", "refs/heads/main": f"{COMMIT}\n", "packed-refs": f"{OTHER} refs/heads/main"},
        {
            "head": "ref: refs/heads/a/b\n",
            "packed-refs": f"# pack-refs\n{OTHER} refs/heads/a\n{COMMIT} refs/heads/a/b\n",
        },
    ],
    ids=["detached", "a branch", "a packed branch"],
)
def test_the_commit_of_a_checkout_is_read(tmp_path: Path, files: dict[str, str]) -> None:
    assert commit_of(checkout(tmp_path, **files)) == COMMIT


def test_a_further_work_tree_has_its_own_commit(tmp_path: Path) -> None:
    first = checkout(tmp_path / "first", head="ref: refs/heads/main\n", **{
        "refs/heads/main": f"{OTHER}\n", "refs/heads/other": f"{COMMIT}\n",
        "worktrees/second/HEAD": "ref: refs/heads/other\n", "worktrees/second/commondir": "../..\n",
    })  # fmt: skip
    second = tmp_path / "second"
    second.mkdir()
    (second / "pyproject.toml").write_text((first / "pyproject.toml").read_text())
    (second / ".git").write_text(f"gitdir: {first}/.git/worktrees/second\n")
    assert (commit_of(first), commit_of(second)) == (OTHER, COMMIT)


def test_another_repository_around_the_package_is_not_ours(tmp_path: Path) -> None:
    packages = tmp_path / "venv" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    checkout(tmp_path)
    assert commit_of(packages) is None, "a virtualenv in a clone"
    assert commit_of(checkout(tmp_path / "mine", name="mine")) is None


@pytest.mark.parametrize(
    "files",
    [
        {"head": "ref: refs/heads/main\n"},
        {"head": "ref: refs/heads/.invalid\n", "packed-refs": ""},
        {"head": "ref: refs/../../secret\n"},
        {"head": "not a commit\n"},
        {"head": ""},
    ],
    ids=["a branch without a commit", "a table of references", "out of the repository", "nonsense", "empty"],
)
def test_what_cannot_be_read_is_not_known(tmp_path: Path, files: dict[str, str]) -> None:
    (tmp_path / "secret").write_text(COMMIT)
    assert commit_of(checkout(tmp_path, **files)) is None


def test_without_a_repository_or_with_a_broken_one_nothing_is_known(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    here = checkout(tmp_path / "here")
    (here / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    assert commit_of(here) is None
    there = checkout(tmp_path / "there")
    (there / "pyproject.toml").write_text("not TOML")
    assert commit_of(there) is None
    gone = tmp_path / "gone"
    gone.mkdir()
    (gone / "pyproject.toml").write_text('[project]\nname = "berth"\n')
    for text in ("gitdir: /nowhere/at/all", "nonsense"):
        (gone / ".git").write_text(text)
        assert commit_of(gone) is None


@pytest.mark.parametrize(
    ("recorded", "commit"),
    [
        (f'{{"url": "https://x", "vcs_info": {{"vcs": "git", "commit_id": "{COMMIT}"}}}}', COMMIT),
        ('{"url": "file:///x", "dir_info": {"editable": true}}', None),
        ('{"vcs_info": {"commit_id": "main"}}', None),
        ('{"vcs_info": 3}', None),
        ("nonsense", None),
        (None, None),
    ],
)
def test_what_pip_has_installed_from_a_repository_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: str | None, commit: str | None
) -> None:
    class Installed:
        version = "7.8"

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return recorded

    monkeypatch.setattr(metadata, "distribution", lambda _: Installed())
    assert installed_commit() == commit
    monkeypatch.setattr(module, "HERE", tmp_path)
    assert version().startswith(f"7.8 ({commit[:8]}, Python 3." if commit else "7.8 (Python 3.")

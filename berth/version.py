"""The version of this program, and the commit that it is of where that is known: by a checkout, or by what pip wrote.

Read without git's program, which a machine that runs berth may not have. A commit that cannot be read is not known.
"""

from __future__ import annotations

import platform
import re
import tomllib
from importlib import metadata
from pathlib import Path

import msgspec

NAME = "berth"
HERE = Path(__file__).resolve().parents[1]  # a checkout, or the site-packages that it is installed in
SHORT = 8  # digits of a commit that are shown
MAX_BYTES = 16 * 2**20  # of a file that is read: packed references are the largest
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_REFERENCE = re.compile(r"refs/[^\x00-\x20\x7f~^:?*\[\\]+")


def version() -> str:
    """The version; in brackets the commit, where it is known, and Python's version."""
    commit = commit_of(HERE) or installed_commit()
    known = [] if commit is None else [commit[:SHORT]]
    return f"{metadata.version(NAME)} ({', '.join([*known, f'Python {platform.python_version()}'])})"


def commit_of(checkout: Path) -> str | None:
    """The commit that a checkout of berth is at; None: it is none, or has no readable repository.

    A directory above, or one that holds another project, is another repository: a package may be installed in it.
    """
    try:
        with (checkout / "pyproject.toml").open("rb") as file:
            if tomllib.load(file).get("project", {}).get("name") != NAME:
                return None
        repository = _repository(checkout / ".git")
        head = _read(repository / "HEAD").strip()
        reference = head.removeprefix("ref: ")
        found = head if reference == head else _referred(repository, reference)
    except (OSError, ValueError):  # not there, not ours to read, no text, no TOML
        return None
    return found if found is not None and _COMMIT.fullmatch(found) else None


def _repository(git: Path) -> Path:
    """The directory of a checkout's HEAD. Of a further work tree, `.git` is a file that names it."""
    if git.is_dir():
        return git
    named = _read(git).strip()
    if not named.startswith("gitdir: "):
        raise ValueError(named)
    return git.parent / named.removeprefix("gitdir: ")


def _referred(repository: Path, reference: str) -> str | None:
    if not _REFERENCE.fullmatch(reference) or ".." in reference:
        return None
    shared = repository
    if (repository / "commondir").exists():  # a further work tree has its HEAD alone
        shared = repository / _read(repository / "commondir").strip()
    for directory in (repository, shared):
        if (directory / reference).is_file():
            return _read(directory / reference).strip()
    lines = (line.split(" ") for line in _read(shared / "packed-refs").splitlines())
    return next((line[0] for line in lines if line[1:] == [reference]), None)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_BYTES).decode()


class _Vcs(msgspec.Struct, frozen=True):
    commit_id: str


class _DirectUrl(msgspec.Struct, frozen=True):
    vcs_info: _Vcs | None = None


def installed_commit() -> str | None:
    """The commit that pip has installed from a repository (its direct_url.json); None: it has not."""
    found = metadata.distribution(NAME).read_text("direct_url.json")
    try:
        recorded = None if found is None else msgspec.json.decode(found, type=_DirectUrl).vcs_info
    except msgspec.DecodeError:
        return None
    return None if recorded is None or not _COMMIT.fullmatch(recorded.commit_id) else recorded.commit_id

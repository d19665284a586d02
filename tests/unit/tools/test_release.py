"""`scripts/nightly release` in a scratch repository: what holds, and what each mistake breaks."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.release import ANCHOR, Finding, findings, git, newest_tag, wheel_findings

VERSION = "0.2.0"
SCHEMA = "placement_worker/store/tables.py"
MIGRATIONS = "placement_worker/store/migrations/versions"


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def commit(root: Path) -> str:
    git(root, "add", "--all")
    git(
        root,
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@localhost",
        "commit",
        "-q",
        "--allow-empty",
        "--message",
        "Change",
    )
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A commit that is ready to be 0.2.0, after a release 0.1.0."""
    root = tmp_path / "clone"
    root.mkdir()
    git(root, "init", "-q")
    packages = '[tool.setuptools.packages.find]\ninclude = ["placement_worker*"]\n'
    write(root, "pyproject.toml", f'[project]\nname = "berth"\nversion = "0.1.0"\n{packages}')
    write(root, "CHANGELOG.md", "# Changelog\n\n## 0.1.0 (2026-01-01)\n\nOld.\n")
    write(root, "changelog.d/.gitignore", "!.gitignore\n")
    write(root, SCHEMA, "one")
    write(root, f"{MIGRATIONS}/0001_initial.py", "METADATA")
    write(root, ANCHOR, f"{commit(root)}\n")
    commit(root)
    git(root, "tag", "v0.1.0")
    write(root, "pyproject.toml", f'[project]\nname = "berth"\nversion = "{VERSION}"\n{packages}')
    write(root, "CHANGELOG.md", f"# Changelog\n\n## {VERSION} (2026-02-01)\n\nNew.\n\n## 0.1.0 (2026-01-01)\n\nOld.\n")
    write(root, SCHEMA, "two")
    write(root, f"{MIGRATIONS}/0002_more.py", "two")
    commit(root)
    return root


def broken(root: Path, version: str = VERSION) -> list[str]:
    return [one.what for one in findings(root, version) if not one.holds]


def test_a_commit_on_which_all_agree_is_a_release(clone: Path) -> None:
    assert broken(clone) == []


def _first_apart(root: Path) -> None:
    """The first migration made what METADATA has, and has statements of its own from now on."""
    write(root, f"{MIGRATIONS}/0001_initial.py", "0001_initial.sql")
    write(root, f"{MIGRATIONS}/0001_initial.sql", "one")
    commit(root)


def test_the_first_migration_may_get_statements_of_its_own(clone: Path) -> None:
    _first_apart(clone)
    assert broken(clone) == []


def test_before_the_first_release_schemas_change_by_migrations_too(clone: Path) -> None:
    git(clone, "tag", "--delete", "v0.1.0")
    _first_apart(clone)
    assert broken(clone) == []
    (clone / MIGRATIONS / "0002_more.py").unlink()
    commit(clone)
    assert broken(clone) == ["each changed schema has a migration"]


def test_before_the_first_release_the_anchor_is_the_named_commit(clone: Path) -> None:
    git(clone, "tag", "--delete", "v0.1.0")
    assert broken(clone) == []
    write(clone, ANCHOR, "0123456789abcdef0123456789abcdef01234567\n")
    commit(clone)
    assert broken(clone) == ["upgrades are tested from a commit of this history"]


def _uncommitted(root: Path) -> None:
    write(root, SCHEMA, "three")


def _fragment(root: Path) -> None:
    write(root, "changelog.d/thing.added.md", "A thing.\n")
    commit(root)


def _undated(root: Path) -> None:
    write(root, "CHANGELOG.md", f"# Changelog\n\n## {VERSION} (not released yet)\n")
    commit(root)


def _other_version(root: Path) -> None:
    write(root, "pyproject.toml", '[project]\nname = "berth"\nversion = "0.1.9"\n')
    commit(root)


def _edited_migration(root: Path) -> None:
    write(root, f"{MIGRATIONS}/0001_initial.py", "METADATA, and another")
    commit(root)


def _first_gone(root: Path) -> None:
    (root / MIGRATIONS / "0001_initial.py").unlink()
    commit(root)


def _no_migration(root: Path) -> None:
    (root / MIGRATIONS / "0002_more.py").unlink()
    commit(root)


def _tagged(root: Path) -> None:
    git(root, "tag", f"v{VERSION}", "v0.1.0")


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (_uncommitted, ["the tree is the commit"]),
        (_fragment, ["no fragment of the changelog is left"]),
        (_undated, ["CHANGELOG.md begins with it and its day"]),
        (_other_version, ["pyproject.toml has it"]),
        (_edited_migration, ["no released migration is another"]),
        (_first_gone, ["no released migration is another"]),
        (_no_migration, ["each changed schema has a migration"]),
        (_tagged, ["no tag has it", "it is above the last release"]),
    ],
)
def test_each_mistake_is_found(clone: Path, spoil: Callable[[Path], None], found: list[str]) -> None:
    spoil(clone)
    assert broken(clone) == found


@pytest.mark.parametrize("version", ["0.1.0", "0.0.9", "v0.2.0", "0.2", "0.2.0rc1"])
def test_a_version_that_is_not_the_next_is_refused(clone: Path, version: str) -> None:
    assert broken(clone, version)


def test_versions_are_compared_as_numbers(clone: Path) -> None:
    for tag in ("v0.9.0", "v0.10.0"):
        git(clone, "tag", tag)
    assert newest_tag(clone) == "v0.10.0"
    assert "it is above the last release" in broken(clone)


def test_a_wheel_lacks_no_file_of_the_packages(clone: Path, tmp_path: Path) -> None:
    def looked_at(name: str, files: list[str]) -> list[Finding]:
        with zipfile.ZipFile(tmp_path / name, "w") as made:
            for file in files:
                made.writestr(file, "")
        return list(wheel_findings(clone, VERSION, tmp_path / name))

    files = [SCHEMA, f"{MIGRATIONS}/0001_initial.py", f"{MIGRATIONS}/0002_more.py"]
    assert all(one.holds for one in looked_at(f"berth-{VERSION}-py3-none-any.whl", files))
    named, whole = looked_at("berth-0.1.9-py3-none-any.whl", files[1:])
    assert (named.holds, whole.holds) == (False, False) and SCHEMA in whole.detail


def test_nothing_is_tagged_or_committed_by_looking(clone: Path) -> None:
    def state() -> tuple[str, str]:
        return git(clone, "for-each-ref"), git(clone, "status", "--porcelain")

    before = state()
    broken(clone)
    assert state() == before

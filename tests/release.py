"""The content of a release, and whether all parts agree on it: `scripts/release`.

Nothing is changed but the directory that sdist and wheel go into, and nothing is tagged or pushed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
SECTION = re.compile(r"^## (\S+) \((.*)\)$", re.MULTILINE)
DAY = re.compile(r"\d{4}-\d\d-\d\d")
ANCHOR = "tests/upgrade/earlier"
SCHEMAS = "*/store/tables.py"
MIGRATIONS = "*/store/migrations/versions/*"
# The tests of what the pages state; the suite runs them, too.
PAGES = ("tests/unit/berth/test_docs.py",)
PAGES_ONLY = "derived or features"
LIMIT_S = 600.0


class Finding(Struct, frozen=True):
    """One thing that a release needs. detail: what is there; or, where it does not hold, what to do."""

    what: str
    holds: bool
    detail: str = ""


def git(root: Path, *arguments: str) -> str:
    """The output of git. Raises CalledProcessError."""
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    return done.stdout.strip()


def is_in(root: Path, commit: str) -> bool:
    """Whether HEAD's history has it."""
    command = ["git", "-C", str(root), "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(command, capture_output=True, check=False, timeout=LIMIT_S).returncode == 0


def newest_tag(root: Path) -> str:
    """The last release's tag; empty: there is none."""
    return next(iter(git(root, "tag", "--list", "v*", "--merged", "HEAD", "--sort=-v:refname").splitlines()), "")


def version_of(root: Path) -> str:
    """That of pyproject.toml."""
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def findings(root: Path, version: str) -> Iterator[Finding]:
    """All that git and the files of the tree show."""
    changed = git(root, "status", "--porcelain").splitlines()
    yield Finding("the tree is the commit", not changed, f"{len(changed)} files differ: commit them" if changed else "")
    yield from _versions(root, version)
    yield from _changelog(root, version)
    yield from _upgrade(root)


def _versions(root: Path, version: str) -> Iterator[Finding]:
    there = version_of(root)
    match = VERSION.fullmatch(version)
    yield Finding("the version is three numbers", match is not None, version)
    yield Finding("pyproject.toml has it", there == version, there if there == version else f"it has {there}: set it")
    last = newest_tag(root)
    tags = git(root, "tag", "--list", f"v{version}")
    yield Finding("no tag has it", not tags, f"v{version} is tagged already: take the next version" if tags else "")
    before = VERSION.fullmatch(last.removeprefix("v"))
    rises = before is None or match is None or [int(n) for n in match.groups()] > [int(n) for n in before.groups()]
    yield Finding("it is above the last release", rises, last or "there is none yet")


def _changelog(root: Path, version: str) -> Iterator[Finding]:
    left = [path.name for path in sorted((root / "changelog.d").glob("*.*.md"))]
    to_do = f"{len(left)} fragments: run towncrier build --version {version}, and commit"
    yield Finding("no fragment of the changelog is left", not left, to_do if left else "")
    newest = SECTION.search((root / "CHANGELOG.md").read_text())
    name, day = (newest[1], newest[2]) if newest else ("nothing", "")
    is_it = name == version and DAY.fullmatch(day) is not None
    yield Finding("CHANGELOG.md begins with it and its day", is_it, f"it begins with {name} ({day})")


def _upgrade(root: Path) -> Iterator[Finding]:
    last, what = newest_tag(root), "upgrades are tested from a commit of this history"
    if last:
        yield Finding(what, True, f"{last}, the last release")
    else:
        last = (root / ANCHOR).read_text().strip()
        found = is_in(root, last)
        detail = f"{last}, as {ANCHOR} has it" if found else f"{ANCHOR} names {last}, which is not in it"
        yield Finding(what, found, detail)
        if not found:
            return
    changes = git(root, "diff", "--name-status", "--no-renames", last, "HEAD", "--", MIGRATIONS).splitlines()
    edited = [
        path for kind, path in (line.split("\t") for line in changes) if kind != "A" and not _frozen(root, last, path)
    ]
    yield Finding("no released migration is another", not edited, ", ".join(edited))
    added = {line.split("/")[0].split("\t")[1] for line in changes if line.startswith("A") and line.endswith(".py")}
    changed = {
        path.split("/")[0] for path in git(root, "diff", "--name-only", last, "HEAD", "--", SCHEMAS).splitlines()
    }
    without = ", ".join(sorted(changed - added))
    yield Finding("each changed schema has a migration", not without, f"not {without}" if without else "")


def _frozen(root: Path, last: str, path: str) -> bool:
    """Whether it is a first migration that made the tables as METADATA has them, and has statements of its own now.

    Whether these make the same is seen where all migrations are compared with the tables: test_schemas.py.
    """
    if not path.endswith("/0001_initial.py") or not (root / path).is_file():
        return False
    return "METADATA" in git(root, "show", f"{last}:{path}") and "METADATA" not in (root / path).read_text()


def pages(root: Path) -> Finding:
    """Whether the features and the derived pages are up to date, by their tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", PAGES_ONLY, *PAGES]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    last = done.stdout.strip().splitlines()[-1:] or [done.stderr[-200:]]
    return Finding("the features and the derived pages are up to date", done.returncode == 0, last[0])


def build(root: Path, directory: Path, builder: str) -> Path:
    """The sdist of the commit, with the commit's time in it, and the wheel that is built from that sdist; returns the
    wheel. builder: a Python that has `build`. Raises CalledProcessError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    moment = git(root, "log", "-1", "--format=%ct")
    with tempfile.TemporaryDirectory(prefix="berth-release-") as place:
        archive = Path(place) / "tree.tar"
        git(root, "archive", "--output", str(archive), "HEAD")
        tree = Path(place) / "tree"
        tree.mkdir()
        subprocess.run(["tar", "-xf", str(archive), "-C", str(tree)], check=True, timeout=LIMIT_S)
        command = [builder, "-m", "build", "--outdir", str(directory), str(tree)]
        env = {**os.environ, "SOURCE_DATE_EPOCH": moment}
        done = subprocess.run(
            command, check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL, env=env, capture_output=True, text=True
        )
        if done.returncode:
            sys.stderr.write(done.stdout[-2000:] + done.stderr[-2000:])
        done.check_returncode()
    return max(directory.glob("berth_scheduler-*.whl"), key=lambda path: path.stat().st_mtime)


def wheel_findings(root: Path, version: str, wheel: Path) -> Iterator[Finding]:
    """The name of the wheel, and the parts of berth's packages that it lacks."""
    yield Finding("the wheel has the version", wheel.name.startswith(f"berth_scheduler-{version}-"), wheel.name)
    packages = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    places = [f"{name.removesuffix('*')}/" for name in packages]
    wanted = {path for path in git(root, "ls-files", *places).splitlines() if not path.endswith(".md")}
    with zipfile.ZipFile(wheel) as opened:
        missing = sorted(wanted - set(opened.namelist()))
    detail = f"{len(missing)} are not: {', '.join(missing[:3])}" if missing else f"{len(wanted)} files"
    yield Finding("every file of berth's packages is in the wheel", not missing, detail)


def main() -> int:
    """Look, build, and print what to type. 1: something does not hold."""
    parser = argparse.ArgumentParser(description="What a release would be.")
    parser.add_argument("version", nargs="?", help="default: that of pyproject.toml")
    parser.add_argument("--into", type=Path, default=ROOT / "dist", metavar="DIRECTORY", help="of sdist and wheel")
    parser.add_argument("--builder", default=sys.executable, help="a Python that has the package build")
    arguments = parser.parse_args()
    version = arguments.version or version_of(ROOT)
    found = []

    def note(one: Finding) -> None:
        found.append(one)
        detail = f": {one.detail}" if one.detail else ""
        sys.stdout.write(f"{'holds ' if one.holds else 'broken'}  {one.what}{detail}\n")
        sys.stdout.flush()

    for one in findings(ROOT, version):
        note(one)
    note(pages(ROOT))
    try:
        wheel = build(ROOT, arguments.into, arguments.builder)
    except subprocess.CalledProcessError as error:
        note(Finding("sdist and wheel are built", False, f"build ended with {error.returncode}"))
    else:
        for one in wheel_findings(ROOT, version, wheel):
            note(one)
    broken = sum(not one.holds for one in found)
    commit = git(ROOT, "rev-parse", "HEAD")
    if broken:
        sys.stdout.write(f"{broken} of {len(found)} do not hold: {commit[:8]} is no release {version}\n")
        return 1
    sys.stdout.write(f"would tag: git tag --annotate v{version} --message 'berth {version}' {commit}\n")
    sys.stdout.write("nothing was tagged or pushed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

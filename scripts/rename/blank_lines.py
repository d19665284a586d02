"""Blank lines between statements as they were before the move of the files: `blank_lines.py COMMIT` (of before)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

PACKAGES = (
    *("bus", "placement_worker", "scheduler_worker", "nova_scheduler", "cell_conductor", "compute_agent"),
    *("compute_sim", "ironic_sync", "gateway", "berth", "lab"),
)
Gap = tuple[str, ...]
Pair = tuple[str, str, Gap]


def main(commit: str) -> None:
    """Write the files that differ, and say how many."""
    before: dict[Pair, set[Gap]] = defaultdict(set)
    listed = _git("ls-tree", "-r", "--name-only", commit, "--", *PACKAGES)
    for name in listed.split():
        if name.endswith(".py"):
            text = _git("show", f"{commit}:{name}")
            for first, second, _, gap in _gaps(text):
                before[first, second, _comments(gap)].add(gap)
    written = 0
    for package in PACKAGES:
        for path in sorted(Path(package).rglob("*.py")):
            text = path.read_text()
            again = _mended(text, before)
            if again != text:
                assert ast.dump(ast.parse(again)) == ast.dump(ast.parse(text)), path
                path.write_text(again)
                written += 1
    print(written)


def _mended(text: str, before: dict[Pair, set[Gap]]) -> str:
    lines = text.splitlines()
    for first, second, at, gap in reversed(list(_gaps(text))):
        known = before.get((first, second, _comments(gap)), set())
        if len(known) == 1:
            new = next(iter(known))
        elif first.startswith("=") and second.startswith("="):
            new = ("", *_comments(gap))
        else:
            continue
        lines[at : at + len(gap)] = new
    return "".join(f"{line}\n" for line in lines)


def _gaps(text: str) -> Iterator[tuple[str, str, int, Gap]]:
    """Of each two statements that follow one another: their names, the first line between them, and the lines."""
    lines = text.splitlines()
    body = ast.parse(text).body
    for one, other in pairwise(body):
        start = min([other.lineno, *(each.lineno for each in getattr(other, "decorator_list", []))])
        end = one.end_lineno or one.lineno
        yield _name(one), _name(other), end, tuple(lines[end : start - 1])


def _comments(gap: Gap) -> Gap:
    return tuple(line for line in gap if line.strip())


def _name(node: ast.stmt) -> str:
    match node:
        case ast.Import() | ast.ImportFrom():
            return "import"
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.Assign(targets=[target, *_]) | ast.AnnAssign(target=target):
            return "=" + ast.unparse(target)
    return ast.unparse(node)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, check=True, text=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])

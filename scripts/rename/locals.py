"""Rename parameters and local names, which `by_type.py` does not know: `locals.py ROWS [--apply]`.

ROWS: a TSV of path patterns (git pathspecs; `:!path` excludes), an old name and a new one. Renames the name in each
function that binds it, in f-strings too, keywords in calls of such functions, and names in `pytest.mark.parametrize`.
A function that has the new name already is printed and left as it is. Run after `by_type.py`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Place = tuple[int, int, str, str]


def bound_in(function: ast.AST) -> set[str]:
    """What this function itself binds, those in it not counted."""
    names: set[str] = set()

    def look(node: ast.AST) -> None:
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        for one in ast.iter_child_nodes(node):
            if not isinstance(one, (*FUNCTIONS, ast.ClassDef)):
                look(one)

    for one in ast.iter_child_nodes(function):
        if not isinstance(one, (*FUNCTIONS, ast.ClassDef)):
            look(one)
    return names


def names_in(node: ast.AST) -> set[str]:
    """Each name that is used or bound there."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} | {
        one.arg for one in ast.walk(node) if isinstance(one, ast.arg)
    }


class File:
    """One file, and where it is to be edited."""

    def __init__(self, path: Path, wanted: dict[str, str]) -> None:
        self.path, self.wanted = path, wanted
        self.text = path.read_text()
        self.lines = self.text.splitlines(keepends=True)
        self.tree = ast.parse(self.text)
        self.places: set[Place] = set()
        self.renamed: set[tuple[str, str]] = set()  # (function or class, parameter)
        self.notes: list[str] = []

    def column(self, line: int, byte: int) -> int:
        return len(self.lines[line - 1].encode()[:byte].decode(errors="ignore"))

    def edit(self, line: int, byte: int, old: str) -> None:
        self.places.add((line, self.column(line, byte), old, self.wanted[old]))

    def functions(self) -> Iterator[tuple[ast.AST, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                for one in node.body:
                    if isinstance(one, FUNCTIONS) and one.name == "__init__":  # type: ignore[union-attr]
                        yield one, node.name
            if isinstance(node, FUNCTIONS):
                yield node, getattr(node, "name", "")

    def rename(self) -> None:
        for function, name in self.functions():
            bound = bound_in(function)
            for old in bound & self.wanted.keys():
                new = self.wanted[old]
                if new in names_in(function):
                    self.notes.append(f"{self.path}:{function.lineno}: {name} has {new} already, beside {old}")  # type: ignore[attr-defined]
                    continue
                arguments = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}  # type: ignore[attr-defined]
                if old in arguments:
                    self.renamed.add((name, old))
                for one in ast.iter_child_nodes(function):
                    self.inside(one, old)
                self.parametrized(function, old)

    def inside(self, node: ast.AST, old: str) -> None:
        """Each use in what is below this node."""
        if isinstance(node, ast.JoinedStr):
            self.f_string(node, old)
            return
        if (isinstance(node, ast.arg) and node.arg == old) or (isinstance(node, ast.Name) and node.id == old):
            self.edit(node.lineno, node.col_offset, old)
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name == old:
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                for found in re.finditer(rf"(?<![\w.]){old}\b", self.lines[line - 1]):
                    after = (line, found.start()) >= (node.lineno, node.col_offset)
                    if after and (line, found.end()) <= (node.end_lineno, node.end_col_offset):
                        self.places.add((line, found.start(), old, self.wanted[old]))
        for one in ast.iter_child_nodes(node):
            self.inside(one, old)

    def f_string(self, node: ast.JoinedStr, old: str) -> None:
        """Python 3.11 does not say where things in it are. Texts beside the braces stay."""
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            text = self.lines[line - 1]
            first = self.column(line, node.col_offset) if line == node.lineno else 0
            last = self.column(line, node.end_col_offset or 0) if line == node.end_lineno else len(text)
            for braces in re.finditer(r"(?<!\{)\{[^{}]*\}", text[first:last]):
                for found in re.finditer(rf"(?<![\w.\"'/]){old}\b(?![\"'/])", braces[0]):
                    self.places.add((line, first + braces.start() + found.start(), old, self.wanted[old]))

    def parametrized(self, function: ast.AST, old: str) -> None:
        for one in getattr(function, "decorator_list", ()):
            if not isinstance(one, ast.Call) or not ast.unparse(one.func).endswith("parametrize") or not one.args:
                continue
            for text in ast.walk(one.args[0]):
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    for found in re.finditer(rf"\b{old}\b", self.lines[text.lineno - 1]):
                        if found.start() >= self.column(text.lineno, text.col_offset):
                            self.places.add((text.lineno, found.start(), old, self.wanted[old]))

    def keywords(self, renamed: set[tuple[str, str]]) -> None:
        """Of calls of what was renamed, by the last part of its name."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Call):
                continue
            callee = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if callee == "partial" and node.args:
                callee = ast.unparse(node.args[0]).rpartition(".")[2]
            for keyword in node.keywords:
                if keyword.arg is not None and (callee, keyword.arg) in renamed and keyword.arg in self.wanted:
                    self.edit(keyword.lineno, keyword.col_offset, keyword.arg)

    def applied(self) -> str:
        lines = list(self.lines)
        for line, column, old, new in sorted(self.places, reverse=True):
            text = lines[line - 1]
            if text[column:].startswith(old):
                lines[line - 1] = text[:column] + new + text[column + len(old) :]
            else:
                self.notes.append(f"{self.path}:{line}: {old} is not where it should be")
        return "".join(lines)


def main(words: list[str]) -> int:
    """Print what is found; with --apply, write it."""
    wanted: dict[Path, dict[str, str]] = defaultdict(dict)
    for line in Path(words[0]).read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        where, old, new = line.split("\t")[:3]
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--", *where.split()], capture_output=True, check=True, text=True
        )
        for path in listed.stdout.split("\0"):
            if path.endswith(".py"):
                wanted[Path(path)][old] = new
    files = [File(path, names) for path, names in sorted(wanted.items())]
    renamed: set[tuple[str, str]] = set()
    for file in files:
        file.rename()
        renamed |= file.renamed
    for file in files:
        file.keywords(renamed)
    count = 0
    for file in files:
        text = file.applied()
        count += len(file.places)
        for note in file.notes:
            print(note)
        if "--apply" in words and text != file.text:
            file.path.write_text(text)
    print(f"{count} places")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

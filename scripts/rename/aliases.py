"""Import modules of ours under their own names, where an alias is the name that they had before: `aliases.py`."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("bus", "placement_worker", "scheduler_worker", "nova_scheduler", "cell_conductor", "compute_agent"),
    *("compute_sim", "ironic_sync", "gateway", "berth", "lab"),
)


def main() -> None:
    """Write the files that differ, and name what stays: the new name is taken there, or the old one is bound twice."""
    before = _old_names()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            again = _renamed(text, before, str(path.relative_to(ROOT)))
            if again != text:
                path.write_text(again)


def _old_names() -> dict[str, set[str]]:
    """By module as it is: the last parts of the names that it had."""
    found: dict[str, set[str]] = {}
    for row in (ROOT / "scripts" / "rename" / "layout.tsv").read_text().splitlines()[1:]:
        module, symbol, place = row.split("\t")
        if symbol == "*":
            found.setdefault(place, set()).add(module.rpartition(".")[2])
    return found


def _renamed(text: str, before: dict[str, set[str]], where: str) -> str:
    tree = ast.parse(text)
    for node in [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]:
        for alias in node.names:
            old, new = alias.asname, alias.name
            if old is None or old not in before.get(f"{node.module}.{new}", ()):
                continue
            if _is_bound(tree, new) or _is_bound(tree, old):
                print(f"{where}: {new} as {old} stays")
                continue
            text = _replaced(text, old, new)
    return text


def _is_bound(tree: ast.Module, name: str) -> bool:
    """Whether something but an import alias binds it."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=found, ctx=ast.Store() | ast.Del()) | ast.arg(arg=found) if found == name:
                return True
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                return True
            case ast.alias(name=found, asname=None) if found == name:
                return True
    return False


def _replaced(text: str, old: str, new: str) -> str:
    lines = text.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    places = []
    for at, token in enumerate(tokens):
        if token.type != tokenize.NAME or token.string != old or tokens[at - 1].string == ".":
            continue
        if not (tokens[at + 1].string == "=" and tokens[at - 1].string in ("(", ",")):  # no name of an argument
            places.append(token.start)
    for row, column in reversed(places):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new + line[column + len(old) :]
    return re.sub(rf"\b{new} as {new}\b", new, "".join(lines))


if __name__ == "__main__":
    main()

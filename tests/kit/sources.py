"""The sources of the repository as the house rules read them: each file once, as text and as a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKERS = ("placement_worker", "scheduler_worker", "cell_conductor", "compute_sim", "ironic_sync")
OURS = ("bus", *WORKERS, "berth")
TESTING = ("tests", "lab")


@cache
def sources(*packages: str) -> tuple[Path, ...]:
    return tuple(path for package in packages for path in sorted((ROOT / package).rglob("*.py")))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file, as `ast.walk` has it."""
    return tuple(ast.walk(parsed(path)))


def forget() -> None:
    """Let go of what has been read."""
    for kept in (sources, parsed, nodes):
        kept.cache_clear()


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Absolute names of the modules a file imports; relative imports are resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *([node.module] if node.module else [])))
            # `from package import module` names a module too.
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"

"""The graph of imports as it will be when each symbol is where `scripts/rename/layout.tsv` puts it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tests.kit.sources import OURS, ROOT, nodes, sources
from tests.kit.struct_types import definitions, imported_names, module_of

PRODUCT = (*OURS, "lab")
# What a package may import besides itself. The laboratory may import all.
MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "bus": frozenset(),
    "placement_worker": frozenset({"bus"}),
    "scheduler_worker": frozenset({"bus", "placement_worker"}),
    "nova_scheduler": frozenset({"bus", "placement_worker", "scheduler_worker"}),
    "cell_conductor": frozenset({"bus"}),
    "compute_agent": frozenset({"bus"}),
    "compute_sim": frozenset({"bus", "compute_agent"}),
    "ironic_sync": frozenset({"bus"}),
    "gateway": frozenset({"bus"}),
    "berth": frozenset(
        {"bus", "placement_worker", "scheduler_worker", "nova_scheduler", "cell_conductor", "compute_agent"}
        | {"compute_sim", "ironic_sync", "gateway"}
    ),
}

Graph = Mapping[str, frozenset[str]]


class Arrow(NamedTuple):
    """A symbol of one module that uses a symbol of another, at their places of today and of the layout."""

    user: str
    used: str
    user_place: str
    used_place: str


def places() -> dict[tuple[str, str], str]:
    """By (module, symbol): the place of a symbol, of the code at a module's top level (""), of all else of it ("*")."""
    rows = (ROOT / "scripts" / "rename" / "layout.tsv").read_text().splitlines()[1:]
    return {(module, symbol): place for module, symbol, place in (row.split("\t") for row in rows)}


def arrows() -> list[Arrow]:
    """Every use of another module's symbol in the product."""
    known = places()

    def place(module: str, symbol: str) -> str:
        return known.get((module, symbol)) or known.get((module, "*")) or module

    found = []
    for path in sources(*PRODUCT):
        module = module_of(path)
        names = imported_names(module)
        own = definitions(module)
        for statement in nodes(path)[0].body:  # type: ignore[attr-defined]
            if isinstance(statement, ast.Import | ast.ImportFrom):
                continue
            for symbol in _defined_by(statement) or [""]:
                for name, attribute in _uses(statement, frozenset()):
                    used = names.get(name)
                    if name in own:
                        used = (module, name)
                    if used is None:
                        continue
                    target = used if used[1] else (used[0], attribute)
                    if target[0].partition(".")[0] in PRODUCT and target != (module, symbol):
                        if target[1] not in definitions(target[0]):
                            target = (target[0], "")
                        arrow = Arrow(f"{module}.{symbol}", ".".join(target), place(module, symbol), place(*target))
                        if arrow.user_place != arrow.used_place:
                            found.append(arrow)
    return found


def _defined_by(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [node.id for one in targets for node in ast.walk(one) if isinstance(node, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _uses(node: ast.AST, hidden: frozenset[str]) -> Iterator[tuple[str, str]]:
    """The names that are read, each with the attribute that is read of it; none of a local variable."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        one = node.args
        arguments = [*one.posonlyargs, *one.args, *one.kwonlyargs, *filter(None, (one.vararg, one.kwarg))]
        hidden |= {argument.arg for argument in arguments}
        if not isinstance(node, ast.Lambda):
            hidden |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
        hidden |= {x.id for one in node.generators for x in ast.walk(one.target) if isinstance(x, ast.Name)}
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id not in hidden:
            yield node.value.id, node.attr
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in hidden:
        yield node.id, ""
    for child in ast.iter_child_nodes(node):
        yield from _uses(child, hidden)


def graph(found: Iterable[Arrow], depth: int = 9) -> Graph:
    """Places that use places, each cut to so many parts: at depth 2 a file in a folder stands for the folder."""
    result: dict[str, set[str]] = defaultdict(set)
    for arrow in found:
        user, used = (_cut(place, depth) for place in (arrow.user_place, arrow.used_place))
        if user != used:
            result[user].add(used)
    return {user: frozenset(used) for user, used in result.items()}


def _cut(place: str, depth: int) -> str:
    parts = place.split(".")
    return ".".join(parts[:depth]) if len(parts) > depth else place


def circles(known: Graph) -> list[frozenset[str]]:
    """The groups of places that use one another (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(place: str) -> None:
        number[place] = lowest[place] = len(number)
        stack.append(place)
        for used in sorted(known.get(place, ())):
            if used not in number:
                visit(used)
                lowest[place] = min(lowest[place], lowest[used])
            elif used in stack:
                lowest[place] = min(lowest[place], number[used])
        if lowest[place] == number[place]:
            group = stack[stack.index(place) :]
            del stack[stack.index(place) :]
            if len(group) > 1:
                found.append(frozenset(group))

    for place in sorted(known):
        if place not in number:
            visit(place)
    return found

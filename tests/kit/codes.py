"""The stable codes in the sources: every dotted literal that is not known to be something else.

A list of the places where codes are written would pass over a new place. So each literal of the form `word.word` is a
code, unless its place shows another purpose (a message's tag, a logger's name) or `NO_CODES` names it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from bus.contracts.catalogue import MESSAGES, QUEUES
from bus.contracts.drains import DrainTarget
from bus.contracts.operations import AdminState
from bus.contracts.placement import ClaimOutcome
from tests.kit.sources import OURS, ROOT, nodes, parsed, sources

# A placeholder of an f-string is written `*`.
FORM = re.compile(r"[a-z*][a-z0-9_*]*(?:\.[a-z0-9_*]+)+")
WORD = re.compile(r"[a-z][a-z0-9_]*")
LOGGED = {"warning", "error", "exception", "critical", "fatal"}
UNLOGGED = {"info", "debug"}

# Arguments of these names are no codes, and neither are arguments of these functions.
OTHER_KEYWORDS = {"tag", "key", "batch_key", "name", "setting", "flavor", "cause"}
OTHER_CALLS = {
    "get_logger", "consumer", "declare", "apply_sql", "_page", "files", "PackageLoader", "import_module", "rendered",
    "read_text", "ForeignKey", *UNLOGGED,
}  # fmt: skip
FILES = re.compile(r"\.(json|html|conf|config|log|pid|sql|toml|d|yaml|txt|gz|sha256)$")
# Dotted names that are no codes, by their purpose.
OTHER_NAMES = {
    "attributes of OpenTelemetry": (
        "berth.attempt berth.bus berth.cause berth.event berth.host berth.instance berth.message berth.move berth.node "
        "db.namespace db.system.name host.name http.request.method http.response.status_code http.route "
        "messaging.batch.message_count messaging.destination.name service.instance.id service.namespace "
        "service.version url.path"
    ),
    "messages of ASGI": "http.disconnect http.response.body http.response.start",
    "fields and events of Ironic's notifications": (
        "baremetal.node.*.* ironic.metrics ironic_object.data ironic_object.name ironic_object.namespace "
        "ironic_object.version oslo.message oslo.version"
    ),
    "flavors": "bm.gold bm.silver gpu.small m1.* m1.large m1.medium m1.small m1.tiny",
    "metrics of hosts": "power.watts sensors.critical sensors.warning temperature.celsius",
    "settings, and values of settings": (
        "cells.*.url compute.ironic.microversion ironic_sync.microversion ironic_sync.notifications"
    ),
    "files, packages, formats, entry points": (
        "placement.token berth.fencing berth.load.v1 berth.migrations.* berth.placement.v3 "
        "cell_conductor.store.migrations ironic_sync.store.migrations placement_worker.store.migrations "
        "scheduler_worker.store.migrations *.store.migrations *.libs *.machines"
    ),
    "exchanges, queues and routing keys": (
        "amq.default berth.dead berth.delay berth.delayed berth.events berth.of.* berth.owner.* berth.probe "
        "berth.reply.*.* berth.return *.b *.* **.* *.*.*"
    ),
    "names under which handled messages are on record": "scheduler.changes.refused scheduler.drains",
    "columns and percentiles of a load's record": "depths.* stages.* utilisation.share p99.9",
    "the cause of messages without another": "ironic.resync",
    "locks in the database": "berth.placement.names berth.placement.trees",
    "a log line of level info or debug, by a variable": "instance.ended",
}
NO_CODES = frozenset(name for names in OTHER_NAMES.values() for name in names.split())
# Codes that are put together, and the words that they are put together of.
FORMED: Mapping[str, tuple[str, ...]] = {
    "*.unknown": tuple(f"{one}.unknown" for one in DrainTarget),
    "claim.*": tuple(
        f"claim.{one}" for one in (ClaimOutcome.RACED, ClaimOutcome.FULL, ClaimOutcome.RULED_OUT, ClaimOutcome.GONE)
    ),
    "database.*_schema": tuple(f"database.{one}_schema" for one in ("other", "newer", "foreign")),
    "host.*": tuple(f"host.{one}" for one in (AdminState.MAINTENANCE, AdminState.FENCED)),
    "load.*": ("load.late", "load.lost"),
    "spawn.*": ("spawn.fenced", "spawn.superseded"),
}


def codes_of(path: Path) -> Iterator[tuple[str, int]]:
    """The codes in a file, each with its line: dotted ones anywhere, others where a code is expected."""
    parents = {child: node for node in nodes(path) for child in ast.iter_child_nodes(node)}
    for node in nodes(path):
        text = _text(node, parents)
        if text is None or not (FORM.fullmatch(text) or (WORD.fullmatch(text) and _is_code(node, parents))):
            continue
        if text in NO_CODES or text in _routing() or FILES.search(text) or _is_other(node, parents):
            continue
        yield from ((code, node.lineno) for code in FORMED.get(text, (text,)))


def logged_in(path: Path) -> Iterator[tuple[str, int]]:
    """The names of the log lines from `warning` up that a file writes, each with its line."""
    own = _constants_of(path)
    for node in nodes(path):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in LOGGED:
            continue
        if not ast.unparse(node.func.value).endswith("log"):
            continue
        for one in ast.walk(node.args[0]):
            if isinstance(one, ast.Constant) and isinstance(one.value, str) and FORM.fullmatch(one.value):
                yield one.value, node.lineno
            elif isinstance(one, ast.Name) and (name := own.get(one.id) or _constants().get(one.id)):
                yield name, node.lineno


@cache
def literals(package: str) -> frozenset[str]:
    """All texts that the sources of a package hold."""
    found = (node.value for path in sources(package) for node in nodes(path) if isinstance(node, ast.Constant))
    return frozenset(text for text in found if isinstance(text, str))


_ROUTING: set[str] = set()
_CONSTANTS: dict[str, str] = {}


def _routing() -> set[str]:
    """The tags and routing keys of messages, and the names and keys of queues."""
    if not _ROUTING:
        found = {one for row in MESSAGES for one in (row.tag, row.key, row.batch_key) if one}
        found |= {one for row in QUEUES for one in (row.name, *(key for _, key in row.bindings))}
        _ROUTING.update(found, (re.sub(r"\{\w+\}", "*", one) for one in found))
    return _ROUTING


def _constants() -> dict[str, str]:
    """The constants of the product that have one value in the form of a code, or of the beginning of one."""
    if not _CONSTANTS:
        found: dict[str, set[str]] = defaultdict(set)
        for path in sources(*OURS):
            for name, value in _constants_of(path).items():
                found[name].add(value)
        _CONSTANTS.update((name, values.pop()) for name, values in found.items() if len(values) == 1)
    return _CONSTANTS


def _constants_of(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in parsed(path).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))):
                if FORM.fullmatch(value) or FORM.fullmatch(value + "*"):
                    found[name] = value
    return found


def _text(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> str | None:
    """The text that a literal stands for; None: it is none, or a part of another."""
    if isinstance(parents.get(node), ast.JoinedStr | ast.FormattedValue):
        return None
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_part(part) for part in parts)
        case ast.BinOp(left=ast.Name() as left, op=ast.Add()) if _constants().get(left.id, "").endswith("."):
            return _constants()[left.id] + "*"
    return None


def _part(part: ast.expr) -> str:
    match part:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=ast.Name(id=name)) if _constants().get(name, "").endswith("."):
            return _constants()[name]
    return "*"


def _is_code(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether a word without a dot stands where a code is expected: `code=...`, `code = ...`, `Stop(_, code)`."""
    match parents[node]:
        case ast.keyword(arg="code") | ast.Assign(targets=[ast.Name(id="code")]):
            return True
        case ast.Call(func=ast.Name(id="Stop" | "Problem"), args=[_, second, *_]):
            return second is node
    return False


def _is_other(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether the place of a literal shows that it is no code."""
    match parents[node]:
        case ast.keyword(arg=name):
            return name in OTHER_KEYWORDS
        case ast.BinOp(op=ast.Div()):
            return True
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=args):
            return name in OTHER_CALLS and node in args
    return False


@cache
def of_package(package: str) -> dict[str, str]:
    """The codes of a package, each with the first place where it stands."""
    found: dict[str, str] = {}
    for path in sources(package):
        for code, line in codes_of(path):
            found.setdefault(code, f"{path.relative_to(ROOT)}:{line}")
    return found

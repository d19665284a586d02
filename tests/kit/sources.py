"""Sources, parsed once: where they are, what they import, and the rules about their syntax and codes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from bus.contracts.catalogue import MESSAGES
from bus.contracts.drains import DrainTarget
from bus.contracts.operations import AdminState
from bus.contracts.placement import ClaimOutcome
from bus.contracts.queues import QUEUES

# --- the sources of the repository as the house rules read them: each file once, as text and as a syntax tree

ROOT = Path(__file__).parents[2]
WORKERS = (
    *("placement_worker", "scheduler_worker", "nova_scheduler", "cell_conductor", "compute_agent", "ironic_sync"),
    "gateway",
)
OURS = ("bus", *WORKERS, "compute_sim", "berth")
TESTING = ("tests", "lab")


@cache
def sources(*packages: str) -> tuple[Path, ...]:
    """Those of packages, or of folders (`bus/contracts`)."""
    return tuple(path for name in packages for path in sorted((ROOT / name.replace(".", "/")).rglob("*.py")))


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


# --- the checks of the house rules on a syntax tree: growing waits, slots, exceptions, docstrings, numbers and fields

WAITS = re.compile("sleep|wait|within")
# A broken contract of the caller's, or of Python's own.
CALLERS_FAULTS = {"AssertionError", "NotImplementedError", "StopAsyncIteration"}
# CONTRIBUTING.md: a duration or a monotonic time ends in `_s`, a time of the calendar in `_at`, `_before` or `_since`.
UNIT = re.compile(r".*_(s|ms|at|before|since|mb|gb|bytes|share|ratio)|now|at|before|seconds")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def waits_longer(function: ast.AST) -> bool:
    """Whether one of its loops waits, and doubles something."""
    return any(
        doubles(loop) and any(isinstance(call, ast.Attribute) and WAITS.search(call.attr) for call in ast.walk(loop))
        for loop in ast.walk(function)
        if isinstance(loop, ast.While | ast.For | ast.AsyncFor)
    )


def doubles(loop: ast.AST) -> bool:
    """Whether it multiplies a variable by two, or raises two to a power. Twice a constant is a wait like any other."""
    for node in ast.walk(loop):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            if any(map(is_two, sides)) and not any(isinstance(one, ast.Name) and one.id.isupper() for one in sides):
                return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and is_two(node.left):
            return True
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult | ast.Pow) and is_two(node.value):
            return True
    return False


def is_two(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == 2


def members_listed(statement: ast.stmt, enumeration: str) -> set[str]:
    """The members of an enumeration that stand in one expression of a statement, where there are several."""
    for expression in ast.iter_child_nodes(statement):
        found = {
            node.attr
            for node in ast.walk(expression)
            if isinstance(expression, ast.expr)
            and isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == enumeration
        }
        if len(found) > 1:
            return found
    return set()


def slots_of(node: ast.ClassDef) -> list[str]:
    """The names of a class's `__slots__`; none when some of them do not stand there as texts."""
    for one in node.body:
        match one:
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=elts)):
                names = [elt.value for elt in elts if isinstance(elt, ast.Constant) and isinstance(elt.value, str)]
                return names if len(names) == len(elts) else []
    return []


def is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def is_own(node: ast.Attribute) -> bool:
    return is_stored(node) and isinstance(node.value, ast.Name) and node.value.id == "self"


def is_broad(kind: ast.expr | None) -> bool:
    return kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"})


def silent_raises(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Public functions and methods that raise an exception which their docstring does not name: (name, line, which)."""
    for name, node in public_definitions(tree):
        if isinstance(node, ast.ClassDef):
            continue
        text = ast.get_docstring(node) or ""
        raised = {kind for one in own_statements(node) if (kind := raised_by(one)) and kind not in CALLERS_FAULTS}
        if raised and "aise" not in text and not any(kind in text for kind in raised):
            yield name, node.lineno, ", ".join(sorted(raised))


def own_statements(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's body, without those of functions and classes inside it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, Definition | ast.Lambda):
            yield node
            yield from own_statements(node)


def raised_by(node: ast.AST) -> str:
    """The class that a statement raises; "": none, or the exception that is handled."""
    if not isinstance(node, ast.Raise) or node.exc is None:
        return ""
    kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    name = kind.id if isinstance(kind, ast.Name) else kind.attr if isinstance(kind, ast.Attribute) else ""
    return name if name[:1].isupper() else ""


def numbers_without_unit(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Parameters of public functions that are floats, with no unit in the name and none in a docstring."""
    classes = {name: ast.get_docstring(node) or "" for name, node in public_definitions(tree)}
    for name, node in public_definitions(tree):
        if isinstance(node, ast.ClassDef):
            continue
        text = classes[name] + classes.get(name.partition(".")[0], "")
        for argument in (*node.args.args, *node.args.kwonlyargs):
            kind = ast.unparse(argument.annotation) if argument.annotation else ""
            is_bare = kind in {"float", "float | None"} and not UNIT.fullmatch(argument.arg)
            if is_bare and not re.search(rf"\b{argument.arg}\b", text):
                yield name, node.lineno, argument.arg


def names_in(definition: ast.AST) -> Iterator[str]:
    """Every name that a class uses, as a field, an argument, an attribute or a text."""
    for node in ast.walk(definition):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)) | ast.AsyncFunctionDef(name=name):
                yield name


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                inner = (one for one in node.body if isinstance(one, Definition) and not one.name.startswith("_"))
                yield from ((f"{node.name}.{one.name}", one) for one in inner)


# --- the stable codes in the sources: every dotted literal that is not known to be something else
# A list of the places where codes are written would pass over a new place. So each literal of the form `word.word` is a
# code, unless its place shows another purpose (a message's tag, a logger's name) or `NO_CODES` names it.

# A placeholder of an f-string is written `*`.
FORM = re.compile(r"[a-z*][a-z0-9_*]*(?:\.[a-z0-9_*]+)+")
WORD = re.compile(r"[a-z][a-z0-9_]*")
LOGGED = {"warning", "error", "exception", "critical", "fatal"}
UNLOGGED = {"info", "debug"}

# Arguments of these names are no codes, and neither are arguments of these functions.
OTHER_KEYWORDS = {"tag", "key", "cell_key", "name", "setting", "flavor", "cause"}
OTHER_CALLS = {
    "get_logger", "consumer", "declare", "apply_sql", "_page", "files", "PackageLoader", "import_module", "rendered",
    "read_text", "ForeignKey", *UNLOGGED,
}  # fmt: skip
FILES = re.compile(r"\.(json|html|conf|config|log|pid|sql|toml|d|yaml|txt|gz|sha256)$")
# Dotted names that are no codes, by their purpose.
OTHER_NAMES = {
    "attributes of OpenTelemetry": (
        "berth.attempt berth.bus berth.cause berth.event berth.host berth.instance berth.message berth.action "
        "berth.node "
        "db.namespace db.system.name host.name http.request.method http.response.status_code http.route "
        "messaging.batch.message_count messaging.destination.name service.instance.id service.namespace "
        "service.version url.path"
    ),
    "reasons of placement": "claim.migration_in_use",
    "messages of ASGI": "http.disconnect http.response.body http.response.start",
    "fields of Nova's objects": "nova_object.data nova_object.name",
    "values of nova.conf": "nova.scheduler.filters.all_filters nova.scheduler.weights.all_weighers",
    "settings": "telemetry.log_level",
    "Nova's notifications": "*.info scheduler.select_destinations.start scheduler.select_destinations.end",
    "fields and events of Ironic's notifications": (
        "baremetal.node.*.* ironic.metrics ironic_object.data ironic_object.name ironic_object.namespace "
        "ironic_object.version oslo.message oslo.version"
    ),
    "flavors": "bm.gold bm.silver gpu.small m1.* m1.large m1.medium m1.small m1.tiny",
    "metrics of hosts": "power.watts sensors.critical sensors.warning temperature.celsius",
    "settings, and values of settings": (
        "cells.*.url compute.ironic.microversion gateway.url ironic_sync.microversion ironic_sync.notifications"
    ),
    "files, packages, formats, entry points": (
        "placement.token berth.drivers berth.fencing berth.load.v1 berth.migrations.* berth.placement.v3 "
        "cell_conductor.store.migrations ironic_sync.store.migrations placement_worker.store.migrations "
        "scheduler_worker.store.migrations *.store.migrations *.libs *.machines"
    ),
    "exchanges, queues and routing keys": (
        "amq.default amq.topic berth.dead berth.delay berth.delayed berth.events berth.of.* berth.owner.* berth.probe "
        "berth.replays berth.replies berth.reply.*.* berth.reply.*.0 client.reply.x berth.return operator.request "
        "client.* door.request "
        "operator.request.* *.b *.* **.* *.*.*"
    ),
    "names under which handled messages are on record": "scheduler.changes.refused",
    "columns and percentiles of a load's record": "depths.* stages.* utilisation.share p99.9",
    "the cause of messages without another": "ironic.resync",
    "modules of the exceptions that Nova's clients raise": "nova.exception oslo_messaging.rpc.dispatcher",
    "locks in the database": "berth.placement.names berth.placement.trees",
    "a log line of level info or debug, by a variable": "instance.ended",
}
NO_CODES = frozenset(name for names in OTHER_NAMES.values() for name in names.split())
# Codes that are put together, and the words that they are put together of.
FORMED: Mapping[str, tuple[str, ...]] = {
    "*.unknown": tuple(f"{one}.unknown" for one in DrainTarget),
    "claim.*": tuple(
        f"claim.{one}"
        for one in (
            ClaimOutcome.CONFLICT,
            ClaimOutcome.NO_CAPACITY,
            ClaimOutcome.POLICY_VIOLATED,
            ClaimOutcome.PROVIDER_REMOVED,
        )
    ),
    "database.*_schema": tuple(f"database.{one}_schema" for one in ("other", "newer", "foreign")),
    "host.*": tuple(f"host.{one}" for one in (AdminState.MAINTENANCE, AdminState.FENCED)),
    "load.*": ("load.late", "load.lost"),
    "spawn.*": ("spawn.attempt_ended", "spawn.superseded"),
}


def codes_of(path: Path) -> Iterator[tuple[str, int]]:
    """The codes in a file, each with its line: dotted ones anywhere, others where a code is expected."""
    parents = {child: node for node in nodes(path) for child in ast.iter_child_nodes(node)}
    for node in nodes(path):
        text = _text(node, parents)
        if text is None or not (FORM.fullmatch(text) or (WORD.fullmatch(text) and _is_code(node, parents))):
            continue
        if text in NO_CODES or text in _routing() or FILES.search(text) or _is_other(node, parents) or _is_module(text):
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
        found = {one for row in MESSAGES for one in (row.tag, row.key, row.cell_key) if one}
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


def _is_module(text: str) -> bool:
    """Whether it is the name of a module of ours."""
    path = ROOT / text.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


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

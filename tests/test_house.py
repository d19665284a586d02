"""The house rules that a machine can check: catalogue, names, docstrings, sizes."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import import_module
from pkgutil import iter_modules

import msgspec
import pytest

from bus import contracts
from bus.contracts import base, catalogue
from bus.contracts.base import Message
from bus.contracts.catalogue import BY_TYPE, MESSAGES, REPLIES
from bus.contracts.queues import COMMANDS, QUEUES, QueueKind, Where
from cell_conductor.state.instance import State
from tests.kit.sources import (
    OURS,
    ROOT,
    WORKERS,
    imports,
    is_broad,
    is_own,
    is_stored,
    members_listed,
    names_in,
    nodes,
    numbers_without_unit,
    parsed,
    silent_raises,
    slots_of,
    sources,
    waits_longer,
    where,
    within,
)

MAX_FILE_LINES = 550
MAX_FUNCTION_LINES = 60
# Functions of more than 40 lines: at most so many. One more is divided.
LONG_LINES, MAX_LONG_FUNCTIONS = 40, 30


def test_files_and_functions_stay_readable() -> None:
    wrong: list[str] = []
    long: list[str] = []
    for path in sources(*OURS):
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            wrong.append(f"{path.relative_to(ROOT)} has {lines} lines")
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > MAX_FUNCTION_LINES:
                    wrong.append(f"{where(path, node.lineno)} {node.name} has {size} lines")
                if size > LONG_LINES:
                    long.append(f"{where(path, node.lineno)} {node.name} has {size} lines")
    assert wrong == []
    assert len(long) <= MAX_LONG_FUNCTIONS, long


def test_no_module_is_called_utils() -> None:
    wrong = [path for path in sources(*OURS) if path.stem in {"utils", "util", "helpers", "misc"}]
    assert wrong == []


def test_every_package_of_ours_is_typed_and_described() -> None:
    missing = [
        f"{package}/{name}" for package in WORKERS for name in ("py.typed", "README.md", "app.py", "config.py",
        "metrics.py") if not (ROOT / package / name).exists()
    ]  # fmt: skip
    assert missing == []


# --- the catalogue


def message_types() -> list[type[Message]]:
    """Every message of every module of `bus.contracts`."""
    modules = [import_module(f"bus.contracts.{one.name}") for one in iter_modules(contracts.__path__) if not one.ispkg]
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Message) and value is not Message
    }
    return sorted(found, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", message_types(), ids=lambda kind: kind.__name__)
def test_every_message_has_a_row_or_is_a_reply(kind: type[Message]) -> None:
    assert (kind in BY_TYPE) != (kind in REPLIES)


def test_tags_are_versioned_and_unique() -> None:
    tags = [base.tag_of(kind) for kind in message_types()]
    assert len(set(tags)) == len(tags)
    assert [tag for tag in tags if not tag.rpartition(".v")[2].isdigit()] == []


@pytest.mark.parametrize("row", MESSAGES, ids=lambda row: row.tag)
def test_a_key_names_fields_that_are_safe_in_a_routing_key(row: catalogue.MessageRow) -> None:
    fields = {field.name: field for field in msgspec.structs.fields(row.message)}
    for part in row.key.split("."):
        if part.startswith("{"):
            name = part[1:-1]
            assert name in fields
            # A free text in a routing key would let its sender add words, or a wildcard's worth of them.
            assert any(word in str(fields[name].type) for word in ("pattern", "BuildState", "ActionState"))


@pytest.mark.parametrize("row", [row for row in MESSAGES if row.exchange == COMMANDS], ids=lambda row: row.tag)
def test_every_command_is_taken_by_one_queue_on_each_of_its_buses(row: catalogue.MessageRow) -> None:
    takers = [queue for queue in QUEUES if row in catalogue.queues_taking(queue.name)]
    assert takers
    buses = {Where.API, Where.CELL} if row.where is Where.BOTH else {row.where}
    for bus in buses:
        # Two queues with the same command would each carry it out. Operators and gateways have keys of their own.
        these = [queue for queue in takers if queue.where in (bus, Where.BOTH) and not queue.takes_dead_letters]
        assert len([one for one in these if one.name not in ("scheduler.operators", "scheduler.door")]) == 1


@pytest.mark.parametrize("queue", QUEUES, ids=lambda queue: queue.name)
def test_every_queue_takes_something_and_is_bounded(queue: catalogue.QueueRow) -> None:
    assert catalogue.queues_taking(queue.name)
    assert queue.max_length > 0
    assert bool(queue.retry_s) == (queue.kind is QueueKind.DURABLE)


def test_replies_are_declared_by_a_request() -> None:
    declared = {row.reply for row in MESSAGES if row.reply is not None} | {base.Refusal}
    assert set(REPLIES) == declared


def test_a_public_class_name_exists_once() -> None:
    where_is: dict[str, list[str]] = {}
    for path in sources(*OURS):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where_is.setdefault(node.name, []).append(where(path, node.lineno))
    doubled = {name: places for name, places in where_is.items() if len(places) > 1}
    assert doubled == {}


# --- schemas

STORES = tuple(worker for worker in WORKERS if (ROOT / worker / "store" / "migrations").is_dir())


@pytest.mark.parametrize("worker", STORES)
def test_migrations_are_named_alike_and_do_not_change(worker: str) -> None:
    store = ROOT / worker / "store"
    names = sorted(path.stem for path in (store / "migrations" / "versions").glob("[0-9]*.py"))
    assert names[0] == "0001_initial"
    assert [name[:4] for name in names] == [f"{number:04}" for number in range(1, len(names) + 1)]
    for name in names:
        source = (store / "migrations" / "versions" / f"{name}.py").read_text()
        assert f'revision = "{name}"' in source, f"{name}: a revision is called as its file"
        if "compatible_from" in source:
            assert any(f'compatible_from = "{one}"' in source for one in names if one < name), (
                f"{name}: no revision before"
            )
        assert "METADATA" not in source or len(names) == 1, f"{name}: a migration is never another, and tables change"


# --- what is installed


def test_a_runtime_dependency_is_imported_by_what_runs_at_a_site() -> None:
    """A package that only the embedded servers, tests and docs need is an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[\[>=]", line)[0].replace("-", "_").replace(".", "_") for line in project["dependencies"]}
    paths = [path for path in sources(*OURS) if (ROOT / "berth" / "up" / "embedded") not in path.parents]
    imported = {module.split(".")[0] for path in paths for module, _ in imports(path)}
    assert sorted(needed - imported - BY_NAME) == []


# Loaded by uvicorn: its parser of HTTP.
BY_NAME = {"httptools"}


# Where waits that grow are at home.
RETRYING = "bus/retrying.py"


def test_only_one_module_defines_how_something_is_retried() -> None:
    """Neither tenacity elsewhere, nor its like made by hand: a loop that waits beside a number that is doubled."""
    wrong: list[str] = []
    for path in sources(*OURS):
        if path == ROOT / RETRYING:
            continue
        wrong += [
            f"{where(path, line)} imports tenacity" for module, line in imports(path) if within(module, "tenacity")
        ]
        wrong += [
            f"{where(path, function.lineno)} waits longer each time"
            for function in nodes(path)
            if isinstance(function, ast.AsyncFunctionDef) and waits_longer(function)
        ]
    assert wrong == []


# The states of an instance: one row each, and the table of what each event does in them.
DESIRES = "cell_conductor/state/desired_state.py"
STATES_LISTED = {DESIRES, "cell_conductor/table.py"}
OF_IDENTITY = ("open", "recovering", "accepted")  # the states of another row
STATES_IN_SQL = re.compile(rf"\bstate (?:NOT )?(?:IN \(|=) ?'(?!(?:{'|'.join(OF_IDENTITY)})')")


def test_the_states_of_an_instance_are_listed_in_one_place() -> None:
    """A set of them that is kept elsewhere, in Python or SQL, is the one that a new state is not entered in."""
    assert not set(OF_IDENTITY) & {*State}
    wrong: list[str] = []
    for path in sources("cell_conductor"):
        if str(path.relative_to(ROOT)) in STATES_LISTED:
            continue
        for node in nodes(path):
            if isinstance(node, ast.stmt) and (found := members_listed(node, "State")):
                wrong.append(f"{where(path, node.lineno)} lists {sorted(found)}: derive that from {DESIRES}")
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and STATES_IN_SQL.search(node.value):
                wrong.append(f"{where(path, node.lineno)} lists states in SQL: derive that from {DESIRES}")
    assert wrong == []


@pytest.mark.parametrize(
    "listing",
    [
        "OVER = frozenset({State.FAILED, State.DELETED})",
        "if state is State.FAILED or state is State.DELETED: pass",
        "x = {State.FAILED: 1, State.DELETED: 2}",
    ],
)
def test_states_that_are_listed_are_found(listing: str) -> None:
    assert members_listed(ast.parse(listing).body[0], "State") == {"FAILED", "DELETED"}


@pytest.mark.parametrize(
    "growing",
    ["wait = min(wait * 2, 5.0)", "wait *= 2", "wait = min(2 * wait, LONGEST_S)", "wait = FIRST_S * 2.0 ** tries"],
)
@pytest.mark.parametrize("waiting", ["sleep", "stop.wait", "_stopped_within"])
def test_a_wait_that_is_made_to_grow_by_hand_is_found(growing: str, waiting: str) -> None:
    code = f"async def f():\n    while True:\n        await self.{waiting}(wait)\n        {growing}\n"
    (function,) = ast.parse(code).body
    assert waits_longer(function)


# --- names that are strings


def test_a_slot_is_an_attribute_that_is_set_and_the_other_way_round() -> None:
    """A rename does not reach a text: the slot would stay unused, and the new name could not be set."""
    wrong: list[str] = []
    for path in sources(*OURS):
        stored = {node.attr for node in nodes(path) if isinstance(node, ast.Attribute) and is_stored(node)}
        for node in nodes(path):
            if not isinstance(node, ast.ClassDef) or not (slots := slots_of(node)) or node.bases:
                continue
            own = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and is_own(one)}
            place = f"{where(path, node.lineno)} {node.name}"
            wrong += [f"{place}: {name} is never set" for name in slots if name not in stored]
            wrong += [f"{place}: no slot for {name}" for name in sorted(own.difference(slots))]
    assert wrong == []


# --- exceptions


def test_a_broad_except_raises_again_or_has_its_reason_beside_it() -> None:
    wrong: list[str] = []
    for path in sources(*OURS):
        lines = path.read_text().splitlines()
        for node in nodes(path):
            if not isinstance(node, ast.ExceptHandler) or not is_broad(node.type):
                continue
            raises_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if not raises_again and "  # " not in lines[node.lineno - 1]:
                wrong.append(where(path, node.lineno))
    assert wrong == []


def test_a_body_of_pass_has_its_reason_beside_it() -> None:
    wrong = [
        where(path, node.lineno)
        for path in sources(*OURS)
        for node in nodes(path)
        if isinstance(node, ast.Pass) and "  # " not in path.read_text().splitlines()[node.lineno - 1]
    ]
    assert wrong == []


# --- docstrings


# Each module of these says once which fault its functions raise, or the docstring is the help of a command.
RAISES_ALLOWED = {
    "placement_worker/rest/": "HttpFault: the REST API's answer, which `rest/faults.py` describes",
    "berth/web/": "Problem: the web API's answer",
    "berth/cli/": "the docstring is the command's help, and the exit status the error",
    "lab/simulation/": "what a broken invariant of the simulation raises ends the run",
}


def test_a_docstring_names_what_is_raised() -> None:
    wrong = [
        f"{where(path, line)} {name}: {kinds}"
        for path in sources(*OURS)
        if not str(path.relative_to(ROOT)).startswith(tuple(RAISES_ALLOWED))
        for name, line, kinds in silent_raises(parsed(path))
    ]
    assert wrong == []


def test_a_number_has_its_unit_in_its_name_or_docstring() -> None:
    """Of the workers, the bus and the client library."""
    wrong = [
        f"{where(path, line)} {name}: {argument}"
        for path in sources(*OURS)
        if not str(path.relative_to(ROOT)).startswith("lab/simulation/")
        for name, line, argument in numbers_without_unit(parsed(path))
    ]
    assert wrong == []


# Before a colon, and no field.
VALUES = {"empty", "none", "null", "full", "gone", "without"}


def test_a_docstring_of_a_class_names_fields_that_it_has() -> None:
    """Its own, and those of the classes of ours that it is made of."""
    classes = {node.name: node for path in sources(*OURS) for node in nodes(path) if isinstance(node, ast.ClassDef)}

    def known_of(node: ast.ClassDef) -> set[str]:
        bases = [classes[one.id] for one in node.bases if isinstance(one, ast.Name) and one.id in classes]
        return {*names_in(node)}.union(*map(known_of, bases))

    wrong: list[str] = []
    for path in sources(*OURS):
        for node in nodes(path):
            if not isinstance(node, ast.ClassDef) or not (text := ast.get_docstring(node)):
                continue
            known = VALUES | known_of(node)
            named = re.findall(r"(?:^|(?<=[.;)] ))((?:[a-z_]\w*(?:, | and ))*[a-z_]\w*): ", " ".join(text.split()))
            names = (name for group in named for name in re.split(r", | and ", group))
            wrong += [f"{where(path, node.lineno)} {node.name}: no {name}" for name in names if name not in known]
    assert wrong == []

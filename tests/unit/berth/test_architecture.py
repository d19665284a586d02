"""Who imports, sends and reads what is as docs/concepts/architecture.md describes; who imports whom: test_layout.py."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bus.contracts.catalogue import MESSAGES
from bus.contracts.publishers import published_by
from bus.contracts.queues import Where
from tests.kit.sources import OURS, ROOT, WORKERS, imports, nodes, sources, where, within

# What decides without I/O, clock and randomness: folders, and patterns of files.
PURE = (
    "placement_worker/domain/*", "ironic_sync/domain/*", "*/*_rules.py", "*/*_steps.py", "*/*_checks.py",
    "scheduler_worker/selection/*", "scheduler_worker/filters/*", "scheduler_worker/weighers/*",
    "scheduler_worker/records/*", "scheduler_worker/requests/*", "scheduler_worker/hosts/*",
    "scheduler_worker/build/pending_build.py", "scheduler_worker/build/admission.py", "scheduler_worker/build/gang.py",
    "scheduler_worker/build/decision_round.py", "scheduler_worker/build/claim_answer.py",
    "scheduler_worker/build/host_search.py", "scheduler_worker/build/recovered_claim.py",
    "scheduler_worker/build/decision.py", "scheduler_worker/action/pending_action.py",
    "scheduler_worker/cell_events/cell_event_batch.py", "scheduler_worker/objects/consistency.py",
    "scheduler_worker/objects/change_plan.py", "scheduler_worker/objects/effective_config.py",
    "scheduler_worker/objects/cell_consequences.py", "scheduler_worker/objects/zone_consequences.py",
    "cell_conductor/state/*", "cell_conductor/rules/*", "cell_conductor/table.py", "cell_conductor/transition.py",
    "cell_conductor/awaited_request.py", "cell_conductor/hosts/lease_table.py",
    "cell_conductor/reports/listings.py", "cell_conductor/reports/report_diff.py",
    "cell_conductor/reports/reserved_machines.py", "cell_conductor/recovery/known_instance.py",
    "compute_agent/records/attempt.py", "compute_sim/faults.py", "compute_sim/host_plan.py",
    "nova_scheduler/fit/*",
)  # fmt: skip
# The inputs that these must be given instead of reaching for them.
IMPURE = {
    "asyncio", "logging", "structlog", "time", "datetime", "random", "secrets", "uuid", "os", "pathlib", "socket",
    "asyncpg", "sqlalchemy", "aio_pika", "httpx", "prometheus_client", "threading", "subprocess",
}  # fmt: skip
# Types are fine: `random.Random` and `datetime` as the type of an argument.
PURE_NAMES = {
    "random": {"Random"},
    "datetime": {"datetime", "timedelta", "UTC"},
    "uuid": {"UUID", "uuid5", "NAMESPACE_URL", "NAMESPACE_OID", "NAMESPACE_DNS"},
}


# --- who may import what


def test_what_is_installed_imports_nothing_of_the_laboratory_or_the_tests() -> None:
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in sources(*OURS)
        for module, line in imports(path)
        if any(within(module, other) for other in ("lab", "tests"))
    ]
    assert wrong == []


def test_the_replica_drags_nothing_of_its_owner_along_but_its_domain() -> None:
    allowed = ("placement_worker.replica", "placement_worker.domain", "bus")
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in sources("placement_worker/replica")
        for module, line in imports(path)
        if any(within(module, ours) for ours in OURS) and not any(within(module, name) for name in allowed)
    ]
    assert wrong == []


# What an adapter of placement's rows takes of the modules that decide: what is to be locked, read and written.
OF_DECISIONS = {
    "claim_group.MembersToLock", "claim_ledger.Decision", "claim_ledger.Lacking", "trees.TreesToLock",
    "report_group.Key", "report_group.LastReport", "report_group.LastReports",
    "report_group.RELEASED", "report_group.WITHDRAWN",
    "report_group.is_retired",  # which rows to read: placement asks again, when they are locked
}  # fmt: skip
DECIDE = ("allocation_migration", "allocations", "claim_group", "claim_ledger", "claims", "refusal", "report_group",
          "reports", "trees")  # fmt: skip
ANSWERS = ("ClaimOutcome", "ClaimResult", "ClaimAllResult", "InventoryResult", "ReleaseResult", "SwapResult")


def test_no_decision_stands_in_the_adapters_of_rows() -> None:
    """They lock, read and write rows; what is refused and answered is the same on both: `service.py` decides it."""
    every = {module for path in sources("placement_worker/store") for module, _ in imports(path)}
    of_domain = {module.removeprefix("placement_worker.domain.") for module in every}
    assert {one for one in of_domain if one.partition(".")[0] in DECIDE} == OF_DECISIONS
    assert every.isdisjoint(f"bus.contracts.placement.{name}" for name in ANSWERS)
    assert not any(within(module, "placement_worker.service") for module in every)


def test_the_contracts_import_nothing_of_ours() -> None:
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in sources("bus/contracts")
        for module, line in imports(path)
        if any(within(module, ours) for ours in OURS) and not within(module, "bus.contracts")
    ]
    assert wrong == []


def test_a_cell_conductor_knows_no_message_of_the_scheduler_but_the_events_it_announces() -> None:
    owned = {row.message.__name__ for row in MESSAGES if row.owner == "scheduler_worker"} - {
        "BuildEvent",
        "ActionEvent",
    }
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in sources("cell_conductor")
        for module, line in imports(path)
        if within(module, "bus.contracts") and module.rpartition(".")[2] in owned
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "worker", [worker for worker in WORKERS if worker not in ("compute_agent", "gateway", "nova_scheduler")]
)
def test_a_worker_with_a_database_shows_whether_it_is_ready(worker: str) -> None:
    """Schedulers and ironic-sync were ready for as long as theirs hung."""
    app = (ROOT / worker / "app.py").read_text()
    assert "env.database(" in app and 'service.add_check("database", ' in app


# A message that a package makes and does not send: a value of its own, or of an answer to itself.
MADE_ONLY = {
    ("placement_worker", "Swap"): "audit writes it to its own store",
    ("placement_worker", "ChangesRequest"): "the replica, which schedulers embed",
    ("placement_worker", "SnapshotRequest"): "the replica, which schedulers embed",
    ("placement_worker", "InventoryUpdate"): "a part of an update that its stores write",
    ("scheduler_worker", "ObjectsChange"): "a host's decision, for its own registry",
    ("scheduler_worker", "BuildRequest"): "the request of a tombstone, on record alone",
    ("scheduler_worker", "DrainQuery"): "for its own planner",
    ("scheduler_worker", "ActionRequest"): "of a drain or an evacuation, for its own engine of moves",
    ("scheduler_worker", "ServiceRemoved"): "for its own table of hosts",
    ("nova_scheduler", "HostStates"): "Nova's hosts, for its own table of hosts",
    ("nova_scheduler", "ServiceRemoved"): "for its own table of hosts",
    ("nova_scheduler", "ServiceStates"): "Nova's services, for its own table of hosts",
    ("scheduler_worker", "BuildQuery"): "compared with one that was received",
    ("cell_conductor", "CellAction"): "the move that a query is about",
}


def test_what_a_package_sends_its_rows_name_it_as_a_publisher_of() -> None:
    """Permissions are printed from the rows: `drain` failed with them, as schedulers were no publisher of its query."""
    messages = {row.message.__name__ for row in MESSAGES}
    published = {
        worker: {row.message.__name__ for place in Where for row in published_by(worker, place)} for worker in WORKERS
    }
    made = {
        (worker, name): where(path, node.lineno)
        for worker in WORKERS
        for path in sources(worker)
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name | ast.Attribute)
        and (name := node.func.id if isinstance(node.func, ast.Name) else node.func.attr) in messages
        and name not in published[worker]
    }
    assert {pair: at for pair, at in made.items() if pair not in MADE_ONLY} == {}
    assert sorted(MADE_ONLY.keys() - made.keys()) == []


def pure_files() -> list[Path]:
    return [path for path in sources(*OURS) if any(path.relative_to(ROOT).match(pattern) for pattern in PURE)]


def test_a_pattern_of_pure_files_has_some() -> None:
    files = [path.relative_to(ROOT) for path in sources(*OURS)]
    assert [pattern for pattern in PURE if not any(path.match(pattern) for path in files)] == []


def test_what_decides_reaches_for_nothing() -> None:
    wrong: list[str] = []
    for path in pure_files():
        for module, line in imports(path):
            top, _, name = module.partition(".")
            if top in IMPURE and name not in PURE_NAMES.get(top, set()):
                # `import random` for the type `random.Random` is fine as long as nothing else of it is used.
                if not name and top in PURE_NAMES and not misused(path, top):
                    continue
                wrong.append(f"{where(path, line)} imports {module}")
        wrong += [
            f"{where(path, node.lineno)} is async"
            for node in nodes(path)
            if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith)
        ]
    assert wrong == []


def misused(path: Path, module: str) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == module
        and node.attr not in PURE_NAMES[module]
        for node in nodes(path)
    )


def test_only_the_command_line_prints() -> None:
    wrong = [
        where(path, node.lineno)
        for path in sources("bus", *WORKERS)
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert wrong == []


def import_graph() -> dict[str, set[str]]:
    """{module: modules of ours that it imports}, imports for types alone included."""
    modules: dict[str, Path] = {}
    for path in sources(*OURS):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = {module if module in modules else module.rpartition(".")[0] for module, _ in imports(path)}
        graph[name] = {module for module in found if module in modules and module != name}
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = import_graph()
    left = {name: set(found) for name, found in graph.items()}
    while free := [name for name, found in left.items() if not found]:
        for name in free:
            del left[name]
        for found in left.values():
            found.difference_update(free)
    # The remaining modules are in a circle or import one; of those that nothing in it imports, none is in one.
    while loose := [name for name in left if not any(name in found for found in left.values())]:
        for name in loose:
            del left[name]
    assert {name: sorted(found & left.keys()) for name, found in left.items()} == {}


# --- The imports of a process before it does anything: each worker and each command pays for it at its start.


COMMAND_TIMEOUT_S = 120.0

# The workers, what only the commands of the pages or of `berth up` need, and `scripts/load`.
OTHERS = {
    "cell_conductor.app",
    "compute_agent.app",
    "gateway.app",
    "ironic_sync.app",
    "placement_worker.app",
    "scheduler_worker.app",
    "lab.load",
    "berth.up.in_one_process",
    "berth.web",
    "httpx",
}
DATABASE = {"alembic", "sqlalchemy"}  # most of what a start costs; only what has a database needs them


def imported_by(program: str) -> set[str]:
    """The imports of a new process after a program."""
    program = f"import json, sys; {program}; print(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=COMMAND_TIMEOUT_S
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("command", ["run", "boot"])
def test_a_command_imports_no_worker_and_nothing_of_other_commands(command: str) -> None:
    client = {"httpx"} if command == "boot" else set()
    found = imported_by(f"from berth.cli.main import load; load({command!r})")
    assert (OTHERS | DATABASE) & found == client


def test_a_compute_service_has_no_database() -> None:
    assert DATABASE & imported_by("import compute_agent.app") == set()


def test_only_a_migration_needs_alembic() -> None:
    assert DATABASE & imported_by("import bus.persistence.database") == {"sqlalchemy"}

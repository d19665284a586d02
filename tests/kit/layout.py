"""The graph of imports between modules and folders, and what each package may import of the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tests.kit.sources import OURS, imports, sources
from tests.kit.struct_types import module_of

PRODUCT = (*OURS, "lab")
# What a package may import besides itself, as prefixes of names. The laboratory may import all.
MAY_IMPORT: Mapping[str, tuple[str, ...]] = {
    "bus": (),
    "placement_worker": ("bus",),
    "scheduler_worker": ("bus", "placement_worker.replica"),
    "nova_scheduler": (
        "bus",
        "placement_worker.operations.export",
        "placement_worker.operations.mirror",
        "placement_worker.operations.mirror_database",
        "placement_worker.operations.mirror_rest",
        "placement_worker.replica",
        "scheduler_worker.build.claim_ownership",
        "scheduler_worker.build.decision",
        "scheduler_worker.build.host_search",
        "scheduler_worker.build.placer",
        "scheduler_worker.config",
        "scheduler_worker.filters.image",
        "scheduler_worker.fleet.metrics_listener",
        "scheduler_worker.hosts.host_metrics",
        "scheduler_worker.hosts.host_table",
        "scheduler_worker.hosts.service_directory",
        "scheduler_worker.placement_client",
        "scheduler_worker.plugins",
        "scheduler_worker.records.build_record",
        "scheduler_worker.selection",
    ),
    "cell_conductor": ("bus",),
    "compute_agent": ("bus",),
    "compute_sim": ("bus", "compute_agent.driver", "compute_agent.driver_plugin", "compute_agent.records"),
    "ironic_sync": ("bus",),
    "gateway": ("bus",),
    "berth": (
        "bus",
        *(f"placement_worker.{name}" for name in ("app", "config", "domain", "operations", "rest", "service", "store")),
        *(f"scheduler_worker.{name}" for name in ("app", "config", "objects", "records", "selection")),
        "scheduler_worker.store.object_rows",
        "scheduler_worker.upkeep.purge",
        *(f"nova_scheduler.{name}" for name in ("app", "cloud", "config", "decide", "nova_conf", "reload")),
        *(f"nova_scheduler.{name}" for name in ("request", "stock", "trial", "wire")),
        *(f"cell_conductor.{name}" for name in ("app", "config", "rules.blocked_rules", "state", "store")),
        *(
            f"compute_agent.{name}"
            for name in ("app", "config", "driver", "driver_plugin", "drivers.ironic", "records")
        ),
        "compute_sim",
        *(f"ironic_sync.{name}" for name in ("app", "config", "domain")),
        "gateway",
    ),
}
# The folders and modules of a package in layers: each imports of its own layer and of those before it.
LAYERS: Mapping[str, str] = {
    "scheduler_worker": """
        config hosts metrics placement_client | selection | filters weighers records | plugins requests store
        | build objects | action cell_events fleet upkeep | drain request_handler | operator_handler queries
        | wiring | app
    """,
    "nova_scheduler": """
        fit metrics wire | cloud filters | config | nova_conf reload request | decide | stock | rpc | app | trial
    """,
    "cell_conductor": """
        config metrics state | rules store | table awaited_request reports
        | transition recorded_changes | placement_client pending_lookups | engine | hosts machine_search periodic
        | recovery request_handlers
        | host_handlers | app
    """,
    "compute_agent": """
        driver metrics | driver_guard records | hosts | driver_plugin | attempts drivers | config handlers
        | wiring | app
    """,
    "compute_sim": "config faults | host_plan | fleet | driver crash_plan faulty_results | plugin ironic_stand_in",
    "berth": """
        client | bus_client config nova_objects asyncapi change_log codes drain_follow object_changes version
        | audit backup fencing dead_letters permissions database_rights project_vhost up | text
        | status why | web | cli | __main__
    """,
}

Graph = Mapping[str, frozenset[str]]


class Arrow(NamedTuple):
    """A module that imports another, or a name of it."""

    user: str
    used: str
    name: str  # as it is imported


def arrows() -> list[Arrow]:
    """Every import of one module of the product by another, those in functions and for types alone included."""
    modules = {module_of(path): path for path in sources(*PRODUCT)}
    found = []
    for user, path in modules.items():
        for name, _ in imports(path):
            used = name if name in modules else name.rpartition(".")[0]
            if used in modules and used != user:
                found.append(Arrow(user, used, name))
    return found


def graph(found: Iterable[Arrow], depth: int = 9) -> Graph:
    """Modules that import modules, each name cut to so many parts: at depth 2 a file stands for its folder."""
    result: dict[str, set[str]] = defaultdict(set)
    for arrow in found:
        user, used = (".".join(module.split(".")[:depth]) for module in arrow[:2])
        if user != used:
            result[user].add(used)
    return {user: frozenset(used) for user, used in result.items()}


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

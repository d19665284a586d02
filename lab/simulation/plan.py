"""The parts of one run, all of them decided before the run, so that it can be reduced to the parts
that make it fail.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.placement import ServerGroup
from compute_sim.config import HostSize
from compute_sim.faults import Faults
from compute_sim.ironic_stand_in.node_pool import Behaviour
from placement_worker.replica.catch_up import PAGE

T = TypeVar("T")

LOAD_S = 60.0  # requests and faults happen in this time; afterwards the system has to come to rest
KEEP_ALL = 1000  # changes of the feed: more than a run makes
MAX_FAULT_S = 8.0  # how long a fault lasts, but a process that stands still
SIZES = (
    HostSize(vcpus=3, memory_mb=32_768, disk_gb=400, cpu_ratio=1.0),
    HostSize(vcpus=8, memory_mb=16_896, disk_gb=200, cpu_ratio=1.5),
    HostSize(vcpus=5, memory_mb=65_536, disk_gb=800, cpu_ratio=1.0),
)


class Action(StrEnum):
    """The actions of clients and operators."""

    BUILD = "build"
    REPEAT = "repeat"  # the same request once more
    DELETE = "delete"
    RESIZE = "resize"
    DISABLE = "disable"
    ENABLE = "enable"
    LOSE = "lose"  # a host is reinstalled: what ran there is gone
    LEAVE = "leave"  # a compute service is stopped in good order, and started again later
    LATE = "late"  # a compute service that is not there before this moment
    DRAIN = "drain"  # a host is emptied and leaves for good
    REHOME = "rehome"  # a host is emptied and given to another service of its cell
    DIE = "die"  # a compute service and its hosts burn down
    UPGRADE = "upgrade"  # a service that reported its hosts flat starts again and reports them nested
    IRONIC = "ironic"  # an operator of bare metal, or another tenant of it, does something to a node
    # The actions of others (lab/simulation/widening.py).
    FOREIGN = "foreign"  # a machine that berth never built begins or ends on one of its hosts
    # A cell is added to the settings, or is taken out of them for a while; or by an operator's decision at run time.
    CELL = "cell"
    SHARES = "shares"  # a service of bare metal joins, or is unavailable for a while: the others' shares change
    BACKUP = "backup"  # a schema's rows are copied
    RESTORE = "restore"  # ... and come back, with nothing that was written since
    SECOND_SERVICE = "second-service"  # a compute service of another name starts, with hosts of the same uuids
    DUPLICATE_NAME = "duplicate-name"  # a second compute service starts under a name that is taken, and is killed later
    COPY = "copy"  # a service's hosts are copied, with what runs on them
    BRING_BACK = "bring-back"  # ... and come back as they were then, while the service is stopped
    MALFORMED = "malformed"  # another client publishes malformed messages
    MOVE = "move"  # something is done with an instance (lab/simulation/moves.py)
    TREE = "tree"  # another source reports its hosts, or another consumer holds a part of them
    REST = "rest"  # another client calls Placement's REST API (lab/simulation/rest_client.py)


class Order(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One act at its time. uuid, service, host: what it is about; host: its number in its service. verb: for Ironic.

    group, apart_from, together_with: the peers of a build; count, min_count: of a build of several
    (bus/contracts/build.py). waits_s: seconds for which the client of a request waits for the answer; then it requests
    the same again and waits twice as long, or gives_up. 0: it publishes until the broker confirms it.
    """

    at: float
    action: Action
    uuid: str = ""
    flavor: str = ""
    project: str = ""
    service: str = ""
    host: int = 0
    size: int = 0
    seconds: float = 0.0
    max_attempts: int | None = None
    verb: str = ""
    group: ServerGroup | None = None
    apart_from: tuple[str, ...] = ()
    together_with: tuple[str, ...] = ()
    count: int = 1
    min_count: int | None = None
    waits_s: float = 0.0
    gives_up: bool = False
    instance: str = ""  # of a move; "": one of those there are then


class FaultType(StrEnum):
    """The faults."""

    CRASH = "crash"  # a process is killed, and starts again after `seconds`
    PAUSE = "pause"  # a process stands still for `seconds`
    SLOW = "slow"  # a process is slow for `seconds`
    CUT = "cut"  # one process loses all its connections to brokers
    BROKER = "broker"  # one broker is unavailable for `seconds`: only durable queues survive
    DATABASE = "database"  # one schema's server dies: transactions under way are lost, and commits not yet on disk
    IRONIC = "ironic"  # Ironic's API is unavailable for `seconds`
    FULL = "full"  # half of a broker's bounded queues are full for `seconds`: they refuse what is published
    MUTE = "mute"  # a compute service's heartbeats are lost for `seconds`, while it works on
    CLOCK = "clock"  # an operator sets a process's clock; `seconds`: where to


class FaultEvent(Struct, frozen=True, kw_only=True):
    """One fault at its time. target: a process, a bus or a schema."""

    at: float
    kind: FaultType
    target: str
    seconds: float


class Rates(Struct, frozen=True, kw_only=True):
    """Small faults that may hit every message and every statement: how often, and how long a delay lasts."""

    delay: float = 0.0
    delay_s: float = 0.0
    duplicate: float = 0.0
    lost_before: float = 0.0  # the connection breaks before the broker has the message
    lost_after: float = 0.0  # ... and before the publisher learns that it has
    conflict: float = 0.0
    store_lost: float = 0.0
    commit_lost_before: float = 0.0
    commit_lost_after: float = 0.0
    store_crash: float = 0.0  # the server dies at this very statement, and is back within two seconds
    crash: float = 0.0  # the process is killed at this very await
    notice_lost: float = 0.0  # a notification of Ironic's is never received
    ironic_lost: float = 0.0  # a request to Ironic, or its answer
    ironic_busy: float = 0.0  # Ironic answers 503


class Cell(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cell: how many conductors, its compute services with their hosts, and its services of bare metal."""

    name: str
    conductors: int
    services: tuple[tuple[str, int], ...]
    metal: tuple[str, ...] = ()


class Metal(Struct, frozen=True, kw_only=True):
    """Bare metal: how many nodes, how many processes of ironic_sync, and how Ironic behaves."""

    nodes: int
    syncs: int
    behaviour: Behaviour
    foreign: tuple[str, ...] = ()  # instances of others that have a node from the beginning


class Plan(Struct, frozen=True, kw_only=True):
    """One run."""

    seed: int
    cells: tuple[Cell, ...]
    placements: int
    schedulers: int
    subset: int
    numa_share: float
    skew_s: float
    computes: Faults
    orders: tuple[Order, ...]
    fault_events: tuple[FaultEvent, ...]
    rates: Rates
    metal: Metal | None = None
    flat: tuple[str, ...] = ()  # services that report their hosts flat until they are upgraded
    feed_retention: int = KEEP_ALL  # changes of the feed that are kept
    page: int = PAGE  # providers, or changes of the feed, in a page of them
    batch: int = 0  # messages that a handler takes at once; 0: as many as ever
    keep_s: float = 0.0  # how long fences, silent sources and deleted instances are kept; 0: as long as ever
    load_s: float = LOAD_S
    quota: dict[str, int] = {}  # what each project may hold, but those that have a quota of their own
    quotas: dict[str, dict[str, int]] = {}
    breaker_limit: int = 0  # of what a report may end without an operator's word; 0: as good as none
    widenings: tuple[str, ...] = ()  # the kinds of what others do that were drawn
    drains_by_schedulers: bool = False  # else the simulation chooses the moves of a drain itself

    def quota_of(self, project: str) -> dict[str, int]:
        """The total that a project may hold: {class: amount}; what is not named has no bound."""
        return self.quotas.get(project, self.quota)

    @property
    def through_schedulers(self) -> bool:
        """Whether what is done with instances is asked of schedulers, and fences are an operator's decisions there."""
        is_decided = "fences" in self.widenings or self.drains_by_schedulers or self.actions_across_cells
        return is_decided or self.sets_cells_back  # a recovery is told of requests by the schedulers alone

    @property
    def sets_cells_back(self) -> bool:
        """Whether the database of a cell is set back."""
        return any(one.action is Action.RESTORE and one.uuid and one.service.startswith("cell_") for one in self.orders)

    @property
    def actions_across_cells(self) -> bool:
        """Whether instances may be unshelved in another cell."""
        return "transfers" in self.widenings or self.judges_machines

    @property
    def judges_machines(self) -> bool:
        """Whether the machines of instances of which a restored database knows an old truth are judged as all others:
        how many of one run, and whether one is left.
        """
        return "transfers-restored" in self.widenings

    @property
    def judges_forgotten(self) -> bool:
        """Whether what a restored database has forgotten is judged as everything else."""
        return bool({"builds-forgotten", "requests-forgotten"} & set(self.widenings))

    @property
    def has_rest_clients(self) -> bool:
        """Whether other clients call Placement's REST API."""
        return any(order.action is Action.REST for order in self.orders)

    @property
    def with_peers(self) -> bool:
        """Whether a build depends on where others are, or on how much they hold."""
        return bool(self.quota or self.quotas) or any(
            order.group or order.apart_from or order.together_with for order in self.orders
        )

    @property
    def services(self) -> list[tuple[str, str]]:
        """(cell, compute service)."""
        return [(cell.name, service) for cell in self.cells for service, _ in cell.services]

    @property
    def metal_services(self) -> list[tuple[str, str]]:
        """(cell, compute service of bare metal): each has its share of the nodes."""
        return [(cell.name, service) for cell in self.cells for service in cell.metal]

    @property
    def processes(self) -> list[str]:
        """Names of all processes, in the order in which they are started."""
        names = [f"placement{n}" for n in range(self.placements)]
        names += [f"conductor-{cell.name}-{n}" for cell in self.cells for n in range(cell.conductors)]
        names += [f"scheduler{n}" for n in range(self.schedulers)]
        names += [f"ironic{n}" for n in range(self.metal.syncs if self.metal else 0)]
        return [*names, *(f"compute-{service}" for _, service in (*self.services, *self.metal_services))]

    def processes_of(self, cell: str) -> list[str]:
        """Names of a cell's processes."""
        home = next(one for one in self.cells if one.name == cell)
        names = [f"conductor-{cell}-{n}" for n in range(home.conductors)]
        return [*names, *(f"compute-{service}" for service in (*dict(home.services), *home.metal))]

    @property
    def late(self) -> list[str]:
        """Processes that are started by an order."""
        names = [f"compute-{order.service}" for order in self.orders if order.action is Action.LATE]
        names += [f"compute-{service}" for service in self.late_metal]
        return [*names, *(name for cell in self.late_cells for name in self.processes_of(cell))]

    @property
    def late_cells(self) -> list[str]:
        """Cells that no worker knows before they join."""
        verbs = ("join", "add")
        return [order.service for order in self.orders if order.action is Action.CELL and order.verb in verbs]

    @property
    def changes_cells(self) -> bool:
        """Whether operators add or remove cells while everything runs."""
        return any(order.action is Action.CELL and order.verb in ("add", "remove") for order in self.orders)

    @property
    def late_metal(self) -> list[str]:
        """Services of bare metal that are not there before they join."""
        joining = [order.service for order in self.orders if order.action is Action.SHARES and order.verb == "join"]
        return [service for cell, service in self.metal_services if service in joining or cell in self.late_cells]

    def without_faults(self) -> Plan:
        """The same world on a good day."""
        metal = self.metal and replace(self.metal, behaviour=replace(self.metal.behaviour, deploy_fails=0.0))
        return replace(self, fault_events=(), rates=Rates(), computes=Faults(), skew_s=0.0, metal=metal)

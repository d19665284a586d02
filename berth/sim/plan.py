"""What a seed means: the topology, the workload and the faults, all decided before the run, so that they can be cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from bus.clock import new_uuid
from compute_sim.config import HostSize
from compute_sim.domain.faults import Faults

T = TypeVar("T")

LOAD_S = 60.0  # requests and faults happen in this time; afterwards the system has to come to rest
PROJECTS = ("red", "blue")
FLAVORS = ("m1.tiny", "m1.small", "m1.medium", "m1.large", "gpu.small", "no.such")
FLAVOR_WEIGHTS = (4, 6, 4, 2, 2, 0.2)
SIZES = (
    HostSize(vcpus=3, memory_mb=32_768, disk_gb=400, cpu_ratio=1.0),
    HostSize(vcpus=8, memory_mb=16_896, disk_gb=200, cpu_ratio=1.5),
    HostSize(vcpus=5, memory_mb=65_536, disk_gb=800, cpu_ratio=1.0),
)


class Act(StrEnum):
    """What clients and operators do."""

    BUILD = "build"
    REPEAT = "repeat"  # the same request once more
    DELETE = "delete"
    RESIZE = "resize"
    DISABLE = "disable"
    ENABLE = "enable"
    LOSE = "lose"  # a host is reinstalled: what ran there is gone
    LEAVE = "leave"  # a compute service is stopped in good order, and started again later
    LATE = "late"  # a compute service that is not there before this moment


class Order(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One act at its time. target: an instance, a host's number in its service, or a service."""

    at: float
    act: Act
    uuid: str = ""
    flavor: str = ""
    project: str = ""
    service: str = ""
    host: int = 0
    size: int = 0
    seconds: float = 0.0
    max_attempts: int | None = None


class Kind(StrEnum):
    """What goes wrong."""

    CRASH = "crash"  # a process is killed, and starts again after `seconds`
    PAUSE = "pause"  # a process stands still for `seconds`
    SLOW = "slow"  # a process is slow for `seconds`
    CUT = "cut"  # one process loses all its connections to brokers
    BROKER = "broker"  # one broker is away for `seconds`: only durable queues survive
    DATABASE = "database"  # one schema cannot be reached for `seconds`, transactions under way are lost


class Blow(Struct, frozen=True, kw_only=True):
    """One fault at its time. target: a process, a bus or a schema."""

    at: float
    kind: Kind
    target: str
    seconds: float


class Rates(Struct, frozen=True, kw_only=True):
    """Small faults that may hit every message and every statement: how often, and how long a delay lasts."""

    delay: float = 0.0
    delay_s: float = 0.0
    duplicate: float = 0.0
    lost_before: float = 0.0  # the connection breaks before the broker has the message
    lost_after: float = 0.0  # ... and before the publisher hears that it has
    conflict: float = 0.0
    store_lost: float = 0.0
    commit_lost_before: float = 0.0
    commit_lost_after: float = 0.0
    crash: float = 0.0  # the process is killed at this very await


class Cell(Struct, frozen=True, kw_only=True):
    """One cell: how many conductors, and its compute services with their hosts."""

    name: str
    conductors: int
    services: tuple[tuple[str, int], ...]


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
    blows: tuple[Blow, ...]
    rates: Rates

    @property
    def services(self) -> list[tuple[str, str]]:
        """(cell, compute service)."""
        return [(cell.name, service) for cell in self.cells for service, _ in cell.services]

    @property
    def processes(self) -> list[str]:
        """Names of all processes, in the order in which they are started."""
        names = [f"placement{n}" for n in range(self.placements)]
        names += [f"conductor-{cell.name}-{n}" for cell in self.cells for n in range(cell.conductors)]
        names += [f"scheduler{n}" for n in range(self.schedulers)]
        return [*names, *(f"compute-{service}" for _, service in self.services)]

    def without_faults(self) -> Plan:
        """The same world on a good day."""
        return replace(self, blows=(), rates=Rates(), computes=Faults(), skew_s=0.0)


def plan_of(seed: int) -> Plan:
    """The plan of one seed."""
    rng = random.Random(f"berth.sim {seed}")
    cells = tuple(_cell(rng, n) for n in range(_pick(rng, (1, 1, 2, 3))))
    plan = Plan(
        seed=seed,
        cells=cells,
        placements=_pick(rng, (1, 2, 2, 3)),
        schedulers=_pick(rng, (1, 2, 2, 3)),
        subset=_pick(rng, (1, 1, 4)),
        numa_share=_pick(rng, (0.0, 0.0, 0.3)),
        skew_s=_pick(rng, (0.0, 0.2, 1.0)),
        computes=_computes(rng),
        orders=(),
        blows=(),
        rates=_rates(rng),
    )
    plan = replace(plan, orders=_orders(rng, plan))
    return replace(plan, blows=_blows(rng, plan))


def _cell(rng: random.Random, number: int) -> Cell:
    services = tuple((f"s{number}{n}", rng.randint(1, 3)) for n in range(rng.randint(1, 3)))
    return Cell(name=f"cell{number}", conductors=_pick(rng, (1, 2, 2)), services=services)


def _computes(rng: random.Random) -> Faults:
    if rng.random() < 0.2:
        return Faults(delay_max_s=rng.uniform(0.01, 2.0))
    some = _sometimes(rng)
    return Faults(
        delay_min_s=0.0,
        delay_max_s=rng.uniform(0.01, 8.0),
        destroy_delay_s=rng.uniform(0.0, 2.0),
        fail_rate=some(0.4),
        abort_rate=some(0.1),
        leftover_rate=some(0.8),
        hang_rate=some(0.15),
        late_rate=some(0.3),
        late_s=rng.choice((8.0, 21.0, 25.0, 45.0)),  # before and after a build's deadline
        duplicate_rate=some(0.3),
    )


def _rates(rng: random.Random) -> Rates:
    some = _sometimes(rng)
    return Rates(
        delay=some(0.2),
        delay_s=rng.choice((0.01, 0.3, 2.0)),
        duplicate=some(0.1),
        lost_before=some(0.01),
        lost_after=some(0.01),
        conflict=some(0.01),
        store_lost=some(0.01),
        commit_lost_before=some(0.02),
        commit_lost_after=some(0.02),
        crash=some(0.002),
    )


def _orders(rng: random.Random, plan: Plan) -> tuple[Order, ...]:
    orders: list[Order] = []
    bursts = [rng.uniform(0.0, LOAD_S * 0.8) for _ in range(rng.randint(3, 30))]
    for _ in range(rng.randint(10, 60)):
        at = _pick(rng, bursts) + _pick(rng, (0.0, 0.001, 0.5))
        uuid, project = new_uuid(rng), _pick(rng, PROJECTS)
        flavor = rng.choices(FLAVORS, FLAVOR_WEIGHTS)[0]
        attempts = _pick(rng, (None, None, None, 1, 5))
        build = Order(at=at, act=Act.BUILD, uuid=uuid, flavor=flavor, project=project, max_attempts=attempts)
        orders.append(build)
        if rng.random() < 0.05:
            orders.append(replace(build, act=Act.REPEAT, at=at + rng.uniform(0.0, 5.0)))
        if rng.random() < 0.4:
            orders.append(Order(at=at + rng.expovariate(0.2), act=Act.DELETE, uuid=uuid, project=project))
    orders += [_host_order(rng, plan) for _ in range(rng.randint(0, 8))]
    for _, service in plan.services:
        if rng.random() < 0.15:
            orders.append(Order(at=rng.uniform(5.0, 20.0), act=Act.LATE, service=service))
        elif rng.random() < 0.1:
            away = rng.uniform(2.0, 20.0)
            orders.append(Order(at=rng.uniform(5.0, 40.0), act=Act.LEAVE, service=service, seconds=away))
    return tuple(sorted(orders, key=lambda order: order.at))


def _host_order(rng: random.Random, plan: Plan) -> Order:
    cell = _pick(rng, plan.cells)
    service, hosts = _pick(rng, cell.services)
    act = _pick(rng, (Act.RESIZE, Act.RESIZE, Act.DISABLE, Act.ENABLE, Act.LOSE))
    at = rng.uniform(2.0, LOAD_S)
    return Order(at=at, act=act, service=service, host=rng.randrange(hosts), size=rng.randrange(len(SIZES)))


def _blows(rng: random.Random, plan: Plan) -> tuple[Blow, ...]:
    kinds = [kind for kind in Kind if rng.random() < 0.6]
    if not kinds:
        return ()
    buses = ["api", *(cell.name for cell in plan.cells)]
    schemas = ["placement", "scheduler", *(f"cell_{cell.name}" for cell in plan.cells)]
    blows = []
    for _ in range(rng.randint(0, 20)):
        kind = _pick(rng, kinds)
        target = _pick(rng, {Kind.BROKER: buses, Kind.DATABASE: schemas}.get(kind, plan.processes))
        seconds = rng.uniform(0.0, 25.0 if kind is Kind.PAUSE else 8.0)
        blows.append(Blow(at=rng.uniform(0.5, LOAD_S), kind=kind, target=target, seconds=seconds))
    return tuple(sorted(blows, key=lambda blow: blow.at))


def _sometimes(rng: random.Random) -> Callable[[float], float]:
    """Each rate is off in half of the runs, so that faults are also seen one at a time."""
    return lambda most: rng.uniform(0.0, most) if rng.random() < 0.5 else 0.0


def _pick(rng: random.Random, choices: tuple[T, ...] | list[T]) -> T:
    return choices[rng.randrange(len(choices))]

"""What the suites of a conductor around the table share: buses that answer, and a conductor over memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import Clock, SystemClock
from bus.consuming.outcome import Outcome, Received
from bus.contracts.base import DatabaseMark, Message, Meta
from bus.contracts.cell import CellBuild, Heartbeat, HostReport, HostStates, Running
from bus.faults import Transient
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import Engine, context_of
from cell_conductor.host_handlers import HostHandlers
from cell_conductor.hosts.lease_controller import LeaseController
from cell_conductor.hosts.lease_table import LeaseTable
from cell_conductor.hosts.service_state_publisher import ServiceStatePublisher
from cell_conductor.hosts.stated_marks import StatedMarks
from cell_conductor.pending_lookups import PendingLookups
from cell_conductor.recovery.cell_recovery import CellRecovery
from cell_conductor.recovery.known_reader import KnownReader
from cell_conductor.recovery.machine_listing import MachineCollector
from cell_conductor.recovery.record_reconciler import RecordReconciler
from cell_conductor.reports.listings import HostListings
from cell_conductor.request_handlers import RequestHandlers
from cell_conductor.state.database_marks import Stated
from cell_conductor.state.instance import Instance
from cell_conductor.state.lease import Lease, LeaseState
from cell_conductor.state.unknown_machine import UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed_tables import DecidedMachine
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.port import InstanceStore
from tests.unit.cell_conductor.scenario import SPEC, UUID, host, selection


class Relay:
    """Keeps what would be published."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, row_id: int | None, outgoing: Any) -> None:
        """Keep it."""
        self.sent += outgoing


class Queried:
    """A bus whose requests get no answer."""

    name = "c1"

    async def request_all(self, messages: list[Any], *_: Any, **__: Any) -> list[Any]:
        """No answer to any of them."""
        return [Transient("no answer", code="request.timeout") for _ in messages]


class Silent(Queried):
    """A bus that takes what is published."""

    name = "c"

    async def publish(self, *_: object, **__: object) -> None:
        return None


def listing(service: str, *hosts: int, sequence: int = 1, runs: tuple[Running, ...] = (), **other: Any) -> HostStates:
    reports = tuple(HostReport(uuid=host(n), name=f"host-{n}", running=runs) for n in hosts)
    made = HostStates(service=service, cell="c1", epoch=1, sequence=sequence, hosts=reports, complete=True)
    return replace(made, **other)


class Quiet(Queried):
    """A bus that keeps what is published."""

    def __init__(self) -> None:
        self.published: list[object] = []

    async def publish(self, message: object, **_: Any) -> None:
        """Keep it."""
        self.published.append(message)


class Alone:
    """What a conductor has beside it where a test is not about that: no fences, no search, no leases."""

    fences: Mapping[str, Any] = {}
    name, is_recent, is_leader = "c1", True, False

    def alive_services(self) -> Collection[str]:
        """All services of these suites are."""
        return ("s1", "s2", "s3")

    def down(self) -> Mapping[str, Lease]:
        """No service is."""
        return {}

    def stated(self) -> Stated:
        """Nobody states anything."""
        return Stated()

    def hear(self, mark: DatabaseMark, *, by: str = "") -> None:
        """Nobody states anything."""

    def record_recovery(self) -> None:
        """It follows from where the database is."""

    def hear_all(self, marks: Collection[DatabaseMark], listening: Any) -> None:
        """Nobody states anything."""

    def marks_wanted_by(self) -> None:
        """Nothing is asked for."""

    async def ensure_loaded(self) -> None:
        """There are no fences."""

    def invalidate(self) -> None:
        """There are no fences."""

    def reload_soon(self) -> None:
        """There are no fences."""

    async def load(self) -> None:
        """There is nothing on record."""

    def is_removed(self, service: str) -> bool:
        """No service is."""
        return False

    async def unknown_machines(self, uuids: object) -> Mapping[str, Any]:
        """No machine is."""
        return {}


ALONE: Any = Alone()


def engine_of(**parts: Any) -> Engine:
    """An engine that is alone but for these."""
    return Engine(**{"leases": ALONE, "marks": ALONE, "fences": ALONE, "lookups": PendingLookups(), **parts})


def requests_of(engine: Any, clock: Clock, bus: Any = ALONE, **parts: Any) -> RequestHandlers:
    """Handlers of requests that are alone but for these."""
    return RequestHandlers(engine, clock, bus, **{"fences": ALONE, "fence_controller": ALONE, "leases": ALONE, **parts})


def leases_of(store: Any, bus: Any, clock: Clock, config: ConductorConfig) -> tuple[LeaseController, StatedMarks]:
    """The leases of a conductor, and what it hears of its database."""
    table = LeaseTable(config.missed_heartbeats)
    marks, publisher = StatedMarks(table, store, clock), ServiceStatePublisher(table, bus, clock=clock, cell="c1")
    leases = LeaseController(
        store, bus, table, marks=marks, publisher=publisher, clock=clock, config=config, cell="c1", process="p"
    )
    return leases, marks


def recovery_of(
    store: InstanceStore,
    bus: Bus,
    relay: Any,
    *,
    clock: Clock,
    config: ConductorConfig,
    known: KnownReader,
    leases: Any,
    fences: Any,
) -> CellRecovery:
    """The recovery of a conductor. leases: what it hears of its database as well."""
    parts: dict[str, Any] = {"clock": clock, "config": config, "leases": leases}
    told, context = {**parts, "marks": leases, "fences": fences}, context_of(config, bus.name)
    collector = MachineCollector(store, bus, **parts)
    reconciler = RecordReconciler(store, bus, relay, context=context, **told)
    return CellRecovery(store, collector=collector, known=known, reconciler=reconciler, **told)


def beat(service: str, epoch: int, sequence: int, **other: Any) -> Heartbeat:
    """A message of a compute service."""
    return Heartbeat(service=service, cell="c1", epoch=epoch, sequence=sequence, **other)


class Told:
    """What reports are told of the leases."""

    def __init__(
        self,
        leases: Any = ALONE,
        up: Any = tuple,
        superseded: Any = lambda _service, _epoch: None,
        gone: Collection[str] = (),
    ) -> None:
        self._leases = leases
        self.up = up
        self.record_superseded = superseded
        if gone:
            self.is_removed = gone.__contains__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._leases, name)


def hosts_of(*parts: Any, **named: Any) -> HostHandlers:
    """Handlers of reports that are alone but for these."""
    told: Any = Told(**{name: named.pop(name) for name in ("leases", "up", "superseded", "gone") if name in named})
    alone = {"listings": HostListings(), "lookups": PendingLookups(), "fences": ALONE, "marks": ALONE}
    return HostHandlers(*parts, leases=told, **{**alone, **named})


BUILD = CellBuild(spec=SPEC, selections=(selection(1), selection(2)), consumer_generation=7, requested_at=1.0)


async def insert(store: MemoryInstances, *instances: Instance) -> None:
    """Put these on record."""
    async with store.transaction() as transaction:
        await transaction.insert(instances)


async def opened_store(clock: Clock | None = None) -> MemoryInstances:
    """A cell's database in memory."""
    store = MemoryInstances(MemoryInstanceTable(clock or SystemClock()).session())
    await store.open()
    return store


def down(service: str, **other: Any) -> Lease:
    """The lease of a service that is silent."""
    return replace(Lease(service=service, epoch=1, state=LeaseState.SILENT, reason="why"), **other)


async def put(store: MemoryInstances, *leases: Lease) -> None:
    """Put these leases on record."""
    term = await store.leases.hold_leadership("p", 60.0, None)
    assert term is not None and await store.leases.record(term, leases)


class Conductor:
    """Takes requests over a cell's database. Nobody answers on its bus."""

    def __init__(self, bus: Any = None, up: Any = None, table: MemoryInstanceTable | None = None) -> None:
        """`table`: another conductor's."""
        clock = SystemClock()
        self.table = table if table is not None else MemoryInstanceTable(clock)
        self.relay, self.bus = Relay(), bus or Quiet()
        self.store = MemoryInstances(self.table.session())
        self.engine = engine_of(
            store=self.store, bus=self.bus, relay=self.relay, clock=clock, config=ConductorConfig(), cell="c1"
        )
        self.requests = requests_of(self.engine, clock)

    async def keep(self, n: int, decision: str = "") -> None:
        """A host has a machine of the instance that no record explains, with this word of an operator."""
        machine = UnknownMachine(UUID, 1, host(n), UnknownMachineKind.QUARANTINED, "newer")
        await self.store.safety.record(f"s{n}", [machine], 1.0)
        if decision:
            await self.store.safety.decide([DecidedMachine(UUID)], decision, "ann", 2.0)

    async def request(self, message: Message, *, attempt: int = 0, message_id: str = "m") -> Outcome:
        (outcome,) = await self.requests.requests(
            [Received(message, Meta(id=message_id, retries=attempt), "c1", "conductor.requests")]
        )
        return outcome

    async def recorded(self) -> Instance | None:
        async with self.store.transaction() as transaction:
            return (await transaction.lock([UUID])).get(UUID)


async def opened(bus: Any = None, up: Any = None, table: MemoryInstanceTable | None = None) -> Conductor:
    """A conductor whose database is open."""
    conductor = Conductor(bus, up, table)
    await conductor.store.open()
    return conductor

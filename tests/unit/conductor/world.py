"""What the suites of a conductor around the table share: buses that answer, and a conductor over memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from bus.clock import Clock, SystemClock
from bus.consuming.outcome import Outcome, Received
from bus.contracts.base import Message, Meta
from bus.contracts.cell import (
    CellBuild,
    ComputeHosts,
    FindMachines,
    FoundMachine,
    Heartbeat,
    HostReport,
    MachinesFound,
    Running,
)
from bus.contracts.placement import Claim, Release
from bus.faults import Fault, Transient
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.breaker import Listings
from cell_conductor.domain.instance import Instance
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.domain.report import Unexplained, UnexplainedKind
from cell_conductor.engine import Engine
from cell_conductor.handlers import HostHandlers, RequestHandlers
from cell_conductor.search import MachineSearch
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.safety import DecidedMachine
from tests.unit.conductor.scenario import SPEC, UUID, host, selection


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


class Silent:
    """A bus that takes what is published."""

    name = "c"

    async def publish(self, *_: object, **__: object) -> None:
        return None


def listing(service: str, *hosts: int, sequence: int = 1, runs: tuple[Running, ...] = (), **other: Any) -> ComputeHosts:
    reports = tuple(HostReport(uuid=host(n), name=f"host-{n}", running=runs) for n in hosts)
    made = ComputeHosts(service=service, cell="c1", epoch=1, sequence=sequence, hosts=reports, complete=True)
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

    known: Mapping[str, Any] = {}
    name, is_recent, is_keeper = "c1", True, False

    def heard(self) -> Collection[str]:
        """All services of these suites are."""
        return ("s1", "s2", "s3")

    def down(self) -> Mapping[str, Lease]:
        """No service is."""
        return {}

    def heard_incarnation(self) -> int:
        """Nobody goes by a later one."""
        return 0

    async def ensure_known(self) -> None:
        """There are no fences."""

    def invalidate(self) -> None:
        """There are no fences."""

    def reload_soon(self) -> None:
        """There are no fences."""

    async def load(self) -> None:
        """There is nothing on record."""

    async def compare(self, *_: object) -> list[Any]:
        """No host is fenced."""
        return []

    def is_gone(self, service: str) -> bool:
        """No service is."""
        return False

    async def unexplained(self, uuids: object) -> Mapping[str, Any]:
        """No machine is."""
        return {}


ALONE: Any = Alone()


def engine_of(**parts: Any) -> Engine:
    """An engine that is alone but for these."""
    return Engine(**{"leases": ALONE, "fences": ALONE, "search": ALONE, **parts})


def requests_of(engine: Any, clock: Clock, bus: Any = ALONE, **parts: Any) -> RequestHandlers:
    """Handlers of requests that are alone but for these."""
    return RequestHandlers(engine, clock, bus, **{"fences": ALONE, "search": ALONE, "leases": ALONE, **parts})


def beat(service: str, epoch: int, sequence: int, **other: Any) -> Heartbeat:
    """A message of a compute service."""
    return Heartbeat(service=service, cell="c1", epoch=epoch, sequence=sequence, **other)


class Told:
    """What reports are told of the leases."""

    def __init__(
        self,
        leases: Any = ALONE,
        up: Any = tuple,
        outdated: Any = lambda _service, _epoch: None,
        gone: Collection[str] = (),
    ) -> None:
        self._leases = leases
        self.up = up
        self.note_outdated = outdated
        if gone:
            self.is_gone = gone.__contains__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._leases, name)


def hosts_of(*parts: Any, **named: Any) -> HostHandlers:
    """Handlers of reports that are alone but for these."""
    told: Any = Told(**{name: named.pop(name) for name in ("leases", "up", "outdated", "gone") if name in named})
    return HostHandlers(*parts, leases=told, **{"listings": Listings(), "fences": ALONE, **named})


def search_of(store: Any, bus: Any, **parts: Any) -> MachineSearch:
    """A search that is told of nothing but these."""
    nothing: Any = {
        "down": dict,
        **dict.fromkeys(("forgotten", "fenced"), frozenset),
        "listings": Listings(),
    }
    return MachineSearch(store, bus, **{**nothing, **parts})


BUILD = CellBuild(spec=SPEC, selections=(selection(1), selection(2)), consumer_generation=7, requested_at=1.0)


class Services:
    """A bus whose compute services have these machines; those of `silent` do not answer. Placement never does."""

    name = "c1"

    def __init__(self, **machines: Sequence[FoundMachine]) -> None:
        self.machines = machines
        self.silent: set[str] = set()
        self.hosts: tuple[str, ...] = tuple(host(n) for n in range(1, 10))  # that each has looked at
        self.page: int | None = None  # of these hosts in one answer
        self.queried: list[FindMachines] = []
        self.of_placement: list[Any] = []

    async def request_all(self, messages: Sequence[Any], *_: Any, **__: Any) -> list[MachinesFound | Fault]:
        """One answer or fault each."""
        self.queried += [one for one in messages if isinstance(one, FindMachines)]
        self.of_placement += [one for one in messages if isinstance(one, Claim | Release)]
        return [
            MachinesFound(
                machines=tuple(self.machines[one.service]),
                hosts=self._hosts(one),
                more=self.page is not None and one.hosts_after + self.page < len(self.hosts),
            )
            if isinstance(one, FindMachines) and one.service not in self.silent
            else Transient("no answer", code="request.timeout")
            for one in messages
        ]

    def _hosts(self, query: FindMachines) -> tuple[str, ...]:
        if not query.thorough:
            return ()
        page = len(self.hosts) if self.page is None else self.page
        return self.hosts[query.hosts_after : query.hosts_after + page]


async def insert(store: MemoryInstances, *instances: Instance) -> None:
    """Put these on record."""
    async with store.transaction() as transaction:
        await transaction.insert(instances)


async def opened_store(clock: Clock | None = None) -> MemoryInstances:
    """A cell's database in memory."""
    store = MemoryInstances(MemoryInstanceTable(clock or SystemClock()).session())
    await store.open()
    return store


def down(service: str, *hosts: int, **other: Any) -> Lease:
    """The lease of a service that is silent, with the hosts that it has listed."""
    named = " ".join(map(host, hosts))
    return replace(Lease(service=service, epoch=1, state=LeaseState.SILENT, reason="why", listed=named), **other)


async def put(store: MemoryInstances, *leases: Lease) -> None:
    """Put these leases on record."""
    term = await store.leases.keep("p", 60.0, None)
    assert term is not None and await store.leases.record(term, leases)


class Conductor:
    """Takes requests over a database that was set back just now."""

    def __init__(
        self,
        services: Services,
        up: Collection[str] | None,
        table: MemoryInstanceTable | None = None,
    ) -> None:
        """`table`: another conductor's."""
        clock = SystemClock()
        self.table = table if table is not None else MemoryInstanceTable(clock)
        self.table.made_at = 0.0  # long before every request
        self.listed = set(services.hosts)
        self.up = up
        self.down: Collection[str] = ()
        self.forgotten: Collection[str] = ()
        self.fenced: Collection[str] = ()
        self.without_list: Collection[str] = ()
        self.relay, bus = Relay(), services
        self.store = MemoryInstances(self.table.session())
        self.search = search_of(
            self.store,
            bus,  # type: ignore[arg-type]
            clock=clock,
            config=ConductorConfig(),
            up=lambda: self.up,
            listings=self,
            down=lambda: {one: down(one) for one in self.down},
            fenced=lambda: self.fenced,
            forgotten=lambda: self.forgotten,
        )
        self.engine = engine_of(
            store=self.store,
            bus=bus,  # type: ignore[arg-type]
            relay=self.relay,  # type: ignore[arg-type]
            clock=clock,
            config=ConductorConfig(),
            cell="c1",
            search=self.search,
        )
        self.requests = requests_of(self.engine, clock, search=self.search)

    def hosts_of(self, _services: Collection[str]) -> set[str]:
        """As of listings."""
        return self.listed

    def unlisted(self, services: Collection[str]) -> set[str]:
        """As of listings."""
        return set(services) & set(self.without_list)

    async def keep(self, n: int, verdict: str = "") -> None:
        """A host has a machine of the instance that no record explains, with this word of an operator."""
        machine = Unexplained(UUID, 1, host(n), UnexplainedKind.QUARANTINED, "newer")
        await self.store.safety.record(f"s{n}", [machine], 1.0)
        if verdict:
            await self.store.safety.decide([DecidedMachine(UUID)], verdict, "ann", 2.0)

    async def take(self, build: Message = BUILD, *, set_back: bool = True, attempt: int = 0) -> Outcome:
        await self.store.open()
        if set_back:
            self.table.place += 1
            await self.engine.sweep()
        return await self.request(build, attempt=attempt)

    async def request(self, message: Message, *, attempt: int = 0, message_id: str = "m") -> Outcome:
        (outcome,) = await self.requests.requests(
            [Received(message, Meta(id=message_id, attempt=attempt), "c1", "conductor.requests")]
        )
        return outcome

    async def recorded(self) -> Instance | None:
        async with self.store.transaction() as transaction:
            return (await transaction.lock([UUID])).get(UUID)


async def opened(services: Services, up: Collection[str] | None, table: MemoryInstanceTable | None = None) -> Conductor:
    """A conductor whose database is open, and was not set back yet."""
    conductor = Conductor(services, up, table)
    await conductor.store.open()
    return conductor

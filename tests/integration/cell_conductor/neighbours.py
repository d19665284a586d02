"""A conductor and its scripted neighbours: placement, one compute service, a scheduler that listens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.actions import ActionEvent
from bus.contracts.base import Message, Refusal
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import (
    AttemptOnHost,
    CellBuild,
    CellDelete,
    ComputeOutcome,
    ComputeResult,
    Destroy,
    InstanceSpec,
    LookUpMachines,
    MachineLookupResult,
    Selection,
    Spawn,
)
from bus.contracts.listing import ListedMachine, ListMachines, MachinesPage
from bus.contracts.placement import Claim, ClaimOutcome, ClaimResult, Release, ReleaseResult, Restate, RestateResult
from bus.contracts.recovery import CellKnown, CellRecovering, KnownPlace, KnownRecord
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.database import Database
from bus.persistence.relay import Relay
from bus.transport import Transport
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import Engine
from cell_conductor.machine_search import SourceLookup
from cell_conductor.pending_lookups import PendingLookups
from cell_conductor.periodic import look_up_forever
from cell_conductor.recovery.known_reader import KnownReader
from cell_conductor.reports.listings import HostListings
from cell_conductor.state.instance import State
from cell_conductor.state.lease import Lease
from cell_conductor.store.postgres import PostgresInstances
from tests.kit.waiting import until
from tests.unit.cell_conductor.world import ALONE, Alone, engine_of, hosts_of, listing, recovery_of, requests_of

CELL = "c1"
WAIT_S = 60.0
# Only a test sweeps here, by hand: an answer that is later than this is not requested by anything else.
ASK_S = 3.0


HOSTS = tuple(f"10000000-0000-4000-8000-{n:012d}" for n in range(1, 10))


class Leases(Alone):
    """Of one service, kept by this conductor."""

    is_leader, is_down = True, False

    def up(self) -> Collection[str]:
        """It alone."""
        return () if self.is_down else ("s1",)

    def down(self) -> Mapping[str, Lease]:
        """It alone."""
        return {"s1": Lease(service="s1", epoch=1)} if self.is_down else {}

    def deleted(self) -> Collection[str]:
        """None."""
        return ()


class MovingClock(SystemClock):
    """The real clock, moved on at will."""

    def __init__(self) -> None:
        self.offset = 0.0

    def time(self) -> float:
        return super().time() + self.offset


class Neighbours:
    """Placement and one compute service, as scripted as a test wants them. They keep what truly happened."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[int, str, int]] = {}  # consumer -> attempt, host, generation
        self.full: set[str] = set()
        self.claims: list[Claim] = []
        self.running: dict[tuple[str, str], int] = {}  # (host, instance) -> attempt
        self.ended_attempts: dict[tuple[str, str], int] = {}
        self.fails: set[str] = set()
        self.hangs: set[str] = set()
        self.silent = False  # the compute service takes no command
        self.specs: dict[str, InstanceSpec] = {}  # of what was commanded: services keep it, and the schedulers have it
        self.spawns: list[Spawn] = []
        self.destroys: list[Destroy] = []
        self.events: list[BuildEvent] = []
        self.actions: list[ActionEvent] = []
        self.bus: Bus

    async def placement(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        return [Done(self._answer(received.message)) for received in batch]

    def _answer(self, message: Message) -> Message | None:
        if isinstance(message, Release):
            held = self.held.get(message.consumer)
            if held and message.attempt is not None and held[0] > message.attempt:
                return ReleaseResult(outcome="consumer_conflict")
            return ReleaseResult(outcome="released" if self.held.pop(message.consumer, None) else "absent")
        if isinstance(message, Restate):
            return self._restate(message)
        if not isinstance(message, Claim):
            return Refusal(code="unexpected")
        self.claims.append(message)
        return self._claim(message)

    def _restate(self, message: Restate) -> RestateResult:
        _, place, generation = self.held.get(message.consumer, (0, "", 0))
        if message.allocations is not None:
            place = next(iter(message.allocations), "")
        if not place:
            self.held.pop(message.consumer, None)
            return RestateResult(outcome="restated")
        self.held[message.consumer] = (message.attempt, place, generation + 1)
        return RestateResult(outcome="restated", consumer_generation=generation + 1)

    def _claim(self, claim: Claim) -> ClaimResult:
        places = [next(iter(option.allocations)) for option in claim.options]
        held = self.held.get(claim.consumer)
        if held and held[0] == claim.attempt:
            return ClaimResult(outcome=ClaimOutcome.CLAIMED, option=places.index(held[1]), consumer_generation=held[2])
        if held is None or held[2] != claim.consumer_generation:
            if held is None:
                return ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT)
            holding = {held[1]: {"VCPU": 1}}
            return ClaimResult(outcome=ClaimOutcome.CONSUMER_CONFLICT, consumer_generation=held[2], allocations=holding)
        del self.held[claim.consumer]
        outcomes: list[ClaimOutcome] = []
        for option, place in enumerate(places):
            if place in self.full:
                outcomes.append(ClaimOutcome.NO_CAPACITY)
                continue
            outcomes.append(ClaimOutcome.CLAIMED)
            self.held[claim.consumer] = (claim.attempt, place, held[2] + 1)
            return ClaimResult(
                outcome=ClaimOutcome.CLAIMED, option=option, outcomes=tuple(outcomes), consumer_generation=held[2] + 1
            )
        return ClaimResult(outcome=ClaimOutcome.NO_CAPACITY, outcomes=tuple(outcomes))

    async def compute(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for received in batch:
            message = received.message
            if isinstance(message, ListMachines):
                outcomes.append(Done(None if self.silent else self._list()))
                continue
            if isinstance(message, LookUpMachines):
                outcomes.append(Done(None if self.silent else self._find(message)))
                continue
            outcomes.append(Done())
            result = self._command(message) if not self.silent else None
            if result is not None:
                await self.bus.publish(result, cause=received.meta.cause)
        return outcomes

    def _list(self) -> MachinesPage:
        machines = tuple(
            ListedMachine(
                instance_uuid=uuid,
                host_uuid=host,
                host=host,
                service="s1",
                attempt=attempt,
                project_id="p",
                spec=self.specs[uuid],
                allocations={host: {"VCPU": 1}},
            )
            for (host, uuid), attempt in sorted(self.running.items())
        )
        return MachinesPage(machines=machines, hosts=HOSTS)

    def _find(self, query: LookUpMachines) -> MachineLookupResult:
        machines = tuple(
            AttemptOnHost(instance_uuid=uuid, host_uuid=host, service="s1", attempt=attempt)
            for (host, uuid), attempt in self.running.items()
            if uuid in query.instance_uuids
        )
        return MachineLookupResult(machines=machines, hosts=HOSTS)

    def _command(self, message: Message) -> ComputeResult | None:
        if isinstance(message, Spawn):
            self.specs[message.spec.instance_uuid] = message.spec
            self.spawns.append(message)
            key = (message.host_uuid, message.spec.instance_uuid)
            if message.attempt <= self.ended_attempts.get(key, 0) or message.host_uuid in self.hangs:
                return None
            if message.host_uuid in self.fails:
                return self._result(message.spec.instance_uuid, message, ComputeOutcome.FAILED, "spawn.planned")
            self.running[key] = message.attempt
            return self._result(message.spec.instance_uuid, message, ComputeOutcome.ACTIVE)
        assert isinstance(message, Destroy)
        self.destroys.append(message)
        key = (message.host_uuid, message.instance_uuid)
        if message.keep_if_complete and self.running.get(key) == message.attempt:
            return self._result(message.instance_uuid, message, ComputeOutcome.ACTIVE)
        self.ended_attempts[key] = max(self.ended_attempts.get(key, 0), message.attempt)
        if self.running.get(key, message.attempt + 1) <= message.attempt:
            del self.running[key]
        return self._result(message.instance_uuid, message, ComputeOutcome.DESTROYED)

    @staticmethod
    def _result(uuid: str, message: Spawn | Destroy, outcome: ComputeOutcome, code: str = "") -> ComputeResult:
        return ComputeResult(
            instance_uuid=uuid,
            attempt=message.attempt,
            host_uuid=message.host_uuid,
            service=message.service,
            outcome=outcome,
            code=code,
        )

    async def scheduler(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        self.events += [received.message for received in batch if isinstance(received.message, BuildEvent)]
        self.actions += [received.message for received in batch if isinstance(received.message, ActionEvent)]
        return [Done()] * len(batch)

    async def recoveries(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """The schedulers tell what they and placement have of the cell."""
        for received in batch:
            query = received.message
            assert isinstance(query, CellRecovering)
            page = CellKnown(
                cell=CELL,
                process=query.process,
                query_id=query.query_id,
                instances=tuple(map(self._known, query.asked or sorted(self.held))),
            )
            await self.bus.publish(page, cause=query.query_id)
        return [Done()] * len(batch)

    def _known(self, uuid: str) -> KnownRecord:
        events = [one for one in self.events if one.instance_uuid == uuid]
        if not events:
            return KnownRecord(instance_uuid=uuid)
        attempt, place, _ = self.held.get(uuid, (events[-1].attempt, "", 0))
        places = (KnownPlace(host_uuid=place, host=place, service="s1", allocations={place: {"VCPU": 1}}),)
        return KnownRecord(
            instance_uuid=uuid,
            project_id="p",
            state=events[-1].state,
            cell=CELL,
            attempt=attempt,
            sequence=events[-1].sequence,
            spec=self.specs.get(uuid),
            places=places if place else (),
        )

    def ends(self, uuid: str) -> list[BuildState]:
        return [event.state for event in self.events if event.instance_uuid == uuid and event.terminal]


class Cell:
    """One conductor under test and its neighbours."""

    def __init__(self, url: str, transports: Callable[[str], Transport], clock: MovingClock) -> None:
        self.rng = random.Random(7)
        self.clock = clock
        self.transports = transports
        self.around = Neighbours()
        self.consumers: list[Consumer] = []
        self.config = ConductorConfig(claim_timeout_s=ASK_S, answer_timeout_s=ASK_S, sweep_batch=10)
        self.database = Database(url, f"cell_{CELL}")
        self.store = PostgresInstances(self.database)

    def new_bus(self, process: str) -> Bus:
        return Bus(CELL, self.transports(CELL), process=process, clock=self.clock, rng=self.rng)

    async def open(self, stack: AsyncExitStack) -> None:
        await self.store.open()
        stack.push_async_callback(self.store.close)
        self.bus = self.new_bus("conductor")
        self.around.bus = self.new_bus("around")
        for bus in (self.bus, self.around.bus):
            await bus.open()
            stack.push_async_callback(bus.close)
        self.relay = Relay(self.store.outbox, {CELL: self.bus}, clock=self.clock)
        self.searches: list[asyncio.Task[None]] = []
        stack.push_async_callback(_cancel, self.searches)
        self.listings = HostListings()
        self.listings.record(listing("s1", 1, 2, 3, pages=1, first_sequence=1))
        self.leases = Leases()
        self.engine = self.new_engine()
        requests = requests_of(self.engine, self.clock)
        self.hosts = hosts_of(
            self.engine, self.store, self.clock, self.config, self.bus, superseded=lambda _service, _epoch: None
        )
        known = KnownReader(self.bus)
        self.recovery = recovery_of(
            self.store,
            self.bus,
            self.relay,
            clock=self.clock,
            config=self.config,
            known=known,
            leases=self.leases,
            fences=ALONE,
        )
        relay = asyncio.create_task(self.relay.run())
        stack.push_async_callback(_cancel, [relay])
        for consumer in (
            Consumer(self.around.bus, "placement.requests", self.around.placement),
            Consumer(self.around.bus, "compute.{service}", self.around.compute, service="s1"),
            Consumer(self.around.bus, "scheduler.builds", self.around.scheduler),
            Consumer(self.around.bus, "scheduler.recoveries", self.around.recoveries),
            Consumer(self.bus, "conductor.known.{process}", known.handle, process="conductor"),
            Consumer(self.bus, "conductor.requests", requests.requests),
            Consumer(self.bus, "conductor.dead_letters", requests.dead_letters),
            Consumer(self.bus, "conductor.results", requests.results),
            Consumer(self.bus, "conductor.hosts.{process}", self.hosts.hosts, process="conductor"),
        ):
            await consumer.start()
            self.consumers.append(consumer)
            stack.push_async_callback(consumer.drain, 5.0)

    async def drain(self) -> None:
        """Return when what was delivered has been handled."""
        for consumer in self.consumers:
            await consumer.drain(WAIT_S)

    def note_blocked(self, instances: Collection[str]) -> None:
        """As the recovery, which is made after the engine."""
        self.recovery.note_blocked(instances)

    def new_engine(self) -> Engine:
        """Of a conductor, which searches in a task of its own."""
        pending = PendingLookups()
        engine = engine_of(
            store=self.store,
            bus=self.bus,
            relay=self.relay,
            clock=self.clock,
            config=self.config,
            cell=CELL,
            lookups=pending,
            leases=self.leases,
            marks=self.leases,
            blocked=self.note_blocked,
        )
        lookup = SourceLookup(
            engine,
            self.store,
            self.bus,
            clock=self.clock,
            config=self.config,
            listings=self.listings,
            pending=pending,
        )
        self.searches.append(asyncio.create_task(look_up_forever(lookup, self.clock)))
        return engine

    def host(self, n: int) -> str:
        return f"10000000-0000-4000-8000-{n:012d}"

    def build(self, *hosts: int, timeout_s: float = 60.0) -> CellBuild:
        """A build whose first selection is claimed, as the scheduler leaves it."""
        uuid = new_uuid(self.rng)
        self.around.held[uuid] = (1, self.host(hosts[0]), 1)
        selections = tuple(
            Selection(host_uuid=self.host(n), host=f"host-{n}", service="s1", allocations={self.host(n): {"VCPU": 1}})
            for n in hosts
        )
        spec = InstanceSpec(instance_uuid=uuid, project_id="p")
        return CellBuild(spec=spec, selections=selections, consumer_generation=1, build_timeout_s=timeout_s)

    async def given(self, *hosts: int, timeout_s: float = 60.0) -> str:
        """The cell is commanded to build an instance, whose uuid this is."""
        build = self.build(*hosts, timeout_s=timeout_s)
        await self.around.bus.publish(build)
        return build.spec.instance_uuid

    async def active(self, *hosts: int) -> str:
        """An instance that the cell has built."""
        uuid = await self.given(*hosts)
        await until(lambda: self.around.ends(uuid) == [BuildState.ACTIVE])
        return uuid

    async def delete(self, uuid: str) -> None:
        await self.around.bus.publish(CellDelete(instance_uuid=uuid, project_id="p"))

    async def recover(self) -> None:
        """The set-back of its database is recognised, and the cell recovers."""
        await self.engine.sweep()
        assert self.store.is_recovering
        await self.recovery.look()
        assert not self.store.is_recovering

    async def sql(self, *statements: str) -> None:
        async with self.database.raw() as connection:
            for statement in statements:
                await connection.execute(statement)

    async def state(self, uuid: str) -> State:
        async with self.store.transaction() as transaction:
            found = (await transaction.lock([uuid])).get(uuid)
        return found.state if found else State.ABSENT

    async def check_at_rest(self) -> None:
        """Invariant 3: what runs = what instances record = what is allocated."""
        async with self.database.raw() as connection:
            rows = await connection.fetch(CLAIMED)
        assert self.around.running == {(host, uuid): attempt for uuid, host, attempt, _ in rows}
        held = {(host, uuid): attempt for uuid, (attempt, host, _) in self.around.held.items()}
        assert held == {(host, uuid): claimed for uuid, host, _, claimed in rows}


# What is active, and the attempt of its claim: a recovery claims under the newest number on record, which fences the
# numbers that are lost.
CLAIMED = """
SELECT uuid, host_uuid, attempt,
    CASE WHEN attempt < coalesce(record ->> 'proves_from', '0')::bigint THEN highest_attempt ELSE attempt END
FROM instances WHERE state = 'active'
"""


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Cell]:
    clock = MovingClock()
    cell = Cell(url, partial(MemoryTransport, MemoryBroker(clock)), clock)
    async with AsyncExitStack() as stack:
        await cell.open(stack)
        yield cell

"""One conductor's copy of its cell's fences, and what an old copy must not undo."""

from __future__ import annotations

import asyncio
import math
import random
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.actions import ActionKind
from bus.contracts.base import Meta
from bus.contracts.cell import CellDelete, Destroy, HostReport, HostStates, Running
from bus.contracts.operations import CellFence, FenceState, HostFence
from bus.faults import Transient
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.outbox import OutboxMessage
from cell_conductor.config import ConductorConfig
from cell_conductor.hosts.fence_cache import FenceCache
from cell_conductor.hosts.fence_controller import FenceController
from cell_conductor.hosts.stale_machines import StaleMachines
from cell_conductor.hosts.stated_marks import _Listening
from cell_conductor.reports.report_guard import ReportGuard
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.evacuation_proof import STILL_RUNNING, evacuation_blocker
from cell_conductor.state.events import InstanceEvent
from cell_conductor.state.fence import Fence, RunningAfterFence
from cell_conductor.state.instance import MACHINE_EXISTS, Instance, InstanceSummary, State, unreadable_summary
from cell_conductor.state.lease import Lease
from cell_conductor.state.ownership_proof import rescan_id
from cell_conductor.state.unknown_machine import NO_RECORD, UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed_tables import PROTECT
from cell_conductor.store.memory import MemoryInstances
from tests.unit.cell_conductor.move_scenario import Scenario, active, claimed, ended, request
from tests.unit.cell_conductor.records import ON_1, ON_2, ON_3, moving, record
from tests.unit.cell_conductor.scenario import PATIENCE, SPEC, UUID, host
from tests.unit.cell_conductor.test_single_conditions import fences_on
from tests.unit.cell_conductor.world import (
    Queried,
    Quiet,
    Relay,
    down,
    engine_of,
    hosts_of,
    insert,
    leases_of,
    listing,
    opened,
    opened_store,
    put,
)

# --- One conductor's copy of its cell's fences, while reads and decisions overlap.


HOST, INSTANCE = "10000000-0000-4000-8000-000000000000", "a0000000-0000-4000-8000-000000000000"


class HeldReads:
    """The fences of a store; a read's answer is held back until `answer` is set."""

    def __init__(self, store: MemoryInstances) -> None:
        self._fences = store.fences
        self.transaction = store.transaction
        self.answer = asyncio.Event()
        self.reading = asyncio.Event()
        self.answer.set()

    async def fences(self) -> list[Fence]:
        rows, held = await self._fences.fences(), self.answer
        self.reading.set()
        await held.wait()
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fences, name)


class Fences(NamedTuple):
    """What one conductor has of its cell's fences."""

    cache: FenceCache
    controller: FenceController
    stale: StaleMachines


def fences_of(reads: HeldReads) -> Fences:
    clock, config, bus = SystemClock(), ConductorConfig(), cast(Any, SentOrders())
    store: Any = SimpleNamespace(fences=reads, transaction=reads.transaction)
    cache = FenceCache(store, clock)
    controller = FenceController(store, cache, bus, clock=clock, config=config, cell="c1")
    return Fences(cache, controller, StaleMachines(store, cache, clock, config))


async def test_an_earlier_read_does_not_replace_what_a_later_one_found() -> None:
    store = await opened_store()
    reads = HeldReads(store)
    fences = fences_of(reads)
    quick, reads.answer = reads.answer, asyncio.Event()
    slow = reads.answer
    first = asyncio.create_task(fences.cache.load())  # sees no fence, and is slow to come back
    await reads.reading.wait()
    await store.fences.put(Fence(host_uuid=HOST, host="h1", version=1))
    reads.answer = quick
    second = asyncio.create_task(fences.cache.load())
    for _ in range(100):  # as far as it gets while the first is out
        await asyncio.sleep(0)
    slow.set()
    await asyncio.gather(first, second)
    assert HOST in fences.cache.fences


async def test_a_lift_and_its_fence_that_two_conductors_take_at_once_leave_no_fence() -> None:
    """One read that there was none, the other recorded it, the first announced it as lifted: nobody lifted it."""
    store = await opened_store()
    fences = fences_of(HeldReads(store))
    sent: Any = fences.controller._bus
    nothing: Any = None
    await fences.controller.take([CellFence(host_uuid=HOST, host="h1", version=6, unfence=True)], nothing)
    await store.fences.put(Fence(host_uuid=HOST, host="h1", version=5))
    await fences.controller.look(nothing)
    assert await store.fences.fences() == []
    reports: list[Any] = sent.orders
    assert [(type(one), one.version, one.state) for one in reports] == [(HostFence, 6, FenceState.UNFENCED)]


async def test_a_lift_that_came_after_a_copy_was_read_is_answered_by_what_is_on_record() -> None:
    store = await opened_store()
    await store.fences.put(Fence(host_uuid=HOST, host="h1", version=5, state=FenceState.FENCED))
    fences = fences_of(HeldReads(store))
    await fences.cache.load()
    await store.fences.put(Fence(host_uuid=HOST, host="h1", version=6, state=FenceState.UNFENCING))
    assert await store.fences.unfence(HOST, 6, 9.0)
    sent: Any = fences.controller._bus
    await fences.controller._publish_recorded(Fence(host_uuid=HOST, host="h1", version=6, state=FenceState.UNFENCED))
    assert [(one.version, one.state) for one in cast(Any, sent.orders)] == [(6, FenceState.UNFENCED)]


@pytest.mark.parametrize(
    ("known", "state", "version", "is_read"),
    [
        (5, FenceState.UNFENCED, 6, True),
        (5, FenceState.UNFENCED, 5, True),
        (7, FenceState.UNFENCED, 6, False),
        (5, FenceState.FENCED, 5, False),
        (5, FenceState.UNFENCING, 6, True),
        (0, FenceState.FENCED, 1, True),
    ],
)
async def test_a_change_that_another_conductor_announces_is_read_soon(
    known: int, state: FenceState, version: int, *, is_read: bool
) -> None:
    """Of a fence that another lifted at once by a later decision it went on for half a minute."""
    store = await opened_store()
    if known:
        await store.fences.put(Fence(host_uuid=HOST, host="h1", version=known))
    fences = FenceCache(store, SystemClock())
    await fences.load()
    fences.on_recorded(HostFence(cell="c1", host_uuid=HOST, version=version, state=state))
    assert fences._is_fresh is not is_read


NOTHING = HostStates(
    service="s", cell="c1", epoch=1, sequence=1, hosts=(HostReport(uuid=HOST, name="h1", running=()),), complete=True
)
MOVED = InstanceSummary(INSTANCE, State.ACTIVE, ON_2.host_uuid, "s", 3, 1.0)  # attempt 2 is over, wherever it was


async def gave_up(*services: str, at: float = 1_000.0) -> tuple[MemoryInstances, Fences]:
    """A fence on record, and machines of these services that were given up on its host."""
    store = await opened_store()
    await store.fences.put(Fence(host_uuid=HOST, host="h1", version=1))
    async with store.transaction() as transaction:
        assert await transaction.rely_on([HOST], {HOST: services} if services else {}, at)
    fences = fences_of(HeldReads(store))
    await fences.cache.load()
    return store, fences


def lists(*running: Running, service: str = "s", rescans: tuple[str, ...] = ()) -> HostStates:
    hosts = (HostReport(uuid=HOST, name="h1", running=running),)
    return replace(NOTHING, service=service, hosts=hosts, rescans=rescans)


async def on_record(store: MemoryInstances) -> int:
    return sum(one.stale_machines for one in await store.fences.fences())


async def test_a_fence_that_is_lifted_while_a_report_is_looked_at_fails_no_report() -> None:
    """The same host is listed twice: with the first listing another conductor has lifted its fence."""
    store, fences = await gave_up("s")

    async def lifted_meanwhile(*given: Any) -> None:
        await store.fences.record_empty(*given)
        await store.fences.put(Fence(host_uuid=HOST, host="h1", version=2, state=FenceState.UNFENCING))
        await store.fences.unfence(HOST, 2, 9.0)
        fences.cache.invalidate()

    fences.stale._store.fences.record_empty = lifted_meanwhile  # type: ignore[method-assign]
    report = lists(rescans=(fences.cache.fences[HOST].rescan_for("s"),))
    assert await fences.stale.compare(replace(report, hosts=report.hosts * 2), [], "d") == [] and not await on_record(
        store
    )


async def test_a_machine_given_up_during_a_read_makes_another_read_due() -> None:
    store = await opened_store()
    reads = HeldReads(store)
    fences = fences_of(reads)
    reads.answer.clear()
    reading = asyncio.create_task(fences.cache.load())
    await reads.reading.wait()
    fences.cache.reload_soon()
    reads.answer.set()
    await reading
    assert not fences.cache._is_fresh


async def test_a_scan_from_before_the_last_machine_was_given_up_lifts_no_fence() -> None:
    """It listed that machine as one that its instance wants; its conductor has not read the fence since."""
    store, fences = await gave_up("s")
    scan = lists(rescans=(fences.cache.fences[HOST].rescan_for("s"),))
    async with store.transaction() as transaction:
        assert await transaction.rely_on([HOST], {HOST: ["s"]}, 1_001.0)
    await fences.stale.compare(scan, [], "d")
    assert await on_record(store) == 2
    await fences.cache.load()
    assert await fences.stale.compare(scan, [], "d") == [(HOST, fences.cache.fences[HOST].rescan_for("s"))]
    await fences.stale.compare(lists(rescans=(fences.cache.fences[HOST].rescan_for("s"),)), [], "d")
    assert await on_record(store) == 0


class SentOrders:
    """A bus that keeps the published commands."""

    def __init__(self) -> None:
        self.orders: list[Destroy] = []

    async def publish(self, message: Destroy, *, cause: str) -> None:
        self.orders.append(message)


async def test_losses_end_by_a_scan_from_after_them_whatever_its_hosts_clock_reads() -> None:
    """Seed 93608: by the host's clock no report was later than the loss, so its fence was not lifted for minutes."""
    store, fences = await gave_up("s")
    rescan = fences.cache.fences[HOST].rescan_for("s")
    assert await fences.stale.compare(NOTHING, [], "d") == [(HOST, rescan)] and await on_record(store)
    assert await fences.stale.compare(lists(rescans=(rescan,)), [], "d") == [] and not await on_record(store)


async def test_losses_end_by_the_scan_of_their_service_or_of_one_that_the_host_has_passed_to() -> None:
    """A second service with a host of the same uuid ended them by its own scan, and the fence was ended."""
    store, fences = await gave_up("s")
    rescan, passed = fences.cache.fences[HOST].rescan_for("s"), [(HOST, "s")]
    first, scanned = lists(service="another"), lists(service="another", rescans=(rescan,))
    assert await fences.stale.compare(first, [], "d") == []
    assert await fences.stale.compare(scanned, [], "d") == []
    assert await on_record(store)
    assert await fences.stale.compare(first, [], "d", lambda *place: place in passed) == [(HOST, rescan)]
    await fences.stale.compare(scanned, [], "d", lambda *place: place in passed)
    assert not await on_record(store)


LISTED = Running(instance_uuid=INSTANCE, attempt=2, database_id="d")
HERE = replace(MOVED, attempt=2, host_uuid=HOST)


@pytest.mark.parametrize(
    ("listed", "summary", "holds"),
    [
        pytest.param(LISTED, MOVED, True, id="over"),
        pytest.param(replace(LISTED, destroying=True), MOVED, True, id="it is being destroyed"),
        pytest.param(LISTED, replace(MOVED, protected_hosts=(HOST,)), False, id="an operator keeps it"),
        pytest.param(LISTED, replace(MOVED, protected_hosts=("x",)), True, id="an operator keeps another"),
        pytest.param(LISTED, replace(MOVED, state=State.FAILED, code=MACHINE_EXISTS), True, id="exists"),
        pytest.param(LISTED, unreadable_summary(INSTANCE, ()), True, id="unreadable"),
        pytest.param(replace(LISTED, attempt=0), MOVED, True, id="unnumbered"),
        pytest.param(LISTED, HERE, False, id="wanted"),
        pytest.param(replace(LISTED, attempt=4), MOVED, False, id="newer"),
        pytest.param(replace(LISTED, database_id="x"), MOVED, False, id="foreign"),
        pytest.param(LISTED, None, False, id="no record"),
    ],
)
async def test_a_fence_stays_for_a_machine_that_may_have_been_given_up_there(
    listed: Running, summary: InstanceSummary | None, *, holds: bool
) -> None:
    store, fences = await gave_up("s")
    report = lists(listed, rescans=(fences.cache.fences[HOST].rescan_for("s"), fences.cache.fences[HOST].rescan))
    assert await fences.stale.compare(report, [summary] if summary is not None else [], "d") == []
    assert bool(await on_record(store)) is holds


async def report_to(store: MemoryInstances, *fenced: int, report: HostStates, lifted: bool = False) -> list[Destroy]:
    """The orders that a report of fenced hosts leads to. lifted: by another conductor, while it is compared."""
    clock, config, relay, bus = SystemClock(), ConductorConfig(), Relay(), Quiet()
    for n in fenced:
        await store.fences.put(Fence(host_uuid=host(n), host=f"host-{n}", version=1, at=1.0))
    fences = FenceCache(store, clock)
    engine = engine_of(
        store=store, bus=cast(Bus, bus), relay=relay, clock=clock, config=config, cell="c1", fences=fences
    )
    hosts = hosts_of(engine, store, clock, config, cast(Bus, bus), fences=fences)
    compare = hosts._stale.compare

    async def compared(*given: Any) -> Any:
        found = await compare(*given)
        if lifted:
            fences.invalidate()
        return found

    hosts._stale.compare = compared  # type: ignore[method-assign]
    await hosts.hosts([Received(report, Meta(id="m"), "c1", "conductor.hosts.c")])
    sent = [*bus.published, *(one.message for one in cast(list[OutboxMessage], relay.sent))]
    return [one for one in sent if isinstance(one, Destroy)]


@pytest.mark.parametrize("lifted", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
async def test_more_losses_than_a_breaker_allows_are_destroyed_and_counted_by_none(
    *, is_open: bool, lifted: bool
) -> None:
    """They were evacuated from there, or failed with it."""
    store = await opened_store()
    if is_open:
        await store.safety.trip(Breaker(service="s1", tripped_at=1.0))
    breakers = await store.safety.breakers()
    uuids = [f"{n:08x}-0000-4000-8000-000000000000" for n in range(10)]
    moved = [record(State.ACTIVE, uuid=one, queried=False, since=1.0) for one in uuids[:5]]
    failed = [replace(one, uuid=uuid, state=State.FAILED) for one, uuid in zip(moved, uuids[5:], strict=True)]
    await insert(store, *moved, *failed)
    runs = tuple(Running(instance_uuid=one, attempt=1, database_id=store.database_id) for one in uuids)
    report = listing("s1", 1, runs=runs, rescans=tuple(rescan_id(one) for one in (*moved, *failed)))
    orders = await report_to(store, 1, report=report, lifted=lifted)
    assert sorted(one.instance_uuid for one in orders) == uuids and await store.safety.breakers() == breakers


async def test_a_second_service_does_not_clear_what_the_first_one_has_found_running() -> None:
    """The machines were evacuated, and ran twice."""
    store = await opened_store()
    fence = Fence(host_uuid=HOST, host="h1", version=1)
    await store.fences.put(fence)
    fences = fences_of(HeldReads(store))
    await fences.cache.load()

    def scan(service: str, *running: Running) -> HostStates:
        host = HostReport(uuid=HOST, name="h1", running=running)
        return HostStates(service=service, cell="c1", epoch=1, sequence=1, hosts=(host,), rescans=(fence.rescan,))

    await fences.stale.compare(scan("s", Running(instance_uuid=INSTANCE, attempt=1, database_id="d")), [], "d")
    await fences.stale.compare(scan("another"), [], "d")
    found = {"s": RunningAfterFence(1, {INSTANCE: 1})}
    assert fences.cache.fences[HOST].running == found
    passed = [(HOST, "s")]
    await fences.stale.compare(scan("another"), [], "d", lambda *place: place in passed)
    assert not fences.cache.fences[HOST].running, "the first one has given the host up"


async def test_what_a_service_found_running_that_is_gone_is_looked_at_by_the_next_one() -> None:
    """Nobody demanded that scan: evacuations from there were refused until they were forced."""
    store = await opened_store()
    fence = Fence(host_uuid=HOST, host="h1", version=1)
    await store.fences.put(fence)
    fences = fences_of(HeldReads(store))
    await fences.cache.load()
    runs = HostReport(uuid=HOST, name="h1", running=(Running(instance_uuid=INSTANCE, attempt=1, database_id="d"),))
    first = HostStates(service="s", cell="c1", epoch=1, sequence=1, hosts=(runs,), rescans=(fence.rescan,))
    await fences.stale.compare(first, [], "d")
    nothing = replace(first, service="another", hosts=(replace(runs, running=()),), rescans=())
    passed = [(HOST, "s")]
    assert await fences.stale.compare(nothing, [], "d") == []
    assert await fences.stale.compare(nothing, [], "d", lambda *place: place in passed) == [(HOST, fence.rescan)]


@pytest.mark.parametrize(("ahead_s", "is_scanned"), [(0.0, False), (86_400.0, True)])
async def test_a_machine_that_has_just_been_given_up_causes_no_scan(ahead_s: float, *, is_scanned: bool) -> None:
    """The order that its host has to carry out first may be behind others. One from the future is no young one: its
    conductor's clock was ahead, and its fence was not lifted for a day.
    """
    _, fences = await gave_up("s", at=SystemClock().time() + ahead_s)
    rescans = [(HOST, fences.cache.fences[HOST].rescan_for("s"))] if is_scanned else []
    assert await fences.stale.compare(NOTHING, [], "d") == rescans


async def test_what_a_host_ran_after_its_fence_is_known_also_after_it_was_fenced_again() -> None:
    """A scan soon after a fence may show what ran before it, because clocks differ: it shows nothing."""
    store = await opened_store()
    fences = fences_of(HeldReads(store))
    runs = Running(instance_uuid=INSTANCE, attempt=1, database_id="d")

    async def fenced(version: int, at: float) -> None:
        await store.fences.put(Fence(host_uuid=HOST, host="h1", version=version, at=at))
        await fences.cache.load()

    async def scanned(*running: Running, later_than: int = 0) -> list[tuple[str, str]]:
        hosts = (HostReport(uuid=HOST, name="h1", running=running),)
        rescans = (Fence(host_uuid=HOST, host="h1", version=later_than).rescan,)
        report = HostStates(service="s", cell="c1", epoch=1, sequence=1, hosts=hosts, complete=True, rescans=rescans)
        return await fences.stale.compare(report, [], "d")

    term = await store.leases.hold_leadership("p", 60.0, None)
    assert term is not None and await store.leases.record(term, [Lease(service="s", epoch=1)])
    await fenced(1, 1_000.0)
    assert await scanned(runs) == [(HOST, fences.cache.fences[HOST].rescan)]
    assert not fences.cache.fences[HOST].running
    assert await scanned(runs, later_than=1) == []
    assert fences.cache.fences[HOST].running == {"s": RunningAfterFence(1, {INSTANCE: 1})}
    await fenced(2, 1_200.0)
    assert await scanned(later_than=1) == [(HOST, fences.cache.fences[HOST].rescan)]
    assert fences.cache.fences[HOST].running == {"s": RunningAfterFence(1, {INSTANCE: 1})}
    assert await scanned(later_than=2) == []
    assert not fences.cache.fences[HOST].running


# --- A conductor whose copy of the fences may be old does not undo an evacuation: it reads the record first.


SECOND = "00000000-0000-4000-8000-0000000000ff"


def evacuated(uuid: str, source: int) -> Instance:
    """Its destination was claimed, and is checked."""
    made = Scenario(active(), replace(PATIENCE, fences=fences_on(1)))
    made.apply(request(ActionKind.EVACUATE, 2, 3), claimed())
    one = made.instance
    assert one.action is not None and one.action.source is not None and one.spec is not None
    where = replace(one.action.source, host_uuid=host(source), allocations={host(source): {"VCPU": 1}})
    return replace(
        one,
        uuid=uuid,
        spec=replace(one.spec, instance_uuid=uuid),
        selections=(where, *one.selections[1:]),
        action=replace(one.action, source=where, request_id=uuid.replace("0", "d", 1)),
    )


async def test_another_hosts_lifted_fence_does_not_undo_an_evacuation_whose_fence_stands() -> None:
    clock = SystemClock()
    bus = Bus("c1", MemoryTransport(MemoryBroker(clock), "c1"), process="conductor", clock=clock, rng=random.Random(1))
    store = await opened_store(clock)
    fences = FenceCache(store, clock)
    for number in (1, 5):
        await store.fences.put(Fence(host_uuid=host(number), host=f"h{number}", version=1))
    await fences.load()
    config = ConductorConfig(claim_timeout_s=0.05)
    engine = engine_of(store=store, bus=bus, relay=Relay(), clock=clock, config=config, cell="c1", fences=fences)
    first, second = evacuated(UUID, 1), evacuated(SECOND, 5)
    await insert(store, first, second)
    await store.fences.put(Fence(host_uuid=host(1), host="h1", version=2, state=FenceState.UNFENCING))
    assert await store.fences.unfence(host(1), 2, 9.0)  # by another conductor
    with pytest.raises(Transient, match="ended meanwhile"):
        await engine.take([InstanceEvent(UUID, ended(first, 2, 2))], source="results")
    for uuid, one in ((SECOND, second), (UUID, first)):
        await engine.take([InstanceEvent(uuid, ended(one, 2, 2))], source="results")
    async with store.transaction() as transaction:
        states = {uuid: one.state for uuid, one in (await transaction.lock([UUID, SECOND])).items()}
    assert states == {UUID: State.REVERTING, SECOND: State.FINISHING}


@pytest.mark.parametrize("kept", ["before", "after", ""])
async def test_a_machine_that_an_operator_keeps_is_no_loss_of_its_fenced_host(kept: str) -> None:
    """The host was ordered to destroy it once it was back, and the operator's word went with the machine. A word that
    came after the delete was not asked for.
    """
    conductor = await opened()
    await conductor.store.fences.put(Fence(host_uuid=host(1), host="h1", version=1))
    fences = FenceCache(conductor.store, SystemClock())
    await fences.load()
    conductor.engine._fences = fences
    failed = Instance(uuid=UUID, state=State.FAILED, spec=SPEC, selections=(ON_1,), attempt=1)
    await insert(conductor.store, failed)
    await conductor.keep(1, PROTECT if kept == "before" else "")
    await conductor.request(CellDelete(instance_uuid=UUID, project_id=SPEC.project_id))
    recorded = await conductor.recorded()
    assert recorded is not None and recorded.state is State.DELETED
    await conductor.keep(1, PROTECT if kept == "after" else "")
    await fences.load()
    config, relay = ConductorConfig(), conductor.relay
    hosts = hosts_of(conductor.engine, conductor.store, SystemClock(), config, cast(Bus, Quiet()), fences=fences)
    runs = Running(instance_uuid=UUID, attempt=1, database_id=conductor.store.database_id)
    before = len(relay.sent)
    await hosts.hosts([Received(listing("s1", 1, runs=(runs,)), Meta(id="m"), "c1", "conductor.hosts.c")])
    orders = [one for one in cast(list[OutboxMessage], relay.sent)[before:] if isinstance(one.message, Destroy)]
    assert len(orders) == (0 if kept else 1)


# --- A conductor that has just started: what it does not know yet is neither up, nor free of a fence.


def _resized() -> Instance:
    """An automatic confirm is due; the destination is s2's."""
    there = replace(ON_2, service="s2")
    action = {"auto_confirm_s": 5.0, "answered": True}
    return moving(State.RESIZED, action=action, selections=(ON_1, there, ON_3), queried=False)


async def test_a_conductor_that_has_just_started_gives_up_no_source_for_a_service_that_is_silent() -> None:
    """Its sweep begins before it has service states, or has read the leases."""
    store = await opened_store()
    await put(store, down("s2"))  # on record, by the former process, whose term lasts
    await insert(store, _resized())
    clock, bus, config = SystemClock(), cast(Bus, Queried()), ConductorConfig()
    leases, marks = leases_of(store, bus, clock, config)
    engine = engine_of(
        store=store,
        bus=bus,
        relay=cast(Any, Relay()),
        clock=clock,
        config=config,
        cell="c1",
        leases=leases,
        marks=marks,
    )
    assert leases.up() is None, "it is not known yet which are"
    assert await engine.sweep() == 0, "nor what they state of the database"
    marks._listening = _Listening(store.servers, math.inf, may_act=True)
    assert await engine.sweep() == 1
    assert store._table.instances[UUID].state is State.RESIZED


async def test_a_conductor_that_has_not_read_its_fences_gives_up_no_source_for_a_fenced_host() -> None:
    """The side tasks run beside the preparations; and all fences are dropped where one was ended meanwhile."""
    store = await opened_store()
    await store.fences.put(Fence(host_uuid=host(2), host="host-2", version=1, at=1.0))
    await insert(store, _resized())
    clock, bus, config = SystemClock(), cast(Bus, Queried()), ConductorConfig()
    fences = FenceCache(store, clock)
    engine = engine_of(
        store=store, bus=bus, relay=cast(Any, Relay()), clock=clock, config=config, cell="c1", fences=fences
    )
    await engine.sweep()
    assert store._table.instances[UUID].state is State.RESIZED


async def test_a_conductor_that_has_just_started_evacuates_nothing_that_its_host_has_reported_to_run() -> None:
    """What a fenced host was found to run is in the memory of the conductor that was notified of it."""
    store, clock = await opened_store(), SystemClock()
    fence = Fence(host_uuid=host(2), host="host-2", version=1, at=1.0)
    await store.fences.put(fence)
    running = Running(instance_uuid=UUID, attempt=2, database_id=store.database_id)
    report = listing("s1", 2, runs=(running,), rescans=(fence.rescan,))
    active = record(State.ACTIVE, queried=False)
    refused: list[str] = []
    for is_told in (True, False):  # the second one after a restart
        fences = FenceCache(store, clock)
        await fences.load()
        if is_told:
            await StaleMachines(store, fences, clock, ConductorConfig()).compare(report, [], store.database_id)
        context = replace(PATIENCE, fences=fences.fences)
        unproved = evacuation_blocker(active, context, fenced=False, force=False)
        refused.append("" if unproved is None else unproved.code)
    assert refused == [STILL_RUNNING, STILL_RUNNING]


ON_HOST = "f0000000-0000-4000-8000-000000000000"


@pytest.mark.parametrize(("state", "stale_machines"), [(FenceState.FENCED, 7), (FenceState.UNFENCED, 0)])
async def test_a_fence_that_is_lifted_is_announced_without_losses(state: FenceState, stale_machines: int) -> None:
    sent: list[HostFence] = []

    async def publish(message: HostFence, **_: object) -> None:
        sent.append(message)

    controller: Any = FenceController.__new__(FenceController)
    controller._bus, controller._cell, controller._clock = SimpleNamespace(publish=publish), "c1", SystemClock()
    await controller._announce(SimpleNamespace(host_uuid=ON_HOST, version=3, state=state, stale_machines=7))
    assert [(one.state, one.stale_machines, one.version) for one in sent] == [(state, stale_machines, 3)]


def test_a_machine_that_stays_unexplained_is_logged_once() -> None:
    guard: Any = ReportGuard.__new__(ReportGuard)
    guard._known = {}
    machines = [
        UnknownMachine(
            f"{at}0000000-0000-4000-8000-000000000000", 1, ON_HOST, UnknownMachineKind.QUARANTINED, NO_RECORD
        )
        for at in (1, 2)
    ]
    with capture_logs() as logged:
        for seen in (machines[:1], machines[:1], machines, machines):
            guard._log("s", seen)
    shown = [one["instance"] for one in logged if one["event"] == "machine.unknown"]
    assert shown == [one.uuid for one in machines]

"""What reports show of fenced hosts: the machines that are left there, and when a fence ends."""

from __future__ import annotations

from typing import Any, cast

import pytest
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.cell import CellDelete, Destroy, HostReport, HostStates, Running
from bus.contracts.operations import FenceState
from bus.persistence.outbox import OutboxMessage
from cell_conductor.config import ConductorConfig
from cell_conductor.hosts.fence_cache import FenceCache
from cell_conductor.hosts.stale_machines import StaleMachines
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.evacuation_proof import STILL_RUNNING, evacuation_blocker
from cell_conductor.state.fence import Fence, RunningAfterFence
from cell_conductor.state.instance import MACHINE_EXISTS, Instance, InstanceSummary, State, unreadable_summary
from cell_conductor.state.lease import Lease
from cell_conductor.state.ownership_proof import rescan_id
from cell_conductor.store.keyed_tables import PROTECT
from cell_conductor.store.memory import MemoryInstances
from tests.unit.cell_conductor.records import ON_1, ON_2, record
from tests.unit.cell_conductor.scenario import PATIENCE, SPEC, UUID, host
from tests.unit.cell_conductor.world import (
    Quiet,
    Relay,
    engine_of,
    hosts_of,
    insert,
    listing,
    opened,
    opened_store,
)

HOST, INSTANCE = "10000000-0000-4000-8000-000000000000", "a0000000-0000-4000-8000-000000000000"
NOTHING = HostStates(
    service="s", cell="c1", epoch=1, sequence=1, hosts=(HostReport(uuid=HOST, name="h1", running=()),), complete=True
)
MOVED = InstanceSummary(INSTANCE, State.ACTIVE, ON_2.host_uuid, "s", 3, 1.0)  # attempt 2 is over, wherever it was


def stale_of(store: MemoryInstances) -> tuple[FenceCache, StaleMachines]:
    clock = SystemClock()
    fences = FenceCache(store, clock)
    return fences, StaleMachines(store, fences, clock, ConductorConfig())


async def gave_up(*services: str, at: float = 1_000.0) -> tuple[MemoryInstances, FenceCache, StaleMachines]:
    """A fence on record, and machines of these services that were given up on its host."""
    store = await opened_store()
    await store.fences.put(Fence(host_uuid=HOST, host="h1", version=1))
    async with store.transaction() as transaction:
        assert await transaction.rely_on([HOST], {HOST: services} if services else {}, at)
    fences, stale = stale_of(store)
    await fences.load()
    return store, fences, stale


def lists(*running: Running, service: str = "s", rescans: tuple[str, ...] = ()) -> HostStates:
    hosts = (HostReport(uuid=HOST, name="h1", running=running),)
    return replace(NOTHING, service=service, hosts=hosts, rescans=rescans)


async def on_record(store: MemoryInstances) -> int:
    return sum(one.stale_machines for one in await store.fences.fences())


async def test_a_fence_that_is_lifted_while_a_report_is_looked_at_fails_no_report() -> None:
    """The same host is listed twice: with the first listing another conductor has lifted its fence."""
    store, fences, stale = await gave_up("s")

    record_empty = store.fences.record_empty

    async def lifted_meanwhile(*given: Any) -> None:
        await record_empty(*given)
        await store.fences.put(Fence(host_uuid=HOST, host="h1", version=2, state=FenceState.UNFENCING))
        await store.fences.unfence(HOST, 2, 9.0)
        fences.invalidate()

    store.fences.record_empty = lifted_meanwhile  # type: ignore[method-assign]
    report = lists(rescans=(fences.fences[HOST].rescan_for("s"),))
    assert await stale.compare(replace(report, hosts=report.hosts * 2), [], "d") == [] and not await on_record(store)


async def test_a_scan_from_before_the_last_machine_was_given_up_lifts_no_fence() -> None:
    """It listed that machine as one that its instance wants; its conductor has not read the fence since."""
    store, fences, stale = await gave_up("s")
    scan = lists(rescans=(fences.fences[HOST].rescan_for("s"),))
    async with store.transaction() as transaction:
        assert await transaction.rely_on([HOST], {HOST: ["s"]}, 1_001.0)
    await stale.compare(scan, [], "d")
    assert await on_record(store) == 2
    await fences.load()
    assert await stale.compare(scan, [], "d") == [(HOST, fences.fences[HOST].rescan_for("s"))]
    await stale.compare(lists(rescans=(fences.fences[HOST].rescan_for("s"),)), [], "d")
    assert await on_record(store) == 0


async def test_losses_end_by_a_scan_from_after_them_whatever_its_hosts_clock_reads() -> None:
    """Seed 93608: by the host's clock no report was later than the loss, so its fence was not lifted for minutes."""
    store, fences, stale = await gave_up("s")
    rescan = fences.fences[HOST].rescan_for("s")
    assert await stale.compare(NOTHING, [], "d") == [(HOST, rescan)] and await on_record(store)
    assert await stale.compare(lists(rescans=(rescan,)), [], "d") == [] and not await on_record(store)


async def test_losses_end_by_the_scan_of_their_service_or_of_one_that_the_host_has_passed_to() -> None:
    """A second service with a host of the same uuid ended them by its own scan, and the fence was ended."""
    store, fences, stale = await gave_up("s")
    rescan, passed = fences.fences[HOST].rescan_for("s"), [(HOST, "s")]
    first, scanned = lists(service="another"), lists(service="another", rescans=(rescan,))
    assert await stale.compare(first, [], "d") == []
    assert await stale.compare(scanned, [], "d") == []
    assert await on_record(store)
    assert await stale.compare(first, [], "d", lambda *place: place in passed) == [(HOST, rescan)]
    await stale.compare(scanned, [], "d", lambda *place: place in passed)
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
        pytest.param(
            replace(LISTED, attempt=4), replace(MOVED, state=State.FAILED, code=MACHINE_EXISTS), False, id="met"
        ),
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
    store, fences, stale = await gave_up("s")
    report = lists(listed, rescans=(fences.fences[HOST].rescan_for("s"), fences.fences[HOST].rescan))
    assert await stale.compare(report, [summary] if summary is not None else [], "d") == []
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
    fences, stale = stale_of(store)
    await fences.load()

    def scan(service: str, *running: Running) -> HostStates:
        host = HostReport(uuid=HOST, name="h1", running=running)
        return HostStates(service=service, cell="c1", epoch=1, sequence=1, hosts=(host,), rescans=(fence.rescan,))

    await stale.compare(scan("s", Running(instance_uuid=INSTANCE, attempt=1, database_id="d")), [], "d")
    await stale.compare(scan("another"), [], "d")
    found = {"s": RunningAfterFence(1, {INSTANCE: 1})}
    assert fences.fences[HOST].running == found
    passed = [(HOST, "s")]
    await stale.compare(scan("another"), [], "d", lambda *place: place in passed)
    assert not fences.fences[HOST].running, "the first one has given the host up"


async def test_what_a_service_found_running_that_is_gone_is_looked_at_by_the_next_one() -> None:
    """Nobody demanded that scan: evacuations from there were refused until they were forced."""
    store = await opened_store()
    fence = Fence(host_uuid=HOST, host="h1", version=1)
    await store.fences.put(fence)
    fences, stale = stale_of(store)
    await fences.load()
    runs = HostReport(uuid=HOST, name="h1", running=(Running(instance_uuid=INSTANCE, attempt=1, database_id="d"),))
    first = HostStates(service="s", cell="c1", epoch=1, sequence=1, hosts=(runs,), rescans=(fence.rescan,))
    await stale.compare(first, [], "d")
    nothing = replace(first, service="another", hosts=(replace(runs, running=()),), rescans=())
    passed = [(HOST, "s")]
    assert await stale.compare(nothing, [], "d") == []
    assert await stale.compare(nothing, [], "d", lambda *place: place in passed) == [(HOST, fence.rescan)]


@pytest.mark.parametrize(("ahead_s", "is_scanned"), [(0.0, False), (86_400.0, True)])
async def test_a_machine_that_has_just_been_given_up_causes_no_scan(ahead_s: float, *, is_scanned: bool) -> None:
    """The order that its host has to carry out first may be behind others. One from the future is no young one: its
    conductor's clock was ahead, and its fence was not lifted for a day.
    """
    _, fences, stale = await gave_up("s", at=SystemClock().time() + ahead_s)
    rescans = [(HOST, fences.fences[HOST].rescan_for("s"))] if is_scanned else []
    assert await stale.compare(NOTHING, [], "d") == rescans


async def test_what_a_host_ran_after_its_fence_is_known_also_after_it_was_fenced_again() -> None:
    """A scan soon after a fence may show what ran before it, because clocks differ: it shows nothing."""
    store = await opened_store()
    fences, stale = stale_of(store)
    runs = Running(instance_uuid=INSTANCE, attempt=1, database_id="d")

    async def fenced(version: int, at: float) -> None:
        await store.fences.put(Fence(host_uuid=HOST, host="h1", version=version, at=at))
        await fences.load()

    async def scanned(*running: Running, later_than: int = 0) -> list[tuple[str, str]]:
        hosts = (HostReport(uuid=HOST, name="h1", running=running),)
        rescans = (Fence(host_uuid=HOST, host="h1", version=later_than).rescan,)
        report = HostStates(service="s", cell="c1", epoch=1, sequence=1, hosts=hosts, complete=True, rescans=rescans)
        return await stale.compare(report, [], "d")

    term = await store.leases.hold_leadership("p", 60.0, None)
    assert term is not None and await store.leases.record(term, [Lease(service="s", epoch=1)])
    await fenced(1, 1_000.0)
    assert await scanned(runs) == [(HOST, fences.fences[HOST].rescan)]
    assert not fences.fences[HOST].running
    assert await scanned(runs, later_than=1) == []
    assert fences.fences[HOST].running == {"s": RunningAfterFence(1, {INSTANCE: 1})}
    await fenced(2, 1_200.0)
    assert await scanned(later_than=1) == [(HOST, fences.fences[HOST].rescan)]
    assert fences.fences[HOST].running == {"s": RunningAfterFence(1, {INSTANCE: 1})}
    assert await scanned(later_than=2) == []
    assert not fences.fences[HOST].running


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


async def test_a_conductor_that_has_just_started_evacuates_nothing_that_its_host_has_reported_to_run() -> None:
    """What a fenced host was found to run is in the memory of the conductor that was notified of it."""
    store = await opened_store()
    fence = Fence(host_uuid=host(2), host="host-2", version=1, at=1.0)
    await store.fences.put(fence)
    running = Running(instance_uuid=UUID, attempt=2, database_id=store.database_id)
    report = listing("s1", 2, runs=(running,), rescans=(fence.rescan,))
    active = record(State.ACTIVE, queried=False)
    refused: list[str] = []
    for is_told in (True, False):  # the second one after a restart
        fences, stale = stale_of(store)
        await fences.load()
        if is_told:
            await stale.compare(report, [], store.database_id)
        context = replace(PATIENCE, fences=fences.fences)
        unproved = evacuation_blocker(active, context, fenced=False, force=False)
        refused.append("" if unproved is None else unproved.code)
    assert refused == [STILL_RUNNING, STILL_RUNNING]

"""Reports of hosts: what they disagree about with the record, late ones, and hosts that two services report."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import cast
from unittest.mock import patch

import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received
from bus.contracts.base import Meta
from bus.contracts.cell import HostReport, HostStates, InstanceSpec, RescanHosts, Running, Selection
from bus.faults import DatabaseUnavailable
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import Sender
from cell_conductor.host_handlers import HostHandlers
from cell_conductor.pending_lookups import PendingLookups
from cell_conductor.reports.listings import NewestReports
from cell_conductor.reports.report_diff import Differences, InstanceSummary, differences
from cell_conductor.reports.report_guard import ReportGuard
from cell_conductor.state.database_marks import Stated
from cell_conductor.state.events import Event, MachineMissing
from cell_conductor.state.instance import Instance, Phase, State
from cell_conductor.state.ownership_proof import rescan_id
from cell_conductor.state.unknown_machine import NO_RECORD, UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed_tables import PROTECT, DecidedMachine
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from tests.unit.cell_conductor.scenario import SPEC, UUID, host, phase_of, selection
from tests.unit.cell_conductor.world import Quiet, Relay, Silent, engine_of, hosts_of, insert, listing, opened_store

# --- The disagreements of a host's report and the record.


HOST = "10000000-0000-4000-8000-000000000001"
A = "00000000-0000-4000-8000-00000000000a"
SINCE = 100.0
DATABASE_ID = "dddddddd-0000-4000-8000-000000000001"
DELETING: Phase = (State.DESTROYING, State.DELETED)


def report(
    *running: tuple[str, int],
    named: bool = True,
    sequence: int = 1,
    epoch: int = 1,
    database_id: str | None = DATABASE_ID,
    built: bool = True,
    destroying: bool = False,
) -> HostStates:
    runs = tuple(
        Running(instance_uuid=uuid, attempt=attempt, database_id=database_id, built=built, destroying=destroying)
        for uuid, attempt in running
    )
    host = HostReport(uuid=HOST, name="host-1", running=runs if named else None)
    return HostStates(service="s", cell="c", epoch=epoch, sequence=sequence, hosts=(host,))


def compared(made: HostStates, *summaries: InstanceSummary, now: float = 201.0) -> Differences:
    return differences(made, summaries, database_id=DATABASE_ID, now=now, grace_s=30.0)


def found(made: HostStates, *summaries: InstanceSummary) -> list[Event]:
    """By a scan from after these records became what they are."""
    differs = compared(replace(made, rescans=tuple(rescan_id(one) for one in summaries)), *summaries)
    return [event for _, event in (*differs.events, *differs.destructive)]


def demanded(differs: Differences) -> tuple[tuple[str, str], ...]:
    """(host, rescan) of all that a later scan has to show."""
    both = (*differs.rescans.items(), *differs.destructive_rescans.items())
    return tuple((host, rescan) for (host, _), rescan in both)


def summary(at: State | Phase, host: str = HOST, attempt: int = 1, service: str = "s") -> InstanceSummary:
    state, next_state = phase_of(at)
    return InstanceSummary(A, state, host, service, attempt, SINCE, next_state=next_state)


def test_what_another_service_misses_is_looked_at_again_before_it_is_lost() -> None:
    """Only a scan that began after the record was what it is proves a loss, and no clock shows that."""
    for state in (State.ACTIVE, State.RESIZED, DELETING):
        record = summary(state, service="former")
        differs = compared(report(), record)
        assert (differs.events, differs.destructive, demanded(differs)) == ((), (), ((HOST, rescan_id(record)),))
        looked = compared(replace(report(), rescans=(rescan_id(record),)), record)
        (event,) = [event for _, event in (*looked.events, *looked.destructive)]
        assert isinstance(event, MachineMissing) and (event.rescans, demanded(looked)) == ((rescan_id(record),), ())


# --- A host's report that meets an outage of the database.


async def test_a_hosts_report_that_met_an_outage_is_compared_when_it_comes_again() -> None:
    """It was noted as received before it was compared: the same report, handed in again, was outdated."""
    looks: list[int] = []

    async def compare(self: HostHandlers, report: HostStates) -> None:
        looks.append(report.sequence)
        if len(looks) == 1:
            raise DatabaseUnavailable("it restarts")

    with patch.object(HostHandlers, "_compare", compare), patch.object(HostHandlers, "__init__", lambda self: None):
        handlers = HostHandlers()  # type: ignore[call-arg]
        handlers._store = await opened_store()
        handlers._newest, handlers._clock, handlers._stated = NewestReports(), SystemClock(), Stated
        page = HostStates(service="s", cell="c", epoch=1, sequence=5, hosts=(), seen_at=1.0)
        batch = [Received(message=page, meta=Meta(id="m"), bus="c", queue="q")]
        with pytest.raises(DatabaseUnavailable):
            await handlers.hosts(batch)
        assert await handlers.hosts(batch) == [Done()]
        assert looks == [5, 5]
        assert await handlers.hosts(batch) == [Done()]
        assert looks == [5, 5], "now it is old news"


async def test_a_report_of_a_lower_epoch_sends_its_service_the_one_it_has_to_outgrow() -> None:
    reported: list[tuple[str, int]] = []

    async def compare(self: HostHandlers, report: HostStates) -> None:
        pass

    with patch.object(HostHandlers, "_compare", compare), patch.object(HostHandlers, "__init__", lambda self: None):
        handlers = HostHandlers()  # type: ignore[call-arg]
        handlers._store = await opened_store()
        handlers._newest, handlers._clock, handlers._stated = NewestReports(), SystemClock(), Stated
        handlers._record_superseded = lambda service, epoch: reported.append((service, epoch))
        for epoch, sequence in ((9, 5), (9, 5), (9, 4), (3, 6)):
            page = HostStates(service="s", cell="c", epoch=epoch, sequence=sequence, seen_at=1.0)
            await handlers.hosts([Received(message=page, meta=Meta(id="m"), bus="c", queue="q")])
    assert reported == [("s", 9)], "copies of its own life are none of it"


# --- A report that was on its way while machines were moved: their sources are gone by now, and open no breaker.


SOURCE, DESTINATION = "bbbbbbbb-0000-4000-8000-000000000000", "bbbbbbbb-0000-4000-8000-000000000001"
SERVICE, CELL, EPOCH, MOVED_AT = "s", "c", 1, 1000.0
MANY = 8
CONFIG = ConductorConfig()


def moved(number: int, service: str) -> Instance:
    """Attempt 2, on the destination; attempt 1 was destroyed on the source before MOVED_AT."""
    uuid = f"aaaaaaaa-0000-4000-8000-{number:012d}"
    here = Selection(host_uuid=DESTINATION, host="h", service=service, allocations={DESTINATION: {"VCPU": 1}})
    return Instance(
        uuid=uuid,
        state=State.ACTIVE,
        spec=InstanceSpec(instance_uuid=uuid, project_id="p"),
        selections=(here,),
        attempt=2,
        since=MOVED_AT,
    )


@asynccontextmanager
async def guarded(instances: Sequence[Instance]) -> AsyncIterator[tuple[MemoryInstances, ReportGuard]]:
    """A conductor's store that has these instances, and its guard."""
    clock = SystemClock()
    store = await opened_store(clock)
    await insert(store, *instances)
    bus = cast(Bus, Silent())
    relay = cast(Sender, None)
    engine = engine_of(store=store, bus=bus, relay=relay, clock=clock, config=CONFIG, cell=CELL)
    yield store, ReportGuard(store, bus, clock, CONFIG, effective=engine.effective, adopt=PendingLookups().add_adoption)
    await store.close()


def report_of_source(instances: Sequence[Instance], database_id: str, *, is_newer: bool = True) -> HostStates:
    """Attempt 1 of each still runs on the source, by this report. is_newer: of a scan that began after their records
    became what they are.
    """
    machines = tuple(Running(instance_uuid=one.uuid, attempt=1, database_id=database_id) for one in instances)
    return HostStates(
        service=SERVICE,
        cell=CELL,
        epoch=EPOCH,
        sequence=9,
        hosts=(HostReport(uuid=SOURCE, name="h", running=machines),),
        rescans=tuple(rescan_id(one) for one in instances) if is_newer else (),
    )


@pytest.mark.parametrize("is_newer", [False, True])
@pytest.mark.parametrize("destination", [SERVICE, "other"])
async def test_sources_that_are_gone_since_the_report_are_not_counted_as_over(destination: str, is_newer: bool) -> None:
    """A chaos run with moves opened a breaker: a report of before an outage listed eight sources of moves."""
    instances = [moved(number, destination) for number in range(MANY)]
    async with guarded(instances) as (store, guard):
        report = report_of_source(instances, store.database_id, is_newer=is_newer)
        summaries = await store.summaries([SOURCE], [one.uuid for one in instances])
        found = differences(report, summaries, now=MOVED_AT + 60, grace_s=30.0, database_id=store.database_id)
        assert len(found.destructive) == (MANY if is_newer else 0)
        assert len(found.destructive_rescans) == (0 if is_newer else MANY), "each is looked for again"
        assert not await guard.assess(report, found)
        assert [breaker.over for breaker in await store.safety.breakers()] == ([MANY] if is_newer else [])


async def test_a_service_below_the_epoch_under_which_its_machine_was_built_is_believed() -> None:
    """A second service of its name had built the machine and was gone: it stayed active for ever (seed 1795360595)."""
    instance = moved(0, SERVICE)
    async with guarded([instance]) as (store, guard):
        empty = HostReport(uuid=DESTINATION, name="h", running=())
        report = replace(report_of_source([], ""), epoch=0, hosts=(empty,), rescans=(rescan_id(instance),))
        summaries = await store.summaries([DESTINATION], [])
        found = differences(report, summaries, now=MOVED_AT + 99, grace_s=30.0, database_id=store.database_id)
        assert [uuid for uuid, _ in await guard.assess(report, found)] == [instance.uuid]


async def test_a_machine_that_a_backup_has_on_record_again_is_taken_off_with_its_next_report() -> None:
    """A simulated cell was restored to while a machine of a move was in quarantine: it stayed listed for ever."""
    instances = [moved(0, SERVICE)]
    (one,) = instances
    strange = UnknownMachine(one.uuid, 1, SOURCE, UnknownMachineKind.QUARANTINED, NO_RECORD)
    async with guarded(instances) as (store, guard):
        report = report_of_source(instances, store.database_id)
        await guard.assess(report, Differences(unknown_machines=(strange,)))
        assert await store.safety.records()
        await guard.delete_resolved(report, ())
        await store.safety.record(SERVICE, [strange], MOVED_AT)  # the backup has it
        store._table.place += 1
        async with store.transaction() as transaction:
            assert await transaction.recognise() is not None
        await guard.delete_resolved(report, ())
        assert not await store.safety.records()


async def test_a_scan_that_shows_a_kept_machine_being_destroyed_is_not_demanded_again() -> None:
    """It was ordered destroyed, which its node's protection prevents, and then an operator kept it: each report was
    answered with a demand, and each demand with a report. That it is missing has to be shown by a later scan.
    """
    clock, bus = SystemClock(), Quiet()
    store = await opened_store(clock)
    await store.safety.record("s1", [UnknownMachine(UUID, 3, host(3), UnknownMachineKind.QUARANTINED, NO_RECORD)], 1.0)
    await store.safety.decide([DecidedMachine(UUID)], PROTECT, "ann", 2.0)
    (record,) = await store.safety.records()
    config, common = ConductorConfig(), {"bus": bus, "clock": clock}
    engine = engine_of(store=store, relay=Relay(), config=config, cell="c1", **common)  # type: ignore[arg-type]
    hosts = hosts_of(engine, store, clock, config, bus)  # type: ignore[arg-type]
    there = Running(instance_uuid=UUID, attempt=3, database_id=store.database_id, destroying=True)

    async def report(sequence: int, *runs: Running, rescans: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        page = listing("s1", 3, runs=runs, rescans=rescans, sequence=sequence)
        await hosts.hosts([Received(page, Meta(id="m"), "c1", "conductor.hosts")])
        return [one.rescans for one in bus.published if isinstance(one, RescanHosts)]

    assert await report(1, there) == []
    assert await report(2, there, rescans=(record.rescan,)) == []
    assert await report(3) == [(record.rescan,)]
    assert [one.decision for one in await store.safety.records()] == [PROTECT]
    assert await report(4, rescans=(record.rescan,)) == [(record.rescan,)]
    assert not await store.safety.records()


# --- Two compute services of different names report hosts of one uuid: it is noticed, and costs no instance.


BOTH = ("s1", "s2")


@pytest.mark.parametrize(
    ("up", "gone"),
    [(BOTH, ()), (("s2",), ()), (("s2",), ("s1",))],
    ids=["both are up", "the first one is silent", "the first one is gone for good"],
)
async def test_an_active_instance_is_not_lost_by_the_report_of_a_second_service(
    up: Collection[str], gone: Collection[str]
) -> None:
    """It was lost after the rescan, and destroyed at its own service. By seed 7109 as its service was paused: its hosts
    pass to another one after ten minutes, and its machines were lost after seconds.
    """
    table, relay, bus, clock = MemoryInstanceTable(SystemClock()), Relay(), Quiet(), SystemClock()
    store = MemoryInstances(table.session())
    await store.open()
    config, common = ConductorConfig(), {"bus": bus, "clock": clock}
    engine = engine_of(store=store, relay=relay, config=config, cell="c1", **common)  # type: ignore[arg-type]
    hosts = hosts_of(
        engine,
        store,
        clock,
        config,
        bus,  # type: ignore[arg-type]
        superseded=lambda _service, _epoch: None,
        up=lambda: up,
        gone=gone,
    )
    record = Instance(
        uuid=UUID, state=State.ACTIVE, spec=SPEC, selections=(selection(1),), attempt=1, since=clock.time() - 3600.0
    )
    await insert(store, record)

    async def report(page: HostStates) -> None:
        page = replace(page, seen_at=clock.time())
        await hosts.hosts([Received(page, Meta(id="m", sent_at=clock.time()), "c1", "conductor.hosts")])

    runs = (Running(instance_uuid=UUID, attempt=1, database_id=store.database_id),)
    await report(listing("s1", 1, runs=runs))
    with capture_logs() as logs:
        await report(listing("s2", 1, 2))
        await report(listing("s2", 1, 2, sequence=2))
    logged = [(line["service"], line["other"], line["host"]) for line in logs if line["event"] == "host.reported_twice"]
    contested = REGISTRY.get_sample_value("berth_conductor_hosts_reported_twice", {"service": "s2"})
    rescans = [one for one in bus.published if isinstance(one, RescanHosts)]
    assert bool(rescans) is bool(gone)
    if up == BOTH:
        assert logged == [("s2", "s1", host(1))] and contested == 1
    else:
        assert not logged
    await report(listing("s2", 1, 2, sequence=3, rescans=(rescan_id(record),)))
    async with store.transaction() as transaction:
        now = (await transaction.lock([UUID]))[UUID]
    assert (now.state is State.ACTIVE) is not bool(gone)
    await report(listing("s2", 2, sequence=4))
    if up == BOTH:
        assert REGISTRY.get_sample_value("berth_conductor_hosts_reported_twice", {"service": "s2"}) == 0

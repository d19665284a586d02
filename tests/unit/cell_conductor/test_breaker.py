"""What of a host's report is done without an operator: the breaker, and what is kept out of the inventory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from msgspec.structs import replace

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.build import AttemptRecord
from bus.contracts.cell import (
    MAX_RESCANS,
    MAX_RESERVED_AT_ONCE,
    HostReport,
    HostStates,
    InstanceSpec,
    RescanHosts,
    ReserveMachines,
    Running,
    Selection,
)
from bus.persistence.guarded_statement import Conflict
from bus.transport import BusUnavailable
from cell_conductor.config import ConductorConfig
from cell_conductor.engine import Sender
from cell_conductor.pending_lookups import PendingLookups
from cell_conductor.reports import listings
from cell_conductor.reports.listings import HostListings
from cell_conductor.reports.report_diff import Differences, differences
from cell_conductor.reports.report_guard import ReportGuard
from cell_conductor.reports.reserved_machines import pages, reserved_on, wrong_reservations
from cell_conductor.state import breaker as breakers
from cell_conductor.state.breaker import Breaker, CountedAs, DestructiveDifference, RecentDifferences, assess
from cell_conductor.state.events import Event, MachineMissing, MachineRunning
from cell_conductor.state.instance import Instance, State
from cell_conductor.state.ownership_proof import rescan_id
from cell_conductor.state.unknown_machine import NO_RECORD, UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed import MAX_TRIES, RowsContended
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from tests.unit.cell_conductor.scenario import UUID, host
from tests.unit.cell_conductor.test_report import (
    CONFIG,
    MANY,
    MOVED_AT,
    SERVICE,
    SOURCE,
    guarded,
    moved,
    report_of_source,
)
from tests.unit.cell_conductor.world import Relay, Silent, engine_of, hosts_of, insert, listing, opened_store

# --- The breaker: how much of one report may be done without an operator's decision.


HOST = "10000000-0000-4000-8000-000000000001"


def lost(*numbers: int) -> list[DestructiveDifference]:
    return [DestructiveDifference(f"i{n}", MachineMissing(at=1.0, host_uuid=HOST, service="s1")) for n in numbers]


def over(*numbers: int) -> list[DestructiveDifference]:
    return [
        DestructiveDifference(f"i{n}", MachineRunning(at=1.0, attempt=1, host_uuid=HOST, service="s")) for n in numbers
    ]


def unknown(*numbers: int) -> list[UnknownMachine]:
    return [UnknownMachine(f"i{n}", 1, HOST, UnknownMachineKind.QUARANTINED, "no record") for n in numbers]


# --- A busy cell's records are ahead of its hosts' reports: that is no loss, and opens no breaker.


BUSY_HOST = "bbbbbbbb-0000-4000-8000-000000000000"
BUSY_SERVICE, CELL, EPOCH = "s", "c", 1
BUSY_MANY = 10


def active(number: int) -> Instance:
    uuid = f"aaaaaaaa-0000-4000-8000-{number:012d}"
    here = Selection(host_uuid=BUSY_HOST, host="h", service=BUSY_SERVICE, allocations={BUSY_HOST: {"VCPU": 1}})
    return Instance(
        uuid=uuid,
        state=State.ACTIVE,
        spec=InstanceSpec(instance_uuid=uuid, project_id="p"),
        selections=(here,),
        attempt=1,
        since=50.0,
    )


async def busy_guarded(instances: list[Instance]) -> tuple[MemoryInstances, ReportGuard]:
    """A conductor's guard, and its store with these records."""
    clock, config = SystemClock(), ConductorConfig()
    store = await opened_store(clock)
    await insert(store, *instances)
    bus = cast(Bus, Silent())
    engine = engine_of(store=store, bus=bus, relay=cast(Sender, None), clock=clock, config=config, cell=CELL)
    return store, ReportGuard(
        store, bus, clock, config, effective=engine.effective, adopt=PendingLookups().add_adoption
    )


@pytest.mark.parametrize("is_newer", [False, True])
async def test_machines_that_came_up_after_the_scan_are_not_counted_as_lost(is_newer: bool) -> None:
    """A thousand boots on three hosts opened the breaker: the report was from before thirteen of them."""
    instances = [active(number) for number in range(BUSY_MANY)]
    store, guard = await busy_guarded(instances)
    report = HostStates(
        service=BUSY_SERVICE,
        cell=CELL,
        epoch=EPOCH,
        sequence=9,
        hosts=(HostReport(uuid=BUSY_HOST, name="h", running=()),),
        rescans=tuple(rescan_id(one) for one in instances) if is_newer else (),
    )
    summaries = await store.summaries([BUSY_HOST], [])
    found = differences(report, summaries, now=101.0, grace_s=30.0, database_id=store.database_id)
    assert len(found.destructive) == (BUSY_MANY if is_newer else 0)
    assert len(found.destructive_rescans) == (0 if is_newer else BUSY_MANY), "each is looked for again"

    assert not await guard.assess(report, found)

    breakers = await store.safety.breakers()
    assert [breaker.lost for breaker in breakers] == ([BUSY_MANY] if is_newer else [])


async def test_machines_whose_record_has_changed_since_the_comparison_are_not_counted_as_lost() -> None:
    """Compared without locks they were missing; one that was moved away since is on record elsewhere."""
    instances = [active(number) for number in range(BUSY_MANY)]
    store, guard = await busy_guarded([replace(one, since=one.since + 1.0) for one in instances])
    rescans = tuple(rescan_id(one) for one in instances)
    missing = MachineMissing(at=101.0, host_uuid=BUSY_HOST, service=BUSY_SERVICE, rescans=rescans)
    report = HostStates(service=BUSY_SERVICE, cell=CELL, epoch=EPOCH, sequence=9, rescans=rescans)
    assert not await guard.assess(report, Differences(destructive=tuple((one.uuid, missing) for one in instances)))
    assert not await store.safety.breakers()


async def test_machines_that_vanish_in_one_report_each_open_the_breaker() -> None:
    """A service reports a host as soon as it has changed, so a mass loss comes in many reports."""
    limit = ConductorConfig().breaker_limit
    store, guard = await busy_guarded([active(number) for number in range(BUSY_MANY)])
    taken: list[tuple[str, Event]] = []
    for number in range(BUSY_MANY):
        rescans = (rescan_id(active(number)),)
        missing = MachineMissing(at=101.0, host_uuid=BUSY_HOST, service=BUSY_SERVICE, rescans=rescans)
        report = HostStates(
            service=BUSY_SERVICE,
            cell=CELL,
            epoch=EPOCH,
            sequence=9 + number,
            hosts=(HostReport(uuid=BUSY_HOST, name="h", running=()),),
            rescans=rescans,
        )
        found = Differences(destructive=((active(number).uuid, missing),))
        taken += await guard.assess(report, found)
    assert len(taken) == limit
    assert [breaker.lost for breaker in await store.safety.breakers()] == [BUSY_MANY]


class Kept(Silent):
    """A bus that keeps what is published."""

    def __init__(self) -> None:
        self.published: list[object] = []

    async def publish(self, message: object, **_: object) -> None:
        self.published.append(message)


async def test_what_an_open_breaker_holds_takes_no_place_in_a_request_for_rescans() -> None:
    """More losses than a request names were held: no delete of a lost machine on that page ended any more, and a scan
    was requested in answer to each scan.
    """
    clock, config, bus = SystemClock(), ConductorConfig(), Kept()
    store = await opened_store(clock)
    held = [active(number) for number in range(MAX_RESCANS + 1)]
    last = active(MAX_RESCANS + 1)
    deleting = replace(last, state=State.DESTROYING, next_state=State.DELETED)
    await insert(store, *held, deleting)
    await store.safety.trip(Breaker(service=BUSY_SERVICE, tripped_at=60.0, lost=len(held)))
    engine = engine_of(store=store, bus=cast(Bus, bus), relay=cast(Sender, None), clock=clock, config=config, cell=CELL)
    hosts = hosts_of(engine, store, clock, config, cast(Bus, bus), superseded=lambda _service, _epoch: None)
    page = HostReport(uuid=BUSY_HOST, name="h", running=())
    report = HostStates(service=BUSY_SERVICE, cell=CELL, epoch=EPOCH, sequence=1, hosts=(page,))
    await hosts.hosts([Received(report, Meta(id="m"), CELL, "conductor.hosts")])
    requested = [one.rescans for one in bus.published if isinstance(one, RescanHosts)]
    assert requested == [(rescan_id(deleting),)]
    await store.safety.reset(BUSY_SERVICE, "ann", clock.time())
    await hosts.hosts([Received(replace(report, sequence=2), Meta(id="n"), CELL, "conductor.hosts")])
    *_, again = [one.rescans for one in bus.published if isinstance(one, RescanHosts)]
    assert len(again) == MAX_RESCANS and again[0] == rescan_id(deleting)


Report = Callable[..., Awaitable[list[int]]]  # (sequence, machines, rescans): the machines named by open breakers


async def reporting(machines: int) -> tuple[MemoryInstances, tuple[Running, ...], Report]:
    """A cell with instances, their machines, and the report of all hosts of their service."""
    clock, config, bus = SystemClock(), ConductorConfig(), cast(Bus, Silent())
    store = await opened_store(clock)
    instances = [active(number) for number in range(machines)]
    await insert(store, *instances)
    engine = engine_of(store=store, bus=bus, relay=cast(Sender, Relay()), clock=clock, config=config, cell=CELL)
    hosts = hosts_of(engine, store, clock, config, bus)
    there = tuple(Running(instance_uuid=one.uuid, attempt=1, database_id=store.database_id) for one in instances)
    rescans = tuple(rescan_id(one) for one in instances)

    async def report(sequence: int, runs: tuple[Running, ...], demanded: tuple[str, ...] = rescans) -> list[int]:
        page = HostReport(uuid=BUSY_HOST, name="h", running=runs)
        made = listing(BUSY_SERVICE, sequence=sequence, hosts=(page,), rescans=demanded, first_sequence=sequence)
        await hosts.hosts([Received(made, Meta(id=str(sequence)), CELL, "conductor.hosts")])
        return [len(one.machines) for one in await store.safety.breakers() if one.is_open]

    return store, there, report


async def test_what_a_false_alarm_has_named_is_counted_when_it_is_missing_again() -> None:
    """Ironic was wrong for an hour, nothing was lost, and the breaker was reset. Wrong once more, it lost them all."""
    store, there, report = await reporting(BUSY_MANY)
    assert await report(1, ()) == [BUSY_MANY]
    assert await store.safety.reset(BUSY_SERVICE, "ann", 1.0)
    assert await report(2, (), ()) == [], "they are scanned again, and the reset holds until then"
    assert [len(one.machines) for one in await store.safety.breakers()] == [BUSY_MANY]
    assert await report(3, there) == []
    assert await report(4, ()) == [BUSY_MANY]
    assert {one.state for one in store._table.instances.values()} == {State.ACTIVE}


async def test_a_reset_allows_what_was_lost_while_the_breaker_was_open() -> None:
    """A rack failed host by host: each reset allowed the first hosts' machines, and the next report tripped it anew."""
    store, there, report = await reporting(2 * BUSY_MANY)
    assert await report(1, there[BUSY_MANY:]) == [BUSY_MANY]
    (seen,) = await store.safety.breakers()
    assert await report(2, there[-1:]) == [2 * BUSY_MANY - 1]
    assert not await store.safety.reset(BUSY_SERVICE, "ann", 1.0, tripped_at=seen.tripped_at), "more are lost by now"
    (seen,) = await store.safety.breakers()
    assert seen.lost == 2 * BUSY_MANY - 1
    assert await report(3, there[-1:]) == [2 * BUSY_MANY - 1]
    assert await store.safety.reset(BUSY_SERVICE, "ann", 1.0, tripped_at=seen.tripped_at)
    assert await report(4, there[-1:]) == []
    assert [one.state for one in store._table.instances.values()].count(State.ACTIVE) == 1


class FailsOnce(Kept):
    """The first message that is published meets an outage."""

    async def publish(self, message: object, **_: object) -> None:
        await super().publish(message)
        if len(self.published) == 1:
            raise BusUnavailable("it restarts")


async def test_a_page_that_comes_again_after_an_outage_is_not_another_page_of_its_scan() -> None:
    """Four machines of each page were missing: eight at once open the breaker of five, and none of them is lost."""
    first, second = [active(k) for k in range(4)], [active(k) for k in range(4, 8)]
    second = [replace(one, selections=(replace(one.current, host_uuid=HOST),)) for one in second]
    clock, config, bus = SystemClock(), ConductorConfig(), cast(Bus, FailsOnce())
    store = await opened_store(clock)
    await insert(store, *first, *second, active(9))
    engine = engine_of(store=store, bus=bus, relay=cast(Sender, None), clock=clock, config=config, cell=CELL)
    hosts = hosts_of(engine, store, clock, config, bus)
    rescans = tuple(rescan_id(one) for one in (*first, *second))
    page_1, page_2 = (
        listing(
            BUSY_SERVICE,
            sequence=n,
            hosts=(HostReport(uuid=uuid, name="h", running=()),),
            complete=n == 2,
            first_sequence=1,
            pages=2,
            scan=7,
            rescans=rescans,
        )
        for n, uuid in ((1, BUSY_HOST), (2, HOST))
    )
    received = [Received(one, Meta(id=str(one.sequence)), CELL, "conductor.hosts") for one in (page_1, page_2)]
    with pytest.raises(BusUnavailable):
        await hosts.hosts(received[:1])
    await hosts.hosts(received[:1])
    await hosts.hosts(received[1:])
    assert {one.state for one in store._table.instances.values()} == {State.ACTIVE}
    assert [one.lost for one in await store.safety.breakers()] == [8]


@pytest.mark.parametrize("conflicts", [MAX_TRIES - 1, MAX_TRIES])
async def test_a_transaction_whose_rows_others_insert_first_is_tried_so_often(
    conflicts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tripped = await opened_store(SystemClock()), Breaker(service="s", tripped_at=1.0)
    left = [Conflict] * conflicts

    async def inserted_first(*_: object, **__: object) -> None:
        if left:
            raise left.pop()

    async with store.safety.keyed.transaction() as rows:
        monkeypatch.setattr(type(rows), "put", inserted_first)
    if conflicts < MAX_TRIES:
        await store.safety.trip(tripped)
    else:
        with pytest.raises(RowsContended):
            await store.safety.trip(tripped)
    assert not left


# --- A silent service lists, when it is back, what its records have ordered it to destroy: that opens no breaker.


ELSEWHERE = "other"


@pytest.mark.parametrize(
    ("outcome", "left", "is_open", "acted_on", "over"),
    [
        pytest.param("failed", (), False, MANY, 0, id="left when its service fell silent"),
        pytest.param("timed_out", (), False, MANY, 0, id="out of time"),
        pytest.param("failed", (), True, 0, 0, id="an open breaker holds them, too"),
        pytest.param("lost", (), False, 0, MANY, id="the report itself had ended it"),
        pytest.param("active", (1,), False, MANY, 0, id="it ran there, and was moved"),
        pytest.param("active", (), False, 0, MANY, id="it ran there, and no move explains that it is elsewhere"),
    ],
)
async def test_a_machine_that_its_record_ordered_destroyed_is_not_counted_as_over(
    outcome: str, left: tuple[int, ...], is_open: bool, acted_on: int, over: int
) -> None:
    """A chaos run with moves: services that had been paused came back with 7, 10 and 19 attempts that had gone on
    elsewhere meanwhile, reported them before they took the waiting orders, and three breakers opened."""
    ended = AttemptRecord(attempt=1, host="source", outcome=outcome, at=MOVED_AT)
    instances = [replace(moved(number, ELSEWHERE), history=(ended,), ended_attempts=left) for number in range(MANY)]
    async with guarded(instances) as (store, guard):
        if is_open:
            await store.safety.trip(Breaker(service=SERVICE, tripped_at=1.0))
        report = report_of_source(instances, store.database_id)
        summaries = await store.summaries([SOURCE], [one.uuid for one in instances])
        found = differences(report, summaries, now=MOVED_AT + 60, grace_s=30.0, database_id=store.database_id)
        assert len(found.destructive) == MANY > CONFIG.breaker_limit

        assert len(await guard.assess(report, found)) == acted_on

        breakers = [one for one in await store.safety.breakers() if one.tripped_at > 1.0]
        assert [breaker.over for breaker in breakers] == ([over] if over else [])


# --- Which machines of a report are to be kept out of their host's inventory.


KEPT_HOST = "10000000-0000-4000-8000-000000000001"
KEPT_OTHER = "10000000-0000-4000-8000-000000000002"
A = "00000000-0000-4000-8000-00000000000a"
B = "00000000-0000-4000-8000-00000000000b"
OURS = Running(instance_uuid=A, attempt=1, database_id="dddddddd-0000-4000-8000-000000000001")
QUARANTINED = UnknownMachine(A, 1, KEPT_HOST, UnknownMachineKind.QUARANTINED, NO_RECORD)


def report(*running: Running) -> HostStates:
    hosts = (HostReport(uuid=KEPT_HOST, name="h", running=running), HostReport(uuid=KEPT_OTHER, name="o", running=()))
    return HostStates(service="s", cell="c", epoch=1, sequence=1, hosts=hosts)


def test_what_its_record_had_chosen_there_is_what_it_takes() -> None:
    here, there = (
        Selection(host_uuid=uuid, host="h", service="s", allocations={uuid: {"VCPU": n}})
        for n, uuid in enumerate((KEPT_HOST, KEPT_OTHER), 1)
    )
    record = Instance(
        uuid=A,
        state=State.FAILED,
        spec=InstanceSpec(instance_uuid=A, project_id="p"),
        selections=(here, there),
        selection_index=1,
    )
    (named,) = reserved_on(KEPT_HOST, [OURS], {A: record}).machines
    assert named.allocations == {KEPT_HOST: {"VCPU": 1}}
    (named,) = reserved_on(KEPT_HOST, [OURS], {A: replace(record, selections=(there,))}).machines
    assert named.allocations is None


def test_item_16_the_machines_of_one_page_of_a_report_are_named_in_several_messages() -> None:
    """5,000 machines with the resources of three providers each took the service 24 ms to decode."""
    wrong = {f"{KEPT_HOST[:-4]}{n:04d}": [OURS] * 30 for n in range(100)}
    named = pages({**wrong, "full": [OURS] * (MAX_RESERVED_AT_ONCE + 1), "empty": []})
    assert [host for page in named for host in page] == [*wrong, "full", "empty"]
    assert [len(page) for page in named] == [33, 33, 33, 1, 1, 1]
    assert pages({}) == [] and pages({"empty": []}) == [["empty"]]


async def test_item_16_a_service_is_sent_them_in_several_messages_about_one_page_of_its_report() -> None:
    sent: list[ReserveMachines] = []

    class Published:
        async def publish(self, command: ReserveMachines, *, cause: str) -> None:
            sent.append(command)

    uuids = [f"{A[:-5]}{n:05d}" for n in range(1_800)]
    hosts = tuple(
        HostReport(uuid=host, name=host, running=tuple(replace(OURS, instance_uuid=one) for one in uuids[at::3]))
        for at, host in enumerate((KEPT_HOST, KEPT_OTHER, B))
    )
    found = [replace(QUARANTINED, host_uuid=hosts[at % 3].uuid, uuid=one) for at, one in enumerate(uuids)]
    store = MemoryInstances(MemoryInstanceTable(SystemClock()).session())
    nothing: Any = None
    guard = ReportGuard(store, Published(), SystemClock(), ConductorConfig(), effective=nothing, adopt=nothing)  # type: ignore[arg-type]
    await guard.reserve(HostStates(service="s", cell="c", epoch=4, sequence=7, hosts=hosts), found)
    assert [[(one.host_uuid, len(one.machines)) for one in command.hosts] for command in sent] == [
        [(KEPT_HOST, 600)],
        [(KEPT_OTHER, 600)],
        [(B, 600)],
    ]
    assert {(command.service, command.epoch, command.sequence) for command in sent} == {("s", 4, 7)}


# --- the breaker of a service, and the listings of hosts: a row for each condition that alone makes the difference


L, Q, O = CountedAs.LOST, CountedAs.QUARANTINED, CountedAs.OVER  # noqa: E741
RESET = Breaker(service="s", tripped_at=1.0, machines=tuple(f"i{n}@{HOST}" for n in (1, 2)), reset_at=2.0)
OPEN = replace(RESET, reset_at=0.0, lost=1, over=1)


def ordered(*numbers: int) -> list[DestructiveDifference]:
    return [replace(one, commanded=True) for one in lost(*numbers)]


@pytest.mark.parametrize(
    ("differences", "quarantined", "known", "recent", "limit", "counted", "tripped"),
    [
        ([], (), None, {}, 0, {}, None),
        (lost(1), (), None, {}, 1, {1: L}, None),
        (lost(1), (), None, {}, 0, {}, (1, 0, 0, [1])),
        (over(1), (2,), None, {}, 2, {1: O, 2: Q}, None),
        (over(1), (2,), None, {}, 1, {}, (0, 1, 1, [1, 2])),
        (lost(1), (), None, {9: O}, 2, {1: L}, None),
        (lost(1), (), None, {9: O}, 1, {}, (1, 0, 1, [1])),
        (lost(1), (), None, {1: O}, 1, {1: L}, None),
        ([], (), None, {7: L, 8: L}, 1, {}, None),
        (ordered(1, 2), (), None, {}, 1, {}, None),
        ([*ordered(1), *lost(2, 3)], (), None, {}, 1, {}, (2, 0, 0, [2, 3])),
        (lost(1, 2, 3), (), RESET, {}, 1, {3: L}, None),
        (lost(3), (), RESET, {1: L}, 1, {3: L}, None),
        (lost(1, 3, 4), (), RESET, {}, 1, {}, (2, 0, 0, [1, 3, 4])),
        ([], (1, 2), RESET, {}, 1, {}, (0, 2, 0, [1, 2])),
        (lost(1), (), OPEN, {}, 9, {}, None),
        (lost(1, 3), (4,), OPEN, {9: O}, 9, {}, (2, 1, 1, [1, 2, 3, 4])),
        ([*ordered(3), *lost(2)], (), OPEN, {}, 0, {}, None),
    ],
)
def test_the_findings_of_a_report_take_effect_all_or_none(
    *,
    differences: list[DestructiveDifference],
    quarantined: tuple[int, ...],
    known: Breaker | None,
    recent: dict[int, CountedAs],
    limit: int,
    counted: dict[int, CountedAs],
    tripped: tuple[int, int, int, list[int]] | None,
) -> None:
    earlier = {f"i{n}@{HOST}": kind for n, kind in recent.items()}
    decision = assess("s", differences, unknown(*quarantined), known, limit=limit, now=7.0, recent=earlier)
    assert decision.counted == {f"i{n}@{HOST}": kind for n, kind in counted.items()}
    is_blocked = tripped is not None or (known is not None and known.is_open)
    assert (decision.effective, decision.blocked) == (((), len(differences)) if is_blocked else (tuple(differences), 0))
    opened = decision.tripped
    if tripped is None:
        assert opened is None
    else:
        *counts, machines = tripped
        assert opened is not None and [opened.lost, opened.quarantined, opened.over] == counts
        assert opened.machines == tuple(f"i{n}@{HOST}" for n in machines)


@pytest.mark.parametrize(
    ("hosts", "found", "left"),
    [((), (), (1, 2)), ((HOST,), (), ()), ((HOST,), (2,), (2,)), (("other",), (1,), (1, 2))],
)
@pytest.mark.parametrize("breaker", [RESET, OPEN])
def test_a_reset_allows_what_a_scan_does_not_find_again_no_more(
    hosts: tuple[str, ...], found: tuple[int, ...], left: tuple[int, ...], breaker: Breaker
) -> None:
    after = breaker.after_scan(hosts, [f"i{n}@{HOST}" for n in found])
    assert after == replace(breaker, machines=tuple(f"i{n}@{HOST}" for n in left))


def test_machines_beyond_the_bound_are_counted_and_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakers, "MAX_NAMED", 2)
    opened = assess("s", lost(3, 1, 2), [], None, limit=1, now=7.0).tripped
    assert opened is not None and (opened.lost, opened.machines) == (3, (f"i1@{HOST}", f"i2@{HOST}"))


@pytest.mark.parametrize(("at", "counts"), [(159.9, True), (160.0, False), (160.1, False)])
def test_a_machine_counts_within_the_window(at: float, counts: bool) -> None:
    recent = RecentDifferences(window_s=60.0)
    recent.add("s", {"m": L}, 100.0)
    recent.add("t", {}, 100.0)
    assert recent.of("s", at) == ({"m": L} if counts else {})
    assert recent.of("t", 100.0) == {}


# --- Which service lists which host.


def listings_of(*reports: HostStates) -> HostListings:
    known = HostListings()
    for report in reports:
        known.record(report)
    return known


def test_a_host_that_one_service_leaves_out_stays_with_the_other() -> None:
    known = listings_of(listing("s1", 1, 2), listing("s2", 1), listing("s1", 2, sequence=2))
    assert [known.reporting_services(host(n)) for n in (1, 2)] == [("s2",), ("s1",)]


def test_a_host_that_none_lists_any_more_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "MAX_HOSTS", 1)
    known = listings_of(listing("s1", 1), listing("s1", sequence=2), listing("s2", 2, 3), listing("s3", 2))
    assert [known.reporting_services(host(n)) for n in (1, 2, 3)] == [(), ("s2", "s3"), ()]


@pytest.mark.parametrize(
    ("mine", "others", "up", "contested"),
    [
        ((0, 0), (0, 0), "s1 s2", True),
        ((0, 0), (0, 0), "s2", True),
        ((0, 0), (0, 0), "s1", False),
        ((1, 0), (0, 1), "s1 s2", False),
        ((0, 1), (1, 0), "s1 s2", False),
        ((0, 0), (1, 1), "s1 s2", True),
        ((1, 1), (0, 0), "s1 s2", True),
    ],
)
def test_a_host_that_two_services_list(
    mine: tuple[int, int], others: tuple[int, int], up: str, contested: bool
) -> None:
    own = listing("s1", 1, 2, ring_term=mine[0], ring_number=mine[1])
    other = listing("s2", 1, ring_term=others[0], ring_number=others[1])
    assert listings_of(own, other).conflicts(own, up.split()) == ({host(1): "s2"} if contested else {})
    assert listings_of(own).conflicts(own, up.split()) == {}


# --- What is kept out of the inventory.


RESERVED = Running(instance_uuid=UUID, attempt=1, reserved=True)


@pytest.mark.parametrize(
    ("running", "kind", "wanted"),
    [
        (None, None, None),
        ((), None, None),
        ((RESERVED,), None, []),
        ((replace(RESERVED, reserved=False),), UnknownMachineKind.QUARANTINED, [UUID]),
        ((replace(RESERVED, reserved=False, destroying=True),), UnknownMachineKind.FOREIGN, None),
        ((replace(RESERVED, destroying=True),), None, None),
        ((RESERVED,), UnknownMachineKind.FOREIGN, None),
    ],
)
def test_the_machines_of_a_host_that_are_to_be_reserved(
    running: tuple[Running, ...] | None, kind: UnknownMachineKind | None, wanted: list[str] | None
) -> None:
    reports = (HostReport(uuid=HOST, name="h", running=running),)
    made = HostStates(service="s", cell="c", epoch=1, sequence=1, hosts=reports)
    unknown = [] if kind is None else [UnknownMachine(UUID, 1, HOST, kind, NO_RECORD)]
    found = {at: [one.instance_uuid for one in machines] for at, machines in wrong_reservations(made, unknown).items()}
    assert found == ({} if wanted is None else {HOST: wanted})

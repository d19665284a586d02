"""What of a host's report is done without an operator's word: the breaker, and what is kept out of the inventory."""

from __future__ import annotations

from typing import cast

import msgspec
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
    MAX_RESERVED_MACHINES,
    ComputeHosts,
    HostReport,
    InstanceSpec,
    RescanHosts,
    ReserveMachines,
    Running,
    Selection,
)
from bus.contracts.moves import MoveKind
from cell_conductor.config import ConductorConfig
from cell_conductor.domain import events as e
from cell_conductor.domain.breaker import (
    Breaker,
    CountedAs,
    Finding,
    RecentFindings,
    assess,
    misreserved,
    pages,
    reserved_on,
)
from cell_conductor.domain.events import Event, HostMissing, HostRuns
from cell_conductor.domain.instance import MAX_ENDED_ATTEMPTS, Instance, State
from cell_conductor.domain.report import (
    NO_MARK,
    NO_RECORD,
    Differences,
    Unexplained,
    UnexplainedKind,
    differences,
    is_ordered,
    rescan_id,
)
from cell_conductor.engine import Engine, Sender
from cell_conductor.guard import Guard, QuarantineReservations
from cell_conductor.handlers import HostHandlers
from cell_conductor.store import rows
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from tests.unit.conductor.move_scenario import MOVE, OTHER, Scenario, request, seen, to_resized
from tests.unit.conductor.scenario import UUID, host, spawned
from tests.unit.conductor.test_report import (
    CONFIG,
    MANY,
    MOVED_AT,
    SERVICE,
    SOURCE,
    guarded,
    moved,
    report_of_source,
)
from tests.unit.conductor.world import Silent

# --- The breaker: how much of one report may be done without an operator's word.


HOST = "10000000-0000-4000-8000-000000000001"


def lost(*numbers: int) -> list[Finding]:
    return [Finding(f"i{n}", HostMissing(at=1.0, host_uuid=HOST, service="s1")) for n in numbers]


def over(*numbers: int) -> list[Finding]:
    return [Finding(f"i{n}", HostRuns(at=1.0, attempt=1, host_uuid=HOST, service="s")) for n in numbers]


def unknown(*numbers: int) -> list[Unexplained]:
    return [Unexplained(f"i{n}", 1, HOST, UnexplainedKind.QUARANTINED, "no record") for n in numbers]


def test_a_few_go_on() -> None:
    found = [*lost(1, 2), *over(3)]
    verdict = assess("s", found, unknown(4, 5), None, limit=5, now=7.0)
    assert verdict.go == tuple(found) and verdict.tripped is None and verdict.held == 0


def test_more_than_a_few_trip_it_and_none_of_them_goes_on() -> None:
    verdict = assess("s", [*lost(1, 2), *over(3)], unknown(4, 5, 6), None, limit=5, now=7.0)
    assert verdict.go == () and verdict.held == 3
    tripped = verdict.tripped
    assert tripped is not None and tripped.is_open and tripped.tripped_at == 7.0
    assert (tripped.lost, tripped.over, tripped.quarantined) == (2, 1, 3)
    assert tripped.machines == tuple(f"i{n}@{HOST}" for n in range(1, 7))


def test_while_it_is_open_nothing_goes_on() -> None:
    is_open = Breaker(service="s", tripped_at=1.0, machines=(f"i1@{HOST}",))
    for found in (lost(1), over(9)):
        verdict = assess("s", found, [], is_open, limit=5, now=7.0)
        assert verdict.go == () and verdict.held == 1 and verdict.tripped is None


def test_go_is_for_the_machines_that_tripped_it_and_no_others() -> None:
    keys = tuple(f"i{n}@{HOST}" for n in range(1, 7))
    gone = Breaker(service="s", tripped_at=1.0, machines=keys, reset_at=2.0, reset_by="op")
    found = [*lost(*range(1, 7)), *lost(7, 8, 9)]
    assert assess("s", found, [], gone, limit=3, now=7.0).go == tuple(found)
    more = assess("s", lost(*range(1, 11)), [], gone, limit=3, now=7.0)
    assert more.go == () and more.tripped is not None and more.tripped.lost == 4
    assert assess("s", lost(1), [], replace(gone, reset_at=0.0), limit=3, now=7.0).go == ()


def test_a_second_go_is_for_the_first_ones_machines_too() -> None:
    """Seed 7027: one report named one host and the next two. Each go was for what was new, and forgot the others:
    the breaker tripped with every report, for ever."""
    first = Breaker(service="s", tripped_at=1.0, machines=tuple(f"i{n}@{HOST}" for n in (1, 2, 3)), reset_at=2.0)
    found = lost(1, 2, 3, 4, 5, 6)
    second = assess("s", found, [], first, limit=1, now=7.0).tripped
    assert second is not None and second.lost == 3, "three of them are new"
    gone = replace(second, reset_at=8.0)
    assert assess("s", found, [], gone, limit=1, now=9.0).go == tuple(found)


def test_machines_that_vanish_one_report_after_the_other_trip_it_too() -> None:
    """Seed 1795422696: a service reported each of its hosts as soon as it had changed, three within 0.3 s."""
    recent = RecentFindings(window_s=60.0)
    for number in (1, 2, 3):
        verdict = assess("s", lost(number), [], None, limit=3, now=7.0, recent=recent.of("s", 100.0 + number))
        assert verdict.tripped is None
        recent.add("s", verdict.counted, 100.0 + number)
    verdict = assess("s", lost(4), unknown(5), None, limit=3, now=7.0, recent=recent.of("s", 104.0))
    assert verdict.go == () and verdict.tripped is not None
    assert (verdict.tripped.lost, verdict.tripped.quarantined) == (4, 1)
    assert verdict.tripped.machines == (f"i4@{HOST}", f"i5@{HOST}")
    assert recent.of("other", 104.0) == {}
    assert set(recent.of("s", 161.5)) == {f"i2@{HOST}", f"i3@{HOST}"}
    recent.clear("s")
    assert recent.of("s", 104.0) == {}


def test_a_machine_that_is_reported_again_counts_once_and_one_that_was_passed_not_at_all() -> None:
    gone = Breaker(service="s", tripped_at=1.0, machines=(f"i9@{HOST}",), reset_at=2.0, reset_by="op")
    recent = {f"i1@{HOST}": CountedAs.LOST, f"i9@{HOST}": CountedAs.LOST}
    assert assess("s", lost(1, 9), [], gone, limit=1, now=7.0, recent=recent).go == tuple(lost(1, 9))
    assert assess("s", lost(2), [], gone, limit=1, now=7.0, recent=recent).go == ()


def test_a_report_without_findings_that_count_does_not_trip_it() -> None:
    """The limit was lowered at a restart of the conductor."""
    recent = {f"i{n}@{HOST}": CountedAs.LOST for n in range(3)}
    ordered = [replace(one, ordered=True) for one in lost(7)]
    assert assess("s", ordered, [], None, limit=1, now=7.0, recent=recent).go == tuple(ordered)


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


async def busy_guarded(instances: list[Instance]) -> tuple[MemoryInstances, Guard]:
    """A conductor's guard, and its store with these records."""
    clock, config = SystemClock(), ConductorConfig()
    store = MemoryInstances(MemoryInstanceTable(clock).session())
    await store.open()
    async with store.transaction() as transaction:
        await transaction.insert(instances)
    bus = cast(Bus, Silent())
    engine = Engine(store=store, bus=bus, relay=cast(Sender, None), clock=clock, config=config, cell=CELL)
    return store, Guard(store, bus, clock, config, effective=engine.effective, adopt=engine.adopt)


@pytest.mark.parametrize("is_later", [False, True])
async def test_machines_that_came_up_after_the_scan_are_not_counted_as_lost(is_later: bool) -> None:
    """A thousand boots on three hosts opened the breaker: the report was from before thirteen of them."""
    instances = [active(number) for number in range(BUSY_MANY)]
    store, guard = await busy_guarded(instances)
    report = ComputeHosts(
        service=BUSY_SERVICE,
        cell=CELL,
        epoch=EPOCH,
        sequence=9,
        hosts=(HostReport(uuid=BUSY_HOST, name="h", running=()),),
        rescans=tuple(rescan_id(one) for one in instances) if is_later else (),
    )
    briefs = await store.briefs([BUSY_HOST], [])
    found = differences(report, briefs, now=101.0, grace_s=30.0, deployment=store.deployment)
    assert len(found.harmful) == (BUSY_MANY if is_later else 0)
    assert len(found.harmful_rescans) == (0 if is_later else BUSY_MANY), "each is looked for again"

    assert not await guard.assess(report, found)

    breakers = await store.safety.breakers()
    assert [breaker.lost for breaker in breakers] == ([BUSY_MANY] if is_later else [])


async def test_machines_whose_record_has_changed_since_the_comparison_are_not_counted_as_lost() -> None:
    """Compared without locks they were missing; one that was moved away since is on record elsewhere."""
    instances = [active(number) for number in range(BUSY_MANY)]
    store, guard = await busy_guarded([replace(one, since=one.since + 1.0) for one in instances])
    rescans = tuple(rescan_id(one) for one in instances)
    missing = HostMissing(at=101.0, host_uuid=BUSY_HOST, service=BUSY_SERVICE, rescans=rescans)
    report = ComputeHosts(service=BUSY_SERVICE, cell=CELL, epoch=EPOCH, sequence=9, rescans=rescans)
    assert not await guard.assess(report, Differences(harmful=tuple((one.uuid, missing) for one in instances)))
    assert not await store.safety.breakers()


async def test_machines_that_vanish_in_one_report_each_open_the_breaker() -> None:
    """A service reports a host as soon as it has changed, so a mass loss comes in many reports."""
    limit = ConductorConfig().breaker_limit
    store, guard = await busy_guarded([active(number) for number in range(BUSY_MANY)])
    taken: list[tuple[str, Event]] = []
    for number in range(BUSY_MANY):
        rescans = (rescan_id(active(number)),)
        missing = HostMissing(at=101.0, host_uuid=BUSY_HOST, service=BUSY_SERVICE, rescans=rescans)
        report = ComputeHosts(
            service=BUSY_SERVICE,
            cell=CELL,
            epoch=EPOCH,
            sequence=9 + number,
            hosts=(HostReport(uuid=BUSY_HOST, name="h", running=()),),
            rescans=rescans,
        )
        found = Differences(harmful=((active(number).uuid, missing),))
        taken += await guard.assess(report, found)
    assert len(taken) == limit
    assert [breaker.lost for breaker in await store.safety.breakers()] == [limit + 1]


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
    store = MemoryInstances(MemoryInstanceTable(clock).session())
    await store.open()
    held = [active(number) for number in range(MAX_RESCANS + 1)]
    last = active(MAX_RESCANS + 1)
    deleting = replace(last, state=State.DESTROYING, then=State.DELETED)
    async with store.transaction() as transaction:
        await transaction.insert([*held, deleting])
    await store.safety.trip(Breaker(service=BUSY_SERVICE, tripped_at=60.0, lost=len(held)))
    engine = Engine(store=store, bus=cast(Bus, bus), relay=cast(Sender, None), clock=clock, config=config, cell=CELL)
    hosts = HostHandlers(engine, store, clock, config, cast(Bus, bus), outdated=lambda _service, _epoch: None)
    page = HostReport(uuid=BUSY_HOST, name="h", running=())
    report = ComputeHosts(service=BUSY_SERVICE, cell=CELL, epoch=EPOCH, sequence=1, hosts=(page,))
    await hosts.hosts([Received(report, Meta(id="m"), CELL, "conductor.hosts")])
    requested = [one.rescans for one in bus.published if isinstance(one, RescanHosts)]
    assert requested == [(rescan_id(deleting),)]
    await store.safety.reset(BUSY_SERVICE, "ann", clock.time())
    await hosts.hosts([Received(replace(report, sequence=2), Meta(id="n"), CELL, "conductor.hosts")])
    *_, again = [one.rescans for one in bus.published if isinstance(one, RescanHosts)]
    assert len(again) == MAX_RESCANS and again[0] == rescan_id(deleting)


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
        report = report_of_source(instances, store.deployment)
        briefs = await store.briefs([SOURCE], [one.uuid for one in instances])
        found = differences(report, briefs, now=MOVED_AT + 60, grace_s=30.0, deployment=store.deployment)
        assert len(found.harmful) == MANY > CONFIG.breaker_limit

        assert len(await guard.assess(report, found)) == acted_on

        breakers = [one for one in await store.safety.breakers() if one.tripped_at > 1.0]
        assert [breaker.over for breaker in breakers] == ([over] if over else [])


def lists(made: Scenario, attempt: int, n: int) -> bool:
    """Whether a report that lists that machine only repeats what the record has ordered."""
    return is_ordered(made.instance, e.HostRuns(at=300.0, attempt=attempt, host_uuid=host(n), service="s1"))


def confirmed() -> Scenario:
    made = to_resized()
    made.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    return made


def test_the_source_of_a_move_is_no_finding_from_its_confirm_on() -> None:
    """5,000 moves with a fault every two seconds: a scan that began before six sources of one service were destroyed
    listed them after that, and its breaker opened. All four did."""
    made = to_resized()
    assert not lists(made, 1, 1)
    made.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    assert (made.instance.phase, lists(made, 1, 1)) == ((State.DESTROYING, State.ACTIVE), True)
    made.apply(e.Destroyed(at=220.0, attempt=1, host_uuid=host(1), service="s1"))
    assert (made.instance.phase, lists(made, 1, 1)) == ((State.RELEASING, State.ACTIVE), True)
    made.apply(e.Released(at=221.0, consumer=MOVE))
    assert (made.instance.state, made.instance.ended_attempts, lists(made, 1, 1)) == (State.ACTIVE, (1,), True)
    assert not lists(made, 2, 2)  # what runs is none


def test_the_destination_of_a_move_that_is_reverted_is_no_finding() -> None:
    made = to_resized()
    made.apply(
        request(MoveKind.REVERT, request_id=OTHER),
        seen(),
        e.Destroyed(at=220.0, attempt=2, host_uuid=host(2), service="s1"),
        e.Reverted(at=221.0, attempt=3, consumer_generation=11),
    )
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.attempt) == (State.ACTIVE, 1)
    assert lists(made, 2, 2)
    assert not lists(made, 1, 1)


def test_so_many_attempts_of_moves_stay_on_record() -> None:
    made = confirmed()
    made.instance = replace(made.instance, ended_attempts=tuple(range(101, 101 + MAX_ENDED_ATTEMPTS)))
    made.apply(e.Destroyed(at=220.0, attempt=1, host_uuid=host(1), service="s1"), e.Released(at=221.0, consumer=MOVE))
    assert made.instance.ended_attempts == (*range(102, 101 + MAX_ENDED_ATTEMPTS), 1)
    made.apply(spawned(attempt=2, at=230.0))
    assert len(made.instance.ended_attempts) == MAX_ENDED_ATTEMPTS


def test_ended_attempts_of_records_of_earlier_versions_are_read() -> None:
    stored = b'{"uuid":"%s","left":[1,3]}' % UUID.encode()
    assert rows.decode(stored).ended_attempts == (1, 3)
    assert msgspec.json.encode(rows.decode(stored)) == stored


# --- Which machines of a report are to be kept out of their host's inventory.


KEPT_HOST = "10000000-0000-4000-8000-000000000001"
KEPT_OTHER = "10000000-0000-4000-8000-000000000002"
A = "00000000-0000-4000-8000-00000000000a"
B = "00000000-0000-4000-8000-00000000000b"
OURS = Running(instance_uuid=A, attempt=1, deployment="dddddddd-0000-4000-8000-000000000001")
RESERVED = replace(OURS, reserved=True)
QUARANTINED = Unexplained(A, 1, KEPT_HOST, UnexplainedKind.QUARANTINED, NO_RECORD)
FOREIGN = Unexplained(A, 1, KEPT_HOST, UnexplainedKind.FOREIGN, NO_MARK)


def report(*running: Running) -> ComputeHosts:
    hosts = (HostReport(uuid=KEPT_HOST, name="h", running=running), HostReport(uuid=KEPT_OTHER, name="o", running=()))
    return ComputeHosts(service="s", cell="c", epoch=1, sequence=1, hosts=hosts)


@pytest.mark.parametrize(
    ("running", "unexplained", "wanted"),
    [
        (OURS, [], None),
        (OURS, [QUARANTINED], [A]),
        (RESERVED, [QUARANTINED], None),
        (RESERVED, [], []),
        (replace(RESERVED, destroying=True), [], None),
        (replace(OURS, destroying=True), [], None),
        (OURS, [FOREIGN], None),
        (RESERVED, [FOREIGN], None),
        (replace(OURS), [replace(QUARANTINED, host_uuid=KEPT_OTHER)], None),
    ],
    ids=[
        "explained", "quarantined", "reserved already", "explained again", "reserved until it is destroyed",
        "being destroyed", "foreign", "its mark was taken away", "in quarantine elsewhere",
    ],
)  # fmt: skip
def test_of_a_host_whose_report_disagrees_all_are_named(
    running: Running, unexplained: list[Unexplained], wanted: list[str] | None
) -> None:
    found = misreserved(report(running), unexplained)
    assert {host: [one.instance_uuid for one in machines] for host, machines in found.items()} == (
        {} if wanted is None else {KEPT_HOST: wanted}
    )


def test_with_one_more_the_others_are_named_again() -> None:
    both = [QUARANTINED, replace(QUARANTINED, uuid=B)]
    found = misreserved(report(RESERVED, replace(OURS, instance_uuid=B)), both)
    assert [one.instance_uuid for one in found[KEPT_HOST]] == [A, B]


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
        position=1,
    )
    (named,) = reserved_on(KEPT_HOST, [OURS], {A: record}).machines
    assert named.allocations == {KEPT_HOST: {"VCPU": 1}}
    (named,) = reserved_on(KEPT_HOST, [OURS], {A: replace(record, selections=(there,))}).machines
    assert named.allocations is None


def test_one_host_is_named_no_more_machines_than_a_message_holds() -> None:
    many = [replace(OURS, instance_uuid=f"{A[:-5]}{n:05d}") for n in range(MAX_RESERVED_MACHINES + 1)]
    assert len(reserved_on(KEPT_HOST, many, {}).machines) == MAX_RESERVED_MACHINES


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
        async def publish(self, order: ReserveMachines, *, cause: str) -> None:
            sent.append(order)

    uuids = [f"{A[:-5]}{n:05d}" for n in range(1_800)]
    hosts = tuple(
        HostReport(uuid=host, name=host, running=tuple(replace(OURS, instance_uuid=one) for one in uuids[at::3]))
        for at, host in enumerate((KEPT_HOST, KEPT_OTHER, B))
    )
    found = [replace(QUARANTINED, host_uuid=hosts[at % 3].uuid, uuid=one) for at, one in enumerate(uuids)]
    store = MemoryInstances(MemoryInstanceTable(SystemClock()).session())
    reservations = QuarantineReservations(store, Published())  # type: ignore[arg-type]
    await reservations.reserve(ComputeHosts(service="s", cell="c", epoch=4, sequence=7, hosts=hosts), found)
    assert [[(one.host_uuid, len(one.machines)) for one in order.hosts] for order in sent] == [
        [(KEPT_HOST, 600)],
        [(KEPT_OTHER, 600)],
        [(B, 600)],
    ]
    assert {(order.service, order.epoch, order.sequence) for order in sent} == {("s", 4, 7)}

"""The record of a build: announcements in any order, their writer, and the messages that follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.bus import API
from bus.clock import SystemClock
from bus.contracts.base import Meta
from bus.contracts.build import AttemptRecord, BuildEvent, BuildRequest, BuildState
from bus.contracts.cell import CellBuild, CellDelete, InstanceSpec, Selection
from bus.contracts.moves import Condition, MoveEvent, MoveKind, MoveState
from bus.contracts.placement import ReleaseRun
from bus.contracts.stages import Stamps
from bus.faults import BrokenInvariant, DatabaseUnavailable
from bus.wire import Malformed
from scheduler_worker.announcements import AnnouncementWriter, AppliedAnnouncements
from scheduler_worker.domain.builds import NewBuild, RecordedBuild, apply_announcement, effects, releases_of
from scheduler_worker.domain.recorded_moves import InstanceRecord, RecordedMove
from scheduler_worker.domain.recorded_moves import apply_announcement as apply_move_announcement
from scheduler_worker.domain.requests import refused_unreadable, timeline_of
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent

# --- The record of a build under late, doubled and foreign announcements.


UUID = "00000000-0000-4000-8000-000000000001"
AT = RecordedBuild(
    instance_uuid=UUID, project_id="demo", state=BuildState.SCHEDULED, sequence=2, terminal=False, cell="c1"
)


def event(state: BuildState, sequence: int, *, terminal: bool = False) -> BuildEvent:
    return BuildEvent(instance_uuid=UUID, project_id="demo", state=state, sequence=sequence, terminal=terminal)


def play(
    *events: BuildEvent, cell: str = "c1", start: RecordedBuild = AT
) -> tuple[RecordedBuild, list[tuple[str, bool]]]:
    build, published = start, []
    for one in events:
        build, announced = apply_announcement(build, one, cell)
        if announced is not None:
            published.append((announced.state.value, announced.terminal))
    return build, published


def test_late_and_doubled_ones_are_ignored() -> None:
    build, published = play(
        event(BuildState.BUILDING, 10),
        event(BuildState.ACTIVE, 12, terminal=True),
        event(BuildState.BUILDING, 11),
        event(BuildState.ACTIVE, 12, terminal=True),
    )
    assert published == [("building", False), ("active", True)]
    assert (build.state, build.sequence) == (BuildState.ACTIVE, 12)


def test_an_end_that_was_overtaken_by_what_followed_it_still_ends_its_request() -> None:
    """Active, then lost: the cell calls the failure no end, because it has announced one; that one comes too late."""
    build, published = play(event(BuildState.FAILED, 13), event(BuildState.ACTIVE, 12, terminal=True))
    assert published == [("failed", True)] and build.terminal


def test_another_cell_decides_nothing() -> None:
    assert play(event(BuildState.FAILED, 99, terminal=True), cell="c2") == (AT, [])


def test_a_build_ends_once_and_its_delete_ends_once() -> None:
    build, published = play(
        event(BuildState.ACTIVE, 12, terminal=True),
        event(BuildState.FAILED, 13, terminal=True),
        event(BuildState.DELETED, 15, terminal=True),
        event(BuildState.DELETED, 16, terminal=True),
    )
    assert published == [("active", True), ("failed", False), ("deleted", True)]
    assert build.state is BuildState.DELETED


def test_a_deleted_instance_is_deleted_though_the_cell_forgot_a_number_that_it_had_announced() -> None:
    """Seed 81141: "deleting", not yet on disk when the cell's database died, had the number that "deleted" then had."""
    for number in (11, 12):
        build, published = play(
            event(BuildState.DELETING, 11),
            event(BuildState.DELETING, 12),
            event(BuildState.DELETED, number, terminal=True),
            event(BuildState.DELETED, number, terminal=True),
        )
        assert published == [("deleting", False), ("deleting", False), ("deleted", True)]
        assert (build.state, build.sequence) == (BuildState.DELETED, 13)


def test_a_delete_under_way_stays_so_on_record() -> None:
    deleting = RecordedBuild(
        instance_uuid=UUID, project_id="demo", state=BuildState.DELETING, sequence=10, terminal=False, cell="c1"
    )
    build, published = play(event(BuildState.ACTIVE, 11, terminal=True), start=deleting)
    assert build.state is BuildState.DELETING and published == [("active", True)]


states = st.sampled_from([BuildState.BUILDING, BuildState.ACTIVE, BuildState.FAILED, BuildState.DELETED])


@given(st.lists(st.builds(event, states, st.integers(0, 30), terminal=st.booleans()), max_size=30))
def test_announcements_rise_and_hold_one_terminal_each(events: list[BuildEvent]) -> None:
    build, published, sequence = AT, [], AT.sequence
    for one in events:
        build, announced = apply_announcement(build, one, "c1")
        if announced is not None:
            assert announced.sequence > sequence
            sequence = announced.sequence
            published.append(announced)
    assert sum(announced.terminal and announced.state is not BuildState.DELETED for announced in published) <= 1
    assert sum(announced.state is BuildState.DELETED for announced in published) <= 1


def test_an_unreadable_request_is_answered_when_it_names_its_subject() -> None:
    def malformed(body: bytes, key: str = "build.request.0.demo") -> Malformed:
        return Malformed(body=body, code="request.invalid", reason="no flavor", meta=Meta(id="m"), queue="q", key=key)

    (published,) = refused_unreadable(malformed(b'{"instance_uuid":"%s"}' % UUID.encode()))
    assert (published.state, published.terminal, published.sequence, published.code) == (
        BuildState.REFUSED,
        True,
        0,
        "request.invalid",
    )
    assert published.project_id == "demo"
    assert refused_unreadable(malformed(b'{"instance_uuid":"x"}')) == ()
    assert refused_unreadable(malformed(b'{"instance_uuid":"%s"}' % UUID.encode(), "build.request.de.mo")) == ()
    assert refused_unreadable(malformed(b'{"instance_uuid":"%s"}' % UUID.encode(), "")) == ()
    assert refused_unreadable(malformed(b"\xff{")) == ()
    assert refused_unreadable(malformed(b"[" * 100_000)) == ()


def test_item_7_a_forged_request_is_answered_to_the_project_of_its_key_alone() -> None:
    """A project that names another's machine must not end that machine's build for those who wait for it."""
    body = b'{"instance_uuid":"%s","project_id":"demo","flavor":5}' % UUID.encode()
    for code in ("message.invalid", "message.wrong_key"):
        forged = Malformed(body=body, code=code, reason="", meta=Meta(id="m"), queue="q", key="build.request.18.evil")
        (published,) = refused_unreadable(forged)
        assert (published.project_id, published.code) == ("evil", code)


def test_a_timeline_holds_each_attempt_once_and_then_the_end() -> None:
    """A conductor sends the whole history with each end; what is on record already is not announced again."""
    tries = (
        AttemptRecord(attempt=1, host="h1", outcome="failed", code="spawn.failed", reason="no disk", at=2.0),
        AttemptRecord(attempt=2, host="h2", outcome="not_claimed", code="full", at=2.5),
        AttemptRecord(attempt=2, host="h3", outcome="active", at=4.0),
    )
    up = BuildEvent(
        instance_uuid=UUID, project_id="demo", state=BuildState.ACTIVE, sequence=13, cell="c1", host="h3", attempt=2,
        history=tries, at=4.0,
    )  # fmt: skip
    assert [(line.at, line.what, line.detail) for line in timeline_of(up, 0, 9.0)] == [
        (2.0, "failed", "h1 (attempt 1); spawn.failed: no disk"),
        (2.5, "not_claimed", "h2 (attempt 2); full"),
        (4.0, "active", "h3 (attempt 2)"),
    ]
    down = BuildEvent(
        instance_uuid=UUID, project_id="demo", state=BuildState.FAILED, sequence=13, host="h1", attempt=1,
        code="max_retries_exceeded", history=tries[:1], at=3.0,
    )  # fmt: skip
    assert [line.detail for line in timeline_of(down, 0, 9.0)] == [
        "h1 (attempt 1); spawn.failed: no disk",
        "h1 (attempt 1); max_retries_exceeded",
    ]
    gone = BuildEvent(
        instance_uuid=UUID, project_id="demo", state=BuildState.DELETED, sequence=15, cell="c1", history=tries, at=8.0
    )
    assert [line.what for line in timeline_of(gone, 3, 9.0)] == ["deleted"]


# --- Announcements of several cells at once are one transaction; what one of them announces wrongly is its own.


CELLS = ["c1", "c2", "c3", "c4"]


def uuid_of(cell: str) -> str:
    return f"{CELLS.index(cell)}0000000-0000-4000-8000-000000000000"


def active(cell: str) -> BuildEvent:
    return BuildEvent(
        instance_uuid=uuid_of(cell), project_id="p", state=BuildState.ACTIVE, sequence=9, terminal=True, cell=cell
    )


class Counting(MemoryBuilds):
    """A store that counts its units. before: runs in each, with the writes that it will commit."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.units = 0
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.before: Callable[[set[str]], None] = lambda _: None

    def unit(self, *, durable: bool = True, optimistic: bool = False) -> Any:
        return self._counted(super().unit(durable=durable, optimistic=optimistic))

    @asynccontextmanager
    async def _counted(self, made: Any) -> AsyncIterator[Any]:
        self.units += 1
        async with made as unit:
            yield unit
            self.begun.set()
            await self.go_on.wait()
            self.before({message.message.instance_uuid for message in unit.outbox})


@pytest.fixture
async def store() -> Counting:
    made = Counting(MemoryBuildTable(SystemClock()).session())
    made.publish_through(Sent())  # type: ignore[arg-type]
    made.go_on.set()
    async with made.unit() as unit:
        for cell in CELLS:
            uuid = uuid_of(cell)
            request = BuildRequest(instance_uuid=uuid, flavor="f", project_id="p", name="n")
            build = RecordedBuild(
                instance_uuid=uuid, project_id="p", state=BuildState.SCHEDULED, sequence=2, cell=cell, host="h"
            )
            await unit.insert([NewBuild(request=request, digest=b"1", build=build)], 1.0)
    made.units = 0
    made.begun.clear()
    made.go_on.clear()
    return made


async def written_states(store: Counting) -> dict[str, BuildState]:
    async with store.unit() as unit:
        locked = await unit.lock([uuid_of(cell) for cell in CELLS])
    return {cell: locked[uuid_of(cell)].state for cell in CELLS}


async def gathered(store: Counting, writer: AnnouncementWriter) -> list[AppliedAnnouncements | BaseException]:
    """The first cell's batch is under way when the others come."""
    tasks = [asyncio.create_task(writer.write("c1", [active("c1")]))]
    await store.begun.wait()
    tasks += [asyncio.create_task(writer.write(cell, [active(cell)])) for cell in CELLS[1:]]
    for _ in range(5):
        await asyncio.sleep(0)
    assert store.units == 1
    store.go_on.set()
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)


async def test_what_comes_while_one_cell_is_written_is_one_transaction(store: Counting) -> None:
    found = await gathered(store, AnnouncementWriter(store, clock=SystemClock()))
    assert [[event.cell for event in one.announced] for one in found] == [[cell] for cell in CELLS]  # type: ignore[union-attr]
    assert store.units == 2
    assert await written_states(store) == dict.fromkeys(CELLS, BuildState.ACTIVE)


async def test_a_cell_may_not_end_the_build_of_another(store: Counting) -> None:
    store.go_on.set()
    writer = AnnouncementWriter(store, clock=SystemClock())
    found = await asyncio.gather(writer.write("c1", [active("c2")]), writer.write("c3", [active("c3")]))
    assert [why for one in found for _, why in one.ignored] == ["foreign"]
    assert (await written_states(store))["c2"] is BuildState.SCHEDULED


async def test_a_batch_that_cannot_be_written_fails_alone(store: Counting) -> None:
    def broken(written: set[str]) -> None:
        if uuid_of("c3") in written:
            raise BrokenInvariant("c3")

    store.before = broken
    found = await gathered(store, AnnouncementWriter(store, clock=SystemClock()))
    assert [isinstance(one, BrokenInvariant) for one in found] == [False, False, True, False]
    store.before = lambda _: None
    assert (await written_states(store)) == {**dict.fromkeys(CELLS, BuildState.ACTIVE), "c3": BuildState.SCHEDULED}


async def test_an_outage_is_every_cells_own_to_wait_for(store: Counting) -> None:
    def unavailable(written: set[str]) -> None:
        raise DatabaseUnavailable("away")

    store.before = unavailable
    writer = AnnouncementWriter(store, clock=SystemClock())
    found = await gathered(store, writer)
    assert [type(one) for one in found] == [DatabaseUnavailable] * 4
    store.before = lambda _: None
    assert len((await writer.write("c2", [active("c2")])).announced) == 1, "nothing of the others is left"
    assert (await written_states(store))["c3"] is BuildState.SCHEDULED


async def test_a_writer_that_is_cancelled_leaves_the_others_to_themselves(store: Counting) -> None:
    writer = AnnouncementWriter(store, clock=SystemClock())
    first = asyncio.create_task(writer.write("c1", [active("c1")]))
    await store.begun.wait()
    second = asyncio.create_task(writer.write("c2", [active("c2")]))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    store.go_on.set()
    assert [event.cell for event in (await second).announced] == ["c2"]
    assert (await written_states(store))["c1"] is BuildState.SCHEDULED


# --- A cell's announcements of a request about an instance, applied in any order of their arrival at the scheduler.


MOVE, VM = "40000000-0000-4000-8000-000000000000", "a0000000-0000-4000-8000-000000000000"
CELL, SOURCE, TARGET = "c1", "host-1", "host-2"
HOSTS = {name: f"{name[-1]}0000000-0000-4000-8000-000000000000" for name in (SOURCE, TARGET, "host-3")}


def on(host: str) -> RecordedBuild:
    """The instance's build, on this host."""
    return RecordedBuild(
        instance_uuid=VM,
        project_id="p",
        state=BuildState.ACTIVE,
        sequence=1,
        cell=CELL,
        host=host,
        host_uuid=HOSTS[host],
    )


def announced(state: MoveState, sequence: int, *, terminal: bool = False) -> MoveEvent:
    condition = Condition.MOVING if sequence < 12 else Condition.ACTIVE
    return MoveEvent(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.LIVE_MIGRATE, state=state, sequence=sequence,
        terminal=terminal, condition=condition, host=TARGET, host_uuid=HOSTS[TARGET],
        flavor="large" if terminal else "",
    )  # fmt: skip


FINISHING = announced(MoveState.FINISHING, 11)
DONE = announced(MoveState.DONE, 12, terminal=True)
GONE = announced(MoveState.SOURCE_GONE, 13)


@pytest.mark.parametrize(
    "order", [*permutations((FINISHING, DONE, GONE))], ids=lambda order: " ".join(e.state for e in order)
)
def test_a_move_ends_in_whatever_order_its_events_come(order: tuple[MoveEvent, ...]) -> None:
    """Where `source-gone` came before `done`, the move stayed under way for ever, and the drain that waited for it."""
    move = RecordedMove(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.LIVE_MIGRATE, digest=b"",
        cell=CELL, state=MoveState.SCHEDULED, sequence=2,
    )  # fmt: skip
    instance = InstanceRecord(instance_uuid=VM, condition=Condition.ACTIVE, under_way=MOVE)
    build = on(SOURCE)
    published: list[MoveEvent] = []
    for event in (*order, *order):  # each at least once
        applied = apply_move_announcement(event, move, instance, build, cell=CELL, now=1.0)
        move, instance, build = applied.move, applied.instance, applied.build
        published += [applied.event] if applied.event is not None else []
    assert (move.state, move.terminal, move.sequence) == (MoveState.DONE, True, 13)
    assert (instance.condition, instance.under_way, instance.flavor) == (Condition.ACTIVE, None, "large")
    assert build == on(TARGET)
    assert {event.host_uuid for event in published} == {None}, "clients have its name"
    assert [event.state for event in published if event.terminal] == [MoveState.DONE], "one terminal event"
    assert len({event.sequence for event in published}) == len(published), "none twice"


def test_an_end_that_comes_after_the_next_request_has_ended_does_not_set_the_host_back() -> None:
    move = RecordedMove(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.LIVE_MIGRATE, digest=b"",
        cell=CELL, state=MoveState.SCHEDULED, sequence=2,
    )  # fmt: skip
    instance = InstanceRecord(instance_uuid=VM, condition=Condition.STOPPED, sequence=20)
    applied = apply_move_announcement(DONE, move, instance, on("host-3"), cell=CELL, now=1.0)
    assert (applied.move.terminal, applied.build, applied.instance) == (True, on("host-3"), instance)


def test_the_end_from_a_cell_whose_numbers_were_set_back_ends_the_move_and_its_condition() -> None:
    move = RecordedMove(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.LIVE_MIGRATE, digest=b"",
        cell=CELL, state=MoveState.FINISHING, sequence=40,
    )  # fmt: skip
    moving = InstanceRecord(instance_uuid=VM, condition=Condition.MOVING, under_way=MOVE, sequence=40)
    applied = apply_move_announcement(DONE, move, moving, on(SOURCE), cell=CELL, now=1.0)
    assert (applied.move.terminal, applied.instance.under_way) == (True, None)
    assert (applied.instance.condition, applied.instance.sequence) == (Condition.ACTIVE, 40)


def test_what_becomes_of_a_finished_move_by_itself_is_what_the_instance_is() -> None:
    """A resized instance whose destination was fenced stayed `moving` there, under a flavor that it had no more."""
    move = RecordedMove(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.RESIZE, digest=b"",
        cell=CELL, state=MoveState.DONE, sequence=12, terminal=True,
    )  # fmt: skip
    resized = InstanceRecord(instance_uuid=VM, condition=Condition.RESIZED, sequence=12, flavor="large")
    under_way = replace(announced(MoveState.UNDOING, 11), sequence=13, flavor="large")
    applied = apply_move_announcement(under_way, move, resized, on(TARGET), cell=CELL, now=1.0)
    assert (applied.instance.condition, applied.instance.flavor, applied.build) == (
        Condition.MOVING,
        "large",
        on(TARGET),
    )
    undone = replace(announced(MoveState.UNDOING, 14), host=SOURCE, host_uuid=HOSTS[SOURCE], flavor="small")
    applied = apply_move_announcement(undone, applied.move, applied.instance, on(TARGET), cell=CELL, now=1.0)
    assert (applied.instance.condition, applied.instance.flavor, applied.build) == (
        Condition.ACTIVE,
        "small",
        on(SOURCE),
    )
    assert (applied.move.state, applied.move.terminal) == (MoveState.DONE, True)


def test_the_end_from_a_cell_without_a_record_has_a_number_above_what_clients_have_had() -> None:
    """Seed 120 of transfers with set-backs: an abort overtook the arrival of its instance, and was refused as number 0,
    which clients take for another request's.
    """
    move = RecordedMove(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.ABORT, digest=b"",
        cell=CELL, state=MoveState.SCHEDULED, sequence=2,
    )  # fmt: skip
    unknown = replace(announced(MoveState.REFUSED, 0, terminal=True), condition=Condition.UNKNOWN)
    instance = InstanceRecord(instance_uuid=VM, condition=Condition.ACTIVE, sequence=20)
    applied = apply_move_announcement(unknown, move, instance, on(SOURCE), cell=CELL, now=1.0)
    assert applied.event is not None and applied.event.sequence == applied.move.sequence == 3
    assert applied.instance == instance


# --- What follows from a build's record: the messages of a change, and what placement is told. A table.


BUILD = RecordedBuild(instance_uuid=UUID, project_id="p", state=BuildState.ACCEPTED, sequence=1, run="mine")
STAMPS = Stamps(requested=1.0, queued=2.0, decided=3.0)
S = BuildState


def after(state: BuildState, cell: str | None = None) -> RecordedBuild:
    terminal = state in (S.FAILED, S.DELETED, S.REFUSED)
    host = None if cell is None else "h"
    return replace(BUILD, state=state, cell=cell, host=host, attempt=1, terminal=terminal, code="why", reason="so")


@pytest.mark.parametrize(
    ("before", "record", "to", "kinds"),
    [
        (None, after(S.ACCEPTED), [API], [BuildEvent]),
        (None, replace(after(S.REFUSED), attempt=0), [API], [BuildEvent]),
        (S.ACCEPTED, after(S.FAILED), [API, API], [BuildEvent, ReleaseRun]),
        (S.ACCEPTED, after(S.DELETED), [API, API], [BuildEvent, ReleaseRun]),
        (S.ACCEPTED, replace(after(S.FAILED), attempt=0), [API], [BuildEvent]),  # nobody has claimed for it
        (S.FAILED, after(S.DELETED), [API], [BuildEvent]),
        # What it held is gone, and a claim of its run may still be on its way.
        (S.FAILED, replace(after(S.DELETED), code="claim.stranded"), [API, API], [BuildEvent, ReleaseRun]),
        (S.SCHEDULED, after(S.DELETING, "c1"), ["c1"], [CellDelete]),
        (S.DELETING, after(S.DELETING, "c1"), [], []),
        (S.DELETED, after(S.DELETED), [], []),
        (S.FAILED, after(S.FAILED), [], []),
    ],
)
def test_a_change_tells_the_cell_and_clients(
    before: BuildState | None, record: RecordedBuild, to: list[str], kinds: list[type]
) -> None:
    found = effects(before, record, 7.0, None, STAMPS)
    assert [(one.bus, type(one.message), one.cause) for one in found] == [
        (bus, kind, UUID) for bus, kind in zip(to, kinds, strict=True)
    ]
    for event in (one.message for one in found if isinstance(one.message, BuildEvent)):
        assert (event.state, event.terminal, event.at) == (record.state, record.terminal, 7.0)
        assert event.stamps == (STAMPS if record.terminal else None)
        assert event.code == ("" if record.state is S.DELETED else "why")


def test_a_dispatch_is_the_command_and_the_event() -> None:
    selection = Selection(host_uuid=UUID, host="h", service="s", allocations={UUID: {"VCPU": 1}})
    spec = InstanceSpec(instance_uuid=UUID, project_id="p", flavor="f")
    command = CellBuild(spec=spec, selections=(selection,), consumer_generation=1)
    sent, event = effects(S.ACCEPTED, after(S.SCHEDULED, "c1"), 7.0, command, STAMPS)
    assert (sent.bus, sent.message, event.bus) == ("c1", command, API)
    assert isinstance(event.message, BuildEvent) and (event.message.cell, event.message.attempt) == ("c1", 1)


@pytest.mark.parametrize("before", [S.ACCEPTED, S.SCHEDULED, S.BUILDING, S.ACTIVE, S.FAILED])
def test_a_delete_shows_its_cell_whether_that_has_announced_the_build(before: BuildState) -> None:
    (sent,) = effects(before, after(S.DELETING, "c1"), 7.0)
    assert isinstance(sent.message, CellDelete) and sent.message.begun is (before is not S.SCHEDULED)


@pytest.mark.parametrize(
    ("record", "is_released"),
    [
        (after(S.FAILED), True),
        (after(S.DELETED), True),
        (after(S.ACCEPTED), False),
        (after(S.REFUSED), True),  # a run whose record was lost may have claimed before, and withdraws so
        (after(S.FAILED, "c1"), False),  # the cell releases it
        (after(S.DELETED, "c1"), False),
        (after(S.SCHEDULED, "c1"), False),
        (replace(after(S.DELETED), run=""), False),  # a delete came, and no build
        (replace(after(S.FAILED), code="claim.stranded"), False),  # its machine may run, and its cell is not known
        (replace(after(S.DELETED), code="claim.stranded"), True),  # it held nothing any more when it was deleted
    ],
)
def test_what_has_ended_without_a_cell_is_released_by_its_run(record: RecordedBuild, is_released: bool) -> None:
    releases = [one.message for one in releases_of(record)]
    assert len(releases) == is_released
    for release in releases:
        assert isinstance(release, ReleaseRun)
        assert (release.consumer, release.attempt, release.project_id, release.by) == (UUID, 1, "p", "mine")

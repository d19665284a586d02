"""An instance leaves its cell for another one: what schedulers make of the announcement of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received
from bus.contracts.base import Meta
from bus.contracts.build import BuildEvent, BuildRequest, BuildState
from bus.contracts.cell import CellDelete, InstanceSpec, Selection
from bus.contracts.moves import (
    ARRIVED,
    NOT_ARRIVED,
    AskedBy,
    CellAsks,
    CellBook,
    CellCheck,
    CellMove,
    CellMoveQuery,
    ChangeKind,
    ChangeMachine,
    Condition,
    Departure,
    MachineChanged,
    MoveEvent,
    MoveKind,
    MoveState,
)
from bus.contracts.objects import CellState, ChangedObject, ObjectKind
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    Migration,
    Release,
    ReleaseResult,
    Revert,
    RevertResult,
)
from bus.faults import RequestRefused, RequestTimeout
from scheduler_worker.announcements import CellAsksHandler
from scheduler_worker.domain.builds import NewBuild, RecordedBuild, SinceBuild
from scheduler_worker.domain.objects import ChangeAuthor
from scheduler_worker.domain.recorded_moves import (
    ANNOUNCED,
    Announcements,
    AppliedEvent,
    MoveContext,
    RecordedMove,
    answered,
    handed_on,
    may_ask,
    refused,
    rests,
    stay_after,
    transferred,
)
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.sent import Sent

REQUEST = "d0000000-0000-4000-8000-000000000001"
UUID = "a0000000-0000-4000-8000-000000000001"
HOST = Selection(
    host_uuid="b0000000-0000-4000-8000-000000000001",
    host="there",
    service="s2",
    allocations={"b0000000-0000-4000-8000-000000000001": {"VCPU": 1}},
)
SPEC = InstanceSpec(instance_uuid=UUID, project_id="p", name="n", image="i", flavor="m1.small")
COMMAND = CellMove(
    request_id=REQUEST,
    instance_uuid=UUID,
    project_id="p",
    kind=MoveKind.UNSHELVE,
    spec=SPEC,
    selections=(HOST,),
    limits={"VCPU": 3},
    to_cell="c2",
)
DEPARTURE = Departure(
    cell="c2",
    spec=replace(SPEC, project_id="another"),
    image="snapshot",
    last=HOST,
    selections=(HOST,),
    newest=5,
    sequence=20,
    stay=2,
)
LEFT = MoveEvent(
    request_id=REQUEST,
    instance_uuid=UUID,
    project_id="p",
    kind=MoveKind.UNSHELVE,
    state=MoveState.SCHEDULED,
    sequence=20,
    departure=DEPARTURE,
)


def on_record(
    *, state: BuildState = BuildState.ACTIVE, cell: str = "c1", sequence: int = 19, stay: int = 2
) -> MoveContext:
    return MoveContext(
        move=RecordedMove(
            request_id=REQUEST,
            instance_uuid=UUID,
            project_id="p",
            kind=MoveKind.UNSHELVE,
            digest=b"",
            state=MoveState.SCHEDULED,
            sequence=2,
            cell=cell,
            command=COMMAND,
        ),
        build=RecordedBuild(
            instance_uuid=UUID,
            project_id="p",
            state=state,
            sequence=sequence,
            terminal=True,
            cell=cell,
            instance=SinceBuild(condition=Condition.OFFLOADED, under_way=REQUEST, stay=stay),
        ),
        build_request=BuildRequest(instance_uuid=UUID, project_id="p", flavor="m1.small"),
    )


def begun(known: MoveContext) -> Announcements:
    builds = {} if known.build is None else {UUID: known.build}
    return Announcements(builds, {} if known.move is None else {REQUEST: known.move}, 100.0)


def applied(known: MoveContext, event: MoveEvent = LEFT) -> Announcements:
    batch = begun(known)
    batch.apply(event, "c1")
    return batch


def sent(batch: Announcements, bus: str) -> list[object]:
    return [one.message for one in batch.messages if one.bus == bus]


@pytest.mark.parametrize(("stay", "sequence"), [(2, 19), (2, 35), (1, 19), (0, 10**6)])
def test_a_departure_counts_by_its_stay_whatever_its_number(stay: int, sequence: int) -> None:
    """Seed 11 of `transfers-restored`: one of a record with old numbers was ignored, and the instance in no cell."""
    batch = applied(on_record(stay=stay, sequence=sequence))
    (command,) = sent(batch, "c2")
    assert isinstance(command, CellMove) and command.arrival is not None
    assert (batch.builds[UUID].cell, batch.builds[UUID].now.stay, command.arrival.stay) == ("c2", 3, 2)
    number = max(sequence, 20)
    assert (command.arrival.sequence, batch.builds[UUID].sequence) == (number, number), "its next cell goes on there"


def test_one_that_is_being_deleted_is_deleted_in_the_cell_that_has_it() -> None:
    batch = applied(on_record(state=BuildState.DELETING))
    command, delete = sent(batch, "c2")
    assert isinstance(command, CellMove)
    assert delete == CellDelete(instance_uuid=UUID, project_id="p", stay=3)


def test_what_is_silent_is_commanded_again_with_its_departure() -> None:
    """A query would end it as lost, and the instance would be in no cell."""
    command = applied(on_record()).moves[REQUEST].command
    assert command is not None and command.arrival is not None and command.to_cell is None


ASKED = AskedBy(cell="c1", request_id=REQUEST)
CHANGE = ChangeMachine(
    change=ChangeKind.CHECK,
    spec=SPEC,
    attempt=5,
    order=9,
    host_uuid=HOST.host_uuid,
    service="s2",
    allocations={},
    image="snapshot",
    asked_by=ASKED,
)
ANSWER = MachineChanged(
    instance_uuid=UUID,
    attempt=5,
    order=9,
    host_uuid=HOST.host_uuid,
    service="s2",
    change=ChangeKind.CHECK,
    done=True,
    asked_by=ASKED,
)


CLAIM = Claim(
    consumer=UUID,
    attempt=3,
    consumer_generation=1,
    options=(ClaimOption(allocations=HOST.allocations),),
    project_id="p",
    migration=Migration(uuid=REQUEST, source={"b0000000-0000-4000-8000-000000000009": {"VCPU": 1}}),
)
OTHER = "d0000000-0000-4000-8000-000000000009"


def test_what_an_instance_without_a_record_holds_is_not_known_to_be_another_cells() -> None:
    """The schedulers' database was set back to before its build: the cell took the refusal for a release."""
    release = CellBook(asked_by=ASKED, instance_uuid=UUID, question=Release(consumer=UUID, attempt=4))
    assert refused(release, replace(on_record(), build=None)) is None
    claim = refused(replace(release, question=CLAIM), replace(on_record(), build=None))
    assert claim is not None and isinstance(claim.answer, ClaimResult), "it is begun by nobody"


def test_a_claim_that_placement_refuses_for_good_is_not_asked_again() -> None:
    """It was asked each 15 s for ever, and neither an abort nor a delete could end that."""
    claim = CellBook(asked_by=ASKED, instance_uuid=UUID, question=CLAIM)
    got = answered(claim, RequestRefused("too long", code="message.invalid"))
    assert got is not None and isinstance(got.answer, ClaimResult) and got.answer.outcome is ClaimOutcome.INVALID
    assert answered(claim, RequestTimeout("no answer")) is None
    release = replace(claim, question=Release(consumer=UUID, attempt=4))
    assert answered(release, RequestRefused("too long", code="message.invalid")) is None


class Giving:
    """Placement takes back whatever it is asked to."""

    async def ask(self, questions: Sequence[object]) -> list[ReleaseResult]:
        return [ReleaseResult(outcome="released") for _ in questions]


async def test_two_questions_about_one_instance_in_a_batch_are_both_answered_and_no_departure_counts_any_more() -> None:
    """Of two that give its claim back the later one rules out every departure from its stay."""
    known, relay = on_record(), Sent()
    assert known.build is not None and known.move is not None and known.build_request is not None
    store = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    store.publish_through(relay)  # type: ignore[arg-type]
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=known.build_request, build=known.build)], 1.0)
    async with store.operation() as operation:
        await operation.insert_moves([known.move], 1.0)
    books = [
        CellBook(asked_by=ASKED, instance_uuid=UUID, question=Release(consumer=UUID, attempt=attempt), stay=stay)
        for attempt, stay in ((5, 3), (4, 2))
    ]
    batch = [Received(CellAsks(message=book), Meta(id=f"m{book.stay}"), "c1", "scheduler.asks") for book in books]
    handler = CellAsksHandler(store, "c1", clock=SystemClock(), cells={}, claims=cast("Any", Giving()))
    assert await handler(batch) == [Done(), Done()]
    sent_back = [one.message for _, rows in relay.rows for one in rows]
    assert sent_back == [replace(book, answer=ReleaseResult(outcome="released")) for book in books]
    async with store.operation() as operation:
        assert (await operation.known([(REQUEST, UUID)]))[REQUEST, UUID].now.stay == 4


# --- an instance that leaves its cell, a row for each condition: records, commands, and what placement is asked


KNOWN = on_record()


def of_move(**more: Any) -> MoveContext:
    assert KNOWN.move is not None
    return replace(KNOWN, move=replace(KNOWN.move, **more))


def of_build(**more: Any) -> MoveContext:
    assert KNOWN.build is not None
    return replace(KNOWN, build=replace(KNOWN.build, **more))


# --- the commands to the cell that it goes to


@pytest.mark.parametrize(
    ("known", "goes_on"),
    [
        (KNOWN, True),
        (of_move(terminal=True), False),
        (of_move(command=None), False),
        (of_move(command=replace(COMMAND, to_cell="c3")), False),
        (of_move(command=replace(COMMAND, to_cell=None)), False),
        (replace(KNOWN, move=None), False),
    ],
)
def test_the_next_cell_is_commanded_what_leads_there_and_queried_otherwise(known: MoveContext, goes_on: bool) -> None:
    assert known.build is not None
    move, build, (command,) = transferred(known.move, known.build, LEFT)
    assert (build.cell, build.host, build.host_uuid) == ("c2", None, None)
    if goes_on:
        assert isinstance(command, CellMove) and move is not None
        assert (move.cell, move.host, move.host_uuid) == ("c2", HOST.host, HOST.host_uuid)
        assert move.command == command == replace(COMMAND, to_cell=None, selections=(), arrival=command.arrival)
    else:
        assert isinstance(command, CellMoveQuery) and move == known.move
        assert (command.request_id, command.instance_uuid, command.project_id) == (REQUEST, UUID, "p")
    assert command.arrival is not None and command.arrival.spec.project_id == "p"


@pytest.mark.parametrize(("kind", "queried"), [(MoveKind.RESIZE, MoveKind.RESIZE), (None, MoveKind.UNSHELVE)])
def test_the_next_cell_is_queried_about_the_kind_that_is_known(kind: MoveKind | None, queried: MoveKind) -> None:
    assert KNOWN.build is not None
    _, _, (query,) = transferred(None, KNOWN.build, replace(LEFT, kind=kind))
    assert isinstance(query, CellMoveQuery) and query.kind is queried


@pytest.mark.parametrize("state", [BuildState.ACTIVE, BuildState.DELETING, BuildState.DELETED])
def test_the_next_cell_deletes_what_is_to_be_deleted(state: BuildState) -> None:
    build = of_build(state=state).build
    assert build is not None
    deletes = [one for one in transferred(None, build, LEFT)[2] if isinstance(one, CellDelete)]
    assert len(deletes) == (state is BuildState.DELETING)


# --- what placement is asked for a cell

REVERT = Revert(consumer=UUID, migration=Migration(uuid=REQUEST, source={}), source_attempt=1, attempt=4)
RELEASE = Release(consumer=UUID, attempt=4)
OF_MIGRATION = Release(consumer=REQUEST, project_id="p", of_migration=True)
CHOSEN = ClaimOption(allocations=HOST.allocations)


@pytest.mark.parametrize(
    ("question", "known", "cell", "asked"),
    [
        (CLAIM, KNOWN, "c1", True),
        (CLAIM, replace(KNOWN, build=None), "c1", False),
        (CLAIM, of_build(cell="c2"), "c1", False),
        (CLAIM, of_build(cell="c2"), "c2", False),
        (CLAIM, of_build(instance_uuid=OTHER), "c1", False),
        (CLAIM, replace(KNOWN, move=None), "c1", False),
        (CLAIM, of_move(instance_uuid=OTHER), "c1", False),
        (CLAIM, of_move(command=None), "c1", False),
        (CLAIM, of_move(command=replace(COMMAND, to_cell=None)), "c1", False),
        (CLAIM, of_build(project_id="q"), "c1", False),
        (replace(CLAIM, consumer=OTHER), KNOWN, "c1", False),
        (replace(CLAIM, consumer=REQUEST), KNOWN, "c1", False),
        (replace(CLAIM, migration=None), KNOWN, "c1", True),
        (replace(CLAIM, migration=Migration(uuid=OTHER, source={})), KNOWN, "c1", False),
        (replace(CLAIM, options=(CHOSEN, ClaimOption(allocations={OTHER: {"VCPU": 1}}))), KNOWN, "c1", False),
        (REVERT, KNOWN, "c1", True),
        (REVERT, replace(KNOWN, move=None), "c1", True),
        (replace(REVERT, consumer=OTHER), KNOWN, "c1", False),
        (replace(REVERT, migration=Migration(uuid=OTHER, source={})), KNOWN, "c1", False),
        (RELEASE, replace(KNOWN, move=None), "c1", True),
        (replace(RELEASE, consumer=OTHER), KNOWN, "c1", False),
        (OF_MIGRATION, KNOWN, "c1", True),
        (replace(OF_MIGRATION, of_migration=False), KNOWN, "c1", False),
        (replace(OF_MIGRATION, consumer=OTHER), KNOWN, "c1", False),
    ],
)
def test_placement_is_asked_for_a_cell_by_what_is_on_record(
    question: Claim | Revert | Release, known: MoveContext, cell: str, asked: bool
) -> None:
    book = CellBook(asked_by=ASKED, instance_uuid=UUID, question=question, stay=2)
    assert may_ask(book, known, cell) is asked
    assert not may_ask(replace(book, asked_by=replace(ASKED, cell="c3")), known, cell)
    if known.build is None:
        return

    def in_stay(stay: int) -> MoveContext:
        return replace(known, build=replace(known.build, instance=replace(known.now, stay=stay)))

    assert not may_ask(book, in_stay(4), cell), "it has come back since"
    assert may_ask(book, in_stay(1), cell) is asked, "the schedulers have forgotten that it came"


@pytest.mark.parametrize(
    ("question", "gives"),
    [
        (CLAIM, False),
        (REVERT, True),
        (RELEASE, True),
        (OF_MIGRATION, False),
        (replace(REVERT, consumer=OTHER), False),
    ],
)
def test_what_gives_the_other_cells_hosts_back(question: Claim | Revert | Release, gives: bool) -> None:
    book = CellBook(asked_by=ASKED, instance_uuid=UUID, question=question, stay=2)
    assert stay_after(book) == 2 + gives
    # It may be asked about again; by then a departure of the stay before does not count.
    (rest,) = rests([book, replace(book, question=CLAIM)], {(REQUEST, UUID): KNOWN})
    after = replace(KNOWN, build=rest.build)
    assert may_ask(book, after, "c1") is may_ask(book, KNOWN, "c1")
    assert bool(begun(after).apply(LEFT, "c1").departed) is not gives
    # Its migration is released after that, and the stay that began by it goes on.
    released = replace(book, question=OF_MIGRATION)
    assert may_ask(released, after, "c1")
    assert rests([released], {(REQUEST, UUID): after}) == [rest]


def test_a_question_that_is_refused_has_an_answer_of_its_kind() -> None:
    for question, answer in ((CLAIM, ClaimResult), (REVERT, RevertResult), (RELEASE, ReleaseResult)):
        book = refused(CellBook(asked_by=ASKED, instance_uuid=UUID, question=question), KNOWN)
        assert book is not None and type(book.answer) is answer


def test_what_placement_answers_is_handed_on() -> None:
    book = CellBook(asked_by=ASKED, instance_uuid=UUID, question=RELEASE)
    assert answered(book, ReleaseResult(outcome="released")) == replace(book, answer=ReleaseResult(outcome="released"))


@pytest.mark.parametrize(
    ("answer", "cell", "to"),
    [(False, "c1", "c2"), (False, "c2", None), (False, "c3", None), (True, "c1", None), (True, "c2", "c1")],
)
def test_a_check_is_handed_on_by_the_cell_that_sends_it(answer: bool, cell: str, to: str | None) -> None:
    check = CellCheck(cell="c2", asked_by=ASKED, **({"answer": ANSWER} if answer else {"change": CHANGE}))
    message = handed_on(check, cell)
    assert (None if message is None else (message.bus, message.message)) == (None if to is None else (to, check))


async def asked_of(
    state: CellState | None, cells: Mapping[str, Any], *, abandoned: bool = True, **more: Any
) -> list[tuple[str, Any]]:
    """Where a check of a host in c2 goes, with this decision about c2 on record; (bus, message)."""
    known, relay = on_record(**more), Sent()
    assert known.build is not None and known.move is not None and known.build_request is not None
    store = MemoryBuilds(MemoryBuildTable(SystemClock()).session())
    store.publish_through(relay)  # type: ignore[arg-type]
    async with store.unit() as unit:
        await unit.insert([NewBuild(request=known.build_request, build=known.build)], 1.0)
    async with store.operation() as operation:
        await operation.insert_moves([known.move], 1.0)
        if state is not None:
            body = {"state": state.value, "abandoned": abandoned}
            one = ChangedObject(kind=ObjectKind.CELL, name="c2", before=None, after=body)
            await operation.lock_objects()
            await operation.write_objects([one], ChangeAuthor(who="ann", why="", at=1.0))
    check = CellCheck(cell="c2", asked_by=ASKED, change=CHANGE, stay=2, is_query=True)
    handler = CellAsksHandler(store, "c1", clock=SystemClock(), cells=cells, claims=cast("Any", Giving()))
    assert await handler([Received(CellAsks(message=check), Meta(id="m"), "c1", "scheduler.asks")]) == [Done()]
    return [(one.bus, one.message) for _, rows in relay.rows for one in rows]


@pytest.mark.parametrize(
    ("stay", "code", "state", "abandoned"),
    [
        (2, NOT_ARRIVED, CellState.REMOVED, True),
        (3, ARRIVED, CellState.REMOVED, True),
        (3, ARRIVED, CellState.REMOVED, False),
        (3, ARRIVED, None, False),
    ],
)
async def test_a_check_about_a_cell_that_was_removed_is_answered_by_the_schedulers(
    stay: int, code: str, state: CellState | None, abandoned: bool
) -> None:
    """It lay in the outbox for good, and the cell that was set back asked for ever, also if its object is gone."""
    ((bus, answered_),) = await asked_of(state, {}, abandoned=abandoned, stay=stay)
    assert (bus, answered_.cell, answered_.answer.code, answered_.answer.done) == ("c1", "c2", code, False)
    assert answered_.asked_by == answered_.answer.asked_by == ASKED


@pytest.mark.parametrize("state", [CellState.REMOVED, None], ids=str)
async def test_that_nothing_has_arrived_in_a_removed_cell_is_not_known_by_the_record_alone(
    state: CellState | None,
) -> None:
    """Schedulers that were set back to before the departure answered so, though the instance ran there."""
    assert await asked_of(state, {}, abandoned=False) == []


@pytest.mark.parametrize(
    ("state", "cells"), [(None, {"c2": None}), (CellState.ENABLED, {}), (CellState.REMOVED, {"c2": None})], ids=str
)
async def test_a_cell_that_is_in_use_or_entered_again_answers_a_check_itself(
    state: CellState | None, cells: Mapping[str, Any]
) -> None:
    """Whatever this scheduler has heard of it: the decision on record counts."""
    ((bus, sent),) = await asked_of(state, cells)
    assert (bus, sent.answer) == ("c2", None)


# --- the announcements of a batch

PLAIN = replace(LEFT, departure=None, state=MoveState.CHANGING)


@pytest.mark.parametrize(
    ("known", "event", "cell", "why", "departs"),
    [
        (KNOWN, PLAIN, "c1", "", False),
        (KNOWN, replace(PLAIN, sequence=2), "c1", "late", False),
        (of_move(cell="c2"), PLAIN, "c1", "foreign", False),
        (KNOWN, PLAIN, "c2", "foreign", False),
        (replace(KNOWN, move=None), PLAIN, "c1", "unknown", False),
        (replace(KNOWN, build=None), PLAIN, "c1", "unknown", False),
        (replace(KNOWN, build=None), LEFT, "c1", "unknown", False),
        (of_move(instance_uuid=OTHER), PLAIN, "c1", "unknown", False),
        (KNOWN, LEFT, "c1", "", True),
        (replace(KNOWN, move=None), LEFT, "c1", "", True),
        (of_move(instance_uuid=OTHER), LEFT, "c1", "", True),
        (of_build(cell="c2"), LEFT, "c1", "", False),
    ],
)  # fmt: skip
def test_an_announcement_is_applied_to_its_own_request_and_of_its_own_cell(
    known: MoveContext, event: Any, cell: str, why: str, departs: bool
) -> None:
    batch = begun(known)
    found = batch.apply(event, cell)
    assert (found.verdict, found.departed) == (why or ANNOUNCED, "c2" if departs else "")
    moved = of_move(instance_uuid=OTHER).move if known.move is not None and known.move.instance_uuid == OTHER else None
    if moved is not None:
        assert batch.moves[REQUEST] == moved and batch.changed == {}


def test_a_departure_has_its_line_at_its_own_time_and_its_number_stays() -> None:
    for at, shown in ((7.0, 7.0), (0.0, 100.0)):
        batch = applied(KNOWN, replace(LEFT, at=at))
        line = batch.timelines[UUID][-1]
        assert (line.at, line.who, line.what, line.detail) == (shown, "conductor c1", "departed", DEPARTURE.cell)
        assert batch.builds[UUID].sequence == LEFT.sequence and [*batch.changed] == [REQUEST]
        assert [one.bus for one in batch.messages] == ["api", "c2"]


# --- builds and moves in one batch


def test_events_of_a_build_and_of_a_move_of_it_are_applied_in_their_order() -> None:
    assert KNOWN.build is not None
    batch = begun(of_build(state=BuildState.BUILDING, terminal=False, sequence=10))
    active = BuildEvent(instance_uuid=UUID, project_id="q", state=BuildState.ACTIVE, sequence=11, terminal=True)
    for event in (active, PLAIN, active):
        found = batch.apply(event, "c1")
    assert found == AppliedEvent("late", active), "its timeline shows it"
    assert [one.what for one in batch.timelines[UUID]] == ["active", "unshelve changing", "active"]
    after = batch.builds[UUID]
    assert (after.state, after.sequence, [*batch.changed]) == (BuildState.ACTIVE, PLAIN.sequence, [REQUEST])


@pytest.mark.parametrize(("build", "verdict"), [({"cell": None}, "foreign"), ({"cell": "c2"}, "foreign")])
def test_a_build_is_announced_by_the_cell_that_has_it(build: dict[str, Any], verdict: str) -> None:
    event = BuildEvent(instance_uuid=UUID, project_id="p", state=BuildState.DELETED, sequence=90, terminal=True)
    batch = begun(of_build(**build))
    assert batch.apply(event, "c1") == AppliedEvent(verdict, event) and batch.timelines == {}


def test_a_failure_waits_for_the_end_before_it_until_it_has_waited_enough() -> None:
    event = BuildEvent(instance_uuid=UUID, project_id="p", state=BuildState.FAILED, sequence=90)
    batch = begun(of_build(terminal=False))
    assert batch.apply(event, "c1") == AppliedEvent("early", event) and batch.timelines == {}
    assert batch.apply(event, "c1", waited=True).verdict == ANNOUNCED

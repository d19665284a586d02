"""An instance that leaves its cell, a row for each condition: records, commands, and what placement is asked."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.build import BuildState
from bus.contracts.cell import CellDelete
from bus.contracts.moves import CellBook, CellCheck, CellMove, CellMoveQuery, Condition, MoveKind, MoveState
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimResult,
    Migration,
    Release,
    ReleaseResult,
    Revert,
    RevertResult,
)
from scheduler_worker.domain.recorded_moves import MoveContext
from scheduler_worker.domain.transfers import (
    AnnouncedMoves,
    answered,
    handed_on,
    may_ask,
    refused,
    rests,
    stay_after,
    transfer,
)
from tests.unit.scheduler.test_transfers import (
    ANSWER,
    ASKED,
    CHANGE,
    CLAIM,
    COMMAND,
    DEPARTURE,
    HOST,
    LEFT,
    OTHER,
    REQUEST,
    UUID,
    applied,
    on_record,
)

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
    gone = transfer(LEFT, known.build, known.move)
    (command,) = gone.commands
    assert (gone.cell, gone.build.cell, gone.build.host, gone.build.host_uuid) == ("c2", "c2", None, None)
    if goes_on:
        assert isinstance(command, CellMove) and gone.move is not None
        assert (gone.move.cell, gone.move.host, gone.move.host_uuid) == ("c2", HOST.host, HOST.host_uuid)
        assert gone.move.command == command == replace(COMMAND, to_cell=None, selections=(), arrival=command.arrival)
    else:
        assert isinstance(command, CellMoveQuery) and gone.move == known.move
        assert (command.request_id, command.instance_uuid, command.project_id) == (REQUEST, UUID, "p")
    assert command.arrival is not None and command.arrival.spec.project_id == "p"


@pytest.mark.parametrize(("kind", "queried"), [(MoveKind.RESIZE, MoveKind.RESIZE), (None, MoveKind.UNSHELVE)])
def test_the_next_cell_is_queried_about_the_kind_that_is_known(kind: MoveKind | None, queried: MoveKind) -> None:
    assert KNOWN.build is not None
    (query,) = transfer(replace(LEFT, kind=kind), KNOWN.build, None).commands
    assert isinstance(query, CellMoveQuery) and query.kind is queried


@pytest.mark.parametrize("state", [BuildState.ACTIVE, BuildState.DELETING, BuildState.DELETED])
def test_the_next_cell_deletes_what_is_to_be_deleted(state: BuildState) -> None:
    build = of_build(state=state).build
    assert build is not None
    deletes = [one for one in transfer(LEFT, build, None).commands if isinstance(one, CellDelete)]
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
    assert not may_ask(book, replace(known, instance=on_record(stay=4).instance), cell), "it has come back since"
    forgotten = replace(known, instance=on_record(stay=1).instance)
    assert may_ask(book, forgotten, cell) is asked, "the schedulers have forgotten that it came"


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
    (rest,) = rests([book, replace(book, question=CLAIM)], {REQUEST: KNOWN})
    after = replace(KNOWN, instance=rest)
    assert may_ask(book, after, "c1") is may_ask(book, KNOWN, "c1")
    assert bool(applied(after).departed) is not gives
    # Its migration is released after that, and the stay that began by it goes on.
    released = replace(book, question=OF_MIGRATION)
    assert may_ask(released, after, "c1")
    assert rests([released], {REQUEST: after}) == [rest]


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
    batch = applied(known, event, cell)
    assert [reason for _, reason in batch.ignored] == ([why] if why else [])
    assert batch.departed == ({UUID: "c2"} if departs else {})
    moved = of_move(instance_uuid=OTHER).move if known.move is not None and known.move.instance_uuid == OTHER else None
    if moved is not None:
        assert batch.moves[REQUEST] == moved and batch.changed == {}


def test_a_departure_has_its_line_at_its_own_time_and_its_number_stays() -> None:
    for at, shown in ((7.0, 7.0), (0.0, 100.0)):
        batch = applied(KNOWN, replace(LEFT, at=at))
        line = batch.timelines[UUID][-1]
        assert (line.at, line.who, line.what, line.detail) == (shown, "conductor c1", "departed", DEPARTURE.cell)
        assert batch.instances[UUID].sequence == LEFT.sequence and [*batch.changed] == [REQUEST]
        assert [one.bus for one in batch.messages] == ["api", "c2"]


def test_records_of_which_a_part_is_missing_are_left_as_they_are() -> None:
    batch = AnnouncedMoves("c1", {REQUEST: replace(KNOWN, move=None, instance=None), OTHER: MoveContext()}, 100.0)
    assert (batch.moves, [*batch.builds]) == ({}, [UUID])
    assert batch.instances[UUID].condition is Condition.ACTIVE

"""An instance moves to another cell, which keeps its machine until the end: what schedulers record and command."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.build import BuildState
from bus.contracts.cell import CellDelete
from bus.contracts.moves import (
    CellMove,
    CellMoveQuery,
    Condition,
    Departure,
    GivenBack,
    KeptMachine,
    MoveEvent,
    MoveKind,
    MoveRequest,
    MoveState,
)
from scheduler_worker.domain.moves import ends_another, may_leave_cell, under_way
from scheduler_worker.domain.recorded_moves import InstanceRecord, MoveContext
from scheduler_worker.domain.transfers import AnnouncedMoves, by_keeper, repeated
from tests.unit.scheduler.test_transfers import COMMAND, DEPARTURE, HOST, REQUEST, UUID, on_record, sent
from tests.unit.scheduler.test_transfers import applied as applied_at

OTHER = "d0000000-0000-4000-8000-000000000002"
KEPT = KeptMachine(cell="c1", migration=REQUEST, at=90.0)
HANDED = replace(DEPARTURE, spec=replace(DEPARTURE.spec, project_id="p"), kind=MoveKind.MIGRATE, kept=KEPT)
LEFT = MoveEvent(
    request_id=REQUEST,
    instance_uuid=UUID,
    project_id="p",
    kind=MoveKind.MIGRATE,
    state=MoveState.MIGRATING,
    sequence=20,
    departure=HANDED,
)
BACK = replace(
    HANDED,
    cell="c1",
    sequence=26,
    kept=None,
    given_back=GivenBack(migration=REQUEST, code="max_retries_exceeded"),
)
NOTHING_KEPT = replace(HANDED, kept=None)
RETURNED = replace(LEFT, state=MoveState.UNDOING, sequence=26, departure=BACK)
DONE = replace(
    LEFT, state=MoveState.DONE, terminal=True, sequence=25, departure=None, condition=Condition.RESIZED, host="there"
)
ACTIVE = replace(DONE, condition=Condition.ACTIVE, settled=REQUEST)


def commanded(**fields: object) -> MoveContext:
    found = on_record(**fields)  # type: ignore[arg-type]
    assert found.move is not None
    command = replace(COMMAND, kind=MoveKind.MIGRATE)
    return replace(found, move=replace(found.move, kind=MoveKind.MIGRATE, command=command))


def after(batch: AnnouncedMoves) -> MoveContext:
    """The records as the batch leaves them."""
    return MoveContext(move=batch.moves.get(REQUEST), build=batch.builds[UUID], instance=batch.instances[UUID])


def received(known: MoveContext, event: MoveEvent, cell: str) -> AnnouncedMoves:
    return applied_at(known, event, cell)


def in_next_cell() -> MoveContext:
    return after(received(commanded(), LEFT, "c1"))


def handed(known: MoveContext) -> Departure | None:
    assert known.instance is not None
    return known.instance.handed


def test_what_is_kept_is_on_record_with_the_departure() -> None:
    batch = received(commanded(), LEFT, "c1")
    (command,) = sent(batch, "c2")
    assert isinstance(command, CellMove) and command.arrival == HANDED and command.selections == (HOST,)
    assert (handed(after(batch)), after(batch).build.cell) == (HANDED, "c2")  # type: ignore[union-attr]


def test_the_former_cell_is_commanded_only_when_the_instance_is_there_for_good() -> None:
    """It may go back as long as the next cell names one that keeps its machine, also after the request has ended."""
    resized = received(in_next_cell(), replace(DONE, kept_in="c1"), "c2")
    assert (sent(resized, "c1"), handed(after(resized))) == ([], HANDED)
    confirmed = replace(ACTIVE, request_id=OTHER, kind=MoveKind.CONFIRM, sequence=27)
    assert confirmed.settled == REQUEST
    known = replace(after(resized), move=replace(resized.moves[REQUEST], request_id=OTHER, terminal=False))
    batch = AnnouncedMoves("c2", {OTHER: known}, 100.0)
    batch.apply(confirmed)
    (command,) = sent(batch, "c1")
    assert isinstance(command, CellMove)
    assert (command.request_id, command.active_in, command.arrival) == (REQUEST, "c2", HANDED)
    assert (handed(after(batch)), UUID in batch.timelines) == (NOTHING_KEPT, True)


def test_what_is_under_way_there_or_not_its_cells_word_destroys_nothing() -> None:
    known = in_next_cell()
    under = replace(DONE, state=MoveState.PREPARING, terminal=False, condition=Condition.MOVING, sequence=24)
    unknown = replace(ACTIVE, state=MoveState.REFUSED, condition=Condition.UNKNOWN, sequence=0, settled=None)
    other = replace(ACTIVE, settled=OTHER)
    for event, cell in ((under, "c2"), (unknown, "c2"), (other, "c2"), (ACTIVE, "c1"), (ACTIVE, "c3")):
        batch = received(known, event, cell)
        assert (sent(batch, "c1"), batch.instances[UUID].handed) == ([], HANDED), event


def test_it_goes_back_by_the_same_request_which_ends_there() -> None:
    batch = received(in_next_cell(), RETURNED, "c2")
    (command,) = sent(batch, "c1")
    assert isinstance(command, CellMove) and (command.arrival, command.active_in) == (BACK, None)
    assert (batch.departed, batch.moves[REQUEST].cell, repeated(batch.moves[REQUEST])) == ({UUID: "c1"}, "c1", command)
    failed = replace(DONE, state=MoveState.FAILED, condition=Condition.ACTIVE, sequence=30, code="max_retries_exceeded")
    ended = received(after(batch), failed, "c1")
    assert (sent(ended, "c1"), sent(ended, "c2")) == ([], [])
    leaves = MoveRequest(request_id=OTHER, instance_uuid=UUID, project_id="p", kind=MoveKind.MIGRATE)
    assert may_leave_cell(leaves, ended.instances[UUID])
    # Its database is set back to when it kept the machine: it is given that back once more, at any time.
    (again,) = sent(received(after(ended), LEFT, "c1"), "c1")
    assert isinstance(again, CellMoveQuery) and again.arrival == BACK
    other = replace(LEFT, departure=replace(HANDED, kept=replace(KEPT, migration=OTHER)))
    assert sent(received(after(ended), other, "c1"), "c1") == [], "which would be answered by the same announcement"
    assert ended.moves[REQUEST].state is MoveState.FAILED


def test_one_that_goes_back_after_its_request_has_ended_is_followed_there() -> None:
    resized = after(received(in_next_cell(), replace(DONE, kept_in="c1"), "c2"))
    batch = received(resized, RETURNED, "c2")
    (query,) = sent(batch, "c1")
    assert isinstance(query, CellMoveQuery) and query.arrival == BACK
    undone = replace(
        LEFT, state=MoveState.UNDOING, sequence=31, departure=None, condition=Condition.ACTIVE, host="here"
    )
    ended = received(after(batch), undone, "c1")
    assert (ended.instances[UUID].condition, ended.builds[UUID].host) == (Condition.ACTIVE, "here")


def test_a_delete_follows_it_back() -> None:
    known = in_next_cell()
    assert known.build is not None
    batch = received(replace(known, build=replace(known.build, state=BuildState.DELETING)), RETURNED, "c2")
    assert sent(batch, "c1")[-1] == CellDelete(instance_uuid=UUID, project_id="p")


def test_a_cell_that_announces_again_what_it_keeps_is_answered_by_what_is_on_record() -> None:
    # Still needed: the cell that has the instance is queried with the departure, and gives back what it never had.
    (query,) = sent(received(in_next_cell(), LEFT, "c1"), "c2")
    assert isinstance(query, CellMoveQuery) and query.arrival == HANDED
    known = in_next_cell()
    assert known.build is not None
    deleted = replace(known, build=replace(known.build, state=BuildState.DELETED))
    (command,) = sent(received(deleted, LEFT, "c1"), "c1")
    assert isinstance(command, CellMove) and command.active_in == "c2"
    # It has been given back, and does not know that.
    (again,) = sent(received(after(received(in_next_cell(), RETURNED, "c2")), LEFT, "c1"), "c1")
    assert isinstance(again, CellMoveQuery) and again.arrival == BACK


def test_schedulers_that_were_set_back_destroy_what_is_kept_by_the_next_cells_statement_only() -> None:
    """Their record, from before the departure or from after it, names the next cell and no departure."""
    known = in_next_cell()
    assert known.build is not None
    for state in (BuildState.ACTIVE, BuildState.FAILED):
        forgotten = replace(known, instance=None, build=replace(known.build, state=state))
        batch = received(forgotten, LEFT, "c1")
        (query,) = sent(batch, "c2")
        assert isinstance(query, CellMoveQuery) and query.arrival == HANDED
        assert (sent(batch, "c1"), handed(after(batch))) == ([], HANDED)
        claiming = replace(DONE, state=MoveState.CLAIMING, terminal=False, condition=Condition.MOVING, kept_in="c1")
        assert sent(received(after(batch), claiming, "c2"), "c1") == []
        # Its answer, which changes nothing of the request, which has ended.
        answered = received(after(batch), replace(ACTIVE, sequence=2), "c2")
        (command,) = sent(answered, "c1")
        assert isinstance(command, CellMove) and (command.request_id, command.active_in) == (REQUEST, "c2")
        assert answered.instances[UUID].handed == NOTHING_KEPT


def test_a_late_announcement_of_what_was_kept_before_does_not_pin_the_instance_to_its_cell() -> None:
    """No cell would ever state that it is settled, and the instance could not leave its cell again."""
    later = replace(HANDED, sequence=40, kept=replace(KEPT, migration=OTHER))
    again = replace(LEFT, request_id=OTHER, sequence=40, departure=later)
    known = in_next_cell()
    here = after(received(after(received(known, ACTIVE, "c2")), RETURNED, "c2"))
    there = after(received(here, again, "c1"))
    assert handed(there) == later
    settled = after(received(there, replace(ACTIVE, sequence=45, settled=OTHER), "c2"))
    assert handed(settled) == replace(later, kept=None)
    late = after(received(settled, LEFT, "c1"))
    assert handed(late) == handed(settled)
    same = after(received(settled, again, "c1"))
    assert handed(same) == later, "its cell still keeps it: it has not had the command"


def test_a_departure_to_another_cell_than_that_on_record_is_neither_recorded_nor_passed_on() -> None:
    """The cell on record would give back what it has never had, while the instance runs in the other one."""
    known = in_next_cell()
    assert known.build is not None
    elsewhere = replace(known, instance=None, build=replace(known.build, cell="c3"))
    batch = received(elsewhere, LEFT, "c1")
    (query,) = sent(batch, "c3")
    assert isinstance(query, CellMoveQuery) and query.arrival is None
    assert handed(after(batch)) is None


def test_what_a_worker_of_the_version_before_announces_destroys_nothing() -> None:
    """It knows neither `kept_in` nor `settled`."""
    for condition in (Condition.ACTIVE, Condition.OFFLOADED, Condition.RESIZED, Condition.STOPPED):
        batch = received(in_next_cell(), replace(DONE, condition=condition, sequence=27), "c2")
        assert (sent(batch, "c1"), batch.instances[UUID].handed) == ([], HANDED)


def test_another_announcement_of_the_same_request_by_a_cell_that_was_set_back_destroys_nothing() -> None:
    anew = replace(LEFT, sequence=1_000_020, departure=replace(HANDED, kept=replace(KEPT, at=500.0)))
    batch = received(in_next_cell(), anew, "c1")
    assert (batch.departed, sent(batch, "c1")) == ({}, [])


def test_schedulers_that_have_forgotten_the_request_have_it_given_back() -> None:
    batch = AnnouncedMoves("c1", {REQUEST: replace(commanded(), move=None)}, 100.0)
    batch.apply(LEFT)
    (query,) = sent(batch, "c2")
    assert isinstance(query, CellMoveQuery) and query.arrival == HANDED
    assert batch.instances[UUID].handed == HANDED


def test_the_end_of_what_was_kept_is_a_line_of_the_timeline_and_nothing_else() -> None:
    there = after(received(in_next_cell(), ACTIVE, "c2"))
    gone = replace(LEFT, state=MoveState.SOURCE_GONE, sequence=21, departure=None)
    batch = received(there, gone, "c1")
    assert [one.what for one in batch.timelines[UUID]] == ["migrate source-gone"]
    assert (batch.instances[UUID], batch.messages) == (there.instance, [])


def test_a_revert_that_an_operator_forces_is_sent_while_the_move_that_it_ends_is_held() -> None:
    known = in_next_cell()
    assert known.instance is not None
    known = replace(known, instance=replace(known.instance, under_way=REQUEST))
    for kind, force, joins in (
        (MoveKind.REVERT, True, True),
        (MoveKind.REVERT, False, False),
        (MoveKind.CONFIRM, True, False),
        (MoveKind.ABORT, False, True),
    ):
        requested = MoveRequest(request_id=OTHER, instance_uuid=UUID, project_id="p", kind=kind, force=force)
        assert ends_another(requested) is joins
        if joins:
            assert under_way(requested, known).under_way == REQUEST, "it does not replace that"
    forced = MoveRequest(request_id=OTHER, instance_uuid=UUID, project_id="p", kind=MoveKind.REVERT, force=True)
    alone = replace(known, instance=replace(known.now, under_way=None))
    assert under_way(forced, alone).under_way == OTHER


def test_while_a_cell_keeps_its_machine_it_leaves_for_no_other() -> None:
    for kind, allowed in ((MoveKind.MIGRATE, True), (MoveKind.RESIZE, True), (MoveKind.LIVE_MIGRATE, False)):
        requested = MoveRequest(request_id=OTHER, instance_uuid=UUID, project_id="p", kind=kind, flavor="m1.small")
        assert may_leave_cell(requested, InstanceRecord(instance_uuid=UUID)) is allowed
        assert not may_leave_cell(requested, InstanceRecord(instance_uuid=UUID, handed=HANDED))


REVERT = CellMove(request_id=OTHER, instance_uuid=UUID, project_id="p", kind=MoveKind.REVERT, room={"VCPU": 3})


def reverting() -> MoveContext:
    """It is resized in its next cell, and a revert is at the cell that keeps its machine."""
    resized = after(received(in_next_cell(), DONE, "c2"))
    assert resized.move is not None and resized.instance is not None
    first = by_keeper(REVERT, resized.instance.handed, "c2")
    assert first is not None and first[0] == "c1"
    move = replace(
        resized.move,
        request_id=OTHER,
        kind=MoveKind.REVERT,
        state=MoveState.SCHEDULED,
        sequence=2,
        terminal=False,
        cell=first[0],
        command=first[1],
    )
    return replace(resized, move=move, instance=replace(resized.instance, under_way=OTHER))


def answered(known: MoveContext, event: MoveEvent, cell: str) -> AnnouncedMoves:
    batch = AnnouncedMoves(cell, {OTHER: known}, 100.0)
    batch.apply(event)
    return batch


SEEN = replace(
    LEFT, request_id=OTHER, kind=MoveKind.REVERT, state=MoveState.UNDOING, sequence=19, departure=None, flavor=""
)


def test_a_revert_queries_the_cell_that_keeps_the_machine_first() -> None:
    known = in_next_cell()
    assert by_keeper(REVERT, handed(known), "c2") == ("c1", replace(REVERT, to_cell="c2"))
    assert by_keeper(replace(REVERT, force=True), handed(known), "c2") is None, "an operator has looked at it"
    assert by_keeper(replace(REVERT, kind=MoveKind.CONFIRM), handed(known), "c2") is None
    assert by_keeper(REVERT, handed(known), "c1") is None, "it is back there"
    assert by_keeper(REVERT, NOTHING_KEPT, "c2") is None
    assert by_keeper(REVERT, None, "c2") is None
    known = reverting()
    assert known.move is not None
    assert repeated(known.move) == replace(REVERT, to_cell="c2"), "as long as that cell is silent"


def test_a_revert_goes_on_in_the_instances_cell_once_the_machine_was_seen() -> None:
    known = reverting()
    batch = answered(known, SEEN, "c1")
    assert sent(batch, "c2") == [replace(REVERT, kept_seen=True)]
    move, instance = batch.moves[OTHER], batch.instances[UUID]
    assert (move.cell, move.terminal, OTHER in batch.changed) == ("c2", False, True)
    assert (instance.condition, instance.under_way) == (Condition.RESIZED, OTHER)
    assert (batch.builds[UUID].cell, batch.builds[UUID].host) == ("c2", "there")
    again = answered(replace(known, move=move), SEEN, "c1")
    assert (sent(again, "c2"), again.changed) == ([], {}), "a copy of the announcement"
    assert repeated(move) == replace(REVERT, kept_seen=True)


def test_a_revert_whose_machine_was_not_seen_ends_and_the_instance_stays() -> None:
    refused = replace(SEEN, state=MoveState.REFUSED, terminal=True, code="move.source_silent")
    batch = answered(reverting(), refused, "c1")
    assert sent(batch, "c2") == []
    move, instance = batch.moves[OTHER], batch.instances[UUID]
    assert (move.state, move.code, move.terminal) == (MoveState.REFUSED, "move.source_silent", True)
    assert (instance.condition, instance.under_way, batch.builds[UUID].cell) == (Condition.RESIZED, None, "c2")
    assert batch.builds[UUID].host == "there"

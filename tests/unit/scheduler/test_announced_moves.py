"""A cell's announcements of a request about an instance, applied in any order of their arrival at the scheduler."""

from __future__ import annotations

from itertools import permutations

import pytest
from msgspec.structs import replace

from bus.contracts.build import BuildState
from bus.contracts.moves import Condition, MoveEvent, MoveKind, MoveState
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.recorded_moves import InstanceRecord, RecordedMove, apply_announcement

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
        applied = apply_announcement(event, move, instance, build, cell=CELL, now=1.0)
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
    applied = apply_announcement(DONE, move, instance, on("host-3"), cell=CELL, now=1.0)
    assert (applied.move.terminal, applied.build, applied.instance) == (True, on("host-3"), instance)


def test_the_end_from_a_cell_whose_numbers_were_set_back_ends_the_move_and_its_condition() -> None:
    move = RecordedMove(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.LIVE_MIGRATE, digest=b"",
        cell=CELL, state=MoveState.FINISHING, sequence=40,
    )  # fmt: skip
    moving = InstanceRecord(instance_uuid=VM, condition=Condition.MOVING, under_way=MOVE, sequence=40)
    applied = apply_announcement(DONE, move, moving, on(SOURCE), cell=CELL, now=1.0)
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
    applied = apply_announcement(under_way, move, resized, on(TARGET), cell=CELL, now=1.0)
    assert (applied.instance.condition, applied.instance.flavor, applied.build) == (
        Condition.MOVING,
        "large",
        on(TARGET),
    )
    undone = replace(announced(MoveState.UNDOING, 14), host=SOURCE, host_uuid=HOSTS[SOURCE], flavor="small")
    applied = apply_announcement(undone, applied.move, applied.instance, on(TARGET), cell=CELL, now=1.0)
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
    applied = apply_announcement(unknown, move, instance, on(SOURCE), cell=CELL, now=1.0)
    assert applied.event is not None and applied.event.sequence == applied.move.sequence == 3
    assert applied.instance == instance

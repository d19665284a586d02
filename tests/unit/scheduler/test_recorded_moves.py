"""The records of requests about instances: what is announced of a decision, and what a cell's event leaves."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord, BuildEvent, BuildRequest, BuildState
from bus.contracts.cell import InstanceSpec
from bus.contracts.moves import CellMove, Condition, Departure, MoveEvent, MoveKind, MoveRequest, MoveState
from scheduler_worker.domain.builds import FAILED_OR_REFUSED, SCHEDULED, Author, RecordedBuild, SinceBuild
from scheduler_worker.domain.recorded_moves import (
    MoveContext,
    PendingMove,
    RecordedMove,
    Transfer,
    announced_move,
    event_of,
    given_up,
    recorded,
)
from tests.unit.scheduler.test_gangs import SELECTION

VM, MOVE = (f"{n}0000000-0000-4000-8000-000000000001" for n in "ad")
MOVED = RecordedMove(
    request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.MIGRATE, digest=b"", state=MoveState.SCHEDULED,
    sequence=2, cell="c1",
)  # fmt: skip
BUILD = RecordedBuild(instance_uuid=VM, project_id="p", state=BuildState.ACTIVE, sequence=11, cell="c1", host="h1")
REQUEST = BuildRequest(instance_uuid=VM, project_id="p", flavor="small")
INSTANCE = SinceBuild(condition=Condition.STOPPED, under_way=MOVE)
MOVING = replace(BUILD, instance=INSTANCE)


@pytest.mark.parametrize(
    ("project", "terminal", "shown"),
    [
        ("p", True, (Condition.STOPPED, "small")),
        ("p", False, (Condition.MOVING, "small")),
        ("q", True, (Condition.UNKNOWN, "")),
        ("q", False, (Condition.UNKNOWN, "")),
    ],
)
def test_an_event_shows_an_instance_to_its_own_project_alone(project: str, terminal: bool, shown: Any) -> None:
    known = MoveContext(build=MOVING, build_request=REQUEST)
    event = event_of(replace(MOVED, project_id=project, terminal=terminal), known, 1.0)
    assert (event.condition, event.flavor) == shown


def tried(host: str) -> tuple[AttemptRecord, ...]:
    return (AttemptRecord(attempt=1, host=host, outcome="failed"),)


OLD, NEW = tried("h0"), (*tried("h0"), *tried("h2"))
COMMAND = CellMove(request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.MIGRATE)
LEADS_AWAY = Transfer(home="c1", away="c2", build=COMMAND, command=COMMAND)
RECORD = replace(MOVED, host="h0", host_uuid="u0", transfer=LEADS_AWAY, history=OLD)
ENDED = replace(RECORD, terminal=True, state=MoveState.DONE, transfer=None)
GOING = SinceBuild(condition=Condition.MOVING, flavor="small", image="i", under_way=MOVE)
GONE = Departure(
    cell="c2",
    spec=InstanceSpec(instance_uuid=VM, project_id="p"),
    image="i",
    attempt=1,
    last=SELECTION,
)
TOLD = MoveEvent(
    request_id=MOVE, instance_uuid=VM, project_id="x", kind=MoveKind.MIGRATE, state=MoveState.FINISHING, sequence=12,
    condition=Condition.MOVING, cell="x", host="h2", host_uuid="u2", flavor="big", image="j", code="a.b", reason="why",
    history=NEW, departure=GONE,
)  # fmt: skip
END = replace(TOLD, state=MoveState.DONE, condition=Condition.ACTIVE, terminal=True)
AFTER = replace(END, state=MoveState.SOURCE_GONE, terminal=False)
# What a record has of the event.
PROGRESS = {
    "state": MoveState.FINISHING,
    "sequence": 12,
    "host": "h2",
    "host_uuid": "u2",
    "code": "a.b",
    "reason": "why",
}
PROGRESS |= {"history": NEW}
OVER = PROGRESS | {"state": MoveState.DONE, "terminal": True, "transfer": None}
THERE = {"host": "h2", "host_uuid": "u2"}
NOW_BIG = {"flavor": "big", "image": "j"}
ACTIVE = {"condition": Condition.ACTIVE, "sequence": 12}
FREE = {"under_way": None}
AWAY, NOWHERE = {"condition": Condition.OFFLOADED}, {"host": None, "host_uuid": None}
RESIZING = replace(GOING, new_flavor="big", old_flavor="small")
ONE_FLAVOR = {"new_flavor": "", "old_flavor": ""}
ENDED_THERE = {"condition": Condition.ACTIVE} | NOW_BIG | FREE


@pytest.mark.parametrize(
    ("told", "records", "after"),
    [
        # progress
        (TOLD, (RECORD, GOING), (PROGRESS, {"sequence": 12}, {})),
        # late progress
        (replace(TOLD, sequence=5), (RECORD, GOING), (PROGRESS | {"sequence": 5}, {}, {})),
        # overtaken progress
        (replace(TOLD, sequence=2), (RECORD, GOING), None),
        # no attempts told
        (replace(TOLD, history=()), (RECORD, GOING), (PROGRESS | {"history": OLD}, {"sequence": 12}, {})),
        # no host told
        (
            replace(TOLD, host=None, host_uuid=None),
            (RECORD, GOING),
            (PROGRESS | {"host": "h0", "host_uuid": "u0"}, {"sequence": 12}, {}),
        ),
        # end
        (END, (RECORD, GOING), (OVER, ACTIVE | NOW_BIG | FREE, THERE)),
        # end without a host
        (replace(END, flavor="", image="", host=None), (RECORD, GOING), (OVER | {"host": "h0"}, ACTIVE | FREE, {})),
        # end without a place
        (
            replace(END, condition=Condition.OFFLOADED, snapshot="s"),
            (RECORD, GOING),
            (OVER, ACTIVE | NOW_BIG | FREE | AWAY | {"snapshot": "s"}, NOWHERE),
        ),
        # end of another than the one under way
        (END, (RECORD, replace(GOING, under_way="y")), (OVER, ACTIVE | NOW_BIG, THERE)),
        # end by a cell that was set back
        (
            replace(END, sequence=1),
            (replace(RECORD, sequence=20), GOING),
            (OVER | {"sequence": 20}, ENDED_THERE, THERE),
        ),
        # the same, of one that does not move
        (
            replace(END, sequence=1),
            (RECORD, replace(GOING, condition=Condition.STOPPED)),
            (OVER | {"sequence": 2}, NOW_BIG | FREE, THERE),
        ),
        # the same, of one that nobody awaits
        (replace(END, sequence=1), (RECORD, replace(GOING, under_way="y")), (OVER | {"sequence": 2}, {}, {})),
        # end without a number
        (
            replace(END, sequence=0),
            (replace(RECORD, sequence=20), GOING),
            (OVER | {"sequence": 21}, ENDED_THERE, THERE),
        ),
        # second end
        (replace(END, sequence=11), (ENDED, replace(GOING, under_way=None)), None),
        # the same, by a cell that was set back to the middle of it, and of a refusal since
        (END, (ENDED, replace(GOING, under_way=None)), (None, ACTIVE | NOW_BIG, THERE)),
        (END, (ENDED, replace(GOING, under_way="y")), (None, ACTIVE | NOW_BIG, THERE)),
        # the same, by a cell that the instance has left
        (END, (replace(ENDED, cell="c2"), replace(GOING, under_way=None)), None),
        # after the end
        (AFTER, (ENDED, replace(GOING, under_way=None)), ({"sequence": 12}, ACTIVE | NOW_BIG, THERE)),
        (AFTER, (replace(ENDED, cell="c2"), replace(GOING, under_way=None)), ({"sequence": 12}, {}, {})),
        # the same, before the end
        (AFTER, (RECORD, GOING), (PROGRESS | {"state": MoveState.SOURCE_GONE}, ACTIVE, {})),
        # after the end, while another moves it
        (replace(AFTER, condition=Condition.MOVING), (ENDED, GOING), ({"sequence": 12}, {"sequence": 12}, {})),
        # late after the end
        (replace(AFTER, sequence=5), (ENDED, GOING), ({"sequence": 5}, {}, {})),
        # of a resize: as long as it may give the instance either flavor, both count
        (TOLD, (RECORD, RESIZING), (PROGRESS, {"sequence": 12}, {})),
        (replace(END, condition=Condition.RESIZED), (RECORD, RESIZING),
         (OVER, ACTIVE | NOW_BIG | FREE | {"condition": Condition.RESIZED}, THERE)),
        (END, (RECORD, RESIZING), (OVER, ACTIVE | NOW_BIG | FREE | ONE_FLAVOR, THERE)),
        (AFTER, (ENDED, replace(RESIZING, under_way=None)), ({"sequence": 12}, ACTIVE | NOW_BIG | ONE_FLAVOR, THERE)),
        (AFTER, (ENDED, replace(RESIZING, under_way="y")), ({"sequence": 12}, ACTIVE | NOW_BIG, THERE)),
    ],
)  # fmt: skip
def test_what_an_announcement_leaves(told: MoveEvent, records: tuple[RecordedMove, SinceBuild], after: Any) -> None:
    move, instance = records
    build = replace(BUILD, instance=instance)
    applied = announced_move(move, build, told)
    if after is None:
        assert applied == (move, build, None)
        return
    of_move, of_instance, of_build = after
    found, instance_after, event = applied
    assert found == replace(move, **(of_move or {}))
    number = of_instance.pop("sequence", BUILD.sequence)
    assert instance_after == replace(BUILD, **of_build, sequence=number, instance=replace(instance, **of_instance))
    if of_move is None:  # no news of its request
        assert event is None
        return
    number = of_move["sequence"] if told.sequence == 0 else told.sequence
    shown = {"cell": move.cell, "project_id": "p", "departure": None, "host_uuid": None}
    assert event == replace(told, sequence=number, **shown)


@pytest.mark.parametrize(
    ("state", "sequence", "ended"),
    [
        (MoveState.SCHEDULED, SCHEDULED, False),
        (MoveState.FAILED, FAILED_OR_REFUSED, True),
        (MoveState.REFUSED, FAILED_OR_REFUSED, True),
    ],
)
def test_the_record_of_a_decision_and_its_event(state: MoveState, sequence: int, ended: bool) -> None:
    request = MoveRequest(request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.STOP)
    pending = PendingMove(position=0, request=request, taken_at=1.0)
    move = recorded(pending, state, Author(who="s", at=3.0), code="a.b", reason="why", host="h1", cell="c1")
    assert move == RecordedMove(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.STOP, digest=pending.digest, state=state,
        sequence=sequence, terminal=ended, created_at=3.0, code="a.b", reason="why", host="h1", cell="c1",
    )  # fmt: skip
    event = MoveEvent(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=MoveKind.STOP, state=state, sequence=sequence,
        terminal=ended, condition=Condition.UNKNOWN, cell="c1", host="h1", code="a.b", reason="why", at=4.0,
    )  # fmt: skip
    assert event_of(move, MoveContext(), 4.0) == event
    moving = Condition.STOPPED if ended else Condition.MOVING
    known = MoveContext(build=MOVING)
    assert event_of(move, known, 4.0) == replace(event, condition=moving)
    known = replace(known, build_request=REQUEST)
    assert event_of(move, known, 4.0) == replace(event, condition=moving, flavor="small")


@pytest.mark.parametrize("kind", [None, MoveKind.EVACUATE, MoveKind.RESIZE])
def test_what_is_given_up_names_the_kind_that_its_cell_tells_of(kind: MoveKind | None) -> None:
    build = replace(BUILD, instance=SinceBuild(first_attempt=3))
    known = {"instance_uuid": VM, "project_id": "p", "sequence": 1, "terminal": True}
    event: Any = BuildEvent(state=BuildState.ACTIVE, **known)  # type: ignore[arg-type]
    if kind is not None:
        event = MoveEvent(request_id=MOVE, kind=kind, state=MoveState.DONE, **known)  # type: ignore[arg-type]
    sent = given_up(event, "c2", build)
    assert sent is not None and sent.bus == "c2"
    assert (sent.message.kind, sent.message.attempt) == (kind or MoveKind.MIGRATE, 2)  # type: ignore[attr-defined]

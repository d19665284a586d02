"""The records of requests about instances: what is announced of a decision, and what a cell's event leaves."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.actions import (
    ActionEvent,
    ActionKind,
    ActionRequest,
    ActionState,
    CellAction,
    CellTransfer,
    Condition,
)
from bus.contracts.build import AttemptRecord, BuildEvent, BuildRequest, BuildState
from bus.contracts.cell import InstanceSpec
from scheduler_worker.action.pending_action import PendingAction, record_of
from scheduler_worker.cell_events.cell_event_batch import apply_action_event
from scheduler_worker.records.action_record import ActionContext, RecordedAction, Transfer, event_of, given_up
from scheduler_worker.records.build_record import FAILED_OR_REFUSED, SCHEDULED, Actor, RecordedBuild, SinceBuild
from tests.unit.scheduler_worker.test_gangs import SELECTION

VM, MOVE = (f"{n}0000000-0000-4000-8000-000000000001" for n in "ad")
MOVED = RecordedAction(
    request_id=MOVE, instance_uuid=VM, project_id="p", kind=ActionKind.MIGRATE, digest=b"", state=ActionState.SCHEDULED,
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
    known = ActionContext(build=MOVING, build_request=REQUEST)
    event = event_of(replace(MOVED, project_id=project, terminal=terminal), known, 1.0)
    assert (event.condition, event.flavor) == shown


def tried(host: str) -> tuple[AttemptRecord, ...]:
    return (AttemptRecord(attempt=1, host=host, outcome="failed"),)


OLD, NEW = tried("h0"), (*tried("h0"), *tried("h2"))
COMMAND = CellAction(request_id=MOVE, instance_uuid=VM, project_id="p", kind=ActionKind.MIGRATE)
LEADS_AWAY = Transfer(home="c1", away="c2", build=COMMAND, command=COMMAND)
RECORD = replace(MOVED, host="h0", host_uuid="u0", transfer=LEADS_AWAY, history=OLD)
ENDED = replace(RECORD, terminal=True, state=ActionState.DONE, transfer=None)
GOING = SinceBuild(condition=Condition.MOVING, flavor="small", image="i", under_way=MOVE)
GONE = CellTransfer(
    cell="c2",
    spec=InstanceSpec(instance_uuid=VM, project_id="p"),
    image="i",
    attempt=1,
    last=SELECTION,
)
TOLD = ActionEvent(
    request_id=MOVE,
    instance_uuid=VM,
    project_id="x",
    kind=ActionKind.MIGRATE,
    state=ActionState.FINISHING,
    sequence=12,
    condition=Condition.MOVING,
    cell="x",
    host="h2",
    host_uuid="u2",
    flavor="big",
    image="j",
    code="a.b",
    reason="why",
    history=NEW,
    transfer=GONE,
)
END = replace(TOLD, state=ActionState.DONE, condition=Condition.ACTIVE, terminal=True)
AFTER = replace(END, state=ActionState.SOURCE_DESTROYED, terminal=False)
# What a record has of the event.
PROGRESS = {
    "state": ActionState.FINISHING,
    "sequence": 12,
    "host": "h2",
    "host_uuid": "u2",
    "code": "a.b",
    "reason": "why",
}
PROGRESS |= {"history": NEW}
OVER = PROGRESS | {"state": ActionState.DONE, "terminal": True, "transfer": None}
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
        # end by a cell that was restored
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
        # the same, by a cell that was restored to the middle of it, and of a refusal since
        (END, (ENDED, replace(GOING, under_way=None)), (None, ACTIVE | NOW_BIG, THERE)),
        (END, (ENDED, replace(GOING, under_way="y")), (None, ACTIVE | NOW_BIG, THERE)),
        # the same, by a cell that the instance has left
        (END, (replace(ENDED, cell="c2"), replace(GOING, under_way=None)), None),
        # after the end
        (AFTER, (ENDED, replace(GOING, under_way=None)), ({"sequence": 12}, ACTIVE | NOW_BIG, THERE)),
        (AFTER, (replace(ENDED, cell="c2"), replace(GOING, under_way=None)), ({"sequence": 12}, {}, {})),
        # the same, before the end
        (AFTER, (RECORD, GOING), (PROGRESS | {"state": ActionState.SOURCE_DESTROYED}, ACTIVE, {})),
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
def test_what_an_event_leaves(told: ActionEvent, records: tuple[RecordedAction, SinceBuild], after: Any) -> None:
    action, instance = records
    build = replace(BUILD, instance=instance)
    applied = apply_action_event(action, build, told)
    if after is None:
        assert applied == (action, build, None)
        return
    of_action, of_instance, of_build = after
    found, instance_after, event = applied
    assert found == replace(action, **(of_action or {}))
    number = of_instance.pop("sequence", BUILD.sequence)
    assert instance_after == replace(BUILD, **of_build, sequence=number, instance=replace(instance, **of_instance))
    if of_action is None:  # no news of its request
        assert event is None
        return
    number = of_action["sequence"] if told.sequence == 0 else told.sequence
    shown = {"cell": action.cell, "project_id": "p", "transfer": None, "host_uuid": None}
    assert event == replace(told, sequence=number, **shown)


@pytest.mark.parametrize(
    ("state", "sequence", "ended"),
    [
        (ActionState.SCHEDULED, SCHEDULED, False),
        (ActionState.FAILED, FAILED_OR_REFUSED, True),
        (ActionState.REFUSED, FAILED_OR_REFUSED, True),
    ],
)
def test_the_record_of_a_decision_and_its_event(state: ActionState, sequence: int, ended: bool) -> None:
    request = ActionRequest(request_id=MOVE, instance_uuid=VM, project_id="p", kind=ActionKind.STOP)
    pending = PendingAction(batch_index=0, request=request, taken_at=1.0)
    action = record_of(pending, state, Actor(name="s", at=3.0), code="a.b", reason="why", host="h1", cell="c1")
    assert action == RecordedAction(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=ActionKind.STOP, digest=pending.digest, state=state,
        sequence=sequence, terminal=ended, created_at=3.0, code="a.b", reason="why", host="h1", cell="c1",
    )  # fmt: skip
    event = ActionEvent(
        request_id=MOVE, instance_uuid=VM, project_id="p", kind=ActionKind.STOP, state=state, sequence=sequence,
        terminal=ended, condition=Condition.UNKNOWN, cell="c1", host="h1", code="a.b", reason="why", at=4.0,
    )  # fmt: skip
    assert event_of(action, ActionContext(), 4.0) == event
    moving = Condition.STOPPED if ended else Condition.MOVING
    known = ActionContext(build=MOVING)
    assert event_of(action, known, 4.0) == replace(event, condition=moving)
    known = replace(known, build_request=REQUEST)
    assert event_of(action, known, 4.0) == replace(event, condition=moving, flavor="small")


@pytest.mark.parametrize("kind", [None, ActionKind.EVACUATE, ActionKind.RESIZE])
def test_what_is_given_up_names_the_kind_that_its_cell_tells_of(kind: ActionKind | None) -> None:
    build = replace(BUILD, instance=SinceBuild(first_attempt=3))
    known = {"instance_uuid": VM, "project_id": "p", "sequence": 1, "terminal": True}
    event: Any = BuildEvent(state=BuildState.ACTIVE, **known)  # type: ignore[arg-type]
    if kind is not None:
        event = ActionEvent(request_id=MOVE, kind=kind, state=ActionState.DONE, **known)  # type: ignore[arg-type]
    sent = given_up(event, "c2", build)
    assert sent is not None and sent.bus == "c2"
    assert (sent.message.kind, sent.message.attempt) == (kind or ActionKind.MIGRATE, 2)  # type: ignore[attr-defined]

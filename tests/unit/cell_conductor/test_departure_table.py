"""An instance that leaves its cell, and arrives: a row for each condition that alone makes the difference."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.actions import (
    OTHER_ATTEMPT,
    ActionEvent,
    ActionKind,
    ActionState,
    CellTransfer,
    CellTransferOut,
    Condition,
)
from bus.contracts.base import Message, Refusal
from bus.contracts.cell import InstanceSpec
from cell_conductor.request_handlers import transfer_event
from cell_conductor.rules.cell_transfer_rules import answer_not_started, refer_to_next_cell, refuse_other
from cell_conductor.state import events as e
from cell_conductor.state.desired_state import PURGEABLE_FAILED
from cell_conductor.state.instance import MAX_ENDED, ActionInProgress, EndedAction, Instance, Phase, Power, State
from cell_conductor.state.ownership_proof import is_provably_ended
from cell_conductor.state.step import Step, StepContext
from cell_conductor.transition import step
from tests.unit.cell_conductor.move_scenario import ACTION, OTHER, request, unbegun
from tests.unit.cell_conductor.scenario import DELETE, PATIENCE, SPEC, UUID, host, phase_of, selection

NEWER = replace(SPEC, flavor="large", image="ubuntu")
LEFT = CellTransfer(
    cell="c2",
    spec=NEWER,
    image="snapshot",
    last=selection(1),
    attempt=7,
    sequence=50,
    kind=ActionKind.MIGRATE,
    is_stopped=True,
    at=600.0,
)
REFUSAL = Refusal(code="x", reason="y")


def told(stepped: Step) -> list[tuple[str, ActionState, str, int]]:
    """Each announcement: whose, what, its code and its number."""
    return [(m.request_id, m.state, m.code, m.sequence) for m in stepped.commands if isinstance(m, ActionEvent)]


# --- It leaves.


def departs(attempt: int = 7, *, ended: bool = False, **fields: Any) -> e.Event:
    known = {"request_id": ACTION, "kind": ActionKind.MIGRATE, **fields}
    message = CellTransferOut(
        instance_uuid=UUID, project_id="p", to_cell="c2", attempt=attempt, ended=ended, sequence=30, **known
    )
    return transfer_event(message, 200.0)


HERE = Instance(
    uuid=UUID,
    state=State.ACTIVE,
    spec=SPEC,
    selections=(selection(1),),
    attempt=6,
    highest_attempt=7,
    sequence=20,
    since=100.0,
    answered=True,
)
WITHOUT_HOST = {"state": State.OFFLOADED, "power": Power.SHELVED, "image": "snapshot"}
TIED = InstanceSpec(instance_uuid=UUID, project_id="p", name="n", networks=({"uuid": host(9)},))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "event", "phase", "state", "code"),
    [
        ({}, departs(), (State.CHANGING, None), ActionState.CHANGING, ""),
        ({"power": Power.STOPPED}, departs(), (State.CHANGING, None), ActionState.CHANGING, ""),
        (
            {"power": Power.SHELVED, "image": "snapshot"},
            departs(kind=ActionKind.UNSHELVE),
            (State.DESTROYING, State.OFFLOADED),
            ActionState.CHANGING,
            "",
        ),
        (WITHOUT_HOST, departs(kind=ActionKind.UNSHELVE), (State.TRANSFERRED, None), ActionState.MIGRATING, ""),
        (WITHOUT_HOST, departs(), (State.OFFLOADED, None), ActionState.REFUSED, "instance.offloaded"),
        ({}, departs(6), (State.ACTIVE, None), ActionState.SCHEDULED, OTHER_ATTEMPT),
        ({}, departs(8), (State.ACTIVE, None), ActionState.SCHEDULED, OTHER_ATTEMPT),
        (WITHOUT_HOST, departs(6), (State.OFFLOADED, None), ActionState.SCHEDULED, OTHER_ATTEMPT),
        ({"power": Power.RESCUED}, departs(), (State.ACTIVE, None), ActionState.REFUSED, "instance.rescued"),
        ({"power": Power.SHELVED}, departs(), (State.ACTIVE, None), ActionState.REFUSED, "instance.shelved"),
        ({"state": State.FAILED}, departs(), (State.FAILED, None), ActionState.REFUSED, "instance.not_active"),
        ({"state": State.BUILDING}, departs(), (State.BUILDING, None), ActionState.REFUSED, "instance.not_active"),
        (
            {"ended": (EndedAction(ACTION, ActionKind.MIGRATE, ActionState.FAILED, "z"),)},
            departs(6),
            (State.ACTIVE, None),
            ActionState.FAILED,
            "z",
        ),
    ],
)
def test_an_instance_leaves_by_its_newest_attempt_alone(
    known: dict[str, Any], event: e.Event, phase: Phase, state: ActionState, code: str
) -> None:
    stepped = step(replace(HERE, **known), event, PATIENCE)
    assert stepped.instance.phase == phase
    assert [one[:3] for one in told(stepped)] == [(ACTION, state, code)]
    if code == OTHER_ATTEMPT:
        (read,) = stepped.commands
        assert isinstance(read, ActionEvent) and (read.attempt, read.terminal) == (7, False)


def test_what_has_networks_of_its_cell_does_not_leave_it() -> None:
    assert [code for _, _, code, _ in told(step(replace(HERE, spec=TIED), departs(), PATIENCE))] == [
        "action.across_cells"
    ]


def test_what_has_no_record_does_not_leave() -> None:
    stepped = step(Instance(uuid=UUID), departs(), PATIENCE)
    assert stepped.instance == Instance(uuid=UUID)
    assert [one[2] for one in told(stepped)] == ["instance.unknown"]


def run(instance: Instance, *events: e.Event, context: StepContext = PATIENCE) -> tuple[Instance, list[Message]]:
    sent: list[Message] = []
    for event in events:
        stepped = step(instance, event, context)
        instance, sent = stepped.instance, [*sent, *stepped.commands]
    return instance, sent


def kept(instance: Instance, **fields: Any) -> e.ChangeEnded:
    assert instance.action is not None
    known = {"done": True, "image": "snapshot", "runs": False, **fields}
    return e.ChangeEnded(
        at=210.0, attempt=6, change_number=instance.action.change_number, host_uuid=host(1), service="s1", **known
    )


DESTROYED = e.Destroyed(at=220.0, attempt=6, host_uuid=host(1), service="s1")


@pytest.mark.parametrize("power", [Power.RUNNING, Power.STOPPED])
def test_its_image_is_kept_then_its_machine_destroyed_then_its_claim_released_and_that_is_announced(
    power: Power,
) -> None:
    leaving, sent = run(replace(HERE, power=power), departs())
    leaving, more = run(leaving, kept(leaving), DESTROYED, e.Released(at=600.0, attempt=8))
    assert leaving.phase == (State.TRANSFERRED, None)
    assert leaving.transfer == replace(
        LEFT, spec=SPEC, attempt=8, sequence=leaving.sequence - 1, is_stopped=power is Power.STOPPED
    )
    assert (leaving.action, leaving.deadline, leaving.transferred_by, leaving.since) == (None, 630.0, ACTION, 600.0)
    ends = [one for one in (*sent, *more) if isinstance(one, ActionEvent)]
    assert not any(one.terminal for one in ends), "the schedulers end the request"
    assert (ends[-1].transfer, ends[-1].condition) == (leaving.transfer, Condition.MOVING)
    numbers = [one.sequence for one in ends]
    assert numbers == sorted(set(numbers)) and numbers[0] == 31


def test_what_its_host_cannot_keep_stays() -> None:
    leaving, _ = run(HERE, departs())
    stays, sent = run(leaving, kept(leaving, done=False, code="change.unsupported", runs=True, image=""))
    assert (stays.phase, stays.power, stays.transfer) == ((State.ACTIVE, None), Power.RUNNING, None)
    assert [(one.state, one.code) for one in sent if isinstance(one, ActionEvent)] == [
        (ActionState.FAILED, "change.unsupported")
    ]


def test_a_host_that_does_not_answer_is_awaited() -> None:
    """The request had failed at its first time-out, and the instance rested shelved when the host had answered."""
    leaving, _ = run(HERE, departs())
    again, sent = run(leaving, e.TimedOut(at=600.0))
    assert again.state is State.CHANGING and not [one for one in sent if isinstance(one, ActionEvent) and one.terminal]
    left, _ = run(again, kept(again), DESTROYED, e.Released(at=900.0, attempt=8))
    assert left.state is State.TRANSFERRED


def test_a_copy_of_the_command_begins_nothing() -> None:
    leaving, _ = run(HERE, departs())
    assert step(leaving, departs(), PATIENCE) == Step(leaving)


@pytest.mark.parametrize(
    ("known", "event", "gives_up"),
    [
        ({}, departs(7, ended=True), True),
        ({}, departs(9, ended=True), True),
        ({}, departs(6, ended=True), False),
        ({"state": State.DELETED}, departs(7, ended=True), False),
        ({"state": State.FAILED}, departs(7, ended=True), True),
        ({"state": State.TOMBSTONE, "spec": None, "selections": ()}, departs(7, ended=True), False),
    ],
)
def test_the_end_of_the_build_elsewhere_ends_each_record_of_no_later_attempt(
    known: dict[str, Any], event: e.Event, gives_up: bool
) -> None:
    before = replace(HERE, **known)
    stepped = step(before, event, PATIENCE)
    assert stepped.commands == ()
    if not gives_up:
        assert stepped.instance is before
        return
    gone = stepped.instance
    assert gone.phase == (State.TRANSFERRED, State.ABSENT)
    assert isinstance(event, e.TransferEnded) and gone.transfer is not None
    assert (gone.transfer.cell, gone.transfer.attempt, gone.transferred_by) == ("c2", event.attempt, ACTION)
    assert is_provably_ended(stepped.instance, 6, host(1)), "what is listed later is over"


def test_a_departure_is_kept_until_the_build_elsewhere_has_ended() -> None:
    assert GONE.phase not in PURGEABLE_FAILED
    assert step(GONE, departs(7, ended=True), PATIENCE).instance.phase in PURGEABLE_FAILED


# --- It arrives.


def arrival(transfer: CellTransfer, *hosts: int, **fields: Any) -> e.InstanceTransferredIn:
    event = request(ActionKind.MIGRATE, *hosts, **{"transfer": transfer, "to_cell": "c1", **fields})
    assert isinstance(event, e.InstanceTransferredIn)
    return event


ARRIVES = arrival(LEFT, 2, 3)
NEW = Instance(uuid=UUID)
GOES_BACK = ((State.RELEASING, State.OFFLOADED), ActionState.ROLLING_BACK)
IS_CLAIMED = ((State.CLAIMING, State.PREPARING), ActionState.CLAIMING)


@pytest.mark.parametrize(
    ("known", "event", "phase", "state"),
    [
        (NEW, ARRIVES, *IS_CLAIMED),
        (NEW, unbegun(ARRIVES), *GOES_BACK),
        (NEW, unbegun(ARRIVES, REFUSAL), *GOES_BACK),
        (NEW, arrival(LEFT), (State.OFFLOADED, None), ActionState.FAILED),
        (replace(NEW, ended=(EndedAction(ACTION, ActionKind.MIGRATE, ActionState.FAILED),)), ARRIVES, *GOES_BACK),
        (replace(NEW, ended=(EndedAction(OTHER, ActionKind.MIGRATE, ActionState.FAILED),)), ARRIVES, *IS_CLAIMED),
        (
            replace(NEW, state=State.TOMBSTONE, highest_attempt=8),
            ARRIVES,
            (State.RELEASING, State.DELETED),
            ActionState.REFUSED,
        ),
        (replace(NEW, state=State.TOMBSTONE, highest_attempt=7), ARRIVES, *IS_CLAIMED),
    ],
)
def test_an_arrival_is_on_record_from_then_on(
    known: Instance, event: e.InstanceTransferredIn, phase: Phase, state: ActionState
) -> None:
    stepped = step(known, event, PATIENCE)
    here = stepped.instance
    assert here.phase == phase
    assert [one[1:] for one in told(stepped)][-1][0] is state
    assert (here.attempt, here.highest_attempt, here.selection_index) == (7, 8, 0), (
        "the first attempt here is above the last there"
    )
    assert (here.spec, here.image, here.cause) == (NEWER, "snapshot", ACTION)
    assert (here.requested_at, here.answered) == (event.at, True)
    assert told(stepped)[0][3] == 51
    if here.action is not None:
        assert (here.action.source, here.action.started_at, here.action.to_cell) == (None, 600.0, "c1")


@pytest.mark.parametrize("state", [State.ACTIVE, State.DELETED, State.TRANSFERRED, State.FAILED, State.OFFLOADED])
@pytest.mark.parametrize(("last", "arrives"), [(6, True), (7, True), (8, False), (40, False)])
def test_an_arrival_is_taken_above_the_newest_attempt_alone(state: State, last: int, arrives: bool) -> None:
    known = replace(GONE, state=state, attempt=last, transfer=LEFT if state is State.TRANSFERRED else None)
    here = step(known, ARRIVES, PATIENCE).instance
    assert (here.phase == (State.CLAIMING, State.PREPARING)) is arrives
    assert here.state is state or arrives


def test_a_late_arrival_where_it_has_left_again_is_answered_with_its_departure() -> None:
    left = replace(GONE, attempt=9)
    stepped = step(left, ARRIVES, PATIENCE)
    assert (stepped.instance, told(stepped)) == (left, [GONE_TOLD])


def test_an_arrival_keeps_what_the_former_record_has() -> None:
    ended = tuple(EndedAction(f"{n}", ActionKind.STOP, ActionState.DONE) for n in range(MAX_ENDED))
    former = replace(GONE, change_number=40, ended=ended, transferred_by=OTHER, traceparent="t", sequence=90)
    here = step(former, ARRIVES, PATIENCE).instance
    assert (here.change_number, here.traceparent, here.transfer, here.sequence) == (40, "t", None, 92)
    assert here.ended == (*ended[1:], EndedAction(OTHER, ActionKind.MIGRATE, ActionState.SCHEDULED))


def test_one_that_comes_home_by_the_request_that_it_left_by_is_built() -> None:
    home = arrival(replace(LEFT, attempt=9), 1, to_cell=None)
    assert step(GONE, home, PATIENCE).instance.phase == (State.CLAIMING, State.PREPARING)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_what_no_host_takes_leaves_again_or_rests_offloaded(is_stopped: bool) -> None:
    arrives = arrival(replace(LEFT, is_stopped=is_stopped), 2)
    for to_cell, phase in (("c1", State.TRANSFERRED), (None, State.OFFLOADED)):
        event = replace(arrives, request=replace(arrives.request, to_cell=to_cell))
        full = e.ClaimRefused(at=210.0, attempt=9, outcomes=())
        here, sent = run(NEW, event, full, e.Released(at=220.0, attempt=10))
        events = [one for one in sent if isinstance(one, ActionEvent)]
        assert (here.state, here.power, here.image, here.spec) == (phase, Power.SHELVED, "snapshot", NEWER)
        assert events[-1].terminal is (to_cell is None)
        if to_cell is None:
            continue
        transfer = here.transfer
        assert transfer is not None and transfer.cell == "c1"
        assert (transfer.attempt, transfer.is_stopped, transfer.code) == (10, is_stopped, "max_retries_exceeded")


@pytest.mark.parametrize(
    "kept",
    [{"code": "build.machine_exists", "proves_from": 9}, {"proves_from": 1000}, {"state": State.ABSENT, "attempt": 0}],
    ids=str,
)
def test_an_arrival_proves_no_more_about_machines_than_the_former_record(kept: dict[str, Any]) -> None:
    former = replace(GONE, **kept)
    here = step(former, ARRIVES, PATIENCE).instance
    assert not any(is_provably_ended(known, 1, host(1)) for known in (former, here))


# --- What the former cell answers.


GONE = Instance(
    uuid=UUID,
    state=State.TRANSFERRED,
    spec=SPEC,
    selections=(selection(1),),
    attempt=7,
    sequence=51,
    transfer=LEFT,
    transferred_by=ACTION,
)
GONE_TOLD = (ACTION, ActionState.MIGRATING, "", 50)
STOP = request(ActionKind.STOP, request_id=OTHER)


def ended(state: ActionState, request_id: str = OTHER) -> tuple[EndedAction, ...]:
    return (EndedAction(request_id, ActionKind.STOP, state, "z"),)


@pytest.mark.parametrize(
    ("known", "event", "answer"),
    [
        ((), DELETE, None),
        ((), departs(), None),
        ((), departs(request_id=OTHER), (ActionState.REFUSED, "instance.transferred")),
        ((), request(ActionKind.STOP), None),
        (ended(ActionState.DONE, ACTION), request(ActionKind.STOP), None),
        ((), STOP, (ActionState.REFUSED, "instance.transferred")),
        ((), unbegun(STOP), (ActionState.FAILED, "action.lost")),
        ((), unbegun(STOP, REFUSAL), (ActionState.REFUSED, "instance.transferred")),
        (ended(ActionState.DONE), STOP, (ActionState.DONE, "z")),
        (ended(ActionState.DONE), unbegun(STOP), (ActionState.DONE, "z")),
        (ended(ActionState.SCHEDULED), STOP, None),
    ],
)
def test_the_former_cell_answers_with_the_departure_and_an_end_of_its_own(
    known: tuple[EndedAction, ...], event: e.ActionRequested | e.DeleteRequested, answer: tuple[ActionState, str] | None
) -> None:
    before = replace(GONE, ended=known)
    stepped = refer_to_next_cell(before, event, PATIENCE)
    assert told(stepped) == [GONE_TOLD, *([] if answer is None else [(OTHER, *answer, 49)])]
    if answer is not None:
        last = stepped.commands[-1]
        assert isinstance(last, ActionEvent) and isinstance(event, e.ActionRequested)
        assert (last.terminal, last.kind, last.transfer) == (True, event.request.kind, None)
    is_new = answer is not None and not known
    kept = (EndedAction(OTHER, last.kind, *answer),) if is_new and answer is not None else known
    assert stepped.instance == replace(before, ended=kept)


@pytest.mark.parametrize(
    ("attempt", "started", "phase"),
    [
        (0, True, (State.TRANSFERRED, None)),
        (7, True, (State.TRANSFERRED, None)),
        (8, True, (State.RELEASING, State.DELETED)),
        (8, False, (State.TOMBSTONE, None)),
    ],
)
def test_a_delete_of_a_later_attempt_than_it_has_left_with_is_carried_out(
    attempt: int, started: bool, phase: Phase
) -> None:
    """It has come back since, and the record of that is lost."""
    stepped = step(GONE, replace(DELETE, may_have_started=started, attempt=attempt), PATIENCE)
    assert stepped.instance.phase == phase
    if phase == (State.TRANSFERRED, None):
        assert told(stepped) == [GONE_TOLD]


def test_so_many_ends_are_kept() -> None:
    many = tuple(EndedAction(f"{n}", ActionKind.STOP, ActionState.DONE) for n in range(MAX_ENDED))
    after = refer_to_next_cell(replace(GONE, ended=many), STOP, PATIENCE).instance.ended
    assert [one.request_id for one in after] == [*(f"{n}" for n in range(1, MAX_ENDED)), OTHER]


OFFLOADED = replace(GONE, state=State.OFFLOADED, transfer=None, transferred_by="")


@pytest.mark.parametrize(
    ("event", "code"), [(unbegun(STOP), "action.lost"), (unbegun(STOP, REFUSAL), "x")], ids=["query", "given up"]
)
def test_what_is_not_begun_is_answered_where_the_instance_is(event: e.ActionQueried, code: str) -> None:
    assert [answer[0] for answer in told(step(GONE, event, PATIENCE))] == [ACTION, OTHER]
    assert [answer[2] for answer in told(answer_not_started(OFFLOADED, event, PATIENCE))] == [code]


@pytest.mark.parametrize(
    ("phase", "actions", "codes"),
    [
        (State.OFFLOADED, False, ["instance.not_active"]),
        (State.RESIZED, True, ["instance.busy"]),
        ((State.DESTROYING, State.DELETED), True, ["instance.not_active"]),
        ((State.RELEASING, State.FAILED), True, ["instance.not_active"]),
        ((State.RELEASING, State.FAILED), False, ["instance.not_active"]),
    ],
)
def test_a_request_that_cannot_be_begun_is_refused(phase: State | Phase, actions: bool, codes: list[str]) -> None:
    state, next_state = phase_of(phase)
    action = ActionInProgress(request_id=ACTION, kind=ActionKind.MIGRATE, spec=NEWER)
    known = replace(GONE, state=state, next_state=next_state, action=action if actions else None)
    assert [code for _, _, code, _ in told(refuse_other(known, STOP, PATIENCE))] == codes

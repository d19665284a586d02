"""An instance that leaves its cell, and arrives: a row for each condition that alone makes the difference."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.base import Message, Refusal
from bus.contracts.cell import InstanceSpec
from bus.contracts.moves import OTHER_ATTEMPT, CellDepart, Condition, Departure, MoveEvent, MoveKind, MoveState
from cell_conductor.domain import events as e
from cell_conductor.domain.departure_rules import answer_unbegun, refer, refuse_other
from cell_conductor.domain.desires import PURGED_FAILED
from cell_conductor.domain.instance import MAX_ENDED, EndedMove, Instance, Move, Phase, Power, State
from cell_conductor.domain.report import is_over
from cell_conductor.domain.steps import Step, StepContext
from cell_conductor.domain.table import step
from cell_conductor.handlers import departure_event
from tests.unit.conductor.move_scenario import MOVE, OTHER, request, unbegun
from tests.unit.conductor.scenario import DELETE, PATIENCE, SPEC, UUID, host, phase_of, selection

NEWER = replace(SPEC, flavor="large", image="ubuntu")
LEFT = Departure(
    cell="c2",
    spec=NEWER,
    image="snapshot",
    last=selection(1),
    attempt=7,
    sequence=50,
    kind=MoveKind.MIGRATE,
    is_stopped=True,
    at=600.0,
)
REFUSAL = Refusal(code="x", reason="y")


def told(stepped: Step) -> list[tuple[str, MoveState, str, int]]:
    """Each announcement: whose, what, its code and its number."""
    return [(m.request_id, m.state, m.code, m.sequence) for m in stepped.commands if isinstance(m, MoveEvent)]


# --- It leaves.


def departs(attempt: int = 7, *, ended: bool = False, **fields: Any) -> e.Event:
    known = {"request_id": MOVE, "kind": MoveKind.MIGRATE, **fields}
    message = CellDepart(
        instance_uuid=UUID, project_id="p", to_cell="c2", attempt=attempt, ended=ended, sequence=30, **known
    )
    return departure_event(message, 200.0)


HERE = Instance(
    uuid=UUID,
    state=State.ACTIVE,
    spec=SPEC,
    selections=(selection(1),),
    attempt=6,
    newest=7,
    sequence=20,
    since=100.0,
    answered=True,
)
WITHOUT_HOST = {"state": State.OFFLOADED, "power": Power.SHELVED, "image": "snapshot"}
TIED = InstanceSpec(instance_uuid=UUID, project_id="p", name="n", networks=({"uuid": host(9)},))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "event", "phase", "state", "code"),
    [
        ({}, departs(), (State.CHANGING, None), MoveState.CHANGING, ""),
        ({"power": Power.STOPPED}, departs(), (State.CHANGING, None), MoveState.CHANGING, ""),
        (
            {"power": Power.SHELVED, "image": "snapshot"},
            departs(kind=MoveKind.UNSHELVE),
            (State.DESTROYING, State.OFFLOADED),
            MoveState.CHANGING,
            "",
        ),
        (WITHOUT_HOST, departs(kind=MoveKind.UNSHELVE), (State.DEPARTED, None), MoveState.MIGRATING, ""),
        (WITHOUT_HOST, departs(), (State.OFFLOADED, None), MoveState.REFUSED, "instance.offloaded"),
        ({}, departs(6), (State.ACTIVE, None), MoveState.SCHEDULED, OTHER_ATTEMPT),
        ({}, departs(8), (State.ACTIVE, None), MoveState.SCHEDULED, OTHER_ATTEMPT),
        (WITHOUT_HOST, departs(6), (State.OFFLOADED, None), MoveState.SCHEDULED, OTHER_ATTEMPT),
        ({"power": Power.RESCUED}, departs(), (State.ACTIVE, None), MoveState.REFUSED, "instance.rescued"),
        ({"power": Power.SHELVED}, departs(), (State.ACTIVE, None), MoveState.REFUSED, "instance.shelved"),
        ({"state": State.FAILED}, departs(), (State.FAILED, None), MoveState.REFUSED, "instance.not_active"),
        ({"state": State.BUILDING}, departs(), (State.BUILDING, None), MoveState.REFUSED, "instance.not_active"),
        (
            {"ended": (EndedMove(MOVE, MoveKind.MIGRATE, MoveState.FAILED, "z"),)},
            departs(6),
            (State.ACTIVE, None),
            MoveState.FAILED,
            "z",
        ),
    ],
)
def test_an_instance_leaves_by_its_newest_attempt_alone(
    known: dict[str, Any], event: e.Event, phase: Phase, state: MoveState, code: str
) -> None:
    stepped = step(replace(HERE, **known), event, PATIENCE)
    assert stepped.instance.phase == phase
    assert [one[:3] for one in told(stepped)] == [(MOVE, state, code)]
    if code == OTHER_ATTEMPT:
        (read,) = stepped.commands
        assert isinstance(read, MoveEvent) and (read.attempt, read.terminal) == (7, False)


def test_what_has_networks_of_its_cell_does_not_leave_it() -> None:
    assert [code for _, _, code, _ in told(step(replace(HERE, spec=TIED), departs(), PATIENCE))] == [
        "move.across_cells"
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
    assert instance.move is not None
    known = {"done": True, "image": "snapshot", "runs": False, **fields}
    return e.ChangeEnded(at=210.0, attempt=6, order=instance.move.order, host_uuid=host(1), service="s1", **known)


DESTROYED = e.Destroyed(at=220.0, attempt=6, host_uuid=host(1), service="s1")


@pytest.mark.parametrize("power", [Power.RUNNING, Power.STOPPED])
def test_its_image_is_kept_then_its_machine_destroyed_then_its_claim_released_and_that_is_announced(
    power: Power,
) -> None:
    leaving, sent = run(replace(HERE, power=power), departs())
    leaving, more = run(leaving, kept(leaving), DESTROYED, e.Released(at=600.0, attempt=8))
    assert leaving.phase == (State.DEPARTED, None)
    assert leaving.departure == replace(
        LEFT, spec=SPEC, attempt=8, sequence=leaving.sequence - 1, is_stopped=power is Power.STOPPED
    )
    assert (leaving.move, leaving.deadline, leaving.departed_by, leaving.since) == (None, 630.0, MOVE, 600.0)
    ends = [one for one in (*sent, *more) if isinstance(one, MoveEvent)]
    assert not any(one.terminal for one in ends), "the schedulers end the request"
    assert (ends[-1].departure, ends[-1].condition) == (leaving.departure, Condition.MOVING)
    numbers = [one.sequence for one in ends]
    assert numbers == sorted(set(numbers)) and numbers[0] == 31


def test_what_its_host_cannot_keep_stays() -> None:
    leaving, _ = run(HERE, departs())
    stays, sent = run(leaving, kept(leaving, done=False, code="change.unsupported", runs=True, image=""))
    assert (stays.phase, stays.power, stays.departure) == ((State.ACTIVE, None), Power.RUNNING, None)
    assert [(one.state, one.code) for one in sent if isinstance(one, MoveEvent)] == [
        (MoveState.FAILED, "change.unsupported")
    ]


def test_a_host_that_does_not_answer_is_awaited() -> None:
    """The request had failed at its first time-out, and the instance rested shelved when the host had answered."""
    leaving, _ = run(HERE, departs())
    again, sent = run(leaving, e.TimedOut(at=600.0))
    assert again.state is State.CHANGING and not [one for one in sent if isinstance(one, MoveEvent) and one.terminal]
    left, _ = run(again, kept(again), DESTROYED, e.Released(at=900.0, attempt=8))
    assert left.state is State.DEPARTED


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
    assert gone.phase == (State.DEPARTED, State.ABSENT)
    assert isinstance(event, e.DepartureEnded) and gone.departure is not None
    assert (gone.departure.cell, gone.departure.attempt, gone.departed_by) == ("c2", event.attempt, MOVE)
    assert is_over(stepped.instance, 6, host(1)), "what is listed later is over"


def test_a_departure_is_kept_until_the_build_elsewhere_has_ended() -> None:
    assert GONE.phase not in PURGED_FAILED
    assert step(GONE, departs(7, ended=True), PATIENCE).instance.phase in PURGED_FAILED


# --- It arrives.


def arrival(departure: Departure, *hosts: int, **fields: Any) -> e.InstanceArrives:
    event = request(MoveKind.MIGRATE, *hosts, **{"departure": departure, "to_cell": "c1", **fields})
    assert isinstance(event, e.InstanceArrives)
    return event


ARRIVES = arrival(LEFT, 2, 3)
NEW = Instance(uuid=UUID)
GOES_BACK = ((State.RELEASING, State.OFFLOADED), MoveState.UNDOING)
IS_CLAIMED = ((State.CLAIMING, State.PREPARING), MoveState.CLAIMING)


@pytest.mark.parametrize(
    ("known", "event", "phase", "state"),
    [
        (NEW, ARRIVES, *IS_CLAIMED),
        (NEW, unbegun(ARRIVES), *GOES_BACK),
        (NEW, unbegun(ARRIVES, REFUSAL), *GOES_BACK),
        (NEW, arrival(LEFT), (State.OFFLOADED, None), MoveState.FAILED),
        (replace(NEW, ended=(EndedMove(MOVE, MoveKind.MIGRATE, MoveState.FAILED),)), ARRIVES, *GOES_BACK),
        (replace(NEW, ended=(EndedMove(OTHER, MoveKind.MIGRATE, MoveState.FAILED),)), ARRIVES, *IS_CLAIMED),
        (replace(NEW, state=State.TOMBSTONE, newest=8), ARRIVES, (State.RELEASING, State.DELETED), MoveState.REFUSED),
        (replace(NEW, state=State.TOMBSTONE, newest=7), ARRIVES, *IS_CLAIMED),
    ],
)
def test_an_arrival_is_on_record_from_then_on(
    known: Instance, event: e.InstanceArrives, phase: Phase, state: MoveState
) -> None:
    stepped = step(known, event, PATIENCE)
    here = stepped.instance
    assert here.phase == phase
    assert [one[1:] for one in told(stepped)][-1][0] is state
    assert (here.attempt, here.newest, here.position) == (7, 8, 0), "the first attempt here is above the last there"
    assert (here.spec, here.image, here.cause) == (NEWER, "snapshot", MOVE)
    assert (here.requested_at, here.answered) == (event.at, True)
    assert told(stepped)[0][3] == 51
    if here.move is not None:
        assert (here.move.source, here.move.began, here.move.to_cell) == (None, 600.0, "c1")


@pytest.mark.parametrize("state", [State.ACTIVE, State.DELETED, State.DEPARTED, State.FAILED, State.OFFLOADED])
@pytest.mark.parametrize(("last", "arrives"), [(6, True), (7, True), (8, False), (40, False)])
def test_an_arrival_is_taken_above_the_newest_attempt_alone(state: State, last: int, arrives: bool) -> None:
    known = replace(GONE, state=state, attempt=last, departure=LEFT if state is State.DEPARTED else None)
    here = step(known, ARRIVES, PATIENCE).instance
    assert (here.phase == (State.CLAIMING, State.PREPARING)) is arrives
    assert here.state is state or arrives


def test_a_late_arrival_where_it_has_left_again_is_answered_with_its_departure() -> None:
    left = replace(GONE, attempt=9)
    stepped = step(left, ARRIVES, PATIENCE)
    assert (stepped.instance, told(stepped)) == (left, [GONE_TOLD])


def test_an_arrival_keeps_what_the_former_record_has() -> None:
    ended = tuple(EndedMove(f"{n}", MoveKind.STOP, MoveState.DONE) for n in range(MAX_ENDED))
    former = replace(GONE, order=40, ended=ended, departed_by=OTHER, traceparent="t", sequence=90)
    here = step(former, ARRIVES, PATIENCE).instance
    assert (here.order, here.traceparent, here.departure, here.sequence) == (40, "t", None, 92)
    assert here.ended == (*ended[1:], EndedMove(OTHER, MoveKind.MIGRATE, MoveState.SCHEDULED))


def test_one_that_comes_home_by_the_request_that_it_left_by_is_built() -> None:
    home = arrival(replace(LEFT, attempt=9), 1, to_cell=None)
    assert step(GONE, home, PATIENCE).instance.phase == (State.CLAIMING, State.PREPARING)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_what_no_host_takes_leaves_again_or_rests_offloaded(is_stopped: bool) -> None:
    arrives = arrival(replace(LEFT, is_stopped=is_stopped), 2)
    for to_cell, phase in (("c1", State.DEPARTED), (None, State.OFFLOADED)):
        event = replace(arrives, request=replace(arrives.request, to_cell=to_cell))
        full = e.ClaimRefused(at=210.0, attempt=9, outcomes=())
        here, sent = run(NEW, event, full, e.Released(at=220.0, attempt=10))
        events = [one for one in sent if isinstance(one, MoveEvent)]
        assert (here.state, here.power, here.image, here.spec) == (phase, Power.SHELVED, "snapshot", NEWER)
        assert events[-1].terminal is (to_cell is None)
        if to_cell is None:
            continue
        departure = here.departure
        assert departure is not None and departure.cell == "c1"
        assert (departure.attempt, departure.is_stopped, departure.code) == (10, is_stopped, "max_retries_exceeded")


@pytest.mark.parametrize("kept", [{"code": "build.machine_exists"}, {"proves_from": 1000}], ids=str)
def test_an_arrival_proves_no_more_about_machines_than_the_former_record(kept: dict[str, Any]) -> None:
    former = replace(GONE, **kept)
    here = step(former, ARRIVES, PATIENCE).instance
    assert not any(is_over(known, 1, host(1)) for known in (former, here))


# --- What the former cell answers.


GONE = Instance(
    uuid=UUID,
    state=State.DEPARTED,
    spec=SPEC,
    selections=(selection(1),),
    attempt=7,
    sequence=51,
    departure=LEFT,
    departed_by=MOVE,
)
GONE_TOLD = (MOVE, MoveState.MIGRATING, "", 50)
STOP = request(MoveKind.STOP, request_id=OTHER)


def ended(state: MoveState, request_id: str = OTHER) -> tuple[EndedMove, ...]:
    return (EndedMove(request_id, MoveKind.STOP, state, "z"),)


@pytest.mark.parametrize(
    ("known", "event", "answer"),
    [
        ((), DELETE, None),
        ((), departs(), None),
        ((), departs(request_id=OTHER), (MoveState.REFUSED, "instance.departed")),
        ((), request(MoveKind.STOP), None),
        (ended(MoveState.DONE, MOVE), request(MoveKind.STOP), None),
        ((), STOP, (MoveState.REFUSED, "instance.departed")),
        ((), unbegun(STOP), (MoveState.FAILED, "move.lost")),
        ((), unbegun(STOP, REFUSAL), (MoveState.REFUSED, "instance.departed")),
        (ended(MoveState.DONE), STOP, (MoveState.DONE, "z")),
        (ended(MoveState.DONE), unbegun(STOP), (MoveState.DONE, "z")),
        (ended(MoveState.SCHEDULED), STOP, None),
    ],
)
def test_the_former_cell_answers_with_the_departure_and_an_end_of_its_own(
    known: tuple[EndedMove, ...], event: e.MoveRequested | e.DeleteRequested, answer: tuple[MoveState, str] | None
) -> None:
    before = replace(GONE, ended=known)
    stepped = refer(before, event, PATIENCE)
    assert told(stepped) == [GONE_TOLD, *([] if answer is None else [(OTHER, *answer, 49)])]
    if answer is not None:
        last = stepped.commands[-1]
        assert isinstance(last, MoveEvent) and isinstance(event, e.MoveRequested)
        assert (last.terminal, last.kind, last.departure) == (True, event.request.kind, None)
    is_new = answer is not None and not known
    kept = (EndedMove(OTHER, last.kind, *answer),) if is_new and answer is not None else known
    assert stepped.instance == replace(before, ended=kept)


@pytest.mark.parametrize(
    ("attempt", "begun", "phase"),
    [
        (0, True, (State.DEPARTED, None)),
        (7, True, (State.DEPARTED, None)),
        (8, True, (State.RELEASING, State.DELETED)),
        (8, False, (State.TOMBSTONE, None)),
    ],
)
def test_a_delete_of_a_later_attempt_than_it_has_left_with_is_carried_out(
    attempt: int, begun: bool, phase: Phase
) -> None:
    """It has come back since, and the record of that is lost."""
    stepped = step(GONE, replace(DELETE, begun=begun, attempt=attempt), PATIENCE)
    assert stepped.instance.phase == phase
    if phase == (State.DEPARTED, None):
        assert told(stepped) == [GONE_TOLD]


def test_so_many_ends_are_kept() -> None:
    many = tuple(EndedMove(f"{n}", MoveKind.STOP, MoveState.DONE) for n in range(MAX_ENDED))
    after = refer(replace(GONE, ended=many), STOP, PATIENCE).instance.ended
    assert [one.request_id for one in after] == [*(f"{n}" for n in range(1, MAX_ENDED)), OTHER]


OFFLOADED = replace(GONE, state=State.OFFLOADED, departure=None, departed_by="")


@pytest.mark.parametrize(
    ("event", "code"), [(unbegun(STOP), "move.lost"), (unbegun(STOP, REFUSAL), "x")], ids=["query", "given up"]
)
def test_what_is_not_begun_is_answered_where_the_instance_is(event: e.MoveQueried, code: str) -> None:
    assert [answer[0] for answer in told(step(GONE, event, PATIENCE))] == [MOVE, OTHER]
    assert [answer[2] for answer in told(answer_unbegun(OFFLOADED, event, PATIENCE))] == [code]


@pytest.mark.parametrize(
    ("phase", "moves", "codes"),
    [
        (State.OFFLOADED, False, ["instance.not_active"]),
        (State.RESIZED, True, ["instance.busy"]),
        ((State.DESTROYING, State.DELETED), True, ["instance.not_active"]),
        ((State.RELEASING, State.FAILED), True, ["instance.not_active"]),
        ((State.RELEASING, State.FAILED), False, ["instance.not_active"]),
    ],
)
def test_a_request_that_cannot_be_begun_is_refused(phase: State | Phase, moves: bool, codes: list[str]) -> None:
    state, then = phase_of(phase)
    move = Move(request_id=MOVE, kind=MoveKind.MIGRATE, spec=NEWER)
    known = replace(GONE, state=state, then=then, move=move if moves else None)
    assert [code for _, _, code, _ in told(refuse_other(known, STOP, PATIENCE))] == codes

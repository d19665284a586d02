"""An instance that leaves its cell, and arrives: a row for each condition that alone makes the difference."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.build import AttemptRecord
from bus.contracts.cell import Spawn
from bus.contracts.moves import Departure, MoveEvent, MoveKind, MoveState
from cell_conductor.domain import events as e
from cell_conductor.domain.departure_rules import answer_unbegun, arrive, give_away, refer, refuse_other
from cell_conductor.domain.doubt import is_in_doubt
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import MAX_ENDED, EndedMove, Instance, Move, Phase, Power, State
from cell_conductor.domain.report import is_over
from cell_conductor.domain.set_back import SetBack
from cell_conductor.domain.steps import Step, StepContext
from cell_conductor.domain.table import step
from tests.unit.conductor.move_scenario import MOVE, OTHER, request, unbegun
from tests.unit.conductor.scenario import DELETE, PATIENCE, SPEC, UUID, host, phase_of, selection

NEWER = replace(SPEC, flavor="large", image="ubuntu")
LEFT = Departure(
    cell="c2",
    spec=NEWER,
    image="snapshot",
    last=selection(1),
    selections=(selection(2), selection(3)),
    newest=7,
    consumer_generation=4,
    order=30,
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


MOVING = Instance(
    uuid=UUID,
    state=State.PREPARING,
    spec=SPEC,
    selections=(selection(1), selection(2), selection(3)),
    position=1,
    attempt=7,
    consumer_generation=4,
    sequence=50,
    order=30,
    image="snapshot",
    deadline=900.0,
    queried=True,
    move=Move(request_id=MOVE, kind=MoveKind.MIGRATE, spec=NEWER, to_cell="c2", power=Power.STOPPED),
)


@pytest.mark.parametrize("power", Power)
def test_what_is_left_is_stated_once_and_nothing_is_awaited(power: Power) -> None:
    assert MOVING.move is not None
    stepped = give_away(replace(MOVING, move=replace(MOVING.move, power=power)), 600.0, PATIENCE)
    left = stepped.instance
    assert left.departure == replace(LEFT, is_stopped=power is Power.STOPPED)
    assert (left.phase, left.selections, left.position) == ((State.DEPARTED, None), (selection(1),), 0)
    assert (left.move, left.deadline, left.queried) == (None, None, False)
    assert (left.departed_by, left.sequence, left.since) == (MOVE, 51, 600.0)
    assert told(stepped) == [(MOVE, MoveState.MIGRATING, "", 50)]
    (event,) = stepped.commands
    assert isinstance(event, MoveEvent)
    assert (event.kind, event.flavor, event.image, event.cell) == (MoveKind.MIGRATE, "large", "ubuntu", "c1")
    assert (event.departure, event.terminal) == (left.departure, False)


def test_a_source_is_destroyed_before_it_has_left() -> None:
    assert MOVING.move is not None
    known = replace(MOVING, move=replace(MOVING.move, source=selection(1), source_attempt=6))
    stepped = give_away(known, 600.0, PATIENCE)
    assert stepped.instance.phase == (State.DESTROYING, State.DEPARTED)
    assert told(stepped) == [(MOVE, MoveState.MIGRATING, "", 50)]


@pytest.mark.parametrize(("consumer", "left"), [(MOVE, True), (OTHER, False), ("", False)])
def test_it_has_left_when_its_migration_is_released(consumer: str, left: bool) -> None:
    releasing = replace(MOVING, state=State.RELEASING, then=State.DEPARTED)
    after = step(releasing, e.Released(at=600.0, consumer=consumer), PATIENCE).instance
    assert (after.state is State.DEPARTED) is left and (left or after is releasing)


# --- It arrives.


def arrival(departure: Departure) -> e.InstanceArrives:
    event = request(MoveKind.MIGRATE, arrival=departure)
    assert isinstance(event, e.InstanceArrives)
    return event


ARRIVES = arrival(LEFT)
NEW = Instance(uuid=UUID)
FENCED = replace(PATIENCE, fences={host(2): Fence(host_uuid=host(2), host="host-2", version=1)})
GOES_BACK = ((State.RELEASING, State.OFFLOADED), MoveState.UNDOING)


@pytest.mark.parametrize(
    ("known", "event", "context", "phase", "state", "sequence"),
    [
        (NEW, ARRIVES, PATIENCE, (State.FINISHING, None), MoveState.FINISHING, 51),
        (NEW, unbegun(ARRIVES), PATIENCE, *GOES_BACK, 51),
        (NEW, unbegun(ARRIVES, REFUSAL), PATIENCE, *GOES_BACK, 51),
        (NEW, ARRIVES, FENCED, (State.CLAIMING, State.PREPARING), MoveState.CLAIMING, 51),
        (
            NEW,
            ARRIVES,
            replace(PATIENCE, set_back=SetBack(700.0)),
            (State.FINISHING, None),
            MoveState.FINISHING,
            700_000,
        ),
        (NEW, ARRIVES, replace(PATIENCE, set_back=SetBack(200.0)), (State.FINISHING, None), MoveState.FINISHING, 51),
        (
            replace(NEW, ended=(EndedMove(MOVE, MoveKind.MIGRATE, MoveState.FAILED),)),
            ARRIVES,
            PATIENCE,
            *GOES_BACK,
            51,
        ),
        (
            replace(NEW, ended=(EndedMove(OTHER, MoveKind.MIGRATE, MoveState.FAILED),)),
            ARRIVES,
            PATIENCE,
            (State.FINISHING, None),
            MoveState.FINISHING,
            51,
        ),
        (
            replace(NEW, state=State.TOMBSTONE),
            ARRIVES,
            PATIENCE,
            (State.RELEASING, State.DELETED),
            MoveState.REFUSED,
            51,
        ),
    ],
)
def test_an_arrival_is_on_record_from_then_on(
    *,
    known: Instance,
    event: e.InstanceArrives,
    context: StepContext,
    phase: Phase,
    state: MoveState,
    sequence: int,
) -> None:
    stepped = arrive(known, event, context)
    here = stepped.instance
    assert here.phase == phase
    assert [(one, number) for _, one, _, number in told(stepped)] == [(state, sequence)]
    is_deleted = known.state is State.TOMBSTONE
    assert (here.attempt, here.newest, here.position) == (7, 7, 0 if is_deleted else 1)
    assert (here.spec, here.consumer_generation, here.order, here.image) == (NEWER, 4, 30, "snapshot")
    assert (here.requested_at, here.since, here.answered, here.cause) == (event.at, event.at, True, MOVE)
    is_begun = state is MoveState.FINISHING and not here.doubted
    assert any(isinstance(one, Spawn) for one in stepped.commands) is is_begun
    if is_deleted:
        assert here.selections == (selection(1),)
        return
    assert here.selections == (selection(1), selection(2), selection(3))
    assert here.move is not None and here.move.source is None
    has_ended = any(one.request_id == MOVE for one in known.ended)
    assert (here.move.began, here.move.answered) == (600.0, has_ended)
    is_doubted = sequence > 51
    assert (here.doubted, here.reused_from) == (is_doubted, 7 if is_doubted else 0)
    why = "x" if event.given_up else "move.lost" if event.is_query else ""
    assert is_in_doubt(here) is is_doubted
    assert here.move.lost_code == ("" if is_doubted else "move.lost" if has_ended else why)


@pytest.mark.parametrize("spec", [SPEC, None])
@pytest.mark.parametrize(("stay", "arrives"), [(0, True), (3, True), (4, False), (9, False)])
def test_an_arrival_begins_in_a_record_of_an_earlier_stay_alone(spec: Any, stay: int, arrives: bool) -> None:
    known = replace(NEW, spec=spec, stay=stay, sequence=10**6, state=State.OFFLOADED, selections=(selection(1),))
    after = arrive(known, arrival(replace(LEFT, stay=3)), PATIENCE).instance
    assert (after.state, after.stay) == ((State.FINISHING, 4) if arrives else (State.OFFLOADED, stay))


@pytest.mark.parametrize(("last", "newest"), [(6, 7), (7, 8), (40, 41)])
def test_no_attempt_that_the_former_record_has_asked_for_is_numbered_again(last: int, newest: int) -> None:
    here = arrive(replace(GONE, attempt=last), ARRIVES, PATIENCE).instance
    assert (here.attempt, here.last_attempt) == (7, newest)


def test_it_leaves_by_the_stay_that_the_schedulers_have_on_record() -> None:
    for mine, theirs in ((1, 4), (4, 1), (4, 4)):
        known = replace(OFFLOADED, stay=mine, power=Power.SHELVED)
        leaves = request(MoveKind.UNSHELVE, 2, request_id=OTHER, to_cell="c2", stay=theirs)
        begun = step(known, leaves, PATIENCE).instance
        left = give_away(replace(begun, position=1), 600.0, PATIENCE).instance
        assert left.departure is not None
        assert (begun.stay, left.departure.stay, left.stay) == (4, 4, 5), "the record knows of the stay that begins"


def test_a_late_arrival_where_it_has_left_again_is_answered_with_its_departure() -> None:
    left = replace(GONE, stay=1)
    stepped = arrive(left, ARRIVES, PATIENCE)
    assert (stepped.instance, told(stepped)) == (left, [GONE_TOLD])


def test_an_arrival_keeps_what_the_former_record_has() -> None:
    ended = tuple(EndedMove(f"{n}", MoveKind.STOP, MoveState.DONE) for n in range(MAX_ENDED))
    former = replace(GONE, order=40, ended=ended, departed_by=OTHER, traceparent="t", sequence=50)
    here = arrive(former, ARRIVES, PATIENCE).instance
    assert (here.order, here.traceparent, here.departure) == (40, "t", None)
    assert here.ended == (*ended[1:], EndedMove(OTHER, MoveKind.MIGRATE, MoveState.SCHEDULED))
    running = arrival(replace(LEFT, is_stopped=False))
    powers = [arrive(NEW, event, FENCED).instance.power for event in (ARRIVES, running)]
    assert powers == [Power.STOPPED, Power.SHELVED]


@pytest.mark.parametrize("context", [PATIENCE, FENCED, replace(PATIENCE, set_back=SetBack(700.0))])
def test_an_arrival_proves_no_more_about_machines_than_the_former_record(context: StepContext) -> None:
    """One of them is in quarantine since the database was set back in an earlier stay, and no operator has decided."""
    former = replace(GONE, reused_from=3)
    here = arrive(former, ARRIVES, context).instance
    proofs = [[is_over(known, attempt, host(4)) for attempt in (2, 3, 6)] for known in (former, here)]
    assert proofs == [[True, False, False], [not here.doubted, False, False]]


@pytest.mark.parametrize(
    "kept",
    [
        {"history": (AttemptRecord(attempt=1, host="host-1", outcome="not_tried"),)},
        {"code": "build.machine_exists"},
        {"doubted": True},
    ],
)
def test_an_arrival_keeps_what_the_former_record_has_not_commanded(kept: dict[str, Any]) -> None:
    """Its first host was passed over in that stay, and has a machine of a record that is lost."""
    former = replace(GONE, **kept)
    here = arrive(former, ARRIVES, PATIENCE).instance
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
COMES = request(MoveKind.STOP, request_id=OTHER, arrival=LEFT)


def ended(state: MoveState, request_id: str = OTHER) -> tuple[EndedMove, ...]:
    return (EndedMove(request_id, MoveKind.STOP, state, "z"),)


@pytest.mark.parametrize(
    ("known", "event", "answer"),
    [
        ((), DELETE, None),
        ((), request(MoveKind.STOP), None),
        (ended(MoveState.DONE, MOVE), request(MoveKind.STOP), None),
        ((), STOP, (MoveState.REFUSED, "instance.departed")),
        ((), unbegun(STOP), (MoveState.FAILED, "move.lost")),
        ((), unbegun(STOP, REFUSAL), (MoveState.REFUSED, "instance.departed")),
        (ended(MoveState.DONE), STOP, (MoveState.DONE, "z")),
        (ended(MoveState.DONE), unbegun(STOP), (MoveState.DONE, "z")),
        (ended(MoveState.SCHEDULED), STOP, None),
        ((), COMES, None),
        (ended(MoveState.SCHEDULED), COMES, None),
        (ended(MoveState.DONE), COMES, (MoveState.DONE, "z")),
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
        assert isinstance(last, MoveEvent)
        assert (last.terminal, last.kind, last.departure) == (True, MoveKind.STOP, None)
    is_new = answer is not None and not known
    kept = (EndedMove(OTHER, MoveKind.STOP, *answer),) if is_new and answer is not None else known
    assert stepped.instance == replace(before, ended=kept)


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
    known = replace(GONE, state=state, then=then, move=MOVING.move if moves else None)
    assert [code for _, _, code, _ in told(refuse_other(known, STOP, PATIENCE))] == codes

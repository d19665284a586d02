"""The orders of a record: a row for each state, request and fact that alone makes the difference."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.cell import Destroy
from bus.contracts.moves import CellAsks, CellCheck, ChangeKind, ChangeMachine, MoveKind
from cell_conductor.domain.instance import Instance, Move, Phase, Power, State
from cell_conductor.domain.orders import (
    MAX_STEP_S,
    change_of,
    numbered,
    orders_of,
    repeat_at,
    repeated,
    step_s,
    with_orders,
)
from cell_conductor.domain.set_back import SetBack
from cell_conductor.domain.steps import Step
from tests.unit.conductor.move_scenario import MOVE as REQUEST
from tests.unit.conductor.scenario import PATIENCE, SPEC, UUID, host, phase_of, selection

OLD, NEW = replace(SPEC, flavor="small"), replace(SPEC, flavor="large")
DELETING, CONFIRMING, UNDOING, OFFLOADING = (
    (State.DESTROYING, then) for then in (State.DELETED, State.ACTIVE, State.REVERTING, State.OFFLOADED)
)
BACK = replace(PATIENCE, set_back=SetBack(1000.0))
MOVE = Move(
    request_id=REQUEST,
    kind=MoveKind.MIGRATE,
    source=replace(selection(1), service="s9"),
    source_attempt=1,
    spec=OLD,
    began=500.0,
    order=5,
    rescue_password="secret",
    step_timeout_s=100.0,
)
NO_MOVE: dict[str, Any] = {"move": None}
OF_INSTANCE = frozenset({"move", "queried", "doubted", "selections"})


def record(at: State | Phase, kind: MoveKind = MoveKind.MIGRATE, **facts: Any) -> Instance:
    """Attempt 2 on host 2, from attempt 1 on host 1. facts: of the instance, or else of its move."""
    state, then = phase_of(at)
    of_move = {name: fact for name, fact in facts.items() if name not in OF_INSTANCE}
    known = Instance(
        uuid=UUID,
        state=state,
        then=then,
        spec=NEW,
        selections=(selection(1), selection(2)),
        position=1,
        attempt=2,
        order=5,
        image="snapshot",
        move=replace(MOVE, kind=kind, **of_move),
    )
    return replace(known, **{name: fact for name, fact in facts.items() if name in OF_INSTANCE})


def in_place(at: State | Phase, **facts: Any) -> Instance:
    """A resize on host 1, which another service has by now."""
    here = replace(selection(1), service="s8", allocations={host(1): {"VCPU": 8}})
    return record(at, MoveKind.RESIZE, selections=(selection(1), here), **facts)


HERE, SOURCE = (2, host(2)), (1, host(1))


@pytest.mark.parametrize(
    ("known", "context", "destroyed", "unless_built"),
    [
        (record(State.ACTIVE, **NO_MOVE), PATIENCE, [], False),
        (record(State.ACTIVE, queried=True, **NO_MOVE), PATIENCE, [HERE], True),
        (record(State.BUILDING, **NO_MOVE), PATIENCE, [], False),
        (record(State.BUILDING, queried=True, **NO_MOVE), PATIENCE, [HERE], True),
        (record((State.CLAIMING, State.BUILDING), queried=True, **NO_MOVE), PATIENCE, [], False),
        (record(State.FINISHING), PATIENCE, [], False),
        (record(State.FINISHING, queried=True), PATIENCE, [HERE], True),
        (record(State.RESIZED), PATIENCE, [], False),
        (record(State.RESIZED, queried=True), PATIENCE, [HERE, SOURCE], True),
        (record(State.RESIZED, queried=True, here_gone=True), PATIENCE, [SOURCE], True),
        (record(State.RESIZED, queried=True, source_gone=True), PATIENCE, [HERE], True),
        (record(DELETING), PATIENCE, [HERE, SOURCE], False),
        (record(DELETING, queried=True), PATIENCE, [HERE, SOURCE], False),
        (record(DELETING, doubted=True), BACK, [HERE, SOURCE], False),
        (record(DELETING, here_gone=True), PATIENCE, [SOURCE], False),
        (record(DELETING, source_gone=True), PATIENCE, [HERE], False),
        (record(DELETING, source=None), PATIENCE, [HERE], False),
        (record(DELETING, **NO_MOVE), PATIENCE, [HERE], False),
        (record(DELETING, doubted=True, **NO_MOVE), BACK, [HERE], False),
        (in_place(DELETING), PATIENCE, [(2, host(1))], False),
        (record(CONFIRMING), PATIENCE, [SOURCE], False),
        (record(OFFLOADING), PATIENCE, [HERE], False),
        (record(UNDOING), PATIENCE, [HERE], False),
        (record(UNDOING), BACK, [HERE], False),
        (record(UNDOING), PATIENCE, [HERE], False),
        (record(UNDOING, doubted=True), BACK, [HERE], True),
    ],
)
def test_the_machines_that_are_to_be_destroyed(
    known: Instance, context: object, destroyed: list[tuple[int, str]], unless_built: bool
) -> None:
    orders = orders_of(known, context)  # type: ignore[arg-type]
    assert [(one.attempt, one.host_uuid, one.unless_built) for one in orders if isinstance(one, Destroy)] == [
        (*each, unless_built) for each in destroyed
    ]
    assert len(orders) == len(destroyed)


@pytest.mark.parametrize(
    ("known", "change"),
    [
        (record(State.CHANGING, MoveKind.STOP), ChangeKind.STOP),
        (record(State.CHANGING, MoveKind.UNSHELVE), ChangeKind.START),
        (record(State.CHANGING, **NO_MOVE), None),
        (record(State.RESTARTING, **NO_MOVE), None),
        (record(State.RESIZED), None),
        (record(State.RESIZING), None),
        (in_place(State.RESIZING), ChangeKind.RESIZE),
        (in_place(UNDOING), ChangeKind.RESIZE),
        (record(UNDOING), None),
        (record(State.HANDING_OVER), ChangeKind.HAND_OVER),
        (record(State.HANDING_OVER, to_cell="c2"), ChangeKind.SNAPSHOT),
        (record(State.HANDING_OVER, MoveKind.LIVE_MIGRATE), ChangeKind.HAND_OVER_LIVE),
        (record(State.HANDING_OVER, MoveKind.LIVE_MIGRATE, to_cell="c2"), ChangeKind.SNAPSHOT),
        (record(State.PREPARING), ChangeKind.CHECK),
        (record(State.PREPARING, to_cell="c2"), ChangeKind.CHECK),
        (record(State.PREPARING, MoveKind.LIVE_MIGRATE), ChangeKind.CHECK),
        (record(State.RESTARTING, MoveKind.LIVE_MIGRATE), ChangeKind.START),
        (replace(record(State.RESTARTING), move=replace(MOVE, power=Power.STOPPED)), ChangeKind.STOP),
        (replace(record(State.PREPARING), move=replace(MOVE, power=Power.STOPPED)), ChangeKind.CHECK),
    ],
)
def test_the_change_that_is_awaited(known: Instance, change: ChangeKind | None) -> None:
    assert change_of(known) is change


AT_SOURCE = {"attempt": 1, "host_uuid": host(1), "service": "s9", "spec": OLD, "allocations": {host(1): {"VCPU": 1}}}


@pytest.mark.parametrize(
    ("known", "fields"),
    [
        (record(State.PREPARING), {}),
        (record(State.HANDING_OVER), {**AT_SOURCE, "to_host": host(2)}),
        (record(State.HANDING_OVER, MoveKind.LIVE_MIGRATE), {**AT_SOURCE, "to_host": host(2)}),
        (record(State.HANDING_OVER, to_cell="c2"), AT_SOURCE),
        (record(State.RESTARTING), {}),
        (record(State.RESTARTING, resizing_back=True), {}),
        (record(State.CHANGING, MoveKind.STOP), {}),
        (record(State.CHANGING, MoveKind.RESCUE), {"rescue_password": "secret"}),
        (
            in_place(State.RESIZING),
            {"host_uuid": host(1), "service": "s8", "allocations": {host(1): {"VCPU": 8}}},
        ),
        (in_place(State.RESIZING, resizing_back=True), {**AT_SOURCE, "service": "s8"}),
        (in_place(UNDOING), {**AT_SOURCE, "service": "s8"}),
    ],
)
def test_what_a_change_is_commanded_with(known: Instance, fields: dict[str, object]) -> None:
    (order,) = orders_of(known, PATIENCE)
    assert isinstance(order, ChangeMachine)
    expected = {
        "attempt": 2,
        "host_uuid": host(2),
        "service": "s1",
        "spec": NEW,
        "allocations": {host(2): {"VCPU": 2}},
        "to_host": None,
        "rescue_password": "",
        "image": "",
        "asked_by": None,
        **fields,
    }
    assert {name: getattr(order, name) for name in expected} == expected
    assert (order.order, order.timeout_s, order.deployment) == (5, 100.0, PATIENCE.deployment)


@pytest.mark.parametrize(
    ("fields", "is_query"), [({}, False), ({"lost_code": "move.in_doubt"}, True), ({"delete": True}, True)]
)
def test_a_host_of_another_cell_is_checked_by_way_of_the_schedulers(fields: dict[str, Any], is_query: bool) -> None:
    (asked,) = orders_of(record(State.PREPARING, to_cell="c2", **fields), PATIENCE)
    assert isinstance(asked, CellAsks)
    check = asked.message
    assert isinstance(check, CellCheck) and check.change is not None
    assert (check.cell, check.change.image, check.change.host_uuid) == ("c2", "snapshot", host(2))
    assert check.change.asked_by == check.asked_by
    by = check.asked_by
    assert (by.cell, by.request_id, check.is_query) == ("c1", REQUEST, is_query)


@pytest.mark.parametrize(
    ("before", "after", "again", "count"),
    [
        (record(State.RESIZED), record(DELETING), False, 2),
        (record(DELETING), record(DELETING), False, 0),
        (record(DELETING), record(DELETING), True, 2),
        (record(CONFIRMING), record(DELETING), False, 2),
        (record(DELETING, source=None), record(DELETING), False, 1),
        (record(DELETING), record(State.DELETED), False, 0),
    ],
)
def test_orders_are_sent_once_and_before_the_other_messages(
    before: Instance, after: Instance, again: bool, count: int
) -> None:
    (other,) = orders_of(record(OFFLOADING), PATIENCE)
    stepped = with_orders(before, Step(after, (other,), again=again), PATIENCE)
    assert stepped.commands == (*orders_of(after, PATIENCE)[len(orders_of(after, PATIENCE)) - count :], other)


@pytest.mark.parametrize(
    ("known", "queried", "order"),
    [
        (record(State.BUILDING, **NO_MOVE), True, 5),
        (record((State.CLAIMING, State.BUILDING), **NO_MOVE), False, 5),
        (record((State.CLAIMING, State.BUILDING), queried=True, **NO_MOVE), True, 5),
        (record(DELETING), False, 5),
        (record(State.RESIZED), True, 5),
        (record(State.PREPARING), False, 2000),
    ],
)
def test_without_an_answer_all_is_sent_again_under_a_new_number(known: Instance, queried: bool, order: int) -> None:
    stepped = repeated(replace(known, since=1.5), 2.0, PATIENCE)
    after = stepped.instance
    assert (stepped.again, after.queried, after.order) == (True, queried, order)
    assert after.deadline == 2.0 + PATIENCE.destroy_retry_s


@pytest.mark.parametrize(("waited", "wait"), [(0.0, 30.0), (30.0, 30.0), (31.0, 31.0), (600.0, 600.0), (601.0, 600.0)])
def test_what_is_not_answered_is_sent_less_and_less_often(waited: float, wait: float) -> None:
    context = replace(PATIENCE, destroy_retry_s=30.0, destroy_retry_max_s=600.0)
    assert repeat_at(Instance(uuid=UUID, since=100.0), 100.0 + waited, context) == 100.0 + waited + wait


@pytest.mark.parametrize(("at", "order"), [(0.001, 6), (0.006, 6), (0.007, 7), (2.0, 2000)])
def test_a_change_is_numbered_above_all_before_and_by_the_time(at: float, order: int) -> None:
    after = numbered(record(State.PREPARING), at)
    assert after.move is not None and (after.order, after.move.order) == (order, order)


LARGE = replace(selection(1), allocations={host(1): {"MEMORY_MB": 4000, "VCPU": 9}, host(3): {"VCPU": 1}})


@pytest.mark.parametrize(
    ("source", "kind", "mb_s", "seconds"),
    [
        (LARGE, ChangeKind.HAND_OVER_LIVE, 10.0, 500.0),
        (LARGE, ChangeKind.HAND_OVER_LIVE, 0.0, 100.0),
        (LARGE, ChangeKind.HAND_OVER_LIVE, 0.001, MAX_STEP_S),
        (LARGE, ChangeKind.HAND_OVER, 10.0, 100.0),
        (None, ChangeKind.HAND_OVER_LIVE, 10.0, 100.0),
        (selection(1), ChangeKind.HAND_OVER_LIVE, 0.01, 100.0),
    ],
)
def test_a_live_migration_has_the_time_to_copy_its_memory(
    source: object, kind: ChangeKind, mb_s: float, seconds: float
) -> None:
    move = replace(MOVE, source=source)
    assert step_s(move, kind, replace(PATIENCE, live_copy_mb_s=mb_s)) == seconds

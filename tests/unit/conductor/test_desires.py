"""The table of desires is total, and the orders that follow from it destroy nothing that is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from msgspec.structs import replace

from bus.contracts.cell import Destroy, Selection
from bus.contracts.moves import MoveKind
from cell_conductor.domain.desires import DESIRES, in_text, of_text
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import Instance, Move, Phase, State
from cell_conductor.domain.orders import orders_of, with_orders
from cell_conductor.domain.steps import Step
from tests.unit.conductor.scenario import PATIENCE, SPEC
from tests.unit.conductor.test_wanted import HERE, IN_PLACE, NO_SOURCE, PHASES, SOURCE, Record, cases, frozen_over

# A resize is under way in these; elsewhere a request for any change.
RESIZES = {(State.RESIZING, None), (State.DESTROYING, State.REVERTING)}


def at(host: str) -> Selection:
    return Selection(host_uuid=host, host=host, service="s1", allocations={host: {}})


def test_every_state_has_a_desire_and_at_most_nineteen_are_there() -> None:
    assert set(DESIRES) == set(PHASES)
    assert {state for state, _ in DESIRES} == set(State) and len(State) <= 19


def test_a_state_has_the_same_name_in_the_database_and_back() -> None:
    assert [of_text(in_text(phase)) for phase in DESIRES] == list(DESIRES)
    assert len({in_text(phase) for phase in DESIRES}) == len(DESIRES)


def records(phase: Phase) -> Iterator[tuple[Instance, Record]]:
    """Records in this state, of every shape of a move, each with the facts that the frozen values are of."""
    (state, then), here, source = phase, at(HERE), at(SOURCE)
    booleans = (False, True)
    for kind, doubted, reused, is_queried, is_deleted, has_move in product(
        (NO_SOURCE, SOURCE, IN_PLACE), booleans, (0, 2, 4), booleans, booleans, booleans
    ):
        if state is State.HANDING_OVER and kind != SOURCE:
            continue  # it is the source that hands over
        origin = {NO_SOURCE: None, SOURCE: source, IN_PLACE: here}[kind]
        move = Move(
            request_id="r",
            kind=MoveKind.RESIZE if phase in RESIZES else MoveKind.STOP,
            source=origin,
            source_attempt=0 if origin is None else 2,
            spec=SPEC,
            delete=is_deleted,
        )
        instance = Instance(
            uuid="i",
            state=state,
            then=then,
            spec=SPEC,
            selections=(origin or here, here),
            position=1,
            attempt=3,
            newest=5,
            doubted=doubted,
            reused_from=reused,
            queried=is_queried,
            move=move if has_move or origin is not None else None,
        )
        yield (
            instance,
            Record(
                phase=phase,
                source=kind,
                doubted=doubted,
                reused_from=reused,
                machine_exists=False,
                first_not_tried=False,
            ),
        )


@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_no_order_destroys_what_was_wanted_before_there_were_desires(phase: Phase, fenced: bool) -> None:
    """But unless it is complete, which a host that is queried decides."""
    fences = {host: Fence(host_uuid=host, host=host, version=1) for host in (HERE, SOURCE) if fenced}
    context = replace(PATIENCE, fences=fences, set_back_at=1e9)
    over = dict(zip(cases(phase), frozen_over(phase), strict=True))
    ordered = 0
    for instance, facts in records(phase):
        for order in orders_of(instance, context):
            if isinstance(order, Destroy) and not order.unless_built:
                ordered += 1
                assert over[facts, order.attempt, order.host_uuid], (instance, order)
    assert bool(ordered) is (phase[0] is State.DESTROYING)


def test_a_machine_under_another_service_gets_its_orders_there() -> None:
    """In every state that has orders for the machine that was found."""
    found = 0
    for phase in PHASES:
        for instance, _ in records(phase):
            moved = replace(instance, selections=tuple(replace(one, service="s9") for one in instance.selections))
            before, after = orders_of(instance, PATIENCE), orders_of(moved, PATIENCE)
            stepped = with_orders(instance, Step(moved), PATIENCE)
            assert stepped.commands == tuple(one for one in after if one not in before)
            found += len(stepped.commands)
    assert found


@pytest.mark.parametrize("phase", PHASES)
def test_orders_are_sent_when_a_state_is_entered_and_not_once_more_within_it(phase: Phase) -> None:
    for instance, _ in records(phase):
        other = State.ACTIVE if phase[0] is not State.ACTIVE else State.ABSENT
        elsewhere = replace(instance, state=other, then=None)
        assert with_orders(elsewhere, Step(instance), PATIENCE).commands == orders_of(instance, PATIENCE)
        assert with_orders(instance, Step(instance), PATIENCE).commands == ()
        assert with_orders(instance, Step(instance, again=True), PATIENCE).commands == orders_of(instance, PATIENCE)


def test_orders_are_sent_again_when_something_else_follows() -> None:
    """A source that was to be destroyed for its move is commanded once more for the delete of its instance."""
    confirming, deleting = ((State.DESTROYING, then) for then in (State.ACTIVE, State.DELETED))
    sent = 0
    for instance, _ in records(confirming):
        after = replace(instance, then=deleting[1])
        assert with_orders(instance, Step(after), PATIENCE).commands == orders_of(after, PATIENCE)
        sent += len(orders_of(after, PATIENCE))
    assert sent

"""What is released and recorded of an instance that is over."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import ActionKind
from bus.contracts.placement import ClaimOutcome, Release
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.state import events as e
from cell_conductor.state.fence import Fence
from cell_conductor.state.instance import State
from cell_conductor.transition import FenceSteps, step
from tests.unit.cell_conductor.move_scenario import ACTION, active, begun
from tests.unit.cell_conductor.scenario import DELETE, PATIENCE, host


def test_what_a_refused_claim_did_not_give_to_its_migration_is_not_released() -> None:
    made = begun(ActionKind.MIGRATE, 2)
    made.apply(DELETE)
    q = awaited_request_of(made.instance)
    # Placement: claim.migration_in_use, as another instance of the project keeps its source under this uuid.
    made.apply(
        e.ClaimRefused(
            at=201.0,
            attempt=q.attempt,
            consumer_conflict=True,
            outcomes=(ClaimOutcome.CONSUMER_CONFLICT,),
            reason="claim.migration_in_use",
        )
    )
    made.apply(e.Destroyed(at=210.0, attempt=9, host_uuid=host(1), service="s1"))
    asked = []
    while made.instance.state is State.RELEASING:
        q = awaited_request_of(made.instance)
        assert isinstance(q, Release)
        asked.append(q.consumer)
        made.apply(e.Released(at=220.0, consumer=q.consumer, attempt=q.attempt or 0))
    assert ACTION not in asked, asked


def test_a_loss_that_its_host_has_answered_is_not_recorded_again() -> None:
    context = replace(PATIENCE, fences={host(1): Fence(host_uuid=host(1), host="h1", version=1, at=1.0)})
    one, found = active(), []
    for event in (DELETE, "released"):
        now = event
        if event == "released":
            q = awaited_request_of(one)
            now = e.Released(at=900.0, consumer=q.consumer, attempt=q.attempt or 0)
        steps = FenceSteps()
        one = steps.apply(one, step(one, now, context), now, context).instance
        found.append(sum(map(len, steps.stale.values())))
    assert one.state is State.DELETED
    assert found == [1, 0], found  # between the two its host has answered that it is gone

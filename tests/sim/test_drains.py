"""Schedulers empty hosts in the simulation: it holds. Its defects: `test_mutants_of_drains.py`."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.drains import DrainMoveState, DrainRecord, DrainState, DrainTarget
from bus.contracts.moves import MoveKind
from lab.simulation import loop as virtual
from lab.simulation import rest
from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.run import simulate
from lab.simulation.widening import Widening
from lab.simulation.world import World
from scheduler_worker.domain.drains import DrainMove

DRAINS = frozenset({Widening.DRAINS})
SEED = 25


def test_the_plan_has_schedulers_empty_hosts() -> None:
    assert plan_of(SEED, DRAINS).drains_by_schedulers
    held = simulate(SEED, DRAINS)
    assert held.breach == "", held.detail


@pytest.mark.parametrize(
    ("state", "burnt", "breaks"),
    [
        pytest.param(DrainMoveState.UNDER_WAY, True, False, id="its move waits for a fence"),  # seed 1795407114
        pytest.param(DrainMoveState.UNDER_WAY, False, True, id="its move goes on"),
        pytest.param(DrainMoveState.WAITING, True, True, id="its move has not begun"),
    ],
)
def test_a_drain_waits_for_the_fence_of_a_host_that_its_move_has_begun_on(
    state: DrainMoveState, monkeypatch: pytest.MonkeyPatch, *, burnt: bool, breaks: bool
) -> None:
    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        made = {"target": DrainTarget.HOST, "kind": MoveKind.LIVE_MIGRATE, "by": "operator", "started_at": 1.0}
        record = DrainRecord(name="h", state=DrainState.RUNNING, **made)
        monkeypatch.setattr(rest, "drains_of", lambda _objects: {"d": record})
        row = {"project_id": "p", "source_uuid": "u", "source": "h", "kind": MoveKind.LIVE_MIGRATE, "position": 0}
        move = DrainMove(drain="d", instance_uuid="i", state=state, **row)
        world.builds.drain_moves[("d", "i")] = move
        assert bool(list(rest._drains_have_ended(world, {"i"} if burnt else set()))) is breaks

    virtual.run(main, on_unseen=pytest.fail)

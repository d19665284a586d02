"""The state of a request, as the invariants judge it."""

from __future__ import annotations

from bus.contracts.build import BuildState
from lab.simulation.plan import Action
from lab.simulation.widening import Widening
from lab.simulation.world import World
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.decisions import INCOMPLETE, NO_HOST
from scheduler_worker.domain.deletes import STRANDED


def standing(world: World, build: RecordedBuild) -> str:
    """The state of a request. Where schedulers forget requests, one that has failed because the host of its instance,
    or of another member of its gang, was not announced counts as active while that runs: `berth check` names it, until
    it is deleted.
    """
    stopped = {order.service for order in world.plan.orders if order.action is Action.LEAVE}
    is_kept = (
        Widening.REQUESTS_FORGOTTEN in world.plan.widenings
        and build.state is BuildState.FAILED
        and build.code in (STRANDED, NO_HOST, INCOMPLETE)
        and any(
            instance.here is not None and (instance.here.service in stopped or build.code == INCOMPLETE)
            for table in world.cells.values()
            if (instance := table.instances.get(build.instance_uuid)) is not None
        )
    )
    return (BuildState.ACTIVE if is_kept else build.state).value

"""The state of a request, as the invariants judge it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from berth.sim.plan import Action
from berth.sim.widening import Widening
from berth.sim.world import World
from bus.contracts.build import BuildState
from scheduler_worker.domain.builds import IN_CELL, RecordedBuild
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


def forgotten_have_ends(world: World, burnt: Collection[str]) -> Iterator[str]:
    """A build, or a delete, of which a restored database knows an old truth may have a second end, and has one.

    Not one that no scheduler has on record, nor one that its cell cannot judge: it has no record of it, and a machine
    of it runs or hangs in its build (a delete ends it), or a service that burnt down may have had one.
    """
    ended = {uuid for (uuid, _), event in world.listener.events.items() if event.terminal}
    fleets = world.fleets.values()
    machines = {guest.instance_uuid for fleet in fleets for _, guest in fleet.guests()}
    for uuid in sorted({*world.taken_back, *world.listener.exempt}):
        build = world.builds.recorded.get(uuid)
        if build is None or build.cell is None or uuid in burnt:
            continue
        table = world.cells[build.cell]
        live = any(fleet.records.live([uuid]) for fleet in fleets)
        if uuid not in table.instances and (uuid in machines or live or world.dead):
            continue
        if build.state in IN_CELL:
            yield f"one_terminal_event: {uuid} is {build.state} at the top"
        elif uuid not in ended:
            yield f"one_terminal_event: {uuid} is {build.state} at the top, and clients have had no end"

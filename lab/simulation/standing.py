"""The state that the invariants count a request in, also after schedulers have forgotten requests."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from bus.contracts.build import BuildState
from cell_conductor.state.unknown_machine import UnknownMachineKind
from lab.simulation.plan import Action
from lab.simulation.widening import Widening
from lab.simulation.world import World
from scheduler_worker.records.build_record import OPEN, UNLOCATABLE, RecordedBuild


def is_unlocatable(build: RecordedBuild) -> bool:
    """Whether it has ended because no cell is known of what it holds, or may wait for that."""
    return build.state is BuildState.ACCEPTED or build.code == UNLOCATABLE


def standing(world: World, build: RecordedBuild) -> str:
    """The state of a request. Where schedulers forget requests, one that waits, or has failed, because the host of its
    instance is not announced, and its cell not known, counts as active while that runs: `berth check` names it, until
    it is deleted.
    """
    stopped = {order.service for order in world.plan.orders if order.action is Action.LEAVE}
    is_kept = (
        Widening.REQUESTS_FORGOTTEN in world.plan.widenings
        and is_unlocatable(build)
        and any(
            instance.current is not None and instance.current.service in stopped
            for table in world.cells.values()
            if (instance := table.instances.get(build.instance_uuid)) is not None
        )
    )
    return (BuildState.ACTIVE if is_kept else build.state).value


def forgotten_have_ends(world: World, unlocatable: Collection[str]) -> Iterator[str]:
    """A build, or a delete, of which a restored database knows an old truth may have a second end, and has one.

    Not one that no scheduler has on record, or whose cell waits for a host that burnt down (`unlocatable`). Nor a
    delete that its cell has no record of while a machine of it has the tag of another database: that one is never
    destroyed, and an operator decides about it.
    """
    ended = {uuid for (uuid, _), event in world.listener.events.items() if event.terminal}
    for uuid in sorted({*world.taken_back, *world.listener.exempt}):
        build = world.builds.recorded.get(uuid)
        if build is None or uuid in unlocatable:
            continue
        if build.state is BuildState.DELETING and build.cell is not None and _is_foreign(world, build.cell, uuid):
            continue
        if build.state in OPEN:
            yield f"one_terminal_event: {uuid} is {build.state} at the top"
        elif uuid not in ended:
            yield f"one_terminal_event: {uuid} is {build.state} at the top, and clients have had no end"


def _is_foreign(world: World, cell: str, uuid: str) -> bool:
    records = world.cells[cell].unknown_machines.values()
    return any(one.machine.uuid == uuid and one.machine.kind is UnknownMachineKind.FOREIGN for one in records)

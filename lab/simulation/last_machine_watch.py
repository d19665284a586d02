"""No instance loses its last machine, unless its client has requested that: *never in neither*, whatever was set back.

Judged from the machines alone: one that a move has left counts like one that runs. Of an instance between two cells
its image counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bus.contracts.actions import ActionKind
from cell_conductor.state.instance import Instance, State
from cell_conductor.store.memory import MemoryInstanceTable
from compute_sim.fleet import Fleet, SimulatedMachine
from lab.simulation.watch import Breach

# Their image is what is kept of these, at the client's request.
_OFFLOADED = frozenset({(State.OFFLOADED, None), *((one, State.OFFLOADED) for one in State)})
_OF_IMAGE = frozenset({ActionKind.UNSHELVE, ActionKind.SHELVE, ActionKind.OFFLOAD})


class LastMachineWatch:
    """Looks when a driver takes a machine away. was_active: instances that a record has had as active."""

    def __init__(
        self, cells: Mapping[str, MemoryInstanceTable], fleets: Mapping[str, Fleet], was_active: Collection[str]
    ) -> None:
        self._cells = cells
        self._fleets = fleets
        self._was_active = was_active
        self._shelved: dict[str, None] = {}
        # They are leaving, or have left, for another cell: with which attempt. Its end was ordered then, and may come
        # when a restored record has the instance active again.
        self._imaged: dict[str, int] = {}

    def instances(self, instances: Mapping[str, Instance]) -> None:
        """After a commit of a conductor: what was offloaded once has an image in place of a machine."""
        for uuid, instance in instances.items():
            kind = None if instance.action is None else instance.action.kind
            if instance.action is not None and instance.action.to_cell is not None:
                if instance.phase == (State.DESTROYING, State.OFFLOADED):
                    self._imaged[uuid] = instance.attempt
            elif uuid not in self._shelved and (instance.phase in _OFFLOADED or kind in _OF_IMAGE):
                self._shelved[uuid] = None

    def destroyed(self, host: str, machine: SimulatedMachine, is_deleted: bool) -> None:
        """A driver takes a machine away. Raises Breach."""
        uuid = machine.instance_uuid
        if not machine.complete or is_deleted or uuid not in self._was_active or uuid in self._shelved:
            return
        if machine.attempt <= self._imaged.get(uuid, 0):
            return
        for fleet in self._fleets.values():
            for other, one in fleet.machines():
                if one.instance_uuid == uuid and one.complete and (other, one.attempt) != (host, machine.attempt):
                    return
        states = {cell: table.instances[uuid].state for cell, table in self._cells.items() if uuid in table.instances}
        raise Breach("never_in_neither", f"{uuid} attempt {machine.attempt} on {host} is its last machine: {states}")

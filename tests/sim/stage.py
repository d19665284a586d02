"""One instance in a simulated world, for tests of what the simulation's watches call a breach."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.cell import ComputeOutcome, ComputeResult, InstanceSpec, Selection
from cell_conductor.state.instance import Instance, State
from cell_conductor.state.unknown_machine import REUSED_ATTEMPT, UnknownMachine, UnknownMachineKind
from cell_conductor.store.keyed_tables import UnknownMachineRecord
from compute_sim.fleet import SimulatedMachine
from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.loop import Process
from lab.simulation.plan import Plan
from lab.simulation.rest import _running, facts_of
from lab.simulation.watch import Breach
from lab.simulation.world import World
from placement_worker.domain.values import Provider

INSTANCE = "00000000-0000-4000-9000-000000000001"
HERE, LEFT = (f"00000000-0000-4000-8000-00000000000{n}" for n in range(2))
SPEC = InstanceSpec(instance_uuid=INSTANCE, project_id="red")


def breach(words: str, *, when: bool = True) -> AbstractContextManager[Any]:
    """The block raises this breach, or, unless `when`, none."""
    return pytest.raises(Breach, match=words) if when else nullcontext()


def chosen(host: str = HERE, service: str = "s") -> Selection:
    return Selection(host_uuid=host, host="h", service=service, allocations={host: {"VCPU": 1}})


def instance(state: State = State.ACTIVE, on: Selection | None = None, attempt: int = 1, **more: Any) -> Instance:
    return Instance(uuid=INSTANCE, state=state, attempt=attempt, selections=(on or chosen(),), **more)


def machine(host: str = HERE, attempt: int = 1, **more: Any) -> SimulatedMachine:
    return SimulatedMachine(INSTANCE, attempt, {host: {"VCPU": 1}}, database_id="d", **more)


def provider(uuid: str, **more: Any) -> Provider:
    """A root provider that has nothing, unless `more` states it."""
    made: dict[str, Any] = {"name": "h", "parent": None, "root": uuid, "generation": 1, "spec_generation": 1}
    return Provider(uuid, **{**made, "inventories": {}, "used": {}, "traits": (), "aggregates": (), **more})


def destroyed(host: str, service: str) -> ComputeResult:
    return ComputeResult(
        instance_uuid=INSTANCE, attempt=1, host_uuid=host, service=service, outcome=ComputeOutcome.DESTROYED
    )


def by(process: str, act: Callable[..., Any], *arguments: Any) -> Process:
    """The process does it."""
    actor = Process(process)
    actor.context.run(act, *arguments)
    return actor


class Stage:
    """A world, by default without bare metal; its first service and the host of that; the instance was requested."""

    def __init__(self, plan: Plan | None = None, *, duplicate: bool = False) -> None:
        self.world = World(plan or replace(plan_of(1), metal=None), EventLog())
        self.cell, self.service = self.world.plan.services[0]
        self.fleet = self.world.fleets[self.service]
        self.host, self.other = ([one.plan.uuid for one in self.fleet.hosts] * 2)[:2]
        self.table = self.world.cells[self.cell]
        self.world.harm.requested[INSTANCE] = None
        if duplicate:
            self.world.start_duplicate(self.service)

    def selection(self, host: str = "") -> Selection:
        return chosen(host or self.host, self.service)

    def show(self, record: Instance) -> None:
        """The watch of machines sees it committed. Raises Breach."""
        self.world.machines.instances("c1", {INSTANCE: record})

    def quarantine(self, attempt: int = 1) -> None:
        """The cell has the machine on its list."""
        listed = UnknownMachine(INSTANCE, attempt, self.host, UnknownMachineKind.QUARANTINED, REUSED_ATTEMPT)
        record = UnknownMachineRecord(machine=listed, service=self.service, first_seen=1.0, last_seen=1.0)
        self.table.unknown_machines[record.location] = record

    def running(self) -> int:
        """How many machines of the instance run when all rests."""
        return len([one for one in _running(self.world) if one.instance_uuid == INSTANCE])

    def counted(self) -> bool:
        """Whether the audit has a machine of it."""
        return any(one.instance_uuid == INSTANCE for one in facts_of(self.world, [], ()).running or ())

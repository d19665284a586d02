"""What is not ours, or not proved to be over, is never changed: conductor, compute service and Ironic stand-in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

import cell_conductor.app
import compute_sim.app
from berth.ironic_stand_in import Behaviour, IronicStandIn, Silent
from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import (
    MAX_NAMED_MACHINES,
    BreakerTripped,
    CellBuild,
    CellDelete,
    ComputeHosts,
    InstanceSpec,
    MachinesUnexplained,
    ReportHosts,
    Selection,
)
from bus.contracts.placement import Claim, ClaimOutcome, ClaimResult, ReleaseResult
from bus.memory import MemoryBroker, MemoryTransport
from bus.owner import BusOwnedByAnother
from bus.service.environment import Environment
from bus.service.service import Service
from cell_conductor.config import ConductorConfig
from cell_conductor.domain.instance import State
from cell_conductor.domain.report import UnexplainedKind
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.safety import DESTROY, KEEP
from compute_sim.config import ComputeConfig, IronicConfig
from compute_sim.fleet import Fleet

WAIT_S = 60.0
LOOKS = 4  # whole reports after which a conductor that wants to destroy something has reported it
QUICK = Behaviour(verify_s=0.001, deploy_s=0.02, undeploy_s=0.005, clean_s=0.005)
CONDUCTOR = ConductorConfig(report_grace_s=0.001, sweep_interval_s=0.05, destroy_retry_s=0.2)


class Life:
    """One life of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(service.run(self._stop))

    async def ready(self) -> None:
        """Wait until it serves; raises what it ended with before."""
        ready = asyncio.create_task(self._service.ready.wait())
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait((ready, self._task), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        self._stop.set()
        async with asyncio.timeout(WAIT_S):
            await self._task


class Cell:
    """A cell's bus, its database, its compute service's memory, and a placement that agrees to everything."""

    def __init__(self, name: str, ironic: IronicStandIn) -> None:
        self.name = name
        self.ironic = ironic
        self.clock = SystemClock()
        self.rng = random.Random(name)
        self.broker = MemoryBroker(self.clock)
        self.bus = Bus(name, MemoryTransport(self.broker, "ears"), process="ears", clock=self.clock, rng=self.rng)
        self.table = MemoryInstanceTable(self.clock)
        self.fleet: Fleet | None = None
        self.reports: list[ComputeHosts] = []
        self.events: list[BuildEvent] = []
        self.alarms: list[MachinesUnexplained | BreakerTripped] = []
        self._changed = asyncio.Condition()
        self._lives: list[Life] = []
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        await self.bus.open()
        for queue in ("placement.requests", "scheduler.builds", "conductor.hosts.{process}", "client.alarms.{process}"):
            consumer = self.bus.consumer(queue, self._receive, concurrency=1)
            await consumer.start()
            task = asyncio.create_task(consumer.run())
            self._stack.push_async_callback(_cancel, task)
            self._stack.push_async_callback(consumer.drain, 1.0)

    async def close(self) -> None:
        await self.stop()
        await self._stack.aclose()
        await self.bus.close()

    async def start(self, *, share: int = 0, shares: int = 1) -> None:
        """A conductor on the table, and a compute service; what the latter remembers is kept over its lives."""
        store = MemoryInstances(self.table.session())
        conductor = cell_conductor.app.build(self._environment("conductor"), CONDUCTOR, self.name, store=store)
        ironic = IronicConfig(
            url=self.ironic.url, poll_interval_s=0.005, watch_interval_s=0.02, share=share, shares=shares
        )
        config = ComputeConfig(
            driver="ironic", hosts=0, ironic=ironic, heartbeat_interval_s=0.2, report_interval_s=60.0
        )
        service = f"{self.name}-a"
        if self.fleet is None:
            self.fleet = Fleet.planned(config, self.name, service)
        compute = compute_sim.app.build(self._environment("compute"), config, self.name, service, fleet=self.fleet)
        self._lives = [Life(conductor), Life(compute)]
        try:
            for life in self._lives:
                await life.ready()
        except BusOwnedByAnother:
            await self._lives.pop().stop()  # the compute service; the conductor has ended
            self._lives.clear()
            raise
        await self.look()

    def release(self) -> None:
        """What `berth bus release` does."""
        self.broker.marks.clear()

    async def stop(self) -> None:
        while self._lives:
            await self._lives.pop().stop()

    def _environment(self, process: str) -> Environment:
        def transport(_: str) -> Any:
            return MemoryTransport(self.broker, process)

        return Environment(f"{process}-{self.name}", transports=transport, clock=self.clock, rng=self.rng)

    async def _receive(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        async with self._changed:
            outcomes = [Done(self._answer(received.message)) for received in batch]
            self._changed.notify_all()
        return outcomes

    def _answer(self, message: Message) -> Message | None:
        if isinstance(message, ComputeHosts):
            self.reports.append(message)
            return None
        if isinstance(message, BuildEvent):
            self.events.append(message)
            return None
        if isinstance(message, MachinesUnexplained | BreakerTripped):
            self.alarms.append(message)
            return None
        return (
            ClaimResult(outcome=ClaimOutcome.FULL) if isinstance(message, Claim) else ReleaseResult(outcome="released")
        )

    async def until(self, there: Any) -> Any:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(there)
        return there()

    async def look(self) -> ComputeHosts:
        """Some whole reports more, and what a conductor did about them; returns the last."""
        for _ in range(LOOKS):
            earlier = len(self.reports)
            await self.bus.publish(ReportHosts(why="test"))
            await self.until(lambda earlier=earlier: any(report.complete for report in self.reports[earlier:]))
        while not self.ironic.pool.idle:  # noqa: ASYNC110  (what was ordered is carried out over HTTP)
            await asyncio.sleep(0.01)
        return [report for report in self.reports if report.complete][-1]

    def hosts(self) -> set[str]:
        """The nodes of the newest whole report."""
        return {host.uuid for host in [report for report in self.reports if report.complete][-1].hosts}

    async def build(self, node: str, uuid: str | None = None) -> tuple[str, BuildState]:
        """Ask for an instance on this node; returns its uuid and how that ended."""
        uuid = uuid or new_uuid(self.rng)
        here = Selection(host_uuid=node, host=node, service=f"{self.name}-a", allocations={node: {"CUSTOM_X": 1}})
        spec = InstanceSpec(instance_uuid=uuid, project_id="p")
        await self.bus.publish(CellBuild(spec=spec, selections=(here,), consumer_generation=1))
        ended = await self.until(lambda: [e for e in self.events if e.instance_uuid == uuid and e.terminal])
        return uuid, ended[0].state

    async def delete(self, uuid: str) -> None:
        await self.bus.publish(CellDelete(instance_uuid=uuid, project_id="p"))

    async def over(self, uuid: str, state: BuildState) -> None:
        await self.until(lambda: any(e.instance_uuid == uuid and e.state is state for e in self.events))

    def state(self, uuid: str) -> State:
        return self.table.instances[uuid].state


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest_asyncio.fixture
async def ironic() -> AsyncIterator[IronicStandIn]:
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=QUICK)
    await stand_in.start()
    yield stand_in
    await stand_in.stop()


@pytest_asyncio.fixture
async def cells(ironic: IronicStandIn) -> AsyncIterator[list[Cell]]:
    made = [Cell(f"c{number}", ironic) for number in range(3)]
    for cell in made:
        await cell.open()
    yield made
    for cell in made:
        await cell.close()


def carried(ironic: IronicStandIn) -> dict[str, tuple[str, str]]:
    """The nodes with an instance: which, and in which state."""
    nodes = ironic.pool.nodes.values()
    return {n["uuid"]: (n["instance_uuid"], n["provision_state"]) for n in nodes if n["instance_uuid"]}


FOREIGN = "70000000-0000-4000-8000-000000000000"


async def test_foreign_nodes_are_never_changed(ironic: IronicStandIn, cells: list[Cell]) -> None:
    """Item 2: an active node with an instance that berth never gave was undeployed and cleaned within seconds."""
    cell = cells[0]
    ironic.pool.plan(2)
    foreign, own = sorted(ironic.pool.nodes)
    ironic.pool.nodes[foreign].update(instance_uuid=FOREIGN, provision_state="active", instance_info={"a": "b"})
    before = dict(ironic.pool.nodes[foreign])
    await cell.start()
    assert ironic.pool.nodes[foreign] == before
    # A client may name its uuid, and ask for the delete of what failed.
    assert await cell.build(foreign, FOREIGN) == (FOREIGN, BuildState.FAILED)
    await cell.delete(FOREIGN)
    await cell.over(FOREIGN, BuildState.DELETED)
    uuid, state = await cell.build(own)
    assert state is BuildState.ACTIVE
    await cell.look()
    await cell.stop()
    await cell.start()
    assert ironic.pool.nodes[foreign] == before
    assert foreign not in {node for _, node in ironic.requested}, "no request that changes it was ever sent"
    assert carried(ironic)[own] == (uuid, "active")


async def test_a_third_cell_changes_nothing_for_nodes_with_an_instance(
    ironic: IronicStandIn, cells: list[Cell]
) -> None:
    """Item 3: of 10 active nodes 8 were cleaned when a third cell came."""
    ironic.pool.plan(16)
    for share, cell in enumerate(cells[:2]):
        await cell.start(share=share, shares=2)
    built: dict[str, str] = {}
    for node in sorted(ironic.pool.nodes)[:10]:
        (cell,) = (cell for cell in cells[:2] if node in cell.hosts())
        assert (await cell.build(node))[1] is BuildState.ACTIVE
        built[node] = cell.name
    before = carried(ironic)
    for cell in cells[:2]:
        await cell.stop()
    for share, cell in enumerate(cells):
        await cell.start(share=share, shares=3)
    for cell in cells:
        await cell.look()
    assert carried(ironic) == before and len(before) == 10
    assert all(state is State.ACTIVE for cell in cells for state in map(cell.state, cell.table.instances))
    owners = {node: [cell.name for cell in cells if node in cell.hosts()] for node in ironic.pool.nodes}
    assert all(len(names) == 1 for names in owners.values()), owners
    assert {node: owners[node][0] for node in built} == built
    assert any(names == ["c2"] for names in owners.values()), "free ones have moved"


async def test_what_an_operator_does_to_our_machine_does_not_destroy_it(
    ironic: IronicStandIn, cells: list[Cell]
) -> None:
    """Item 4: a node of ours in rescue, service or rebuild was lost, then undeployed and offered."""
    cell = cells[0]
    ironic.pool.plan(1)
    (node,) = ironic.pool.nodes
    await cell.start()
    uuid, _ = await cell.build(node)
    for state in ("rescue", "rescue failed", "servicing", "service failed", "deploying", "deploy failed", "error"):
        ironic.pool.nodes[node]["provision_state"] = state
        await cell.look()
        assert (cell.state(uuid), carried(ironic)) == (State.ACTIVE, {node: (uuid, state)})
    ironic.pool.nodes[node]["provision_state"] = "active"
    await cell.stop()
    ironic.pool.nodes[node]["provision_state"] = "deploying"  # ... and over a restart of both
    await cell.start()
    assert (cell.state(uuid), carried(ironic)) == (State.ACTIVE, {node: (uuid, "deploying")})
    ironic.pool.nodes[node].update(provision_state="available", instance_uuid=None, instance_info={})
    await cell.look()
    await cell.over(uuid, BuildState.FAILED)
    assert cell.state(uuid) is State.FAILED, "carrying no instance it is lost"


async def test_a_conductor_on_an_empty_or_anothers_database_destroys_nothing(
    ironic: IronicStandIn, cells: list[Cell]
) -> None:
    """Item 5: it destroyed every machine of its cell within seconds."""
    cell, other = cells[:2]
    ironic.pool.plan(4)
    await cell.start()
    for node in list(ironic.pool.nodes):
        assert (await cell.build(node))[1] is BuildState.ACTIVE
    before, table = carried(ironic), cell.table
    await cell.stop()
    for wrong in (MemoryInstanceTable(cell.clock), other.table):
        cell.table = wrong
        with pytest.raises(BusOwnedByAnother):
            await cell.start()
        assert carried(ironic) == before
        cell.release()  # an operator who trusts the database and not the bus
        for fleet in (cell.fleet, None):  # with and without what the compute service remembers
            cell.fleet = fleet
            await cell.start()
            assert carried(ironic) == before
            await cell.stop()
    cell.table = table
    cell.release()
    await cell.start()
    assert carried(ironic) == before
    assert all(cell.state(uuid) is State.ACTIVE for uuid, _ in before.values())


async def test_a_conductor_on_a_restored_database_destroys_nothing_newer(
    ironic: IronicStandIn, cells: list[Cell]
) -> None:
    """Item 5: what was built since the backup has no record there, and what was deleted since has one."""
    cell = cells[0]
    ironic.pool.plan(3)
    first, second, third = sorted(ironic.pool.nodes)
    await cell.start()
    kept, deleted = (await cell.build(first))[0], (await cell.build(second))[0]
    backup = dict(cell.table.instances)
    await cell.delete(deleted)
    await cell.over(deleted, BuildState.DELETED)
    await cell.look()
    newer, also_newer = (await cell.build(second))[0], (await cell.build(third))[0]
    before = carried(ironic)
    assert {uuid for uuid, _ in before.values()} == {kept, newer, also_newer}
    await cell.stop()
    cell.table.instances = backup
    await cell.start()
    await cell.over(deleted, BuildState.FAILED)
    await cell.look()
    assert carried(ironic) == before
    assert (cell.state(kept), cell.state(deleted)) == (State.ACTIVE, State.FAILED)
    assert newer not in cell.table.instances and also_newer not in cell.table.instances
    quarantined = {one.machine.uuid: one.machine.kind for one in cell.table.unexplained.values()}
    assert quarantined == {newer: UnexplainedKind.QUARANTINED, also_newer: UnexplainedKind.QUARANTINED}
    safety = MemoryInstances(cell.table.session()).safety
    assert await safety.decide(newer, DESTROY, "an operator", cell.clock.time()) == 1
    assert await safety.decide(also_newer, KEEP, "an operator", cell.clock.time()) == 1
    await cell.look()
    assert carried(ironic) == {node: what for node, what in before.items() if what[0] != newer}
    await cell.look()
    assert [one.machine.uuid for one in cell.table.unexplained.values()] == [also_newer], "and is still reported"


async def test_what_first_appears_unexplained_is_announced_once(ironic: IronicStandIn, cells: list[Cell]) -> None:
    """A listener on the cell's bus receives foreign machines and of machines in quarantine: counts, and some names."""
    cell = cells[0]
    ironic.pool.plan(MAX_NAMED_MACHINES + 2)
    own, *others = sorted(ironic.pool.nodes)
    for node in others:
        ironic.pool.nodes[node].update(instance_uuid=new_uuid(cell.rng), provision_state="active")
    await cell.start()
    (alarm,) = await cell.until(lambda: list(cell.alarms))
    assert isinstance(alarm, MachinesUnexplained)
    assert (alarm.cell, alarm.service, alarm.foreign, alarm.quarantined) == ("c0", "c0-a", len(others), 0)
    assert len(alarm.machines) == MAX_NAMED_MACHINES
    uuid, _ = await cell.build(own)
    await cell.look()
    await cell.stop()
    del cell.table.instances[uuid]
    cell.fleet = None
    await cell.start()  # another conductor: the foreign ones are on record already
    assert cell.alarms[0] is alarm
    (second,) = await cell.until(lambda: cell.alarms[1:])
    assert isinstance(second, MachinesUnexplained) and (second.foreign, second.quarantined) == (0, 1)
    assert [(one.instance_uuid, one.host_uuid, one.kind) for one in second.machines] == [(uuid, own, "quarantined")]
    await cell.look()
    assert len(cell.alarms) == 2


async def test_many_losses_at_once_wait_for_an_operator(ironic: IronicStandIn, cells: list[Cell]) -> None:
    """Another's script clears `instance_uuid` of all nodes, or the service is pointed at the wrong Ironic."""
    cell = cells[0]
    ironic.pool.plan(8)
    await cell.start()
    built = {(await cell.build(node))[0] for node in list(ironic.pool.nodes)}
    for node in ironic.pool.nodes.values():
        node.update(instance_uuid=None, instance_info={}, provision_state="available")
    await cell.look()
    assert {cell.state(uuid) for uuid in built} == {State.ACTIVE}, "none of them is lost"
    breaker = cell.table.breakers["c0-a"]
    assert breaker.is_open and breaker.lost == 8
    (alarm,) = await cell.until(lambda: [one for one in cell.alarms if isinstance(one, BreakerTripped)])
    assert (alarm.cell, alarm.service, alarm.lost, alarm.limit) == ("c0", "c0-a", 8, CONDUCTOR.breaker_limit)
    await cell.stop()
    await cell.start()  # another conductor, too, reads it from the cell's schema
    assert {cell.state(uuid) for uuid in built} == {State.ACTIVE}
    # A delete that a client requests is no part of it.
    first = min(built)
    await cell.delete(first)
    await cell.over(first, BuildState.DELETED)
    safety = MemoryInstances(cell.table.session()).safety
    assert await safety.reset("c0-a", "an operator", cell.clock.time())
    await cell.look()
    for uuid in built - {first}:
        await cell.over(uuid, BuildState.FAILED)

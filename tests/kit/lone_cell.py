"""One cell alone, for what conductor and compute service do to the nodes of an Ironic."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from msgspec.structs import replace

import cell_conductor.app
import compute_agent.app
from berth.config.settings import ComputeSettings
from bus.bus import Bus
from bus.bus_ownership import BusOwnedByAnother
from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import (
    BreakerTripped,
    CellBuild,
    CellDelete,
    HostStates,
    InstanceSpec,
    ReportHosts,
    Selection,
    UnknownMachinesFound,
)
from bus.contracts.placement import Claim, ClaimOutcome, ClaimResult, ReleaseResult
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from cell_conductor.config import ConductorConfig
from cell_conductor.state.instance import State
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.records.records import Records
from tests.kit.waiting import until

WAIT_S = 300.0
LOOKS = 4  # whole reports after which a conductor that wants to destroy something has reported it
CONDUCTOR = ConductorConfig(report_grace_s=0.001, sweep_interval_s=0.05, destroy_retry_s=0.2)


class Life:
    """One life of a service."""

    def __init__(self, service: WorkerRuntime) -> None:
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


class LoneCell:
    """A cell's bus, its database, its compute service's memory, and a placement that agrees to everything.

    ironic: of its compute service. is_idle: whether Ironic has carried out what was ordered.
    """

    def __init__(self, name: str, ironic: IronicConfig, *, is_idle: Callable[[], bool] = lambda: True) -> None:
        self.name = name
        self.ironic = ironic
        self.is_idle = is_idle
        self.clock = SystemClock()
        self.rng = random.Random(name)
        self.broker = MemoryBroker(self.clock)
        self.bus = Bus(name, MemoryTransport(self.broker, "ears"), process="ears", clock=self.clock, rng=self.rng)
        self.table = MemoryInstanceTable(self.clock)
        self.records = Records()
        self.reports: list[HostStates] = []
        self.events: list[BuildEvent] = []
        self.alarms: list[UnknownMachinesFound | BreakerTripped] = []
        self._lives: list[Life] = []
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        await self.bus.open()
        for queue in ("placement.requests", "scheduler.builds", "conductor.hosts.{process}", "client.alarms.{process}"):
            consumer = Consumer(self.bus, queue, self._receive, concurrency=1)
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
        config = ComputeSettings(
            driver="ironic",
            ironic=replace(self.ironic, share=share, shares=shares),
            heartbeat_interval_s=0.2,
            report_interval_s=60.0,
        )
        service = f"{self.name}-a"
        compute = compute_agent.app.build(
            self._environment("compute"), config, self.name, service, records=self.records
        )
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
        """The effect of `berth bus disown`."""
        self.broker.owners.clear()

    async def stop(self) -> None:
        while self._lives:
            await self._lives.pop().stop()

    def _environment(self, process: str) -> Environment:
        def transport(_: str) -> Any:
            return MemoryTransport(self.broker, process)

        return Environment(f"{process}-{self.name}", transports=transport, clock=self.clock, rng=self.rng)

    async def _receive(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        return [Done(self._answer(received.message)) for received in batch]

    def _answer(self, message: Message) -> Message | None:
        if isinstance(message, HostStates):
            self.reports.append(message)
            return None
        if isinstance(message, BuildEvent):
            self.events.append(message)
            return None
        if isinstance(message, UnknownMachinesFound | BreakerTripped):
            self.alarms.append(message)
            return None
        return (
            ClaimResult(outcome=ClaimOutcome.NO_CAPACITY)
            if isinstance(message, Claim)
            else ReleaseResult(outcome="released")
        )

    async def until(self, there: Any) -> Any:
        return await until(there, WAIT_S)

    async def look(self) -> HostStates:
        """Some whole reports more, and what a conductor did about them; returns the last."""
        for _ in range(LOOKS):
            earlier = len(self.reports)
            await self.bus.publish(ReportHosts())
            await self.until(lambda earlier=earlier: any(report.complete for report in self.reports[earlier:]))
        await until(self.is_idle, WAIT_S)
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


async def a_third_cell_joins(
    cells: Sequence[LoneCell],
    nodes: Sequence[str],
    count: int,
    carried: Callable[[], Awaitable[dict[str, tuple[str, str]]]],
) -> list[list[str]]:
    """Two cells share the nodes and have instances on so many; then three share them, and nothing may change.

    carried: the nodes with an instance, now. Returns the cells of each node.
    """
    for share, cell in enumerate(cells[:2]):
        await cell.start(share=share, shares=2)
    built: dict[str, str] = {}
    for node in sorted(nodes)[:count]:
        (cell,) = (cell for cell in cells[:2] if node in cell.hosts())
        assert (await cell.build(node))[1] is BuildState.ACTIVE
        built[node] = cell.name
    before = await carried()
    for cell in cells[:2]:
        await cell.stop()
    for share, cell in enumerate(cells):
        await cell.start(share=share, shares=3)
    for cell in cells:
        await cell.look()
    assert await carried() == before and len(before) == count
    assert all(state is State.ACTIVE for cell in cells for state in map(cell.state, cell.table.instances))
    owners = {node: [cell.name for cell in cells if node in cell.hosts()] for node in nodes}
    assert {node: owners[node][0] for node in built} == built
    return list(owners.values())

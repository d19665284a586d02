"""A cell that received a fence: what waits ends, and a host is sent its stale machines before the fence is ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial

import pytest

from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Outcome, Received
from bus.contracts.build import BuildState
from bus.contracts.cell import HostReport, HostStates, Running
from bus.contracts.operations import CellFence, FenceState, HostFence
from bus.memory import MemoryBroker, MemoryTransport
from cell_conductor.hosts.fence_cache import FenceCache
from cell_conductor.hosts.fence_controller import PUBLISH_S, FenceController
from tests.integration.cell_conductor.neighbours import CELL, WAIT_S, Cell, MovingClock
from tests.kit.waiting import until
from tests.unit.cell_conductor.world import hosts_of, requests_of

pytestmark = pytest.mark.postgres


class FencedCell(Cell):
    """A cell whose conductor keeps fences."""

    async def open(self, stack: AsyncExitStack) -> None:
        await super().open(stack)
        self.published: list[HostFence] = []
        self.sequence = self.compared = 0
        for consumer in self.consumers:
            await consumer.drain(WAIT_S)
        self.consumers.clear()
        self.conduct()
        running = asyncio.create_task(self.controller.run(self.engine))
        stack.push_async_callback(self._stop, running)
        requests = requests_of(self.engine, self.clock, fences=self.fences, fence_controller=self.controller)
        for consumer in (
            Consumer(self.around.bus, "placement.requests", self.around.placement),
            Consumer(self.around.bus, "compute.{service}", self.around.compute, service="s1"),
            Consumer(self.around.bus, "scheduler.builds", self._receive),
            Consumer(self.bus, "conductor.requests", requests.requests),
            Consumer(self.bus, "conductor.results", requests.results),
            Consumer(self.bus, "conductor.hosts.{process}", self._compare, process="conductor"),
        ):
            await consumer.start()
            self.consumers.append(consumer)
            stack.push_async_callback(consumer.drain, 5.0)

    def conduct(self) -> None:
        """A conductor that knows nothing yet but what is on record."""
        self.fences = FenceCache(self.store, self.clock)
        self.controller = FenceController(
            self.store, self.fences, self.bus, clock=self.clock, config=self.config, cell=CELL
        )
        self.engine = self.new_engine()
        self.engine._fences = self.fences
        self.hosts = hosts_of(
            self.engine,
            self.store,
            self.clock,
            self.config,
            self.bus,
            superseded=lambda _service, _epoch: None,
            fences=self.fences,
        )

    @staticmethod
    async def _stop(task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _receive(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        self.published += [received.message for received in batch if isinstance(received.message, HostFence)]
        return await self.around.scheduler(batch)

    async def fence(self, n: int, version: int, *, lift: bool = False, at: float = 1.0) -> None:
        decision = CellFence(host_uuid=self.host(n), host=f"host-{n}", version=version, unfence=lift, by="ann", at=at)
        await self.around.bus.publish(decision)

    async def report(self, n: int, *running: Running, service: str = "s1") -> None:
        """By a scan that began after what is on record of the host by now."""
        self.sequence += 1
        known = self.fences.fences.get(self.host(n))
        fences = await self.store.fences.fences()
        rescans = [one.rescan_for(name) for one in fences for name in one.stale]
        rescans += [] if known is None else [known.rescan]
        host = HostReport(uuid=self.host(n), name=f"host-{n}", running=running)
        await self.around.bus.publish(
            HostStates(
                service=service,
                cell=CELL,
                epoch=9,
                sequence=self.sequence,
                hosts=(host,),
                complete=True,
                first_sequence=self.sequence,
                rescans=tuple(rescans),
            )
        )

    async def _compare(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        outcomes = await self.hosts.hosts(batch)
        self.compared += len(batch)
        return outcomes

    async def settled_reports(self) -> None:
        """Return when all reports so far were handled."""
        await until(lambda: self.compared == self.sequence)

    def states(self, version: int) -> list[FenceState]:
        return [one.state for one in self.published if one.version == version]


@pytest.fixture
async def cell(postgres_url: str) -> AsyncIterator[FencedCell]:
    clock = MovingClock()
    made = FencedCell(postgres_url, partial(MemoryTransport, MemoryBroker(clock)), clock)
    async with AsyncExitStack() as stack:
        await made.open(stack)
        yield made


async def test_a_delete_on_a_fenced_host_ends_and_the_host_is_commanded_before_the_fence_is_lifted(
    cell: FencedCell,
) -> None:
    uuid = await cell.active(1)
    cell.around.silent = True  # the host is dead: its service takes no command
    await cell.delete(uuid)
    await until(lambda: any(one.state is BuildState.DELETING for one in cell.around.events))
    await cell.fence(1, 1)
    await until(lambda: cell.around.ends(uuid)[-1:] == [BuildState.DELETED])
    assert uuid not in cell.around.held
    await until(lambda: cell.states(1)[:1] == [FenceState.FENCED])
    assert cell.published[-1].stale_machines == 1
    await cell.fence(1, 2, lift=True)
    await until(lambda: cell.states(2)[:1] == [FenceState.UNFENCING])
    cell.around.silent = False
    await cell.report(1, Running(instance_uuid=uuid, attempt=1, database_id=cell.store.database_id))
    await until(lambda: not cell.around.running)
    await cell.settled_reports()
    assert FenceState.UNFENCED not in cell.states(2), "it was listed"
    await cell.report(1)
    await until(lambda: FenceState.UNFENCED in cell.states(2))
    assert [one.instance_uuid for one in cell.around.destroys] == [uuid]


async def test_what_is_lost_is_destroyed_and_no_breaker_counts_it(cell: FencedCell) -> None:
    """More machines than a breaker allows."""
    uuids = [await cell.active(1) for _ in range(cell.config.breaker_limit + 2)]
    cell.around.silent = True
    await cell.fence(1, 1)
    for uuid in uuids:
        await cell.delete(uuid)
    await until(lambda: all(cell.around.ends(one)[-1] is BuildState.DELETED for one in uuids))
    cell.around.silent = False
    foreign = Running(instance_uuid=new_uuid(cell.rng), attempt=1, database_id=new_uuid(cell.rng))
    ours = [Running(instance_uuid=one, attempt=1, database_id=cell.store.database_id) for one in uuids]
    await cell.report(1, foreign, *ours)
    await cell.settled_reports()
    await until(lambda: not cell.around.running)
    assert foreign.instance_uuid not in {one.instance_uuid for one in cell.around.destroys}
    assert not await cell.store.safety.breakers()
    assert [one.machine.uuid for one in await cell.store.safety.records()] == [foreign.instance_uuid]


class LaterClock(SystemClock):
    """The real clock, as far ahead as a test wants."""

    offset = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.offset


async def test_a_fence_is_announced_again_to_schedulers_that_may_have_forgotten_it(cell: FencedCell) -> None:
    clock = LaterClock()
    fences = FenceCache(cell.store, clock)
    other = FenceController(cell.store, fences, cell.bus, clock=clock, config=cell.config, cell=CELL)
    await cell.fence(1, 1)
    await until(lambda: cell.states(1)[:1] == [FenceState.FENCED])
    running = asyncio.create_task(other.run(cell.engine))
    clock.offset = PUBLISH_S
    await until(lambda: len(cell.states(1)) == 2)
    assert cell.states(1)[-1] is FenceState.FENCED
    running.cancel()


async def test_a_fence_that_is_delivered_again_after_its_lift_ends_nothing(cell: FencedCell) -> None:
    """A conductor was killed between carrying it out and acknowledging it; another one has lifted the fence since."""
    await cell.fence(1, 5)
    await until(lambda: cell.states(5)[:1] == [FenceState.FENCED])
    await cell.fence(1, 6, lift=True)
    await until(lambda: cell.states(6)[:1] == [FenceState.UNFENCED])
    uuid = await cell.active(1)
    cell.conduct()  # one that was started since
    await cell.fence(1, 5)
    await cell.fence(2, 4, lift=True)  # overtakes its fence
    await until(lambda: cell.states(4) == [FenceState.UNFENCED])
    await cell.fence(2, 3)
    await until(lambda: cell.states(6)[:2] == cell.states(4)[:2] == [FenceState.UNFENCED] * 2)
    assert cell.around.ends(uuid) == [BuildState.ACTIVE] and cell.states(3) == []
    assert await cell.store.fences.fences() == []

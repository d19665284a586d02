"""A cell that received a fence: what waits ends, and a host is sent its losses before the fence is lifted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Outcome, Received
from bus.contracts.build import BuildState
from bus.contracts.cell import ComputeHosts, HostReport, Running
from bus.contracts.moves import CellMove, MoveEvent, MoveKind, MoveState
from bus.contracts.operations import CellFence, FenceState, HostFence
from bus.memory import MemoryBroker, MemoryTransport
from cell_conductor.domain.instance import State
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.domain.move_steps import STILL_RUNNING
from cell_conductor.fences import ANNOUNCE_S, RELOAD_S, FenceKeeper
from tests.integration.conductor.neighbours import CELL, WAIT_S, Cell, MovingClock
from tests.kit.waiting import until
from tests.unit.conductor.world import hosts_of, requests_of

pytestmark = pytest.mark.postgres


class FencedCell(Cell):
    """A cell whose conductor keeps fences."""

    async def open(self, stack: AsyncExitStack) -> None:
        await super().open(stack)
        self.published: list[HostFence] = []
        self.sequence = self.compared = 0
        self.scans_are_old = False
        for consumer in self.consumers:
            await consumer.drain(WAIT_S)
        self.consumers.clear()
        self.conduct()
        running = asyncio.create_task(self.fences.run())
        stack.push_async_callback(self._stop, running)
        requests = requests_of(self.engine, self.clock, fences=self.fences)
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
        self.fences = FenceKeeper(self.store, self.bus, clock=self.clock, config=self.config, cell=CELL)
        self.engine = self.new_engine()
        self.engine._fences = self.fences
        self.hosts = hosts_of(
            self.engine,
            self.store,
            self.clock,
            self.config,
            self.bus,
            outdated=lambda _service, _epoch: None,
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
        decision = CellFence(host_uuid=self.host(n), host=f"host-{n}", version=version, lift=lift, by="ann", at=at)
        await self.around.bus.publish(decision)

    async def report(self, n: int, *running: Running, service: str = "s1") -> None:
        """By a scan that began after what is on record of the host by now."""
        self.sequence += 1
        known = self.fences.known.get(self.host(n))
        losses = await self.store.fences.losses()
        rescans = [one.rescan for one in losses] + ([] if known is None else [known.rescan])
        host = HostReport(uuid=self.host(n), name=f"host-{n}", running=running)
        await self.around.bus.publish(
            ComputeHosts(
                service=service,
                cell=CELL,
                epoch=9,
                sequence=self.sequence,
                hosts=(host,),
                complete=True,
                first_sequence=self.sequence,
                rescans=() if self.scans_are_old else tuple(rescans),
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
    assert cell.published[-1].losses == 1
    await cell.fence(1, 2, lift=True)
    await until(lambda: cell.states(2)[:1] == [FenceState.LIFTING])
    cell.around.silent = False
    await cell.report(1, Running(instance_uuid=uuid, attempt=1, deployment=cell.store.deployment))
    await until(lambda: FenceState.LIFTED in cell.states(2))
    assert not cell.around.running
    assert [one.instance_uuid for one in cell.around.destroys] == [uuid]


async def test_what_is_lost_and_has_no_record_any_more_is_destroyed_and_no_breaker_counts_it(cell: FencedCell) -> None:
    """More machines than a breaker allows, whose records were purged while their host was away."""
    uuids = [await cell.active(1) for _ in range(cell.config.breaker_limit + 2)]
    cell.around.silent = True
    await cell.fence(1, 1)
    for uuid in uuids:
        await cell.delete(uuid)
    await until(lambda: all(cell.around.ends(one)[-1] is BuildState.DELETED for one in uuids))
    assert await cell.store.purge_deleted(cell.clock.time() + 1, 1000) == len(uuids)
    cell.around.silent = False
    foreign = Running(instance_uuid=new_uuid(cell.rng), attempt=1, deployment=new_uuid(cell.rng))
    ours = [Running(instance_uuid=one, attempt=1, deployment=cell.store.deployment) for one in uuids]
    await cell.report(1, foreign, *ours)
    await cell.settled_reports()
    await until(lambda: not cell.around.running)
    assert foreign.instance_uuid not in {one.instance_uuid for one in cell.around.destroys}
    assert not await cell.store.safety.breakers()
    assert [one.machine.uuid for one in await cell.store.safety.records()] == [foreign.instance_uuid]


async def test_a_fence_survives_its_conductor_and_is_answered_again(cell: FencedCell) -> None:
    uuid = await cell.active(1)
    cell.around.silent = True
    await cell.fence(1, 1)
    await until(lambda: cell.states(1)[:1] == [FenceState.FENCED])
    cell.conduct()
    await cell.fences.load()
    assert set(cell.fences.known) == {cell.host(1)}
    await cell.fence(1, 1)  # repeated: answered again, and nothing is recorded twice
    await until(lambda: cell.states(1)[:2] == [FenceState.FENCED] * 2)
    assert await cell.state(uuid) is State.ACTIVE


async def test_a_doubted_build_on_a_dead_host_goes_on_elsewhere_once_its_host_is_fenced(cell: FencedCell) -> None:
    """A machine that its host has, and that the set-back record forgot, is destroyed before the fence is lifted."""
    cell.around.hangs = {cell.host(1)}
    uuid = await cell.given(1, 2)
    await until(lambda: bool(cell.around.spawns))
    cell.around.running[cell.host(1), uuid] = 1  # it is up, and the backup is from before that was reported
    cell.around.dead = {cell.host(1)}
    await cell.sql("UPDATE identity SET origin = 'another cluster'")
    for _ in range(4):  # it is doubted, then asked for, and its host does not answer
        cell.clock.offset += 100.0
        await cell.engine.sweep()
    async with cell.store.transaction() as transaction:
        record = (await transaction.lock([uuid]))[uuid]
    assert (record.state, record.doubted, cell.around.destroys) == (State.BUILDING, True, [])
    await cell.fence(1, 1)
    await until(lambda: cell.states(1)[:1] == [FenceState.FENCED])
    assert cell.published[-1].losses == 1
    await until(lambda: cell.around.ends(uuid) == [BuildState.ACTIVE])
    assert cell.around.spawns[-1].host_uuid == cell.host(2) and cell.around.held[uuid][1] == cell.host(2)
    await cell.fence(1, 2, lift=True)
    await until(lambda: cell.states(2)[:1] == [FenceState.LIFTING])
    assert cell.around.running == {(cell.host(1), uuid): 1, (cell.host(2), uuid): 2}
    cell.around.dead.clear()
    await cell.report(1, Running(instance_uuid=uuid, attempt=1, deployment=cell.store.deployment))
    await until(lambda: FenceState.LIFTED in cell.states(2))
    assert cell.around.running == {(cell.host(2), uuid): 2}
    await cell.check_at_rest()


class LaterClock(SystemClock):
    """The real clock, as far ahead as a test wants."""

    offset = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.offset


async def test_a_conductor_that_missed_the_announcement_of_the_first_fence_reads_it_later(cell: FencedCell) -> None:
    clock = LaterClock()
    other = FenceKeeper(cell.store, cell.bus, clock=clock, config=cell.config, cell=CELL)
    await other.prepare()
    running = asyncio.create_task(other.run())
    await cell.fence(1, 1)
    await until(lambda: cell.states(1)[:1] == [FenceState.FENCED])
    assert not other.known
    clock.offset = RELOAD_S
    await until(lambda: other.known)
    running.cancel()


async def test_a_fence_is_announced_again_to_schedulers_that_may_have_forgotten_it(cell: FencedCell) -> None:
    clock = LaterClock()
    other = FenceKeeper(cell.store, cell.bus, clock=clock, config=cell.config, cell=CELL)
    await cell.fence(1, 1)
    await until(lambda: cell.states(1)[:1] == [FenceState.FENCED])
    running = asyncio.create_task(other.run())
    clock.offset = ANNOUNCE_S
    await until(lambda: len(cell.states(1)) == 2)
    assert cell.states(1)[-1] is FenceState.FENCED
    running.cancel()


async def test_an_older_decision_is_ignored_and_a_lift_of_nothing_is_answered(cell: FencedCell) -> None:
    await cell.fence(2, 5)
    await until(lambda: cell.states(5)[:1] == [FenceState.FENCED])
    await cell.fence(2, 4, lift=True)
    await until(lambda: cell.states(5)[:2] == [FenceState.FENCED] * 2)
    await cell.fence(3, 1, lift=True)
    await until(lambda: cell.states(1)[:1] == [FenceState.LIFTED])
    await cell.fence(2, 6, lift=True)
    await until(lambda: cell.states(6)[:1] == [FenceState.LIFTED])
    assert cell.states(4) == [], "the older decision is never answered as if it held"


async def test_a_fence_that_is_delivered_again_after_its_lift_ends_nothing(cell: FencedCell) -> None:
    """A conductor was killed between carrying it out and acknowledging it; another one has lifted the fence since."""
    await cell.fence(1, 5)
    await until(lambda: cell.states(5)[:1] == [FenceState.FENCED])
    await cell.fence(1, 6, lift=True)
    await until(lambda: cell.states(6)[:1] == [FenceState.LIFTED])
    uuid = await cell.active(1)
    cell.conduct()  # one that was started since
    await cell.fence(1, 5)
    await cell.fence(2, 4, lift=True)  # overtakes its fence
    await cell.fence(2, 3)
    await until(lambda: cell.states(6)[:2] == cell.states(4)[:2] == [FenceState.LIFTED] * 2)
    assert cell.around.ends(uuid) == [BuildState.ACTIVE] and cell.states(3) == []
    assert await cell.store.fences.fences() == []


async def test_a_machine_that_a_returned_host_does_not_have_is_no_loss_after_a_while(cell: FencedCell) -> None:
    uuid = await cell.active(1)
    cell.around.silent = True
    await cell.fence(1, 1)
    await cell.delete(uuid)
    await until(lambda: cell.around.ends(uuid)[-1] is BuildState.DELETED)
    await cell.fence(1, 2, lift=True)
    await until(lambda: cell.states(2)[:1] == [FenceState.LIFTING])
    cell.scans_are_old = True
    await cell.report(1)
    await cell.settled_reports()
    assert [one.instance_uuid for one in await cell.store.fences.losses()] == [uuid]
    cell.scans_are_old = False
    await cell.report(1, service="s2")  # it has another host of this uuid
    await cell.settled_reports()
    assert [one.instance_uuid for one in await cell.store.fences.losses()] == [uuid]
    await cell.report(1)
    await until(lambda: FenceState.LIFTED in cell.states(2))


async def test_what_a_fenced_host_reports_as_running_is_known_until_it_does_not_or_the_fence_is_lifted(
    cell: FencedCell,
) -> None:
    """By that an evacuation is refused: the fence did not hold."""
    uuid = await cell.active(1)
    deployment = cell.store.deployment
    cell.around.silent = True
    await cell.fence(1, 1)
    await until(lambda: cell.states(1)[:1] == [FenceState.FENCED])
    runs = Running(instance_uuid=uuid, attempt=1, deployment=deployment, built=True)

    await cell.report(1, replace(runs, stopped=True))
    await cell.settled_reports()
    assert cell.fences.still_running[cell.host(1)]["s1"].attempts == {}
    await cell.report(1, runs)
    await cell.settled_reports()
    assert cell.fences.still_running[cell.host(1)]["s1"].attempts == {uuid: 1}
    await cell.report(1)
    await cell.settled_reports()
    assert cell.fences.still_running[cell.host(1)]["s1"].attempts == {}
    await cell.fence(1, 2, lift=True)
    await until(lambda: cell.states(2)[-1:] == [FenceState.LIFTED])
    await cell.fences.load()
    assert cell.fences.still_running == {}


async def test_an_instance_of_a_host_that_was_fenced_while_it_ran_is_evacuated_once_it_is_off_and_fenced_again(
    cell: FencedCell,
) -> None:
    uuid = await cell.active(1)
    await cell.fence(1, 1)
    await until(lambda: cell.states(1)[:1] == [FenceState.FENCED])
    await cell.report(1, Running(instance_uuid=uuid, attempt=1, deployment=cell.store.deployment, built=True))
    await cell.settled_reports()

    async def evacuate() -> str:
        """Why it is refused; "" once a destination is claimed."""
        move = CellMove(
            request_id=new_uuid(cell.rng),
            instance_uuid=uuid,
            project_id="p",
            kind=MoveKind.EVACUATE,
            selections=(replace(cell.build(2).selections[0], service="s2"),),
        )
        await cell.around.bus.publish(move)

        def answers() -> list[MoveEvent]:
            found = [one for one in cell.around.moves if one.request_id == move.request_id]
            return [one for one in found if one.state in {MoveState.REFUSED, MoveState.CLAIMING}]

        await until(lambda: bool(answers()))
        return answers()[0].code

    assert await evacuate() == STILL_RUNNING
    cell.around.silent = True
    down = Lease(service="s1", epoch=9, state=LeaseState.SILENT, since=cell.clock.time())
    cell.engine._down = lambda: {"s1": down}
    assert await evacuate() == STILL_RUNNING, "silence alone shows nothing"
    await cell.fence(1, 2, at=cell.clock.time())
    await until(lambda: cell.states(2)[:1] == [FenceState.FENCED])
    assert not await evacuate()

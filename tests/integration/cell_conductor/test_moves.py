"""Moves on real servers: conductor, placement and two compute services as they are wired; the test is the scheduler."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest
from msgspec.structs import replace

import cell_conductor.app
import compute_agent.app
import placement_worker.app
from berth.config.settings import ComputeSettings
from berth.up.embedded.rabbitmq import RabbitMQ
from bus.bus import API, Bus
from bus.clock import SystemClock, new_uuid
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.actions import ActionEvent, ActionKind, ActionState, CellAction, Condition
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import CellBuild, InstanceSpec, Selection
from bus.contracts.operations import CellFence
from bus.contracts.placement import Claim, ClaimOption, ClaimResult, LocatePage, LocateRequest, Release, ReleaseResult
from bus.rabbitmq.transport import RabbitTransport
from bus.service.environment import Environment
from bus.service.service import WorkerRuntime
from cell_conductor.config import ConductorConfig
from compute_agent.records.records import Records
from compute_sim.config import SimulatedConfig
from compute_sim.faults import Faults
from compute_sim.fleet import Fleet
from placement_worker.config import PlacementConfig
from tests.kit.waiting import until

pytestmark = [pytest.mark.rabbitmq]

CELL = "c1"
WAIT_S = 60.0
SERVICES = ("s1", "s2")
# The answer of a service that is stopped is not waited for long.
CONDUCTOR = ConductorConfig(sweep_interval_s=0.1, answer_timeout_s=2.0, destroy_retry_s=1.0)


class Rig:
    """The running machines, and the cell's announcements."""

    def __init__(self, broker: RabbitMQ, database_url: str) -> None:
        self._broker = broker
        self._url = database_url
        self.rng = random.Random(11)
        self.config = ComputeSettings(
            simulated=SimulatedConfig(hosts=1, gpu_share=0.0, faults=Faults(change_max_s=0.02))
        )
        self.fleets = {name: Fleet.planned(self.config.simulated, CELL, name, Records()) for name in SERVICES}
        self.published: list[Message] = []
        self._stop = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []
        self._computes: dict[str, tuple[asyncio.Event, asyncio.Task[None]]] = {}
        self.cell = self._bus(CELL)
        self.api = self._bus(API)

    def _bus(self, name: str) -> Bus:
        transport = RabbitTransport(self._broker.url(name), name=name)
        return Bus(name, transport, process="test", clock=SystemClock(), rng=self.rng)

    def _environment(self, process: str) -> Environment:
        return Environment(
            process,
            transports=lambda name: RabbitTransport(self._broker.url(name), name=name),
            cells=(CELL,),
            database_url=self._url,
        )

    async def open(self) -> None:
        services: list[WorkerRuntime] = [
            placement_worker.app.build(self._environment("placement"), PlacementConfig(), [CELL]),
            cell_conductor.app.build(self._environment("conductor"), CONDUCTOR, CELL),
        ]
        self._running = [asyncio.create_task(service.run(self._stop)) for service in services]
        async with asyncio.timeout(WAIT_S):
            for service in services:
                await service.ready.wait()
        for name in SERVICES:
            await self.start(name)
        await self.cell.open()
        await self.api.open()
        self._ears = Consumer(self.cell, "scheduler.builds", self._receive)
        await self._ears.start()
        for name in SERVICES:
            await self._until_reported(name)

    async def start(self, name: str) -> None:
        """A process of this compute service, with the machines that its hosts have."""
        config, fleet, stop = self.config, self.fleets[name], asyncio.Event()
        service = compute_agent.app.build(
            self._environment(f"compute-{name}"), config, CELL, name, records=fleet.records, driver_state=fleet
        )
        self._computes[name] = (stop, asyncio.create_task(service.run(stop)))
        async with asyncio.timeout(WAIT_S):
            await service.ready.wait()

    async def stop(self, name: str) -> None:
        """The end of that process."""
        stop, task = self._computes.pop(name)
        stop.set()
        await task

    async def close(self) -> None:
        for name in list(self._computes):
            await self.stop(name)
        self._stop.set()
        await asyncio.gather(*self._running)
        await self._ears.drain(1.0)
        await self.cell.close()
        await self.api.close()

    async def _receive(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        self.published += [received.message for received in batch]
        return [Done()] * len(batch)

    async def _until_reported(self, service: str) -> None:
        """Wait until placement has the inventory of this service's host."""
        consumer, amounts = new_uuid(self.rng), self.selection(service).allocations
        claim = Claim(consumer=consumer, options=(ClaimOption(allocations=amounts),), project_id="p")
        async with asyncio.timeout(WAIT_S):
            while (await self.api.request(claim, ClaimResult, timeout_s=WAIT_S)).outcome != "claimed":
                pass
        await self.api.request(Release(consumer=consumer), ReleaseResult, timeout_s=WAIT_S)

    # --- what a scheduler does

    def selection(self, service: str, vcpus: int = 1) -> Selection:
        (host,) = self.fleets[service].hosts
        amounts = {"VCPU": vcpus, "MEMORY_MB": 512}
        return Selection(
            host_uuid=host.plan.uuid, host=host.plan.name, service=service, allocations={host.plan.uuid: amounts}
        )

    async def build(self) -> str:
        """An instance on s1, active."""
        uuid, here = new_uuid(self.rng), self.selection("s1")
        claim = Claim(consumer=uuid, options=(ClaimOption(allocations=here.allocations),), project_id="p")
        result = await self.api.request(claim, ClaimResult, timeout_s=WAIT_S)
        assert result.consumer_generation is not None
        spec = InstanceSpec(instance_uuid=uuid, project_id="p", flavor="small")
        await self.cell.publish(
            CellBuild(spec=spec, selections=(here,), consumer_generation=result.consumer_generation)
        )
        await until(lambda: self.state(uuid) is BuildState.ACTIVE)
        return uuid

    def state(self, uuid: str) -> BuildState | None:
        events = [m for m in self.published if isinstance(m, BuildEvent) and m.instance_uuid == uuid]
        return events[-1].state if events else None

    async def move(self, uuid: str, kind: ActionKind, *services: str, vcpus: int = 1, **fields: object) -> ActionEvent:
        """Ask for it, and return its end."""
        request = CellAction(
            request_id=new_uuid(self.rng),
            instance_uuid=uuid,
            project_id="p",
            kind=kind,
            selections=tuple(self.selection(service, vcpus) for service in services),
            **fields,  # type: ignore[arg-type]
        )
        await self.send(request)
        await until(lambda: self.ends(request.request_id))
        return self.ends(request.request_id)[-1]

    async def send(self, request: CellAction) -> None:
        await self.cell.publish(request)
        await self.cell.publish(request)  # at least once

    async def fence(self, service: str, version: int, *, lift: bool = False) -> None:
        """An operator's decision about the host of this service."""
        (host,) = self.fleets[service].hosts
        at = SystemClock().time()
        fence = CellFence(host_uuid=host.plan.uuid, host=host.plan.name, version=version, unfence=lift, at=at)
        await self.cell.publish(fence)

    def condition(self, uuid: str) -> Condition | None:
        events = [m for m in self.published if isinstance(m, ActionEvent) and m.instance_uuid == uuid]
        return max(events, key=lambda one: one.sequence).condition if events else None

    def ends(self, request_id: str) -> list[ActionEvent]:
        return [m for m in self.published if isinstance(m, ActionEvent) and m.request_id == request_id and m.terminal]

    # --- what is there

    def machines(self, uuid: str) -> dict[str, bool]:
        """{service: whether the machine runs}."""
        found = {
            name: machine.runs for name, fleet in self.fleets.items() for _, machine in fleet.machines()
            if machine.instance_uuid == uuid
        }  # fmt: skip
        assert sum(found.values()) <= 1
        return found

    async def held(self, *consumers: str) -> list[str]:
        """The services on whose hosts these consumers hold something."""
        page = await self.api.request(LocateRequest(project_id="p", consumers=consumers), LocatePage, timeout_s=WAIT_S)
        names = {self.selection(name).host_uuid: name for name in SERVICES}
        return sorted({names[host] for hosts in page.hosts.values() for host in hosts})


@pytest.fixture
async def rig(own_broker: RabbitMQ, postgres_url: str) -> AsyncIterator[Rig]:
    await asyncio.to_thread(own_broker.add_vhosts, (API, CELL))
    made = Rig(own_broker, postgres_url)
    await made.open()
    yield made
    await made.close()


async def test_a_cold_migration_is_confirmed_and_another_one_reverted(rig: Rig) -> None:
    uuid = await rig.build()
    moved = await rig.move(uuid, ActionKind.MIGRATE, "s2")
    assert (moved.state, moved.condition) == (ActionState.DONE, Condition.RESIZED)
    assert rig.machines(uuid) == {"s1": False, "s2": True}
    assert await rig.held(uuid) == ["s2"]
    assert await rig.held(moved.request_id) == ["s1"]
    confirmed = await rig.move(uuid, ActionKind.CONFIRM)
    assert (confirmed.state, confirmed.condition) == (ActionState.DONE, Condition.ACTIVE)
    assert rig.machines(uuid) == {"s2": True}
    assert await rig.held(uuid, moved.request_id) == ["s2"]
    back = await rig.move(uuid, ActionKind.MIGRATE, "s1")
    reverted = await rig.move(uuid, ActionKind.REVERT)
    assert (reverted.state, reverted.condition) == (ActionState.DONE, Condition.ACTIVE)
    assert rig.machines(uuid) == {"s2": True}
    assert await rig.held(uuid, back.request_id) == ["s2"]


async def test_a_live_migration_leaves_nothing_behind(rig: Rig) -> None:
    uuid = await rig.build()
    moved = await rig.move(uuid, ActionKind.LIVE_MIGRATE, "s2")
    assert moved.state is ActionState.DONE
    await until(
        lambda: any(isinstance(m, ActionEvent) and m.state is ActionState.SOURCE_DESTROYED for m in rig.published)
    )
    assert rig.machines(uuid) == {"s2": True}
    assert await rig.held(uuid, moved.request_id) == ["s2"]


async def test_an_offloaded_instance_holds_nothing_and_comes_back_elsewhere(rig: Rig) -> None:
    uuid = await rig.build()
    assert (await rig.move(uuid, ActionKind.STOP)).condition is Condition.STOPPED
    assert (await rig.move(uuid, ActionKind.START)).condition is Condition.ACTIVE
    shelved = await rig.move(uuid, ActionKind.SHELVE, offload=True)
    assert (shelved.state, shelved.condition) == (ActionState.DONE, Condition.OFFLOADED)
    assert (rig.machines(uuid), await rig.held(uuid)) == ({}, [])
    unshelved = await rig.move(uuid, ActionKind.UNSHELVE, "s2")
    assert (unshelved.state, unshelved.condition) == (ActionState.DONE, Condition.ACTIVE)
    assert (rig.machines(uuid), await rig.held(uuid)) == ({"s2": True}, ["s2"])


async def test_a_revert_to_a_host_without_its_machine_gives_nothing_up(rig: Rig) -> None:
    uuid = await rig.build()
    moved = await rig.move(uuid, ActionKind.MIGRATE, "s2")
    (host,) = rig.fleets["s1"].hosts
    rig.fleets["s1"].remove(host.plan.uuid, uuid)
    refused = await rig.move(uuid, ActionKind.REVERT)
    assert (refused.state, refused.code) == (ActionState.REFUSED, "action.source_lost")
    assert rig.machines(uuid) == {"s2": True}
    confirmed = await rig.move(uuid, ActionKind.CONFIRM)
    assert (confirmed.state, rig.machines(uuid)) == (ActionState.DONE, {"s2": True})
    assert await rig.held(uuid, moved.request_id) == ["s2"]


async def test_a_fenced_destination_is_given_up_when_the_source_is_back_and_not_before(rig: Rig) -> None:
    """Both hosts were lost with their rack; the destination has the newest machine."""
    uuid = await rig.build()
    await rig.move(uuid, ActionKind.MIGRATE, "s2")
    for name in SERVICES:
        await rig.stop(name)
    (host,) = rig.fleets["s2"].hosts
    rig.fleets["s2"].put(host.plan.uuid, replace(rig.fleets["s2"].machine(host.plan.uuid, uuid), runs=False))
    await rig.fence("s2", 1)
    refused = await rig.move(uuid, ActionKind.REVERT)
    assert (refused.state, refused.code) == (ActionState.REFUSED, "action.source_silent")
    assert rig.machines(uuid) == {"s1": False, "s2": False}
    await rig.start("s1")
    await until(lambda: rig.condition(uuid) is Condition.ACTIVE)
    assert rig.machines(uuid) == {"s1": True, "s2": False}
    assert await rig.held(uuid) == ["s1"]

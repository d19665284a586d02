"""A host is killed and fenced, by a person or by `Fencer`: its instances are active elsewhere, once; it returns."""

from __future__ import annotations

import asyncio
import random

import pytest
from msgspec.structs import replace

from berth.client import BuildClient
from berth.fencing.fencer import Fencer
from berth.fencing.plugin import load
from berth.settings import FencingSettings
from berth.trial.ironic_stand_in import Behaviour, IronicStandIn, Silent
from bus.clock import SystemClock
from bus.contracts.build import HostRecord
from bus.contracts.operations import AdminState
from compute_sim.config import IronicConfig
from lab.benchmarks.evacuation import Drill, plan_of
from tests.system.worker_processes import rig

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

HOSTS, INSTANCES = 4, 40
PATIENCE_S = 240.0


async def test_the_instances_of_a_dead_host_are_active_elsewhere_once_it_is_fenced() -> None:
    async with rig(replace(plan_of(HOSTS), durable=False)) as whole:
        figures = await Drill(whole.processes, whole.site, whole.client).run(HOSTS, INSTANCES, random.Random(1))
    assert figures.on_host > 0 and figures.evacuated == figures.on_host
    assert figures.broken == ()


async def test_a_silent_host_is_switched_off_and_fenced_without_a_person() -> None:
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=Behaviour(power_s=0.1))
    settings = FencingSettings(
        plugin="ironic", after_s=5.0, ironic=IronicConfig(url=await stand_in.start(), poll_interval_s=0.05)
    )
    plugin = load(settings, clock=SystemClock())
    node = stand_in.pool.add(power_state="power on")
    try:
        async with rig(replace(plan_of(HOSTS), durable=False)) as whole:
            fencer = Fencer(whole.client, plugin, settings, clock=SystemClock())

            async def fence(host: HostRecord) -> None:
                node["name"] = host.name
                running = asyncio.create_task(fencer.run())
                try:
                    await until_fenced(whole.client, host.uuid)
                finally:
                    running.cancel()
                assert node["power_state"] == "power off"

            drill = Drill(whole.processes, whole.site, whole.client)
            figures = await drill.run(HOSTS, INSTANCES, random.Random(1), fence=fence)
    finally:
        await plugin.close()
        await stand_in.stop()
    assert figures.on_host > 0 and figures.evacuated == figures.on_host
    assert figures.broken == ()


async def until_fenced(client: BuildClient, uuid: str) -> None:
    """Wait for the decision, and look who made it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            page = await client.hosts(limit=100, timeout_s=PATIENCE_S)
            (admin,) = (one.admin for one in page.hosts if one.uuid == uuid)
            if admin is not None and admin.state is AdminState.FENCED:
                assert admin.by == "fencer" and "power off" in admin.reason
                return
            await asyncio.sleep(0.2)

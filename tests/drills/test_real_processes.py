"""The same load on RabbitMQ and PostgreSQL, each worker its own process; then with each role killed, and the broker."""

from __future__ import annotations

import asyncio
import re

import pytest

from berth.config.settings import ComputeSettings
from berth.up.servers import SystemPlan
from berth.up.worker_processes import WorkerProcesses
from bus.contracts.build import BuildPage, BuildQuery
from compute_sim.config import HostSize, SimulatedConfig
from compute_sim.faults import Faults
from tests.system.worker_processes import Rig, rig

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

FAULTS = Faults(delay_max_s=0.2, fail_rate=0.05, leftover_rate=0.3, duplicate_rate=0.05)
PATIENCE_S = 90.0
MOST_RACES = 10
ROLES = ("scheduler1", "placement1", "conductor-cell1-1", "compute-cell2-c1", "scheduler2", "placement2")


async def test_a_thousand_boots_then_each_role_killed_then_the_broker() -> None:
    plan = SystemPlan(compute=ComputeSettings(simulated=SimulatedConfig(hosts=50, faults=FAULTS)), durable=False)
    async with rig(plan) as whole:
        calm = await whole.load(1000)
        assert (calm.active + calm.failed, calm.unfinished, calm.refused) == (1000, 0, 0)
        assert calm.alternates_used > 0, "five builds in a hundred fail: some must have gone to an alternate"
        await whole.assert_invariants()

        killed = await load_while(whole, 600, kill_each_role)
        assert (killed.active + killed.failed, killed.unfinished) == (600, 0)
        await whole.assert_invariants()

        broken = await load_while(whole, 600, restart_the_broker)
        assert (broken.active + broken.failed, broken.unfinished) == (600, 0)
        await whole.assert_invariants()


async def load_while(whole: Rig, boots: int, disturb):  # type: ignore[no-untyped-def]
    """Fire builds; once some have ended, disturb."""
    before = len(whole.client.watches)

    async def accident() -> None:
        await whole.client.until(
            lambda: len(whole.client.watches) > before and whole.client.unfinished <= 0.9 * boots, PATIENCE_S
        )
        await disturb(whole)

    trouble = asyncio.create_task(accident())
    report = await whole.load(boots, timeout_s=PATIENCE_S)
    await trouble
    return report


async def kill_each_role(whole: Rig) -> None:
    for name in ROLES[:4]:
        await asyncio.to_thread(whole.processes.kill, name)
        await asyncio.to_thread(whole.processes.restart, name)
    await whole.processes.ready(ROLES[:4])


async def restart_the_broker(whole: Rig) -> None:
    """SIGKILL and start again. A quorum queue's registration reaches the disk a second after its declaration, and
    this test is about what was confirmed on queues that exist, so that second has to be over."""
    for cell in whole.site.cells:
        await asyncio.to_thread(whole.servers.broker.wait_registered, cell, "conductor.requests")
    await asyncio.to_thread(whole.servers.broker.kill)
    await asyncio.to_thread(whole.servers.broker.start)


async def test_two_schedulers_race_for_few_hosts() -> None:
    """Few hosts, many requests, two schedulers: claims conflict and are distinguished, nothing is overcommitted."""
    small = HostSize(vcpus=4, memory_mb=8192, disk_gb=100, cpu_ratio=1.0, reserved_memory_mb=0)
    plan = SystemPlan(
        cells=("cell1",),
        compute=ComputeSettings(simulated=SimulatedConfig(hosts=10, sizes=(small,), gpu_share=0.0)),
        durable=False,
    )
    async with rig(plan) as whole:
        for races in range(1, MOST_RACES + 1):
            report = await whole.load(200, mix={"m1.tiny": 1.0})
            assert report.active == 40, "ten hosts of four CPUs"
            assert report.failures_by_code == {"no_valid_host": 160}
            assert all(failure.funnel for failure in report.failures)
            await whole.assert_invariants()
            outcomes = await claim_outcomes(whole.processes)
            assert outcomes["claimed"] == 40 * races
            if outcomes.get("no_capacity", 0.0) > 0:
                return
            await delete_all(whole)  # one was done before the other began, as may be on a busy machine: again
        raise AssertionError(f"two schedulers chose from the same forty places without conflict: {outcomes}")


async def delete_all(whole: Rig) -> None:
    """Delete all that runs."""
    running = [watch.instance_uuid for watch in whole.client.watches.values() if watch.state == "active"]
    queries = [BuildQuery(instance_uuid=uuid) for uuid in running]
    pages = await whole.client.bus.request_all(queries, BuildPage, timeout_s=PATIENCE_S, causes=running)
    await whole.client.delete([page.builds[0] for page in pages if isinstance(page, BuildPage)])
    assert await whole.client.wait(PATIENCE_S)


async def claim_outcomes(processes: WorkerProcesses) -> dict[str, float]:
    """Claims by outcome, over all schedulers."""
    totals: dict[str, float] = {}
    for name in processes.workers:
        if name.startswith("scheduler"):
            for outcome, value in re.findall(
                r'^berth_scheduler_claims_total\{outcome="(\w+)"\} (\S+)$', await processes.metrics(name), re.MULTILINE
            ):
                totals[outcome] = totals.get(outcome, 0.0) + float(value)
    return totals

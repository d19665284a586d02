"""One of two compute services is killed for good under load: the other builds on, and `berth check` reports it."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest

from berth.trial.servers import SystemPlan, variables
from compute_sim.config import ComputeConfig
from compute_sim.domain.faults import Faults
from tests.kit.forks import run_berth
from tests.system.worker_processes import Rig, rig

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

BOOTS = 300
PATIENCE_S = 120.0  # an attempt alone waits for 300 s
DEAD = "compute-cell1-c2"


async def check(whole: Rig) -> tuple[int, dict[str, dict[str, object]]]:
    """`berth check --json` as an operator starts it: its exit status, and what it reports of each invariant."""
    arguments = ("check", "--json", "--wait", "60")
    environment = {**os.environ, **variables(whole.site.settings)}
    done = await asyncio.to_thread(run_berth, *arguments, env=environment, timeout_s=PATIENCE_S)
    report = msgspec.json.decode(done.stdout)
    assert report["at_rest"], "what is under way at a service that is away is not waited for"
    return done.returncode, {one["name"]: one for one in report["invariants"]}


async def test_builds_of_a_service_that_is_killed_go_on_elsewhere_and_none_is_lost_or_doubled() -> None:
    compute = ComputeConfig(hosts=20, faults=Faults(delay_max_s=3.0))
    plan = SystemPlan(cells=("cell1",), computes_per_cell=2, compute=compute, durable=False)
    async with rig(plan) as whole:
        before = await whole.load(100, timeout_s=PATIENCE_S)
        assert before.active == 100

        async def kill_it() -> None:
            await whole.client.until(lambda: whole.client.unfinished > BOOTS / 2, PATIENCE_S)
            await asyncio.to_thread(whole.processes.kill, DEAD)

        killing = asyncio.create_task(kill_it())
        load = await whole.load(BOOTS, timeout_s=PATIENCE_S)
        await killing
        assert (load.active, load.unfinished) == (BOOTS, 0), load
        assert load.alternates_used > 0, "it was killed with builds under way"

        status, report = await check(whole)
        assert status == 1
        assert [name for name, one in report.items() if not one["holds"]] == ["services_there"]
        (silent,) = report["services_there"]["examples"]  # type: ignore[misc]
        assert silent.startswith("cell1: cell1-c2: silent since "), silent
        (missing,) = report["built_once"]["not_judged"]  # type: ignore[misc]
        assert missing.startswith("what cell1-c2 of cell1 runs, "), missing

        after = await whole.load(50, timeout_s=PATIENCE_S)
        assert (after.active, after.alternates_used) == (50, 0), (
            f"schedulers know it, and choose nothing there: {after}"
        )

        await asyncio.to_thread(whole.processes.restart, DEAD)
        await whole.processes.ready([DEAD])
        async with asyncio.timeout(PATIENCE_S):
            while (await check(whole))[0] != 0:  # what it had built of builds that went elsewhere is being destroyed
                pass

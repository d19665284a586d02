"""A move waits for its confirm, and the service of its source is dead: no revert gives up the machine that runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from berth.trial.servers import SystemPlan, variables
from bus.bus import Bus
from bus.contracts.build import HostRecord, HostsPage, HostsQuery
from bus.contracts.cell import FindMachines, MachinesFound
from compute_sim.config import ComputeConfig
from tests.kit.forks import run_berth
from tests.system.worker_processes import Rig, rig

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

WAIT_S = 120.0
UNKNOWN_DEPLOYMENT = "dddddddd-0000-4000-8000-000000000009"
SERVICE, OTHER = "cell1-c1", "cell1-c2"
SOURCE, DESTINATION = "cell1-c1-00001", "cell1-c2-00000"
PLAN = SystemPlan(
    cells=("cell1",),
    schedulers=1,
    placements=1,
    computes_per_cell=2,
    compute=ComputeConfig(hosts=2, gpu_share=0.0),
    durable=False,
)


class Moved:
    """An instance that was built on a host of one service and has moved to the other, which awaits its confirm."""

    def __init__(self, whole: Rig, cell: Bus) -> None:
        self.whole = whole
        self.cell = cell
        self.uuid = ""

    async def berth(self, *arguments: str) -> tuple[int, Any, str]:
        """A command as its user starts it: exit status, what it prints with `--json`, and its errors."""
        environment = {**os.environ, **variables(self.whole.site.settings)}
        done = await asyncio.to_thread(run_berth, *arguments, env=environment, timeout_s=WAIT_S)
        return done.returncode, msgspec.json.decode(done.stdout) if "--json" in arguments else None, done.stderr

    async def move(self) -> None:
        status, boots, err = await self.berth("boot", "--flavor", "m1.tiny", "--host", SOURCE, "--wait", "--json")
        assert status == 0, err
        self.uuid = boots[0]["instance_uuid"]
        status, moved, err = await self.berth("migrate", self.uuid, "--host", DESTINATION, "--wait", "--json")
        assert (status, moved["state"]) == (0, "done"), (moved, err)

    async def shown(self) -> Any:
        return (await self.berth("show", self.uuid, "--json"))[1]

    async def machines(self, service: str) -> list[int]:
        """The attempts of the machines that this service has of it."""
        question = FindMachines(
            service=service, deployment=UNKNOWN_DEPLOYMENT, instance_uuids=(self.uuid,), thorough=True
        )
        answer = await self.cell.request(question, MachinesFound, timeout_s=WAIT_S)
        return [one.attempt for one in answer.machines]

    async def until_host(self, holds: Callable[[HostRecord | None], bool]) -> None:
        """Wait until the schedulers know this of the source's host."""
        async with asyncio.timeout(WAIT_S):
            while True:
                page = await self.whole.client.bus.request(HostsQuery(), HostsPage, timeout_s=WAIT_S)
                if holds(next((one for one in page.hosts if one.name == SOURCE), None)):
                    return
                await asyncio.sleep(0.1)

    async def assert_runs_on(self, code: str) -> None:
        """A revert is refused with this code, and the machine at the destination runs on."""
        before = await self.machines(OTHER)
        status, reverted, err = await self.berth("revert", self.uuid, "--wait", "--json")
        assert (status, reverted["state"], reverted["code"]) == (1, "refused", code), (status, reverted, err)
        assert await self.machines(OTHER) == before, "the only machine that runs"
        there = await self.shown()
        assert (there["condition"], there["host"]) == ("resized", DESTINATION), there


@asynccontextmanager
async def moved() -> AsyncIterator[Moved]:
    async with rig(PLAN) as whole:
        cell = whole.site.bus("looker", "cell1")
        await cell.open()
        try:
            made = Moved(whole, cell)
            await made.move()
            yield made
        finally:
            await cell.close()


async def test_a_revert_to_a_fenced_host_is_refused_and_a_confirm_ends() -> None:
    async with moved() as made:
        await asyncio.to_thread(made.whole.processes.kill, f"compute-{SERVICE}")
        await made.until_host(lambda host: host is not None and not host.up)
        status, _, err = await made.berth("hosts", "fence", SOURCE, "--reason", "power is cut", "--by", "ann")
        assert status == 0, err
        await made.assert_runs_on("move.source_fenced")
        status, confirmed, err = await made.berth("confirm", made.uuid, "--wait", "--json")
        assert (status, confirmed["state"]) == (0, "done"), err
        assert len(await made.machines(OTHER)) == 1 and (await made.shown())["condition"] == "active"


async def test_a_revert_to_a_silent_host_is_refused_and_a_confirm_shows_what_it_waits_for() -> None:
    async with moved() as made:
        await asyncio.to_thread(made.whole.processes.kill, f"compute-{SERVICE}")
        await made.assert_runs_on("move.source_silent")
        status, _, err = await made.berth("confirm", made.uuid)
        assert status == 0, err
        async with asyncio.timeout(WAIT_S):
            while True:
                newest = (await made.berth("moves", "--instance", made.uuid, "--json"))[1][0]
                if newest["code"] == "move.source_silent":
                    break
        assert (newest["kind"], newest.get("terminal", False)) == ("confirm", False)
        assert len(await made.machines(OTHER)) == 1
        await asyncio.to_thread(made.whole.processes.restart, f"compute-{SERVICE}")
        async with asyncio.timeout(WAIT_S):
            while (await made.berth("moves", "--instance", made.uuid, "--json"))[1][0]["state"] != "done":
                pass
        assert (await made.shown())["condition"] == "active" and await made.machines(SERVICE) == []


async def test_a_revert_to_a_host_that_its_service_no_longer_has_is_refused() -> None:
    async with moved() as made:
        worker = made.whole.processes.workers[f"compute-{SERVICE}"]
        await asyncio.to_thread(worker.process.stop)
        made.whole.processes.start(worker.name, *worker.arguments, settings={"BERTH_COMPUTE__HOSTS": "1"})
        await made.whole.processes.ready([worker.name])
        await made.assert_runs_on("move.source_unreported")


async def test_a_revert_to_a_source_that_has_lost_its_machine_is_refused() -> None:
    async with moved() as made:
        worker = made.whole.processes.workers[f"compute-{SERVICE}"]
        await asyncio.to_thread(worker.process.stop)
        (disk,) = (made.whole.processes.directory / "machines").glob(f"*{SERVICE}.machines")
        disk.unlink()
        made.whole.processes.restart(worker.name)
        await made.whole.processes.ready([worker.name])
        await made.assert_runs_on("move.source_lost")


async def test_a_revert_to_a_source_that_is_there_is_carried_out() -> None:
    async with moved() as made:
        status, reverted, err = await made.berth("revert", made.uuid, "--wait", "--json")
        assert (status, reverted["state"]) == (0, "done"), err
        assert len(await made.machines(SERVICE)) == 1 and await made.machines(OTHER) == []

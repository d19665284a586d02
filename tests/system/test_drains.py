"""Hosts that die in a move, and drains."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from berth.client import drains as client_drains
from berth.client.moves import MoveClient
from berth.trial.servers import SystemPlan, variables
from bus.bus import Bus
from bus.clock import new_uuid
from bus.contracts.build import BuildQuery, BuildRequest, HostRecord, HostsPage, HostsQuery
from bus.contracts.cell import FindMachines, MachinesFound
from bus.contracts.drains import DrainAction, DrainCommand, DrainProgress, DrainQuery, DrainStart
from bus.contracts.feed import SnapshotPage, SnapshotRequest
from bus.contracts.moves import MoveKind, MovePage, MoveQuery, MoveRequest
from bus.contracts.operations import AdminState, SetAdminState
from compute_sim.config import ComputeConfig
from compute_sim.domain.faults import Faults
from tests.kit.forks import run_berth
from tests.system.worker_processes import Rig, rig

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


# --- a move waits for its confirm, and the service of its source is dead: no revert gives up the machine that runs


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
        assert status == 0, (boots, err)
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


# --- drains of hosts that hold something of an instance that is not active there, in a whole system of real processes


TIMEOUT_S = 120.0
POLL_S = 0.05
SLOW = Faults(
    delay_min_s=3.0, delay_max_s=3.0, change_min_s=0.8, change_max_s=0.8
)  # of builds, and of each step of a move
DRAINS_PLAN = SystemPlan(
    cells=("cell1",), placements=1, compute=ComputeConfig(hosts=4, gpu_share=0.0, faults=SLOW), durable=False
)


async def host_of(whole: Rig, instance: str) -> str:
    """The host on record of an instance, or of its build in progress."""
    while True:
        page = await whole.client.query(BuildQuery(instance_uuid=instance), timeout_s=TIMEOUT_S)
        if page.builds and page.builds[0].host is not None:
            return page.builds[0].host
        await whole.site.clock.sleep(POLL_S)


async def requested(whole: Rig) -> str:
    """A build that is requested; it takes a while."""
    instance = new_uuid(whole.rng)
    await whole.client.boot([BuildRequest(instance_uuid=instance, project_id="p", flavor="m1.small")])
    return instance


async def drains_moved(moves: MoveClient, whole: Rig, instance: str, kind: MoveKind, *, wait: bool) -> str:
    """A request about the instance; its id."""
    request = new_uuid(whole.rng)
    one = MoveRequest(request_id=request, instance_uuid=instance, project_id="p", kind=kind)
    await moves.ask(one)
    if wait:
        await moves.wait(TIMEOUT_S)
        assert moves.ended[request].state == "done", moves.ended[request]
    return request


async def destination(whole: Rig, request: str) -> str:
    """The host that a request under way names."""
    while True:
        page = await whole.client.bus.request(MoveQuery(request_id=request), MovePage, timeout_s=TIMEOUT_S)
        if page.moves and page.moves[0].host is not None:
            return page.moves[0].host
        await whole.site.clock.sleep(POLL_S)


async def drained(whole: Rig, host: str, *, force: bool = False) -> DrainProgress:
    """The end of a drain of this host."""
    start = DrainStart(drain=new_uuid(whole.rng), name=host, by="ann", force=force)
    await client_drains.start(whole.client.bus, start)
    return await followed(whole, start.drain)


async def followed(whole: Rig, drain: str) -> DrainProgress:
    return await client_drains.follow(whole.client.bus, drain, clock=whole.site.clock, timeout_s=TIMEOUT_S)


async def resumed(whole: Rig, drain: str) -> DrainProgress:
    command = DrainCommand(drain=drain, action=DrainAction.RESUME, by="ann")
    await client_drains.command(whole.client.bus, command)
    return await followed(whole, drain)


async def used(whole: Rig, host: str) -> dict[str, int]:
    """Usage of the host in the book."""
    page = await whole.client.bus.request(SnapshotRequest(limit=5000), SnapshotPage, timeout_s=TIMEOUT_S)
    (there,) = (one for one in page.providers if one.name == host)
    return {name: amount for name, amount in there.used.items() if amount}


async def test_a_drain_is_done_when_its_host_holds_nothing() -> None:
    async with rig(DRAINS_PLAN) as whole:
        moves = MoveClient(whole.client.bus, clock=whole.site.clock, process="drains")
        await moves.open()
        # A build is in progress on the host.
        instance = await requested(whole)
        host = await host_of(whole, instance)
        ended = await drained(whole, host)
        assert (ended.code, ended.moved, await used(whole, host)) == ("drain.done", (instance,), {})
        enabled = SetAdminState(host=host, state=AdminState.ENABLED, by="ann")
        await whole.client.set_admin_state(enabled, timeout_s=TIMEOUT_S)
        # A move to the host is under way.
        request = await drains_moved(moves, whole, instance, MoveKind.LIVE_MIGRATE, wait=False)
        host = await destination(whole, request)
        # Forced: as soon as the instance is on the host, and until its request has ended, it is `instance.busy`. A host
        # that is disabled before its claim is not claimed any more: then the instance goes to an alternate.
        ended = await drained(whole, host, force=True)
        assert (ended.code, await used(whole, host)) == ("drain.done", {})
        assert await moves.wait(TIMEOUT_S) and await host_of(whole, instance) != host
        assert await used(whole, host) == {}
        # The host keeps the source of a move that awaits its confirm.
        source = await host_of(whole, instance)
        await drains_moved(moves, whole, instance, MoveKind.MIGRATE, wait=True)
        plan = await client_drains.plan(whole.client.bus, DrainQuery(host=source))
        assert [(one.instance_uuid, one.code) for one in plan.moves] == [(instance, "instance.unconfirmed")]
        ended = await drained(whole, source, force=True)
        assert (ended.code, [one.code for one in ended.failed]) == ("drain.left", ["instance.unconfirmed"])
        assert await used(whole, source)
        await drains_moved(moves, whole, instance, MoveKind.CONFIRM, wait=True)
        ended = await resumed(whole, ended.id)
        assert (ended.code, await used(whole, source)) == ("drain.done", {})
        await moves.close()
        await whole.assert_invariants()

"""A drain of a host that holds something of an instance that is not active there, in a system of real processes."""

from __future__ import annotations

import pytest

from berth.client import drains as client_drains
from berth.client.moves import MoveClient
from berth.trial.servers import SystemPlan
from bus.clock import new_uuid
from bus.contracts.build import BuildQuery, BuildRequest
from bus.contracts.drains import DrainAction, DrainCommand, DrainProgress, DrainQuery, DrainStart
from bus.contracts.feed import SnapshotPage, SnapshotRequest
from bus.contracts.moves import MoveKind, MovePage, MoveQuery, MoveRequest
from bus.contracts.operations import AdminState, SetAdminState
from compute_sim.config import ComputeConfig
from compute_sim.domain.faults import Faults
from tests.system.worker_processes import Rig, rig

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


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

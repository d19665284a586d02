"""The steps that tests of schedulers share: holding a call, filling a host, losing a record, deciding about a host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bus.bus import API
from bus.clock import new_uuid
from bus.contracts.actions import ActionAccepted, ActionRequest, ActionState, Condition
from bus.contracts.build import BuildRequest, HostRecord, HostsPage, HostsQuery
from bus.contracts.cell import ServiceDown, ServiceStates
from bus.contracts.objects import ObjectChange, ObjectKind, ObjectsChange, ObjectsChanged
from bus.contracts.operations import (
    AdminState,
    AdminStateSet,
    CellFence,
    DeleteHost,
    FenceState,
    HostAdminState,
    HostDeleted,
    HostFence,
    SetAdminState,
)
from bus.contracts.placement import Claim, ClaimOption, ClaimOutcome, ClaimResult
from bus.contracts.queues import REQUEST_QUEUES
from bus.faults import RequestRefused
from scheduler_worker.config import SchedulerConfig
from tests.integration.scheduler_worker.world import CELLS, World
from tests.kit.waiting import PATIENCE_S, until

CONFIG = SchedulerConfig(hosts_warmup_s=0.001, concurrency=1)
ROOM_FOR_ONE = {"VCPU": 1, "MEMORY_MB": 4096, "DISK_GB": 100}


class Gate:
    """Holds the first call of a method until it is opened. after: when it is done, and has not returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool = False) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        real: Callable[..., Any] = getattr(owner, name)

        async def held(this: Any, *arguments: Any) -> Any:
            done = [await real(this, *arguments)] if after else []
            if not self.reached.is_set():
                self.reached.set()
                await self.open.wait()
            return done[0] if done else await real(this, *arguments)

        monkeypatch.setattr(owner, name, held)

    async def wait(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.reached.wait()


def cut_request_consumer(world: World) -> None:
    """Cut the connection of the one that takes requests; it comes back, but takes none any more."""
    for transport in list(world.brokers[API].transports):
        kept = [one for one in transport.subscriptions if one.queue.plan.name not in REQUEST_QUEUES]
        if len(kept) != len(transport.subscriptions):
            transport.subscriptions[:] = kept
            transport.lose()
            transport.reconnect_soon()


async def code_of(asked: Awaitable[object]) -> str:
    """The code with which this is refused."""
    with pytest.raises(RequestRefused) as refusal:
        await asked
    return refusal.value.code


async def fill(world: World, host: str) -> str:
    consumer = new_uuid(world.rng)
    claim = Claim(consumer=consumer, options=(ClaimOption(allocations={host: {"VCPU": 1}}),), project_id="other")
    answer = await world.answer(claim, ClaimResult)
    assert answer.outcome is ClaimOutcome.CLAIMED
    return consumer


async def forget(world: World, *uuids: str) -> None:
    """Their records are lost, as by a crash of the schedulers' database; placement has its own."""
    gone = await world.sql("DELETE FROM scheduler.build_requests WHERE instance_uuid = ANY($1) RETURNING 1", uuids)
    assert len(gone) == len(uuids)
    world.builds.clear()
    world.events.clear()


async def running(world: World, on: str = "c1", **more: str) -> tuple[BuildRequest, str]:
    """An instance on the only host, which has room for no other; its request is forgotten."""
    (host,) = await world.scheduler_and_hosts(1, CONFIG, on=on, **ROOM_FOR_ONE)
    request = world.request(**more)
    await world.active(request)
    await forget(world, request.instance_uuid)
    return request, host


async def unannounce(world: World, host: str, *, has_another: bool = True) -> None:
    """Another scheduler takes over, and nothing reports this host to it; there may be one of another cell."""
    await world.stop("s1")
    del world.hosts["c1"][host]
    await world.scheduler("s2", CONFIG)
    if has_another:
        await world.add_hosts("c2", 1, **ROOM_FOR_ONE)


WARM = SchedulerConfig(hosts_warmup_s=0.001)
DONE = {"terminal": True, "condition": Condition.ACTIVE}


async def one_active(world: World, hosts: int = 3, config: SchedulerConfig = WARM, **more: object) -> BuildRequest:
    await world.scheduler_and_hosts(hosts, config)
    await world.add_hosts("c2", 1)
    request = world.request(**more)
    await world.active(request)
    return request


async def refused(world: World, action: ActionRequest) -> str:
    """The code of the refusal: to the requester, and on the event stream."""
    with pytest.raises(RequestRefused) as fault:
        await world.answer(action, ActionAccepted)
    answer = await world.moved(action)
    assert (answer.state, answer.code, answer.terminal) == (ActionState.REFUSED, fault.value.code, True)
    assert not [one for _, one in world.actions if one.request_id == action.request_id]
    return fault.value.code


BEGUN_S = 3.0  # the time-out of a requester whose request has begun by then


async def decide(world: World, host: str, state: AdminState, reason: str = "fan", **more: Any) -> HostAdminState:
    forced = {"force": True} if state is AdminState.FENCED else {}  # the hosts of these tests have a service that is up
    command = SetAdminState(host=host, state=state, reason=reason, by="ann", **{**forced, **more})
    return (await world.answer(command, AdminStateSet)).host


async def hosts_of(world: World) -> dict[str, HostRecord]:
    page = await world.answer(HostsQuery(), HostsPage)
    return {host.name: host for host in page.hosts}


async def forget_host(world: World, host: str, **more: str) -> HostDeleted:
    command = DeleteHost(**{"host": host, "reason": "scrapped", "by": "ann", **more})
    return await world.answer(command, HostDeleted)


async def digests(world: World, *down: str, number: int = 1, cells: tuple[str, ...] = CELLS) -> None:
    """Each cell's conductor reports its services: up, or silent."""
    for cell in cells:
        silent = tuple(
            ServiceDown(service=name, epoch=2**62, code="service.silent", reason="no heartbeat for 6 s")
            for name in down
            if name == f"compute-{cell}"
        )
        up = int(bool(world.hosts[cell]) and not silent)
        await world.buses[cell].publish(
            ServiceStates(cell=cell, term=1, number=number, page=1, pages=1, up=up, down=silent)
        )
    tables = world.tables.values()
    await until(lambda: all(t.services.is_complete(cell, world.clock.monotonic()) for t in tables for cell in cells))
    await until(lambda: all(sum(t.services.down()[:-1]) == len(down) for t in tables))


async def fence_sent(world: World, version: int, cell: str = "c1") -> CellFence:
    found = await until(lambda: [one for bus, one in world.fences if (bus, one.version) == (cell, version)])
    return found[0]


async def publish_fence(
    world: World, uuid: str, version: int, state: FenceState, *, stale_machines: int = 0, cell: str = "c1"
) -> None:
    announced = HostFence(cell=cell, host_uuid=uuid, version=version, state=state, stale_machines=stale_machines)
    await world.buses[cell].publish(announced)


async def becomes(world: World, uuid: str, state: AdminState, **fields: object) -> None:
    def there() -> bool:
        found = [table.decision_of(uuid) for table in world.tables.values()]
        return all(
            one is not None
            and one.state is state
            and all(getattr(one, name) == value for name, value in fields.items())
            for one in found
        )

    await until(there)


F, A, Q, S, C = ObjectKind.FLAVOR, ObjectKind.AGGREGATE, ObjectKind.QUOTA, ObjectKind.SCHEDULING, ObjectKind.CELL


async def change(world: World, *changes: ObjectChange, **more: Any) -> ObjectsChanged:
    requested = ObjectsChange(actor="operator", reason="a test", changes=changes, **more)
    return await world.answer(requested, ObjectsChanged)


def flavor(name: str, **body: Any) -> ObjectChange:
    return ObjectChange(kind=F, name=name, body=body)


async def refused_change(world: World, *changes: ObjectChange) -> RequestRefused:
    with pytest.raises(RequestRefused) as found:
        await change(world, *changes)
    return found.value

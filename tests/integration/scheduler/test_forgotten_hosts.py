"""Hosts that an operator forgets: what stands in the way, what goes, and the entry in the log."""

from __future__ import annotations

import asyncio

import pytest

from bus.bus import API
from bus.contracts.build import BuildState
from bus.contracts.cell import ComputeHosts, HostReport, ServiceDown, ServicesDigest
from bus.contracts.fences import FenceState
from bus.contracts.objects import (
    ObjectChange,
    ObjectKind,
    ObjectLogPage,
    ObjectLogQuery,
    ObjectsChange,
    ObjectsChanged,
    ObjectsPage,
    ObjectsQuery,
)
from bus.contracts.operations import AdminState, ForgetHost, HostForgotten
from bus.contracts.placement import Release, ReleaseResult
from bus.faults import RequestRefused
from scheduler_worker.config import SchedulerConfig
from tests.integration.scheduler.test_fences import publish_fence
from tests.integration.scheduler.test_host_decisions import decide, hosts_of
from tests.integration.scheduler.world import CELLS, PATIENCE_S, World

pytestmark = pytest.mark.postgres

WARM = SchedulerConfig(hosts_warmup_s=0.001)
ZONE = "a0000000-0000-4000-8000-00000000000a"


async def forget(world: World, host: str, **more: str) -> HostForgotten:
    command = ForgetHost(**{"host": host, "reason": "scrapped", "by": "ann", **more})
    return await world.buses[API].request(command, HostForgotten, timeout_s=PATIENCE_S)


async def refused(world: World, host: str) -> str:
    with pytest.raises(RequestRefused) as fault:
        await forget(world, host)
    return fault.value.code


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
            ServicesDigest(cell=cell, term=1, number=number, page=1, pages=1, up=up, down=silent)
        )
    tables = world.tables.values()
    await world.eventually(lambda: all(t.is_complete(cell, world.clock.monotonic()) for t in tables for cell in cells))
    await world.eventually(lambda: all(sum(t.down()[:-1]) == len(down) for t in tables))


async def test_a_host_that_is_gone_leaves_the_book_the_record_and_its_aggregates(world: World) -> None:
    await world.scheduler("s1", WARM)
    await world.scheduler("s2", WARM)
    gone, other = await world.add_hosts("c1", 2)
    aggregate = {"name": "rack", "uuid": ZONE, "hosts": ["c1-0", "c1-1"]}
    change = ObjectsChange(changes=(ObjectChange(kind=ObjectKind.AGGREGATE, name="rack", body=aggregate),), who="ann")
    await world.buses[API].request(change, ObjectsChanged, timeout_s=PATIENCE_S)
    await decide(world, "c1-0", AdminState.DISABLED, reason="smoke")
    await digests(world, "compute-c1")
    done = await forget(world, "c1-0")
    assert (done.host_uuid, done.host, done.removed, done.aggregates) == (gone, "c1-0", True, ("rack",))
    await world.eventually(lambda: all(book.row_of(gone) is None for book in world.replicas.values()))
    await world.eventually(lambda: all(table.decision_of(gone) is None for table in world.tables.values()))
    assert list(await hosts_of(world)) == ["c1-1"]
    assert all(book.row_of(other) is not None for book in world.replicas.values())
    log = await world.buses[API].request(ObjectLogQuery(name=gone), ObjectLogPage, timeout_s=PATIENCE_S)
    newest = log.entries[0]
    assert (newest.who, newest.why, newest.after) == ("ann", "scrapped", None)
    assert newest.before is not None and newest.before["host"] == "c1-0"
    again = await forget(world, gone)
    assert (again.host_uuid, again.removed) == (gone, False)
    log = await world.buses[API].request(ObjectLogQuery(name=gone), ObjectLogPage, timeout_s=PATIENCE_S)
    assert log.entries[0] == newest, "nothing was on record, and nothing is logged"


async def test_a_host_without_a_decision_is_in_the_log_when_it_is_forgotten(world: World) -> None:
    await world.scheduler("s1", WARM)
    (gone,) = await world.add_hosts("c1", 1)
    await digests(world, "compute-c1")
    assert (await forget(world, "c1-0", cell="c1")).removed
    log = await world.buses[API].request(ObjectLogQuery(kind=ObjectKind.HOST), ObjectLogPage, timeout_s=PATIENCE_S)
    assert [(one.name, one.who, one.before) for one in log.entries] == [
        (gone, "ann", {"host": "c1-0", "state": "enabled"})
    ]


async def test_a_host_that_a_service_may_still_report_is_kept(world: World) -> None:
    """A service that is up; and a cell whose services this scheduler does not know, or not all of them."""
    await world.scheduler("s1", WARM)
    (host,) = await world.add_hosts("c1", 1)
    await digests(world)
    assert await refused(world, "c1-0") == "host.service_up"
    await world.stop("s1")
    await world.scheduler("s2", WARM)
    await world.eventually(lambda: world.tables["s2"].index_of(host) is not None)
    silent = ServiceDown(service="compute-c1", epoch=2**62, code="service.silent", reason="no heartbeat")
    await world.buses["c1"].publish(ServicesDigest(cell="c1", term=1, number=1, page=1, pages=1, up=0, down=(silent,)))
    await world.eventually(lambda: world.tables["s2"].is_down(host))
    assert await refused(world, "c1-0") == "host.cell_silent"  # c2 may have it
    await world.buses["c2"].publish(ServicesDigest(cell="c2", term=1, number=1, page=1, pages=1, up=2))
    await decide(world, "c1-0", AdminState.DISABLED)
    assert await refused(world, "c1-0") == "host.cell_silent"  # a service of c2 has not announced its hosts here
    assert world.replicas["s2"].row_of(host) is not None


async def test_a_host_that_something_is_on_record_of_is_kept(world: World) -> None:
    """Its instance by the schedulers' record; its fence; and what a consumer holds by the book, whichever that is."""
    await world.scheduler("s1", WARM)
    (host,) = await world.add_hosts("c1", 1)
    build = world.request()
    await world.active(build)
    await digests(world, "compute-c1")
    assert await refused(world, "c1-0") == "host.has_instances"
    number = (await decide(world, host, AdminState.FENCED)).fence
    await publish_fence(world, host, number, FenceState.FENCED, losses=1)
    await world.announced("c1", build, BuildState.DELETED, 12, terminal=True)
    await world.ended(build.instance_uuid, BuildState.DELETED)
    assert await refused(world, "c1-0") == "host.fence_open"
    await decide(world, host, AdminState.ENABLED, reason="burnt", force=True)
    assert await refused(world, "c1-0") == "host.fence_open"  # its cell would put the fence on record again
    (lift,) = {one.version for _, one in await world.until(lambda: [one for one in world.fences if one[1].lift])}
    await publish_fence(world, host, lift, FenceState.LIFTING, losses=1)
    async with asyncio.timeout(PATIENCE_S):
        while await refused(world, "c1-0") == "host.fence_open":
            pass
    assert await refused(world, "c1-0") == "host.in_use"  # no cell has released what the instance held
    assert all(book.row_of(host) is not None for book in world.replicas.values())
    await world.buses[API].request(Release(consumer=build.instance_uuid), ReleaseResult, timeout_s=PATIENCE_S)
    assert (await forget(world, "c1-0")).removed
    # A report about the fence that was under way does not bring it back.
    await publish_fence(world, host, lift, FenceState.LIFTING, losses=1)
    await decide(world, (await world.add_hosts("c2", 1))[0], AdminState.DISABLED)
    page = await world.buses[API].request(ObjectsQuery(kind=ObjectKind.FENCE), ObjectsPage, timeout_s=PATIENCE_S)
    assert page.objects == ()


async def test_another_host_may_have_the_name_afterwards(world: World) -> None:
    """A machine that is replaced keeps its name and has a uuid of its own: the name meant two hosts for ever."""
    await world.scheduler("s1", WARM)
    (gone,) = await world.add_hosts("c1", 1)
    await digests(world, "compute-c1")
    assert (await forget(world, gone)).removed
    new = "f0000000-0000-4000-8000-00000000000f"
    world.hosts["c1"] = {new: HostReport(uuid=new, name="c1-0")}
    await world.report(new, "c1-0", {"VCPU": 4})
    await world.buses["c1"].publish(
        ComputeHosts(
            service="compute-c1",
            cell="c1",
            epoch=2**62 + 1,
            sequence=1,
            hosts=tuple(world.hosts["c1"].values()),
            complete=True,
        )
    )
    await world.eventually(lambda: world.tables["s1"].index_of(new) is not None)
    await world.eventually(lambda: world.replicas["s1"].row_of(new) is not None)
    assert (await decide(world, "c1-0", AdminState.DISABLED)).host_uuid == new


async def test_an_unknown_name_is_refused_and_an_unknown_uuid_is_nothing_on_record(world: World) -> None:
    await world.scheduler("s1", WARM)
    await world.add_hosts("c1", 1)
    await digests(world)
    assert await refused(world, "nowhere") == "host.unknown"
    assert not (await forget(world, ZONE)).removed
    log = await world.buses[API].request(ObjectLogQuery(kind=ObjectKind.HOST), ObjectLogPage, timeout_s=PATIENCE_S)
    assert log.entries == ()

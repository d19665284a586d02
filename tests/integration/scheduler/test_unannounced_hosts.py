"""Hosts that no compute service has announced to a scheduler since its start: dead ones, and those that have left."""

from __future__ import annotations

import msgspec
import pytest

from bus.bus import API
from bus.clock import new_uuid
from bus.contracts.build import HostsPage, HostsQuery
from bus.contracts.cell import HostReport, ServiceDown, ServicesDigest
from bus.contracts.fences import FenceState
from bus.contracts.objects import HostDecision, ObjectChange, ObjectKind, ObjectsChange, ObjectsChanged
from bus.contracts.operations import (
    AdminState,
    AdminStateSet,
    ForgetHost,
    HostForgotten,
    ServicesPage,
    ServicesQuery,
    SetAdminState,
)
from bus.contracts.placement import Inventory, InventoryResult, InventoryUpdate, ProviderReport
from bus.faults import RequestRefused
from scheduler_worker.config import SchedulerConfig
from tests.contract.test_published_once import watched
from tests.integration.scheduler.test_fences import becomes, fence_sent, publish_fence
from tests.integration.scheduler.test_forgotten_hosts import digests, forget
from tests.integration.scheduler.test_host_decisions import decide, hosts_of
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres

WARM = SchedulerConfig(hosts_warmup_s=0.001)


async def restarted_without(world: World, host: str) -> None:
    """The compute service of a host dies, and then the only scheduler starts again."""
    await world.stop("s1")
    del world.hosts["c1"][host]
    await world.scheduler("s2", WARM)
    await world.eventually(lambda: world.tables["s2"].index_of(host) is None)
    await digests(world)


async def test_a_dead_host_is_listed_fenced_and_forgotten_by_a_scheduler_that_started_since(world: World) -> None:
    """By its name: everything was restarted, and this host is dead."""
    await world.scheduler("s1", WARM)
    dead, _ = await world.add_hosts("c1", 2)
    await restarted_without(world, dead)
    await world.eventually(lambda: len(world.tables["s2"]) == 1)
    listed = (await hosts_of(world))["c1-0"]
    assert (listed.uuid, listed.announced, listed.up, listed.service) == (dead, False, False, None)
    assert listed.resources["VCPU"] == (0, 16)
    with pytest.raises(RequestRefused) as in_cell:
        await decide(world, "c1-0", AdminState.FENCED, cell="c1", force=False)
    assert in_cell.value.code == "host.unknown", "a name may be of another cell's host"
    with pytest.raises(RequestRefused) as nowhere:
        await decide(world, "c1-0", AdminState.FENCED)
    assert nowhere.value.code == "host.cell_unknown", "its service is not listed as dead by its cell"
    decided = await decide(world, dead, AdminState.FENCED, cell="c1", force=False)
    assert (decided.host_uuid, decided.state) == (dead, AdminState.FENCED)
    await publish_fence(world, dead, decided.fence, FenceState.FENCED)
    await becomes(world, dead, AdminState.FENCED, acknowledged=decided.fence)
    assert (await hosts_of(world))["c1-0"].admin == world.tables["s2"].decision_of(dead)
    back = await decide(world, "c1-0", AdminState.ENABLED, cell="c1")
    await publish_fence(world, dead, back.fence, FenceState.LIFTED)
    await becomes(world, dead, AdminState.ENABLED, pending=None)
    assert (await forget(world, "c1-0")).removed
    await world.eventually(lambda: world.replicas["s2"].row_of(dead) is None)
    assert list(await hosts_of(world)) == ["c1-1"]


async def test_a_fenced_host_that_has_left_the_book_is_listed_until_its_fence_has_ended(world: World) -> None:
    """Seed 1795404129: it was taken out of its service just before it was fenced, and the schedulers were restarted."""
    await world.scheduler("s1", WARM)
    left, _ = await world.add_hosts("c1", 2)
    first = await decide(world, left, AdminState.FENCED)
    await publish_fence(world, left, first.fence, FenceState.FENCED)
    await becomes(world, left, AdminState.FENCED, acknowledged=first.fence)
    removed = InventoryUpdate(source="world", version=99, root_uuid=left, providers=())
    await world.buses[API].request(removed, InventoryResult, timeout_s=PATIENCE_S)
    await world.eventually(lambda: world.replicas["s1"].row_of(left) is None)
    assert list(await hosts_of(world)) == ["c1-0", "c1-1"]
    await restarted_without(world, left)
    listed = (await hosts_of(world))["c1-0"]
    assert (listed.uuid, listed.announced, listed.up, listed.cell) == (left, False, False, "c1")
    assert listed.admin is not None and listed.admin.is_fence_acknowledged and not listed.resources
    page = await world.buses[API].request(HostsQuery(cell="c1", up=False), HostsPage, timeout_s=PATIENCE_S)
    assert [host.uuid for host in page.hosts] == [left]
    back = await decide(world, "c1-0", AdminState.ENABLED, cell="c1")
    await publish_fence(world, left, back.fence, FenceState.LIFTED)
    await becomes(world, left, AdminState.ENABLED, pending=None)
    assert list(await hosts_of(world)) == ["c1-1"]


async def fence_by_objects(world: World, uuid: str, host: str, *, force: bool = False) -> int:
    """Fence a host as a change of objects, as any operator's program may; the fence's version."""
    body = msgspec.to_builtins(HostDecision(host=host, state=AdminState.FENCED, reason="fan"))
    change = ObjectsChange(
        changes=(ObjectChange(kind=ObjectKind.HOST, name=uuid, body=body),), who="ann", why="fan", force=force
    )
    return (await world.buses[API].request(change, ObjectsChanged, timeout_s=PATIENCE_S)).revision


async def dead_in_book(world: World) -> str:
    """The book has host rack1 as the service s9's of cell c1; no service has announced it."""
    dead = new_uuid(world.rng)
    provider = ProviderReport(uuid=dead, name="rack1", inventories={"VCPU": Inventory(total=4, max_unit=4)})
    report = InventoryUpdate(source="compute-s9", version=1, root_uuid=dead, providers=(provider,))
    await world.buses["c1"].publish(report)
    await world.eventually(lambda: world.replicas["s1"].row_of(dead) is not None)
    return dead


@pytest.mark.parametrize("by_objects", [False, True], ids=["hosts.set", "objects.change"])
async def test_the_fence_of_a_dead_host_that_is_not_announced_is_acknowledged_by_its_cell_alone(
    world: World, by_objects: bool
) -> None:
    """The book has it as the dead service's. Another cell's acknowledgement stops no build in this one."""
    await world.scheduler("s1", WARM)
    dead = await dead_in_book(world)
    gone = ServiceDown(service="s9", epoch=1, code="service.silent")
    await world.buses["c1"].publish(ServicesDigest(cell="c1", term=1, number=1, down=(gone,)))
    await world.eventually(lambda: world.tables["s1"].dead_unannounced() == [("c1", "s9")])
    page = await world.buses[API].request(ServicesQuery(up=False), ServicesPage, timeout_s=PATIENCE_S)
    (listed,) = page.services
    assert (listed.cell, listed.name, listed.up, listed.code, listed.announced) == ("c1", "s9", False, gone.code, False)
    if by_objects:
        number = await fence_by_objects(world, dead, "rack1")
    else:
        number = (await decide(world, "rack1", AdminState.FENCED, force=False)).fence
    assert (await hosts_of(world))["rack1"].cell == "c1"
    await acknowledged_by_c1_alone(world, dead, number)


async def acknowledged_by_c1_alone(world: World, dead: str, number: int) -> None:
    await fence_sent(world, number)
    assert {bus for bus, _ in world.fences} == {"c1"}
    await publish_fence(world, dead, number, FenceState.FENCED, cell="c2", losses=7)
    await publish_fence(world, dead, number, FenceState.FENCED, losses=1)
    await becomes(world, dead, AdminState.FENCED, acknowledged=number, losses=1)


async def test_a_host_whose_cell_nothing_shows_is_fenced_where_its_operator_names_the_cell(world: World) -> None:
    """The fence was sent to every cell, and the first acknowledgement counted: another cell's stops nothing there."""
    await world.scheduler("s1", WARM)
    dead = await dead_in_book(world)
    requests = [
        decide(world, "rack1", AdminState.FENCED, force=False),
        decide(world, dead, AdminState.FENCED, force=True),
        decide(world, dead, AdminState.FENCED, cell="c3"),
        fence_by_objects(world, dead, "rack1"),
        fence_by_objects(world, dead, "rack1", force=True),
    ]
    for one in requests:
        with pytest.raises(RequestRefused) as fault:
            await one
        assert fault.value.code == "host.cell_unknown"
    assert not world.fences and world.tables["s1"].decision_of(dead) is None
    number = (await decide(world, dead, AdminState.FENCED, cell="c1", force=False)).fence
    await acknowledged_by_c1_alone(world, dead, number)


async def test_a_copy_of_a_refused_fence_does_nothing_when_its_host_has_been_enabled_since(world: World) -> None:
    """Seed 1795640147: the fence was refused, decided with its cell, and ended; then the copy fenced the host again."""
    await world.scheduler("s1", WARM)
    dead = await dead_in_book(world)
    sent = watched(world.buses[API].transport)
    with pytest.raises(RequestRefused) as fault:
        await decide(world, dead, AdminState.FENCED)
    assert fault.value.code == "host.cell_unknown"
    (copy,) = sent
    number = (await decide(world, dead, AdminState.FENCED, cell="c1", force=False)).fence
    await acknowledged_by_c1_alone(world, dead, number)
    back = await decide(world, dead, AdminState.ENABLED)
    await publish_fence(world, dead, back.fence, FenceState.LIFTED)
    await becomes(world, dead, AdminState.ENABLED, pending=None)
    world.hosts["c1"][dead] = HostReport(uuid=dead, name="rack1")
    await world.announce("c1")
    await world.eventually(lambda: world.tables["s1"].index_of(dead) is not None)
    await world.buses[API].transport.publish(copy)
    last = await decide(world, dead, AdminState.ENABLED, reason="last")
    assert (last.state, last.fence, last.pending) == (AdminState.ENABLED, 0, None)


async def test_a_host_reinstalled_under_its_name_is_listed_and_its_name_means_two(world: World) -> None:
    """The book refuses its inventory (`provider.name_taken`): it was in no list, and its name meant the other one."""
    await world.scheduler("s1", WARM)
    (old,) = await world.add_hosts("c1", 1)
    new = new_uuid(world.rng)
    world.hosts["c1"] = {new: HostReport(uuid=new, name="c1-0")}
    await world.announce("c1")
    await world.eventually(lambda: all(table.live_service_of(new) for table in world.tables.values()))
    page = await world.buses[API].request(HostsQuery(), HostsPage, timeout_s=PATIENCE_S)
    listed = {one.uuid: one for one in page.hosts}
    assert listed.keys() == {old, new} and {one.name for one in page.hosts} == {"c1-0"}
    assert old in listed[new].not_in_book and not listed[old].not_in_book
    for command, reply in (
        (ForgetHost(host="c1-0", reason="scrapped", by="ann"), HostForgotten),
        (SetAdminState(host="c1-0", state=AdminState.DISABLED, reason="?", by="ann"), AdminStateSet),
    ):
        with pytest.raises(RequestRefused) as fault:
            await world.buses[API].request(command, reply, timeout_s=PATIENCE_S)
        assert fault.value.code == "host.ambiguous"

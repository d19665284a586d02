"""Cells in and out of use, a cell that is unreachable, and hosts that nobody has announced."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from bus.bus import Bus
from bus.clock import SystemClock, new_uuid
from bus.codec import pack, single
from bus.contracts.base import Meta
from bus.contracts.build import BuildRequest, BuildState, HostsPage, HostsQuery
from bus.contracts.cell import HostReport, ServiceDown, ServiceStates
from bus.contracts.objects import (
    CellRecord,
    CellsPage,
    CellsQuery,
    CellState,
    HostDecision,
    LinkState,
    ObjectChange,
    ObjectKind,
    ObjectsChange,
    ObjectsChanged,
)
from bus.contracts.operations import (
    AdminState,
    AdminStateSet,
    DeleteHost,
    FenceState,
    HostDeleted,
    ServicesPage,
    ServicesQuery,
    SetAdminState,
)
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport, Release, ReleaseResult
from bus.contracts.queues import DEAD
from bus.faults import RequestRefused
from bus.memory import MemoryTransport
from tests.integration.scheduler_worker.steps import (
    WARM,
    becomes,
    code_of,
    decide,
    digests,
    fence_sent,
    forget_host,
    hosts_of,
    publish_fence,
)
from tests.integration.scheduler_worker.world import World
from tests.kit.waiting import until

# --- Cells are taken into use and out of use by operators while schedulers and placement run, on real PostgreSQL.


pytestmark = pytest.mark.postgres
ABSENT = "a0000000-0000-4000-8000-000000000000"


@pytest.fixture(autouse=True)
def announced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker looks by itself: what it knows, it was sent."""
    monkeypatch.setattr("scheduler_worker.objects.object_registry.RELOAD_S", 3600.0)
    monkeypatch.setattr("placement_worker.cell_follower.LOOK_S", 3600.0)
    monkeypatch.setattr("bus.cell_links.REOPEN_S", 0.02)


@pytest.fixture
async def running(world: World) -> AsyncIterator[World]:
    """Two schedulers, placement, and a cell `c3` that no settings name."""
    await world.scheduler("s1")
    await world.scheduler("s2")
    await world.open_cell("c3")
    yield world


async def decide_cell(
    world: World, name: str, state: str | None, *, force: bool = False, **body: Any
) -> ObjectsChanged:
    change = ObjectChange(kind=ObjectKind.CELL, name=name, body=None if state is None else {"state": state, **body})
    requested = ObjectsChange(actor="ann", reason="a test", changes=(change,), force=force)
    return await world.answer(requested, ObjectsChanged)


async def refused(world: World, name: str, state: str | None, **body: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as found:
        await decide_cell(world, name, state, **body)
    return found.value


async def cells(world: World) -> dict[str, CellRecord]:
    page = await world.answer(CellsQuery(), CellsPage)
    return {one.name: one for one in page.cells}


async def linked(world: World, name: str, *, count: int) -> None:
    """Wait until so many workers are connected to a cell's bus, beside this world."""
    await until(lambda: len(world.brokers[name].transports) == count + 1)


async def problem(world: World, name: str, text: str) -> None:
    """Wait until the scheduler that answers cannot enter the cell, for this reason."""

    async def is_named() -> bool:
        return text in (await cells(world))[name].problem

    await until(is_named)


async def in_state(world: World, name: str, state: CellState) -> None:
    """Wait until the scheduler that answers has this state of the cell: of two the other one may have decided."""

    async def is_in_state() -> bool:
        return (await cells(world))[name].state is state

    await until(is_in_state)


async def only(world: World, name: str) -> None:
    """No other cell takes builds, on any scheduler."""
    others = {"c1", "c2", "c3"} - {name}
    for other in sorted(others & {"c1", "c2"}):
        await decide_cell(world, other, "disabled")
    await until(lambda: all(others & {"c1", "c2"} <= t.disabled_cells for t in world.tables.values()))


async def active_in_added_cell(world: World, name: str) -> BuildRequest:
    """A cell is added, alone with a host, and has an instance."""
    await decide_cell(world, name, "enabled", bus={})
    await linked(world, name, count=3)
    await world.add_hosts(name, 1)
    await only(world, name)
    request = world.request()
    await world.active(request)
    return request


async def test_an_added_cell_is_served_by_every_worker_without_a_restart(running: World) -> None:
    before = dict(running.services)
    await decide_cell(running, "c3", "enabled", bus={})
    await linked(running, "c3", count=3)
    await running.add_hosts("c3", 2)
    await only(running, "c3")
    requests = [running.request() for _ in range(6)]
    for request in requests:
        await running.active(request)
    assert {bus for bus, _ in running.builds} == {"c3"}
    # Placement serves the cell's conductors there: a release is answered.
    answer = await running.answer(Release(consumer=ABSENT, attempt=1), ReleaseResult, on="c3")
    assert answer.outcome
    found = (await cells(running))["c3"]
    assert (found.state, found.in_use, found.configured, found.by, found.link) == (
        CellState.ENABLED, True, False, "ann", LinkState.UP,
    )  # fmt: skip
    assert dict(running.services) == before, "the same workers run"


async def test_a_cell_with_instances_is_removed_by_force_only_and_left_by_every_worker(running: World) -> None:
    request = await active_in_added_cell(running, "c3")
    await decide_cell(running, "c1", "enabled")
    fault = await refused(running, "c3", "removed", bus={})
    assert (fault.code, "1 instance," in fault.reason) == ("cell.in_use", True)
    fault = await refused(running, "c3", None)
    assert fault.code == "cell.in_use", "nor is it forgotten"
    await decide_cell(running, "c3", "removed", bus={}, abandoned=True, force=True)
    await linked(running, "c3", count=0)
    found = (await cells(running))["c3"]
    assert (found.state, found.in_use, found.link) == (CellState.REMOVED, False, LinkState.CLOSED)
    # Added again it is as before: what is there can be deleted.
    await decide_cell(running, "c3", "enabled", bus={})
    await linked(running, "c3", count=3)
    await running.delete(request)
    await until(lambda: [one for cell, one in running.deletes if cell == "c3"])


async def test_a_request_for_a_cell_that_was_left_reaches_it_when_it_is_added_again(running: World) -> None:
    """Messages to it stay in the table meanwhile."""
    request = await active_in_added_cell(running, "c3")
    await decide_cell(running, "c3", "removed", bus={}, abandoned=True, force=True)
    await linked(running, "c3", count=0)
    await running.delete(request)
    await until(lambda: running.sql("SELECT 1 FROM scheduler.outbox WHERE bus = 'c3'"))
    assert not running.deletes
    await decide_cell(running, "c3", "enabled", bus={})
    await until(lambda: [one for cell, one in running.deletes if cell == "c3"])


async def test_a_removed_cell_of_the_settings_is_left_and_taken_back(running: World) -> None:
    await linked(running, "c2", count=3)
    await running.add_hosts("c1", 1)
    await running.add_hosts("c2", 1)
    await decide_cell(running, "c2", "removed")
    await linked(running, "c2", count=0)
    request = running.request()
    await running.active(request)
    assert {bus for bus, _ in running.builds} == {"c1"}
    assert all(service.not_ready() == [] for service, _, _ in running.services.values())
    await decide_cell(running, "c2", None)
    await linked(running, "c2", count=3)
    await only(running, "c2")
    await running.active(running.request())
    assert {bus for bus, _ in running.builds} == {"c1", "c2"}
    await lies_dead(running, "c2")
    await running.services["s1"][0].refresh()
    assert REGISTRY.get_sample_value("berth_bus_dead_letters", {"bus": "c2"}) == 1


async def lies_dead(world: World, cell: str) -> None:
    """A dead letter on this cell's bus."""
    bus = Bus(cell, MemoryTransport(world.brokers[cell], cell), process="parker", clock=SystemClock(), rng=world.rng)
    await bus.open()
    packed = pack(Release(consumer=ABSENT), Meta(id="m1", sent_at=bus.clock.time()))
    await bus.transport.publish(single(packed, DEAD, "placement.requests", mandatory=True))
    await bus.close()


async def test_a_build_that_had_chosen_a_removed_cell_is_carried_to_its_end(
    running: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that had not received the removal has placed it there."""
    monkeypatch.setattr("scheduler_worker.fleet.cell_connections.CHECK_S", 0.02)
    monkeypatch.setattr("placement_worker.cell_follower.LOOK_S", 0.05)
    await decide_cell(running, "c3", "enabled", bus={})
    await linked(running, "c3", count=3)
    await running.add_hosts("c3", 1)
    await only(running, "c3")
    request = await running.scheduled()
    await decide_cell(running, "c1", "enabled")
    await decide_cell(running, "c3", "removed", bus={}, force=True)
    await in_state(running, "c3", CellState.REMOVED)
    await linked(running, "c3", count=3)
    await running.announced("c3", request, BuildState.ACTIVE, 11, terminal=True, attempt=1, host="c3-0")
    await running.ended(request.instance_uuid, BuildState.ACTIVE)
    await running.announced("c3", request, BuildState.DELETED, 12, terminal=True)
    await linked(running, "c3", count=0)


async def test_a_cell_that_cannot_be_entered_ends_no_worker_and_is_entered_when_it_can(running: World) -> None:
    """Its URL is not there yet; or its bus is another deployment's."""
    await decide_cell(running, "c3", "enabled", bus={"url_file": "later"})
    await problem(running, "c3", "No such file")
    running.brokers["later"] = running.brokers["c3"]
    await linked(running, "c3", count=3)
    await decide_cell(running, "c3", "removed", bus={"url_file": "later"})
    await linked(running, "c3", count=0)
    other = MemoryTransport(running.brokers["c3"], "c3")
    await other.open()
    for role in ("placement", "scheduler"):
        await other.clear_owner(role)
        await other.set_owner(role, ABSENT)
    await decide_cell(running, "c3", "enabled", bus={"url_file": "later"})
    await problem(running, "c3", "belongs to another deployment")
    assert all(service.ready.is_set() for service, _, _ in running.services.values())
    for role in ("placement", "scheduler"):
        await other.clear_owner(role)
    await other.close()
    await linked(running, "c3", count=3)


# --- A cell whose broker is unavailable: the other cells are served all the same, and it is, when it comes.


async def test_a_scheduler_that_starts_while_a_cell_is_unreachable_serves_the_others(world: World) -> None:
    (there,) = await world.add_hosts("c1", 1, VCPU=1, MEMORY_MB=4096, DISK_GB=100)
    (unreachable,) = await world.add_hosts("c2", 1, VCPU=1, MEMORY_MB=4096, DISK_GB=100)
    world.brokers["c2"].stop()
    service = await world.scheduler()
    assert service.not_ready() == ["bus c2: not connected"]
    first, second = world.request(), world.request()
    await world.ask(first)
    event = await world.ended(first.instance_uuid, BuildState.SCHEDULED)
    assert event.cell == "c1"
    world.brokers["c2"].start()
    await until(lambda: not service.not_ready())
    await world.ask(second)
    assert (await world.ended(second.instance_uuid, BuildState.SCHEDULED)).cell == "c2"
    await world.announced("c2", second, BuildState.ACTIVE, 10, terminal=True)
    await world.ended(second.instance_uuid, BuildState.ACTIVE)
    assert set(await world.used()) == {there, unreachable}


# --- Hosts that no compute service has reported to a scheduler since its start: dead ones, and those that have
# left.


async def restarted_without(world: World, host: str) -> None:
    """The compute service of a host dies, and then the only scheduler starts again."""
    await world.stop("s1")
    del world.hosts["c1"][host]
    await world.scheduler("s2", WARM)
    await until(lambda: world.tables["s2"].index_of(host) is None)
    await digests(world)


async def test_a_dead_host_is_listed_fenced_and_deleted_by_a_scheduler_that_started_since(world: World) -> None:
    """By its name: everything was restarted, and this host is dead."""
    dead, _ = await world.scheduler_and_hosts(2, WARM)
    await restarted_without(world, dead)
    await until(lambda: len(world.tables["s2"]) == 1)
    listed = (await hosts_of(world))["c1-0"]
    assert (listed.uuid, listed.reported, listed.up, listed.service) == (dead, False, False, None)
    assert listed.resources["VCPU"] == (0, 16)
    assert await code_of(decide(world, "c1-0", AdminState.FENCED, cell="c1", force=False)) == "host.unknown", (
        "a name may be of another cell's host"
    )
    assert await code_of(decide(world, "c1-0", AdminState.FENCED)) == "host.cell_unknown", (
        "its service is not listed as dead by its cell"
    )
    decided = await decide(world, dead, AdminState.FENCED, cell="c1", force=False)
    assert (decided.host_uuid, decided.state) == (dead, AdminState.FENCED)
    await publish_fence(world, dead, decided.fence, FenceState.FENCED)
    await becomes(world, dead, AdminState.FENCED, acknowledged=decided.fence)
    assert (await hosts_of(world))["c1-0"].admin == world.tables["s2"].decision_of(dead)
    back = await decide(world, "c1-0", AdminState.ENABLED, cell="c1")
    await publish_fence(world, dead, back.fence, FenceState.UNFENCED)
    await becomes(world, dead, AdminState.ENABLED, pending=None)
    assert (await forget_host(world, "c1-0")).removed
    await until(lambda: world.replicas["s2"].row_of(dead) is None)
    assert list(await hosts_of(world)) == ["c1-1"]


async def fence_by_objects(world: World, uuid: str, host: str, *, force: bool = False) -> int:
    """Fence a host as a change of objects, as any operator's program may; the fence's version."""
    body = msgspec.to_builtins(HostDecision(host=host, state=AdminState.FENCED, reason="fan"))
    change = ObjectsChange(
        changes=(ObjectChange(kind=ObjectKind.HOST, name=uuid, body=body),), actor="ann", reason="fan", force=force
    )
    return (await world.answer(change, ObjectsChanged)).revision


async def dead_in_placement(world: World) -> str:
    """Placement has host rack1 as the service s9's of cell c1; no service has reported it."""
    dead = new_uuid(world.rng)
    provider = ProviderReport(uuid=dead, name="rack1", inventories={"VCPU": Inventory(total=4, max_unit=4)})
    report = InventoryUpdate(reporter="compute-s9", version=1, root_uuid=dead, providers=(provider,))
    await world.buses["c1"].publish(report)
    await until(lambda: world.replicas["s1"].row_of(dead) is not None)
    return dead


@pytest.mark.parametrize("by_objects", [False, True], ids=["hosts.set", "objects.change"])
async def test_the_fence_of_a_dead_host_that_is_not_reported_is_acknowledged_by_its_cell_alone(
    world: World, by_objects: bool
) -> None:
    """Placement has it as the dead service's. Another cell's acknowledgement stops no build in this one."""
    await world.scheduler("s1", WARM)
    dead = await dead_in_placement(world)
    gone = ServiceDown(service="s9", epoch=1, code="service.silent")
    await world.buses["c1"].publish(ServiceStates(cell="c1", term=1, number=1, down=(gone,)))
    await until(lambda: world.tables["s1"].services.dead_not_reported() == [("c1", "s9")])
    page = await world.answer(ServicesQuery(up=False), ServicesPage)
    (listed,) = page.services
    assert (listed.cell, listed.name, listed.up, listed.code, listed.reported) == ("c1", "s9", False, gone.code, False)
    if by_objects:
        number = await fence_by_objects(world, dead, "rack1")
    else:
        number = (await decide(world, "rack1", AdminState.FENCED, force=False)).fence
    assert (await hosts_of(world))["rack1"].cell == "c1"
    await acknowledged_by_c1_alone(world, dead, number)


async def acknowledged_by_c1_alone(world: World, dead: str, number: int) -> None:
    await fence_sent(world, number)
    assert {bus for bus, _ in world.fences} == {"c1"}
    await publish_fence(world, dead, number, FenceState.FENCED, cell="c2", stale_machines=7)
    await publish_fence(world, dead, number, FenceState.FENCED, stale_machines=1)
    await becomes(world, dead, AdminState.FENCED, acknowledged=number, stale_machines=1)


async def test_a_host_reinstalled_under_its_name_is_listed_and_its_name_means_two(world: World) -> None:
    """Placement refuses its inventory (`provider.name_taken`): it was in no list, and its name meant the other one."""
    (old,) = await world.scheduler_and_hosts(1, WARM)
    new = new_uuid(world.rng)
    world.hosts["c1"] = {new: HostReport(uuid=new, name="c1-0")}
    await world.announce("c1")
    await until(lambda: all(table.live_service_of(new) for table in world.tables.values()))
    page = await world.answer(HostsQuery(), HostsPage)
    listed = {one.uuid: one for one in page.hosts}
    assert listed.keys() == {old, new} and {one.name for one in page.hosts} == {"c1-0"}
    assert old in listed[new].not_in_placement and not listed[old].not_in_placement
    for command, reply in (
        (DeleteHost(host="c1-0", reason="scrapped", by="ann"), HostDeleted),
        (SetAdminState(host="c1-0", state=AdminState.DISABLED, reason="?", by="ann"), AdminStateSet),
    ):
        assert await code_of(world.answer(command, reply)) == "host.ambiguous"

"""Cells are taken into use and out of use by operators while schedulers and placement run, on real PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
from prometheus_client import REGISTRY

from bus.bus import Bus
from bus.clock import SystemClock
from bus.contracts.base import Meta
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.catalogue import DEAD
from bus.contracts.cells import CellRecord, CellsPage, CellsQuery, LinkState
from bus.contracts.objects import (
    CellState,
    ObjectChange,
    ObjectKind,
    ObjectLogPage,
    ObjectLogQuery,
    ObjectsChange,
    ObjectsChanged,
)
from bus.contracts.placement import Release, ReleaseResult
from bus.faults import RequestRefused
from bus.memory import MemoryTransport
from bus.wire import pack, single
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres

ABSENT = "a0000000-0000-4000-8000-000000000000"


@pytest.fixture(autouse=True)
def announced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker looks by itself: what it knows, it was sent."""
    monkeypatch.setattr("scheduler_worker.objects.RELOAD_S", 3600.0)
    monkeypatch.setattr("placement_worker.cells.LOOK_S", 3600.0)
    monkeypatch.setattr("bus.cell_links.REOPEN_S", 0.02)


@pytest.fixture
async def running(world: World) -> AsyncIterator[World]:
    """Two schedulers, placement, and a cell `c3` that no settings name."""
    await world.scheduler("s1")
    await world.scheduler("s2")
    await world.open_cell("c3")
    yield world


async def decide(world: World, name: str, state: str | None, *, force: bool = False, **body: Any) -> ObjectsChanged:
    change = ObjectChange(kind=ObjectKind.CELL, name=name, body=None if state is None else {"state": state, **body})
    requested = ObjectsChange(who="ann", why="a test", changes=(change,), force=force)
    return await world.buses["api"].request(requested, ObjectsChanged, timeout_s=PATIENCE_S)


async def refused(world: World, name: str, state: str | None, **body: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as found:
        await decide(world, name, state, **body)
    return found.value


async def cells(world: World) -> dict[str, CellRecord]:
    page = await world.buses["api"].request(CellsQuery(), CellsPage, timeout_s=PATIENCE_S)
    return {one.name: one for one in page.cells}


async def linked(world: World, name: str, *, count: int) -> None:
    """Wait until so many workers are connected to a cell's bus, beside this world."""
    await world.eventually(lambda: len(world.brokers[name].transports) == count + 1)


async def problem(world: World, name: str, text: str) -> None:
    """Wait until the scheduler that answers cannot enter the cell, for this reason."""
    async with asyncio.timeout(PATIENCE_S):
        while text not in (await cells(world))[name].problem:
            pass


async def in_state(world: World, name: str, state: CellState) -> None:
    """Wait until the scheduler that answers has this state of the cell: of two the other one may have decided."""
    async with asyncio.timeout(PATIENCE_S):
        while (await cells(world))[name].state is not state:
            pass


async def only(world: World, name: str) -> None:
    """No other cell takes builds, on any scheduler."""
    others = {"c1", "c2", "c3"} - {name}
    for other in sorted(others & {"c1", "c2"}):
        await decide(world, other, "disabled")
    await world.eventually(lambda: all(others & {"c1", "c2"} <= t.disabled_cells for t in world.tables.values()))


async def active_in_added_cell(world: World, name: str) -> BuildRequest:
    """A cell is added, alone with a host, and has an instance."""
    await decide(world, name, "enabled", bus={})
    await linked(world, name, count=3)
    await world.add_hosts(name, 1)
    await only(world, name)
    request = world.request()
    await world.active(request)
    return request


async def test_an_added_cell_is_served_by_every_worker_without_a_restart(running: World) -> None:
    before = dict(running.services)
    await decide(running, "c3", "enabled", bus={})
    await linked(running, "c3", count=3)
    await running.add_hosts("c3", 2)
    await only(running, "c3")
    requests = [running.request() for _ in range(6)]
    for request in requests:
        await running.active(request)
    assert {bus for bus, _ in running.builds} == {"c3"}
    # Placement serves the cell's conductors there: a release is answered.
    answer = await running.buses["c3"].request(Release(consumer=ABSENT, attempt=1), ReleaseResult, timeout_s=PATIENCE_S)
    assert answer.outcome
    found = (await cells(running))["c3"]
    assert (found.state, found.in_use, found.configured, found.by, found.link) == (
        CellState.ENABLED, True, False, "ann", LinkState.UP,
    )  # fmt: skip
    assert dict(running.services) == before, "the same workers run"


async def test_a_cell_with_instances_is_removed_by_force_only_and_left_by_every_worker(running: World) -> None:
    request = await active_in_added_cell(running, "c3")
    await decide(running, "c1", "enabled")
    fault = await refused(running, "c3", "removed", bus={})
    assert (fault.code, "1 instance," in fault.reason) == ("cell.in_use", True)
    fault = await refused(running, "c3", None)
    assert fault.code == "cell.in_use", "nor is it forgotten"
    await decide(running, "c3", "removed", bus={}, abandoned=True, force=True)
    await linked(running, "c3", count=0)
    found = (await cells(running))["c3"]
    assert (found.state, found.in_use, found.link) == (CellState.REMOVED, False, LinkState.CLOSED)
    # Added again it is as before: what is there can be deleted.
    await decide(running, "c3", "enabled", bus={})
    await linked(running, "c3", count=3)
    await running.delete(request)
    await running.until(lambda: [one for cell, one in running.deletes if cell == "c3"])


async def test_a_request_for_a_cell_that_was_left_reaches_it_when_it_is_added_again(running: World) -> None:
    """Messages to it stay in the table meanwhile."""
    request = await active_in_added_cell(running, "c3")
    await decide(running, "c3", "removed", bus={}, abandoned=True, force=True)
    await linked(running, "c3", count=0)
    await running.delete(request)
    connection = await asyncpg.connect(running.url)
    async with asyncio.timeout(PATIENCE_S):
        while not await connection.fetchval("SELECT count(*) FROM scheduler.outbox WHERE bus = 'c3'"):
            pass
    await connection.close()
    assert not running.deletes
    await decide(running, "c3", "enabled", bus={})
    await running.until(lambda: [one for cell, one in running.deletes if cell == "c3"])


async def test_a_removed_cell_of_the_settings_is_left_and_taken_back(running: World) -> None:
    await linked(running, "c2", count=3)
    await running.add_hosts("c1", 1)
    await running.add_hosts("c2", 1)
    await decide(running, "c2", "removed")
    await linked(running, "c2", count=0)
    request = running.request()
    await running.active(request)
    assert {bus for bus, _ in running.builds} == {"c1"}
    assert all(service.not_ready() == [] for service, _, _ in running.services.values())
    await decide(running, "c2", None)
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
    monkeypatch.setattr("scheduler_worker.keepers.CHECK_S", 0.02)
    monkeypatch.setattr("placement_worker.cells.LOOK_S", 0.05)
    await decide(running, "c3", "enabled", bus={})
    await linked(running, "c3", count=3)
    await running.add_hosts("c3", 1)
    await only(running, "c3")
    request = running.request()
    await running.ask(request)
    await running.ended(request.instance_uuid, BuildState.SCHEDULED)
    await decide(running, "c1", "enabled")
    await decide(running, "c3", "removed", bus={}, force=True)
    await in_state(running, "c3", CellState.REMOVED)
    await linked(running, "c3", count=3)
    await running.announced("c3", request, BuildState.ACTIVE, 11, terminal=True, attempt=1, host="c3-0")
    await running.ended(request.instance_uuid, BuildState.ACTIVE)
    await running.announced("c3", request, BuildState.DELETED, 12, terminal=True)
    await linked(running, "c3", count=0)


async def test_a_cell_that_cannot_be_entered_ends_no_worker_and_is_entered_when_it_can(running: World) -> None:
    """Its URL is not there yet; or its bus is another deployment's."""
    await decide(running, "c3", "enabled", bus={"url_file": "later"})
    await problem(running, "c3", "No such file")
    running.brokers["later"] = running.brokers["c3"]
    await linked(running, "c3", count=3)
    await decide(running, "c3", "removed", bus={"url_file": "later"})
    await linked(running, "c3", count=0)
    other = MemoryTransport(running.brokers["c3"], "c3")
    await other.open()
    for role in ("placement", "scheduler"):
        await other.unmark(role)
        await other.mark(role, ABSENT)
    await decide(running, "c3", "enabled", bus={"url_file": "later"})
    await problem(running, "c3", "belongs to another deployment")
    assert all(service.ready.is_set() for service, _, _ in running.services.values())
    for role in ("placement", "scheduler"):
        await other.unmark(role)
    await other.close()
    await linked(running, "c3", count=3)


@pytest.mark.parametrize(
    ("name", "body", "code"),
    [
        ("c3", {"state": "enabled"}, "object.unknown"),
        ("c3", {"state": "enabled", "bus": {"url_file": "../secret"}}, "object.invalid"),
        ("c3", {"state": "enabled", "bus": {"url_file": "/etc/passwd"}}, "object.invalid"),
        ("c3", {"state": "enabled", "bus": {"url_file": "f\n"}}, "object.invalid"),
        ("c3", {"state": "enabled", "bus": {"url_variable": "BERTH_BUS__URL"}}, "object.invalid"),
        ("c3", {"state": "enabled", "bus": {"url_variable": "CELL_A", "url_file": "f"}}, "object.invalid"),
        ("c3", {"state": "enabled", "bus": {"url": "amqp://u:p@h/"}}, "object.invalid"),
        ("api", {"state": "enabled", "bus": {}}, "object.invalid"),
        ("c 3", {"state": "enabled", "bus": {}}, "object.invalid"),
    ],
)
async def test_a_decision_that_is_none_is_refused(world: World, name: str, body: dict[str, Any], code: str) -> None:
    await world.scheduler("s1")
    state = body.pop("state")
    assert (await refused(world, name, state, **body)).code == code
    assert "c3" not in await cells(world)


async def test_a_scheduler_that_starts_later_connects_to_the_added_cells(running: World) -> None:
    await decide(running, "c3", "enabled", bus={})
    await linked(running, "c3", count=3)
    await running.stop("s1")
    await linked(running, "c3", count=2)
    await running.scheduler("s3")
    await linked(running, "c3", count=3)
    await running.placement("p2")
    await linked(running, "c3", count=4)


async def test_each_decision_is_in_the_log_with_who_and_why(running: World) -> None:
    await decide(running, "c3", "enabled", bus={"prefix": "x."})
    await decide(running, "c3", "disabled", bus={"prefix": "x."}, reason="power")
    await decide(running, "c3", "removed", bus={"prefix": "x."})
    await decide(running, "c3", None)
    query = ObjectLogQuery(kind=ObjectKind.CELL)
    page = await running.buses["api"].request(query, ObjectLogPage, timeout_s=PATIENCE_S)
    found = [(one.who, one.why, None if one.after is None else one.after["state"]) for one in page.entries]
    assert found == [("ann", "a test", state) for state in (None, "removed", "disabled", "enabled")]
    await linked(running, "c3", count=0)

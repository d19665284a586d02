"""Attacks that may not harm a machine, tried on a real Ironic: foreign machines, shares, operators, wrong databases,
losses.

The same attacks as tests/system/test_no_harm.py, which has a simulated Ironic and more of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from bus.bus_ownership import BusOwnedByAnother
from bus.clock import new_uuid
from bus.contracts.build import BuildState
from bus.contracts.cell import BreakerTripped
from bus.openstack.rest import IRONIC_VERSION
from cell_conductor.state.instance import State
from cell_conductor.state.unknown_machine import UnknownMachineKind
from cell_conductor.store.keyed_tables import DESTROY, PROTECT, DecidedMachine
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from compute_agent.drivers.ironic.config import IronicConfig
from lab.ironic.laboratory import Nodes, lab
from tests.kit.lone_cell import CONDUCTOR, LoneCell, a_third_cell_joins
from tests.kit.real_metal import RNG

FIELDS = "uuid,provision_state,instance_uuid"
LOST = CONDUCTOR.breaker_limit + 1
STEP = {"interface": "vendor", "step": "log_passthrough", "args": {}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[Nodes]:
    async with lab(delays={"deploy_delay": 1}) as here:
        operator = Nodes(here.ironic.url)
        operator.client.headers[IRONIC_VERSION] = "1.108"  # a service step without a ramdisk
        yield operator
        await operator.close()


@pytest_asyncio.fixture(loop_scope="module")
async def cells(nodes: Nodes) -> AsyncIterator[list[LoneCell]]:
    """Three cells that are not started. The next test finds no node of this one."""
    config = IronicConfig(url=str(nodes.client.base_url), poll_interval_s=0.2, watch_interval_s=0.5)
    made = [LoneCell(f"c{number}", config) for number in range(3)]
    for cell in made:
        await cell.open()
    yield made
    for cell in made:
        await cell.close()
    for node in await nodes.list_all("uuid"):
        await nodes.maintenance(node["uuid"], on=True)
        assert (await nodes.client.delete(f"/v1/nodes/{node['uuid']}")).is_success


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


async def carried(nodes: Nodes) -> dict[str, tuple[str, str]]:
    """The nodes with an instance: which, and in which state."""
    found = await nodes.list_all(FIELDS)
    return {one["uuid"]: (one["instance_uuid"], one["provision_state"]) for one in found if one["instance_uuid"]}


async def unchanged(nodes: Nodes, node: str, before: dict[str, Any]) -> bool:
    """Whether a node is as it was, with the times of periodic looks left out."""
    after = await nodes.get(node)
    return {**after, "updated_at": before["updated_at"]} == before


async def test_a_foreign_machine_is_never_changed(nodes: Nodes, cells: list[LoneCell]) -> None:
    foreign, own = await nodes.enroll(2)
    theirs = new_uuid(RNG)
    await nodes.patch(foreign, {"op": "add", "path": "/instance_uuid", "value": theirs})
    await nodes.provision(foreign, "active")
    await nodes.until(foreign, "active")
    before, cell = await nodes.get(foreign), cells[0]
    await cell.start()
    assert await cell.build(foreign, theirs) == (theirs, BuildState.FAILED)
    await cell.delete(theirs)
    await cell.over(theirs, BuildState.DELETED)
    uuid, state = await cell.build(own)
    assert state is BuildState.ACTIVE
    await cell.look()
    await cell.stop()
    await cell.start()
    assert await unchanged(nodes, foreign, before)
    assert (await carried(nodes))[own] == (uuid, "active")


async def test_a_third_cell_changes_nothing_for_nodes_with_an_instance(nodes: Nodes, cells: list[LoneCell]) -> None:
    """Of 10 active nodes 8 were cleaned when a third cell came."""
    owners = await a_third_cell_joins(cells, await nodes.enroll(12), 7, lambda: carried(nodes))
    assert all(len(names) == 1 for names in owners), owners


async def test_what_an_operator_does_to_our_machine_does_not_destroy_it(nodes: Nodes, cells: list[LoneCell]) -> None:
    (node,) = await nodes.enroll(1)
    cell = cells[0]
    await cell.start()
    uuid, _ = await cell.build(node)
    orders: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("rescue", "rescue", {"rescue_password": "secret"}),
        ("unrescue", "active", {}),
        ("rebuild", "active", {}),
        ("service", "active", {"service_steps": [STEP], "disable_ramdisk": True}),
    )
    # Ironic 39 answers 500 to a rebuild without an image (`auto_lessee` is unbound).
    await nodes.patch(node, {"op": "add", "path": "/instance_info/image_source", "value": "http://127.0.0.1/image"})
    seen = set()
    for target, reached, more in orders:
        await nodes.provision(node, target, **more)
        while (state := (await nodes.get(node))["provision_state"]) != reached:
            seen.add(state)
            await cell.look()
        await cell.look()
        assert cell.state(uuid) is State.ACTIVE
        if target == "rebuild":  # and over a restart of both
            await cell.stop()
            await cell.start()
        assert (await carried(nodes))[node][0] == uuid
    assert "deploying" in seen or "servicing" in seen, seen
    assert await carried(nodes) == {node: (uuid, "active")}


async def test_an_empty_or_anothers_database_destroys_nothing(nodes: Nodes, cells: list[LoneCell]) -> None:
    cell, other = cells[:2]
    for node in await nodes.enroll(3):
        await cell.start()
        assert (await cell.build(node))[1] is BuildState.ACTIVE
        await cell.stop()
    before, table = await carried(nodes), cell.table
    for wrong in (MemoryInstanceTable(cell.clock), other.table):
        cell.table = wrong
        with pytest.raises(BusOwnedByAnother):
            await cell.start()
        cell.release()  # an operator who trusts the database and not the bus
        for fleet in (cell.fleet, None):  # with and without what the compute service remembers
            cell.fleet = fleet
            await cell.start()
            await cell.look()
            assert await carried(nodes) == before
            await cell.stop()
    cell.table = table
    cell.release()
    await cell.start()
    assert await carried(nodes) == before
    assert all(cell.state(uuid) is State.ACTIVE for uuid, _ in before.values())


async def test_a_restored_database_destroys_nothing_newer(nodes: Nodes, cells: list[LoneCell]) -> None:
    """An instance that was built since the backup has no record there, and one that was deleted since has one."""
    first, second, third = await nodes.enroll(3)
    cell = cells[0]
    await cell.start()
    kept, deleted = (await cell.build(first))[0], (await cell.build(second))[0]
    backup = dict(cell.table.instances)
    await cell.delete(deleted)
    await cell.over(deleted, BuildState.DELETED)
    await nodes.until(second, "available")
    newer, also_newer = (await cell.build(second))[0], (await cell.build(third))[0]
    before = await carried(nodes)
    assert {uuid for uuid, _ in before.values()} == {kept, newer, also_newer}
    await cell.stop()
    cell.table.instances = backup
    await cell.start()
    await cell.over(deleted, BuildState.FAILED)
    await cell.look()
    assert await carried(nodes) == before
    assert (cell.state(kept), cell.state(deleted)) == (State.ACTIVE, State.FAILED)
    quarantined = {one.machine.uuid: one.machine.kind for one in cell.table.unknown_machines.values()}
    assert quarantined == {newer: UnknownMachineKind.QUARANTINED, also_newer: UnknownMachineKind.QUARANTINED}
    safety = MemoryInstances(cell.table.session()).safety
    assert len(await safety.decide([DecidedMachine(newer)], DESTROY, "an operator", cell.clock.time())) == 1
    assert len(await safety.decide([DecidedMachine(also_newer)], PROTECT, "an operator", cell.clock.time())) == 1
    await nodes.until(second, "available")
    await cell.look()
    assert await carried(nodes) == {node: what for node, what in before.items() if what[0] != newer}
    assert [one.machine.uuid for one in cell.table.unknown_machines.values()] == [also_newer], "and is still reported"


async def test_many_losses_at_once_wait_for_an_operator(nodes: Nodes, cells: list[LoneCell]) -> None:
    """Another's script undeploys all nodes while the services are restarted."""
    all_nodes = await nodes.enroll(LOST)
    cell = cells[0]
    await cell.start()
    built = {(await cell.build(node))[0] for node in all_nodes}
    await cell.stop()
    await asyncio.gather(*(nodes.provision(node, "deleted") for node in all_nodes))
    for node in all_nodes:
        await nodes.until(node, "available")
    await cell.start()
    assert {cell.state(uuid) for uuid in built} == {State.ACTIVE}, "none of them is taken for lost"
    assert cell.table.breakers["c0-a"].is_open
    (alarm,) = await cell.until(lambda: [one for one in cell.alarms if isinstance(one, BreakerTripped)])
    assert (alarm.service, alarm.lost, alarm.limit) == ("c0-a", LOST, CONDUCTOR.breaker_limit)
    safety = MemoryInstances(cell.table.session()).safety
    assert await safety.reset("c0-a", "an operator", cell.clock.time())
    await cell.look()
    for uuid in built:
        await cell.over(uuid, BuildState.FAILED)
    states = await nodes.list_all(FIELDS)
    assert all((one["provision_state"], one["instance_uuid"]) == ("available", None) for one in states)

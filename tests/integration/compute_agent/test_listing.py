"""A conductor reads everything that a real compute service has, over a bus, in pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from berth.config.settings import ComputeSettings
from bus.clock import SystemClock
from bus.contracts.actions import ChangeKind, ChangeMachine
from bus.contracts.listing import ListedMachine, ListMachines, MachinesPage
from compute_agent.driver import Build, ChangeOrder, ChangeResult
from compute_agent.hosts import machine_listing as listing
from compute_sim.config import SimulatedConfig
from compute_sim.driver import SimulatedDriver
from compute_sim.faults import Faults
from compute_sim.fleet import SimulatedMachine
from tests.integration.compute_agent.harness import DATABASE_ID, SERVICE, Cell, Metal, cell_on, planned, spawn
from tests.kit.waiting import PATIENCE_S, until

ANOTHER = "dddddddd-0000-4000-8000-000000000002"


@pytest_asyncio.fixture(params=["memory", "broker"])
async def cell(request: pytest.FixtureRequest) -> AsyncIterator[Cell]:
    made = Cell() if request.param == "memory" else cell_on(*request.getfixturevalue("amqp"))
    await made.open()
    yield made
    await made.close()


async def read_all(cell: Cell, service: str = SERVICE) -> tuple[dict[str, ListedMachine], list[str], int]:
    """The machines by instance, the hosts, and how many pages they came in."""
    machines, hosts, pages = dict[str, ListedMachine](), list[str](), 0
    query = ListMachines(service=service, database_id=DATABASE_ID)
    while True:
        page = await cell.bus.request(query, MachinesPage, timeout_s=PATIENCE_S)
        machines |= {one.instance_uuid: one for one in page.machines}
        hosts += page.hosts
        pages += 1
        if not page.more:
            return machines, hosts, pages
        query = ListMachines(
            service=service, database_id=DATABASE_ID, after_host=page.next_host, after_instance=page.next_instance
        )


class Gated(SimulatedDriver):
    """Builds and changes of what is named wait."""

    waiting: frozenset[str] = frozenset()

    async def spawn(self, build: Build) -> None:
        if build.spec.instance_uuid in self.waiting:
            await asyncio.get_running_loop().create_future()
        await super().spawn(build)

    async def change(self, change: ChangeOrder) -> ChangeResult:
        if change.spec.instance_uuid in self.waiting:
            await asyncio.get_running_loop().create_future()
        return await super().change(change)


def stop(host: str, instance: str) -> ChangeMachine:
    command = spawn(host, instance)
    return ChangeMachine(
        spec=command.spec, attempt=1, host_uuid=host, allocations=command.allocations, service=SERVICE,
        database_id=DATABASE_ID, change=ChangeKind.STOP, change_number=1,
    )  # fmt: skip


@pytest.mark.parametrize("most", [1, 3, 1000])
async def test_every_machine_is_listed_whatever_its_state(
    cell: Cell, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "MAX_LISTED_MACHINES", most)
    settings = ComputeSettings(simulated=SimulatedConfig(hosts=3), heartbeat_interval_s=0.05)
    fleet = planned(settings)
    driver = Gated(fleet, Faults(), seed=1, clock=SystemClock())
    life = await cell.compute(settings, fleet, driver=driver)
    hosts = [one.plan.uuid for one in fleet.hosts]
    built, stopped, changing, building, foreign = (cell.instance() for _ in range(5))
    for instance, host in ((built, hosts[0]), (stopped, hosts[1]), (changing, hosts[2])):
        await cell.built(host, instance)
    await cell.bus.publish(stop(hosts[1], stopped))
    await until(lambda: not fleet.machine(hosts[1], stopped).runs)  # type: ignore[union-attr]
    fleet.put(hosts[0], SimulatedMachine(foreign, 1, {hosts[0]: {"VCPU": 1}}, database_id=ANOTHER))
    driver.waiting = frozenset({changing, building})
    await cell.bus.publish(stop(hosts[2], changing))
    await cell.spawn(hosts[0], building)

    machines, read, pages = await read_all(cell)

    assert sorted(read) == sorted(hosts) and pages == {1: 5, 3: 2, 1000: 1}[most]
    assert {
        name: (one.complete, one.runs, one.busy, one.foreign)
        for name, one in (
            (name, machines.pop(uuid))
            for name, uuid in (
                ("built", built), ("stopped", stopped), ("changing", changing), ("building", building),
                ("foreign", foreign),
            )
        )
    } == {
        "built": (True, True, False, False),
        "stopped": (True, False, False, False),
        "changing": (True, True, True, False),
        "building": (False, False, False, False),
        "foreign": (True, True, False, True),
    } and machines == {}  # fmt: skip
    await life.kill()


async def test_a_node_s_machine_is_listed_with_the_spec_of_its_order(metal: Metal) -> None:
    cell = Cell()
    await cell.open()
    life, node = await metal.serve(cell), metal.first
    instance = await cell.built(node)
    await life.kill()
    await metal.serve(cell)
    machines, hosts, _ = await read_all(cell)
    one, command = machines[instance], spawn(node, instance)
    assert sorted(hosts) == sorted(metal.nodes)
    assert (one.spec, one.allocations, one.complete) == (command.spec, command.allocations, True)
    await cell.close()

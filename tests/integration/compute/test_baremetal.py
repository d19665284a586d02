"""The bare-metal driver against the Ironic stand-in, over real HTTP, in a whole service."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence

import httpx
import pytest
import pytest_asyncio

from berth.ironic_stand_in import Behaviour, Farm, IronicStandIn, Silent
from bus.clock import SystemClock
from bus.contracts.cell import ComputeOutcome, InstanceSpec
from compute_sim.config import ComputeConfig, IronicConfig
from compute_sim.driver import Build, DriverUnavailable, Machine, Reschedule
from compute_sim.drivers.baremetal import BareMetal
from compute_sim.fleet import Fleet
from tests.integration.compute.harness import CELL, PATIENCE_S, Cell

NODES = 6
QUICK = Behaviour(verify_s=0.001, deploy_s=0.02, undeploy_s=0.005, clean_s=0.02)


@pytest_asyncio.fixture
async def ironic() -> AsyncIterator[IronicStandIn]:
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=QUICK)
    await stand_in.start()
    stand_in.farm.plan(NODES)
    yield stand_in
    await stand_in.stop()


@pytest_asyncio.fixture
async def driver(ironic: IronicStandIn) -> AsyncIterator[BareMetal]:
    made = BareMetal(settings(ironic).ironic, clock=SystemClock())
    await made.open()
    yield made
    await made.close()


def settings(ironic: IronicStandIn, **more: int) -> ComputeConfig:
    return ComputeConfig(
        driver="ironic", hosts=0, ironic=IronicConfig(url=ironic.url, poll_s=0.005, watch_s=0.01, **more)
    )


def build(node: str, instance: str, attempt: int = 1) -> Build:
    return Build(node, InstanceSpec(instance_uuid=instance, project_id="p"), attempt, {node: {"CUSTOM_GOLD": 1}})


async def test_a_node_is_deployed_listed_and_given_back(cell: Cell, ironic: IronicStandIn) -> None:
    config = settings(ironic)
    fleet = Fleet.planned(config, CELL, "c1-a")
    life = await cell.compute(config, fleet)
    page = (await cell.until(cell.announced))[0]
    assert sorted(host.uuid for host in page.hosts) == sorted(ironic.farm.nodes) and page.complete
    node, instance = sorted(ironic.farm.nodes)[0], cell.instance()
    await cell.spawn(node, instance)
    assert (await cell.outcome(instance, 1)).outcome is ComputeOutcome.ACTIVE
    assert ironic.farm.nodes[node]["provision_state"] == "active"
    await life.kill()
    life = await cell.compute(config, fleet)  # Ironic does not know attempts: the records do
    page = (await cell.until(lambda: [p for p in cell.announced() if any(h.running for h in p.hosts)]))[0]
    running = {host.uuid: [(r.instance_uuid, r.attempt) for r in host.running or ()] for host in page.hosts}
    assert running[node] == [(instance, 1)]
    assert cell.inventory() == []  # ironic_sync's business
    await cell.destroy(node, instance)
    await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
    assert ironic.farm.nodes[node]["instance_uuid"] is None
    await life.stop()


async def test_a_build_that_is_destroyed_half_way_gives_the_node_back(cell: Cell, ironic: IronicStandIn) -> None:
    life = await cell.compute(settings(ironic), Fleet.planned(settings(ironic), CELL, "c1-a"))
    for node in ironic.farm.nodes:
        instance = cell.instance()
        await cell.spawn(node, instance)
        await cell.destroy(node, instance)
        await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
        assert ironic.farm.nodes[node]["instance_uuid"] is None
    await life.stop()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"maintenance": True}, "node.maintenance"),
        ({"provision_state": "cleaning"}, "node.not_available"),
        ({"instance_uuid": "10000000-0000-4000-8000-000000000000", "provision_state": "active"}, "node.taken"),
        (None, "host.unknown"),
    ],
)
async def test_a_node_is_looked_at_again_before_it_is_taken(
    ironic: IronicStandIn, driver: BareMetal, change: dict[str, object] | None, code: str
) -> None:
    node = next(iter(ironic.farm.nodes))
    if change is None:
        del ironic.farm.nodes[node]
    else:
        ironic.farm.nodes[node].update(change)
    with pytest.raises(Reschedule) as caught:
        await driver.spawn(build(node, "20000000-0000-4000-8000-000000000000"))
    assert caught.value.code == code


async def test_a_failed_deployment_is_for_another_host_and_can_be_cleared(
    ironic: IronicStandIn, driver: BareMetal
) -> None:
    ironic.farm.behaviour = Behaviour(deploy_s=0.001, undeploy_s=0.001, clean_s=0.001, deploy_fails=1.0)
    node, instance = next(iter(ironic.farm.nodes)), "20000000-0000-4000-8000-000000000000"
    with pytest.raises(Reschedule) as caught:
        await driver.spawn(build(node, instance))
    assert caught.value.code == "node.deploy_failed"
    await driver.destroy(node, instance, 1)
    assert ironic.farm.nodes[node]["instance_uuid"] is None
    await driver.destroy(node, instance, 1)  # nothing there: fine


async def test_two_instances_race_for_one_node_and_one_wins(ironic: IronicStandIn, driver: BareMetal) -> None:
    node = next(iter(ironic.farm.nodes))
    first, second = "20000000-0000-4000-8000-000000000000", "30000000-0000-4000-8000-000000000000"
    await driver._take(build(node, first))
    with pytest.raises(Reschedule):
        await driver._take(build(node, second))
    await driver.destroy(node, second, 1)  # the loser's clean-up leaves the winner alone
    assert ironic.farm.nodes[node]["instance_uuid"] == first


async def test_shares_cover_every_node_once(ironic: IronicStandIn) -> None:
    ironic.farm.plan(50)
    seen: list[str] = []
    for share in range(3):
        driver = BareMetal(settings(ironic, share=share, shares=3).ironic, clock=SystemClock())
        await driver.open()
        seen += [host.uuid for host in await driver.hosts()]
        await driver.close()
    assert sorted(seen) == sorted(ironic.farm.nodes)


@pytest.mark.parametrize(
    ("status", "body"), [(503, "{}"), (401, "{}"), (200, "not json"), (200, '{"uuid": 5}'), (404, "")]
)
async def test_answers_that_say_nothing_are_never_taken_for_destroyed(status: int, body: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=body))
    driver = BareMetal(IronicConfig(), clock=SystemClock(), transport=transport)
    await driver.open()
    node, instance = "10000000-0000-4000-8000-000000000000", "20000000-0000-4000-8000-000000000000"
    if status == 404:
        await driver.destroy(node, instance, 1)
    else:
        with pytest.raises(DriverUnavailable):
            await driver.destroy(node, instance, 1)
    await driver.close()


class Growing(BareMetal):
    """A node appears in Ironic while the service looks what its nodes run."""

    farm: Farm
    grown: str | None = None

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        found = await super().list(hosts)
        if hosts is None and self.grown is None and self.asked_for_a_report:
            self.grown = self.farm.add(provision_state="available", power_state="power off")["uuid"]
        return found

    asked_for_a_report = False


async def test_a_host_that_is_announced_is_one_whose_builds_are_taken(cell: Cell, ironic: IronicStandIn) -> None:
    """A node that appeared between two looks was announced, and its builds refused as host.unknown."""
    config = settings(ironic)
    driver = Growing(config.ironic, clock=SystemClock())
    driver.farm = ironic.farm
    life = await cell.compute(config, Fleet.planned(config, CELL, "c1-a"), driver=driver)
    first = len(await cell.until(cell.announced))
    driver.asked_for_a_report = True
    await cell.ask()
    pages = await cell.until(lambda: cell.announced()[first:])
    assert driver.grown is not None
    for host in {host.uuid for page in pages for host in page.hosts}:
        instance = cell.instance()
        await cell.spawn(host, instance)
        assert (await cell.outcome(instance, 1)).outcome is ComputeOutcome.ACTIVE, host
    await life.stop()


async def test_a_node_that_is_new_in_ironic_is_announced_at_once(cell: Cell, ironic: IronicStandIn) -> None:
    config = settings(ironic)
    await cell.compute(config, Fleet.planned(config, CELL, "c1-a"))
    await cell.until(cell.announced)
    new = ironic.farm.add(provision_state="available", resource_class="baremetal-gold")["uuid"]

    def said() -> list[bool]:
        return [host.enabled for page in cell.announced() for host in page.hosts if host.uuid == new]

    assert await cell.until(said) == [True]
    ironic.farm.nodes[new]["maintenance"] = True
    await cell.until(lambda: said() == [True, False])


async def test_a_new_node_is_told_whoever_else_has_seen_it(ironic: IronicStandIn, driver: BareMetal) -> None:
    """An announcement of one host alone asks for all nodes, too; what was new then waited for the next of all hosts."""
    told: list[str] = []
    driver.on_change(told.extend)
    await driver.hosts()  # the announcement of all hosts, which a start begins with
    new = ironic.farm.add(provision_state="available")["uuid"]
    await driver.hosts()
    watching = asyncio.create_task(driver.watch())
    async with asyncio.timeout(PATIENCE_S):
        while not told:  # noqa: ASYNC110  (Ironic is asked over HTTP)
            await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert told == [new]

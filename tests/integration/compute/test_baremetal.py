"""The bare-metal driver against the Ironic stand-in, over real HTTP, in a whole service."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import httpx
import pytest
import pytest_asyncio
from msgspec.structs import replace

from berth.trial.ironic_stand_in import Behaviour, IronicStandIn, NodePool, Silent
from bus.clock import SystemClock
from bus.contracts.cell import ComputeHosts, ComputeOutcome, InstanceSpec
from compute_sim.config import ComputeConfig, IronicConfig
from compute_sim.driver import Build, DriverHost, DriverUnavailable, Machine, NotOurs, Reschedule
from compute_sim.drivers.ironic import driver as driver_module
from compute_sim.drivers.ironic.driver import BareMetal
from compute_sim.fleet import Fleet
from tests.integration.compute.harness import CELL, DEPLOYMENT, PATIENCE_S, Cell

NODES = 6
QUICK = Behaviour(verify_s=0.001, deploy_s=0.02, undeploy_s=0.005, clean_s=0.02)


@pytest_asyncio.fixture
async def ironic() -> AsyncIterator[IronicStandIn]:
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=QUICK)
    await stand_in.start()
    stand_in.pool.plan(NODES)
    yield stand_in
    await stand_in.stop()


@pytest_asyncio.fixture
async def driver(ironic: IronicStandIn) -> AsyncIterator[BareMetal]:
    made = bare_metal(settings(ironic).ironic)
    await made.open()
    yield made
    await made.close()


def settings(ironic: IronicStandIn, **more: Any) -> ComputeConfig:
    return ComputeConfig(
        driver="ironic",
        hosts=0,
        ironic=IronicConfig(url=ironic.url, poll_interval_s=0.005, watch_interval_s=0.01, **more),
    )


def build(node: str, instance: str, attempt: int = 1) -> Build:
    allocations = {node: {"CUSTOM_GOLD": 1}}
    return Build(node, InstanceSpec(instance_uuid=instance, project_id="p"), attempt, allocations, DEPLOYMENT)


def bare_metal(
    config: IronicConfig, transport: httpx.AsyncBaseTransport | None = None, service: str = "c1-a"
) -> BareMetal:
    return BareMetal(config, cell=CELL, service=service, clock=SystemClock(), transport=transport)


async def test_a_node_is_deployed_listed_and_given_back(cell: Cell, ironic: IronicStandIn) -> None:
    config = settings(ironic)
    fleet = Fleet.planned(config, CELL, "c1-a")
    life = await cell.compute(config, fleet)
    page = (await cell.until(cell.announced))[0]
    assert sorted(host.uuid for host in page.hosts) == sorted(ironic.pool.nodes) and page.complete
    node, instance = sorted(ironic.pool.nodes)[0], cell.instance()
    await cell.spawn(node, instance)
    assert (await cell.outcome(instance, 1)).outcome is ComputeOutcome.ACTIVE
    assert ironic.pool.nodes[node]["provision_state"] == "active"
    await life.kill()
    life = await cell.compute(config, fleet)  # Ironic does not know attempts: the records do
    page = (await cell.until(lambda: [p for p in cell.announced() if any(h.running for h in p.hosts)]))[0]
    running = {host.uuid: [(r.instance_uuid, r.attempt) for r in host.running or ()] for host in page.hosts}
    assert running[node] == [(instance, 1)]
    assert cell.inventory() == []  # ironic_sync's business
    await cell.destroy(node, instance)
    await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
    assert ironic.pool.nodes[node]["instance_uuid"] is None
    await life.stop()


async def test_a_build_that_is_destroyed_half_way_gives_the_node_back(cell: Cell, ironic: IronicStandIn) -> None:
    life = await cell.compute(settings(ironic), Fleet.planned(settings(ironic), CELL, "c1-a"))
    for node in ironic.pool.nodes:
        instance = cell.instance()
        await cell.spawn(node, instance)
        await cell.destroy(node, instance)
        await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
        assert ironic.pool.nodes[node]["instance_uuid"] is None
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
    node = next(iter(ironic.pool.nodes))
    if change is None:
        del ironic.pool.nodes[node]
    else:
        ironic.pool.nodes[node].update(change)
    with pytest.raises(Reschedule) as caught:
        await driver.spawn(build(node, "20000000-0000-4000-8000-000000000000"))
    assert caught.value.code == code


async def test_a_failed_deployment_is_for_another_host_and_can_be_cleared(
    ironic: IronicStandIn, driver: BareMetal
) -> None:
    ironic.pool.behaviour = Behaviour(deploy_s=0.001, undeploy_s=0.001, clean_s=0.001, deploy_fails=1.0)
    node, instance = next(iter(ironic.pool.nodes)), "20000000-0000-4000-8000-000000000000"
    with pytest.raises(Reschedule) as caught:
        await driver.spawn(build(node, instance))
    assert caught.value.code == "node.deploy_failed"
    await driver.destroy(node, instance, 1, DEPLOYMENT)
    assert ironic.pool.nodes[node]["instance_uuid"] is None
    await driver.destroy(node, instance, 1, DEPLOYMENT)  # nothing there: fine


async def half_undeployed(ironic: IronicStandIn, node: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while ironic.pool.nodes[node]["provision_state"] != "error":  # noqa: ASYNC110  (the stand-in takes its time)
            await asyncio.sleep(0.001)


async def test_a_node_whose_undeploying_failed_is_undeployed_again(ironic: IronicStandIn, driver: BareMetal) -> None:
    """Ironic drops instance and mark then. The delete ended, and the machine ran on in a node that none undeployed."""
    node, instance = next(iter(ironic.pool.nodes)), "20000000-0000-4000-8000-000000000000"
    await driver.spawn(build(node, instance))
    ironic.pool.behaviour = replace(QUICK, undeploy_fails=True)
    async with asyncio.timeout(PATIENCE_S):
        destroying = asyncio.create_task(driver.destroy(node, instance, 1, DEPLOYMENT))
        await half_undeployed(ironic, node)
        assert [(one.instance_uuid, one.attempt) for one in (await driver.list())[node]] == [(instance, 1)]
        orders = len(ironic.requested)
        while len(ironic.requested) == orders:
            assert not destroying.done()
            await asyncio.sleep(0.001)
        ironic.pool.behaviour = QUICK
        await destroying
    assert ironic.pool.nodes[node]["provision_state"] in {"cleaning", "available"}


async def test_a_node_that_is_never_undeployed_is_named(ironic: IronicStandIn) -> None:
    driver = bare_metal(settings(ironic, clean_timeout_s=0.2).ironic)
    await driver.open()
    node, instance = next(iter(ironic.pool.nodes)), "20000000-0000-4000-8000-000000000000"
    await driver.spawn(build(node, instance))
    ironic.pool.behaviour = replace(QUICK, undeploy_fails=True)
    with pytest.raises(DriverUnavailable):
        await driver.destroy(node, instance, 1, DEPLOYMENT)
    await half_undeployed(ironic, node)
    with pytest.raises(DriverUnavailable, match=r"is not undeployed and is in (error|deleting): "):
        await driver.destroy(node, instance, 1, DEPLOYMENT)  # as the agent repeats it
    await driver.close()
    await half_undeployed(ironic, node)
    orders = len(ironic.requested)
    restarted = bare_metal(settings(ironic).ironic)
    await restarted.open()
    await restarted.destroy(node, instance, 1, DEPLOYMENT)
    assert len(ironic.requested) == orders, "nothing proves any more that it was ours: it is left to its operator"
    await restarted.close()


async def test_two_instances_race_for_one_node_and_one_wins(ironic: IronicStandIn, driver: BareMetal) -> None:
    node = next(iter(ironic.pool.nodes))
    first, second = "20000000-0000-4000-8000-000000000000", "30000000-0000-4000-8000-000000000000"
    ended = await asyncio.gather(
        driver.spawn(build(node, first)), driver.spawn(build(node, second)), return_exceptions=True
    )
    lost = [one for one in ended if isinstance(one, BaseException)]
    assert len(lost) == 1 and isinstance(lost[0], Reschedule) and lost[0].code == "node.taken"
    winner, loser = (first, second) if ended[1] is lost[0] else (second, first)
    await driver.destroy(node, loser, 1, DEPLOYMENT)  # the loser's clean-up leaves the winner alone
    assert ironic.pool.nodes[node]["instance_uuid"] == winner


async def test_shares_cover_every_node_once(ironic: IronicStandIn) -> None:
    ironic.pool.plan(50)
    seen: list[str] = []
    for share in range(3):
        driver = bare_metal(settings(ironic, share=share, shares=3).ironic)
        await driver.open()
        seen += [host.uuid for host in await driver.hosts()]
        await driver.close()
    assert sorted(seen) == sorted(ironic.pool.nodes)


@pytest.mark.parametrize(
    ("status", "body"), [(503, "{}"), (401, "{}"), (200, "not json"), (200, '{"uuid": 5}'), (404, "")]
)
async def test_empty_answers_are_never_taken_for_destroyed(status: int, body: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=body))
    driver = bare_metal(IronicConfig(), transport=transport)
    await driver.open()
    node, instance = "10000000-0000-4000-8000-000000000000", "20000000-0000-4000-8000-000000000000"
    if status == 404:
        await driver.destroy(node, instance, 1, DEPLOYMENT)
    else:
        with pytest.raises(DriverUnavailable):
            await driver.destroy(node, instance, 1, DEPLOYMENT)
    await driver.close()


class Growing(BareMetal):
    """A node appears in Ironic while the service looks what its nodes run."""

    pool: NodePool
    grown: str | None = None

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        found = await super().list(hosts)
        if hosts is None and self.grown is None and self.report_requested:
            self.grown = self.pool.add(provision_state="available", power_state="power off")["uuid"]
        return found

    report_requested = False


async def test_a_host_that_is_announced_is_one_whose_builds_are_taken(cell: Cell, ironic: IronicStandIn) -> None:
    """A node that appeared between two looks was announced, and its builds refused as host.unknown."""
    config = settings(ironic)
    driver = Growing(config.ironic, cell=CELL, service="c1-a", clock=SystemClock())
    driver.pool = ironic.pool
    life = await cell.compute(config, Fleet.planned(config, CELL, "c1-a"), driver=driver)
    first = len(await cell.until(cell.announced))
    driver.report_requested = True
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
    new = ironic.pool.add(provision_state="available", resource_class="baremetal-gold")["uuid"]

    def offered() -> list[bool]:
        return [host.enabled for page in cell.announced() for host in page.hosts if host.uuid == new]

    assert await cell.until(offered) == [True]
    ironic.pool.nodes[new]["maintenance"] = True
    await cell.until(lambda: offered() == [True, False])


async def test_a_new_node_is_announced_whichever_service_has_seen_it(
    ironic: IronicStandIn, driver: BareMetal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An announcement of one host alone reads all nodes, too; what was new then waited for the next of all hosts."""
    monkeypatch.setattr(driver_module, "LOOK_SHARE", 0)  # a look that takes long delays the next one by no minute
    assigned: list[str] = []
    driver.on_change(assigned.extend)
    await driver.hosts()  # the announcement of all hosts, which a start begins with
    new = ironic.pool.add(provision_state="available")["uuid"]
    await driver.hosts()
    watching = asyncio.create_task(driver.watch())
    async with asyncio.timeout(PATIENCE_S):
        while not assigned:  # noqa: ASYNC110  (Ironic is asked over HTTP)
            await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert assigned == [new]


# --- what is not ours

NOVAS = "70000000-0000-4000-8000-000000000000"
ANOTHER = "dddddddd-0000-4000-8000-000000000002"


def occupy(ironic: IronicStandIn, instance: str = NOVAS, state: str = "active", info: object = None) -> str:
    """A node that carries an instance that this deployment did not put there."""
    node = next(iter(ironic.pool.nodes))
    ironic.pool.nodes[node].update(
        instance_uuid=instance, provision_state=state, instance_info={"image_source": "x"} if info is None else info
    )
    return node


def mark(instance: str = NOVAS, **changed: object) -> dict[str, object]:
    made = {"deployment": DEPLOYMENT, "cell": CELL, "service": "c1-a", "instance": instance, "attempt": 1}
    return {"berth": {**made, **changed}}


async def test_a_nodes_mark_is_written_with_its_instance_and_goes_with_it(
    ironic: IronicStandIn, driver: BareMetal
) -> None:
    node, instance = next(iter(ironic.pool.nodes)), "20000000-0000-4000-8000-000000000000"
    await driver.spawn(build(node, instance, attempt=3))
    assert ironic.pool.nodes[node]["instance_info"] == {**mark(instance, attempt=3), "project_id": "p"}
    assert [method for method, _ in ironic.requested] == ["PATCH", "PUT"], "one PATCH carries both"
    assert (await driver.list())[node] == (Machine(node, instance, 3, DEPLOYMENT, True),)
    await driver.destroy(node, instance, 3, DEPLOYMENT)
    assert ironic.pool.nodes[node]["instance_info"] == {}


async def test_a_cleared_instance_uuid_does_not_prove_the_machine_gone_and_nothing_is_done_to_it(
    ironic: IronicStandIn, driver: BareMetal
) -> None:
    """It was reported lost; set again by its operator the machine was then destroyed as one that is over."""
    node, instance = next(iter(ironic.pool.nodes)), "20000000-0000-4000-8000-000000000000"
    await driver.spawn(build(node, instance, attempt=3))
    ironic.pool.nodes[node]["instance_uuid"] = None
    ironic.requested.clear()
    assert (await driver.list())[node] == (Machine(node, instance, 3, DEPLOYMENT, True, left=True),)
    with pytest.raises(Reschedule):
        await driver.spawn(build(node, NOVAS))
    await driver.destroy(node, instance, 3, DEPLOYMENT)  # a client's delete: the node is its operator's now
    assert not ironic.requested and ironic.pool.nodes[node]["provision_state"] == "active"
    ironic.pool.nodes[node]["instance_uuid"] = NOVAS
    assert (await driver.list())[node] == (Machine(node, NOVAS, None, None, True),), "another's: now it is lost"
    ironic.pool.nodes[node].update(instance_uuid=None, provision_state="available")
    assert (await driver.list())[node] == (), "nothing is deployed there: now it is lost"


@pytest.mark.parametrize(
    "info",
    [
        {"image_source": "x"},
        mark(deployment=ANOTHER),
        mark("20000000-0000-4000-8000-000000000000"),
        {"berth": "no mark"},
        {"berth": {"deployment": 5}},
    ],
)
async def test_a_foreign_nodes_uuid_neither_builds_nor_destroys_it(
    ironic: IronicStandIn, driver: BareMetal, info: object
) -> None:
    """A client's build request may name the uuid of another's instance: its delete undeployed that node."""
    node = occupy(ironic, info=info)
    before = dict(ironic.pool.nodes[node])
    with pytest.raises(Reschedule) as caught:
        await driver.spawn(build(node, NOVAS))
    assert caught.value.code == "node.taken"
    with pytest.raises(NotOurs):
        await driver.destroy(node, NOVAS, 9, DEPLOYMENT)
    assert ironic.pool.nodes[node] == before and not ironic.requested


async def test_a_refused_destroy_is_reported_and_an_operators_undeployment_ends_it(
    cell: Cell, ironic: IronicStandIn
) -> None:
    life = await cell.compute(settings(ironic), Fleet.planned(settings(ironic), CELL, "c1-a"))
    node = occupy(ironic)
    await cell.spawn(node, NOVAS)
    assert (await cell.ended(NOVAS, 1, ComputeOutcome.FAILED)).code == "node.taken"
    await cell.destroy(node, NOVAS)
    refused = (await cell.until(lambda: [r for r in cell.results(NOVAS) if r.code == "destroy.not_ours"]))[0]
    assert "nothing was changed" in refused.reason and not ironic.requested
    ironic.pool.nodes[node].update(instance_uuid=None, instance_info={}, provision_state="available")
    await cell.destroy(node, NOVAS)
    await cell.ended(NOVAS, 1, ComputeOutcome.DESTROYED)
    await life.stop()


@pytest.mark.parametrize(
    "state", ["rescue", "rescuing", "servicing", "deploying", "error", "cleaning", "deploy failed"]
)
async def test_a_node_with_an_instance_is_listed_whatever_its_state(
    ironic: IronicStandIn, driver: BareMetal, state: str
) -> None:
    node = occupy(ironic, state=state, info=mark())
    (machine,) = (await driver.list())[node]
    assert (machine.instance_uuid, machine.attempt, machine.deployment) == (NOVAS, 1, DEPLOYMENT)
    assert machine.built is (state in ("rescue", "rescuing", "servicing"))


async def test_every_node_that_was_seen_is_listed_and_no_other(ironic: IronicStandIn, driver: BareMetal) -> None:
    listed = await driver.list()
    assert listed == dict.fromkeys(ironic.pool.nodes, ())
    one = next(iter(ironic.pool.nodes))
    del ironic.pool.nodes[one]
    assert one not in await driver.list([one])


async def test_a_node_that_is_absent_from_ironics_list_is_not_lost(cell: Cell, ironic: IronicStandIn) -> None:
    """Mere absence proves nothing: only a node that is there and carries another's or no instance does."""
    fleet = Fleet.planned(settings(ironic), CELL, "c1-a")
    life = await cell.compute(settings(ironic), fleet)
    node, instance = next(iter(ironic.pool.nodes)), cell.instance()
    await cell.spawn(node, instance)
    await cell.ended(instance, 1, ComputeOutcome.ACTIVE)
    hidden = ironic.pool.nodes.pop(node)
    first = len(cell.announced())
    await cell.ask()
    # One that was on its way may still have it.
    await cell.until(lambda: [page for page in cell.announced()[first:] if node not in {h.uuid for h in page.hosts}])
    assert list(fleet.records.running()) == [(node, instance)]
    ironic.pool.nodes[node] = hidden
    first = len(cell.announced())
    await cell.ask()
    page = (await cell.until(lambda: [p for p in cell.announced()[first:] if node in {h.uuid for h in p.hosts}]))[0]
    (host,) = (host for host in page.hosts if host.uuid == node)
    assert [(r.instance_uuid, r.attempt, r.deployment) for r in host.running or ()] == [(instance, 1, DEPLOYMENT)]
    await life.stop()


async def test_a_restart_adopts_nothing_that_it_did_not_build(cell: Cell, ironic: IronicStandIn) -> None:
    node = occupy(ironic)
    config = settings(ironic)
    fleet = Fleet.planned(config, CELL, "c1-a")
    life = await cell.compute(config, fleet)
    page = (await cell.until(cell.announced))[0]
    (host,) = (host for host in page.hosts if host.uuid == node)
    assert [(r.instance_uuid, r.attempt, r.deployment) for r in host.running or ()] == [(NOVAS, 0, None)]
    assert fleet.records.running() == {} and not ironic.requested
    await life.stop()


def offering(cell: Cell) -> dict[str, str]:
    """Which service offers each node, as the last announcements have it."""
    found: dict[str, str] = {}
    for page in cell.announced():
        if page.complete:
            found = {node: service for node, service in found.items() if service != page.service}
        found.update((host.uuid, page.service) for host in page.hosts)
    return found


async def test_services_share_the_free_nodes_and_take_over_those_of_one_that_dies(
    cell: Cell, ironic: IronicStandIn
) -> None:
    """A number in a file assigned the nodes, and a dead service's free nodes served no more."""
    ironic.pool.plan(30)
    config = settings(ironic)
    nodes = set(ironic.pool.nodes)
    lives = {
        name: await cell.compute(config, Fleet.planned(config, CELL, name), service=name) for name in ("a", "b", "c")
    }

    def of(*services: str) -> bool:
        found = offering(cell)
        return set(found) == nodes and set(found.values()) == set(services)

    await cell.until(lambda: of("a", "b", "c"))
    before = offering(cell)
    occupied, instance = next(node for node, service in before.items() if service == "b"), cell.instance()
    await cell.spawn(occupied, instance, service="b")
    await cell.ended(instance, 1, ComputeOutcome.ACTIVE)
    await lives.pop("a").kill()
    await cell.lose("a")
    await cell.until(lambda: of("b", "c"))
    after = offering(cell)
    assert {node: after[node] for node in nodes if before[node] != "a"} == {
        node: before[node] for node in nodes if before[node] != "a"
    }, "only the dead one's have moved"
    await lives.pop("b").stop()  # it announces its stop, and is gone at once

    def all_but_the_occupied() -> bool:
        return {node for node, service in offering(cell).items() if service == "c"} == nodes - {occupied}

    await cell.until(all_but_the_occupied)
    await lives.pop("c").stop()


async def test_a_build_for_a_node_that_has_just_changed_hands_is_taken(cell: Cell, ironic: IronicStandIn) -> None:
    ironic.pool.plan(30)
    config = settings(ironic)
    first = await cell.compute(config, Fleet.planned(config, CELL, "a"), service="a")
    await cell.until(lambda: set(offering(cell)) == set(ironic.pool.nodes))
    second = await cell.compute(config, Fleet.planned(config, CELL, "b"), service="b")
    await cell.until(lambda: set(offering(cell).values()) == {"a", "b"})
    moved, instance = next(node for node, service in offering(cell).items() if service == "b"), cell.instance()
    await cell.spawn(moved, instance, service="a")  # decided before it moved
    await cell.ended(instance, 1, ComputeOutcome.ACTIVE)
    await cell.until(lambda: offering(cell)[moved] == "a")
    assert ironic.pool.nodes[moved]["instance_info"]["berth"]["service"] == "a", "and it stays there"
    await first.stop()
    await second.stop()


async def test_a_node_whose_machine_is_gone_is_reported_by_its_service_until_the_cell_has_ended_it(
    cell: Cell, ironic: IronicStandIn
) -> None:
    """Undeployed by its operator it was free, and the ring's: only a service with another clock knew what was there."""
    ironic.pool.plan(30)
    config = settings(ironic)
    first = await cell.compute(config, Fleet.planned(config, CELL, "a"), service="a")
    await cell.until(lambda: set(offering(cell)) == set(ironic.pool.nodes))
    second = await cell.compute(config, Fleet.planned(config, CELL, "b"), service="b")
    await cell.until(lambda: set(offering(cell).values()) == {"a", "b"})
    node, instance = next(node for node, service in offering(cell).items() if service == "b"), cell.instance()
    await cell.spawn(node, instance, service="a")
    await cell.ended(instance, 1, ComputeOutcome.ACTIVE)
    ironic.pool.nodes[node].update(instance_uuid=None, instance_info={}, provision_state="available")  # by its operator
    for _ in range(2):  # not only the look that notes it as lost
        earlier = len(cell.announced())
        await cell.ask()
        page = (await cell.until(partial(whole_of, cell, "a", earlier)))[0]
        assert [host.running for host in page.hosts if host.uuid == node] == [()]
    await cell.destroy(node, instance, service="a")  # what the cell does with what is lost
    await cell.ended(instance, 1, ComputeOutcome.DESTROYED)
    earlier = len(cell.announced())
    await cell.ask()
    page = (await cell.until(partial(whole_of, cell, "a", earlier)))[0]
    assert node not in {host.uuid for host in page.hosts}, "free, and the ring's"
    await cell.until(lambda: offering(cell)[node] == "b")
    await first.stop()
    await second.stop()


def whole_of(cell: Cell, service: str, earlier: int) -> list[ComputeHosts]:
    """Whole announcements of this service, of those after the first `earlier`."""
    return [page for page in cell.announced()[earlier:] if page.service == service and page.complete]


async def test_a_service_offers_nodes_of_its_group_and_shards_and_names_their_project(
    ironic: IronicStandIn,
) -> None:
    plain, grouped, sharded, leased, owned, retired = sorted(ironic.pool.nodes)
    ironic.pool.nodes[grouped].update(conductor_group="rack1", shard="s2")
    ironic.pool.nodes[sharded].update(shard="s1")
    ironic.pool.nodes[leased].update(owner="hotel", lessee="guest")
    ironic.pool.nodes[owned].update(owner="hotel")
    ironic.pool.nodes[retired].update(retired=True, retired_reason="the fan")

    async def hosts(**more: Any) -> dict[str, DriverHost]:
        driver = bare_metal(settings(ironic, **more).ironic)
        await driver.open()
        found = {host.uuid: host for host in await driver.hosts()}
        await driver.close()
        return found

    everything = await hosts()
    assert set(everything) == set(ironic.pool.nodes)
    assert {uuid: host.attributes.get("project_id") for uuid, host in everything.items()} == {
        **dict.fromkeys(everything),
        leased: "guest",
        owned: "hotel",
    }
    assert [(host.uuid, host.disabled_reason) for host in everything.values() if not host.enabled] == [
        (retired, "retired: the fan")
    ]
    assert set(await hosts(conductor_group="RACK1")) == {grouped}
    assert set(await hosts(conductor_group="")) == set(ironic.pool.nodes) - {grouped}
    assert set(await hosts(shards=("s1", "s2"), microversion="1.82")) == {grouped, sharded}
    assert set(await hosts(shards=("s1",), conductor_group="rack1", microversion="1.82")) == set()
    with pytest.raises(ValueError, match=r"shards need microversion 1\.82"):
        settings(ironic, shards=("s1",))
    info = mark(service="c1-a")
    ironic.pool.nodes[plain].update(instance_uuid=NOVAS, instance_info=info, provision_state="active")
    assert set(await hosts(conductor_group="rack1")) == {grouped, plain}, "what it has built on it keeps"


async def test_a_new_lessee_is_announced_at_once(cell: Cell, ironic: IronicStandIn) -> None:
    """Not with the next announcement of all hosts, which does not come in this test."""
    config = replace(settings(ironic), report_interval_s=86_400.0)
    life = await cell.compute(config, Fleet.planned(config, CELL, "c1-a"))
    node = next(iter(ironic.pool.nodes))
    await cell.until(lambda: node in offering(cell))

    def project() -> str | None:
        offered = [host for page in cell.announced() for host in page.hosts if host.uuid == node]
        return offered[-1].attributes.get("project_id")

    for lessee in ("guest", "another"):  # the first may be announced by the first scan, which announces all nodes
        assert project() != lessee
        ironic.pool.nodes[node]["lessee"] = lessee
        await cell.until(lambda lessee=lessee: project() == lessee)  # type: ignore[misc]
    await life.stop()


async def test_nodes_with_an_instance_stay_with_the_service_that_built_them(ironic: IronicStandIn) -> None:
    """A third service took over two thirds of the nodes, machines and all, and its cell knew none of them."""
    ironic.pool.plan(10)

    async def assigned(shares: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for share in range(shares):
            driver = bare_metal(settings(ironic, share=share, shares=shares).ironic, service=f"c{share}-a")
            await driver.open()
            for host in await driver.hosts():
                assert found.setdefault(host.uuid, f"c{share}-a") == f"c{share}-a"
                assert set(await driver.list([host.uuid])) == {host.uuid}
            await driver.close()
        return found

    before = await assigned(2)
    assert sorted(before) == sorted(ironic.pool.nodes) and len(before) == 16
    for number, node in enumerate(sorted(before)[:10]):
        instance = f"20000000-0000-4000-8000-{number:012d}"
        occupy_at = {"instance_uuid": instance, "provision_state": "active"}
        ironic.pool.nodes[node].update(occupy_at, instance_info=mark(instance, service=before[node]))
    after = await assigned(3)
    assert sorted(after) == sorted(before)
    assert {node: after[node] for node in sorted(before)[:10]} == {node: before[node] for node in sorted(before)[:10]}
    assert "c2-a" in after.values(), "the free ones are dealt out anew"


async def test_a_service_takes_over_the_nodes_of_one_that_runs_no_more_by_its_settings(ironic: IronicStandIn) -> None:
    node = occupy(ironic, info=mark(service="c1-gone"))
    for takes_over, seen in (((), False), (("c1-gone",), True)):
        driver = bare_metal(settings(ironic, takes_over=takes_over).ironic)
        await driver.open()
        assert (node in {host.uuid for host in await driver.hosts()}) is seen
        await driver.close()

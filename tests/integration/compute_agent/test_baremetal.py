"""The bare-metal driver: builds on nodes, what is not berth's, and which service offers a node."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from bus.contracts.cell import ComputeOutcome, HostStates
from compute_agent.driver import DriverHost, DriverUnavailable, Machine, NotOwned, Reschedule
from tests.integration.compute_agent.harness import (
    DATABASE_ID,
    FAILING,
    INSTANCE,
    QUICK,
    Cell,
    Driver,
    Metal,
    build,
    fault,
    owner_tag,
    running,
)
from tests.kit.waiting import until

OTHER = "70000000-0000-4000-8000-000000000000"
ANOTHER = "dddddddd-0000-4000-8000-000000000002"


def occupy(metal: Metal, instance: str = OTHER, state: str = "active", info: object = None) -> str:
    """A node that carries an instance that this deployment did not put there."""
    info = {"image_source": "x"} if info is None else info
    metal.node.update(instance_uuid=instance, provision_state=state, instance_info=info)
    return metal.first


# --- builds


async def test_a_node_is_deployed_listed_and_given_back(cell: Cell, metal: Metal) -> None:
    life, node = await metal.serve(cell), metal.first
    page = (await until(cell.announced))[0]
    assert sorted(host.uuid for host in page.hosts) == sorted(metal.nodes) and page.complete
    instance = await cell.built(node)
    assert metal.node["provision_state"] == "active"
    await life.kill()
    await metal.serve(cell)  # Ironic does not know attempts: the records do
    pages = await until(lambda: [page for page in cell.announced() if any(host.running for host in page.hosts)])
    assert running(pages[:1])[node] == [(instance, 1)]
    assert cell.inventory() == []  # ironic_sync's business
    await cell.destroyed(node, instance)
    assert metal.node["instance_uuid"] is None


async def test_a_build_that_is_destroyed_half_way_gives_the_node_back(cell: Cell, metal: Metal) -> None:
    await metal.serve(cell)
    for node in metal.nodes:
        instance = cell.instance()
        await cell.spawn(node, instance)
        await cell.destroyed(node, instance)
        assert metal.nodes[node]["instance_uuid"] is None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"maintenance": True}, "node.maintenance"),
        ({"provision_state": "cleaning"}, "node.not_available"),
        ({"instance_uuid": OTHER, "provision_state": "active"}, "node.taken"),
        ({"retired": True}, "node.retired"),
        (None, "host.unknown"),
    ],
)
async def test_a_node_is_looked_at_again_before_it_is_taken(
    metal: Metal, driver: Driver, change: dict[str, object] | None, code: str
) -> None:
    node = metal.first
    if change is None:
        del metal.nodes[node]
    else:
        metal.node.update(change)
    assert await fault(driver.spawn(build(node))) == (Reschedule, code)
    assert not metal.requested


async def test_a_failed_deployment_is_for_another_host_and_can_be_cleared(metal: Metal, driver: Driver) -> None:
    metal.pool.behaviour = FAILING
    assert await fault(driver.spawn(build(metal.first))) == (Reschedule, "node.deploy_failed")
    for _ in range(2):  # the second time nothing is there: fine
        await driver.destroy(metal.first)
        assert metal.node["instance_uuid"] is None


async def test_a_node_whose_undeploying_failed_is_undeployed_again(metal: Metal, driver: Driver) -> None:
    """Ironic drops instance and tag then. The delete ended, and the machine ran on in a node that none undeployed."""
    await driver.spawn(build(metal.first))
    metal.pool.behaviour = replace(QUICK, undeploy_fails=True)
    destroying = asyncio.create_task(driver.destroy(metal.first))
    await metal.in_state("error")
    assert [(one.instance_uuid, one.attempt) for one in (await driver.list())[metal.first]] == [(INSTANCE, 1)]
    commands = len(metal.requested)
    await until(lambda: len(metal.requested) > commands)
    assert not destroying.done()
    metal.pool.behaviour = QUICK
    await destroying
    assert metal.node["provision_state"] in {"cleaning", "available"}


async def test_a_node_that_is_never_undeployed_is_named(metal: Metal) -> None:
    driver = await metal.deployed(build(metal.first), clean_timeout_s=0.05)
    metal.pool.behaviour = replace(QUICK, undeploy_fails=True)

    async def is_in_error() -> bool:
        """A busy machine may be out of time before it has requested anything of Ironic: then it is repeated."""
        assert (await fault(driver.destroy(metal.first)))[0] is DriverUnavailable
        return bool(metal.nodes[metal.first]["provision_state"] == "error")

    await until(is_in_error)
    with pytest.raises(DriverUnavailable, match=r"is not undeployed and is in (error|deleting): "):
        await driver.destroy(metal.first)  # as the agent repeats it
    await metal.in_state("error")
    commands = len(metal.requested)
    without_records = await metal.driver(clean_timeout_s=0.05)
    assert (await fault(without_records.destroy(metal.first)))[0] is DriverUnavailable
    assert len(metal.requested) == commands, "nothing proves any more that it was ours: it is left to its operator"


async def test_two_instances_race_for_one_node_and_one_wins(metal: Metal, driver: Driver) -> None:
    node, two = metal.first, (INSTANCE, OTHER)
    ended = await asyncio.gather(*(driver.spawn(build(node, one)) for one in two), return_exceptions=True)
    ((loser, lost),) = [(one, end) for one, end in zip(two, ended, strict=True) if isinstance(end, BaseException)]
    assert isinstance(lost, Reschedule) and lost.code == "node.taken"
    await driver.destroy(node, loser)  # the loser's clean-up leaves the winner alone
    assert metal.node["instance_uuid"] == ({*two} - {loser}).pop()


@pytest.mark.parametrize(
    ("status", "body"), [(503, "{}"), (401, "{}"), (200, "not json"), (200, '{"uuid": 5}'), (404, ""), (404, "{}")]
)
async def test_empty_answers_are_never_taken_for_destroyed(metal: Metal, status: int, body: str) -> None:
    driver = await metal.driver(way=httpx.MockTransport(lambda _: httpx.Response(status, text=body)))
    with pytest.raises(DriverUnavailable):
        await driver.destroy(OTHER)
    await (await metal.driver()).destroy(OTHER)  # Ironic's own 404, and it shows the other nodes


# --- what is announced


class Growing(Driver):
    """A node appears in Ironic while the service looks what its nodes run."""

    metal: Metal
    grown: str | None = None
    report_requested = False

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        found = await super().list(hosts)
        if hosts is None and self.grown is None and self.report_requested:
            self.grown = self.metal.pool.add(provision_state="available", power_state="power off")["uuid"]
        return found


async def test_a_host_that_is_announced_is_one_whose_builds_are_taken(cell: Cell, metal: Metal) -> None:
    """A node that appeared between two looks was announced, and its builds refused as host.unknown."""
    driver = metal.made(Growing)
    driver.metal = metal
    await metal.serve(cell, driver=driver)
    first = len(await until(cell.announced))
    driver.report_requested = True
    await cell.ask()
    pages = await until(lambda: cell.announced()[first:])
    assert driver.grown is not None
    for host in running(pages):
        await cell.built(host)


async def test_a_node_that_is_new_in_ironic_is_announced_at_once(cell: Cell, metal: Metal) -> None:
    await metal.serve(cell)
    await until(cell.announced)
    new = metal.pool.add(provision_state="available", resource_class="baremetal-gold")["uuid"]

    def offered() -> list[bool]:
        return [host.enabled for page in cell.announced() for host in page.hosts if host.uuid == new]

    assert await until(offered) == [True]
    metal.nodes[new]["maintenance"] = True
    await until(lambda: offered() == [True, False])


async def test_a_new_node_is_announced_whichever_service_has_seen_it(
    metal: Metal, driver: Driver, looks_soon: None
) -> None:
    """An announcement of one host alone reads all nodes, too; what was new then waited for the next of all hosts."""
    assigned: list[str] = []
    driver.on_change(assigned.extend)
    await driver.hosts()  # the announcement of all hosts, which a start begins with
    new = metal.pool.add(provision_state="available")["uuid"]
    await driver.hosts()
    async with metal.watching(driver):
        await until(lambda: assigned)
    assert assigned == [new]


async def test_a_new_lessee_is_announced_at_once(cell: Cell, metal: Metal) -> None:
    """Not with the next announcement of all hosts, which does not come in this test."""
    await metal.serve(cell, report_interval_s=86_400.0)

    def projects() -> list[object]:
        hosts = [host for page in cell.announced() for host in page.hosts if host.uuid == metal.first]
        return [host.attributes.get("project_id") for host in hosts]

    await until(projects)
    for lessee in ("guest", "another"):  # the first may be reported by the first scan, which reports all nodes
        assert projects()[-1] != lessee
        metal.node["lessee"] = lessee
        await until(lambda lessee=lessee: projects()[-1] == lessee)  # type: ignore[misc]


# --- what is not berth's


async def test_a_nodes_mark_is_written_with_its_instance_and_goes_with_it(metal: Metal, driver: Driver) -> None:
    await driver.spawn(build(metal.first, attempt=3))
    assert metal.node["instance_info"] == {**owner_tag(attempt=3), "project_id": "acme"}
    assert [method for method, _ in metal.requested] == ["PATCH", "PUT"], "one PATCH carries both"
    assert (await driver.list())[metal.first] == (Machine(metal.first, INSTANCE, 3, DATABASE_ID, True),)
    await driver.destroy(metal.first, attempt=3)
    assert metal.node["instance_info"] == {}


async def test_a_cleared_instance_uuid_does_not_prove_the_machine_gone_and_nothing_is_done_to_it(
    metal: Metal, driver: Driver
) -> None:
    """It was reported lost; set again by its operator the machine was then destroyed as one that is over."""
    node = metal.first
    await driver.spawn(build(node, attempt=3))
    metal.node["instance_uuid"] = None
    metal.requested.clear()
    assert (await driver.list())[node] == (Machine(node, INSTANCE, 3, DATABASE_ID, True, tag_only=True),)
    assert (await fault(driver.spawn(build(node, OTHER))))[0] is Reschedule
    await driver.destroy(node, attempt=3)  # a client's delete: the node is its operator's now
    assert not metal.requested and metal.node["provision_state"] == "active"
    metal.node["instance_uuid"] = OTHER
    assert (await driver.list())[node] == (Machine(node, OTHER, None, None, True),), "another's: now it is lost"
    metal.node.update(instance_uuid=None, provision_state="available")
    assert (await driver.list())[node] == (), "nothing is deployed there: now it is lost"


@pytest.mark.parametrize(
    "info",
    [
        {"image_source": "x"},
        owner_tag(OTHER, database_id=ANOTHER),
        owner_tag(INSTANCE),
        {"berth": "no mark"},
        {"berth": {"database_id": 5}},
    ],
)
async def test_a_foreign_nodes_uuid_neither_builds_nor_destroys_it(metal: Metal, driver: Driver, info: object) -> None:
    """A client's build request may name the uuid of another's instance: its delete undeployed that node."""
    node = occupy(metal, info=info)
    before = dict(metal.node)
    assert await fault(driver.spawn(build(node, OTHER))) == (Reschedule, "node.taken")
    assert (await fault(driver.destroy(node, OTHER, 9)))[0] is NotOwned
    assert metal.node == before and not metal.requested


async def test_a_refused_destroy_is_reported_and_an_operators_undeployment_ends_it(cell: Cell, metal: Metal) -> None:
    await metal.serve(cell)
    node = occupy(metal)
    await cell.spawn(node, OTHER)
    assert (await cell.ended(OTHER, 1, ComputeOutcome.FAILED)).code == "node.taken"
    await cell.destroy(node, OTHER)
    await until(lambda: [result for result in cell.results(OTHER) if result.code == "destroy.not_owned"])
    assert not metal.requested
    metal.node.update(instance_uuid=None, instance_info={}, provision_state="available")
    await cell.destroyed(node, OTHER)


@pytest.mark.parametrize(
    "state", ["rescue", "rescuing", "servicing", "deploying", "error", "cleaning", "deploy failed"]
)
async def test_a_node_with_an_instance_is_listed_whatever_its_state(metal: Metal, driver: Driver, state: str) -> None:
    node = occupy(metal, state=state, info=owner_tag(OTHER))
    built = state in {"rescue", "rescuing", "servicing"}
    (machine,) = (await driver.list())[node]
    assert (machine.instance_uuid, machine.attempt, machine.database_id, machine.built) == (
        OTHER,
        1,
        DATABASE_ID,
        built,
    )


async def test_a_node_that_is_absent_from_ironics_list_is_not_lost(cell: Cell, metal: Metal) -> None:
    """Mere absence proves nothing: only a node that is there and carries another's or no instance does."""
    await metal.serve(cell)
    node = metal.first
    instance = await cell.built(node)
    hidden = metal.nodes.pop(node)
    first = len(cell.announced())
    await cell.ask()
    # One that was on its way may still have it.
    await until(lambda: [page for page in cell.announced()[first:] if node not in running([page])])
    assert list(metal.fleets["c1-a"].records.running()) == [(node, instance)]
    metal.nodes[node] = hidden
    first = len(cell.announced())
    await cell.ask()
    pages = await until(lambda: [page for page in cell.announced()[first:] if node in running([page])])
    (host,) = (host for host in pages[0].hosts if host.uuid == node)
    assert [(one.instance_uuid, one.attempt, one.database_id) for one in host.running] == [(instance, 1, DATABASE_ID)]


async def test_a_restart_adopts_nothing_that_it_did_not_build(cell: Cell, metal: Metal) -> None:
    node = occupy(metal)
    await metal.serve(cell)
    page = (await until(cell.announced))[0]
    (host,) = (host for host in page.hosts if host.uuid == node)
    assert [(one.instance_uuid, one.attempt, one.database_id) for one in host.running] == [(OTHER, 0, None)]
    assert metal.fleets["c1-a"].records.running() == {} and not metal.requested


# --- which service offers a node


def offering(cell: Cell) -> dict[str, str]:
    """Which service offers each node, as the last announcements have it."""
    found: dict[str, str] = {}
    for page in cell.announced():
        if page.complete:
            found = {node: service for node, service in found.items() if service != page.service}
        found.update((host.uuid, page.service) for host in page.hosts)
    return found


async def two_services(cell: Cell, metal: Metal) -> str:
    """Service `a`, joined by `b` later; a node that has moved to it."""
    metal.pool.plan(30)
    await metal.serve(cell, "a")
    await until(lambda: set(offering(cell)) == set(metal.nodes))
    await metal.serve(cell, "b")
    await until(lambda: set(offering(cell).values()) == {"a", "b"})
    return next(node for node, service in offering(cell).items() if service == "b")


async def test_services_share_the_free_nodes_and_take_over_those_of_one_that_dies(cell: Cell, metal: Metal) -> None:
    """A number in a file assigned the nodes, and a dead service's free nodes served no more."""
    metal.pool.plan(30)
    nodes = set(metal.nodes)
    lives = {name: await metal.serve(cell, name) for name in ("a", "b", "c")}

    def of(*services: str) -> bool:
        found = offering(cell)
        return set(found) == nodes and set(found.values()) == set(services)

    await until(lambda: of("a", "b", "c"))
    before = offering(cell)
    occupied = next(node for node, service in before.items() if service == "b")
    await cell.built(occupied, service="b")
    await lives["a"].kill()
    await cell.lose("a")
    await until(lambda: of("b", "c"))
    after = offering(cell)
    assert all(after[node] == service for node, service in before.items() if service != "a"), "only the dead one's"
    await lives["b"].stop()  # it announces its stop, and is gone at once

    def of_c() -> set[str]:
        return {node for node, service in offering(cell).items() if service == "c"}

    await until(lambda: of_c() == nodes - {occupied})


async def test_a_build_for_a_node_that_has_just_changed_hands_is_taken(cell: Cell, metal: Metal) -> None:
    moved = await two_services(cell, metal)
    await cell.built(moved, service="a")  # decided before it moved
    await until(lambda: offering(cell)[moved] == "a")
    assert metal.nodes[moved]["instance_info"]["berth"]["service"] == "a", "and it stays there"


async def test_a_node_whose_machine_is_gone_is_reported_by_its_service_until_the_cell_has_ended_it(
    cell: Cell, metal: Metal
) -> None:
    """Undeployed by its operator it was free, and the ring's: only a service with another clock knew what was there."""
    node = await two_services(cell, metal)
    instance = await cell.built(node, service="a")
    metal.nodes[node].update(instance_uuid=None, instance_info={}, provision_state="available")  # by its operator

    async def reported() -> dict[str, list[tuple[str, int]]]:
        earlier = len(cell.announced())
        await cell.ask()

        def whole() -> list[HostStates]:
            return [page for page in cell.announced()[earlier:] if page.service == "a" and page.complete]

        return running((await until(whole))[:1])

    for _ in range(2):  # not only the look that notes it as lost
        assert (await reported())[node] == []
    await cell.destroyed(node, instance, service="a")  # what the cell does with what is lost
    assert node not in await reported(), "free, and the ring's"
    await until(lambda: offering(cell)[node] == "b")


async def hosts(metal: Metal, service: str = "c1-a", **config: Any) -> dict[str, DriverHost]:
    """By node: what a service of these settings offers."""
    return {host.uuid: host for host in await (await metal.driver(service=service, **config)).hosts()}


async def test_a_service_offers_nodes_of_its_group_and_shards_and_names_their_project(metal: Metal) -> None:
    metal.pool.plan(3)
    plain, grouped, sharded, leased, owned, retired = sorted(metal.nodes)
    metal.nodes[grouped].update(conductor_group="rack1", shard="s2")
    metal.nodes[sharded].update(shard="s1")
    metal.nodes[leased].update(owner="hotel", lessee="guest")
    metal.nodes[owned].update(owner="hotel")
    metal.nodes[retired].update(retired=True, retired_reason="the fan")
    found = await hosts(metal)
    assert set(found) == set(metal.nodes)
    projects = {uuid: host.attributes["project_id"] for uuid, host in found.items() if "project_id" in host.attributes}
    assert projects == {leased: "guest", owned: "hotel"}
    assert {uuid: host.disabled_reason for uuid, host in found.items() if not host.enabled} == {
        retired: "retired: the fan"
    }
    for config, offered in (
        ({"conductor_group": "RACK1"}, {grouped}),
        ({"conductor_group": ""}, {*metal.nodes} - {grouped}),
        ({"shards": ("s1", "s2"), "microversion": "1.82"}, {grouped, sharded}),
        ({"shards": ("s1",), "conductor_group": "rack1", "microversion": "1.82"}, set()),
    ):
        assert set(await hosts(metal, **config)) == offered, config
    with pytest.raises(ValueError, match=r"shards need microversion 1\.82"):
        metal.config(shards=("s1",))
    metal.nodes[plain].update(instance_uuid=OTHER, instance_info=owner_tag(OTHER), provision_state="active")
    assert set(await hosts(metal, conductor_group="rack1")) == {grouped, plain}, "what it has built on it keeps"


async def test_shares_cover_every_node_once_and_built_ones_stay_with_the_service_that_built_them(metal: Metal) -> None:
    """A third service took over two thirds of the nodes, machines and all, and its cell knew none of them."""
    metal.pool.plan(30)

    async def assigned(shares: int) -> dict[str, str]:
        found: dict[str, str] = {}
        for share in range(shares):
            driver = await metal.driver(service=f"c{share}-a", share=share, shares=shares)
            for host in await driver.hosts():
                assert found.setdefault(host.uuid, f"c{share}-a") == f"c{share}-a", "once"
                assert set(await driver.list([host.uuid])) == {host.uuid}
        return found

    before = await assigned(2)
    assert sorted(before) == sorted(metal.nodes)
    built = sorted(before)[:10]
    for number, node in enumerate(built):
        instance = f"20000000-0000-4000-8000-{number:012d}"
        info = owner_tag(instance, service=before[node])
        metal.nodes[node].update(instance_uuid=instance, provision_state="active", instance_info=info)
    after = await assigned(3)
    assert sorted(after) == sorted(before)
    assert [after[node] for node in built] == [before[node] for node in built]
    assert "c2-a" in after.values(), "the free ones are dealt out anew"


async def test_a_service_takes_over_the_nodes_of_one_that_runs_no_more_by_its_settings(metal: Metal) -> None:
    node = occupy(metal, info=owner_tag(OTHER, service="c1-gone"))
    assert node not in await hosts(metal, takes_over=())
    assert node in await hosts(metal, takes_over=("c1-gone",))

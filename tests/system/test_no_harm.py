"""Bare metal that is not ours or not proved to be over is never changed; services share what is free."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

import compute_agent.app
from berth.audit.facts import gather, rest
from berth.audit.invariants import InvariantResult, check_invariants
from berth.bus_client import BuildClient
from berth.config.settings import BusSettings, CellSettings, ComputeSettings, DatabaseSettings, Settings, UpSettings
from berth.config.site import Site, process_name
from berth.up.in_one_process import LocalSystem, announcer, site
from bus.bus_ownership import BusOwnedByAnother
from bus.clock import SystemClock, new_uuid
from bus.contracts.build import BuildPage, BuildQuery, BuildRecord, BuildRequest, BuildState, HostsPage, HostsQuery
from cell_conductor.config import ConductorConfig
from cell_conductor.state.instance import State
from cell_conductor.state.unknown_machine import UnknownMachineKind
from cell_conductor.store.keyed_tables import DESTROY, PROTECT, DecidedMachine
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.records.records import Records
from compute_sim.ironic_stand_in import Behaviour, IronicStandIn, Silent
from tests.kit.lone_cell import LoneCell
from tests.kit.waiting import until

# --- Objects that are not ours, or not proved to be over, are never changed: conductor, compute service and Ironic
# stand-in.


QUICK = Behaviour(verify_s=0.001, deploy_s=0.02, undeploy_s=0.005, clean_s=0.005)


@pytest_asyncio.fixture
async def ironic() -> AsyncIterator[IronicStandIn]:
    stand_in = IronicStandIn(Silent(), clock=SystemClock(), rng=random.Random(1), behaviour=QUICK)
    await stand_in.start()
    yield stand_in
    await stand_in.stop()


@pytest_asyncio.fixture
async def cells(ironic: IronicStandIn) -> AsyncIterator[list[LoneCell]]:
    config = IronicConfig(url=ironic.url, poll_interval_s=0.005, watch_interval_s=0.02)
    made = [LoneCell(f"c{number}", config, is_idle=lambda: ironic.pool.idle) for number in range(3)]
    for cell in made:
        await cell.open()
    yield made
    for cell in made:
        await cell.close()


def carried(ironic: IronicStandIn) -> dict[str, tuple[str, str]]:
    """The nodes with an instance: which, and in which state."""
    nodes = ironic.pool.nodes.values()
    return {n["uuid"]: (n["instance_uuid"], n["provision_state"]) for n in nodes if n["instance_uuid"]}


FOREIGN = "70000000-0000-4000-8000-000000000000"


async def test_foreign_nodes_are_never_changed(ironic: IronicStandIn, cells: list[LoneCell]) -> None:
    """Item 2: an active node with an instance that berth never gave was undeployed and cleaned within seconds."""
    cell = cells[0]
    ironic.pool.plan(2)
    foreign, own = sorted(ironic.pool.nodes)
    ironic.pool.nodes[foreign].update(instance_uuid=FOREIGN, provision_state="active", instance_info={"a": "b"})
    before = dict(ironic.pool.nodes[foreign])
    await cell.start()
    assert ironic.pool.nodes[foreign] == before
    # A client may name its uuid, and ask for the delete of what failed.
    assert await cell.build(foreign, FOREIGN) == (FOREIGN, BuildState.FAILED)
    await cell.delete(FOREIGN)
    await cell.over(FOREIGN, BuildState.DELETED)
    uuid, state = await cell.build(own)
    assert state is BuildState.ACTIVE
    await cell.look()
    await cell.stop()
    await cell.start()
    assert ironic.pool.nodes[foreign] == before
    assert foreign not in {node for _, node in ironic.requested}, "no request that changes it was ever sent"
    assert carried(ironic)[own] == (uuid, "active")


async def test_what_an_operator_does_to_our_machine_does_not_destroy_it(
    ironic: IronicStandIn, cells: list[LoneCell]
) -> None:
    """Item 4: a node of ours in rescue, service or rebuild was lost, then undeployed and offered."""
    cell = cells[0]
    ironic.pool.plan(1)
    (node,) = ironic.pool.nodes
    await cell.start()
    uuid, _ = await cell.build(node)
    for state in ("rescue", "rescue failed", "servicing", "service failed", "deploying", "deploy failed", "error"):
        ironic.pool.nodes[node]["provision_state"] = state
        await cell.look()
        assert (cell.state(uuid), carried(ironic)) == (State.ACTIVE, {node: (uuid, state)})
    ironic.pool.nodes[node]["provision_state"] = "active"
    await cell.stop()
    ironic.pool.nodes[node]["provision_state"] = "deploying"  # ... and over a restart of both
    await cell.start()
    assert (cell.state(uuid), carried(ironic)) == (State.ACTIVE, {node: (uuid, "deploying")})
    ironic.pool.nodes[node].update(provision_state="available", instance_uuid=None, instance_info={})
    await cell.look()
    await cell.over(uuid, BuildState.FAILED)
    assert cell.state(uuid) is State.FAILED, "carrying no instance it is lost"


async def test_a_conductor_on_an_empty_or_anothers_database_destroys_nothing(
    ironic: IronicStandIn, cells: list[LoneCell]
) -> None:
    """Item 5: it destroyed every machine of its cell within seconds."""
    cell, other = cells[:2]
    ironic.pool.plan(4)
    await cell.start()
    for node in list(ironic.pool.nodes):
        assert (await cell.build(node))[1] is BuildState.ACTIVE
    before, table = carried(ironic), cell.table
    await cell.stop()
    for wrong in (MemoryInstanceTable(cell.clock), other.table):
        cell.table = wrong
        with pytest.raises(BusOwnedByAnother):
            await cell.start()
        assert carried(ironic) == before
        cell.release()  # an operator who trusts the database and not the bus
        for records in (cell.records, Records()):  # with and without what the compute service remembers
            cell.records = records
            await cell.start()
            assert carried(ironic) == before
            await cell.stop()
    cell.table = table
    cell.release()
    await cell.start()
    assert carried(ironic) == before
    assert all(cell.state(uuid) is State.ACTIVE for uuid, _ in before.values())


async def test_a_conductor_on_a_restored_database_destroys_nothing_newer(
    ironic: IronicStandIn, cells: list[LoneCell]
) -> None:
    """Item 5: what was built since the backup has no record there, and what was deleted since has one."""
    cell = cells[0]
    ironic.pool.plan(3)
    first, second, third = sorted(ironic.pool.nodes)
    await cell.start()
    kept, deleted = (await cell.build(first))[0], (await cell.build(second))[0]
    backup = dict(cell.table.instances)
    await cell.delete(deleted)
    await cell.over(deleted, BuildState.DELETED)
    await cell.look()
    newer, also_newer = (await cell.build(second))[0], (await cell.build(third))[0]
    before = carried(ironic)
    assert {uuid for uuid, _ in before.values()} == {kept, newer, also_newer}
    await cell.stop()
    cell.table.instances = backup
    await cell.start()
    await cell.over(deleted, BuildState.FAILED)
    await cell.look()
    assert carried(ironic) == before
    assert (cell.state(kept), cell.state(deleted)) == (State.ACTIVE, State.FAILED)
    assert newer not in cell.table.instances and also_newer not in cell.table.instances
    quarantined = {one.machine.uuid: one.machine.kind for one in cell.table.unknown_machines.values()}
    assert quarantined == {newer: UnknownMachineKind.QUARANTINED, also_newer: UnknownMachineKind.QUARANTINED}
    safety = MemoryInstances(cell.table.session()).safety
    assert len(await safety.decide([DecidedMachine(newer)], DESTROY, "an operator", cell.clock.time())) == 1
    assert len(await safety.decide([DecidedMachine(also_newer)], PROTECT, "an operator", cell.clock.time())) == 1
    await cell.look()
    assert carried(ironic) == {node: what for node, what in before.items() if what[0] != newer}
    await cell.look()
    assert [one.machine.uuid for one in cell.table.unknown_machines.values()] == [also_newer], "and is still reported"


# --- Services of bare metal share the free nodes of one Ironic, with a whole cell above them that knows of none.


NODES = 24
WAIT_S = 60.0
CELL = "cell1"


class Metal:
    """One cell whose services of bare metal start and die."""

    def __init__(self, place: Site, system: LocalSystem, ironic: IronicStandIn, client: BuildClient) -> None:
        self.place = place
        self.system = system
        self.ironic = ironic
        self.client = client

    async def start(self, service: str, state: Path | None = None) -> None:
        """One more process; nothing else is configured with it. state: where `berth run` finds berth's state."""
        base = self.place.settings.compute
        config = replace(base, driver="ironic", ironic=replace(base.ironic, url=self.ironic.url))
        if state is not None:
            config = replace(self.place.settings, state_dir=str(state), compute=config).kept_compute
        built = compute_agent.app.build(self.place.environment(service), config, CELL, service)
        await self.system.in_process.start((service, built))

    async def by_service(self) -> dict[str, list[str]]:
        """The nodes that a build can go to now, by the service that has them."""
        page = await self.client.bus.request(HostsQuery(up=True), HostsPage, timeout_s=WAIT_S)
        assert len({host.uuid for host in page.hosts}) == len(page.hosts), "no node twice"
        found: dict[str, list[str]] = {}
        for host in page.hosts:
            if host.service is not None and any(most > used for used, most in host.resources.values()):
                found.setdefault(host.service, []).append(host.uuid)
        return found

    async def until(self, there: Callable[[dict[str, list[str]]], bool]) -> dict[str, list[str]]:
        async def found() -> dict[str, list[str]] | None:
            return services if there(services := await self.by_service()) else None

        return await until(found, WAIT_S)


@pytest_asyncio.fixture
async def metal() -> AsyncIterator[Metal]:
    settings = Settings(
        bus=BusSettings(),
        cells={CELL: CellSettings()},
        database=DatabaseSettings(),
        up=UpSettings(nodes=NODES, computes_per_cell=0, schedulers=1, rest=False, web=False),
        conductor=ConductorConfig(report_grace_s=0.1, sweep_interval_s=0.2),
        compute=ComputeSettings(ironic=IronicConfig(poll_interval_s=0.05)),
    )
    async with site(settings, directory=None) as place:
        quick = Behaviour(verify_s=0.01, deploy_s=0.05, undeploy_s=0.01, clean_s=0.05)
        ironic = IronicStandIn(announcer(place), clock=place.clock, rng=random.Random(5), behaviour=quick)
        ironic.pool.plan(NODES)
        await ironic.start()
        system = LocalSystem(place)
        client = BuildClient(place.bus(process_name("test")), clock=place.clock, process=process_name("test"))
        try:
            await system.start(ironic_url=ironic.url)
            await client.open()
            yield Metal(place, system, ironic, client)
        finally:
            await client.close()
            await system.in_process.stop()
            await ironic.stop()


def all_of(*services: str) -> Callable[[dict[str, list[str]]], bool]:
    return lambda found: set(found) == set(services) and sum(map(len, found.values())) == NODES


async def test_a_service_more_or_less_is_a_process_more_or_less(metal: Metal) -> None:
    first = f"{CELL}-metal"
    await metal.until(all_of(first))
    await metal.start("more")
    before = await metal.until(all_of(first, "more"))
    builds = [
        BuildRequest(instance_uuid=new_uuid(random.Random(n)), flavor="bm.gold", project_id="p") for n in range(4)
    ]
    await metal.client.boot(builds)
    assert await metal.client.wait(WAIT_S)
    taken = {node["uuid"] for node in metal.ironic.pool.nodes.values() if node["instance_uuid"]}
    free = {node for nodes in before.values() for node in nodes} - taken
    await metal.system.kill_compute(first)
    after = await metal.until(lambda found: set(found.get("more", ())) == free)
    assert after.keys() == {"more"}, "an occupied node stays with the dead one"
    watches = await metal.client.boot(
        [BuildRequest(instance_uuid=new_uuid(random.Random(9)), flavor="bm.gold", project_id="p")]
    )
    assert await metal.client.wait(WAIT_S) and watches[0].state == "active"


async def test_a_service_that_starts_again_knows_its_machines_at_once(metal: Metal, tmp_path: Path) -> None:
    """`berth run compute` keeps records by default. Without, `berth check` called healthy machines broken for 67 s."""
    first = f"{CELL}-metal"
    await metal.until(all_of(first))
    await metal.start("kept", tmp_path)
    await metal.until(all_of(first, "kept"))
    stopped = metal.system.in_process.members.pop(first)  # on purpose: one that died is missed by `services_there`
    stopped.stop.set()
    await stopped.task
    await metal.until(lambda found: found.keys() == {"kept"})
    builds = [
        BuildRequest(instance_uuid=new_uuid(random.Random(n)), flavor="bm.gold", project_id="p") for n in range(4)
    ]
    watches = await metal.client.boot(builds)
    assert await metal.client.wait(WAIT_S) and {watch.state for watch in watches} == {"active"}
    await metal.system.in_process.kill("kept")
    await metal.start("kept", tmp_path)
    assert await rest(metal.place, timeout_s=WAIT_S)

    async def heard() -> list[InvariantResult]:
        """What does not hold, once the service is heard again: on a busy machine its start takes seconds."""
        verdicts = check_invariants(await gather(metal.place))
        return list(verdicts) if all(one.holds for one in verdicts if one.name == "services_there") else []

    wrong = [verdict for verdict in await until(heard, WAIT_S) if not verdict.holds]
    assert not wrong, wrong
    await metal.client.delete([await record_of(metal.client, one.instance_uuid) for one in builds], retry_for_s=WAIT_S)
    assert await metal.client.wait(WAIT_S)
    await metal.until(lambda found: sum(map(len, found.values())) == NODES)


async def record_of(client: BuildClient, instance: str) -> BuildRecord:
    page = await client.bus.request(BuildQuery(instance_uuid=instance), BuildPage, timeout_s=WAIT_S)
    return page.builds[0]

"""Services of bare metal share the free nodes of one Ironic, with a whole cell above them that knows of none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest_asyncio
from msgspec.structs import replace

import compute_sim.app
from berth.audit.gather import gather, rest
from berth.audit.invariants import check_invariants
from berth.client import BuildClient
from berth.settings import BusSettings, CellSettings, DatabaseSettings, Settings, UpSettings
from berth.site import Site, process_name
from berth.trial.ironic_stand_in import Behaviour, IronicStandIn
from berth.trial.up import LocalSystem, announcer, site
from bus.clock import new_uuid
from bus.contracts.build import BuildPage, BuildQuery, BuildRecord, BuildRequest, HostsPage, HostsQuery
from cell_conductor.config import ConductorConfig
from compute_sim.config import ComputeConfig, IronicConfig
from compute_sim.fleet import Fleet

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
        config = replace(base, driver="ironic", hosts=0, ironic=replace(base.ironic, url=self.ironic.url))
        if state is not None:
            config = replace(self.place.settings, state_dir=str(state), compute=config).kept_compute
        fleet = Fleet.planned(config, CELL, service)
        built = compute_sim.app.build(self.place.environment(service), config, CELL, service, fleet=fleet)
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
        async with asyncio.timeout(WAIT_S):
            while not there(found := await self.by_service()):  # noqa: ASYNC110  (asked of the scheduler)
                await asyncio.sleep(0.05)
        return found


@pytest_asyncio.fixture
async def metal() -> AsyncIterator[Metal]:
    settings = Settings(
        bus=BusSettings(),
        cells={CELL: CellSettings()},
        database=DatabaseSettings(),
        up=UpSettings(nodes=NODES, computes_per_cell=0, schedulers=1, rest=False, web=False),
        conductor=ConductorConfig(report_grace_s=0.1, sweep_interval_s=0.2),
        compute=ComputeConfig(ironic=IronicConfig(poll_interval_s=0.05)),
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
    tracks = await metal.client.boot(
        [BuildRequest(instance_uuid=new_uuid(random.Random(9)), flavor="bm.gold", project_id="p")]
    )
    assert await metal.client.wait(WAIT_S) and tracks[0].state == "active"


async def test_a_service_that_starts_again_knows_its_machines_at_once(metal: Metal, tmp_path: Path) -> None:
    """`berth run compute` keeps records by default. Without, `berth check` called healthy machines broken for 67 s."""
    first = f"{CELL}-metal"
    await metal.until(all_of(first))
    await metal.start("kept", tmp_path)
    await metal.until(all_of(first, "kept"))
    await metal.system.kill_compute(first)
    await metal.until(lambda found: found.keys() == {"kept"})
    builds = [
        BuildRequest(instance_uuid=new_uuid(random.Random(n)), flavor="bm.gold", project_id="p") for n in range(4)
    ]
    tracks = await metal.client.boot(builds)
    assert await metal.client.wait(WAIT_S) and {track.state for track in tracks} == {"active"}
    await metal.system.in_process.kill("kept")
    await metal.start("kept", tmp_path)
    assert await rest(metal.place, timeout_s=WAIT_S)
    wrong = [verdict for verdict in check_invariants(await gather(metal.place)) if not verdict.holds]
    assert not wrong, wrong
    await metal.client.delete([await record_of(metal.client, one.instance_uuid) for one in builds], retry_for_s=WAIT_S)
    assert await metal.client.wait(WAIT_S)
    await metal.until(lambda found: sum(map(len, found.values())) == NODES)


async def record_of(client: BuildClient, instance: str) -> BuildRecord:
    page = await client.bus.request(BuildQuery(instance_uuid=instance), BuildPage, timeout_s=WAIT_S)
    return page.builds[0]

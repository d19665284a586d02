"""A compute service that is gone for good: its host is fenced, emptied and forgotten; in memory and on RabbitMQ."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

import compute_sim.app
from berth.audit.gather import gather, rest
from berth.audit.invariants import check_invariants
from berth.client import BuildClient
from berth.commands.book import audited
from berth.settings import MEMORY, BusSettings, CellSettings, DatabaseSettings, Settings, UpSettings
from berth.site import process_name
from berth.trial.up import LocalSystem
from berth.trial.up import site as local_site
from bus.clock import new_uuid
from bus.contracts.build import BuildQuery, BuildRequest, HostRecord, HostsPage, HostsQuery
from bus.contracts.objects import ObjectKind, ObjectLogPage, ObjectLogQuery
from bus.contracts.operations import (
    AdminState,
    ForgetHost,
    ForgetService,
    HostForgotten,
    ServiceForgotten,
    SetAdminState,
)
from bus.faults import RequestRefused
from compute_sim.config import ComputeConfig

pytestmark = [pytest.mark.system, pytest.mark.postgres]

WAIT_S = 120.0
RNG = random.Random(7)
Hosts = dict[str, HostRecord]


class Whole:
    """A system of one process with one cell, and a second compute service there, `c2`, of one host."""

    def __init__(self, system: LocalSystem, client: BuildClient) -> None:
        self.system = system
        self.client = client

    async def hosts(self) -> Hosts:
        page = await self.client.bus.request(HostsQuery(), HostsPage, timeout_s=WAIT_S)
        return {host.name: host for host in page.hosts}

    async def until(self, holds: Callable[[Hosts], bool]) -> Hosts:
        async with asyncio.timeout(WAIT_S):
            while not holds(found := await self.hosts()):
                pass
        return found

    async def forget(self, host: str) -> HostForgotten:
        return await self.client.forget_host(ForgetHost(host=host, reason="burnt", by="ann"), timeout_s=WAIT_S)

    async def refused(self, host: str) -> str:
        with pytest.raises(RequestRefused) as fault:
            await self.forget(host)
        return fault.value.code

    async def forget_service(self, name: str, cell: str | None = None) -> ServiceForgotten:
        command = ForgetService(service=name, reason="burnt", by="ann", cell=cell)
        return await self.client.forget_service(command, timeout_s=WAIT_S)

    async def refused_service(self, name: str, cell: str | None = None) -> str:
        with pytest.raises(RequestRefused) as fault:
            await self.forget_service(name, cell)
        return fault.value.code

    async def decide(self, host: str, state: AdminState, *, force: bool = False) -> None:
        command = SetAdminState(host=host, state=state, reason="burnt", by="ann", force=force)
        await self.client.set_admin_state(command, timeout_s=WAIT_S)


@pytest_asyncio.fixture(params=["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
async def whole(request: pytest.FixtureRequest) -> AsyncIterator[Whole]:
    url, prefix = MEMORY, ""
    if request.param == "rabbitmq":
        url, prefix = request.getfixturevalue("amqp")
    settings = Settings(
        bus=BusSettings(url=url, prefix=prefix),
        cells={"cell1": CellSettings()},
        database=DatabaseSettings(url=request.getfixturevalue("postgres_url")),
        up=UpSettings(nodes=0, computes_per_cell=1, schedulers=1, rest=False, web=False),
        compute=ComputeConfig(hosts=1, heartbeat_interval_s=0.5),
    )
    async with local_site(settings, directory=None) as place:
        system = LocalSystem(place)
        client = BuildClient(place.bus(process_name("test")), clock=place.clock, process=process_name("test"))
        try:
            await system.start()
            await client.open()
            second = compute_sim.app.build(place.environment("c2", "compute"), settings.compute, "cell1", "c2")
            await system.in_process.start(("c2", second))
            yield Whole(system, client)
        finally:
            await client.close()
            await system.in_process.stop()


async def test_a_host_whose_service_has_died_is_fenced_emptied_and_forgotten(whole: Whole) -> None:
    hosts = await whole.until(lambda found: len(found) == 2 and all(host.up for host in found.values()))
    (mine,) = (name for name, host in hosts.items() if host.service == "c2")
    build = BuildRequest(instance_uuid=new_uuid(RNG), flavor="m1.tiny", project_id="p", host=mine)
    await whole.client.boot([build])
    assert await whole.client.wait(WAIT_S)
    assert await whole.refused(mine) == "host.service_up"
    assert await whole.refused_service("c2") == "service.up"
    assert await whole.refused_service("none", cell="nowhere") == "cell.unknown"
    await whole.system.in_process.kill("c2")
    await whole.until(lambda found: not found[mine].up)
    assert await whole.refused(mine) == "host.has_instances"
    assert await whole.refused_service("c2") == "service.has_hosts"
    await whole.decide(mine, AdminState.FENCED)
    query = BuildQuery(instance_uuid=build.instance_uuid)
    await whole.client.delete((await whole.client.query(query, timeout_s=WAIT_S)).builds)
    assert await whole.client.wait(WAIT_S)
    assert await whole.refused(mine) == "host.fence_open"
    await whole.decide(mine, AdminState.ENABLED, force=True)
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                assert (await whole.forget(mine)).removed
                break
            except RequestRefused as fault:
                assert fault.code == "host.fence_open"  # until its cell has acknowledged that it is to be lifted
    await whole.until(lambda found: set(found) == set(hosts) - {mine})
    place = whole.system.site
    assert await rest(place, timeout_s=WAIT_S)
    facts = await gather(place)
    # The service has its own record, in its cell, which drops it in `conductor.services_retention_s`.
    assert {one.name for one in check_invariants(facts) if not one.holds} <= {"services_there"}
    assert (await whole.forget_service("c2")).removed
    assert [one.name for one in check_invariants(await gather(place)) if not one.holds] == []
    page = await whole.client.services(limit=10, timeout_s=WAIT_S)
    assert [one.name for one in page.services if not one.up] == []
    log = await whole.client.bus.request(ObjectLogQuery(kind=ObjectKind.SERVICE), ObjectLogPage, timeout_s=WAIT_S)
    assert [(one.name, one.who, one.why) for one in log.entries] == [("c2", "ann", "burnt")]
    assert not any((await audited(place, repair=False, grace_s=0.0)).values())
    settings = place.settings
    again = compute_sim.app.build(place.environment("c2", "compute"), settings.compute, "cell1", "c2")
    await whole.system.in_process.start(("c2", again))
    back = await whole.until(lambda found: mine in found and found[mine].up)
    assert back[mine].admin is None

"""A cell is added to a running system, used, and removed; a service that is gone is forgotten."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import pytest_asyncio

import cell_conductor.app
import compute_agent.app
from berth.audit.facts import gather, rest
from berth.audit.invariants import check_invariants
from berth.bus_client import BuildClient
from berth.cli.claims.placement_audit import audited
from berth.config.settings import (
    MEMORY,
    BusSettings,
    CellSettings,
    ComputeSettings,
    DatabaseSettings,
    Settings,
    UpSettings,
)
from berth.config.site import Site, process_name
from berth.up.embedded.rabbitmq import RabbitMQ
from berth.up.in_one_process import LocalSystem
from berth.up.in_one_process import site as local_site
from berth.up.servers import variables
from bus.clock import new_uuid
from bus.contracts.build import BuildPage, BuildQuery, BuildRecord, BuildRequest, HostRecord, HostsPage, HostsQuery
from bus.contracts.objects import (
    CellsPage,
    CellsQuery,
    LinkState,
    ObjectChange,
    ObjectKind,
    ObjectLogPage,
    ObjectLogQuery,
    ObjectsChange,
    ObjectsChanged,
)
from bus.contracts.operations import AdminState, DeleteHost, DeleteService, HostDeleted, ServiceDeleted, SetAdminState
from bus.faults import RequestRefused
from compute_sim.config import SimulatedConfig
from tests.kit.forks import run_berth
from tests.kit.waiting import until

# --- A cell is added to a running system, used, and removed, by `berth cell`; in memory and on a real RabbitMQ.


pytestmark = [pytest.mark.system, pytest.mark.postgres]
WAIT_S = 120.0
RNG = random.Random(7)
SECRET = "CELL_NEW_URL"


Hosts = dict[str, HostRecord]


class Whole:
    """A system of one process, whose settings have cell1 alone. url: of its buses."""

    def __init__(self, place: Site, system: LocalSystem, client: BuildClient, url: str) -> None:
        self.place = place
        self.system = system
        self.client = client
        self.url = url

    async def start_cell2(self) -> None:
        """Its conductor and a compute service."""
        settings = msgspec.structs.replace(self.place.settings, cells={"cell2": CellSettings(prefix="new.")})
        other = Site(settings, brokers=self.place.brokers, database_url=self.place.database_url, clock=self.place.clock)
        conductor = cell_conductor.app.build(other.environment("conductor-cell2"), settings.conductor, "cell2")
        await self.system.in_process.start(("conductor-cell2", conductor))
        compute = compute_agent.app.build(other.environment("c2", "compute"), settings.compute, "cell2", "c2")
        await self.system.in_process.start(("c2", compute))

    async def decide(self, name: str, *, force: bool = False, **body: object) -> ObjectsChanged:
        change = ObjectChange(kind=ObjectKind.CELL, name=name, body=body)
        requested = ObjectsChange(actor="ann", reason="a test", changes=(change,), force=force)
        return await self.client.bus.request(requested, ObjectsChanged, timeout_s=WAIT_S)

    async def linked(self, state: LinkState) -> CellsPage:
        async def reached() -> CellsPage | None:
            page = await self.client.bus.request(CellsQuery(), CellsPage, timeout_s=WAIT_S)
            return page if [one.link for one in page.cells if one.name == "cell2"] == [state] else None

        return await until(reached, WAIT_S)

    async def hosts_known(self) -> None:
        async def known() -> object:
            query = HostsQuery(cell="cell2", up=True)
            page = await self.client.bus.request(query, HostsPage, timeout_s=WAIT_S)
            return [host for host in page.hosts if host.resources]  # the others are not in placement yet

        await until(known, WAIT_S)

    async def built(self) -> BuildRecord:
        request = BuildRequest(instance_uuid=new_uuid(RNG), flavor="m1.tiny", project_id="p")
        await self.client.boot([request])
        assert await self.client.wait(WAIT_S)
        return await self.record(request.instance_uuid)

    async def checked(self) -> None:
        """An added cell was not read: what ran there broke two invariants, and a repair released its allocation."""
        assert await rest(self.place, timeout_s=WAIT_S)
        facts = await gather(self.place)
        assert [one for one in check_invariants(facts) if not one.holds] == []
        assert [(one.cell, one.state) for one in facts.instances] == [("cell2", "active")]
        assert facts.running is not None and len(facts.running) == 1
        assert not any((await audited(self.place, repair=True, grace_s=0.0)).values())

    async def deleted(self, build: BuildRecord) -> None:
        async def gone() -> bool:
            return (await self.record(build.instance_uuid)).state == "deleted"

        await until(gone, WAIT_S)

    async def record(self, uuid: str) -> BuildRecord:
        return (await self.client.bus.request(BuildQuery(instance_uuid=uuid), BuildPage, timeout_s=WAIT_S)).builds[0]

    # --- hosts and services

    async def hosts(self) -> Hosts:
        page = await self.client.bus.request(HostsQuery(), HostsPage, timeout_s=WAIT_S)
        return {host.name: host for host in page.hosts}

    async def until(self, holds: Callable[[Hosts], bool]) -> Hosts:
        async def held() -> Hosts | None:
            return found if holds(found := await self.hosts()) else None

        return await until(held, WAIT_S)

    async def forget(self, host: str) -> HostDeleted:
        return await self.client.delete_host(DeleteHost(host=host, reason="burnt", by="ann"), timeout_s=WAIT_S)

    async def refused(self, host: str) -> str:
        with pytest.raises(RequestRefused) as fault:
            await self.forget(host)
        return fault.value.code

    async def forget_service(self, name: str, cell: str | None = None) -> ServiceDeleted:
        command = DeleteService(service=name, reason="burnt", by="ann", cell=cell)
        return await self.client.delete_service(command, timeout_s=WAIT_S)

    async def refused_service(self, name: str, cell: str | None = None) -> str:
        with pytest.raises(RequestRefused) as fault:
            await self.forget_service(name, cell)
        return fault.value.code

    async def decide_host(self, host: str, state: AdminState, *, force: bool = False) -> None:
        command = SetAdminState(host=host, state=state, reason="burnt", by="ann", force=force)
        await self.client.set_admin_state(command, timeout_s=WAIT_S)


@pytest_asyncio.fixture(params=["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
async def whole(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Whole]:
    url, prefix = MEMORY, ""
    if request.param == "rabbitmq":
        url, prefix = request.getfixturevalue("amqp")
    async with running(url, prefix, request.getfixturevalue("postgres_url"), monkeypatch) as made:
        yield made


@asynccontextmanager
async def running(url: str, prefix: str, database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Whole]:
    """A system of one process, its client open. The URL is in the variable SECRET, too."""
    monkeypatch.setenv(SECRET, url)
    settings = Settings(
        bus=BusSettings(url=url, prefix=prefix),
        cells={"cell1": CellSettings()},
        database=DatabaseSettings(url=database_url),
        up=UpSettings(nodes=0, computes_per_cell=1, schedulers=1, rest=False, web=False),
        compute=ComputeSettings(simulated=SimulatedConfig(hosts=1), heartbeat_interval_s=0.5),
    )
    async with local_site(settings, directory=None) as place:
        system = LocalSystem(place)
        client = BuildClient(place.bus(process_name("test")), clock=place.clock, process=process_name("test"))
        try:
            await system.start()
            await client.open()
            yield Whole(place, system, client, url)
        finally:
            await client.close()
            await system.in_process.stop()


async def test_a_cell_is_added_used_emptied_and_removed(whole: Whole) -> None:
    bus = {"url_variable": SECRET, "prefix": "new."}
    await whole.decide("cell2", state="enabled", bus=bus)
    page = await whole.linked(LinkState.UP)
    assert whole.url == MEMORY or whole.url not in str(page), "the URL is shown nowhere"
    await whole.start_cell2()
    await whole.hosts_known()
    await whole.decide("cell1", state="disabled")
    build = await whole.built()
    assert (build.state, build.cell) == ("active", "cell2")
    await whole.checked()
    await whole.decide("cell1", state="enabled")
    with pytest.raises(RequestRefused, match="1 instance,"):
        await whole.decide("cell2", state="removed", bus=bus)
    await whole.client.delete([build])
    await whole.deleted(build)
    await whole.decide("cell2", state="removed", bus=bus)
    await whole.linked(LinkState.CLOSED)
    assert (await whole.built()).cell == "cell1"
    await whole.decide("cell2", state="enabled", bus=bus)
    await whole.decide("cell1", state="disabled")
    await whole.linked(LinkState.UP)
    await whole.hosts_known()
    build = await whole.built()
    assert (build.state, build.cell) == ("active", "cell2")


@pytest.mark.parametrize(
    ("path", "code"), [(None, "cell.address"), ("/no-such-virtual-host", "bus.forbidden")], ids=["no URL", "refused"]
)
async def test_a_cell_that_cannot_be_read_is_named_and_the_rest_is_judged(
    own_broker: RabbitMQ, postgres_url: str, monkeypatch: pytest.MonkeyPatch, path: str | None, code: str
) -> None:
    url = own_broker.add_vhosts(("judged",))["judged"]
    async with running(url, "", postgres_url, monkeypatch) as whole:
        await whole.decide("cell2", state="enabled", bus={"url_variable": SECRET, "prefix": "new."})
        await whole.start_cell2()
        await whole.hosts_known()
        await whole.decide("cell1", state="disabled")
        assert (await whole.built()).cell == "cell2"
        environment = {**os.environ, **variables(whole.place.settings)}
        environment.pop(SECRET)
        if path is not None:
            environment[SECRET] = url.rpartition("/")[0] + path
        for command in ("check", "audit"):
            done = await asyncio.to_thread(run_berth, command, "-o", "json", env=environment, timeout_s=WAIT_S)
            assert done.returncode == 2, (done.stdout, done.stderr)
            assert "Traceback" not in done.stderr
            if command == "check":
                judged = msgspec.json.decode(done.stdout)
                assert {cell: why["code"] for cell, why in judged["not_judged"].items()} == {"cell2": code}
                assert [one["name"] for one in judged["invariants"] if not one["holds"]] == []
            else:
                said = [msgspec.json.decode(line) for line in done.stdout.splitlines()]
                assert [(one["state"], one["cell"], one["code"]) for one in said] == [("not_judged", "cell2", code)]


# --- A compute service that is gone for good: its host is fenced, emptied and forgotten; in memory and on RabbitMQ.


@pytest_asyncio.fixture
async def with_second(whole: Whole) -> Whole:
    """A second compute service in the cell, `c2`, of one host."""
    place = whole.place
    second = compute_agent.app.build(place.environment("c2", "compute"), place.settings.compute, "cell1", "c2")
    await whole.system.in_process.start(("c2", second))
    return whole


async def test_a_host_whose_service_has_died_is_fenced_emptied_and_forgotten(with_second: Whole) -> None:
    hosts = await with_second.until(
        lambda found: len(found) == 2 and all(host.up and host.resources for host in found.values())  # up, in placement
    )
    (mine,) = (name for name, host in hosts.items() if host.service == "c2")
    build = BuildRequest(instance_uuid=new_uuid(RNG), flavor="m1.tiny", project_id="p", host=mine)
    await with_second.client.boot([build])
    assert await with_second.client.wait(WAIT_S)
    assert await with_second.refused(mine) == "host.service_up"
    assert await with_second.refused_service("c2") == "service.up"
    assert await with_second.refused_service("none", cell="nowhere") == "cell.unknown"
    await with_second.system.in_process.kill("c2")
    await with_second.until(lambda found: not found[mine].up)
    assert await with_second.refused(mine) == "host.has_instances"
    assert await with_second.refused_service("c2") == "service.has_hosts"
    await with_second.decide_host(mine, AdminState.FENCED)
    query = BuildQuery(instance_uuid=build.instance_uuid)
    await with_second.client.delete((await with_second.client.query(query, timeout_s=WAIT_S)).builds)
    assert await with_second.client.wait(WAIT_S)
    assert await with_second.refused(mine) == "host.fence_open"
    await with_second.decide_host(mine, AdminState.ENABLED, force=True)
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                assert (await with_second.forget(mine)).removed
                break
            except RequestRefused as fault:
                assert fault.code == "host.fence_open"  # until its cell has acknowledged that it is to be lifted
    await with_second.until(lambda found: set(found) == set(hosts) - {mine})
    place = with_second.place
    assert await rest(place, timeout_s=WAIT_S)
    facts = await gather(place)
    # The service has its own record, in its cell, which drops it in `conductor.services_retention_s`.
    assert {one.name for one in check_invariants(facts) if not one.holds} <= {"services_there"}
    assert (await with_second.forget_service("c2")).removed
    assert [one.name for one in check_invariants(await gather(place)) if not one.holds] == []
    page = await with_second.client.services(limit=10, timeout_s=WAIT_S)
    assert [one.name for one in page.services if not one.up] == []
    log = await with_second.client.bus.request(ObjectLogQuery(kind=ObjectKind.SERVICE), ObjectLogPage, timeout_s=WAIT_S)
    assert [(one.name, one.actor, one.reason) for one in log.entries] == [("c2", "ann", "burnt")]
    assert not any((await audited(place, repair=False, grace_s=0.0)).values())
    settings = place.settings
    again = compute_agent.app.build(place.environment("c2", "compute"), settings.compute, "cell1", "c2")
    await with_second.system.in_process.start(("c2", again))
    back = await with_second.until(lambda found: mine in found and found[mine].up)
    assert back[mine].admin is None

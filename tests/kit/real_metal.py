"""berth whole, in this process, on a real Ironic of its own: what tests/ironic is written with."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from msgspec.structs import replace

from berth.audit.facts import gather, rest
from berth.audit.invariants import check_invariants
from berth.bus_client import BuildClient, RequestWatch
from berth.config.settings import BusSettings, CellSettings, ComputeSettings, DatabaseSettings, Settings, UpSettings
from berth.config.site import process_name
from berth.up.in_one_process import LocalSystem, site
from bus.clock import new_uuid
from bus.contracts.build import BuildPage, BuildQuery, BuildRecord, BuildRequest, HostsPage, HostsQuery
from bus.contracts.deploy import ConfigDrive, ImageSource
from cell_conductor.config import ConductorConfig
from compute_agent.drivers.ironic.config import IronicConfig
from ironic_sync.config import IronicSyncConfig, NotificationBroker
from lab.ironic.laboratory import Lab, Nodes, lab
from tests.kit import waiting

WAIT_S = 300.0
POLL_S = 0.2
FLAVOR = "bm.gold"
RNG = random.Random()


class RealMetal:
    """A running berth and a running Ironic, and what a test does with them."""

    def __init__(self, ironic: Lab, nodes: Nodes, system: LocalSystem, client: BuildClient) -> None:
        here = system.site
        self.lab = ironic
        self.system = system
        self.nodes = nodes
        self.site = here
        self.client = client
        self.image = ImageSource(
            source=ironic.agents.image_url,
            hash_algorithm="sha256",
            hash_value=ironic.agents.image_sha256,
            type="whole-disk",
        )

    def request(self, **fields: Any) -> BuildRequest:
        """A request for a node of the class that `Nodes.enroll` makes."""
        build: dict[str, Any] = {"flavor": FLAVOR, "project_id": "acme", "build_timeout_s": WAIT_S, **fields}
        return BuildRequest(instance_uuid=new_uuid(RNG), **build)

    async def boot(self, *requests: BuildRequest) -> list[RequestWatch]:
        """Ask, and wait until all have ended."""
        watches = await self.client.boot(requests)
        assert await self.client.wait(WAIT_S), [watch.state for watch in watches]
        return watches

    async def delete(self, *uuids: str) -> None:
        """Delete, and wait until all are gone."""
        await self.client.delete([await self.record(uuid) for uuid in uuids], retry_for_s=WAIT_S)
        assert await self.client.wait(WAIT_S)

    async def record(self, uuid: str) -> BuildRecord:
        """A build as the scheduler has it."""
        page = await self.client.bus.request(BuildQuery(instance_uuid=uuid), BuildPage, timeout_s=WAIT_S)
        return page.builds[0]

    async def offered(self, *nodes: str) -> None:
        """Wait until the scheduler can place on all of these nodes."""
        await until(lambda: self._are_offered(nodes))

    async def _are_offered(self, nodes: Sequence[str]) -> bool:
        page = await self.client.bus.request(HostsQuery(up=True), HostsPage, timeout_s=WAIT_S)
        free = {host.uuid for host in page.hosts if any(most > used for used, most in host.resources.values())}
        return set(nodes) <= free

    async def is_offered(self, node: str) -> bool:
        """Whether the scheduler can place on the node now."""
        return await self.is_free(node) and await self.takes_builds(node, True)

    async def is_free(self, node: str) -> bool:
        """Whether placement offers the node."""
        return await self._are_offered((node,))

    async def takes_builds(self, node: str, wanted: bool) -> bool:
        """Whether the scheduler has the node as enabled, or as disabled."""
        page = await self.client.bus.request(HostsQuery(up=True), HostsPage, timeout_s=WAIT_S)
        return any(host.uuid == node and host.enabled is wanted for host in page.hosts)

    async def all_agree(self) -> None:
        """At rest, nodes, book and records agree."""
        assert await rest(self.site, timeout_s=WAIT_S)
        wrong = [verdict for verdict in check_invariants(await gather(self.site)) if not verdict.holds]
        assert not wrong, wrong


async def until(there: Callable[[], Awaitable[bool]], poll_s: float = POLL_S) -> None:
    """Wait for a condition that has to be asked for."""
    await waiting.until(there, WAIT_S, poll_s)


@contextlib.asynccontextmanager
async def real_metal(
    *, compute: dict[str, Any] | None = None, sync: dict[str, Any] | None = None, **ironic: Any
) -> AsyncIterator[RealMetal]:
    """Everything started; Ironic publishes to a broker of its own. compute, sync: fields of IronicConfig and of
    IronicSyncConfig.
    """
    async with lab(**ironic) as here:
        settings = settings_of(here, compute or {}, sync or {})
        async with site(settings, directory=None) as place:
            system = LocalSystem(place)
            nodes = Nodes(here.ironic.url)
            client = BuildClient(place.bus(process_name("test")), clock=place.clock, process=process_name("test"))
            try:
                await system.start(ironic_url=here.ironic.url)
                await client.open()
                yield RealMetal(here, nodes, system, client)
            finally:
                await client.close()
                await nodes.close()
                await system.in_process.stop()


@contextlib.asynccontextmanager
async def another_berth(ironic: Lab, nodes: Nodes) -> AsyncIterator[RealMetal]:
    """A second deployment on the same Ironic: the same names, and a database that knows nothing of the first."""
    async with site(settings_of(ironic, {}, {"name": "another"}), directory=None) as place:
        system = LocalSystem(place)
        client = BuildClient(place.bus(process_name("test")), clock=place.clock, process=process_name("test"))
        try:
            await system.start(ironic_url=ironic.ironic.url)
            await client.open()
            yield RealMetal(ironic, nodes, system, client)
        finally:
            await client.close()
            await system.in_process.stop()


def settings_of(here: Lab, compute: dict[str, Any], sync: dict[str, Any]) -> Settings:
    """One cell, one of each worker, impatient."""
    again = ImageSource(
        source=f"{here.agents.image_url}?again",
        hash_algorithm="sha256",
        hash_value=here.agents.image_sha256,
        type="whole-disk",
    )
    ironic = IronicConfig(url=here.ironic.url, poll_interval_s=0.1, watch_interval_s=0.5, images={"again": again})
    return Settings(
        bus=BusSettings(),
        cells={"cell1": CellSettings()},
        database=DatabaseSettings(),
        up=UpSettings(nodes=0, computes_per_cell=0, schedulers=1, rest=False, web=False),
        conductor=ConductorConfig(report_grace_s=0.1, sweep_interval_s=0.2),
        compute=ComputeSettings(ironic=replace(ironic, **compute), heartbeat_interval_s=0.5, report_interval_s=5.0),
        ironic_sync=IronicSyncConfig(broker=NotificationBroker(url=here.broker_url), bind_retry_s=0.5, **sync),
    )


def drive() -> ConfigDrive:
    """A config drive with something on it."""
    return ConfigDrive(user_data="#cloud-config\n", public_keys=("ssh-ed25519 AAAA me",))

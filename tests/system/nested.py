"""The blocks of docs/use/nested-hosts.md, read out of the page: settings and messages of each example."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

import compute_agent.app
from berth.audit.facts import gather, rest
from berth.audit.invariants import Facts, check_invariants
from berth.bus_client import RequestWatch
from berth.config.settings import CellSettings, ComputeSettings, Settings, UpSettings, read_settings
from berth.config.site import process_name
from berth.up.in_one_process import LocalSystem, site
from bus.clock import new_uuid
from bus.contracts.build import BuildPage, BuildQuery, BuildRequest
from bus.contracts.placement import InventoryResult, InventoryUpdate
from compute_agent.records.records import Records
from compute_sim.config import Device, HostSize, SimulatedConfig
from compute_sim.fleet import Fleet
from lab.feed_watch import RecordingClient

PAGE = Path(__file__).parents[2] / "docs" / "use" / "nested-hosts.md"
CELL, OLD = "cell1", "cell1-old"
PATIENCE_S = 60.0

# The host that is upgraded: two NUMA cells and two cards with eight PGPUs each, reported flat at first.
UPGRADED = HostSize(
    vcpus=16,
    memory_mb=32_768,
    reserved_memory_mb=0,
    disk_gb=0,
    cpu_ratio=1.0,
    numa=2,
    devices=tuple(Device(name=f"card{n}", under=f"numa{n}", inventories={"PGPU": 8}) for n in range(2)),
)
FLAT = ComputeSettings(
    simulated=SimulatedConfig(hosts=1, gpu_share=0.0, sizes=(UPGRADED,), nested=False), heartbeat_interval_s=0.5
)


def blocks(kind: str) -> list[str]:
    """The page's fenced blocks of one kind."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def page_settings(directory: Path) -> Settings:
    """The page's settings, read as an operator's file is; a host for every size."""
    path = directory / "berth.toml"
    path.write_text("\n".join(blocks("toml")))
    settings = read_settings(path, {})
    simulated = settings.compute.simulated
    simulated = replace(simulated, hosts=len(simulated.sizes), gpu_share=0.0)
    compute = replace(settings.compute, simulated=simulated, heartbeat_interval_s=0.5)
    up = UpSettings(schedulers=2, placements=2, computes_per_cell=1, nodes=0)
    return replace(settings, compute=compute, up=up, cells={CELL: CellSettings()})


class Example:
    """The objects of a test: a client, and eyes on placement."""

    def __init__(self, system: LocalSystem, client: RecordingClient, old: Fleet) -> None:
        self.system = system
        self.client = client
        self._old = old
        self.rng = system.site.rng

    def requests(self, flavor: str, count: int) -> list[BuildRequest]:
        """So many builds of one flavor."""
        return [
            BuildRequest(instance_uuid=new_uuid(self.rng), flavor=flavor, project_id="nested") for _ in range(count)
        ]

    async def boot(self, flavor: str, count: int = 1) -> list[RequestWatch]:
        """Build, to the end."""
        watches = await self.client.boot(self.requests(flavor, count))
        await self.ended()
        return watches

    async def ended(self) -> None:
        """Everything requested has ended, and every worker knows."""
        assert await self.client.wait(PATIENCE_S), [t.state for t in self.client.watches.values() if not t.ended_at]
        assert await rest(self.system.site, timeout_s=PATIENCE_S)

    async def delete(self, watches: list[RequestWatch]) -> None:
        """Delete those that run."""
        running = [watch.instance_uuid for watch in watches if watch.state == "active"]
        queries = [BuildQuery(instance_uuid=uuid) for uuid in running]
        pages = await self.client.bus.request_all(queries, BuildPage, timeout_s=PATIENCE_S, causes=running)
        await self.client.delete([page.builds[0] for page in pages if isinstance(page, BuildPage)])
        await self.ended()

    async def looked_at(self) -> Facts:
        """Everything from outside, the invariants judged."""
        facts = await gather(self.system.site, accepted=list(self.client.watches), events=self.client.events)
        assert [verdict for verdict in check_invariants(facts) if not verdict.holds] == []
        return facts

    async def where(self, watches: list[RequestWatch]) -> Counter[tuple[str, str, int]]:
        """How many of these hold what of which provider, by the providers' names, read from PostgreSQL."""
        facts = await self.looked_at()
        names = await self.names()
        counted: Counter[tuple[str, str, int]] = Counter()
        for watch in watches:
            for provider, resources in facts.allocations.get(watch.instance_uuid, {}).items():
                counted.update((names[provider], name, amount) for name, amount in resources.items())
        return counted

    async def names(self) -> dict[str, str]:
        """{provider: its name}, of hosts without the host's own."""
        book = self.system.site.environment("names").database("placement", pool_size=1)
        try:
            async with book.raw() as connection:
                rows = await connection.fetch("SELECT uuid::text, name FROM providers")
        finally:
            await book.close()
        return {uuid: re.sub(rf"^({CELL}-c1|{OLD})-\d+", "host", name) for uuid, name in rows}

    async def old_service(self, *, nested: bool) -> None:
        """Start the service of the host that is upgraded; killed first, if it runs."""
        if OLD in self.system.in_process.members:
            await self.system.in_process.kill(OLD)
        config = replace(FLAT, simulated=replace(FLAT.simulated, nested=nested))
        environment = self.system.site.environment(OLD)
        service = compute_agent.app.build(
            environment, config, CELL, OLD, records=self._old.records, driver_state=self._old
        )
        await self.system.in_process.start((OLD, service))


@contextlib.asynccontextmanager
async def example(directory: Path) -> AsyncIterator[Example]:
    """The system of the page: one host an example, the pools announced by plain messages."""
    async with site(page_settings(directory), directory=None, seed=3) as here:
        system = LocalSystem(here)
        client = RecordingClient(here.bus("client"), clock=here.clock, process=process_name("nested"))
        await system.start()
        await client.open()
        try:
            for body in blocks("json"):
                update = msgspec.json.decode(body, type=InventoryUpdate)
                result = await client.bus.request(update, InventoryResult, timeout_s=PATIENCE_S)
                assert result.outcome == "applied"
            made = Example(system, client, Fleet.planned(FLAT.simulated, CELL, OLD, Records()))
            await made.old_service(nested=False)
            yield made
        finally:
            await client.close()
            await system.in_process.stop()

"""A whole system of real processes on real servers, for the tests of this folder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from msgspec import Struct

from berth.audit.facts import gather, rest
from berth.audit.invariants import InvariantResult, check_invariants
from berth.config.site import Site, process_name
from berth.up.servers import RealServers, SystemPlan, hosts_known, running_processes
from berth.up.worker_processes import WorkerProcesses
from lab.feed_watch import RecordingClient
from lab.load import LoadPlan, LoadReport, run_load
from tests.kit.forks import ForkedProcess
from tests.kit.lent import lent_servers

REST_TIMEOUT_S = 60.0


class Rig(Struct):
    """The objects of a test of the whole system."""

    servers: RealServers
    processes: WorkerProcesses
    site: Site
    client: RecordingClient
    rng: random.Random

    async def load(self, boots: int, *, mix: dict[str, float] | None = None, timeout_s: float = 90.0) -> LoadReport:
        """Fire so many builds at once and wait for their ends."""
        plan = LoadPlan(boots=boots, mix=mix or {"m1.tiny": 1.0, "m1.small": 1.0}, timeout_s=timeout_s)
        return await run_load(self.client, plan, clock=self.site.clock, rng=self.rng)

    async def verdicts(self) -> Sequence[InvariantResult]:
        """Wait for rest and judge the invariants from the outside."""
        assert await rest(self.site, timeout_s=REST_TIMEOUT_S), "the system does not come to rest"
        facts = await gather(self.site, accepted=list(self.client.watches), events=self.client.events)
        return check_invariants(facts)

    async def assert_invariants(self) -> None:
        """Every invariant holds."""
        broken = [verdict for verdict in await self.verdicts() if not verdict.holds]
        assert not broken, broken


@asynccontextmanager
async def rig(plan: SystemPlan, *, seed: int = 1) -> AsyncIterator[Rig]:
    """Private servers, every worker of the plan as a process, their hosts known, a client that listens."""
    assert not plan.durable, "servers that are lent are not"
    servers_context = lent_servers(plan.cells)
    servers = await asyncio.to_thread(servers_context.__enter__)
    try:
        async with running_processes(servers, plan, spawn=ForkedProcess) as (processes, site):
            process = process_name("test")
            client = RecordingClient(site.bus(process), clock=site.clock, process=process, durable=True)
            await client.open()
            try:
                await hosts_known(client, plan)
                yield Rig(servers=servers, processes=processes, site=site, client=client, rng=random.Random(seed))
            finally:
                await client.close()
    finally:
        await asyncio.to_thread(servers_context.__exit__, None, None, None)

"""The drill: all databases are lost at a random moment and restored to an earlier one, while the hosts run on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from msgspec import Struct

from berth.backup.copying import save
from berth.backup.restoring import restore
from berth.client import BuildClient
from berth.gather import gather, rest
from berth.invariants import Facts, check_invariants
from berth.servers import SystemPlan
from berth.site import Site
from bus.clock import new_uuid
from bus.contracts.build import BuildQuery, BuildRecord, BuildRequest
from cell_conductor.store.safety import DESTROY, PostgresSafety
from compute_sim.config import ComputeConfig
from tests.system.worker_processes import Rig, rig

pytestmark = [pytest.mark.system, pytest.mark.postgres, pytest.mark.rabbitmq, pytest.mark.timeout(600)]

PLAN = SystemPlan(
    cells=("cell1",),
    schedulers=1,
    placements=1,
    compute=ComputeConfig(hosts=12, heartbeat_interval_s=0.5, report_interval_s=2.0),
    durable=False,
)
WITH_DATABASE = ("placement1", "conductor-cell1-1", "scheduler1")
PATIENCE_S = 120.0


async def boot(client: BuildClient, count: int) -> list[str]:
    """Ask for so many builds; they need not have ended."""
    requests = [BuildRequest(instance_uuid=new_uuid(random.Random()), flavor="m1.tiny", project_id="demo") for _ in range(count)]
    await client.boot(requests)
    return [request.instance_uuid for request in requests]


async def active(client: BuildClient, uuids: list[str], count: int) -> None:
    """Wait until so many of these are active."""

    def reached() -> bool:
        return sum(client.tracks[uuid].state == "active" for uuid in uuids) >= count

    assert await client.until(reached, PATIENCE_S)


async def delete(client: BuildClient, uuids: list[str]) -> None:
    """Delete these and wait until they are gone."""
    records = []
    for uuid in uuids:
        records += (await client.query(BuildQuery(instance_uuid=uuid), timeout_s=PATIENCE_S)).builds
    await client.delete(records)
    assert await client.wait(PATIENCE_S)


async def lose(url: str) -> None:
    connection = await asyncpg.connect(url)
    for schema in ("placement", "scheduler", "cell_cell1"):
        await connection.execute(f"DROP SCHEMA {schema} CASCADE")
    await connection.close()


@pytest.mark.parametrize("seed", [1, 2])
async def test_x(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with rig(PLAN, seed=seed) as it:
        url = it.servers.database_url
        old = await boot(it.client, 30)
        assert await it.client.wait(PATIENCE_S)
        before = await boot(it.client, 30)
        await active(it.client, before, rng.randrange(30))
        await save(url, tmp_path / "backup")
        assert await it.client.wait(PATIENCE_S)
        gone = rng.sample(old, 6)
        await delete(it.client, gone)
        after = await boot(it.client, 30)
        await active(it.client, after, rng.randrange(30))
        for name in WITH_DATABASE:
            it.processes.kill(name)
        promised = {u for u in (*old, *before, *after) if it.client.tracks[u].state == "active"} - set(gone)
        await lose(url)
        await restore(url, tmp_path / "backup")
        async def look(what):
            c = await asyncpg.connect(url)
            held = {str(r[0]) for r in await c.fetch("SELECT DISTINCT consumer FROM placement.allocations")}
            req = {str(r[0]): r[1] for r in await c.fetch("SELECT instance_uuid, state FROM scheduler.build_requests")}
            ins = {str(r[0]): r[1] for r in await c.fetch("SELECT uuid, state FROM cell_cell1.instances")}
            for n, g in (("old", set(old)-set(gone)), ("gone", set(gone)), ("before", set(before)), ("after", set(after))):
                print(what, n, len(g), "held", len(g & held), Counter(req.get(u) for u in g), Counter(ins.get(u) for u in g))
            await c.close()
        from collections import Counter
        await look("restored")
        for name in WITH_DATABASE:
            it.processes.restart(name)
        await it.processes.ready(WITH_DATABASE)
        await look("ready")
        print("rest", await rest(it.site, timeout_s=60))
        await look("rest")
        for k in range(1):
            facts = await gather(it.site)
            running = [fact.instance_uuid for fact in facts.running or ()]
            print("promised", len(promised), "running", len(running), len(set(running)), "lost", promised - set(running))
            for verdict in check_invariants(facts):
                if not verdict.holds: print(verdict)
            from collections import Counter
            print(Counter(i.state for i in facts.instances), Counter(facts.requests.values()))
            print(len(facts.quarantine or ()), facts.breakers, [ (q.why) for q in facts.quarantine or ()][:3])
            await asyncio.sleep(5)
        assert 0

"""The drill: all databases are lost at a random moment and restored to an earlier one, while the hosts run on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import asyncpg
import pytest

from berth.audit.facts import gather, rest
from berth.audit.invariants import Facts, check_invariants
from berth.backup.copying import save
from berth.backup.restoring import restore
from berth.bus_client import BuildClient
from berth.config.settings import ComputeSettings
from berth.config.site import Site
from berth.up.servers import SystemPlan, variables
from bus.clock import new_uuid
from bus.contracts.build import BuildQuery, BuildRecord, BuildRequest
from cell_conductor.store.keyed_tables import DESTROY, DecidedMachine
from cell_conductor.store.postgres_keyed import PostgresKeyed
from cell_conductor.store.unknown_machines import Safety
from compute_sim.config import SimulatedConfig
from tests.system.worker_processes import rig

pytestmark = [pytest.mark.system, pytest.mark.postgres, pytest.mark.rabbitmq, pytest.mark.timeout(600)]

PLAN = SystemPlan(
    cells=("cell1",),
    schedulers=1,
    placements=1,
    compute=ComputeSettings(simulated=SimulatedConfig(hosts=12), heartbeat_interval_s=0.5, report_interval_s=2.0),
    durable=False,
)
WITH_DATABASE = ("placement1", "conductor-cell1-1", "scheduler1")
PATIENCE_S = 120.0
REST_S = 20.0


async def boot(client: BuildClient, count: int) -> list[str]:
    """Ask for so many builds; they need not have ended."""
    requests = [
        BuildRequest(instance_uuid=new_uuid(random.Random()), flavor="m1.tiny", project_id="demo") for _ in range(count)
    ]
    await client.boot(requests)
    return [request.instance_uuid for request in requests]


async def active(client: BuildClient, uuids: list[str], count: int) -> None:
    """Wait until so many of these are active."""

    def reached() -> bool:
        return sum(client.watches[uuid].state == "active" for uuid in uuids) >= count

    assert await client.until(reached, PATIENCE_S)


async def request_again(client: BuildClient, uuids: list[str]) -> None:
    """Publish these requests again, as a client does that has no answer; wait until each has its end."""
    for uuid in uuids:
        client.unfollow(uuid)
    await client.boot([BuildRequest(instance_uuid=uuid, flavor="m1.tiny", project_id="demo") for uuid in uuids])
    assert await client.wait(PATIENCE_S), [uuid for uuid in uuids if not client.watches[uuid].state]


async def delete(client: BuildClient, uuids: list[str]) -> None:
    """Delete these and wait until they are gone."""
    records: list[BuildRecord] = []
    for uuid in uuids:
        records += (await client.query(BuildQuery(instance_uuid=uuid), timeout_s=PATIENCE_S)).builds
    await client.delete(records)
    assert await client.wait(PATIENCE_S)


async def breaches(site: Site) -> list[str]:
    """The invariants that do not hold, each with its first findings."""
    return [f"{one.name}: {one.examples}" for one in check_invariants(await gather(site)) if not one.holds]


async def lose(url: str) -> None:
    connection = await asyncpg.connect(url)
    for schema in ("placement", "scheduler", "cell_cell1"):
        await connection.execute(f"DROP SCHEMA {schema} CASCADE")
    await connection.close()


async def forget_requests(url: str, uuids: list[str]) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("DELETE FROM scheduler.build_requests WHERE instance_uuid = ANY($1::uuid[])", uuids)
    await connection.close()


async def age(url: str) -> None:
    """Let the grace of the audit pass for everything that is on record."""
    connection = await asyncpg.connect(url)
    await connection.execute("UPDATE placement.consumers SET updated_at = updated_at - interval '1 hour'")
    # `since` is in the column for statements and in the record for the conductor, which must agree.
    await connection.execute(
        "UPDATE cell_cell1.instances SET since = since - 3600,"
        " record = jsonb_set(record::jsonb, '{since}', to_jsonb(since - 3600))::json"
    )
    await connection.close()


async def repaired(site: Site) -> dict[str, list[str]]:
    """The findings that `berth placement audit --repair` leaves, and its repairs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "berth", "placement", "audit", "--repair", "--yes", "-o", "json"),
        env={**os.environ, **variables(site.settings)},
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    found: dict[str, list[str]] = json.loads(printed)
    return found


async def decide(site: Site, facts: Facts) -> None:
    """The operator's part: go on after the breaker, and destroy what the client knows nothing of."""
    database = site.environment("operator").database("cell_cell1", pool_size=1)
    safety = Safety(PostgresKeyed(database))
    for breaker in facts.breakers or ():
        if breaker.is_open:
            await safety.reset(breaker.service, "drill", site.clock.time())
    for machine in facts.quarantine or ():
        await safety.decide([DecidedMachine(machine.instance_uuid)], DESTROY, "drill", site.clock.time())
    await database.close()


def running(facts: Facts) -> Counter[str]:
    return Counter(fact.instance_uuid for fact in facts.running or ())


def running_twice(facts: Facts) -> dict[str, int]:
    """Instances with several machines, in quarantine or not: all services are up, and queried before a build."""
    return {uuid: count for uuid, count in running(facts).items() if count > 1}


def moved_since(facts: Facts) -> set[str]:
    """Active instances that were moved after the backup: placement has them where their machines are, in quarantine.

    The restored book has carried out a claim of the forgotten history. Their records are behind: an operator decides.
    """
    kept = {(one.instance_uuid, one.host_uuid) for one in facts.quarantine or ()}
    places: dict[str, set[str]] = {}
    for one in facts.running or ():
        places.setdefault(one.instance_uuid, set()).add(one.host_uuid)
    return {
        one.instance_uuid
        for one in facts.instances
        if one.state == "active"
        and (there := places.get(one.instance_uuid, set())) == set(facts.allocations.get(one.instance_uuid, ()))
        and there
        and one.host_uuid not in there
        and all((one.instance_uuid, host) in kept for host in there)
    }


def unclaimed(facts: Facts) -> dict[str, set[str]]:
    """Active instances whose machine runs where it is on record, or elsewhere without an allocation, and which hold
    something else than something of the host on record: {uuid: where}.
    """
    lives = {one.instance_uuid: one.host_uuid for one in facts.instances if one.state == "active"}
    moved = moved_since(facts)
    held = {
        uuid: set(facts.allocations.get(uuid, ())) for uuid in lives if uuid in running(facts) and uuid not in moved
    }
    return {uuid: hosts for uuid, hosts in held.items() if hosts != {lives[uuid]}}


async def claimed_in_time(site: Site, url: str) -> Facts:
    """The facts when every active instance holds what it takes; at the latest after the patience."""
    facts = await gather(site)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while unclaimed(facts):
                await age(url)
                await repaired(site)
                facts = await gather(site)
    return facts


def comes_or_runs(facts: Facts) -> bool:
    """Whether a machine runs, or a build may still come up: a doubted one waits for its cell's services."""
    return bool(running(facts)) or any(one.state in ("building", "active") for one in facts.instances)


async def destroyed(site: Site, client: BuildClient) -> None:
    """Wait until nothing runs: a destruction that was decided comes with its host's next report.

    A doubted build waits until its cell's services have answered: what came up since the last delete is deleted, too.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while comes_or_runs(facts := await gather(site)):
                await decide(site, facts)
                late = sorted(one.instance_uuid for one in facts.instances if one.state == "active")
                await request_again(client, [uuid for uuid in late if uuid not in facts.requests])
                await delete(client, late)


async def deleted_by_all(site: Site, client: BuildClient, url: str, facts: Facts, gone: Sequence[str]) -> None:
    """An operator decides about the rest, and the client deletes what it has: then every invariant holds.

    The client requests the instances again that the cell has and schedulers do not know: it is one request.
    """
    await decide(site, facts)
    known = {one.instance_uuid for one in facts.instances} - set(gone)
    await request_again(client, sorted(known - set(facts.requests)))
    await delete(client, sorted(known))
    await age(url)
    await destroyed(site, client)
    broken = ["not judged yet"]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while (broken := await breaches(site)) or comes_or_runs(await gather(site)):
                await destroyed(site, client)
                facts = await gather(site)
                await decide(site, facts)
                late = sorted({one.instance_uuid for one in facts.instances} - set(facts.requests) - set(gone))
                await request_again(client, late)  # the broker has handed its command in since, and it has failed
                await delete(client, late)
                await repaired(site)
    assert broken == []


@pytest.mark.parametrize(("seed", "top_forgets"), [(1, False), (2, False), (3, True)])
async def test_after_a_restore_each_machine_runs_on_and_what_differs_is_found_and_put_right(
    tmp_path: Path, *, seed: int, top_forgets: bool
) -> None:
    """top_forgets: what the broker hands in again, it hands in to the cell alone: the schedulers know nothing of it."""
    rng = random.Random(seed)
    async with rig(PLAN, seed=seed) as it:
        url, client = it.servers.database_url, it.client
        old = await boot(client, 30)
        assert await client.wait(PATIENCE_S)
        before = await boot(client, 30)
        await active(client, before, rng.randrange(30))
        await save(url, tmp_path / "backup")
        assert await client.wait(PATIENCE_S)
        gone = rng.sample(old, 3)
        await delete(client, gone)
        after = await boot(client, 30)
        await active(client, after, rng.randrange(30))
        for name in rng.sample(WITH_DATABASE, len(WITH_DATABASE)):
            it.processes.kill(name)
        promised = {uuid for uuid in (*old, *before, *after) if client.watches[uuid].state == "active"}

        await lose(url)
        await restore(url, tmp_path / "backup")
        for name in WITH_DATABASE:
            it.processes.restart(name)
        await it.processes.ready(WITH_DATABASE)
        await rest(it.site, timeout_s=REST_S)  # builds that the broker hands in again may be waited for in vain

        if top_forgets:
            await forget_requests(url, after)

        # Nothing that a client was answered with is touched, nothing runs twice, nothing that was deleted
        # comes back.
        facts = await gather(it.site)
        assert promised <= running(facts).keys()
        assert running_twice(facts) == {}
        assert not running(facts).keys() & set(gone)

        # Placement is made to equal the cells: nothing runs unclaimed, and nothing is held for what is not there.
        await age(url)
        done = await repaired(it.site)
        assert not (done["orphaned"] or done["doubled"] or done["unsound"] or done["over_capacity"]), done
        # A build that came again may be adopted only now: the audit takes it up in its next run.
        facts = await claimed_in_time(it.site, url)
        assert unclaimed(facts) == {}

        await deleted_by_all(it.site, client, url, facts, gone)
        assert not running(await gather(it.site))

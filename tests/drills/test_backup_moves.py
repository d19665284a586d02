"""The drill with moves, a drain, a gang and objects under way: what a restore sets back, and what runs on.

Instances that were moved after a backup are on record where they run, once their cell has recovered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from berth.audit.facts import gather, rest
from berth.audit.invariants import Facts
from berth.backup.copying import save
from berth.backup.restoring import restore
from berth.bus_client import drains
from berth.bus_client.actions import ActionClient
from berth.drain_follow import follow
from berth.up.servers import variables
from bus.clock import new_uuid
from bus.contracts.actions import ActionKind, ActionRequest, ActionState
from bus.contracts.build import BuildQuery, BuildRequest, member_uuids
from bus.contracts.drains import DrainAction, DrainCommand, DrainStart, DrainState
from bus.contracts.objects import ObjectChange, ObjectKind, ObjectsChange, ObjectsChanged, ObjectsPage, ObjectsQuery
from bus.contracts.placement import Release
from placement_worker.service import PlacementService
from placement_worker.store.postgres_rows import PostgresPlacementRows
from tests.drills.test_backup_drill import (
    PATIENCE_S,
    PLAN,
    REST_S,
    WITH_DATABASE,
    active,
    age,
    boot,
    breaches,
    claimed_in_time,
    decide,
    delete,
    lose,
    moved_since,
    repaired,
    request_again,
    running,
    unclaimed,
)
from tests.kit.forks import run_berth
from tests.kit.web_process import served
from tests.system.worker_processes import Rig, rig

pytestmark = [pytest.mark.system, pytest.mark.postgres, pytest.mark.rabbitmq, pytest.mark.timeout(600)]


OPEN_MOVES = "SELECT count(*) FROM scheduler.instance_actions WHERE NOT terminal"
GROUP = ObjectChange(kind=ObjectKind.GROUP, name="demo/web", body={"policy": "soft-affinity"})


async def define(it: Rig, change: ObjectChange) -> None:
    requested = ObjectsChange(changes=(change,), actor="drill")
    await it.client.bus.request(requested, ObjectsChanged, timeout_s=PATIENCE_S)


def moves_of(uuids: list[str], kind: ActionKind = ActionKind.LIVE_MIGRATE, **more: object) -> list[ActionRequest]:
    rng = random.Random()
    return [
        ActionRequest(request_id=new_uuid(rng), instance_uuid=uuid, project_id="demo", kind=kind, **more)  # type: ignore[arg-type]
        for uuid in uuids
    ]


def running_twice(facts: Facts) -> dict[str, int]:
    """Instances with several machines that are outside of quarantine: both hosts of a forgotten move may have one."""
    kept = {(fact.host_uuid, fact.instance_uuid) for fact in facts.quarantine or ()}
    machines = Counter(
        fact.instance_uuid for fact in facts.running or () if (fact.host_uuid, fact.instance_uuid) not in kept
    )
    return {uuid: count for uuid, count in machines.items() if count > 1}


async def until_ended(actions: ActionClient, count: int) -> None:
    """Wait until so many more moves have ended."""
    least = len(actions.ended) + count
    async with asyncio.timeout(PATIENCE_S):
        while len(actions.ended) < least and actions.unfinished:  # noqa: ASYNC110  (its event is for all of them)
            await asyncio.sleep(0.01)


async def until_under_way(url: str, count: int) -> None:
    """Wait until so many moves are on record without a terminal event."""
    connection = await asyncpg.connect(url)
    async with asyncio.timeout(PATIENCE_S):
        while await connection.fetchval(OPEN_MOVES) < count:
            pass  # nothing announces it, and a question is a wait of its own
    await connection.close()


async def open_moves(url: str) -> int:
    """How many moves have no terminal event on record."""
    connection = await asyncpg.connect(url)
    count = await connection.fetchval(OPEN_MOVES)
    await connection.close()
    return int(count)


async def begin(it: Rig, actions: ActionClient, rng: random.Random, old: list[str]) -> tuple[BuildRequest, str]:
    """Moves, a drain and a gang, all under way; the gang's request, and the drain."""
    await define(it, GROUP)
    emptied = it.client.watches[old[20]].last
    assert emptied is not None and emptied.host is not None
    drain = DrainStart(drain=new_uuid(rng), name=emptied.host, by="drill", force=True)
    await drains.start(it.client.bus, drain)
    gang = BuildRequest(
        instance_uuid=new_uuid(rng), flavor="m1.tiny", project_id="demo", count=4, min_count=4, group="web"
    )
    await it.client.boot([gang])
    resizes = moves_of(old[8:12], ActionKind.RESIZE, flavor="m1.small", auto_confirm_s=0)
    await actions.submit([*moves_of(old[:8]), *resizes])
    await until_under_way(it.servers.database_url, 1 + rng.randrange(8))
    return gang, drain.drain


async def stop(it: Rig, drain: str) -> None:
    """Stop the drain, and wait for its moves: it tries an instance again, also between two readings of the site."""
    await drains.command(it.client.bus, DrainCommand(drain=drain, action=DrainAction.STOP, by="drill"))
    ended = await follow(partial(drains.one, it.client.bus, drain), clock=it.site.clock, timeout_s=PATIENCE_S)
    assert ended.state is DrainState.ENDED, ended


async def go_on(it: Rig, actions: ActionClient, rng: random.Random, old: list[str]) -> tuple[list[str], list[str]]:
    """The machines that the restored databases do not know: (deleted, booted) since the backup; then the workers are
    killed.
    """
    await define(it, ObjectChange(kind=ObjectKind.QUOTA, name="late", body={"limits": {"VCPU": 1}}))
    gone = rng.sample(old[12:20], 2)
    await delete(it.client, gone)
    await actions.submit(moves_of([uuid for uuid in (*old[4:10], *old[14:16]) if uuid not in gone]))
    after = await boot(it.client, 10)
    await until_ended(actions, rng.randrange(6))
    await active(it.client, after, rng.randrange(10))
    for name in rng.sample(WITH_DATABASE, len(WITH_DATABASE)):
        it.processes.kill(name)
    return gone, after


async def test_after_a_restore_in_the_middle_of_moves_each_machine_runs_once(tmp_path: Path) -> None:
    seed = 2
    rng = random.Random(seed)
    async with rig(PLAN, seed=seed) as it:
        url, client = it.servers.database_url, it.client
        actions = ActionClient(client.bus, clock=it.site.clock, process="drill")
        await actions.open()
        old = await boot(client, 24)
        assert await client.wait(PATIENCE_S)
        gang, drain = await begin(it, actions, rng, old)
        await save(url, tmp_path / "backup")
        assert await actions.wait(PATIENCE_S) and await client.wait(PATIENCE_S)
        gone, after = await go_on(it, actions, rng, old)
        promised = {uuid for uuid in (*old, *after) if client.watches[uuid].state == "active"} - set(gone)

        await lose(url)
        await restore(url, tmp_path / "backup")
        assert await open_moves(url), "the backup is of a moment with moves under way"
        for name in WITH_DATABASE:
            it.processes.restart(name)
        await it.processes.ready(WITH_DATABASE)
        await stop(it, drain)
        await rest(it.site, timeout_s=REST_S)

        facts = await gather(it.site)
        assert promised <= running(facts).keys(), promised - running(facts).keys()
        assert running_twice(facts) == {}
        assert not running(facts).keys() & set(gone)
        page = await client.bus.request(ObjectsQuery(), ObjectsPage, timeout_s=PATIENCE_S)
        assert "demo/web" in {one.name for one in page.objects}  # the later one may be handed in again by the broker

        await age(url)
        done = await repaired(it.site)
        assert not (done["orphaned"] or done["unsound"] or done["over_capacity"]), done
        doubled = {line.split(":")[0] for line in done["doubled"]}
        assert doubled <= moved_since(await gather(it.site)), done
        # A build that came again may be adopted only now: the audit takes it up in its next run.
        facts = await claimed_in_time(it.site, url)
        assert unclaimed(facts) == {}
        recorded = {one.instance_uuid: one.host_uuid for one in facts.instances if one.state == "active"}
        elsewhere = {
            one.instance_uuid for one in facts.running or () if recorded.get(one.instance_uuid) != one.host_uuid
        }
        quarantined = {one.instance_uuid for one in facts.quarantine or ()}
        assert elsewhere <= quarantined, "what runs on another host than recorded is kept, and an operator decides"

        await decide(it.site, facts)
        known = {one.instance_uuid for one in facts.instances} - set(gone)
        # Members that the backup has as accepted are scheduled again some time later, unless they are deleted.
        members = set(member_uuids(gang))
        await request_again(client, sorted(known - set(facts.requests) - members))
        await delete(client, sorted(known | members))
        await at_rest(it, url)
        await actions.close()


async def at_rest(it: Rig, url: str) -> None:
    """Every invariant holds, and nothing runs, once what is doubted has been decided about."""
    await age(url)
    broken = ["not judged yet"]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while broken := await breaches(it.site):
                await decide(it.site, await gather(it.site))
                await repaired(it.site)
    assert broken == []
    assert not running(await gather(it.site))


async def test_a_book_that_is_ahead_of_records_is_put_right_where_the_machines_are_reported() -> None:
    """As after a claim of the forgotten history whose command reached no host; the next move has a later attempt."""
    async with rig(PLAN, seed=3) as it:
        uuids = await boot(it.client, 4)
        assert await it.client.wait(PATIENCE_S)
        connection = await asyncpg.connect(it.servers.database_url)
        await connection.execute("UPDATE placement.consumers SET attempt = 7 WHERE uuid = ANY($1::uuid[])", uuids)
        await connection.close()
        book = it.site.environment("drill").database("placement", pool_size=1)
        store = PlacementService(PostgresPlacementRows(book))
        await store.open()
        await store.apply([Release(consumer=uuid, attempt=7) for uuid in uuids])
        await store.close()
        await age(it.servers.database_url)
        assert set(unclaimed(await gather(it.site))) == set(uuids)
        done = await repaired(it.site)
        assert sorted(done["repaired"]) == [f"{uuid}: claimed again" for uuid in sorted(uuids)], done
        actions = ActionClient(it.client.bus, clock=it.site.clock, process="drill")
        await actions.open()
        await actions.submit(moves_of(uuids))
        assert await actions.wait(PATIENCE_S)
        assert {one.state for one in actions.ended.values()} == {ActionState.DONE}
        await actions.close()
        await delete(it.client, uuids)
        await at_rest(it, it.servers.database_url)


# --- instances that were moved after a backup: the cell recovers, and has them where they run


MOVED = 6  # more than a breaker lets pass
CONDUCTOR = "conductor-cell1-1"


async def berth(it: Rig, *words: str) -> tuple[int, str]:
    env = variables(it.site.settings)

    def called() -> subprocess.CompletedProcess[str]:
        with served(env, it.processes.directory) as web:
            return run_berth(*words, env={**os.environ, **env, **web}, timeout_s=PATIENCE_S)

    done = await asyncio.to_thread(called)
    return done.returncode, done.stdout + done.stderr


async def reached(it: Rig, condition: Callable[[Facts], bool]) -> Facts:
    """The facts, once the condition holds of them."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition(facts := await gather(it.site)):
            pass  # nothing announces it, and a look is a wait of its own
    return facts


async def moved_and_forgotten(it: Rig) -> list[str]:
    """Instances whose cell has lost their moves, while placement and the schedulers have them."""
    uuids = await boot(it.client, MOVED)
    assert await it.client.wait(PATIENCE_S)
    connection = await asyncpg.connect(it.servers.database_url)
    await connection.execute("CREATE TABLE saved AS SELECT * FROM cell_cell1.instances")
    actions = ActionClient(it.client.bus, clock=it.site.clock, process="drill")
    await actions.open()
    await actions.submit(moves_of(uuids))
    assert await actions.wait(PATIENCE_S)
    assert {one.state for one in actions.ended.values()} == {ActionState.DONE}
    await actions.close()
    # A conductor that is killed is handed in again what it has carried out and not acknowledged.
    await asyncio.to_thread(it.processes.workers[CONDUCTOR].process.stop)
    await connection.execute("DELETE FROM cell_cell1.instances")
    await connection.execute("INSERT INTO cell_cell1.instances SELECT * FROM saved")
    await connection.execute("UPDATE cell_cell1.identity SET origin = 'another cluster'")
    await connection.close()
    it.processes.restart(CONDUCTOR)
    await it.processes.ready([CONDUCTOR])
    return uuids


async def test_machines_of_forgotten_moves_are_on_record_again_where_they_run() -> None:
    """They stayed in quarantine, with a breaker, until an operator had given each of them back."""
    async with rig(PLAN) as it:
        place = {}

        def is_recovered(facts: Facts) -> bool:
            place.update({one.instance_uuid: one.host_uuid for one in facts.running or ()})
            now = {one.instance_uuid: one.host_uuid for one in facts.instances if one.state == "active"}
            return len(now) == MOVED and now == place

        uuids = await moved_and_forgotten(it)
        facts = await reached(it, is_recovered)
        assert set(place) == set(uuids) and len(facts.running or ()) == MOVED
        assert not facts.quarantine and not facts.breakers
        status, output = await berth(
            it, "quarantine", "adopt", uuids[0], "--host", place[uuids[0]], "--reason", "drill"
        )
        assert status == 1 and "quarantine.unknown" in output, "none of its machines is in quarantine"
        await age(it.servers.database_url)
        done = await repaired(it.site)
        assert not (done["doubled"] or done["unclaimed"] or done["repaired"]), done
        assert await breaches(it.site) == []
        page = await it.client.query(BuildQuery(instance_uuid=uuids[0]), timeout_s=PATIENCE_S)
        assert [one.state for one in page.builds] == ["active"]
        actions = ActionClient(it.client.bus, clock=it.site.clock, process="drill")
        await actions.open()
        await actions.submit(moves_of(uuids))
        assert await actions.wait(PATIENCE_S)
        assert {one.state for one in actions.ended.values()} == {ActionState.DONE}
        await actions.close()
        await delete(it.client, uuids)
        await at_rest(it, it.servers.database_url)

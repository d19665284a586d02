"""Instances that were moved after a backup run in quarantine; an operator gives them back to their records."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import asyncpg
import pytest

from berth.audit.gather import gather
from berth.audit.invariants import Facts
from berth.client.moves import MoveClient
from berth.trial.servers import variables
from bus.contracts.build import BuildQuery
from bus.contracts.moves import MoveState
from bus.contracts.objects import ObjectKind, ObjectLogPage, ObjectLogQuery
from tests.drills.test_backup_drill import PATIENCE_S, PLAN, age, boot, breaches, delete, repaired
from tests.drills.test_backup_moves import at_rest, moves_of
from tests.kit.forks import run_berth
from tests.system.worker_processes import Rig, rig

pytestmark = [pytest.mark.system, pytest.mark.postgres, pytest.mark.rabbitmq, pytest.mark.timeout(600)]

MOVED = 6  # with the machines in quarantine more than a breaker lets pass, so none is given up as lost
CONDUCTOR = "conductor-cell1-1"


async def berth(it: Rig, *words: str) -> tuple[int, str]:
    env = {**os.environ, **variables(it.site.settings)}
    done = await asyncio.to_thread(run_berth, *words, env=env, timeout_s=PATIENCE_S)
    return done.returncode, done.stdout + done.stderr


async def reached(it: Rig, condition: Callable[[Facts], bool]) -> Facts:
    """The facts, once the condition holds of them."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition(facts := await gather(it.site)):
            pass  # nothing announces it, and a look is a wait of its own
    return facts


async def moved_and_forgotten(it: Rig) -> list[str]:
    """Instances whose cell has lost their moves, while the book and the schedulers have them."""
    uuids = await boot(it.client, MOVED)
    assert await it.client.wait(PATIENCE_S)
    connection = await asyncpg.connect(it.servers.database_url)
    await connection.execute("CREATE TABLE saved AS SELECT * FROM cell_cell1.instances")
    moves = MoveClient(it.client.bus, clock=it.site.clock, process="drill")
    await moves.open()
    await moves.offer(moves_of(uuids))
    assert await moves.wait(PATIENCE_S)
    assert {one.state for one in moves.ended.values()} == {MoveState.DONE}
    await moves.close()
    # A conductor that is killed is handed in again what it has carried out and not acknowledged.
    await asyncio.to_thread(it.processes.workers[CONDUCTOR].process.stop)
    await connection.execute("DELETE FROM cell_cell1.instances")
    await connection.execute("INSERT INTO cell_cell1.instances SELECT * FROM saved")
    await connection.execute("UPDATE cell_cell1.identity SET origin = 'another cluster'")
    await connection.close()
    it.processes.restart(CONDUCTOR)
    await it.processes.ready([CONDUCTOR])
    return uuids


async def test_machines_of_forgotten_moves_are_given_back_to_their_records() -> None:
    """They stayed in quarantine for good: an operator could have them destroyed, and nothing else."""
    async with rig(PLAN) as it:
        uuids = await moved_and_forgotten(it)
        facts = await reached(it, lambda facts: len(facts.quarantine or ()) == MOVED and bool(facts.breakers))
        place = {one.instance_uuid: one.host_uuid for one in facts.quarantine or ()}
        before = {one.instance_uuid: one.host_uuid for one in facts.instances}
        assert set(place) == set(before) == set(uuids) and not any(before[one] == place[one] for one in uuids)
        first = uuids[0]
        status, output = await berth(
            it, "quarantine", "adopt", first, "--host", before[first] or "", "--reason", "drill"
        )
        assert status == 1 and "quarantine.unknown" in output, "no machine of it is in quarantine there"
        for uuid in uuids:
            words = ("--host", place[uuid], "--reason", "moved since the backup", "--by", "ann", "--json")
            status, output = await berth(it, "quarantine", "adopt", uuid, *words)
            assert status == 0, output

        def is_given_back(facts: Facts) -> bool:
            now = {one.instance_uuid: one.host_uuid for one in facts.instances if one.state == "active"}
            return now == place and not facts.quarantine

        facts = await reached(it, is_given_back)
        assert {(one.instance_uuid, one.host_uuid) for one in facts.running or ()} == set(place.items())
        for one in facts.breakers or ():
            assert (await berth(it, "breaker", "reset", one.service))[0] == 0
        await age(it.servers.database_url)
        done = await repaired(it.site)
        assert not (done["doubled"] or done["unclaimed"]), done
        assert await breaches(it.site) == []
        query = ObjectLogQuery(kind=ObjectKind.REPAIR)
        log = await it.client.bus.request(query, ObjectLogPage, timeout_s=PATIENCE_S)
        assert {(one.name, one.who, one.why) for one in log.entries} == {
            (uuid, "ann", "moved since the backup") for uuid in uuids
        }
        page = await it.client.query(BuildQuery(instance_uuid=first), timeout_s=PATIENCE_S)
        assert [one.state for one in page.builds] == ["active"]
        await delete(it.client, uuids)
        await at_rest(it, it.servers.database_url)

"""The drill: an old backup is restored under a real Prometheus, which has to show what then waits for an operator."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest

from berth.audit import quarantine
from berth.audit.facts import rest
from berth.backup.copying import save
from berth.backup.restoring import restore
from cell_conductor.state.unknown_machine import UnknownMachineKind
from cell_conductor.store.keyed_tables import PROTECT, DecidedMachine
from tests.drills.test_backup_drill import PATIENCE_S, PLAN, REST_S, WITH_DATABASE, boot, lose
from tests.kit.waiting import until
from tests.system.test_traces import ask, prometheus
from tests.system.worker_processes import rig

pytestmark = [
    pytest.mark.system,
    pytest.mark.postgres,
    pytest.mark.rabbitmq,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="the package prometheus is not installed"),
]

FIRING = 'ALERTS{alertstate="firing", alertname=~"BerthBreakerTripped|BerthMachinesQuarantined", cell="cell1"}'
MACHINES = 20  # of one service: more than cell_conductor's breaker_limit


async def until_firing(client: httpx.AsyncClient, names: set[str]) -> None:
    """Wait until these of the two fire, and no other of them."""

    async def fire() -> bool:
        return {str(one["metric"]["alertname"]) for one in await ask(client, FIRING)} == names  # type: ignore[index]

    await until(fire, PATIENCE_S)


async def test_an_old_backup_raises_the_alarms_until_an_operator_has_decided(tmp_path: Path) -> None:
    """Three breakers were open and 1,218 machines in quarantine, and no alert fired."""
    async with rig(PLAN) as it:
        url = it.servers.database_url
        await boot(it.client, 5)
        assert await it.client.wait(PATIENCE_S)
        await save(url, tmp_path / "backup")
        after = await boot(it.client, MACHINES)
        assert await it.client.wait(PATIENCE_S)
        assert {it.client.watches[uuid].state for uuid in after} == {"active"}

        # A request that the broker hands in again takes its machine over: workers that are stopped, not killed, have
        # acknowledged what they carried out.
        assert await rest(it.site, timeout_s=REST_S)
        for name in WITH_DATABASE:
            await asyncio.to_thread(it.processes.workers[name].process.stop)
        await lose(url)
        await restore(url, tmp_path / "backup")
        for name in WITH_DATABASE:
            it.processes.restart(name)
        await it.processes.ready(WITH_DATABASE)
        async with prometheus(tmp_path, it.processes) as client:  # the ports of their metrics are new ones
            await until_firing(client, {"BerthBreakerTripped", "BerthMachinesQuarantined"})

            env = it.site.environment("operator")
            read = await quarantine.read(env)
            found = [one.machine for _, one in read.machines(UnknownMachineKind.QUARANTINED)]
            assert {one.uuid for one in found} == set(after)
            chosen = [DecidedMachine(one.uuid, one.host_uuid, one.attempt) for one in found]
            decided, _ = await quarantine.decide(env, {"cell1": chosen}, PROTECT, "drill")
            assert len(decided["cell1"]) == MACHINES
            await until_firing(client, {"BerthBreakerTripped"})
            tripped = [("cell1", one.service, one.tripped_at) for one in read.breakers["cell1"]]
            reset, _ = await quarantine.reset(env, tripped, "drill")
            assert all(reset.values())
            await until_firing(client, set())

"""`berth audit --watch` as a process beside worker processes: it finds what is planted, and repairs by its policy."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from berth.audit.facts import rest
from berth.config.settings import ComputeSettings
from berth.config.site import Site
from berth.up.servers import SystemPlan, variables
from bus.clock import new_uuid
from bus.contracts.base import DatabaseMark
from bus.contracts.build import BuildQuery, BuildRequest
from bus.contracts.cell import InstanceSpec, Selection, Spawn
from bus.contracts.objects import ObjectKind, ObjectLogPage, ObjectLogQuery
from bus.contracts.placement import Claim, ClaimOption, ClaimOutcome, ClaimResult
from cell_conductor.state.instance import Instance, State
from cell_conductor.store.tables import INSERT, columns, with_parameters
from compute_sim.config import SimulatedConfig
from tests.system.worker_processes import Rig, rig

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

PATIENCE_S = 60.0
LIMIT_S = 90.0  # of all that follows once the workers are ready: 5 s on a quiet machine
CELL = "cell1"
PLAN = SystemPlan(
    durable=False, cells=(CELL,), compute=ComputeSettings(simulated=SimulatedConfig(hosts=3), heartbeat_interval_s=0.5)
)
AT = {"VCPU": 1}


class Watching:
    """The lines that the process prints: {(state, kind, subject)}, and the repairs."""

    def __init__(self, output: asyncio.StreamReader) -> None:
        self._output = output
        self.lines: set[tuple[str, str, str]] = set()
        self.repaired: list[str] = []

    async def until(self, *lines: tuple[str, str, str]) -> None:
        """Wait until these have come."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.lines.issuperset(lines):
                await self.read()

    async def read(self) -> None:
        line: dict[str, Any] = json.loads(await self._output.readline())
        if line["state"] == "repaired":
            self.repaired.append(line["what"])
        else:
            self.lines.add((line["state"], line["kind"], line["subject"]))


@asynccontextmanager
async def watching(site: Site, **settings: str) -> AsyncIterator[Watching]:
    """`berth audit --watch` with these settings beside the site's."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "berth", "audit", "--watch", "--every", "0.2", "-o", "json"),
        env={**os.environ, **variables(site.settings), **settings},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield Watching(process.stdout)
    finally:
        process.terminate()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise


async def claimed(it: Rig, consumer: str, host: str) -> None:
    option = ClaimOption(allocations={host: AT}, host=host)
    claim = Claim(consumer=consumer, attempt=7, options=(option,), project_id="p")
    answer = await it.client.bus.request(claim, ClaimResult, timeout_s=PATIENCE_S)
    assert answer.outcome is ClaimOutcome.CLAIMED


async def deleted(it: Rig) -> str:
    """An instance that was built and deleted."""
    build = BuildRequest(instance_uuid=new_uuid(it.rng), flavor="m1.tiny", project_id="p")
    await it.client.boot([build])
    assert await it.client.wait(PATIENCE_S)
    query = BuildQuery(instance_uuid=build.instance_uuid)
    await it.client.delete((await it.client.query(query, timeout_s=PATIENCE_S)).builds)
    assert await it.client.wait(PATIENCE_S)
    assert await rest(it.site, timeout_s=PATIENCE_S)
    return build.instance_uuid


async def planted(it: Rig, host: str, service: str, on_record: str, on_host: str) -> None:
    """A record without a machine, and a machine without a record."""
    selection = Selection(host_uuid=host, host="h", service=service, allocations={host: AT})
    spec = InstanceSpec(instance_uuid=on_record, project_id="p")
    record = Instance(
        uuid=on_record, state=State.ACTIVE, spec=spec, selections=(selection,), attempt=1, since=it.site.clock.time()
    )
    connection = await asyncpg.connect(it.servers.database_url)
    await connection.execute(f"SET search_path TO cell_{CELL}")
    await connection.execute(with_parameters(INSERT), *columns([record]))
    incarnation = await connection.fetchval("SELECT database_incarnation FROM identity")
    await connection.close()
    bus = it.site.bus("planter", CELL)
    bus.states_mark(lambda: DatabaseMark(incarnation))
    await bus.open()
    other = InstanceSpec(instance_uuid=on_host, project_id="p")
    await bus.publish(Spawn(spec=other, attempt=1, host_uuid=host, allocations={host: AT}, service=service))
    await bus.close()


async def test_what_is_planted_is_found_and_what_the_policy_names_is_repaired() -> None:
    """The policy was tried in one process with the system, never by the command."""
    async with rig(PLAN) as it, asyncio.timeout(LIMIT_S):
        ended = await deleted(it)
        (home, *_) = (await it.client.hosts(limit=10, timeout_s=PATIENCE_S)).hosts
        unknown, on_record, on_host = (new_uuid(it.rng) for _ in range(3))
        assert home.service is not None
        async with watching(it.site) as proposing:
            for consumer in (ended, unknown):
                await claimed(it, consumer, home.uuid)
            await planted(it, home.uuid, home.service, on_record, on_host)
            await proposing.until(
                ("found", "orphaned", ended),
                ("found", "orphaned", unknown),
                ("found", "instance_without_machine", on_record),
                ("found", "machine_without_instance", on_host),
            )
            assert proposing.repaired == [], "by default it proposes"
        async with watching(it.site, BERTH_AUDIT__ORPHANED="repair") as repairing:
            await repairing.until(("found", "orphaned", unknown), ("gone", "orphaned", ended))
            assert [line.partition(" (")[0] for line in repairing.repaired] == [f"{ended}: released"]
            assert ("gone", "orphaned", unknown) not in repairing.lines, "no record knows it: it has no proof"
        query = ObjectLogQuery(kind=ObjectKind.REPAIR)
        log = await it.client.bus.request(query, ObjectLogPage, timeout_s=PATIENCE_S)
        assert [(one.name, one.reason) for one in log.entries] == [(ended, "audit.orphaned = repair")]

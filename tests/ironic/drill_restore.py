"""A restore beside a real Ironic: all databases are lost, and are yesterday's again. No node is touched."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from berth.audit.facts import gather, rest
from berth.backup.copying import save
from berth.backup.restoring import restore
from berth.config.settings import ComputeSettings
from berth.up.servers import SystemPlan
from bus.clock import new_uuid
from bus.contracts.build import BuildRequest
from compute_agent.drivers.ironic.config import IronicConfig
from lab.ironic.laboratory import Lab, Nodes, lab
from tests.drills.test_backup_drill import age, breaches, decide, delete, repaired
from tests.kit.real_metal import FLAVOR, WAIT_S, until
from tests.system.worker_processes import Rig, rig

PLAN = SystemPlan(
    cells=("cell1",),
    schedulers=1,
    placements=1,
    computes_per_cell=0,
    compute=ComputeSettings(driver="ironic", heartbeat_interval_s=0.5, report_interval_s=2.0),
    durable=False,
)
COMPUTE, SYNC = "compute-cell1-metal", "ironic-sync"
WITH_DATABASE = ("placement1", "conductor-cell1-1", "scheduler1", SYNC)
PATIENCE_S = 40.0
PROJECT = "acme"
RNG = random.Random(1)
LOOK_S = 0.5
FIELDS = "uuid,provision_state,instance_uuid,instance_info,lessee,maintenance,target_provision_state,extra"
THEIRS = "90000000-0000-4000-8000-000000000000"

pytestmark = pytest.mark.timeout(900)


class Metal:
    """A whole berth of processes, and the real Ironic beside it."""

    def __init__(self, it: Rig, ironic: Lab, nodes: Nodes) -> None:
        self.it = it
        self.url = it.servers.database_url
        self.nodes = nodes
        self.ironic = ironic

    async def start(self) -> None:
        """The workers of bare metal."""
        url = self.ironic.ironic.url
        config = IronicConfig(url=url, poll_interval_s=0.2, watch_interval_s=0.5)
        sync = {
            "BERTH_IRONIC_SYNC__URL": url,
            "BERTH_IRONIC_SYNC__BROKER": msgspec.json.encode({"url": self.ironic.broker_url}).decode(),
        }
        driver = {"BERTH_COMPUTE__IRONIC": msgspec.json.encode(config).decode()}
        self.it.processes.start(SYNC, SYNC, settings=sync)
        self.it.processes.start(COMPUTE, "compute", "--cell", "cell1", "--service", "metal", settings=driver)
        await self.it.processes.ready([SYNC, COMPUTE])

    async def offered(self, count: int) -> None:
        """Wait until so many nodes can be placed on."""

        async def are() -> bool:
            return await self.free() == count

        await until(are, LOOK_S)

    async def free(self) -> int:
        """How many nodes the scheduler can place on."""
        page = await self.it.client.hosts(limit=100, timeout_s=WAIT_S, up=True)
        return sum(any(most > used for used, most in host.resources.values()) for host in page.hosts)

    async def boot(self, *uuids: str) -> list[str]:
        """These instances, or new ones: each on a node, active."""
        requests = [BuildRequest(instance_uuid=uuid, flavor=FLAVOR, project_id=PROJECT) for uuid in uuids]
        for uuid in uuids:
            self.it.client.unfollow(uuid)
        watches = await self.it.client.boot(requests)
        assert await self.it.client.wait(WAIT_S)
        assert [watch.state for watch in watches] == ["active"] * len(uuids), [watch.last for watch in watches]
        return list(uuids)

    async def carried(self) -> dict[str, dict[str, Any]]:
        """Every node with an instance, with all that may not change; by instance."""
        return {node["instance_uuid"]: node for node in await self.nodes.list_all(FIELDS) if node["instance_uuid"]}

    async def deploy_theirs(self, node: str) -> None:
        """Another user of this Ironic deploys a node."""
        await self.nodes.patch(node, {"op": "add", "path": "/instance_uuid", "value": THEIRS})
        await self.nodes.provision(node, "active")
        await self.nodes.until(node, "active")

    async def lose_and_restore(self, backup: Path) -> None:
        """All databases are lost at once and are those of the backup; the compute service runs on."""
        for name in WITH_DATABASE:
            self.it.processes.kill(name)
        await lose(self.url)
        await restore(self.url, backup)
        for name in WITH_DATABASE:
            self.it.processes.restart(name)
        await self.it.processes.ready(WITH_DATABASE)
        await rest(self.it.site, timeout_s=20.0)  # builds that are handed in again may be waited for in vain

    async def audited(self, nodes: Mapping[str, str]) -> None:
        """Wait until an audit leaves nothing unclaimed: what runs on a node holds it, though the node is reserved."""

        async def unclaimed() -> dict[str, list[str]]:
            held = (await gather(self.it.site)).allocations
            found = {uuid: list(held.get(uuid, ())) for uuid in nodes}
            return {uuid: there for uuid, there in found.items() if there != [nodes[uuid]]}

        async def is_none() -> bool:
            return await unclaimed() == {}

        assert await within(is_none, self.audit), await unclaimed()

    async def audit(self) -> None:
        """An audit that repairs, of everything: nothing is too young for it."""
        await age(self.url)
        done = await repaired(self.it.site)
        assert not (done["doubled"] or done["unsound"] or done["over_capacity"]), done

    async def agrees(self, nodes: Mapping[str, str], before: Mapping[str, dict[str, Any]]) -> None:
        """Nodes are as they were; their tags and lessees are those of the records."""
        assert await self.carried() == before, "an audit changes no node"
        facts = await gather(self.it.site)
        assert {one.instance_uuid: one.host_uuid for one in facts.instances if one.state == "active"} == nodes
        for uuid, node in nodes.items():
            assert (before[uuid]["uuid"], before[uuid]["lessee"]) == (node, PROJECT)
            assert before[uuid]["instance_info"]["berth"]["instance"] == uuid
        quarantined = {one.instance_uuid for one in facts.quarantine or ()}
        assert quarantined == before.keys() - nodes.keys() - {THEIRS}

    async def destroyed(self, uuids: list[str]) -> bool:
        """An operator has what is in quarantine destroyed."""

        async def are() -> bool:
            return not (await self.carried()).keys() & set(uuids)

        async def order() -> None:
            await decide(self.it.site, await gather(self.it.site))

        return await within(are, order)

    async def is_sound(self) -> bool:
        """Every invariant holds, at the latest after some audits."""

        async def holds() -> bool:
            return await breaches(self.it.site) == []

        return await within(holds, self.audit)


def some(count: int) -> list[str]:
    return [new_uuid(RNG) for _ in range(count)]


async def lose(url: str) -> None:
    connection = await asyncpg.connect(url)
    for schema in ("placement", "scheduler", "cell_cell1", "ironic_sync"):
        await connection.execute(f"DROP SCHEMA {schema} CASCADE")
    await connection.close()


async def within(condition: Callable[[], Awaitable[bool]], do: Callable[[], Awaitable[Any]]) -> bool:
    """Repeat `do` until the condition holds; False: it never did."""
    end = time.monotonic() + PATIENCE_S
    while not await condition():
        if time.monotonic() > end:
            return False
        await do()
    return True


@contextlib.asynccontextmanager
async def metal_rig() -> AsyncIterator[Metal]:
    async with lab(delays={"deploy_delay": 1}) as ironic, rig(PLAN) as it:
        nodes = Nodes(ironic.ironic.url)
        metal = Metal(it, ironic, nodes)
        try:
            await metal.start()
            yield metal
        finally:
            await nodes.close()


async def test_a_restore_of_yesterday_changes_no_node_and_the_audit_makes_all_agree(tmp_path: Path) -> None:
    async with metal_rig() as metal:
        foreign, *ours = await metal.nodes.enroll(6)
        await metal.deploy_theirs(foreign)
        await metal.offered(len(ours))
        kept, gone = await metal.boot(*some(2)), await metal.boot(*some(1))
        await save(metal.url, tmp_path / "backup")
        await delete(metal.it.client, gone)
        await metal.offered(len(ours) - len(kept))
        again, doomed = await metal.boot(*some(1)), await metal.boot(*some(1))
        before = await metal.carried()
        assert before.keys() == {*kept, *again, *doomed, THEIRS}

        await metal.lose_and_restore(tmp_path / "backup")
        assert await metal.carried() == before, "a restored database changes no node"
        # The client has no answer about one that was built since, and requests it again: it is found where it runs.
        await metal.boot(*again)
        assert await metal.carried() == before, "what runs is not built a second time"
        nodes = {uuid: before[uuid]["uuid"] for uuid in (*kept, *again)}
        await metal.audited(nodes)
        # A node that carries an instance is reserved, so no build is offered it, claimed or not.
        assert await metal.free() == len(ours) - len(nodes) - len(doomed)
        await metal.agrees(nodes, before)

        # The operator decides about what no client knows of, and the client deletes what it has.
        assert await metal.destroyed(doomed)
        await delete(metal.it.client, list(nodes))
        await metal.offered(len(ours))
        assert await metal.carried() == {THEIRS: before[THEIRS]}, "and another's machine is as it was"
        free = [node for node in await metal.nodes.list_all(FIELDS) if node["uuid"] != foreign]
        assert all((one["lessee"], one["instance_info"]) == (None, {}) for one in free)
        assert await metal.is_sound(), await breaches(metal.it.site)

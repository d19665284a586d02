"""Two versions side by side: a running system of the last release is upgraded worker by worker under load, and back.

    python -m tests.upgrade.rolling OLD_TREE [--short] [--json FILE]

OLD_TREE: a directory with the sources of the earlier version (`scripts/side-by-side` makes it). Every worker is
replaced, one at a time, by one of this version, which migrates its schema, and then each by one of the earlier version
again, while builds and deletes go on; after each conductor a host is fenced and the fence lifted. At the end every
request must have ended once and well, every invariant must hold, nothing may lie in a dead-letter queue, and the
schemas must be those of this version.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from berth.audit.facts import gather, rest
from berth.audit.invariants import check_invariants
from berth.backup.copying import connect
from berth.bus_client import BuildClient
from berth.config.schemas import SchemaRevision, SchemaState, find_schemas
from berth.config.settings import ComputeSettings
from berth.config.site import Site, process_name
from berth.up.servers import API_VHOST, RealServers, SystemPlan, real_servers, start_all, variables
from berth.up.worker_processes import Worker, WorkerProcesses
from bus.clock import new_uuid
from bus.contracts.build import MAX_HOSTS, BuildRecord, BuildRequest, BuildState
from bus.contracts.operations import AdminState, HostAdminState, SetAdminState
from compute_sim.config import SimulatedConfig
from lab.feed_watch import RecordingClient

PLAN = SystemPlan(
    cells=("cell1",),
    schedulers=2,
    placements=2,
    conductors_per_cell=2,
    computes_per_cell=2,
    compute=ComputeSettings(simulated=SimulatedConfig(hosts=10), heartbeat_interval_s=0.5),
    durable=False,
)
# Two compute services: while the only one of a cell is replaced there would be no host. Two conductors: an earlier one
# runs on beside the one that has migrated their schema.
SHORT = msgspec.structs.replace(PLAN, placements=1)
AT_ONCE = 4  # builds asked for together ...
PAUSE_S = 0.2  # ... and so long until the next
KEPT = 60  # machines that run at a time; the oldest are deleted
PATIENCE_S = 120.0
MAX_STOP_S = 60.0


class Tally(Struct):
    """The progress of the load."""

    requested: int = 0
    deleted: int = 0
    failed: list[str] = []
    slowest_s: float = 0.0


class Load:
    """Builds and deletes without a pause, until `stop` is set."""

    def __init__(self, client: BuildClient, seed: int) -> None:
        self.client = client
        self.stop = asyncio.Event()
        self.tally = Tally(failed=[])
        self._rng = random.Random(seed)
        self._kept: list[str] = []

    async def run(self) -> None:
        """Keep KEPT machines, a part of them always new. Raises TimeoutError when a round does not end."""
        while not self.stop.is_set():
            await self._round()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), PAUSE_S)

    async def _round(self) -> None:
        requests = [
            BuildRequest(instance_uuid=new_uuid(self._rng), flavor="m1.tiny", project_id="demo") for _ in range(AT_ONCE)
        ]
        began = time.monotonic()
        await self.client.boot(requests, retry_for_s=PATIENCE_S)
        await self._ended("builds")
        self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - began)
        self.tally.requested += AT_ONCE
        for request in requests:
            track = self.client.watches[request.instance_uuid]
            if track.state != "active":
                why = track.last.code if track.last is not None else ""
                self.tally.failed.append(f"{request.instance_uuid}: {track.state} {why}")
        self._kept += [request.instance_uuid for request in requests]
        old, self._kept = self._kept[:-KEPT], self._kept[-KEPT:]
        if old:
            records = [
                BuildRecord(instance_uuid=uuid, project_id="demo", flavor="m1.tiny", state=BuildState.ACTIVE)
                for uuid in old
            ]
            await self.client.delete(records, retry_for_s=PATIENCE_S)
            await self._ended("deletes")
            self.tally.deleted += len(old)

    async def _ended(self, what: str) -> None:
        if not await self.client.wait(PATIENCE_S):
            raise TimeoutError(f"{self.client.unfinished} {what} had not ended after {PATIENCE_S:g} s")


class FencedHost:
    """A host without machines, whose fence each mix of conductors records and lifts: they share its tables."""

    def __init__(self, client: BuildClient) -> None:
        self._client = client
        self._uuid = ""
        self.fenced = 0

    async def take(self) -> None:
        """Choose a host that nothing runs on yet, and keep builds away from it."""
        async with asyncio.timeout(PATIENCE_S):
            while not self._uuid:
                page = await self._client.hosts(limit=1, timeout_s=PATIENCE_S)
                self._uuid = next((host.uuid for host in page.hosts), "")
        await self._decide(AdminState.DISABLED)

    async def fence_and_lift(self) -> None:
        """Do both, and wait until the cell has recorded each. Raises TimeoutError."""
        await self._decide(AdminState.FENCED)
        await self._until(lambda admin: admin.state is AdminState.FENCED and admin.acknowledged >= admin.fence)
        await self._decide(AdminState.DISABLED)
        await self._until(lambda admin: admin.state is AdminState.DISABLED)
        self.fenced += 1

    async def _decide(self, state: AdminState) -> None:
        force = state is AdminState.FENCED  # its compute service is up
        decision = SetAdminState(host=self._uuid, state=state, reason="upgrade", by="upgrade", force=force)
        await self._client.set_admin_state(decision, timeout_s=PATIENCE_S)

    async def _until(self, condition: Callable[[HostAdminState], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                page = await self._client.hosts(limit=MAX_HOSTS, timeout_s=PATIENCE_S)
                admin = next((host.admin for host in page.hosts if host.uuid == self._uuid), None)
                if admin is not None and condition(admin):
                    return
                await asyncio.sleep(0.05)


class MixedProcesses(WorkerProcesses):
    """The workers of one system, each of the earlier version or of this one."""

    def __init__(self, directory: Path, settings: Mapping[str, str], old: Path) -> None:
        super().__init__(directory, settings)
        self._tree = {"PYTHONPATH": str(old)}
        self.is_old = True  # what is started next

    def start(self, name: str, *arguments: str, settings: Mapping[str, str] | None = None) -> Worker:
        """Of the earlier version or of this one."""
        return super().start(name, *arguments, settings=self._tree if self.is_old else settings)

    async def replace(self, name: str, *, by_old: bool) -> None:
        """Stop one worker in good order, and start it again from the other tree."""
        worker, self.is_old = self.workers[name], by_old
        await asyncio.to_thread(worker.process.stop, timeout_s=MAX_STOP_S)
        self.start(name, *worker.arguments)
        await self.ready([name])


@contextlib.asynccontextmanager
async def _system(
    servers: RealServers, old: Path, directory: Path, plan: SystemPlan
) -> AsyncIterator[tuple[MixedProcesses, Site]]:
    settings = servers.settings(plan)
    given = {**variables(settings), "BERTH_COMPUTE__STATE_DIR": str(directory / "machines")}
    processes = MixedProcesses(directory, given, old)
    try:
        start_all(processes, plan)
        await processes.ready()
        yield processes, Site(settings)
    finally:
        await asyncio.to_thread(processes.stop)


async def run(servers: RealServers, old: Path, directory: Path, plan: SystemPlan, seed: int) -> dict[str, object]:
    """The whole of it; returns what it has come to. Raises TimeoutError, ServerFailed."""
    async with _system(servers, old, directory, plan) as (processes, site):
        process = process_name("upgrade")
        before = await _schemas(site)
        client = RecordingClient(site.bus(process), clock=site.clock, process=process, durable=True)
        await client.open()
        load, host = Load(client, seed), FencedHost(client)
        await host.take()
        task = asyncio.create_task(load.run())
        try:
            for by_old in (False, True):
                for name in list(processes.workers):
                    built = load.tally.requested
                    await processes.replace(name, by_old=by_old)
                    _print(f"{name} is of the {'earlier' if by_old else 'new'} version")
                    if name.startswith("conductor"):
                        await host.fence_and_lift()
                    async with asyncio.timeout(PATIENCE_S):
                        while load.tally.requested < built + 2 * AT_ONCE:  # by each mix of versions
                            if task.done():
                                await task
                            await asyncio.sleep(0.05)
            load.stop.set()
            await task
            at_rest = await rest(site, timeout_s=PATIENCE_S)
            verdicts = check_invariants(await gather(site, accepted=list(client.watches), events=client.events))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()
        after = await _schemas(site)
        letters = {vhost: _dead_letters(servers, vhost) for vhost in (API_VHOST, *plan.cells)}
    return {
        "replaced": 2 * len(processes.workers),
        "built": load.tally.requested,
        "deleted": load.tally.deleted,
        "fenced": host.fenced,
        "slowest_round_s": round(load.tally.slowest_s, 3),
        "failed": load.tally.failed,
        "at_rest": at_rest,
        "broken": [f"{one.name}: {'; '.join(one.examples)}" for one in verdicts if not one.holds],
        "dead_letters": {vhost: found for vhost, found in letters.items() if found},
        "migrated": {
            name: f"{before[name].revision} to {one.revision}, runs from {one.oldest}"
            for name, one in after.items()
            if one.revision != before[name].revision
        },
        "not_migrated": [name for name, one in after.items() if one.state is not SchemaState.CURRENT],
        "terminals": dict(Counter(str(track.terminals) for track in client.watches.values())),
    }


async def _schemas(site: Site) -> dict[str, SchemaRevision]:
    """The schemas of the system, as this version judges them."""
    assert site.database_url is not None
    connection = await connect(site.database_url, name="upgrade")
    try:
        return {one.schema: one for one in await find_schemas(connection)}
    finally:
        await connection.close()


def _dead_letters(servers: RealServers, vhost: str) -> dict[str, int]:
    """Queues of a virtual host that keep what was given up, with how much."""
    listed = servers.broker.control("-q", "list_queues", "-p", vhost, "name", "messages", "--formatter", "json")
    return {one["name"]: one["messages"] for one in json.loads(listed) if ".dead" in one["name"] and one["messages"]}


def _print(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")


def _tree_of(old: Path) -> Path:
    """Where a process of the earlier version takes its code from, which must be there."""
    command = [sys.executable, "-c", "import berth; print(berth.__file__)"]
    found = subprocess.run(command, env={"PYTHONPATH": str(old)}, cwd="/", capture_output=True, text=True, check=True)
    return Path(found.stdout.strip()).parents[1].resolve()


def main() -> int:
    """0: upgraded and back, and all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("--short", action="store_true", help="one placement")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    old: Path = options.old.resolve()
    if _tree_of(old) != old:
        _print(f"{old} holds no berth that Python would take")
        return 2
    plan = SHORT if options.short else PLAN
    with real_servers(plan.cells, durable=False) as servers, tempfile.TemporaryDirectory(prefix="berth-upgrade-") as at:
        found = asyncio.run(run(servers, old, Path(at), plan, options.seed))
    text = json.dumps(found, indent=1)
    sys.stdout.write(text + "\n")
    if options.json is not None:
        options.json.write_text(text + "\n")
    sound = found["at_rest"] and not any(found[what] for what in ("failed", "broken", "dead_letters", "not_migrated"))
    return 0 if sound and set(found["terminals"]) == {"1"} else 1  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main())

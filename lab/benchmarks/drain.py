"""How long a drain's plan and the drain itself take, and how many moves it needs, of one host and of a rack.

    python -m lab.benchmarks.drain [--on-host 100] [--rack 40] [--others 40]
        [--instances 1000] [--at-once 16] [--json FILE]

Real servers and a process for each worker. The rack is the hosts of one compute service. First one host of it with
`--on-host` instances is drained and enabled again; then the whole rack. The fewest moves there can be are as
many as there are instances on the drained hosts. For comparison the same rack is planned host by host: what would go
to another host of the rack would have to move again. The other hosts are as full as the rack. While instances move
the book is read again and again: no provider over capacity, no two members of an anti-affinity group on one host. At
the end all invariants are judged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from berth.audit.gather import gather, rest
from berth.audit.invariants import check_invariants
from berth.client import BuildClient
from berth.client import drains as client_drains
from berth.site import Site
from berth.trial.servers import SystemPlan, real_servers, running_processes
from berth.trial.worker_processes import WorkerProcesses
from bus.clock import new_uuid
from bus.contracts.build import BuildRequest
from bus.contracts.drains import DrainProgress, DrainQuery, DrainStart, DrainTarget
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.operations import AdminState, SetAdminState
from compute_sim.config import ComputeConfig, HostSize
from lab.benchmarks.command import as_json, measured, parser_of, positive, write
from lab.benchmarks.street_systems import connected

CELL = "cell1"
SERVICE = "cell1-rack"
TIMEOUT_S = 400.0
POLL_S = 0.2
BIG = HostSize(vcpus=64, memory_mb=262_144, disk_gb=4_000)
GROUPS, MEMBERS = 5, 8  # anti-affinity groups in the rack, and their members

_OVER = "SELECT count(*) FROM inventories WHERE used > capacity"
_PLACES = """
SELECT a.consumer::text, r.uuid::text FROM allocations a JOIN providers p ON p.id = a.provider_id
JOIN providers r ON r.id = p.root_id JOIN consumers c ON c.uuid = a.consumer
WHERE c.released_at IS NULL AND a.consumer = ANY($1::uuid[]) GROUP BY 1, 2
"""
_MOVES = "SELECT count(*) FROM moves WHERE kind IN ('live-migrate', 'migrate')"


class DrainFigures(Struct, frozen=True, kw_only=True):
    """One drain. fewest: the lower bound of its moves; moves: those requested. looks: at the book while it ran."""

    hosts: int
    instances: int
    plan_ms: float
    start_ms: float
    drain_s: float
    fewest: int
    moves: int
    failed: int
    looks: int
    host_by_host_again: int | None = None
    broken: tuple[str, ...] = ()


class Rack:
    """A system with a rack of hosts to drain."""

    def __init__(self, processes: WorkerProcesses, site: Site, client: BuildClient, at_once: int) -> None:
        self.processes = processes
        self.site = site
        self.client = client
        self.at_once = at_once
        self.others: list[str] = []
        self.groups: dict[str, list[str]] = defaultdict(list)
        self.looks = 0
        self.broken: list[str] = []

    async def start(self, rack: int, others: int) -> list[str]:
        """The rack's hosts, by name, once all hosts can be used."""
        worker = f"compute-{SERVICE}"
        size = msgspec.json.encode([BIG]).decode()
        settings = {"BERTH_COMPUTE__HOSTS": str(rack), "BERTH_COMPUTE__SIZES": size, "BERTH_COMPUTE__GPU_SHARE": "0"}
        self.processes.start(worker, "compute", "--cell", CELL, "--service", SERVICE, settings=settings)
        await self.processes.ready([worker])
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                page = await self.client.hosts(limit=10_000, timeout_s=TIMEOUT_S, up=True)
                mine = [host.name for host in page.hosts if host.service == SERVICE and host.resources]
                if len(mine) == rack and sum(bool(host.resources) for host in page.hosts) == rack + others:
                    self.others = sorted(host.name for host in page.hosts if host.service != SERVICE)
                    return sorted(mine)
                await asyncio.sleep(POLL_S)

    async def boot(self, hosts: Sequence[str], count: int, rng: random.Random) -> None:
        """So many active instances, spread over these hosts; the first of them in anti-affinity groups."""
        groups = [ServerGroup(uuid=new_uuid(rng), policy=GroupPolicy.ANTI_AFFINITY) for _ in range(GROUPS)]
        if len(hosts) < MEMBERS:
            groups = []
        requests = []
        for number in range(count):
            group = groups[number // MEMBERS] if number < len(groups) * MEMBERS else None
            one = BuildRequest(
                instance_uuid=new_uuid(rng),
                flavor="m1.tiny",
                project_id="bench",
                host=hosts[number % len(hosts)],
                server_group=group,
            )
            requests.append(one)
            if group is not None:
                self.groups[group.uuid].append(one.instance_uuid)
        tracks = await self.client.boot(requests, retry_for_s=TIMEOUT_S)
        if not await self.client.wait(TIMEOUT_S) or any(track.state != "active" for track in tracks):
            raise SystemExit(f"{sum(track.state != 'active' for track in tracks)} boots are not active")

    async def drain(self, name: str, target: DrainTarget, hosts: Sequence[str]) -> DrainFigures:
        """Plan, drain and follow."""
        clock, bus = self.site.clock, self.client.bus
        began_s = clock.monotonic()
        plan = await client_drains.plan(bus, DrainQuery(host=name, target=target))
        planned_s = clock.monotonic()
        again = None if len(hosts) == 1 else await self._host_by_host(hosts)
        moves, self.looks = await self._count_moves(), 0
        start_s = clock.monotonic()
        command = DrainStart(
            drain=new_uuid(random.SystemRandom()), name=name, target=target, at_once=self.at_once, by="bench"
        )
        async with self._watched():
            begun = await client_drains.start(bus, command)
            begun_s = clock.monotonic()
            ended = await self._followed(begun)
            ended_s = clock.monotonic()
        used = await self._count_moves() - moves
        looks = self.looks
        await rest(self.site, timeout_s=TIMEOUT_S)
        verdicts = check_invariants(await gather(self.site, accepted=list(self.client.tracks)))
        self.broken += [f"{one.sentence}: {one.examples}" for one in verdicts if not one.holds]
        return DrainFigures(
            hosts=len(hosts),
            instances=len(plan.moves),
            plan_ms=round(1000 * (planned_s - began_s), 1),
            start_ms=round(1000 * (begun_s - start_s), 1),
            drain_s=round(ended_s - start_s, 2),
            fewest=len(plan.moves),
            moves=used,
            failed=len(ended.failed),
            looks=looks,
            host_by_host_again=again,
            broken=tuple(self.broken),
        )

    async def _followed(self, begun: DrainProgress) -> DrainProgress:
        return await client_drains.follow(self.client.bus, begun.id, clock=self.site.clock, timeout_s=TIMEOUT_S)

    async def _host_by_host(self, hosts: Sequence[str]) -> int:
        """How many instances a plan of one host at a time sends to another host of the rack."""
        again = 0
        for name in hosts:
            plan = await client_drains.plan(self.client.bus, DrainQuery(host=name, target=DrainTarget.HOST))
            again += sum(one.hosts[0] in hosts for one in plan.moves if one.hosts)
        return again

    async def _count_moves(self) -> int:
        database = self.site.environment("bench").database("scheduler", pool_size=1)
        try:
            async with database.raw() as connection:
                return int(await connection.fetchval(_MOVES))
        finally:
            await database.close()

    @contextlib.asynccontextmanager
    async def _watched(self):  # type: ignore[no-untyped-def]
        """Look at the book again and again meanwhile."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        database = self.site.environment("bench").database("placement", pool_size=1)
        group_of = {uuid: group for group, members in self.groups.items() for uuid in members}
        try:
            while True:
                async with database.raw() as connection:
                    over = await connection.fetchval(_OVER)
                    places = await connection.fetch(_PLACES, list(group_of))
                shared = Counter((group_of[uuid], host) for uuid, host in places)
                if over:
                    self.broken.append(f"{over} inventories over capacity on the way")
                self.broken += [f"{n} of group {group} on {host}" for (group, host), n in shared.items() if n > 1]
                self.looks += 1
                await asyncio.sleep(POLL_S)
        finally:
            await database.close()


async def measure(options: argparse.Namespace) -> list[DrainFigures]:
    """On servers of its own."""
    compute = ComputeConfig(hosts=options.others, sizes=(BIG,), gpu_share=0.0)
    plan = SystemPlan(cells=(CELL,), schedulers=2, placements=1, compute=compute)
    with real_servers((CELL,), durable=True) as servers:
        async with running_processes(servers, plan) as (processes, site), connected(site, keep_events=False) as client:
            rack = Rack(processes, site, client, options.at_once)
            names, rng = await rack.start(options.rack, options.others), random.Random(1)
            await rack.boot(names[:1], options.on_host, rng)
            one = await rack.drain(names[0], DrainTarget.HOST, names[:1])
            enabled = SetAdminState(host=names[0], state=AdminState.ENABLED, by="bench")
            await client.set_admin_state(enabled, timeout_s=TIMEOUT_S)
            await rack.boot(names, options.instances, rng)
            await rack.boot(rack.others, options.instances, rng)
            return [one, await rack.drain(SERVICE, DrainTarget.SERVICE, names)]


def main() -> int:
    """Print, and write when asked. Exit status 1 when an invariant was broken."""
    parser = parser_of(__doc__)
    parser.add_argument("--on-host", type=positive, default=100)
    parser.add_argument("--rack", type=positive, default=40)
    parser.add_argument("--others", type=positive, default=40)
    parser.add_argument("--instances", type=positive, default=1_000)
    parser.add_argument("--at-once", type=positive, default=16)
    options = parser.parse_args()
    figures = measured(measure(options))
    print(as_json(figures).decode())
    write(figures, options.json)
    return 1 if any(one.broken for one in figures) else 0


if __name__ == "__main__":
    sys.exit(main())

"""How long the instances of a fenced host take to be elsewhere, and what is left of them when the host returns.

    python -m lab.benchmarks.evacuation [--hosts 50] [--instances 1000] [--json FILE]

Real servers and a process for each worker; every instance has policy `restart`. One host's compute service is killed
and the host is fenced. Measured: from the operator's decision until each instance is claimed elsewhere, and until it is
active there. Then the host returns and is enabled; the invariants are judged twice, before and after (0 doubled, 0
orphans), and the host's own list of machines must be empty before it is used again.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from berth.audit.gather import gather, rest
from berth.audit.invariants import InvariantVerdict, check_invariants
from berth.client import BuildClient
from berth.load import percentiles
from berth.site import Site
from berth.trial.servers import SystemPlan, real_servers, running_processes
from berth.trial.worker_processes import WorkerProcesses
from bus.clock import new_uuid
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import BuildRequest, HostRecord
from bus.contracts.moves import MoveEvent, MoveKind, MoveState
from bus.contracts.operations import AdminState, EvacuationPolicy, SetAdminState
from compute_sim.config import ComputeConfig, HostSize
from lab.benchmarks.command import as_json, measured, parser_of, positive, write
from lab.benchmarks.street_systems import connected

CELL = "cell1"
SERVICE = "cell1-alone"  # the compute service that has the one host
WORKER = f"compute-{SERVICE}"
TIMEOUT_S = 240.0
POLL_S = 0.2
BIG = HostSize(vcpus=64, memory_mb=262_144, disk_gb=4_000)
# Invariants that a service which is known to be dead breaks; they hold again when it is back.
OF_THE_DEAD = frozenset({"services_there"})


class EvacuationFigures(Struct, frozen=True, kw_only=True):
    """The results. claimed_ms, active_ms: from the decision to fence. lost: machines that the host destroyed."""

    hosts: int
    instances: int
    on_host: int
    evacuated: int
    claimed_ms: dict[str, float]
    active_ms: dict[str, float]
    returned_s: float
    broken: tuple[str, ...] = ()


class Drill:
    """One host of many is killed, fenced and brought back, on a system that runs."""

    def __init__(self, processes: WorkerProcesses, site: Site, client: BuildClient) -> None:
        self.processes = processes
        self.site = site
        self.client = client
        self.claimed_s: dict[str, float] = {}  # monotonic, by instance
        self.active_s: dict[str, float] = {}
        self.failed: list[MoveEvent] = []

    async def start_host(self) -> None:
        """The service of the one host, beside those of the plan."""
        arguments = ("compute", "--cell", CELL, "--service", SERVICE)
        self.processes.start(WORKER, *arguments, settings={"BERTH_COMPUTE__HOSTS": "1"})
        await self.processes.ready([WORKER])

    async def known(self, hosts: int) -> HostRecord:
        """Wait until so many hosts can be used; the one of `SERVICE`."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                page = await self.client.hosts(limit=10_000, timeout_s=TIMEOUT_S, up=True)
                mine = [host for host in page.hosts if host.service == SERVICE and host.resources]
                if mine and sum(bool(host.resources) for host in page.hosts) >= hosts:
                    return mine[0]
                await asyncio.sleep(POLL_S)

    async def boot(self, instances: int, rng: random.Random) -> None:
        """All active. Ends the program where one is not."""
        requests = [
            BuildRequest(
                instance_uuid=new_uuid(rng),
                flavor="m1.tiny",
                project_id="bench",
                on_host_failure=EvacuationPolicy.RESTART,
            )
            for _ in range(instances)
        ]
        tracks = await self.client.boot(requests, retry_for_s=TIMEOUT_S)
        if not await self.client.wait(TIMEOUT_S) or any(track.state != "active" for track in tracks):
            raise SystemExit(f"{sum(track.state != 'active' for track in tracks)} boots are not active")

    def on_host(self, name: str) -> set[str]:
        """The instances that were built on a host."""
        tracks = self.client.tracks.values()
        return {track.instance_uuid for track in tracks if track.last is not None and track.last.host == name}

    async def listen(self) -> None:
        """Note when instances are claimed elsewhere, and active there."""
        bus = self.client.bus
        consumer = Consumer(bus, "client.moves.{process}", self._on_events, concurrency=1, process=self.client.process)
        await consumer.start()
        self._listening = asyncio.create_task(consumer.run())

    async def _on_events(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            event = received.message
            if isinstance(event, MoveEvent) and event.kind is MoveKind.EVACUATE:
                now_s = self.site.clock.monotonic()
                if event.state in (MoveState.FINISHING, MoveState.DONE):
                    self.claimed_s.setdefault(event.instance_uuid, now_s)
                if event.state is MoveState.DONE:
                    self.active_s.setdefault(event.instance_uuid, now_s)
                elif event.terminal:
                    self.failed.append(event)
        return [Done()] * len(batch)

    async def decide(self, host: HostRecord, state: AdminState) -> None:
        """As an operator who knows that the host is off."""
        decision = SetAdminState(host=host.uuid, state=state, reason="drill", by="bench", force=True)
        await self.client.set_admin_state(decision, timeout_s=TIMEOUT_S)

    async def until_used(self, host: HostRecord) -> None:
        """Wait until the host may be built on again: its cell has lifted the fence."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                page = await self.client.hosts(limit=10_000, timeout_s=TIMEOUT_S, up=True)
                found = next((one for one in page.hosts if one.uuid == host.uuid), None)
                is_fenced = found is None or (found.admin is not None and found.admin.state is AdminState.FENCED)
                if found is not None and found.enabled and not is_fenced:
                    return
                await asyncio.sleep(POLL_S)

    async def verdicts(self) -> Sequence[InvariantVerdict]:
        """Of the whole system, at rest."""
        await rest(self.site, timeout_s=TIMEOUT_S)
        return check_invariants(await gather(self.site, accepted=list(self.client.tracks), events=self.client.events))

    async def run(
        self,
        hosts: int,
        instances: int,
        rng: random.Random,
        *,
        fence: Callable[[HostRecord], Awaitable[None]] | None = None,
    ) -> EvacuationFigures:
        """The whole of it. fence: how the dead host comes to be fenced; None: an operator does it at once."""
        await self.start_host()
        host = await self.known(hosts)
        await self.boot(instances, rng)
        mine = self.on_host(host.name)
        await self.listen()
        await asyncio.to_thread(self.processes.kill, WORKER)
        decided_s = self.site.clock.monotonic()
        await (fence(host) if fence is not None else self.decide(host, AdminState.FENCED))
        async with asyncio.timeout(TIMEOUT_S):
            while not mine <= self.active_s.keys():  # noqa: ASYNC110  (events come from a consumer)
                await asyncio.sleep(POLL_S)
        before = [one for one in await self.verdicts() if not one.holds and one.name not in OF_THE_DEAD]
        back_s = self.site.clock.monotonic()
        await asyncio.to_thread(self.processes.restart, WORKER)
        await self.processes.ready([WORKER])
        await self.decide(host, AdminState.ENABLED)
        await self.until_used(host)
        returned_s = self.site.clock.monotonic() - back_s
        after = [one for one in await self.verdicts() if not one.holds]
        self._listening.cancel()
        return EvacuationFigures(
            hosts=hosts,
            instances=instances,
            on_host=len(mine),
            evacuated=len(self.active_s.keys() & mine),
            claimed_ms=percentiles([1000 * (self.claimed_s[uuid] - decided_s) for uuid in mine]),
            active_ms=percentiles([1000 * (self.active_s[uuid] - decided_s) for uuid in mine]),
            returned_s=round(returned_s, 1),
            broken=tuple(f"{one.sentence}: {one.examples}" for one in (*before, *after)),
        )


def plan_of(hosts: int) -> SystemPlan:
    """All hosts but one at one service; two schedulers, so that either may do it."""
    return SystemPlan(
        cells=(CELL,), schedulers=2, placements=1, compute=ComputeConfig(hosts=hosts - 1, sizes=(BIG,), gpu_share=0.0)
    )


async def measure(hosts: int, instances: int) -> EvacuationFigures:
    """On servers of its own."""
    with real_servers((CELL,), durable=True) as servers:
        async with running_processes(servers, plan_of(hosts)) as (processes, site), connected(site) as client:
            return await Drill(processes, site, client).run(hosts, instances, random.Random(1))


def main() -> int:
    """Print, and write when asked. Exit status 1 when an invariant was broken."""
    parser = parser_of(__doc__)
    parser.add_argument("--hosts", type=positive, default=50)
    parser.add_argument("--instances", type=positive, default=1_000)
    options = parser.parse_args()
    started = time.monotonic()
    figures = measured(measure(options.hosts, options.instances))
    print(as_json(figures).decode())
    print(f"{time.monotonic() - started:.0f} s in all", file=sys.stderr)
    write(figures, options.json)
    return 1 if figures.broken else 0


if __name__ == "__main__":
    sys.exit(main())

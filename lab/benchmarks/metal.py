"""Ten thousand bare-metal nodes: reading them all, rest, 500 deploys of a busy Ironic.

    python -m lab.benchmarks.metal [--nodes 10000] [--deploys 500] [--rest 60] [--json FILE]

Private servers and a process for each worker; Ironic is simulated, in a process of its own, over real HTTP and a real
exchange (metal_ironic.py). Measured: from the start of `ironic-sync` until placement offers every node, then until a
scheduler has them all from their compute service; CPU and requests to Ironic in a minute without any change; builds at
once while a tenth of all changes are answered 409 and every deployment beyond 100 nodes 503, with their requests.
Exit status 1: a build is not active.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
from msgspec import Struct

from berth.bus_client import BuildClient
from berth.config.ports import free_port
from berth.config.settings import ComputeSettings
from berth.config.site import Site
from berth.up.embedded.process import Account, GuardedProcess
from berth.up.servers import RealServers, SystemPlan, real_servers, running_processes
from berth.up.worker_processes import WorkerProcesses
from bus.clock import new_uuid
from bus.contracts.build import BuildRequest
from compute_agent.drivers.ironic.config import IronicConfig
from compute_sim.config import SimulatedConfig
from lab.benchmarks import probe
from lab.benchmarks.command import as_json, measured, parser_of, positive, write
from lab.benchmarks.street_systems import connected, progress
from lab.load import percentiles

CELL, SERVICE = "cell1", "cell1-metal"
COMPUTE, SYNC = f"compute-{SERVICE}", "ironic-sync"
FLAVOR, CLASS = "bm.gold", "CUSTOM_BAREMETAL_GOLD"
TIMEOUT_S = 600.0
POLL_S = 0.25
OFFERED = """
SELECT count(*) FROM inventories i JOIN resource_classes c ON c.id = i.class_id
WHERE c.name = $1 AND i.total > i.reserved
"""
WORKERS = 100  # of Ironic's conductor, as its default; more nodes under way are answered 503
LOCKED = 0.1  # of changes answered 409


class MetalFigures(Struct, kw_only=True):
    """The results. Seconds; requests by Ironic's path; CPU in seconds, by worker."""

    nodes: int
    deploys: int
    resync_s: float = 0.0
    resync_cpu_s: dict[str, float] = {}
    announced_s: float = 0.0
    rest_s: float = 0.0
    rest_cpu_s: dict[str, float] = {}
    rest_requests: dict[str, int] = {}
    deploy_states: dict[str, int] = {}
    deploy_failures: list[str] = []
    deploy_p50_s: float = 0.0
    deploy_max_s: float = 0.0
    deploy_attempts: int = 0
    deploy_requests: dict[str, int] = {}
    deploy_requests_per_s: float = 0.0
    deploy_cpu_s: dict[str, float] = {}


class MetalBench:
    """A running system, its Ironic, and what is read of both."""

    def __init__(self, servers: RealServers, processes: WorkerProcesses, here: Site, ironic: httpx.AsyncClient) -> None:
        self._servers = servers
        self._processes = processes
        self._here = here
        self._ironic = ironic

    def cpu(self) -> dict[str, float]:
        """CPU seconds that each process has used so far."""
        pids = {name: worker.process.pid for name, worker in self._processes.workers.items()}
        pids |= {"broker": self._servers.broker.pid, "postgresql": self._servers.postgres.pid}
        return {name: probe.cpu_s(pid) for name, pid in pids.items()}

    def used(self, before: dict[str, float]) -> dict[str, float]:
        """The resources that each has used since."""
        return {name: round(now - before.get(name, 0.0), 2) for name, now in self.cpu().items()}

    async def counts(self) -> Counter[str]:
        """Requests that Ironic has had."""
        return Counter((await self._ironic.get("/bench/counts")).json())

    async def requests(self, before: Counter[str]) -> dict[str, int]:
        """... since."""
        return {name: count - before[name] for name, count in (await self.counts()).items() if count > before[name]}

    async def resync(self, figures: MetalFigures) -> None:
        """ironic-sync reads everything; then the compute service announces it."""
        before, began = self.cpu(), time.perf_counter()
        self._processes.start(SYNC, SYNC, settings={"BERTH_IRONIC_SYNC__URL": str(self._ironic.base_url)})
        placement = self._here.environment("bench").database("placement", pool_size=1)
        try:
            async with asyncio.timeout(TIMEOUT_S), placement.raw() as connection:
                while await connection.fetchval(OFFERED, CLASS) != figures.nodes:  # noqa: ASYNC110  (another process)
                    await asyncio.sleep(POLL_S)
        finally:
            await placement.close()
        figures.resync_s = round(time.perf_counter() - began, 2)
        figures.resync_cpu_s = self.used(before)

    async def announced(self, figures: MetalFigures, client: BuildClient) -> None:
        """The compute service starts: until the scheduler has all of its nodes as up."""
        began = time.perf_counter()
        config = IronicConfig(url=str(self._ironic.base_url))
        settings = {
            "BERTH_COMPUTE__DRIVER": "ironic",
            "BERTH_COMPUTE__IRONIC": msgspec.json.encode(config).decode(),
        }
        self._processes.start(COMPUTE, "compute", "--cell", CELL, "--service", SERVICE, settings=settings)
        async with asyncio.timeout(TIMEOUT_S):
            known = 0
            while known != figures.nodes:
                await asyncio.sleep(POLL_S)
                services = (await client.services(limit=10, timeout_s=TIMEOUT_S, up=True)).services
                known = sum(one.in_placement for one in services)
        figures.announced_s = round(time.perf_counter() - began, 2)

    async def rest(self, figures: MetalFigures, seconds: float) -> None:
        """Nothing changes."""
        await asyncio.sleep(5.0)  # what the announcement still causes
        before, requests = self.cpu(), await self.counts()
        await asyncio.sleep(seconds)
        figures.rest_s = seconds
        figures.rest_cpu_s = self.used(before)
        figures.rest_requests = await self.requests(requests)

    async def deploys(self, figures: MetalFigures, client: BuildClient) -> None:
        """So many builds at once, of an Ironic that turns some requests down."""
        await self._ironic.post("/bench/trouble", params={"workers": WORKERS, "locked": LOCKED})
        before, requests, began = self.cpu(), await self.counts(), time.perf_counter()
        rng = random.Random(1)
        requested = [
            BuildRequest(instance_uuid=new_uuid(rng), flavor=FLAVOR, project_id="bench", build_timeout_s=TIMEOUT_S)
            for _ in range(figures.deploys)
        ]
        watches = await client.boot(requested, retry_for_s=TIMEOUT_S)
        if not await client.wait(TIMEOUT_S):
            raise SystemExit("not all builds have ended")
        took = time.perf_counter() - began
        figures.deploy_states = dict(Counter(watch.state for watch in watches))
        figures.deploy_failures = [
            f"{watch.last.code}: {watch.last.reason}"
            for watch in watches
            if watch.last is not None and watch.state != "active"
        ]
        active_s = [watch.latency_s for watch in watches if watch.state == "active" and watch.latency_s is not None]
        figures.deploy_p50_s = round(percentiles(active_s).get("p50", 0.0), 1)
        figures.deploy_max_s = round(took, 1)
        figures.deploy_attempts = sum(watch.last.attempt for watch in watches if watch.last is not None)
        figures.deploy_requests = await self.requests(requests)
        asked = sum(count for name, count in figures.deploy_requests.items() if not name.isdecimal())
        figures.deploy_requests_per_s = round(asked / took, 1)
        figures.deploy_cpu_s = self.used(before)


@contextlib.asynccontextmanager
async def ironic_process(nodes: int, broker: str, directory: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The simulated Ironic, answering."""
    port = free_port()
    command = [sys.executable, "-m", "lab.benchmarks.metal_ironic", "--nodes", str(nodes), "--broker", broker]
    process = GuardedProcess(
        [*command, "--port", str(port)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=directory,
        log=directory / "ironic.log",
        account=Account(()),
    )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/bench/counts", trust_env=False).is_success
        return False

    try:
        await asyncio.to_thread(process.wait_until, "the Ironic that is simulated", answers)
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
            yield client
    finally:
        await asyncio.to_thread(process.stop)


async def measure(options: argparse.Namespace) -> MetalFigures:
    """A system of its own, through all of it."""
    figures = MetalFigures(nodes=options.nodes, deploys=options.deploys)
    plan = SystemPlan(
        cells=(CELL,),
        schedulers=1,
        placements=1,
        computes_per_cell=0,
        compute=ComputeSettings(simulated=SimulatedConfig(hosts=0)),
        durable=True,
    )
    with real_servers((CELL,), durable=True) as servers:
        async with running_processes(servers, plan) as (processes, here):
            broker = here.settings.bus.url
            async with (
                ironic_process(options.nodes, broker, processes.directory) as ironic,
                connected(here, BuildClient) as client,
            ):
                await run(MetalBench(servers, processes, here, ironic), figures, client, options.rest)
    return figures


async def run(bench: MetalBench, figures: MetalFigures, client: BuildClient, rest_s: float) -> None:
    """One part after the other."""
    progress(f"{figures.nodes} nodes are read")
    await bench.resync(figures)
    progress(f"{figures.resync_s} s; they are announced")
    await bench.announced(figures, client)
    progress(f"{figures.announced_s} s; {rest_s:g} s of rest")
    await bench.rest(figures, rest_s)
    progress(f"{figures.deploys} builds at once")
    await bench.deploys(figures, client)


def main() -> int:
    """Print, and write when requested."""
    options = parser_of(__doc__)
    options.add_argument("--nodes", type=positive, default=10_000)
    options.add_argument("--deploys", type=positive, default=500)
    options.add_argument("--rest", type=float, default=60.0, help="seconds")
    wanted = options.parse_args()
    figures = measured(measure(wanted))
    print(as_json(figures).decode())
    write(figures, wanted.json)
    return 0 if figures.deploy_states == {"active": figures.deploys} else 1


if __name__ == "__main__":
    sys.exit(main())

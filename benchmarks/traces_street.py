"""The cost of traces in the street: CPU a boot of all processes and servers, without traces and with them, in turns.

    python -m benchmarks.traces_street [--ratio 0.05] [--turns 20] [--boots 2000] [--idle 60] [--hosts 2000]

One system of real processes on a private RabbitMQ and a private PostgreSQL, as `benchmarks.street` has it. Its workers
trace what their client has sampled and nothing else, and the client samples in every second turn. So both turns have
the same processes, caches and database, and a machine that becomes slower does so for both. The collector's own CPU is
not counted; exporting to it is.

Boots a second of both kinds of turn are compared as well, and the latency of boots one at a time before each burst.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time

import uvloop
from msgspec import Struct
from msgspec.structs import replace

from benchmarks import probe
from benchmarks.street import positive
from benchmarks.street_systems import BIG, servers_for
from benchmarks.traces import COLLECTOR, WAIT_S, summary
from berth.client import BuildClient
from berth.servers import RealServers, SystemPlan, running_processes
from berth.settings import TraceSettings
from berth.site import Site
from berth.worker_processes import WorkerProcesses
from bus.clock import new_uuid
from bus.contracts.build import BuildRequest
from bus.service.telemetry import configure_logging
from compute_sim.config import ComputeConfig

CELLS = ("cell1", "cell2", "cell3", "cell4")
WARM_UP = 2
# Between the turns, so that what a turn leaves behind (exports, outboxes, acknowledgements) is counted as its own.
REST_S = 6.0


class Turn(Struct, frozen=True):
    """Of one burst: milliseconds of CPU a boot, and boots a second. alone_ms: p50 of boots one at a time before it."""

    cpu_ms: float
    per_s: float
    alone_ms: float


class Street:
    """One system, whose bursts are measured."""

    def __init__(self, servers: RealServers, processes: WorkerProcesses, client: BuildClient) -> None:
        self._servers = servers
        self._processes = processes
        self._client = client
        self._rng = random.Random(2)

    async def burst(self, boots: int, idle: int) -> Turn:
        """Some boots one at a time, then so many at once, and what those cost until all is quiet again."""
        alone = [await self._boot(1) for _ in range(idle)]
        used = self._used()
        took_s = await self._boot(boots)
        await asyncio.sleep(REST_S)
        return Turn((self._used() - used) / boots * 1000, boots / took_s, statistics.median(alone) * 1000)

    async def _boot(self, boots: int) -> float:
        """So many at once; the seconds until the last has ended."""
        began = time.monotonic()
        await self._client.boot(
            [BuildRequest(instance_uuid=new_uuid(self._rng), flavor="m1.tiny", project_id="p") for _ in range(boots)]
        )
        assert await self._client.wait(WAIT_S)
        return time.monotonic() - began

    def _used(self) -> float:
        """CPU seconds of all processes so far."""
        workers = [one.process.pid for one in self._processes.workers.values()]
        pids = [self._servers.broker.pid, self._servers.postgres.pid, *workers]
        return time.process_time() + sum(map(probe.cpu_s, pids))


async def measure(options: argparse.Namespace, endpoint: str) -> list[tuple[Turn, Turn]]:
    """Each pair of turns, without and with traces."""
    sampling = TraceSettings(endpoint=endpoint, ratio=options.ratio, most_per_s=100_000.0)
    workers = {
        "BERTH_TRACES__ENDPOINT": endpoint,
        "BERTH_TRACES__RATIO": "0",
        "BERTH_TRACES__MOST_PER_S": "100000",
    }
    plan = SystemPlan(
        cells=CELLS,
        schedulers=1,
        placements=1,
        compute=ComputeConfig(hosts=options.hosts // len(CELLS), gpu_share=0.0, sizes=(BIG,)),
    )
    with servers_for(CELLS, None) as servers:
        async with running_processes(servers, plan, extra=workers) as (processes, here):
            sampled = Site(replace(here.settings, traces=sampling))
            bus = sampled.bus("client")
            tracer = bus.tracer
            client = BuildClient(bus, clock=sampled.clock, process="client")
            await client.open()
            street = Street(servers, processes, client)
            pairs: list[tuple[Turn, Turn]] = []
            try:
                for number in range(-WARM_UP, options.turns):
                    turn = {}
                    for on in (True, False) if number % 2 else (False, True):
                        bus.tracer = tracer if on else None
                        turn[on] = await street.burst(options.boots, options.idle)
                    if number >= 0:
                        pairs.append((turn[False], turn[True]))
                        print(
                            "CPU ms a boot, boots a second, ms of a boot alone: "
                            f"{_line(turn[False])} without, {_line(turn[True])} with",
                            flush=True,
                        )
            finally:
                await client.close()
    return pairs


def _line(turn: Turn) -> str:
    return f"{turn.cpu_ms:.3f}, {turn.per_s:.0f}, {turn.alone_ms:.1f}"


def main() -> None:
    """Print the pairs and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--boots", type=int, default=2000)
    parser.add_argument("--idle", type=positive, default=60, help="boots one at a time before each burst")
    parser.add_argument("--hosts", type=int, default=2000)
    options = parser.parse_args()
    configure_logging(process="traces", role="benchmark", level="error", style="pretty")
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as collector:
        try:
            assert collector.stdout is not None
            endpoint = f"http://127.0.0.1:{collector.stdout.readline().strip()}"
            pairs = uvloop.run(measure(options, endpoint))
        finally:
            collector.terminate()
    cpu = summary([(off.cpu_ms, on.cpu_ms) for off, on in pairs])
    speed = summary([(off.per_s, on.per_s) for off, on in pairs])
    alone = summary([(off.alone_ms, on.alone_ms) for off, on in pairs])
    print(
        f"traces at a ratio of {options.ratio:g}\nCPU a boot: {cpu}\nboots a second: {speed}\n"
        f"a boot alone: {alone}\n{time.monotonic() - began:.0f} s in all"
    )


if __name__ == "__main__":
    main()

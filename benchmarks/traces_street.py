"""The cost of traces in the street: CPU a boot of all processes and servers, without traces and with them, in turns.

    python -m benchmarks.traces_street [--ratio 0.05] [--turns 20] [--boots 2000] [--idle 60] [--hosts 2000] [--watched]

One system of real processes on a private RabbitMQ and a private PostgreSQL, as `benchmarks.street` has it. Its workers
trace what their client has sampled and nothing else, and the client samples in every second turn. So both turns have
the same processes, caches and database, and a machine that becomes slower does so for both. The collector's own CPU is
not counted; exporting to it is.

--watched: what the page, the metrics and the traces cost together. In each turn with them a web server runs whose page
Now a viewer follows and reads every 2 s, and each worker's metrics are scraped every 15 s, as by Prometheus. The web
server is counted, the viewer is not.

Boots a second of both kinds of turn are compared as well, and the latency of boots one at a time before each burst.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop
from msgspec import Struct
from msgspec.structs import replace

from benchmarks import probe
from benchmarks.street import positive
from benchmarks.street_systems import BIG, servers_for
from benchmarks.traces import COLLECTOR, WAIT_S, summary
from berth.client import BuildClient
from berth.embedded.process import free_port
from berth.servers import RealServers, SystemPlan, running_processes, variables
from berth.settings import Settings, TraceSettings
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


VIEWER = """
import sys, threading, time, urllib.request
page, *metrics = sys.argv[1:]
def follow():
    for _ in urllib.request.urlopen(page + "/now/events"): pass
def repeat(urls, every_s):
    while True:
        for url in urls: urllib.request.urlopen(url).read()
        time.sleep(every_s)
while True:
    try: urllib.request.urlopen(page + "/").read(); break
    except OSError: time.sleep(0.1)
threading.Thread(target=follow, daemon=True).start()
threading.Thread(target=repeat, args=([page + "/"], 2), daemon=True).start()
print("watching", flush=True)
repeat(metrics, 15)
"""


class Turn(Struct, frozen=True):
    """Of one burst: milliseconds of CPU a boot, and boots a second. alone_ms: p50 of boots one at a time before it."""

    cpu_ms: float
    per_s: float
    alone_ms: float


class Street:
    """One system, whose bursts are measured."""

    def __init__(
        self, servers: RealServers, processes: WorkerProcesses, client: BuildClient, settings: Settings
    ) -> None:
        self._servers = servers
        self._processes = processes
        self._client = client
        self._settings = settings
        self._rng = random.Random(2)

    @asynccontextmanager
    async def _watched(self, *, wanted: bool) -> AsyncIterator[list[int]]:
        """The processes of the page, as long as it is looked at."""
        if not wanted:
            yield []
            return
        port = free_port()
        web = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "berth", "web", "--listen", f"127.0.0.1:{port}"),
            env={**os.environ, **variables(self._settings)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        scraped = [f"http://127.0.0.1:{one.port}/metrics" for one in self._processes.workers.values()]
        viewer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", VIEWER, f"http://127.0.0.1:{port}", *scraped, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert viewer.stdout is not None
            assert await viewer.stdout.readline(), "the viewer did not start"
            yield [web.pid]
        finally:
            viewer.kill()
            await viewer.wait()
            web.terminate()
            await web.wait()

    async def burst(self, boots: int, idle: int, *, watched: bool) -> Turn:
        """Some boots one at a time, then so many at once, and what those cost until all is quiet again."""
        async with self._watched(wanted=watched) as more:
            alone = [await self._boot(1) for _ in range(idle)]
            used = self._used(more)
            took_s = await self._boot(boots)
            await asyncio.sleep(REST_S)
            cpu_ms = (self._used(more) - used) / boots * 1000
            return Turn(cpu_ms, boots / took_s, statistics.median(alone) * 1000)

    async def _boot(self, boots: int) -> float:
        """So many at once; the seconds until the last has ended."""
        began = time.monotonic()
        await self._client.boot(
            [BuildRequest(instance_uuid=new_uuid(self._rng), flavor="m1.tiny", project_id="p") for _ in range(boots)]
        )
        assert await self._client.wait(WAIT_S)
        return time.monotonic() - began

    def _used(self, more: list[int]) -> float:
        """CPU seconds of all processes so far."""
        workers = [one.process.pid for one in self._processes.workers.values()]
        pids = [self._servers.broker.pid, self._servers.postgres.pid, *workers, *more]
        return time.process_time() + sum(map(probe.cpu_s, pids))


async def measure(options: argparse.Namespace, endpoint: str) -> list[tuple[Turn, Turn]]:
    """Each pair of turns, without and with traces (watched: and page and metrics)."""
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
            street = Street(servers, processes, client, here.settings)
            pairs: list[tuple[Turn, Turn]] = []
            try:
                for number in range(-WARM_UP, options.turns):
                    turn = {}
                    for on in (True, False) if number % 2 else (False, True):
                        bus.tracer = tracer if on else None
                        turn[on] = await street.burst(options.boots, options.idle, watched=on and options.watched)
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
    parser.add_argument("--watched", action="store_true", help="page and metrics beside the traces")
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
    what = "page, metrics and traces" if options.watched else "traces"
    cpu = summary([(off.cpu_ms, on.cpu_ms) for off, on in pairs])
    speed = summary([(off.per_s, on.per_s) for off, on in pairs])
    alone = summary([(off.alone_ms, on.alone_ms) for off, on in pairs])
    print(
        f"{what} at a ratio of {options.ratio:g}\nCPU a boot: {cpu}\nboots a second: {speed}\n"
        f"a boot alone: {alone}\n{time.monotonic() - began:.0f} s in all"
    )


if __name__ == "__main__":
    main()

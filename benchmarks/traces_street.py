"""The cost of traces in the street: CPU a boot of all processes and servers, without traces and with them, in turns.

    python -m benchmarks.traces_street [--ratio 0.05] [--turns 20] [--boots 2000] [--hosts 2000]

One system of real processes on a private RabbitMQ and a private PostgreSQL, as `benchmarks.street` has it. Its workers
trace what their client has sampled and nothing else, and the client samples in every second turn. So both turns have
the same processes, caches and database, and a machine that becomes slower does so for both. The collector's own CPU is
not counted; exporting to it is.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time

import uvloop
from msgspec.structs import replace

from benchmarks import probe
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


async def measure(ratio: float, turns: int, boots: int, hosts: int, endpoint: str) -> list[tuple[float, float]]:
    """Milliseconds of CPU a boot, without and with traces, of each pair of turns."""
    sampling = TraceSettings(endpoint=endpoint, ratio=ratio, most_per_s=100_000.0)
    workers = {
        "BERTH_TRACES__ENDPOINT": endpoint,
        "BERTH_TRACES__RATIO": "0",
        "BERTH_TRACES__MOST_PER_S": "100000",
    }
    plan = SystemPlan(
        cells=CELLS,
        schedulers=1,
        placements=1,
        compute=ComputeConfig(hosts=hosts // len(CELLS), gpu_share=0.0, sizes=(BIG,)),
    )
    with servers_for(CELLS, None) as servers:
        async with running_processes(servers, plan, extra=workers) as (processes, here):
            sampled = Site(replace(here.settings, traces=sampling))
            bus = sampled.bus("client")
            tracer = bus.tracer
            client = BuildClient(bus, clock=sampled.clock, process="client")
            await client.open()
            pairs: list[tuple[float, float]] = []
            rng = random.Random(2)
            try:
                for number in range(-WARM_UP, turns):
                    costs = {}
                    for on in (True, False) if number % 2 else (False, True):
                        bus.tracer = tracer if on else None
                        costs[on] = await _turn(client, rng, boots, servers, processes)
                    if number >= 0:
                        pairs.append((costs[False], costs[True]))
                        print(f"{costs[False]:.3f} ms a boot without, {costs[True]:.3f} with", flush=True)
            finally:
                await client.close()
    return pairs


async def _turn(
    client: BuildClient, rng: random.Random, boots: int, servers: RealServers, processes: WorkerProcesses
) -> float:
    began = _used(servers, processes)
    await client.boot(
        [BuildRequest(instance_uuid=new_uuid(rng), flavor="m1.tiny", project_id="p") for _ in range(boots)]
    )
    assert await client.wait(WAIT_S)
    await asyncio.sleep(REST_S)
    return (_used(servers, processes) - began) / boots * 1000


def _used(servers: RealServers, processes: WorkerProcesses) -> float:
    """CPU seconds of all processes so far."""
    pids = [servers.broker.pid, servers.postgres.pid, *(one.process.pid for one in processes.workers.values())]
    return time.process_time() + sum(map(probe.cpu_s, pids))


def main() -> None:
    """Print the pairs and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--boots", type=int, default=2000)
    parser.add_argument("--hosts", type=int, default=2000)
    options = parser.parse_args()
    configure_logging(process="traces", role="benchmark", level="error", style="pretty")
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as collector:
        try:
            assert collector.stdout is not None
            endpoint = f"http://127.0.0.1:{collector.stdout.readline().strip()}"
            pairs = uvloop.run(measure(options.ratio, options.turns, options.boots, options.hosts, endpoint))
        finally:
            collector.terminate()
    print(f"traces at a ratio of {options.ratio:g}: {summary(pairs)}; {time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()

"""The cost of traces: CPU a boot without them and with them, in turns on one running system.

    python -m lab.benchmarks.traces [--ratio 0.05] [--turns 10] [--boots 400] [--hosts 400] [--watched]

--watched: what the page, the metrics and the traces cost together. In each turn with them a web server runs in this
process, a viewer of its page Now holds the stream of events and reads the page every 2 s, and the metrics are scraped
every second (Prometheus: every 15 s).

All workers and the client run in this process (memory buses, a private PostgreSQL), and the processor time of this
process is counted: making, encoding and exporting spans is in it, the broker's and the database's time are not, so the
share is higher than that of a whole system. The collector is a process of its own. Turns alternate, so that a machine
that becomes slower does so for both. Garbage is collected between turns: a whole collection came in every second one,
and took a third of it.

Spans are exported as a running system exports them: when a batch is full, and every 5 s. The second cost is
counted by itself, because a turn is shorter.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from prometheus_client import start_http_server

from berth.client import BuildClient
from berth.settings import DatabaseSettings, Settings, TraceSettings, UpSettings
from berth.site import Site
from berth.trial.up import LocalSystem, site
from berth.web.access import Access
from berth.web.server import WebServer
from bus.bus import Bus
from bus.clock import new_uuid
from bus.contracts.build import BuildRequest
from bus.service.environment import Environment
from bus.service.telemetry import configure_logging
from bus.tracing import tracer as tracer_module
from bus.tracing.tracer import Tracer
from compute_sim.config import ComputeConfig, HostSize

WAIT_S = 120.0
WARM_UP = 2
PAUSE_S = tracer_module.EXPORT_PAUSE_S
COLLECTOR = """
import http.server
class Take(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Take)
print(server.server_port, flush=True)
server.serve_forever()
"""


VIEWER = """
import sys, threading, time, urllib.request
page, metrics = sys.argv[1:]
def follow():
    for _ in urllib.request.urlopen(page + "/now/events"): pass
def repeat(url, every_s):
    while True:
        urllib.request.urlopen(url).read()
        time.sleep(every_s)
threading.Thread(target=follow, daemon=True).start()
threading.Thread(target=repeat, args=(page + "/", 2), daemon=True).start()
urllib.request.urlopen(metrics).read()
print("watching", flush=True)
repeat(metrics, 1)
"""


class SwitchedTraces:
    """The buses of a site, whose traces are turned on and off."""

    def __init__(self) -> None:
        self.buses: list[tuple[Bus, Tracer | None]] = []
        made = Environment.bus

        def bus(environment: Environment, name: str = "api") -> Bus:
            one = made(environment, name)
            self.buses.append((one, one.tracer))
            return one

        Environment.bus = bus  # type: ignore[method-assign,assignment]

    def turn(self, *, on: bool) -> None:
        """Make traces from now on, or none."""
        for bus, tracer in self.buses:
            bus.tracer = tracer if on else None

    async def export(self) -> None:
        """Export what waits in every process."""
        for tracer in {tracer for _, tracer in self.buses if tracer is not None}:
            await tracer._export_waiting()


@asynccontextmanager
async def being_watched(here: Site, *, wanted: bool) -> AsyncIterator[None]:
    """A page with a viewer, and metrics that are scraped, for as long as the block runs."""
    if not wanted:
        yield
        return
    access = Access(None, here.clock)
    web = WebServer(here.environment("web"), here.settings, host="127.0.0.1", port=0, access=access)
    await web.open()
    metrics, _ = start_http_server(0, "127.0.0.1")
    address = f"http://127.0.0.1:{metrics.server_port}/"
    viewer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", VIEWER, web.url, address, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert viewer.stdout is not None
        assert await viewer.stdout.readline(), "the viewer did not start"
        yield
    finally:
        viewer.kill()
        await viewer.wait()
        metrics.shutdown()
        await web.close()


async def measure(
    ratio: float, turns: int, boots: int, hosts: int, endpoint: str, *, watched: bool = False
) -> tuple[list[tuple[float, float]], float]:
    """Milliseconds of CPU a boot, without and with traces (watched: and page and metrics), of each pair of turns; and
    of the exports that come with time, on the average.
    """
    switched = SwitchedTraces()
    tracer_module.EXPORT_PAUSE_S = math.inf  # here they come between turns
    settings = Settings(
        database=DatabaseSettings(),
        traces=TraceSettings(endpoint=endpoint, ratio=ratio, most_per_s=100_000.0),
        up=UpSettings(nodes=0, rest=False, web=False),
        compute=ComputeConfig(hosts=hosts, sizes=(HostSize(vcpus=4096, memory_mb=2**24, disk_gb=2**20),)),
    )
    async with site(settings, directory=None, seed=1) as here:
        system = LocalSystem(here)
        await system.start()
        client = BuildClient(here.bus("client"), clock=here.clock, process="client")
        await client.open()
        pairs: list[tuple[float, float]] = []
        exported = waited = 0.0
        rng = random.Random(2)
        try:
            gc.disable()
            for number in range(-WARM_UP, turns):
                order = (True, False) if number % 2 else (False, True)
                costs = {}
                for on in order:
                    began = time.monotonic()
                    async with being_watched(here, wanted=on and watched):
                        costs[on] = await _turn(client, switched, rng, boots, on=on)
                    waited += time.monotonic() - began if on else 0.0
                if number >= 0:
                    pairs.append((costs[False], costs[True]))
                if number < 0 or waited >= PAUSE_S or number == turns - 1:
                    began, waited = time.process_time(), 0.0
                    await switched.export()
                    exported += time.process_time() - began if number >= 0 else 0.0
        finally:
            gc.enable()
            await client.close()
            await system.in_process.stop()
        return pairs, exported / (turns * boots) * 1000


async def _turn(client: BuildClient, switched: SwitchedTraces, rng: random.Random, boots: int, *, on: bool) -> float:
    switched.turn(on=on)
    gc.collect()  # what the turn before has left
    began = time.process_time()
    requests = [BuildRequest(instance_uuid=new_uuid(rng), flavor="m1.tiny", project_id="p") for _ in range(boots)]
    for start in range(0, boots, 40):
        await client.boot(requests[start : start + 40])
        assert await client.wait(WAIT_S)
    return (time.process_time() - began) / boots * 1000


def summary(pairs: Sequence[tuple[float, float]]) -> str:
    """The median of what is on over what is off, between which values it lies (19 times in 20), where the middle half
    of the pairs lies, and all of them.
    """
    ratios = sorted(on / off for off, on in pairs)
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    least, most = median_interval(ratios) or (-math.inf, math.inf)
    return (
        f"median {statistics.median(ratios):.3f} of {len(ratios)} pairs (19 times in 20 from {least:.3f} to "
        f"{most:.3f}), half of them from {low:.3f} to {high:.3f}, all from {ratios[0]:.3f} to {ratios[-1]:.3f}"
    )


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Between which of these the median of what they are drawn from lies, whatever its distribution (order statistics:
    as many lie below it as heads fall). None: they are too few for that confidence, fewer than 6 for 0.95.
    """
    ordered, count = sorted(values), len(values)
    outside, below = 0.0, -1  # the chance that the median lies below ordered[below] or above its counterpart
    while below < count // 2:
        more = outside + 2 * math.comb(count, below + 1) / 2**count
        if more > 1 - confidence:
            break
        outside, below = more, below + 1
    return None if below < 0 else (ordered[below], ordered[count - 1 - below])


def main() -> None:
    """Print the pairs and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--boots", type=int, default=400)
    parser.add_argument("--hosts", type=int, default=400)
    parser.add_argument("--watched", action="store_true", help="page and metrics beside the traces")
    options = parser.parse_args()
    configure_logging(process="traces", role="benchmark", level="error", style="pretty")
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as collector:
        try:
            assert collector.stdout is not None
            endpoint = f"http://127.0.0.1:{collector.stdout.readline().strip()}"
            parameters = (options.ratio, options.turns, options.boots, options.hosts, endpoint)
            pairs, exports = asyncio.run(measure(*parameters, watched=options.watched))
        finally:
            collector.terminate()
    for off, on in pairs:
        print(f"{off:.3f} ms a boot without, {on:.3f} with: {on / off:.3f}")
    what = "page, metrics and traces" if options.watched else "traces"
    print(f"{what} at a ratio of {options.ratio:g}: {summary(pairs)}; {time.monotonic() - began:.0f} s in all")
    share = exports / statistics.median(off for off, _ in pairs)
    print(f"exports every {PAUSE_S:g} s: {exports:.4f} ms a boot, {share:.3f} of one without traces")


if __name__ == "__main__":
    main()

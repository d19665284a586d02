"""Boots a second, CPU a boot and idle latency with page, metrics and traces, over those without, on one system.

    python -m benchmarks.watched [--pairs 24] [--minutes 9] [--boots 3000] [--idle 60] [--pages 1] [--hosts 2000]

RabbitMQ, PostgreSQL, a process for each worker, `berth web`, a collector and a viewer are started once. Then turns
alternate, two to a pair, in a drawn order (of two pairs one has either order):

    off   the client samples no request; nothing is scraped, no page is open
    on    the client samples --ratio of its requests; the viewer scrapes each worker every 5 s, has --pages pages Now
          and as many pages Fleet open, each read at its own rate

A turn: boots at once (boots a second; CPU a boot until the last is active), --rest seconds, boots one after the other
(p50), and deletes of all of them, which are not measured.

CPU a boot is that of workers, client, broker and database. That of `berth web` is printed separately, because a core
for a watcher is no part of a boot's cost, and so is the sum. "with what follows" is CPU until after the boots one by
one: it has the exports of spans that come up to 5 s later, and what the watchers request of the workers in that time.

The workers' tracers and the listener of `berth web` are not switched. benchmarks/traces.py measures what a tracer
costs without a sampled request. The viewer's CPU is printed separately, the collector's is counted nowhere.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence

import uvloop
from msgspec import Struct
from msgspec.structs import replace

from benchmarks import probe
from benchmarks.street import positive
from benchmarks.street_measure import all_hosts_known, progress
from benchmarks.street_systems import BIG, servers_for
from benchmarks.traces import COLLECTOR, WAIT_S, median_interval
from berth.client import BuildClient
from berth.embedded.process import free_port
from berth.servers import RealServers, SystemPlan, running_processes, variables
from berth.settings import Settings, TraceSettings
from berth.site import Site
from berth.worker_processes import WorkerProcesses
from bus.clock import new_uuid
from bus.contracts.build import BuildRecord, BuildRequest, BuildState
from bus.service.telemetry import configure_logging
from compute_sim.config import ComputeConfig

CELLS = ("cell1", "cell2", "cell3", "cell4")
WARM_UP = 1
SETTLE_S = 1.0  # after the deletes of a turn, before the next


class Turn(Struct, frozen=True):
    """One turn's figures: CPU in milliseconds a boot."""

    boots_per_s: float
    cpu_ms: float
    web_ms: float
    viewer_ms: float
    followed_ms: float
    idle_p50_ms: float


class Pair(Struct, frozen=True):
    """Both turns of a pair."""

    off: Turn
    on: Turn


FIGURES: tuple[tuple[str, Callable[[Turn], float]], ...] = (
    ("boots a second", lambda turn: turn.boots_per_s),
    ("idle p50, ms", lambda turn: turn.idle_p50_ms),
    ("CPU a boot, ms", lambda turn: turn.cpu_ms),
    ("... with what follows", lambda turn: turn.followed_ms),
    ("... with berth web", lambda turn: turn.cpu_ms + turn.web_ms),
)
# In the turns off they use next to nothing, so there is no ratio.
APART: tuple[tuple[str, Callable[[Turn], float]], ...] = (
    ("berth web alone, ms a boot", lambda turn: turn.web_ms),
    ("the viewer alone, ms a boot", lambda turn: turn.viewer_ms),
)


class Watchers:
    """`berth web` and the viewer, as processes."""

    def __init__(self, web: asyncio.subprocess.Process, viewer: asyncio.subprocess.Process) -> None:
        self._web = web
        self._viewer = viewer
        self.read = ""

    async def look(self, *, on: bool) -> None:
        """Open or close the pages, and scrape or do not."""
        assert self._viewer.stdin is not None
        assert self._viewer.stdout is not None
        self._viewer.stdin.write(b"on\n" if on else b"off\n")
        if not (answer := await self._viewer.stdout.readline()):
            raise SystemExit("the viewer has ended")
        self.read = self.read if on else answer.decode().strip()

    def web_s(self) -> float:
        """CPU seconds of `berth web` so far."""
        return probe.cpu_s(self._web.pid)

    def viewer_s(self) -> float:
        """CPU seconds of the viewer so far."""
        return probe.cpu_s(self._viewer.pid)


@contextlib.asynccontextmanager
async def watchers(
    processes: WorkerProcesses, settings: Settings, extra: dict[str, str], pages: int
) -> AsyncIterator[Watchers]:
    """Both, ready; nothing is looked at yet."""
    port = free_port()
    web = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "berth", "web", "--listen", f"127.0.0.1:{port}"),
        env={**os.environ, **variables(settings), **extra},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = [f"http://127.0.0.1:{one.port}/metrics" for one in processes.workers.values()]
    viewer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.viewer", str(pages), f"http://127.0.0.1:{port}", *metrics),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        await _answers(port, web)
        yield Watchers(web, viewer)
    finally:
        for one in (viewer, web):
            if one.returncode is None:
                one.terminate()
            await one.wait()


async def _answers(port: int, web: asyncio.subprocess.Process) -> None:
    """Wait until the port takes connections."""
    while web.returncode is None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return
    raise SystemExit("`berth web` has ended")


class Bench:
    """The system, whose turns are measured."""

    def __init__(
        self, servers: RealServers, processes: WorkerProcesses, client: BuildClient, watching: Watchers, rest_s: float
    ) -> None:
        workers = [one.process.pid for one in processes.workers.values()]
        self._pids = [servers.broker.pid, servers.postgres.pid, *workers]
        self._client = client
        self._tracer = client.bus.tracer
        self._watching = watching
        self._rest_s = rest_s
        self._rng = random.Random(2)

    async def turn(self, boots: int, idle: int, *, on: bool) -> Turn:
        """One turn, and everything deleted again."""
        if on:
            await self._watching.look(on=True)
            self._client.bus.tracer = self._tracer
        web_s, viewer_s, used_s = self._watching.web_s(), self._watching.viewer_s(), self._used_s()
        began = time.monotonic()
        uuids = await self._boot(boots)
        took_s = time.monotonic() - began
        cpu_ms = (self._used_s() - used_s) * 1000
        web_ms, viewer_ms = (self._watching.web_s() - web_s) * 1000, (self._watching.viewer_s() - viewer_s) * 1000
        await asyncio.sleep(self._rest_s)
        latencies = []
        for _ in range(idle):
            began = time.monotonic()
            uuids += await self._boot(1)
            latencies.append((time.monotonic() - began) * 1000)
        followed_ms = (self._used_s() - used_s) * 1000
        self._client.bus.tracer = None
        if on:
            await self._watching.look(on=False)
        await self._delete(uuids)
        return Turn(
            boots_per_s=boots / took_s,
            cpu_ms=cpu_ms / boots,
            web_ms=web_ms / boots,
            viewer_ms=viewer_ms / boots,
            followed_ms=followed_ms / (boots + idle),
            idle_p50_ms=statistics.median(latencies),
        )

    async def _boot(self, boots: int) -> list[str]:
        requests = [
            BuildRequest(instance_uuid=new_uuid(self._rng), flavor="m1.tiny", project_id="p") for _ in range(boots)
        ]
        tracks = await self._client.boot(requests)
        if not await self._client.wait(WAIT_S) or any(track.state != "active" for track in tracks):
            raise SystemExit(f"of {boots} builds not all are active")
        return [track.instance_uuid for track in tracks]

    async def _delete(self, uuids: Sequence[str]) -> None:
        await self._client.delete(
            [
                BuildRecord(instance_uuid=uuid, project_id="p", flavor="m1.tiny", state=BuildState.ACTIVE)
                for uuid in uuids
            ]
        )
        if not await self._client.wait(WAIT_S):
            raise SystemExit("instances are not deleted in time")
        for uuid in uuids:
            self._client.unfollow(uuid)
        await asyncio.sleep(SETTLE_S)

    def _used_s(self) -> float:
        """CPU seconds so far of workers, broker, database and client."""
        return time.process_time() + sum(map(probe.cpu_s, self._pids))


def orders(pairs: int, rng: random.Random) -> list[tuple[bool, bool]]:
    """Which turn comes first in each pair: of two successive pairs, one has either order; which one is drawn."""
    found: list[tuple[bool, bool]] = []
    while len(found) < pairs:
        first = rng.random() < 0.5
        found += [(first, not first), (not first, first)]
    return found[:pairs]


async def measure(options: argparse.Namespace, endpoint: str) -> tuple[list[Pair], str]:
    """The pairs, and what the viewer has read."""
    sampling = TraceSettings(endpoint=endpoint, ratio=options.ratio, most_per_s=100_000.0)
    extra = {"BERTH_TRACES__ENDPOINT": endpoint, "BERTH_TRACES__RATIO": "0", "BERTH_TRACES__MOST_PER_S": "100000"}
    size = ComputeConfig(hosts=math.ceil(options.hosts / len(CELLS)), gpu_share=0.0, sizes=(BIG,))
    plan = SystemPlan(cells=CELLS, schedulers=1, placements=1, compute=size)
    pairs: list[Pair] = []
    async with contextlib.AsyncExitStack() as stack:
        servers = stack.enter_context(servers_for(CELLS, None))
        processes, here = await stack.enter_async_context(running_processes(servers, plan, extra=extra))
        own = Site(replace(here.settings, traces=sampling))
        client = BuildClient(own.bus("client"), clock=own.clock, process="client")
        await client.open()
        stack.push_async_callback(client.close)
        await all_hosts_known(client, here, size.hosts * len(CELLS))
        watching = await stack.enter_async_context(watchers(processes, here.settings, extra, options.pages))
        bench = Bench(servers, processes, client, watching, options.rest)
        client.bus.tracer = None
        until = time.monotonic() + options.minutes * 60
        for number, order in enumerate(orders(WARM_UP + options.pairs, random.Random(options.seed))):
            turns = {on: await bench.turn(options.boots, options.idle, on=on) for on in order}
            if number >= WARM_UP:
                pairs.append(Pair(turns[False], turns[True]))
                progress(line(pairs[-1]))
            if time.monotonic() > until:
                break
        return pairs, watching.read


def line(pair: Pair) -> str:
    """One pair's figures, off and on."""
    return "; ".join(f"{name} {of(pair.off):.2f} / {of(pair.on):.2f}" for name, of in FIGURES)


def report(pairs: Sequence[Pair]) -> list[str]:
    """A table: medians of both turns, and the median of the pairs' ratios with the interval it lies in."""
    lines = [f"| {len(pairs)} pairs | off | on | on / off | 19 times in 20 |", "| --- | --- | --- | --- | --- |"]
    for name, of in FIGURES:
        off, on = (statistics.median(map(of, turns)) for turns in both(pairs))
        ratios = [of(pair.on) / of(pair.off) for pair in pairs]
        interval = median_interval(ratios)
        between = "fewer than 6 pairs" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
        lines.append(f"| {name} | {off:.2f} | {on:.2f} | {statistics.median(ratios):.3f} | {between} |")
    for name, of in APART:
        off, on = (statistics.median(map(of, turns)) for turns in both(pairs))
        lines.append(f"| {name} | {off:.3f} | {on:.3f} | | |")
    return lines


def both(pairs: Sequence[Pair]) -> tuple[list[Turn], list[Turn]]:
    """The turns off, and the turns on."""
    return [pair.off for pair in pairs], [pair.on for pair in pairs]


def parser() -> argparse.ArgumentParser:
    """The options. By default 24 pairs in at most ten minutes."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--pairs", type=positive, default=24)
    found.add_argument("--minutes", type=float, default=9.0, help="begin no pair after these (%(default)s)")
    found.add_argument("--boots", type=positive, default=3000, help="at once, in each turn (%(default)s)")
    found.add_argument("--idle", type=positive, default=60, help="one after the other, in each turn (%(default)s)")
    found.add_argument("--rest", type=float, default=5.0, help="seconds between both (%(default)s)")
    found.add_argument("--pages", type=positive, default=1, help="open pages Now, and as many Fleet (%(default)s)")
    found.add_argument("--hosts", type=positive, default=2000)
    found.add_argument("--ratio", type=float, default=0.05, help="of requests that are sampled (%(default)s)")
    found.add_argument("--seed", type=int, default=1, help="of the order of the turns")
    return found


def main() -> int:
    """Print the table."""
    options = parser().parse_args()
    configure_logging(process="bench", role="bench", level="error", style="pretty")
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as collector:
        try:
            assert collector.stdout is not None
            endpoint = f"http://127.0.0.1:{collector.stdout.readline().strip()}"
            pairs, read = uvloop.run(measure(options, endpoint))
        finally:
            collector.terminate()
    print("\n".join(report(pairs)))
    print(f"the viewer has read {read}; {time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())

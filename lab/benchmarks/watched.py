"""Boots a second, CPU a boot and idle latency with page, metrics and traces, over those without, on one system.

    python -m lab.benchmarks.watched [--pairs 24] [--minutes 9] [--boots 3000] [--idle 60] [--pages 1] [--hosts 2000]
    python -m lab.benchmarks.watched --on page --on scrape --on traces    # what each of the three costs alone

RabbitMQ, PostgreSQL, a process for each worker, `berth web`, a collector and a viewer are started once. Then turns
alternate, two to a pair, in a drawn order (of two pairs one has either order):

    off   the client samples no request; nothing is scraped, no page is open
    on    traces: the client samples --ratio of its requests; scrape: the viewer scrapes each worker every 5 s; page:
          it has --pages pages Now and as many pages Fleet open, each read at its own rate

--on names what is on, all three by default, with "+" between several. Repeated, each of them has a turn in every round,
and a pair with that round's turn off. The CPU of each role is printed beside.

A turn: boots at once (boots a second; CPU a boot until the last is active), --rest seconds, boots one after the other
(p50), and deletes of all of them, which are not measured.

CPU a boot is that of workers, client, broker and database. That of `berth web` is printed separately, because a core
for a watcher is no part of a boot's cost, and so is the sum. "with what follows" is CPU until after the boots one by
one: it has the exports of spans that come up to 5 s later, and what the watchers request of the workers in that time.

The workers' tracers and the listener of `berth web` are not switched. lab/benchmarks/traces.py measures what a tracer
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

from berth.client import BuildClient
from berth.settings import Settings, TraceSettings
from berth.site import Site
from berth.trial.embedded.process import free_port
from berth.trial.servers import RealServers, SystemPlan, running_processes, variables
from berth.trial.worker_processes import WorkerProcesses
from bus.clock import new_uuid
from bus.contracts.build import BuildRecord, BuildRequest, BuildState
from bus.service.telemetry import configure_logging
from compute_sim.config import ComputeConfig
from lab.benchmarks import probe
from lab.benchmarks.street import positive
from lab.benchmarks.street_measure import all_hosts_known, progress
from lab.benchmarks.street_systems import BIG, servers_for
from lab.benchmarks.traces import COLLECTOR, WAIT_S, median_interval

# The names of those of the three that are on in a turn.
On = tuple[str, ...]

ALL: On = ("page", "scrape", "traces")
OFF: On = ()
CELLS = ("cell1", "cell2", "cell3", "cell4")
WARM_UP = 1
SETTLE_S = 1.0  # after the deletes of a turn, before the next


class Turn(Struct, frozen=True):
    """One turn's figures: CPU in milliseconds a boot. roles: until after the boots one by one, with the watchers'."""

    boots_per_s: float
    cpu_ms: float
    web_ms: float
    viewer_ms: float
    followed_ms: float
    idle_p50_ms: float
    roles: dict[str, float] = {}


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

    async def look(self, on: On) -> None:
        """Open the pages and scrape, or those of both that are on. Of neither: close them."""
        assert self._viewer.stdin is not None
        assert self._viewer.stdout is not None
        looks_at = [one for one in on if one != "traces"]
        self._viewer.stdin.write(" ".join(looks_at or ["off"]).encode() + b"\n")
        if not (answer := await self._viewer.stdout.readline()):
            raise SystemExit("the viewer has ended")
        self.read = self.read if looks_at else answer.decode().strip()

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
        *(sys.executable, "-m", "lab.benchmarks.viewer", str(pages), f"http://127.0.0.1:{port}", *metrics),
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
        self._pids = {"broker": [servers.broker.pid], "database": [servers.postgres.pid]}
        for one in processes.workers.values():
            self._pids.setdefault(one.arguments[0], []).append(one.process.pid)
        self._client = client
        self._tracer = client.bus.tracer
        self._watching = watching
        self._rest_s = rest_s
        self._rng = random.Random(2)

    async def turn(self, boots: int, idle: int, on: On) -> Turn:
        """One turn, and everything deleted again."""
        await self._watching.look(on)
        self._client.bus.tracer = self._tracer if "traces" in on else None
        used = self._used_s()
        began = time.monotonic()
        uuids = await self._boot(boots)
        took_s = time.monotonic() - began
        at_once = self._used_ms_since(used)
        await asyncio.sleep(self._rest_s)
        latencies = []
        for _ in range(idle):
            began = time.monotonic()
            uuids += await self._boot(1)
            latencies.append((time.monotonic() - began) * 1000)
        followed = self._used_ms_since(used)
        self._client.bus.tracer = None
        await self._watching.look(OFF)
        await self._delete(uuids)
        return Turn(
            boots_per_s=boots / took_s,
            cpu_ms=_of_the_system(at_once) / boots,
            web_ms=at_once["berth web"] / boots,
            viewer_ms=at_once["viewer"] / boots,
            followed_ms=_of_the_system(followed) / (boots + idle),
            idle_p50_ms=statistics.median(latencies),
            roles={role: ms / (boots + idle) for role, ms in followed.items()},
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

    def _used_s(self) -> dict[str, float]:
        """CPU seconds so far of client, broker, database and workers by role, and of both watchers."""
        return {
            "client": time.process_time(),
            **{role: sum(map(probe.cpu_s, pids)) for role, pids in self._pids.items()},
            "berth web": self._watching.web_s(),
            "viewer": self._watching.viewer_s(),
        }

    def _used_ms_since(self, before: dict[str, float]) -> dict[str, float]:
        return {role: (used - before[role]) * 1000 for role, used in self._used_s().items()}


def _of_the_system(used: dict[str, float]) -> float:
    return sum(amount for role, amount in used.items() if role not in ("berth web", "viewer"))


def orders(rounds: int, conditions: Sequence[On], rng: random.Random) -> list[list[On]]:
    """In which order each round's turns come: of two successive rounds one has the other's reversed; which is drawn."""
    found: list[list[On]] = []
    while len(found) < rounds:
        first = rng.sample(conditions, len(conditions))
        found += [first, first[::-1]]
    return found[:rounds]


async def measure(options: argparse.Namespace, endpoint: str) -> tuple[dict[On, list[Pair]], str]:
    """The pairs of each that was on, and what the viewer has read."""
    sampling = TraceSettings(endpoint=endpoint, ratio=options.ratio, most_per_s=100_000.0)
    extra = {"BERTH_TRACES__ENDPOINT": endpoint, "BERTH_TRACES__RATIO": "0", "BERTH_TRACES__MOST_PER_S": "100000"}
    size = ComputeConfig(hosts=math.ceil(options.hosts / len(CELLS)), gpu_share=0.0, sizes=(BIG,))
    plan = SystemPlan(cells=CELLS, schedulers=1, placements=1, compute=size)
    pairs: dict[On, list[Pair]] = {on: [] for on in options.on or [ALL]}
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
        for number, order in enumerate(orders(WARM_UP + options.pairs, [OFF, *pairs], random.Random(options.seed))):
            turns = {on: await bench.turn(options.boots, options.idle, on) for on in order}
            if number >= WARM_UP:
                for on, found in pairs.items():
                    found.append(Pair(turns[OFF], turns[on]))
                    progress(f"{'+'.join(on)}: {line(found[-1])}")
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
    for role in pairs[0].off.roles:
        differences = [pair.on.roles[role] - pair.off.roles[role] for pair in pairs]
        off, on = (statistics.median(turn.roles[role] for turn in turns) for turns in both(pairs))
        interval = median_interval(differences)
        between = "" if interval is None else f"{interval[0]:+.3f} to {interval[1]:+.3f}"
        more = statistics.median(differences)
        lines.append(f"| {role}, ms a boot | {off:.3f} | {on:.3f} | {more:+.3f} | {between} |")
    return lines


def both(pairs: Sequence[Pair]) -> tuple[list[Turn], list[Turn]]:
    """The turns off, and the turns on."""
    return [pair.off for pair in pairs], [pair.on for pair in pairs]


def condition(text: str) -> On:
    """The value of --on: names with "+" between them."""
    names = text.split("+")
    if not set(names) <= set(ALL):
        raise argparse.ArgumentTypeError(f"{text}: there are {', '.join(ALL)}, with + between several")
    return tuple(one for one in ALL if one in names)


def parser() -> argparse.ArgumentParser:
    """The options. By default 24 pairs in at most ten minutes."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--pairs", type=positive, default=24)
    found.add_argument("--on", type=condition, action="append", help="what is on, such as page+scrape (all three)")
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
    for on, found in pairs.items():
        print(f"on: {', '.join(on)}")
        print("\n".join(report(found)))
    print(f"the viewer has read {read}; {time.monotonic() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())

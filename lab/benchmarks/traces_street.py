"""The cost of traces in the street: CPU a boot of all processes and servers, without traces and with them, in turns.

    python -m lab.benchmarks.traces_street [--ratio 0.05] [--pairs 300] [--boots 400] [--at-once 100] [--hosts 2000]

One system of real processes on a private RabbitMQ and a private PostgreSQL, as `scripts/street` has it. Its workers
trace what their client has sampled and nothing else, and the client samples in every second turn. So both kinds of turn
have the same processes, caches and database, and a machine that becomes slower does so for both. The collector's own
CPU is not counted; exporting to it is.

Turns are short and many, because what else happens on the machine changes within seconds: of the two turns of a pair
the first has traces in every second pair. The boots of a turn come some at once, and the next when those have ended, so
that the batches of all turns are of the same size.

Spans are exported as a running system exports them: when a batch is full, and every 5 s. A turn is shorter, so the
second kind of export comes between the pairs, after every 5 s of turns with traces, and is counted by itself: all
processes export at a signal, and the CPU of equal times without exports, before and after, is subtracted.

CPU is the nanoseconds for which the scheduler ran each thread, not time by the clock. Other programs change it all the
same, by their use of caches and of the other half of a core: on a machine with others at work the two turns of a pair
differ by a tenth and more. A higher ratio of sampling has a cost that stands out from that: it shows what a span costs,
and the spans a boot at 0.05 are counted exactly. They are more than the share of those of a higher ratio, because a
batch with any sampled message has spans of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import glob
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import uvloop
from msgspec import Struct
from msgspec.structs import replace

from berth.client import BuildClient
from berth.settings import TraceSettings
from berth.site import Site
from berth.trial.embedded.process import GuardedProcess
from berth.trial.servers import RealServers, SystemPlan, running_processes
from berth.trial.worker_processes import WorkerProcesses
from bus.clock import new_uuid
from bus.contracts.build import BuildRequest
from bus.service.telemetry import configure_logging
from bus.tracing import tracer as tracer_module
from bus.tracing.tracer import Tracer
from compute_sim.config import ComputeConfig
from lab.benchmarks import probe
from lab.benchmarks.street import positive
from lab.benchmarks.street_systems import BIG, servers_for
from lab.benchmarks.traces import COLLECTOR, WAIT_S, summary

CELLS = ("cell1", "cell2", "cell3", "cell4")
WARM_UP = 4
REST_S = 0.1  # after a turn, for what it leaves behind: outboxes, acknowledgements
EXPORT_S = 0.5  # for the exports of all processes
PAUSE_S = tracer_module.EXPORT_PAUSE_S
NEVER_S = 1e6
SAMPLES = 2_000  # of the pairs, for an interval
OUTER = 0.1  # of the pairs, at either end
SPANS = EXPORTED, DROPPED = "berth_trace_spans", "berth_trace_dropped_spans"
# A worker that exports its spans when a batch is full, and at a signal.
WORKER = f"""
import runpy, signal
from bus.tracing import tracer
tracer.EXPORT_PAUSE_S = {NEVER_S}
made, begin = [], tracer.Tracer.__init__
def init(self, *arguments, **options):
    begin(self, *arguments, **options)
    made.append(self)
tracer.Tracer.__init__ = init
signal.signal(signal.SIGUSR1, lambda *_: [one._full.set() for one in made])
runpy.run_module("berth", run_name="__main__", alter_sys=True)
"""


class ExportsAtSignal(GuardedProcess):
    """A worker whose exports the benchmark times."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        python, module, name, *arguments = command
        assert (module, name) == ("-m", "berth")
        super().__init__([python, "-c", WORKER, *arguments], **options)


class Turn(Struct, frozen=True):
    """Milliseconds of CPU a boot, of all and of workers and client alone; and of a boot by the clock."""

    cpu_ms: float
    own_ms: float
    took_ms: float


class Exported(Struct, frozen=True):
    """Of a boot with traces: milliseconds of CPU of the exports between the pairs, and spans."""

    between_ms: float
    spans: float


class Street:
    """One system, whose boots are measured in turns."""

    def __init__(self, servers: RealServers, processes: WorkerProcesses, client: BuildClient) -> None:
        self._servers = [servers.broker.pid, servers.postgres.pid]
        self._processes = processes
        self._workers = [one.process.pid for one in processes.workers.values()]
        self._client = client
        self._rng = random.Random(2)

    async def turn(self, boots: int, at_once: int) -> Turn:
        """Boot so many, and count until their spans are exported."""
        own, servers, began = self._own_s(), self._servers_s(), time.monotonic()
        for _ in range(0, boots, at_once):
            uuids = [new_uuid(self._rng) for _ in range(at_once)]
            await self._client.boot([BuildRequest(instance_uuid=u, flavor="m1.tiny", project_id="p") for u in uuids])
            assert await self._client.wait(WAIT_S)
        took_s = time.monotonic() - began
        await asyncio.sleep(REST_S)
        own, servers = self._own_s() - own, self._servers_s() - servers
        self._client.tracks.clear()
        return Turn((own + servers) / boots * 1000, own / boots * 1000, took_s / boots * 1000)

    async def export(self, tracer: Tracer) -> float:
        """Let all processes export their spans; seconds of CPU."""
        await asyncio.sleep(EXPORT_S)
        before = await self._quiet()
        for pid in self._workers:
            os.kill(pid, signal.SIGUSR1)
        tracer._full.set()
        took = await self._quiet()
        return took - (before + await self._quiet()) / 2

    async def spans(self) -> int:
        """How many spans have been exported so far."""
        pages = [await self._processes.metrics(name) for name in self._processes.workers]
        found = [probe.own_counters(SPANS), *(probe.counters(page, SPANS) for page in pages)]
        assert not any(one[DROPPED] for one in found), "spans were dropped"
        return sum(one[EXPORTED] for one in found)

    async def _quiet(self) -> float:
        """CPU seconds of workers and client in a while without boots."""
        used = self._own_s()
        await asyncio.sleep(EXPORT_S)
        return self._own_s() - used

    def _own_s(self) -> float:
        """CPU seconds of the workers and the client so far."""
        return time.process_time() + sum(map(run_s, self._workers))

    def _servers_s(self) -> float:
        """CPU seconds of RabbitMQ and PostgreSQL so far."""
        return sum(map(run_s, self._servers))


def run_s(root: int) -> float:
    """CPU seconds of all threads of a process and of its living descendants, to the nanosecond."""
    total = 0
    for pid in probe.tree(root):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            ticks = sum(map(int, file.read().rpartition(")")[2].split()[13:15]))  # of children that have ended
            total += ticks * 10**9 // probe.TICKS_PER_S
        for path in glob.glob(f"/proc/{pid}/task/*/schedstat"):
            with contextlib.suppress(OSError), open(path, encoding="ascii") as file:  # it may have just ended
                total += int(file.read().split()[0])
    return total / 1e9


async def measure(options: argparse.Namespace, endpoint: str) -> tuple[list[tuple[Turn, Turn]], Exported]:
    """Each pair of turns, without and with traces; and what was exported in turns and between them."""
    workers = {
        "BERTH_TRACES__ENDPOINT": endpoint,
        "BERTH_TRACES__RATIO": "0",
        "BERTH_TRACES__MOST_PER_S": "100000",
    }
    sampling = TraceSettings(endpoint=endpoint, ratio=options.ratio, most_per_s=100_000.0)
    plan = SystemPlan(
        cells=CELLS,
        schedulers=1,
        placements=1,
        compute=ComputeConfig(hosts=options.hosts // len(CELLS), gpu_share=0.0, sizes=(BIG,)),
    )
    tracer_module.EXPORT_PAUSE_S = NEVER_S  # the client's
    with servers_for(CELLS, None) as servers:
        async with running_processes(servers, plan, extra=workers, spawn=ExportsAtSignal) as (processes, here):
            sampled = Site(replace(here.settings, traces=sampling))
            bus = sampled.bus("client")
            tracer = bus.tracer
            assert tracer is not None
            client = BuildClient(bus, clock=sampled.clock, process="client")
            await client.open()
            street = Street(servers, processes, client)
            pairs: list[tuple[Turn, Turn]] = []
            exported = waited = 0.0
            spans = 0
            try:
                for number in range(-WARM_UP, options.pairs):
                    turn = {}
                    for on in (True, False) if number % 2 else (False, True):
                        bus.tracer = tracer if on else None
                        turn[on] = await street.turn(options.boots, options.at_once)
                    if number >= 0:
                        pairs.append((turn[False], turn[True]))
                        waited += turn[True].took_ms * options.boots / 1000
                        print(f"{_line(turn[False])} without, {_line(turn[True])} with", flush=True)
                    if waited >= PAUSE_S or number in {-1, options.pairs - 1}:
                        cost, waited = await street.export(tracer), 0.0
                        exported += cost if number >= 0 else 0.0
                        if number < 0:
                            spans = await street.spans()
                spans = await street.spans() - spans
            finally:
                await client.close()
    boots = options.pairs * options.boots
    return pairs, Exported(exported / boots * 1000, spans / boots)


def _line(turn: Turn) -> str:
    return f"{turn.cpu_ms:.4f} ms of CPU a boot, {turn.own_ms:.4f} of it berth's, {turn.took_ms:.3f} by the clock"


def middle(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return what is on over what is off, and between which values it lies, 19 times in 20 (bootstrap): the mean of the
    logarithms of all ratios but those of the OUTER pairs at either end.
    """
    logs = [math.log(on / off) for off, on in pairs]
    rng = random.Random(3)
    means = sorted(_trimmed(rng.choices(logs, k=len(logs))) for _ in range(SAMPLES))
    found = (_trimmed(logs), means[round(0.025 * SAMPLES)], means[round(0.975 * SAMPLES) - 1])
    return math.exp(found[0]), math.exp(found[1]), math.exp(found[2])


def _trimmed(values: Sequence[float]) -> float:
    cut = round(OUTER * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def report(pairs: Sequence[tuple[Turn, Turn]], exported: Exported) -> str:
    """The printed figures of all pairs."""
    kinds: dict[str, Callable[[Turn, float], float]] = {
        "CPU a boot, with exports": lambda turn, between: turn.cpu_ms + between,
        "CPU a boot": lambda turn, _: turn.cpu_ms,
        "... of workers and client": lambda turn, _: turn.own_ms,
        "a boot by the clock": lambda turn, _: turn.took_ms,
    }
    lines = [f"{exported.spans:.3f} spans a boot; exports every {PAUSE_S:g} s: {exported.between_ms:.4f} ms a boot"]
    for kind, of in kinds.items():
        values = [(of(off, 0.0), of(on, exported.between_ms)) for off, on in pairs]
        without, found = statistics.median(off for off, _ in values), middle(values)
        us = [f"{(one - 1) * without / exported.spans * 1000:.1f}" for one in found]
        lines.append(
            f"{kind}: {without:.4f} ms without; with traces {found[0]:.4f} of it (19 times in 20 from {found[1]:.4f} "
            f"to {found[2]:.4f}): {us[0]} us a span ({us[1]} to {us[2]}); {summary(values)}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the pairs and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--pairs", type=positive, default=300)
    parser.add_argument("--boots", type=positive, default=400, help="of a turn")
    parser.add_argument("--at-once", type=positive, default=100)
    parser.add_argument("--hosts", type=positive, default=2000)
    options = parser.parse_args()
    configure_logging(process="traces", role="benchmark", level="error", style="pretty")
    began = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as collector:
        try:
            assert collector.stdout is not None
            endpoint = f"http://127.0.0.1:{collector.stdout.readline().strip()}"
            pairs, exported = uvloop.run(measure(options, endpoint))
        finally:
            collector.terminate()
    print(f"traces at a ratio of {options.ratio:g}\n{report(pairs, exported)}")
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()

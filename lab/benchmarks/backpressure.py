"""Three times too much for a minute: is memory bounded, is nothing lost, do publishers learn it, does latency recover?

    python -m lab.benchmarks.backpressure [--seconds 60] [--hosts 10000] [--cells 4] [--json FILE]

Real servers (a private RabbitMQ with quorum queues and confirms, a private PostgreSQL with fsync), each worker its own
process, the client and all on this computer. A burst finds what the system sustains. Then one open loop without a
break: half of that for a while (calm), three times that for --seconds (overload), half again (after). Latency is
counted from each request's intended time. Every process's memory (PSS: shared pages are divided among those who share
them) and every queue's depth are sampled throughout; at the end the invariants are judged, over what was accepted.

A refused request is one that the broker did not take (`bus.full`): its publisher got an error. It is offered once. On a
slow machine overload and what comes after it last longer than asked: the bounded queue is to get full, and empty again.
Exit status 1 when a verdict is no.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median

from msgspec import Struct
from rich.console import Console

from berth.audit.facts import gather, rest
from berth.audit.invariants import check_invariants
from berth.bus_client import BuildClient
from berth.config.site import Site
from berth.up.servers import RealServers, SystemPlan, hosts_known, real_servers, running_processes
from berth.up.worker_processes import WorkerProcesses
from bus.codec import pack
from bus.contracts.base import Meta
from bus.contracts.queues import MAX_REQUESTS_PER_MESSAGE, MAX_WAITING_BYTES, MAX_WAITING_MESSAGES, REQUEST_PREFETCH
from lab.benchmarks import probe
from lab.benchmarks.command import measured, parser_of, write
from lab.benchmarks.street_systems import MIX, connected, fire, plan_of
from lab.load import LoadPlan, LoadRun, draw_requests, percentiles
from lab.load.plan import phase_boots
from lab.load.record import LoadRecord, Operations
from lab.load.session import looking_on, recorded

FIND_BOOTS = 3_000
FIND_TIMES = 2
TIMES_TOO_MUCH = 3.0
CALM_SHARE = 0.5
CALM_S = 10.0
# The backlog that the bound allows drains at what calm leaves free: half of what is sustained. So much longer than it.
MARGIN = 1.5
AFTER_S = 100.0
TIMEOUT_S = 300.0
REST_TIMEOUT_S = 120.0
MEMORY_EVERY_S = 1.0
# The most that each process may hold, whatever the load, MiB of PSS. The broker's quorum queues keep their log in
# memory until it is rolled over, by default at 512 MiB; the client keeps a row for every request, refused or not.
MEMORY_BOUND_MB = {"broker": 1024.0, "postgresql": 768.0, "client": 1024.0}
WORKER_BOUND_MB = 512.0
# Latency has recovered where the median of the end is back at the calm one, within this factor and this much.
LAST_WINDOW_S = 10.0
RECOVERED_TIMES = 2.0
RECOVERED_ABOVE_MS = 20.0


class Phase(Struct, frozen=True, kw_only=True):
    """One phase: what was offered, what was accepted, refused (with an error), and accepted ones' latency."""

    name: str
    rate_per_s: float
    seconds: float
    offered: int
    refused: int
    accepted: int
    active: int
    latency_ms: dict[str, float]


class Memory(Struct, frozen=True, kw_only=True):
    """One process, MiB: before the overload, at most during it and after, at the end; and what it may hold."""

    calm: float
    peak: float
    end: float
    bound: float


class Result(Struct, frozen=True, kw_only=True):
    """Everything measured, and the verdicts."""

    sustained_per_s: float
    hosts: int
    phases: tuple[Phase, ...]
    memory_mb: dict[str, Memory]
    deepest: dict[str, int]
    outcomes: dict[str, int]
    calm_p50_ms: float
    last_p50_ms: float
    queue_bound: dict[str, int]
    verdicts: dict[str, bool]
    broken: tuple[str, ...] = ()


class MemoryWatch:
    """Samples what every process holds."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self.rows: list[tuple[float, dict[str, float]]] = []

    async def watch(self) -> None:
        """Look each second, until cancelled."""
        while True:
            held = await asyncio.to_thread(self.held)
            self.rows.append((time.monotonic(), held))
            await asyncio.sleep(MEMORY_EVERY_S)

    def held(self) -> dict[str, float]:
        """MiB of each process and its children, now; all others are children of this one, which is the client."""
        own = os.getpid()
        return {name: round(probe.memory_mb(pid, alone=pid == own), 1) for name, pid in self._pids.items()}

    def summary(self, overload_at: float) -> dict[str, Memory]:
        """Each process over the run; `overload_at`: when that began."""
        return {
            name: Memory(
                calm=max(held[name] for at, held in self.rows if at < overload_at),
                peak=max(held[name] for at, held in self.rows if at >= overload_at),
                end=self.rows[-1][1][name],
                bound=MEMORY_BOUND_MB.get(name, WORKER_BOUND_MB),
            )
            for name in self._pids
        }


async def measure(
    servers: RealServers,
    processes: WorkerProcesses,
    here: Site,
    client: BuildClient,
    options: argparse.Namespace,
    *,
    plan: SystemPlan,
) -> Result:
    """Find the rate, offer too much of it, look."""
    rng = random.Random(1)
    await hosts_known(client, plan)
    sustained = await sustained_per_s(client, here, rng)
    backlog = largest_backlog(options.schedulers)
    overload_s = max(options.seconds, MARGIN * backlog / (sustained * (TIMES_TOO_MUCH - 1)))
    after_s = max(options.after, LAST_WINDOW_S + MARGIN * backlog / (sustained * (1 - CALM_SHARE)))
    print(
        f"sustained: {sustained:.0f} boots a second; {overload_s:.0f} s of {TIMES_TOO_MUCH:g} times that fill the "
        f"queue and more, {after_s:.0f} s of {CALM_SHARE:g} times that empty it",
        file=sys.stderr,
    )
    phases = (
        (sustained * CALM_SHARE, CALM_S),
        (sustained * TIMES_TOO_MUCH, overload_s),
        (sustained * CALM_SHARE, after_s),
    )
    pids = {
        "broker": servers.broker.pid, "postgresql": servers.postgres.pid, "client": os.getpid(),
        **{name: worker.process.pid for name, worker in processes.workers.items()},
    }  # fmt: skip
    memory = MemoryWatch(pids)
    watching = asyncio.create_task(memory.watch())
    try:
        record, started = await offered(client, here, phases, rng)
        at_rest = await rest(here, timeout_s=REST_TIMEOUT_S)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching  # raises what ended it: of a process that is gone nothing is known
    held = memory.summary(started + CALM_S)
    return await checked(here, record, phases, sustained, held, at_rest=at_rest, hosts=options.hosts)


def largest_backlog(schedulers: int) -> int:
    """About how many requests may be accepted and not begun: in the bounded queue, and in each scheduler's hands."""
    request = draw_requests(LoadPlan(boots=1, mix=MIX, project_id="bench"), random.Random(1))[0]
    meta = Meta(id=request.instance_uuid, cause=request.instance_uuid, sent_at=time.time())
    waiting = MAX_WAITING_BYTES // len(pack(request, meta).body)
    return waiting + schedulers * REQUEST_PREFETCH * MAX_REQUESTS_PER_MESSAGE


async def sustained_per_s(client: BuildClient, here: Site, rng: random.Random) -> float:
    """The rate that the system carries: the best of a few bursts, the first of which also warms it up."""
    best = 0.0
    for _ in range(FIND_TIMES):
        best = max(best, (await fire(client, here, FIND_BOOTS, rng)).boots_per_s)
    return best


async def offered(
    client: BuildClient, here: Site, phases: Sequence[tuple[float, float]], rng: random.Random
) -> tuple[LoadRecord, float]:
    """One open loop through all phases; its record, and when it began."""
    plan = LoadPlan(
        boots=phase_boots(phases),
        mix=MIX,
        project_id="bench",
        phases=tuple(phases),
        retry_for_s=0.0,
        timeout_s=TIMEOUT_S,
    )
    runs: list[LoadRun] = []
    console = Console(stderr=True, highlight=False)
    async with looking_on(here, "bench-looks") as transports:
        record = await recorded(
            client, plan, clock=here.clock, rng=rng, transports=transports, started=runs.append, console=console
        )
    return record, runs[0].started


async def checked(
    here: Site,
    record: LoadRecord,
    phases: Sequence[tuple[float, float]],
    sustained: float,
    held: dict[str, Memory],
    *,
    at_rest: bool,
    hosts: int,
) -> Result:
    """The verdicts."""
    boots, outcomes = record.boots, record.totals.outcomes
    refused = {boots.instance_uuid[row] for row in range(len(boots)) if boots.outcome_of(row) == "backpressure"}
    accepted = [uuid for uuid in boots.instance_uuid if uuid not in refused]
    facts = await gather(here, accepted=accepted)
    broken = [f"{result.message}: {result.examples[:2]}" for result in check_invariants(facts) if not result.holds]
    measured = _phases(boots, phases)
    calm, overload, after = measured
    bound = max(RECOVERED_TIMES * calm.latency_ms["p50"], calm.latency_ms["p50"] + RECOVERED_ABOVE_MS)
    fell_at = CALM_S + phases[1][1]
    last = median(_latencies(boots, fell_at + phases[2][1] - LAST_WINDOW_S, fell_at + phases[2][1]) or [float("inf")])
    return Result(
        sustained_per_s=round(sustained, 1),
        hosts=hosts,
        phases=measured,
        memory_mb=held,
        deepest={
            queue: max((depth for depth in depths if depth is not None), default=0)
            for queue, depths in record.samples.depths.items()
        },
        outcomes=outcomes,
        calm_p50_ms=calm.latency_ms["p50"],
        last_p50_ms=round(last, 3),
        queue_bound={"bytes": MAX_WAITING_BYTES, "messages": MAX_WAITING_MESSAGES},
        verdicts={
            "memory_bounded": all(one.peak <= one.bound for one in held.values()),
            "nothing_lost": at_rest and not outcomes.get("lost") and not outcomes.get("unsent") and not broken,
            "publishers_told": overload.refused > 0 and overload.offered == overload.accepted + overload.refused,
            "refused_are_nowhere": not refused & set(facts.requests),
            "latency_recovers": last <= bound and after.refused < after.offered,
            "invariants_hold": not broken,
        },
        broken=tuple(broken),
    )


def _phases(boots: Operations, phases: Sequence[tuple[float, float]]) -> tuple[Phase, ...]:
    found, begun = [], 0.0
    for name, (rate, seconds) in zip(("calm", "overload", "after"), phases, strict=True):
        rows = [row for row in range(len(boots)) if begun <= boots.intended_s[row] < begun + seconds]
        outcomes = [boots.outcome_of(row) for row in rows]
        refused = outcomes.count("backpressure")
        found.append(
            Phase(
                name=name,
                rate_per_s=round(rate, 1),
                seconds=seconds,
                offered=len(rows),
                refused=refused,
                accepted=len(rows) - refused - outcomes.count("unsent"),
                active=outcomes.count("active"),
                latency_ms=percentiles(_latencies(boots, begun, begun + seconds)),
            )
        )
        begun += seconds
    return tuple(found)


def _latencies(boots: Operations, since: float, until: float) -> list[float]:
    """Milliseconds of the boots that were meant to leave then and became active."""
    return [
        1000 * (boots.latency_s(row) or 0.0)
        for row in range(len(boots))
        if since <= boots.intended_s[row] < until and boots.outcome_of(row) == "active"
    ]


async def run(options: argparse.Namespace) -> Result:
    """Start everything, measure, stop everything."""
    plan = plan_of(options.hosts, options.cells, schedulers=options.schedulers, placements=options.placements)
    with real_servers(plan.cells, durable=True) as servers:
        async with running_processes(servers, plan) as (processes, here), connected(here, BuildClient) as client:
            return await measure(servers, processes, here, client, options, plan=plan)


def main() -> int:
    """Print, and write when asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long too much is offered")
    parser.add_argument("--after", type=float, default=AFTER_S, help="how long it is looked on afterwards")
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--cells", type=int, default=2)
    parser.add_argument("--schedulers", type=int, default=1)
    parser.add_argument("--placements", type=int, default=1)
    options = parser.parse_args()
    result = measured(run(options))
    print_result(result)
    write(result, options.json)
    return 0 if all(result.verdicts.values()) else 1


def print_result(result: Result) -> None:
    """For a person."""
    print(f"sustained {result.sustained_per_s:.0f} boots/s, {result.hosts} hosts; queue bound {result.queue_bound}")
    for phase in result.phases:
        ranks = ", ".join(f"{name} {value:.0f}" for name, value in phase.latency_ms.items())
        print(
            f"  {phase.name:8} {phase.rate_per_s:6.0f}/s for {phase.seconds:.0f} s: {phase.offered} offered, "
            f"{phase.accepted} accepted, {phase.refused} refused (with an error), {phase.active} active; ms {ranks}"
        )
    print(f"  outcomes {result.outcomes}")
    print(f"  {'memory, MiB (PSS)':20} {'calm':>7} {'peak':>7} {'end':>7} {'bound':>7}")
    for name, one in result.memory_mb.items():
        print(f"  {name:20} {one.calm:7.0f} {one.peak:7.0f} {one.end:7.0f} {one.bound:7.0f}")
    print("  deepest queues, broker messages:", {queue: depth for queue, depth in result.deepest.items() if depth})
    print(f"  p50 calm {result.calm_p50_ms:.0f} ms, last {LAST_WINDOW_S:.0f} s {result.last_p50_ms:.0f} ms")
    for name, holds in result.verdicts.items():
        print(f"  {'yes' if holds else 'NO '} {name}")
    for sentence in result.broken:
        print(f"  BROKEN {sentence}")


if __name__ == "__main__":
    sys.exit(main())

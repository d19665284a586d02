"""A real cluster's whole trace, replayed on hosts like its own: what was rejected, how full it got, what is left over.

    python -m lab.benchmarks.trace HOSTS.csv REQUESTS.csv [--speed N] [--bus memory|real] [--json FILE]
    python -m lab.benchmarks.trace HOSTS.csv REQUESTS.csv --no-deletes --speed N [--pack]

The files are those of `berth trace-settings`. With deletions the fleet is as full as it was then: the book is looked at
all along, and compared with what the trace itself asked for in the same time. Without them everything has to fit at
once, until the fleet is full: what counts then is how much of the GPUs was given away before the first rejection and
at the end, and how much of the rest no request could use (fragmentation). --pack: fullest hosts first; the default
spreads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from berth.audit.gather import gather, rest
from berth.audit.invariants import check_invariants
from berth.client import BuildClient
from berth.load import LoadPlan, LoadRun
from berth.load.fleet import GPU_CLASS, GPU_TRAIT, demand, mean_in, read_hosts, settings_like
from berth.load.plan import Arrival
from berth.load.record import LoadRecord
from berth.load.report import render
from berth.load.session import recorded
from berth.load.trace import WHOLE_GPU, TraceRequest, TraceRow, arrivals_of, read_requests, skipped
from berth.settings import Settings
from berth.site import Site
from berth.trial.servers import SystemPlan, real_servers, running_processes, variables
from berth.trial.up import LocalSystem, site
from bus.clock import Clock
from bus.persistence.database import Database
from lab.benchmarks.command import measured, parser_of, write
from lab.benchmarks.street_systems import all_hosts_known, connected, progress

LOOK_S = 0.25  # the book is looked at so often
PIECES = 10  # the time is cut where so many equal parts of the arrivals end
PACKED = {"ram": -1.0, "cpu": -1.0}
TIMEOUT_S = 120.0
REST_TIMEOUT_S = 60.0
CLASSES = {"cores": "VCPU", "memory_mib": "MEMORY_MB", "gpus": GPU_CLASS}
UNITS = {"cores": 1000, "memory_mib": 1, "gpus": WHOLE_GPU}
_FULL = """
SELECT c.name, sum(i.used)::float8, sum(i.capacity)::float8
FROM inventories i JOIN resource_classes c ON c.id = i.class_id GROUP BY 1
"""
_FREE = """
SELECT p.root_id, p.id, c.name, (i.capacity - i.used)::float8,
       (SELECT min(t.name) FROM provider_traits pt JOIN traits t ON t.id = pt.trait_id
        WHERE pt.provider_id = p.id AND t.name LIKE 'CUSTOM_GPU_MODEL_%')
FROM providers p JOIN inventories i ON i.provider_id = p.id JOIN resource_classes c ON c.id = i.class_id
ORDER BY p.root_id, p.id
"""


class Piece(Struct, frozen=True, kw_only=True):
    """A part of the time: what the trace asked for, and what the book had given away, means of each."""

    until_s: float
    arrivals: int
    requested: dict[str, float]
    given: dict[str, float]


class FreeHost(Struct, kw_only=True):
    """The remaining resources of one host: thousandths of cores, MiB, and of each GPU."""

    cpu_milli: float = 0.0
    memory_mib: float = 0.0
    gpus: list[tuple[float, str]] = []  # (thousandths, model)


class Replay(Struct, frozen=True, kw_only=True):
    """The results.

    fragmented_share: of all GPU capacity, what is free and of no use to a GPU request drawn as they come.
    """

    hosts: int
    requests: int
    speed: float
    skipped_s: float
    deletes: bool
    packed: bool
    bus: str
    seconds: float
    outcomes: dict[str, int]
    why_not: dict[str, int]
    delete_outcomes: dict[str, int]
    first_rejected_at: dict[str, float]  # arrivals before it, and the share of GPUs that was given away then
    latency_ms: dict[str, float]
    delete_ms: dict[str, float]
    capacity: dict[str, float]
    highest_share: dict[str, float]
    end_share: dict[str, float]
    free_gpu_share: float
    fragmented_share: float
    pieces: list[Piece]
    invariants_hold: bool


class Watch:
    """Looks at the book: (seconds of the run, {class: used}, {class: capacity}) each LOOK_S."""

    def __init__(self, book: Database, clock: Clock) -> None:
        self.seen: list[tuple[float, dict[str, float], dict[str, float]]] = []
        self._run: LoadRun | None = None
        self._book = book
        self._clock = clock

    def begin(self, run: LoadRun) -> None:
        """The run's clock is the one that counts."""
        self._run = run

    async def forever(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await self._clock.sleep(LOOK_S)

    async def look(self) -> None:
        """Once."""
        if self._run is None:
            return
        async with self._book.raw() as connection:
            rows = await connection.fetch(_FULL)
        at = self._clock.monotonic() - self._run.started
        used = {name: row[1] / UNITS[name] for name, row in _named(rows)}
        capacity = {name: row[2] / UNITS[name] for name, row in _named(rows)}
        self.seen.append((at, used, capacity))

    def mean(self, name: str, low: float, high: float) -> float:
        """The allocated amount of a class, the mean of the samples within a time (or of the last before it)."""
        found = [used[name] for at, used, _ in self.seen if low <= at < high]
        before = [used[name] for at, used, _ in self.seen if at < low]
        return sum(found) / len(found) if found else (before or [0.0])[-1]


def _named(rows: Iterable[Sequence[object]]) -> list[tuple[str, Sequence[float]]]:
    names = {klass: name for name, klass in CLASSES.items()}
    return [(names[str(row[0])], row) for row in rows if row[0] in names]  # type: ignore[misc]


def fragmented(hosts: Sequence[FreeHost], requested: Counter[TraceRequest]) -> float:
    """Thousandths of GPUs that are free and that a GPU request, drawn as they come, cannot use: its expectation.

    As in "Beware of Fragmentation" (ATC 2023), over the requests that ask for GPUs: all that is free on a host which
    cannot take the request; else what is free of single GPUs that are too full, or of a model it may not have.
    """
    wants = {one: count for one, count in requested.items() if one.gpus}
    whole = sum(wants.values())
    alike = Counter((host.cpu_milli, host.memory_mib, tuple(sorted(host.gpus))) for host in hosts if host.gpus)
    total = 0.0
    for (cpu_milli, memory_mib, gpus), hosts_alike in alike.items():
        for one, count in wants.items():
            fits = [free for free, model in gpus if free >= one.gpu_milli and may_be(model, one)]
            room = one.cpu_milli <= cpu_milli and one.memory_mib <= memory_mib and len(fits) >= one.gpus
            unused = sum(free for free, _ in gpus) - (sum(fits) if room else 0.0)
            total += hosts_alike * count / whole * unused
    return total


def may_be(model: str, requested: TraceRequest) -> bool:
    """Whether a request may have this model."""
    return not requested.models or model in requested.models


async def free_hosts(book: Database) -> list[FreeHost]:
    """The remaining resources of every host."""
    async with book.raw() as connection:
        rows = await connection.fetch(_FREE)
    found: dict[int, FreeHost] = defaultdict(FreeHost)
    prefix = GPU_TRAIT.format("")
    for root, _, name, free, trait in rows:
        host = found[root]
        if name == "VCPU":
            host.cpu_milli = free
        elif name == "MEMORY_MB":
            host.memory_mib = free
        elif name == GPU_CLASS:
            host.gpus.append((free, (trait or "").removeprefix(prefix)))
    return list(found.values())


def first_rejection(record: LoadRecord, watch: Watch) -> dict[str, float]:
    """Arrivals before the first that found no host, and the share of GPUs that was given away then; {}: none was."""
    boots = record.boots
    failed = [row for row in range(len(boots)) if boots.outcome_of(row) in {"failed", "refused"}]
    if not failed:
        return {}
    first = min(failed, key=lambda row: boots.ended_s[row] or 0.0)
    seen = min(watch.seen, key=lambda look: abs(look[0] - (boots.ended_s[first] or 0.0)))
    return {"arrivals": float(first), "gpu_share": round(seen[1]["gpus"] / seen[2]["gpus"], 4)}


def pieces(requests: Sequence[TraceRow], watch: Watch, *, speed: float, deletes: bool) -> list[Piece]:
    """Asked and given over the run, cut where equal parts of the arrivals end."""
    first = requests[0].created_s
    requested = demand(requests, deletes=deletes)
    cuts = [requests[(len(requests) - 1) * part // PIECES].created_s - first for part in range(PIECES + 1)]
    found = []
    for low, high in itertools.pairwise(cuts):
        found.append(
            Piece(
                until_s=round(high / speed, 2),
                arrivals=sum(low <= one.created_s - first < high for one in requests),
                requested={name: round(mean_in(requested, low, high, part), 2) for part, name in enumerate(CLASSES, 1)},
                given={name: round(watch.mean(name, low / speed, high / speed), 2) for name in CLASSES},
            )
        )
    return found


async def replay(here: Site, requests: list[TraceRow], hosts: int, options: argparse.Namespace) -> Replay:
    """Fire it at a system that runs; look on; judge."""
    shapes = {one.flavor: one.shape for one in {request.requested for request in requests}}
    arrivals = arrivals_of(requests, shapes, speed=options.speed, deletes=options.deletes)
    book = here.environment("bench").database("placement", pool_size=1)
    watch = Watch(book, here.clock)
    try:
        async with connected(here, keep_events=False) as client:
            progress(f"waiting until {hosts:,} hosts are known")
            await all_hosts_known(client, here, hosts)
            record = await looked_on(here, client, arrivals, watch, options)
            progress("judging the invariants")
            await rest(here, timeout_s=REST_TIMEOUT_S)
            verdicts = check_invariants(await gather(here, accepted=list(client.tracks)))
        left = await free_hosts(book)
    finally:
        await book.close()
    if options.report:
        options.report.write_text(render(record), encoding="utf-8")
    for verdict in verdicts:
        if not verdict.holds:
            print(f"BROKEN: {verdict.sentence}: {verdict.examples}")
    hold = all(verdict.holds for verdict in verdicts)
    return summed_up(requests, record, watch, left, options, hosts=hosts, invariants_hold=hold)


async def looked_on(
    here: Site, client: BuildClient, arrivals: tuple[Arrival, ...], watch: Watch, options: argparse.Namespace
) -> LoadRecord:
    """The run's record; the book is looked at all along, and once more at its end."""
    progress(f"{len(arrivals):,} arrivals in {arrivals[-1].at_s:.0f} s")
    looking = asyncio.create_task(watch.forever())
    try:
        record = await recorded(
            client,
            LoadPlan(boots=len(arrivals), mix={}, trace=arrivals, timeout_s=TIMEOUT_S),
            clock=here.clock,
            rng=random.Random(options.seed),
            started=watch.begin,
            seed=options.seed,
            trace=options.requests.name,
            speed=options.speed,
        )
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    await watch.look()
    return record


def summed_up(
    requests: list[TraceRow],
    record: LoadRecord,
    watch: Watch,
    left: Sequence[FreeHost],
    options: argparse.Namespace,
    *,
    hosts: int,
    invariants_hold: bool,
) -> Replay:
    """The figures of a run that has ended."""
    capacity = watch.seen[-1][2]
    milli = capacity["gpus"] * WHOLE_GPU
    totals = record.totals
    return Replay(
        hosts=hosts,
        requests=len(requests),
        speed=options.speed,
        skipped_s=options.skip,
        deletes=options.deletes,
        packed=options.pack,
        bus=options.bus,
        seconds=round(record.seconds, 2),
        outcomes=totals.outcomes,
        why_not=totals.by_code,
        delete_outcomes=totals.delete_outcomes,
        first_rejected_at=first_rejection(record, watch),
        latency_ms=totals.latency_ms,
        delete_ms=totals.delete_ms,
        capacity=capacity,
        highest_share={name: round(max(seen[1][name] for seen in watch.seen) / capacity[name], 4) for name in CLASSES},
        end_share={name: round(watch.seen[-1][1][name] / capacity[name], 4) for name in CLASSES},
        free_gpu_share=round(sum(free for host in left for free, _ in host.gpus) / milli, 4),
        fragmented_share=round(fragmented(left, Counter(one.requested for one in requests)) / milli, 4),
        pieces=pieces(requests, watch, speed=options.speed, deletes=options.deletes),
        invariants_hold=invariants_hold,
    )


@contextlib.asynccontextmanager
async def in_memory(settings: Settings) -> AsyncIterator[Site]:
    """Every worker in this process."""
    async with site(settings, directory=None) as here:
        system = LocalSystem(here)
        await system.start()
        try:
            yield here
        finally:
            await system.in_process.stop()


@contextlib.asynccontextmanager
async def on_real_servers(settings: Settings) -> AsyncIterator[Site]:
    """Every worker its own process."""
    plan = SystemPlan(cells=tuple(settings.cells), schedulers=1, placements=1, compute=settings.compute)
    flavors = {name: text for name, text in variables(settings).items() if name.startswith("BERTH_SCHEDULER__")}
    with real_servers(plan.cells, durable=True) as servers:
        async with running_processes(servers, plan, extra=flavors) as (_, here):
            yield here


async def measure(options: argparse.Namespace) -> Replay:
    """Start, replay, stop."""
    hosts, requests = read_hosts(options.hosts), skipped(read_requests(options.requests), options.skip)
    settings = settings_like(hosts, requests)
    scheduler = replace(settings.scheduler, multipliers=PACKED if options.pack else {})
    settings = replace(settings, scheduler=scheduler, up=replace(settings.up, schedulers=1))
    progress(f"starting a system with {hosts.total():,} hosts of {len(hosts)} kinds")
    async with (in_memory if options.bus == "memory" else on_real_servers)(settings) as here:
        return await replay(here, requests, hosts.total(), options)


def print_replay(found: Replay) -> None:
    """For a person."""
    ended = ", ".join(f"{count} {name}" for name, count in found.outcomes.items())
    why = ", ".join(f"{count} {name}" for name, count in found.why_not.items()) or "nothing rejected"
    print(f"{found.requests:,} requests on {found.hosts:,} hosts in {found.seconds:.0f} s: {ended} ({why})")
    if found.delete_outcomes:
        print("deletes:", ", ".join(f"{count} {name}" for name, count in found.delete_outcomes.items()))
    print("latency, ms:", ", ".join(f"{name} {ms:.0f}" for name, ms in found.latency_ms.items()))
    for what, share in (("highest", found.highest_share), ("at the end", found.end_share)):
        print(f"given away, {what}:", ", ".join(f"{name} {part:.2%}" for name, part in share.items()))
    if found.first_rejected_at:
        at = found.first_rejected_at
        print(f"first rejection: arrival {at['arrivals']:.0f}, {at['gpu_share']:.1%} of the GPUs given away")
    print(f"GPUs free {found.free_gpu_share:.2%}, of no use to a GPU request as they come {found.fragmented_share:.2%}")
    print("| until s | arrivals | cores asked | given | GPUs asked | given |\n" + "| --- " * 6 + "|")
    for one in found.pieces:
        cells = [f"{value:,.1f}" for name in ("cores", "gpus") for value in (one.requested[name], one.given[name])]
        print(f"| {one.until_s} | {one.arrivals} | {' | '.join(cells)} |")
    print(f"invariants {'hold' if found.invariants_hold else 'BROKEN'}")


def main() -> int:
    """Print, and write when asked."""
    parser = parser_of(__doc__)
    parser.add_argument("hosts", type=Path)
    parser.add_argument("requests", type=Path)
    parser.add_argument("--speed", type=float, default=100_000.0, help="so many times faster (%(default)s)")
    parser.add_argument("--deletes", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--skip", type=float, default=0.0, help="seconds of the trace; what is there then comes at once"
    )
    parser.add_argument("--pack", action="store_true", help="fullest hosts first")
    parser.add_argument("--bus", choices=("memory", "real"), default="memory")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="the load run's report as HTML")
    options = parser.parse_args()
    began = time.monotonic()
    found = measured(measure(options))
    print_replay(found)
    progress(f"{time.monotonic() - began:.0f} s in all")
    write(found, options.json)
    return 0 if found.invariants_hold else 1


if __name__ == "__main__":
    sys.exit(main())

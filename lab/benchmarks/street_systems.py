"""The two systems that are measured: all in one process, or processes on real servers. See lab/benchmarks/street.py."""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from berth.audit.gather import gather, rest
from berth.audit.invariants import check_invariants
from berth.client import BuildClient
from berth.load import LoadPlan, LoadReport, run_load
from berth.settings import Settings, UpSettings
from berth.site import Site, process_name
from berth.trial.embedded.postgres import Postgres
from berth.trial.embedded.rabbitmq import RabbitMQ
from berth.trial.servers import RealServers, SystemPlan, running_processes
from berth.trial.up import LocalSystem, site
from compute_sim.config import ComputeConfig, HostSize
from lab.benchmarks import bare, probe
from lab.benchmarks.bare import AtRate
from lab.benchmarks.street_report import Costs, Instruments, Result, migrate_all

IDLE_BOOTS = 100
WARM_UP = 200
REST_TIMEOUT_S = 60.0
HOSTS_TIMEOUT_S = 300.0
ANNOUNCED_S = 2.0  # compute services announce their hosts while they report the inventory, which takes longer
KNOWN = "SELECT (SELECT count(*) FROM providers WHERE id = root_id), (SELECT number FROM feed_head)"
RATE_S = 10.0  # how long each rate is held
RATES = (0.5, 0.8)
BACKGROUND_S = 5.0  # how long it is looked at what the processes use while nothing is booted
CALM = 0.05  # and so little, where batches are small: what a boot costs then is what one of many cells pays
MIX = {"m1.tiny": 1.0, "m1.small": 1.0}


class Measured(Struct, kw_only=True):
    """The measured figures, and how they are measured. `before` and `after` are called around each load.

    bare: the bare pipeline at a rate (boots a second), to compare with; it is asked for each rate that is held.
    """

    boots: int
    hosts: int
    rates: bool = False
    moves: int = 0
    idle_boots: int = IDLE_BOOTS
    idle_pause_s: float = 0.0
    before: Callable[[], Awaitable[None]] | None = None
    after: Callable[[int], Awaitable[Costs]] | None = None
    bare: Callable[[float], Awaitable[AtRate]] | None = None


async def measure(client: BuildClient, here: Site, system: str, what: Measured, seed: int = 1) -> Result:
    """Warm up, boot one at a time, then all at once; judge."""
    rng = random.Random(seed)
    progress(f"{system}: waiting until {what.hosts:,} hosts are known")
    await all_hosts_known(client, here, what.hosts)
    progress(f"warming up, then {what.idle_boots} boots one at a time")
    await fire(client, here, WARM_UP, rng)
    idle, costs_alone = await one_by_one(client, here, what, rng)
    latencies = sorted(report.latency_ms["max"] for report in idle)
    progress(f"idle boot p50 {statistics.median(latencies):.1f} ms; {what.boots:,} boots at once")
    background, resting = await at_rest(here, what)
    report, costs = await costed(client, here, what, what.boots, rng)
    progress(f"{report.boots_per_s:,.0f} boots a second")
    at_rates, costs_at_rates, bare_at_rates, background_after = await held_rates(
        client, here, what, report.boots_per_s, rng
    )
    moves = None
    if what.moves:
        progress(f"{what.moves:,} live migrations at once")
        moves = await migrate_all(client, what.moves, rng)
    return Result(
        system=system,
        boots=what.boots,
        hosts=what.hosts,
        cells=len(here.cells),
        schedulers=1,
        boots_per_s=round(report.boots_per_s, 1),
        latency_ms=report.latency_ms,
        stages_ms=report.stages_ms,
        spent_ms={
            stage: {name: round(figures[name], 3) for name in ("p50", "p99")}
            for stage, figures in report.spent_ms.items()
        },
        idle_p50_ms=round(statistics.median(latencies), 2),
        idle_p95_ms=round(latencies[int(0.95 * len(latencies))], 2),
        idle_stages_ms={
            name: round(statistics.median(one.stages_ms[name]["p50"] for one in idle if one.stages_ms[name]), 2)
            for name in idle[0].stages_ms
            if any(one.stages_ms[name] for one in idle)
        },
        idle_spent_ms={
            stage: round(statistics.median(one.spent_ms[stage]["p50"] for one in idle if stage in one.spent_ms), 2)
            for stage in idle[0].spent_ms
        },
        invariants_hold=await invariants_hold(client, here),
        active=report.active,
        at_rates=at_rates,
        costs=costs,
        costs_at_rates=costs_at_rates,
        costs_alone=costs_alone,
        bare_at_rates=bare_at_rates,
        background_cores=background,
        background_cores_after=background_after,
        background_transactions_per_s=resting,
        moves=moves,
    )


async def held_rates(
    client: BuildClient, here: Site, what: Measured, highest_per_s: float, rng: random.Random
) -> tuple[dict[str, dict[str, float]], dict[str, Costs], dict[str, AtRate], dict[str, float]]:
    """Latency and cost of a boot at shares of the highest rate, and the bare pipeline beside; where that is asked.

    And the cores that are used without any boot before the lowest rate: after a load there is more to clear up.
    """
    at_rates, costs_at_rates, bare_at_rates, background = {}, {}, {}, dict[str, float]()
    for share in (*RATES, CALM) if what.rates else ():
        if share == CALM:
            background, _ = await at_rest(here, what)
        rate = highest_per_s * share
        progress(f"{RATE_S:.0f} s at {share:.0%} of it")
        held, spending = await costed(client, here, what, max(int(rate * RATE_S), 1), rng, rate=rate)
        if spending is not None:
            costs_at_rates[f"{share:.0%}"] = spending
        spent = {f"{stage}_p50": figures["p50"] for stage, figures in held.spent_ms.items()}
        at_rates[f"{share:.0%}"] = {"rate_per_s": round(rate, 1), **held.latency_ms, **spent}
        if what.bare is not None:
            bare_at_rates[f"{share:.0%}"] = await what.bare(rate)
    return at_rates, costs_at_rates, bare_at_rates, background


async def invariants_hold(client: BuildClient, here: Site) -> bool:
    """Judge what there is once all is at rest; what does not hold is printed."""
    progress("judging the invariants")
    await rest(here, timeout_s=REST_TIMEOUT_S)
    verdicts = check_invariants(await gather(here, accepted=list(client.tracks), events=client.events))
    for verdict in verdicts:
        if not verdict.holds:
            print(f"BROKEN: {verdict.sentence}: {verdict.examples}")
    return all(verdict.holds for verdict in verdicts)


async def at_rest(here: Site, what: Measured) -> tuple[dict[str, float], float]:
    """Cores that each process uses while nothing is booted, and transactions a second; {} where it is not measured."""
    if what.before is None or what.after is None or not what.rates:
        return {}, 0.0
    await what.before()
    await here.clock.sleep(BACKGROUND_S)
    costs = await what.after(1)
    cores = {name: round(used / 1000 / BACKGROUND_S, 5) for name, used in costs.cpu_s_per_1000_boots.items()}
    return cores, round(costs.transactions_per_boot / BACKGROUND_S, 3)


async def costed(
    client: BuildClient, here: Site, what: Measured, boots: int, rng: random.Random, *, rate: float = 0.0
) -> tuple[LoadReport, Costs | None]:
    """Fire so many, and measure what they cost where that is requested."""
    if what.before is not None:
        await what.before()
    report = await fire(client, here, boots, rng, rate=rate)
    return report, await what.after(boots) if what.after is not None else None


def progress(sentence: str) -> None:
    """Report progress on standard error; figures go to stdout and the file."""
    print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)


async def one_by_one(
    client: BuildClient, here: Site, what: Measured, rng: random.Random
) -> tuple[list[LoadReport], Costs | None]:
    """Each boot alone, and what one costs. Without a pause the system clears up after one while it boots the next.

    The cost includes what the processes do meanwhile whether or not something is booted (`at_rest`).
    """
    if what.before is not None:
        await what.before()
    reports = []
    for _ in range(what.idle_boots):
        await here.clock.sleep(what.idle_pause_s)
        reports.append(await fire(client, here, 1, rng))
    return reports, await what.after(what.idle_boots) if what.after is not None else None


async def all_hosts_known(client: BuildClient, here: Site, hosts: int) -> None:
    """Wait until the book has every host, the scheduler's replica has caught up, and the hosts are announced."""
    book = here.environment("bench").database("placement", pool_size=1)
    until = here.clock.monotonic() + HOSTS_TIMEOUT_S
    try:
        while True:
            async with book.raw() as connection:
                known, head = await connection.fetchrow(KNOWN)
            page = await client.hosts(limit=1, timeout_s=HOSTS_TIMEOUT_S)
            if known >= hosts and page.feed_sequence >= head:
                await here.clock.sleep(ANNOUNCED_S)
                return
            if here.clock.monotonic() > until:
                raise SystemExit(f"{known} of {hosts} hosts are known after {HOSTS_TIMEOUT_S:.0f} s")
            await here.clock.sleep(1.0)
    finally:
        await book.close()


async def fire(client: BuildClient, here: Site, boots: int, rng: random.Random, *, rate: float = 0.0) -> LoadReport:
    """So many builds at once, or at a rate."""
    plan = LoadPlan(boots=boots, mix=MIX, project_id="bench", timeout_s=300, rate_per_s=rate)
    report = await run_load(client, plan, clock=here.clock, rng=rng)
    if report.active != boots:
        raise SystemExit(f"{boots - report.active} of {boots} builds failed: {report.failures[:3]}")
    return report


@contextlib.asynccontextmanager
async def connected(here: Site, *, keep_events: bool = True) -> AsyncIterator[BuildClient]:
    """A client that keeps what it receives."""
    client = BuildClient(here.bus("bench"), clock=here.clock, process=process_name("bench"), keep_events=keep_events)
    await client.open()
    try:
        yield client
    finally:
        await client.close()


BARE_BOOTS = 4000
BIG = HostSize(vcpus=128, memory_mb=2**20, disk_gb=100_000)
DEBIAN = Path("/usr/lib/postgresql")


async def in_memory(options: argparse.Namespace) -> Result:
    """Everything in this process."""
    cells = len(Settings().cells)
    per_cell = math.ceil(options.hosts / cells)
    settings = Settings(
        up=UpSettings(schedulers=1, placements=1, computes_per_cell=1, nodes=0),
        compute=ComputeConfig(hosts=per_cell, gpu_share=0.0, sizes=(BIG,)),
    )
    async with site(settings, directory=None) as here:
        system = LocalSystem(here)
        await system.start()
        try:
            async with connected(here) as client:
                what = Measured(
                    boots=options.boots,
                    hosts=per_cell * cells,
                    idle_boots=options.idle,
                    idle_pause_s=options.pause,
                    moves=options.moves,
                )
                return await measure(client, here, "memory", what)
        finally:
            await system.in_process.stop()


async def on_real_servers(options: argparse.Namespace) -> Result:
    """Every worker its own process."""
    cells = tuple(f"cell{number}" for number in range(1, options.cells + 1))
    per_cell = math.ceil(options.hosts / len(cells))
    plan = SystemPlan(
        cells=cells,
        schedulers=options.schedulers,
        placements=options.placements,
        compute=ComputeConfig(hosts=per_cell, gpu_share=0.0, sizes=(BIG,)),
    )
    counting = counting_binaries() if options.statements else None
    if options.statements and counting is None:
        print("SQL statements are not counted: there is no PostgreSQL with pg_stat_statements here", file=sys.stderr)
    progress("starting RabbitMQ and PostgreSQL")
    async with contextlib.AsyncExitStack() as stack:
        servers = stack.enter_context(servers_for(cells, counting))
        if counting is not None:
            await probe.count_statements(servers.database_url)
        pipeline, plain = None, None
        if options.bare:
            progress(f"the bare pipeline: {BARE_BOOTS:,} boots through five hops")
            pipeline = await stack.enter_async_context(bare.running(servers.urls["berth"]))
            plain = await pipeline.measure(BARE_BOOTS, options.idle)
        progress("starting the workers")
        async with running_processes(servers, plan) as (processes, here), connected(here) as client:
            reads = Instruments(servers, processes, profiles=options.profiles)
            what = Measured(
                boots=options.boots,
                hosts=per_cell * len(cells),
                rates=options.rates,
                idle_boots=options.idle,
                idle_pause_s=options.pause,
                moves=options.moves,
                before=reads.before,
                after=reads.after,
                bare=None if pipeline is None else pipeline.at_rate,
            )
            result = await measure(client, here, "real", what)
    return replace(
        result,
        schedulers=options.schedulers,
        bare_boots_per_s=None if plain is None else round(plain.boots_per_s, 1),
        ratio_to_bare_pipeline=None if plain is None else round(result.boots_per_s / plain.boots_per_s, 2),
        bare_idle_p50_ms=None if plain is None else round(plain.idle_p50_ms, 2),
        bare_idle_cpu_ms=None if plain is None else round(plain.idle_cpu_ms, 2),
        idle_ratio_to_bare_pipeline=None if plain is None else round(result.idle_p50_ms / plain.idle_p50_ms, 2),
    )


def counting_binaries() -> Path | None:
    """The newest PostgreSQL of Debian that can count statements."""
    found = DEBIAN.glob("*/lib/pg_stat_statements.so")
    servers = [library.parent.parent / "bin" for library in found]
    return max((path for path in servers if (path / "postgres").exists()), key=_version, default=None)


def _version(binaries: Path) -> float:
    try:
        return float(binaries.parent.name)
    except ValueError:
        return 0.0


@contextlib.contextmanager
def servers_for(cells: tuple[str, ...], counting: Path | None) -> Iterator[RealServers]:
    """Private servers with default durability. counting: the PostgreSQL to take, with pg_stat_statements."""
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(RabbitMQ())
        if counting is None:
            yield RealServers(broker, stack.enter_context(Postgres(durable=True)), cells)
            return
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="berth-bench-")))
        postgres = stack.enter_context(Postgres(directory, durable=True, binaries=counting))
        postgres.shut_down()
        with (directory / "data" / "postgresql.conf").open("a") as file:
            file.write("shared_preload_libraries = 'pg_stat_statements'\npg_stat_statements.track_utility = on\n")
        postgres.start()
        yield RealServers(broker, postgres, cells)

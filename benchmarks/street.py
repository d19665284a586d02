"""Boots a second through the whole street, as processes on real servers (or in one process over memory).

    benchmarks/street [--boots N] [--hosts N] [--cells N] [--only real|memory|both] [--json FILE]

Real: each worker its own process, a private RabbitMQ (quorum queues, confirms, a virtual host per bus) and a private
PostgreSQL (fsync on), workers, servers and the client all on this machine. Hosts build at once: what is measured is
the street. One boot alone on the idle system is measured as well, and the invariants are judged after each run.
Memory: every worker in this process, memory buses, an embedded PostgreSQL.

Real also says what a boot costs: CPU of every process, broker messages, transactions, statements (counted by
pg_stat_statements, which Debian's PostgreSQL has and the wheel's has not); latency at 50 % and 80 % of the highest
rate; and the bare five-hop pipeline on the same broker (benchmarks/bare.py) in the same run. Each can be left out.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import uvloop
from msgspec import Struct
from msgspec.structs import replace

from benchmarks import bare, probe
from berth.client import BuildClient
from berth.crew import Crew
from berth.embedded.postgres import Postgres
from berth.embedded.rabbitmq import RabbitMQ
from berth.gather import gather, rest
from berth.invariants import judge
from berth.load import LoadPlan, LoadReport, run_load
from berth.servers import Plan, RealServers, running_crew
from berth.settings import Settings, UpSettings
from berth.site import Site, process_name
from berth.up import Street, site
from bus.service.telemetry import configure_logging
from compute_sim.config import ComputeConfig, HostSize

IDLE_BOOTS = 40
WARM_UP = 200
BARE_BOOTS = 4000
REST_TIMEOUT_S = 60.0
HOSTS_TIMEOUT_S = 300.0
ANNOUNCED_S = 2.0  # compute services announce their hosts while they report the inventory, which takes longer
KNOWN = "SELECT (SELECT count(*) FROM providers WHERE id = root_id), (SELECT number FROM feed_head)"
RATE_S = 10.0  # how long each rate is held
RATES = (0.5, 0.8)
BACKGROUND_S = 5.0  # how long it is looked at what the processes use while nothing is booted
CALM = 0.05  # and so little, where batches are small: what a boot costs then is what one of many cells pays
MIX = {"m1.tiny": 1.0, "m1.small": 1.0}
BIG = HostSize(vcpus=128, memory_mb=2**20, disk_gb=100_000)
CLAIMS = "berth_scheduler_claims"
LOST = tuple(
    f'{CLAIMS}{{outcome="{outcome}"}}' for outcome in ("full", "raced")
)  # to other schedulers, or to stale news
COUNTED = ("berth_bus_published", "berth_bus_items", "berth_bus_consumed", CLAIMS)
DEBIAN = Path("/usr/lib/postgresql")


class Costs(Struct, frozen=True, kw_only=True):
    """What 1,000 boots cost while the street was full, each process by its name, and the counts per boot."""

    cpu_s_per_1000_boots: dict[str, float]
    cpu_s_per_1000_boots_all: float
    memory_mb: dict[str, float]
    broker_messages_per_boot: float
    items_per_boot: float
    items_per_broker_message: dict[str, float]
    transactions_per_boot: float
    claims_per_boot: float
    conflict_rate: float  # the share of claims that were lost
    statements_per_boot: float | None = None
    statements: dict[str, tuple[float, float]] | None = None  # {statement: (calls a boot, ms in the server a boot)}


class Result(Struct, frozen=True, kw_only=True):
    """One system's figures."""

    system: str
    boots: int
    hosts: int
    cells: int
    schedulers: int
    boots_per_s: float
    latency_ms: dict[str, float]
    stages_ms: dict[str, dict[str, float]]
    spent_ms: dict[str, dict[str, float]]  # in each stage, which add up to a boot's latency
    idle_p50_ms: float
    idle_p95_ms: float
    idle_stages_ms: dict[str, float]
    idle_spent_ms: dict[str, float]  # the median of each stage
    invariants_hold: bool
    active: int
    ratio_to_bare_pipeline: float | None = None
    bare_boots_per_s: float | None = None
    idle_ratio_to_bare_pipeline: float | None = None
    bare_idle_p50_ms: float | None = None
    at_rates: dict[str, dict[str, float]] = {}
    costs: Costs | None = None
    costs_at_rates: dict[str, Costs] = {}
    background_cores: dict[str, float] = {}  # of each process, while nothing is booted: heartbeats, reports, timers


class Measured(Struct, kw_only=True):
    """What is measured, and by what means. `before` and `after` are called around each load but the idle boots."""

    boots: int
    hosts: int
    rates: bool = False
    idle_boots: int = IDLE_BOOTS
    idle_pause_s: float = 0.0
    before: Callable[[], Awaitable[None]] | None = None
    after: Callable[[int], Awaitable[Costs]] | None = None


async def measure(client: BuildClient, here: Site, system: str, what: Measured, seed: int = 1) -> Result:
    """Warm up, boot one at a time, then all at once; judge."""
    rng = random.Random(seed)
    progress(f"{system}: waiting until {what.hosts:,} hosts are known")
    await all_hosts_known(client, here, what.hosts)
    progress(f"warming up, then {what.idle_boots} boots one at a time")
    await fire(client, here, WARM_UP, rng)
    idle = await one_by_one(client, here, what, rng)
    latencies = sorted(report.latency_ms["max"] for report in idle)
    progress(f"idle boot p50 {statistics.median(latencies):.1f} ms; {what.boots:,} boots at once")
    background = await at_rest(here, what)
    report, costs = await costed(client, here, what, what.boots, rng)
    progress(f"{report.boots_per_s:,.0f} boots a second")
    at_rates, costs_at_rates = {}, {}
    for share in (*RATES, CALM) if what.rates else ():
        rate = report.boots_per_s * share
        progress(f"{RATE_S:.0f} s at {share:.0%} of it")
        held, spending = await costed(client, here, what, max(int(rate * RATE_S), 1), rng, rate=rate)
        if spending is not None:
            costs_at_rates[f"{share:.0%}"] = spending
        spent = {f"{stage}_p50": figures["p50"] for stage, figures in held.spent_ms.items()}
        at_rates[f"{share:.0%}"] = {"rate_per_s": round(rate, 1), **held.latency_ms, **spent}
    progress("judging the invariants")
    await rest(here, timeout_s=REST_TIMEOUT_S)
    verdicts = judge(await gather(here, accepted=list(client.tracks), events=client.events))
    for verdict in verdicts:
        if not verdict.holds:
            print(f"BROKEN: {verdict.sentence}: {verdict.examples}")
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
        },
        idle_spent_ms={
            stage: round(statistics.median(one.spent_ms[stage]["p50"] for one in idle if stage in one.spent_ms), 2)
            for stage in idle[0].spent_ms
        },
        invariants_hold=all(verdict.holds for verdict in verdicts),
        active=report.active,
        at_rates=at_rates,
        costs=costs,
        costs_at_rates=costs_at_rates,
        background_cores=background,
    )


async def at_rest(here: Site, what: Measured) -> dict[str, float]:
    """Cores that each process uses while nothing is booted; {} where nobody can say."""
    if what.before is None or what.after is None or not what.rates:
        return {}
    await what.before()
    await here.clock.sleep(BACKGROUND_S)
    costs = await what.after(1)
    return {name: round(used / 1000 / BACKGROUND_S, 5) for name, used in costs.cpu_s_per_1000_boots.items()}


async def costed(
    client: BuildClient, here: Site, what: Measured, boots: int, rng: random.Random, *, rate: float = 0.0
) -> tuple[LoadReport, Costs | None]:
    """Fire so many, and say what they cost where that is asked."""
    if what.before is not None:
        await what.before()
    report = await fire(client, here, boots, rng, rate=rate)
    return report, await what.after(boots) if what.after is not None else None


def progress(sentence: str) -> None:
    """What is being done, for whoever watches; figures go to stdout and the file."""
    print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)


async def one_by_one(client: BuildClient, here: Site, what: Measured, rng: random.Random) -> list[LoadReport]:
    """Each boot alone. Without a pause the system still clears up after one while it boots the next."""
    reports = []
    for _ in range(what.idle_boots):
        await here.clock.sleep(what.idle_pause_s)
        reports.append(await fire(client, here, 1, rng))
    return reports


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


class Instruments:
    """Reads what every process has used, before and after; the difference is what the load cost."""

    def __init__(self, servers: RealServers, crew: Crew, *, profiles: Path | None) -> None:
        self._crew = crew
        self._profiles = profiles
        self._url = servers.database_url
        self._pids = {
            "broker": servers.broker.pid,
            "postgresql": servers.postgres.pid,
            **{name: worker.process.pid for name, worker in crew.workers.items()},
        }
        self._cpu: dict[str, float] = {}
        self._messages: dict[str, Counter[str]] = {}
        self._transactions = 0.0
        self._statements: Mapping[str, tuple[float, float]] | None = None

    async def before(self) -> None:
        """Note where everything stands."""
        self._messages = await self._counters()
        self._statements = await probe.statements(self._url)
        self._transactions = await probe.transactions(self._url)
        if self._profiles is not None:
            workers = {name: worker.process.pid for name, worker in self._crew.workers.items()}
            probe.profile({"client": os.getpid(), **workers}, self._profiles)
            self._profiles = None  # the first load is the full one
        self._cpu = self._used()

    async def after(self, boots: int) -> Costs:
        """What came since."""
        cpu = {name: used - self._cpu[name] for name, used in self._used().items()}
        memory = {name: round(probe.memory_mb(pid), 1) for name, pid in self._pids.items()}
        messages = {name: now - self._messages[name] for name, now in (await self._counters()).items()}
        transactions = await probe.transactions(self._url) - self._transactions
        spent = self._spent(await probe.statements(self._url), boots)
        published = sum(one["berth_bus_published"] for one in messages.values())
        claims = sum(one[CLAIMS] for one in messages.values())
        lost = sum(one[name] for one in messages.values() for name in LOST)
        return Costs(
            cpu_s_per_1000_boots={name: round(1000 * used / boots, 3) for name, used in cpu.items()},
            cpu_s_per_1000_boots_all=round(1000 * sum(cpu.values()) / boots, 3),
            memory_mb=memory,
            broker_messages_per_boot=round(published / boots, 2),
            items_per_boot=round(sum(one["berth_bus_items"] for one in messages.values()) / boots, 2),
            items_per_broker_message={
                name: round(one["berth_bus_items"] / one["berth_bus_published"], 1)
                for name, one in messages.items()
                if one["berth_bus_published"]
            },
            transactions_per_boot=round(transactions / boots, 3),
            claims_per_boot=round(claims / boots, 4),
            conflict_rate=round(lost / max(claims, 1), 4),
            statements_per_boot=None if spent is None else round(sum(calls for calls, _ in spent.values()), 3),
            statements=spent,
        )

    def _used(self) -> dict[str, float]:
        return {name: probe.cpu_s(pid) for name, pid in self._pids.items()} | {"client": time.process_time()}

    async def _counters(self) -> dict[str, Counter[str]]:
        pages = {name: await self._crew.metrics(name) for name in self._crew.workers}
        found = {name: probe.counters(page, COUNTED) for name, page in pages.items()}
        return found | {"client": probe.own_counters(COUNTED)}

    def _spent(
        self, now: Mapping[str, tuple[float, float]] | None, boots: int
    ) -> dict[str, tuple[float, float]] | None:
        if now is None or self._statements is None:
            return None
        bare_minus = (
            (query, calls - self._statements.get(query, (0.0, 0.0))[0], ms - self._statements.get(query, (0.0, 0.0))[1])
            for query, (calls, ms) in now.items()
        )
        spent = {
            " ".join(query.split()): (round(c / boots, 4), round(ms / boots, 4)) for query, c, ms in bare_minus if c
        }
        return dict(sorted(spent.items(), key=lambda pair: -pair[1][1]))


@contextlib.asynccontextmanager
async def connected(here: Site, *, keep_events: bool = True) -> AsyncIterator[BuildClient]:
    """A client that keeps what it hears."""
    client = BuildClient(here.bus("bench"), clock=here.clock, process=process_name("bench"), keep_events=keep_events)
    await client.open()
    try:
        yield client
    finally:
        await client.close()


async def in_memory(options: argparse.Namespace) -> Result:
    """Everything in this process."""
    cells = len(Settings().cells)
    per_cell = math.ceil(options.hosts / cells)
    settings = Settings(
        up=UpSettings(schedulers=1, placements=1, computes_per_cell=1, nodes=0),
        compute=ComputeConfig(hosts=per_cell, gpu_share=0.0, sizes=(BIG,)),
    )
    async with site(settings, directory=None) as here:
        street = Street(here)
        await street.start()
        try:
            async with connected(here) as client:
                what = Measured(
                    boots=options.boots, hosts=per_cell * cells, idle_boots=options.idle, idle_pause_s=options.pause
                )
                return await measure(client, here, "memory", what)
        finally:
            await street.ensemble.stop()


async def on_real_servers(options: argparse.Namespace) -> Result:
    """Every worker its own process."""
    cells = tuple(f"cell{number}" for number in range(1, options.cells + 1))
    per_cell = math.ceil(options.hosts / len(cells))
    plan = Plan(
        cells=cells,
        schedulers=options.schedulers,
        placements=options.placements,
        compute=ComputeConfig(hosts=per_cell, gpu_share=0.0, sizes=(BIG,)),
    )
    counting = counting_binaries() if options.statements else None
    if options.statements and counting is None:
        print("SQL statements are not counted: there is no PostgreSQL with pg_stat_statements here", file=sys.stderr)
    progress("starting RabbitMQ and PostgreSQL")
    with servers_for(cells, counting) as servers:
        if counting is not None:
            await probe.count_statements(servers.database_url)
        if options.bare:
            progress(f"the bare pipeline: {BARE_BOOTS:,} boots through five hops")
        plain = await bare.measure(servers.urls["berth"], BARE_BOOTS, options.idle) if options.bare else None
        progress("starting the workers")
        async with running_crew(servers, plan) as (crew, here), connected(here) as client:
            reads = Instruments(servers, crew, profiles=options.profiles)
            what = Measured(
                boots=options.boots,
                hosts=per_cell * len(cells),
                rates=options.rates,
                idle_boots=options.idle,
                idle_pause_s=options.pause,
                before=reads.before,
                after=reads.after,
            )
            result = await measure(client, here, "real", what)
    return replace(
        result,
        schedulers=options.schedulers,
        bare_boots_per_s=None if plain is None else round(plain.boots_per_s, 1),
        ratio_to_bare_pipeline=None if plain is None else round(result.boots_per_s / plain.boots_per_s, 2),
        bare_idle_p50_ms=None if plain is None else round(plain.idle_p50_ms, 2),
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


def parser() -> argparse.ArgumentParser:
    """What can be asked for. By default everything, on the system that berth is judged by."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    yes_no = argparse.BooleanOptionalAction
    found.add_argument("--boots", type=positive, default=20_000, help="at once, after the idle ones (%(default)s)")
    found.add_argument("--hosts", type=positive, default=10_000, help="in all, rounded up to a multiple of the cells")
    found.add_argument("--cells", type=positive, default=4)
    found.add_argument("--idle", type=positive, default=IDLE_BOOTS, help="boots one at a time, before the load")
    found.add_argument("--pause", type=float, default=0.0, help="seconds of rest before each of those")
    found.add_argument("--schedulers", type=positive, default=1)
    found.add_argument("--placements", type=positive, default=1)
    found.add_argument("--only", choices=("real", "memory", "both"), default="real", help="which system (%(default)s)")
    found.add_argument("--bare", action=yes_no, default=True, help="measure the bare pipeline")
    found.add_argument("--rates", action=yes_no, default=True, help="latency at 50 %% and 80 %% of the highest rate")
    found.add_argument("--statements", action=yes_no, default=True, help="count SQL statements, where it can be done")
    found.add_argument("--profiles", type=Path, help="py-spy's profile of each process under load, in this directory")
    found.add_argument("--json", type=Path, help="write the figures here; of `both`, memory's under `memory`")
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line (None: this process's); ends the process where they are wrong."""
    known = parser()
    options = known.parse_args(arguments)
    try:
        if options.json:
            options.json.open("ab").close()  # found out before minutes of measuring, not after
    except OSError as fault:
        known.error(f"cannot write {options.json}: {fault.strerror}")
    return options


def positive(text: str) -> int:
    """A number of things."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def main() -> int:
    """Print, and write when asked."""
    options = parsed()
    configure_logging(process="bench", role="bench", level="error", style="pretty")
    results: dict[str, Result] = {}
    for name, run in (("memory", in_memory), ("real", on_real_servers)):
        if options.only in {"both", name}:
            started = time.monotonic()
            results[name] = result = uvloop.run(run(options))
            say(result, time.monotonic() - started)
    if options.json:
        figures = msgspec.to_builtins(results.get("real") or results["memory"])
        if len(results) > 1:
            figures["memory"] = results["memory"]
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2))
    return 0 if all(result.invariants_hold for result in results.values()) else 1


def say(result: Result, seconds: float) -> None:
    """One system's figures for a person."""
    ratio = f", {result.ratio_to_bare_pipeline} x the bare pipeline" if result.ratio_to_bare_pipeline else ""
    print(
        f"{result.system}: {result.boots_per_s:.0f} boots/s{ratio} ({result.active} of {result.boots} active, "
        f"{result.hosts} hosts in {result.cells} cells), idle boot p50 {result.idle_p50_ms:.1f} ms, "
        f"p95 {result.idle_p95_ms:.1f} ms, invariants {'hold' if result.invariants_hold else 'BROKEN'}; "
        f"{seconds:.0f} s in all"
    )
    if result.bare_idle_p50_ms is not None:
        print(
            f"  the bare pipeline: {result.bare_boots_per_s:.0f} boots/s, one alone {result.bare_idle_p50_ms:.1f} ms "
            f"(ours {result.idle_ratio_to_bare_pipeline} x that)"
        )
    print("  idle, ms until:", ", ".join(f"{name} {ms}" for name, ms in result.idle_stages_ms.items()))
    print("  idle, ms in each stage:", ", ".join(f"{name} {ms}" for name, ms in result.idle_spent_ms.items()))
    spent = (f"{name} {ms['p50']:.0f} ({ms['p99']:.0f})" for name, ms in result.spent_ms.items())
    print("  loaded, ms in each stage, p50 (p99):", ", ".join(spent))
    for share, figures in result.at_rates.items():
        stages = ", ".join(f"{n.removesuffix('_p50')} {ms:.0f}" for n, ms in figures.items() if n.endswith("_p50"))
        print(
            f"  at {share} ({figures['rate_per_s']:.0f}/s): p50 {figures['p50']:.0f} ms, p99 {figures['p99']:.0f} ms",
            end="",
        )
        print(f"; in each stage, p50: {stages}")
    if result.background_cores:
        print(f"  cores used while nothing is booted: {sum(result.background_cores.values()):.3f}")
    for share, spending in result.costs_at_rates.items():
        print(f"  at {share}, CPU ms a boot: {spending.cpu_s_per_1000_boots_all:.3f}")
    costs = result.costs
    if costs is None:
        return
    print(f"  CPU ms a boot: {costs.cpu_s_per_1000_boots_all:.3f} =", end=" ")
    print(", ".join(f"{name} {used:.3f}" for name, used in costs.cpu_s_per_1000_boots.items()))
    print(
        f"  a boot: {costs.broker_messages_per_boot} broker messages of {costs.items_per_boot} items, "
        f"{costs.transactions_per_boot} transactions, {costs.statements_per_boot} statements; "
        f"{costs.claims_per_boot} claims, {costs.conflict_rate:.2%} of them lost"
    )
    print("  items a broker message:", ", ".join(f"{n} {v}" for n, v in costs.items_per_broker_message.items()))
    for statement, (calls, ms) in list((costs.statements or {}).items())[:14]:
        print(f"    {1000 * ms:7.1f} us {calls:7.4f} calls  {statement[:110]}")


if __name__ == "__main__":
    sys.exit(main())

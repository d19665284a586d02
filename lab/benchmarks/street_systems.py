"""The two systems that are measured: all in one process, or processes on real servers. See lab/benchmarks/street.py."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from berth.settings import Settings, UpSettings
from berth.trial.embedded.postgres import Postgres
from berth.trial.embedded.rabbitmq import RabbitMQ
from berth.trial.servers import RealServers, SystemPlan, running_processes
from berth.trial.up import LocalSystem, site
from compute_sim.config import ComputeConfig, HostSize
from lab.benchmarks import bare, probe
from lab.benchmarks.street_costs import Instruments
from lab.benchmarks.street_measure import Measured, connected, measure, progress
from lab.benchmarks.street_report import Result

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

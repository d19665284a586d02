"""The cost of one boot in each process at low, fixed rates: CPU, wake-ups, writes, messages, transactions, flushes.

    python -m lab.benchmarks.cost [--rates 5,20,70] [--seconds 10] [--hosts 2000] [--cells 4] [--json FILE]

Private servers and a process for each worker, as in scripts/street, but the rates are given and not shares of the
highest one. Counts and CPU hardly depend on what else the machine does, so two commits can be compared on a busy one;
the latencies that are printed beside them cannot. A figure is what came during the load, the timers' part included;
the line `rest` shows what they use without any load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import asyncpg
import msgspec
from msgspec import Struct

from berth.client import BuildClient
from berth.site import Site
from berth.trial.servers import RealServers, SystemPlan, running_processes
from berth.trial.worker_processes import WorkerProcesses
from compute_sim.config import ComputeConfig
from lab.benchmarks import probe
from lab.benchmarks.command import measured, parser_of, write
from lab.benchmarks.street_report import COUNTED
from lab.benchmarks.street_systems import (
    BIG,
    all_hosts_known,
    connected,
    counting_binaries,
    fire,
    progress,
    servers_for,
)

WARM_UP = 100
WARM_UP_PER_S = 50.0
REST_S = 5.0
# Flushes of the logs of all quorum queues: what RabbitMQ's log writer calls a batch.
BROKER_FLUSHES = "lists:sum([maps:get(batches, C, 0) || C <- maps:values(ra_counters:overview()), is_map(C)])."
DATABASE = """
SELECT (SELECT sum(xact_commit) FROM pg_stat_database)::float8 AS transactions,
       (SELECT wal_sync FROM pg_stat_wal)::float8 AS flushes, (SELECT wal_write FROM pg_stat_wal)::float8 AS wal_writes
"""
Database = tuple[float, float, float]  # transactions, flushes, writes of the log
Statements = Mapping[str, tuple[float, float]]  # as `probe.statements` has them
PRINTED = 12  # statements, the most frequent ones


class Used(Struct, frozen=True, kw_only=True):
    """The resources that a process and its children have used. wake_ups: context switches because a thread had nothing
    to do; writes: write system calls (PostgreSQL's to its sockets are not among them).
    """

    cpu_ms: float = 0.0
    wake_ups: float = 0.0
    writes: float = 0.0
    messages: float = 0.0  # that it published, and the broker confirmed

    def minus(self, other: Used, boots: float) -> Used:
        """The difference, per boot."""
        return Used(
            cpu_ms=round((self.cpu_ms - other.cpu_ms) / boots, 3),
            wake_ups=round((self.wake_ups - other.wake_ups) / boots, 2),
            writes=round((self.writes - other.writes) / boots, 2),
            messages=round((self.messages - other.messages) / boots, 2),
        )


class Cost(Struct, frozen=True, kw_only=True):
    """A boot at one rate; for the rate 0, a second of rest."""

    rate_per_s: float
    p50_ms: float
    p99_ms: float
    processes: dict[str, Used]
    transactions: float
    statements: dict[str, float] | None  # calls of each
    database_flushes: float
    database_wal_writes: float
    broker_flushes: float

    @property
    def all(self) -> Used:
        """The sum over the processes."""
        return total(self.processes.values())


class Reading(Struct, frozen=True, kw_only=True):
    """Where every counter stands."""

    processes: dict[str, Used]
    database: Database
    statements: Statements | None
    broker_flushes: float


class Instruments:
    """Reads the counters of a running system. The figures of the processes are read next to the load: reading the rest
    makes them work.
    """

    def __init__(self, servers: RealServers, processes: WorkerProcesses) -> None:
        self._servers = servers
        self._processes = processes

    async def before(self) -> Reading:
        """All counters, before a load."""
        flushes = await self._broker_flushes()
        published, statements, database = await self._published(), await self._statements(), await self._database()
        return Reading(
            processes=self._used(published), database=database, statements=statements, broker_flushes=flushes
        )

    async def after(self) -> Reading:
        """All counters, after it; in the opposite order."""
        found, database, statements = self._used({}), await self._database(), await self._statements()
        published = await self._published()
        for name, count in published.items():
            found[group(name)] = total([found[group(name)], Used(messages=count)])
        flushes = await self._broker_flushes()
        return Reading(processes=found, database=database, statements=statements, broker_flushes=flushes)

    def _used(self, published: Mapping[str, float]) -> dict[str, Used]:
        roots = {"broker": self._servers.broker.pid, "postgresql": self._servers.postgres.pid, "client": os.getpid()}
        roots |= {name: self._processes.workers[name].process.pid for name in self._names()}
        found: dict[str, Used] = {}
        for name, pid in roots.items():
            one = msgspec.structs.replace(used(pid, alone=name == "client"), messages=published.get(name, 0.0))
            found[group(name)] = total([found.get(group(name), Used()), one])
        return found

    async def _published(self) -> dict[str, float]:
        """The broker messages of each process."""
        pages = {name: probe.scraped(await self._processes.metrics(name), COUNTED) for name in self._names()}
        pages["client"] = probe.own_counters(COUNTED)
        return {name: float(page["berth_bus_published"]) for name, page in pages.items()}

    async def _broker_flushes(self) -> float:
        """Takes seconds on a busy machine."""
        return float(await asyncio.to_thread(self._servers.broker.control, "eval", BROKER_FLUSHES))

    async def _statements(self) -> Statements | None:
        return await probe.statements(self._servers.database_url)

    def _names(self) -> list[str]:
        return list(self._processes.workers)

    async def _database(self) -> Database:
        connection = await asyncpg.connect(self._servers.database_url)
        try:
            transactions, flushes, writes = await connection.fetchrow(DATABASE)
            return transactions, flushes, writes
        finally:
            await connection.close()


def group(name: str) -> str:
    """The processes of a role are added up: conductor-cell1-1 is one of the conductors."""
    return re.sub(r"(-.*|\d+)$", "", name)


def total(parts: Iterable[Used]) -> Used:
    """The sum."""
    columns = zip(*(msgspec.structs.astuple(part) for part in parts), strict=True)
    return Used(**dict(zip(Used.__struct_fields__, map(sum, columns), strict=True)))


def used(root: int, *, alone: bool) -> Used:
    """The resources of a process (unless alone: and its children) has used so far, by the nanosecond; of threads that
    live.
    """
    cpu_ns = wake_ups = writes = 0
    for pid in [root] if alone else probe.tree(root):
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):  # it has just ended
                cpu_ns += int((task / "schedstat").read_text().split()[0])
                wake_ups += int(_field(task / "status", "voluntary_ctxt_switches"))
        with contextlib.suppress(OSError):
            writes += int(_field(Path(f"/proc/{pid}/io"), "syscw"))
    return Used(cpu_ms=cpu_ns / 1e6, wake_ups=wake_ups, writes=writes)


def _field(path: Path, name: str) -> str:
    return next(line.split()[1] for line in path.read_text().splitlines() if line.startswith(name))


async def measure(options: argparse.Namespace) -> list[Cost]:
    """A system of its own, at rest and at each rate."""
    cells = tuple(f"cell{number}" for number in range(1, options.cells + 1))
    per_cell = math.ceil(options.hosts / len(cells))
    plan = SystemPlan(
        cells=cells,
        schedulers=1,
        placements=1,
        compute=ComputeConfig(hosts=per_cell, gpu_share=0.0, sizes=(BIG,)),
    )
    counting = counting_binaries()
    with servers_for(cells, counting) as servers:
        if counting is not None:
            await probe.count_statements(servers.database_url)
        async with running_processes(servers, plan) as (processes, here), connected(here, keep_events=False) as client:
            await all_hosts_known(client, here, per_cell * len(cells))
            await fire(client, here, WARM_UP, random.Random(1), rate=WARM_UP_PER_S)
            instruments = Instruments(servers, processes)
            found = [await at(0.0, REST_S, instruments, client, here)]
            for rate in options.rates:
                progress(f"{options.seconds:.0f} s at {rate:g} boots a second")
                found.append(await at(rate, options.seconds, instruments, client, here))
            return found


async def at(rate: float, seconds: float, instruments: Instruments, client: BuildClient, here: Site) -> Cost:
    """The cost of a boot at this rate; at rate 0, what a second of rest does."""
    before = await instruments.before()
    latency: dict[str, float] = {}
    boots = seconds
    if rate:
        boots = max(1.0, rate * seconds)
        latency = (await fire(client, here, int(boots), random.Random(rate), rate=rate)).latency_ms
    else:
        await here.clock.sleep(seconds)
    after = await instruments.after()
    transactions, flushes, wal_writes = (
        round((now - then) / boots, 2) for now, then in zip(after.database, before.database, strict=True)
    )
    return Cost(
        rate_per_s=rate,
        p50_ms=round(latency.get("p50", 0.0), 1),
        p99_ms=round(latency.get("p99", 0.0), 1),
        processes={name: now.minus(before.processes[name], boots) for name, now in after.processes.items()},
        transactions=transactions,
        statements=called(before.statements, after.statements, boots),
        database_flushes=flushes,
        database_wal_writes=wal_writes,
        broker_flushes=round((after.broker_flushes - before.broker_flushes) / boots, 2),
    )


def called(before: Statements | None, after: Statements | None, boots: float) -> dict[str, float] | None:
    """Calls of each statement per boot, the most frequent first."""
    if before is None or after is None:
        return None
    calls = {" ".join(text.split()): count - before.get(text, (0.0, 0.0))[0] for text, (count, _) in after.items()}
    return {text: round(count / boots, 3) for text, count in sorted(calls.items(), key=lambda one: -one[1]) if count}


def print_cost(cost: Cost, rest: Used) -> None:
    """One rate for a person, as a table of Markdown; rest: what all processes use in a second without load."""
    title = f"{cost.rate_per_s:g}/s, a boot" if cost.rate_per_s else "rest, a second"
    print(f"| {title} | CPU ms | wake-ups | writes | broker messages |\n| --- | --- | --- | --- | --- |")
    for name, one in {**cost.processes, "all": cost.all}.items():
        print(f"| {name} | {one.cpu_ms:.2f} | {one.wake_ups:.1f} | {one.writes:.1f} | {one.messages:.2f} |")
    if cost.rate_per_s:
        net = cost.all.minus(rest.minus(Used(), cost.rate_per_s), 1.0)
        print(f"| without rest | {net.cpu_ms:.2f} | {net.wake_ups:.1f} | {net.writes:.1f} | {net.messages:.2f} |")
    statements = "" if cost.statements is None else f"{sum(cost.statements.values()):.2f} statements, "
    print(
        f"\n{cost.transactions} transactions, {statements}{cost.database_flushes} flushes of the database, "
        f"{cost.broker_flushes} of the broker; p50 {cost.p50_ms} ms, p99 {cost.p99_ms} ms\n",
        flush=True,
    )
    for text, calls in list((cost.statements or {}).items())[:PRINTED]:
        print(f"    {calls:7.3f} {text[:140]}")


def main() -> int:
    """Print, and write when asked."""
    options = parser_of(__doc__)
    options.add_argument(
        "--rates", type=lambda text: [float(rate) for rate in text.split(",")], default=[5.0, 20.0, 70.0]
    )
    options.add_argument("--seconds", type=float, default=10.0, help="how long each rate is held")
    options.add_argument("--hosts", type=int, default=2_000)
    options.add_argument("--cells", type=int, default=4)
    wanted = options.parse_args()
    found = measured(measure(wanted))
    for cost in found:
        print_cost(cost, found[0].all)
    write(found, wanted.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

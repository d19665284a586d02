"""The cost of a load in each process of a system: CPU, wake-ups, broker messages, transactions, statements, flushes."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping

import asyncpg
from msgspec import Struct

from berth.up.servers import RealServers
from berth.up.worker_processes import WorkerProcesses
from lab.benchmarks import probe

CLAIMS = "berth_scheduler_claims"
# Claims that were lost to other schedulers, or to stale news.
LOST = tuple(f'{CLAIMS}{{outcome="{outcome}"}}' for outcome in ("no_capacity", "conflict"))
COUNTED = ("berth_bus_published", "berth_bus_items", CLAIMS)
# Flushes of the logs of all quorum queues: what RabbitMQ's log writer calls a batch.
BROKER_FLUSHES = "lists:sum([maps:get(batches, C, 0) || C <- maps:values(ra_counters:overview()), is_map(C)])."
_DATABASE = """
SELECT (SELECT sum(xact_commit) FROM pg_stat_database WHERE datname = current_database())::float8,
       (SELECT wal_sync FROM pg_stat_wal)::float8
"""
_STATEMENTS = """
SELECT regexp_replace(query, '\\s+', ' ', 'g') AS text, sum(calls)::float8, sum(total_exec_time) AS ms
FROM pg_stat_statements WHERE NOT query ~ '^EXPLAIN|pg_stat_' GROUP BY text
"""
Statements = Mapping[str, tuple[float, float]]  # {statement: (calls, milliseconds)}


class Costs(Struct, frozen=True, kw_only=True):
    """The cost of 1,000 boots of one load, each process by its name, and the counts per boot.

    wake_ups_per_boot: context switches because a thread had nothing to do. conflict_rate: the share of claims that were
    lost. statements: {statement: (calls a boot, ms in the server a boot)}; None where the server does not count them.
    seconds_per_boot: of the whole load; the timers of all processes work in each of them.
    """

    cpu_s_per_1000_boots: dict[str, float]
    cpu_s_per_1000_boots_all: float
    memory_mb: dict[str, float]
    wake_ups_per_boot: dict[str, float]
    messages_per_boot: dict[str, float]
    broker_messages_per_boot: float
    items_per_boot: float
    items_per_broker_message: dict[str, float]
    transactions_per_boot: float
    database_flushes_per_boot: float
    broker_flushes_per_boot: float
    claims_per_boot: float
    conflict_rate: float
    statements_per_boot: float | None = None
    statements: dict[str, tuple[float, float]] | None = None
    seconds_per_boot: float = 0.0


class Used(Struct, frozen=True, kw_only=True):
    """The resources that each process but the client has used."""

    cpu_s: dict[str, float]
    wake_ups: dict[str, int]


class Client(Struct, frozen=True):
    """The CPU that this process has used, and when that was read."""

    cpu_s: float
    at_s: float

    @classmethod
    def now(cls) -> Client:
        """Its reading."""
        return cls(time.process_time(), time.monotonic())


class Reading(Struct, frozen=True, kw_only=True):
    """Where every counter stands. outside: transactions, flushes of the database, flushes of the broker."""

    used: Used
    client: Client
    metrics: dict[str, Counter[str]]
    outside: tuple[float, float, float]
    statements: Statements | None


class Instruments:
    """Reads what every process has used, before and after a load; the difference is what the load cost.

    The client's are read next to the load, then those of the processes: reading what follows makes the client work,
    and reading the others makes the processes work.
    """

    def __init__(self, servers: RealServers, processes: WorkerProcesses, *, counts_statements: bool) -> None:
        self._servers = servers
        self._processes = processes
        self._counts_statements = counts_statements

    async def before(self) -> Reading:
        """All counters, before a load."""
        outside, statements = await self._read_outside()
        metrics = await self._read_metrics()
        used = self._used()
        return Reading(outside=outside, statements=statements, metrics=metrics, used=used, client=Client.now())

    async def since(self, before: Reading, boots: int) -> Costs:
        """The cost of each of so many boots since then."""
        client, used = Client.now(), self._used()
        metrics = await self._read_metrics()
        outside, statements = await self._read_outside()
        now = Reading(outside=outside, statements=statements, metrics=metrics, used=used, client=client)
        return _difference(before, now, boots, {name: probe.memory_mb(pid) for name, pid in self._pids().items()})

    def _pids(self) -> dict[str, int]:
        workers = {name: worker.process.pid for name, worker in self._processes.workers.items()}
        return {"broker": self._servers.broker.pid, "postgresql": self._servers.postgres.pid, **workers}

    def _used(self) -> Used:
        pids = self._pids()
        return Used(
            cpu_s={name: probe.cpu_s(pid) for name, pid in pids.items()},
            wake_ups={name: probe.wake_ups(pid) for name, pid in pids.items()},
        )

    async def _read_metrics(self) -> dict[str, Counter[str]]:
        pages = {name: await self._processes.metrics(name) for name in self._processes.workers}
        found = {name: probe.scraped(page, COUNTED) for name, page in pages.items()}
        return found | {"client": probe.own_counters(COUNTED)}

    async def _read_outside(self) -> tuple[tuple[float, float, float], Statements | None]:
        flushed = self._servers.broker.evaluate(BROKER_FLUSHES)
        connection = await asyncpg.connect(self._servers.database_url)
        try:
            transactions, flushes = await connection.fetchrow(_DATABASE)
            statements = None
            if self._counts_statements:
                await connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
                statements = {text: (calls, ms) for text, calls, ms in await connection.fetch(_STATEMENTS)}
        finally:
            await connection.close()
        return (transactions, flushes, float(re.findall(r"\d+", flushed)[-1])), statements


def _difference(before: Reading, now: Reading, boots: int, memory_mb: Mapping[str, float]) -> Costs:
    cpu = {name: (used - before.used.cpu_s[name]) / boots for name, used in now.used.cpu_s.items()}
    cpu["client"] = (now.client.cpu_s - before.client.cpu_s) / boots
    wake_ups = {name: (count - before.used.wake_ups[name]) / boots for name, count in now.used.wake_ups.items()}
    metrics = {name: counted - before.metrics[name] for name, counted in now.metrics.items()}
    published, items, claims = (sum(one[name] for one in metrics.values()) for name in COUNTED)
    transactions, flushes, broker_flushes = (
        round((new - old) / boots, 3) for new, old in zip(now.outside, before.outside, strict=True)
    )
    spent = _spent(before.statements, now.statements, boots)
    return Costs(
        cpu_s_per_1000_boots={name: round(1000 * used, 3) for name, used in cpu.items()},
        cpu_s_per_1000_boots_all=round(1000 * sum(cpu.values()), 3),
        memory_mb={name: round(held, 1) for name, held in memory_mb.items()},
        wake_ups_per_boot={name: round(count, 2) for name, count in wake_ups.items()},
        messages_per_boot={name: round(one["berth_bus_published"] / boots, 2) for name, one in metrics.items()},
        broker_messages_per_boot=round(published / boots, 2),
        items_per_boot=round(items / boots, 2),
        items_per_broker_message={
            name: round(one["berth_bus_items"] / one["berth_bus_published"], 1)
            for name, one in metrics.items()
            if one["berth_bus_published"]
        },
        transactions_per_boot=transactions,
        database_flushes_per_boot=flushes,
        broker_flushes_per_boot=broker_flushes,
        claims_per_boot=round(claims / boots, 4),
        conflict_rate=round(sum(one[name] for one in metrics.values() for name in LOST) / max(claims, 1), 4),
        statements_per_boot=None if spent is None else round(sum(calls for calls, _ in spent.values()), 3),
        statements=spent,
        seconds_per_boot=round((now.client.at_s - before.client.at_s) / boots, 5),
    )


def _spent(before: Statements | None, now: Statements | None, boots: int) -> dict[str, tuple[float, float]] | None:
    """Calls and milliseconds of each statement per boot, those that took longest first."""
    if before is None or now is None:
        return None
    spent = {}
    for text, (calls, ms) in now.items():
        earlier_calls, earlier_ms = before.get(text, (0.0, 0.0))
        if calls > earlier_calls:
            spent[text] = (round((calls - earlier_calls) / boots, 4), round((ms - earlier_ms) / boots, 4))
    return dict(sorted(spent.items(), key=lambda one: -one[1][1]))

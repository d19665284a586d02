"""The cost of a load in each process, the broker and the database. See lab/benchmarks/street.py."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from berth.trial.servers import RealServers
from berth.trial.worker_processes import WorkerProcesses
from lab.benchmarks import probe
from lab.benchmarks.street_report import Costs

CLAIMS = "berth_scheduler_claims"
LOST = tuple(
    f'{CLAIMS}{{outcome="{outcome}"}}' for outcome in ("full", "raced")
)  # to other schedulers, or to stale news
COUNTED = ("berth_bus_published", "berth_bus_items", "berth_bus_consumed", CLAIMS)


class Instruments:
    """Reads what every process has used, before and after; the difference is what the load cost."""

    def __init__(self, servers: RealServers, processes: WorkerProcesses, *, profiles: Path | None) -> None:
        self._processes = processes
        self._profiles = profiles
        self._url = servers.database_url
        self._pids = {
            "broker": servers.broker.pid,
            "postgresql": servers.postgres.pid,
            **{name: worker.process.pid for name, worker in processes.workers.items()},
        }
        self._cpu: dict[str, float] = {}
        self._messages: dict[str, Counter[str]] = {}
        self._transactions = 0.0
        self._began_s = 0.0
        self._statements: Mapping[str, tuple[float, float]] | None = None

    async def before(self) -> None:
        """Note where everything stands."""
        self._messages = await self._counters()
        self._statements = await probe.statements(self._url)
        self._transactions = await probe.transactions(self._url)
        if self._profiles is not None:
            workers = {name: worker.process.pid for name, worker in self._processes.workers.items()}
            probe.profile({"client": os.getpid(), **workers}, self._profiles)
            self._profiles = None  # the first load is the full one
        self._cpu = self._used()
        self._began_s = time.monotonic()

    async def after(self, boots: int) -> Costs:
        """The difference since then."""
        took_s = time.monotonic() - self._began_s
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
            seconds_per_boot=round(took_s / boots, 5),
        )

    def _used(self) -> dict[str, float]:
        return {name: probe.cpu_s(pid) for name, pid in self._pids.items()} | {"client": time.process_time()}

    async def _counters(self) -> dict[str, Counter[str]]:
        pages = {name: await self._processes.metrics(name) for name in self._processes.workers}
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

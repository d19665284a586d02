"""One system's figures, and how they are printed. See lab/benchmarks/street.py."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from berth.client import BuildClient
from berth.client.moves import MoveClient
from berth.trial.servers import RealServers
from berth.trial.worker_processes import WorkerProcesses
from bus.clock import new_uuid
from bus.contracts.moves import MoveEvent, MoveKind, MoveRequest, MoveState
from lab.benchmarks import probe
from lab.benchmarks.bare import AtRate

SLICE = 500  # requests published in one go
AGAIN_S = 0.25  # the queue of requests is full: what was refused is published again after so long
WAIT_S = 600.0


class MoveFigures(Struct, frozen=True, kw_only=True):
    """The results of the moves. latency_ms: from their publication to their end. codes: of those that were not done."""

    kind: str
    moves: int
    done: int
    moves_per_s: float
    latency_ms: dict[str, float]
    codes: dict[str, int] = {}


async def migrate_all(client: BuildClient, count: int, rng: random.Random, *, rate_per_s: float = 0.0) -> MoveFigures:
    """Live-migrate so many of the client's active builds, at this rate or (0) all at once."""
    active = [track for track in client.tracks.values() if track.state == "active"][:count]
    slice_ = max(1, round(rate_per_s * AGAIN_S)) if rate_per_s else SLICE
    following = MoveClient(client.bus, clock=client.clock, process=client.process)
    ended_s: dict[str, float] = {}
    requested_s: dict[str, float] = {}

    def receive(event: MoveEvent) -> None:
        if event.terminal:
            ended_s.setdefault(event.request_id, client.clock.monotonic())

    following.on_event(receive)
    await following.open()
    try:
        began_s = client.clock.monotonic()
        waiting = [
            MoveRequest(
                request_id=new_uuid(rng),
                instance_uuid=track.instance_uuid,
                project_id=track.project_id,
                kind=MoveKind.LIVE_MIGRATE,
            )
            for track in active
        ]
        while waiting:
            part = waiting[:slice_]
            now_s = client.clock.monotonic()
            for one in part:
                requested_s.setdefault(one.request_id, now_s)
            errors = await following.offer(part)
            refused = [one for one, error in zip(part, errors, strict=True) if error is not None]
            waiting = refused + waiting[slice_:]
            if refused or rate_per_s:
                await client.clock.sleep(AGAIN_S)
        await following.wait(WAIT_S)
    finally:
        await following.close()
    took_s = max(ended_s.values(), default=client.clock.monotonic()) - began_s
    ends = list(following.ended.values())
    latencies = sorted(1000 * (at - requested_s[one]) for one, at in ended_s.items())
    codes = Counter(end.code or end.state.value for end in ends if end.state is not MoveState.DONE)
    if following.unfinished:
        codes["not ended"] = following.unfinished
    return MoveFigures(
        kind=MoveKind.LIVE_MIGRATE.value,
        moves=len(active),
        done=sum(end.state is MoveState.DONE for end in ends),
        moves_per_s=round(len(ends) / took_s, 1) if took_s > 0 else 0.0,
        latency_ms=spread_of(latencies),
        codes=dict(codes),
    )


def spread_of(sorted_ms: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th hundredth and the longest; {} of nothing."""
    if not sorted_ms:
        return {}
    at = {"p95": 0.95, "p99": 0.99}
    found = {name: sorted_ms[min(len(sorted_ms) - 1, int(share * len(sorted_ms)))] for name, share in at.items()}
    return {
        "p50": round(statistics.median(sorted_ms), 1),
        **{name: round(value, 1) for name, value in found.items()},
        "max": round(sorted_ms[-1], 1),
    }


LEAST_CORES = 0.002  # of a process that is named


class Costs(Struct, frozen=True, kw_only=True):
    """The cost of 1,000 boots of one load, each process by its name, and the counts per boot."""

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
    seconds_per_boot: float = 0.0  # of the whole load; the timers of all processes work in each of them


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
    bare_idle_cpu_ms: float | None = None
    at_rates: dict[str, dict[str, float]] = {}
    costs: Costs | None = None
    costs_at_rates: dict[str, Costs] = {}
    costs_alone: Costs | None = None  # of boots one at a time, with what goes on meanwhile anyway
    bare_at_rates: dict[str, AtRate] = {}  # the bare pipeline at the same rates
    moves: MoveFigures | None = None
    background_cores: dict[str, float] = {}  # of each process, while nothing is booted: heartbeats, reports, timers
    background_cores_after: dict[str, float] = {}  # the same after the loads, before the lowest rate
    background_transactions_per_s: float = 0.0


def print_result(result: Result, seconds: float) -> None:
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
            f"(ours {result.idle_ratio_to_bare_pipeline} x that) and {result.bare_idle_cpu_ms:.1f} ms of CPU"
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
        print(
            f"    {figures['p50'] / result.idle_p50_ms:.1f} x alone, p99 {figures['p99'] / figures['p50']:.1f} x p50",
            end="",
        )
        if (plain := result.bare_at_rates.get(share)) is not None:
            print(f"; the bare pipeline p50 {plain.p50_ms:.1f} ms, p99 {plain.p99_ms:.1f} ms", end="")
        print()
    if result.background_cores:
        after = result.background_cores_after
        print(
            f"  cores used while nothing is booted: {sum(result.background_cores.values()):.3f}; "
            f"after the loads {sum(after.values()):.3f}:",
            ", ".join(f"{name} {used:.3f}" for name, used in after.items() if used >= LEAST_CORES),
        )
    for share, spending in (("alone", result.costs_alone), *result.costs_at_rates.items()):
        if spending is not None:
            print(
                f"  {share}, CPU ms a boot: {spending.cpu_s_per_1000_boots_all:.3f}; "
                f"{spending.broker_messages_per_boot} broker messages, {spending.transactions_per_boot} transactions"
                f"{_resting(result, spending)}"
            )
            print(
                "    by process:",
                ", ".join(f"{name} {used:.3f}" for name, used in spending.cpu_s_per_1000_boots.items()),
            )
            print(
                "    items a broker message:",
                ", ".join(f"{n} {v}" for n, v in spending.items_per_broker_message.items()),
            )
    if result.moves is not None:
        measured = result.moves
        latencies = ", ".join(f"{name} {ms:.0f} ms" for name, ms in measured.latency_ms.items())
        done = f"{measured.done} of {measured.moves} done"
        print(f"  {measured.moves_per_s:.0f} {measured.kind} a second ({done}), {latencies}", end="")
        print(f"; {measured.codes}" if measured.codes else "")
    if result.costs is not None:
        _print_costs(result.costs)


def _resting(result: Result, costs: Costs) -> str:
    """The part of a boot's cost that its seconds use whether or not anything is booted: more on a slower machine."""
    if not result.background_cores:
        return ""
    seconds = costs.seconds_per_boot
    cpu_ms = 1000 * sum(result.background_cores.values()) * seconds
    transactions = result.background_transactions_per_s * seconds
    return f"; rest is {cpu_ms:.1f} ms and {transactions:.2f} transactions of these ({1000 * seconds:.1f} ms a boot)"


def _print_costs(costs: Costs) -> None:
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
        found = {name: probe.scraped(page, COUNTED) for name, page in pages.items()}
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

"""One system's figures, and how they are printed. See lab/benchmarks/street.py."""

from __future__ import annotations

from msgspec import Struct

from lab.benchmarks.bare import AtRate
from lab.benchmarks.street_moves import MoveFigures

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

"""The figures of the street, and how they are printed. See lab/benchmarks/street.py."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from lab.benchmarks.bare import AtRate, Bare
from lab.benchmarks.costs import Costs

LEAST_CORES = 0.002  # of a process that is named
STATEMENTS_SHOWN = 14


class Result(Struct, kw_only=True):
    """The figures. spent_ms: in each stage, which add up to a boot's latency; the idle ones are medians.

    costs_alone: of boots one at a time, with what goes on meanwhile anyway. background: a second in which nothing is
    booted, before the load and after it; there is more to clear up then. bare_at_rates: the bare pipeline at the same
    rates.
    """

    boots: int
    hosts: int
    cells: int
    schedulers: int
    boots_per_s: float
    latency_ms: dict[str, float]
    stages_ms: dict[str, dict[str, float]]
    spent_ms: dict[str, dict[str, float]]
    idle_p50_ms: float
    idle_p95_ms: float
    idle_stages_ms: dict[str, float]
    idle_spent_ms: dict[str, float]
    active: int
    costs: Costs
    costs_alone: Costs
    background: Costs
    background_after: Costs
    invariants_hold: bool = False
    ratio_to_bare_pipeline: float | None = None
    bare_boots_per_s: float | None = None
    idle_ratio_to_bare_pipeline: float | None = None
    bare_idle_p50_ms: float | None = None
    bare_idle_cpu_ms: float | None = None
    at_rates: dict[str, dict[str, float]] = {}
    costs_at_rates: dict[str, Costs] = {}
    bare_at_rates: dict[str, AtRate] = {}

    def compare(self, plain: Bare) -> None:
        """Note what the bare pipeline did."""
        self.bare_boots_per_s = round(plain.boots_per_s, 1)
        self.bare_idle_p50_ms = round(plain.idle_p50_ms, 2)
        self.bare_idle_cpu_ms = round(plain.idle_cpu_ms, 2)
        self.ratio_to_bare_pipeline = round(self.boots_per_s / plain.boots_per_s, 2)
        self.idle_ratio_to_bare_pipeline = round(self.idle_p50_ms / plain.idle_p50_ms, 2)


def print_result(result: Result, seconds: float) -> None:
    """The figures for a person."""
    print(
        f"{result.boots_per_s:.0f} boots/s ({result.active} of {result.boots} active, {result.hosts} hosts in "
        f"{result.cells} cells), idle boot p50 {result.idle_p50_ms:.1f} ms, p95 {result.idle_p95_ms:.1f} ms, "
        f"invariants {'hold' if result.invariants_hold else 'BROKEN'}; {seconds:.0f} s in all"
    )
    if result.bare_boots_per_s is not None:
        times = result.ratio_to_bare_pipeline
        print(
            f"  the bare pipeline: {result.bare_boots_per_s:.0f} boots/s (ours {times} x that), "
            f"alone {result.bare_idle_p50_ms:.1f} ms (ours {result.idle_ratio_to_bare_pipeline} x) and "
            f"{result.bare_idle_cpu_ms:.1f} ms of CPU"
        )
    print("  idle, ms until:", _listed(result.idle_stages_ms))
    print("  idle, ms in each stage:", _listed(result.idle_spent_ms))
    spent = {name: f"{ms['p50']:.0f} ({ms['p99']:.0f})" for name, ms in result.spent_ms.items()}
    print("  loaded, ms in each stage, p50 (p99):", _listed(spent))
    for share, held in result.at_rates.items():
        stages = {name.removesuffix("_p50"): f"{ms:.0f}" for name, ms in held.items() if name.endswith("_p50")}
        plain = result.bare_at_rates.get(share)
        beside = "" if plain is None else f"; the bare pipeline p50 {plain.p50_ms:.1f} ms, p99 {plain.p99_ms:.1f} ms"
        print(
            f"  at {share} ({held['rate_per_s']:.0f}/s): p50 {held['p50']:.0f} ms, p99 {held['p99']:.0f} ms; "
            f"{held['p50'] / result.idle_p50_ms:.1f} x alone, p99 {held['p99'] / held['p50']:.1f} x p50{beside}\n"
            f"    in each stage, p50: {_listed(stages)}"
        )
    for name, idle in (("before", result.background), ("after", result.background_after)):
        cores = {one: used / 1000 for one, used in idle.cpu_s_per_1000_boots.items()}
        named = {one: f"{used:.3f}" for one, used in cores.items() if used >= LEAST_CORES}
        print(f"  cores used while nothing is booted, {name} the load: {sum(cores.values()):.3f}: {_listed(named)}")
    loads = {"alone": result.costs_alone, **result.costs_at_rates, "at once": result.costs}
    for name, costs in loads.items():
        _print_costs(name, costs, result.background)


def _print_costs(load: str, costs: Costs, background: Costs) -> None:
    """background: what its seconds use whether or not anything is booted: more on a slower machine."""
    seconds, wake_ups = costs.seconds_per_boot, sum(costs.wake_ups_per_boot.values())
    print(
        f"  {load}, a boot: {costs.cpu_s_per_1000_boots_all:.3f} ms of CPU, {wake_ups:.1f} "
        f"wake-ups; {costs.broker_messages_per_boot} broker messages of {costs.items_per_boot} items; "
        f"{costs.transactions_per_boot} transactions, {costs.statements_per_boot} statements; "
        f"{costs.database_flushes_per_boot} flushes of the database, {costs.broker_flushes_per_boot} of the broker; "
        f"{costs.claims_per_boot} claims, {costs.conflict_rate:.2%} of them lost\n"
        f"    of these, in its {1000 * seconds:.1f} ms and without a boot: "
        f"{background.cpu_s_per_1000_boots_all * seconds:.3f} ms of CPU, "
        f"{background.transactions_per_boot * seconds:.2f} transactions"
    )
    print("    CPU ms:", _listed(costs.cpu_s_per_1000_boots))
    print("    wake-ups:", _listed(costs.wake_ups_per_boot))
    print("    broker messages:", _listed(costs.messages_per_boot))
    print("    items a broker message:", _listed(costs.items_per_broker_message))
    for statement, (calls, ms) in list((costs.statements or {}).items())[:STATEMENTS_SHOWN]:
        print(f"    {1000 * ms:7.1f} us {calls:7.4f} calls  {statement[:110]}")


def _listed(figures: Mapping[str, float | str]) -> str:
    return ", ".join(f"{name} {figure}" for name, figure in figures.items())

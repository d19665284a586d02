"""The rate that more machines would carry, by the measured cost of a boot in each part.

    scripts/street --json street.json
    python -m lab.benchmarks.scale --json scale.json
    python -m lab.benchmarks.model street.json [--scale scale.json] [--cells N] [--hosts N] [--rate N] ...

Small batches cost more a boot than full ones, so each part is charged what it was measured to cost at the boots a
second that it would see: a cell's parts their cell's share, all others everything. Between two measured rates the cost
is taken on the line between them (by the logarithm of the rate), beyond the measured ones the nearest. The cost of a
part while nothing is booted (heartbeats, reports) is apart, and grows with the hosts it was measured with. Where parts
share a process that was measured as one (RabbitMQ's virtual hosts, PostgreSQL's schemas), each of theirs is charged the
whole: it is an upper bound. No process and no machine is filled beyond FILL.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from lab.benchmarks.scale import Scale
from lab.benchmarks.street import positive
from lab.benchmarks.street_report import Result

FILL = 0.7
# Each host's whole inventory is repeated so often (compute_sim: report_interval_s, every tenth time).
REPEAT_S = 600.0
IN_CELL = ("conductor", "compute")  # of these each cell has its own
ONE_CORE = ("scheduler", "placement", "conductor", "compute", "client")  # one process fills one core at most
NOT_THEIRS = ("client",)  # the load generator is not part of what is to be bought
WHAT_TO_ADD = {
    "scheduler": "a scheduler: they share the queue and the book only",
    "placement": "a placement worker; one at a time is in the counter's critical section",
    "postgresql": "a PostgreSQL for each owner: placement, scheduler, each cell",
    "broker": "a broker a cell",
    "conductor": "a conductor, or a cell",
    "compute": "a compute service",
}


class Point(Struct, frozen=True):
    """The cost of one boot in a role at this many a second."""

    per_s: float
    ms: float


Curves = Mapping[str, Sequence[Point]]


class Need(Struct, frozen=True, kw_only=True):
    """One role of a plan: boots a second that one cell's (or all) of it see, ms a boot then, cores and processes."""

    role: str
    per_s: float
    ms: float
    cores: float
    processes: int


def role_of(process: str) -> str:
    """The role of a process of the street: `conductor-cell1-1` is a conductor."""
    return process.partition("-")[0].rstrip("0123456789")


def by_role(used: Mapping[str, float]) -> dict[str, float]:
    """The resources of processes, the sum of each role."""
    found: dict[str, float] = {}
    for process, amount in used.items():
        found[role_of(process)] = found.get(role_of(process), 0.0) + amount
    return found


def curves(result: Result) -> Curves:
    """The cost of a boot in each role at every measured rate; a cell's roles at their cell's share of it."""
    if result.costs is None:
        raise SystemExit("that file has no costs: measure the real system (scripts/street)")
    measured = [(result.boots_per_s, result.costs)]
    measured += [(result.at_rates[share]["rate_per_s"], costs) for share, costs in result.costs_at_rates.items()]
    found: dict[str, list[Point]] = {}
    background = by_role(result.background_cores)
    for rate, costs in sorted(measured, key=lambda pair: pair[0]):
        for role, ms in by_role(costs.cpu_s_per_1000_boots).items():
            of_boots = max(ms - 1000 * background.get(role, 0.0) / rate, 0.0)
            found.setdefault(role, []).append(Point(rate / (result.cells if role in IN_CELL else 1), of_boots))
    return found


def cost_ms(points: Sequence[Point], per_s: float) -> float:
    """The cost of a boot at this rate."""
    if per_s <= points[0].per_s:
        return points[0].ms
    for low, high in itertools.pairwise(points):
        if per_s <= high.per_s:
            share = math.log(per_s / low.per_s) / math.log(high.per_s / low.per_s)
            return low.ms + share * (high.ms - low.ms)
    return points[-1].ms


def needs(known: Curves, rate: float, cells: int) -> list[Need]:
    """Cores and processes of each role at this rate, most cores first."""
    found = []
    for role, points in known.items():
        if role in NOT_THEIRS:
            continue
        seen = rate / cells if role in IN_CELL else rate
        ms = cost_ms(points, seen)
        cores = rate * ms / 1000
        each = math.ceil(seen * ms / 1000 / FILL) if role in ONE_CORE else 1
        found.append(
            Need(role=role, per_s=seen, ms=ms, cores=cores, processes=each * (cells if role in IN_CELL else 1))
        )
    return sorted(found, key=lambda need: -need.cores)


def carried(known: Curves, cores: float, cells: int) -> float:
    """Boots a second that so many cores carry, filled to FILL."""
    low, high = 0.0, 1e7
    for _ in range(60):
        middle = (low + high) / 2
        fits = sum(need.cores for need in needs(known, middle, cells)) <= FILL * cores
        low, high = (middle, high) if fits else (low, middle)
    return low


def first_full(known: Curves, cells: int) -> list[tuple[str, float]]:
    """Boots a second at which one process of each role is a full core: the least first."""
    rows = [
        (role, 1000 / points[-1].ms * (cells if role in IN_CELL else 1))
        for role, points in known.items()
        if role in ONE_CORE and role not in NOT_THEIRS
    ]
    return sorted(rows, key=lambda row: row[1])


def host_kb(scale: Scale) -> float | None:
    """Memory of a scheduler for each host more, from the parts with the fewest and the most hosts."""
    found = {
        run.hosts: run.result.costs.memory_mb["scheduler1"]
        for run in scale.runs
        if run.schedulers == 1 and run.result is not None and run.result.costs is not None
    }
    if len(found) < 2:
        return None
    fewest, most = min(found), max(found)
    return 1024 * (found[most] - found[fewest]) / (most - fewest)


def rows_of(plan: Iterable[Need]) -> list[str]:
    """A plan as a table."""
    head = ["| part | sees boots/s | CPU ms a boot | cores | processes | what to add |", "| --- " * 6 + "|"]
    return head + [
        f"| {need.role} | {need.per_s:,.0f} | {need.ms:.3f} | {need.cores:.2f} | {need.processes} "
        f"| {WHAT_TO_ADD.get(need.role, '')} |"
        for need in plan
    ]


def report(result: Result, scale: Scale, options: argparse.Namespace) -> str:
    """All of it in words."""
    known = curves(result)
    assert result.costs is not None
    background = {role: cores for role, cores in by_role(result.background_cores).items() if role not in NOT_THEIRS}
    lines = [
        f"Measured {result.boots_per_s:,.0f} boots a second. CPU ms a boot of each part, by the boots a second it saw:",
        *(f"  {role}: " + ", ".join(f"{p.ms:.3f} at {p.per_s:,.0f}" for p in points) for role, points in known.items()),
        f"One process of each as a full core, with {result.cells} cells, carries (boots a second): "
        + ", ".join(f"{role} {per_s:,.0f}" for role, per_s in first_full(known, result.cells)),
        "",
        f"One machine of {options.machine} cores, {result.cells} cells, {FILL:.0%} full: "
        f"{carried(known, options.machine, result.cells):,.0f} boots a second",
        f"{options.machines} machines of {options.machine} cores, {options.machines} cells: "
        f"{carried(known, options.machine * options.machines, options.machines):,.0f} boots a second by their cores"
        + (
            f", {options.claims:,.0f} by the book's counter"
            if options.claims
            else " (what one book claims: see --claims)"
        ),
        "",
        f"{options.rate:,.0f} boots a second, {options.cells} cells, {options.hosts:,} hosts:",
        *rows_of(needs(known, options.rate, options.cells)),
    ]
    of_boots = sum(need.cores for need in needs(known, options.rate, options.cells))
    at_rest = sum(background.values()) * options.hosts / result.hosts
    whole = of_boots + at_rest
    lines += [
        f"Boots {of_boots:.1f} cores, and at rest {at_rest:.1f} ("
        + ", ".join(f"{role} {cores * options.hosts / result.hosts:.2f}" for role, cores in background.items())
        + f"; measured with {result.hosts:,} hosts, taken to grow with them): {math.ceil(whole / FILL)} to be bought",
        "At full batches "
        f"{result.costs.transactions_per_boot * options.rate:,.0f} transactions and "
        f"{result.costs.broker_messages_per_boot * options.rate:,.0f} broker messages a second",
        f"Inventories repeated: {options.hosts / REPEAT_S:,.0f} a second",
    ]
    kb = host_kb(scale)
    if kb is not None:
        lines.append(f"A scheduler's copy of the book: {kb:.2f} kB a host, {kb * options.hosts / 1024**2:.1f} GB")
    return "\n".join(lines)


def main() -> int:
    """Print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("street", type=Path)
    parser.add_argument("--scale", type=Path)
    parser.add_argument("--machine", type=positive, default=16, help="cores of a machine")
    parser.add_argument("--machines", type=positive, default=10)
    parser.add_argument("--cells", type=positive, default=100)
    parser.add_argument("--hosts", type=positive, default=1_000_000)
    parser.add_argument("--rate", type=float, default=10_000.0)
    parser.add_argument("--claims", type=float, help="claims a second that one book takes (lab.benchmarks.claims)")
    options = parser.parse_args()
    result = msgspec.json.decode(options.street.read_bytes(), type=Result)
    scale = msgspec.json.decode(options.scale.read_bytes(), type=Scale) if options.scale else Scale()
    print(report(result, scale, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())

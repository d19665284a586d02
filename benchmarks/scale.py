"""The street at 1,000, 10,000 and 100,000 hosts, and with 1, 2 and 4 schedulers: one after the other, in bounded time.

    python -m benchmarks.scale [--boots N] [--minutes N] [--json FILE]

Each run is `benchmarks.street` on real servers of its own: throughput, CPU of each process a boot, idle latency, the
share of claims that were lost to other schedulers, the invariants. A run is begun only while there is time for it; one
that was not begun, or failed, says so and the others stand.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
from msgspec import Struct

from benchmarks.street import Result, on_real_servers
from berth.embedded.process import ServerFailed
from bus.service.telemetry import configure_logging

HOSTS = (1_000, 10_000, 100_000)
SCHEDULERS = (2, 4)  # one is the run above at as many hosts
HOSTS_OF_SCHEDULERS = 10_000
CELLS = 4
NEAR = 0.2  # throughput at the most hosts may be so much below that at the fewest
MINUTES = 11.5
# A run that hangs is ended; one of 100,000 hosts spends most of this on making them known.
RUN_S = 330.0
# So long a run takes at least: with less left it is not begun.
LEAST_S = {1_000: 35.0, 10_000: 45.0, 100_000: 150.0}


class Run(Struct, frozen=True):
    """One run: what was asked, and what came of it (None: why not)."""

    hosts: int
    schedulers: int
    result: Result | None = None
    why_not: str = ""


async def run_all(boots: int, minutes: float) -> list[Run]:
    """Every run for which there is time."""
    until = time.monotonic() + 60 * minutes
    plan = [(HOSTS[0], 1), (HOSTS[1], 1), *((HOSTS_OF_SCHEDULERS, n) for n in SCHEDULERS), (HOSTS[2], 1)]
    runs: list[Run] = []
    for hosts, schedulers in plan:
        left = until - time.monotonic()
        if left < LEAST_S[hosts]:
            runs.append(Run(hosts, schedulers, why_not=f"not begun, {left:.0f} s left"))
            continue
        runs.append(await run_one(hosts, schedulers, boots, min(left, RUN_S)))
        print(line(runs[-1]), flush=True)
    return runs


async def run_one(hosts: int, schedulers: int, boots: int, most_s: float) -> Run:
    """One street, ended when it takes too long."""
    options = argparse.Namespace(
        hosts=hosts,
        cells=CELLS,
        schedulers=schedulers,
        placements=1,
        boots=boots,
        bare=False,
        rates=False,
        statements=False,
        profiles=None,
    )
    try:
        async with asyncio.timeout(most_s):
            return Run(hosts, schedulers, result=await on_real_servers(options))
    except TimeoutError:
        return Run(hosts, schedulers, why_not=f"ended after {most_s:.0f} s")
    except (SystemExit, ServerFailed) as error:  # how the street says that builds failed, or hosts stayed unknown
        return Run(hosts, schedulers, why_not=(str(error).splitlines() or [type(error).__name__])[0])


def line(run: Run) -> str:
    """One run as a row of the tables."""
    result = run.result
    if result is None or result.costs is None:
        return f"| {run.hosts:,} | {run.schedulers} | {run.why_not} |"
    spent: dict[str, float] = {}
    for name, used in result.costs.cpu_s_per_1000_boots.items():
        role = name.split("-")[0].rstrip("0123456789")
        spent[role] = spent.get(role, 0.0) + used
    parts = ", ".join(f"{role} {used:.3f}" for role, used in spent.items())
    return (
        f"| {run.hosts:,} | {run.schedulers} | {result.boots_per_s:,.0f} | {result.idle_p50_ms:.1f} "
        f"| {result.costs.cpu_s_per_1000_boots_all:.3f} = {parts} | {result.costs.claims_per_boot:.3f} "
        f"| {result.costs.conflict_rate:.2%} | {'hold' if result.invariants_hold else 'BROKEN'} |"
    )


def tables(runs: Sequence[Run]) -> str:
    """Both tables, and how far apart the first and the last size are."""
    head = "| hosts | schedulers | boots/s | idle p50 ms | CPU ms a boot | claims a boot | lost | invariants |"
    rule = "| --- " * 8 + "|"
    by_hosts = [line(run) for run in sorted(runs, key=lambda run: run.hosts) if run.schedulers == 1]
    by_schedulers = [line(run) for run in runs if run.hosts == HOSTS_OF_SCHEDULERS]
    return "\n".join(["", head, rule, *by_hosts, "", head, rule, *by_schedulers, "", spread(runs)])


def spread(runs: Sequence[Run]) -> str:
    """Throughput at the most hosts against that at the fewest."""
    found = {run.hosts: run.result.boots_per_s for run in runs if run.schedulers == 1 and run.result is not None}
    if not {HOSTS[0], HOSTS[-1]} <= found.keys():
        return "The fewest and the most hosts were not both measured."
    ratio = found[HOSTS[-1]] / found[HOSTS[0]]
    verdict = "within" if 1 - NEAR <= ratio <= 1 / (1 - NEAR) else "NOT within"
    return f"{HOSTS[-1]:,} hosts against {HOSTS[0]:,}: {ratio:.2f} of the throughput, {verdict} {NEAR:.0%}."


def main() -> int:
    """Print, and write when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boots", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no run is begun or goes on past this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    configure_logging(process="bench", role="bench", level="error", style="pretty")
    runs = uvloop.run(run_all(options.boots, options.minutes))
    print(tables(runs))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(runs), indent=2))
    return 0 if all(run.result is not None and run.result.invariants_hold for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())

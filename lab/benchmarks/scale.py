"""The street at 1,000, 10,000 and 100,000 hosts, and with 1, 2 and 4 schedulers.

    python -m lab.benchmarks.scale [--parts 1000x1,100000x1] [--json FILE]      parts are HOSTSxSCHEDULERS

Each part is `scripts/street` on real servers of its own: throughput, CPU of each process a boot, idle latency, the
share of claims that were lost to other schedulers, the invariants. FILE is written after each part. One that hangs is
ended; one that failed is shown. Exit status 1: a part has no result, or its invariants do not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from berth.trial.embedded.process import ServerFailed
from lab.benchmarks.command import measured, parser_of, positive, write
from lab.benchmarks.street import parsed
from lab.benchmarks.street_report import Result
from lab.benchmarks.street_systems import on_real_servers

PARTS = "1000x1,10000x1,10000x2,10000x4,100000x1"
CELLS = 4
BOOTS = 10_000
NEAR = 0.2  # throughput at the most hosts may be so much below that at the fewest, or above
PART_S = 175.0  # one of 100,000 hosts spends most of this on making them known
HEAD = "| hosts | schedulers | boots/s | idle p50 ms | CPU ms a boot | claims a boot | lost | invariants |"
RULE = "| --- " * 8 + "|"


class Run(Struct, frozen=True, kw_only=True):
    """One part: what was asked, and what came of it (None: why not)."""

    hosts: int
    schedulers: int
    seconds: float = 0.0
    result: Result | None = None
    why_not: str = ""


class Spread(Struct, frozen=True, kw_only=True):
    """Throughput at the most hosts against that at the fewest, one scheduler each."""

    fewest: int
    most: int
    ratio: float
    bound: float = NEAR
    verdict: Literal["within", "NOT within"]


class Scale(Struct, frozen=True, kw_only=True):
    """The file: every part that was run, and what they show together (None: too few were)."""

    runs: list[Run] = []
    spread: Spread | None = None


def parse_parts(text: str) -> list[tuple[int, int]]:
    """`HOSTSxSCHEDULERS,...` as (hosts, schedulers)."""
    found = []
    for part in text.split(","):
        hosts, _, schedulers = part.strip().partition("x")
        try:
            found.append((positive(hosts), positive(schedulers or "1")))
        except ValueError:
            raise argparse.ArgumentTypeError(f"a part is HOSTSxSCHEDULERS, as in 1000x2: not {part!r}") from None
    return found


async def run_all(parts: Sequence[tuple[int, int]], boots: int, path: Path | None) -> Scale:
    """Every part; the file is up to date after each."""
    scale = Scale()
    for hosts, schedulers in parts:
        run = await run_one(hosts, schedulers, boots)
        print(line(run), flush=True)
        runs = sorted([*scale.runs, run], key=lambda one: (one.hosts, one.schedulers))
        scale = Scale(runs=runs, spread=spread(runs))
        write(scale, path)
    return scale


async def run_one(hosts: int, schedulers: int, boots: int) -> Run:
    """One street, ended when it takes too long."""
    options = options_of(hosts, schedulers, boots)
    result, why_not, began = None, "", time.monotonic()
    try:
        async with asyncio.timeout(PART_S):
            result = await on_real_servers(options)
    except TimeoutError:
        why_not = f"ended after {PART_S:.0f} s"
    except (SystemExit, ServerFailed) as error:  # how the benchmark ends when builds failed, or hosts stayed unknown
        why_not = (str(error).splitlines() or [type(error).__name__])[0]
    seconds = round(time.monotonic() - began, 1)
    return Run(hosts=hosts, schedulers=schedulers, seconds=seconds, result=result, why_not=why_not)


def options_of(hosts: int, schedulers: int, boots: int) -> argparse.Namespace:
    """The requirements of a part on the benchmark."""
    requested = ["--hosts", str(hosts), "--schedulers", str(schedulers), "--boots", str(boots), "--cells", str(CELLS)]
    return parsed([*requested, "--no-bare", "--no-rates", "--no-statements"])


def line(run: Run) -> str:
    """One part as a row of the tables."""
    result = run.result
    if result is None or result.costs is None:
        return f"| {run.hosts:,} | {run.schedulers} | {run.why_not} | | | | | |"
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


def tables(scale: Scale) -> str:
    """Parts by hosts, parts by schedulers, and how far apart the fewest and the most hosts are."""
    by_hosts = [line(run) for run in scale.runs if run.schedulers == 1]
    several = {run.hosts for run in scale.runs if run.schedulers > 1}
    by_schedulers = [line(run) for run in scale.runs if run.hosts in several]
    rows = ["", HEAD, RULE, *by_hosts]
    if by_schedulers:
        rows += ["", HEAD, RULE, *by_schedulers]
    found = scale.spread
    summary = (
        "Different numbers of hosts were not measured."
        if found is None
        else f"{found.most:,} hosts against {found.fewest:,}: {found.ratio:.2f} of the throughput, "
        f"{found.verdict} {found.bound:.0%}."
    )
    return "\n".join([*rows, "", summary])


def spread(runs: Sequence[Run]) -> Spread | None:
    """Throughput at the most hosts against that at the fewest."""
    found = {run.hosts: run.result.boots_per_s for run in runs if run.schedulers == 1 and run.result is not None}
    if len(found) < 2:
        return None
    fewest, most = min(found), max(found)
    ratio = round(found[most] / found[fewest], 3)
    near = 1 - NEAR <= ratio <= 1 / (1 - NEAR)
    return Spread(fewest=fewest, most=most, ratio=ratio, verdict="within" if near else "NOT within")


def main() -> int:
    """Print, and write when asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", type=parse_parts, default=PARTS, help="%(default)s")
    parser.add_argument("--boots", type=positive, default=BOOTS)
    options = parser.parse_args()
    scale = measured(run_all(options.parts, options.boots, options.json))
    print(tables(scale))
    return 0 if all(run.result is not None and run.result.invariants_hold for run in scale.runs) else 1


if __name__ == "__main__":
    sys.exit(main())

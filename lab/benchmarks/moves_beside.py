"""How long a boot takes while instances are live-migrated beside it: pairs of loads with and without, on one system.

    python -m lab.benchmarks.moves_beside [--pairs 6] [--rate 100] [--moves-per-s 20] [--seconds 10] [--hosts 2000]

Real servers and a process for each worker, as in lab/benchmarks/street.py. The order within a pair alternates.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys

import uvloop
from msgspec import Struct

from berth.client import BuildClient
from berth.load import LoadReport
from berth.site import Site
from berth.trial.servers import SystemPlan, running_processes
from bus.service.telemetry import configure_logging
from compute_sim.config import ComputeConfig
from lab.benchmarks.street import positive
from lab.benchmarks.street_measure import all_hosts_known, connected, fire, invariants_hold, progress
from lab.benchmarks.street_moves import MoveFigures, migrate_all
from lab.benchmarks.street_systems import BIG, servers_for

CELLS = ("cell1", "cell2", "cell3", "cell4")
FIGURES = ("p50", "p95", "p99")


class Pair(Struct, frozen=True):
    """The same load of boots without and with moves beside it, and those moves."""

    alone: LoadReport
    beside: LoadReport
    moves: MoveFigures


async def measure(options: argparse.Namespace) -> tuple[list[Pair], bool]:
    """The pairs, and whether the invariants hold at the end."""
    size = ComputeConfig(hosts=options.hosts // len(CELLS), gpu_share=0.0, sizes=(BIG,))
    plan = SystemPlan(cells=CELLS, schedulers=1, placements=1, compute=size)
    rng = random.Random(1)
    with servers_for(CELLS, None) as servers:
        async with running_processes(servers, plan) as (_, here), connected(here) as client:
            await all_hosts_known(client, here, options.hosts)
            moved = options.moves_per_s * options.seconds
            await fire(client, here, moved, rng)
            pairs = []
            for number in range(options.pairs):
                pairs.append(await _pair(client, here, options, rng, number))
                progress(_line(pairs[-1]))
            return pairs, await invariants_hold(client, here)


async def _pair(client: BuildClient, here: Site, options: argparse.Namespace, rng: random.Random, number: int) -> Pair:
    boots = options.rate * options.seconds
    alone = None if number % 2 else await fire(client, here, boots, rng, rate=options.rate)
    count = options.moves_per_s * options.seconds
    moving = asyncio.create_task(migrate_all(client, count, rng, rate_per_s=options.moves_per_s))
    beside = await fire(client, here, boots, rng, rate=options.rate)
    moves = await moving
    if alone is None:
        alone = await fire(client, here, boots, rng, rate=options.rate)
    return Pair(alone, beside, moves)


def _line(pair: Pair) -> str:
    times = ", ".join(
        f"{name} {pair.alone.latency_ms[name]:.1f} / {pair.beside.latency_ms[name]:.1f}" for name in FIGURES
    )
    return f"boot ms alone / beside: {times}; {pair.moves.done} of {pair.moves.moves} moves, {pair.moves.latency_ms} ms"


def main() -> int:
    """Print the ratios of the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=positive, default=6)
    parser.add_argument("--rate", type=positive, default=100, help="boots a second")
    parser.add_argument("--moves-per-s", type=positive, default=20)
    parser.add_argument("--seconds", type=positive, default=10, help="of each load")
    parser.add_argument("--hosts", type=positive, default=2000)
    options = parser.parse_args()
    configure_logging(process="bench", role="bench", level="error", style="pretty")
    pairs, holds = uvloop.run(measure(options))
    for name in FIGURES:
        ratios = sorted(one.beside.latency_ms[name] / one.alone.latency_ms[name] for one in pairs)
        print(f"{name} of a boot beside moves: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    done, moves = (sum(getattr(one.moves, name) for one in pairs) for name in ("done", "moves"))
    print(f"{done} of {moves} moves; invariants hold: {holds}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

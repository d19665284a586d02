"""How soon an operator's decision about a cell is in effect in every scheduler.

    python -m benchmarks.cells [--rounds 10] [--schedulers 3]

Real servers and a process for each worker. In each round a cell that no settings name is added, disabled, enabled and
removed. Measured: from the answer to the decision until the last scheduler has it, and, of one added or removed, has a
connection to its bus or has closed it. Any scheduler answers a query, so several answers in a row have to agree.
"""

from __future__ import annotations

import argparse
import sys
import time

import msgspec
import uvloop

from benchmarks.street import positive
from benchmarks.street_moves import spread_of
from berth.servers import SystemPlan, real_servers, running_processes
from berth.site import Site, process_name
from bus.bus import Bus
from bus.contracts.cells import CellsPage, CellsQuery, LinkState
from bus.contracts.objects import CellState, ObjectChange, ObjectKind, ObjectsChange, ObjectsChanged
from bus.service.telemetry import configure_logging
from compute_sim.config import ComputeConfig

ADDED = "added"
ANSWERS_IN_A_ROW = 4  # of each scheduler
TIMEOUT_S = 60.0
BUS = {"prefix": "added."}
# One round: what is decided, and how the connection to the cell's bus is to be then.
STEPS = (
    ("added", CellState.ENABLED, LinkState.UP),
    ("disabled", CellState.DISABLED, LinkState.UP),
    ("enabled", CellState.ENABLED, LinkState.UP),
    ("removed", CellState.REMOVED, LinkState.CLOSED),
)


async def measure(rounds: int, schedulers: int) -> dict[str, dict[str, float]]:
    """Milliseconds until in effect everywhere, by what was decided."""
    plan = SystemPlan(cells=("cell1",), schedulers=schedulers, compute=ComputeConfig(hosts=4))
    with real_servers(plan.cells, durable=True) as servers:
        async with running_processes(servers, plan) as (_, site):
            return await _rounds(site, rounds, ANSWERS_IN_A_ROW * schedulers)


async def _rounds(site: Site, rounds: int, in_a_row: int) -> dict[str, dict[str, float]]:
    bus = site.bus(process_name("bench"))
    await bus.open()
    try:
        took: dict[str, list[float]] = {name: [] for name, _, _ in STEPS}
        for _ in range(rounds):
            for name, state, link in STEPS:
                took[name].append(await _in_effect_ms(bus, state, link, in_a_row))
        return {name: spread_of(sorted(times)) for name, times in took.items()}
    finally:
        await bus.close()


async def _in_effect_ms(bus: Bus, state: CellState, link: LinkState, in_a_row: int) -> float:
    change = ObjectChange(kind=ObjectKind.CELL, name=ADDED, body={"state": state.value, "bus": BUS})
    await bus.request(ObjectsChange(who="bench", changes=(change,)), ObjectsChanged, timeout_s=TIMEOUT_S)
    decided = since = time.perf_counter()
    agreed = 0
    while agreed < in_a_row:
        if time.perf_counter() - decided > TIMEOUT_S:
            raise SystemExit(f"not {state.value} everywhere after {TIMEOUT_S:g} s")
        before = time.perf_counter()
        page = await bus.request(CellsQuery(), CellsPage, timeout_s=TIMEOUT_S)
        if [(one.state, one.link) for one in page.cells if one.name == ADDED] != [(state, link)]:
            agreed = 0
            continue
        since = since if agreed else before
        agreed += 1
    return (since - decided) * 1000


def main() -> int:
    """Print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--schedulers", type=positive, default=3)
    options = parser.parse_args()
    configure_logging(process="bench", role="bench", level="error", style="pretty")
    figures = uvloop.run(measure(options.rounds, options.schedulers))
    print(msgspec.json.format(msgspec.json.encode(figures), indent=2).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

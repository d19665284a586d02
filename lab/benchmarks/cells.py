"""How soon an operator's decision about a cell is in effect in every scheduler.

    python -m lab.benchmarks.cells [--rounds 10] [--schedulers 3]

Real servers and a process for each worker. In each round a cell that no settings name is added, disabled, enabled and
removed. Measured: from the answer to the decision until the last scheduler has it, and, of one added or removed, has a
connection to its bus or has closed it. Any scheduler answers a query, so several answers in a row have to agree.
"""

from __future__ import annotations

import sys

from berth.site import Site, process_name
from berth.trial.servers import SystemPlan, real_servers, running_processes
from bus.bus import Bus
from bus.contracts.cells import CellsPage, CellsQuery, LinkState
from bus.contracts.objects import CellState, ObjectChange, ObjectKind, ObjectsChange, ObjectsChanged
from compute_sim.config import ComputeConfig
from lab.benchmarks.in_effect import TIMEOUT_S, Figures, in_effect_ms, run
from lab.benchmarks.street_moves import spread_of

ADDED = "added"
ANSWERS_IN_A_ROW = 4  # of each scheduler
BUS = {"prefix": "added."}
# One round: what is decided, and how the connection to the cell's bus is to be then.
STEPS = (
    ("added", CellState.ENABLED, LinkState.UP),
    ("disabled", CellState.DISABLED, LinkState.UP),
    ("enabled", CellState.ENABLED, LinkState.UP),
    ("removed", CellState.REMOVED, LinkState.CLOSED),
)


async def measure(rounds: int, schedulers: int) -> Figures:
    """Milliseconds until in effect everywhere, by what was decided."""
    plan = SystemPlan(cells=("cell1",), schedulers=schedulers, compute=ComputeConfig(hosts=4))
    with real_servers(plan.cells, durable=True) as servers:
        async with running_processes(servers, plan) as (_, site):
            return await _rounds(site, rounds, ANSWERS_IN_A_ROW * schedulers)


async def _rounds(site: Site, rounds: int, in_a_row: int) -> Figures:
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

    async def agrees() -> bool:
        page = await bus.request(CellsQuery(), CellsPage, timeout_s=TIMEOUT_S)
        return [(one.state, one.link) for one in page.cells if one.name == ADDED] == [(state, link)]

    return await in_effect_ms(agrees, in_a_row, f"cell {ADDED}, {state.value}")


if __name__ == "__main__":
    sys.exit(run(measure, description=__doc__, rounds=10))

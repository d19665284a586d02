"""The cost model (lab/benchmarks/model.py): each part costs what was measured at that rate."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lab.benchmarks.model import FILL, Point, carried, cost_ms, curves, first_full, needs, role_of
from lab.benchmarks.street_report import Costs, Result

POINTS = [Point(100.0, 4.0), Point(1000.0, 1.0)]


def costs(scheduler: float, conductor: float, client: float) -> Costs:
    each = {
        "scheduler1": scheduler,
        "conductor-cell1-1": conductor / 2,
        "conductor-cell2-1": conductor / 2,
        "client": client,
    }
    return Costs(
        cpu_s_per_1000_boots=each, cpu_s_per_1000_boots_all=sum(each.values()), memory_mb={}, items_per_boot=1.0,
        broker_messages_per_boot=0.1, items_per_broker_message={}, transactions_per_boot=0.1, claims_per_boot=1.0,
        conflict_rate=0.0,
    )  # fmt: skip


def result() -> Result:
    empty: dict[str, float] = {}
    return Result(
        system="real", boots=10, hosts=8, cells=2, schedulers=1, boots_per_s=1000.0, latency_ms=empty, stages_ms={},
        spent_ms={}, idle_p50_ms=1.0, idle_p95_ms=1.0, idle_stages_ms=empty, idle_spent_ms=empty, invariants_hold=True,
        active=10, at_rates={"10%": {"rate_per_s": 100.0}}, costs=costs(0.5, 0.25, 9.0),
        costs_at_rates={"10%": costs(1.0, 1.0, 9.0)},
    )  # fmt: skip


@pytest.mark.parametrize(("per_s", "ms"), [(1.0, 4.0), (100.0, 4.0), (316.22776, 2.5), (1000.0, 1.0), (50_000.0, 1.0)])
def test_a_cost_is_read_between_the_rates_that_were_measured_and_not_beyond(per_s: float, ms: float) -> None:
    assert cost_ms(POINTS, per_s) == pytest.approx(ms, rel=1e-6)


def test_a_cells_parts_see_their_cells_share() -> None:
    known = curves(result())
    assert known["conductor"] == [Point(50.0, 1.0), Point(500.0, 0.25)]
    assert known["scheduler"] == [Point(100.0, 1.0), Point(1000.0, 0.5)]
    plan = {need.role: need for need in needs(known, 5000.0, 100)}
    assert "client" not in plan, "the load generator is not to be bought"
    assert (plan["conductor"].per_s, plan["conductor"].ms, plan["conductor"].cores) == (50.0, 1.0, 5.0)
    assert plan["conductor"].processes == 100 and plan["scheduler"].processes == 4, "2.5 cores, each filled to 70 %"


def test_what_a_part_uses_at_rest_is_not_charged_to_boots() -> None:
    known = curves(replace(result(), background_cores={"scheduler1": 0.05, "conductor-cell1-1": 0.2}))
    assert known["scheduler"] == [Point(100.0, 0.5), Point(1000.0, 0.45)], (
        "0.05 cores are 0.5 ms a boot at 100 a second"
    )
    assert known["conductor"][0] == Point(50.0, 0.0), "never less than nothing"


def test_what_cores_carry_fills_them_and_no_more() -> None:
    known = curves(result())
    rate = carried(known, 3.0, 2)
    assert sum(need.cores for need in needs(known, rate, 2)) == pytest.approx(3.0 * FILL)
    assert first_full(known, 2) == [("scheduler", 2000.0), ("conductor", 8000.0)]


def test_roles_are_read_off_processes() -> None:
    names = ("conductor-cell1-1", "compute-cell4-c1", "scheduler12", "placement1", "broker")
    assert [role_of(name) for name in names] == ["conductor", "compute", "scheduler", "placement", "broker"]

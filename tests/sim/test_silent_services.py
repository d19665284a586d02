"""A compute service that falls silent while it builds: its builds end elsewhere within a bound, and none is doubled."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest

from bus.contracts.build import BuildEvent, BuildState
from cell_conductor.domain.leases import Lease, LeaseTable
from lab.simulation.plan import Action, Cell, FaultEvent, FaultType, Order, Plan
from lab.simulation.run import Result, run
from lab.simulation.watch import Listener
from lab.simulation.wiring import BUILD_TIMEOUT_S
from tests.sim.plans import plan_of_case

SILENT_AT = 10.0
LEASE_S = 5 * 2.0  # missed_heartbeats, of a heartbeat every two seconds
BUILDS_S = 2.0  # a build takes so long at most


def plan(seed: int, kind: FaultType, seconds: float, *, target: str = "compute-s00") -> Plan:
    """Two services; twelve builds around the moment when one of them falls silent."""
    builds = tuple(
        Order(
            at=SILENT_AT - 2.0 + number / 4,
            action=Action.BUILD,
            uuid=f"{seed:08x}-0000-4000-8000-{number:012d}",
            flavor="m1.tiny",
            project="red",
        )
        for number in range(12)
    )
    return plan_of_case(
        seed,
        (Cell(name="cell0", conductors=2, services=(("s00", 3), ("s01", 3))),),
        builds,
        (FaultEvent(at=SILENT_AT, kind=kind, target=target, seconds=seconds),),
        builds_s=BUILDS_S,
    )


def ends_of(planned: Plan) -> tuple[Result, dict[str, float]]:
    """The run, and how long each build took to its end: active, or failed because its other hosts are full."""
    requested = {order.uuid: order.at for order in planned.orders}
    took: dict[str, float] = {}
    listen = Listener.event

    def event(self: Listener, announced: BuildEvent) -> None:
        if announced.terminal and announced.state is not BuildState.DELETED and announced.instance_uuid in requested:
            took.setdefault(
                announced.instance_uuid, asyncio.get_running_loop().time() - requested[announced.instance_uuid]
            )
        listen(self, announced)

    with patch.object(Listener, "event", event):
        return run(planned), took


CASES = [
    (FaultType.PAUSE, 60.0),  # it stands still, and comes back with the same epoch
    (FaultType.CRASH, 60.0),  # it is killed, and starts again with what it remembers
    (FaultType.MUTE, 25.0),  # it works on, and its heartbeats do not arrive
]
# The time of a lease, a claim and a build elsewhere, and looks in between; far below an attempt's own deadline.
BOUND_S = LEASE_S + BUILDS_S + 5.0


@pytest.mark.parametrize(("kind", "seconds"), CASES)
@pytest.mark.parametrize("seed", [1, 2])
def test_builds_of_a_silent_service_end_elsewhere_within_a_bound(seed: int, kind: FaultType, seconds: float) -> None:
    result, took = ends_of(plan(seed, kind, seconds))
    assert result.breach == "", result.detail
    assert len(took) == 12 and max(took.values()) < BOUND_S < BUILD_TIMEOUT_S, took


def test_without_failing_over_they_wait_for_the_deadline() -> None:
    """So the bound above is not met by chance."""

    def none_down(_: LeaseTable) -> dict[str, Lease]:
        return {}

    with (
        patch.object(LeaseTable, "abandoned", property(none_down)),
        patch.object(LeaseTable, "down", property(none_down)),
    ):
        result, took = ends_of(plan(1, FaultType.PAUSE, 60.0))
    assert result.breach == "", result.detail
    assert len(took) == 12 and max(took.values()) > BUILD_TIMEOUT_S, took


@pytest.mark.parametrize("target", ["conductor-cell0-0", "conductor-cell0-1"])
def test_a_conductor_that_stands_still_suspects_no_service(target: str) -> None:
    result, took = ends_of(plan(3, FaultType.PAUSE, 30.0, target=target))
    assert result.breach == "", result.detail
    assert len(took) == 12

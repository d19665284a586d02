"""Two compute services with hosts of the same uuids: the second one builds nothing; a host is re-homed all the same."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from msgspec.structs import replace

from lab.simulation.plan import Action, Cell, FaultEvent, FaultType, Order, Plan
from lab.simulation.run import Result, run
from placement_worker.domain.report_group import ReportGroup
from tests.sim.plans import plan_of_case

BUILDS = tuple(
    Order(
        at=2.0 + number,
        action=Action.BUILD,
        uuid=f"a0000000-0000-4000-8000-{number:012d}",
        flavor="m1.tiny",
        project="red",
    )
    for number in range(24)
)
LATE = tuple(replace(one, at=one.at + 26.0, uuid=one.uuid.replace("a", "b", 1)) for one in BUILDS)
SECOND = Order(at=4.0, action=Action.SECOND_SERVICE, service="s00", seconds=40.0)


def plan(*orders: Order, faults: tuple[FaultEvent, ...] = ()) -> Plan:
    """Two services of two hosts each; a build a second."""
    return plan_of_case(
        7,
        (Cell(name="cell0", conductors=2, services=(("s00", 2), ("s01", 2))),),
        tuple(sorted((*BUILDS, *orders), key=lambda order: order.at)),
        faults,
        builds_s=1.0,
    )


def held(planned: Plan) -> Result:
    result = run(planned)
    assert result.breach == "", result.detail
    return result


def test_a_second_service_builds_nothing_and_changes_no_inventory() -> None:
    held(plan(SECOND))


def test_it_builds_nothing_when_the_schedulers_and_conductors_start_again_beside_it() -> None:
    names = ("scheduler0", "conductor-cell0-0", "conductor-cell0-1", "compute-s00")
    crashes = tuple(
        FaultEvent(at=12.0 + at, kind=FaultType.CRASH, target=name, seconds=2.0) for at, name in enumerate(names)
    )
    held(plan(SECOND, faults=crashes))


DOWN = (FaultEvent(at=8.0, kind=FaultType.CRASH, target="compute-s00", seconds=36.0),)
LATER = replace(SECOND, seconds=50.0)


def test_it_builds_nothing_while_the_first_is_down_for_a_while() -> None:
    held(plan(LATER, *LATE, faults=DOWN))


def test_without_the_books_refusal_it_is_built_on() -> None:
    with patch.object(ReportGroup, "refuse_owned", lambda _self: None):
        result = run(plan(LATER, *LATE, faults=DOWN))
    assert result.breach in {"lost_was_lost", "host_has_one_service"}, result.detail


@pytest.mark.parametrize("at", [3.0, 20.0])
def test_a_host_is_given_to_another_service_which_is_up(at: float) -> None:
    """Its former service is up, and does not list it any more: the book lets the next one take it over."""
    held(plan(Order(at=at, action=Action.REHOME, service="s00", host=0)))

"""Clients wait for an answer for a time only, while a server is away for longer: every request on record has its end.

Its defect: `test_mutants_of_deadlines.py`.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lab.simulation.draw import plan_of
from lab.simulation.plan import Action, FaultEvent, FaultType, Plan
from lab.simulation.run import run
from lab.simulation.widening import Widening


def requesters_give_up(seed: int) -> Plan:
    """The builds of this seed; all clients give up while placement's database is unavailable. Half of the builds are
    deleted later by a client that repeats its request.
    """
    plan = plan_of(seed).without_faults()
    builds = [
        replace(one, at=20.0 + number * 0.01, waits_s=2.0, gives_up=True)
        for number, one in enumerate(order for order in plan.orders if order.action is Action.BUILD)
    ]
    deletes = [replace(one, at=36.0, action=Action.DELETE, waits_s=0.5, gives_up=False) for one in builds[::2]]
    outage = FaultEvent(at=19.9, kind=FaultType.DATABASE, target="placement", seconds=8.0)
    return replace(
        plan, orders=(*builds, *deletes), fault_events=(outage,), widenings=(Widening.DEADLINES,), load_s=50.0
    )


@pytest.mark.parametrize("seed", [1, 3])
def test_every_request_on_record_has_its_end(seed: int) -> None:
    held = run(requesters_give_up(seed))
    assert held.breach == "", held.detail
    assert held.states.get("active", 0) > 0, "requests that were begun are carried out"

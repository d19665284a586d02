"""Deliberate defects of what carries drains out are found."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from lab.simulation import drain_watch
from lab.simulation.moves import DRAIN
from lab.simulation.plan import Action, Cell, Order, Plan
from lab.simulation.run import run, simulate
from lab.simulation.widening import Widening
from scheduler_worker import drains
from tests.sim.mutants import Mutant
from tests.sim.plans import plan_of_case
from tests.sim.test_fences import DRAINS, SEED


def moves_of_drains_are_not_followed() -> AbstractContextManager[Any]:
    """The end of a move that a drain has begun is never read."""
    step = drains.step

    def unfollowed(found: Any, known: Any, *more: Any) -> Any:
        return step(found, {uuid: replace(context, move=None) for uuid, context in known.items()}, *more)

    return patch.object(drains, "step", unfollowed)


def drains_never_end() -> AbstractContextManager[Any]:
    """A drain of which nothing is left stays as it is."""
    return patch.object(drains, "end_of", lambda found, now: None)


def drains_end_without_a_look_at_their_hosts() -> AbstractContextManager[Any]:
    """A drain is done as soon as the instances of its plan have been moved."""

    async def unseen(*_arguments: Any, **_named: Any) -> bool:
        return False

    return patch.object(drains.DrainKeeper, "_review", unseen)


@pytest.mark.parametrize("mutant", [drains_never_end, moves_of_drains_are_not_followed])
def test_a_defect_of_drains_is_found(mutant: Mutant) -> None:
    with mutant():
        assert simulate(SEED, DRAINS).breach == "drains_end"


def a_build_comes_to_a_host_that_is_being_drained() -> Plan:
    """Builds every millisecond around the start of a drain: of some, the claim comes after its plan."""
    cell = Cell(name="cell0", conductors=1, services=(("s00", 1), ("s01", 6)), metal=())
    uuids = [f"a0000000-0000-4000-8000-0000000000{number:02}" for number in range(34)]
    build = Order(at=5.0, action=Action.BUILD, flavor="m1.tiny", project="red")
    early = [replace(build, uuid=uuid) for uuid in uuids[:14]]
    late = [replace(build, uuid=uuid, at=40.0 + number * 0.001) for number, uuid in enumerate(uuids[14:])]
    uuid = "d0000000-0000-4000-8000-000000000001"
    drain = Order(at=40.0, action=Action.MOVE, verb=DRAIN, service="s00", uuid=uuid, seconds=60.0)
    plan = plan_of_case(1, (cell,), (*early, *late, drain), (), builds_s=0.5)
    return replace(plan, widenings=(Widening.DRAINS,), drains_by_schedulers=True, load_s=110.0)


def test_a_drain_that_does_not_look_at_its_hosts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch grants a move that was dispatched before ten seconds; nothing moves here but by the drain."""
    monkeypatch.setattr(drain_watch, "LOOKED_S", 0.1)
    held = run(a_build_comes_to_a_host_that_is_being_drained())
    assert held.breach == "", held.detail
    with drains_end_without_a_look_at_their_hosts():
        assert run(a_build_comes_to_a_host_that_is_being_drained()).breach == "drained_hosts_hold_nothing"

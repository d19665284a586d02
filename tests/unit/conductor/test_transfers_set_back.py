"""A cell's database is set back in the middle of a move to another cell: no machine is doubled, and what is in doubt is
held until its hosts, a client or an operator have decided it.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.contracts.cell import Destroy, FoundMachine
from bus.contracts.moves import (
    MoveKind,
    MoveState,
)
from bus.contracts.placement import Release
from cell_conductor.domain import events as e
from cell_conductor.domain import rules
from cell_conductor.domain.adopt_rules import is_searched
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.set_back import FORGOTTEN_ATTEMPTS, SetBack
from cell_conductor.domain.steps import StepContext
from cell_conductor.domain.table import question_of
from cell_conductor.search import LOGGED_MOVES
from tests.unit.conductor.move_scenario import Scenario, active, begun, claimed, unbegun
from tests.unit.conductor.scenario import PATIENCE, UUID, host
from tests.unit.conductor.test_leaving import (
    THERE,
    arrives,
    departed,
    gone,
)
from tests.unit.conductor.world import Conductor, Services

SET_BACK_AT = 1_000.0
AFTER = replace(THERE, set_back=SetBack(SET_BACK_AT))
AFTER_HERE = replace(PATIENCE, set_back=SetBack(SET_BACK_AT))


def arrived(*, is_query: bool = False) -> Scenario:
    """It arrives in a cell that was set back since it has left."""
    _, departure = departed()
    made = Scenario(Instance(uuid=UUID), AFTER)
    event = arrives(departure)
    made.apply(unbegun(event) if is_query else event)
    return made


def held() -> Scenario:
    """It is about to be offloaded, in doubt."""
    made = arrived()
    made.apply(gone(made.instance, 2))
    return made


def machine(attempt: int, n: int = 3, **fields: object) -> FoundMachine:
    made = FoundMachine(
        instance_uuid=UUID, host_uuid=host(n), host=f"host-{n}", service="s1", attempt=attempt, project_id="p"
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def found(*machines: FoundMachine) -> e.MachineFound:
    return e.MachineFound(at=1_600.0, machines=machines)


def orders(made: Scenario) -> list[Destroy]:
    return [one for one in made.commands if isinstance(one, Destroy)]


# --- the next cell was set back


@pytest.mark.parametrize("how", ["the claimed host", "another host"])
def test_a_complete_machine_of_an_arrival_is_the_instances(how: str) -> None:
    there = arrived()
    attempt, n = there.instance.attempt, 2
    if how == "another host":
        there.apply(gone(there.instance, 2))
        attempt, n = attempt + 1, 3
        there.apply(found(machine(attempt)))
        assert (there.instance.phase, there.instance.host_uuid) == ((State.DESTROYING, State.REVERTING), host(3))
        assert (orders(there)[-1].host_uuid, orders(there)[-1].unless_built) == (host(3), True)
    there.apply(e.Spawned(at=1_601.0, attempt=attempt, host_uuid=host(n), service="s1"))
    now = there.instance
    assert (now.state, now.attempt, now.host_uuid, now.doubted) == (State.ACTIVE, attempt, host(n), False)
    assert there.terminals == [(MoveKind.MIGRATE, MoveState.DONE, "")]


@pytest.mark.parametrize("how", ["nothing", "found", "silent", "down", "unknown", "unseen", "fenced"])
async def test_placement_is_requested_once_all_services_have_answered_that_they_have_none(how: str) -> None:
    services = Services(s1=(), s2=(machine(9),) if how == "found" else ())
    services.silent = {"s2"} if how == "silent" else {"s3"}
    conductor = Conductor(services, None if how == "unknown" else ("s1", "s2"))
    await conductor.store.open()
    if how in ("unseen", "fenced"):  # it may have the machine, which no record has
        conductor.listed |= {host(77)}
    fenced = {host(77)} if how == "fenced" else set()
    down = {"s3"} if how == "down" else ()
    machines, waits = await conductor.search.find_moved({UUID: held().instance}, down, fenced)
    assert waits == (set() if how in ("nothing", "fenced") else {UUID})
    assert bool(machines) is (how == "found")


async def test_what_a_search_holds_is_logged_up_to_a_bound() -> None:
    services = Services(s1=())
    services.silent = {"s3"}
    conductor = Conductor(services, ("s1",))
    await conductor.store.open()
    moved = {f"{n:08x}-0000-4000-8000-000000000000": held().instance for n in range(LOGGED_MOVES + 3)}
    with capture_logs() as logged:
        _, waits = await conductor.search.find_moved(moved, {"s3"}, ())
    assert waits == moved.keys()
    assert [one["event"] for one in logged].count("move.held") == LOGGED_MOVES


# --- the former cell was set back


def lost(given: Scenario, context: StepContext) -> Scenario:
    """A report of its host lacks it, after the database was set back."""
    given.context = context
    given.instance = rules.give_up_lost(given.instance, 1_350.0, context, code="instance.lost", reason="x").instance
    return given


def test_one_that_was_resized_in_place_is_not_adopted_with_its_move() -> None:
    """It was, and every later delete waited for the end of a move that nothing ended."""
    resized = begun(MoveKind.RESIZE, 1)
    resized.apply(claimed(resized.instance.next_attempt))
    resized.end(1, 1)
    assert resized.instance.phase == (State.RESIZED, None) and resized.instance.is_in_place
    resized.instance = replace(resized.instance, doubted=True)
    lost(resized, AFTER_HERE)
    assert not is_searched(resized.instance)
    resized.apply(e.MachineFound(at=1_600.0, machines=(machine(5, 3, built=True),)))
    assert resized.instance.phase == (State.RELEASING, State.FAILED)


def test_a_delete_that_waits_for_a_host_goes_on_to_wait_when_its_arrival_comes_again() -> None:
    """Its claim was released while the machine was there."""
    _, departure = departed()
    deleted = Scenario(Instance(uuid=UUID), AFTER)
    found_here = (machine(departure.newest, 2, built=True),)
    deleted.apply(e.DeleteRequested(at=1_500.0, project_id="p", begun=True, found=found_here))
    deleted.apply(arrives(departure))
    after = deleted.instance
    assert (after.phase, after.stay) == ((State.DESTROYING, State.DELETED), departure.stay + 1)
    deleted.apply(gone(after, 2))
    question = question_of(deleted.instance)
    assert isinstance(question, Release) and question.attempt > departure.newest + FORGOTTEN_ATTEMPTS


def test_a_machine_of_this_stay_is_found_though_the_record_has_numbered_on() -> None:
    """It was taken for older than the arrival, and the move was held for good."""
    _, departure = departed()
    back = lost(Scenario(active(), AFTER), AFTER)
    back.apply(e.MachineFound(at=1_600.0, machines=(machine(departure.newest + 1, 3, built=True),)))
    back.apply(arrives(departure))
    back.apply(e.Destroyed(at=1_700.0, attempt=back.instance.last_attempt, host_uuid=host(2), service="s1"))
    assert back.instance.phase == (State.RELEASING, State.OFFLOADED)
    back.apply(found(machine(departure.newest + 1, 3, built=True)))
    assert back.instance.here.host_uuid == host(3)


def test_a_delete_numbers_above_all_that_its_departed_record_gave_out() -> None:
    given, _ = departed()
    given.context = AFTER_HERE
    given.instance = replace(given.instance, newest=3_000)
    given.apply(e.DeleteRequested(at=1_500.0, project_id="p", begun=True, found=(), stay=given.instance.stay + 1))
    question = question_of(given.instance)
    assert isinstance(question, Release) and question.attempt > 3_000

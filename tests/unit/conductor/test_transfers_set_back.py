"""A cell's database is set back in the middle of a move to another cell: no machine is doubled, and what is in doubt is
held until its hosts, a client or an operator have decided it.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.contracts.cell import Destroy, FoundMachine
from bus.contracts.moves import (
    MACHINE_ABSENT,
    ChangeKind,
    ChangeMachine,
    Condition,
    MoveEvent,
    MoveKind,
    MoveState,
)
from bus.contracts.placement import Release, Revert
from cell_conductor.domain import events as e
from cell_conductor.domain import rules
from cell_conductor.domain.adopt_rules import is_searched
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import Instance, Power, State
from cell_conductor.domain.move_doubts import IN_DOUBT, is_searched_for
from cell_conductor.domain.set_back import FORGOTTEN_ATTEMPTS, SET_BACK_GAP, SetBack, numbered_on
from cell_conductor.domain.steps import StepContext
from cell_conductor.domain.table import question_of
from cell_conductor.search import LOGGED_MOVES
from tests.unit.conductor.move_scenario import Scenario, active, begun, claimed, unbegun
from tests.unit.conductor.scenario import PATIENCE, UUID, host
from tests.unit.conductor.test_leaving import (
    THERE,
    arrives,
    checking,
    departed,
    given_away,
    gone,
    is_announced,
    leaves,
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


def at_state(state: State) -> Scenario:
    """The record of the next cell, which was set back: host 2 builds it, or has failed, and host 3 is claimed."""
    _, departure = departed()
    there = Scenario(Instance(uuid=UUID), THERE)
    there.apply(arrives(departure))
    if state is not State.FINISHING:
        there.apply(e.SpawnFailed(at=261.0, attempt=departure.newest, host_uuid=host(2), code="x"))
    if state is State.PREPARING:
        there.apply(claimed(there.instance.next_attempt))
    assert there.instance.state is state
    there.instance = replace(numbered_on(there.instance), doubted=True)
    there.context, there.commands = AFTER, []
    return there


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


@pytest.mark.parametrize("is_query", [False, True])
def test_an_arrival_that_may_have_been_here_before_is_searched_for_and_not_built(is_query: bool) -> None:
    there = arrived(is_query=is_query)
    assert there.instance.phase == (State.DESTROYING, State.REVERTING) and there.spawns == []
    assert [one.unless_built for one in orders(there)] == [True], "what is complete on its claimed host stays"
    there.apply(gone(there.instance, 2))
    release = question_of(there.instance)
    assert isinstance(release, Release) and release.attempt is not None and is_searched_for(there.instance)
    assert release.attempt > there.instance.attempt + FORGOTTEN_ATTEMPTS
    there.apply(e.Released(at=1_010.0))
    assert (there.instance.state, there.instance.image) == (State.OFFLOADED, "snapshot-1")
    assert there.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, IN_DOUBT)]
    assert [one.sequence > SET_BACK_GAP for one in there.commands if isinstance(one, MoveEvent)].count(False) == 0


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


@pytest.mark.parametrize("state", [State.CLAIMING, State.PREPARING, State.FINISHING])
def test_what_may_run_on_a_later_destination_is_searched_for_before_its_claim_is_released(state: State) -> None:
    there = at_state(state)
    if state is State.CLAIMING:
        there.apply(e.ClaimRefused(at=1_400.0, attempt=there.instance.next_attempt, consumer_changed=True))
    for at in (1_500.0, 1_600.0):
        if there.instance.state in (State.PREPARING, State.FINISHING):
            there.apply(e.TimedOut(at=at))
    last = there.instance
    assert last.host_uuid is not None
    ended = e.Destroyed(at=1_601.0, attempt=last.last_attempt, host_uuid=last.host_uuid, service="s1")
    there.apply(ended, ended)
    assert there.instance.phase == (State.RELEASING, State.OFFLOADED) and is_searched_for(there.instance)
    assert all(one.unless_built for one in orders(there))


def test_one_that_is_not_complete_there_is_ended_and_searched_for_again() -> None:
    there = held()
    there.apply(found(machine(9, built=False)), e.Destroyed(at=1_602.0, attempt=9, host_uuid=host(3), service="s1"))
    assert there.instance.phase == (State.RELEASING, State.OFFLOADED) and is_searched_for(there.instance)


@pytest.mark.parametrize("why", [{"project_id": "theirs"}, {"attempt": 1}, {"foreign": True}])
def test_a_machine_that_is_not_proved_to_be_its_own_holds_it(why: dict[str, object]) -> None:
    there = held()
    before = there.instance
    stepped = there.apply(found(replace(machine(9), **why)))  # type: ignore[arg-type]
    assert (there.instance, stepped.commands) == (before, ())


def test_a_delete_ends_what_is_held() -> None:
    there = held()
    there.apply(e.DeleteRequested(at=1_500.0))
    assert there.instance.phase == (State.DESTROYING, State.DELETED)
    assert [one.unless_built for one in orders(there)][-1:] == [False] and not is_searched_for(there.instance)


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


def test_a_fence_of_its_destination_gives_nothing_up_by_a_record_in_doubt() -> None:
    """Its host would destroy the only machine when it is back."""
    for there in (arrived(), at_state(State.FINISHING)):
        there.context = replace(AFTER, fences={host(2): Fence(host_uuid=host(2), host="h2", version=1)})
        before = there.instance
        stepped = there.apply(e.HostFenced(at=1_500.0, host_uuid=host(2)))
        assert (there.instance, stepped.commands) == (before, ())


def test_an_arrival_from_before_the_schema_was_made_anew_is_searched_for() -> None:
    """Its machine runs there, with the mark of the former schema."""
    _, departure = departed()
    sure = Scenario(Instance(uuid=UUID), replace(THERE, set_back=SetBack(made_at=departure.at - 1.0)))
    sure.apply(arrives(departure))
    assert sure.instance.state is State.FINISHING
    anew = Scenario(Instance(uuid=UUID), replace(THERE, set_back=SetBack(made_at=departure.at + 1.0)))
    anew.apply(arrives(departure))
    assert anew.spawns == [] and anew.instance.doubted


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


def test_a_former_cell_in_doubt_destroys_and_gives_nothing_away() -> None:
    """The other cell may have it, and nothing of it is here: a host that has the machine has it whole."""
    for made in (checking(), given_away()):
        made.instance = replace(numbered_on(made.instance), doubted=True)
        made.context, made.commands = AFTER_HERE, []
        if made.instance.state is State.PREPARING:
            made.end(2, made.instance.attempt)
            assert made.instance.state is State.REVERTING
        assert not is_announced(made)
        assert not any(one.host_uuid == host(2) for one in orders(made)), "hosts of the other cell are not its own"


def test_a_record_from_before_a_move_that_has_left_starts_nothing() -> None:
    """Its machine is gone before the departure is announced: a host that is commanded to start it has none."""
    made, _ = departed()
    kinds = [(type(one), getattr(one, "change", None)) for one in made.commands]
    last_order = max(n for n, (kind, _) in enumerate(kinds) if kind in (ChangeMachine, Destroy))
    announced = next(n for n, one in enumerate(made.commands) if isinstance(one, MoveEvent) and one.departure)
    assert last_order < announced and (ChangeMachine, ChangeKind.START) not in kinds


def absent(made: Scenario) -> None:
    """The source's host answers that it has no such machine."""
    made.end(1, made.instance.attempt, done=False, runs=False, code=MACHINE_ABSENT)


def set_back(made: Scenario, *happened: e.Event) -> Scenario:
    """Its database is set back to this record, from after the instance had left by a departure that is void."""
    made.instance = replace(numbered_on(made.instance), doubted=True)
    made.context, made.commands = AFTER_HERE, []
    made.apply(*happened)
    revert = question_of(made.instance)
    assert isinstance(revert, Revert)
    made.apply(e.Reverted(at=1_300.0, attempt=revert.attempt, consumer_generation=7))
    return made


@pytest.mark.parametrize("power", [Power.RUNNING, Power.STOPPED])
def test_one_whose_machine_is_gone_by_a_void_departure_keeps_its_image(power: Power) -> None:
    made = Scenario(replace(active(), power=power))
    made.apply(leaves())
    made.apply(claimed(made.instance.next_attempt))
    made.end(1, 1, image="snapshot-1", runs=False)
    set_back(made, e.TimedOut(at=1_200.0), e.TimedOut(at=1_210.0))
    absent(made)
    assert (made.instance.phase, made.instance.image) == ((State.RELEASING, State.OFFLOADED), "snapshot-1")
    release = question_of(made.instance)
    assert isinstance(release, Release) and release.consumer == UUID and is_searched_for(made.instance)
    made.apply(e.Released(at=1_400.0))
    assert (made.instance.state, made.instance.image) == (State.OFFLOADED, "snapshot-1")
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, IN_DOUBT)]
    assert [one.condition for one in made.commands if isinstance(one, MoveEvent)][-1] is Condition.OFFLOADED


@pytest.mark.parametrize("power", [Power.RUNNING, Power.STOPPED])
def test_one_whose_image_may_be_kept_under_a_forgotten_name_is_held(power: Power) -> None:
    """By the record its source has not answered yet: the image of its only disk is not on record."""
    made = Scenario(replace(active(), power=power))
    made.apply(leaves())
    made.apply(claimed(made.instance.next_attempt))
    set_back(made, e.TimedOut(at=1_200.0))
    absent(made)
    made.apply(e.HostMissing(at=1_350.0, host_uuid=host(1), service="s1"), e.TimedOut(at=1_400.0))
    absent(made)
    assert (made.instance.state, question_of(made.instance)) == (State.RESTARTING, None)
    assert [state for _, state, _ in made.terminals] == [MoveState.FAILED], "its client does not wait"
    made.apply(e.DeleteRequested(at=1_500.0))
    assert made.instance.then is State.DELETED


@pytest.mark.parametrize("power", [Power.RUNNING, Power.STOPPED])
def test_one_whose_machine_is_there_is_as_it_was(power: Power) -> None:
    made = Scenario(replace(active(), power=power))
    made.apply(leaves())
    made.apply(claimed(made.instance.next_attempt))
    made.end(1, 1, image="snapshot-1", runs=False)
    set_back(made, e.TimedOut(at=1_200.0), e.TimedOut(at=1_210.0))
    (change,) = [one for one in made.commands if isinstance(one, ChangeMachine)]
    assert change.change is (ChangeKind.START if power is Power.RUNNING else ChangeKind.STOP)
    made.end(1, 1, runs=power is Power.RUNNING)
    assert (made.instance.state, made.instance.power, made.instance.image) == (State.ACTIVE, power, "")


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

"""An instance moves to another cell, also amid a set-back: it never runs in both, and no machine is doubled."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import ANY

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received
from bus.contracts.base import Meta
from bus.contracts.cell import Destroy, FoundMachine, InstanceSpec
from bus.contracts.moves import (
    CellAsks,
    CellCheck,
    ChangeKind,
    ChangeMachine,
    Condition,
    Departure,
    MoveEvent,
    MoveKind,
    MoveState,
)
from bus.contracts.placement import Claim, Release, Revert
from bus.persistence.outbox import OutboxMessage
from cell_conductor.domain import events as e
from cell_conductor.domain import rules
from cell_conductor.domain.doubt import machine_query_of
from cell_conductor.domain.instance import Instance, Power, State
from cell_conductor.domain.set_back import FORGOTTEN_ATTEMPTS, SetBack
from cell_conductor.domain.steps import StepContext
from cell_conductor.domain.table import question_of
from cell_conductor.engine import LOGGED_MOVES
from cell_conductor.store.safety import KEEP
from tests.unit.conductor.move_scenario import (
    MOVE,
    OTHER,
    SERVICE_DOWN,
    Scenario,
    active,
    begun,
    claimed,
    request,
    unbegun,
)
from tests.unit.conductor.scenario import PATIENCE, UUID, host, spawned
from tests.unit.conductor.world import Conductor, Quiet, Services, insert, opened, requests_of

# --- an instance moves to another cell: it never runs in both, and is destroyed only for a place that reads its image


THERE = replace(PATIENCE, cell="c2")
LARGER = InstanceSpec(instance_uuid=UUID, project_id="p", name="n", flavor="m1.large")


def leaves(kind: MoveKind = MoveKind.MIGRATE, *hosts: int, **fields: object) -> e.MoveRequested:
    """The other cell has hosts 2 and 3."""
    return request(kind, *(hosts or (2, 3)), to_cell="c2", **fields)


def leaving(kind: MoveKind = MoveKind.MIGRATE, **fields: object) -> Scenario:
    """On host 1 as attempt 1, while host 2 is claimed."""
    made = Scenario(active())
    made.apply(leaves(kind, **fields))
    return made


def stopping(kind: MoveKind = MoveKind.MIGRATE, **fields: object) -> Scenario:
    """Host 2 is claimed, and host 1 was commanded to keep its image."""
    made = leaving(kind, **fields)
    made.apply(claimed(made.instance.next_attempt))
    return made


def checking(kind: MoveKind = MoveKind.MIGRATE, **fields: object) -> Scenario:
    """Its image is kept, and host 2 is checked by way of the schedulers."""
    made = stopping(kind, **fields)
    made.end(1, 1, image="snapshot-1", runs=False)
    return made


def given_away(kind: MoveKind = MoveKind.MIGRATE, **fields: object) -> Scenario:
    """Host 2 reads the image, and host 1 was commanded to destroy."""
    made = checking(kind, **fields)
    made.end(2, made.instance.attempt)
    return made


def departed(kind: MoveKind = MoveKind.MIGRATE, **fields: object) -> tuple[Scenario, Departure]:
    made = given_away(kind, **fields)
    made.apply(gone(made.instance, 1), e.Released(at=230.0, consumer=MOVE))
    return made, departure_of(made)


def departure_of(made: Scenario) -> Departure:
    return [one.departure for one in made.commands if isinstance(one, MoveEvent) and one.departure is not None][-1]


def arrives(departure: Departure, kind: MoveKind = MoveKind.MIGRATE, **fields: object) -> e.MoveRequested:
    return request(kind, arrival=departure, **fields)


def in_next_cell(*happened: e.Event) -> Scenario:
    made = Scenario(Instance(uuid=UUID), THERE)
    made.apply(*happened)
    return made


def changes(made: Scenario) -> list[ChangeKind]:
    return [one.change for one in made.commands if isinstance(one, ChangeMachine)]


def last_event(made: Scenario) -> MoveEvent:
    return [one for one in made.commands if isinstance(one, MoveEvent)][-1]


def gone(instance: Instance, n: int) -> e.Destroyed:
    return e.Destroyed(at=220.0, attempt=instance.last_attempt, host_uuid=host(n), service="s1")


# --- it leaves


def back(made: Scenario) -> None:
    question = question_of(made.instance)
    assert isinstance(question, Revert) and question.migration.uuid == MOVE
    made.apply(e.Reverted(at=250.0, attempt=question.attempt, consumer_generation=9))
    assert (made.instance.state, changes(made)[-1]) == (State.RESTARTING, ChangeKind.START)
    made.end(1, 1)
    now = made.instance
    assert (now.state, now.power, now.attempt, now.image) == (State.ACTIVE, Power.RUNNING, 1, "")
    assert made.destroys == []


@pytest.mark.parametrize("make", [stopping, checking])
def test_an_abort_brings_it_back_before_its_machine_is_given_up(make: object) -> None:
    made = make()  # type: ignore[operator]
    made.apply(request(MoveKind.ABORT, request_id=OTHER))
    back(made)
    assert [one[:2] for one in made.terminals] == [
        (MoveKind.MIGRATE, MoveState.FAILED),
        (MoveKind.ABORT, MoveState.DONE),
    ]
    late = given_away()
    late.apply(request(MoveKind.ABORT, request_id=OTHER))
    assert late.terminals == [(MoveKind.ABORT, MoveState.REFUSED, "move.too_late")]


# --- it arrives


def test_its_next_cell_builds_it_from_its_image_on_the_claimed_host_and_the_move_is_over() -> None:
    former, departure = departed()
    there = in_next_cell(arrives(departure))
    (spawn,) = there.spawns
    assert spawn.origin is not None and (spawn.origin.image, spawn.origin.runs) == ("snapshot-1", True)
    assert (spawn.attempt, spawn.host_uuid, question_of(there.instance)) == (departure.newest, host(2), None)
    there.apply(spawned(n=2, attempt=departure.newest, at=260.0))
    assert (there.instance.state, there.instance.power) == (State.ACTIVE, Power.RUNNING)
    assert there.terminals == [(MoveKind.MIGRATE, MoveState.DONE, "")]
    assert (last_event(there).condition, there.instance.consumer_generation) == (Condition.ACTIVE, 9)
    sequences = [one.sequence for one in (*former.commands, *there.commands) if isinstance(one, MoveEvent)]
    assert sequences == sorted(set(sequences))


@pytest.mark.parametrize("kind", [MoveKind.MIGRATE, MoveKind.RESIZE])
def test_what_no_host_of_the_next_cell_builds_is_offloaded_there_as_it_was(kind: MoveKind) -> None:
    _, departure = departed(kind, spec=LARGER)
    assert departure.spec.flavor == active().spec.flavor  # type: ignore[union-attr]
    there = in_next_cell(arrives(departure, kind, spec=LARGER))
    assert there.spawns[0].spec.flavor == "m1.large"
    there.apply(
        e.SpawnFailed(at=261.0, attempt=departure.newest, host_uuid=host(2), code="image.broken", final=True),
        gone(there.instance, 2),
        e.Released(at=263.0),
    )
    now = there.instance
    assert (now.state, now.power, now.image, now.spec) == (
        State.OFFLOADED,
        Power.SHELVED,
        "snapshot-1",
        departure.spec,
    )
    assert there.terminals == [(kind, MoveState.FAILED, "image.broken")]


def test_a_service_of_this_cell_that_is_down_closes_no_host_of_a_like_named_one_of_the_other_cell() -> None:
    """A service's name is unique within its cell: no host of the other cell was tried, or the one that was checked was
    passed over.
    """
    made = Scenario(active(), SERVICE_DOWN)
    made.apply(leaves())
    claim = question_of(made.instance)
    assert isinstance(claim, Claim) and len(claim.options) == 2
    checked = checking()
    checked.apply(e.ServiceLost(at=215.0, service="s1", code="service.silent"))
    assert (checked.instance.state, checked.instance.host_uuid) == (State.PREPARING, host(2))
    here = Scenario(active(), SERVICE_DOWN)
    here.apply(request(MoveKind.MIGRATE, 2))
    assert isinstance(question_of(here.instance), Revert)


# --- an instance without a host leaves one cell for another: never in both, never in neither, whatever comes late


ELSEWHERE = "e0000000-0000-4000-8000-000000000009"
BACK = "e0000000-0000-4000-8000-000000000010"


def deleted() -> e.DeleteRequested:
    return e.DeleteRequested(at=206.0, cause=UUID)


def offloaded() -> Scenario:
    """Built as attempt 1, shelved and offloaded by another request."""
    made = Scenario(active())
    made.apply(request(MoveKind.SHELVE, request_id=OTHER, offload=True))
    made.end(1, 1, image="snapshot-1")
    made.apply(e.Destroyed(at=203.0, attempt=1, host_uuid=host(1), service="s1"), e.Released(at=204.0))
    assert made.instance.state is State.OFFLOADED
    return made


def leaves_offloaded(cell: str = "c2", request_id: str = MOVE) -> e.MoveRequested:
    return request(MoveKind.UNSHELVE, 2, request_id=request_id, to_cell=cell)


def leave(made: Scenario, cell: str = "c2", request_id: str = MOVE) -> Departure:
    """It leaves for host 2 of that cell, which reads its image."""
    made.apply(leaves_offloaded(cell, request_id))
    made.apply(claimed(made.instance.next_attempt))
    made.end(2, made.instance.attempt)
    event = last_event(made)
    assert event.departure is not None
    return event.departure


def left_offloaded() -> tuple[Scenario, Departure]:
    made = offloaded()
    return made, leave(made)


def fails(made: Scenario) -> None:
    """Its host cannot build it, and it is offloaded where it has come to."""
    attempt = made.instance.attempt
    made.apply(
        e.SpawnFailed(at=219.0, attempt=attempt, host_uuid=host(2), code="sim.spawn_failed"),
        e.Destroyed(at=219.5, attempt=attempt, host_uuid=host(2), service="s1"),
        e.Released(at=220.0),
    )
    assert made.instance.state is State.OFFLOADED


@pytest.mark.parametrize("late", [leaves_offloaded(), request(MoveKind.STOP, request_id=ELSEWHERE), deleted()])
def test_what_still_comes_to_the_former_cell_is_answered_with_the_departure_and_changes_nothing(late: e.Event) -> None:
    made, departure = left_offloaded()
    before = made.instance
    stepped = made.apply(late)
    left, event = stepped.commands[0], last_event(made)
    assert isinstance(left, MoveEvent) and left.request_id == MOVE
    assert replace(made.instance, ended=before.ended) == before
    assert (left.departure, left.sequence, left.terminal) == (departure, departure.sequence, False)
    if isinstance(late, e.MoveRequested) and late.request.request_id == ELSEWHERE:
        assert (event.state, event.code, event.terminal) == (MoveState.REFUSED, "instance.departed", True)
        assert (event.departure, event.sequence < left.sequence) == (None, True)
        made.apply(unbegun(late))  # a request has one end, however often it is asked for
        assert last_event(made) == replace(event, at=300.0)
    else:
        assert not event.terminal


def back_again() -> Departure:
    """It has been here, and comes back from the cell that it had left for."""
    there = in_next_cell(arrives(left_offloaded()[1], MoveKind.UNSHELVE))
    fails(there)
    return leave(there, "c1", BACK)


@pytest.mark.parametrize(("stay", "is_forgotten"), [(0, False), (1, False), (2, True)])
def test_a_delete_of_a_later_stay_than_the_record_has_left_by_is_carried_out(stay: int, is_forgotten: bool) -> None:
    """Its answer was the departure, which is late by the map, and the delete had no end."""
    here, departure = left_offloaded()
    left = here.instance
    here.apply(replace(deleted(), begun=True, stay=stay, found=() if is_forgotten else None))
    if not is_forgotten:
        assert (here.instance.state, last_event(here).departure) == (State.DEPARTED, departure)
        return
    release = question_of(here.instance)
    assert isinstance(release, Release) and (release.attempt or 0) > departure.newest
    here.instance = left
    here.apply(replace(deleted(), stay=stay))
    assert here.instance.state is State.TOMBSTONE
    here.apply(arrives(back_again(), MoveKind.UNSHELVE, request_id=BACK))
    assert here.instance.phase == (State.RELEASING, State.DELETED), "the claim of one that comes after it is released"


# --- a cell's database is set back in the middle: what is in doubt is held until hosts, a client or an operator decide


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


def machine(attempt: int, n: int = 3, **fields: object) -> FoundMachine:
    made = FoundMachine(
        instance_uuid=UUID, host_uuid=host(n), host=f"host-{n}", service="s1", attempt=attempt, project_id="p"
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def found(*machines: FoundMachine) -> e.InstanceSearched:
    """All services have answered, about all hosts."""
    hosts = frozenset(host(n) for n in range(1, 10))
    return e.InstanceSearched(at=1_600.0, query=ANY, era=AFTER.set_back.first_number, machines=machines, hosts=hosts)


def orders(made: Scenario) -> list[Destroy]:
    return [one for one in made.commands if isinstance(one, Destroy)]


# --- the next cell was set back


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("n", [2, 3], ids=["the claimed host", "another host"])
def test_a_complete_machine_of_an_arrival_is_the_instances(n: int, *, is_built: bool) -> None:
    there = arrived()
    attempt = there.instance.attempt + (n == 3)
    there.apply(found(machine(attempt, n, built=is_built)))
    if not is_built:
        assert (there.instance.state, there.instance.host_uuid) == (State.FINISHING, host(n))
        assert (orders(there)[-1].host_uuid, orders(there)[-1].unless_built) == (host(n), True)
        there.apply(e.Spawned(at=1_601.0, attempt=attempt, host_uuid=host(n), service="s1"))
    now = there.instance
    assert (now.state, now.attempt, now.host_uuid, now.doubted) == (State.ACTIVE, attempt, host(n), True)
    assert there.terminals == [(MoveKind.MIGRATE, MoveState.DONE, "")]


async def resolved(conductor: Conductor, *moved: Instance) -> dict[str, Instance]:
    """The records after a search, of those that are certain by then."""
    await insert(conductor.store, *[replace(one, deadline=1.0) for one in moved])
    await conductor.engine.sweep()
    await conductor.engine.search()
    known = await conductor.engine.known([one.uuid for one in moved])
    return {uuid: one for uuid, one in known.items() if not one.doubted}


@pytest.mark.parametrize("is_built", [False, True])
async def test_a_move_in_doubt_ends_no_machine_that_an_operator_keeps(is_built: bool) -> None:
    """It became the destination that is given up. The move waits for another word about it."""
    conductor = await opened(Services(s1=(), s2=(machine(9, built=is_built),)), ("s1", "s2"))
    await conductor.keep(3, KEEP)
    assert not await resolved(conductor, arrived().instance)
    sent = [one.message for one in conductor.relay.sent if isinstance(one, OutboxMessage)]
    assert {type(one) for one in sent} <= {MoveEvent}


@pytest.mark.parametrize("has", [False, True])
@pytest.mark.parametrize("how", ["nothing", "silent", "down", "unknown", "unseen", "fenced", "unlisted"])
async def test_an_arrival_is_offloaded_once_all_services_have_answered_that_none_is_there(
    how: str, *, has: bool
) -> None:
    """None that is found counts before, either: another service, or host, may have a later one."""
    services = Services(s1=(), s2=(machine(9),) if has else (), s4=())
    services.silent = {"s4"} if how == "silent" else {"s3"}
    conductor = await opened(services, None if how == "unknown" else ("s1", "s2", "s4"))
    if how in ("unseen", "fenced"):  # it may have the machine, which no record has
        conductor.listed |= {host(77)}
    conductor.fenced = {host(77)} if how == "fenced" else set()
    conductor.down = {"s3"} if how == "down" else ()
    conductor.without_list = {"s4"} if how == "unlisted" else ()  # which hosts it is to look at is not known
    now = (await resolved(conductor, arrived().instance)).get(UUID)
    is_complete = how in ("nothing", "fenced")
    if not is_complete:
        assert now is None
        return
    assert now is not None and now.phase == ((State.ACTIVE, None) if has else (State.DESTROYING, State.REVERTING))
    if not has:
        there = Scenario(now, AFTER)
        there.apply(gone(now, 2))
        assert there.instance.phase == (State.RELEASING, State.OFFLOADED)


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("silent", ["of its hosts", "another"])
async def test_a_move_with_a_source_waits_for_other_services_until_the_doubts_limit(
    silent: str, *, is_over: bool
) -> None:
    """Nothing is started from its image: what its two hosts have answered decides then."""
    services = Services(s1=(), s2=())
    services.silent = {"s1"} if silent == "of its hosts" else {"s2"}
    conductor = await opened(services, ("s1", "s2"))
    conductor.listed |= {host(1), host(2)}
    moved = replace(checking().instance, doubted=True, since=1.0 if is_over else SystemClock().time())
    assert moved.move is not None
    moved = replace(moved, move=replace(moved.move, to_cell=None))
    now = await resolved(conductor, moved)
    assert (UUID in now) is (is_over and silent == "another")


async def test_what_a_search_holds_is_logged_up_to_a_bound() -> None:
    services = Services(s1=())
    services.silent = {"s3"}
    conductor = await opened(services, ("s1",))
    conductor.down = {"s3"}
    moved = [replace(arrived().instance, uuid=f"{n:08x}-0000-4000-8000-000000000000") for n in range(LOGGED_MOVES + 3)]
    with capture_logs() as logged:
        assert not await resolved(conductor, *moved)
    assert [one["event"] for one in logged].count("move.held") == LOGGED_MOVES


# --- the former cell was set back


def lost(given: Scenario, context: StepContext) -> Scenario:
    """A report of its host lacks it, after the database was set back."""
    given.context = context
    given.instance = rules.give_up_lost(given.instance, 1_350.0, context, code="instance.lost", reason="x").instance
    return given


def checks(made: Scenario) -> list[CellCheck]:
    asks = [one.message for one in made.commands if isinstance(one, CellAsks)]
    return [one for one in asks if isinstance(one, CellCheck)]


@pytest.mark.parametrize("make", [leaving, stopping, checking])
@pytest.mark.parametrize("has_arrived", [True, False])
def test_a_claim_in_another_cell_is_given_back_only_if_that_cell_does_not_have_the_instance(
    make: Callable[[], Scenario], has_arrived: bool
) -> None:
    """Where the schedulers were set back to before the departure as well, they gave it back while the instance ran
    there, and the former cell offloaded it: another machine of it could be built from its image.
    """
    made = make()
    made.context, made.instance = AFTER_HERE, replace(made.instance, doubted=True)
    for _ in range(2):
        made.apply(e.TimedOut(at=2_000.0))
        assert isinstance(question_of(made.instance), e.MachineQuery)
        made.apply(found(machine(1, 1)))
        assert made.instance.phase == (State.PREPARING, None)
        assert (checks(made)[-1].cell, checks(made)[-1].stay) == ("c2", made.instance.stay)
        assert checks(made)[-1].is_query
    made.end(2, made.instance.attempt, done=False, code="move.arrived" if has_arrived else "image.missing")
    if not has_arrived:
        assert isinstance(question_of(made.instance), Revert)
        return
    assert made.instance.phase == (State.DESTROYING, State.DEPARTED)
    made.apply(gone(made.instance, 1), e.Released(at=2_100.0, consumer=MOVE))
    assert made.instance.state is State.DEPARTED and departure_of(made).cell == "c2"


@pytest.mark.parametrize("make", [leaving, stopping, checking])
@pytest.mark.parametrize("has_arrived", [True, False])
def test_a_delete_of_what_may_have_left_releases_nothing_in_the_other_cell_before_that_has_answered(
    make: Callable[[], Scenario], has_arrived: bool
) -> None:
    """What is claimed there was released, and the instance ran on."""
    made = make()
    made.context, made.instance = AFTER_HERE, replace(made.instance, doubted=True)
    made.apply(e.DeleteRequested(at=1_500.0, project_id="p"))
    made.apply(e.TimedOut(at=2_000.0))
    assert made.instance.phase == (State.PREPARING, None) and isinstance(question_of(made.instance), e.MachineQuery)
    assert made.destroys == [] and checks(made)[-1].stay == made.instance.stay and checks(made)[-1].is_query
    made.end(2, made.instance.attempt, done=False, code="move.arrived" if has_arrived else "image.missing")
    follows = State.DEPARTED if has_arrived else State.DELETED
    assert made.instance.phase == (State.DESTROYING, follows)
    made.apply(gone(made.instance, 1), e.Released(at=2_100.0, consumer=MOVE if has_arrived else UUID))
    assert made.instance.then is (None if has_arrived else State.DELETED)


def left_for(cell: str, stay: int) -> Instance:
    given, departure = departed()
    return replace(given.instance, stay=stay, departure=replace(departure, cell=cell))


@pytest.mark.parametrize("is_query", [False, True], ids=["the host is checked", "only that is asked"])
@pytest.mark.parametrize(
    ("record", "has_arrived"),
    [
        (replace(active(), stay=1), True),
        (replace(active(), state=State.DELETED, stay=1), True),
        (active(), False),
        (left_for("c3", 2), True),
        (left_for("c1", 2), False),
        (left_for("c3", 0), False),
        (None, False),
    ],
    ids=["it runs here", "deleted here", "before", "it went on", "it went back", "it left before", "none"],
)
async def test_a_cell_answers_a_check_by_its_record_for_what_it_has_and_where_only_that_is_asked(
    record: Instance | None, has_arrived: bool, is_query: bool
) -> None:
    """A query waited for the host, for good where that was dead; and what a third cell had was given back."""
    conductor, bus = await opened(Services(s1=()), ("s1",)), Quiet()
    if record is not None:
        await insert(conductor.store, record)
    (check,) = checks(checking())
    check = replace(check, is_query=is_query)
    handlers = requests_of(conductor.engine, SystemClock(), bus=bus)  # type: ignore[arg-type]
    (outcome,) = await handlers.requests([Received(check, Meta(id="m"), "c2", "conductor.requests")])
    (passed,) = bus.published
    assert isinstance(outcome, Done)
    if not has_arrived and not is_query:
        assert passed == check.change
        return
    assert isinstance(passed, CellAsks) and isinstance(passed.message, CellCheck) and check.change is not None
    answer, code = passed.message.answer, "move.arrived" if has_arrived else "instance.unknown"
    assert answer is not None and (answer.done, answer.code, answer.asked_by) == (False, code, check.asked_by)
    assert (answer.order, answer.attempt) == (check.change.order, check.change.attempt)


@pytest.mark.parametrize("is_query", [False, True], ids=["the host is checked", "only that is asked"])
@pytest.mark.parametrize("record", [None, active(), replace(active(), stay=1)], ids=["none", "before", "it is here"])
async def test_a_cell_with_a_machine_in_quarantine_does_not_answer_that_the_instance_has_not_arrived(
    record: Instance | None, is_query: bool
) -> None:
    """The record of the arrival was lost, its machine ran, and the former cell had its claim given back."""
    conductor, bus = await opened(Services(s1=()), ("s1",)), Quiet()
    await conductor.keep(1)
    if record is not None:
        await insert(conductor.store, record)
    (check,) = checks(checking())
    handlers = requests_of(conductor.engine, SystemClock(), bus=bus, search=conductor.search)  # type: ignore[arg-type]
    asked = Received(replace(check, is_query=is_query), Meta(id="m"), "c2", "conductor.requests")
    assert [type(one) for one in await handlers.requests([asked])] == [Done]
    if record is None or record.stay == 0:
        assert bus.published == [], "a host that is checked would have the instance come once more"
        return
    (passed,) = bus.published
    assert isinstance(passed, CellAsks) and isinstance(passed.message, CellCheck)
    assert passed.message.answer is not None and passed.message.answer.code == "move.arrived"


async def test_an_arrival_that_comes_in_one_batch_with_the_check_of_it_comes_first() -> None:
    """The check was answered by the record before the batch: the claim was given back, and the machine built."""
    conductor, bus = await opened(Services(s1=()), ("s1",)), Quiet()
    (check,) = checks(checking())
    arrival = arrives(departed()[1])
    handlers = requests_of(conductor.engine, SystemClock(), bus=bus, search=conductor.search)  # type: ignore[arg-type]
    batch = [
        Received(message, Meta(id=str(number)), "c2", "conductor.requests")
        for number, message in enumerate((arrival.request, replace(check, is_query=True)))
    ]
    await handlers.requests(batch)
    (passed,) = [one for one in bus.published if isinstance(one, CellAsks)]
    assert isinstance(passed.message, CellCheck) and passed.message.answer is not None
    assert passed.message.answer.code == "move.arrived"


def test_one_that_was_resized_in_place_is_not_adopted_with_its_move() -> None:
    """It was, and every later delete waited for the end of a move that nothing ended."""
    resized = begun(MoveKind.RESIZE, 1)
    resized.apply(claimed(resized.instance.next_attempt))
    resized.end(1, 1)
    assert resized.instance.phase == (State.RESIZED, None) and resized.instance.is_in_place
    resized.instance = replace(resized.instance, doubted=True)
    lost(resized, AFTER_HERE)
    assert machine_query_of(resized.instance) is None
    resized.apply(found(machine(5, 3, built=True)))
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
    back.apply(found(machine(departure.newest + 1, 3, built=True)))
    back.apply(arrives(departure))
    back.apply(found(machine(departure.newest + 1, 3, built=True)))
    assert back.instance.here.host_uuid == host(3)


def test_a_delete_numbers_above_all_that_its_departed_record_gave_out() -> None:
    given, _ = departed()
    given.context = AFTER_HERE
    given.instance = replace(given.instance, newest=3_000)
    given.apply(e.DeleteRequested(at=1_500.0, project_id="p", begun=True, found=(), stay=given.instance.stay + 1))
    question = question_of(given.instance)
    assert isinstance(question, Release) and question.attempt > 3_000

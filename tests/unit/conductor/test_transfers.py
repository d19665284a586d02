"""An instance moves to another cell, also amid a set-back: it never runs in both, and no machine is doubled."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.contracts.cell import Destroy, FoundMachine, InstanceSpec
from bus.contracts.moves import (
    CellDepart,
    ChangeKind,
    ChangeMachine,
    Condition,
    Departure,
    MoveEvent,
    MoveKind,
    MoveState,
)
from bus.contracts.placement import Claim, Release
from bus.persistence.outbox import OutboxMessage
from cell_conductor.domain import events as e
from cell_conductor.domain import rules
from cell_conductor.domain.doubt import machine_query_of
from cell_conductor.domain.instance import Instance, Power, State
from cell_conductor.domain.set_back import FORGOTTEN_ATTEMPTS, SetBack
from cell_conductor.domain.steps import StepContext
from cell_conductor.domain.table import question_of
from cell_conductor.engine import LOGGED_MOVES
from cell_conductor.handlers import departure_event
from cell_conductor.store.safety import KEEP
from tests.unit.conductor.move_scenario import MOVE, OTHER, Scenario, active, begun, claimed, request, unbegun
from tests.unit.conductor.scenario import PATIENCE, UUID, host, queried, spawned
from tests.unit.conductor.world import Conductor, Services, insert, opened

THERE = replace(PATIENCE, cell="c2")
AFTER_HERE = replace(PATIENCE, set_back=SetBack(at=1_300.0))
AFTER = replace(THERE, set_back=SetBack(at=1_300.0))
LARGER = InstanceSpec(instance_uuid=UUID, project_id="p", name="n", flavor="m1.large")


def departs(instance: Instance, kind: MoveKind = MoveKind.MIGRATE, to_cell: str = "c2", **fields: Any) -> e.Event:
    known = {"request_id": MOVE, "attempt": instance.last_attempt, **fields}
    message = CellDepart(instance_uuid=UUID, project_id="p", kind=kind, to_cell=to_cell, **known)
    return departure_event(message, 200.0)


def leaving(kind: MoveKind = MoveKind.MIGRATE) -> Scenario:
    """Its host was commanded to keep its image."""
    made = Scenario(active())
    made.apply(departs(made.instance, kind))
    return made


def departed(kind: MoveKind = MoveKind.MIGRATE) -> tuple[Scenario, Departure]:
    made = leaving(kind)
    made.end(1, 1, image="snapshot-1", runs=False)
    made.apply(gone(made.instance, 1))
    released(made)
    return made, departure_of(made)


def released(made: Scenario) -> None:
    question = question_of(made.instance)
    assert isinstance(question, Release)
    made.apply(e.Released(at=230.0, attempt=question.attempt or 0))


def departure_of(made: Scenario) -> Departure:
    return [one.departure for one in made.commands if isinstance(one, MoveEvent) and one.departure is not None][-1]


def arrives(departure: Departure, kind: MoveKind = MoveKind.MIGRATE, *hosts: int, **fields: object) -> e.MoveRequested:
    known = {"departure": departure, "to_cell": "c1", **fields}
    return request(kind, *(hosts or (2, 3)), **known)


def in_next_cell(*happened: e.Event, context: StepContext = THERE) -> Scenario:
    made = Scenario(Instance(uuid=UUID), context)
    made.apply(*happened)
    return made


def building(made: Scenario, n: int = 2) -> Scenario:
    """A host is claimed, can take it, and was commanded to build it."""
    made.apply(claimed(made.instance.next_attempt))
    made.end(n, made.instance.attempt)
    return made


def arrived() -> Scenario:
    """It is being built in the next cell, whose database was set back."""
    there = building(in_next_cell(arrives(departed()[1])))
    there.context = AFTER
    there.instance = replace(there.instance, doubted=True, since=1_200.0)
    return there


def changes(made: Scenario) -> list[ChangeKind]:
    return [one.change for one in made.commands if isinstance(one, ChangeMachine)]


def gone(instance: Instance, n: int) -> e.Destroyed:
    return e.Destroyed(at=220.0, attempt=instance.last_attempt, host_uuid=host(n), service="s1")


# --- it leaves, and is built in the next cell


@pytest.mark.parametrize("kind", [MoveKind.MIGRATE, MoveKind.RESIZE])
def test_its_next_cell_claims_a_host_and_builds_it_from_its_image_and_the_move_is_over(kind: MoveKind) -> None:
    former, departure = departed(kind)
    assert changes(former) == [ChangeKind.SNAPSHOT] and former.destroys == [(1, host(1))]
    there = in_next_cell(arrives(departure, kind, spec=LARGER))
    claim = question_of(there.instance)
    assert isinstance(claim, Claim) and claim.attempt > departure.attempt + 1 and claim.migration is None
    assert [len(claim.options), claim.consumer_generation] == [2, None]
    building(there)
    (spawn,) = there.spawns
    assert spawn.origin is not None and (spawn.origin.image, spawn.origin.runs) == ("snapshot-1", True)
    assert (spawn.attempt, spawn.host_uuid, spawn.spec.flavor) == (claim.attempt, host(2), "m1.large")
    there.apply(spawned(n=2, attempt=spawn.attempt, at=260.0))
    assert (there.instance.state, there.instance.power) == (State.ACTIVE, Power.RUNNING)
    assert there.terminals == [(kind, MoveState.DONE, "")] and former.terminals == []
    ends = [one for one in (*former.commands, *there.commands) if isinstance(one, MoveEvent)]
    assert ends[-1].condition is Condition.ACTIVE
    sequences = [one.sequence for one in ends]
    assert sequences == sorted(set(sequences))


def test_a_departure_is_announced_until_the_build_elsewhere_has_ended() -> None:
    """Schedulers that were set back have forgotten to say so: its record was kept for ever."""
    made, departure = departed()
    announced = made.commands[-1]
    for _ in range(3):
        assert made.instance.deadline is not None
        made.apply(e.TimedOut(at=made.instance.deadline))
        assert made.commands[-1] == replace(announced, at=ANY) and made.instance.departure == departure
    made.apply(departs(made.instance, ended=True))
    assert (made.instance.phase, made.instance.deadline) == ((State.DEPARTED, State.ABSENT), None)


@pytest.mark.parametrize("kind", [MoveKind.MIGRATE, MoveKind.RESIZE])
def test_a_departure_by_another_request_than_it_left_by_is_refused(kind: MoveKind) -> None:
    former, departure = departed()
    former.apply(departs(former.instance, kind, "c3", request_id=OTHER))
    left, end = [one for one in former.commands if isinstance(one, MoveEvent)][-2:]
    assert (left.request_id, left.departure) == (MOVE, departure)
    assert (end.request_id, end.terminal, end.code, end.departure) == (OTHER, True, "instance.departed", None)
    told = len(former.commands)
    former.apply(departs(former.instance))
    assert [one.departure for one in former.commands[told:] if isinstance(one, MoveEvent)] == [departure]


def test_what_has_another_flavor_than_the_hosts_there_were_chosen_for_does_not_leave() -> None:
    """It would be built with that one: its client has not requested it."""
    made = Scenario(replace(active(), spec=LARGER))
    made.apply(departs(made.instance, expected_flavor="m1.tiny"))
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.REFUSED, "instance.flavor_changed")]
    made.apply(departs(made.instance, expected_flavor="m1.large", request_id=OTHER))
    assert made.instance.state is State.CHANGING


def test_what_no_host_of_the_next_cell_builds_comes_home_as_it_was() -> None:
    former, departure = departed(MoveKind.RESIZE)
    there = building(in_next_cell(arrives(departure, MoveKind.RESIZE, spec=LARGER)))
    attempt = there.instance.attempt
    there.apply(
        e.SpawnFailed(at=261.0, attempt=attempt, host_uuid=host(2), code="image.broken", final=True),
        e.Destroyed(at=262.0, attempt=attempt, host_uuid=host(2), service="s1"),
    )
    released(there)
    back = departure_of(there)
    assert (there.instance.state, there.terminals) == (State.DEPARTED, [])
    assert (back.cell, back.code, back.spec, back.image) == ("c1", "image.broken", departure.spec, "snapshot-1")
    assert back.attempt > attempt > departure.attempt
    former.apply(arrives(back, MoveKind.RESIZE, 1, to_cell=None, spec=None))
    assert building(former, 1).spawns[-1].spec == active().spec
    former.apply(spawned(n=1, attempt=former.instance.attempt, at=270.0))
    assert (former.instance.state, former.terminals) == (
        State.ACTIVE,
        [(MoveKind.RESIZE, MoveState.FAILED, "image.broken")],
    )
    former.apply(departs(active()))  # its schedulers' database was set back to the first step
    assert [one[1:] for one in former.terminals] == [(MoveState.FAILED, "image.broken")] * 2


def test_a_silent_host_of_the_next_cell_ends_no_move_that_goes_on_at_home() -> None:
    there = building(in_next_cell(arrives(departed()[1])))
    attempt = there.instance.attempt
    failed = e.SpawnFailed(at=261.0, attempt=attempt, host_uuid=host(2), code="image.broken", final=True)
    there.apply(failed, e.TimedOut(at=400.0))
    assert there.instance.phase == (State.DESTROYING, State.REVERTING)
    there.apply(e.Destroyed(at=462.0, attempt=attempt, host_uuid=host(2), service="s1"))
    released(there)
    assert (there.instance.state, there.terminals) == (State.DEPARTED, [])


def test_what_no_host_at_home_takes_either_rests_offloaded() -> None:
    former, departure = departed()
    back = replace(departure, cell="c1", attempt=departure.attempt + 9)
    former.apply(arrives(back, MoveKind.MIGRATE, 1, to_cell=None))
    former.apply(e.ClaimRefused(at=240.0, attempt=former.instance.next_attempt, outcomes=()))
    released(former)
    now = former.instance
    assert (now.state, now.power, now.image) == (State.OFFLOADED, Power.SHELVED, "snapshot-1")
    assert [one[:2] for one in former.terminals] == [(MoveKind.MIGRATE, MoveState.FAILED)]


@pytest.mark.parametrize("begun_by", [leaving, lambda: begun(MoveKind.SHELVE, offload=True)])
@pytest.mark.parametrize("fields", [{"done": False, "code": "disk.full"}, {"image": ""}])
def test_what_was_stopped_for_an_image_that_it_has_not_runs_again(begun_by: Any, fields: dict[str, Any]) -> None:
    made = begun_by()
    made.end(1, 1, runs=False, **fields)
    assert (made.instance.state, changes(made)) == (State.RESTARTING, [ChangeKind.SNAPSHOT, ChangeKind.START])
    assert made.terminals == []
    made.end(1, 1, runs=True)
    now = made.instance
    assert (now.state, now.power, now.move, now.image) == (State.ACTIVE, Power.RUNNING, None, "")
    assert [one[1:] for one in made.terminals] == [(MoveState.FAILED, fields.get("code", "snapshot.no_image"))]


@pytest.mark.parametrize("begun_by", [leaving, lambda: begun(MoveKind.SHELVE, offload=True)])
@pytest.mark.parametrize("power", [Power.RUNNING, Power.STOPPED])
def test_what_its_host_has_no_images_of_is_as_it_was(begun_by: Any, power: Power) -> None:
    """Its driver has no snapshots, and states nothing about the machine: it was asked again for ever."""
    made = begun_by()
    made.instance = replace(made.instance, power=power)
    made.end(1, 1, done=False, code="change.unsupported")
    assert (made.instance.phase, made.instance.power) == ((State.ACTIVE, None), power)
    assert [one[1:] for one in made.terminals] == [(MoveState.FAILED, "change.unsupported")]


def test_its_client_waits_for_no_host_that_is_to_start_it_again() -> None:
    made = leaving()
    made.end(1, 1, done=False, runs=False, code="disk.full")
    made.apply(e.TimedOut(at=made.instance.deadline or 0.0))
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, "disk.full")]
    assert made.instance.state is State.RESTARTING


def test_what_did_not_run_is_not_started_for_want_of_an_image() -> None:
    made = Scenario(replace(active(), power=Power.STOPPED))
    made.apply(departs(made.instance))
    made.end(1, 1, done=False, runs=False, code="disk.full")
    assert (made.instance.state, made.instance.power) == (State.ACTIVE, Power.STOPPED)


def test_the_schedulers_wait_for_a_host_that_does_not_know_whether_the_image_is_kept() -> None:
    """Its answer leads the move: an end before it would leave the instance stopped, for a move that has failed."""
    made = leaving()
    made.end(1, 1, done=False)
    made.apply(e.TimedOut(at=made.instance.deadline or 0.0))
    assert (made.terminals, made.instance.state) == ([], State.CHANGING)
    made.end(1, 1, image="snapshot-1", runs=False)
    assert made.instance.phase == (State.DESTROYING, State.OFFLOADED)


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_delete_ends_it_on_its_way(is_begun: bool) -> None:
    made = leaving()
    if is_begun:
        made.end(1, 1, image="snapshot-1", runs=False)
    made.apply(e.DeleteRequested(at=206.0, cause=UUID))
    assert made.instance.phase == (State.DESTROYING, State.DELETED)
    made.apply(gone(made.instance, 1))
    released(made)
    assert made.instance.state is State.DELETED and made.instance.departure is None


# --- a cell's database is set back in the middle: what is in doubt is held until hosts, a client or an operator decide


def machine(attempt: int, n: int = 3, **fields: object) -> FoundMachine:
    made = FoundMachine(
        instance_uuid=UUID, host_uuid=host(n), host=f"host-{n}", service="s1", attempt=attempt, project_id="p"
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def found(*machines: FoundMachine) -> e.InstanceSearched:
    """All services have answered, about all hosts."""
    hosts = frozenset(host(n) for n in range(1, 10))
    return e.InstanceSearched(
        at=1_600.0, query=ANY, incarnation=AFTER.set_back.incarnation, machines=machines, hosts=hosts
    )


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
    checking = begun(MoveKind.MIGRATE, 2)
    checking.apply(claimed())
    moved = replace(checking.instance, doubted=True, since=1.0 if is_over else SystemClock().time())
    now = await resolved(conductor, moved)
    assert (UUID in now) is (is_over and silent == "another")


async def test_what_a_search_holds_is_logged_up_to_a_bound() -> None:
    services = Services(s1=())
    services.silent = {"s3"}
    conductor = await opened(services, ("s1",))
    conductor.down = {"s3"}
    uuids = [f"{n:08x}-0000-4000-8000-000000000000" for n in range(LOGGED_MOVES + 3)]
    moved = [replace(arrived().instance, uuid=one, cause="asked" if one == uuids[0] else "") for one in uuids]
    with capture_logs() as logged:
        assert not await resolved(conductor, *moved)
    causes = [one["cause"] for one in logged if one["event"] == "move.held"]
    assert causes == ["asked", *uuids[1:LOGGED_MOVES]]


# --- the former cell was set back


def lost(given: Scenario, context: StepContext) -> Scenario:
    """A report of its host lacks it, after the database was set back."""
    given.context = context
    given.instance = rules.give_up_lost(given.instance, 1_350.0, context, code="instance.lost", reason="x").instance
    return given


def test_a_record_from_before_its_departure_ends_once_the_build_elsewhere_has() -> None:
    """Its image may be kept under a forgotten name, so it was held for good."""
    made = leaving()
    made.context, made.instance = AFTER_HERE, replace(made.instance, doubted=True)
    made.apply(found())
    assert made.instance.phase == (State.CHANGING, None) and made.instance.doubted
    ended = CellDepart(
        request_id=MOVE,
        instance_uuid=UUID,
        project_id="p",
        kind=MoveKind.MIGRATE,
        to_cell="c2",
        attempt=2,
        ended=True,
    )
    made.apply(departure_event(ended, 1_700.0))
    assert made.instance.phase == (State.DEPARTED, State.ABSENT) and question_of(made.instance) is None


def test_a_record_in_doubt_about_its_departure_ends_no_move_that_may_go_on_elsewhere() -> None:
    made = leaving()
    made.context, made.instance = AFTER_HERE, replace(made.instance, doubted=True)
    made.apply(e.TimedOut(at=AFTER_HERE.set_back.at + 2 * AFTER_HERE.doubt_limit_s))
    (told,) = [one for one in made.commands if isinstance(one, MoveEvent)][-1:]
    assert (told.terminal, told.state) == (False, MoveState.CHANGING)


@pytest.mark.parametrize("is_query", [False, True])
def test_a_record_that_was_given_up_without_its_departure_leaves_no_request_without_an_end(*, is_query: bool) -> None:
    """The cell was set back to before the departure, and its schedulers to before the move."""
    made = Scenario(active(), AFTER_HERE)
    over = CellDepart(
        request_id=OTHER, instance_uuid=UUID, project_id="p", kind=MoveKind.MIGRATE, to_cell="c2", attempt=2, ended=True
    )
    made.apply(departure_event(over, 1_700.0))
    assert made.instance.phase == (State.DEPARTED, State.ABSENT)
    asked = departs(active())
    assert isinstance(asked, e.MoveRequested)
    for _ in range(2):
        made.apply(unbegun(asked) if is_query else asked)
    end = (MoveState.FAILED, "move.lost") if is_query else (MoveState.REFUSED, "instance.departed")
    assert made.terminals == [(MoveKind.MIGRATE, *end)] * 2


def test_a_cell_that_an_instance_has_left_announces_no_machine_of_it() -> None:
    former, departure = departed()
    former.commands.clear()
    former.apply(queried(hosts=1))
    assert [getattr(one, "departure", None) for one in former.commands] == [departure]


def test_a_delete_that_came_before_its_instance_is_later_than_that_whatever_its_attempt() -> None:
    there = in_next_cell(e.DeleteRequested(at=100.0, project_id="p", begun=True, found=(), attempt=1_501))
    released(there)
    assert there.instance.state is State.DELETED
    _, departure = departed()
    there.apply(arrives(replace(departure, attempt=1_500)))
    assert there.instance.state is State.DELETED


def test_an_undone_arrival_in_doubt_outranks_no_later_cell() -> None:
    """It came here, went on and is in a third cell, by the next attempts: what that has claimed was released here."""
    there = arrived()
    attempt = there.instance.last_attempt
    there.apply(found(), gone(there.instance, 2))
    question = question_of(there.instance)
    assert isinstance(question, Release) and question.attempt == attempt + 1
    released(there)
    assert departure_of(there).attempt == attempt + 1
    there.commands.clear()
    _, departure = departed()
    newest = replace(departure, attempt=attempt + 5, image="newest", at=2_000.0)
    there.apply(arrives(newest, request_id=OTHER))
    assert (there.instance.state, there.instance.image) == (State.CLAIMING, "newest")


async def test_what_comes_home_without_a_host_waits_for_no_service_of_the_other_cell() -> None:
    """No host was named for it at home, and the database was set back meanwhile."""
    former, departure = departed()
    last = replace(departure.last, service="compute-of-c2", host_uuid=host(77))
    back = replace(departure, cell="c1", attempt=departure.attempt + 9, last=last, at=1_200.0)
    for record in (former.instance, Instance(uuid=UUID)):
        made = Scenario(record, AFTER_HERE)
        made.apply(arrives(back, MoveKind.UNSHELVE, to_cell=None, selections=()))
        assert made.instance.doubted
        conductor = await opened(Services(s1=()), ("s1",))
        assert UUID in await resolved(conductor, replace(made.instance, since=1.0))


def test_what_is_back_in_doubt_about_its_departure_leaves_once_more() -> None:
    made = leaving()
    made.end(1, 1, image="snapshot-1", runs=False)
    made.context, made.instance = AFTER_HERE, replace(made.instance, doubted=True)
    made.apply(found(), gone(made.instance, 1))
    released(made)
    assert made.instance.state is State.DEPARTED and departure_of(made).cell == "c2"


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


def test_a_delete_numbers_above_all_that_its_departed_record_gave_out() -> None:
    given, _ = departed()
    given.context = AFTER_HERE
    given.instance = replace(given.instance, newest=3_000)
    given.apply(e.DeleteRequested(at=1_500.0, project_id="p", begun=True, found=(), attempt=3_001))
    question = question_of(given.instance)
    assert isinstance(question, Release) and question.attempt is not None
    assert question.attempt > 3_000 + FORGOTTEN_ATTEMPTS

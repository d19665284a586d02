"""An instance moves to another cell, also amid a set-back: it never runs in both, and no machine is doubled."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest
from msgspec.structs import replace

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
from cell_conductor.domain import events as e
from cell_conductor.domain import rules
from cell_conductor.domain.instance import Instance, Power, State
from cell_conductor.domain.steps import StepContext
from cell_conductor.domain.table import question_of
from cell_conductor.handlers import departure_event
from tests.unit.conductor.move_scenario import MOVE, OTHER, Scenario, active, begun, claimed, request
from tests.unit.conductor.scenario import PATIENCE, UUID, host, queried, spawned

THERE = replace(PATIENCE, cell="c2")
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


def orders(made: Scenario) -> list[Destroy]:
    return [one for one in made.commands if isinstance(one, Destroy)]


# --- the next cell was set back


# --- the former cell was set back


def lost(given: Scenario, context: StepContext) -> Scenario:
    """A report of its host lacks it, after the database was set back."""
    given.context = context
    given.instance = rules.give_up_lost(given.instance, 1_350.0, context, code="instance.lost", reason="x").instance
    return given


def test_a_cell_that_an_instance_has_left_announces_no_machine_of_it() -> None:
    former, departure = departed()
    former.commands.clear()
    former.apply(queried(hosts=1))
    assert [getattr(one, "departure", None) for one in former.commands] == [departure]

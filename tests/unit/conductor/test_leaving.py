"""An instance moves to another cell: it never runs in both, and is destroyed only for a place that reads its image."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.cell import InstanceSpec
from bus.contracts.moves import (
    ChangeKind,
    ChangeMachine,
    Condition,
    Departure,
    MoveEvent,
    MoveKind,
    MoveState,
)
from bus.contracts.placement import Claim, Revert
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Instance, Power, State
from cell_conductor.domain.table import question_of
from tests.unit.conductor.move_scenario import MOVE, OTHER, SERVICE_DOWN, Scenario, active, claimed, request
from tests.unit.conductor.scenario import PATIENCE, UUID, host, spawned

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

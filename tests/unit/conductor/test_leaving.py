"""An instance moves to another cell: it never runs in both, and is destroyed only for a place that reads its image."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import Destroy, InstanceSpec
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
from cell_conductor.domain import events as e
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import Instance, Power, State
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.domain.table import question_of
from tests.unit.conductor.move_scenario import MOVE, OTHER, SERVICE_DOWN, Scenario, active, claimed, refused, request
from tests.unit.conductor.scenario import PATIENCE, UUID, host, spawned

LATER = "d0000000-0000-4000-8000-000000000003"
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


def checks(made: Scenario) -> list[CellCheck]:
    return [one.message for one in made.commands if isinstance(one, CellAsks) and isinstance(one.message, CellCheck)]


def changes(made: Scenario) -> list[ChangeKind]:
    return [one.change for one in made.commands if isinstance(one, ChangeMachine)]


def last_event(made: Scenario) -> MoveEvent:
    return [one for one in made.commands if isinstance(one, MoveEvent)][-1]


def gone(instance: Instance, n: int) -> e.Destroyed:
    return e.Destroyed(at=220.0, attempt=instance.last_attempt, host_uuid=host(n), service="s1")


def is_announced(made: Scenario) -> bool:
    return any(isinstance(one, MoveEvent) and one.departure is not None for one in made.commands)


# --- it leaves


def test_a_host_is_claimed_before_it_is_stopped_and_checked_with_its_image_before_it_is_destroyed() -> None:
    made = leaving()
    claim = question_of(made.instance)
    assert isinstance(claim, Claim) and claim.migration is not None
    assert (claim.migration.uuid, made.instance.phase, changes(made)) == (MOVE, (State.CLAIMING, State.PREPARING), [])
    made.apply(claimed(claim.attempt))
    assert (made.instance.state, changes(made), checks(made)) == (State.HANDING_OVER, [ChangeKind.SNAPSHOT], [])
    made.end(1, 1, image="snapshot-1", runs=False)
    (check,) = checks(made)
    assert check.change is not None and (check.cell, check.asked_by.cell) == ("c2", PATIENCE.cell)
    assert (check.change.change, check.change.host_uuid, check.change.image) == (
        ChangeKind.CHECK,
        host(2),
        "snapshot-1",
    )
    assert (made.instance.state, made.destroys, changes(made)) == (State.PREPARING, [], [ChangeKind.SNAPSHOT])
    made.end(2, claim.attempt)
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.DEPARTED), [(1, host(1))])
    assert (question_of(made.instance), is_announced(made)) == (None, False)
    made.apply(gone(made.instance, 1))
    assert question_of(made.instance) == Release(consumer=MOVE, project_id="p", of_migration=True)
    made.apply(e.Released(at=230.0, consumer=MOVE))
    departure = departure_of(made)
    assert (made.instance.state, made.instance.move, made.instance.deadline) == (State.DEPARTED, None, None)
    assert (departure.cell, departure.image, departure.newest) == ("c2", "snapshot-1", claim.attempt)
    assert [one.host_uuid for one in departure.selections] == [host(2), host(3)]


def test_what_is_claimed_there_is_above_all_that_a_record_from_before_can_release() -> None:
    before = active()
    claim = question_of(leaving().instance)
    assert isinstance(claim, Claim) and claim.attempt > before.next_attempt


@pytest.mark.parametrize("how", ["refused", "silent"])
def test_what_its_host_cannot_stop_goes_back_to_it_and_runs(how: str) -> None:
    made = stopping()
    if how == "refused":
        made.end(1, 1, done=False, code="change.unsupported", runs=True)
    else:
        made.apply(e.TimedOut(at=900.0))
    back(made)
    ((kind, state, code),) = made.terminals
    assert (kind, state) == (MoveKind.MIGRATE, MoveState.FAILED)
    assert code == ("change.unsupported" if how == "refused" else "move.timeout")


def back(made: Scenario) -> None:
    question = question_of(made.instance)
    assert isinstance(question, Revert) and question.migration.uuid == MOVE
    made.apply(e.Reverted(at=250.0, attempt=question.attempt, consumer_generation=9))
    assert (made.instance.state, changes(made)[-1]) == (State.RESTARTING, ChangeKind.START)
    made.end(1, 1)
    now = made.instance
    assert (now.state, now.power, now.attempt, now.image) == (State.ACTIVE, Power.RUNNING, 1, "")
    assert made.destroys == []


@pytest.mark.parametrize("how", ["refused", "silent"])
def test_a_host_that_does_not_read_the_image_is_passed_over_and_without_another_it_stays(how: str) -> None:
    made = checking()
    for n in (2, 3):
        if how == "refused":
            made.end(n, made.instance.attempt, done=False, code="image.unreadable")
        else:
            made.apply(e.TimedOut(at=900.0 * n))
        if n == 2:
            assert made.instance.phase == (State.CLAIMING, State.PREPARING)
            made.apply(claimed(made.instance.next_attempt))
            assert (made.instance.state, made.instance.host_uuid) == (State.PREPARING, host(3))
    assert changes(made) == [ChangeKind.SNAPSHOT], "it is stopped once"
    back(made)
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, "max_retries_exceeded")]


def test_without_a_host_there_it_is_not_even_stopped() -> None:
    made = leaving()
    made.apply(refused(made.instance.next_attempt))
    question = question_of(made.instance)
    assert isinstance(question, Revert)
    made.apply(e.Reverted(at=250.0, attempt=question.attempt))
    assert (made.instance.state, changes(made)) == (State.ACTIVE, [])


def test_the_answer_of_another_check_changes_nothing() -> None:
    made = checking()
    late = made.instance.move
    assert late is not None
    made.apply(
        e.ChangeEnded(
            at=1.0, attempt=made.instance.attempt, order=late.order - 1, host_uuid=host(2), service="s1", done=True
        )
    )
    assert made.instance.state is State.PREPARING


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


def test_a_silent_source_holds_the_departure_until_it_answers_or_is_fenced() -> None:
    made = given_away()
    for at in (300.0, 1000.0):
        made.apply(e.TimedOut(at=at))
    assert made.destroys == [(1, host(1))] * 3 and not is_announced(made)
    made.apply(e.HostFenced(at=1001.0, host_uuid=host(1)))
    assert made.instance.phase == (State.RELEASING, State.DEPARTED)


@pytest.mark.parametrize("make", [leaving, stopping, checking, given_away])
def test_a_delete_of_one_that_leaves_releases_both_claims(make: object) -> None:
    made = make()  # type: ignore[operator]
    made.apply(e.DeleteRequested(at=203.0))
    if made.instance.state is State.CLAIMING:
        made.apply(claimed(made.instance.next_attempt))
    assert made.instance.phase == (State.DESTROYING, State.DELETED)
    assert {one.host_uuid for one in made.commands if isinstance(one, Destroy)} == {host(1)}
    made.apply(gone(made.instance, 1))
    release = question_of(made.instance)
    assert isinstance(release, Release) and release.consumer == UUID
    made.apply(e.Released(at=222.0))
    assert question_of(made.instance) == Release(consumer=MOVE, project_id="p", of_migration=True)
    made.apply(e.Released(at=223.0, consumer=MOVE))
    ends = [one.state for one in made.commands if isinstance(one, BuildEvent) and one.terminal]
    assert (ends[-1], made.instance.state) == (BuildState.DELETED, State.DELETED)


def test_what_has_things_of_its_cell_does_not_leave() -> None:
    before = active()
    assert before.spec is not None
    for more in ({"networks": (UUID,)}, {"volumes": (UUID,)}):
        made = Scenario(replace(before, spec=replace(before.spec, **more)))
        made.apply(leaves())
        assert made.terminals == [(MoveKind.MIGRATE, MoveState.REFUSED, "move.across_cells")]
        assert made.instance.state is State.ACTIVE
        made = Scenario(replace(before, state=State.OFFLOADED, power=Power.SHELVED, spec=replace(before.spec, **more)))
        made.apply(leaves(MoveKind.UNSHELVE))
        assert made.terminals == [(MoveKind.UNSHELVE, MoveState.REFUSED, "move.across_cells")]
        assert made.instance.state is State.OFFLOADED


@pytest.mark.parametrize("power", [Power.SHELVED, Power.RESCUED])
def test_a_shelved_or_rescued_one_does_not_leave(power: Power) -> None:
    made = Scenario(replace(active(), power=power))
    made.apply(leaves())
    ((_, state, code),) = made.terminals
    assert (made.instance.state, state, code) == (State.ACTIVE, MoveState.REFUSED, f"instance.{power.value}")


def test_a_departure_of_a_record_with_old_numbers_is_announced_above_what_the_schedulers_have_had() -> None:
    """Seed 11 of `transfers-restored`: they ignored it, and the instance was in no cell."""
    made, departure = departed(sequence=500)
    assert departure.sequence > 500
    before = made.instance.sequence
    made.apply(request(MoveKind.STOP, request_id=LATER, sequence=900))
    assert made.instance.sequence == before, "it has left: the other cell numbers it"


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


@pytest.mark.parametrize("kind", [MoveKind.CONFIRM, MoveKind.REVERT])
def test_nothing_of_it_is_there_to_be_confirmed_or_reverted(kind: MoveKind) -> None:
    _, departure = departed()
    there = in_next_cell(arrives(departure), spawned(n=2, attempt=departure.newest, at=260.0))
    there.apply(request(kind, request_id=OTHER))
    assert there.terminals[1:] == [(kind, MoveState.REFUSED, "move.none")]


def test_another_host_of_the_next_cell_is_tried() -> None:
    _, departure = departed()
    there = in_next_cell(arrives(departure))
    there.apply(e.SpawnFailed(at=261.0, attempt=departure.newest, host_uuid=host(2), code="sim.spawn_failed"))
    claim = question_of(there.instance)
    assert isinstance(claim, Claim) and (claim.attempt, claim.migration) == (departure.newest + 1, None)
    assert claim.release_first and claim.consumer_generation == departure.consumer_generation


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


def test_a_host_that_is_closed_meanwhile_is_passed_over() -> None:
    _, departure = departed()
    fenced = replace(THERE, fences={host(2): Fence(host_uuid=host(2), host="h2", version=1)})
    down = replace(THERE, down={"s1": Lease(service="s1", epoch=1, state=LeaseState.SILENT)})
    for context, phase in (
        (fenced, (State.CLAIMING, State.PREPARING)),
        (down, (State.RELEASING, State.OFFLOADED)),
    ):
        there = Scenario(Instance(uuid=UUID), context)
        there.apply(arrives(departure))
        assert (there.instance.phase, there.spawns) == (phase, [])


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


def test_one_that_was_stopped_stays_stopped_in_its_next_cell() -> None:
    made = Scenario(active())
    made.apply(request(MoveKind.STOP, request_id=OTHER))
    made.end(1, 1)
    made.apply(leaves())
    made.apply(claimed(made.instance.next_attempt))
    made.end(1, 1, image="snapshot-1")
    made.end(2, made.instance.attempt)
    made.apply(gone(made.instance, 1), e.Released(at=230.0, consumer=MOVE))
    departure = departure_of(made)
    there = in_next_cell(arrives(departure), spawned(n=2, attempt=departure.newest, at=260.0))
    (spawn,) = there.spawns
    assert spawn.origin is not None and not spawn.origin.runs
    assert there.instance.power is Power.STOPPED


def test_it_comes_back_the_same_way() -> None:
    former, departure = departed()
    there = in_next_cell(arrives(departure), spawned(n=2, attempt=departure.newest, at=260.0))
    there.apply(request(MoveKind.MIGRATE, 4, request_id=LATER, to_cell=PATIENCE.cell))
    there.apply(claimed(there.instance.next_attempt))
    there.end(2, departure.newest, image="snapshot-2")
    there.end(4, there.instance.attempt)
    there.apply(gone(there.instance, 2), e.Released(at=300.0, consumer=LATER))
    second = departure_of(there)
    former.apply(arrives(departure))
    assert former.instance.state is State.DEPARTED, "an older arrival"
    former.apply(arrives(second, request_id=LATER))
    assert (former.instance.state, former.spawns[-1].attempt) == (State.FINISHING, second.newest)

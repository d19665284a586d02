"""Moves to another host as scenarios of the table: each way back ends on the source."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from bus.contracts.cell import Destroy
from bus.contracts.moves import (
    ChangeKind,
    Condition,
    MoveEvent,
    MoveKind,
    MoveState,
)
from bus.contracts.placement import Claim, Release, Revert
from bus.persistence.outbox import OutboxMessage
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Instance, Power, State
from cell_conductor.domain.report import is_over
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import question_of, step
from cell_conductor.placement_requests import Transition, may_be_redone
from tests.unit.conductor.move_scenario import (
    MOVE,
    OTHER,
    Scenario,
    active,
    announced,
    begun,
    changes,
    claimed,
    ended,
    refused,
    request,
    seen,
    to_resized,
)
from tests.unit.conductor.scenario import PATIENCE, SPEC, UUID, host, queried, run, selection, spawned
from tests.unit.conductor.scenario import announced as builds

SMALL = replace(SPEC, flavor="m1.small")


@pytest.mark.parametrize("kind", [MoveKind.MIGRATE, MoveKind.LIVE_MIGRATE, MoveKind.REBUILD, MoveKind.UNSHELVE])
def test_hosts_chosen_for_another_flavor_than_the_instance_has_are_refused(kind: MoveKind) -> None:
    made = Scenario(replace(active(), spec=SMALL))
    made.apply(
        request(kind, 2, spec=SPEC if kind in (MoveKind.REBUILD, MoveKind.UNSHELVE) else None, expected_flavor="m1.old")
    )
    assert made.terminals == [(kind, MoveState.REFUSED, "instance.flavor_changed")]
    assert (made.instance.state, made.instance.spec) == (State.ACTIVE, SMALL)


@pytest.mark.parametrize("kind", [MoveKind.STOP, MoveKind.SHELVE, MoveKind.RESCUE])
def test_a_change_for_which_no_hosts_were_chosen_does_not_depend_on_the_flavor(kind: MoveKind) -> None:
    made = Scenario(replace(active(), spec=SMALL))
    made.apply(request(kind, expected_flavor="m1.old"))
    assert (made.instance.state, made.terminals) == (State.CHANGING, [])


def test_hosts_chosen_for_the_flavor_that_the_instance_has_are_claimed() -> None:
    made = Scenario(replace(active(), spec=SMALL))
    made.apply(request(MoveKind.LIVE_MIGRATE, 2, expected_flavor="m1.small"))
    assert made.instance.phase == (State.CLAIMING, State.PREPARING)


def test_a_cold_migration_from_claim_to_confirm() -> None:
    made = begun(MoveKind.MIGRATE, 2, 3)
    question = question_of(made.instance)
    assert isinstance(question, Claim)
    assert (question.attempt, question.release_first, len(question.options)) == (2, False, 2)
    assert question.migration is not None
    assert question.migration.uuid == MOVE
    assert made.instance.phase == (State.CLAIMING, State.PREPARING)
    (check,) = changes(made.apply(claimed()))
    assert (check.change, check.host_uuid, check.attempt) == (ChangeKind.CHECK, host(2), 2)
    (stop,) = changes(made.end(2, 2))
    assert (stop.change, stop.host_uuid, stop.attempt, stop.to_host) == (ChangeKind.HAND_OVER, host(1), 1, host(2))
    assert stop.order > check.order
    assert not made.spawns
    made.end(1, 1)
    (spawn,) = made.spawns
    assert (spawn.attempt, spawn.host_uuid) == (2, host(2))
    assert spawn.origin is not None
    assert (spawn.origin.host_uuid, spawn.origin.runs) == (host(1), True)
    assert made.destroys == []  # before the destination is active the source is never given up
    made.apply(spawned(attempt=2, at=210.0))
    assert made.instance.state is State.RESIZED
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.DONE, "")]
    assert made.destroys == []
    made.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.ACTIVE), [(1, host(1))])
    made.apply(e.Destroyed(at=220.0, attempt=1, host_uuid=host(1), service="s1"))
    released = question_of(made.instance)
    assert isinstance(released, Release)
    assert released.consumer == MOVE
    made.apply(e.Released(at=221.0, consumer=MOVE))
    assert (made.instance.state, made.instance.host_uuid, made.instance.attempt) == (State.ACTIVE, host(2), 2)
    assert made.instance.move is None
    assert made.terminals[1:] == [(MoveKind.CONFIRM, MoveState.DONE, "")]


def test_a_copy_of_a_request_that_has_ended_gets_its_end_again() -> None:
    made = to_resized()
    made.apply(request(MoveKind.MIGRATE, 2, 3))
    assert made.instance.state is State.RESIZED
    made.apply(request(MoveKind.REVERT, request_id=OTHER), seen())
    made.apply(request(MoveKind.MIGRATE, 2, 3))
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.DONE, "")] * 2
    made = begun(MoveKind.MIGRATE, 1)
    made.apply(request(MoveKind.MIGRATE, 2))
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.REFUSED, "move.no_host")] * 2


def test_a_reverted_move_destroys_the_destination_before_the_source_starts() -> None:
    made = to_resized()
    made.apply(request(MoveKind.REVERT, request_id=OTHER), seen())
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.REVERTING), [(2, host(2))])
    assert question_of(made.instance) is None
    made.apply(e.Destroyed(at=220.0, attempt=2, host_uuid=host(2), service="s1"))
    question = question_of(made.instance)
    assert isinstance(question, Revert)
    assert (question.attempt, question.source_attempt) == (3, 1)
    (start,) = changes(made.apply(e.Reverted(at=221.0, attempt=3, consumer_generation=11)))
    assert (start.change, start.host_uuid, start.attempt) == (ChangeKind.START, host(1), 1)
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.host_uuid, made.instance.attempt) == (State.ACTIVE, host(1), 1)
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.DONE, ""), (MoveKind.REVERT, MoveState.DONE, "")]
    # The numbers that the move has used are behind it: what they may still bring is over, the source is not.
    assert is_over(made.instance, 2, host(2))
    assert not is_over(made.instance, 1, host(1))
    assert not is_over(made.instance, 4, host(2))
    made.apply(request(MoveKind.MIGRATE, 2, request_id=OTHER.replace("2", "3")))
    question = question_of(made.instance)
    assert isinstance(question, Claim)
    assert question.attempt == 4


def test_the_time_confirms_and_a_late_revert_is_refused() -> None:
    made = to_resized(auto_confirm_s=5.0)
    assert made.instance.deadline == 215.0
    made.apply(e.TimedOut(at=215.0), request(MoveKind.REVERT, request_id=OTHER))
    assert made.instance.phase == (State.DESTROYING, State.ACTIVE)
    assert made.terminals[1:] == [(MoveKind.REVERT, MoveState.REFUSED, "move.too_late")]


def test_a_revert_and_then_the_time_reverts() -> None:
    made = to_resized(auto_confirm_s=5.0)
    made.apply(request(MoveKind.REVERT, request_id=OTHER), seen(), e.TimedOut(at=245.0))
    assert made.instance.phase == (State.DESTROYING, State.REVERTING)


@pytest.mark.parametrize("code", ["check", "spawn"])
def test_a_destination_that_fails_is_followed_by_the_next(code: str) -> None:
    made = begun(MoveKind.MIGRATE, 2, 3)
    made.apply(claimed())
    if code == "check":
        made.end(2, 2, done=False, code="host.disabled")
        assert made.destroys == []
    else:
        made.end(2, 2)
        made.end(1, 1)
        made.apply(e.SpawnFailed(at=210.0, attempt=2, host_uuid=host(2), code="spawn.no_disk"))
        assert made.destroys == [(2, host(2))]
    question = question_of(made.instance)
    assert isinstance(question, Claim)
    assert (question.attempt, question.release_first, len(question.options)) == (3, True, 1)
    made.apply(claimed(3))
    made.end(3, 3)
    if code == "check":
        made.end(1, 1)
    assert [(spawn.attempt, spawn.host_uuid) for spawn in made.spawns][-1] == (3, host(3))
    earlier = list(made.destroys)
    made.apply(e.SpawnFailed(at=215.0, attempt=2, host_uuid=host(2), code="spawn.no_disk"))  # its order came again
    assert made.destroys == [*earlier, (2, host(2))] and made.instance.state is State.FINISHING
    made.apply(e.SpawnFailed(at=216.0, attempt=1, host_uuid=host(1), code="spawn.no_disk"))
    assert made.destroys == [*earlier, (2, host(2))], "the source is wanted until the destination is active"
    made.apply(spawned(attempt=3, at=220.0))
    assert (made.instance.state, made.instance.attempt) == (State.RESIZED, 3)
    event = next(m for m in made.commands if isinstance(m, MoveEvent) and m.terminal)
    assert [record.outcome for record in event.history] == ["failed", "active"]


def test_without_an_alternate_the_instance_is_active_where_it_was() -> None:
    made = begun(MoveKind.MIGRATE, 2)
    made.apply(claimed())
    made.end(2, 2)
    made.end(1, 1)
    made.apply(e.SpawnFailed(at=210.0, attempt=2, host_uuid=host(2), code="spawn.no_disk"))
    made.apply(e.Destroyed(at=211.0, attempt=2, host_uuid=host(2), service="s1"), e.Reverted(at=212.0, attempt=3))
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.host_uuid, made.instance.power) == (
        State.ACTIVE,
        host(1),
        Power.RUNNING,
    )
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, "max_retries_exceeded")]


def test_a_destination_that_does_not_answer_is_never_followed_by_another_machine() -> None:
    made = begun(MoveKind.MIGRATE, 2, 3)
    made.apply(claimed())
    made.end(2, 2)
    made.end(1, 1)
    for at in (600.0, 700.0, 900.0):
        made.apply(e.TimedOut(at=at), e.ServiceLost(at=at, service="s1", code="service.silent"))
        order = made.commands[-1]
        assert isinstance(order, Destroy)
        assert order.unless_built
    assert made.instance.state is State.FINISHING
    made.apply(e.Destroyed(at=901.0, attempt=2, host_uuid=host(2), service="s1"))
    assert made.instance.phase == (State.CLAIMING, State.PREPARING)


def test_a_source_that_does_not_hand_over_is_started_again() -> None:
    made = begun(MoveKind.MIGRATE, 2)
    made.apply(claimed())
    made.end(2, 2)
    late = ended(made.instance, 1, 1)
    made.apply(e.TimedOut(at=600.0))
    assert made.instance.state is State.REVERTING  # the destination was never commanded
    (start,) = changes(made.apply(e.Reverted(at=601.0, attempt=3)))
    assert start.change is ChangeKind.START
    assert not changes(made.apply(late))  # its answer to the older order counts for nothing
    assert made.instance.state is State.RESTARTING
    made.apply(e.TimedOut(at=602.0))
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, "move.timeout")]
    made.end(1, 1, runs=True)
    assert made.instance.state is State.ACTIVE
    assert len(made.terminals) == 1


def test_a_failed_live_migration_leaves_the_machine_active() -> None:
    made = begun(MoveKind.LIVE_MIGRATE, 2)
    made.apply(claimed())
    (copy,) = changes(made.end(2, 2))
    assert copy.change is ChangeKind.HAND_OVER_LIVE
    made.end(1, 1, done=False, code="live.too_slow", runs=True)
    made.apply(e.Reverted(at=205.0, attempt=3))
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.host_uuid) == (State.ACTIVE, host(1))
    assert made.terminals == [(MoveKind.LIVE_MIGRATE, MoveState.FAILED, "live.too_slow")]


def test_a_live_migration_may_take_the_time_of_copying_its_memory() -> None:
    """Its deadline was that of any other step: a large machine was given up in the middle of its copying."""
    made = begun(MoveKind.LIVE_MIGRATE, 2, step_timeout_s=60.0)
    made.context = replace(PATIENCE, live_copy_mb_s=32.0)
    assert made.instance.move is not None and made.instance.move.source is not None
    held = replace(made.instance.move.source, allocations={host(1): {"VCPU": 1, "MEMORY_MB": 3200}})
    made.instance = replace(made.instance, move=replace(made.instance.move, source=held))
    (check,) = changes(made.apply(claimed()))
    assert (check.timeout_s, made.instance.deadline) == (60.0, 261.0)
    (copy,) = changes(made.end(2, 2))
    assert (copy.timeout_s, made.instance.deadline) == (160.0, 362.0)
    made.apply(e.TimedOut(at=362.0))
    assert made.instance.move is not None
    assert made.instance.move.lost_reason == "the source did not hand over within 160 s"


@pytest.mark.parametrize(("kind", "rate"), [(MoveKind.MIGRATE, 32.0), (MoveKind.LIVE_MIGRATE, 0.0)])
def test_other_steps_take_the_time_of_a_step(kind: MoveKind, rate: float) -> None:
    made = begun(kind, 2, step_timeout_s=60.0)
    made.context = replace(PATIENCE, live_copy_mb_s=rate)
    made.apply(claimed())
    (copy,) = changes(made.end(2, 2))
    assert (copy.timeout_s, made.instance.deadline) == (60.0, 262.0)


def test_no_step_takes_longer_than_a_day() -> None:
    made = begun(MoveKind.LIVE_MIGRATE, 2, step_timeout_s=86_000.0)
    made.context = replace(PATIENCE, live_copy_mb_s=0.001)
    assert made.instance.move is not None and made.instance.move.source is not None
    held = replace(made.instance.move.source, allocations={host(1): {"MEMORY_MB": 1_000_000}})
    made.instance = replace(made.instance, move=replace(made.instance.move, source=held))
    made.apply(claimed())
    (copy,) = changes(made.end(2, 2))
    assert copy.timeout_s == 86_400.0


def refused_live(*hosts: int, **fields: object) -> tuple[Scenario, Step]:
    """A live migration whose source has refused, before it began, to hand over to host 2."""
    made = begun(MoveKind.LIVE_MIGRATE, *hosts)
    made.apply(claimed())
    made.end(2, 2)
    known = {"done": False, "code": "live.pinned", "reason": "a device", "runs": True, "refused": True, **fields}
    return made, made.end(1, 1, **known)  # type: ignore[arg-type]


def test_a_live_migration_that_the_source_refuses_leaves_the_machine_active_and_unchanged() -> None:
    """No alternate could help, and nothing was begun: the machine is not even commanded to start again."""
    made, _ = refused_live(2, 3)
    assert made.instance.state is State.REVERTING
    stepped = made.apply(e.Reverted(at=205.0, attempt=3))
    assert changes(stepped) == [] and made.destroys == [] and made.spawns == []
    assert (made.instance.state, made.instance.host_uuid, made.instance.power) == (
        State.ACTIVE,
        host(1),
        Power.RUNNING,
    )
    assert made.terminals == [(MoveKind.LIVE_MIGRATE, MoveState.FAILED, "live.pinned")]
    event = next(m for m in made.commands if isinstance(m, MoveEvent) and m.terminal)
    assert [(one.host, one.outcome, one.code) for one in event.history] == [("host-2", "failed", "live.pinned")]


def test_an_alternate_is_tried_where_the_source_refuses_one_destination_only() -> None:
    made, _ = refused_live(2, 3, elsewhere=True)
    question = question_of(made.instance)
    assert isinstance(question, Claim)
    assert (made.instance.phase, question.attempt, question.release_first) == (
        (State.CLAIMING, State.PREPARING),
        3,
        True,
    )
    (check,) = changes(made.apply(claimed(3)))
    assert (check.change, check.host_uuid) == (ChangeKind.CHECK, host(3))
    (copy,) = changes(made.end(3, 3))  # the source is commanded again: it had not handed over
    assert (copy.change, copy.host_uuid, copy.to_host) == (ChangeKind.HAND_OVER_LIVE, host(1), host(3))
    made.end(1, 1)
    assert [(spawn.attempt, spawn.host_uuid) for spawn in made.spawns] == [(3, host(3))]


def test_without_an_alternate_a_refused_destination_leaves_the_machine_active() -> None:
    made, _ = refused_live(2, elsewhere=True)
    stepped = made.apply(e.Reverted(at=205.0, attempt=3))
    assert (made.instance.state, made.instance.host_uuid, changes(stepped)) == (State.ACTIVE, host(1), [])
    assert made.terminals == [(MoveKind.LIVE_MIGRATE, MoveState.FAILED, "max_retries_exceeded")]


@pytest.mark.parametrize("runs", [False, None])
def test_a_source_that_refuses_and_may_not_run_is_started(runs: bool | None) -> None:
    """It may have handed over before, by a copy of the command: only a machine that runs needs no start."""
    made, _ = refused_live(2, 3, elsewhere=True, runs=runs)
    (start,) = changes(made.apply(e.Reverted(at=205.0, attempt=3)))
    assert (start.change, start.host_uuid) == (ChangeKind.START, host(1))


def test_a_live_migration_awaits_no_confirm() -> None:
    made = to_resized(MoveKind.LIVE_MIGRATE)
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.ACTIVE), [(1, host(1))])
    assert made.terminals == [(MoveKind.LIVE_MIGRATE, MoveState.DONE, "")]


@pytest.mark.parametrize("when", ["claiming", "preparing", "handing over"])
def test_an_abort_ends_the_move_before_the_destination_is_commanded(when: str) -> None:
    made = begun(MoveKind.LIVE_MIGRATE, 2)
    stop = request(MoveKind.ABORT, request_id=OTHER)
    if when == "claiming":
        made.apply(stop, claimed())
    elif when == "preparing":
        made.apply(claimed(), stop)
    else:
        made.apply(claimed())
        made.end(2, 2)
        made.apply(stop)
    made.apply(e.Reverted(at=205.0, attempt=3))
    if when == "handing over":
        made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.host_uuid) == (State.ACTIVE, host(1))
    assert made.terminals == [
        (MoveKind.LIVE_MIGRATE, MoveState.FAILED, "move.aborted"),
        (MoveKind.ABORT, MoveState.DONE, ""),
    ]


def test_an_abort_that_was_refused_before_a_move_does_not_abort_it_when_it_comes_again() -> None:
    """A copy of it is delivered late: it is answered as it was."""
    made = Scenario(active())
    stop = request(MoveKind.ABORT, request_id=OTHER)
    made.apply(stop, request(MoveKind.LIVE_MIGRATE, 2))
    made.apply(stop)
    assert made.instance.move is not None and made.instance.move.by == ""
    made.apply(claimed(), stop)
    assert made.instance.state is State.PREPARING
    assert made.terminals == [(MoveKind.ABORT, MoveState.REFUSED, "move.none")] * 3


@pytest.mark.parametrize("is_moving", [False, True])
def test_a_second_build_is_announced_under_the_number_of_its_first_whatever_moves_have_taken_since(
    is_moving: bool,
) -> None:
    """A refused abort had taken the number before the next one: its clients got a second terminal event (seed
    1795337330088).
    """
    built = run(queried(hosts=1), spawned())
    (first,) = builds(built)
    made = Scenario(built.instance)
    made.apply(request(MoveKind.ABORT, request_id=OTHER))
    if is_moving:
        made.apply(request(MoveKind.MIGRATE, 2), claimed())
    (again,) = builds(made.apply(queried(hosts=1)))
    assert (again.state, again.sequence, again.terminal) == (first.state, first.sequence, True)
    numbers = [one.sequence for one in made.commands if isinstance(one, MoveEvent)]
    assert numbers == list(range(first.sequence + 1, made.instance.sequence))


STAGES = ["claiming", "preparing", "handing over", "finishing", "resized", "confirming", "releasing source", "undoing"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_delete_in_every_state_destroys_both_and_releases_both(stage: str) -> None:
    made = begun(MoveKind.MIGRATE, 2)
    number = STAGES.index(stage)
    steps = [
        lambda: made.apply(claimed()),
        lambda: made.end(2, 2),
        lambda: made.end(1, 1),
        lambda: made.apply(spawned(attempt=2, at=210.0)),
        lambda: made.apply(request(MoveKind.CONFIRM, request_id=OTHER)),
        lambda: made.apply(e.Destroyed(at=215.0, attempt=1, host_uuid=host(1), service="s1")),
    ]
    for act in steps[: min(number, 6)] if stage != "undoing" else steps[:4]:
        act()
    if stage == "undoing":
        made.apply(request(MoveKind.REVERT, request_id=OTHER), seen())
    made.apply(e.DeleteRequested(at=300.0))
    if stage == "claiming":
        made.apply(claimed())
    made.apply(e.Destroyed(at=301.0, attempt=1, host_uuid=host(1), service="s1"))
    if number >= STAGES.index("finishing"):
        if stage != "releasing source":
            assert made.instance.phase == (State.DESTROYING, State.DELETED)  # the destination has not answered
        made.apply(e.Destroyed(at=301.0, attempt=2, host_uuid=host(2), service="s1"))
    assert made.instance.phase == (State.RELEASING, State.DELETED)
    first = question_of(made.instance)
    assert isinstance(first, Release)
    assert first.consumer == UUID
    made.apply(e.Released(at=302.0, consumer=UUID), e.Released(at=302.0, consumer=UUID))
    second = question_of(made.instance)
    assert isinstance(second, Release)
    assert second.consumer == MOVE
    made.apply(e.Released(at=303.0, consumer=MOVE))
    assert (made.instance.state, made.instance.move) == (State.DELETED, None)
    assert len({m.request_id for m in made.commands if isinstance(m, MoveEvent) and m.terminal}) == len(made.terminals)


@pytest.mark.parametrize("deleted_first", [True, False])
def test_a_delete_after_a_refused_claim_releases_both_because_a_copy_may_have_succeeded(*, deleted_first: bool) -> None:
    """Seed 1795411216: the claim was sent twice, the second copy was refused, the first came later and succeeded."""
    made = begun(MoveKind.MIGRATE, 2)
    events = [refused(), e.DeleteRequested(at=300.0)]
    made.apply(*(reversed(events) if deleted_first else events))
    made.apply(e.Destroyed(at=301.0, attempt=1, host_uuid=host(1), service="s1"))
    for consumer in (UUID, MOVE):
        question = question_of(made.instance)
        assert isinstance(question, Release)
        assert question.consumer == consumer
        made.apply(e.Released(at=302.0, consumer=consumer))
    assert made.instance.state is State.DELETED


def test_a_move_of_what_is_not_there_is_refused() -> None:
    stepped = step(Instance(uuid=UUID), request(MoveKind.MIGRATE, 2), PATIENCE)
    (event,) = stepped.commands
    assert isinstance(event, MoveEvent)
    assert (event.state, event.code, event.condition) == (MoveState.REFUSED, "instance.unknown", Condition.UNKNOWN)
    assert stepped.instance.state is State.ABSENT


def test_one_thing_at_a_time() -> None:
    made = begun(MoveKind.MIGRATE, 2)
    made.apply(request(MoveKind.STOP, request_id=OTHER), request(MoveKind.MIGRATE, 2))
    assert made.terminals == [(MoveKind.STOP, MoveState.REFUSED, "instance.busy")]


def test_a_source_that_may_run_is_not_on_record_as_stopped() -> None:
    """Its host did not know whether it had started again: it ran, and its record had it stopped."""
    made = begun(MoveKind.MIGRATE, 2)
    made.apply(claimed())
    made.end(2, 2)
    made.end(1, 1, done=False, code="change.timeout")
    made.apply(e.Reverted(at=205.0, attempt=3))
    made.end(1, 1, done=False, code="change.timeout")
    assert (made.instance.state, made.instance.power) == (State.RESTARTING, Power.RUNNING)
    (again,) = changes(made.apply(e.TimedOut(at=600.0)))
    assert again.change is ChangeKind.START
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.power) == (State.ACTIVE, Power.RUNNING)
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, "change.timeout")]


def test_a_refusal_is_on_disk_before_its_request_is_acknowledged() -> None:
    """Forgotten in a crash, the request came again when the instance was not busy any more, and was carried out."""
    made = to_resized()
    refusal = made.apply(request(MoveKind.STOP, request_id=OTHER))
    assert announced(*refusal.commands) == [(MoveKind.STOP, MoveState.REFUSED, True, "instance.resized")]
    outgoing = [OutboxMessage("c", message, UUID) for message in refusal.commands]
    assert not may_be_redone(Transition({UUID: refusal.instance}, outgoing, Counter(), []), {})


def test_a_stopped_machine_is_stopped_where_it_has_been_moved_to() -> None:
    made = begun(MoveKind.STOP)
    made.end(1, 1, runs=False)
    made.apply(request(MoveKind.MIGRATE, 2, request_id=OTHER), claimed())
    made.end(2, 2)
    made.end(1, 1, runs=False)
    (spawn,) = made.spawns
    assert spawn.origin is not None
    assert not spawn.origin.runs
    made.apply(spawned(attempt=2, at=210.0))
    assert (made.instance.state, made.instance.power) == (State.RESIZED, Power.STOPPED)


def test_a_move_goes_on_with_the_generation_that_an_audits_claim_has_left() -> None:
    """A running, claimed instance was refused to move for ever: the record has the generation from before the audit."""
    made = begun(MoveKind.MIGRATE, 2, 3)
    changed = e.ClaimRefused(
        at=201.0, attempt=2, consumer_changed=True, consumer_generation=12, holding={host(1): {"VCPU": 1}}
    )
    made.apply(changed)
    question = question_of(made.instance)
    assert isinstance(question, Claim)
    assert (question.attempt, question.consumer_generation, made.instance.state) == (2, 12, State.CLAIMING)
    made.apply(changed)
    assert made.instance.state is State.REVERTING, "once: another client goes on changing it"
    other = begun(MoveKind.MIGRATE, 2, 3)
    other.apply(replace(changed, holding={host(1): {"VCPU": 2}}))
    assert other.instance.state is State.REVERTING, "another client holds something else"


@pytest.mark.parametrize(
    ("left", "is_refused"), [({"VCPU": 0}, True), ({"VCPU": 1}, False), ({"DISK_GB": 0}, False), ({}, False)]
)
def test_a_clients_revert_to_a_larger_size_needs_room_in_the_quota(left: dict[str, int], is_refused: bool) -> None:
    """Resize down, build in the room that this left, revert: the project held more than its quota."""
    smaller = replace(selection(2), allocations={host(2): {"DISK_GB": 1}})
    made = Scenario(active())  # VCPU 1
    made.apply(request(MoveKind.RESIZE, selections=(smaller,)), claimed())
    made.end(2, 2)
    made.end(1, 1)
    made.apply(spawned(attempt=2, at=210.0))
    assert made.instance.state is State.RESIZED
    made.apply(request(MoveKind.REVERT, request_id=OTHER, room=left), seen())
    if is_refused:
        assert made.instance.state is State.RESIZED
        assert made.terminals[-1] == (MoveKind.REVERT, MoveState.REFUSED, "quota.exceeded")
        made.apply(request(MoveKind.CONFIRM, request_id=OTHER.replace("2", "3")))
        assert made.instance.phase == (State.DESTROYING, State.ACTIVE)
    else:
        assert made.instance.phase == (State.DESTROYING, State.REVERTING)

"""Moves to another host as scenarios of the table: each way back ends on the source."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from bus.contracts.moves import (
    ChangeKind,
    MoveEvent,
    MoveKind,
    MoveState,
)
from bus.contracts.placement import Claim, Release, Revert
from bus.persistence.outbox import OutboxMessage
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Power, State
from cell_conductor.domain.report import is_over
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import question_of
from cell_conductor.placement_requests import Transition, may_be_redone
from tests.unit.conductor.move_scenario import (
    MOVE,
    OTHER,
    Scenario,
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
from tests.unit.conductor.scenario import UUID, host, spawned


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


@pytest.mark.parametrize("runs", [False, None])
def test_a_source_that_refuses_and_may_not_run_is_started(runs: bool | None) -> None:
    """It may have handed over before, by a copy of the command: only a machine that runs needs no start."""
    made, _ = refused_live(2, 3, elsewhere=True, runs=runs)
    (start,) = changes(made.apply(e.Reverted(at=205.0, attempt=3)))
    assert (start.change, start.host_uuid) == (ChangeKind.START, host(1))


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

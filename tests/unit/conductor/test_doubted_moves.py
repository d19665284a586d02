"""Moves in doubt: their cell's database was set back in the middle of one, and only the two hosts know its end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.base import Message
from bus.contracts.cell import Destroy, Spawn
from bus.contracts.moves import MACHINE_ABSENT, ChangeMachine, MoveEvent, MoveKind, MoveState
from bus.contracts.placement import Claim, Revert
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Phase, State
from cell_conductor.domain.move_doubts import IN_DOUBT
from cell_conductor.domain.proof import is_over
from cell_conductor.domain.report import RENUMBERED, UnexplainedKind, differences
from cell_conductor.domain.table import question_of
from tests.unit.conductor.move_scenario import (
    OTHER,
    Scenario,
    active,
    begun,
    claimed,
    refused,
    request,
    seen,
    to_resized,
)
from tests.unit.conductor.scenario import DEPLOYMENT, PATIENCE, RELEASED, host, missed, spawned
from tests.unit.conductor.test_doubted import brief, report_of

SET_BACK_AT = 1_000.0
AFTER = replace(PATIENCE, set_back_at=SET_BACK_AT)
SOURCE, DESTINATION = (host(1), 1), (host(2), 2)
ROUNDS = 40


def at_state(state: State, then: State | None = None) -> Scenario:
    """A cold migration from host 1 to host 2, in this state, whose record was set back to there."""
    made = begun(MoveKind.MIGRATE, 2, 3, auto_confirm_s=5.0)
    made.apply(claimed())
    if state is not State.PREPARING:
        made.end(2, 2)
    if state not in (State.PREPARING, State.HANDING_OVER):
        made.end(1, 1)
    if state in (State.RESIZED, State.DESTROYING):
        made.apply(spawned(attempt=2, at=210.0))
    if then is State.REVERTING:
        made.apply(request(MoveKind.REVERT, request_id=OTHER), seen())
    assert made.instance.phase == (state, then)
    made.instance = replace(made.instance, doubted=True)
    made.context = AFTER
    made.commands.clear()
    return made


class Hosts:
    """The two hosts as they really are, and a book that has gone on. Every destruction is checked."""

    def __init__(self, made: Scenario, machines: set[tuple[str, int]]) -> None:
        self.made = made
        self.machines = machines
        self.ended: set[tuple[str, int]] = set()
        self.at = 2_000.0

    def play(self, first: e.Event) -> None:
        """Answer whatever is commanded and asked, until the record is at rest."""
        commands = list(self.made.apply(first).commands)
        for _ in range(ROUNDS):
            self.at += 100.0
            answers = [answer for command in commands if (answer := self._answer(command))]
            if not answers and (question := self._placement()):
                answers = [question]
            if not answers and self.made.instance.deadline is not None:
                answers = [e.TimedOut(at=self.at)]
            if not answers or self.made.instance.state in (State.ACTIVE, State.FAILED):
                return
            commands = []
            for answer in answers:
                commands += self.made.apply(answer).commands
            if self.made.instance.state is State.RESIZED and not self.made.instance.doubted:
                return
        raise AssertionError(f"still {self.made.instance.state}")

    def _answer(self, command: Message) -> e.Event | None:
        if isinstance(command, Destroy):
            return self._destroy(command)
        if isinstance(command, ChangeMachine):
            there = (command.host_uuid, command.attempt) in self.machines
            return e.ChangeEnded(
                at=self.at, attempt=command.attempt, order=command.order, host_uuid=command.host_uuid, service="s1",
                done=there, runs=there, code="" if there else MACHINE_ABSENT,
            )  # fmt: skip
        if isinstance(command, Spawn):
            place = (command.host_uuid, command.attempt)
            if place in self.ended:
                return e.SpawnFailed(
                    at=self.at, attempt=command.attempt, host_uuid=command.host_uuid, code="spawn.fenced", reason=""
                )
            self.machines.add(place)
            return self._there(*place)
        return None

    def _destroy(self, order: Destroy) -> e.Event:
        place = (order.host_uuid, order.attempt)
        if order.unless_built and place in self.machines:
            return self._there(*place)
        if place in self.machines:
            assert len(self.machines) > 1, f"{place} is the only machine, and its host was not asked"
            self.machines.remove(place)
        self.ended.add(place)
        return e.Destroyed(at=self.at, attempt=order.attempt, host_uuid=order.host_uuid, service="s1")

    def _there(self, uuid: str, attempt: int) -> e.Spawned:
        return e.Spawned(at=self.at, attempt=attempt, host_uuid=uuid, service="s1")

    def _placement(self) -> e.Event | None:
        question = question_of(self.made.instance)
        if question is None:
            return None
        if isinstance(question, Claim):
            return e.ClaimRefused(at=self.at, attempt=question.attempt, consumer_changed=True, outcomes=())
        if isinstance(question, Revert):
            return e.Reverted(at=self.at, attempt=question.attempt, consumer_generation=11)
        return e.Released(at=self.at, consumer=question.consumer)


TRULY = {"arrived": {DESTINATION}, "undone": {SOURCE}, "both": {SOURCE, DESTINATION}, "neither": set()}
PHASES = (
    (State.PREPARING, None),
    (State.HANDING_OVER, None),
    (State.FINISHING, None),
    (State.RESIZED, None),
    (State.DESTROYING, State.REVERTING),
)


@pytest.mark.parametrize("truly", TRULY)
@pytest.mark.parametrize("phase", PHASES)
def test_the_only_machine_is_never_destroyed_and_the_record_follows_it(phase: Phase, truly: str) -> None:
    """The move was undone, or confirmed, by what the old record held; its client's machine was lost, or destroyed."""
    made = at_state(*phase)
    hosts = Hosts(made, set(TRULY[truly]))
    hosts.play(e.TimedOut(at=1_500.0))
    instance = made.instance
    assert len(hosts.machines) == min(1, len(TRULY[truly])) or instance.state is State.RESIZED
    if truly == "arrived":
        assert (instance.state, instance.host_uuid, instance.attempt) == (State.ACTIVE, *DESTINATION)
        assert hosts.machines == {DESTINATION} and not instance.doubted
    if truly == "undone":
        assert (instance.state, instance.host_uuid, instance.attempt) == (State.ACTIVE, *SOURCE)
        assert hosts.machines == {SOURCE}
    if truly == "both":
        assert instance.state is State.RESIZED and hosts.machines == {SOURCE, DESTINATION}
        assert not instance.doubted and instance.deadline is not None, "its time to be confirmed begins anew"


@pytest.mark.parametrize("kind", [MoveKind.CONFIRM, MoveKind.REVERT])
@pytest.mark.parametrize("truly", ["arrived", "undone", "both"])
def test_a_client_who_confirms_or_reverts_is_refused_until_both_hosts_have_answered(kind: MoveKind, truly: str) -> None:
    made = at_state(State.RESIZED)
    hosts = Hosts(made, set(TRULY[truly]))
    hosts.play(request(kind, request_id=OTHER))
    (refusal,) = [one for one in made.commands if isinstance(one, MoveEvent) and one.kind is kind and one.terminal]
    assert (refusal.state, refusal.code) == (MoveState.REFUSED, IN_DOUBT)
    assert hosts.machines == TRULY[truly]
    if truly == "both":
        assert made.instance.state is State.RESIZED
        made.apply(request(kind, request_id=OTHER.replace("2", "4")), seen(OTHER.replace("2", "4")))
        assert made.instance.phase == (State.DESTROYING, State.ACTIVE if kind is MoveKind.CONFIRM else State.REVERTING)
    else:
        assert made.instance.state is State.ACTIVE
        assert made.instance.host_uuid == (DESTINATION if truly == "arrived" else SOURCE)[0]


@pytest.mark.parametrize("phase", PHASES[-2:])
def test_while_the_destination_is_silent_nothing_is_decided(phase: Phase) -> None:
    made = at_state(*phase)
    for seconds in (1_500.0, 2_500.0, 9_500.0):
        made.apply(e.TimedOut(at=seconds))
        if phase[0] is State.RESIZED:
            made.apply(spawned(attempt=1, at=seconds))  # the source has its machine; that proves nothing of the other
        assert made.instance.phase == phase and made.instance.deadline is not None
    assert all(one.unless_built for one in made.commands if isinstance(one, Destroy))


def test_a_report_of_the_destination_answers_as_well() -> None:
    made = at_state(State.DESTROYING, State.REVERTING)
    runs = e.HostRuns(at=1_500.0, attempt=2, host_uuid=host(2), service="s1", built=False)
    made.apply(runs)
    assert made.instance.phase == (State.DESTROYING, State.REVERTING), "one that is not complete may still go"
    made.apply(replace(runs, built=True))
    assert made.instance.state is State.RESIZED
    assert made.terminals[-1] == (MoveKind.REVERT, MoveState.FAILED, IN_DOUBT)


def test_a_move_that_began_after_the_set_back_is_like_any_other() -> None:
    """The doubt of a database that was set back once belongs to the move that was under way."""
    made = to_resized(auto_confirm_s=5.0)
    assert made.instance.move is not None
    later = replace(made.instance.move, began=SET_BACK_AT + 60.0)
    made.instance, made.context = replace(made.instance, doubted=True, move=later), AFTER
    made.apply(e.TimedOut(at=1_500.0))
    assert made.instance.phase == (State.DESTROYING, State.ACTIVE) and made.destroys[-1] == (1, host(1))


def undone_after_the_set_back() -> Scenario:
    """A record set back to before a move to host 2, which is moved once more and finds no host."""
    made = Scenario(active(), AFTER)
    made.apply(request(MoveKind.RESIZE, 3), refused(), e.Reverted(at=SET_BACK_AT + 60.0, attempt=2))
    assert (made.instance.state, made.instance.attempt, made.instance.last_attempt) == (State.ACTIVE, 1, 2)
    return made


def test_what_a_forgotten_move_left_is_kept_though_a_later_move_had_its_number() -> None:
    """Seed 81082: the record was then found lost on its old host, and the only machine taken for over and destroyed."""
    made = undone_after_the_set_back()
    undone = made.instance
    lost = made.apply(missed(undone), RELEASED).instance
    assert lost.state is State.FAILED
    for record in (undone, lost):
        assert not is_over(record, 2, host(2))
        assert is_over(replace(record, reused_from=0), 2, host(2))
        found = differences(report_of(2, on=2), [brief(record)], now=9e3, grace_s=30.0, deployment=DEPLOYMENT)
        assert [(one.kind, one.why) for one in found.unexplained] == [(UnexplainedKind.QUARANTINED, RENUMBERED)]
        made.instance = record
        assert not made.apply(spawned(attempt=2)).commands, "nor by the host's own late word"


def test_numbers_of_before_the_set_back_prove_as_ever_and_so_do_those_of_a_younger_build() -> None:
    moved = replace(undone_after_the_set_back().instance, attempt=4)
    assert is_over(moved, 1, host(1)) and not is_over(moved, 2, host(2))
    younger = Scenario(active(), replace(AFTER, set_back_at=-SET_BACK_AT))
    younger.apply(request(MoveKind.RESIZE, 3), refused(), e.Reverted(at=60.0, attempt=2))
    assert is_over(younger.instance, 2, host(2))


@pytest.mark.parametrize("state", [State.PREPARING, State.HANDING_OVER])
def test_a_delete_in_doubt_holds_the_allocation_of_a_destination_until_its_host_has_answered(state: State) -> None:
    """By the record it had been commanded nothing: it was released, and the machine that had gone on there ran."""
    made = at_state(state)
    made.apply(e.DeleteRequested(at=2_000.0, cause="delete"))
    assert made.instance.phase == (State.DESTROYING, State.DELETED)
    assert made.destroys == [(2, host(2)), (1, host(1))]
    gone = e.Destroyed(at=2_001.0, attempt=1, host_uuid=host(1), service="s1")
    made.apply(gone)
    assert made.instance.phase == (State.DESTROYING, State.DELETED)
    made.apply(replace(gone, attempt=2, host_uuid=host(2)))
    assert made.instance.state is State.RELEASING

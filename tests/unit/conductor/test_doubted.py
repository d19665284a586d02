"""Builds and moves in doubt: their cell's database was set back, so the record does not hold what is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.base import Message, Refusal
from bus.contracts.build import BuildState
from bus.contracts.cell import ComputeHosts, Destroy, FoundMachine, HostReport, Running, Spawn
from bus.contracts.moves import MACHINE_ABSENT, ChangeMachine, MoveEvent, MoveKind, MoveState
from bus.contracts.placement import Claim, Release, Revert
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Instance, Phase, State
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.domain.move_doubts import IN_DOUBT
from cell_conductor.domain.report import RENUMBERED, UnexplainedKind, differences, is_over
from cell_conductor.domain.rules import OUTCOME_UNKNOWN
from cell_conductor.domain.set_back import SetBack, numbered_on
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import question_of, step
from cell_conductor.store.port import Brief
from scheduler_worker.domain.builds import RecordedBuild, apply_announcement
from tests.unit.conductor.move_scenario import OTHER, Scenario, active, begun, refused, request, seen, to_resized
from tests.unit.conductor.move_scenario import claimed as move_claimed
from tests.unit.conductor.scenario import (
    DEPLOYMENT,
    PATIENCE,
    RELEASED,
    UUID,
    announced,
    claimed,
    destroys,
    failed,
    host,
    missed,
    queried,
    spawned,
    spawns,
)

# --- Builds in doubt: their cell's database was set back, so the record does not hold what their hosts have done
# since.


SET_BACK_AT = 1_000.0
LIMIT_S = 3_600.0
SILENT = {"s1": Lease(service="s1", epoch=1, state=LeaseState.SILENT, reason="why")}
AFTER = replace(PATIENCE, set_back=SetBack(SET_BACK_AT), doubt_limit_s=LIMIT_S)


def run_after(*happened: e.Event, start: Instance | None = None, down: bool = False) -> Step:
    stepped = Step(start or Instance(uuid=UUID))
    for event in happened:
        stepped = step(stepped.instance, event, replace(AFTER, down=SILENT if down else {}))
    return stepped


def requested(at: float) -> e.BuildRequested:
    return replace(queried(hosts=2, at=SET_BACK_AT + 100.0), requested_at=at)


def in_doubt() -> Instance:
    return run_after(requested(SET_BACK_AT - 10.0)).instance


def past(instance: Instance, seconds: float) -> e.TimedOut:
    return e.TimedOut(at=instance.since + seconds)


def brief(record: Instance) -> Brief:
    return Brief(
        record.uuid,
        record.state,
        record.host_uuid,
        "s1",
        record.attempt,
        record.since,
        newest=record.newest,
        doubted=record.doubted,
        reused_from=record.reused_from,
        machine_exists=record.machine_exists,
        then=record.then,
    )


def report_of(attempt: int, on: int = 1) -> ComputeHosts:
    machine = Running(instance_uuid=UUID, attempt=attempt, deployment=DEPLOYMENT)
    hosts = (HostReport(uuid=host(on), name=f"host-{on}", running=(machine,)),)
    return ComputeHosts(service="s1", cell="c1", epoch=1, sequence=1, hosts=hosts, complete=True)


def test_a_build_that_was_requested_before_a_set_back_waits_for_its_host() -> None:
    """The redelivered cell.build was timed out like any other: its machine was active and was built a second time."""
    first = run_after(requested(SET_BACK_AT - 10.0))
    assert spawns(first) == [(1, host(1))] and first.instance.doubted
    now = first
    for seconds in (61.0, 72.0, 90.0, 600.0):
        now = run_after(past(first.instance, seconds), start=now.instance)
        assert now.instance.state is State.BUILDING
        assert [c.unless_built for c in now.commands if isinstance(c, Destroy)] == [True]
    up = run_after(spawned(), start=now.instance)
    assert up.instance.state is State.ACTIVE and not up.instance.doubted


def test_a_build_under_a_later_attempt_is_one_that_this_database_has_lost() -> None:
    """Schedulers claim under attempt 1: this cell has claimed for it since, so it may have a machine."""
    late = replace(requested(SET_BACK_AT + 100.0), attempt=3)
    first = step(Instance(uuid=UUID), late, PATIENCE)  # the set-back is not known
    assert spawns(first) == [(3, host(1))] and first.instance.doubted
    assert not is_over(first.instance, 1, host(1)) and not is_over(first.instance, 2, host(2)), "nothing is destroyed"
    next_claim = question_of(run_after(failed(attempt=3, n=1), start=first.instance).instance)
    assert isinstance(next_claim, Claim) and next_claim.attempt == 4
    released = question_of(run_after(late, start=Instance(uuid=UUID, state=State.TOMBSTONE)).instance)
    assert isinstance(released, Release) and (released.attempt or 0) >= 3


def test_a_build_under_a_later_attempt_that_was_given_up_leaves_its_machine() -> None:
    """The next report had the machine destroyed that the client had as active."""
    late = replace(
        requested(SET_BACK_AT + 100.0), attempt=2, given_up=Refusal(code="broker.delivery_limit", reason="r")
    )
    over = step(Instance(uuid=UUID), late, PATIENCE)
    assert (over.instance.phase, over.commands) == ((State.RELEASING, State.FAILED), ())
    ended = step(over.instance, RELEASED, PATIENCE)
    (event,) = announced(ended)
    assert (event.state, event.code, event.terminal) == (BuildState.FAILED, OUTCOME_UNKNOWN, True)
    for record in (over.instance, ended.instance):
        for attempt, on in ((2, 1), (1, 1), (1, 2), (2, 2)):
            found = differences(report_of(attempt, on), [brief(record)], now=9e3, grace_s=30.0, deployment=DEPLOYMENT)
            assert [one.kind for one in found.unexplained] == [UnexplainedKind.QUARANTINED], (attempt, on)
            assert not is_over(record, attempt, host(on))
    first = step(Instance(uuid=UUID), replace(late, attempt=1), PATIENCE).instance
    assert isinstance(question_of(first), Release), "a scheduler's claim that no cell has built on is released"


def test_a_build_that_was_deleted_before_it_came_again_holds_its_claim_until_its_machine_is_gone() -> None:
    """The first delivery was carried out, and the database has lost it: the claim was released while it ran."""
    machine = FoundMachine(
        instance_uuid=UUID, host_uuid=host(1), host="host", service="s1", attempt=1, project_id="p", built=True
    )
    gone = Instance(uuid=UUID, state=State.TOMBSTONE)
    left = run_after(replace(requested(SET_BACK_AT - 10.0), found=(machine,)), start=gone)
    assert (left.instance.phase, destroys(left), question_of(left.instance)) == (
        (State.DESTROYING, State.DELETED),
        [(1, host(1))],
        None,
    )
    over = run_after(e.Destroyed(at=2e3, attempt=1, host_uuid=host(1), service="s1"), start=left.instance).instance
    assert (over.phase, isinstance(question_of(over), Release)) == ((State.RELEASING, State.DELETED), True)


def test_a_build_under_an_attempt_that_a_failed_one_had_is_not_built_on_what_that_has_released() -> None:
    over = replace(in_doubt(), state=State.FAILED, attempt=2, newest=3, requested_at=0.0)
    late = requested(SET_BACK_AT + 100.0)
    for attempt in (2, 3):
        again = run_after(replace(late, attempt=attempt, found=()), start=over)
        assert [one.state for one in announced(again)] == [BuildState.FAILED] and not spawns(again)
    assert spawns(run_after(replace(late, attempt=4, found=()), start=over)) == [(4, host(1))]
    for on in (2, 1):
        machine = FoundMachine(
            instance_uuid=UUID, host_uuid=host(on), host="host", service="s1", attempt=2, project_id="p", built=True
        )
        adopting = run_after(replace(late, attempt=2, found=(machine,)), start=over)
        assert adopting.instance.phase == (State.CLAIMING, State.ACTIVE) and not spawns(adopting)
        assert (adopting.instance.host_uuid, adopting.instance.next_attempt) == (host(on), 4)


def test_it_does_not_pass_over_its_first_host_because_that_is_silent_just_then() -> None:
    stepped = run_after(requested(SET_BACK_AT - 10.0), down=True)
    assert spawns(stepped) == [(1, host(1))] and stepped.instance.doubted


def test_a_build_that_was_requested_after_the_set_back_is_like_any_other() -> None:
    stepped = run_after(requested(SET_BACK_AT + 60.0))
    assert not stepped.instance.doubted
    assert run_after(
        past(stepped.instance, 61.0), past(stepped.instance, 72.0), start=stepped.instance
    ).instance.phase == (
        State.CLAIMING,
        State.BUILDING,
    )
    assert not step(Instance(uuid=UUID), requested(5.0), PATIENCE).instance.doubted, "never set back"


def test_clocks_may_be_apart() -> None:
    assert run_after(requested(SET_BACK_AT + 20.0)).instance.doubted


def given_up() -> Step:
    waiting = in_doubt()
    return run_after(past(waiting, 61.0), past(waiting, LIMIT_S + 1.0), start=waiting)


def test_a_doubted_build_on_a_dead_host_ends_and_nothing_is_destroyed() -> None:
    """It stayed `building` for ever."""
    over = given_up()
    assert over.instance.phase == (State.RELEASING, State.FAILED) and over.commands == ()
    failed = run_after(RELEASED, start=over.instance)
    (event,) = announced(failed)
    assert (event.state, event.code, event.terminal) == (BuildState.FAILED, OUTCOME_UNKNOWN, True)
    assert "silent" in event.reason and event.history[-1].outcome == "unknown"
    assert failed.instance.doubted


def test_the_limit_counts_from_the_set_back_and_not_from_the_build_in_the_backup() -> None:
    """A record of a day-old backup was given up after one unanswered question."""
    restored = replace(in_doubt(), since=SET_BACK_AT - 86_400.0, queried=True)
    assert run_after(e.TimedOut(at=SET_BACK_AT + 60.0), start=restored).instance.state is State.BUILDING


def test_what_its_host_runs_when_it_is_back_is_kept_in_quarantine() -> None:
    over = given_up().instance
    for record in (over, run_after(RELEASED, start=over).instance):
        found = differences(report_of(1), [brief(record)], now=9e3, grace_s=30.0, deployment=DEPLOYMENT)
        assert [one.kind for one in found.unexplained] == [UnexplainedKind.QUARANTINED]
        assert not found.events and not found.harmful
        assert not destroys(run_after(spawned(), start=record)), "nor by the host's own late word"


@pytest.mark.parametrize("is_queried", [True, False])
def test_what_a_second_service_of_the_same_name_has_answered_for_is_kept_when_it_is_listed(*, is_queried: bool) -> None:
    """It was destroyed with the first service's next report, though a client had it as active (seed 1795360332)."""
    restored = replace(in_doubt(), reused_from=0)
    if is_queried:
        restored = run_after(past(restored, 61.0), start=restored).instance
    ended = run_after(e.Destroyed(at=restored.since + 70.0, attempt=1, host_uuid=host(1), service="s1"), start=restored)
    assert ended.instance.phase == (State.CLAIMING, State.BUILDING) and not destroys(ended), (
        "an order would wait for the first service"
    )
    second = run_after(claimed(2), start=ended.instance)
    records = [second.instance, run_after(spawned(2), start=second.instance).instance]
    again = run_after(
        e.Destroyed(at=restored.since + 99.0, attempt=2, host_uuid=host(2), service="s1"), start=second.instance
    )
    records += [again.instance, run_after(RELEASED, start=again.instance).instance]
    assert [one.state for one in records] == [State.BUILDING, State.ACTIVE, State.RELEASING, State.FAILED]
    for record in records:
        for attempt, on in ((1, 1), (2, 2))[: 2 if record.state is State.FAILED else 1]:
            found = differences(report_of(attempt, on), [brief(record)], now=9e3, grace_s=30.0, deployment=DEPLOYMENT)
            assert [one.kind for one in found.unexplained] == [UnexplainedKind.QUARANTINED], record.state
            assert not found.events and not found.harmful
            assert not destroys(run_after(spawned(attempt, on), start=record))
    deleted = run_after(e.DeleteRequested(at=9e3), start=records[-1]).instance
    assert is_over(deleted, 1, host(1)), "its client wants neither"


def announced_to(build: RecordedBuild, *stepped: Step) -> RecordedBuild:
    for one in stepped:
        for event in announced(one):
            build = apply_announcement(build, event, "c1")[0]
    return build


@pytest.mark.parametrize("forgotten", ["the whole build", "its end"])
def test_the_end_of_a_build_reaches_schedulers_though_they_have_had_one_of_that_number(forgotten: str) -> None:
    """It was numbered as the `active` that the cell had forgotten: the schedulers had it active for ever."""
    building = run_after(requested(SET_BACK_AT + 100.0))
    up = run_after(spawned(), start=building.instance)
    top = RecordedBuild(instance_uuid=UUID, project_id="p", state=BuildState.SCHEDULED, sequence=2, cell="c1")
    top = announced_to(top, building, up)
    assert (top.state, top.terminal) == (BuildState.ACTIVE, True)
    again = (
        run_after(requested(SET_BACK_AT - 10.0)).instance
        if forgotten == "the whole build"
        else replace(numbered_on(building.instance), doubted=True)
    )
    over = run_after(past(again, 61.0), past(again, LIMIT_S + 1e6), start=again)
    top = announced_to(top, run_after(RELEASED, start=over.instance))
    assert (top.state, top.code) == (BuildState.FAILED, OUTCOME_UNKNOWN)


def test_its_client_may_still_delete_it_and_then_the_machine_goes() -> None:
    failed = run_after(RELEASED, start=given_up().instance).instance
    deleted = run_after(e.DeleteRequested(at=9e3), start=failed).instance
    assert deleted.state is State.DELETED and is_over(deleted, 1, host(1))


def test_a_failure_that_its_host_has_reported_leaves_no_doubt() -> None:
    waiting = in_doubt()
    failed = replace(run_after(RELEASED, start=given_up().instance).instance, doubted=False)
    assert is_over(failed, 1, host(1))
    gone = run_after(e.Destroyed(at=2e3, attempt=1, host_uuid=host(1), service="s1"), start=waiting)
    assert run_after(claimed(), start=gone.instance).instance.state is State.BUILDING


def test_what_a_forgotten_move_left_on_its_destination_is_kept_though_the_record_numbers_on() -> None:
    """A record that was set back to the middle of a move undid it, and took the only machine for over."""
    undone = replace(run_after(requested(SET_BACK_AT + 100.0), spawned()).instance, doubted=True, newest=3)
    assert undone.state is State.ACTIVE and undone.last_attempt == 3
    lost = run_after(missed(undone), RELEASED, start=undone)
    assert lost.instance.state is State.FAILED
    for record in (undone, lost.instance):
        assert not is_over(record, 2, host(2))
        assert is_over(replace(record, doubted=False), 2, host(2))
        found = differences(report_of(2, on=2), [brief(record)], now=9e3, grace_s=30.0, deployment=DEPLOYMENT)
        assert [(one.kind, one.why) for one in found.unexplained] == [(UnexplainedKind.QUARANTINED, RENUMBERED)]
    assert is_over(run_after(e.DeleteRequested(at=9e3), start=lost.instance).instance, 2, host(2))


# --- Moves in doubt: their cell's database was set back in the middle of one, and only the two hosts know its end.


AFTER_MOVE = replace(PATIENCE, set_back=SetBack(SET_BACK_AT))
SOURCE, DESTINATION = (host(1), 1), (host(2), 2)
ROUNDS = 40


def at_state(state: State, then: State | None = None) -> Scenario:
    """A cold migration from host 1 to host 2, in this state, whose record was set back to there."""
    made = begun(MoveKind.MIGRATE, 2, 3, auto_confirm_s=5.0)
    made.apply(move_claimed())
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
    made.context = AFTER_MOVE
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
    made.instance, made.context = replace(made.instance, doubted=True, move=later), AFTER_MOVE
    made.apply(e.TimedOut(at=1_500.0))
    assert made.instance.phase == (State.DESTROYING, State.ACTIVE) and made.destroys[-1] == (1, host(1))


def undone_after_the_set_back() -> Scenario:
    """A record set back to before a move to host 2, which is moved once more and finds no host."""
    made = Scenario(active(), AFTER_MOVE)
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
    younger = Scenario(active(), replace(AFTER_MOVE, set_back=SetBack(-SET_BACK_AT)))
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

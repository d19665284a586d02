"""A fence of a host: what waits for the host's word ends, what is active stays, and what it may have kept is a loss."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.base import Message
from bus.contracts.build import BuildState
from bus.contracts.cell import Destroy, Spawn
from bus.contracts.fences import EvacuationPolicy
from bus.contracts.moves import ChangeKind, ChangeMachine, MoveKind, MoveState
from bus.contracts.placement import Claim, Release, Revert
from cell_conductor.domain import events as e
from cell_conductor.domain.evacuations import is_evacuated_from, relied_on
from cell_conductor.domain.fence_steps import FenceSteps
from cell_conductor.domain.fences import FENCED, Fence, RunningAfterFence, losses_of
from cell_conductor.domain.instance import Instance, Power, State
from cell_conductor.domain.table import question_of, step
from cell_conductor.domain.way_back import SourceQuery
from tests.unit.conductor.move_scenario import (
    OTHER,
    SERVICE_DOWN,
    Scenario,
    active,
    begun,
    claimed,
    ended,
    request,
    seen,
    selection,
    to_resized,
)
from tests.unit.conductor.scenario import DELETE, PATIENCE, UUID, announced, destroys, host, queried, run, spawned


def fenced(*numbers: int) -> dict[str, Fence]:
    return {host(n): Fence(host_uuid=host(n), host=f"host-{n}", version=1) for n in numbers}


def found_running(attempt: int = 1, version: int = 1) -> dict[str, dict[str, RunningAfterFence]]:
    """On host 1, by its service; a second one with a host of this uuid has found nothing there."""
    found = RunningAfterFence(version, {UUID: attempt})
    return {host(1): {active().here.service: found, "another": RunningAfterFence(version, {})}}


def fence(n: int, at: float = 300.0) -> e.HostFenced:
    return e.HostFenced(at=at, host_uuid=host(n))


def lost(before: Instance, after: Instance, n: int) -> list[tuple[str, int]]:
    return [(one.host_uuid, one.attempt) for one in losses_of(before, after, host(n), 300.0)]


def test_a_delete_on_a_fenced_host_ends_without_its_answer_and_records_that() -> None:
    before = run(queried(hosts=1), spawned(), DELETE).instance
    stepped = run(fence(1), start=before)
    assert (stepped.instance.phase, isinstance(question_of(stepped.instance), Release)) == (
        (State.RELEASING, State.DELETED),
        True,
    )
    ended = run(e.Released(at=301.0), start=stepped.instance)
    (event,) = announced(ended)
    assert (event.state, event.terminal) == (BuildState.DELETED, True)
    assert (event.history[-1].outcome, event.history[-1].code, event.history[-1].host) == ("fenced", FENCED, "host-1")
    assert lost(before, stepped.instance, 1) == [(host(1), 1)]


def test_a_build_leaves_a_fenced_host_even_when_its_record_is_doubted() -> None:
    before = replace(run(queried()).instance, doubted=True)
    stepped = run(fence(1), start=before)
    assert (stepped.instance.phase, destroys(stepped)) == ((State.CLAIMING, State.BUILDING), [(1, host(1))])
    assert stepped.instance.history[-1].code == FENCED
    assert lost(before, stepped.instance, 1) == [(host(1), 1)]


def test_a_build_without_another_host_fails() -> None:
    stepped = run(queried(hosts=1), fence(1))
    assert stepped.instance.phase == (State.RELEASING, State.FAILED)


def test_nothing_is_commanded_on_a_fenced_host() -> None:
    context = replace(PATIENCE, fences=fenced(1, 2))
    stepped = step(Instance(uuid=UUID), queried(), context)
    claim = question_of(stepped.instance)
    assert not [one for one in stepped.commands if isinstance(one, Spawn)]
    assert isinstance(claim, Claim)
    assert [list(option.allocations) for option in claim.options] == [[host(3)]]
    alone = step(Instance(uuid=UUID), queried(hosts=2), context)
    assert (alone.instance.phase, alone.instance.code) == ((State.RELEASING, State.FAILED), "max_retries_exceeded")
    assert not alone.commands


@pytest.mark.parametrize("policy", [None, EvacuationPolicy.WAIT, EvacuationPolicy.RESTART])
def test_an_active_instance_stays_on_record(policy: EvacuationPolicy | None) -> None:
    before = active()
    assert before.spec is not None
    before = replace(before, spec=replace(before.spec, on_host_failure=policy))
    assert run(fence(1), start=before).instance is before


def test_an_active_instance_whose_policy_is_to_fail_has_failed() -> None:
    before = active()
    assert before.spec is not None
    before = replace(before, spec=replace(before.spec, on_host_failure=EvacuationPolicy.FAIL))
    stepped = run(fence(1), start=before)
    assert (stepped.instance.phase, stepped.instance.code) == ((State.RELEASING, State.FAILED), FENCED)
    assert destroys(stepped) == [(1, host(1))]  # waits in its queue
    assert lost(before, stepped.instance, 1) == [(host(1), 1)]
    assert run(fence(2), start=before).instance is before


def test_an_evacuation_needs_a_fence_on_this_record_and_then_no_silence() -> None:
    made = Scenario(active(), replace(PATIENCE, fences=fenced(1)))
    made.apply(request(MoveKind.EVACUATE, 2))
    assert made.instance.phase == (State.CLAIMING, State.PREPARING)
    other = Scenario(active(), replace(PATIENCE, fences=fenced(2)))
    other.apply(request(MoveKind.EVACUATE, 2))
    assert other.terminals == [(MoveKind.EVACUATE, MoveState.REFUSED, "evacuate.not_fenced")]


def test_what_runs_on_a_fenced_host_all_the_same_is_not_evacuated_unless_forced() -> None:
    """It would run twice: the report is proof that the fence did not hold."""
    there = replace(PATIENCE, fences=fenced(1), still_running=found_running())
    made = Scenario(active(), there)
    made.apply(request(MoveKind.EVACUATE, 2))
    assert made.terminals == [(MoveKind.EVACUATE, MoveState.REFUSED, "evacuate.still_running")]
    assert made.instance.state is State.ACTIVE
    older = Scenario(active(), replace(there, still_running=found_running(active().attempt - 1)))
    forced = Scenario(active(), there)
    older.apply(request(MoveKind.EVACUATE, 2))
    forced.apply(request(MoveKind.EVACUATE, 2, force=True))
    assert older.instance.phase == forced.instance.phase == (State.CLAIMING, State.PREPARING)


def test_the_source_of_an_evacuation_is_released_with_the_fence() -> None:
    made = Scenario(active(), replace(PATIENCE, fences=fenced(1)))
    made.apply(request(MoveKind.EVACUATE, 2), claimed())
    made.end(2, 2)
    before = made.instance
    made.apply(spawned(attempt=2, at=210.0), fence(1))
    assert made.instance.phase == (State.RELEASING, State.ACTIVE)
    assert made.destroys == [(1, host(1))]  # for when it comes back
    assert lost(before, made.instance, 1) == [(host(1), 1)]


def test_an_evacuation_whose_fence_is_lifted_before_a_destination_is_commanded_is_undone() -> None:
    """Its host may run it again."""
    made = Scenario(active(), replace(PATIENCE, fences=fenced(1)))
    made.apply(request(MoveKind.EVACUATE, 2, 3), claimed())
    made.context = PATIENCE
    made.end(2, 2)
    assert made.instance.state is State.REVERTING
    assert not made.spawns
    assert made.terminals == []
    made.apply(e.Reverted(at=203.0, attempt=3, consumer_generation=10))
    assert made.instance.state is State.ACTIVE
    assert made.instance.host_uuid == host(1)
    assert made.terminals == [(MoveKind.EVACUATE, MoveState.FAILED, "evacuate.not_fenced")]


def test_an_evacuation_on_a_clients_statement_is_undone_when_the_service_is_back() -> None:
    there = replace(selection(2), service="s2")
    made = Scenario(active(), SERVICE_DOWN)
    made.apply(request(MoveKind.EVACUATE, fenced=True, selections=(there,)), claimed())
    down = made.instance
    made.context = PATIENCE
    made.end(2, 2)
    assert made.instance.move is not None
    assert made.instance.move.lost_code == "evacuate.service_up"
    assert not made.spawns
    still = Scenario(down, SERVICE_DOWN)
    still.end(2, 2)
    assert still.instance.state is State.FINISHING


def test_the_step_that_commands_the_destination_of_an_evacuation_holds_the_fence() -> None:
    """Another conductor may be lifting it."""
    context = replace(PATIENCE, fences=fenced(1))
    made = Scenario(active(), context)
    made.apply(request(MoveKind.EVACUATE, 2), claimed())
    steps, event = FenceSteps(), ended(made.instance, 2, 2)
    followed = steps.follow(made.instance, step(made.instance, event, context), event, context)
    assert followed.instance.state is State.FINISHING
    assert list(steps.hosts) == [host(1)]
    assert not steps.losses
    assert is_evacuated_from(followed.instance, host(1))
    assert not is_evacuated_from(followed.instance, host(2))


@pytest.mark.parametrize("is_last", [False, True])
def test_a_destination_that_is_fenced_is_given_up(is_last: bool) -> None:
    made = begun(MoveKind.MIGRATE, *((2,) if is_last else (2, 3)))
    made.apply(claimed())
    made.end(2, 2)
    made.end(1, 1)
    assert made.instance.state is State.FINISHING
    before = made.instance
    made.apply(fence(2))
    follows = (State.DESTROYING, State.REVERTING) if is_last else (State.CLAIMING, State.PREPARING)
    assert (made.instance.phase, made.destroys) == (follows, [(2, host(2))])
    if is_last:
        made.apply(fence(2))
        assert isinstance(question_of(made.instance), Revert)
    assert lost(before, made.instance, 2) == [(host(2), 2)]


def test_a_destination_that_was_only_queried_is_passed_over() -> None:
    made = begun(MoveKind.MIGRATE, 2, 3)
    made.apply(claimed(), fence(2))
    assert (made.instance.phase, made.destroys) == ((State.CLAIMING, State.PREPARING), [])


def test_a_source_that_is_fenced_before_it_handed_over_ends_the_move_on_record_there() -> None:
    made = begun(MoveKind.MIGRATE, 2, 3)
    made.apply(claimed())
    made.end(2, 2)
    made.apply(fence(1), e.Reverted(at=301.0, attempt=3))
    assert made.instance.state is State.RESTARTING
    made.apply(fence(1))
    assert (made.instance.state, made.instance.host_uuid, made.instance.move) == (State.ACTIVE, host(1), None)
    assert made.terminals == [(MoveKind.MIGRATE, MoveState.FAILED, FENCED)]


def test_a_migration_that_is_not_confirmed_goes_back_from_a_fenced_destination() -> None:
    made = to_resized()
    made.apply(fence(2), fence(2))
    assert isinstance(question_of(made.instance), SourceQuery)
    made.context = replace(PATIENCE, fences=fenced(2))
    made.apply(seen(""), fence(2))
    assert isinstance(question_of(made.instance), Revert)
    made.apply(e.Reverted(at=301.0, attempt=3))
    (start,) = [one for one in made.commands[-2:] if isinstance(one, ChangeMachine)]
    assert start.host_uuid == host(1)


@pytest.mark.parametrize("kind", [MoveKind.STOP, MoveKind.SHELVE])
def test_a_change_on_a_fenced_host_has_failed(kind: MoveKind) -> None:
    made = begun(kind)
    made.apply(fence(1))
    assert (made.instance.state, made.terminals) == (State.ACTIVE, [(kind, MoveState.FAILED, FENCED)])


def test_an_offload_on_a_fenced_host_releases() -> None:
    made = begun(MoveKind.SHELVE, offload=True)
    made.end(1, 1, runs=False, image="kept")
    before = made.instance
    made.apply(fence(1))
    assert isinstance(question_of(made.instance), Release)
    assert lost(before, made.instance, 1) == [(host(1), 1)]


@pytest.mark.parametrize("kind", [MoveKind.EVACUATE, MoveKind.OFFLOAD])
def test_what_is_shelved_on_a_fenced_host_gives_the_host_up(kind: MoveKind) -> None:
    """Nothing of it is started elsewhere, whatever hosts the request names."""
    made = begun(MoveKind.SHELVE)
    made.end(1, 1, runs=False, image="kept")
    context = replace(PATIENCE, fences=fenced(1))
    steps = FenceSteps()
    gives_up = request(kind, 2, request_id=OTHER)
    gone = steps.follow(made.instance, step(made.instance, gives_up, context), gives_up, context)
    assert isinstance(question_of(gone.instance), Release)
    assert [(one.host_uuid, one.attempt) for one in steps.losses] == [(host(1), 1)]
    assert list(steps.proofs) == ([host(1)] if kind is MoveKind.EVACUATE else []), "only while the fence is in force"
    made.context = context
    made.instance = gone.instance
    made.apply(e.Released(at=400.0))
    assert made.instance.state is State.OFFLOADED and made.instance.image == "kept"
    assert made.terminals[-1] == (kind, MoveState.DONE, "")


@pytest.mark.parametrize("lifting", [False, True])
@pytest.mark.parametrize("power", [Power.RUNNING, Power.SHELVED])
def test_an_evacuation_relies_on_no_fence_that_is_being_lifted(power: Power, lifting: bool) -> None:
    """The client states that the host is off. A proof on a fence that is to be lifted would never be recorded."""
    fences = {host(1): replace(fenced(1)[host(1)], lifting=lifting)}
    context = replace(PATIENCE, fences=fences, down=SERVICE_DOWN.down)
    made = Scenario(replace(active(), power=power), context)
    before = made.instance
    made.apply(request(MoveKind.EVACUATE, fenced=True, selections=(replace(selection(2), service="s2"),)))
    if power is Power.RUNNING:
        made.apply(claimed())
        before = made.instance
        made.end(2, 2)
    assert made.instance.state is (State.FINISHING if power is Power.RUNNING else State.DESTROYING)
    assert list(relied_on(before, made.instance, fences)) == ([] if lifting else [host(1)])


def test_a_shelved_instance_is_not_evacuated_from_a_host_that_may_be_on() -> None:
    """Its fence was lifted before the request arrived: the shelved machine is there."""
    made = begun(MoveKind.SHELVE)
    made.end(1, 1, runs=False, image="kept")
    made.apply(request(MoveKind.EVACUATE, 2, request_id=OTHER))
    assert made.terminals[-1] == (MoveKind.EVACUATE, MoveState.REFUSED, "evacuate.not_fenced")
    assert made.instance.state is State.ACTIVE


def test_a_delete_of_what_moves_ends_when_both_hosts_have_confirmed_or_are_fenced() -> None:
    made = to_resized()
    made.apply(DELETE, fence(1))
    assert made.instance.phase == (State.DESTROYING, State.DELETED)
    made.apply(e.Destroyed(at=302.0, attempt=2, host_uuid=host(2), service="s1"))
    assert made.instance.phase == (State.RELEASING, State.DELETED)
    assert [one.host for one in made.instance.history if one.code == FENCED] == ["host-1"]


def test_what_is_still_wanted_there_is_no_loss() -> None:
    before = active()
    assert lost(before, before, 1) == []
    assert [one for one in destroys(run(fence(1), start=before)) if isinstance(one, Destroy)] == []
    assert selection(1).service == "s1"


def follow(made: Scenario, *happened: e.Event, fences: dict[str, Fence]) -> tuple[Message, ...]:
    """The messages after these, as an engine takes them while the hosts are fenced."""
    context, sent = replace(PATIENCE, fences=fences), ()
    for event in happened:
        before = made.instance
        followed = FenceSteps().follow(before, step(before, event, context), event, context)
        made.instance, sent = followed.instance, (*sent, *followed.commands)
    return sent


def changes_on(sent: tuple[Message, ...], n: int) -> list[ChangeKind]:
    return [one.change for one in sent if isinstance(one, ChangeMachine) and one.host_uuid == host(n)]


def test_a_move_that_is_undone_starts_nothing_on_its_fenced_source() -> None:
    """The host was back before its fence was lifted, started the machine, and the evacuation started a second one."""
    made = Scenario(active())
    sent = follow(
        made,
        request(MoveKind.LIVE_MIGRATE, 2),
        claimed(),
        e.ChangeEnded(at=202.0, attempt=2, order=0, host_uuid=host(2), service="s1", done=True),
        fences=fenced(1),
    )
    assert made.instance.move is not None
    order = made.instance.move.order
    checked = e.ChangeEnded(at=203.0, attempt=2, order=order, host_uuid=host(2), service="s1", done=True)
    sent += follow(made, checked, e.Reverted(at=204.0, attempt=3), fences=fenced(1))
    assert (made.instance.state, made.instance.host_uuid) == (State.ACTIVE, host(1))
    assert changes_on(sent, 1) == [ChangeKind.HAND_OVER_LIVE, ChangeKind.STOP]


def test_a_start_that_waits_in_the_queue_of_a_fenced_host_is_followed_by_a_stop() -> None:
    made = begun(MoveKind.STOP)
    made.end(1, 1, runs=False)
    made.apply(request(MoveKind.START, request_id=OTHER))
    waiting = made.instance.order
    sent = follow(made, fence(1), fences=fenced(1))
    assert made.instance.state is State.ACTIVE
    (stop,) = [one for one in sent if isinstance(one, ChangeMachine)]
    assert (stop.change, stop.host_uuid, stop.attempt) == (ChangeKind.STOP, host(1), 1)
    assert stop.order == made.instance.order > waiting


def test_a_change_that_is_requested_on_a_fenced_host_starts_nothing() -> None:
    for kind in (MoveKind.REBUILD, MoveKind.RESCUE):
        made = Scenario(active())
        sent = follow(made, request(kind), fences=fenced(1))
        assert (made.instance.state, changes_on(sent, 1)) == (State.ACTIVE, [ChangeKind.STOP])

"""Changes in place and machines that are lost while they move, as scenarios of the table."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from bus.contracts.cell import InstanceSpec
from bus.contracts.deploy import ImageSource
from bus.contracts.fences import EvacuationPolicy
from bus.contracts.moves import RESCUE_FAILED, ChangeKind, ChangeMachine, Condition, MoveEvent, MoveKind, MoveState
from bus.contracts.placement import Claim, ClaimOutcome, Release
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Power, State
from cell_conductor.domain.leases import LeaseState
from cell_conductor.domain.move_events import condition_of
from cell_conductor.domain.report import is_over, rescan_id
from cell_conductor.domain.table import question_of
from tests.unit.conductor.move_scenario import (
    MOVE,
    OTHER,
    SERVICE_DOWN,
    Scenario,
    active,
    announced,
    begun,
    changes,
    claimed,
    refused,
    request,
    seen,
    to_resized,
)
from tests.unit.conductor.scenario import PATIENCE, SPEC, UUID, host, missed, selection, spawned
from tests.unit.conductor.test_table_fences import fenced

# --- Changes of a machine in place, as scenarios of the table: resized, stopped, rescued, shelved, rebuilt.


def test_a_resize_in_place_has_one_machine() -> None:
    made = begun(MoveKind.RESIZE, 1, spec=replace(SPEC, flavor="larger"))
    (resize,) = changes(made.apply(claimed()))
    assert (resize.change, resize.attempt, resize.host_uuid, resize.spec.flavor) == (
        ChangeKind.RESIZE,
        1,
        host(1),
        "larger",
    )
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.attempt, made.spawns) == (State.RESIZED, 1, [])
    assert not is_over(made.instance, 1, host(1))
    made.apply(request(MoveKind.CONFIRM, request_id=OTHER))
    assert made.instance.phase == (State.RELEASING, State.ACTIVE)
    made.apply(e.Released(at=230.0, consumer=MOVE))
    assert made.instance.spec is not None
    assert (made.instance.state, made.instance.spec.flavor, made.destroys) == (State.ACTIVE, "larger", [])


LARGER = replace(
    SPEC,
    flavor="larger",
    image="as-built",
    root_gb=40,
    traits=("CUSTOM_B",),
    capabilities={"boot_mode": "uefi"},
    on_host_failure=EvacuationPolicy.FAIL,
)


@pytest.mark.parametrize("kind", [MoveKind.RESIZE, MoveKind.MIGRATE, MoveKind.EVACUATE])
def test_a_destination_is_told_all_of_the_flavor_that_it_was_chosen_for(kind: MoveKind) -> None:
    """And the image that the instance has: a later evacuation deployed by the old traits and root disk."""
    rebuilt = replace(SPEC, image="now", image_source=ImageSource(source="http://images/now"), root_gb=20)
    made = Scenario(replace(active(), spec=rebuilt), replace(PATIENCE, fences=fenced(1)))
    made.apply(request(kind, 2, spec=LARGER))
    assert made.instance.phase == (State.CLAIMING, State.PREPARING)
    assert made.instance.spec == replace(LARGER, image="now", image_source=rebuilt.image_source)
    assert made.instance.move is not None and made.instance.move.spec == rebuilt


@pytest.mark.parametrize(
    ("image", "named", "source"),
    [("new", "http://images/2", "http://images/2"), ("new", None, None), ("old", None, "http://images/1")],
)
def test_a_rebuild_replaces_the_source_of_its_image(image: str, named: str | None, source: str | None) -> None:
    """The old one stayed and won over the new image; the same image again is from where it was."""
    old = replace(SPEC, image="old", image_source=ImageSource(source="http://images/1"), root_gb=20)
    target = replace(LARGER, image=image, image_source=None if named is None else ImageSource(source=named))
    made = Scenario(replace(active(), spec=old))
    (rebuild,) = changes(made.apply(request(MoveKind.REBUILD, spec=target)))
    wanted = replace(old, image=image, image_source=None if source is None else ImageSource(source=source))
    assert rebuild.spec == made.instance.spec == wanted


def test_a_reverted_resize_in_place_is_given_its_old_size_before_the_book_is() -> None:
    made = begun(MoveKind.RESIZE, 1, spec=replace(SPEC, flavor="larger"))
    made.apply(claimed())
    made.end(1, 1, runs=True)
    (back,) = changes(made.apply(request(MoveKind.REVERT, request_id=OTHER), seen()))
    assert (back.change, back.spec.flavor, made.instance.then) == (ChangeKind.RESIZE, "", State.REVERTING)
    made.end(1, 1, done=False)
    assert made.instance.phase == (
        State.DESTROYING,
        State.REVERTING,
    )  # until it has its old size the larger claim is kept
    made.apply(e.TimedOut(at=400.0))
    made.end(1, 1, runs=True)
    made.apply(e.Reverted(at=401.0, attempt=3))
    assert (made.instance.state, made.instance.attempt, made.destroys) == (State.ACTIVE, 1, [])


def test_an_old_size_that_no_host_confirms_is_commanded_less_and_less_often() -> None:
    """Its host had burnt down: one command every 30 s was left in the queue of its service (seed 1795337330120)."""
    made = begun(MoveKind.RESIZE, 1, spec=replace(SPEC, flavor="larger"))
    made.apply(claimed())
    made.end(1, 1, runs=True)
    made.apply(request(MoveKind.REVERT, request_id=OTHER), seen())
    waits, now = [], made.instance.since
    while len(waits) < 7:
        assert (made.instance.phase, made.instance.deadline is None) == ((State.DESTROYING, State.REVERTING), False)
        waits.append((made.instance.deadline or 0.0) - now)
        now += waits[-1]
        (back,) = changes(made.apply(e.TimedOut(at=now)))
        assert (back.change, back.spec.flavor) == (ChangeKind.RESIZE, "")
    assert waits == [30.0, 30.0, 60.0, 120.0, 240.0, 480.0, 600.0]


def test_a_machine_that_is_gone_is_not_waited_for_to_take_its_old_size() -> None:
    made = begun(MoveKind.RESIZE, 1, 2, spec=replace(SPEC, flavor="larger"))
    made.apply(claimed())
    made.end(1, 1, done=False, code="machine.absent", runs=False)
    made.apply(refused(3))
    made.end(1, 1, done=False, code="machine.absent", runs=False)
    assert made.instance.state is State.REVERTING


@pytest.mark.parametrize(
    ("kind", "change", "power"),
    [
        (MoveKind.STOP, ChangeKind.STOP, Power.STOPPED),
        (MoveKind.REBUILD, ChangeKind.REBUILD, Power.RUNNING),
        (MoveKind.SHELVE, ChangeKind.SNAPSHOT, Power.SHELVED),
        (MoveKind.RESCUE, ChangeKind.RESCUE, Power.RESCUED),
        (MoveKind.UNRESCUE, ChangeKind.UNRESCUE, Power.RUNNING),
    ],
)
def test_what_is_done_in_place(kind: MoveKind, change: ChangeKind, power: Power) -> None:
    made = begun(kind, spec=replace(SPEC, image="new") if kind is MoveKind.REBUILD else None)
    (order,) = [one for one in made.commands if isinstance(one, ChangeMachine)]
    assert (order.change, order.attempt) == (change, 1)
    made.apply(e.TimedOut(at=600.0))
    assert made.terminals == [(kind, MoveState.FAILED, "change.timeout")]
    made.end(1, 1, runs=power in (Power.RUNNING, Power.RESCUED), image="kept")
    assert (made.instance.state, made.instance.power) == (State.ACTIVE, power)
    assert len(made.terminals) == 1


def rescued() -> Scenario:
    made = begun(MoveKind.RESCUE, rescue_password="sesame")
    made.end(1, 1, runs=True)
    return made


def test_a_rescued_instance_is_unrescued_first_and_its_password_is_forgotten() -> None:
    made = begun(MoveKind.RESCUE, rescue_password="sesame")
    (order,) = [one for one in made.commands if isinstance(one, ChangeMachine)]
    assert (order.change, order.rescue_password) == (ChangeKind.RESCUE, "sesame")
    made.end(1, 1, runs=True)
    assert b"sesame" not in msgspec.json.encode(made.instance)
    assert condition_of(made.instance) is Condition.RESCUED
    refusal = made.apply(request(MoveKind.STOP, request_id=OTHER))
    assert announced(*refusal.commands) == [(MoveKind.STOP, MoveState.REFUSED, True, "instance.rescued")]
    (order,) = changes(made.apply(request(MoveKind.UNRESCUE, request_id=UUID)))
    assert (order.change, order.rescue_password) == (ChangeKind.UNRESCUE, "")


@pytest.mark.parametrize(
    ("made", "kind", "code", "runs", "power"),
    [
        (None, MoveKind.RESCUE, RESCUE_FAILED, False, Power.RESCUED),
        (None, MoveKind.RESCUE, "node.refused", True, Power.RUNNING),
        (rescued, MoveKind.UNRESCUE, RESCUE_FAILED, True, Power.RESCUED),
        (rescued, MoveKind.UNRESCUE, "node.refused", True, Power.RESCUED),
    ],
)
def test_what_is_left_of_a_rescue_that_failed(
    made: Callable[[], Scenario] | None, kind: MoveKind, code: str, runs: bool, power: Power
) -> None:
    """From a rescue that was begun, unrescuing is the way back; one that was refused has changed nothing."""
    there = Scenario(active()) if made is None else made()
    there.apply(request(kind, request_id=OTHER, rescue_password="sesame"))
    there.end(1, 1, done=False, code=code, runs=runs)
    assert (there.instance.state, there.instance.power) == (State.ACTIVE, power)


def test_what_is_so_already_is_done_at_once() -> None:
    made = begun(MoveKind.START)
    assert (made.terminals, made.instance.state) == ([(MoveKind.START, MoveState.DONE, "")], State.ACTIVE)


def offloaded() -> Scenario:
    made = begun(MoveKind.SHELVE, offload=True)
    made.end(1, 1, runs=False, image="kept")
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.OFFLOADED), [(1, host(1))])
    made.apply(e.Destroyed(at=210.0, attempt=1, host_uuid=host(1), service="s1"))
    assert isinstance(question_of(made.instance), Release)
    made.apply(e.Released(at=211.0, consumer=UUID))
    return made


def test_an_offloaded_instance_holds_nothing_and_is_unshelved_from_its_image() -> None:
    made = offloaded()
    assert (made.instance.state, question_of(made.instance)) == (State.OFFLOADED, None)
    assert made.terminals == [(MoveKind.SHELVE, MoveState.DONE, "")]
    assert is_over(made.instance, 1, host(1))
    made.apply(request(MoveKind.UNSHELVE, 2, 3, request_id=OTHER))
    question = question_of(made.instance)
    assert isinstance(question, Claim)
    assert (question.consumer_generation, question.migration, question.release_first) == (None, None, False)
    made.apply(claimed(question.attempt))
    made.end(2, question.attempt)
    (spawn,) = made.spawns
    assert spawn.origin is not None
    assert (spawn.origin.image, spawn.host_uuid) == ("kept", host(2))
    made.apply(spawned(attempt=question.attempt, n=2, at=230.0))
    assert (made.instance.state, made.instance.power, made.instance.host_uuid) == (
        State.ACTIVE,
        Power.RUNNING,
        host(2),
    )


@pytest.mark.parametrize("is_claimed", [False, True])
def test_what_is_deleted_before_its_unshelving_has_commanded_a_host_has_no_machine_to_destroy(
    *, is_claimed: bool
) -> None:
    made = offloaded()
    made.apply(request(MoveKind.UNSHELVE, 2, request_id=OTHER))
    if is_claimed:
        made.apply(claimed(made.instance.next_attempt))
        assert made.instance.state is State.PREPARING
    made.apply(e.DeleteRequested(at=150.0))
    if not is_claimed:  # the claim may be granted yet
        made.apply(claimed(made.instance.next_attempt))
    assert made.instance.phase == (State.RELEASING, State.DELETED)


def test_an_unshelving_on_hosts_chosen_for_another_flavor_is_refused() -> None:
    made = offloaded()
    made.instance = replace(made.instance, spec=replace(SPEC, flavor="m1.small"))
    made.apply(request(MoveKind.UNSHELVE, 2, request_id=OTHER, expected_flavor="m1.old"))
    assert made.terminals[1:] == [(MoveKind.UNSHELVE, MoveState.REFUSED, "instance.flavor_changed")]
    assert made.instance.state is State.OFFLOADED


def test_an_unshelving_beyond_the_quota_has_the_quotas_code() -> None:
    made = offloaded()
    made.apply(request(MoveKind.UNSHELVE, 2, request_id=OTHER))
    over = replace(refused(made.instance.next_attempt), outcomes=(ClaimOutcome.OVER_LIMIT,))
    made.apply(over, e.Released(at=231.0, consumer=UUID))
    assert made.terminals[1:] == [(MoveKind.UNSHELVE, MoveState.FAILED, "quota.exceeded")]


def test_an_unshelving_that_finds_no_host_leaves_it_offloaded() -> None:
    made = offloaded()
    made.apply(request(MoveKind.UNSHELVE, 2, request_id=OTHER))
    made.apply(refused(made.instance.next_attempt))
    assert isinstance(question_of(made.instance), Release)
    made.apply(e.Released(at=231.0, consumer=UUID))
    assert (made.instance.state, made.instance.image) == (State.OFFLOADED, "kept")
    assert made.terminals[1:] == [(MoveKind.UNSHELVE, MoveState.FAILED, "max_retries_exceeded")]


def test_a_change_of_which_its_host_does_not_know_whether_it_happened_is_commanded_again() -> None:
    made = begun(MoveKind.STOP)
    made.end(1, 1, done=False, code="change.timeout")
    assert made.terminals == [(MoveKind.STOP, MoveState.FAILED, "change.timeout")]
    assert made.instance.state is State.CHANGING
    (again,) = changes(made.apply(e.TimedOut(at=600.0)))
    assert again.change is ChangeKind.STOP
    made.end(1, 1, runs=False)
    assert (made.instance.state, made.instance.power) == (State.ACTIVE, Power.STOPPED)
    assert len(made.terminals) == 1


def test_a_shelved_machine_that_runs_though_its_start_failed_is_not_on_record_as_shelved() -> None:
    made = begun(MoveKind.SHELVE)
    made.end(1, 1, runs=False, image="snapshot")
    made.apply(request(MoveKind.UNSHELVE, request_id=OTHER))
    made.end(1, 1, done=False, code="broken", runs=True)
    assert (made.instance.state, made.instance.power, made.instance.image) == (State.ACTIVE, Power.RUNNING, "")
    assert made.terminals[-1] == (MoveKind.UNSHELVE, MoveState.FAILED, "broken")


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "not answered"])
def test_a_resize_that_failed_in_place_is_taken_back_before_the_next_host_is_commanded(answered: bool) -> None:
    """The machine kept the new size, and with the move undone its record and the book had the old one."""
    made = begun(MoveKind.RESIZE, 1, 2, spec=replace(SPEC, flavor="larger"))
    made.apply(claimed())
    (back,) = changes(made.end(1, 1, done=False, code="broken", runs=True))
    assert (back.change, back.spec.flavor, back.allocations) == (ChangeKind.RESIZE, "", selection(1).allocations)
    assert made.instance.state is State.RESIZING
    if not answered:
        made.end(1, 1, done=False, code="broken", runs=True)
        made.apply(e.TimedOut(at=600.0))
        assert made.instance.phase == (State.DESTROYING, State.REVERTING)
        return
    made.end(1, 1, runs=True)
    assert made.instance.phase == (State.CLAIMING, State.PREPARING)
    made.apply(claimed(3))
    made.end(2, 3, done=False, code="full")
    made.apply(e.Reverted(at=401.0, attempt=4))
    assert (made.instance.state, made.instance.here) == (State.ACTIVE, selection(1))
    assert made.instance.spec == SPEC


@pytest.mark.parametrize("state", [State.CHANGING, State.RESTARTING])
def test_a_machine_that_is_being_changed_is_wanted_where_it_is(state: State) -> None:
    """A report that lists it comes while it is being stopped, or started again after a move that was undone."""
    made = begun(MoveKind.STOP) if state is State.CHANGING else begun(MoveKind.MIGRATE, 2)
    if state is State.RESTARTING:
        made.apply(claimed())
        made.end(2, 2)
        made.end(1, 1, done=False, code="broken", runs=True)
        made.apply(e.Reverted(at=205.0, attempt=3))
    assert made.instance.state is state
    assert not is_over(made.instance, 1, host(1))
    made.apply(e.HostRuns(at=206.0, attempt=1, host_uuid=host(1), service="s1"))
    assert (made.instance.state, made.destroys) == (state, [])


# --- Machines that are lost while they move, and evacuations, as scenarios of the table.


def test_a_lost_destination_is_reverted_and_not_failed() -> None:
    made = to_resized()
    made.apply(missed(made.instance, 2))
    assert made.instance.phase == (State.DESTROYING, State.REVERTING)
    made.apply(e.Destroyed(at=301.0, attempt=2, host_uuid=host(2), service="s1"), e.Reverted(at=302.0, attempt=3))
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.host_uuid) == (State.ACTIVE, host(1))


def test_what_a_finished_resize_is_after_it_was_undone_by_itself_is_announced() -> None:
    """Its request has had its end, and no other gets one: schedulers had the destination and its flavor on record."""
    small = active().spec
    made = to_resized(MoveKind.RESIZE, spec=InstanceSpec(instance_uuid=UUID, project_id="p", flavor="large"))
    (done,) = made.terminals
    assert done[1] is MoveState.DONE and small is not None
    made.apply(missed(made.instance, 2))
    made.apply(e.Destroyed(at=301.0, attempt=2, host_uuid=host(2), service="s1"), e.Reverted(at=302.0, attempt=3))
    made.end(1, 1, runs=True)
    last = [one for one in made.commands if isinstance(one, MoveEvent)][-1]
    assert (last.state, last.terminal, last.condition) == (MoveState.UNDOING, False, Condition.ACTIVE)
    assert (last.host, last.flavor, last.code) == ("host-1", small.flavor, "instance.lost")


def test_a_rebuild_leaves_the_flavor_as_it_is() -> None:
    """It claims nothing: a flavor that its scheduler has late would not be what the instance holds."""
    before = active()
    assert before.spec is not None
    late = InstanceSpec(instance_uuid=UUID, project_id="p", flavor="large", image="new")
    made = begun(MoveKind.REBUILD, spec=late)
    assert made.instance.spec == replace(before.spec, image="new")


def test_an_evacuation_needs_a_fence_and_a_service_that_is_down() -> None:
    made = begun(MoveKind.EVACUATE, 2)
    assert made.terminals == [(MoveKind.EVACUATE, MoveState.REFUSED, "evacuate.not_fenced")]
    made = begun(MoveKind.EVACUATE, 2, fenced=True)
    assert made.terminals == [(MoveKind.EVACUATE, MoveState.REFUSED, "evacuate.service_up")]


def test_a_request_does_not_evacuate_from_a_service_that_was_stopped_on_purpose() -> None:
    """Seed 1795360510: a service was stopped to be upgraded, and what its hosts ran on was built a second time."""
    stopped = Scenario(
        active(), replace(SERVICE_DOWN, down={"s1": replace(SERVICE_DOWN.down["s1"], state=LeaseState.STOPPED)})
    )
    stopped.apply(request(MoveKind.EVACUATE, 2, fenced=True))
    assert stopped.terminals == [(MoveKind.EVACUATE, MoveState.REFUSED, "evacuate.not_fenced")]
    assert stopped.instance.state is State.ACTIVE


def test_an_evacuated_source_keeps_its_claim_until_its_host_has_nothing_of_it() -> None:
    made = Scenario(active(), SERVICE_DOWN)
    elsewhere = replace(selection(2), service="s2")
    asking = request(MoveKind.EVACUATE, fenced=True)
    made.apply(replace(asking, request=replace(asking.request, selections=(elsewhere,))))
    made.apply(claimed())
    made.end(2, 2)
    (spawn,) = made.spawns
    assert spawn.origin is not None
    assert spawn.origin.host_uuid is None
    made.apply(replace(spawned(attempt=2, at=210.0), service="s2"))
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.ACTIVE), [(1, host(1))])
    assert question_of(made.instance) is None
    runs = e.HostRuns(at=900.0, attempt=1, host_uuid=host(1), service="s3")
    made.apply(runs)
    assert made.destroys[-1] == (1, host(1))  # its host has another service now, which is commanded
    missing = e.HostMissing(at=990.0, host_uuid=host(1), service="s1")
    assert made.apply(missing).instance.phase == (State.DESTROYING, State.ACTIVE), (
        "its former service may have looked before that"
    )
    made.apply(replace(missing, rescans=(rescan_id(made.instance),)))
    assert made.instance.phase == (State.RELEASING, State.ACTIVE)


def test_a_machine_that_was_resized_in_place_is_not_lost_by_a_report_of_before_it_was_built() -> None:
    """Seed 61105 at d0562af: its host was not taken for the one that was seen to run it."""
    made = begun(MoveKind.RESIZE, 1)
    made.apply(claimed())
    older = missed(made.instance)
    made.end(1, 1)
    assert made.instance.state is State.RESIZED and made.instance.is_in_place
    assert made.apply(older).instance.state is State.RESIZED
    assert made.apply(missed(made.instance)).instance.phase == (State.RELEASING, State.FAILED)


def test_an_evacuation_that_finds_no_host_leaves_the_record_as_it_was() -> None:
    made = Scenario(active(), SERVICE_DOWN)
    elsewhere = replace(selection(2), service="s2")
    asking = request(MoveKind.EVACUATE, fenced=True)
    made.apply(replace(asking, request=replace(asking.request, selections=(elsewhere,))))
    made.apply(refused(), e.Reverted(at=202.0, attempt=2))
    assert (made.instance.state, made.instance.host_uuid) == (State.ACTIVE, host(1))
    assert not changes(made.apply())  # nothing is started on a host that is dead


def test_after_a_move_that_was_undone_its_source_is_lost_by_a_later_scan_only() -> None:
    """That its host had been seen to run it was forgotten: a report of a host whose clock was behind was dropped."""
    made = Scenario(active())
    older = missed(made.instance)
    made.apply(request(MoveKind.MIGRATE, 2), refused(), e.Reverted(at=205.0, attempt=2))
    assert made.instance.state is State.ACTIVE
    assert made.apply(older).instance.state is State.ACTIVE
    assert made.apply(missed(made.instance)).instance.phase == (State.RELEASING, State.FAILED)


def test_a_report_of_before_the_delete_releases_neither_host_of_a_move() -> None:
    """Each host is judged by a scan of its own, and by no clock."""
    made = to_resized()
    older = missed(made.instance)
    made.apply(e.DeleteRequested(at=220.0, cause="delete"))
    deleting = made.instance
    made.apply(older, replace(older, host_uuid=host(2)))
    assert (made.instance, deleting.phase) == (deleting, (State.DESTROYING, State.DELETED))
    made.apply(missed(made.instance))
    assert made.instance.move is not None and made.instance.move.source_gone and not made.instance.move.here_gone
    made.apply(missed(made.instance, 2))
    assert made.instance.phase == (State.RELEASING, State.DELETED)

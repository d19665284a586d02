"""Machines that are lost while they move, and evacuations, as scenarios of the table."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.cell import InstanceSpec
from bus.contracts.moves import (
    Condition,
    MoveEvent,
    MoveKind,
    MoveState,
)
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import State
from cell_conductor.domain.leases import LeaseState
from cell_conductor.domain.proof import rescan_id
from cell_conductor.domain.table import question_of
from tests.unit.conductor.move_scenario import (
    SERVICE_DOWN,
    Scenario,
    active,
    begun,
    changes,
    claimed,
    refused,
    request,
    to_resized,
)
from tests.unit.conductor.scenario import UUID, host, missed, selection, spawned


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

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
from cell_conductor.domain.instance import ScanId, State
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
from tests.unit.conductor.scenario import UUID, host, selection, spawned


def test_a_lost_destination_is_reverted_and_not_failed() -> None:
    made = to_resized()
    made.apply(e.HostMissing(at=300.0, host_uuid=host(2), seen_at=299.0, service="s1"))
    assert made.instance.phase == (State.DESTROYING, State.REVERTING)
    made.apply(e.Destroyed(at=301.0, attempt=2, host_uuid=host(2)), e.Reverted(at=302.0, attempt=3))
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.host_uuid) == (State.ACTIVE, host(1))


def test_what_a_finished_resize_is_after_it_was_undone_by_itself_is_announced() -> None:
    """Its request has had its end, and no other gets one: schedulers had the destination and its flavor on record."""
    small = active().spec
    made = to_resized(MoveKind.RESIZE, spec=InstanceSpec(instance_uuid=UUID, project_id="p", flavor="large"))
    (done,) = made.terminals
    assert done[1] is MoveState.DONE and small is not None
    made.apply(e.HostMissing(at=300.0, host_uuid=host(2), seen_at=299.0, service="s1"))
    made.apply(e.Destroyed(at=301.0, attempt=2, host_uuid=host(2)), e.Reverted(at=302.0, attempt=3))
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
    runs = e.HostRuns(at=900.0, attempt=1, host_uuid=host(1), service="s3", seen_at=900.0)
    made.apply(runs)
    assert made.destroys[-1] == (1, host(1))  # its host has another service now, which is commanded
    missing = e.HostMissing(at=990.0, host_uuid=host(1), seen_at=990.0, service="s1")
    assert made.apply(missing).instance.phase == (State.DESTROYING, State.ACTIVE), (
        "its former service may have looked before that"
    )
    made.apply(replace(missing, rescans=(rescan_id(made.instance),)))
    assert made.instance.phase == (State.RELEASING, State.ACTIVE)


def test_a_machine_that_was_resized_in_place_is_not_lost_by_a_report_of_before_it_was_built() -> None:
    """Seed 61105 at d0562af: its host was not taken for the one that was seen to run it."""
    made = Scenario(replace(active(), up_scan=ScanId(5, 3)))
    made.apply(request(MoveKind.RESIZE, 1), claimed())
    made.end(1, 1)
    assert made.instance.state is State.RESIZED and made.instance.is_in_place
    older = e.HostMissing(at=300.0, host_uuid=host(1), seen_at=999.0, service="s1", scan=ScanId(5, 3))
    assert made.apply(older).instance.state is State.RESIZED
    assert made.apply(replace(older, scan=ScanId(5, 4))).instance.phase == (State.RELEASING, State.FAILED)


def test_an_evacuation_that_finds_no_host_leaves_the_record_as_it_was() -> None:
    made = Scenario(active(), SERVICE_DOWN)
    elsewhere = replace(selection(2), service="s2")
    asking = request(MoveKind.EVACUATE, fenced=True)
    made.apply(replace(asking, request=replace(asking.request, selections=(elsewhere,))))
    made.apply(refused(), e.Reverted(at=202.0, attempt=2))
    assert (made.instance.state, made.instance.host_uuid) == (State.ACTIVE, host(1))
    assert not changes(made.apply())  # nothing is started on a host that is dead


def test_after_a_move_that_was_undone_its_source_is_lost_by_its_own_hosts_scans_as_before() -> None:
    """That its host had been seen to run it was forgotten: a report of a host whose clock was behind was dropped."""
    up = active()
    made = Scenario(replace(up, up_at=50.0, up_scan=ScanId(1, 4)))
    made.apply(request(MoveKind.MIGRATE, 2), refused(), e.Reverted(at=205.0, attempt=2))
    assert made.instance.state is State.ACTIVE
    older = e.HostMissing(at=300.0, host_uuid=host(1), seen_at=20.0, service="s1", scan=ScanId(1, 4))
    assert made.apply(older).instance.state is State.ACTIVE
    made.apply(replace(older, scan=ScanId(1, 5)))
    assert made.instance.phase == (State.RELEASING, State.FAILED)


def test_a_report_of_before_a_host_was_known_to_run_it_releases_neither_host_of_a_move() -> None:
    """Each host is judged by its own scans, and by the clock alone when its service counts none of them."""
    made = Scenario(replace(active(), up_scan=ScanId(5, 3)))
    made.apply(request(MoveKind.MIGRATE, 2, 3), claimed())
    made.end(2, 2)
    made.end(1, 1)
    made.apply(replace(spawned(attempt=2, at=210.0), scan=ScanId(5, 7)), e.DeleteRequested(at=220.0, cause="delete"))
    missing = e.HostMissing(at=230.0, host_uuid=host(1), seen_at=999.0, service="s1", scan=ScanId(5, 3))
    deleting = made.instance
    made.apply(missing, replace(missing, host_uuid=host(2), scan=ScanId(5, 7)))
    assert (made.instance, deleting.phase) == (deleting, (State.DESTROYING, State.DELETED))
    made.apply(replace(missing, scan=ScanId(5, 4)))
    assert made.instance.move is not None and made.instance.move.source_gone and not made.instance.move.here_gone
    made.apply(replace(missing, host_uuid=host(2), scan=ScanId(5, 8)))
    assert made.instance.phase == (State.RELEASING, State.DELETED)


def test_a_destination_that_was_never_reached_is_not_judged_by_the_scans_of_its_source() -> None:
    made = Scenario(replace(active(), up_scan=ScanId(5, 3)))
    elsewhere = replace(selection(2), service="s2")
    asking = request(MoveKind.MIGRATE)
    made.apply(replace(asking, request=replace(asking.request, selections=(elsewhere,))), claimed())
    made.end(2, 2)
    made.end(1, 1)
    assert made.instance.state is State.FINISHING
    made.apply(e.DeleteRequested(at=220.0, cause="delete"))
    assert made.instance.move is not None and not made.instance.move.here_gone
    made.apply(e.HostMissing(at=230.0, host_uuid=host(2), seen_at=999.0, service="s2", scan=ScanId(4, 9)))
    assert made.instance.move is not None and made.instance.move.here_gone

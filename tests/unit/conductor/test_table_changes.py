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
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import Power, State
from cell_conductor.domain.move_events import condition_of
from cell_conductor.domain.report import is_over
from tests.unit.conductor.move_scenario import (
    OTHER,
    Scenario,
    active,
    announced,
    begun,
    changes,
    claimed,
    request,
    to_resized,
)
from tests.unit.conductor.scenario import PATIENCE, SPEC, UUID, host, missed, selection
from tests.unit.conductor.test_table_fences import fenced

# --- Changes of a machine in place, as scenarios of the table: resized, stopped, rescued, shelved, rebuilt.


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

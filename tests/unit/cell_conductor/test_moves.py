"""Moves to another host, changes in place and ways back, as scenarios: what no row of the tables holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from bus.contracts.actions import (
    RESCUE_FAILED,
    ActionEvent,
    ActionKind,
    ActionState,
    ChangeKind,
    ChangeMachine,
    Condition,
)
from bus.contracts.cell import AttemptOnHost, InstanceSpec, MachineLookupResult
from bus.contracts.deploy import ImageSource, VolumeRequest
from bus.contracts.operations import EvacuationPolicy
from bus.contracts.placement import Claim, Release, Revert
from bus.faults import Fault, RequestTimeout
from bus.persistence.outbox import OutboxMessage
from cell_conductor.placement_client import Transition, is_repeatable
from cell_conductor.placement_question import awaited_request_of
from cell_conductor.rules.action_events import condition_of
from cell_conductor.rules.move_steps import NO_IMAGE
from cell_conductor.rules.rollback_rules import SOURCE_LOST, SOURCE_SILENT, SOURCE_UNREPORTED, answer_about
from cell_conductor.state import events as e
from cell_conductor.state.events import SourceQuery
from cell_conductor.state.instance import Power, State
from cell_conductor.state.lease import Lease, LeaseState
from cell_conductor.state.ownership_proof import is_provably_ended
from cell_conductor.state.step import Step
from tests.unit.cell_conductor.move_scenario import (
    ACTION,
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
from tests.unit.cell_conductor.records import BY_REVERT, changing, in_place
from tests.unit.cell_conductor.scenario import PATIENCE, RELEASED, SPEC, UUID, host, missed, selection, spawned
from tests.unit.cell_conductor.test_single_conditions import fences_on

# --- moves to another host as scenarios of the table: each way back ends on the source


def test_a_reverted_move_destroys_the_destination_before_the_source_starts() -> None:
    made = to_resized()
    made.apply(request(ActionKind.REVERT, request_id=OTHER), seen())
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.REVERTING), [(2, host(2))])
    assert awaited_request_of(made.instance) is None
    made.apply(e.Destroyed(at=220.0, attempt=2, host_uuid=host(2), service="s1"))
    query = awaited_request_of(made.instance)
    assert isinstance(query, Revert)
    assert (query.attempt, query.source_attempt) == (3, 1)
    (start,) = changes(made.apply(e.Reverted(at=221.0, attempt=3, consumer_generation=11)))
    assert (start.change, start.host_uuid, start.attempt) == (ChangeKind.START, host(1), 1)
    made.end(1, 1, runs=True)
    assert (made.instance.state, made.instance.host_uuid, made.instance.attempt) == (State.ACTIVE, host(1), 1)
    assert made.terminals == [(ActionKind.MIGRATE, ActionState.DONE, ""), (ActionKind.REVERT, ActionState.DONE, "")]
    # The numbers that the move has used are behind it: what they may still bring is over, the source is not.
    assert is_provably_ended(made.instance, 2, host(2))
    assert not is_provably_ended(made.instance, 1, host(1))
    assert not is_provably_ended(made.instance, 4, host(2))
    made.apply(request(ActionKind.MIGRATE, 2, request_id=OTHER.replace("2", "3")))
    query = awaited_request_of(made.instance)
    assert isinstance(query, Claim)
    assert query.attempt == 4


def test_a_source_that_does_not_hand_over_is_started_again() -> None:
    made = begun(ActionKind.MIGRATE, 2)
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
    assert made.terminals == [(ActionKind.MIGRATE, ActionState.FAILED, "action.timeout")]
    made.end(1, 1, runs=True)
    assert made.instance.state is State.ACTIVE
    assert len(made.terminals) == 1


def refused_live(*hosts: int, **fields: object) -> tuple[Scenario, Step]:
    """A live migration whose source has refused, before it began, to hand over to host 2."""
    made = begun(ActionKind.LIVE_MIGRATE, *hosts)
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
    assert made.terminals == [(ActionKind.LIVE_MIGRATE, ActionState.FAILED, "live.pinned")]
    event = next(m for m in made.commands if isinstance(m, ActionEvent) and m.terminal)
    assert [(one.host, one.outcome, one.code) for one in event.history] == [("host-2", "failed", "live.pinned")]


@pytest.mark.parametrize("runs", [False, None])
def test_a_source_that_refuses_and_may_not_run_is_started(runs: bool | None) -> None:
    """It may have handed over before, by a copy of the command: only a machine that runs needs no start."""
    made, _ = refused_live(2, 3, retry_other_host=True, runs=runs)
    (start,) = changes(made.apply(e.Reverted(at=205.0, attempt=3)))
    assert (start.change, start.host_uuid) == (ChangeKind.START, host(1))


STAGES = ["claiming", "preparing", "handing over", "finishing", "resized", "confirming", "releasing source", "undoing"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_delete_in_every_state_destroys_both_and_releases_both(stage: str) -> None:
    made = begun(ActionKind.MIGRATE, 2)
    number = STAGES.index(stage)
    steps = [
        lambda: made.apply(claimed()),
        lambda: made.end(2, 2),
        lambda: made.end(1, 1),
        lambda: made.apply(spawned(attempt=2, at=210.0)),
        lambda: made.apply(request(ActionKind.CONFIRM, request_id=OTHER)),
        lambda: made.apply(e.Destroyed(at=215.0, attempt=1, host_uuid=host(1), service="s1")),
    ]
    for act in steps[: min(number, 6)] if stage != "undoing" else steps[:4]:
        act()
    if stage == "undoing":
        made.apply(request(ActionKind.REVERT, request_id=OTHER), seen())
    made.apply(e.DeleteRequested(at=300.0))
    if stage == "claiming":
        made.apply(claimed())
    made.apply(e.Destroyed(at=301.0, attempt=1, host_uuid=host(1), service="s1"))
    if number >= STAGES.index("finishing"):
        if stage != "releasing source":
            assert made.instance.phase == (State.DESTROYING, State.DELETED)  # the destination has not answered
        made.apply(e.Destroyed(at=301.0, attempt=2, host_uuid=host(2), service="s1"))
    assert made.instance.phase == (State.RELEASING, State.DELETED)
    first = awaited_request_of(made.instance)
    assert isinstance(first, Release)
    assert first.consumer == UUID
    made.apply(e.Released(at=302.0, consumer=UUID), e.Released(at=302.0, consumer=UUID))
    second = awaited_request_of(made.instance)
    assert isinstance(second, Release)
    assert second.consumer == ACTION
    made.apply(e.Released(at=303.0, consumer=ACTION))
    assert (made.instance.state, made.instance.action) == (State.DELETED, None)
    assert len({m.request_id for m in made.commands if isinstance(m, ActionEvent) and m.terminal}) == len(
        made.terminals
    )


@pytest.mark.parametrize("deleted_first", [True, False])
def test_a_delete_after_a_refused_claim_releases_both_because_a_copy_may_have_succeeded(*, deleted_first: bool) -> None:
    """Seed 1795411216: the claim was sent twice, the second copy was refused, the first came later and succeeded."""
    made = begun(ActionKind.MIGRATE, 2)
    events = [refused(), e.DeleteRequested(at=300.0)]
    made.apply(*(reversed(events) if deleted_first else events))
    made.apply(e.Destroyed(at=301.0, attempt=1, host_uuid=host(1), service="s1"))
    for consumer in (UUID, ACTION):
        query = awaited_request_of(made.instance)
        assert isinstance(query, Release)
        assert query.consumer == consumer
        made.apply(e.Released(at=302.0, consumer=consumer))
    assert made.instance.state is State.DELETED


def test_a_revert_has_a_number_above_the_claim_that_was_refused() -> None:
    """Seed 4800600: a resize in place was refused, a first copy of its claim came later and succeeded, and its number
    was the revert's: placement took the move for reverted, and the instance held its new size for good.
    """
    made = begun(ActionKind.RESIZE, 1)
    asked = awaited_request_of(made.instance)
    made.apply(refused())
    revert = awaited_request_of(made.instance)
    assert isinstance(asked, Claim) and isinstance(revert, Revert) and revert.attempt > asked.attempt


def test_a_refusal_is_on_disk_before_its_request_is_acknowledged() -> None:
    """Forgotten in a crash, the request came again when the instance was not busy any more, and was carried out."""
    made = to_resized()
    refusal = made.apply(request(ActionKind.STOP, request_id=OTHER))
    assert announced(*refusal.commands) == [(ActionKind.STOP, ActionState.REFUSED, True, "instance.resized")]
    outgoing = [OutboxMessage("c", message, UUID) for message in refusal.commands]
    assert not is_repeatable(Transition({UUID: refusal.instance}, {}, outgoing, Counter(), []), {})


def test_a_stopped_machine_is_stopped_where_it_has_been_moved_to() -> None:
    made = begun(ActionKind.STOP)
    made.end(1, 1, runs=False)
    made.apply(request(ActionKind.MIGRATE, 2, request_id=OTHER), claimed())
    made.end(2, 2)
    made.end(1, 1, runs=False)
    (spawn,) = made.spawns
    assert spawn.origin is not None
    assert not spawn.origin.runs
    made.apply(spawned(attempt=2, at=210.0))
    assert (made.instance.state, made.instance.power) == (State.RESIZED, Power.STOPPED)


def test_a_move_goes_on_with_the_generation_that_an_audits_claim_has_left() -> None:
    """A running, claimed instance was refused to move for ever: the record has the generation from before the audit."""
    made = begun(ActionKind.MIGRATE, 2, 3)
    changed = e.ClaimRefused(
        at=201.0, attempt=2, consumer_conflict=True, consumer_generation=12, allocations={host(1): {"VCPU": 1}}
    )
    made.apply(changed)
    query = awaited_request_of(made.instance)
    assert isinstance(query, Claim)
    assert (query.attempt, query.consumer_generation, made.instance.state) == (2, 12, State.CLAIMING)
    made.apply(changed)
    assert made.instance.state is State.REVERTING, "once: another client goes on changing it"
    other = begun(ActionKind.MIGRATE, 2, 3)
    other.apply(replace(changed, allocations={host(1): {"VCPU": 2}}))
    assert other.instance.state is State.REVERTING, "another client holds something else"


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


@pytest.mark.parametrize("kind", [ActionKind.RESIZE, ActionKind.MIGRATE, ActionKind.EVACUATE])
def test_a_destination_is_told_all_of_the_flavor_that_it_was_chosen_for(kind: ActionKind) -> None:
    """And the image that the instance has: a later evacuation deployed by the old traits and root disk."""
    rebuilt = replace(SPEC, image="now", image_source=ImageSource(source="http://images/now"), root_gb=20)
    made = Scenario(replace(active(), spec=rebuilt), replace(PATIENCE, fences=fences_on(1)))
    made.apply(request(kind, 2, spec=LARGER))
    assert made.instance.phase == (State.CLAIMING, State.PREPARING)
    assert made.instance.spec == replace(LARGER, image="now", image_source=rebuilt.image_source)
    assert made.instance.action is not None and made.instance.action.spec == rebuilt


@pytest.mark.parametrize(
    ("image", "named", "source"),
    [("new", "http://images/2", "http://images/2"), ("new", None, None), ("old", None, "http://images/1")],
)
def test_a_rebuild_replaces_the_source_of_its_image(image: str, named: str | None, source: str | None) -> None:
    """The old one stayed and won over the new image; the same image again is from where it was."""
    old = replace(SPEC, image="old", image_source=ImageSource(source="http://images/1"), root_gb=20)
    target = replace(LARGER, image=image, image_source=None if named is None else ImageSource(source=named))
    made = Scenario(replace(active(), spec=old))
    (rebuild,) = changes(made.apply(request(ActionKind.REBUILD, spec=target)))
    wanted = replace(old, image=image, image_source=None if source is None else ImageSource(source=source))
    assert rebuild.spec == made.instance.spec == wanted


@pytest.mark.parametrize(("runs", "power"), [(True, Power.RUNNING), (False, Power.STOPPED), (None, Power.STOPPED)])
@pytest.mark.parametrize("fails_first", [False, True])
def test_a_stopped_instance_is_on_record_as_its_rebuild_has_left_it(
    runs: bool | None, power: Power, fails_first: bool
) -> None:
    """A node runs after it; the record said `stopped`, and a stop did nothing."""
    made = Scenario(replace(active(), power=Power.STOPPED))
    if fails_first:
        made.apply(request(ActionKind.REBUILD, request_id=OTHER))
        made.end(1, 1, done=False, code="node.rebuild_failed", runs=False)
    made.apply(request(ActionKind.REBUILD, request_id=UUID))
    made.end(1, 1, runs=runs)
    assert (made.instance.state, made.instance.power) == (State.ACTIVE, power)
    stopping = changes(made.apply(request(ActionKind.STOP, request_id=ACTION)))
    assert len(stopping) == (power is Power.RUNNING)


def rescued() -> Scenario:
    made = begun(ActionKind.RESCUE, rescue_password="sesame")
    made.end(1, 1, runs=True)
    return made


def test_a_rescued_instance_is_unrescued_first_and_its_password_is_forgotten() -> None:
    made = begun(ActionKind.RESCUE, rescue_password="sesame")
    (command,) = [one for one in made.commands if isinstance(one, ChangeMachine)]
    assert (command.change, command.rescue_password) == (ChangeKind.RESCUE, "sesame")
    made.end(1, 1, runs=True)
    assert b"sesame" not in msgspec.json.encode(made.instance)
    assert condition_of(made.instance) is Condition.RESCUED
    refusal = made.apply(request(ActionKind.STOP, request_id=OTHER))
    assert announced(*refusal.commands) == [(ActionKind.STOP, ActionState.REFUSED, True, "instance.rescued")]
    (command,) = changes(made.apply(request(ActionKind.UNRESCUE, request_id=UUID)))
    assert (command.change, command.rescue_password) == (ChangeKind.UNRESCUE, "")


@pytest.mark.parametrize(
    ("made", "kind", "code", "runs", "power"),
    [
        (None, ActionKind.RESCUE, RESCUE_FAILED, False, Power.RESCUED),
        (None, ActionKind.RESCUE, "node.refused", True, Power.RUNNING),
        (rescued, ActionKind.UNRESCUE, RESCUE_FAILED, True, Power.RESCUED),
        (rescued, ActionKind.UNRESCUE, "node.refused", True, Power.RESCUED),
    ],
)
def test_what_is_left_of_a_rescue_that_failed(
    made: Callable[[], Scenario] | None, kind: ActionKind, code: str, runs: bool, power: Power
) -> None:
    """From a rescue that was begun, unrescuing is the way back; one that was refused has changed nothing."""
    there = Scenario(active()) if made is None else made()
    there.apply(request(kind, request_id=OTHER, rescue_password="sesame"))
    there.end(1, 1, done=False, code=code, runs=runs)
    assert (there.instance.state, there.instance.power) == (State.ACTIVE, power)


def test_a_shelved_machine_that_runs_though_its_start_failed_is_not_on_record_as_shelved() -> None:
    made = begun(ActionKind.SHELVE)
    made.end(1, 1, runs=False, image="snapshot")
    made.apply(request(ActionKind.UNSHELVE, request_id=OTHER))
    made.end(1, 1, done=False, code="broken", runs=True)
    assert (made.instance.state, made.instance.power, made.instance.image) == (State.ACTIVE, Power.RUNNING, "")
    assert made.terminals[-1] == (ActionKind.UNSHELVE, ActionState.FAILED, "broken")


ROOT_VOLUME = replace(SPEC, volumes=(VolumeRequest(volume_id="v"),))


@pytest.mark.parametrize(
    ("spec", "code", "state"),
    [
        (SPEC, NO_IMAGE, State.CHANGING),
        (replace(SPEC, volumes=(VolumeRequest(volume_id="v", boot_index=1),)), NO_IMAGE, State.CHANGING),
        (ROOT_VOLUME, "", State.DESTROYING),
    ],
)
def test_a_machine_whose_image_has_no_name_is_not_given_up(spec: InstanceSpec, code: str, state: State) -> None:
    """Its host answers the snapshot as done: it was destroyed, and built anew later."""
    shelving = changing(ActionKind.SHELVE, offload=True, change_number=5)
    made = Scenario(replace(shelving, spec=spec, power=Power.RUNNING, image=""))
    made.end(2, 2, image="")
    assert (made.instance.state, bool(made.destroys)) == (state, state is State.DESTROYING)
    assert [one[2] for one in made.terminals] == ([code] if code else [])


def test_a_machine_that_leaves_its_cell_stays_where_its_image_has_no_name() -> None:
    known = {"to_cell": "c2", "offload": True, "change_number": 5}
    made = Scenario(replace(changing(ActionKind.MIGRATE, **known), change_number=5, power=Power.RUNNING, image=""))
    made.end(2, 2, image="", runs=True)
    assert made.instance.phase == (State.ACTIVE, None) and not made.destroys
    assert made.terminals == [(ActionKind.MIGRATE, ActionState.FAILED, NO_IMAGE)]


def test_a_revert_that_waits_ends_with_the_machine_that_is_lost() -> None:
    made = Scenario(in_place(State.RESIZED, action={**BY_REVERT, "answered": True}, queried=False))
    made.apply(missed(made.instance))
    assert made.instance.phase == (State.RELEASING, State.FAILED)
    made.apply(RELEASED)
    made.apply(e.Released(at=131.0, consumer=ACTION))
    assert made.instance.state is State.FAILED
    ends = [(one.request_id, one.state, one.code) for one in made.commands if isinstance(one, ActionEvent)]
    assert ends == [(OTHER, ActionState.FAILED, "instance.lost")]


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "not answered"])
def test_a_resize_that_failed_in_place_is_taken_back_before_the_next_host_is_commanded(answered: bool) -> None:
    """The machine kept the new size, and with the move rolled back its record and placement had the old one."""
    made = begun(ActionKind.RESIZE, 1, 2, spec=replace(SPEC, flavor="larger"))
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
    assert (made.instance.state, made.instance.current) == (State.ACTIVE, selection(1))
    assert made.instance.spec == SPEC


@pytest.mark.parametrize("state", [State.CHANGING, State.RESTARTING])
def test_a_machine_that_is_being_changed_is_wanted_where_it_is(state: State) -> None:
    """A report that lists it comes while it is being stopped, or started again after a move that was rolled back."""
    made = begun(ActionKind.STOP) if state is State.CHANGING else begun(ActionKind.MIGRATE, 2)
    if state is State.RESTARTING:
        made.apply(claimed())
        made.end(2, 2)
        made.end(1, 1, done=False, code="broken", runs=True)
        made.apply(e.Reverted(at=205.0, attempt=3))
    assert made.instance.state is state
    assert not is_provably_ended(made.instance, 1, host(1))
    made.apply(e.MachineRunning(at=206.0, attempt=1, host_uuid=host(1), service="s1"))
    assert (made.instance.state, made.destroys) == (state, [])


# --- Machines that are lost while they move, and evacuations, as scenarios of the table.


def test_what_a_finished_resize_is_after_it_was_undone_by_itself_is_announced() -> None:
    """Its request has had its end, and no other gets one: schedulers had the destination and its flavor on record."""
    small = active().spec
    made = to_resized(ActionKind.RESIZE, spec=InstanceSpec(instance_uuid=UUID, project_id="p", flavor="large"))
    (done,) = made.terminals
    assert done[1] is ActionState.DONE and small is not None
    made.apply(missed(made.instance, 2))
    made.apply(e.Destroyed(at=301.0, attempt=2, host_uuid=host(2), service="s1"), e.Reverted(at=302.0, attempt=3))
    made.end(1, 1, runs=True)
    last = [one for one in made.commands if isinstance(one, ActionEvent)][-1]
    assert (last.state, last.terminal, last.condition) == (ActionState.ROLLING_BACK, False, Condition.ACTIVE)
    assert (last.host, last.flavor, last.code) == ("host-1", small.flavor, "instance.lost")


# --- no move that has arrived is rolled back before its source was seen, and what waits for a silent host shows it


QUERIED = SourceQuery(host(1), "s1", 1, 202001)
DOWN = replace(PATIENCE, up=("s1",), down={"s2": Lease(service="s2", epoch=1, state=LeaseState.SILENT)})


def reverting(**fields: object) -> Scenario:
    made = to_resized(**fields)
    made.commands.clear()
    made.apply(request(ActionKind.REVERT, request_id=OTHER))
    return made


# --- a revert


def test_a_revert_queries_for_its_source_first_and_gives_nothing_up() -> None:
    made = reverting()
    assert (made.instance.state, made.commands) == (State.RESIZED, [])
    assert awaited_request_of(made.instance) == QUERIED
    made.apply(seen())
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.REVERTING), [(2, host(2))])
    assert awaited_request_of(made.instance) is None


# --- what waits shows it


def test_time_alone_does_not_give_the_source_up_for_a_destination_that_is_down() -> None:
    there = replace(selection(2), service="s2")
    made = begun(ActionKind.MIGRATE, selections=(there,), auto_confirm_s=5.0)
    made.apply(claimed())
    made.apply(
        e.ChangeEnded(at=202.0, attempt=2, change_number=_order(made), host_uuid=host(2), service="s2", done=True)
    )
    made.end(1, 1)
    made.apply(replace(spawned(attempt=2, at=210.0), service="s2"))
    made.context = DOWN
    made.commands.clear()
    made.apply(e.TimedOut(at=215.0))
    assert (made.instance.state, made.commands, made.instance.deadline) == (State.RESIZED, [], 245.0)
    made.context = PATIENCE
    made.apply(e.TimedOut(at=245.0))
    assert made.instance.phase == (State.DESTROYING, State.ACTIVE)


def _order(made: Scenario) -> int:
    assert made.instance.action is not None
    return made.instance.action.change_number


# --- the answers of the services


def found(service: str = "s1", *machines: int, hosts: tuple[int, ...] = (1,)) -> MachineLookupResult:
    """An answer: the attempts that it has on host 1, and the hosts that it has looked at."""
    return MachineLookupResult(
        machines=tuple(
            AttemptOnHost(instance_uuid=UUID, host_uuid=host(1), service=service, attempt=one) for one in machines
        ),
        hosts=tuple(map(host, hosts)),
    )


NONE = RequestTimeout("no answer")


@pytest.mark.parametrize(
    ("answers", "code", "service"),
    [
        ([("s1", found("s1", 1))], "", "s1"),
        ([("s1", NONE), ("s9", found("s9", 1))], "", "s9"),
        ([("s1", found("s1", hosts=())), ("s9", found("s9", 1))], "", "s9"),
        ([("s1", found("s1", 2))], SOURCE_LOST, ""),
        ([("s1", found("s1"))], SOURCE_LOST, ""),
        ([("s1", found("s1", hosts=())), ("s9", found("s9"))], SOURCE_LOST, ""),
        ([("s1", found("s1", hosts=()))], SOURCE_UNREPORTED, ""),
        ([("s1", found("s1", hosts=(2,))), ("s9", NONE)], SOURCE_UNREPORTED, ""),
        ([("s1", NONE)], SOURCE_SILENT, ""),
        ([("s1", NONE), ("s9", found("s9"))], SOURCE_SILENT, ""),
        ([("s9", found("s9")), ("s1", NONE)], SOURCE_SILENT, ""),
        ([("s9", found("s9"))], SOURCE_SILENT, ""),
        ([("s1", found("s1", 1, hosts=()))], SOURCE_UNREPORTED, ""),  # by its record, which proves nothing
    ],
)
def test_the_source_is_seen_only_where_its_host_lists_that_very_machine(
    answers: list[tuple[str, MachineLookupResult | Fault]], code: str, service: str
) -> None:
    answered = answer_about(UUID, QUERIED, answers, 211.0)
    assert (answered.query, answered.code, answered.service) == (QUERIED, code, service)

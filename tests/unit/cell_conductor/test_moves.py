"""Moves to another host, changes in place and ways back, as scenarios: what no row of the tables holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

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
from bus.contracts.placement import Claim, ClaimOutcome, Release, Revert
from bus.faults import Fault, RequestTimeout
from bus.persistence.outbox import OutboxMessage
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.recorded_changes import RecordedChanges, is_repeatable
from cell_conductor.rules.move_steps import NO_IMAGE
from cell_conductor.rules.rollback_rules import SOURCE_LOST, SOURCE_SILENT, SOURCE_UNREPORTED, answer_about
from cell_conductor.state import events as e
from cell_conductor.state.events import SourceQuery
from cell_conductor.state.fence import Fence
from cell_conductor.state.instance import Power, State
from cell_conductor.state.ownership_proof import is_provably_ended
from cell_conductor.transition import FenceSteps, step
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
from tests.unit.cell_conductor.records import BY_REVERT, changing, fenced, in_place
from tests.unit.cell_conductor.scenario import DELETE, PATIENCE, SPEC, UUID, host, missed, selection, spawned
from tests.unit.cell_conductor.test_single_conditions import fences_on

# --- moves to another host as scenarios of the table: each way back ends on the source


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
    assert not is_repeatable(RecordedChanges({UUID: refusal.instance}, {}, outgoing, Counter(), []), {})


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


def test_a_revert_queries_for_its_source_first_and_gives_nothing_up() -> None:
    made = to_resized()
    made.commands.clear()
    made.apply(request(ActionKind.REVERT, request_id=OTHER))
    assert (made.instance.state, made.commands) == (State.RESIZED, [])
    assert awaited_request_of(made.instance) == QUERIED
    made.apply(seen())
    assert (made.instance.phase, made.destroys) == ((State.DESTROYING, State.REVERTING), [(2, host(2))])
    assert awaited_request_of(made.instance) is None


# --- a revert


# --- what waits shows it


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


# --- What is released and recorded of an instance that is over


def test_what_a_refused_claim_did_not_give_to_its_migration_is_not_released() -> None:
    made = begun(ActionKind.MIGRATE, 2)
    made.apply(DELETE)
    q = awaited_request_of(made.instance)
    # Placement: claim.migration_in_use, as another instance of the project keeps its source under this uuid.
    made.apply(
        e.ClaimRefused(
            at=201.0,
            attempt=q.attempt,
            consumer_conflict=True,
            outcomes=(ClaimOutcome.CONSUMER_CONFLICT,),
            reason="claim.migration_in_use",
        )
    )
    made.apply(e.Destroyed(at=210.0, attempt=9, host_uuid=host(1), service="s1"))
    asked = []
    while made.instance.state is State.RELEASING:
        q = awaited_request_of(made.instance)
        assert isinstance(q, Release)
        asked.append(q.consumer)
        made.apply(e.Released(at=220.0, consumer=q.consumer, attempt=q.attempt or 0))
    assert ACTION not in asked, asked


def test_a_loss_that_its_host_has_answered_is_not_recorded_again() -> None:
    context = replace(PATIENCE, fences={host(1): Fence(host_uuid=host(1), host="h1", version=1, at=1.0)})
    one, found = active(), []
    for event in (DELETE, "released"):
        now = event
        if event == "released":
            q = awaited_request_of(one)
            now = e.Released(at=900.0, consumer=q.consumer, attempt=q.attempt or 0)
        steps = FenceSteps()
        one = steps.apply(one, step(one, now, context), now, context).instance
        found.append(sum(map(len, steps.stale.values())))
    assert one.state is State.DELETED
    assert found == [1, 0], found  # between the two its host has answered that it is gone


# --- A change that takes longer than its step, and a revert whose instance is deleted


def test_a_revert_of_a_resize_in_place_that_was_lost_has_an_end_though_its_instance_is_deleted() -> None:
    made = Scenario(
        in_place(State.RESIZED, action={**BY_REVERT, "answered": True}, queried=False, code="", highest_attempt=0)
    )
    made.apply(missed(made.instance))
    assert made.instance.phase == (State.RELEASING, State.FAILED)
    made.apply(DELETE)
    while isinstance(query := awaited_request_of(made.instance), Release):
        made.apply(e.Released(at=400.0, consumer=query.consumer, attempt=query.attempt or 0))
    assert made.instance.state is State.DELETED
    assert [m for m in made.commands if isinstance(m, ActionEvent) and m.terminal and m.request_id == OTHER]


def test_a_change_that_takes_longer_than_its_step_comes_to_an_end() -> None:
    made = begun(ActionKind.SHELVE, offload=True)
    assert made.instance.state is State.CHANGING
    for number in range(20):  # the snapshot takes 400 s, the step 300: its host gives it up each time, and begins anew
        at = 500.0 + 400 * number
        made.end(1, 1, done=False, runs=None, code="change.timeout")
        made.apply(e.TimedOut(at=at))
    timeouts = {m.timeout_s for m in made.commands if isinstance(m, ChangeMachine)}
    assert made.instance.state is not State.CHANGING or len(timeouts) > 1, (
        "20 times from the beginning, with the same limit"
    )


# --- A revert or abort whose source is silent when it is to be started again


def test_why_a_revert_waits_for_the_start_of_its_source_is_reported() -> None:
    made = to_resized()
    made.apply(request(ActionKind.REVERT, request_id=OTHER))

    made.apply(seen(awaited_request_of(made.instance)))
    made.apply(e.Destroyed(at=220.0, attempt=2, host_uuid=host(2), service="s1"))
    q = awaited_request_of(made.instance)
    made.apply(e.Reverted(at=221.0, attempt=q.attempt, consumer_generation=11))
    assert made.instance.state is State.RESTARTING, made.instance.phase
    before = len(made.commands)
    for n in range(5):
        made.apply(e.TimedOut(at=1000.0 + 700 * n))
    told = [
        (m.state, m.code, m.terminal)
        for m in made.commands[before:]
        if isinstance(m, ActionEvent) and m.request_id == OTHER
    ]
    assert told and any(code for _, code, _ in told), "no event of the revert in an hour"


# --- Answers of compute services about a record that has changed meanwhile, or of a database that was restored since


THIRD = "d0000000-0000-4000-8000-000000000003"


# --- Of the services that were asked about the source of a move.


def _fence(made: Scenario, n: int) -> SourceQuery:
    made.context = fenced(n)
    made.apply(e.HostFenced(at=220.0, host_uuid=host(n)))
    query = awaited_request_of(made.instance)
    assert isinstance(query, SourceQuery)
    return query


def _seen(query: SourceQuery) -> e.SourceAnswered:
    machine = AttemptOnHost(instance_uuid=UUID, host_uuid=query.host_uuid, service=query.service, attempt=query.attempt)
    answer = MachineLookupResult(machines=(machine,), hosts=(query.host_uuid,))
    return answer_about(UUID, query, [(query.service, answer)], 230.0)


def test_the_answer_about_an_earlier_moves_source_undoes_no_later_move() -> None:
    """A conductor is paused with the answer; meanwhile the move is confirmed, and the next one's destination fenced."""
    made = to_resized()
    late = _seen(asked := _fence(made, 2))
    made.context = PATIENCE
    made.apply(request(ActionKind.CONFIRM, request_id=OTHER))
    made.apply(e.Destroyed(at=240.0, attempt=1, host_uuid=host(1), service="s1"))
    made.apply(e.Released(at=241.0, consumer=ACTION))
    assert made.instance.phase == (State.ACTIVE, None) and made.instance.action is None
    made.apply(request(ActionKind.MIGRATE, 3, request_id=THIRD))
    made.apply(claimed(attempt=(number := made.instance.next_attempt)))
    made.end(3, number)
    made.end(2, 2)
    made.apply(replace(spawned(attempt=number, n=3), at=250.0))
    assert _fence(made, 3) != asked
    made.apply(late)
    assert made.instance.phase == (State.RESIZED, None), "nobody has seen the source of this move"


def test_an_answer_from_before_the_destination_was_used_again_undoes_nothing() -> None:
    """The same move: fenced, the answer is held back, the fence lifted, the source's host reinstalled, fenced again."""
    made = to_resized(auto_confirm_s=1000.0)
    late = _seen(_fence(made, 2))
    made.context = PATIENCE
    made.apply(e.TimedOut(at=260.0))  # it is used again, and waits for nothing
    assert made.instance.action is not None and not made.instance.action.rollback_code
    _fence(made, 2)
    made.apply(late)
    assert made.instance.state is State.RESIZED, "that its source is there was answered to another question"


def test_an_answer_that_takes_as_long_as_it_may_is_to_the_question_that_is_asked_then() -> None:
    """Each question was numbered anew before the services had answered it: the move waited for its source for ever."""
    made = to_resized()
    made.context = replace(fenced(2), answer_timeout_s=60.0)
    made.apply(e.HostFenced(at=220.0, host_uuid=host(2)))
    for at in (400.0, 600.0):
        made.apply(e.TimedOut(at=at))
        assert made.instance.deadline is not None and made.instance.deadline > at + 60.0

"""An instance moves to another cell, also amid a set-back: it never runs in both, and no machine is doubled."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest
from msgspec.structs import replace

from bus.contracts.actions import (
    ActionEvent,
    ActionKind,
    ActionState,
    CellTransfer,
    CellTransferOut,
    ChangeKind,
    ChangeMachine,
    Condition,
)
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.cell import Destroy, InstanceSpec
from bus.contracts.listing import ListedMachine
from bus.contracts.operations import EvacuationPolicy
from bus.contracts.placement import Claim, Release
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.request_handlers import transfer_event
from cell_conductor.rules.reconcile import ATTEMPTS_PER_INCARNATION, reconcile
from cell_conductor.rules.recovered import recovered
from cell_conductor.rules.recovery_facts import KnownInstance
from cell_conductor.state import events as e
from cell_conductor.state.instance import Instance, Power, State
from cell_conductor.state.step import StepContext
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.drain.drain_steps import is_restarted
from scheduler_worker.records.action_record import ActionContext
from scheduler_worker.records.build_record import RecordedBuild, SinceBuild
from tests.unit.cell_conductor.move_scenario import ACTION, OTHER, Scenario, active, begun, claimed, request, unbegun
from tests.unit.cell_conductor.records import fenced as on_fenced
from tests.unit.cell_conductor.scenario import PATIENCE, SPEC, UUID, host, queried, selection, spawned
from tests.unit.cell_conductor.test_single_conditions import fenced, in_place

THERE = replace(PATIENCE, cell="c2")
LARGER = InstanceSpec(instance_uuid=UUID, project_id="p", name="n", flavor="m1.large")


def departs(instance: Instance, kind: ActionKind = ActionKind.MIGRATE, to_cell: str = "c2", **fields: Any) -> e.Event:
    known = {"request_id": ACTION, "attempt": instance.last_attempt, **fields}
    message = CellTransferOut(instance_uuid=UUID, project_id="p", kind=kind, to_cell=to_cell, **known)
    return transfer_event(message, 200.0)


def leaving(kind: ActionKind = ActionKind.MIGRATE) -> Scenario:
    """Its host was commanded to keep its image."""
    made = Scenario(active())
    made.apply(departs(made.instance, kind))
    return made


def transferred(kind: ActionKind = ActionKind.MIGRATE) -> tuple[Scenario, CellTransfer]:
    made = leaving(kind)
    made.end(1, 1, image="snapshot-1", runs=False)
    made.apply(gone(made.instance, 1))
    released(made)
    return made, transfer_of(made)


def given() -> CellTransfer:
    return transferred()[1]


def released(made: Scenario) -> None:
    query = awaited_request_of(made.instance)
    assert isinstance(query, Release)
    made.apply(e.Released(at=230.0, attempt=query.attempt or 0))


def transfer_of(made: Scenario) -> CellTransfer:
    return [one.transfer for one in made.commands if isinstance(one, ActionEvent) and one.transfer is not None][-1]


def arrives(
    transfer: CellTransfer, kind: ActionKind = ActionKind.MIGRATE, *hosts: int, **fields: object
) -> e.ActionRequested:
    known = {"transfer": transfer, "to_cell": "c1", **fields}
    return request(kind, *(hosts or (2, 3)), **known)


def in_next_cell(*happened: e.Event, context: StepContext = THERE) -> Scenario:
    made = Scenario(Instance(uuid=UUID), context)
    made.apply(*happened)
    return made


def building(made: Scenario, n: int = 2) -> Scenario:
    """A host is claimed, can take it, and was commanded to build it."""
    made.apply(claimed(made.instance.next_attempt))
    made.end(n, made.instance.attempt)
    return made


def changes(made: Scenario) -> list[ChangeKind]:
    return [one.change for one in made.commands if isinstance(one, ChangeMachine)]


def gone(instance: Instance, n: int) -> e.Destroyed:
    return e.Destroyed(at=220.0, attempt=instance.last_attempt, host_uuid=host(n), service="s1")


# --- it leaves, and is built in the next cell


@pytest.mark.parametrize("kind", [ActionKind.MIGRATE, ActionKind.RESIZE])
def test_its_next_cell_claims_a_host_and_builds_it_from_its_image_and_the_move_is_over(kind: ActionKind) -> None:
    former, transfer = transferred(kind)
    assert changes(former) == [ChangeKind.SNAPSHOT] and former.destroys == [(1, host(1))]
    there = in_next_cell(arrives(transfer, kind, spec=LARGER))
    claim = awaited_request_of(there.instance)
    assert isinstance(claim, Claim) and claim.attempt > transfer.attempt + 1 and claim.migration is None
    assert [len(claim.options), claim.consumer_generation] == [2, None]
    building(there)
    (spawn,) = there.spawns
    assert spawn.origin is not None and (spawn.origin.image, spawn.origin.runs) == ("snapshot-1", True)
    assert (spawn.attempt, spawn.host_uuid, spawn.spec.flavor) == (claim.attempt, host(2), "m1.large")
    there.apply(spawned(n=2, attempt=spawn.attempt, at=260.0))
    assert (there.instance.state, there.instance.power) == (State.ACTIVE, Power.RUNNING)
    assert there.terminals == [(kind, ActionState.DONE, "")] and former.terminals == []
    ends = [one for one in (*former.commands, *there.commands) if isinstance(one, ActionEvent)]
    assert ends[-1].condition is Condition.ACTIVE
    sequences = [one.sequence for one in ends]
    assert sequences == sorted(set(sequences))


def test_a_departure_is_announced_until_the_build_elsewhere_has_ended() -> None:
    """Schedulers that were restored have forgotten to say so: its record was kept for ever."""
    made, transfer = transferred()
    announced = made.commands[-1]
    for _ in range(3):
        assert made.instance.deadline is not None
        made.apply(e.TimedOut(at=made.instance.deadline))
        assert made.commands[-1] == replace(announced, at=ANY) and made.instance.transfer == transfer
    made.apply(departs(made.instance, ended=True))
    assert (made.instance.phase, made.instance.deadline) == ((State.TRANSFERRED, State.ABSENT), None)


def test_what_has_another_flavor_than_the_hosts_there_were_chosen_for_does_not_leave() -> None:
    """It would be built with that one: its client has not requested it."""
    made = Scenario(replace(active(), spec=LARGER))
    made.apply(departs(made.instance, expected_flavor="m1.tiny"))
    assert made.terminals == [(ActionKind.MIGRATE, ActionState.REFUSED, "instance.flavor_changed")]
    made.apply(departs(made.instance, expected_flavor="m1.large", request_id=OTHER))
    assert made.instance.state is State.CHANGING


def test_what_no_host_of_the_next_cell_builds_comes_home_as_it_was() -> None:
    former, transfer = transferred(ActionKind.RESIZE)
    there = building(in_next_cell(arrives(transfer, ActionKind.RESIZE, spec=LARGER)))
    attempt = there.instance.attempt
    there.apply(
        e.SpawnFailed(at=261.0, attempt=attempt, host_uuid=host(2), code="image.broken", final=True),
        e.Destroyed(at=262.0, attempt=attempt, host_uuid=host(2), service="s1"),
    )
    released(there)
    back = transfer_of(there)
    assert (there.instance.state, there.terminals) == (State.TRANSFERRED, [])
    assert (back.cell, back.code, back.spec, back.image) == ("c1", "image.broken", transfer.spec, "snapshot-1")
    assert back.attempt > attempt > transfer.attempt
    former.apply(arrives(back, ActionKind.RESIZE, 1, to_cell=None, spec=None))
    assert building(former, 1).spawns[-1].spec == active().spec
    former.apply(spawned(n=1, attempt=former.instance.attempt, at=270.0))
    assert (former.instance.state, former.terminals) == (
        State.ACTIVE,
        [(ActionKind.RESIZE, ActionState.FAILED, "image.broken")],
    )
    former.apply(departs(active()))  # its schedulers' database was restored to the first step
    assert [one[1:] for one in former.terminals] == [(ActionState.FAILED, "image.broken")] * 2


@pytest.mark.parametrize("begun_by", [leaving, lambda: begun(ActionKind.SHELVE, offload=True)])
@pytest.mark.parametrize("power", [Power.RUNNING, Power.STOPPED])
def test_what_its_host_has_no_images_of_is_as_it_was(begun_by: Any, power: Power) -> None:
    """Its driver has no snapshots, and states nothing about the machine: it was asked again for ever."""
    made = begun_by()
    made.instance = replace(made.instance, power=power)
    made.end(1, 1, done=False, code="change.unsupported")
    assert (made.instance.phase, made.instance.power) == ((State.ACTIVE, None), power)
    assert [one[1:] for one in made.terminals] == [(ActionState.FAILED, "change.unsupported")]


def test_its_client_waits_for_no_host_that_is_to_start_it_again() -> None:
    made = leaving()
    made.end(1, 1, done=False, runs=False, code="disk.full")
    made.apply(e.TimedOut(at=made.instance.deadline or 0.0))
    assert made.terminals == [(ActionKind.MIGRATE, ActionState.FAILED, "disk.full")]
    assert made.instance.state is State.RESTARTING


def test_the_schedulers_wait_for_a_host_that_does_not_know_whether_the_image_is_kept() -> None:
    """Its answer leads the move: an end before it would leave the instance stopped, for a move that has failed."""
    made = leaving()
    made.end(1, 1, done=False)
    made.apply(e.TimedOut(at=made.instance.deadline or 0.0))
    assert (made.terminals, made.instance.state) == ([], State.CHANGING)
    made.end(1, 1, image="snapshot-1", runs=False)
    assert made.instance.phase == (State.DESTROYING, State.OFFLOADED)


# --- a cell's database is restored in the middle: what hosts list and the schedulers have decides


INCARNATION = 2
FLOOR = INCARNATION * ATTEMPTS_PER_INCARNATION


def machine(attempt: int, n: int = 3, **fields: Any) -> ListedMachine:
    known = {"instance_uuid": UUID, "host": f"host-{n}", "service": "s1", "project_id": "p", **fields}
    return ListedMachine(attempt=attempt, host_uuid=host(n), **known)


def here(attempt: int, *hosts: int, **fields: Any) -> KnownInstance:
    """The map has it in this cell, and placement on these hosts; its move is under way."""
    places = tuple(selection(n) for n in hosts)
    under_way = {"request_id": ACTION, "kind": ActionKind.MIGRATE, "spec": active().spec, "own_count": len(hosts)}
    return KnownInstance(attempt=attempt, project_id="p", selections=places, sequence=50, **{**under_way, **fields})


def elsewhere(attempt: int, **fields: Any) -> KnownInstance:
    return here(attempt, is_in_other_cell=True, cell="c2", **fields)


def recover(
    made: Scenario, *machines: ListedMachine, known: KnownInstance | None, absent: tuple[int, ...] = (), **given: Any
) -> Scenario:
    """Its record is as it is, and these machines are listed."""
    made.commands.clear()
    record, silent = replace(made.instance, blocked_reason=""), [host(n) for n in absent]
    found = reconcile(record, machines, known, silent, None, incarnation=INCARNATION, **given)
    stepped = recovered(made.instance, found, known, 1_600.0, made.context, incarnation=INCARNATION)
    assert stepped is not None
    made.instance, made.commands = stepped.instance, [*stepped.commands]
    return made


def orders(made: Scenario) -> list[tuple[int, str, bool]]:
    return [(one.attempt, one.host_uuid, one.keep_if_complete) for one in made.commands if isinstance(one, Destroy)]


def arrived() -> Scenario:
    """It is being built in the next cell."""
    return building(in_next_cell(arrives(transferred()[1])))


# --- the next cell was restored


@pytest.mark.parametrize(("attempt", "state", "blocked"), [(9, State.CLAIMING, ""), (0, State.ACTIVE, "host_absent")])
def test_an_instance_that_comes_back_while_it_is_blocked_is_not_refused(
    attempt: int, state: State, blocked: str
) -> None:
    """The other cell has given it up: no cell had it, nor its image, any more."""
    made = Scenario(replace(active(), blocked_reason="host_absent", deadline=1.0))
    made.apply(arrives(replace(given(), attempt=attempt)))
    assert (made.instance.state, made.instance.blocked_reason) == (state, blocked)
    assert made.terminals == []


@pytest.mark.parametrize("n", [2, 3], ids=["the claimed host", "another host"])
def test_a_complete_machine_of_an_arrival_is_the_instances(n: int) -> None:
    there = arrived()
    attempt = there.instance.attempt + (n == 3)
    incomplete = machine(attempt, n, complete=False)
    recover(there, incomplete, known=here(attempt, n))
    assert (there.instance.state, there.instance.blocked_reason) == (State.FINISHING, "incomplete")
    assert (orders(there), there.terminals) == ([(attempt, host(n), True)], [])
    recover(there, replace(incomplete, complete=True), known=here(attempt, n))
    now = there.instance
    assert (now.state, now.attempt, now.host_uuid, now.blocked_reason) == (State.ACTIVE, attempt, host(n), "")
    assert (there.terminals, orders(there)) == ([(ActionKind.MIGRATE, ActionState.DONE, "")], [])


@pytest.mark.parametrize("complete", [False, True])
def test_a_move_ends_no_machine_that_an_operator_keeps(complete: bool) -> None:
    """It became the destination that is given up."""
    there = arrived()
    recover(there, machine(9, complete=complete), known=here(9, 3), protected=[host(3)])
    assert there.instance.host_uuid != host(3) and orders(there) == []


@pytest.mark.parametrize(
    ("known", "absent", "reason"),
    [
        (here(3, 2), (), ""),
        (here(3, 2), (9,), ""),
        (here(3, 2), (2,), "host_absent"),
        (here(4, 5), (5,), "host_absent"),
        (None, (), "schedulers_silent"),
        (None, (9,), "host_absent"),
    ],
)
def test_an_arrival_is_offloaded_once_its_hosts_have_listed_that_none_is_there(
    known: KnownInstance | None, absent: tuple[int, ...], reason: str
) -> None:
    """Not before: its image would be started a second time."""
    there = recover(arrived(), known=known, absent=absent)
    assert there.instance.blocked_reason == reason
    if reason:
        assert (there.instance.state, there.commands) == (State.FINISHING, [])
    else:
        assert (there.instance.state, there.instance.image) == (State.OFFLOADED, "snapshot-1")
        assert there.terminals == [(ActionKind.MIGRATE, ActionState.FAILED, "action.lost")]


@pytest.mark.parametrize(("absent", "is_blocked"), [((1,), True), ((2,), True), ((9,), False)])
def test_a_move_with_a_source_waits_for_its_two_hosts_and_no_others(absent: tuple[int, ...], is_blocked: bool) -> None:
    checking = begun(ActionKind.MIGRATE, 2)
    checking.apply(claimed())
    left = [machine(1, n, allocations={host(n): {}}) for n in {1} - set(absent)]
    recover(checking, *left, known=here(2, 2, 1, own_count=1), absent=absent)
    assert bool(checking.instance.blocked_reason) is is_blocked
    if not is_blocked:
        assert (checking.instance.state, checking.instance.host_uuid) == (State.ACTIVE, host(1))
        assert checking.terminals == [(ActionKind.MIGRATE, ActionState.FAILED, "action.lost")]


# --- the former cell was restored


def before_it_left() -> list[Scenario]:
    """Records that a backup may have of one that is in the next cell."""
    kept = leaving()
    kept.end(1, 1, image="snapshot-1", runs=False)
    holds = leaving()
    holds.end(1, 1, image="snapshot-1", runs=False)
    holds.apply(gone(holds.instance, 1))
    return [Scenario(active()), leaving(), kept, holds]


def test_a_record_from_before_its_departure_ends_no_move_that_may_go_on_elsewhere() -> None:
    for made in before_it_left():
        before = made.instance.phase
        recover(made, known=None)
        assert (made.instance.phase, made.instance.blocked_reason) == (before, "schedulers_silent")
        assert made.commands == [] and awaited_request_of(made.instance) is None


@pytest.mark.parametrize("under_way", [{}, {"request_id": "", "kind": None}], ids=["under way", "over"])
def test_a_record_from_before_its_departure_gives_it_up_and_leaves_the_move_to_the_next_cell(
    under_way: dict[str, Any],
) -> None:
    """Its attempts stay those of the next cell, and an end of the move would be a second one."""
    for made in before_it_left():
        recover(made, known=elsewhere(9, **under_way))
        now = made.instance
        assert now.phase == (State.TRANSFERRED, State.ABSENT) and awaited_request_of(now) is None
        assert (made.commands, now.deadline, now.last_attempt < FLOOR) == ([], None, True)
        recover(made, known=elsewhere(9, **under_way))
        assert (made.instance, made.commands) == (now, []), "it is not made again"


def test_what_the_next_cell_gives_back_after_a_set_back_of_the_former_one_is_built_there() -> None:
    """The move had ended by the record, so it rested offloaded, without an end."""
    for made in before_it_left():
        recover(made, known=elsewhere(9))
        back = replace(given(), cell="c1", attempt=9, code="image.broken")
        made.apply(arrives(back, ActionKind.MIGRATE, 1, to_cell=None))
        building(made, 1).apply(spawned(n=1, attempt=made.instance.attempt, at=1_700.0))
        assert made.instance.state is State.ACTIVE
        assert made.terminals == [(ActionKind.MIGRATE, ActionState.FAILED, "image.broken")]


def test_schedulers_that_were_set_back_as_well_are_referred_to_the_next_cell() -> None:
    """Any request of theirs ended the conductor: the record had no departure."""
    for made in before_it_left():
        recover(made, known=elsewhere(9))
        for event in (e.DeleteRequested(at=1_700.0, project_id="p", attempt=1), queried(), request(ActionKind.STOP)):
            made.commands.clear()
            made.apply(event)
            assert transfer_of(made).cell == "c2"


@pytest.mark.parametrize("listed", [(machine(1, 1),), (machine(9),)])
def test_what_has_a_machine_here_as_well_is_decided_by_nobody_else_than_an_operator(
    listed: tuple[ListedMachine, ...],
) -> None:
    made = recover(leaving(), *listed, known=elsewhere(9))
    assert (made.instance.blocked_reason, orders(made), made.terminals) == ("conflict", [], [])


def test_what_had_no_machine_any_more_rests_offloaded_and_leaves_by_the_next_request() -> None:
    for made in before_it_left()[2:]:
        recover(made, known=here(made.instance.last_attempt))
        assert (made.instance.state, made.instance.image) == (State.OFFLOADED, "snapshot-1")
        assert made.terminals == [(ActionKind.MIGRATE, ActionState.FAILED, "action.lost")]
        made.apply(departs(made.instance, ActionKind.UNSHELVE, request_id=OTHER))
        assert made.instance.state is State.TRANSFERRED and transfer_of(made).cell == "c2"


@pytest.mark.parametrize("is_query", [False, True])
def test_a_record_that_was_given_up_without_its_departure_leaves_no_request_without_an_end(*, is_query: bool) -> None:
    """The cell was restored to before the transfer, and its schedulers to before the move."""
    made = Scenario(active())
    over = CellTransferOut(
        request_id=OTHER,
        instance_uuid=UUID,
        project_id="p",
        kind=ActionKind.MIGRATE,
        to_cell="c2",
        attempt=2,
        ended=True,
    )
    made.apply(transfer_event(over, 1_700.0))
    assert made.instance.phase == (State.TRANSFERRED, State.ABSENT)
    asked = departs(active())
    assert isinstance(asked, e.ActionRequested)
    for _ in range(2):
        made.apply(unbegun(asked) if is_query else asked)
    end = (ActionState.FAILED, "action.lost") if is_query else (ActionState.REFUSED, "instance.transferred")
    assert made.terminals == [(ActionKind.MIGRATE, *end)] * 2


def test_a_delete_that_came_before_its_instance_is_later_than_that_whatever_its_attempt() -> None:
    there = in_next_cell(e.DeleteRequested(at=100.0, project_id="p", may_have_started=True, attempt=1_501))
    released(there)
    assert there.instance.state is State.DELETED
    _, transfer = transferred()
    there.apply(arrives(replace(transfer, attempt=1_500)))
    assert there.instance.state is State.DELETED


def test_what_came_here_and_went_on_outranks_no_later_cell() -> None:
    """It is in a third cell by the next attempts: what comes back from there is built."""
    there = arrived()
    attempt = there.instance.last_attempt
    recover(there, known=elsewhere(attempt + 3))
    assert there.instance.phase == (State.TRANSFERRED, State.ABSENT) and awaited_request_of(there.instance) is None
    newest = replace(given(), attempt=attempt + 5, image="newest", at=2_000.0)
    there.apply(arrives(newest, request_id=OTHER))
    assert (there.instance.state, there.instance.image) == (State.CLAIMING, "newest")


def test_one_that_was_resized_in_place_keeps_no_move_where_a_later_machine_is_its_own() -> None:
    """Every later delete waited for the end of a move that nothing ended."""
    resized = begun(ActionKind.RESIZE, 1)
    resized.apply(claimed(resized.instance.next_attempt))
    resized.end(1, 1)
    assert resized.instance.phase == (State.RESIZED, None) and resized.instance.is_in_place
    recover(resized, machine(5, 3, allocations={host(3): {}}), known=here(5, 3, request_id="", kind=None))
    now = resized.instance
    assert (now.state, now.host_uuid, now.action, now.last_attempt) == (State.ACTIVE, host(3), None, FLOOR)


def test_a_delete_numbers_above_all_that_its_departed_record_gave_out() -> None:
    given, _ = transferred()
    given.instance = replace(given.instance, highest_attempt=3_000)
    given.apply(e.DeleteRequested(at=1_500.0, project_id="p", may_have_started=True, attempt=3_001))
    query = awaited_request_of(given.instance)
    assert isinstance(query, Release) and query.attempt is not None
    assert query.attempt > 3_001


# --- An instance that awaits its confirm on a host that is fenced


VM = "a0000000-0000-4000-8000-000000000000"


def test_it_is_restarted_elsewhere_or_its_move_is_ended_by_its_cell() -> None:
    made = in_place()
    made.context = on_fenced(1)
    made.instance = replace(made.instance, spec=replace(SPEC, on_host_failure=EvacuationPolicy.RESTART))
    made.apply(fenced(1))
    still_resized = made.instance.state is State.RESIZED
    build = RecordedBuild(
        instance_uuid=VM,
        project_id="p",
        state=BuildState.ACTIVE,
        sequence=9,
        terminal=True,
        cell="c1",
        instance=SinceBuild(condition=Condition.RESIZED),
    )
    request = BuildRequest(
        instance_uuid=VM, project_id="p", flavor="m1.small", on_host_failure=EvacuationPolicy.RESTART
    )
    restarted = is_restarted(ActionContext(build=build, build_request=request), SchedulerConfig())
    assert restarted or not still_resized, "the cell leaves it resized, and the scheduler leaves it to the cell"

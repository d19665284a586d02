"""The orders of a record, and what is asked and granted in each state: a row for each that makes the difference."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionKind, ChangeKind, ChangeMachine
from bus.contracts.cell import Destroy
from bus.contracts.placement import Claim, ClaimOption, Migration, Release, Revert, ServerGroup
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.state import events as e
from cell_conductor.state.commands import (
    MAX_STEP_S,
    change_of,
    commands_of,
    next_resend_at,
    resend_all,
    step_s,
    with_change_number,
    with_commands,
)
from cell_conductor.state.events import SourceQuery
from cell_conductor.state.instance import ActionInProgress, Instance, Phase, Power, State
from cell_conductor.state.step import Step
from cell_conductor.transition import step
from tests.unit.cell_conductor.move_scenario import ACTION, OTHER
from tests.unit.cell_conductor.records import (
    BY_REVERT,
    ON_1,
    ON_2,
    ON_3,
    at_source,
    in_place,
    moving,
    record,
    unshelving,
)
from tests.unit.cell_conductor.scenario import PATIENCE, SPEC, UUID, claimed, host, phase_of, selection

# --- The orders of a record: a row for each state, request and fact that alone makes the difference.


OLD, NEW = replace(SPEC, flavor="small"), replace(SPEC, flavor="large")
DELETING, CONFIRMING, UNDOING, OFFLOADING = (
    (State.DESTROYING, then) for then in (State.DELETED, State.ACTIVE, State.REVERTING, State.OFFLOADED)
)
MIGRATING = ActionInProgress(
    request_id=ACTION,
    kind=ActionKind.MIGRATE,
    source=replace(selection(1), service="s9"),
    source_attempt=1,
    spec=OLD,
    started_at=500.0,
    change_number=5,
    rescue_password="secret",
    step_timeout_s=100.0,
)
NO_MOVE: dict[str, Any] = {"action": None}
FIELDS_OF_INSTANCE = frozenset({"action", "queried", "selections"})


def in_phase(at: State | Phase, kind: ActionKind = ActionKind.MIGRATE, **fields: Any) -> Instance:
    """Attempt 2 on host 2, from attempt 1 on host 1. facts: of the instance, or else of its move."""
    state, next_state = phase_of(at)
    of_action = {name: fact for name, fact in fields.items() if name not in FIELDS_OF_INSTANCE}
    known = Instance(
        uuid=UUID,
        state=state,
        next_state=next_state,
        spec=NEW,
        selections=(selection(1), selection(2)),
        selection_index=1,
        attempt=2,
        change_number=5,
        image="snapshot",
        action=replace(MIGRATING, kind=kind, **of_action),
    )
    return replace(known, **{name: fact for name, fact in fields.items() if name in FIELDS_OF_INSTANCE})


def resized_here(at: State | Phase, **fields: Any) -> Instance:
    """A resize on host 1, which another service has by now."""
    here = replace(selection(1), service="s8", allocations={host(1): {"VCPU": 8}})
    return in_phase(at, ActionKind.RESIZE, selections=(selection(1), here), **fields)


HERE, SOURCE = (2, host(2)), (1, host(1))


@pytest.mark.parametrize(
    ("known", "context", "destroyed", "keep_if_complete"),
    [
        (in_phase(State.ACTIVE, **NO_MOVE), PATIENCE, [], False),
        (in_phase(State.ACTIVE, queried=True, **NO_MOVE), PATIENCE, [], False),
        (in_phase(State.BUILDING, **NO_MOVE), PATIENCE, [], False),
        (in_phase(State.BUILDING, queried=True, **NO_MOVE), PATIENCE, [HERE], True),
        (in_phase((State.CLAIMING, State.BUILDING), queried=True, **NO_MOVE), PATIENCE, [], False),
        (in_phase(State.FINISHING), PATIENCE, [], False),
        (in_phase(State.FINISHING, queried=True), PATIENCE, [HERE], True),
        (in_phase(State.RESIZED), PATIENCE, [], False),
        (in_phase(State.RESIZED, queried=True), PATIENCE, [], False),
        (in_phase(DELETING), PATIENCE, [HERE, SOURCE], False),
        (in_phase(DELETING, queried=True), PATIENCE, [HERE, SOURCE], False),
        (in_phase(DELETING, current_destroyed=True), PATIENCE, [SOURCE], False),
        (in_phase(DELETING, source_destroyed=True), PATIENCE, [HERE], False),
        (in_phase(DELETING, source=None), PATIENCE, [HERE], False),
        (in_phase(DELETING, **NO_MOVE), PATIENCE, [HERE], False),
        (resized_here(DELETING), PATIENCE, [(2, host(1))], False),
        (in_phase(CONFIRMING), PATIENCE, [SOURCE], False),
        (in_phase(OFFLOADING), PATIENCE, [HERE], False),
        (in_phase(UNDOING), PATIENCE, [HERE], False),
        (in_phase(UNDOING), PATIENCE, [HERE], False),
    ],
)
def test_the_machines_that_are_to_be_destroyed(
    known: Instance, context: object, destroyed: list[tuple[int, str]], keep_if_complete: bool
) -> None:
    orders = commands_of(known, context)  # type: ignore[arg-type]
    assert [(one.attempt, one.host_uuid, one.keep_if_complete) for one in orders if isinstance(one, Destroy)] == [
        (*each, keep_if_complete) for each in destroyed
    ]
    assert len(orders) == len(destroyed)


@pytest.mark.parametrize(
    ("known", "change"),
    [
        (in_phase(State.CHANGING, ActionKind.STOP), ChangeKind.STOP),
        (in_phase(State.CHANGING, ActionKind.UNSHELVE), ChangeKind.START),
        (in_phase(State.CHANGING, **NO_MOVE), None),
        (in_phase(State.RESTARTING, **NO_MOVE), None),
        (in_phase(State.RESIZED), None),
        (in_phase(State.RESIZING), None),
        (resized_here(State.RESIZING), ChangeKind.RESIZE),
        (resized_here(UNDOING), ChangeKind.RESIZE),
        (in_phase(UNDOING), None),
        (in_phase(State.HANDING_OVER), ChangeKind.HAND_OVER),
        (in_phase(State.CHANGING, to_cell="c2"), ChangeKind.SNAPSHOT),
        (in_phase(State.CHANGING, ActionKind.UNSHELVE, to_cell="c2"), ChangeKind.SNAPSHOT),
        (in_phase(State.HANDING_OVER, ActionKind.LIVE_MIGRATE), ChangeKind.HAND_OVER_LIVE),
        (in_phase(State.PREPARING), ChangeKind.CHECK),
        (in_phase(State.PREPARING, to_cell="c2"), ChangeKind.CHECK),
        (in_phase(State.PREPARING, ActionKind.LIVE_MIGRATE), ChangeKind.CHECK),
        (in_phase(State.RESTARTING, ActionKind.LIVE_MIGRATE), ChangeKind.START),
        (replace(in_phase(State.RESTARTING), action=replace(MIGRATING, power=Power.STOPPED)), ChangeKind.STOP),
        (replace(in_phase(State.PREPARING), action=replace(MIGRATING, power=Power.STOPPED)), ChangeKind.CHECK),
    ],
)
def test_the_change_that_is_awaited(known: Instance, change: ChangeKind | None) -> None:
    assert change_of(known) is change


AT_SOURCE = {"attempt": 1, "host_uuid": host(1), "service": "s9", "spec": OLD, "allocations": {host(1): {"VCPU": 1}}}


@pytest.mark.parametrize(
    ("known", "fields"),
    [
        (in_phase(State.PREPARING), {}),
        (in_phase(State.HANDING_OVER), {**AT_SOURCE, "to_host": host(2)}),
        (in_phase(State.HANDING_OVER, ActionKind.LIVE_MIGRATE), {**AT_SOURCE, "to_host": host(2)}),
        (in_phase(State.RESTARTING), {}),
        (in_phase(State.RESTARTING, restoring_size=True), {}),
        (in_phase(State.CHANGING, ActionKind.STOP), {}),
        (in_phase(State.CHANGING, ActionKind.RESCUE), {"rescue_password": "secret"}),
        (
            resized_here(State.RESIZING),
            {"host_uuid": host(1), "service": "s8", "allocations": {host(1): {"VCPU": 8}}},
        ),
        (resized_here(State.RESIZING, restoring_size=True), {**AT_SOURCE, "service": "s8"}),
        (resized_here(UNDOING), {**AT_SOURCE, "service": "s8"}),
    ],
)
def test_what_a_change_is_commanded_with(known: Instance, fields: dict[str, object]) -> None:
    (command,) = commands_of(known, PATIENCE)
    assert isinstance(command, ChangeMachine)
    expected = {
        "attempt": 2,
        "host_uuid": host(2),
        "service": "s1",
        "spec": NEW,
        "allocations": {host(2): {"VCPU": 2}},
        "to_host": None,
        "rescue_password": "",
        **fields,
    }
    assert {name: getattr(command, name) for name in expected} == expected
    assert (command.change_number, command.timeout_s, command.database_id) == (5, 100.0, PATIENCE.database_id)


@pytest.mark.parametrize(
    ("before", "after", "again", "count"),
    [
        (in_phase(State.RESIZED), in_phase(DELETING), False, 2),
        (in_phase(DELETING), in_phase(DELETING), False, 0),
        (in_phase(DELETING), in_phase(DELETING), True, 2),
        (in_phase(CONFIRMING), in_phase(DELETING), False, 2),
        (in_phase(DELETING, source=None), in_phase(DELETING), False, 1),
        (in_phase(DELETING), in_phase(State.DELETED), False, 0),
    ],
)
def test_orders_are_sent_once_and_before_the_other_messages(
    before: Instance, after: Instance, again: bool, count: int
) -> None:
    (other,) = commands_of(in_phase(OFFLOADING), PATIENCE)
    stepped = with_commands(before, Step(after, (other,), resend=again), PATIENCE)
    assert stepped.commands == (*commands_of(after, PATIENCE)[len(commands_of(after, PATIENCE)) - count :], other)


@pytest.mark.parametrize(
    ("known", "queried", "command"),
    [
        (in_phase(State.BUILDING, **NO_MOVE), True, 5),
        (in_phase((State.CLAIMING, State.BUILDING), **NO_MOVE), False, 5),
        (in_phase((State.CLAIMING, State.BUILDING), queried=True, **NO_MOVE), True, 5),
        (in_phase(DELETING), False, 5),
        (in_phase(State.RESIZED), False, 5),
        (in_phase(State.PREPARING), False, 2000),
    ],
)
def test_without_an_answer_all_is_sent_again_under_a_new_number(known: Instance, queried: bool, command: int) -> None:
    stepped = resend_all(replace(known, since=1.5), 2.0, PATIENCE)
    after = stepped.instance
    assert (stepped.resend, after.queried, after.change_number) == (True, queried, command)
    assert after.deadline == 2.0 + PATIENCE.destroy_retry_s


@pytest.mark.parametrize(("waited", "wait"), [(0.0, 30.0), (30.0, 30.0), (31.0, 31.0), (600.0, 600.0), (601.0, 600.0)])
def test_what_is_not_answered_is_sent_less_and_less_often(waited: float, wait: float) -> None:
    context = replace(PATIENCE, destroy_retry_s=30.0, destroy_retry_max_s=600.0)
    assert next_resend_at(Instance(uuid=UUID, since=100.0), 100.0 + waited, context) == 100.0 + waited + wait


@pytest.mark.parametrize(("at", "command"), [(0.001, 6), (0.006, 6), (0.007, 7), (2.0, 2000)])
def test_a_change_is_numbered_above_all_before_and_by_the_time(at: float, command: int) -> None:
    after = with_change_number(in_phase(State.PREPARING), at)
    assert after.action is not None and (after.change_number, after.action.change_number) == (command, command)


LARGE = replace(selection(1), allocations={host(1): {"MEMORY_MB": 4000, "VCPU": 9}, host(3): {"VCPU": 1}})


@pytest.mark.parametrize(
    ("source", "kind", "mb_s", "seconds"),
    [
        (LARGE, ChangeKind.HAND_OVER_LIVE, 10.0, 500.0),
        (LARGE, ChangeKind.HAND_OVER_LIVE, 0.0, 100.0),
        (LARGE, ChangeKind.HAND_OVER_LIVE, 0.001, MAX_STEP_S),
        (LARGE, ChangeKind.HAND_OVER, 10.0, 100.0),
        (None, ChangeKind.HAND_OVER_LIVE, 10.0, 100.0),
        (selection(1), ChangeKind.HAND_OVER_LIVE, 0.01, 100.0),
    ],
)
def test_a_live_migration_has_the_time_to_copy_its_memory(
    source: object, kind: ChangeKind, mb_s: float, seconds: float
) -> None:
    action = replace(MIGRATING, source=source)
    assert step_s(action, kind, replace(PATIENCE, live_copy_mb_s=mb_s)) == seconds


# --- What is asked of placement or of services in each state, which claims may be granted in it, and what is illegal.


S = State
GROUP = ServerGroup(uuid="g", policy="affinity")
OPTION_2, OPTION_3 = (
    ClaimOption(allocations=on.allocations, spec_generations=on.spec_generations) for on in (ON_2, ON_3)
)
CLAIM = Claim(
    consumer=UUID,
    attempt=5,
    consumer_generation=7,
    release_first=True,
    options=(OPTION_3,),
    project_id="p",
    user_id="u",
)
MIGRATION = Migration(uuid=ACTION, source=ON_1.allocations)
OF_INSTANCE = Release(consumer=UUID, attempt=5)
OF_MIGRATION = Release(consumer=ACTION, project_id="p", of_migration=True)
BOTH = (OPTION_2, OPTION_3)


@pytest.mark.parametrize(
    ("known", "query"),
    [
        (record(S.CLAIMING, S.BUILDING), CLAIM),
        (
            record(S.CLAIMING, S.BUILDING, server_group=GROUP, limits={"VCPU": 9}),
            replace(CLAIM, server_group=GROUP, limits={"VCPU": 9}, options=(replace(OPTION_3, host=host(3)),)),
        ),
        (record(S.CLAIMING, S.BUILDING, selection_index=0), replace(CLAIM, options=BOTH)),
        (record(S.CLAIMING, S.DELETED), CLAIM),
        (at_source(), replace(CLAIM, release_first=False, options=BOTH, migration=MIGRATION)),
        (moving(S.CLAIMING, S.PREPARING), replace(CLAIM, migration=MIGRATION)),
        (unshelving(S.CLAIMING, S.PREPARING), CLAIM),
        (unshelving(S.CLAIMING, S.PREPARING, selection_index=0), replace(CLAIM, release_first=False, options=BOTH)),
        (moving(S.REVERTING), Revert(consumer=UUID, migration=MIGRATION, source_attempt=4, attempt=5)),
        (record(S.RELEASING, S.FAILED), OF_INSTANCE),
        (moving(S.RELEASING, S.FAILED), OF_INSTANCE),
        (moving(S.RELEASING, S.DELETED, {"instance_released": True}), OF_MIGRATION),
        (unshelving(S.RELEASING, S.OFFLOADED), OF_INSTANCE),
        (moving(S.RELEASING, S.ACTIVE), OF_MIGRATION),
        (moving(S.RESIZED, action={**BY_REVERT, "change_number": 5}), SourceQuery(host(1), "s1", 1, 5)),
        (
            in_place(S.RESIZED, action={"rollback_code": "host.fenced", "change_number": 5}),
            SourceQuery(host(1), "s1", 1, 5),
        ),
        (moving(S.RESIZED), None),
        (
            moving(S.REVERTING, action=BY_REVERT),
            Revert(consumer=UUID, migration=MIGRATION, source_attempt=4, attempt=5),
        ),
        (moving(S.PREPARING, action={"instance_released": True}), None),
        (record(S.ACTIVE), None),
        (record(S.BUILDING), None),
        (record(S.DESTROYING, S.DELETED), None),
    ],
)
def test_the_request_that_follows_from_a_record(known: Instance, query: object) -> None:
    assert awaited_request_of(known) == query


@pytest.mark.parametrize(
    ("before", "highest"),
    [
        (record(S.CLAIMING, S.BUILDING), 5),
        (record(S.FAILED), 5),
        (record(S.DELETED), 5),
        (record(S.RELEASING, S.FAILED), 5),
        (moving(S.REVERTING), 5),
        (record(S.ACTIVE), 4),
        (moving(S.PREPARING), 4),
        (moving(S.FINISHING), 4),
        (record(S.BUILDING), 4),
    ],
)
def test_a_claim_beyond_the_one_that_was_requested_changes_nothing(before: Instance, highest: int) -> None:
    step(before, claimed(highest), PATIENCE)
    assert step(before, claimed(highest + 1), PATIENCE).instance is before


ANSWERS = {
    Claim: lambda **of: e.Claimed(at=220.0, option=0, consumer_generation=9, **of),
    Release: lambda **of: e.Released(at=220.0, **of),
    Revert: lambda **of: e.Reverted(at=220.0, **of),
}


@pytest.mark.parametrize(
    "known",
    [
        record(S.CLAIMING, S.BUILDING),
        record(S.CLAIMING, S.DELETED),
        at_source(),
        moving(S.REVERTING),
        record(S.RELEASING, S.FAILED),
        moving(S.RELEASING, S.FAILED),
        moving(S.RELEASING, S.DELETED, {"instance_released": True}),
        unshelving(S.RELEASING, S.OFFLOADED),
        moving(S.RELEASING, S.ACTIVE),
    ],
)
def test_only_the_answer_to_what_is_asked_now_counts(known: Instance) -> None:
    """A conductor that was paused brings the answer to what an earlier record had asked: a release that it took for its
    own left an allocation that nobody released.
    """
    query = awaited_request_of(known)
    assert isinstance(query, Claim | Release | Revert)
    answer, attempt = ANSWERS[type(query)], query.attempt or 0
    assert step(known, answer(consumer=query.consumer, attempt=attempt), PATIENCE).instance is not known
    for consumer, other in ((query.consumer, attempt - 1), (OTHER, attempt)):
        assert step(known, answer(consumer=consumer, attempt=other), PATIENCE) == Step(known)

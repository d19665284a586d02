"""The instance state machine and its table of desires as a whole, and what a scheduler's query is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

from bus.contracts.actions import ActionEvent, ActionKind, ActionState, Condition
from bus.contracts.cell import UNKNOWN_ATTEMPT, Destroy, Selection
from cell_conductor.awaited_request import awaited_request_of
from cell_conductor.state import events as e
from cell_conductor.state.commands import commands_of, with_commands
from cell_conductor.state.desired_state import DELETE_REQUESTED, DESIRED_STATES, phase_from_text, phase_to_text
from cell_conductor.state.fence import Fence
from cell_conductor.state.instance import (
    MACHINE_EXISTS,
    ActionInProgress,
    BlockedReason,
    Instance,
    InstanceSummary,
    Phase,
    State,
)
from cell_conductor.state.ownership_proof import is_provably_ended
from cell_conductor.state.step import Step
from cell_conductor.table import BLOCKED, TABLE, ByNextState, rules_of
from cell_conductor.transition import IllegalStep, step
from tests.unit.cell_conductor.move_scenario import ACTION, active, request, unbegun
from tests.unit.cell_conductor.scenario import (
    DELETE,
    PATIENCE,
    RELEASED,
    SPEC,
    TIMED_OUT,
    UUID,
    claimed,
    failed,
    queried,
    refused,
    run,
    spawned,
)

# --- The instance state machine, pair by pair: its table as a whole.


def test_total_over_states_and_events() -> None:
    assert set(TABLE) == set(State)
    assert set(BLOCKED) == set(e.EVENTS)
    for state, row in TABLE.items():
        assert set(row) == set(e.EVENTS), state
        follow = {then for known, then in DESIRED_STATES if known is state and then is not None}
        for event, entry in row.items():
            if isinstance(entry, ByNextState):
                assert entry.rules.keys() <= follow, (state, event)
                assert all(entry.of(then) is not None for then in follow), (state, event)


def test_every_state_is_reached_and_left() -> None:
    rules = {state: [rule for entry in row.values() for rule in rules_of(entry)] for state, row in TABLE.items()}
    assert {target for row in rules.values() for rule in row for target in rule.to} == set(State) - {State.ABSENT}
    assert all(any(rule.to for rule in row) for row in rules.values())


def test_illegal_pairs_raise_with_the_history() -> None:
    with pytest.raises(IllegalStep, match=r"spawn\.no_disk"):
        run(TIMED_OUT, start=run(queried(), failed(), claimed(), spawned(2)).instance)
    with pytest.raises(IllegalStep):
        run(TIMED_OUT)


@pytest.mark.parametrize("answer", [claimed(), refused(), RELEASED, e.Reverted(at=120.0, attempt=2)])
@pytest.mark.parametrize("start", [Instance(uuid=UUID), run(queried()).instance])
def test_an_answer_to_what_no_record_asks_changes_nothing(answer: e.Event, start: Instance) -> None:
    """A database that was restored has lost the request. It ended the process (seed 51)."""
    after = step(start, answer, PATIENCE)
    assert (after.instance, after.commands) == (start, ())


# --- What a record proves to be over, state by state, against a table of values from before the table of desires.
# `wanted_by_state.json` is an oracle, not a derived file: it was written once by the hand-kept sets of states that
# were there before, and shares no code with what it checks. Its 33 states have become 21, of which three say what
# follows: `NAMES` has what each of them was.


FROZEN: dict[str, str] = json.loads((Path(__file__).parent / "data" / "wanted_by_state.json").read_text())
HERE, SOURCE, ELSEWHERE = "here", "source", "elsewhere"
# The current attempt is 3, its move's source has 2, and 5 was the last that was given out.
ATTEMPTS = (UNKNOWN_ATTEMPT, 1, 2, 3, 4, 6)
IN_PLACE, NO_REPORT = "in place", "none"
SOURCES = (NO_REPORT, SOURCE, IN_PLACE)
WAITS: dict[Phase, str] = {
    (State.CLAIMING, State.BUILDING): "reclaiming",
    (State.CLAIMING, State.DELETED): "abandoning",
    (State.CLAIMING, State.PREPARING): "claiming",
    (State.RELEASING, State.FAILED): "giving_up",
    (State.RELEASING, State.DELETED): "releasing",
    (State.RELEASING, State.OFFLOADED): "vacating",
    (State.RELEASING, State.ACTIVE): "releasing_source",
    (State.DESTROYING, State.DELETED): "deleting",
    (State.DESTROYING, State.ACTIVE): "confirming",
    (State.DESTROYING, State.REVERTING): "undoing",
    (State.DESTROYING, State.OFFLOADED): "offloading",
}
NAMES: dict[Phase, str] = {
    **WAITS,
    **{(state, None): state.value for state in State if state not in {waiting for waiting, _ in WAITS}},
    (State.TRANSFERRED, State.ABSENT): "transferred",
}
PHASES = tuple(NAMES)


def facts(phase: Phase, source: str, *, code: str = "", proves_from: int = 0) -> InstanceSummary:
    """What the proof reads of a record."""
    is_there, source_attempt = source == SOURCE, 0 if source == NO_REPORT else 2
    return InstanceSummary(
        "i", phase[0], HERE, "s1", 3, 0.0, highest_attempt=5, source_host_uuid=SOURCE if is_there else None,
        source_attempt=source_attempt, code=code, next_state=phase[1], proves_from=proves_from,
    )  # fmt: skip


def frozen_over(phase: Phase) -> dict[tuple[InstanceSummary, int, str], bool]:
    """The frozen answers, of records from no earlier incarnation of the database. The values are also of facts that no
    record has any more: doubted, reused_from, and untried.
    """
    frozen, booleans, over = FROZEN[NAMES[phase]], (False, True), {}
    bits = f"{int(frozen, 16):b}".zfill(len(frozen) * 4)
    columns = product(SOURCES, booleans, (0, 2, 4), booleans, booleans, ATTEMPTS, (HERE, SOURCE, ELSEWHERE))
    for (source, doubted, reused, exists, untried, attempt, at), bit in zip(columns, bits, strict=True):
        if not (doubted or reused or untried):
            record = facts(phase, source, code=MACHINE_EXISTS if exists else "")
            over[record, attempt, at] = bit == "1"
    return over


def is_named(record: InstanceSummary, attempt: int) -> bool:
    return attempt == record.attempt or (record.source_host_uuid is not None and attempt == record.source_attempt)


@pytest.mark.parametrize("proves_from", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("phase", PHASES)
def test_what_is_over_has_not_changed(phase: Phase, proves_from: int) -> None:
    """But that a number from before the last recovery proves only what the record names, or its client has deleted."""
    wrong = [
        (record, attempt, at)
        for (record, attempt, at), was in frozen_over(phase).items()
        if is_provably_ended(replace(record, proves_from=proves_from), attempt, at)
        is not (was and (attempt >= proves_from or is_named(record, attempt) or phase in DELETE_REQUESTED))
    ]
    assert not wrong, wrong[:3]


# --- The table of desires is total, and the orders that follow from it destroy nothing that is wanted.


# A resize is under way in these; elsewhere a request for any change.
RESIZES = {(State.RESIZING, None), (State.DESTROYING, State.REVERTING)}


def at(host: str) -> Selection:
    return Selection(host_uuid=host, host=host, service="s1", allocations={host: {}})


def test_every_state_has_a_desire_and_at_most_nineteen_are_there() -> None:
    assert set(DESIRED_STATES) == set(PHASES)
    assert {state for state, _ in DESIRED_STATES} == set(State) and len(State) <= 19


def test_a_state_has_the_same_name_in_the_database_and_back() -> None:
    assert [phase_from_text(phase_to_text(phase)) for phase in DESIRED_STATES] == list(DESIRED_STATES)
    assert len({phase_to_text(phase) for phase in DESIRED_STATES}) == len(DESIRED_STATES)


def records(phase: Phase) -> Iterator[tuple[Instance, InstanceSummary]]:
    """Records in this state, of every spec generation of a move, each with the facts that the frozen values are of."""
    (state, next_state), here, source = phase, at(HERE), at(SOURCE)
    booleans = (False, True)
    for kind, is_queried, is_deleted, has_action in product(SOURCES, booleans, booleans, booleans):
        if state is State.HANDING_OVER and kind != SOURCE:
            continue  # it is the source that hands over
        origin = {NO_REPORT: None, SOURCE: source, IN_PLACE: here}[kind]
        action = ActionInProgress(
            request_id="r",
            kind=ActionKind.RESIZE if phase in RESIZES else ActionKind.STOP,
            source=origin,
            source_attempt=0 if origin is None else 2,
            spec=SPEC,
            delete=is_deleted,
        )
        instance = Instance(
            uuid="i",
            state=state,
            next_state=next_state,
            spec=SPEC,
            selections=(origin or here, here),
            selection_index=1,
            attempt=3,
            highest_attempt=5,
            queried=is_queried,
            action=action if has_action or origin is not None else None,
        )
        yield instance, facts(phase, kind)


@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_no_order_destroys_what_was_wanted_before_there_were_desires(phase: Phase, fenced: bool) -> None:
    """But unless it is complete, which a host that is queried decides."""
    fences = {host: Fence(host_uuid=host, host=host, version=1) for host in (HERE, SOURCE) if fenced}
    context, over, ordered = replace(PATIENCE, fences=fences), frozen_over(phase), 0
    for instance, known in records(phase):
        for command in commands_of(instance, context):
            if isinstance(command, Destroy) and not command.keep_if_complete:
                ordered += 1
                assert over[known, command.attempt, command.host_uuid], (instance, command)
    assert bool(ordered) is (phase[0] is State.DESTROYING)


def test_a_machine_under_another_service_gets_its_orders_there() -> None:
    """In every state that has orders for the machine that was found."""
    found = 0
    for phase in PHASES:
        for instance, _ in records(phase):
            moved = replace(instance, selections=tuple(replace(one, service="s9") for one in instance.selections))
            before, after = commands_of(instance, PATIENCE), commands_of(moved, PATIENCE)
            stepped = with_commands(instance, Step(moved), PATIENCE)
            assert stepped.commands == tuple(one for one in after if one not in before)
            found += len(stepped.commands)
    assert found


@pytest.mark.parametrize("phase", PHASES)
def test_orders_are_sent_when_a_state_is_entered_and_not_once_more_within_it(phase: Phase) -> None:
    for instance, _ in records(phase):
        other = State.ACTIVE if phase[0] is not State.ACTIVE else State.ABSENT
        elsewhere = replace(instance, state=other, next_state=None)
        assert with_commands(elsewhere, Step(instance), PATIENCE).commands == commands_of(instance, PATIENCE)
        assert with_commands(instance, Step(instance), PATIENCE).commands == ()
        assert with_commands(instance, Step(instance, resend=True), PATIENCE).commands == commands_of(
            instance, PATIENCE
        )


def test_orders_are_sent_again_when_something_else_follows() -> None:
    """A source that was to be destroyed for its move is commanded once more for the delete of its instance."""
    confirming, deleting = ((State.DESTROYING, then) for then in (State.ACTIVE, State.DELETED))
    sent = 0
    for instance, _ in records(confirming):
        after = replace(instance, next_state=deleting[1])
        assert with_commands(instance, Step(after), PATIENCE).commands == commands_of(after, PATIENCE)
        sent += len(commands_of(after, PATIENCE))
    assert sent


# --- A record with a blocked reason, in every state: one gate.


JUDGED_BY = {
    e.Claimed: claimed(3),
    e.ClaimRefused: refused(3),
    e.Released: RELEASED,
    e.Reverted: e.Reverted(at=120.0, attempt=3),
    e.RevertRefused: e.RevertRefused(at=120.0, attempt=3, outcome="x"),
    e.Spawned: replace(spawned(3), host_uuid=HERE),
    e.SpawnFailed: replace(failed(3), host_uuid=HERE),
    e.Destroyed: e.Destroyed(at=120.0, attempt=3, host_uuid=HERE, service="s1"),
    e.MachineRunning: e.MachineRunning(at=125.0, attempt=1, host_uuid=ELSEWHERE, service="s1"),
    e.MachineMissing: e.MachineMissing(at=900.0, host_uuid=HERE, service="s1"),
    e.ServiceLost: e.ServiceLost(at=900.0, service="s1", code="x"),
    e.ChangeEnded: e.ChangeEnded(at=120.0, attempt=3, change_number=0, host_uuid=HERE, service="s1", done=True),
    e.HostFenced: e.HostFenced(at=120.0, host_uuid=HERE),
}


@pytest.mark.parametrize("event", JUDGED_BY.values(), ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("phase", PHASES)
def test_no_report_answer_or_fence_judges_what_is_blocked(phase: Phase, event: e.Event) -> None:
    for instance, _ in records(phase):
        blocked = replace(instance, blocked_reason=BlockedReason.HOST_ABSENT)
        assert step(blocked, event, PATIENCE) == Step(blocked)


@pytest.mark.parametrize("phase", PHASES)
def test_nothing_is_ordered_or_asked_for_what_is_blocked_and_its_delete_is_on_record(phase: Phase) -> None:
    for instance, _ in records(phase):
        blocked = replace(instance, blocked_reason=BlockedReason.HOST_ABSENT)
        assert awaited_request_of(blocked) is None
        timed_out, deleted = (step(blocked, event, PATIENCE) for event in (TIMED_OUT, replace(DELETE, project_id="p")))
        assert (timed_out.instance.phase, timed_out.commands) == (phase, ())
        assert [type(one).__name__ for one in deleted.commands] == ["BuildEvent"]
        after = deleted.instance
        assert after.blocked_reason and (
            after.phase in DELETE_REQUESTED or (after.action is not None and after.action.delete)
        )


# --- A scheduler without news of a request queries its cell: the answer begins nothing, and always leads to an end.


def queries(kind: ActionKind = ActionKind.MIGRATE, request_id: str = ACTION) -> e.ActionRequested:
    return unbegun(request(kind, request_id=request_id))


def answer(instance: Instance, query: e.ActionRequested) -> tuple[Step, ActionEvent]:
    stepped = step(instance, query, PATIENCE)
    (event,) = stepped.commands
    assert isinstance(event, ActionEvent) and event.request_id == query.request.request_id
    return stepped, event


def test_a_request_without_a_record_ends_as_lost_and_a_late_copy_of_it_is_not_begun() -> None:
    stepped, event = answer(active(), queries())
    assert (event.state, event.code, event.terminal) == (ActionState.FAILED, "action.lost", True)
    assert (event.condition, stepped.instance.state) == (Condition.ACTIVE, State.ACTIVE)
    late = step(stepped.instance, request(ActionKind.MIGRATE, 2), PATIENCE)
    (repeated,) = late.commands
    assert isinstance(repeated, ActionEvent)
    assert (repeated.state, repeated.code, late.instance.state) == (ActionState.FAILED, "action.lost", State.ACTIVE)

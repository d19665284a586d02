"""`berth.why`: of what is on record, the part that explains an instance, what it waits for and the next command."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from berth.why import explained
from bus.contracts.actions import ActionKind, ActionRecord, ActionState, Condition
from bus.contracts.build import BuildRecord, BuildState, TimelineEntry

UUID, REQUEST = "7f3c2f5e-0000-4000-8000-000000000001", "7f3c2f5e-0000-4000-8000-000000000002"
AT = {"created_at": 1.0, "updated_at": 2.0}
BUILT = BuildRecord(instance_uuid=UUID, project_id="p", flavor="f", state=BuildState.ACTIVE, condition="active", **AT)
REFUSED = ActionRecord(
    request_id=REQUEST, instance_uuid=UUID, project_id="p", kind=ActionKind.CONFIRM, state=ActionState.REFUSED,
    terminal=True, code="action.none", **AT,
)  # fmt: skip
GOES_ON = replace(REFUSED, state=ActionState.CLAIMING, terminal=False, code="")
DONE = replace(REFUSED, state=ActionState.DONE, code="")


@pytest.mark.parametrize(
    ("record", "action", "is_named", "request_", "code"),
    [
        (BUILT, None, False, "build", ""),
        (BUILT, DONE, False, "build", ""),
        (BUILT, DONE, True, "confirm", ""),
        (BUILT, GOES_ON, False, "confirm", ""),
        (BUILT, REFUSED, False, "confirm", "action.none"),
        (replace(BUILT, state=BuildState.DELETED), REFUSED, False, "build", ""),
        (replace(BUILT, state=BuildState.DELETED), REFUSED, True, "confirm", "action.none"),
        (replace(BUILT, state=BuildState.FAILED, code="host.none"), None, False, "build", "host.none"),
    ],
)
def test_what_explains_an_instance(
    record: BuildRecord, action: ActionRecord | None, is_named: bool, request_: str, code: str
) -> None:
    found = explained(record, action, is_named=is_named)
    assert (found.request, found.code) == (request_, code)
    assert (found.request_id == UUID) is (request_ == "build")


@pytest.mark.parametrize("state", [one for one in BuildState if one is not BuildState.ACTIVE])
def test_a_build_waits_for_something_until_it_has_ended(state: BuildState) -> None:
    found = explained(replace(BUILT, state=state), None)
    is_ended = state in {BuildState.FAILED, BuildState.REFUSED, BuildState.DELETED}
    assert bool(found.waiting) is not is_ended
    assert (f"berth logs {UUID}" in found.next) is not is_ended


@pytest.mark.parametrize("state", list(ActionState))
def test_an_action_waits_for_something_until_it_has_ended(state: ActionState) -> None:
    is_ended = state in {ActionState.DONE, ActionState.FAILED, ActionState.REFUSED}
    not_states = {ActionState.CONFIRMED, ActionState.SOURCE_DESTROYED}  # events after the end
    found = explained(BUILT, replace(GOES_ON, state=state, terminal=is_ended), is_named=True)
    assert bool(found.waiting) is (not is_ended and state not in not_states)


def test_what_a_scheduler_has_noted_is_what_a_build_waits_for() -> None:
    noted = TimelineEntry(at=1.0, actor="s", what="waiting", detail="for room")
    assert explained(replace(BUILT, state=BuildState.ACCEPTED, timeline=(noted,)), None).waiting == "for room"


@pytest.mark.parametrize(
    ("condition", "command"),
    [
        (Condition.STOPPED, "berth instance start"),
        (Condition.RESIZED, "berth instance confirm"),
        (Condition.SHELVED, "berth instance unshelve"),
        (Condition.OFFLOADED, "berth instance unshelve"),
        (Condition.RESCUED, "berth instance unrescue"),
        (Condition.ACTIVE, "berth show"),
    ],
)
def test_the_next_command_follows_from_the_state(condition: Condition, command: str) -> None:
    found = explained(replace(BUILT, condition=condition.value), None)
    assert found.next[0].startswith(f"{command} {UUID}")
    assert bool(found.waiting) is (condition is Condition.RESIZED)

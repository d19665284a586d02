"""Why an instance, or a request about it, is as it is: one answer of what is on record, with the next commands."""

from __future__ import annotations

from collections.abc import Iterator

from berth.client.types import Why
from berth.codes import code_named
from bus.contracts.actions import ActionRecord, ActionState, Condition
from bus.contracts.build import BuildRecord, BuildState

GONE_WRONG = frozenset({ActionState.FAILED, ActionState.REFUSED})
# Plain words for what is under way, where its timeline has none.
_WAITS = {
    BuildState.ACCEPTED: "for a scheduler to choose a host",
    BuildState.SCHEDULED: "for its cell to claim one of the chosen hosts, and to command it",
    BuildState.BUILDING: "for its host to build it",
    BuildState.DELETING: "for its host to destroy it",
    ActionState.ACCEPTED: "for a scheduler to take it up",
    ActionState.SCHEDULED: "for its cell to take it up",
    ActionState.CLAIMING: "for placement to claim a destination",
    ActionState.PREPARING: "for the destination to check whether it can take it",
    ActionState.MIGRATING: "for its source to hand it over",
    ActionState.FINISHING: "for the destination to start it",
    ActionState.CHANGING: "for its host to change it",
    ActionState.ROLLING_BACK: "for its source to take it back",
}
_ENDED_BY_CLIENT = {Condition.RESIZED: "for a confirm or a revert"}
# What a client can do about the state that an instance rests in.
_NEXT = {
    Condition.STOPPED: ("instance start",),
    Condition.RESIZED: ("instance confirm", "instance revert"),
    Condition.SHELVED: ("instance unshelve",),
    Condition.OFFLOADED: ("instance unshelve",),
    Condition.RESCUED: ("instance unrescue",),
}


def explained(record: BuildRecord, action: ActionRecord | None, *, is_named: bool = False) -> Why:
    """The answer. action: the newest request about the instance; it explains one that is there while it is under way,
    or where it came to nothing; else the build does. is_named: it is the one that was meant, so it explains.
    """
    of = action if action is not None and (is_named or _matters(record, action)) else None
    about = of or record
    code = None if not about.code else code_named(about.code)
    return Why(
        instance_uuid=record.instance_uuid,
        name=record.name,
        project_id=record.project_id,
        state=record.shown_state,
        host=record.host,
        request="build" if of is None else of.kind.value,
        request_id=record.instance_uuid if of is None else of.request_id,
        request_state=about.state.value,
        since=about.updated_at,
        code=about.code,
        reason=about.reason,
        waiting=_waits_for(record, of),
        attempts=about.history,
        funnel=about.funnel,
        scores=() if of is not None or about.code or record.choice is None else record.choice.scores,
        cause="" if code is None else code.cause,
        remedy="" if code is None else code.remedy,
        next=tuple(_next(record, of)),
    )


def _matters(record: BuildRecord, action: ActionRecord) -> bool:
    return record.state is BuildState.ACTIVE and (not action.terminal or action.state in GONE_WRONG)


def _waits_for(record: BuildRecord, action: ActionRecord | None) -> str:
    if action is not None:
        return _WAITS.get(action.state, "")
    noted = next((line.detail for line in record.timeline[-1:] if line.what == "waiting"), "")
    return noted or _WAITS.get(record.state, "") or _ENDED_BY_CLIENT.get(_condition(record), "")


def _condition(record: BuildRecord) -> Condition:
    is_known = record.state is BuildState.ACTIVE and record.condition in set(Condition)
    return Condition(record.condition) if is_known else Condition.UNKNOWN


def _next(record: BuildRecord, action: ActionRecord | None) -> Iterator[str]:
    if record.state in (BuildState.ACCEPTED, BuildState.SCHEDULED, BuildState.BUILDING, BuildState.DELETING):
        yield f"berth logs {record.instance_uuid}"
    elif action is not None and not action.terminal:
        yield f"berth action show {action.request_id}"
    else:
        for verb in _NEXT.get(_condition(record), ()):
            yield f"berth {verb} {record.instance_uuid}"
        if record.state is BuildState.ACTIVE or action is not None:
            yield f"berth show {record.instance_uuid} --history"
    if record.state in (BuildState.FAILED, BuildState.REFUSED):
        yield f"berth flavor show {record.flavor}"
        yield "berth host list"

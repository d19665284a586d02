"""The terminal events of requests that are refused and change no record."""

from __future__ import annotations

from contextlib import suppress

import msgspec
from msgspec import Struct

from bus.codec import Malformed
from bus.contracts.actions import ActionEvent, ActionKind, ActionState, Condition
from bus.contracts.base import MAX_REASON, Message, Refusal, Uuid
from bus.contracts.build import OFF_RECORD, BuildEvent, BuildState

_ACTIONS = "instance.action."  # how the routing keys of actions begin


class _Named(Struct):
    """The field of an unreadable request that an answer on the event stream needs."""

    instance_uuid: Uuid


class _NamedAction(_Named):
    """The fields of an unreadable action."""

    request_id: Uuid


class _Kind(Struct):
    """Another field, which may be readable."""

    kind: ActionKind | None = None


def refused_build_event(
    uuid: str, project: str, refusal: Refusal, at: float = 0.0, sequence: int = OFF_RECORD
) -> BuildEvent:
    """The end of a build, or of a delete."""
    return BuildEvent(
        instance_uuid=uuid,
        project_id=project,
        state=BuildState.REFUSED,
        sequence=sequence,
        terminal=True,
        code=refusal.code,
        reason=refusal.reason,
        at=at,
    )


def refused_action_event(
    request_id: str, uuid: str, project: str, kind: ActionKind | None, *, refusal: Refusal, at: float = 0.0
) -> ActionEvent:
    """The end of an action."""
    return ActionEvent(
        request_id=request_id,
        instance_uuid=uuid,
        project_id=project,
        kind=kind,
        state=ActionState.REFUSED,
        sequence=OFF_RECORD,
        terminal=True,
        condition=Condition.UNKNOWN,
        code=refusal.code,
        reason=refusal.reason,
        at=at,
    )


def unreadable_events(malformed: Malformed, project: str) -> tuple[Message, ...]:
    """The end of a request that cannot be read, for the stream of its project; none if its ids are unreadable, too."""
    refusal, body = Refusal(code=malformed.code, reason=malformed.reason[:MAX_REASON]), malformed.body
    try:
        if not malformed.key.startswith(_ACTIONS):
            named = msgspec.json.decode(body, type=_Named)
            return (refused_build_event(named.instance_uuid, project, refusal),)
        action, kind = msgspec.json.decode(body, type=_NamedAction), None
        with suppress(msgspec.ValidationError):
            kind = msgspec.json.decode(body, type=_Kind).kind
        return (refused_action_event(action.request_id, action.instance_uuid, project, kind, refusal=refusal),)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()

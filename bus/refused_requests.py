"""The terminal events of requests that are refused and change no record."""

from __future__ import annotations

from contextlib import suppress

import msgspec
from msgspec import Struct

from bus.contracts.base import MAX_REASON, Message, Refusal, Uuid
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.moves import Condition, MoveEvent, MoveKind, MoveState
from bus.wire import Malformed

# The number of an event about a request that is not on record, or about a refused delete: the lowest, so it is outdated
# for a client that follows what is on record.
OFF_RECORD = 0
_MOVES = "instance.move."  # how the routing keys of moves begin


class _Named(Struct):
    """The field of an unreadable request that an answer on the event stream needs."""

    instance_uuid: Uuid


class _NamedMove(_Named):
    """The fields of an unreadable move."""

    request_id: Uuid


class _Kind(Struct):
    """Another field, which may be readable."""

    kind: MoveKind | None = None


def refused_build_event(
    uuid: str, project: str, why: Refusal, at: float = 0.0, sequence: int = OFF_RECORD
) -> BuildEvent:
    """The end of a build, or of a delete."""
    return BuildEvent(
        instance_uuid=uuid,
        project_id=project,
        state=BuildState.REFUSED,
        sequence=sequence,
        terminal=True,
        code=why.code,
        reason=why.reason,
        at=at,
    )


def refused_move_event(
    request_id: str, uuid: str, project: str, kind: MoveKind | None, *, why: Refusal, at: float = 0.0
) -> MoveEvent:
    """The end of a move."""
    return MoveEvent(
        request_id=request_id,
        instance_uuid=uuid,
        project_id=project,
        kind=kind,
        state=MoveState.REFUSED,
        sequence=OFF_RECORD,
        terminal=True,
        condition=Condition.UNKNOWN,
        code=why.code,
        reason=why.reason,
        at=at,
    )


def unreadable_events(malformed: Malformed, project: str) -> tuple[Message, ...]:
    """The end of a request that cannot be read, for the stream of its project; none if its ids are unreadable, too."""
    why, body = Refusal(code=malformed.code, reason=malformed.reason[:MAX_REASON]), malformed.body
    try:
        if not malformed.key.startswith(_MOVES):
            named = msgspec.json.decode(body, type=_Named)
            return (refused_build_event(named.instance_uuid, project, why),)
        move, kind = msgspec.json.decode(body, type=_NamedMove), None
        with suppress(msgspec.ValidationError):
            kind = msgspec.json.decode(body, type=_Kind).kind
        return (refused_move_event(move.request_id, move.instance_uuid, project, kind, why=why),)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()

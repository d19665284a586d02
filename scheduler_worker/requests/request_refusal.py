"""The terminal events of requests that are refused and change no record. Pure."""

from __future__ import annotations

from bus.bus import API
from bus.codec import Malformed
from bus.contracts.actions import ActionKind
from bus.contracts.base import Message, Refusal
from bus.contracts.build import OFF_RECORD
from bus.contracts.catalogue import project_of
from bus.persistence.outbox import OutboxMessage
from bus.refused_requests import refused_action_event, refused_build_event, unreadable_events

TOO_OLD = Refusal(
    code="request.too_old",
    reason="it was sent so long ago that it may have been carried out, and its record purged",
)


def refused_build(uuid: str, project: str, refusal: Refusal, at: float, sequence: int = OFF_RECORD) -> OutboxMessage:
    """The terminal event of a build, or of a delete, that is refused and changes no record."""
    return OutboxMessage(API, refused_build_event(uuid, project, refusal, at, sequence), uuid)


def refused_action(
    request_id: str, uuid: str, project: str, kind: ActionKind | None, *, refusal: Refusal, at: float
) -> OutboxMessage:
    """The terminal event of an action that is refused and changes no record."""
    return OutboxMessage(API, refused_action_event(request_id, uuid, project, kind, refusal=refusal, at=at), request_id)


def refused_unreadable(malformed: Malformed) -> tuple[Message, ...]:
    """An unreadable request, answered on the event stream of the project whose routing key it came under: the broker
    permits its publisher that key, while the body's project may be forged.
    """
    project = project_of(malformed.key)
    return unreadable_events(malformed, project) if project else ()

"""What builds, deletes and moves have in common as requests: their record, how one came (by which delivery, whether
another may follow), and the rules, each once. What a delivery has done is on record; a claim for a lost record is not,
and has the claim owner of the message. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.consuming.outcome import (
    DEAD_LETTERED_BY_BROKER,
    EXPIRED_WAITING,
    Received,
    Retry,
    RetryWhenAvailable,
    dead_letter_reason_of,
    never,
)
from bus.contracts.base import Message, Refusal
from bus.contracts.build import AttemptRecord, BuildEvent, BuildRequest, TimelineEntry
from bus.contracts.catalogue import project_of
from bus.contracts.moves import ActionEvent, ActionKind, ActionRequest
from bus.contracts.queues import BY_QUEUE
from bus.faults import Transient
from bus.persistence.outbox import OutboxMessage
from bus.refused_requests import OFF_RECORD, refused_action_event, refused_build_event, unreadable_events
from bus.wire import Malformed

TOO_OLD = Refusal(
    code="request.too_old",
    reason="it was sent so long ago that it may have been carried out, and its record purged",
)
DIGEST_BYTES = 16

_encode = msgspec.json.Encoder(order="deterministic").encode


def digest_of(request: BuildRequest | ActionRequest) -> bytes:
    """Of its whole content, which distinguishes a repeated request from a clash."""
    return blake2b(_encode(request), digest_size=DIGEST_BYTES).digest()


class RecordedRequest(Struct, frozen=True, kw_only=True):
    """What is on record of every request."""

    instance_uuid: str
    project_id: str
    # of its whole content, which distinguishes a repeated request from a clash (empty: its delete came, and no request)
    digest: bytes = b""
    sequence: int  # of its newest event
    terminal: bool = False  # its one terminal event was reported
    cell: str | None = None  # where it was dispatched to
    host: str | None = None
    host_uuid: str | None = None
    code: str = ""
    reason: str = ""
    history: tuple[AttemptRecord, ...] = ()  # the attempts that its cell has reported


# --- what is reported of it


def is_newer(event: BuildEvent | ActionEvent, than: int, *, ends: bool = False) -> bool:
    """Whether an event counts beside what is on record. than: the number of the newest event there. ends: it ends what
    has not ended. That counts whatever its number: a cell whose database was lost starts its numbers again, and a later
    event may overtake the end.
    """
    return ends or event.sequence > than


def timeline_of(event: BuildEvent | ActionEvent, known: int, now: float) -> tuple[TimelineEntry, ...]:
    """One event as lines of the instance's timeline: the attempts that it reports for the first time, then itself.
    known: how many attempts are on record. Each line has its own time; the timeline is sorted by it.
    """
    actor = f"conductor {event.cell}" if event.cell else "conductor"
    kind = f"{event.kind} " if isinstance(event, ActionEvent) else ""
    attempts = tuple(
        TimelineEntry(at=tried.at or now, actor=actor, what=kind + tried.outcome, detail=_detail(tried.host, tried))
        for tried in event.history[known:]
        if tried.outcome != "active"  # the event itself is the entry of this attempt
    )
    stage_times = event.stage_times if isinstance(event, BuildEvent) else None
    what = kind + event.state.value
    return (
        *attempts,
        TimelineEntry(
            at=event.at or now, actor=actor, what=what, detail=_detail(event.host, event), stage_times=stage_times
        ),
    )


def _detail(host: str | None, of: BuildEvent | ActionEvent | AttemptRecord) -> str:
    where = f"{host} (attempt {of.attempt})" if host and of.attempt else host
    refusal = f"{of.code}: {of.reason}" if of.code and of.reason else of.code or of.reason
    return "; ".join(part for part in (where, refusal) if part)


# --- its end off record


def refused_build(uuid: str, project: str, refusal: Refusal, at: float, sequence: int = OFF_RECORD) -> OutboxMessage:
    """The terminal event of a build, or of a delete, that is refused and changes no record."""
    return OutboxMessage(API, refused_build_event(uuid, project, refusal, at, sequence), uuid)


def refused_action(
    request_id: str, uuid: str, project: str, kind: ActionKind | None, *, refusal: Refusal, at: float
) -> OutboxMessage:
    """The terminal event of a move that is refused and changes no record."""
    return OutboxMessage(API, refused_action_event(request_id, uuid, project, kind, refusal=refusal, at=at), request_id)


def refused_unreadable(malformed: Malformed) -> tuple[Message, ...]:
    """An unreadable request, answered on the event stream of the project whose routing key it came under: the broker
    permits its publisher that key, while the body's project may be forged.
    """
    project = project_of(malformed.key)
    return unreadable_events(malformed, project) if project else ()


DEAD_LETTERS = "scheduler.dead_letters"
RETRIES = len(BY_QUEUE["scheduler.requests"].retry_s)  # of `scheduler.changes` as well
# A request may overtake the one that it refers to, on the way to another scheduler: that is looked for this often.
OVERTAKES = 2
HOSTS_UNKNOWN = Retry("hosts.unknown", "not every host has been reported yet")


class RequestDelivery(Struct, frozen=True, kw_only=True):
    """How a request came."""

    attempt: int = 0  # how often its queue has had it retried
    # no delivery of it was before, so none has claimed for it (another copy that has is delivered again, and reads its
    # end)
    is_first: bool = True
    # if its handling crashes, its queue gives it up and its dead letter ends it; a dead letter has none
    has_dead_letter: bool = True
    last: bool = False  # it is not retried any more; it ends now
    refusal: Refusal | None = None  # it ends with this, on record or not (None: it does not end)
    has_requester: bool = False  # one waits for an answer, and knows that a late request may be carried out
    is_late: Callable[[], bool] = never  # whether its time is over, at each call
    is_old: bool = False  # it was sent so long ago that its record may be purged
    # this process has just started, so hosts that were not reported yet may still be, and "no host" would be a guess
    awaits_hosts: bool = False

    @property
    def may_be_out_of_order(self) -> bool:
        """Whether what it refers to may not be on record yet."""
        return self.attempt < OVERTAKES and not self.last

    @property
    def is_abandoned(self) -> bool:
        """Whether it is not begun, and has no event: its requester has stopped waiting, and may request it again."""
        return self.has_requester and self.is_late()

    def ending_refusal(self) -> Refusal | None:
        """With what one that is not begun ends; None: it may be begun."""
        return self.refusal or (EXPIRED_WAITING if self.is_late() else None)

    def without_deadline(self) -> RequestDelivery:
        """Of what is on record, or was: that its time is over does not end it any more."""
        return replace(self, is_late=never)

    def crashed(self) -> RequestDelivery:
        """Of one without a dead letter, whose handling has crashed: it ends now."""
        return replace(self, refusal=DEAD_LETTERED_BY_BROKER, is_late=never)


def waits(fault: Transient) -> RetryWhenAvailable:
    """The outcome of a request that a server does not answer about."""
    return RetryWhenAvailable(fault.code, str(fault))


LAST = RequestDelivery(attempt=RETRIES, last=True)


def resumed_delivery(attempt: int, *, is_warming_up: bool, last: bool = False) -> RequestDelivery:
    """The delivery of a request that is on record and that no message carries on. attempt: as often as this was done.
    is_warming_up: this process has started a moment ago. last: it ends now, however often that was.
    """
    last = last or attempt >= RETRIES
    return RequestDelivery(
        attempt=attempt, is_first=False, has_dead_letter=False, last=last, awaits_hosts=is_warming_up and not last
    )


def classify_delivery(
    received: Received, *, is_warming_up: bool = False, recorded_since: float = 0.0
) -> RequestDelivery:
    """The delivery of a request that has just been taken. is_warming_up: as `taken_up` has it. recorded_since: the
    records of requests that were sent before may have been purged (seconds since the epoch).
    """
    is_dead_letter = received.queue == DEAD_LETTERS
    refusal = dead_letter_reason_of(received) or (DEAD_LETTERED_BY_BROKER if is_dead_letter else None)
    is_expired = refusal is EXPIRED_WAITING
    return replace(
        resumed_delivery(received.meta.delivery_attempt, is_warming_up=is_warming_up, last=refusal is not None),
        is_first=not (received.redelivered or received.meta.delivery_attempt or is_dead_letter),
        has_dead_letter=not is_dead_letter,
        refusal=None if is_expired else refusal,
        has_requester=received.meta.reply_to is not None,
        is_late=_always if is_expired else received.is_late,
        is_old=0 < received.meta.sent_at < recorded_since,
    )


def over_retry_limit(batch: Sequence[Received], least: int) -> set[int]:
    """The `id` of each message of a batch that its queue has had retried at least so often."""
    return {id(received.message) for received in batch if received.meta.delivery_attempt >= least}


def _always() -> bool:
    return True

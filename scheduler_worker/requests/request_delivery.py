"""How a request of a build, a delete or an action came: by which delivery, and whether another may follow. What a
delivery has done is on record; a claim for a lost record is not, and has the claim owner of the message. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.consuming.outcome import (
    DEAD_LETTERED_BY_BROKER,
    EXPIRED_WAITING,
    Received,
    Retry,
    RetryWhenAvailable,
    dead_letter_reason_of,
    never,
)
from bus.contracts.base import Refusal
from bus.contracts.queues import BY_QUEUE
from bus.faults import Transient

DEAD_LETTERS = "scheduler.dead_letters"
MAX_RETRIES = len(BY_QUEUE["scheduler.requests"].retry_s)  # of `scheduler.changes` as well
# A request may overtake the one that it refers to, on the way to another scheduler: that is looked for this often.
OVERTAKES = 2
HOSTS_UNKNOWN = Retry("hosts.unknown", "not every host has been reported yet")


class RequestDelivery(Struct, frozen=True, kw_only=True):
    """How a request came."""

    retries: int = 0  # how often its queue has had it retried
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
        return self.retries < OVERTAKES and not self.last

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


LAST = RequestDelivery(retries=MAX_RETRIES, last=True)


def resumed_delivery(retries: int, *, is_warming_up: bool, last: bool = False) -> RequestDelivery:
    """The delivery of a request that is on record and that no message carries on. retries: as often as this was done.
    is_warming_up: this process has started a moment ago. last: it ends now, however often that was.
    """
    last = last or retries >= MAX_RETRIES
    return RequestDelivery(
        retries=retries, is_first=False, has_dead_letter=False, last=last, awaits_hosts=is_warming_up and not last
    )


def classify_delivery(
    received: Received, *, is_warming_up: bool = False, recorded_since: float = 0.0
) -> RequestDelivery:
    """The delivery of a request that has just been taken. is_warming_up: as in `resumed_delivery`. recorded_since: the
    records of requests that were sent before may have been purged (seconds since the epoch).
    """
    is_dead_letter = received.queue == DEAD_LETTERS
    refusal = dead_letter_reason_of(received) or (DEAD_LETTERED_BY_BROKER if is_dead_letter else None)
    is_expired = refusal is EXPIRED_WAITING
    return replace(
        resumed_delivery(received.meta.retries, is_warming_up=is_warming_up, last=refusal is not None),
        is_first=not (received.redelivered or received.meta.retries or is_dead_letter),
        has_dead_letter=not is_dead_letter,
        refusal=None if is_expired else refusal,
        has_requester=received.meta.reply_to is not None,
        is_late=_always if is_expired else received.is_late,
        is_old=0 < received.meta.sent_at < recorded_since,
    )


def over_retry_limit(batch: Sequence[Received], least: int) -> set[int]:
    """The `id` of each message of a batch that its queue has had retried at least so often."""
    return {id(received.message) for received in batch if received.meta.retries >= least}


def _always() -> bool:
    return True

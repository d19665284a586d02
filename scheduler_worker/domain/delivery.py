"""How a request came: by which delivery, and whether another one may follow. Pure, and made in one function.

What a delivery has done before is on record, or is not: no delivery tells.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from bus.consuming.given_up import EXPIRED_WAITING, GIVEN_UP_BY_BROKER, given_up_of
from bus.consuming.outcome import Received, Retry, never
from bus.contracts.base import Refusal
from bus.contracts.catalogue import BY_QUEUE

LETTERS = "scheduler.given_up"
RETRIES = len(BY_QUEUE["scheduler.requests"].retry_s)  # of `scheduler.changes` as well
# A request may overtake the one that it refers to, on the way to another scheduler: that is looked for this often.
OVERTAKES = 2
HOSTS_UNKNOWN = Retry("hosts.unknown", "not every host has been announced yet")


class RequestDelivery(Struct, frozen=True, kw_only=True):
    """How a request came.

    attempt: how often its queue has had it retried. has_letter: if its handling crashes its queue gives it up, and its
    letter ends it; a letter has none. last: it is not retried any more; it ends now. why: it ends with this, unless it
    is on record and goes on (None: it does not end). has_requester: one waits for an answer, and knows that a request
    whose time is over may be carried out. is_late: whether its time is over, whenever it is asked. is_old: it was sent
    so long ago that its record may be purged. awaits_hosts: this process has just started, so hosts that were not
    announced yet may still be, and "no host" would be a guess.
    """

    attempt: int = 0
    has_letter: bool = True
    last: bool = False
    why: Refusal | None = None
    has_requester: bool = False
    is_late: Callable[[], bool] = never
    is_old: bool = False
    awaits_hosts: bool = False

    @property
    def may_be_early(self) -> bool:
        """Whether what it refers to may not be on record yet."""
        return self.attempt < OVERTAKES and not self.last

    @property
    def is_left(self) -> bool:
        """Whether it is not begun, and has no event: its requester has stopped waiting, and may request it again."""
        return self.has_requester and self.is_late()

    def ends_with(self) -> Refusal | None:
        """With what one that is not begun ends; None: it may be begun."""
        return self.why or (EXPIRED_WAITING if self.is_late() else None)

    def going_on(self) -> RequestDelivery:
        """Of what is on record: it is carried on by this delivery."""
        return replace(self, why=None, is_late=never)

    def crashed(self) -> RequestDelivery:
        """Of one without a letter, whose handling has crashed: it ends now."""
        return replace(self, why=GIVEN_UP_BY_BROKER, is_late=never)


LAST = RequestDelivery(attempt=RETRIES, last=True)


def delivery_of(received: Received, *, is_warming_up: bool = False, kept_since: float = 0.0) -> RequestDelivery:
    """The delivery of a request that has just been taken. is_warming_up: this process has started a moment ago.
    kept_since: the records of requests that were sent before may have been purged (seconds since the epoch).
    """
    is_letter = received.queue == LETTERS
    why = given_up_of(received)
    if is_letter and why is None:
        why = GIVEN_UP_BY_BROKER
    last = is_letter or why is not None or received.meta.attempt >= RETRIES
    return RequestDelivery(
        attempt=received.meta.attempt,
        has_letter=not is_letter,
        last=last,
        why=why,
        has_requester=received.meta.reply_to is not None,
        is_late=_always if why is EXPIRED_WAITING else received.is_late,
        is_old=0 < received.meta.sent_at < kept_since,
        awaits_hosts=is_warming_up and not last,
    )


def _always() -> bool:
    return True

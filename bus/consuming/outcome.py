"""Outcomes: the value that a handler returns for each message. Only the consumer acts on them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from msgspec import Struct

from bus.contracts.base import Message, Meta, Refusal
from bus.published_key import BROKERS


class Done(Struct, frozen=True):
    """The message is handled, now or by an earlier delivery."""

    label: ClassVar[str] = "done"  # of metrics, as of each

    reply: Message | None = None  # sent to the requester, if there is one
    # a flush (`bus.persistence.group_flush`): the message is acknowledged after it, or requeued if it fails
    after: asyncio.Future[None] | None = None


class Coded(Struct, frozen=True):
    """An outcome with a reason: a stable code, and words for a person."""

    label: ClassVar[str]

    code: str
    reason: str = ""


class Retry(Coded, frozen=True):
    """The message cannot be handled now: it is delivered again after the queue's next delay, and given up after the
    last one.
    """

    label = "retry"


class Refuse(Coded, frozen=True):
    """The message can never be handled: the requester gets a Refusal; without a requester, the message is a dead letter
    with this code and reason.
    """

    label = "refuse"


class RetryWhenAvailable(Coded, frozen=True):
    """A server that this message depends on does not answer: the handler is called again with it after a wait, which
    holds up no other message of its batch, and uses up no retry.
    """

    label = "wait"


class DeadLetterNow(Coded, frozen=True):
    """The consumer gives the message up; its handler may have put it on record before. A requester gets a Refusal.
    Without one, or where another queue ends requests by their dead letters, the message is a dead letter.
    """

    label = "dead_letter"


Outcome = Done | Retry | Refuse | RetryWhenAvailable | DeadLetterNow


def endless_s() -> float:
    """`remaining_s` of what is of use whenever it is handled."""
    return math.inf


class Received(Struct, frozen=True):
    """One message as a handler gets it: parsed, within its bounds, and with its metadata."""

    message: Message
    meta: Meta
    bus: str
    queue: str
    # a handler may have had it before, in another process, or in this one, where it waited or crashed
    redelivered: bool = False
    # delivered so often without a result that the broker is about to give it up. A handler that must announce the end
    # to a client does that now and nothing else, because handling may have ended earlier processes.
    at_delivery_limit: bool = False
    dead_letter_code: str = ""  # why another queue gave it up; "": it is no dead letter
    remaining_s: Callable[[], float] = endless_s  # seconds until its publisher has no use for it, at each call

    def is_late(self) -> bool:
        """Whether its publisher has no use for it any more. A handler that must not begin then asks under its lock: a
        process may stand still, or wait for the lock, for longer than that.
        """
        return self.remaining_s() < 0.0


def never() -> bool:
    """`is_late` of what no requester waits for."""
    return False


# A handler gets the gathered messages (at least one) and returns an outcome for each, in the same order.
Handler = Callable[[Sequence[Received]], Awaitable[Sequence[Outcome]]]


EXPIRED = f"{BROKERS}expired"
AT_DELIVERY_LIMIT = "delivery.limit_reached"
DEAD_LETTERED = "delivery.dead_lettered"
DEAD_LETTERED_BY_BROKER = Refusal(code=DEAD_LETTERED, reason="its queue gave it up; its dead letter has the reason")
EXPIRED_WAITING = Refusal(code=EXPIRED, reason="it waited longer than the expiration that its publisher gave it")


def dead_letter_reason_of(received: Received) -> Refusal | None:
    """Return why the queue has given up a request, or is about to; None when it has not."""
    if received.at_delivery_limit or received.dead_letter_code in (AT_DELIVERY_LIMIT, f"{BROKERS}delivery_limit"):
        return Refusal(
            code=AT_DELIVERY_LIMIT, reason="it was delivered to several processes, and none of them finished it"
        )
    if received.dead_letter_code == EXPIRED:
        return EXPIRED_WAITING
    if received.dead_letter_code:
        return Refusal(
            code=DEAD_LETTERED,
            reason=f"a worker gave it up; its dead letter has the reason ({received.dead_letter_code})",
        )
    return None

"""The deliveries that have arrived at a consumer, the messages taken from them, and the interval between batches."""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec import structs

from bus.clock import CLOCKS_APART_S, Clock
from bus.codec import Malformed
from bus.consuming.outcome import Received
from bus.contracts.base import Meta
from bus.contracts.queues import ON_RECORD
from bus.transport import Delivery, Subscription

# The bytes of bodies that a consumer has, waiting or being handled, before the broker is to deliver no more; it goes on
# when half of them are settled. (RabbitMQ does not implement AMQP's bound of bytes.) Ten batches of requests of the
# usual length fit in, so that a long line of them is taken at full speed.
MAX_BUFFERED_BYTES = 2 * 2**20


class ArrivedDelivery(NamedTuple):
    """A delivery that waits to be taken."""

    delivery: Delivery
    at: float  # when it was read, by the monotonic clock
    # the earliest time from which it can have waited in this process; earlier than `at` where the process stood still
    since: float

    @property
    def is_lost(self) -> bool:
        """Whether its acknowledgement would be lost."""
        return self.delivery.is_lost


class BufferedBytes:
    """The bytes of the bodies of all deliveries that are not settled (`buffered`); it pauses their subscription while
    they are too many.
    """

    __slots__ = ("_paused", "_pauses", "buffered", "subscription")

    def __init__(self, *, pauses: bool) -> None:
        self.subscription: Subscription | None = None
        self._pauses = pauses  # False where another consumer would go on meanwhile, out of order
        self.buffered = 0
        self._paused = False

    def add(self, delivery: Delivery) -> None:
        """Count a delivery that has arrived."""
        self.buffered += len(delivery.body)
        if self._pauses and self.buffered > MAX_BUFFERED_BYTES and not self._paused and self.subscription is not None:
            self._paused = True
            self.subscription.pause()

    def remove(self, delivery: Delivery) -> None:
        """A delivery is settled, or lost."""
        self.buffered -= len(delivery.body)
        if self._paused and self.buffered <= MAX_BUFFERED_BYTES // 2 and self.subscription is not None:
            self._paused = False
            self.subscription.resume()


# From the third try on (after two without an acknowledgement) a delivery is handled separately from all others, in
# parts of half of its messages, then a quarter, ... and at last one message at a time. If single messages were tried at
# once, a large delivery would take so long that it might never end on an unstable bus.
POISON_SUSPECTED_FROM = 2

# The number of batches of other messages that may be taken before a suspect, a message that was delivered often and
# never acknowledged.
MAX_SKIPPED = 8

# The bytes after which no further delivery is opened for a batch: all that are opened are decoded in one turn of the
# event loop, a megabyte in 5 to 12 ms.
MAX_OPENED_BYTES = 512 * 1024

# The unreadable messages after which no further delivery is opened for a batch. A batch makes none of them cheaper, and
# the sound requests beside them wait.
MAX_UNREADABLE = 64

# The time that a consumer waits for further suspects after the first, and then takes one of them at random. The first
# to arrive would be the same each time, and the others would be requeued with it each time.
POISON_RETRY_S = 0.1

# The number of last deliveries, before the broker dead-letters a message, in which the message is `at_delivery_limit`:
# its handler can still announce the end.
LAST_DELIVERIES = 3


def may_be_started(queue: str, delivery: Delivery, meta: Meta) -> bool:
    """Whether a handler may have had this message of a queue whose requests end by what is on record.

    It goes on, though its requester may have stopped waiting: it may be on record, and a claim be made for it.
    """
    return queue in ON_RECORD and (delivery.redelivered or meta.retries > 0)


def useful_until(delivery: Delivery, meta: Meta, since: float, clock: Clock) -> float | None:
    """The monotonic time after which a message is of no use to its publisher (None: there is none). since: when it
    arrived, in monotonic seconds.
    """
    # It is counted from the arrival: the broker drops messages that wait there too long, and a retry subtracts what has
    # passed. The wait of a copy with earlier consumers and on its way is unknown, so it is late only by the clocks as
    # well: one dropped while its requester waits would never be answered. One that waited in its queue without a
    # consumer begins too late by the clocks' difference at most. A dead letter is handled however late: its end is
    # announced.
    if meta.timeout_s is None:
        return None
    until = since + meta.timeout_s - meta.waited_s
    if not meta.sent_at or not (delivery.redelivered or meta.retries):
        return until
    return min(until, clock.monotonic() + meta.sent_at + meta.timeout_s + CLOCKS_APART_S - clock.time())


def remaining_s(until: float, clock: Clock) -> float:
    """Return the seconds until a message is of no use. until: as `useful_until` returns it."""
    return until - clock.monotonic()


def retried(received: Received, delay_s: float) -> Meta:
    """Return the metadata of a message's copy, which is delivered again after a delay: the next consumer counts from
    its arrival there, so what has passed by then is subtracted.
    """
    meta = structs.replace(received.meta, retries=received.meta.retries + 1)
    left = received.remaining_s()
    if meta.timeout_s is None or left == math.inf:
        return meta
    return structs.replace(meta, waited_s=meta.timeout_s - left + delay_s)


class InFlightDelivery:
    """One delivery, which may contain many messages. It is acknowledged when the last of them is settled."""

    __slots__ = ("_buffered", "delivery", "open", "part", "rejected", "requeues", "tries")

    def __init__(self, delivery: Delivery, buffered: BufferedBytes, count: int, tries: int) -> None:
        self.delivery = delivery
        self._buffered = buffered
        self.tries = tries
        self.part = max(1, count >> max(0, tries - POISON_SUSPECTED_FROM + 1))  # the messages that are tried together
        self.open = count
        self.rejected = False
        self.requeues = False

    def acknowledge(self) -> None:
        """Record that one of its messages is settled."""
        self.open -= 1
        if self.open:
            return
        self._buffered.remove(self.delivery)
        if self.requeues:
            self.delivery.nack(requeue=True)
        elif self.rejected:
            self.delivery.nack(requeue=False)
        else:
            self.delivery.ack()


class InFlightMessage:
    """One message that was taken. After `until` (seconds of this process's clock; None: never) it is dropped, because
    its requester has stopped waiting for the answer.
    """

    __slots__ = ("in_flight", "received", "until")

    def __init__(self, in_flight: InFlightDelivery, received: Received | Malformed, until: float | None = None) -> None:
        self.in_flight = in_flight
        self.received = received
        self.until = until

    @property
    def is_lost(self) -> bool:
        """Whether its acknowledgement would be lost."""
        return self.in_flight.delivery.is_lost

    @property
    def weight(self) -> int:
        """How many requests it counts as."""
        return 1 if isinstance(self.received, Malformed) else self.received.message.weight

    def mark_redelivered(self) -> None:
        """The handler has had it, and may have begun it: its next call is no first delivery."""
        if isinstance(self.received, Received):
            self.received = structs.replace(self.received, redelivered=True)


ITEMS_AS_A_BATCH = 25.0  # this many items cost as much as the batch itself
GAP = 3.0  # in multiples of the duration of a batch without items
LONGEST_S = 0.1  # the longest gap
DOUBLES_S = 600.0  # the duration of a batch without items is assumed to double in this time, unless one is as quick


class BatchInterval:
    """The interval between one batch and the next. Times are seconds of one monotonic clock, which the caller reads."""

    # Measurements and the reason why it cannot oscillate: docs/concepts/performance.md, "Batches".

    __slots__ = ("_alone_s", "_arrived_at", "_taken_at", "gap_s")

    def __init__(self) -> None:
        self.gap_s = 0.0
        self._alone_s: float | None = None  # the duration of a batch without items, by the quickest recent batch
        self._arrived_at = 0.0
        self._taken_at: float | None = None

    def wait_s(self, now: float) -> float:
        """Return how long (seconds) to wait before the next batch; 0 or less: no wait."""
        return 0.0 if self._taken_at is None else self._taken_at + self.gap_s - now

    def start_batch(self, now: float) -> None:
        """Record that a batch is taken."""
        self._taken_at = now

    def end_batch(self, seconds: float, items: int, now: float, *, more: bool) -> None:
        """Record that a batch is done. more: enough messages wait that an interval would not make the next batch
        larger.
        """
        base_s = seconds / (1.0 + items / ITEMS_AS_A_BATCH)
        if self._alone_s is None:
            self._alone_s = base_s
        else:
            self._alone_s = min(base_s, self._alone_s * 2.0 ** ((now - self._arrived_at) / DOUBLES_S))
        self._arrived_at = now
        self.gap_s = 0.0 if more else min(GAP * self._alone_s, LONGEST_S)

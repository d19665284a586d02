"""The deliveries that a consumer has not taken yet, by the queue that they came from; it takes from the queues in turn.

Each queue is a lane. The deliveries of one lane are taken in their order, one at a time from each lane that has some,
so a message waits for one delivery of each other lane at most, however many wait there.
"""

from __future__ import annotations

from typing import NamedTuple

from bus.port import Delivery, Subscription

# The unacknowledged messages of each lane that the broker delivers ahead: with 32 requests each, as a busy client sends
# them, two batches. With bodies of a megabyte, the bound of a client's, a lane has 32 MiB of them at the very most: a
# broker that is short of memory reads nothing of a connection that publishes, so it does not hear of a pause either.
LANE_PREFETCH = 32

# The bytes of bodies that a consumer has of one lane, waiting or being handled, before the broker is to deliver no
# more of it; it delivers again when half of them are settled. Messages on their way by then still come: no more than
# the queue holds, which is bounded too. Ten batches of requests of the usual length fit in, so that a long line of
# them is taken at full speed.
MAX_LANE_BYTES = 2 * 2**20


class ArrivedDelivery(NamedTuple):
    """A delivery that waits to be taken. at: when it was read, by the monotonic clock. since: the earliest time from
    which it can have waited in this process; earlier than `at` where the process stood still.
    """

    delivery: Delivery
    at: float
    since: float
    lane: ConsumerLane

    @property
    def may_have_waited(self) -> bool:
        """Whether it may have waited before it was read."""
        return self.since < self.at


class ConsumerLane:
    """The deliveries of one queue. name: that of its row's queue. held: bytes of the bodies of all that are not
    settled.
    """

    __slots__ = ("_paused", "held", "name", "subscription")

    def __init__(self, name: str) -> None:
        self.name = name
        self.subscription: Subscription | None = None
        self.held = 0
        self._paused = False

    def hold(self, delivery: Delivery) -> None:
        """Count a delivery that has arrived."""
        self.held += len(delivery.body)
        if self.held > MAX_LANE_BYTES and not self._paused and self.subscription is not None:
            self._paused = True
            self.subscription.pause()

    def release(self, delivery: Delivery) -> None:
        """A delivery is settled, or lost."""
        self.held -= len(delivery.body)
        if self._paused and self.held <= MAX_LANE_BYTES // 2 and self.subscription is not None:
            self._paused = False
            self.subscription.resume()

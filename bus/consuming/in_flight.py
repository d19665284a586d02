"""The messages that a consumer has under way: messages, and the deliveries that brought them."""

from __future__ import annotations

from bus.consuming.outcome import Received
from bus.port import Delivery
from bus.wire import Malformed

# From the third try on (two were not acknowledged) a delivery is taken apart from all others, its messages in parts of
# half of them, then a quarter, ... and at last one at a time. One at a time from the first would take so long that on
# an unstable bus a large delivery never ends.
SUSPECT_FROM = 2


class InFlightDelivery:
    """One delivery, which may hold many messages; it is acknowledged when the last of them is settled.

    tries: deliveries before this one after which a handler had it when it was lost, as far as this process knows.
    rejected: one of its messages can neither be settled nor parked, so the broker is to dead-letter all of it.
    again: the effects of one of its messages may be lost, so all of it is to be delivered again.
    """

    __slots__ = ("again", "delivery", "open", "part", "rejected", "tries")

    def __init__(self, delivery: Delivery, count: int, tries: int) -> None:
        self.delivery = delivery
        self.tries = tries
        self.part = max(1, count >> max(0, tries - SUSPECT_FROM + 1))  # this many of its messages are tried together
        self.open = count
        self.rejected = False
        self.again = False

    @property
    def is_suspect(self) -> bool:
        """Whether it has been tried so often without an end that it may have ended its consumers."""
        return self.tries >= SUSPECT_FROM

    def settle(self) -> None:
        """One of its messages is settled."""
        self.open -= 1
        if self.open:
            return
        if self.again:
            self.delivery.nack(requeue=True)
        elif self.rejected:
            self.delivery.nack(requeue=False)
        else:
            self.delivery.ack()


class InFlightMessage:
    """One message in hand. until: by this process's own clock, when its answer is of no use any more; None: never."""

    __slots__ = ("in_flight", "received", "until")

    def __init__(self, in_flight: InFlightDelivery, received: Received | Malformed, until: float | None = None) -> None:
        self.in_flight = in_flight
        self.received = received
        self.until = until

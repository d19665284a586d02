"""What a consumer has in hand: messages, and the deliveries that brought them."""

from __future__ import annotations

from bus.consuming.outcome import Received
from bus.port import Delivery
from bus.wire import Malformed

# From the third delivery on (two were not acknowledged) the messages of a delivery are taken one at a time.
SUSPECT_FROM = 2


class InFlightDelivery:
    """One delivery, which may hold many messages; it is acknowledged when the last of them is settled.

    rejected: one of its messages can neither be settled nor parked, so the broker is to dead-letter all of it.
    again: what was done for one of its messages may be lost, so all of it is to be delivered again.
    """

    __slots__ = ("again", "delivery", "open", "rejected")

    def __init__(self, delivery: Delivery, count: int) -> None:
        self.delivery = delivery
        self.open = count
        self.rejected = False
        self.again = False

    @property
    def is_suspect(self) -> bool:
        """Whether it has been delivered so often without an end that it may be what ended its consumers."""
        return self.delivery.delivery_count >= SUSPECT_FROM

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

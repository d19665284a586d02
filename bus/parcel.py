"""What a consumer has in hand: messages, and the deliveries that brought them."""

from __future__ import annotations

from bus.outcome import Received
from bus.port import Delivery
from bus.wire import Malformed


class Parcel:
    """One delivery, which may hold many messages; it is acknowledged when the last of them is settled."""

    __slots__ = ("delivery", "open")

    def __init__(self, delivery: Delivery, count: int) -> None:
        self.delivery = delivery
        self.open = count

    def settle(self) -> None:
        """One of its messages is settled."""
        self.open -= 1
        if not self.open:
            self.delivery.ack()


class Item:
    """One message in hand. until: by this process's own clock, nobody waits for its answer any more; None: never so."""

    __slots__ = ("parcel", "received", "until")

    def __init__(self, parcel: Parcel, received: Received | Malformed, until: float | None = None) -> None:
        self.parcel = parcel
        self.received = received
        self.until = until

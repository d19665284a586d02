"""The reason why a message is given up, worded for the client that sent the request."""

from __future__ import annotations

from bus.consuming.outcome import Received
from bus.contracts.base import Refusal
from bus.key_trust import BROKERS

EXPIRED = f"{BROKERS}expired"
EXHAUSTED = "delivery.exhausted"
GIVEN_UP = "delivery.given_up"
GIVEN_UP_BY_BROKER = Refusal(code=GIVEN_UP, reason="its queue gave it up; its dead letter has the reason")
EXPIRED_WAITING = Refusal(code=EXPIRED, reason="it waited longer than the expiration that its publisher gave it")


def given_up_of(received: Received) -> Refusal | None:
    """Return why the queue has given up a request, or is about to; None when it has not."""
    if received.exhausted or received.given_up == f"{BROKERS}delivery_limit":
        return Refusal(code=EXHAUSTED, reason="it was delivered to several processes, and none of them finished it")
    if received.given_up == EXPIRED:
        return EXPIRED_WAITING
    if received.given_up:
        return Refusal(
            code=GIVEN_UP, reason=f"a worker gave it up; its dead letter has the reason ({received.given_up})"
        )
    return None

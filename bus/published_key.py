"""The routing key that a message was first published with, as far as the broker has checked it, and why a dead letter
died.
"""

from __future__ import annotations

from collections.abc import Mapping

from bus.contracts.queues import COMMANDS, DEAD, EVENTS, REPLAY, REPLY, RETURN
from bus.topology import has_delayed
from bus.transport import UNREAD, Delivery

# On a dead letter, and on one that an operator sends back: the key that it was first published with.
ORIGINAL_KEY = "berth-key"
CODE = "berth-code"  # on a dead letter: why it was given up
BROKERS = "broker."  # how the code of a letter begins that the broker itself gave up
DEATHS = "x-death"  # the broker's record of how a message died, the last death first


def published_key(delivery: Delivery) -> str | None:
    """The routing key that a message was first published with. "": none that binds its body, as of a reply, or of what
    a worker has read before and delayed. None: the broker has checked no key of it.
    """
    # It checks none where a queue dead-letters to, nor where an exchange that is bound to berth's passes on.
    exchange, headers = delivery.exchange, delivery.headers
    if UNREAD in headers:  # the record of its deaths may be among what was left out
        return None
    if exchange in (COMMANDS, EVENTS, REPLY):
        return None if DEATHS in headers else "" if exchange == REPLY else delivery.routing_key
    found, written = headers.get(DEATHS), headers.get(ORIGINAL_KEY)
    deaths = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    if exchange == REPLAY or (exchange == DEAD and DEATHS not in headers):
        return written if isinstance(written, str) else ""
    if exchange not in (DEAD, RETURN) or not deaths or not all(_is_own(one, delivery) for one in deaths):
        return None
    first, keys = str(deaths[-1].get("exchange")), deaths[-1].get("routing-keys")
    if first.endswith(REPLAY):
        return written if isinstance(written, str) else ""
    return str(keys[0]) if not has_delayed(first) and isinstance(keys, list) and keys else ""


def _is_own(death: Mapping[str, object], delivery: Delivery) -> bool:
    """Whether a queue of berth's has passed a message on: a delay's, or, of a dead letter, the one that it names."""
    if has_delayed(str(death.get("exchange"))):
        return True
    return delivery.exchange == DEAD and str(death.get("queue")).endswith(delivery.routing_key)


def dead_letter_code_of(delivery: Delivery) -> str:
    """Return why a dead letter was given up: the code that its consumer wrote, or `broker.<reason>`; "": it is none."""
    deaths = delivery.headers.get(DEATHS)
    last = deaths[0] if isinstance(deaths, list) and deaths else None
    reason = last.get("reason") if isinstance(last, dict) else delivery.headers.get("x-first-death-reason")
    if isinstance(reason, str) and reason:
        return BROKERS + reason
    code = delivery.headers.get(CODE)
    return code if isinstance(code, str) else ""

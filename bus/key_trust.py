"""The routing key that a message was published with, and whether the broker has let its publisher use that key.

RabbitMQ checks the topic permissions of a publisher against the first key of its publish. It does not check the key by
which a queue dead-letters, and a project's user may declare a queue that dead-letters into the exchange of commands
(tried on 3.10.8 and 4.3.6). Version 3.10 does not check the keys of the headers CC and BCC either. So the key of a
delivery proves nothing about its publisher by itself. This table is the one rule:

| exchange | key | trusted when |
| --- | --- | --- |
| of commands | its routing key | the message was never dead-lettered, and a binding of the queue takes this key |
| of events | its routing key | the message was never dead-lettered |
| of replies | none | the same: who answers whom is a permission of its own |
| given-up | its routing key | it was dead-lettered by a queue that `keeps_keys`, and by no other program's queue |
| dead, parked by a worker | the header `berth-key` | always: only berth's workers may publish there |
| dead, by the broker | the first death's key | only queues of berth have dead-lettered it |
| return | none | a delay alone has dead-lettered it: a worker read it before |
| replays | the header `berth-key`, or none | always: only operators may publish there |
| another's, the default exchange | none | never: the broker checks no key there |

A user may bind an exchange under a name of its own to one of ours, and the broker then checks no key of what it
publishes there. A delivery names the exchange that its message was published to, and so does the record of its death.

The queues of berth never dead-letter into the exchanges of commands and events. A message that was dead-lettered there
comes from another program's queue, or its publisher has written so into its headers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache

from bus.contracts.queues import COMMANDS, DEAD, DELAYED, EVENTS, GIVEN_UP, QUEUES, REPLAY, REPLY, RETURN
from bus.port import UNREAD, Delivery
from bus.topology import delayed_it, matches

# The outcome of a message whose key nothing vouches for: it is counted, logged and acknowledged.
UNTRUSTED = "message.untrusted_key"

# The header with the key that a message was first published with, where a worker or an operator passes it on.
ORIGINAL_KEY = "berth-key"
CODE = "berth-code"  # on a dead letter: why it was given up
BROKERS = "broker."  # how the code of a letter begins that the broker itself gave up

# The broker's record of how a message died. RabbitMQ 4 writes it anew at each death. RabbitMQ 3.10 adds to one that a
# publisher has written, so that of a message that died nothing but this is sure: the queue and the reason of its last
# death are named (an entry for the same queue and reason keeps the publisher's exchange and routing key).
DEATHS = "x-death"
BROKERS_OWN = frozenset({DEATHS, "x-first-death-exchange", "x-first-death-queue", "x-first-death-reason"})
# A message may have died if its headers have a record, or if not all of them could be read.
_MAY_HAVE_DIED = BROKERS_OWN | {UNREAD}

# The queues whose letters keep their keys. A letter with such a name as its key came back from a delay.
KEEPING = tuple(queue.name for row in QUEUES if row.keeps_keys for queue in row.queues)

# Keys remembered of each queue, with whether its bindings take them. A client chooses the keys.
MAX_KEYS = 4096


def published_key(delivery: Delivery, queue: str = "") -> str | None:
    """Return the routing key that a message was published with; "": it was read under one before, or is a reply; None:
    nothing shows that its publisher was allowed to use a key. queue: the name of the queue's row, or of the lane, where
    it has not been checked yet that the key leads there.
    """
    exchange = delivery.exchange
    if exchange == REPLAY:
        return _written_key(delivery)
    if exchange == RETURN:
        return "" if _was_delayed(delivery) else None
    if exchange in (DEAD, GIVEN_UP):
        return letters_key(delivery)
    if exchange not in (COMMANDS, EVENTS, REPLY) or not _MAY_HAVE_DIED.isdisjoint(delivery.headers):
        return None
    if exchange == COMMANDS and queue and not _is_bound(queue, delivery.routing_key):
        return None
    return "" if exchange == REPLY else delivery.routing_key


def _written_key(delivery: Delivery) -> str:
    """Return the key that a worker or an operator has written into a header; "": none."""
    key = delivery.headers.get(ORIGINAL_KEY)
    return key if isinstance(key, str) else ""


def _was_delayed(delivery: Delivery) -> bool:
    """Whether a message was published to a delay, and died there alone: a queue of a worker's own may dead-letter into
    a delay under any key. RabbitMQ 3.10 may have the record from a publisher.
    """
    deaths = _deaths(delivery.headers)
    exchange = deaths[0].get("exchange") if deaths else None
    return isinstance(exchange, str) and delayed_it(exchange) and all(_is_own(death, ()) for death in deaths)


def letters_key(delivery: Delivery) -> str | None:
    """Return the routing key that a dead letter was first published with, against which it is read again; "": it was
    read before, or no key is known; None: another program's queue has dead-lettered it, or its record is no record.

    A letter of the broker's has the headers of its publisher, who may have written anything. The queue of requests
    keeps the key (`QueueRow.keeps_keys`), so that of one that no consumer has read the broker itself still knows the
    key under which it let it pass. A message that was read cannot have brought a record along (`published_key`): where
    it came back from a delay, the record has the key.
    """
    if delivery.exchange != GIVEN_UP and _MAY_HAVE_DIED.isdisjoint(delivery.headers):
        return _written_key(delivery)
    deaths = _deaths(delivery.headers)
    keeping = delivery.exchange == GIVEN_UP
    own = KEEPING if keeping else (delivery.routing_key,)
    if UNREAD in delivery.headers or not deaths or not all(own) or not all(_is_own(death, own) for death in deaths):
        return None
    if keeping and not delivery.routing_key.endswith(KEEPING):
        return delivery.routing_key
    first = deaths[-1]
    exchange, keys = first.get("exchange"), first.get("routing-keys")
    if isinstance(exchange, str) and exchange.endswith(REPLAY):
        return _written_key(delivery)
    if not isinstance(exchange, str) or delayed_it(exchange):
        return ""
    return keys[0] if isinstance(keys, list) and keys and isinstance(keys[0], str) else ""


def letters_code(delivery: Delivery) -> str:
    """Return why a dead letter was given up: the code that its consumer wrote, or `broker.<reason>`; "": it is none."""
    deaths = delivery.headers.get(DEATHS)
    last = deaths[0] if isinstance(deaths, list) and deaths else None
    reason = last.get("reason") if isinstance(last, dict) else delivery.headers.get("x-first-death-reason")
    if isinstance(reason, str) and reason:
        return BROKERS + reason
    code = delivery.headers.get(CODE)
    return code if isinstance(code, str) else ""


def _deaths(headers: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return the deaths that the broker has recorded, the last one first; none if that is not what is there."""
    found = headers.get(DEATHS)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        return []
    return found


def _is_own(death: Mapping[str, object], own: tuple[str, ...]) -> bool:
    """Whether one of berth's queues (own: their names without prefix) has dead-lettered the message then."""
    queue = death.get("queue")
    return isinstance(queue, str) and (queue.endswith(own) or _DELAYED.search(queue) is not None)


# A lane has bindings of its own.
_ROWS = {queue.name: queue for row in QUEUES for queue in row.queues}
_DELAYED = re.compile(rf"{re.escape(DELAYED)}\.[0-9]+\Z")


@lru_cache(MAX_KEYS)
def _is_bound(queue: str, key: str) -> bool:
    """Whether a binding of this queue takes a key from the exchange of commands. If not, another key of the message has
    led it here.
    """
    patterns = _patterns(queue)
    words = key.split(".")
    return not patterns or any(matches(pattern, words) for pattern in patterns)


@cache
def _patterns(queue: str) -> tuple[tuple[str, ...], ...]:
    """Return the bindings of a queue to the exchange of commands; a placeholder is any one word."""
    row = _ROWS.get(queue)
    bindings = row.bindings if row is not None else ()
    return tuple(
        tuple("*" if word.startswith("{") else word for word in key.split("."))
        for exchange, key in bindings
        if exchange == COMMANDS
    )

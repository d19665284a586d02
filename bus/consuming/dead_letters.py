"""Looking at dead letters, and sending them back. Nothing is lost on the way: a letter leaves its queue last.

A bus has one queue of dead letters. The routing key of a letter is the name of the queue that gave it up: the broker
writes it there by that queue's own settings, and permissions bind a consumer that parks a letter to its own queues. No
header has it, as a publisher may have written any header.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

import structlog
from msgspec import Struct

from bus import metrics
from bus.contracts.catalogue import DEAD, DEAD_LETTERS, GIVEN_UP, RETURN
from bus.port import BusError, Delivery, Outgoing, Transport
from bus.wire import (
    ATTEMPT,
    BATCH,
    BROKERS,
    CAUSE,
    DEADLINE,
    JSON,
    KEEPING,
    MAX_TIME_S,
    ORIGINAL_KEY,
    SENT_AT,
    TRACEPARENT,
    letters_code,
    letters_key,
    shown,
)

log = structlog.get_logger(__name__)

# Why a message was given up, on the dead letter.
REASON = "berth-reason"
EXCHANGE = "berth-exchange"
DIED_AT = "berth-died-at-ms"

# Letters that are passed over or shown in one go; those behind them wait for the next.
MAX_LOOKED_AT = 10_000

# The origin of a letter without one: another program wrote it into the queue of dead letters.
UNKNOWN = "unknown"

# The properties that go back with a letter, beside the time at which it was sent. A deadline has long passed, and its
# retries begin anew.
_KEPT = (CAUSE, TRACEPARENT)


class DeadLetter(Struct, frozen=True, kw_only=True):
    """One message that a queue gave up, and why. The body may hold secrets.

    position: from the oldest letter of the bus. queue: which gave it up; UNKNOWN: no trustworthy header names it.
    sent_at: when it was sent, at the latest; None when unknown. batch: the body holds several messages.
    """

    position: int
    queue: str
    id: str
    code: str
    reason: str
    type: str
    exchange: str
    routing_key: str
    cause: str
    died_at: float | None
    sent_at: float | None
    batch: bool
    body: bytes
    headers: Mapping[str, object]


class Counts(Struct, frozen=True):
    """Dead letters of a bus by the queue that gave them up; `more` lie behind those that were looked at."""

    by_queue: Mapping[str, int]
    more: int


async def list_dead(transport: Transport, queue: str | None = None, limit: int = 100) -> list[DeadLetter]:
    """The oldest dead letters (of one queue, or of all), which stay where they are.

    Raises QueueMissing: there is no letter of that queue, or no such queue.
    """
    found: list[DeadLetter] = []
    with _given_back() as kept:
        async for letter, delivery in _each(transport, kept):
            _keep(kept, delivery)
            if queue in (None, letter.queue):
                found.append(letter)
                if len(found) == limit:
                    break
    if not found and queue not in (None, UNKNOWN):
        await transport.depth(queue)
    return found


async def count(transport: Transport) -> Counts:
    """How many letters of which queue there are, by the names of the queues."""
    by_queue: Counter[str] = Counter()
    with _given_back() as kept:
        async for letter, delivery in _each(transport, kept):
            _keep(kept, delivery)
            by_queue[letter.queue] += 1
        more = await transport.depth(DEAD_LETTERS)
    return Counts(dict(sorted(by_queue.items())), more)


async def count_dead_letters(bus: str, transport: Transport) -> None:
    """Set the gauge of a bus to its number of dead letters; a broker that is unavailable leaves it as it was."""
    if not transport.connected:
        return
    try:
        metrics.DEAD_LETTERS.labels(bus).set(await transport.depth(DEAD_LETTERS))
    except BusError as error:
        log.debug("dead_letters.not_counted", bus=bus, code=error.code)


def _any(letter: DeadLetter) -> bool:
    return True


async def replay(
    transport: Transport,
    queue: str,
    ids: Collection[str] | None = None,
    *,
    may_go: Callable[[DeadLetter], bool] = _any,
) -> list[str]:
    """Send dead letters of a queue (those with these ids, or all) back to it; returns the ids sent.

    Each is confirmed there before it leaves here, so a crash in between may double one, never lose it. A letter that
    may not go stays in its queue.
    """
    wanted = None if ids is None else set(ids)
    sent: list[str] = []
    with _given_back() as kept:
        async for letter, delivery in _each(transport, kept):
            goes = letter.queue == queue and (wanted is None or letter.id in wanted) and may_go(letter)
            if not goes:
                _keep(kept, delivery)
                continue
            await _send_back(transport, queue, delivery, kept)
            sent.append(letter.id)
            if wanted is not None:
                wanted.discard(letter.id)
                if not wanted:
                    break
    return sent


async def purge(transport: Transport, queue: str) -> int:
    """Drop the dead letters of a queue; returns how many."""
    gone = 0
    with _given_back() as kept:
        async for letter, delivery in _each(transport, kept):
            if letter.queue == queue:
                delivery.ack()
                gone += 1
            else:
                _keep(kept, delivery)
    return gone


@contextmanager
def _given_back() -> Iterator[list[Delivery]]:
    """Letters that are held until the end, so that the next ones are seen, and then given back."""
    kept: list[Delivery] = []
    try:
        yield kept
    finally:
        for delivery in kept:
            delivery.nack(requeue=True)


def _keep(kept: list[Delivery], delivery: Delivery) -> None:
    delivery.body = b""  # its queue has it; thousands of large ones here would be more than a process may hold
    kept.append(delivery)


async def _each(transport: Transport, kept: list[Delivery]) -> AsyncIterator[tuple[DeadLetter, Delivery]]:
    """The letters of a bus, the oldest first, until too many are kept; messages that are parked meanwhile are not among
    them.
    """
    delivery = await transport.get(DEAD_LETTERS)
    behind = await transport.depth(DEAD_LETTERS)  # after a get, which the broker handles after earlier returns
    position = 0
    while delivery is not None:
        yield read_letter(position, delivery), delivery
        position += 1
        delivery = await transport.get(DEAD_LETTERS) if position <= behind and len(kept) < MAX_LOOKED_AT else None


async def _send_back(transport: Transport, queue: str, delivery: Delivery, kept: list[Delivery]) -> None:
    try:
        await transport.publish(_revived(queue, delivery))
    except BaseException:
        kept.append(delivery)
        raise
    delivery.ack()


def _revived(queue: str, delivery: Delivery) -> Outgoing:
    headers: dict[str, str | int | float] = {
        name: value for name in _KEPT if isinstance(value := delivery.headers.get(name), str)
    }
    # The consumer has to see how old it is: the record of a later delete or release may have been purged.
    sent_at = _sent_at(delivery.headers)
    if sent_at is not None:
        headers[SENT_AT] = int(sent_at * 1000)
    return Outgoing(
        exchange="",
        routing_key=queue,
        body=delivery.body,
        content_type=delivery.content_type or JSON,
        message_id=delivery.message_id or "",
        type=delivery.type or "",
        correlation_id=delivery.correlation_id,
        reply_to=delivery.reply_to,
        headers={ORIGINAL_KEY: letters_key(delivery), ATTEMPT: 0, **headers},
        mandatory=True,
    )


def read_letter(position: int, delivery: Delivery) -> DeadLetter:
    """A letter as a person wants to see it."""
    code, reason = letters_code(delivery) or "unknown", _text(delivery, REASON)
    if code.startswith(BROKERS):  # then it has the headers of its publisher, who may have written any
        gone = delivery.exchange == RETURN
        reason = "its queue was gone when its retry was due" if gone else "given up by the broker"
    return DeadLetter(
        position=position,
        queue=_origin(delivery),
        id=shown(delivery.message_id or ""),
        code=code,
        reason=reason,
        type=shown(delivery.type or ""),
        exchange=_text(delivery, EXCHANGE) or delivery.exchange,
        routing_key=shown(letters_key(delivery) or delivery.routing_key),
        cause=_text(delivery, CAUSE),
        died_at=_died_at(delivery.headers),
        sent_at=_sent_at(delivery.headers),
        batch=delivery.content_type == BATCH,
        body=delivery.body,
        headers={name: value for name, value in delivery.headers.items() if name != DEADLINE},
    )


def _origin(delivery: Delivery) -> str:
    """The queue that gave it up."""
    if delivery.exchange == GIVEN_UP:
        return KEEPING[0]  # there is one such queue (tests/test_house.py)
    if delivery.exchange in (DEAD, RETURN) and delivery.routing_key:
        return shown(delivery.routing_key)
    return UNKNOWN


def _text(delivery: Delivery, name: str) -> str:
    value = delivery.headers.get(name)
    return value if isinstance(value, str) else ""


def _sent_at(headers: Mapping[str, object]) -> float | None:
    """When it was sent, or else died: it was sent no later than that."""
    written = headers.get(SENT_AT)
    if isinstance(written, int | float) and 0 < written < MAX_TIME_S * 1000:
        return written / 1000
    return _died_at(headers)


def _died_at(headers: Mapping[str, object]) -> float | None:
    """By our consumer's header, or by the broker's own record of its first death."""
    written = headers.get(DIED_AT)
    if isinstance(written, int | float) and 0 < written < MAX_TIME_S * 1000:
        return written / 1000
    deaths = headers.get("x-death")
    if isinstance(deaths, list) and deaths and isinstance(deaths[-1], dict):
        when = deaths[-1].get("time")
        return when.timestamp() if isinstance(when, datetime) else None
    return None

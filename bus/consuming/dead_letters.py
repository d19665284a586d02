"""Lists dead letters and sends them back. None is lost: a dead letter is removed from its queue as the last step."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

import structlog
from msgspec import Struct

from bus import metrics
from bus.codec import (
    BATCH,
    CAUSE,
    INCARNATION,
    JSON,
    MAX_TIME_S,
    RETRIES,
    SENT_AT,
    TIMEOUT,
    TRACEPARENT,
    WAITED,
    shown,
)
from bus.contracts.queues import DEAD, DEAD_LETTERS, REPLAY, RETURN
from bus.published_key import BROKERS, DEATHS, ORIGINAL_KEY, dead_letter_code_of, published_key
from bus.transport import BusError, Delivery, Outgoing, Transport

log = structlog.get_logger(__name__)

# The header of a dead letter with the reason for which its message was given up.
REASON = "berth-reason"
EXCHANGE = "berth-exchange"
DIED_AT = "berth-died-at-ms"
TRUNCATED_FROM = (
    "berth-truncated-from-bytes"  # the size of the message's body, of which the dead letter has only the first bytes
)

# The code for which a dead letter is not sent back to its queue.
TRUNCATED = "dead_letter.truncated"

# The bound of dead letters that are counted by their queues. The dead letters of one queue are found however many are
# before them: what is given back is the first in line again, so they would be behind the same ones in each call.
MAX_COUNTED = 10_000

# The origin of a dead letter that another program wrote into the queue of dead letters.
UNKNOWN = "unknown"

# The headers that go back with a dead letter, beside the time at which it was sent. A deadline has long passed, and
# retries begin anew.
_KEPT = (CAUSE, TRACEPARENT, INCARNATION)


class DeadLetter(Struct, frozen=True, kw_only=True):
    """One message that a queue gave up, and the reason. The body may hold secrets."""

    # A bus has one queue of dead letters. The routing key of a dead letter names the queue that gave it up: the broker
    # writes it by that queue's own settings, and permissions bind a consumer that parks a dead letter to its own
    # queues. Headers are not used, because a publisher may have written any.

    position: int  # counted from the oldest dead letter of the bus
    queue: str  # the queue that gave the message up; UNKNOWN: nothing trustworthy names it
    id: str
    code: str
    reason: str
    type: str
    exchange: str
    routing_key: str
    cause: str
    died_at: float | None
    sent_at: float | None  # the latest time at which it may have been sent; None when unknown
    batch: bool  # the body holds several messages
    body: bytes
    headers: Mapping[str, object]
    # the bytes of the message's body where the dead letter has only the first of them; 0: it has all
    truncated_from: int = 0
    blocks_replay: str = ""  # the code for which it is not sent back; "": it may be


class Counts(Struct, frozen=True):
    """The numbers of dead letters of a bus by the queue that gave them up."""

    by_queue: Mapping[str, int]
    more: int  # the dead letters that were not read


async def list_dead(transport: Transport, queue: str | None = None, limit: int = 100) -> list[DeadLetter]:
    """Return the oldest dead letters (of one queue or of all), which stay in place.

    Raises QueueMissing when there is no dead letter of that queue, or no such queue.
    """
    found: list[DeadLetter] = []
    with _requeued_at_end() as kept:
        async for dead_letter, _ in _each(transport, kept):
            if queue in (None, dead_letter.queue):
                found.append(dead_letter)
                if len(found) == limit:
                    break
    if not found and queue not in (None, UNKNOWN):
        await transport.depth(queue)
    return found


async def count(transport: Transport) -> Counts:
    """Return the number of dead letters of each queue, sorted by the name of the queue."""
    by_queue: Counter[str] = Counter()
    with _requeued_at_end() as kept:
        async for dead_letter, _ in _each(transport, kept):
            by_queue[dead_letter.queue] += 1
            if len(kept) == MAX_COUNTED:
                break
        more = await transport.depth(DEAD_LETTERS)
    return Counts(dict(sorted(by_queue.items())), more)


async def count_dead_letters(bus: str, transport: Transport) -> None:
    """Set the gauge of a bus to its number of dead letters. While the broker is unavailable, the gauge keeps its
    value.
    """
    if not transport.connected:
        return
    try:
        metrics.DEAD_LETTERS.labels(bus).set(await transport.depth(DEAD_LETTERS))
    except BusError as error:
        log.debug("dead_letters.not_counted", bus=bus, code=error.code)


async def replay(
    transport: Transport,
    queue: str,
    ids: Collection[str] | None = None,
    *,
    may_go: Callable[[DeadLetter], bool] = lambda _: True,
) -> list[str]:
    """Send dead letters of a queue (those with these ids, or all) back to it. Returns the ids that were sent."""
    return [ident async for ident in send_each(transport, queue, ids, may_go=may_go)]


async def send_each(
    transport: Transport, queue: str, ids: Collection[str] | None, *, may_go: Callable[[DeadLetter], bool]
) -> AsyncIterator[str]:
    """Send them back one by one; yields the id of each that was sent. Each is confirmed there before it is removed
    here: a crash may duplicate one, not lose it. One that `may_go` refuses, or that `blocks_replay`, stays.
    """
    wanted = None if ids is None else set(ids)
    with _requeued_at_end() as kept:
        async for dead_letter, delivery in _each(transport, kept):
            named = dead_letter.queue == queue and (wanted is None or dead_letter.id in wanted)
            if not named or not may_go(dead_letter) or dead_letter.blocks_replay:
                continue
            await transport.publish(_revived(queue, delivery))
            kept.pop().ack()
            yield dead_letter.id
            if wanted is not None:
                wanted.discard(dead_letter.id)
                if not wanted:
                    break


async def purge(transport: Transport, queue: str, ids: Collection[str] | None = None) -> int:
    """Drop the dead letters of a queue (one for each of these ids, or all). Returns their number."""
    gone, left = 0, Counter(ids or ())
    with _requeued_at_end() as kept:
        async for dead_letter, _ in _each(transport, kept):
            if dead_letter.queue == queue and (ids is None or left[dead_letter.id]):
                kept.pop().ack()
                left[dead_letter.id] -= 1
                gone += 1
    return gone


@contextmanager
def _requeued_at_end() -> Iterator[list[Delivery]]:
    """Hold dead letters until the end of the block, so that the next ones can be read, and then requeue them."""
    kept: list[Delivery] = []
    try:
        yield kept
    finally:
        for delivery in kept:
            delivery.nack(requeue=True)


async def _each(transport: Transport, kept: list[Delivery]) -> AsyncIterator[tuple[DeadLetter, Delivery]]:
    """Yield the dead letters of a bus, the oldest first. Messages that are parked meanwhile are not among them. kept:
    each letter is the last of it while it is looked at.
    """
    delivery = await transport.get(DEAD_LETTERS)
    behind = await transport.depth(DEAD_LETTERS)  # after a get, which the broker handles after earlier requeues
    position = 0
    while delivery is not None:
        kept.append(delivery)
        yield read_dead_letter(position, delivery), delivery
        delivery.body, delivery.headers = b"", {}  # the queue keeps them; there may be a million letters
        position += 1
        delivery = await transport.get(DEAD_LETTERS) if position <= behind else None


def _revived(queue: str, delivery: Delivery) -> Outgoing:
    headers: dict[str, str | int | float] = {
        name: value for name in _KEPT if isinstance(value := delivery.headers.get(name), str | int)
    }
    # The consumer must see how old the message is, because the record of a later delete or release may have been
    # purged.
    sent_at = _sent_at(delivery.headers)
    if sent_at is not None:
        headers[SENT_AT] = int(sent_at * 1000)
    return Outgoing(
        exchange=REPLAY,
        routing_key=queue,
        body=delivery.body,
        content_type=delivery.content_type or JSON,
        message_id=delivery.message_id or "",
        type=delivery.type or "",
        correlation_id=delivery.correlation_id,
        reply_to=delivery.reply_to,
        headers={ORIGINAL_KEY: published_key(delivery) or "", RETRIES: 0, **headers},
        mandatory=True,
    )


def read_dead_letter(position: int, delivery: Delivery) -> DeadLetter:
    """Return a dead letter in readable form."""
    code, reason = dead_letter_code_of(delivery) or "unknown", _text(delivery, REASON)
    if code.startswith(BROKERS):  # the dead letter then has its publisher's headers, which may be anything
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
        routing_key=shown(published_key(delivery) or delivery.routing_key),
        cause=_text(delivery, CAUSE),
        died_at=_died_at(delivery.headers),
        sent_at=_sent_at(delivery.headers),
        batch=delivery.content_type == BATCH,
        body=delivery.body,
        headers={name: value for name, value in delivery.headers.items() if name not in {TIMEOUT, WAITED}},
        truncated_from=_truncated_from(delivery),
        blocks_replay=TRUNCATED if _truncated_from(delivery) else "",
    )


def _truncated_from(delivery: Delivery) -> int:
    size = delivery.headers.get(TRUNCATED_FROM)
    return size if isinstance(size, int) and size > len(delivery.body) else 0


def _origin(delivery: Delivery) -> str:
    """Return the queue that gave the message up. What another queue has passed on is no dead letter of the one it
    names.
    """
    if delivery.exchange in (DEAD, RETURN) and delivery.routing_key and published_key(delivery) is not None:
        return shown(delivery.routing_key)
    return UNKNOWN


def _text(delivery: Delivery, name: str) -> str:
    value = delivery.headers.get(name)
    return value if isinstance(value, str) else ""


def _sent_at(headers: Mapping[str, object]) -> float | None:
    """Return the time of sending (seconds since the epoch), or else that of its death, which is later."""
    return _time(headers, SENT_AT) or _died_at(headers)


def _died_at(headers: Mapping[str, object]) -> float | None:
    """Return the time of death by the consumer's header, or else by the broker's record of the first death."""
    deaths = headers.get(DEATHS)
    first = deaths[-1] if isinstance(deaths, list) and deaths else None
    when = first.get("time") if isinstance(first, dict) else None
    return _time(headers, DIED_AT) or (when.timestamp() if isinstance(when, datetime) else None)


def _time(headers: Mapping[str, object], name: str) -> float | None:
    written = headers.get(name)
    return written / 1000 if isinstance(written, int | float) and 0 < written < MAX_TIME_S * 1000 else None

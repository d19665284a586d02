"""Looking at dead letters, and sending them back. Nothing is lost on the way: a letter leaves its queue last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime

from msgspec import Struct

from bus.port import Delivery, Outgoing, Transport, dead_queue
from bus.wire import ATTEMPT, BATCH, CAUSE, DEADLINE, JSON, MAX_TIME_S, ORIGINAL_KEY, SENT_AT, TRACEPARENT, shown

# Why a message was given up, on the dead letter.
CODE = "berth-code"
REASON = "berth-reason"
QUEUE = "berth-queue"
EXCHANGE = "berth-exchange"
DIED_AT = "berth-died-at-ms"

# Letters looked at in one go; the others wait for the next.
MAX_LOOKED_AT = 10_000

# What goes back with a letter, beside the time at which it was sent. A deadline has long passed, and its retries begin
# anew.
_KEPT = (CAUSE, TRACEPARENT)


class DeadLetter(Struct, frozen=True, kw_only=True):
    """One message that a queue gave up, and why. `position` counts from the oldest; the body may hold secrets.

    sent_at: when it was sent, at the latest; None when nothing says so. batch: the body holds several messages.
    """

    position: int
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


async def list_dead(transport: Transport, queue: str, limit: int = 100) -> list[DeadLetter]:
    """The oldest dead letters of a queue, which stay where they are. Raises QueueMissing."""
    held: list[Delivery] = []
    try:
        while len(held) < min(limit, MAX_LOOKED_AT) and (delivery := await transport.get(dead_queue(queue))):
            held.append(delivery)
    finally:
        for delivery in held:
            delivery.nack(requeue=True)
    return [read_letter(position, delivery) for position, delivery in enumerate(held)]


def _any(letter: DeadLetter) -> bool:
    return True


async def replay(
    transport: Transport,
    queue: str,
    ids: Collection[str] | None = None,
    *,
    may_go: Callable[[DeadLetter], bool] = _any,
) -> list[str]:
    """Send dead letters (those with these ids, or all) back to the queue they died in; returns the ids sent.

    Each is confirmed there before it leaves here, so a crash in between may double one, never lose it. What may not
    go stays where it is.
    """
    wanted = None if ids is None else set(ids)
    passed_over: list[Delivery] = []
    sent: list[str] = []
    try:
        for _ in range(min(await transport.depth(dead_queue(queue)), MAX_LOOKED_AT)):
            delivery = await transport.get(dead_queue(queue))
            if delivery is None or wanted == set():
                passed_over += [delivery] if delivery else []
                break
            name = shown(delivery.message_id or "")
            if wanted is not None and name not in wanted:
                passed_over.append(delivery)
                continue
            if not may_go(read_letter(0, delivery)):
                passed_over.append(delivery)
                continue
            await _send_back(transport, queue, delivery, passed_over)
            sent.append(name)
            if wanted is not None:
                wanted.discard(name)
    finally:
        for delivery in passed_over:
            delivery.nack(requeue=True)
    return sent


async def purge(transport: Transport, queue: str) -> int:
    """Drop all dead letters of a queue; returns how many."""
    return await transport.purge(dead_queue(queue))


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
    # Who takes it has to see how old it is: what was said of it since (a delete, a release) may be forgotten.
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
        headers={ORIGINAL_KEY: _published_key(delivery), ATTEMPT: 0, **headers},
        mandatory=True,
    )


def read_letter(position: int, delivery: Delivery) -> DeadLetter:
    """A letter as a person wants to see it."""
    broker_says = _text(delivery, "x-first-death-reason")
    return DeadLetter(
        position=position,
        id=shown(delivery.message_id or ""),
        code=_text(delivery, CODE) or (f"broker.{broker_says}" if broker_says else "unknown"),
        reason=_text(delivery, REASON) or ("given up by the broker" if broker_says else ""),
        type=shown(delivery.type or ""),
        exchange=_text(delivery, EXCHANGE) or delivery.exchange,
        routing_key=shown(_published_key(delivery) or delivery.routing_key),
        cause=_text(delivery, CAUSE),
        died_at=_died_at(delivery.headers),
        sent_at=_sent_at(delivery.headers),
        batch=delivery.content_type == BATCH,
        body=delivery.body,
        headers={name: value for name, value in delivery.headers.items() if name not in (QUEUE, DEADLINE)},
    )


def _published_key(delivery: Delivery) -> str:
    """The routing key that it was first published with, against which it is read again; empty: none is known.

    A letter of the broker's has the headers of its publisher, who may have written anything: there the broker's own
    record tells.
    """
    if not delivery.headers.keys() & {"x-death", "x-first-death-reason"}:
        return _text(delivery, ORIGINAL_KEY)
    deaths = delivery.headers.get("x-death")
    first = deaths[-1] if isinstance(deaths, list) and deaths else None
    keys = first.get("routing-keys") if isinstance(first, dict) and first.get("exchange") else None
    return keys[0] if isinstance(keys, list) and keys and isinstance(keys[0], str) else ""


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

"""What a catalogue row means to a broker: the queues to declare, their bounds and bindings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from bus.contracts.catalogue import DEAD, QueueKind, QueueRow
from bus.port import dead_queue, retry_queue

# A parking or retry queue holds at most this many messages; past it the consumer that parks waits and tries again.
MAX_PARKED = 1_000_000

# A name that starts with this is somebody else's (a foreign client's reply queue): it gets no prefix.
FOREIGN = "="


class QueuePlan(Struct, frozen=True, kw_only=True):
    """One queue of the broker. `dead_exchange` None: what it gives up is gone."""

    name: str
    durable: bool
    exclusive: bool
    max_length: int
    drop_head: bool = False
    delivery_limit: int | None = None
    ttl_s: float | None = None
    dead_exchange: str | None = None
    dead_key: str = ""
    bindings: tuple[tuple[str, str], ...] = ()


def plan(row: QueueRow, name: str, bindings: Sequence[tuple[str, str]]) -> tuple[QueuePlan, ...]:
    """The queues that one catalogue row asks for: the queue itself last, after those it dead-letters to."""
    if row.kind is not QueueKind.DURABLE:
        private = row.kind is QueueKind.PRIVATE
        return (
            QueuePlan(
                name=name,
                durable=False,
                exclusive=private,
                max_length=row.max_length,
                drop_head=private,
                ttl_s=row.ttl_s,
                bindings=tuple(bindings),
            ),
        )
    return (*_beside(row, name), _durable(row, name, bindings))


def reply_plan(name: str, max_length: int) -> QueuePlan:
    """A private queue for replies: the oldest goes when nobody fetches them."""
    return QueuePlan(name=name, durable=False, exclusive=True, max_length=max_length, drop_head=True)


def foreign_plan(name: str) -> QueuePlan:
    """A durable queue that will be bound to somebody else's exchange."""
    return QueuePlan(name=name, durable=True, exclusive=False, max_length=MAX_PARKED, drop_head=True)


def fill_in(row: QueueRow, values: Mapping[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The queue's real name and bindings, placeholders filled in. ValueError: a value is not one safe word."""
    for key, value in values.items():
        if not value or any(letter in value for letter in ".#*{} \n") or len(value) > 128:
            raise ValueError(f"{key}={value!r} cannot be part of a queue name")
    bindings = tuple((exchange, pattern.format_map(values)) for exchange, pattern in row.bindings)
    return row.name.format_map(values), bindings


def matches(pattern: Sequence[str], key: Sequence[str]) -> bool:
    """Whether a topic pattern takes a routing key, both split into words: `*` is one word, `#` any number."""
    if not pattern:
        return not key
    if pattern[0] == "#":
        return any(matches(pattern[1:], key[skip:]) for skip in range(len(key) + 1))
    return bool(key) and pattern[0] in ("*", key[0]) and matches(pattern[1:], key[1:])


def _durable(row: QueueRow, name: str, bindings: Sequence[tuple[str, str]]) -> QueuePlan:
    return QueuePlan(
        name=name,
        durable=True,
        exclusive=False,
        max_length=row.max_length,
        delivery_limit=row.delivery_limit,
        ttl_s=row.ttl_s,
        dead_exchange=DEAD,
        dead_key=name,
        bindings=tuple(bindings),
    )


def _beside(row: QueueRow, name: str) -> list[QueuePlan]:
    dead = QueuePlan(
        name=dead_queue(name), durable=True, exclusive=False, max_length=MAX_PARKED, bindings=((DEAD, name),)
    )
    retries = [
        QueuePlan(
            name=retry_queue(name, level),
            durable=True,
            exclusive=False,
            max_length=MAX_PARKED,
            ttl_s=delay,
            dead_exchange="",
            dead_key=name,
        )
        for level, delay in enumerate(row.retry_s)
    ]
    return [dead, *retries]

"""What a catalogue row means to a broker: the queues to declare, their bounds and bindings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from bus.contracts.catalogue import DEAD, QueueKind, QueueRow
from bus.port import dead_queue, retry_queue

# A parking or retry queue holds at most this many messages; past it the consumer that parks waits and tries again.
MAX_PARKED = 1_000_000

# Replies that wait in one reply queue; the oldest goes first.
MAX_REPLIES = 100_000

# A name that starts with this is another program's (a client's reply queue): it gets no prefix.
FOREIGN = "="


class QueuePlan(Struct, frozen=True, kw_only=True):
    """One queue of the broker. `dead_exchange` None: what it gives up is gone.

    disposable: where a queue of other properties has its name, as an older berth declared, that one is deleted.
    """

    name: str
    durable: bool
    exclusive: bool
    max_length: int
    max_bytes: int = 0
    drop_head: bool = False
    delivery_limit: int | None = None
    ttl_s: float | None = None
    disposable: bool = False
    dead_exchange: str | None = None
    dead_key: str = ""
    bindings: tuple[tuple[str, str], ...] = ()


class QueueNames:
    """Names as the broker knows them: ours have the prefix, so that several systems share one virtual host."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def exchange(self, name: str) -> str:
        """One of our exchanges."""
        return self._prefix + name if name else ""

    def queue(self, name: str) -> str:
        """A queue: berth's, or another program's when it is marked so."""
        return name[1:] if name.startswith(FOREIGN) else self._prefix + name

    def key(self, exchange: str, key: str) -> str:
        """A routing or binding key: on the default and the dead-letter exchange it is a queue's name."""
        return self.queue(key) if exchange in ("", DEAD) else key

    def local(self, name: str) -> str:
        """An exchange or queue of ours as the code calls it."""
        return name.removeprefix(self._prefix)

    def local_reply(self, reply_to: str | None) -> str | None:
        """A reply queue as the code calls it; a foreign client's is marked."""
        if not reply_to or not self._prefix:
            return reply_to or None
        return self.local(reply_to) if reply_to.startswith(self._prefix) else FOREIGN + reply_to

    def plan(self, planned: QueuePlan) -> QueuePlan:
        """A planned queue under its real names."""
        dead = planned.dead_exchange
        return structs.replace(
            planned,
            name=self.queue(planned.name),
            bindings=tuple((self.exchange(where), self.key(where, key)) for where, key in planned.bindings),
            dead_exchange=dead if dead is None else self.exchange(dead),
            dead_key=self.queue(planned.dead_key) if dead is not None else "",
        )


def plan(row: QueueRow, name: str, bindings: Sequence[tuple[str, str]]) -> tuple[QueuePlan, ...]:
    """The queues that one catalogue row asks for: the queue itself last, after those it dead-letters to."""
    if row.kind is not QueueKind.DURABLE:
        private = row.kind is QueueKind.PRIVATE
        return (
            QueuePlan(
                name=name,
                durable=not private,
                exclusive=private,
                disposable=not private,
                max_length=row.max_length,
                max_bytes=row.max_bytes,
                drop_head=private,
                ttl_s=row.ttl_s,
                bindings=tuple(bindings),
            ),
        )
    return (*_beside(row, name), _durable(row, name, bindings))


def reply_plan(name: str) -> QueuePlan:
    """A private queue for replies: the oldest goes when they are not fetched."""
    return QueuePlan(name=name, durable=False, exclusive=True, max_length=MAX_REPLIES, drop_head=True)


def foreign_plan(name: str) -> QueuePlan:
    """A durable queue that will be bound to an exchange of another system."""
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
        max_bytes=row.max_bytes,
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

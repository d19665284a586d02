"""The meaning of a catalogue row to a broker: the queues to declare, their bounds and bindings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from bus.contracts.catalogue import (
    COMMANDS,
    DEAD,
    DEAD_LETTERS,
    DELAY,
    DELAYED,
    EVENTS,
    GIVEN_UP,
    RETRY_S,
    RETURN,
    QueueKind,
    QueueRow,
)

# The queue of dead letters, and that of each delay, holds at most this many messages.
MAX_PARKED = 1_000_000

# The delays that a bus offers for a message: a queue and an exchange each.
DELAYS_S = RETRY_S

# The binding key that takes every routing key.
ALL_KEYS = "#"

# Replies that wait in one reply queue; the oldest goes first.
MAX_REPLIES = 100_000

# The exchange of a mark (`Transport.mark`) is this and the mark's name. Its alternate exchange, which never exists
# and has no prefix, names the owner: the broker refuses to declare an exchange anew with another one.
MARK = "berth.owner."
MARK_OF = "berth.of."

# A name that starts with this is another program's (a client's reply queue): it gets no prefix.
FOREIGN = "="


class ExchangePlan(Struct, frozen=True):
    """One topic exchange of the broker.

    A message that it routes nowhere goes to the exchange `alternate` ("": there is none).
    """

    name: str
    alternate: str = ""


class QueuePlan(Struct, frozen=True, kw_only=True):
    """One queue of the broker. `dead_exchange` None: messages that it gives up are gone; `dead_key` "": under its own
    key.

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
        """A routing or binding key, which on some exchanges is a queue's name."""
        return self.queue(key) if keys_are_queues(exchange) and key != ALL_KEYS else key

    def local_key(self, exchange: str, key: str) -> str:
        """The routing key of a delivery as the code calls it; `exchange` is given so."""
        return self.local(key) if keys_are_queues(exchange) else key

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
            dead_key=self.queue(planned.dead_key) if planned.dead_key else "",
        )

    def plan_exchange(self, planned: ExchangePlan) -> ExchangePlan:
        """A planned exchange under its real names."""
        return ExchangePlan(self.exchange(planned.name), self.exchange(planned.alternate))


def keys_are_queues(exchange: str) -> bool:
    """Whether routing keys of this exchange (as the code calls it) are names of queues."""
    return exchange in ("", DEAD, RETURN) or is_delay(exchange)


def is_delay(exchange: str) -> bool:
    """Whether an exchange is one of those that delay."""
    return exchange.startswith(DELAY + ".")


def delayed_it(real_exchange: str) -> bool:
    """Whether this, as the broker calls it, is an exchange that delays, of whichever system."""
    return is_delay(real_exchange[real_exchange.rfind(DELAY) :])


def delay_exchange(delay_s: float) -> str:
    """The exchange that delays a message by so much; its routing key names the queue that gets it then."""
    return f"{DELAY}.{_ms(delay_s)}"


def delayed_queue(delay_s: float) -> str:
    """The queue in which messages wait that are delayed by so much."""
    return f"{DELAYED}.{_ms(delay_s)}"


def shared_exchanges() -> tuple[ExchangePlan, ...]:
    """The exchanges of a bus, in the order in which they can be declared.

    A message that was delayed for a queue that is gone meanwhile is a dead letter. Without that the broker would offer
    it again and again, and a few of them would hold up all that is delayed
    (docs/decisions/0016-one-set-of-delays-a-bus.md).
    """
    delays = (ExchangePlan(delay_exchange(delay_s)) for delay_s in DELAYS_S)
    return (
        ExchangePlan(COMMANDS),
        ExchangePlan(EVENTS),
        ExchangePlan(DEAD),
        ExchangePlan(GIVEN_UP),
        ExchangePlan(RETURN, alternate=DEAD),
        *delays,
    )


def shared_queues() -> tuple[QueuePlan, ...]:
    """The queues that a bus has for all its consumers."""
    dead = QueuePlan(
        name=DEAD_LETTERS,
        durable=True,
        exclusive=False,
        max_length=MAX_PARKED,
        bindings=((DEAD, ALL_KEYS), (GIVEN_UP, ALL_KEYS)),
    )
    delays = (
        QueuePlan(
            name=delayed_queue(delay_s),
            durable=True,
            exclusive=False,
            max_length=MAX_PARKED,
            ttl_s=delay_s,
            dead_exchange=RETURN,
            bindings=((delay_exchange(delay_s), ALL_KEYS),),
        )
        for delay_s in DELAYS_S
    )
    return (dead, *delays)


def plan(row: QueueRow, name: str, bindings: Sequence[tuple[str, str]]) -> QueuePlan:
    """The queue that a catalogue row describes."""
    durable = row.kind is QueueKind.DURABLE
    private = row.kind is QueueKind.PRIVATE
    dies = durable and not row.takes_letters
    return QueuePlan(
        name=name,
        durable=not private,
        exclusive=private,
        disposable=row.kind is QueueKind.EXPIRING,
        max_length=row.max_length,
        max_bytes=row.max_bytes,
        drop_head=private,
        delivery_limit=row.delivery_limit if durable else None,
        ttl_s=row.ttl_s,
        dead_exchange=(GIVEN_UP if row.keeps_keys else DEAD) if dies else None,
        dead_key=name if dies and not row.keeps_keys else "",
        bindings=(*bindings, (RETURN, name)) if durable else tuple(bindings),
    )


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


def _ms(delay_s: float) -> int:
    return round(delay_s * 1000)

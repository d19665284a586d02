"""Derives from catalogue rows what a broker declares: exchanges, queues, bounds and bindings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from bus.contracts.queues import (
    COMMANDS,
    DEAD,
    DEAD_LETTERS,
    DELAY,
    DELAYED,
    EVENTS,
    REPLAY,
    REPLY,
    RETRY_S,
    RETURN,
    QueueKind,
    QueueRow,
    Where,
    is_project_bus,
)

# The bounds of the queue of dead letters and of the queue of each delay: messages, and bytes of their bodies.
MAX_PARKED = 1_000_000
MAX_PARKED_BYTES = 256 * 2**20

# The delivery limit of a queue whose messages the broker never gives up for being given back. It is stated, because
# RabbitMQ 4 gives a message up after 20 times where none is stated; and it is not -1, which RabbitMQ 3.10 takes for a
# limit that each message has passed.
NEVER_GIVEN_UP = 2**31 - 1

# The delays that a bus has for messages. Each is a queue and an exchange.
DELAYS_S = RETRY_S

# The binding key that matches every routing key.
ALL_KEYS = "#"

# The bound of replies in one reply queue; the oldest is dropped first.
MAX_REPLIES = 100_000

# The exchange of an owner (`Transport.set_owner`) is named by this prefix and the owned name. Its alternate exchange,
# which never exists and has no prefix, names the owner: the broker refuses a declaration with another alternate
# exchange.
OWNER_EXCHANGE = "berth.owner."
OWNER_ID = "berth.of."

# The mark of a name that belongs to another program (a client's reply queue), and gets no prefix.
EXTERNAL = "="


class ExchangePlan(Struct, frozen=True):
    """One topic exchange of the broker."""

    name: str
    alternate: str = ""  # the exchange for messages that it cannot route ("": none)


class QueuePlan(Struct, frozen=True, kw_only=True):
    """One queue of the broker."""

    name: str
    durable: bool
    exclusive: bool
    max_length: int
    max_bytes: int = 0
    drop_head: bool = False
    # how often a message may be given back before the queue gives it up (None: not stated, because it has no consumer)
    delivery_limit: int | None = None
    ttl_s: float | None = None
    # an existing queue of this name with other properties, declared by an older berth, is deleted
    disposable: bool = False
    single_active: bool = False  # one consumer at a time gets the deliveries
    dead_exchange: str | None = None  # the exchange for messages that the queue gives up; None: they are dropped
    dead_key: str = ""  # their routing key there; "": the message's own
    bindings: tuple[tuple[str, str], ...] = ()


class ExternalQueue(Struct, frozen=True, kw_only=True):
    """A queue of another system and the exchange that it is bound to, both as that system's own processes declare them.
    Its names have no prefix.
    """

    name: str
    durable: bool
    auto_delete: bool
    arguments: Mapping[str, str | int] = {}
    exchange: str
    exchange_type: str
    exchange_durable: bool
    exchange_auto_delete: bool
    routing_key: str


class QueueNames:
    """Translates names of berth to names of the broker, which have a prefix, so that several systems can share one
    virtual host.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def exchange(self, name: str) -> str:
        """Return the broker's name of an exchange of berth."""
        return self._prefix + name if name else ""

    def queue(self, name: str) -> str:
        """Return the broker's name of a queue of berth, or of another program when the name is marked so."""
        return name[1:] if name.startswith(EXTERNAL) else self._prefix + name

    def key(self, exchange: str, key: str) -> str:
        """Return the broker's routing or binding key, which on some exchanges is the name of a queue."""
        return self.queue(key) if keys_are_queues(exchange) and key != ALL_KEYS else key

    def local_key(self, exchange: str, key: str) -> str:
        """Return the local form of a delivery's routing key. exchange: in its local form."""
        return self.local(key) if keys_are_queues(exchange) else key

    def local(self, name: str) -> str:
        """Return the local form of the name of an exchange or queue of berth."""
        return name.removeprefix(self._prefix)

    def local_reply(self, reply_to: str | None) -> str | None:
        """Return the local form of a reply queue's name; that of a foreign client is marked."""
        if not reply_to or not self._prefix:
            return reply_to or None
        return self.local(reply_to) if reply_to.startswith(self._prefix) else EXTERNAL + reply_to

    def plan(self, planned: QueuePlan) -> QueuePlan:
        """Return a planned queue with the broker's names."""
        dead = planned.dead_exchange
        return structs.replace(
            planned,
            name=self.queue(planned.name),
            bindings=tuple((self.exchange(where), self.key(where, key)) for where, key in planned.bindings),
            dead_exchange=dead if dead is None else self.exchange(dead),
            dead_key=self.queue(planned.dead_key) if planned.dead_key else "",
        )

    def plan_exchange(self, planned: ExchangePlan) -> ExchangePlan:
        """Return a planned exchange with the broker's names."""
        return ExchangePlan(self.exchange(planned.name), self.exchange(planned.alternate))


def keys_are_queues(exchange: str) -> bool:
    """Whether the routing keys of this exchange (local name) are names of queues."""
    return exchange in ("", DEAD, RETURN, REPLAY, REPLY) or is_delay(exchange)


def is_delay(exchange: str) -> bool:
    """Whether this is an exchange of delayed messages."""
    return exchange.startswith(DELAY + ".")


def has_delayed(real_exchange: str) -> bool:
    """Whether this (by the broker's name) is an exchange of delayed messages, of any system."""
    return is_delay(real_exchange[real_exchange.rfind(DELAY) :])


def delay_exchange(delay_s: float) -> str:
    """Return the exchange that delays a message by this time (seconds). The routing key names the queue that gets the
    message afterwards.
    """
    return f"{DELAY}.{_ms(delay_s)}"


def delayed_queue(delay_s: float) -> str:
    """Return the queue in which messages with this delay (seconds) wait."""
    return f"{DELAYED}.{_ms(delay_s)}"


def shared_exchanges(bus: str = "") -> tuple[ExchangePlan, ...]:
    """The exchanges of a bus, in the order in which they can be declared. A project's bus has those of clients."""
    # A delayed message whose queue no longer exists becomes a dead letter: the broker would otherwise try to route it
    # again and again, and a few such messages would block all delayed ones
    # (docs/decisions/0016-one-set-of-delays-a-bus.md).
    if is_project_bus(bus):
        return (ExchangePlan(COMMANDS), ExchangePlan(EVENTS), ExchangePlan(DEAD), ExchangePlan(REPLY))
    delays = (ExchangePlan(delay_exchange(delay_s)) for delay_s in DELAYS_S)
    return (
        ExchangePlan(COMMANDS),
        ExchangePlan(EVENTS),
        ExchangePlan(DEAD),
        ExchangePlan(REPLAY),
        ExchangePlan(REPLY),
        ExchangePlan(RETURN, alternate=DEAD),
        *delays,
    )


def shared_queues(bus: str = "") -> tuple[QueuePlan, ...]:
    """Return the queues that all consumers of a bus share; on a project's there are none."""
    if is_project_bus(bus):
        return ()
    dead = QueuePlan(
        name=DEAD_LETTERS,
        durable=True,
        exclusive=False,
        max_length=MAX_PARKED,
        max_bytes=MAX_PARKED_BYTES,
        delivery_limit=NEVER_GIVEN_UP,  # each look at the dead letters gives all of them back
        bindings=((DEAD, ALL_KEYS),),
    )
    delays = (
        QueuePlan(
            name=delayed_queue(delay_s),
            durable=True,
            exclusive=False,
            max_length=MAX_PARKED,
            max_bytes=MAX_PARKED_BYTES,
            ttl_s=delay_s,
            dead_exchange=RETURN,
            bindings=((delay_exchange(delay_s), ALL_KEYS),),
        )
        for delay_s in DELAYS_S
    )
    return (dead, *delays)


def plan(row: QueueRow, name: str, bindings: Sequence[tuple[str, str]]) -> QueuePlan:
    """Return the queue that a catalogue row describes."""
    durable = row.kind is QueueKind.DURABLE
    private = row.kind is QueueKind.PRIVATE
    dies = row.has_dead_letters
    dead_exchange, dead_key = DEAD, name
    if row.drops_to:
        dead_exchange, dead_key = RETURN, _named_as(row.drops_to, row, name)
    return QueuePlan(
        name=name,
        durable=not private,
        exclusive=private,
        disposable=row.kind is QueueKind.EXPIRING and not row.single_active,
        single_active=row.single_active,
        max_length=row.max_length,
        max_bytes=row.max_bytes,
        drop_head=private or bool(row.drops_to),
        delivery_limit=_delivery_limit(row),
        ttl_s=row.ttl_s,
        dead_exchange=dead_exchange if dies or row.drops_to else None,
        dead_key=dead_key if dies or row.drops_to else "",
        bindings=(*bindings, (RETURN, name), (REPLAY, name)) if durable else tuple(bindings),
    )


def _delivery_limit(row: QueueRow) -> int | None:
    """A project's message that ends its gateway each time is given up, as a worker's."""
    if row.kind is QueueKind.PRIVATE:
        return None
    return row.delivery_limit if row.kind is QueueKind.DURABLE or row.where is Where.PROJECT else NEVER_GIVEN_UP


def _named_as(template: str, row: QueueRow, name: str) -> str:
    """Return the name of a queue of another template, with the word that the name of this row's queue ends with."""
    return template.partition("{")[0] + name.removeprefix(row.name.partition("{")[0])


def reply_plan(name: str, *, bound: bool = True) -> QueuePlan:
    """Return a private queue for replies, which drops the oldest when it is full."""
    bindings = ((REPLY, name),) if bound else ()
    return QueuePlan(
        name=name, durable=False, exclusive=True, max_length=MAX_REPLIES, drop_head=True, bindings=bindings
    )


def external_plan(name: str) -> QueuePlan:
    """Return a durable queue that is to be bound to an exchange of another system."""
    return QueuePlan(
        name=name,
        durable=True,
        exclusive=False,
        max_length=MAX_PARKED,
        drop_head=True,
        delivery_limit=NEVER_GIVEN_UP,
    )


def fill_in(row: QueueRow, values: Mapping[str, str]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the queue's name and bindings with the placeholders filled in. Raises ValueError when a value is not one
    safe word.
    """
    for key, value in values.items():
        if not value or any(character in value for character in ".#*{} \n") or len(value) > 128:
            raise ValueError(f"{key}={value!r} cannot be part of a queue name")
    bindings = tuple((exchange, pattern.format_map(values)) for exchange, pattern in row.bindings)
    return row.name.format_map(values), bindings


def matches(pattern: Sequence[str], key: Sequence[str]) -> bool:
    """Whether a topic pattern matches a routing key, both split into words: `*` is one word, `#` any number of
    words.
    """
    if not pattern:
        return not key
    if pattern[0] == "#":
        return any(matches(pattern[1:], key[skip:]) for skip in range(len(key) + 1))
    return bool(key) and pattern[0] in ("*", key[0]) and matches(pattern[1:], key[1:])


def _ms(delay_s: float) -> int:
    return round(delay_s * 1000)

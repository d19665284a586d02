"""The memory broker: exchanges, bindings, connections, and queues with their messages and consumers."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct, structs

from bus.clock import Clock
from bus.topology import QueueNames, QueuePlan, matches
from bus.transport import (
    DELIVERY_FIELDS,
    Delivery,
    Outgoing,
    PublishRefused,
    QueueLocked,
    QueueMissing,
    Unroutable,
    call_back,
)

# Routes remembered per exchange; one more and they are all worked out again.
MAX_ROUTES = 50_000


# Deliveries of one queue in one turn of the loop: a consumer that gives back at once must not stop all others.
MAX_PER_TURN = 256

# A message for which its next queue has no room is offered to it again this often. This many wait for that, and let
# messages for other queues pass, as in RabbitMQ (dead_letter_worker_consumer_prefetch).
CAPACITY_RETRY_S = 0.2
MAX_DYING = 32


# How often and where a message has died, the last death first, as RabbitMQ writes it into the header x-death.
Deaths = tuple[Mapping[str, object], ...]


class Connection(Protocol):
    """The part of a connected transport that the broker and its queues use."""

    names: QueueNames
    subscriptions: list[Consumption]

    def declare_no_more(self, queue: str) -> None:
        """A consumption of this queue has ended."""

    def lose(self) -> None:
        """The connection is cut."""

    def reconnect_soon(self) -> None:
        """The broker can be reached again."""


class Stored(Struct, eq=False):
    """One message in the broker. `number` is its place in line; it keeps it when it is given back."""

    message: Outgoing
    number: int
    expires_at: float | None
    returns: int = 0
    redelivered: bool = False
    deaths: Deaths = ()


class MemoryDelivery:
    """One message handed to a consumer."""

    __slots__ = ("_consumer", "_held", "_stored", *DELIVERY_FIELDS)

    def __init__(self, stored: Stored, consumer: Consumption) -> None:
        message = stored.message
        self._stored = stored
        self._consumer = consumer
        self._held = consumer.unacked
        self.body = message.body
        self.exchange = consumer.transport.names.local(message.exchange)
        self.routing_key = consumer.transport.names.local_key(self.exchange, message.routing_key)
        self.content_type: str | None = message.content_type
        self.message_id: str | None = message.message_id or None
        self.type: str | None = message.type or None
        self.correlation_id = message.correlation_id
        self.reply_to = consumer.transport.names.local_reply(message.reply_to)
        self.headers: Mapping[str, object] = message.headers
        if stored.deaths:
            first = {f"x-first-death-{name}": stored.deaths[-1][name] for name in ("reason", "queue", "exchange")}
            self.headers = {**self.headers, "x-death": [dict(death) for death in stored.deaths], **first}
        self.redelivered = stored.redelivered
        self.delivery_count = stored.returns
        self.expiration_s = message.expiration_s

    @property
    def is_lost(self) -> bool:
        """Whether its connection is lost."""
        return self._held is not self._consumer.unacked

    def ack(self) -> None:
        """Done with it."""
        if self._held.pop(self._stored.number, None) is not None:
            self._consumer.queue.wake()

    def nack(self, *, requeue: bool) -> None:
        """Give it back, or let it die."""
        if self._held.pop(self._stored.number, None) is None:
            return
        queue = self._consumer.queue
        if requeue:
            queue.requeue(self._stored)
        else:
            queue.die(self._stored, "rejected")
        queue.wake()


class Consumption:
    """One consumption of one queue by one transport, which takes it up again after a lost connection. prefetch: 0 for a
    transport's single gets, and for one that was cancelled. unacked: what the present connection holds.
    """

    def __init__(self, queue: Queue, transport: Connection, prefetch: int, on: Callable[[Delivery], None]) -> None:
        self.transport = transport
        self.prefetch = prefetch
        self.on_delivery = on
        self.paused = False
        self.attach(queue)

    def attach(self, queue: Queue) -> None:
        """Begin, on a connection that is up."""
        self.queue = queue
        self.unacked: dict[int, Stored] = {}
        queue.consumers.append(self)
        queue.wake()

    def lose(self) -> None:
        """The connection is lost: everything unacknowledged goes back in line."""
        held, self.unacked = self.unacked, {}
        for stored in held.values():
            self.queue.requeue(stored)
        held.clear()
        self.queue.wake()

    def pause(self) -> None:
        """No new deliveries until `resume`."""
        self.paused = True

    def resume(self) -> None:
        """Deliver again."""
        self.paused = False
        self.queue.wake()

    async def cancel(self) -> None:
        """No new deliveries; those handed over may still be acknowledged."""
        self.transport.subscriptions = [one for one in self.transport.subscriptions if one is not self]
        self.prefetch = 0
        self.transport.declare_no_more(self.queue.plan.name)


class Queue:
    """A queue: ready messages, returned messages (first in line again), consumers."""

    def __init__(self, broker: MemoryBroker, planned: QueuePlan, owner: Connection | None) -> None:
        self.broker = broker
        self.plan = planned
        self.owner = owner
        self.ready: deque[Stored] = deque()
        self.returned: list[tuple[int, Stored]] = []
        self.consumers: list[Consumption] = []
        self.dying: deque[tuple[Stored, str]] = deque()  # given up, and no room for it among the dead letters
        self.bytes = 0  # of the bodies in line
        self.next_number = 0
        self.woken = False
        self.shut = 0  # how many planned faults make it count as full
        self.alarm: asyncio.TimerHandle | None = None  # its messages are looked at again
        self.alarm_at = 0.0

    def __len__(self) -> int:
        return len(self.ready) + len(self.returned)

    @property
    def full(self) -> bool:
        """Whether a publish is refused."""
        if self.plan.drop_head:
            return False
        return (
            self.shut > 0
            or len(self) + len(self.dying) >= self.plan.max_length  # as RabbitMQ counts, so those are bounded too
            or bool(self.plan.max_bytes and self.bytes >= self.plan.max_bytes)
        )

    def put(self, message: Outgoing, deaths: Deaths = ()) -> None:
        """A new message, last in line."""
        while self.plan.drop_head and len(self) and self._is_over(len(message.body)):
            self.die(self.pop(), "maxlen")
        waits = [wait for wait in (self.plan.ttl_s, message.expiration_s) if wait is not None]
        expires_at = self.broker.clock.monotonic() + min(waits) if waits else None
        stored = Stored(message, self.next_number, expires_at, deaths=deaths)
        self.next_number += 1
        self.ready.append(stored)
        self.bytes += len(message.body)
        if self.consumers:
            self.wake()
        if expires_at is not None:
            self.set_alarm(expires_at)

    def _is_over(self, more_bytes: int) -> bool:
        """Whether it has no room for a message of so many bytes, besides what it has."""
        plan = self.plan
        return len(self) >= plan.max_length or bool(plan.max_bytes and self.bytes + more_bytes > plan.max_bytes)

    def pop(self) -> Stored:
        """The first in line, out of it."""
        first = heapq.heappop(self.returned)[1] if self.returned else self.ready.popleft()
        self.bytes -= len(first.message.body)
        return first

    def clear(self) -> None:
        """Drop everything in line."""
        self.ready.clear()
        self.returned.clear()
        self.bytes = 0

    def head(self) -> Stored | None:
        """The first in line."""
        if self.returned:
            return self.returned[0][1]
        return self.ready[0] if self.ready else None

    def requeue(self, stored: Stored) -> None:
        """At its old place in line, unless it has come back too often."""
        stored.returns += 1
        stored.redelivered = True
        limit = self.plan.delivery_limit
        if limit is not None and stored.returns > limit:
            self.die(stored, "delivery_limit")
        else:
            heapq.heappush(self.returned, (stored.number, stored))
            self.bytes += len(stored.message.body)

    def die(self, stored: Stored, reason: str) -> None:
        """To the dead letters; while they are full it waits here, as in RabbitMQ (at-least-once)."""
        if self.dying or not self.dead_letter(stored, reason):
            self.dying.append((stored, reason))
            self.set_alarm(self.broker.clock.monotonic() + CAPACITY_RETRY_S)

    def dead_letter(self, stored: Stored, reason: str) -> bool:
        """To the dead letters, where this queue has some. False: the queue is full; who ignores it loses it."""
        return self.plan.dead_exchange is None or self.broker.dead_letter(self.plan, stored, reason)

    def expire(self) -> None:
        """Expired messages leave from the head of the line, as in RabbitMQ; never for a queue that is full."""
        now = self.broker.clock.monotonic()
        if self.dying:
            self.dying = deque(one for one in self.dying if not self.dead_letter(*one))
        while (first := self.head()) is not None and first.expires_at is not None and first.expires_at <= now:
            if len(self.dying) >= MAX_DYING:
                break
            self.pop()
            if not self.dead_letter(first, "expired"):
                self.dying.append((first, "expired"))
        if self.dying:
            self.set_alarm(now + CAPACITY_RETRY_S)
        if first is not None and first.expires_at is not None and first.expires_at > now:
            self.set_alarm(first.expires_at)

    def set_alarm(self, due: float) -> None:
        """Look at the messages at a time, if not before. due: by the broker's monotonic clock, in seconds."""
        if self.alarm is not None:
            if self.alarm_at <= due:
                return
            self.alarm.cancel()
        self.alarm_at, wait_s = due, due - self.broker.clock.monotonic()
        self.alarm = asyncio.get_running_loop().call_later(wait_s, self._ring, context=self.broker.context)

    def _ring(self) -> None:
        self.alarm = None
        self.expire()

    def wake(self) -> None:
        """Deliver the ready messages, on the next turn of the loop."""
        if not self.woken and (self.ready or self.returned) and self.consumers:
            self.woken = True
            asyncio.get_running_loop().call_soon(self._fill_consumers, context=self.broker.context)

    def _fill_consumers(self) -> None:
        self.woken = False
        self.expire()
        if self.plan.single_active:
            self.consumers.sort(key=lambda one: one.prefetch == 0)  # those that were cancelled last
        idle = handed = 0
        while (self.ready or self.returned) and idle < len(self.consumers):
            if handed == MAX_PER_TURN:
                self.wake()
                return
            consumer = self.consumers[0]
            if not self.plan.single_active:  # the consumer that was served goes to the end of the round
                self.consumers.append(self.consumers.pop(0))
            if consumer.paused or len(consumer.unacked) >= consumer.prefetch:
                idle += len(self.consumers) if self.plan.single_active else 1
                continue
            idle = 0
            handed += 1
            self.deliver_to(consumer)

    def deliver_to(self, consumer: Consumption) -> None:
        """The first in line to this consumer."""
        stored = self.pop()
        consumer.unacked[stored.number] = stored
        delivery = MemoryDelivery(stored, consumer)
        if not call_back(consumer.on_delivery, delivery):
            delivery.nack(requeue=False)

    def disconnect(self, transport: Connection) -> None:
        """A connection is gone: its consumers leave, and their messages go back in line."""
        mine = [one for one in self.consumers if one.transport is transport]
        self.consumers = [one for one in self.consumers if one.transport is not transport]
        for consumer in mine:
            consumer.lose()


class MemoryBroker:
    """The broker. Lives in one event loop; several transports share it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        # Deliveries run in the broker's own context, so that a worker that is killed in a simulation stops no
        # deliveries to others.
        self.context = contextvars.copy_context()
        self.up = True
        self.transports: list[Connection] = []
        self._exchanges: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        self._routes: dict[str, dict[str, tuple[str, ...]]] = {}
        self._alternates: dict[str, str] = {}
        self._queues: dict[str, Queue] = {}
        self.owners: dict[str, str] = {}  # durable: {name: owner}

    def drop_connections(self) -> None:
        """Cut every connection; each comes back by itself, as after a network fault."""
        for transport in list(self.transports):
            transport.lose()
        for transport in list(self.transports):
            transport.reconnect_soon()

    def stop(self) -> None:
        """The broker goes down: only durable queues and their persistent messages survive."""
        self.up = False
        for transport in list(self.transports):
            transport.lose()
        for name, queue in list(self._queues.items()):
            if not queue.plan.durable:
                self._delete(name)

    def start(self) -> None:
        """The broker is back; the transports reconnect."""
        self.up = True
        for transport in list(self.transports):
            transport.reconnect_soon()

    def declare_exchange(self, name: str, alternate: str = "") -> None:
        """Declare a topic exchange; in tests, those of other systems too.

        alternate: the exchange for what this one leads to no queue.
        """
        self._exchanges.setdefault(name, [])
        if alternate:
            self._alternates[name] = alternate

    def has_exchange(self, name: str) -> bool:
        """Whether the exchange exists."""
        return name in self._exchanges

    def declare(self, planned: QueuePlan, owner: Connection | None) -> None:
        """Declare a queue and its bindings; harmless when it exists. Raises QueueLocked: another connection's."""
        found = self._queues.get(planned.name)
        if found is None:
            self._queues[planned.name] = Queue(self, planned, owner)
        elif found.owner is not None and found.owner is not owner:
            raise QueueLocked(f"another connection has the queue {planned.name!r}")
        for exchange, pattern in planned.bindings:
            self.bind(planned.name, exchange, pattern)

    def bind(self, queue: str, exchange: str, pattern: str) -> None:
        """Bind a queue to an exchange. Raises QueueMissing when the exchange does not exist."""
        if exchange not in self._exchanges:
            raise QueueMissing(f"no exchange {exchange!r}")
        binding = (tuple(pattern.split(".")), queue)
        if binding not in self._exchanges[exchange]:
            self._exchanges[exchange].append(binding)
            self._routes.pop(exchange, None)

    def queue(self, name: str) -> Queue:
        """A queue by its real name. Raises QueueMissing."""
        found = self._queues.get(name)
        if found is None:
            raise QueueMissing(f"no queue {name!r}")
        return found

    def route(self, message: Outgoing, deaths: Deaths = ()) -> None:
        """Put a message into every queue that its exchange and key lead to, or raise as the port specifies."""
        names = self._targets(message.exchange, message.routing_key)
        if not names and message.mandatory:
            raise Unroutable(f"{message.exchange!r} {message.routing_key!r}")
        refused = False
        for name in names:
            queue = self._queues[name]
            if queue.full:
                refused = True
            else:
                queue.put(message, deaths)
        if refused:
            raise PublishRefused(f"{message.exchange!r} {message.routing_key!r}: the queue is full")

    def dead_letter(self, planned: QueuePlan, stored: Stored, reason: str) -> bool:
        """A message that a queue gave up goes where its plan sends it. False: that queue is full."""
        message = stored.message
        exchange, key = planned.dead_exchange or "", planned.dead_key or message.routing_key
        dead_letter = structs.replace(message, exchange=exchange, routing_key=key, mandatory=False, expiration_s=None)
        try:
            self.route(dead_letter, _delivery_failures_with(stored, planned.name, reason))
        except PublishRefused:
            return False
        except QueueMissing:  # as in RabbitMQ: a dead letter that no queue takes is dropped
            return True
        return True

    def leave(self, transport: Connection) -> None:
        """A connection ends: its unacknowledged messages go back, its private queues are deleted."""
        for name, queue in list(self._queues.items()):
            queue.disconnect(transport)
            if queue.owner is transport:
                self._delete(name)

    def _delete(self, name: str) -> None:
        del self._queues[name]
        for exchange, bindings in self._exchanges.items():
            kept = [binding for binding in bindings if binding[1] != name]
            if len(kept) != len(bindings):
                self._exchanges[exchange] = kept
                self._routes.pop(exchange, None)

    def _targets(self, exchange: str, key: str) -> tuple[str, ...]:
        if not exchange:
            return (key,) if key in self._queues else ()
        bindings = self._exchanges.get(exchange)
        if bindings is None:
            raise QueueMissing(f"no exchange {exchange!r}")
        routes = self._routes.setdefault(exchange, {})
        found = routes.get(key)
        if found is None:
            words = key.split(".") if key else []  # RabbitMQ: an empty key has no words
            found = tuple(dict.fromkeys(queue for pattern, queue in bindings if matches(pattern, words)))
            if len(routes) >= MAX_ROUTES:
                routes.clear()
            routes[key] = found
        if not found and exchange in self._alternates:
            return self._targets(self._alternates[exchange], key)
        return found


def _delivery_failures_with(stored: Stored, queue: str, reason: str) -> Deaths:
    """The deaths of a message after it has died in a queue: one entry for each queue and reason, as in RabbitMQ 4."""
    message = stored.message
    death: dict[str, object] = {
        "count": 1,
        "reason": reason,
        "queue": queue,
        "exchange": message.exchange,
        "routing-keys": [message.routing_key],
    }
    others = []
    for former in stored.deaths:
        if (former["queue"], former["reason"]) == (queue, reason):
            count = former["count"]
            assert isinstance(count, int)
            death = {**former, "count": count + 1}
        else:
            others.append(former)
    return (death, *others)

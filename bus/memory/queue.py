"""A queue of the memory broker: ready messages, returned messages, consumers, and when messages die."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from bus.clock import Clock
from bus.port import CC, DELIVERY_FIELDS, Delivery, Outgoing, call_back
from bus.topology import QueueNames, QueuePlan

# Deliveries of one queue in one turn of the loop: a consumer that gives back at once must not stop all others.
MAX_PER_TURN = 256

# A message for which its next queue has no room is offered to it again this often. This many wait for that, and let
# messages for other queues pass, as in RabbitMQ (dead_letter_worker_consumer_prefetch).
ROOM_AGAIN_S = 0.2
MAX_DYING = 32


# How often and where a message has died, the last death first, as RabbitMQ writes it into the header x-death.
Deaths = tuple[Mapping[str, object], ...]


class Connection(Protocol):
    """The part of a connected transport that the broker and its queues use."""

    names: QueueNames

    def lose(self) -> None:
        """The connection is cut."""

    def reconnect_soon(self) -> None:
        """The broker can be reached again."""


class QueueHost(Protocol):
    """The operations that a queue needs of its broker."""

    clock: Clock
    context: contextvars.Context

    def dead_letter(self, planned: QueuePlan, stored: Stored, reason: str) -> bool:
        """Send a message where the queue's plan sends it. False: that queue is full."""

    def set_alarm(self, queue: Queue, due: float) -> None:
        """Call the queue's `expire` at a time. due: by the loop's monotonic clock, in seconds."""


class Stored:
    """One message in the broker. `number` is its place in line; it keeps it when it is given back."""

    __slots__ = ("deaths", "expires_at", "message", "number", "redelivered", "returns")

    def __init__(self, message: Outgoing, number: int, expires_at: float | None) -> None:
        self.message = message
        self.number = number
        self.expires_at = expires_at
        self.returns = 0
        self.redelivered = False
        self.deaths: Deaths = ()


class MemoryDelivery:
    """One message handed to a consumer."""

    __slots__ = ("_consumer", "_stored", *DELIVERY_FIELDS)

    def __init__(self, stored: Stored, consumer: Consumption) -> None:
        message = stored.message
        self._stored = stored
        self._consumer = consumer
        self.body = message.body
        self.exchange = consumer.transport.names.local(message.exchange)
        self.routing_key = consumer.transport.names.local_key(self.exchange, message.routing_key)
        self.content_type: str | None = message.content_type
        self.message_id: str | None = message.message_id or None
        self.type: str | None = message.type or None
        self.correlation_id = message.correlation_id
        self.reply_to = consumer.transport.names.local_reply(message.reply_to)
        self.headers: Mapping[str, object] = message.headers
        if message.also:
            self.headers = {**self.headers, CC: [message.also]}
        if stored.deaths:
            first = {f"x-first-death-{name}": stored.deaths[-1][name] for name in ("reason", "queue", "exchange")}
            self.headers = {**self.headers, "x-death": [dict(death) for death in stored.deaths], **first}
        self.redelivered = stored.redelivered
        self.delivery_count = stored.returns
        self.timestamp: float | None = None
        self.expiration_s = message.expiration_s

    @property
    def is_lost(self) -> bool:
        """Whether its connection is lost."""
        return self._consumer.is_lost

    def ack(self) -> None:
        """Done with it."""
        self._consumer.settle(self._stored)

    def nack(self, *, requeue: bool) -> None:
        """Give it back, or let it die."""
        self._consumer.give_up(self._stored, requeue=requeue)


class Consumption:
    """One consumption of one queue by one transport; also stands for a transport's single gets."""

    def __init__(self, queue: Queue, transport: Connection, prefetch: int, on: Callable[[Delivery], None]) -> None:
        self.queue = queue
        self.transport = transport
        self.prefetch = prefetch
        self.on_delivery = on
        self.unacked: dict[int, Stored] = {}
        self.active = True
        self.paused = False
        self.is_lost = False  # its connection is

    def settle(self, stored: Stored) -> None:
        """Its holder is done with it."""
        if self.unacked.pop(stored.number, None) is not None:
            self.queue.wake()

    def give_up(self, stored: Stored, *, requeue: bool) -> None:
        """Its holder is not: back in line, or to the dead letters."""
        if self.unacked.pop(stored.number, None) is None:
            return
        if requeue:
            self.queue.requeue(stored)
        else:
            self.queue.die(stored, "rejected")
        self.queue.wake()

    def requeue_all(self) -> None:
        """Everything unacknowledged goes back in line."""
        unacked, self.unacked = list(self.unacked.values()), {}
        for stored in unacked:
            self.queue.requeue(stored)
        self.queue.wake()


class Queue:
    """A queue: ready messages, returned messages (first in line again), consumers."""

    def __init__(self, broker: QueueHost, planned: QueuePlan, owner: Connection | None) -> None:
        self.broker = broker
        self.plan = planned
        self.owner = owner
        self.ready: deque[Stored] = deque()
        self.returned: list[tuple[int, Stored]] = []
        self.consumers: list[Consumption] = []
        self.holders: list[Consumption] = []  # cancelled, or single gets, with something unacknowledged
        self.dying: deque[tuple[Stored, str]] = deque()  # given up, and no room for it among the dead letters
        self.bytes = 0  # of the bodies in line
        self.next_number = 0
        self.woken = False
        self.shut = 0  # how many planned faults make it count as full
        self.alarm_at: float | None = None

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

    def put(self, message: Outgoing, now: float, deaths: Deaths = ()) -> None:
        """A new message, last in line."""
        if self.plan.drop_head and len(self) >= self.plan.max_length:
            self.die(self.pop(), "maxlen")
        waits = [wait for wait in (self.plan.ttl_s, message.expiration_s) if wait is not None]
        stored = Stored(message, self.next_number, now + min(waits) if waits else None)
        stored.deaths = deaths
        self.next_number += 1
        self.ready.append(stored)
        self.bytes += len(message.body)
        if self.consumers:
            self.wake()
        if stored.expires_at is not None:
            self.broker.set_alarm(self, stored.expires_at)

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
            self.broker.set_alarm(self, self.broker.clock.monotonic() + ROOM_AGAIN_S)

    def dead_letter(self, stored: Stored, reason: str) -> bool:
        """To the dead letters, where this queue has some. False: the queue is full; who ignores it loses it."""
        return self.plan.dead_exchange is None or self.broker.dead_letter(self.plan, stored, reason)

    def expire(self, now: float) -> None:
        """Expired messages leave from the head of the line, as in RabbitMQ; never for a queue that is full."""
        if self.dying:
            self.dying = deque(one for one in self.dying if not self.dead_letter(*one))
        while (first := self.head()) is not None and first.expires_at is not None and first.expires_at <= now:
            if len(self.dying) >= MAX_DYING:
                break
            self.pop()
            if not self.dead_letter(first, "expired"):
                self.dying.append((first, "expired"))
        if self.dying:
            self.broker.set_alarm(self, now + ROOM_AGAIN_S)
        if first is not None and first.expires_at is not None and first.expires_at > now:
            self.broker.set_alarm(self, first.expires_at)

    def wake(self) -> None:
        """Deliver the ready messages, on the next turn of the loop."""
        if not self.woken and (self.ready or self.returned) and self.consumers:
            self.woken = True
            asyncio.get_running_loop().call_soon(self._fill_consumers, context=self.broker.context)

    def _fill_consumers(self) -> None:
        self.woken = False
        self.expire(self.broker.clock.monotonic())
        idle = handed = 0
        while (self.ready or self.returned) and idle < len(self.consumers):
            if handed == MAX_PER_TURN:
                self.wake()
                return
            consumer = self.consumers.pop(0)
            self.consumers.append(consumer)  # the consumer that was served goes to the end of the round
            if consumer.paused or len(consumer.unacked) >= consumer.prefetch:
                idle += 1
                continue
            idle = 0
            handed += 1
            self.deliver_to(consumer)

    def deliver_to(self, consumer: Consumption) -> None:
        """The first in line to this consumer."""
        stored = self.pop()
        consumer.unacked[stored.number] = stored
        call_back(consumer.on_delivery, MemoryDelivery(stored, consumer))

    def disconnect(self, transport: Connection) -> None:
        """A connection is gone: its consumers leave, and their messages go back in line."""
        mine = [one for one in (*self.consumers, *self.holders) if one.transport is transport]
        self.consumers = [one for one in self.consumers if one.transport is not transport]
        self.holders = [one for one in self.holders if one.transport is not transport]
        for consumer in mine:
            consumer.active = False
            consumer.is_lost = True
            consumer.requeue_all()

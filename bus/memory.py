"""A broker in memory with RabbitMQ's semantics, for one process: first looks, simulation, tests.

Only bytes cross it, so nobody shares an object by accident. It passes the same suite as the RabbitMQ adapter.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from msgspec import structs

from bus.clock import Clock
from bus.contracts.catalogue import COMMANDS, DEAD, EVENTS, QueueRow
from bus.port import BusUnavailable, Delivery, Outgoing, PublishRefused, QueueMissing, Transport, Unroutable
from bus.topology import FOREIGN, Names, QueuePlan, foreign_plan, matches, plan, reply_plan

# Deliveries of one queue in one turn of the loop: a consumer that gives back at once must not stop everybody else.
MAX_PER_TURN = 256
# Routes remembered per exchange; one more and they are all worked out again.
MAX_ROUTES = 50_000


class _Stored:
    """One message in the broker. `number` is its place in line; it keeps it when it is given back."""

    __slots__ = ("died", "expires_at", "message", "number", "redelivered", "returns")

    def __init__(self, message: Outgoing, number: int, expires_at: float | None) -> None:
        self.message = message
        self.number = number
        self.expires_at = expires_at
        self.returns = 0
        self.redelivered = False
        self.died = ""


class MemoryDelivery:
    """One message handed to a consumer."""

    __slots__ = (
        "_consumer",
        "_stored",
        "body",
        "content_type",
        "correlation_id",
        "delivery_count",
        "exchange",
        "headers",
        "message_id",
        "redelivered",
        "reply_to",
        "routing_key",
        "timestamp",
        "type",
    )

    def __init__(self, stored: _Stored, consumer: _Consumer) -> None:
        message = stored.message
        self._stored = stored
        self._consumer = consumer
        self.body = message.body
        self.exchange = consumer.transport.names.local(message.exchange)
        self.routing_key = message.routing_key
        self.content_type: str | None = message.content_type
        self.message_id: str | None = message.message_id or None
        self.type: str | None = message.type or None
        self.correlation_id = message.correlation_id
        self.reply_to = consumer.transport.names.local_reply(message.reply_to)
        self.headers: Mapping[str, object] = message.headers
        if stored.died:
            self.headers = {**message.headers, "x-first-death-reason": stored.died}
        self.redelivered = stored.redelivered
        self.delivery_count = stored.returns
        self.timestamp: float | None = None

    def ack(self) -> None:
        """Done with it."""
        self._consumer.settle(self._stored)

    def nack(self, *, requeue: bool) -> None:
        """Give it back, or let it die."""
        self._consumer.give_up(self._stored, requeue=requeue)


class _Consumer:
    """One consumption of one queue by one transport; also stands for a transport's single gets."""

    def __init__(
        self, queue: _Queue, transport: MemoryTransport, prefetch: int, on: Callable[[Delivery], None]
    ) -> None:
        self.queue = queue
        self.transport = transport
        self.prefetch = prefetch
        self.on_delivery = on
        self.unacked: dict[int, _Stored] = {}
        self.active = True

    def settle(self, stored: _Stored) -> None:
        if self.unacked.pop(stored.number, None) is not None:
            self.queue.wake()

    def give_up(self, stored: _Stored, *, requeue: bool) -> None:
        if self.unacked.pop(stored.number, None) is None:
            return
        if requeue:
            self.queue.take_back(stored)
        else:
            self.queue.bury(stored, "rejected")
        self.queue.wake()

    def give_all_back(self) -> None:
        unacked, self.unacked = list(self.unacked.values()), {}
        for stored in unacked:
            self.queue.take_back(stored)
        self.queue.wake()


class _Queue:
    """A queue: what is ready, what was given back (first in line again), who consumes."""

    def __init__(self, broker: MemoryBroker, planned: QueuePlan, owner: MemoryTransport | None) -> None:
        self.broker = broker
        self.plan = planned
        self.owner = owner
        self.ready: deque[_Stored] = deque()
        self.returned: list[tuple[int, _Stored]] = []
        self.consumers: list[_Consumer] = []
        self.holders: list[_Consumer] = []  # cancelled, or single gets, with something unacknowledged
        self.next_number = 0
        self.woken = False
        self.alarm_at: float | None = None

    def __len__(self) -> int:
        return len(self.ready) + len(self.returned)

    @property
    def full(self) -> bool:
        return not self.plan.drop_head and len(self) >= self.plan.max_length

    def put(self, message: Outgoing, now: float, died: str = "") -> None:
        if self.plan.drop_head and len(self) >= self.plan.max_length:
            self.bury(self.pop(), "maxlen")
        waits = [wait for wait in (self.plan.ttl_s, message.expiration_s) if wait is not None]
        stored = _Stored(message, self.next_number, now + min(waits) if waits else None)
        stored.died = died
        self.next_number += 1
        self.ready.append(stored)
        if self.consumers:
            self.wake()
        if stored.expires_at is not None:
            self.broker.alarm(self, stored.expires_at)

    def pop(self) -> _Stored:
        return heapq.heappop(self.returned)[1] if self.returned else self.ready.popleft()

    def head(self) -> _Stored | None:
        if self.returned:
            return self.returned[0][1]
        return self.ready[0] if self.ready else None

    def take_back(self, stored: _Stored) -> None:
        stored.returns += 1
        stored.redelivered = True
        limit = self.plan.delivery_limit
        if limit is not None and stored.returns > limit:
            self.bury(stored, "delivery_limit")
        else:
            heapq.heappush(self.returned, (stored.number, stored))

    def bury(self, stored: _Stored, reason: str) -> None:
        if self.plan.dead_exchange is not None:
            self.broker.dead_letter(self.plan, stored.message, reason)

    def expire(self, now: float) -> None:
        """What is past its time leaves from the head of the line, as in RabbitMQ."""
        while (first := self.head()) is not None and first.expires_at is not None and first.expires_at <= now:
            self.bury(self.pop(), "expired")
        if first is not None and first.expires_at is not None:
            self.broker.alarm(self, first.expires_at)

    def wake(self) -> None:
        if not self.woken and (self.ready or self.returned) and self.consumers:
            self.woken = True
            asyncio.get_running_loop().call_soon(self._pump, context=self.broker.context)

    def _pump(self) -> None:
        self.woken = False
        self.expire(self.broker.clock.monotonic())
        idle = handed = 0
        while (self.ready or self.returned) and idle < len(self.consumers):
            if handed == MAX_PER_TURN:
                self.wake()
                return
            consumer = self.consumers.pop(0)
            self.consumers.append(consumer)  # whoever was served goes to the end of the round
            if len(consumer.unacked) >= consumer.prefetch:
                idle += 1
                continue
            idle = 0
            handed += 1
            self.hand_to(consumer)

    def hand_to(self, consumer: _Consumer) -> None:
        stored = self.pop()
        consumer.unacked[stored.number] = stored
        consumer.on_delivery(MemoryDelivery(stored, consumer))

    def forget(self, transport: MemoryTransport) -> None:
        """A connection is gone: its consumers leave, and what they held goes back in line."""
        mine = [one for one in (*self.consumers, *self.holders) if one.transport is transport]
        self.consumers = [one for one in self.consumers if one.transport is not transport]
        self.holders = [one for one in self.holders if one.transport is not transport]
        for consumer in mine:
            consumer.active = False
            consumer.give_all_back()


class MemoryBroker:
    """The broker. Lives in one event loop; several transports share it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        # Its own turns are nobody else's: a worker that is killed in a simulation takes no delivery of others with it.
        self.context = contextvars.copy_context()
        self.up = True
        self.transports: list[MemoryTransport] = []
        self._exchanges: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        self._routes: dict[str, dict[str, tuple[str, ...]]] = {}
        self._queues: dict[str, _Queue] = {}
        self._alarms: list[tuple[float, int, _Queue]] = []
        self._alarm_number = 0
        self._alarm_task: asyncio.Task[None] | None = None
        self._alarm_sleeps_until = 0.0

    def transport(self, name: str, *, prefix: str = "") -> Transport:
        """A new connection to this broker."""
        return MemoryTransport(self, name, prefix)

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

    def declare_exchange(self, name: str) -> None:
        """Declare a topic exchange; somebody else's are declared with this too, in tests."""
        self._exchanges.setdefault(name, [])

    def has_exchange(self, name: str) -> bool:
        """Whether the exchange exists."""
        return name in self._exchanges

    def declare(self, planned: QueuePlan, owner: MemoryTransport | None) -> None:
        """Declare a queue and its bindings; harmless when it exists."""
        if planned.name not in self._queues:
            self._queues[planned.name] = _Queue(self, planned, owner)
        for exchange, pattern in planned.bindings:
            self.bind(planned.name, exchange, pattern)

    def bind(self, queue: str, exchange: str, pattern: str) -> None:
        """Bind a queue to an exchange. Raises QueueMissing when there is no such exchange."""
        if exchange not in self._exchanges:
            raise QueueMissing(f"no exchange {exchange!r}")
        binding = (tuple(pattern.split(".")), queue)
        if binding not in self._exchanges[exchange]:
            self._exchanges[exchange].append(binding)
            self._routes.pop(exchange, None)

    def queue(self, name: str) -> _Queue:
        """A queue by its real name. Raises QueueMissing."""
        found = self._queues.get(name)
        if found is None:
            raise QueueMissing(f"no queue {name!r}")
        return found

    def route(self, message: Outgoing, died: str = "") -> None:
        """Put a message into every queue that its exchange and key lead to, or raise as the port says."""
        names = self._targets(message.exchange, message.routing_key)
        if not names and message.mandatory:
            raise Unroutable(f"{message.exchange!r} {message.routing_key!r}")
        now = self.clock.monotonic()
        refused = False
        for name in names:
            queue = self._queues[name]
            if queue.full:
                refused = True
            else:
                queue.put(message, now, died)
        if refused:
            raise PublishRefused(f"{message.exchange!r} {message.routing_key!r}: the queue is full")

    def dead_letter(self, planned: QueuePlan, message: Outgoing, reason: str) -> None:
        """What a queue gave up goes where its plan says; a full parking queue loses it, as at-most-once does."""
        exchange, key = planned.dead_exchange or "", planned.dead_key
        letter = structs.replace(message, exchange=exchange, routing_key=key, mandatory=False, expiration_s=None)
        try:
            self.route(letter, died=reason)
        except (PublishRefused, QueueMissing):
            return

    def leave(self, transport: MemoryTransport) -> None:
        """A connection ends: what it holds goes back, what is its own goes away."""
        for name, queue in list(self._queues.items()):
            if queue.owner is transport:
                self._delete(name)
            else:
                queue.forget(transport)

    def alarm(self, queue: _Queue, due: float) -> None:
        """See that a queue looks for expired messages at this time."""
        if queue.alarm_at is not None and queue.alarm_at <= due:
            return
        queue.alarm_at = due
        self._alarm_number += 1
        heapq.heappush(self._alarms, (due, self._alarm_number, queue))
        task = self._alarm_task
        if task is not None and not task.done():
            if due >= self._alarm_sleeps_until:
                return
            task.cancel()
        self._alarm_task = asyncio.get_running_loop().create_task(self._ring(), context=self.context)

    def quiet(self) -> None:
        """Stop the alarm when the last connection is gone, so that no task outlives its users."""
        if not self.transports and self._alarm_task is not None:
            self._alarm_task.cancel()
            self._alarm_task = None
            for queue in self._queues.values():
                queue.alarm_at = None
            self._alarms.clear()

    async def _ring(self) -> None:
        while self._alarms:
            due, _, queue = self._alarms[0]
            self._alarm_sleeps_until = due
            wait = due - self.clock.monotonic()
            if wait > 0:
                await self.clock.sleep(wait)
                continue
            heapq.heappop(self._alarms)
            if queue.alarm_at == due:
                queue.alarm_at = None
            queue.expire(self.clock.monotonic())

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
        return found


class MemorySubscription:
    """A consumption that is taken up again after a lost connection."""

    def __init__(
        self, transport: MemoryTransport, queue: str, prefetch: int, on_delivery: Callable[[Delivery], None]
    ) -> None:
        self._transport = transport
        self._queue = queue
        self._prefetch = prefetch
        self._on_delivery = on_delivery
        self._consumer: _Consumer | None = None

    def attach(self) -> None:
        """Begin, on a connection that is up."""
        queue = self._transport.broker.queue(self._queue)
        self._consumer = _Consumer(queue, self._transport, self._prefetch, self._on_delivery)
        queue.consumers.append(self._consumer)
        queue.wake()

    async def cancel(self) -> None:
        """No new deliveries; those handed over may still be acknowledged."""
        self._transport.subscriptions = [one for one in self._transport.subscriptions if one is not self]
        consumer, self._consumer = self._consumer, None
        if consumer is not None and consumer.active:
            consumer.active = False
            consumer.queue.consumers = [one for one in consumer.queue.consumers if one is not consumer]
            consumer.queue.holders.append(consumer)


class MemoryTransport:
    """One connection to a MemoryBroker."""

    def __init__(self, broker: MemoryBroker, name: str, prefix: str) -> None:
        self.broker = broker
        self.name = name
        self.subscriptions: list[MemorySubscription] = []
        self.names = Names(prefix)
        self._plain = not prefix
        self._declared: list[QueuePlan] = []
        self._getters: dict[str, _Consumer] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._connected = asyncio.Event()
        self._opened = False

    @property
    def connected(self) -> bool:
        """Whether the broker can be spoken to now."""
        return self._connected.is_set()

    async def open(self) -> None:
        """Connect; waits while the broker is stopped."""
        self._opened = True
        if self not in self.broker.transports:
            self.broker.transports.append(self)
        if self.broker.up:
            self._connected.set()
        await self._connected.wait()

    async def close(self) -> None:
        """Close; unacknowledged deliveries go back to their queues."""
        self._opened = False
        if self in self.broker.transports:
            self.broker.transports.remove(self)
        self.lose()
        self.subscriptions.clear()
        self.broker.quiet()

    def lose(self) -> None:
        """The connection is cut."""
        self._connected.clear()
        self._getters.clear()
        self.broker.leave(self)

    def reconnect_soon(self) -> None:
        """Come back on the next turn of the loop."""
        asyncio.get_running_loop().call_soon(self._reconnect, context=self.broker.context)

    def _reconnect(self) -> None:
        if not self._opened or not self.broker.up or self.connected:
            return
        self._connected.set()
        for planned in self._declared:
            self.broker.declare(planned, self if planned.exclusive else None)
        for subscription in self.subscriptions:
            subscription.attach()
        for callback in self._callbacks:
            callback()

    async def declare_exchanges(self) -> None:
        """Declare the three exchanges of the catalogue."""
        self._check()
        for exchange in (COMMANDS, EVENTS, DEAD):
            self.broker.declare_exchange(self.names.exchange(exchange))

    async def declare_queue(self, row: QueueRow, name: str, bindings: Sequence[tuple[str, str]]) -> None:
        """Declare a queue with its retry and dead-letter queues."""
        self._check()
        for planned in plan(row, name, bindings):
            self._declare(planned)

    async def declare_reply_queue(self, name: str) -> None:
        """Declare a private queue for replies."""
        self._check()
        self._declare(reply_plan(name))

    async def bind_foreign(self, queue: str, exchange: str, keys: Sequence[str]) -> None:
        """A durable queue bound to somebody else's exchange."""
        self._check()
        if not self.broker.has_exchange(exchange):
            raise QueueMissing(f"no exchange {exchange!r}")
        self._declare(foreign_plan(queue))
        for key in keys:
            self.broker.bind(self.names.queue(queue), exchange, key)

    async def publish(self, message: Outgoing) -> None:
        """Publish and wait for the confirm, which takes one turn of the loop."""
        self._check()
        self.broker.route(self._outward(message))
        await asyncio.sleep(0)

    async def consume(
        self, queue: str, on_delivery: Callable[[Delivery], None], *, prefetch: int
    ) -> MemorySubscription:
        """Deliver messages of a queue to a callback."""
        self._check()
        subscription = MemorySubscription(self, self.names.queue(queue), prefetch, on_delivery)
        subscription.attach()
        self.subscriptions.append(subscription)
        return subscription

    async def get(self, queue: str) -> Delivery | None:
        """Take one message."""
        self._check()
        found = self.broker.queue(self.names.queue(queue))
        found.expire(self.broker.clock.monotonic())
        if not len(found):
            return None
        taken: list[Delivery] = []
        getter = self._getters.get(queue)
        if getter is None or not getter.active or getter.queue is not found:
            getter = self._getters[queue] = _Consumer(found, self, 0, taken.append)
            found.holders.append(getter)
        getter.on_delivery = taken.append
        found.hand_to(getter)
        return taken[0]

    async def depth(self, queue: str) -> int:
        """Messages ready in a queue."""
        self._check()
        found = self.broker.queue(self.names.queue(queue))
        found.expire(self.broker.clock.monotonic())
        return len(found)

    async def purge(self, queue: str) -> int:
        """Drop what is ready in a queue."""
        self._check()
        found = self.broker.queue(self.names.queue(queue))
        dropped = len(found)
        found.ready.clear()
        found.returned.clear()
        return dropped

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Called each time the connection is back."""
        self._callbacks.append(callback)

    def _check(self) -> None:
        if not self._connected.is_set():
            raise BusUnavailable(f"{self.name}: not connected")

    def _declare(self, planned: QueuePlan) -> None:
        real = self.names.plan(planned)
        self.broker.declare(real, self if real.exclusive else None)
        self._declared = [one for one in self._declared if one.name != real.name] + [real]

    def _outward(self, message: Outgoing) -> Outgoing:
        """With this transport's prefix, and without what the caller could still change."""
        reply_to = message.reply_to
        if self._plain and not message.headers and not (reply_to and reply_to.startswith(FOREIGN)):
            return message
        return structs.replace(
            message,
            exchange=self.names.exchange(message.exchange),
            routing_key=self.names.key(message.exchange, message.routing_key),
            reply_to=None if reply_to is None else self.names.queue(reply_to),
            headers=dict(message.headers),
        )

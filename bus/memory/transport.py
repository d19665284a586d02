"""One connection to a memory broker: the transport port, lost and taken up again as RabbitMQ's are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec import structs

from bus.contracts.queues import QueueRow
from bus.memory.broker import Consumption, MemoryBroker, Queue
from bus.topology import (
    EXTERNAL,
    OWNER_EXCHANGE,
    QueueNames,
    QueuePlan,
    external_plan,
    plan,
    reply_plan,
    shared_exchanges,
    shared_queues,
)
from bus.transport import BusOwned, Delivery, NotSent, Outgoing, QueueLocked, QueueMissing, Subscription, call_back

# A connection whose private queue another one has tries again this often.
LOCKED_RETRY_S = 0.1


class MemoryTransport:
    """One connection to a MemoryBroker."""

    def __init__(self, broker: MemoryBroker, name: str, prefix: str = "") -> None:
        self.broker = broker
        self.name = name
        self.subscriptions: list[Consumption] = []
        self.names = QueueNames(prefix)
        self._plain = not prefix
        self._owners: dict[str, str] = {}
        self._declared: list[QueuePlan] = []
        self._getters: dict[str, Consumption] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._on_locked: list[Callable[[], None]] = []
        self._connected = asyncio.Event()
        self._opened = False

    @property
    def blocked(self) -> str:
        """A broker in a process's memory raises no alarms."""
        return ""

    @property
    def connected(self) -> bool:
        """Whether the broker can be reached now."""
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
        if self in self.broker.transports:
            self.broker.transports.remove(self)
        self.end()
        self.subscriptions.clear()

    def end(self) -> None:
        """Its process is gone: the connection is lost, and does not come back."""
        self._opened = False
        self.lose()

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
        try:
            for name, owner in self._owners.items():
                self._set_owner(name, owner)
            for planned in self._declared:
                self.broker.declare(planned, self if planned.exclusive else None)
        except (QueueLocked, BusOwned) as error:
            self.broker.leave(self)
            asyncio.get_running_loop().call_later(LOCKED_RETRY_S, self._reconnect, context=self.broker.context)
            for callback in self._on_locked if isinstance(error, QueueLocked) else ():
                call_back(callback)
            return
        self._connected.set()
        for subscription in self.subscriptions:
            subscription.attach(self.broker.queue(subscription.queue.plan.name))
        for callback in self._callbacks:
            call_back(callback)

    async def declare_shared(self) -> None:
        """Declare the shared topology of the bus."""
        self._check()
        for exchange in shared_exchanges(self.name):
            real = self.names.plan_exchange(exchange)
            self.broker.declare_exchange(real.name, alternate=real.alternate)
        for planned in shared_queues(self.name):
            self._declare(planned)

    async def check_publishes(self, keys: Sequence[tuple[str, str]]) -> None:
        """A broker in memory knows no users."""

    async def set_owner(self, name: str, owner: str) -> None:
        """Set the owner of a name, or find it there."""
        self._check()
        self._set_owner(name, owner)
        self._owners[name] = owner

    async def owner_of(self, name: str) -> str:
        """The owner of a name."""
        self._check()
        return self.broker.owners.get(self.names.exchange(OWNER_EXCHANGE + name), "")

    async def clear_owner(self, name: str) -> None:
        """A name has no owner any more."""
        self._check()
        self.broker.owners.pop(self.names.exchange(OWNER_EXCHANGE + name), None)
        self._owners.pop(name, None)

    def _set_owner(self, name: str, owner: str) -> None:
        found = self.broker.owners.setdefault(self.names.exchange(OWNER_EXCHANGE + name), owner)
        if found != owner:
            raise BusOwned(found)

    async def declare_queue(self, row: QueueRow, name: str, bindings: Sequence[tuple[str, str]]) -> None:
        """Declare a queue."""
        self._check()
        self._declare(plan(row, name, bindings))

    async def declare_reply_queue(self, name: str) -> None:
        """Declare a private queue for replies."""
        self._check()
        self._declare(reply_plan(name))

    async def bind_external(self, queue: str, exchange: str, keys: Sequence[str]) -> None:
        """A durable queue bound to an exchange of another system. Raises QueueMissing while it does not exist."""
        self._check()
        if not self.broker.has_exchange(exchange):
            raise QueueMissing(f"no exchange {exchange!r}")
        self._declare(external_plan(queue))
        for key in keys:
            self.broker.bind(self.names.queue(queue), exchange, key)

    async def publish(self, message: Outgoing) -> None:
        """Publish and wait for the confirm, which takes one turn of the loop."""
        self._check()
        self.broker.route(self._outward(message))
        await asyncio.sleep(0)

    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], *, prefetch: int) -> Subscription:
        """Deliver messages of a queue to a callback."""
        subscription = Consumption(self._queue(queue), self, prefetch, on_delivery)
        self.subscriptions.append(subscription)
        return subscription

    async def get(self, queue: str) -> Delivery | None:
        """Take one message."""
        found = self._queue(queue)
        if not len(found):
            return None
        taken: list[Delivery] = []
        getter = self._getters.get(queue)
        if getter is None or getter.queue is not found:
            getter = self._getters[queue] = Consumption(found, self, 0, taken.append)
        getter.on_delivery = taken.append
        found.deliver_to(getter)
        return taken[0]

    async def depth(self, queue: str) -> int:
        """Messages ready in a queue."""
        return len(self._queue(queue))

    async def purge(self, queue: str) -> int:
        """Drop the ready messages of a queue."""
        found = self._queue(queue)
        dropped = len(found)
        found.clear()
        return dropped

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Called each time the connection is back."""
        self._callbacks.append(callback)

    def on_locked(self, callback: Callable[[], None]) -> None:
        """Called each time the connection does not come back, as another has a private queue of this one's."""
        self._on_locked.append(callback)

    def _check(self) -> None:
        if not self._connected.is_set():
            raise NotSent(f"{self.name}: not connected")

    def _queue(self, name: str) -> Queue:
        """A queue as it is now. Raises QueueMissing."""
        self._check()
        found = self.broker.queue(self.names.queue(name))
        found.expire()
        return found

    def _declare(self, planned: QueuePlan) -> None:
        real = self.names.plan(planned)
        self.broker.declare(real, self if real.exclusive else None)
        self._declared = [one for one in self._declared if one.name != real.name] + [real]

    def declare_no_more(self, queue: str) -> None:
        """Leave a queue (by the broker's name) as it is after the next loss."""
        self._declared = [one for one in self._declared if one.name != queue]

    def _outward(self, message: Outgoing) -> Outgoing:
        """With this transport's prefix, and as a copy that the caller cannot change."""
        reply_to = message.reply_to
        if self._plain and not message.headers and not (reply_to and reply_to.startswith(EXTERNAL)):
            return message
        return structs.replace(
            message,
            exchange=self.names.exchange(message.exchange),
            routing_key=self.names.key(message.exchange, message.routing_key),
            reply_to=None if reply_to is None else self.names.queue(reply_to),
            headers=dict(message.headers),
        )

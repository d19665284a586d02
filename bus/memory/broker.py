"""The memory broker itself: exchanges, bindings, queues, and who is connected."""

from __future__ import annotations

import asyncio
import contextvars
import heapq

from msgspec import structs

from bus.clock import Clock
from bus.memory.queue import Connection, Deaths, Queue, Stored
from bus.port import Outgoing, PublishRefused, QueueLocked, QueueMissing, Unroutable
from bus.topology import QueuePlan, matches

# Routes remembered per exchange; one more and they are all worked out again.
MAX_ROUTES = 50_000


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
        self.marks: dict[str, str] = {}  # durable: {name: owner}
        self._alarms: list[tuple[float, int, Queue]] = []
        self._alarm_number = 0
        self._alarm_task: asyncio.Task[None] | None = None
        self._alarm_sleeps_until = 0.0

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
        """Put a message into every queue that its exchange and keys lead to, or raise as the port specifies."""
        names = self._targets(message.exchange, message.routing_key)
        if message.also:
            names = tuple(dict.fromkeys((*names, *self._targets(message.exchange, message.also))))
        if not names and message.mandatory:
            raise Unroutable(f"{message.exchange!r} {message.routing_key!r}")
        now = self.clock.monotonic()
        refused = False
        for name in names:
            queue = self._queues[name]
            if queue.full:
                refused = True
            else:
                queue.put(message, now, deaths)
        if refused:
            raise PublishRefused(f"{message.exchange!r} {message.routing_key!r}: the queue is full")

    def dead_letter(self, planned: QueuePlan, stored: Stored, reason: str) -> bool:
        """A message that a queue gave up goes where its plan sends it. False: that queue is full."""
        message = stored.message
        exchange, key = planned.dead_exchange or "", planned.dead_key or message.routing_key
        # As in RabbitMQ: a key of the queue's own stands for all that the message had.
        also = "" if planned.dead_key else message.also
        letter = structs.replace(
            message, exchange=exchange, routing_key=key, also=also, mandatory=False, expiration_s=None
        )
        try:
            self.route(letter, _deaths_with(stored, planned.name, reason))
        except PublishRefused:
            return False
        except QueueMissing:  # as in RabbitMQ: a letter that no queue takes is dropped
            return True
        return True

    def arrive(self, transport: Connection) -> None:
        """A connection begins. Where there was none, expired messages are still there."""
        if not self.transports:
            for queue in self._queues.values():
                queue.expire(self.clock.monotonic())
        if transport not in self.transports:
            self.transports.append(transport)

    def leave(self, transport: Connection) -> None:
        """A connection ends: its unacknowledged messages go back, its private queues are deleted."""
        for name, queue in list(self._queues.items()):
            if queue.owner is transport:
                self._delete(name)
            else:
                queue.disconnect(transport)

    def set_alarm(self, queue: Queue, due: float) -> None:
        """Expire the messages of a queue at this time. due: by the broker's monotonic clock, in seconds."""
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

    def clear_alarm(self) -> None:
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
        if not found and exchange in self._alternates:
            return self._targets(self._alternates[exchange], key)
        return found


def _deaths_with(stored: Stored, queue: str, reason: str) -> Deaths:
    """The deaths of a message after it has died in a queue: one entry for each queue and reason, as in RabbitMQ 4."""
    message = stored.message
    keys = [message.routing_key, *([message.also] if message.also else ())]
    death: dict[str, object] = {
        "count": 1,
        "reason": reason,
        "queue": queue,
        "exchange": message.exchange,
        "routing-keys": keys,
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

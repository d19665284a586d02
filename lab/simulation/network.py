"""Connections of simulated processes: the memory broker behind latency, delays, doubles and lost connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from bus.contracts.queues import QueueRow
from bus.memory import MemoryBroker, MemoryTransport
from bus.memory.broker import Deaths
from bus.topology import external_plan
from bus.transport import BusError, BusUnavailable, Delivery, Outgoing, Subscription, Transport
from lab.simulation.event_log import EventLog
from lab.simulation.loop import Process
from lab.simulation.plan import Rates

T = TypeVar("T")

LATENCY_S = 0.0004
# Setting up waits for a connection that is unavailable, as `bus.rabbitmq` does.
SETUP_PATIENCE_S = 20.0
SETUP_WAIT_S = 0.2
# A connection that broke comes back after this long at most.
REPAIR_S = 2.0
# A doubled message comes again within this.
DOUBLE_S = 5.0
HEARTBEATS = "compute.heartbeat."
# The queue of another tenant of the broker, and what is in it.
THEIRS, FOREIGN_BODY = "theirs.work", b'{"type":"theirs.v1"}'


class NetworkFaults:
    """The faults that may hit a message now. `calm` ends all of it."""

    def __init__(self, rates: Rates, rng: random.Random) -> None:
        self.rates = rates
        self.is_calm = False
        self.crash: Callable[[str], bool] = lambda _: False  # kills a process soon; False: this one may live
        self._rng = rng

    def calm(self) -> None:
        """No more faults."""
        self.rates, self.is_calm = Rates(), True

    def strikes(self, rate: float) -> bool:
        """Whether it happens this time."""
        return rate > 0 and self._rng.random() < rate

    async def maybe_crash(self, process: str) -> None:
        """An await of a process: it may be its last."""
        if self.strikes(self.rates.crash) and self.crash(process):
            await asyncio.get_running_loop().create_future()  # never: none of its code runs any more

    def latency(self) -> float:
        """How long one message takes to the broker, or from it: without faults none overtakes another."""
        return LATENCY_S + (self._rng.uniform(0.0, self.rates.delay_s) if self.strikes(self.rates.delay) else 0.0)

    def between(self, low: float, high: float) -> float:
        """Some time."""
        return self._rng.uniform(low, high)


class Broker(MemoryBroker):
    """A memory broker whose every message is an event of the trace."""

    bus = ""
    event_log: EventLog
    on_message: Callable[[str, Outgoing], None] | None = None

    def add_foreign_tenant(self) -> None:
        """Another tenant of the broker has a queue with something in it, and never looks."""
        self.declare(external_plan(THEIRS), None)
        self.queue(THEIRS).put(Outgoing(exchange="", routing_key=THEIRS, body=FOREIGN_BODY))

    def theirs_differ(self) -> str:
        """The change of the other tenant's queue; "" when it is as it was."""
        queue = self.queue(THEIRS)
        bodies = [stored.message.body for stored in queue.ready]
        return "" if bodies == [FOREIGN_BODY] and not queue.consumers else f"another's queue holds {bodies}"

    def fill(self, rng: random.Random) -> Callable[[], None]:
        """Half of the queues that have a bound refuse what is published to them, until the result is called."""
        full = [queue for _, queue in sorted(self._queues.items()) if queue.plan.durable and not queue.plan.drop_head]
        full = [queue for queue in full if rng.random() < 0.5]
        for queue in full:
            queue.shut += 1

        def empty() -> None:
            for queue in full:
                queue.shut -= 1

        return empty

    def route(self, message: Outgoing, deaths: Deaths = ()) -> None:
        """Put a message into its queues."""
        what = "dead" if deaths else "message"
        self.event_log.record(what, f"{self.bus} {message.exchange} {message.routing_key}", message.body)
        super().route(message, deaths)
        if self.on_message is not None and not deaths:
            self.on_message(self.bus, message)


class SimTransport:
    """One connection of one process. While it is cut nothing goes through, and the broker takes back what it held."""

    def __init__(self, broker: Broker, process: Process, network_faults: NetworkFaults, event_log: EventLog) -> None:
        inner = MemoryTransport(broker, process.name)
        assert isinstance(inner, MemoryTransport)
        self.name = process.name
        self.slow_s = 0.0
        self.muted = False  # heartbeats are lost on the way, which their sender does not notice
        self.arrived: Callable[[Delivery], None] = lambda _: None
        self._inner = inner
        self._broker = broker
        self._process = process
        self._network_faults = network_faults
        self._event_log = event_log
        self._life = 0  # rises with every loss: what is under way then is lost

    # --- faults

    def cut(self, seconds: float) -> None:
        """The connection breaks and is repaired after a while."""
        if not self._inner.connected:
            return
        self._life += 1
        self._event_log.record("cut", f"{self.name} {self._broker.bus}")
        self._inner.lose()
        asyncio.get_running_loop().call_later(seconds, self._repair, context=self._broker.context)

    def kill(self) -> None:
        """The process is gone, and the broker has noticed."""
        self._life += 1
        self._inner.subscriptions.clear()
        if self._inner in self._broker.transports:
            self._broker.transports.remove(self._inner)
        self._inner.end()

    def _repair(self) -> None:
        if self._inner in self._broker.transports:
            self._inner.reconnect_soon()

    # --- the port

    @property
    def blocked(self) -> str:
        """Simulated brokers raise no alarms."""
        return ""

    @property
    def connected(self) -> bool:
        """Whether the broker can be reached now."""
        return self._inner.connected

    async def open(self) -> None:
        """Connect."""
        await self._inner.open()

    async def close(self) -> None:
        """Close."""
        self._life += 1
        await self._inner.close()

    async def declare_shared(self) -> None:
        """Declare what the bus shares."""
        await self._lasting(self._inner.declare_shared)

    async def check_publishes(self, keys: Sequence[tuple[str, str]]) -> None:
        """The broker of a simulation knows no users."""

    async def set_owner(self, name: str, owner: str) -> None:
        """Set the owner of a name, or find it there; at once, so that the run goes as it did before there were
        marks.
        """
        await self._inner.set_owner(name, owner)

    async def owner_of(self, name: str) -> str:
        """The owner of a name."""
        await self._trip()
        return await self._inner.owner_of(name)

    async def clear_owner(self, name: str) -> None:
        """A name has no owner any more."""
        await self._trip()
        await self._inner.clear_owner(name)

    async def declare_queue(self, row: QueueRow, name: str, bindings: Sequence[tuple[str, str]]) -> None:
        """Declare a queue."""
        await self._lasting(lambda: self._inner.declare_queue(row, name, bindings))

    async def declare_reply_queue(self, name: str) -> None:
        """Declare a private queue."""
        await self._lasting(lambda: self._inner.declare_reply_queue(name))

    async def bind_external(self, queue: str, exchange: str, keys: Sequence[str]) -> None:
        """Bind to an exchange of another system."""
        await self._trip()
        await self._inner.bind_external(queue, exchange, keys)

    async def publish(self, message: Outgoing) -> None:
        """To the broker and back with its confirm; either way may fail."""
        network_faults, life = self._network_faults, await self._trip()
        if network_faults.strikes(network_faults.rates.lost_before):
            self.cut(network_faults.between(0.0, REPAIR_S))
            raise BusUnavailable(f"{self.name}: lost before it was sent")
        if self.muted and message.routing_key.startswith(HEARTBEATS):
            return
        await self._inner.publish(message)
        if network_faults.strikes(network_faults.rates.duplicate):
            later = network_faults.between(0.0, DOUBLE_S)
            asyncio.get_running_loop().call_later(later, self._again, message, context=self._broker.context)
        if network_faults.strikes(network_faults.rates.lost_after):
            self.cut(network_faults.between(0.0, REPAIR_S))
        await network_faults.maybe_crash(self.name)
        await asyncio.sleep(network_faults.latency())
        if self._life != life:
            raise BusUnavailable(f"{self.name}: lost before the confirm")

    def _again(self, message: Outgoing) -> None:
        """The behaviour of a publisher that never saw its confirm: the same message once more."""
        try:
            self._broker.route(message)
        except BusError as error:  # not waited for
            self._event_log.log("network", f"a double went nowhere: {error}")

    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], *, prefetch: int) -> Subscription:
        """Deliver after the latency of the way; a delay lets others overtake."""

        def arrive(life: int, delivery: Delivery) -> None:
            if life == self._life:  # otherwise it was lost on the way, and the broker has taken it back
                self.arrived(delivery)
                on_delivery(delivery)

        def leave(delivery: Delivery) -> None:
            delay = self._network_faults.latency() + self.slow_s
            loop = asyncio.get_running_loop()
            loop.call_later(delay, arrive, self._life, delivery, context=self._process.context)

        return await self._lasting(lambda: self._inner.consume(queue, leave, prefetch=prefetch))

    async def get(self, queue: str) -> Delivery | None:
        """Take one message."""
        await self._trip()
        return await self._inner.get(queue)

    async def depth(self, queue: str) -> int:
        """Messages ready."""
        await self._trip()
        return await self._inner.depth(queue)

    async def purge(self, queue: str) -> int:
        """Drop what is ready."""
        await self._trip()
        return await self._inner.purge(queue)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Called in the process, when the connection is back."""

        def call() -> None:
            asyncio.get_running_loop().call_soon(callback, context=self._process.context)

        self._inner.on_reconnect(call)

    def on_locked(self, callback: Callable[[], None]) -> None:
        """Called in the process, when the connection does not come back as another has a private queue of its own."""

        def call() -> None:
            asyncio.get_running_loop().call_soon(callback, context=self._process.context)

        self._inner.on_locked(call)

    async def _lasting(self, work: Callable[[], Awaitable[T]]) -> T:
        """Setting up outlives a lost connection, as with RabbitMQ, within a time limit."""
        until = asyncio.get_running_loop().time() + SETUP_PATIENCE_S
        while True:
            try:
                await self._trip()
                return await work()
            except BusUnavailable:
                if asyncio.get_running_loop().time() > until:
                    raise
                await asyncio.sleep(SETUP_WAIT_S)

    async def _trip(self) -> int:
        life = self._life
        await self._network_faults.maybe_crash(self.name)
        await asyncio.sleep(self._network_faults.latency() + self.slow_s)
        if life != self._life or not self._inner.connected:
            raise BusUnavailable(f"{self.name}: not connected")
        return life


def as_transport(transport: SimTransport) -> Transport:
    """The same, seen as the port (checked by mypy here, once)."""
    return transport

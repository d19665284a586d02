"""Publishes with coalescing: an idle link (one exchange and routing key) sends at once; a busy one gathers messages
into one broker message while it waits for a confirm. A broker message costs 100 microseconds and more, an item in a
batch about ten.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import islice

import structlog
from msgspec import Struct, structs

from bus import metrics
from bus.batcher import Batcher
from bus.clock import Clock, LogInterval
from bus.codec import Packed, batch, single
from bus.contracts.queues import EVENTS
from bus.transport import BusError, BusUnavailable, Outgoing, PublishRefused, Transport

log = structlog.get_logger("bus.publishing")


# A broker at full load confirms after some hundred milliseconds. What follows gathers until then: sent beside it, it
# would be more and smaller messages for the same broker.
SLOW_CONFIRM_S = 0.5


class BusLimits(Struct, frozen=True, kw_only=True):
    """The bounds of one bus."""

    # batch_items, batch_bytes: the bounds of one broker message
    batch_items: int = 128
    batch_bytes: int = 512 * 1024
    link_in_flight: int = 1  # unconfirmed broker messages of one batching link
    # the same while each is full, because a wait would not make them larger (a slow disk confirms late), or slow
    # (`Batcher`)
    full_in_flight: int = 8
    in_flight: int = 256  # unconfirmed broker messages of all links
    waiting: int = 50_000  # messages gathered in all links before publishers must wait
    refused_s: float = 60.0  # for so long an event's refusals are errors of its publisher, which tries again
    calm_s: float = 15.0  # after such a pause that time begins anew
    close_s: float = 5.0  # how long close() waits for the gathered messages


class Mode(Struct, frozen=True):
    """The form in which a link sends messages."""

    batches: bool  # False when each message leaves alone, so that any client can read it
    persistent: bool = True
    mandatory: bool = False
    max_batch: int = 0  # messages in one broker message; 0: as many as the bus's limits allow

    def at_most(self, limits: BusLimits) -> int:
        """Return the number of messages that one broker message may carry."""
        return min(self.max_batch, limits.batch_items) if self.max_batch else limits.batch_items


class Waiter:
    """Waits until any number of messages are settled, then raises the first error."""

    __slots__ = ("_future", "error", "pending")

    def __init__(self) -> None:
        self.pending = 0
        self.error: BaseException | None = None
        self._future: asyncio.Future[None] | None = None

    def resolve(self, error: BaseException | None) -> None:
        """Record that one message is confirmed (None) or has failed."""
        self.pending -= 1
        if error is not None and self.error is None:
            self.error = error
        if not self.pending:
            self._end()

    def _end(self) -> None:
        """All of them are settled."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        """Wait until all messages are settled."""
        if self.pending:
            self._future = asyncio.get_running_loop().create_future()
            await self._future
        if self.error is not None:
            raise self.error


class Confirmation(Waiter):
    """One of many messages whose publisher needs the result of each. error: the result, valid after the group has
    waited.
    """

    __slots__ = ("_group",)

    def __init__(self, group: Waiter) -> None:
        super().__init__()
        self._group = group
        group.pending += 1

    def fail(self, error: BaseException) -> None:
        """Record that the message could not be given to the publisher. What was given of it is waited for."""
        self.error = error
        if not self.pending:
            self._end()

    def _end(self) -> None:
        self._group.resolve(None)


KEPT_REFUSED = 10_000  # projects with refused events that are remembered; the one refused longest ago goes first
KEPT_LINKS = 256  # beyond these a link exists while it has messages to send: clients name the projects of keys


class _Entry(Struct):
    packed: Packed
    waiter: Waiter
    until: float | None  # the time of the event loop until which its requester waits; None: there is none

    def leaving(self, now: float) -> Packed:
        """The message as it leaves: whoever reads it counts from its arrival, so what has passed is subtracted."""
        if self.until is None:
            return self.packed
        return structs.replace(self.packed, meta=structs.replace(self.packed.meta, timeout_s=self.until - now))


class _Route:
    """The messages for one exchange and key."""

    __slots__ = ("entries", "exchange", "flights", "key", "mode")

    def __init__(self, publisher: Publisher, limits: BusLimits, exchange: str, key: str, mode: Mode) -> None:
        self.exchange = exchange
        self.key = key
        self.mode = mode
        self.entries: deque[_Entry] = deque()
        full = mode.at_most(limits) if mode.batches else 1
        # those on their way, in batches
        self.flights: Batcher[_Entry] = Batcher(
            partial(publisher.take, self),
            partial(publisher.fly, self),
            waiting=partial(publisher.may_fly, self),
            at_once=limits.link_in_flight,
            most=limits.full_in_flight if mode.batches else limits.in_flight,
            is_full=lambda: len(self.entries) >= full,
            slow_s=SLOW_CONFIRM_S,
            on_idle=partial(publisher.forget, self),
            on_error=partial(publisher.end, self),
        )

    def take(self, limits: BusLimits) -> list[_Entry]:
        """Return the entries of the next broker message."""
        if not self.mode.batches:
            return [self.entries.popleft()]
        taken: list[_Entry] = []
        size = 0
        most = self.mode.at_most(limits)
        while self.entries and len(taken) < most:
            size += len(self.entries[0].packed.body)
            if taken and size > limits.batch_bytes:
                break
            taken.append(self.entries.popleft())
        return taken

    def message(self, entries: Sequence[_Entry]) -> Outgoing:
        """Return the broker message that carries these entries."""
        now = asyncio.get_running_loop().time()
        untils = [math.inf if entry.until is None else entry.until for entry in entries]
        options = {
            "persistent": self.mode.persistent,
            "mandatory": self.mode.mandatory,
            "expiration_s": None if math.inf in untils else max(0.0, max(untils) - now),
        }
        leaving = [entry.leaving(now) for entry in entries]
        if len(entries) == 1:
            return single(leaving[0], self.exchange, self.key, **options)
        return batch(leaving, self.exchange, self.key, **options)


class Publisher:
    """All links of one bus."""

    def __init__(self, bus: str, transport: Transport, limits: BusLimits, clock: Clock, *, others_listen: bool) -> None:
        self._transport = transport
        self._limits = limits
        self._links: dict[tuple[str, str, Mode], _Route] = {}
        self._stalled: dict[_Route, None] = {}  # links that wait for the bus's `in_flight`
        self._in_flight = 0  # broker messages of all links
        self._waiting_for_capacity: deque[asyncio.Future[None]] = deque()
        self.waiting = 0
        self._closing = False
        self._clock = clock
        self._lost_log = LogInterval(clock)
        self._others_listen = others_listen  # programs that are not berth's may bind queues to its events
        self._refused: dict[str, tuple[float, float]] = {}  # {project: since when, when last}, the last at the end
        self._bus = bus
        self._published = metrics.PUBLISHED.labels(bus)
        self._items = metrics.ITEMS.labels(bus)
        metrics.IN_FLIGHT.labels(bus).set_function(lambda: self._in_flight)

    async def wait_for_capacity(self) -> None:
        """Wait while the bound of gathered messages is reached."""
        while self.waiting >= self._limits.waiting:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting_for_capacity.append(future)
            await future

    def post(  # noqa: PLR0917  (hot, so no keywords)
        self,
        exchange: str,
        key: str,
        mode: Mode,
        packed: Packed,
        waiter: Waiter,
        until: float | None = None,
    ) -> None:
        """Send one message in the next turn of the event loop, or later. Await `wait_for_capacity` first. until: the
        time of the event loop until which its requester waits.
        """
        link = self._link(exchange, key, mode)
        link.entries.append(_Entry(packed, waiter, until))
        waiter.pending += 1
        self.waiting += 1
        link.flights.wake()

    def _link(self, exchange: str, key: str, mode: Mode) -> _Route:
        link = self._links.get((exchange, key, mode))
        if link is None:
            link = self._links[exchange, key, mode] = _Route(self, self._limits, exchange, key, mode)
        return link

    async def close(self) -> None:
        """Wait for the gathered messages within the time bound. The remaining ones fail as unavailable."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.close_s):
                while busy := [link.flights for link in self._links.values() if link.flights.is_busy]:
                    await asyncio.gather(*(flights.idle() for flights in busy))
        self._closing = True  # what ends now makes room for nothing
        await asyncio.gather(*(link.flights.close() for link in self._links.values()))
        for link in self._links.values():
            self.end(link, BusUnavailable("the bus is closed"))
        self._links.clear()
        self._stalled.clear()
        self._closing = False  # further ones fail at the transport, or the bus is opened again

    def may_fly(self, link: _Route) -> int:
        """How many entries of a link may leave now."""
        if self._closing or not link.entries:
            return 0
        if self._in_flight >= self._limits.in_flight:
            self._stalled[link] = None
            return 0
        return len(link.entries)

    def take(self, link: _Route) -> list[_Entry]:
        """The entries of a link's next broker message."""
        self._in_flight += 1
        self._stalled.pop(link, None)
        return link.take(self._limits)

    def forget(self, link: _Route) -> None:
        """Nothing of a link is under way any more. It stays for the next message where there are few."""
        if not link.entries and len(self._links) > KEPT_LINKS:
            self._links.pop((link.exchange, link.key, link.mode), None)

    def end(self, link: _Route, error: BaseException) -> None:
        """No entry of a link can be sent."""
        self._settle([link.entries.popleft() for _ in range(len(link.entries))], error)

    async def fly(self, link: _Route, entries: Sequence[_Entry]) -> None:
        """Send one broker message, and settle its entries."""
        error: BaseException | None = None
        try:
            await self._send(link, entries)
        except BusError as fault:
            error = fault
        except asyncio.CancelledError:
            error = BusUnavailable("the bus is closed")
        except Exception as fault:  # a defect of berth must reach the publisher, and not be lost with this task
            log.exception("bus.publish_failed", bus=self._bus, exchange=link.exchange)
            error = fault
        self._count(len(entries), error)
        self._settle(entries, error)
        self._in_flight -= 1
        for stalled in list(islice(self._stalled, self._limits.in_flight - self._in_flight)):  # in turn
            del self._stalled[stalled]
            stalled.flights.wake()

    async def _send(self, link: _Route, entries: Sequence[_Entry]) -> None:
        """Publish one broker message. Raises as the transport does."""
        try:
            await self._transport.publish(link.message(entries))
        except PublishRefused as refused:
            if not self._may_lose(link):
                raise
            metrics.PUBLISH_ERRORS.labels(self._bus, refused.code).inc()
            if lost := self._lost_log.count():
                log.warning("bus.event_lost", bus=self._bus, key=link.key, lost=lost)

    def _may_lose(self, link: _Route) -> bool:
        """Whether what was refused now is lost: an event, after those of its project were refused again and again."""
        # One queue that is full, or has no leader, has the broker refuse a message that the other queues have. A leader
        # comes back within seconds. A queue that stays full is another program's, and what waited for it would hold up
        # the events of all.
        if not self._others_listen or link.exchange != EVENTS:
            return False
        now, project = self._clock.monotonic(), link.key.rpartition(".")[2]
        since, last = self._refused.pop(project, (now, now))
        if now - last > self._limits.calm_s:
            since = now
        self._refused[project] = since, now
        if len(self._refused) > KEPT_REFUSED:
            del self._refused[next(iter(self._refused))]
        return now - since >= self._limits.refused_s

    def _settle(self, entries: Sequence[_Entry], error: BaseException | None) -> None:
        self.waiting -= len(entries)
        for entry in entries:
            entry.waiter.resolve(error)
        free = self._limits.waiting - self.waiting
        while self._waiting_for_capacity and free > 0:
            future = self._waiting_for_capacity.popleft()
            if not future.done():
                future.set_result(None)
                free -= 1

    def _count(self, items: int, error: BaseException | None) -> None:
        if error is None:
            self._published.inc()
            self._items.inc(items)
        else:
            metrics.PUBLISH_ERRORS.labels(self._bus, getattr(error, "code", "bus.error")).inc()

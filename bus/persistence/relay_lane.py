"""The messages of a relay that wait for one bus. They are published in batches and in order, and wait while the bus is
unavailable.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog
from msgspec import Struct
from prometheus_client import Counter

from bus.clock import Clock
from bus.contracts.base import Message
from bus.in_turn import InTurn
from bus.persistence.outbox import OutboxMessage
from bus.port import BusError, BusUnavailable
from bus.retrying import RELAY, Retrying
from bus.under_way import UnderWay

if TYPE_CHECKING:
    from bus.bus import Bus

log = structlog.get_logger(__name__)

LANE_PUBLISHES = 4  # the bound of concurrent publishes on one bus, if all but the last are full or slow
LANE_BATCH = 512  # messages handed to the bus at once
MAX_BEHIND = 2 * LANE_BATCH  # messages in a lane above which its workers make no further ones by choice
UNAVAILABLE_LOG_INTERVAL_S = 30.0  # the interval at which an unavailable bus is logged, whatever the number of attempts

_published = Counter("berth_outbox_messages", "Outbox messages confirmed by the broker", ["bus"])
_overtaken = Counter("berth_outbox_overtaken_messages", "Outbox messages that a newer one replaced", ["bus"])

StreamPosition = tuple[Hashable, int]  # the subject of a message, and its number among the reports on that


class Ticket:
    """One outbox row whose messages are being published. It is deleted when all of them are confirmed."""

    __slots__ = ("failed", "left", "row_id", "waiting")

    def __init__(self, row_id: int, waiting: int, left: Sequence[OutboxMessage]) -> None:
        self.row_id = row_id
        self.waiting = waiting
        self.left = left  # messages of the row for buses that take nothing now: they stay in the table
        self.failed = False


QueuedMessage = tuple[Ticket, OutboxMessage]


class SettleDeliveries(Protocol):
    """The relay's actions for messages that have left; failed: or that stay behind for the sweep."""

    def __call__(self, items: Iterable[QueuedMessage], *, failed: bool = False) -> None:
        """Once for each batch, in any order."""


class Lingering(Struct, frozen=True):
    """Which messages wait for the next one on their subject, and how long.

    lingers: messages that are not waited for; each waits for half of `linger_s` or longer, up to all of it, whatever
    else leaves. place: the subject of a message, and its number among the reports on that; None: on nothing, so the
    message waits for no other. When a message with a higher number on the same subject comes meanwhile, the lingering
    one is dropped: its row adds nothing to the newer one's. keeps: instead it leaves together with that one, before it,
    because the receiver records each. line: the line in which a message waits to leave; the lines have their turns, and
    a line keeps its order.
    """

    linger_s: float = 0.0
    lingers: Callable[[Message], bool] | None = None
    place: Callable[[Message], StreamPosition | None] = lambda _: None
    keeps: bool = False
    line: Callable[[Message], Hashable] = lambda _: None


NO_LINGERING = Lingering()


class _LingeringReports(Struct):
    """The lingering messages on one subject, and the newest one's number. since: how many halves had passed then."""

    number: int
    items: list[QueuedMessage]
    since: int


class Lane:
    """The messages that wait for one bus. Bounded by the relay's rows."""

    def __init__(self, bus: Bus, clock: Clock, settle: SettleDeliveries, lingering: Lingering) -> None:
        self.lingers = lingering.lingers if lingering.linger_s > 0 else None
        self._bus = bus
        self._clock = clock
        self._settle = settle
        self._place = lingering.place
        self._keeps = lingering.keeps
        self._linger_s = lingering.linger_s
        # By their subjects, the oldest first; the others each under a number of its own.
        self._lingering: dict[Hashable, _LingeringReports] = {}
        self._numbers = itertools.count()
        self._some_linger = asyncio.Event()
        self._halves = 0  # the number of half linger times that have passed
        self._at_once = False  # the process is ending, and nothing lingers
        self._line = lingering.line
        self._waiting: InTurn[QueuedMessage] = InTurn()
        self._some = asyncio.Event()
        self._under_way = UnderWay(self._wake)
        self.is_unavailable = False  # while True one of its publishers retries
        self._logged_at = -math.inf
        self._closed = False

    def is_behind(self, most: int) -> bool:
        """Whether its bus is unavailable and so much waits for it that more is better left to the sweep."""
        return self.is_unavailable and len(self._waiting) + len(self._lingering) >= most

    @property
    def is_full(self) -> bool:
        """Whether so much waits that more would only wait longer."""
        return len(self._waiting) >= MAX_BEHIND

    def put(self, item: QueuedMessage) -> None:
        """Publish a message soon."""
        message = item[1].message
        is_lingering = self.lingers is not None and not self._at_once and self.lingers(message)
        if is_lingering or self._lingering:
            place = self._place(message)
            if place is not None:
                if self._keeps:
                    return self._keep(place, item, is_lingering=is_lingering)
                if not self._overtake(place, item, is_lingering=is_lingering):
                    return None
            if is_lingering:
                subject, number = place or (next(self._numbers), 0)
                return self._linger(subject, number, item)
        self._wait(item)
        return self._wake()

    def _wait(self, item: QueuedMessage) -> None:
        self._waiting.put(self._line(item[1].message), item)

    def _linger(self, subject: Hashable, number: int, item: QueuedMessage) -> None:
        self._lingering[subject] = _LingeringReports(number, [item], self._halves)
        self._some_linger.set()

    def _keep(self, place: StreamPosition, item: QueuedMessage, *, is_lingering: bool) -> None:
        """The messages that linger on the subject of a report leave with it, in order; or all linger together."""
        subject, number = place
        found = self._lingering.get(subject)
        if found is None and is_lingering:
            self._linger(subject, number, item)
        elif found is not None and is_lingering:
            found.items.append(item)  # since the first
        else:
            if found is not None:
                for earlier in self._lingering.pop(subject).items:
                    self._wait(earlier)
            self._wait(item)
            self._wake()

    def _overtake(self, place: StreamPosition, item: QueuedMessage, *, is_lingering: bool) -> bool:
        """Drop the older one of a lingering report and this one on the same subject; False: that is this one."""
        subject, number = place
        found = self._lingering.get(subject)
        if found is None or (found.number >= number and not is_lingering):
            return True
        is_newer = found.number < number
        if is_newer:
            del self._lingering[subject]
        _overtaken.labels(self._bus.name).inc()
        self._settle(found.items if is_newer else [item])
        return is_newer

    async def end_lingering(self) -> None:
        """Publish lingering messages at the end of their time, whatever else is to be sent."""
        while True:
            await self._some_linger.wait()
            await self._clock.sleep(self._linger_s / 2)
            self._halves += 1
            self._wake()
            if not self._lingering:
                self._some_linger.clear()

    def publish_at_once(self) -> None:
        """Publish the lingering messages and let none linger any more, because the process is ending."""
        self._at_once = True
        self._wake()

    def _is_due(self) -> bool:
        """Whether the oldest has lingered long enough: a whole half of the time, and a part of another.

        If all of them left whenever the time is over, most would have just come, and the ends of those builds would
        follow in a message of their own.
        """
        if not self._lingering:
            return False
        return self._at_once or self._halves >= next(iter(self._lingering.values())).since + 2

    def _wake(self) -> None:
        if self._may_publish():
            self._some.set()

    def _may_publish(self) -> bool:
        """Whether a publish may begin. Publishes run one at a time, so that messages that arrive meanwhile gather; a
        further one may begin when its batch is full, or when those under way are slow.
        """
        count = len(self._waiting) + (len(self._lingering) if self._is_due() else 0)
        if not count or not self._under_way.count:
            return count > 0
        return not self.is_unavailable and (not self._under_way.holds_up or count >= LANE_BATCH)

    def _take(self) -> list[QueuedMessage]:
        """The next batch. A lingering message is younger than the waiting ones, or about another subject."""
        items = [self._waiting.take() for _ in range(min(LANE_BATCH, len(self._waiting)))]
        while self._is_due() and len(items) < LANE_BATCH:
            items += self._lingering.pop(next(iter(self._lingering))).items  # a few more, where they are kept
        return items

    async def run(self) -> None:
        """Publish until cancelled, one batch at a time; several of these run for one lane."""
        while True:
            if not self._may_publish():
                self._some.clear()
                await self._some.wait()
                continue
            items = self._take()
            with self._under_way.batch():
                self._wake()
                try:
                    await self._publish(items)
                except asyncio.CancelledError:
                    if self._closed:
                        self._settle(items, failed=True)
                    raise

    def close(self) -> None:
        """Leave all waiting messages in the table. The messages that are being published are left when their publish is
        cancelled.
        """
        self._closed = True
        left = [*self._waiting, *(item for one in self._lingering.values() for item in one.items)]
        self._waiting.clear()
        self._lingering.clear()
        self._settle(left, failed=True)

    async def _publish(self, items: list[QueuedMessage]) -> None:
        batch = [(item.message, item.cause) for _ticket, item in items]
        traces = [item.traceparent for _ticket, item in items]
        try:  # while it is unavailable it is not known which of them arrived: all of them again, when it is back
            await Retrying(RELAY, self._clock).call(
                lambda: self._bus.publish_all(batch, traces),
                lambda error: isinstance(error, BusUnavailable),
                on_failure=lambda error, _: self._log_unavailable(error),
            )
        except BusError as error:
            self._log_available()
            log.warning("outbox.refused", bus=self._bus.name, code=error.code, reason=str(error))
            await self._one_by_one(items)
        else:
            self._log_available()
            _published.labels(self._bus.name).inc(len(items))
            self._settle(items)

    def _log_unavailable(self, error: BaseException) -> None:
        """Log that the bus is unavailable, once at first and then at intervals."""
        now = self._clock.monotonic()
        if not self.is_unavailable or now - self._logged_at >= UNAVAILABLE_LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("outbox.bus_unavailable", bus=self._bus.name, waiting=len(self._waiting), reason=str(error))
        self.is_unavailable = True

    def _log_available(self) -> None:
        if self.is_unavailable:
            log.info("outbox.bus_back", bus=self._bus.name)
        self.is_unavailable = False

    async def _one_by_one(self, items: list[QueuedMessage]) -> None:
        """Something of the batch has no queue, or a full one: it alone stays behind for the sweep."""
        while items:  # messages left when this is cancelled were not settled
            item = items[0]
            try:
                await self._bus.publish_all([(item[1].message, item[1].cause)], [item[1].traceparent])
            except BusError as error:
                log.warning(
                    "outbox.refused_by_broker",
                    bus=self._bus.name,
                    row=item[0].row_id,
                    code=error.code,
                    reason=str(error),
                )
                self._settle([items.pop(0)], failed=True)
            else:
                _published.labels(self._bus.name).inc()
                self._settle([items.pop(0)])

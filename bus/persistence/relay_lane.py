"""What waits for one bus: the relay's messages leave in batches, in order, and wait while the bus is unavailable."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog
from msgspec import Struct
from prometheus_client import Counter

from bus.clock import Clock
from bus.contracts.base import Message
from bus.persistence.outbox import OutboxMessage
from bus.port import BusError, BusUnavailable
from bus.retrying import RELAY, Retrying

if TYPE_CHECKING:
    from bus.bus import Bus

log = structlog.get_logger(__name__)

LANE_PUBLISHES = 4  # publishes of one bus under way at a time, if all but the last are full or slow
LANE_SLOW_S = 0.05  # a publish that takes so long no longer holds up what has gathered behind it
LANE_BATCH = 512  # messages handed to the bus at once
UNAVAILABLE_LOG_INTERVAL_S = 30.0  # an unavailable bus is logged this often, whatever the number of tries

_published = Counter("berth_outbox_messages", "Outbox messages confirmed by the broker", ["bus"])
_overtaken = Counter("berth_outbox_overtaken_messages", "Outbox messages that a newer one replaced", ["bus"])

StreamPosition = tuple[Hashable, int]  # what a message reports on, and its number among the reports on that


class Ticket:
    """One outbox row under way: it is deleted when all its messages are confirmed."""

    __slots__ = ("failed", "left", "row_id", "waiting")

    def __init__(self, row_id: int, waiting: int, left: Sequence[OutboxMessage]) -> None:
        self.row_id = row_id
        self.waiting = waiting
        self.left = left  # messages of the row for buses that take nothing now: they stay in the table
        self.failed = False


QueuedMessage = tuple[Ticket, OutboxMessage]


class SettleDeliveries(Protocol):
    """What the relay does with messages that have left; failed: or that stay behind for the sweep."""

    def __call__(self, items: Iterable[QueuedMessage], *, failed: bool = False) -> None:
        """Once for each batch, in any order."""


class Lingering(Struct, frozen=True):
    """Which messages wait for others, and how long.

    lingers: messages that are not waited for; each leaves with the next message that does not linger, in order, or
    after `linger_s`. place: what a message reports on, and its number among the reports on that; None: on nothing. With
    it a message that lingers waits for `linger_s` whatever else leaves, and is dropped when a message with a higher
    number of the same subject comes meanwhile: its row adds nothing to the newer one's.
    """

    linger_s: float = 0.0
    lingers: Callable[[Message], bool] | None = None
    place: Callable[[Message], StreamPosition | None] | None = None


NO_LINGERING = Lingering()


class Lane:
    """What waits for one bus. Bounded by the relay's rows."""

    def __init__(self, bus: Bus, clock: Clock, settle: SettleDeliveries, lingering: Lingering) -> None:
        self.lingers = lingering.lingers if lingering.linger_s > 0 else None
        self._bus = bus
        self._clock = clock
        self._settle = settle
        self._place = lingering.place
        self._linger_s = lingering.linger_s
        # By what they report on, the newest of each; the others each under a number of its own.
        self._lingering: dict[Hashable, tuple[int, QueuedMessage]] = {}
        self._numbers = itertools.count()
        self._some_linger = asyncio.Event()
        self._is_due = False  # what lingers has lingered long enough
        self._waiting: deque[QueuedMessage] = deque()
        self._some = asyncio.Event()
        self._publishing = 0
        self._slow = False  # the youngest publish has been under way for LANE_SLOW_S
        self.is_unavailable = False  # while True one of its publishers tries again and again
        self._logged_at = -math.inf
        self._closed = False

    def is_behind(self, most: int) -> bool:
        """Whether its bus is unavailable and so much waits for it that more is better left to the sweep."""
        return self.is_unavailable and len(self._waiting) + len(self._lingering) >= most

    def put(self, item: QueuedMessage) -> None:
        """Publish a message soon."""
        message = item[1].message
        place = None if self._place is None else self._place(message)
        is_lingering = self.lingers is not None and self.lingers(message)
        if place is not None and not self._overtake(place, item, is_lingering=is_lingering):
            return
        if is_lingering:
            key, number = place or (next(self._numbers), 0)
            self._lingering[key] = (number, item)
            self._some_linger.set()
            return
        if self._place is None:
            self._waiting.extend(lingering for _, lingering in self._lingering.values())
            self._lingering.clear()
        self._waiting.append(item)
        self._wake()

    def _overtake(self, place: StreamPosition, item: QueuedMessage, *, is_lingering: bool) -> bool:
        """Drop the older one of a lingering report and this one on the same subject; False: that is this one."""
        subject, number = place
        found = self._lingering.get(subject)
        if found is None or (found[0] >= number and not is_lingering):
            return True
        is_newer = found[0] < number
        if is_newer:
            del self._lingering[subject]
        _overtaken.labels(self._bus.name).inc()
        self._settle([found[1] if is_newer else item])
        return is_newer

    async def end_lingering(self) -> None:
        """What lingers leaves in the end, whatever else is to be sent."""
        while True:
            await self._some_linger.wait()
            self._some_linger.clear()
            await self._clock.sleep(self._linger_s)
            self._is_due = bool(self._lingering)
            self._wake()

    def _wake(self) -> None:
        if self._may_publish():
            self._some.set()

    def _may_publish(self) -> bool:
        """One publish at a time, so that what comes meanwhile gathers; a full one beside it, or when it is slow."""
        count = len(self._waiting) + (len(self._lingering) if self._is_due else 0)
        if not count or not self._publishing:
            return count > 0
        return not self.is_unavailable and (self._slow or count >= LANE_BATCH)

    def _take(self) -> list[QueuedMessage]:
        """The next batch. What lingers is younger than what waits, or has nothing to do with it."""
        items = [self._waiting.popleft() for _ in range(min(LANE_BATCH, len(self._waiting)))]
        while self._is_due and self._lingering and len(items) < LANE_BATCH:
            items.append(self._lingering.pop(next(iter(self._lingering)))[1])
        self._is_due = self._is_due and bool(self._lingering)
        return items

    def _is_slow(self) -> None:
        self._slow = True
        self._wake()

    async def run(self) -> None:
        """Publish until cancelled, one batch at a time; several of these run for one lane."""
        while True:
            if not self._may_publish():
                self._some.clear()
                await self._some.wait()
                continue
            items = self._take()
            self._publishing += 1
            self._slow = False
            self._wake()
            slow = asyncio.get_running_loop().call_later(LANE_SLOW_S, self._is_slow)
            try:
                await self._publish(items)
            except asyncio.CancelledError:
                if self._closed:
                    self._settle(items, failed=True)
                raise
            finally:
                slow.cancel()
                self._publishing -= 1

    def close(self) -> None:
        """Leave all that waits here in the table. What is being published is left by its cancellation."""
        self._closed = True
        left = [*self._waiting, *(item for _, item in self._lingering.values())]
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
        """Logged when it becomes unavailable, and at intervals while it stays so."""
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
        while items:  # what is left of them when this is cancelled was not settled
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

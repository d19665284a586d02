"""Ironic's notifications as they arrive: own queue, bound to an exchange of Ironic's."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable

import structlog
from msgspec import Struct

from bus.clock import Clock, event_or_time
from bus.contracts.host_metrics import HostReading
from bus.transport import BusError, BusUnavailable, Delivery, QueueMissing, Subscription, Transport
from ironic_sync import metrics
from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain.effect import NO_EFFECT, effect_of
from ironic_sync.domain.notification import Notification, Rejected, Sensors, parse
from ironic_sync.sync_state import SyncState

log = structlog.get_logger(__name__)

UNHANDLED = "notification.unhandled"
RECOUNTED_EVENTS = 64  # distinct event names counted by name; an event type beyond that is counted as "other"


class ListeningTerm(Struct, frozen=True):
    """What notifications change in one term of this process."""

    sync_state: SyncState
    follow_allocation: Callable[[str], None]
    read_all: Callable[[], None]
    measured: Callable[[HostReading], None]


class NotificationListener:
    """Binds, consumes, and turns each delivery into a step of the sync_state, in order of arrival. A process has one
    subscription, which rests between its terms.
    """

    # A delivery is acknowledged once its changes are saved. One that only causes a read is acknowledged by a process
    # that was the only writer after it had come: every later writer reads all nodes, so that no read is lost with this
    # one.

    def __init__(self, transport: Transport, *, clock: Clock, config: IronicSyncConfig) -> None:
        self._transport = transport
        self._clock = clock
        self._config = config
        self._term: ListeningTerm | None = None  # None: deliveries go back, for the writer
        self._subscription: Subscription | None = None
        self._check = asyncio.Event()
        self._events: set[str] = set()
        self._logged_missing = False
        self.bound = False
        self.exchange_missing = False  # the exchange is not there: Ironic makes it with its first notification
        transport.on_reconnect(self._check.set)

    async def run(self, term: ListeningTerm) -> None:
        """Bind, consume, and bind again after each reconnection and now and then, until cancelled."""
        # Ironic's exchange is not durable: it goes with the broker and takes the binding along, and may be made anew
        # while we are connected. So the binding is repeated with each read of all; repeating it costs nothing.
        self._term = term
        first = True  # nodes are read even while there is nothing to bind to
        try:
            while True:
                self._check.clear()
                was_bound, self.bound = self.bound, await self._bind()
                metrics.BOUND.set(self.bound)
                if first or (self.bound and not was_bound):
                    term.read_all()
                first = False
                wait_s = self._config.resync_interval_s if self.bound else self._config.bind_retry_s
                if await event_or_time(self._check, self._clock, wait_s):
                    self.bound = False  # the connection is new: bind first, then read all
        finally:
            self.bound = False
            metrics.BOUND.set(0)
            self.stop()

    def stop(self) -> None:
        """Take no more notifications in this term."""
        self._term = None
        if self._subscription is not None:
            self._subscription.pause()

    async def _bind(self) -> bool:
        config = self._config
        self.exchange_missing = False
        try:
            # Never `#`: Ironic's RPC goes through the same exchange.
            await self._transport.bind_external(
                config.own_queue, config.exchange, [f"{topic}.*" for topic in config.topics]
            )
            if self._term is None:
                return False
            if self._subscription is not None:
                self._subscription.resume()
            else:
                self._subscription = await self._transport.consume(
                    config.own_queue, self.on_delivery, prefetch=config.prefetch
                )
        except QueueMissing:
            self.exchange_missing = True
            if not self._logged_missing:  # a fresh Ironic is silent for hours; the metric shows it all the while
                log.warning("ironic.exchange_missing", exchange=config.exchange, again_in_s=config.bind_retry_s)
            self._logged_missing = True
            return False
        except BusUnavailable as error:
            log.warning("ironic.bus_unavailable", reason=str(error))
            return False
        except BusError as error:
            log.error("ironic.cannot_bind", exchange=config.exchange, queue=config.own_queue, code=error.code)
            return False
        self._logged_missing = False
        return True

    def on_delivery(self, delivery: Delivery) -> None:
        """Take one message. Never blocks, never raises, never shows a body, which may be anything that anyone
        published.
        """
        # One that cannot be handled is dropped, and all nodes are read, which covers it.
        term = self._term
        if term is None:
            delivery.nack(requeue=True)
            return
        try:
            self._take(delivery, term)
        except Exception as error:  # the input is foreign; reading all nodes covers its subject
            metrics.REJECTED.labels(UNHANDLED).inc()
            log.error("ironic.unhandled", code=UNHANDLED, error=type(error).__name__, where=_where(error))
            delivery.ack()
            term.read_all()

    def _take(self, delivery: Delivery, term: ListeningTerm) -> None:
        notification = parse(delivery.body)
        if isinstance(notification, Rejected):
            metrics.REJECTED.labels(notification.code).inc()
            log.warning(
                "ironic.rejected", code=notification.code, reason=notification.reason, cause=notification.request_id
            )
            delivery.ack()  # it contains nothing that reading all nodes would not find
            return
        metrics.NOTIFICATIONS.labels(self._event(notification)).inc()
        if isinstance(notification, Sensors):
            delivery.ack()  # lost with this process, the next one is newer
            if notification.reading is not None:
                term.measured(notification.reading)
            return
        self._act(notification, term)
        term.sync_state.take(delivery)

    def _act(self, notification: Notification, term: ListeningTerm) -> None:
        known = term.sync_state.positions.get(notification.subject or "")
        means = effect_of(notification, seen_updated_at=known.updated_at if known else None)
        log.debug(
            "ironic.notification",
            what=notification.event,
            node=means.read,
            reserve_all=means.reserve_all,
            cause=notification.request_id,
        )
        if means == NO_EFFECT:
            return
        if means.allocation is not None:
            term.follow_allocation(means.allocation)
            return
        cause = notification.request_id or notification.message_id
        term.sync_state.apply_notification(means, cause, notification.event)

    def _event(self, notification: Notification | Sensors) -> str:
        """A label from outside, so the number of different ones is bounded."""
        if len(self._events) < RECOUNTED_EVENTS:
            self._events.add(notification.event)
        return notification.event if notification.event in self._events else "other"


def _where(error: Exception) -> str:
    """The line that raised it. Its text might quote the body, and a body may hold a live token."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.name}:{frame.lineno}"

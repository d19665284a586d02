"""The transport: keeps one session alive, and restores declarations and consumption each time it is new."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import structlog
from aiormq.abc import AbstractChannel, DeliveredMessage

from bus import metrics
from bus.clock import SystemClock
from bus.codec import most_bytes
from bus.contracts.queues import QueueRow
from bus.rabbitmq.address import parse_bus_url
from bus.rabbitmq.channels import Acks, RabbitDelivery
from bus.rabbitmq.errors import translated
from bus.rabbitmq.patches import hand_over_at_once, has_ended, install
from bus.rabbitmq.session import RPC_TIMEOUT_S, Session
from bus.retrying import RECONNECT, SET_UP, Backoff, Retrying
from bus.topology import OWNER_EXCHANGE, ExternalQueue, QueueNames, QueuePlan, external_plan, plan, reply_plan
from bus.transport import (
    BusError,
    BusForbidden,
    BusRightsMissing,
    BusUnavailable,
    Delivery,
    NotSent,
    Outgoing,
    QueueLocked,
    QueueMissing,
    call_back,
)

log = structlog.get_logger("bus.rabbitmq")

T = TypeVar("T")


class RabbitSubscription:
    """A consumption on a channel of its own, taken up again after a loss."""

    def __init__(
        self,
        transport: RabbitTransport,
        queue: str,
        on: Callable[[RabbitDelivery], None],
        prefetch: int,
        *,
        gathers: bool = True,  # whether acknowledgements wait for others
        arguments: Callable[[], Mapping[str, str | int]] = dict,  # those of the consumption, each time it begins
    ) -> None:
        self.queue = queue
        self._gathers = gathers
        self._arguments = arguments
        self._transport = transport
        self._on_delivery = on
        self._prefetch = prefetch
        self._channel: AbstractChannel | None = None
        self._tag = ""
        self._cancelled = False
        self._paused = False
        self._changing = asyncio.Lock()  # begins and ends of the consumption come one after the other

    async def attach(self, session: Session) -> None:
        """Consume on this session, unless the subscription was cancelled."""
        async with self._changing:
            if self._cancelled:
                return
            channel = await session.channel(confirms=False)
            acks = Acks(channel, prefetch=self._prefetch, gathers=self._gathers)
            names = session.names

            def on_message(message: DeliveredMessage) -> None:
                acks.register(message.delivery_tag or 0)
                try:
                    self._on_delivery(RabbitDelivery(message, acks, names))
                except Exception:  # of one message, and not of its channel: unsettled it would be held for ever
                    log.exception("bus.delivery_failed", queue=self.queue)
                    acks.nack(message.delivery_tag or 0, requeue=False)

            hand_over_at_once(channel, on_message, most_bytes(names.local(self.queue)))
            try:
                with translated():
                    await channel.basic_qos(prefetch_count=self._prefetch, timeout=RPC_TIMEOUT_S)
                tag = "" if self._paused else await self._consume(channel)
            except BusError:
                await acks.close()  # the next attempt has another one
                raise
            self._channel, self._acks, self._tag = channel, acks, tag
            channel.on_consumer_cancel_callbacks.add(lambda _: self._ended(session, channel))
            channel.closing.add_done_callback(lambda _: self._ended(session, channel))
            # The broker may have ended it before anyone listened.
            if tag and tag not in channel.consumers:  # type: ignore[attr-defined]
                self._ended(session, channel)

    async def _consume(self, channel: AbstractChannel) -> str:
        """Begin on this channel, where `hand_over_at_once` has the deliveries. Returns the tag of the consumption."""

        def not_called(_: DeliveredMessage) -> None:
            raise AssertionError("a delivery is handed over at once")

        with translated():
            answer = await channel.basic_consume(
                self.queue,
                not_called,  # type: ignore[arg-type]
                arguments=dict(self._arguments()),
                timeout=RPC_TIMEOUT_S,
            )
        return answer.consumer_tag or ""

    def pause(self) -> None:
        """No new deliveries until `resume`."""
        self._paused = True
        self._transport.run_in_background(self._follow())

    def resume(self) -> None:
        """Deliver again."""
        self._paused = False
        self._transport.run_in_background(self._follow())

    async def _follow(self) -> None:
        """Consume or not, as was last wanted. A lost channel `attach` replaces."""
        async with self._changing:
            channel = self._channel
            try:
                while channel is not None and not has_ended(channel) and bool(self._tag) is self._rests:
                    if not self._rests:
                        self._tag = await self._consume(channel)
                        continue
                    with translated():
                        await channel.basic_cancel(self._tag, timeout=RPC_TIMEOUT_S)
                    self._tag = ""
            except BusError as error:
                log.info("bus.not_regulated", queue=self.queue, code=error.code)

    @property
    def _rests(self) -> bool:
        return self._paused or self._cancelled

    async def cancel(self) -> None:
        """No new deliveries; those handed over may still be acknowledged: the channel stays until they are."""
        self._cancelled = True  # what begins to consume afterwards does not
        self._transport.declare_no_more(self.queue)
        await self._follow()
        self._on_delivery = lambda delivery: delivery.nack(requeue=True)
        if self._channel is not None:
            self._acks.once_acknowledged(self._end)

    def _end(self) -> None:
        self._transport.forget(self)
        self._transport.run_in_background(self._acks.close())

    async def flush(self) -> None:
        """Hand the settled deliveries to the connection before it closes."""
        if self._channel is not None:
            await self._acks.flush()

    def _ended(self, session: Session, channel: AbstractChannel) -> None:
        """The broker ended this consumption (the queue was deleted, the channel closed) but the connection stands."""
        if self._channel is channel and not self._cancelled and not session.lost.is_set():
            self._channel = None
            self._transport.run_in_background(self._resume(session, self._acks))

    async def _resume(self, session: Session, acks: Acks) -> None:
        """On another channel. What is not settled on the one before comes again, as after a lost connection."""
        await acks.close()
        await self._transport.restore(self, session)


class RabbitTransport:
    """One connection to one virtual host of RabbitMQ: to one of the nodes that the URL names, and to another when it
    is lost. Raises BadBusUrl, UnknownLibrary."""

    def __init__(self, url: str, *, name: str, prefix: str = "", connection_name: str = "") -> None:
        install()
        self.name = name
        self._address = parse_bus_url(url)
        self._names = QueueNames(prefix)
        self._connection_name = connection_name or f"berth {name}"
        self._session: Session | None = None
        self._keep_task: asyncio.Task[None] | None = None
        self._closing = False
        self._restoring: set[asyncio.Task[None]] = set()
        self._opened: asyncio.Future[None] | None = None
        self._shared = False
        self._owners: dict[str, str] = {}  # {exchange: owner}
        self._declared: dict[str, Callable[[Session], Awaitable[None]]] = {}  # by the queue's name
        self._subscriptions: list[RabbitSubscription] = []  # of those cancelled the last acks may be on the way
        self._getter: Acks | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._on_locked: list[Callable[[], None]] = []
        self._jitter = random.Random()
        self._clock = SystemClock()

    @property
    def connected(self) -> bool:
        """Whether the broker can be reached now."""
        return self._session is not None and not self._session.lost.is_set()

    @property
    def blocked(self) -> str:
        """Why the broker takes no messages now; "": it does."""
        return self._session.blocked if self._session is not None else ""

    async def open(self) -> None:
        """Connect; waits for the broker while it is unavailable. Raises BusForbidden."""
        # aiormq logs every lost connection with a traceback; what matters of it is logged here.
        logging.getLogger("aiormq").setLevel(logging.CRITICAL)
        logging.getLogger("aio_pika").setLevel(logging.CRITICAL)
        self._closing = False
        if self._keep_task is None or self._keep_task.done():
            self._opened = asyncio.Future()
            self._keep_task = asyncio.create_task(self._keep())
        assert self._opened is not None
        try:
            await self._opened
        except asyncio.CancelledError:  # its keeper would go on, and connect for nobody
            await self.close()
            raise
        except BusForbidden as error:  # a process has several of these, with users of their own
            raise type(error)(f"bus {self.name}: {error}") from error

    async def close(self) -> None:
        """Close; unacknowledged deliveries go back to their queues."""
        self._closing = True  # a cancellation may get lost in aiormq, which keeps messages that come while it closes
        tasks = [*self._restoring, *([self._keep_task] if self._keep_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        flushes = [subscription.flush() for subscription in self._subscriptions]
        if self._getter is not None:
            flushes.append(self._getter.flush())
        await asyncio.gather(*flushes)
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        self._subscriptions.clear()

    async def declare_shared(self) -> None:
        """Declare the shared topology of the bus."""
        # A worker that may not make it begins beside those that do: for a while there is nothing to say.
        await self._retry_until_done(lambda session: session.declare_shared(self.name), besides=(BusRightsMissing,))
        self._shared = True

    async def check_publishes(self, keys: Sequence[tuple[str, str]]) -> None:
        """Try these keys. Without an answer, as in an alarm, it ends at once: who consumes ends the alarm."""
        try:
            await self._retry_until_done(lambda session: session.check_publishes(keys))
        except TimeoutError:
            log.warning("bus.permissions_unchecked", bus=self.name, reason=self.blocked)

    async def set_owner(self, name: str, owner: str) -> None:
        """Set the owner of a name, or find it there."""
        real = self._names.exchange(OWNER_EXCHANGE + name)
        await self._retry_until_done(lambda session: session.set_owner(real, owner))
        self._owners[real] = owner

    async def owner_of(self, name: str) -> str:
        """The owner of a name."""
        return await self._retry_until_done(
            lambda session: session.owner_of(self._names.exchange(OWNER_EXCHANGE + name))
        )

    async def clear_owner(self, name: str) -> None:
        """A name has no owner any more."""
        real = self._names.exchange(OWNER_EXCHANGE + name)
        await self._current().clear_owner(real)
        self._owners.pop(real, None)

    async def declare_queue(self, row: QueueRow, name: str, bindings: Sequence[tuple[str, str]]) -> None:
        """Declare a queue. Raises QueueLocked."""
        await self._declare(plan(row, name, bindings))

    async def declare_reply_queue(self, name: str, *, bound: bool = True) -> None:
        """Declare a private queue for replies. bound: False on a bus of Nova, where the default exchange answers."""
        await self._declare(reply_plan(name, bound=bound))

    async def bind_external(self, queue: str, exchange: str, keys: Sequence[str]) -> None:
        """A durable queue bound to an exchange of another system. Raises QueueMissing.

        After a reconnection the queue is there, and the caller binds it again: that exchange may be gone, or another.
        """
        planned = self._names.plan(external_plan(queue))
        await self._current().bind_external(planned, exchange, keys)
        self._declared[planned.name] = partial(Session.declare, planned=planned)

    async def declare_external(self, planned: ExternalQueue) -> None:
        """Declare a queue of another system as that system does, and its exchange. What exists is used as it is."""
        await self._retry_until_done(lambda session: session.declare_external(planned))
        self._declared[planned.name] = partial(Session.declare_external, planned=planned)

    async def declare_listening(self, planned: QueuePlan) -> None:
        """Declare a private queue that gets copies of what is published to exchanges of another system, which are
        waited for and not declared.
        """
        await self._retry_until_done(lambda session: session.declare(planned), besides=(QueueMissing,))
        self._declared[planned.name] = partial(Session.declare, planned=planned)

    async def publish(self, message: Outgoing) -> None:
        """Publish and wait for the broker's confirm."""
        await self._current().publish(message)

    async def consume(
        self, queue: str, on_delivery: Callable[[Delivery], None], *, prefetch: int
    ) -> RabbitSubscription:
        """Deliver messages of a queue to a callback."""
        return await self._consume(RabbitSubscription(self, self._names.queue(queue), on_delivery, prefetch))

    async def consume_external(
        self,
        queue: str,
        on_delivery: Callable[[RabbitDelivery], None],
        *,
        prefetch: int,
        arguments: Callable[[], Mapping[str, str | int]] = dict,
    ) -> RabbitSubscription:
        """As `consume`, a queue that `declare_external` has declared. Each acknowledgement is sent at once: processes
        of that system take from the queue as well, and one that is given back they would carry out again. arguments:
        those of the consumption, each time it begins.
        """
        subscription = RabbitSubscription(self, queue, on_delivery, prefetch, gathers=False, arguments=arguments)
        return await self._consume(subscription)

    async def _consume(self, subscription: RabbitSubscription) -> RabbitSubscription:
        await self._retry_until_done(subscription.attach)
        self._subscriptions.append(subscription)
        return subscription

    def forget(self, subscription: RabbitSubscription) -> None:
        """A subscription was cancelled, and nothing of it is open."""
        self._subscriptions = [one for one in self._subscriptions if one is not subscription]

    def declare_no_more(self, queue: str) -> None:
        """Leave a queue (by the broker's name) as it is after the next loss: an operator may have removed it."""
        self._declared.pop(queue, None)

    async def get(self, queue: str) -> RabbitDelivery | None:
        """Take one message."""
        channel = await self._current().named("get")
        with translated():
            message = await channel.basic_get(self._names.queue(queue), timeout=RPC_TIMEOUT_S)
        if message.delivery_tag is None:
            return None
        if self._getter is None or self._getter.channel is not channel:
            self._getter = Acks(channel, prefetch=1)
        self._getter.register(message.delivery_tag)
        return RabbitDelivery(message, self._getter, self._names)

    async def depth(self, queue: str) -> int:
        """Messages ready in a queue."""
        return await self._current().depth(self._names.queue(queue))

    async def consumers(self, queue: str) -> int:
        """Consumptions of a queue, those of other processes among them."""
        return await self._current().consumers(self._names.queue(queue))

    async def purge(self, queue: str) -> int:
        """Drop the ready messages of a queue."""
        return await self._current().purge(self._names.queue(queue))

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Called each time everything is declared and consumed again."""
        self._callbacks.append(callback)

    def on_locked(self, callback: Callable[[], None]) -> None:
        """Called each time the connection does not come back, as another has a private queue of this one's."""
        self._on_locked.append(callback)

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something for a subscription, until it ends or the transport closes."""
        task = asyncio.get_running_loop().create_task(work)
        self._restoring.add(task)
        task.add_done_callback(self._restoring.discard)

    def _current(self) -> Session:
        if self._session is None or self._session.lost.is_set():
            raise NotSent(f"{self.name}: not connected")
        return self._session

    async def _retry_until_done(
        self, work: Callable[[Session], Awaitable[T]], *, besides: tuple[type[BusError], ...] = ()
    ) -> T:
        """Do it on this session; when that is lost meanwhile, or after the faults `besides`, on the next. Raises
        BusUnavailable, or one of these, in the end.
        """
        # When several processes declare one quorum queue for the first time, RabbitMQ ends some of their connections
        # with INTERNAL_ERROR; trying again is all that helps.

        def may_pass(error: BaseException) -> bool:
            # A queue is another process's, perhaps: the caller knows how long to wait.
            passes = isinstance(error, (BusUnavailable, *besides)) and not isinstance(error, QueueLocked)
            return passes and self._keep_task is not None and not self._keep_task.done()

        return await Retrying(SET_UP, self._clock, self._jitter).call(lambda: work(self._current()), may_pass)

    async def _declare(self, planned: QueuePlan) -> None:
        real = self._names.plan(planned)
        await self._retry_until_done(lambda session: session.declare(real))
        self._declared[real.name] = partial(Session.declare, planned=real)

    async def _keep(self) -> None:
        """Connect, restore, wait for the loss, and again."""
        backoff = Backoff(RECONNECT, self._clock, self._jitter)
        while not self._closing:
            try:
                session = await self._connected()
            except BusError as error:
                if isinstance(error, BusForbidden) and self._opened is not None and not self._opened.done():
                    self._opened.set_exception(error)
                    return
                if isinstance(error, QueueLocked):
                    for callback in self._on_locked:
                        call_back(callback)
                attempt = backoff.failures + 1
                log.warning("bus.unavailable", bus=self.name, code=error.code, reason=str(error), attempt=attempt)
            except Exception:  # a library that fails in a new way must not leave a process without a connection
                log.exception("bus.connecting_broke", bus=self.name, attempt=backoff.failures + 1)
            else:
                backoff.reset()
                self._has_reconnected(session)
                await session.lost.wait()
                self._session = None
                metrics.BLOCKED.labels(self.name).set(0)
                log.warning("bus.lost", bus=self.name, reason=session.lost_reason)
                await session.close()
                continue
            await backoff.wait()

    async def _connected(self) -> Session:
        """A session in which everything is declared and consumed again."""
        session = await Session.connect(self._address, self._names, self._connection_name)
        try:
            await self._restore(session)
            if self._closing:
                raise asyncio.CancelledError
        except BaseException:
            await session.close()
            raise
        return session

    def _has_reconnected(self, session: Session) -> None:
        self._session = session
        session.on_blocked = self._alarm_changed
        if session.blocked:
            self._alarm_changed()
        if self._opened is not None and not self._opened.done():
            self._opened.set_result(None)
            return
        log.info("bus.back", bus=self.name)
        for callback in self._callbacks:
            call_back(callback)

    def _alarm_changed(self) -> None:
        """The broker has run short of memory or disk, or has enough again: logged once each time."""
        reason = self.blocked
        metrics.BLOCKED.labels(self.name).set(1 if reason else 0)
        if reason:
            log.warning("bus.blocked", bus=self.name, reason=reason)
        else:
            log.info("bus.unblocked", bus=self.name)

    async def _restore(self, session: Session) -> None:
        for owner in self._owners.items():
            await session.set_owner(*owner)
        if self._shared:
            await session.declare_shared(self.name)
        for declare in self._declared.values():
            await declare(session)
        # A message delivered while further queues are taken up is answered at once, so this is the current session now.
        self._session = session
        try:
            for subscription in tuple(self._subscriptions):  # what `_consume` adds meanwhile is on this session already
                await subscription.attach(session)
        except BaseException:
            self._session = None
            raise

    async def restore(self, subscription: RabbitSubscription, session: Session) -> None:
        """Take up a consumption again that the broker ended."""
        backoff = Backoff(RECONNECT, self._clock, self._jitter)
        while self._session is session and not session.lost.is_set():
            try:
                declare = self._declared.get(subscription.queue)
                if declare is not None:
                    await declare(session)
                return await subscription.attach(session)
            except BusError as error:
                log.warning("bus.consumption_lost", queue=subscription.queue, code=error.code, reason=str(error))
                await backoff.wait()

"""The fallback: calls that berth does not decide are taken to a stock nova-scheduler on another virtual host, as they
came but for the reply queue, and answered byte by byte.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from bus.clock import Clock
from bus.faults import Fault
from bus.rabbitmq.transport import RabbitTransport
from bus.transport import BusError, BusUnavailable, Delivery, NotSent, Outgoing
from nova_scheduler.metrics import FORWARDED
from nova_scheduler.wire.envelope import CALL_LIMIT_S, REPLY_QUEUES, Call, CallUnreadable, parse_reply, readdressed
from nova_scheduler.wire.queues import POLL_S, TOPIC

log = structlog.get_logger("nova")

PREFETCH = 64
# Calls that wait for an answer. A stock nova-scheduler takes one after the other: they wait in its queue.
IN_FLIGHT = 1024
STOPS = "this frontend stops"
REASON = re.compile(r"[a-z][a-z0-9_.]{0,39}")
OTHER = "other"
MAX_REASONS = 64
_COUNTED: set[str] = set()  # reasons that are labels


class ForwardFailed(Fault):
    """A call that was forwarded has no answer."""

    code = "nova.forward_failed"


class Fallback(Protocol):
    """What takes a call to a stock nova-scheduler: `StockForwarder`, and the shadow before it."""

    async def open(self) -> None:
        """Connect; waits for the broker. Raises BusForbidden."""

    async def close(self) -> None:
        """Close; calls under way get no answer from here."""

    async def call(self, call: Call, reason: str, acknowledge_first: Callable[[], Awaitable[None]]) -> bytes:
        """The body of the answer to a call. acknowledge_first: awaited once, before the call leaves; when it raises
        BusError, this does, and the call has not left. Raises ForwardFailed.
        """

    def abandon(self) -> None:
        """Wait for no answer any more: calls under way fail."""

    async def forward(self, call: Call) -> None:
        """Pass a cast to all servers on. Raises BusError."""


class _Awaited:
    """A call under way."""

    def __init__(self) -> None:
        self.sign = asyncio.Event()  # set by each reply, heartbeats among them
        self.answer: bytes | None = None
        self.abandoned = False


class StockForwarder:
    """Calls on their way to a stock nova-scheduler."""

    # The stock scheduler claims by itself, so a call must not reach it twice: it leaves once Nova's broker has
    # confirmed that it is acknowledged, so a call that is delivered again has never left. A process killed in between
    # loses the call, as a killed stock nova-scheduler does.

    def __init__(
        self,
        transport: RabbitTransport,  # of its virtual host; it is opened and closed here
        *,
        control_exchange: str,
        unique: str,  # what tells the reply queue from those of other processes
        clock: Clock,
        in_flight: int = IN_FLIGHT,  # calls at a time; a further one fails
    ) -> None:
        self._transport = transport
        self._exchange = control_exchange
        self._reply_queue = f"{REPLY_QUEUES}{unique}"
        self._clock = clock
        self._in_flight = in_flight
        self._waiting: dict[str, _Awaited] = {}  # by message id

    async def open(self) -> None:
        """Connect; waits for the broker. Raises BusForbidden."""
        await self._transport.open()
        await self._transport.declare_reply_queue(self._reply_queue, bound=False)
        await self._transport.consume(self._reply_queue, self._on_reply, prefetch=PREFETCH)

    async def close(self) -> None:
        """Close; calls under way get no answer from here."""
        await self._transport.close()

    @property
    def unavailable_reason(self) -> str:
        """Why nothing can be forwarded now; "": it can."""
        return self._transport.blocked if self._transport.connected else "not connected"

    def abandon(self) -> None:
        """As Fallback has it."""
        for awaited in self._waiting.values():
            awaited.abandoned = True
            awaited.sign.set()

    async def call(self, call: Call, reason: str, acknowledge_first: Callable[[], Awaitable[None]]) -> bytes:
        """As Fallback has it. It may be cancelled. Raises ForwardFailed: no broker or scheduler takes it, too many wait
        already, or none gave a sign of life for as long as the client would wait.
        """
        outcome = "cancelled"
        try:
            body = await self._forwarded(call, acknowledge_first)
            outcome = "answered"
        except ForwardFailed as error:
            outcome = "failed"
            log.warning("nova.forward_failed", reason=str(error), request_id=call.request_id)
            raise
        finally:
            count_forwarded(reason, outcome)
        return body

    async def forward(self, call: Call) -> None:
        """Pass a cast to all servers on, as the stock scheduler's own view of hosts depends on it. Raises BusError.

        Of several frontends each does so: the casts are of a kind that may come twice.
        """
        if self.unavailable_reason:  # casts come one after the other, and would wait for it one after the other
            raise BusUnavailable(self.unavailable_reason)
        await self._transport.publish(Outgoing(exchange=f"{TOPIC}_fanout", routing_key="", body=call.body))

    async def _forwarded(self, call: Call, acknowledge_first: Callable[[], Awaitable[None]]) -> bytes:
        if call.message_id in self._waiting:
            raise ForwardFailed("a call of the same id is under way")
        if len(self._waiting) >= self._in_flight:
            raise ForwardFailed(f"{self._in_flight} calls wait for it already")
        awaited = self._waiting[call.message_id] = _Awaited()
        try:
            await acknowledge_first()  # first: what waits here holds no slot of the topic
            return await self._answer_to(call, awaited)
        finally:
            del self._waiting[call.message_id]

    async def _answer_to(self, call: Call, awaited: _Awaited) -> bytes:
        message = Outgoing(
            exchange=self._exchange,
            routing_key=TOPIC,
            body=readdressed(call.body, self._reply_queue),
            mandatory=True,
            # Taken later than it is waited for here, it would claim a host for nobody.
            expiration_s=call.answer_timeout_s,
        )
        try:
            await self._publish(message, call, awaited)
            while awaited.answer is None:
                if awaited.abandoned:
                    raise ForwardFailed(STOPS)
                async with asyncio.timeout(call.timeout_s or None):
                    await awaited.sign.wait()
                awaited.sign.clear()
            return awaited.answer
        except BusError as error:
            raise ForwardFailed(f"{error.code}: {error}") from error
        except TimeoutError as error:
            raise ForwardFailed(f"silent for {call.timeout_s} s") from error

    async def _publish(self, message: Outgoing, call: Call, awaited: _Awaited) -> None:
        """To the fallback's broker, which is waited for as the frontend's own is: as long as the client waits for a
        sign of life. Raises ForwardFailed; BusError: the broker refuses it. Without its word a scheduler may have it,
        and claim.
        """
        until_s, reason = self._clock.monotonic() + (call.answer_timeout_s or CALL_LIMIT_S), STOPS
        while not awaited.abandoned and self._clock.monotonic() < until_s:
            reason = self.unavailable_reason
            try:
                if not reason:
                    return await self._transport.publish(message)
            except NotSent as error:
                reason = str(error)
            except BusUnavailable as error:
                log.warning("nova.call_uncertain", code=error.code, reason=str(error), request_id=call.request_id)
                return None
            await self._clock.sleep(POLL_S)
        raise ForwardFailed(reason)

    def _on_reply(self, delivery: Delivery) -> None:
        delivery.ack()
        try:
            reply = parse_reply(delivery.body)
        except CallUnreadable as error:
            log.warning("nova.call_unreadable", reason=str(error), queue=self._reply_queue)
            return
        awaited = self._waiting.get(reply.message_id)
        if awaited is not None:
            awaited.answer = reply.body if reply.ending else awaited.answer
            awaited.sign.set()


def count_forwarded(reason: str, outcome: str) -> None:
    """Count a call that berth has not decided. The reason is a label: words of the code, and never so many that a
    registry is filled.
    """
    if len(_COUNTED) < MAX_REASONS and REASON.fullmatch(reason):
        _COUNTED.add(reason)
    FORWARDED.labels(reason if reason in _COUNTED else OTHER, outcome).inc()

"""Requests with a deadline. Each bus has one private reply queue, and replies are matched by their correlation id."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

import structlog

from bus import metrics
from bus.clock import Clock, new_uuid
from bus.contracts.base import Message, Meta, Refusal
from bus.contracts.catalogue import BY_TYPE, REPLIES, destination
from bus.faults import DatabaseUnavailable, Fault, RequestRefused, RequestTimeout, RequestUnconfirmed
from bus.port import Delivery, Transport
from bus.publishing import Mode, Publisher, Waiter
from bus.retrying import WITHIN_A_REQUEST, Retrying
from bus.tracing.context import CURRENT, Span, SpanKind, traceparent_of
from bus.wire import REPLY_PREFIX, TOO_LARGE, Codec, Malformed, pack, tag

log = structlog.get_logger("bus.requests")

R = TypeVar("R", bound=Message)

# Replies are taken from the queue as they arrive; this bounds how many the broker sends ahead.
REPLY_PREFETCH = 1_000


class _PendingRequests:
    """The requests of one call, and the reply to each. spans: the spans of sampled traces, by the index of the
    request.
    """

    def __init__(self, count: int, spans: Mapping[int, Span]) -> None:
        self.spans = spans
        self.answers: list[Message | None] = [None] * count
        self.missing = count
        self.unconfirmed = False  # published, and the broker has not answered yet
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer(self, index: int, reply: Message) -> None:
        if self.answers[index] is None:
            self.answers[index] = reply
            self.missing -= 1
            if not self.missing and not self.done.done():
                self.done.set_result(None)


class Requester:
    """Sends requests and waits for their replies. It opens the reply queue at the first request."""

    def __init__(
        self, bus: str, transport: Transport, publisher: Publisher, *, process: str, clock: Clock, rng: random.Random
    ) -> None:
        self._transport = transport
        self._publisher = publisher
        self._clock = clock
        self._rng = rng
        self._queue = f"{REPLY_PREFIX}{process}.{rng.getrandbits(48):012x}"
        self._codec = Codec(REPLIES, queue=self._queue)
        self._pending: dict[str, tuple[_PendingRequests, int]] = {}
        self._opening = asyncio.Lock()
        self._is_open = False
        self._retrying = Retrying(WITHIN_A_REQUEST, clock, rng)
        self._late = metrics.LATE_REPLIES.labels(bus)
        self._timeouts = metrics.REPLY_TIMEOUTS.labels(bus)

    async def ask(
        self, messages: Sequence[Message], reply: type[R], *, timeout_s: float, causes: Sequence[str]
    ) -> list[R | Fault]:
        """Send all requests at once. Returns the reply or the fault of each, in order."""
        if not messages:
            return []
        pending = _PendingRequests(len(messages), _spans(messages, causes))
        ids = [new_uuid(self._rng) for _ in messages]
        for index, one in enumerate(ids):
            self._pending[one] = (pending, index)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await self._open(limit)
                if not limit.expired():
                    await self._exchange(messages, causes, ids, pending, timeout_s)
        except TimeoutError:
            pass  # what is missing is counted below
        finally:
            for one in ids:
                self._pending.pop(one, None)
            for index, span in pending.spans.items():
                span.end("" if pending.answers[index] is not None else RequestTimeout.code)
        if missing := pending.missing:
            self._timeouts.inc(missing)
        return [_result(answer, reply, timeout_s, pending) for answer in pending.answers]

    async def _open(self, limit: asyncio.Timeout) -> None:
        """aiormq calls asyncio.wait_for, which on Python 3.11 may return, or raise the error of what it waited for,
        instead of being cancelled. A time-out cancels once: what began after that would wait for ever. Raises
        TimeoutError.
        """

        async def consume_replies() -> None:
            if limit.expired():
                raise TimeoutError
            await self._consume_replies()

        async with self._opening:
            if not self._is_open:
                await self._retrying.call(consume_replies)
                self._is_open = True

    async def _consume_replies(self) -> None:
        await self._transport.declare_reply_queue(self._queue)
        await self._transport.consume(self._queue, self._on_delivery, prefetch=REPLY_PREFETCH)

    async def _exchange(
        self,
        messages: Sequence[Message],
        causes: Sequence[str],
        ids: Sequence[str],
        pending: _PendingRequests,
        timeout_s: float,
    ) -> None:
        """Publish the requests until the broker accepts them: the other side may be starting, and requests may be
        repeated.
        """
        deadline = self._clock.time() + timeout_s

        async def publish_unanswered() -> None:
            waiter = Waiter()
            for index, message in enumerate(messages):
                if pending.answers[index] is None:
                    await self._publisher.wait_for_capacity()
                    self._post(message, causes[index], ids[index], deadline, waiter, pending.spans.get(index))
            pending.unconfirmed = True
            try:
                await waiter.wait()
            except Exception:
                pending.unconfirmed = False  # the broker has answered, or is unavailable
                raise
            pending.unconfirmed = False
            await pending.done

        def log_failure(error: BaseException, _failures: int) -> None:
            code = getattr(error, "code", "")
            log.info("bus.request_again", code=code, pending=len(ids), cause=causes[0])

        await self._retrying.call(publish_unanswered, on_failure=log_failure)

    def _post(  # noqa: PLR0917  (hot, so no keywords)
        self,
        message: Message,
        cause: str,
        correlation_id: str,
        deadline: float,
        waiter: Waiter,
        span: Span | None,
    ) -> None:
        now = self._clock.time()
        left_s = max(deadline - now, 0.001)
        row = BY_TYPE[type(message)]
        meta = Meta(
            id=correlation_id,
            cause=cause,
            sent_at=now,
            reply_to=self._queue,
            correlation_id=correlation_id,
            patience_s=left_s,
            traceparent=(traceparent_of(cause) or None) if span is None else span.context.header,
        )
        mode = Mode(True, row.persistent, row.mandatory)
        packed = pack(message, meta)
        self._publisher.post(*destination(message), mode, packed, waiter, left_s)

    def _on_delivery(self, delivery: Delivery) -> None:
        for read in self._codec.read(delivery, "reply"):
            found = self._pending.get(read.meta.correlation_id or "")
            if isinstance(read, Malformed):
                log.warning("bus.bad_reply", code=read.code, reason=read.reason)
                if found is not None and read.code == TOO_LARGE:
                    found[0].answer(found[1], Refusal(code=read.code, reason=read.reason))
            elif found is None:
                self._late.inc()
            else:
                found[0].answer(found[1], read.message)
        delivery.ack()


def _spans(messages: Sequence[Message], causes: Sequence[str]) -> dict[int, Span]:
    """Begin a span for each request of a sampled trace, by index. It lasts from the publication to the reply."""
    scope = CURRENT.get()
    if scope is None:
        return {}
    spans: dict[int, Span] = {}
    for index, (message, cause) in enumerate(zip(messages, causes, strict=True)):
        parent = scope.of(cause)
        if parent is not None:
            spans[index] = scope.start(f"request {tag(type(message))}", parent=parent, kind=SpanKind.CLIENT)
    return spans


def _result(answer: Message | None, reply: type[R], timeout_s: float, pending: _PendingRequests) -> R | Fault:
    if answer is None and pending.unconfirmed:
        return RequestUnconfirmed(f"the broker confirmed nothing within {timeout_s} s")
    if answer is None:
        return RequestTimeout(f"no reply within {timeout_s} s")
    if isinstance(answer, reply):
        return answer
    if isinstance(answer, Refusal) and answer.code == DatabaseUnavailable.code:
        return DatabaseUnavailable(answer.reason)  # the other side's database is unavailable
    if isinstance(answer, Refusal):
        return RequestRefused(answer.reason, code=answer.code)
    return RequestRefused(f"the reply is a {type(answer).__name__}, not a {reply.__name__}", code="reply.unexpected")

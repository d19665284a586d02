"""The interface of one bus: publish, request, declare. `bus.consuming.consumer` consumes.

Requests have a deadline. Each bus has one private reply queue, and replies are matched by their correlation id.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import structlog

from bus import metrics
from bus.bus_ownership import enter
from bus.clock import Clock, new_uuid
from bus.codec import TOO_LARGE, Codec, Malformed, may_batch, pack, tag
from bus.consuming.stall_watch import StallWatch
from bus.contracts.base import DatabaseMark, Message, Meta, Refusal
from bus.contracts.catalogue import BY_TYPE, REPLIES, MessageRow, destination
from bus.contracts.queues import BY_QUEUE, EVENTS, REPLY, Where, is_project_bus
from bus.contracts.replies import REPLY_PREFIX
from bus.faults import DatabaseUnavailable, Fault, RequestRefused, RequestTimeout, RequestUnconfirmed
from bus.publishing import BusLimits, Confirmation, Mode, Publisher, Waiter
from bus.retrying import QUEUE_LOCKED, WITHIN_A_REQUEST, Retrying
from bus.rights import sample_keys
from bus.topology import fill_in
from bus.tracing.context import CURRENT, Span, SpanKind, traceparent_of
from bus.tracing.tracer import Tracer
from bus.transport import Delivery, QueueLocked, Transport

R = TypeVar("R", bound=Message)

log = structlog.get_logger("bus")

API = "api"  # the name of the bus that clients use; every other bus is a cell's


class Bus:
    """One bus: "api", or a cell's name."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        process: str,
        clock: Clock,
        rng: random.Random,
        limits: BusLimits = BusLimits(),  # noqa: B008  (frozen)
        tracer: Tracer | None = None,
        stall_watch: StallWatch | None = None,
    ) -> None:
        self.name = name
        self.transport = transport
        self.process = process
        self.clock = clock
        self.rng = rng
        self.limits = limits
        self.tracer = tracer
        self.stall_watch = StallWatch() if stall_watch is None else stall_watch
        self._in_cell = name != API and not is_project_bus(name)
        self.publisher = Publisher(name, transport, limits, clock, others_listen=not self._in_cell)
        self._mark: Callable[[], DatabaseMark] = DatabaseMark
        self._requester = Requester(
            name,
            transport,
            self.publisher,
            process=process,
            clock=clock,
            rng=rng,
        )
        self._modes: dict[type[Message], tuple[MessageRow, Mode]] = {}
        self._owner: tuple[str, Callable[[], str], Callable[[], str]] | None = None
        self._publishes: list[tuple[str, str]] = []

    @property
    def unavailable_reason(self) -> str:
        """The reason why nothing can be published on the bus now; "" when it can."""
        if not self.transport.connected:
            return "not connected"
        blocked = self.transport.blocked
        return f"the broker takes no messages: {blocked}" if blocked else ""

    def belongs_to(self, role: str, database_id: Callable[[], str], place: Callable[[], str] = lambda: "") -> None:
        """Have `open` enter the bus only if it belongs to this deployment or to none yet. Called on opening:
        database_id returns the identity of the role's database, place that of the database that all roles above cells
        share ("": none).
        """
        self._owner = role, database_id, place

    def publishes_as(self, package: str) -> None:
        """Have `open` check that this user may publish what a worker of this package does."""
        self._publishes = sample_keys(package, Where.API if self.name == API else Where.CELL)

    def states_mark(self, mark: Callable[[], DatabaseMark]) -> None:
        """Have each message state the incarnation of the cell's database by which this process decides, and what of it
        is certainly on disk.
        """
        self._mark = self._requester.mark = mark

    async def open(self) -> None:
        """Connect and declare the shared topology of the bus. Raises BusOwnedByAnother."""
        await self.transport.open()
        await self.declare_shared()

    async def declare_shared(self) -> None:
        """Declare the shared topology of the bus, once its owner is known. Raises BusOwnedByAnother."""
        if self._owner is not None:
            role, database_id, place = self._owner
            await enter(self.transport, self.name, role, database_id(), place())
        await self.transport.declare_shared()
        if self._publishes:
            await self.transport.check_publishes(self._publishes)

    async def close(self) -> None:
        """Send the gathered messages within the time bound, and close the connection."""
        await self.publisher.close()
        await self.transport.close()

    async def publish(self, message: Message, *, cause: str = "", correlation_id: str | None = None) -> None:
        """Publish one message; returns after the broker's confirm.

        Raises BusUnavailable (it may have arrived), Unroutable or PublishRefused.
        """
        waiter = Waiter()
        await self.publisher.wait_for_capacity()
        self._post(message, cause, waiter, correlation_id=correlation_id)
        await waiter.wait()

    async def publish_all(self, messages: Sequence[tuple[Message, str]], traceparents: Sequence[str] = ()) -> None:
        """Publish many messages, each with its cause. Raises the first error, after all are settled. traceparents: the
        trace of each ("": none); by default that of the message that is being handled.
        """
        waiter = Waiter()
        await self._post_each(messages, lambda: waiter, traceparents)
        await waiter.wait()

    def post_all(
        self,
        messages: Sequence[tuple[Message, str]],
        traceparents: Sequence[str],
        waiters: Sequence[Waiter],
        incarnations: Sequence[int | None] = (),
    ) -> None:
        """Publish many messages, each with its cause, its trace ("": none) and the waiter that is told of its confirm.
        The caller bounds them. incarnations: by which each was decided; by default it is that of now.
        """
        stated = incarnations or [None] * len(messages)
        for (message, cause), traceparent, waiter, number in zip(messages, traceparents, waiters, stated, strict=True):
            self._post(message, cause, waiter, traceparent=traceparent, incarnation=number)

    async def publish_each(
        self, messages: Sequence[tuple[Message, str]], *, within_s: float | None = None
    ) -> list[BaseException | None]:
        """Publish many messages, each with its cause, and return an outcome for each: None when it was confirmed.

        within_s: what the broker has not confirmed by then has RequestUnconfirmed; it may have arrived.
        """
        waiter = Waiter()
        places: list[Confirmation] = []

        def next_place() -> Confirmation:
            places.append(Confirmation(waiter))
            return places[-1]

        try:
            async with asyncio.timeout(within_s):
                await self._post_each(messages, next_place)
                await waiter.wait()
        except TimeoutError:
            late = RequestUnconfirmed(f"the broker confirmed nothing of this within {within_s:.1f} s")
            known = [late if place.pending else place.error for place in places]
            return [*known, *[late] * (len(messages) - len(known))]
        return [place.error for place in places]

    async def _post_each(
        self, messages: Sequence[tuple[Message, str]], waiter: Callable[[], Waiter], traceparents: Sequence[str] = ()
    ) -> None:
        for number, (message, cause) in enumerate(messages):
            if self.publisher.waiting >= self.limits.waiting:
                await self.publisher.wait_for_capacity()
            traceparent = traceparents[number] if traceparents else None
            self._post(message, cause, waiter(), traceparent=traceparent)

    async def request(self, message: Message, reply: type[R], *, timeout_s: float, cause: str = "") -> R:
        """Send a request and wait for the reply. Raises RequestTimeout or RequestRefused (with the other side's
        code).
        """
        answer = (await self._requester.ask([message], reply, timeout_s=timeout_s, causes=[cause]))[0]
        if isinstance(answer, Fault):
            raise answer
        return answer

    async def request_all(
        self,
        messages: Sequence[Message],
        reply: type[R],
        *,
        timeout_s: float,
        causes: Sequence[str],
        to: Callable[[Message], tuple[str, str]] | None = None,
        on_confirmed: Callable[[], None] | None = None,
        remaining_s: Sequence[float] = (),
    ) -> list[R | Fault]:
        """Send many requests in one round trip; the reply or the fault of each, in order. With `to` (exchange, routing
        key; not the messages' own) the broker is asked once: what it refuses raises as `publish` does. on_confirmed:
        called when it has all. remaining_s: how long each is of use; by default until the time-out.
        """
        return await self._requester.ask(
            messages,
            reply,
            timeout_s=timeout_s,
            causes=causes,
            to=to,
            on_confirmed=on_confirmed,
            remaining_s=remaining_s,
        )

    def post_reply(self, meta: Meta, reply: Message, waiter: Waiter) -> None:
        """Send a reply to the requester of a message with this metadata, which wants one."""
        assert meta.reply_to is not None
        answer = Meta(
            id=new_uuid(self.rng), cause=meta.cause, sent_at=self.clock.time(), correlation_id=meta.correlation_id
        )
        mode = Mode(meta.reply_to.startswith(REPLY_PREFIX) and may_batch(answer), False, False)
        self.publisher.post(REPLY, meta.reply_to, mode, pack(reply, answer), waiter)

    async def declare(self, queue: str, **fill: str) -> str:
        """Declare a queue of the catalogue by its row's name, and return its real name. `{process}` is this bus's own
        process unless another is given. While another connection, perhaps a former one of this process, has a private
        queue of this name, the call is retried. Raises QueueLocked when the policy QUEUE_LOCKED ends.
        """

        def log_failure(error: BaseException, _failures: int) -> None:
            log.warning("bus.queue_locked", bus=self.name, queue=queue, reason=str(error))

        return await Retrying(QUEUE_LOCKED, self.clock).call(
            lambda: self.declare_now(queue, **fill),
            lambda error: isinstance(error, QueueLocked),
            on_failure=log_failure,
        )

    async def declare_now(self, queue: str, **fill: str) -> str:
        """Declare a queue as `declare` does. Raises QueueLocked at once."""
        row = BY_QUEUE[queue]
        name, bindings = fill_in(row, {"process": self.process, **fill})
        await self.transport.declare_queue(row, name, bindings)
        return name

    def _post(
        self,
        message: Message,
        cause: str,
        waiter: Waiter,
        *,
        correlation_id: str | None = None,
        traceparent: str | None = None,
        incarnation: int | None = None,
    ) -> None:
        row, mode = self._row(type(message))
        mark = self._mark()
        if incarnation is not None and incarnation != mark.database_incarnation:
            mark = DatabaseMark(incarnation)
        meta = Meta(
            id=new_uuid(self.rng),
            cause=cause,
            sent_at=self.clock.time(),
            correlation_id=correlation_id,
            traceparent=(traceparent_of(cause) if traceparent is None else traceparent) or None,
            database_incarnation=mark.database_incarnation,
            sent_sequences=mark.sent_sequences,
        )
        packed = pack(message, meta)
        exchange, key = (row.exchange, row.cell_key) if row.cell_key and self._in_cell else destination(message)
        self.publisher.post(exchange, key, mode, packed, waiter)

    def _row(self, kind: type[Message]) -> tuple[MessageRow, Mode]:
        found = self._modes.get(kind)
        if found is None:
            row = BY_TYPE[kind]
            # A project's clients read one JSON object in each message.
            alone = is_project_bus(self.name) and row.public and row.exchange == EVENTS
            mode = Mode(not alone, row.persistent, row.mandatory, row.max_batch)
            found = self._modes[kind] = row, mode
        return found


# Replies are taken from the queue as they arrive; this bounds how many the broker sends ahead.
REPLY_PREFETCH = 1_000


class _PendingRequests:
    """The requests of one call, and the reply to each."""

    def __init__(self, count: int, spans: Mapping[int, Span], mark: DatabaseMark) -> None:
        self.spans = spans  # the spans of sampled traces, by the index of the request
        self.answers: list[Message | None] = [None] * count
        self.missing = count
        self.confirms = Waiter()  # those that the broker has not answered yet
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.mark = mark  # of when they were decided, however often they are published

    def answer(self, index: int, reply: Message) -> None:
        if self.answers[index] is None:
            self.answers[index] = reply
            self.missing -= 1
            if not self.missing and not self.done.done():
                self.done.set_result(None)


class Requester:
    """Sends requests and waits for their replies. It opens the reply queue at the first request. mark(): what they
    state of the cell's database.
    """

    def __init__(
        self,
        bus: str,
        transport: Transport,
        publisher: Publisher,
        *,
        process: str,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._transport = transport
        self._publisher = publisher
        self._clock = clock
        self._rng = rng
        self.mark: Callable[[], DatabaseMark] = DatabaseMark
        self._queue = f"{REPLY_PREFIX}{process}.{rng.getrandbits(48):012x}"
        self._codec = Codec(REPLIES, queue=self._queue)
        self._pending: dict[str, tuple[_PendingRequests, int]] = {}
        self._opening = asyncio.Lock()
        self._is_open = False
        self._retrying = Retrying(WITHIN_A_REQUEST, clock, rng)
        self._late = metrics.LATE_REPLIES.labels(bus)
        self._timeouts = metrics.REPLY_TIMEOUTS.labels(bus)

    async def ask(
        self,
        messages: Sequence[Message],
        reply: type[R],
        *,
        timeout_s: float,
        causes: Sequence[str],
        to: Callable[[Message], tuple[str, str]] | None = None,
        on_confirmed: Callable[[], None] | None = None,
        remaining_s: Sequence[float] = (),
    ) -> list[R | Fault]:
        """Send all requests at once. Returns the reply or the fault of each, in order."""
        if not messages:
            return []
        pending = _PendingRequests(len(messages), _spans(messages, causes), self.mark())
        ids = [new_uuid(self._rng) for _ in messages]
        now = asyncio.get_running_loop().time()
        untils = [now + one for one in remaining_s or [timeout_s] * len(messages)]
        for index, one in enumerate(ids):
            self._pending[one] = (pending, index)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await self._open(limit)
                if not limit.expired():
                    await self._exchange(messages, causes, ids, pending, untils, to=to, on_confirmed=on_confirmed)
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
        untils: Sequence[float],
        *,
        to: Callable[[Message], tuple[str, str]] | None,
        on_confirmed: Callable[[], None] | None,
    ) -> None:
        """Publish the requests until the broker accepts them: the other side may be starting, and requests may be
        repeated. untils: the time of the event loop until which each is of use.
        """

        async def publish_unanswered() -> None:
            waiter = pending.confirms = Waiter()
            for index, message in enumerate(messages):
                if pending.answers[index] is None:
                    await self._publisher.wait_for_capacity()
                    where = (to or destination)(message)
                    self._post(message, where, causes[index], ids[index], untils[index], waiter, pending, index)
            await waiter.wait()
            if on_confirmed is not None:
                on_confirmed()
            await pending.done

        def log_failure(error: BaseException, _failures: int) -> None:
            code = getattr(error, "code", "")
            log.info("bus.request_again", code=code, pending=len(ids), cause=causes[0])

        if to is None:
            await self._retrying.call(publish_unanswered, on_failure=log_failure)
        else:
            await publish_unanswered()

    def _post(  # noqa: PLR0917  (hot, so no keywords)
        self,
        message: Message,
        where: tuple[str, str],
        cause: str,
        correlation_id: str,
        until: float,
        waiter: Waiter,
        pending: _PendingRequests,
        index: int,
    ) -> None:
        row, span = BY_TYPE[type(message)], pending.spans.get(index)
        meta = Meta(
            id=correlation_id,
            cause=cause,
            sent_at=self._clock.time(),
            reply_to=self._queue,
            correlation_id=correlation_id,
            traceparent=(traceparent_of(cause) or None) if span is None else span.context.header,
            database_incarnation=pending.mark.database_incarnation,
            sent_sequences=pending.mark.sent_sequences,
        )
        mode = Mode(True, row.persistent, row.mandatory)
        self._publisher.post(*where, mode, pack(message, meta), waiter, None if until == math.inf else until)

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
        parent = scope.for_cause(cause)
        if parent is not None:
            spans[index] = scope.start(f"request {tag(type(message))}", parent=parent, kind=SpanKind.CLIENT)
    return spans


def _result(answer: Message | None, reply: type[R], timeout_s: float, pending: _PendingRequests) -> R | Fault:
    if answer is None and pending.confirms.pending:
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

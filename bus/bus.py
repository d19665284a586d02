"""The interface of one bus: publish, request, declare. `bus.consuming.consumer` consumes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import structlog
from msgspec import structs

from bus.clock import Clock, new_uuid
from bus.consuming.stall_watch import StallWatch
from bus.contracts.base import Message, Meta
from bus.contracts.catalogue import BY_TYPE, MessageRow, destination
from bus.contracts.queues import BY_QUEUE, EVENTS
from bus.faults import Fault, RequestUnconfirmed
from bus.owner import enter
from bus.port import QueueLocked, Transport
from bus.publishing import BATCHED, BusLimits, Confirmation, Mode, Publisher, Waiter
from bus.requests import Requester
from bus.retrying import QUEUE_LOCKED, Retrying
from bus.topology import fill_in
from bus.tracing.context import traceparent_of
from bus.tracing.tracer import Tracer
from bus.wire import Packed, pack

__all__ = ["API", "Bus", "BusLimits"]

R = TypeVar("R", bound=Message)

# A call with more messages than this publishes batches, also of messages that otherwise leave under a key of their own.
FEW = 2

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
    ) -> None:
        self.name = name
        self.transport = transport
        self.process = process
        self.clock = clock
        self.rng = rng
        self.limits = limits
        self.tracer = tracer
        self.stall_watch = StallWatch()
        self.publisher = Publisher(name, transport, limits)
        self._requester = Requester(name, transport, self.publisher, process=process, clock=clock, rng=rng)
        self._modes: dict[type[Message], tuple[MessageRow, Mode]] = {}
        self._owner: tuple[str, Callable[[], str], Callable[[], str]] | None = None

    @property
    def unavailable_reason(self) -> str:
        """The reason why nothing can be published on the bus now; "" when it can."""
        if not self.transport.connected:
            return "not connected"
        blocked = self.transport.blocked
        return f"the broker takes no messages: {blocked}" if blocked else ""

    def belongs_to(self, role: str, deployment: Callable[[], str], place: Callable[[], str] = lambda: "") -> None:
        """Have `open` enter the bus only if the bus belongs to this deployment or to none yet.

        deployment: a function that returns the identity of the role's database. place: one that returns the identity of
        the database that all roles above cells share ("": none). Both are called when the bus is opened.
        """
        self._owner = role, deployment, place

    async def open(self) -> None:
        """Connect and declare the shared topology of the bus. Raises BusOwnedByAnother."""
        await self.transport.open()
        await self.declare_shared()

    async def declare_shared(self) -> None:
        """Declare the shared topology of the bus, once its owner is known. Raises BusOwnedByAnother."""
        if self._owner is not None:
            role, deployment, place = self._owner
            await enter(self.transport, self.name, role, deployment(), place())
        await self.transport.declare_shared()

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
        self._post(message, cause, waiter, few=True, correlation_id=correlation_id)
        await waiter.wait()

    async def publish_all(self, messages: Sequence[tuple[Message, str]], traceparents: Sequence[str] = ()) -> None:
        """Publish many messages, each with its cause. Raises the first error, after all are settled.

        traceparents: the trace of each message, where the caller knows it ("": none). By default it is the trace of the
        message that is being handled.
        """
        waiter = Waiter()
        await self._post_each(messages, lambda: waiter, traceparents)
        await waiter.wait()

    def post_all(
        self,
        messages: Sequence[tuple[Message, str]],
        traceparents: Sequence[str],
        waiters: Sequence[Waiter],
        line: Callable[[Message], Hashable],
    ) -> None:
        """Publish many messages, each with its cause, its trace ("": none) and the waiter that is told of its confirm.
        The caller bounds them. line: the line in which a message waits; the lines have their turns.
        """
        few = len(messages) <= FEW
        for (message, cause), traceparent, waiter in zip(messages, traceparents, waiters, strict=True):
            self._post(message, cause, waiter, few=few, traceparent=traceparent, line=line(message))

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
        few = len(messages) <= FEW
        for number, (message, cause) in enumerate(messages):
            if self.publisher.waiting >= self.limits.waiting:
                await self.publisher.wait_for_capacity()
            traceparent = traceparents[number] if traceparents else None
            self._post(message, cause, waiter(), few=few, traceparent=traceparent)

    async def request(self, message: Message, reply: type[R], *, timeout_s: float, cause: str = "") -> R:
        """Send a request and wait for the reply. Raises RequestTimeout or RequestRefused (with the other side's
        code).
        """
        answer = (await self._requester.ask([message], reply, timeout_s=timeout_s, causes=[cause]))[0]
        if isinstance(answer, Fault):
            raise answer
        return answer

    async def request_all(
        self, messages: Sequence[Message], reply: type[R], *, timeout_s: float, causes: Sequence[str]
    ) -> list[R | Fault]:
        """Send many requests in one round trip. Returns the reply or the fault of each, in order."""
        return await self._requester.ask(messages, reply, timeout_s=timeout_s, causes=causes)

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
        """Declare a queue as `declare` does, and those of its lanes. Raises QueueLocked at once."""
        names = []
        for row in BY_QUEUE[queue].queues:
            name, bindings = fill_in(row, {"process": self.process, **fill})
            await self.transport.declare_queue(row, name, bindings)
            names.append(name)
        return names[0]

    def _post(
        self,
        message: Message,
        cause: str,
        waiter: Waiter,
        *,
        few: bool,
        correlation_id: str | None = None,
        traceparent: str | None = None,
        line: Hashable = None,
    ) -> None:
        row, mode = self._row(type(message))
        meta = Meta(
            id=new_uuid(self.rng),
            cause=cause,
            sent_at=self.clock.time(),
            correlation_id=correlation_id,
            traceparent=(traceparent_of(cause) if traceparent is None else traceparent) or None,
        )
        packed = pack(message, meta)
        # On a bus where only berth's processes listen, the message leaves in batches only, of all states and projects
        # together.
        in_batches = row.batch_key and not mode.probes_first
        exchange, key = (row.exchange, row.batch_key) if in_batches else destination(message)
        has_two_keys = mode.probes_first
        if has_two_keys and few and self.publisher.post_once(exchange, key, mode, row.batch_key, packed, waiter):
            return
        self.publisher.post(exchange, key, mode, packed, waiter, line=line)
        if has_two_keys:
            # A new id, because the id distinguishes the broker's answers on this connection.
            again = Packed(packed.body, structs.replace(meta, id=f"{meta.id}.b"), packed.type)
            self.publisher.post(exchange, row.batch_key, BATCHED, again, waiter, line=line)

    def _row(self, kind: type[Message]) -> tuple[MessageRow, Mode]:
        found = self._modes.get(kind)
        if found is None:
            row = BY_TYPE[kind]
            # Other programs may listen to public events on the API bus, and read one JSON object in each message.
            # Without listeners this costs almost nothing.
            alone = row.public and row.exchange == EVENTS and self.name == API
            probes_first = alone and bool(row.batch_key)
            found = self._modes[kind] = (
                row,
                Mode(not alone, row.persistent, row.mandatory, probes_first, row.max_batch),
            )
        return found

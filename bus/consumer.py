"""The consumer: gathers what has arrived, asks the handler, and alone acknowledges.

What happens to one message: Done, and it is acknowledged; Retry, and it waits in the queue's retry queue, after the
last delay it is a dead letter; Refuse, and the asker gets a Refusal, or it is a dead letter. A transient fault makes
the consumer wait and call again with the same batch: an outage uses up no retries. A handler that crashes is called
again item by item, so that only the item that crashes it is given up. So it is when an invariant breaks, but then the
consumer settles what it has in hand, takes nothing more and ends (docs/decisions/broken-invariants.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter as Counted
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import structlog
import tenacity
from msgspec import structs
from prometheus_client import Counter

from bus import metrics
from bus.burial import bury
from bus.clock import new_uuid
from bus.contracts.base import MAX_REASON, Message, Meta, Refusal
from bus.contracts.catalogue import BY_QUEUE, DEAD, QueueKind, taken_by
from bus.dead_letters import CODE, DIED_AT, EXCHANGE, QUEUE, REASON
from bus.faults import BrokenInvariant, Forbidden, Transient
from bus.link import Mode, Waiter
from bus.outcome import Done, Handler, Outcome, Received, Refuse, Retry
from bus.pace import Pace
from bus.port import BusError, BusForbidden, Delivery, Outgoing, Subscription, retry_queue
from bus.wire import JSON, ORIGINAL_KEY, REPLY_PREFIX, Codec, Malformed, Packed, headers_of, pack

if TYPE_CHECKING:
    from bus.bus import Bus

__all__ = ["Consumer", "Malformed"]

log = structlog.get_logger("bus.consumer")

T = TypeVar("T")

# Waits between calls while something we depend on is away: from the first, doubled, to the longest; halved at random.
FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 5.0
# A consumer that has waited this long for what it depends on says that it is not ready.
NOT_READY_AFTER_S = 10.0

CRASHED = "handler.crashed"


class _Parcel:
    """One delivery, which may hold many messages; it is acknowledged when the last of them is settled."""

    __slots__ = ("delivery", "open")

    def __init__(self, delivery: Delivery, count: int) -> None:
        self.delivery = delivery
        self.open = count

    def settle(self) -> None:
        self.open -= 1
        if not self.open:
            self.delivery.ack()


class _Item:
    """One message in hand. until: by this process's own clock, nobody waits for its answer any more; None: never so."""

    __slots__ = ("parcel", "received", "until")

    def __init__(self, parcel: _Parcel, received: Received | Malformed, until: float | None = None) -> None:
        self.parcel = parcel
        self.received = received
        self.until = until


class Consumer:
    """Consumes one queue. start(), then run() as a side task, then drain()."""

    def __init__(
        self,
        bus: Bus,
        queue: str,
        handler: Handler,
        *,
        max_batch: int,
        concurrency: int,
        prefetch: int,
        on_malformed: Callable[[Malformed], Sequence[Message]] | None,
        fill: Mapping[str, str],
        pace: Pace | None,
    ) -> None:
        self.queue = queue
        self._pace = pace
        self._bus = bus
        self._row = BY_QUEUE[queue]
        self._handler = handler
        self._max_batch = max_batch
        self._concurrency = concurrency
        self._prefetch = prefetch
        self._on_malformed = on_malformed
        self._fill = dict(fill)
        self._codec = Codec([row.message for row in taken_by(queue)], queue=queue)
        self._deliveries: deque[Delivery] = deque()
        self._items: deque[_Item] = deque()
        self._in_hand: set[_Parcel] = set()
        self._arrived = asyncio.Event()
        self._draining = False
        self._broken: BrokenInvariant | None = None
        self._settling = 0
        self._subscription: Subscription | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] | None = None
        self._stalled_since: dict[int, float] = {}
        self._consumed = metrics.CONSUMED.labels(bus.name, queue)
        self._outcomes: dict[str, Counter] = {}

    @property
    def ready(self) -> bool:
        """Whether it gets on with its work (for /readyz)."""
        if self._subscription is None or not self._bus.transport.connected:
            return False
        oldest = min(self._stalled_since.values(), default=None)
        return oldest is None or self._bus.clock.monotonic() - oldest < NOT_READY_AFTER_S

    @property
    def started(self) -> bool:
        """Whether it consumes."""
        return self._subscription is not None

    async def start(self) -> None:
        """Declare the queue and begin. When the bus goes away meanwhile it may be called again."""
        self.queue = await self._bus.declare(self._row.name, **self._fill)
        self._subscription = await self._bus.transport.consume(self.queue, self._on_delivery, prefetch=self._prefetch)
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        self._workers = [loop.create_task(self._work(number)) for number in range(self._concurrency)]
        for worker in self._workers:
            worker.add_done_callback(self._worker_ended)

    async def run(self) -> None:
        """Until drained; raises what ended the consumer otherwise. Cancelled, it stops where it stands."""
        assert self._failed is not None, "start() first"
        try:
            await asyncio.shield(self._failed)
        finally:
            # No worker outlives its service; what it had in hand goes back when the connection closes.
            for worker in self._workers:
                worker.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)

    async def drain(self, grace_s: float) -> None:
        """Take nothing more, finish what is in hand within the grace time, and give back the rest."""
        self._draining = True
        if self._subscription is not None:
            await self._subscription.cancel()
        while self._deliveries:
            self._deliveries.popleft().nack(requeue=True)
        self._arrived.set()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=max(grace_s, 0.0))
            for worker in late:
                worker.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)
        for parcel in self._in_hand:
            if parcel.open:
                parcel.delivery.nack(requeue=True)
        self._in_hand.clear()
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(None)

    def _on_delivery(self, delivery: Delivery) -> None:
        if self._draining or self._broken is not None:
            delivery.nack(requeue=True)
            return
        self._deliveries.append(delivery)
        self._arrived.set()

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        if self._failed is None or self._failed.done() or worker.cancelled():
            return
        error = worker.exception()
        if error is not None:
            self._failed.set_exception(error)
            self._failed.exception()  # whoever drains without running must not be warned about it

    async def _work(self, number: int) -> None:
        while True:
            await self._turn()
            items = self._take()
            if items:
                self._settling += 1
                try:
                    await self._settle_all(items, number)
                finally:
                    self._settling -= 1
            elif self._broken is not None:
                if self._settling:
                    return  # the last one says why
                raise self._broken
            elif self._draining:
                return
            else:
                self._arrived.clear()
                await self._arrived.wait()

    async def _turn(self) -> None:
        """Until it is time for a batch; what has come by then goes into it."""
        if self._pace is None or not self._waiting() or self._draining or self._broken is not None:
            return
        left_s = self._pace.wait_s(self._bus.clock.monotonic())
        if left_s > 0:
            await self._bus.clock.sleep(left_s)

    def _waiting(self) -> int:
        """At least so many messages have arrived that nobody has in hand."""
        return len(self._deliveries) + len(self._items)

    def _take(self) -> list[_Item]:
        """At most `max_batch` messages of what has arrived."""
        while self._deliveries and len(self._items) < self._max_batch and not self._draining:
            self._open(self._deliveries.popleft())
        count = min(len(self._items), self._max_batch)
        if count and self._pace is not None:
            self._pace.taken(self._bus.clock.monotonic())
        return [self._items.popleft() for _ in range(count)]

    def _open(self, delivery: Delivery) -> None:
        reads = self._codec.read(delivery, new_uuid(self._bus.rng))
        self._consumed.inc(len(reads))
        if not reads:
            delivery.ack()
            return
        parcel = _Parcel(delivery, len(reads))
        self._in_hand.add(parcel)
        for read in reads:
            if isinstance(read, Malformed):
                self._items.append(_Item(parcel, read))
                continue
            received = Received(read.message, read.meta, self._bus.name, self.queue, delivery.redelivered)
            self._items.append(_Item(parcel, received, self._until(read.meta)))

    def _until(self, meta: Meta) -> float | None:
        """When an answer is of no use any more, on our clock.

        Counted from now: two machines' clocks may be minutes apart, and the broker drops what waits there for too long.
        Only a publisher who does not say when it sent is taken by its own clock.
        """
        if meta.deadline is None:
            return None
        left_s = meta.deadline - (meta.sent_at or self._bus.clock.time())
        return self._bus.clock.monotonic() + left_s

    async def _settle_all(self, items: list[_Item], number: int) -> None:
        now = self._bus.clock.monotonic()
        sound: list[_Item] = []
        for item in items:
            if isinstance(item.received, Malformed):
                await self._insist(number, lambda item=item: self._refuse_malformed(item))  # type: ignore[misc]
                self._close(item)
                self._count(item.received.code, 1)
            elif item.until is not None and item.until < now:
                self._close(item)
                self._count("expired", 1)
            else:
                sound.append(item)
        if sound:
            outcomes = await self._ask(sound, number)
            if self._pace is not None:
                done = self._bus.clock.monotonic()
                self._pace.took(done - now, len(sound), done, more=self._waiting() >= self._max_batch)
            await self._insist(number, lambda: self._act(sound, outcomes))
            for item in sound:
                self._close(item)
            for kind, times in Counted(map(type, outcomes)).items():
                self._count(kind.__name__.lower(), times)

    def _close(self, item: _Item) -> None:
        item.parcel.settle()
        if not item.parcel.open:
            self._in_hand.discard(item.parcel)

    def _count(self, outcome: str, times: int) -> None:
        counter = self._outcomes.get(outcome)
        if counter is None:
            counter = self._outcomes[outcome] = metrics.OUTCOMES.labels(self._bus.name, self._row.name, outcome)
        counter.inc(times)

    async def _ask(self, items: Sequence[_Item], number: int) -> Sequence[Outcome]:
        """The handler's answers; a crash is narrowed down to the items that cause it."""
        received = [item.received for item in items if isinstance(item.received, Received)]
        last = max((math.inf if item.until is None else item.until) for item in items)
        try:
            return await self._insist(number, lambda: self._call(received, last))
        except (BusForbidden, Forbidden):
            raise  # not the message's fault: it goes back with the connection, and the process says why it ends
        except BrokenInvariant as broken:
            await self._end_with(broken)
            log.error("consumer.broken", queue=self.queue, code=broken.code, reason=broken.reason, items=len(items))
            if len(items) == 1:
                metrics.BROKEN.labels(self._bus.name, self._row.name).inc()
                return [Refuse(broken.code, broken.reason[:MAX_REASON])]
        except Exception as error:  # whatever a handler raises must not stop its neighbours
            if len(items) == 1:
                log.exception("consumer.crashed", queue=self.queue, cause=received[0].meta.cause)
                return [Refuse(CRASHED, f"{type(error).__name__}: {error}"[:MAX_REASON])]
            log.warning("consumer.split", queue=self.queue, items=len(items), error=type(error).__name__)
        return [(await self._ask([item], number))[0] for item in items]

    async def _end_with(self, broken: BrokenInvariant) -> None:
        """Take nothing more; the workers end with it once nothing is left in hand.

        What is in hand is settled first: given back, it would have used up deliveries for another message's fault.
        """
        if self._broken is None:
            self._broken = broken
            self._arrived.set()
            if self._subscription is not None:
                with contextlib.suppress(BusError):  # away: then nothing more comes, either
                    await self._subscription.cancel()

    async def _call(self, received: Sequence[Received], until: float) -> Sequence[Outcome]:
        if until < self._bus.clock.monotonic():
            return [Done()] * len(received)  # what it depends on was away for so long that nobody waits any more
        outcomes = await self._handler(received)
        if len(outcomes) != len(received):
            raise TypeError(f"the handler gave {len(outcomes)} outcomes for {len(received)} messages")
        return outcomes

    async def _insist(self, number: int, call: Callable[[], Awaitable[T]]) -> T:
        """Call until what we depend on is there; anything but a passing fault is raised."""
        try:
            return await call()
        except (Transient, BusError) as error:
            if isinstance(error, BusForbidden):
                raise
            self._stalled(number, error)
        clock, rng = self._bus.clock, self._bus.rng

        async def once() -> T:  # tenacity awaits only what it can see to be a coroutine function
            return await call()

        def wait(state: tenacity.RetryCallState) -> float:
            longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(state.attempt_number, 30))
            return longest * (0.5 + rng.random() / 2)

        again = tenacity.AsyncRetrying(
            sleep=clock.sleep,
            wait=wait,
            retry=tenacity.retry_if_exception(_passes),
            before_sleep=lambda state: self._stalled(number, state.outcome.exception() if state.outcome else None),
            reraise=True,
        )
        await clock.sleep(FIRST_WAIT_S * (0.5 + rng.random() / 2))
        try:
            return await again(once)
        finally:
            self._stalled_since.pop(number, None)

    def _stalled(self, number: int, error: BaseException | None) -> None:
        code = str(getattr(error, "code", ""))
        if number not in self._stalled_since:
            self._stalled_since[number] = self._bus.clock.monotonic()
            log.warning("consumer.waits", queue=self.queue, code=code, reason=str(error))
        metrics.STALLS.labels(self._bus.name, self._row.name, code).inc()

    async def _act(self, items: Sequence[_Item], outcomes: Sequence[Outcome]) -> None:
        """Send what the outcomes ask for. Returns when it is confirmed, so that the messages may be acknowledged."""
        moves, replies = Waiter(), Waiter()
        buried: list[Outgoing] = []
        for item, outcome in zip(items, outcomes, strict=True):
            received = item.received
            if isinstance(received, Malformed):
                continue
            if isinstance(outcome, Done) and (outcome.reply is None or received.meta.reply_to is None):
                continue
            await self._bus.publisher.room()
            if isinstance(outcome, Done):
                self._reply(received.meta, outcome.reply, replies)
            elif isinstance(outcome, Retry) and 0 <= received.meta.attempt < len(self._row.retry_s):
                self._retry(received, moves)
            else:
                buried += self._give_up(item, outcome.code, outcome.reason, replies)
        self._bus.publisher.pump()
        await self._sent(moves, replies, buried)

    async def _sent(self, moves: Waiter, replies: Waiter, buried: Sequence[Outgoing]) -> None:
        for letter in buried:
            await bury(self._bus, self.queue, letter)
        try:
            await replies.wait()
        except BusError as error:
            # A reply that cannot be delivered is the asker's timeout; it must not hold up the queue.
            log.info("consumer.reply_lost", queue=self.queue, code=error.code)
        await moves.wait()

    def _reply(self, meta: Meta, reply: Message | None, waiter: Waiter) -> None:
        if meta.reply_to is None or reply is None:
            return
        bus = self._bus
        answer = Meta(
            id=new_uuid(bus.rng), cause=meta.cause, sent_at=bus.clock.time(), correlation_id=meta.correlation_id
        )
        mode = Mode(meta.reply_to.startswith(REPLY_PREFIX), False, False)
        bus.publisher.post("", meta.reply_to, mode, pack(reply, answer), waiter)

    def _retry(self, received: Received, waiter: Waiter) -> None:
        attempt = received.meta.attempt
        meta = structs.replace(received.meta, attempt=attempt + 1)
        mode = Mode(True, True, True)
        key = retry_queue(self.queue, attempt)
        self._bus.publisher.post("", key, mode, pack(received.message, meta), waiter)

    def _give_up(self, item: _Item, code: str, reason: str, replies: Waiter) -> list[Outgoing]:
        """A Refusal to whoever asked, else a dead letter; a queue without one loses it, and says so."""
        received = item.received
        if received.meta.reply_to is not None:
            self._reply(received.meta, Refusal(code=code, reason=reason[:MAX_REASON]), replies)
            return []
        if self._row.kind is not QueueKind.DURABLE:
            log.warning("consumer.dropped", queue=self.queue, code=code, reason=reason, cause=received.meta.cause)
            return []
        return [self._dead_letter(item, code, reason)]

    def _dead_letter(self, item: _Item, code: str, reason: str) -> Outgoing:
        received, delivery = item.received, item.parcel.delivery
        packed = (
            Packed(received.body, received.meta, delivery.type or "")
            if isinstance(received, Malformed)
            else pack(received.message, received.meta)
        )
        log.warning("consumer.dead_letter", queue=self.queue, code=code, reason=reason, cause=received.meta.cause)
        return Outgoing(
            exchange=DEAD,
            routing_key=self.queue,
            body=packed.body,
            content_type=JSON,
            message_id=received.meta.id,
            type=packed.type,
            correlation_id=received.meta.correlation_id,
            reply_to=received.meta.reply_to,
            headers={
                **headers_of(received.meta),
                CODE: code,
                REASON: reason[:MAX_REASON],
                QUEUE: self.queue,
                EXCHANGE: delivery.exchange,
                ORIGINAL_KEY: delivery.routing_key,
                DIED_AT: int(self._bus.clock.time() * 1000),
            },
            mandatory=True,
        )

    async def _refuse_malformed(self, item: _Item) -> None:
        """Answer what could not be read: on the reply queue, as the owner says, or as a dead letter."""
        bad = item.received
        assert isinstance(bad, Malformed)
        answers = self._answers(structs.replace(bad, queue=self.queue)) if bad.meta.reply_to is None else ()
        if answers:
            await self._bus.publish_all([(answer, bad.meta.cause or bad.meta.id) for answer in answers])
            return
        moves, replies = Waiter(), Waiter()
        buried = self._give_up(item, bad.code, bad.reason, replies)
        self._bus.publisher.pump()
        await self._sent(moves, replies, buried)

    def _answers(self, bad: Malformed) -> Sequence[Message]:
        """What the owner of the queue says to it; a crash there makes it a dead letter, not a dead worker."""
        try:
            return self._on_malformed(bad) if self._on_malformed is not None else ()
        except Exception:  # the input is hostile
            log.exception("consumer.on_malformed_crashed", queue=self.queue, code=bad.code)
            return ()


def _passes(error: BaseException) -> bool:
    """Whether waiting helps."""
    return isinstance(error, Transient | BusError) and not isinstance(error, BusForbidden)

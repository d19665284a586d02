"""The consumer gathers deliveries into batches, calls the handler, and alone acknowledges the messages, by the
handler's outcomes (`bus.consuming.outcome`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter as Counted
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from prometheus_client import Counter

from bus import metrics
from bus.batcher import Batcher
from bus.bus import Bus
from bus.clock import new_uuid
from bus.codec import DROPPED, Codec, Malformed, Read
from bus.consuming.in_flight import (
    LAST_DELIVERIES,
    MAX_OPENED_BYTES,
    MAX_SKIPPED,
    MAX_UNREADABLE,
    POISON_RETRY_S,
    POISON_SUSPECTED_FROM,
    ArrivedDelivery,
    BatchInterval,
    BufferedBytes,
    InFlightDelivery,
    InFlightMessage,
    may_be_started,
    remaining_s,
    useful_until,
)
from bus.consuming.outcome import DeadLetterNow, Done, Handler, Outcome, Received, Refuse, RetryWhenAvailable, endless_s
from bus.consuming.outcome_handling import OutcomeHandler, RetryUntilAvailable
from bus.contracts.base import MAX_REASON, Message, Meta
from bus.contracts.catalogue import queues_taking
from bus.contracts.queues import BY_QUEUE, ON_RECORD, QueueKind
from bus.faults import BrokenInvariant, Forbidden, Transient
from bus.published_key import dead_letter_code_of
from bus.transport import BusError, BusForbidden, Delivery

log = structlog.get_logger("bus.consuming.consumer")

# A consumer is not ready after it has waited this long for a server that it depends on.
NOT_READY_AFTER_S = 10.0

CRASHED = "handler.crashed"

# The bound of remembered messages that were lost with their connection before a handler had them. The oldest are
# dropped first, and their deliveries count as tries again.
MAX_UNHANDLED = 10_000

# The bound of a drain's wait until the effects of handled messages are on disk. Messages whose effects are not are
# requeued.
FLUSHED_TIMEOUT_S = 2.0


class Consumer:
    """Consumes a queue of the catalogue, which it declares. start(), then run() as a side task, then drain()."""

    # After a transient fault the handler is called again with the same batch, after RetryWhenAvailable with the
    # messages that have it: an outage uses up no retries. After a crash it is called with each message alone, so that
    # only the one that crashes it is a dead letter; also after a broken invariant, and then the consumer ends
    # (docs/decisions/0010-broken-invariants.md).

    def __init__(
        self,
        bus: Bus,
        queue: str,
        handler: Handler,
        *,
        max_batch: int = 64,
        concurrency: int = 2,
        prefetch: int = 256,
        on_malformed: Callable[[Malformed], Sequence[Message]] | None = None,
        paced: bool = False,  # it waits between two batches, so that the next one gathers (`bus.consuming.in_flight`)
        **fill: str,
    ) -> None:
        # fill: the placeholders in the name of the row, as in `Bus.declare`
        self.queue = queue
        self.stall_watch = bus.stall_watch
        self._batch_interval = BatchInterval() if paced else None
        self._bus = bus
        self._row = BY_QUEUE[queue]
        self._handler = handler
        self._max_batch = max_batch
        self._prefetch = prefetch
        self._until_available = RetryUntilAvailable(bus, queue)
        self._outcome_handler = OutcomeHandler(bus, self._row, self._until_available, on_malformed)
        self._fill = fill
        self._codec = Codec([row.message for row in queues_taking(queue)], queue=queue)
        self._buffered = BufferedBytes(pauses=not self._row.single_active)
        self._arrived: deque[ArrivedDelivery | InFlightMessage] = deque()  # of an opened delivery its messages
        self._suspected_poison: list[InFlightMessage] = []
        self._skipped = 0
        self._unhandled: dict[str, int] = {}  # {message id: how often it was lost before a handler had it}
        self._requeued: dict[str, float] = {}  # {message id: when it was given back after a stall}
        self._poison_retry_at = -math.inf  # the monotonic time from which a suspect may be taken
        self._in_flight_deliveries: set[InFlightDelivery] = set()
        self._unflushed: set[asyncio.Future[None]] = set()  # flushes that handled messages wait for
        self._draining = False
        self._broken: BrokenInvariant | None = None
        self._batcher: Batcher[InFlightMessage] = Batcher(
            self._take,
            self._handle_all,
            waiting=lambda: self._waiting() if self.started else 0,  # nothing before it has started
            is_full=self._is_full,
            most=concurrency,
            pause_s=self._pause_s,
            enough=lambda: self._draining or self._broken is not None,
            sleep=bus.clock.sleep,
            on_idle=self._end_if_broken,
            on_error=self._fail,
        )
        self._failed: asyncio.Future[None] | None = None
        self._consumed = metrics.CONSUMED.labels(bus.name, queue)
        self._outcomes: dict[str, Counter] = {}

    @property
    def ready(self) -> bool:
        """Whether the consumer makes progress (for /readyz)."""
        is_connected = self.started and self._bus.transport.connected
        return is_connected and self._until_available.waited_s < NOT_READY_AFTER_S

    @property
    def started(self) -> bool:
        """Whether the consumer is started."""
        return self._failed is not None

    @property
    def in_flight(self) -> int:
        """The number of deliveries that were taken and are not settled."""
        return len(self._in_flight_deliveries)

    async def start(self) -> None:
        """Declare the queue and begin to consume. It may be called again when the bus was lost meanwhile."""
        self.queue = await self._bus.declare(self._row.name, **self._fill)
        self._outcome_handler.queue = self._until_available.queue = self.queue
        if not self._draining and self._buffered.subscription is None:
            transport = self._bus.transport
            self._buffered.subscription = await transport.consume(
                self.queue, self._on_delivery, prefetch=self._prefetch
            )
        self._failed = asyncio.get_running_loop().create_future()
        if self._draining:  # it was drained meanwhile, and what has begun since then ends
            await self._requeue_arrived()
            self._failed.set_result(None)
        self._batcher.wake()

    async def run(self) -> None:
        """Run until drained. Raises the fault that ended the consumer. A cancellation stops it at once."""
        assert self._failed is not None, "start() first"
        try:
            await asyncio.shield(self._failed)
        except GeneratorExit:  # collected after its loop has closed: no batch is handled any more
            raise
        except BaseException:  # unacknowledged messages return to the queue when the connection closes
            await self._batcher.close()
            raise
        await self._batcher.close()

    async def drain(self, grace_s: float) -> None:
        """Take no further messages, finish the batches in progress within the grace time (seconds), and requeue the
        rest.
        """
        self._draining = True
        await self._requeue_arrived()
        self._batcher.wake()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(grace_s, 0.0)):
                await self._batcher.idle()
        await self._batcher.close()
        if self._unflushed:
            await asyncio.wait(self._unflushed, timeout=min(max(grace_s, 0.0), FLUSHED_TIMEOUT_S))
        for in_flight in self._in_flight_deliveries:
            if in_flight.open:
                in_flight.delivery.nack(requeue=True)
        self._in_flight_deliveries.clear()
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(None)

    async def _end_subscription(self) -> None:
        if self._buffered.subscription is not None:
            await self._buffered.subscription.cancel()

    async def _requeue_arrived(self) -> None:
        """End the subscription, and only then requeue what has arrived: a message that is given back before is
        delivered here again, and again, until the broker gives it up (`delivery_limit`).
        """
        await self._end_subscription()
        arrived, self._arrived = self._arrived, deque()
        for one in arrived:
            if isinstance(one, ArrivedDelivery):
                one.delivery.nack(requeue=True)
            else:
                self._arrived.append(one)

    def _on_delivery(self, delivery: Delivery) -> None:
        now = self._bus.clock.monotonic()
        requeued_at = self._requeued.get(delivery.message_id or "", -math.inf)
        since = max(self._bus.stall_watch.waiting_since(now), requeued_at)
        self._buffered.add(delivery)
        self._arrived.append(ArrivedDelivery(delivery, now, since))
        if self._is_suspected_poison(self._tries(delivery)):
            self._poison_retry_at = now + POISON_RETRY_S
        self._batcher.wake()

    def _fail(self, error: Exception) -> None:
        """End the consumer: `run` raises the error."""
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # a caller that drains without running must not be warned about it

    def _end_if_broken(self) -> None:
        if self._broken is not None:
            self._fail(self._broken)

    def _is_full(self) -> bool:
        return self._waiting() >= self._max_batch

    def _pause_s(self) -> float:
        """How long (seconds) to wait for the next batch. Messages that have arrived by then are part of it."""
        now = self._bus.clock.monotonic()
        interval_s = self._batch_interval.wait_s(now) if self._batch_interval is not None else 0.0
        return max(interval_s, self._poison_retry_at - now)

    def _waiting(self) -> int:
        """Return a lower bound of the messages that have arrived and are in no batch."""
        return len(self._arrived) + len(self._suspected_poison)

    def _take(self) -> list[InFlightMessage]:
        """Take as many as count as `max_batch` requests. Suspects are taken separately, and later than others."""
        # When a message ends its process, those delivered with it are delivered again, too, in the same order each
        # time, until the broker gives up all of them. Taken one by one in a random order, each process settles half of
        # the rest, until that message is the only one left.
        self._drop_lost()
        taken = [] if self._suspected_poison and self._skipped >= MAX_SKIPPED else self._take_first()
        if self._suspected_poison:
            self._skipped += 1
            if not taken:
                self._skipped = 0
                return self._take_suspected_poison()
        if taken and self._batch_interval is not None:
            self._batch_interval.start_batch(self._bus.clock.monotonic())
        return taken

    def _take_first(self) -> list[InFlightMessage]:
        """Take what has arrived, in its order. A delivery is opened when its messages are next."""
        taken: list[InFlightMessage] = []
        requests = opened_bytes = unreadable = 0
        while requests < self._max_batch and self._arrived:
            first = self._arrived[0]
            if isinstance(first, ArrivedDelivery):
                if self._draining or (taken and (opened_bytes >= MAX_OPENED_BYTES or unreadable >= MAX_UNREADABLE)):
                    break
                self._arrived.popleft()
                opened = self._open(first)
                opened_bytes += len(first.delivery.body)
                unreadable += sum(isinstance(one.received, Malformed) for one in opened)
                self._arrived.extendleft(reversed(opened))
                continue
            requests += first.weight
            if taken and requests > self._max_batch:
                break
            self._arrived.popleft()
            taken.append(first)
        return taken

    def _take_suspected_poison(self) -> list[InFlightMessage]:
        """Take one suspect at random, with as many others of its delivery as are to be tried together."""
        first = self._suspected_poison.pop(self._bus.rng.randrange(len(self._suspected_poison)))
        most = min(first.in_flight.part, self._max_batch)
        taken = [first, *[one for one in self._suspected_poison if one.in_flight is first.in_flight][: most - 1]]
        ids = {id(one) for one in taken}
        self._suspected_poison = [one for one in self._suspected_poison if id(one) not in ids]
        return taken

    def _drop_lost(self) -> None:
        """Drop the first messages of a lost connection: they are delivered again, and their acknowledgements lost."""
        # If they were handled, each would be processed once for each loss, while their replacements are lost in turn,
        # until the broker gives up all of them. No handler had them, so the delivery does not count as a try. A queue
        # that was deleted with its connection does not deliver again.
        if self._row.kind is not QueueKind.DURABLE and not self._row.single_active:
            return
        lost: dict[InFlightDelivery, None] = {}
        while self._arrived and self._arrived[0].is_lost:
            arrival = self._arrived.popleft()
            if isinstance(arrival, ArrivedDelivery):
                self._buffered.remove(arrival.delivery)
                self._count_unhandled(arrival.delivery)
            else:
                lost[arrival.in_flight] = None
                self._close(arrival)
        if self._suspected_poison and self._suspected_poison[0].is_lost:
            for item in self._suspected_poison:
                if item.is_lost:
                    lost[item.in_flight] = None
                    self._close(item)
            self._suspected_poison = [item for item in self._suspected_poison if not item.is_lost]
        for in_flight in lost:
            if not in_flight.open:  # otherwise a handler has another message of this delivery
                self._count_unhandled(in_flight.delivery)

    def _count_unhandled(self, delivery: Delivery) -> None:
        name = delivery.message_id
        if name:
            self._unhandled[name] = self._unhandled.pop(name, 0) + 1
            if len(self._unhandled) > MAX_UNHANDLED:
                del self._unhandled[next(iter(self._unhandled))]

    def _tries(self, delivery: Delivery) -> int:
        """Return the number of earlier deliveries that may have been tries: not those that this process lost before a
        handler had them.
        """
        return max(0, delivery.delivery_count - self._unhandled.get(delivery.message_id or "", 0))

    def _is_suspected_poison(self, tries: int) -> bool:
        """Whether a message of so many tries is handled apart. A queue with one consumer at a time keeps its order."""
        return tries >= POISON_SUSPECTED_FROM and not self._row.single_active

    def _open(self, arrival: ArrivedDelivery) -> list[InFlightMessage]:
        """Read a delivery. Returns its messages, unless they are suspects."""
        delivery = arrival.delivery
        reads = self._codec.read(delivery, new_uuid(self._bus.rng))
        # One that was read at once has not waited.
        if arrival.since < arrival.at and self._requeue(arrival, reads):
            self._buffered.remove(delivery)
            return []
        self._consumed.inc(len(reads))
        if not reads:
            self._count(DROPPED, 1)
            self._buffered.remove(delivery)
            delivery.ack()
            return []
        in_flight = InFlightDelivery(delivery, self._buffered, len(reads), self._tries(delivery))
        self._in_flight_deliveries.add(in_flight)
        opened: list[InFlightMessage] = []
        at_delivery_limit = in_flight.tries > self._row.delivery_limit - LAST_DELIVERIES
        dead_letter_code = dead_letter_code_of(delivery) if self._row.takes_dead_letters else ""
        for read in reads:
            if isinstance(read, Malformed):
                opened.append(InFlightMessage(in_flight, read))
                continue
            until = self._until(delivery, read.meta, arrival.since)
            received = Received(
                read.message,
                read.meta,
                self._bus.name,
                self.queue,
                delivery.redelivered,
                at_delivery_limit,
                dead_letter_code,
                endless_s if until is None else partial(remaining_s, until, self._bus.clock),
            )
            # Without a requester, who knows that it may be carried out and repeats it, its handler announces an end.
            goes_on = read.meta.reply_to is None or may_be_started(self._row.name, delivery, read.meta)
            opened.append(InFlightMessage(in_flight, received, None if goes_on else until))
        if self._is_suspected_poison(in_flight.tries):
            self._suspected_poison += opened
            return []
        return opened

    def _until(self, delivery: Delivery, meta: Meta, since: float) -> float | None:
        return None if self._row.takes_dead_letters else useful_until(delivery, meta, since, self._bus.clock)

    def _requeue(self, arrival: ArrivedDelivery, reads: Sequence[Read | Malformed]) -> bool:
        """Requeue a delivery whose requester may have given it up while this process stood still."""
        # The broker has counted the whole time (except of retried copies): it drops the delivery, or delivers it again.
        # The wait counts from the return then, so a delivery is given back once for each stall.
        now, delivery = self._bus.clock.monotonic(), arrival.delivery
        ends = [
            self._until(delivery, read.meta, arrival.since)
            for read in reads
            if isinstance(read, Read) and not (read.meta.retries or may_be_started(self._row.name, delivery, read.meta))
        ]
        if not (name := delivery.message_id) or all(until is None or until >= now for until in ends):
            return False
        self._requeued[name] = now
        if len(self._requeued) > MAX_UNHANDLED:
            del self._requeued[next(iter(self._requeued))]
        log.warning("consumer.requeued", queue=self.queue, items=len(reads), may_have_waited_s=now - arrival.since)
        delivery.nack(requeue=True)
        self._count_unhandled(delivery)
        return True

    async def _handle_all(self, items: Sequence[InFlightMessage]) -> None:
        malformed = [item for item in items if isinstance(item.received, Malformed)]
        if malformed:
            await self._refuse_all(malformed)
        sound = self._awaited([item for item in items if not isinstance(item.received, Malformed)])
        await self._until_available.call(partial(self._handle, sound))

    def _awaited(self, items: list[InFlightMessage]) -> list[InFlightMessage]:
        """Those of these whose requesters wait for an answer; the others are dropped."""
        now = self._bus.clock.monotonic()
        late = [item for item in items if item.until is not None and item.until < now]
        for item in late:
            self._close(item)
        self._count("expired", len(late))
        return [item for item in items if item not in late]

    async def _handle(self, waiting: list[InFlightMessage]) -> None:
        """Call the handler and carry out its outcomes. Raises Transient for messages that wait; only these are left."""
        # A request already sent on goes on without its requester where its record ends it: if it has expired since and
        # its record commits only now, nothing else would end it, not even the loss of its connection.
        if self._row.name not in ON_RECORD:
            waiting[:] = self._awaited(waiting)
        if not waiting:
            return
        began, asked = self._bus.clock.monotonic(), list(waiting)
        outcomes = await self._call_handler(asked)
        waits = [one for one in outcomes if isinstance(one, RetryWhenAvailable)]
        if self._batch_interval is not None and not waits:
            done = self._bus.clock.monotonic()
            self._batch_interval.end_batch(done - began, len(asked), done, more=self._is_full())
        waiting[:] = [item for item, one in zip(asked, outcomes, strict=True) if isinstance(one, RetryWhenAvailable)]
        if waits:
            for item in waiting:
                item.mark_redelivered()
            asked = [item for item, one in zip(asked, outcomes, strict=True) if not isinstance(one, RetryWhenAvailable)]
            outcomes = [one for one in outcomes if not isinstance(one, RetryWhenAvailable)]
        await self._apply_outcomes(asked, outcomes)
        self._close_all(asked, outcomes)
        for label, times in Counted(one.label for one in outcomes).items():
            self._count(label, times)
        if waits:
            raise Transient(waits[0].reason, code=waits[0].code)

    async def _refuse_all(self, malformed: Sequence[InFlightMessage]) -> None:
        bad = [item.received for item in malformed if isinstance(item.received, Malformed)]
        await self._apply_outcomes(malformed, [Refuse(one.code, one.reason) for one in bad])
        for item, one in zip(malformed, bad, strict=True):
            self._close(item)
            self._count(one.code, 1)

    async def _apply_outcomes(self, items: Sequence[InFlightMessage], outcomes: Sequence[Outcome]) -> None:
        """Carry out the outcomes. What can neither be carried out nor parked, the broker parks as it came."""
        for item, error in (await self._outcome_handler.apply(items, outcomes)).items():
            log.error("consumer.cannot_park", queue=self.queue, exc_info=error)
            item.in_flight.rejected = True

    def _close_all(self, items: Sequence[InFlightMessage], outcomes: Sequence[Outcome]) -> None:
        """Acknowledge the handled messages, after the flush where their effects must be on disk first."""
        unflushed: dict[asyncio.Future[None], list[InFlightMessage]] = {}
        for item, outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, Done) and outcome.after is not None:
                unflushed.setdefault(outcome.after, []).append(item)
            else:
                self._close(item)
        for after, waiting in unflushed.items():
            self._unflushed.add(after)
            after.add_done_callback(partial(self._flushed, waiting))

    def _flushed(self, items: Sequence[InFlightMessage], after: asyncio.Future[None]) -> None:
        self._unflushed.discard(after)
        error = asyncio.CancelledError("cancelled") if after.cancelled() else after.exception()
        if error is not None:
            log.warning("consumer.not_flushed", queue=self.queue, items=len(items), reason=str(error))
        for item in items:
            if item.in_flight in self._in_flight_deliveries:  # otherwise a drain has requeued it
                item.in_flight.requeues |= error is not None
                self._close(item)

    def _close(self, item: InFlightMessage) -> None:
        item.in_flight.acknowledge()
        if not item.in_flight.open:
            self._in_flight_deliveries.discard(item.in_flight)
            if self._unhandled and not item.in_flight.delivery.is_lost:
                self._unhandled.pop(item.in_flight.delivery.message_id or "", None)

    def _count(self, outcome: str, times: int) -> None:
        counter = self._outcomes.get(outcome)
        if counter is None:
            counter = self._outcomes[outcome] = metrics.OUTCOMES.labels(self._bus.name, self._row.name, outcome)
        counter.inc(times)

    async def _call_handler(self, items: Sequence[InFlightMessage]) -> Sequence[Outcome]:
        """Call the handler and return its outcomes: RetryWhenAvailable for all after a transient fault. After a crash
        each item is tried alone, to find those that cause it.
        """
        received = [item.received for item in items if isinstance(item.received, Received)]
        try:
            return await self._call(received)
        except (BusForbidden, Forbidden):
            # not the message's fault: the message is requeued with the connection, and the process logs why it ends
            raise
        except (BusError, Transient) as unavailable:
            return [RetryWhenAvailable(unavailable.code, str(unavailable))] * len(items)
        except BrokenInvariant as broken:
            await self._end_with(broken)
            log.error("consumer.broken", queue=self.queue, code=broken.code, reason=broken.reason, items=len(items))
            if len(items) == 1:
                metrics.BROKEN.labels(self._bus.name, self._row.name).inc()
                return [DeadLetterNow(broken.code, broken.reason[:MAX_REASON])]
        except Exception as error:  # a handler's error for one item must not stop the others
            if len(items) == 1:
                log.exception("consumer.crashed", queue=self.queue, cause=received[0].meta.cause)
                return [DeadLetterNow(CRASHED, f"{type(error).__name__}: {error}"[:MAX_REASON])]
            log.warning("consumer.split", queue=self.queue, items=len(items), error=type(error).__name__)
        for item in items:
            item.mark_redelivered()
        return [(await self._call_handler([item]))[0] for item in items]

    async def _end_with(self, broken: BrokenInvariant) -> None:
        """Take no further messages, and end with this fault once no delivery is in progress: if batches in progress
        were requeued, another message's fault would use up their deliveries.
        """
        if self._broken is None:
            self._broken = broken
            with contextlib.suppress(BusError):  # the bus is unavailable: then no message arrives, either
                await self._end_subscription()

    async def _call(self, received: Sequence[Received]) -> Sequence[Outcome]:
        tracer = self._bus.tracer
        if tracer is None:
            outcomes = await self._handler(received)
        else:
            with tracer.consuming(self._bus.name, self._row.name, received) as ended:
                outcomes = await self._handler(received)
                ended.extend(outcomes)
        if len(outcomes) != len(received):
            raise TypeError(f"the handler gave {len(outcomes)} outcomes for {len(received)} messages")
        return outcomes

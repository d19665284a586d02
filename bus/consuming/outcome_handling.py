"""Carries out the outcomes of a handler: sends replies, retries, refusals and dead letters, and waits for their
confirms. And what needs no handler: calls that wait for a server, and messages whose key proves nothing.

When the queue of dead letters is full, a letter is dropped and logged, and the consumer goes on. Letters of messages
that other programs have published take no more than their share of it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import structlog
from msgspec import structs

from bus import metrics
from bus.clock import Clock, new_uuid
from bus.consuming.dead_letters import CUT_FROM, DIED_AT, EXCHANGE, REASON
from bus.consuming.in_flight import InFlightMessage, retried
from bus.consuming.outcome import Done, Outcome, Received, Refuse, Retry
from bus.consuming.stall_watch import StallWatch
from bus.contracts.base import MAX_REASON, Message, Meta, Refusal
from bus.contracts.catalogue import DEAD, DEAD_LETTERS, ENDED_BY_LETTER, GIVEN_UP, QueueRow, Where
from bus.key_trust import CODE, ORIGINAL_KEY, UNTRUSTED, letters_code, published_key
from bus.log_interval import LogInterval
from bus.port import BusError, Delivery, Outgoing, PublishRefused, Transport
from bus.publishing import Mode, Publisher, Waiter
from bus.retrying import UNTIL_AVAILABLE, Retrying
from bus.topology import delay_exchange
from bus.tracing.tracer import Tracer
from bus.wire import (
    CAUSE,
    MAX_LETTER_BYTES,
    REPLY_PREFIX,
    Malformed,
    Packed,
    headers_of,
    may_gather,
    pack,
    shown,
)

log = structlog.get_logger("bus.consuming.consumer")

T = TypeVar("T")

CANNOT_APPLY = "outcome.not_applied"

# While the queue of dead letters has as many, no message of a client becomes another one: the room behind is the
# workers' own. With `MAX_LETTER_BYTES` each this is two thirds of the queue's bytes.
MAX_CLIENT_LETTERS = 10_000
# The depth of the queue is read again after this time.
DEPTH_VALID_S = 1.0


class ConsumedBus(Protocol):
    """The bus of a consumer."""

    name: str
    clock: Clock
    rng: random.Random
    transport: Transport
    publisher: Publisher
    tracer: Tracer | None
    stall_watch: StallWatch

    async def declare(self, queue: str, **fill: str) -> str:
        """Declare a queue of the catalogue by its row's name; returns its real name."""

    async def publish_all(self, messages: Sequence[tuple[Message, str]]) -> None:
        """Publish many messages, each with its cause."""


class _Letter(NamedTuple):
    """A dead letter to park. is_clients: its bytes are a client's choice, and nothing but a look of the operator needs
    it: it may be dropped when there are too many.
    """

    message: Outgoing
    is_clients: bool


class OutcomeHandler:
    """Carries out outcomes for one consumer, which acknowledges the messages afterwards."""

    def __init__(
        self, bus: ConsumedBus, row: QueueRow, on_malformed: Callable[[Malformed], Sequence[Message]] | None
    ) -> None:
        self.queue = row.name
        self._row = row
        self._bus = bus
        self._on_malformed = on_malformed
        self._clients = ClientLetters(bus)

    async def apply(self, items: Sequence[InFlightMessage], outcomes: Sequence[Outcome]) -> None:
        """Send the messages of the outcomes. Returns after the confirms, so that the handled messages may be
        acknowledged.
        """
        moves, replies = Waiter(), Waiter()
        parked: list[_Letter] = []
        answers: list[tuple[Message, str]] = []
        for item, outcome in zip(items, outcomes, strict=True):
            received = item.received
            parked += self._letter_of_brokers(item)
            if isinstance(received, Malformed):
                await self._bus.publisher.wait_for_capacity()
                parked += self._refuse_malformed(item, received, answers, replies)
                continue
            if isinstance(outcome, Done) and (outcome.reply is None or received.meta.reply_to is None):
                continue
            await self._bus.publisher.wait_for_capacity()
            if isinstance(outcome, Done):
                self._reply(received.meta, outcome.reply, replies)
            elif isinstance(outcome, Retry) and 0 <= received.meta.attempt < len(self._row.retry_s):
                self._retry(received, moves)
            elif isinstance(outcome, Refuse) or not self._ends_by_letter(received.meta):
                parked += self._refuse(item, outcome.code, outcome.reason, replies)
            else:
                parked += self._dead_letters(item, outcome.code, outcome.reason)
                self._reply(received.meta, Refusal(code=outcome.code, reason=outcome.reason[:MAX_REASON]), replies)
        if answers:
            await self._bus.publish_all(answers)
        await self._park_all(parked)
        await self._sent(moves, replies)

    async def _sent(self, moves: Waiter, replies: Waiter) -> None:
        try:
            await replies.wait()
        except BusError as error:
            # For a reply that cannot be delivered, the requester has a time-out; the reply must not hold up the queue.
            log.info("consumer.reply_lost", queue=self.queue, code=error.code)
        await moves.wait()

    async def _park_all(self, letters: Sequence[_Letter]) -> None:
        """Park letters, all in one round of confirms. Raises the first error, after all are settled."""
        rooms = [not one.is_clients or await self._clients.has_room(self.queue, one.message) for one in letters]
        parking = [
            park(self._bus, self.queue, one.message) for one, has_room in zip(letters, rooms, strict=True) if has_room
        ]
        for error in await asyncio.gather(*parking, return_exceptions=True):
            if error is not None:
                raise error

    def _reply(self, meta: Meta, reply: Message | None, waiter: Waiter) -> None:
        if meta.reply_to is None or reply is None:
            return
        bus = self._bus
        answer = Meta(
            id=new_uuid(bus.rng), cause=meta.cause, sent_at=bus.clock.time(), correlation_id=meta.correlation_id
        )
        mode = Mode(meta.reply_to.startswith(REPLY_PREFIX) and may_gather(answer), False, False)
        bus.publisher.post("", meta.reply_to, mode, pack(reply, answer), waiter)

    def _ends_by_letter(self, meta: Meta) -> bool:
        """Whether the consumer of dead letters announces its end. On a cell's bus what is answered has no event."""
        return self._row.name in ENDED_BY_LETTER and (meta.reply_to is None or self._row.where is not Where.CELL)

    def _retry(self, received: Received, waiter: Waiter) -> None:
        delay_s = self._row.retry_s[received.meta.attempt]
        meta = retried(received, delay_s)
        mode = Mode(may_gather(meta), True, True)
        exchange = delay_exchange(delay_s)
        self._bus.publisher.post(exchange, self.queue, mode, pack(received.message, meta), waiter)

    def _refuse(self, item: InFlightMessage, code: str, reason: str, replies: Waiter) -> list[_Letter]:
        """Send a Refusal to the requester; without one, park a dead letter."""
        if item.received.meta.reply_to is None:
            return self._dead_letters(item, code, reason)
        self._reply(item.received.meta, Refusal(code=code, reason=reason[:MAX_REASON]), replies)
        return []

    def _dead_letters(self, item: InFlightMessage, code: str, reason: str) -> list[_Letter]:
        """The dead letter to park. For a queue without dead letters the message is logged and lost. When the message is
        a copy of a dead letter, the letter itself stays.
        """
        if self._row.has_letters:
            return [self._dead_letter(item, code, reason)]
        log.warning("consumer.dropped", queue=self.queue, code=code, reason=reason, cause=item.received.meta.cause)
        return []

    def _letter_of_brokers(self, item: InFlightMessage) -> list[_Letter]:
        """The letter of a message that the broker gave up of a queue that keeps keys, which is delivered here alone."""
        delivery = item.in_flight.delivery
        if delivery.exchange != GIVEN_UP:
            return []
        return [self._dead_letter(item, letters_code(delivery), "given up by the broker")]

    def _dead_letter(self, item: InFlightMessage, code: str, reason: str) -> _Letter:
        received, delivery = item.received, item.in_flight.delivery
        log.warning("consumer.dead_letter", queue=self.queue, code=code, reason=reason, cause=received.meta.cause)
        packed, size = _packed(received, delivery.type or "")
        headers = {**headers_of(received.meta), EXCHANGE: delivery.exchange}
        given_up = delivery.exchange == GIVEN_UP
        return self._letter(item, packed, size, code, reason, headers=headers, given_up=given_up)

    async def park(self, item: InFlightMessage, error: Exception) -> None:
        """Dead-letter one message whose outcome could not be carried out. Of the message only its body is kept."""
        log.error("consumer.cannot_settle", queue=self.queue, error=type(error).__name__, exc_info=error)
        if self._row.has_letters:
            packed, size = _packed(item.received, "")
            bare = Packed(packed.body, Meta(id=new_uuid(self._bus.rng)), "")
            reason = shown(f"{type(error).__name__}: {error}")
            await self._park_all([self._letter(item, bare, size, CANNOT_APPLY, reason)])

    def _letter(
        self,
        item: InFlightMessage,
        packed: Packed,
        size: int,
        code: str,
        reason: str,
        *,
        headers: Mapping[str, str | int | float] = {},
        given_up: bool = False,
    ) -> _Letter:
        is_clients = self._row.has_clients and (given_up or isinstance(item.received, Malformed))
        body, size = _cut(packed.body, size) if is_clients else (packed.body, size)
        letter = Outgoing(
            exchange=DEAD,
            routing_key=self.queue,
            body=body,
            message_id=packed.meta.id,
            type=packed.type,
            correlation_id=packed.meta.correlation_id,
            headers={
                **headers,
                CODE: code,
                REASON: reason[:MAX_REASON],
                ORIGINAL_KEY: shown(published_key(item.in_flight.delivery, self._row.name) or ""),
                DIED_AT: int(self._bus.clock.time() * 1000),
                **({CUT_FROM: size} if size else {}),
            },
            mandatory=True,
        )
        return _Letter(letter, is_clients)

    def _refuse_malformed(
        self, item: InFlightMessage, bad: Malformed, answers: list[tuple[Message, str]], replies: Waiter
    ) -> list[_Letter]:
        """Answer an unreadable message by the outcome that the queue's owner returns and on its reply queue; otherwise
        dead-letter it.
        """
        found = self._answers(structs.replace(bad, queue=self.queue))
        answers += [(answer, bad.meta.cause or bad.meta.id) for answer in found]
        if not found or bad.meta.reply_to is not None:
            return self._refuse(item, bad.code, bad.reason, replies)
        return []

    def _answers(self, bad: Malformed) -> Sequence[Message]:
        """Return the outcome of the queue's owner. An exception there makes the message a dead letter and does not end
        the worker.
        """
        try:
            return self._on_malformed(bad) if self._on_malformed is not None else ()
        except Exception:  # the input is hostile
            log.exception("consumer.on_malformed_crashed", queue=self.queue, code=bad.code)
            return ()


def _packed(received: Received | Malformed, type_: str) -> tuple[Packed, int]:
    """Return a message as its letter has it, and the size of its body where that is cut already (0: it is not)."""
    if isinstance(received, Malformed):
        return Packed(received.body, received.meta, type_), received.size
    return pack(received.message, received.meta), 0


def _cut(body: bytes, size: int) -> tuple[bytes, int]:
    """Return the part of a body that a letter of a client's message keeps, and the size of the whole (0: all of it)."""
    return (body, size) if len(body) <= MAX_LETTER_BYTES else (body[:MAX_LETTER_BYTES], size or len(body))


class ClientLetters:
    """The letters that one consumer makes of messages of clients, which could be as many as a client can publish."""

    def __init__(self, bus: ConsumedBus) -> None:
        self._bus = bus
        self._room = 0
        self._read_at = -math.inf
        self._log = LogInterval(bus.clock)

    async def has_room(self, queue: str, letter: Outgoing) -> bool:
        """Whether this letter of a queue may be parked. Otherwise it is dropped, counted and logged. Raises
        BusUnavailable.
        """
        now = self._bus.clock.monotonic()
        if now - self._read_at >= DEPTH_VALID_S:
            self._room = MAX_CLIENT_LETTERS - await self._bus.transport.depth(DEAD_LETTERS)
            self._read_at = now
        self._room -= 1
        if self._room >= 0:
            return True
        metrics.DEAD_DROPPED.labels(self._bus.name, queue).inc()
        if dropped := self._log.count():
            log.error("dead_letter.dropped", queue=queue, dropped=dropped, code=letter.headers.get(CODE))
        return False


async def park(bus: ConsumedBus, queue: str, letter: Outgoing) -> None:
    """Park a dead letter of this queue.

    When the queue of dead letters is full, with a million letters, this one is dropped and logged. It does not replace
    an older one, because all workers of a bus park in one queue, and a worker that may take letters out could read
    those of the others. Raises BusUnavailable and the other errors of a publish, except PublishRefused.
    """
    try:
        await bus.transport.publish(letter)
    except PublishRefused:
        metrics.DEAD_DROPPED.labels(bus.name, queue).inc()
        log.error(
            "dead_letter.dropped",
            queue=queue,
            id=shown(letter.message_id),
            type=shown(letter.type),
            code=letter.headers.get(CODE),
            reason=letter.headers.get(REASON),
            cause=letter.headers.get(CAUSE),
        )


class RetryUntilAvailable:
    """The calls of one consumer. Each of its batches may wait for a server that it depends on."""

    def __init__(self, bus: ConsumedBus, row: str) -> None:
        self.queue = row
        self._row = row
        self._bus = bus
        self._since: dict[object, float] = {}  # of each call that waits

    @property
    def waited_s(self) -> float:
        """The time (seconds) that the longest waiting call has waited; 0 when none waits."""
        oldest = min(self._since.values(), default=None)
        return 0.0 if oldest is None else self._bus.clock.monotonic() - oldest

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call the function until no transient fault occurs. Other exceptions are raised."""
        retrying = Retrying(UNTIL_AVAILABLE, self._bus.clock, self._bus.rng)
        call = object()
        try:
            return await retrying.call(function, on_failure=lambda error, _: self._stalled(call, error))
        finally:
            self._since.pop(call, None)

    def _stalled(self, call: object, error: BaseException) -> None:
        code = str(getattr(error, "code", ""))
        if call not in self._since:
            self._since[call] = self._bus.clock.monotonic()
            log.warning("consumer.waits", queue=self.queue, code=code, reason=str(error))
        metrics.STALLS.labels(self._bus.name, self._row, code).inc()


class UntrustedMessages:
    """Drops the untrusted messages of one queue. row: the name of the queue's row."""

    def __init__(self, bus: ConsumedBus, row: str) -> None:
        self._row = row
        self._dropped = metrics.OUTCOMES.labels(bus.name, row, UNTRUSTED)
        self._log = LogInterval(bus.clock)

    def drop(self, delivery: Delivery, lane: str) -> bool:
        """Acknowledge and count a delivery of a lane (the name of its row's queue) if its key is untrusted. False: it
        is not.
        """
        if published_key(delivery, lane) is not None:
            return False
        delivery.ack()
        self._dropped.inc()
        if dropped := self._log.count():
            log.warning(UNTRUSTED, queue=self._row, dropped=dropped, see="docs/operate/permissions.md")
        return True

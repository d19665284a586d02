"""Carries out the outcomes of a handler: sends replies, retries, refusals and dead letters, waits for their confirms,
and repeats calls that wait for a server. When the queue of dead letters is full, a dead letter is dropped and logged,
and the consumer goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import structlog
from msgspec import structs

from bus import metrics
from bus.bus import Bus
from bus.clock import LogInterval, new_uuid
from bus.codec import Malformed, Packed, may_batch, pack, shown
from bus.consuming.dead_letters import DIED_AT, EXCHANGE, REASON, TRUNCATED_FROM
from bus.consuming.in_flight import InFlightMessage, retried
from bus.consuming.outcome import Done, Outcome, Received, Refuse, Retry
from bus.contracts.base import MAX_REASON, Message, Meta, Refusal
from bus.contracts.queues import DEAD, ENDED_BY_DEAD_LETTER, QueueRow, Where
from bus.published_key import CODE, ORIGINAL_KEY, published_key
from bus.publishing import Confirmation, Mode, Waiter
from bus.retrying import UNTIL_AVAILABLE, Retrying, is_transient
from bus.topology import delay_exchange
from bus.transport import BusError, BusForbidden, PublishRefused

log = structlog.get_logger("bus.consuming.consumer")

T = TypeVar("T")

CANNOT_APPLY = "outcome.not_applied"


class OutcomeMessage(NamedTuple):
    """A message that the outcome of an item sends."""

    item: InFlightMessage
    post: Callable[[Waiter], None]  # hands it to the publisher
    is_reply: bool = False  # its requester has a time-out when it is lost
    # a full queue of another program that refuses it holds up nothing: the item becomes a dead letter
    is_event: bool = False
    dead_letter: Packed | None = None  # the dead letter that it is


class OutcomeHandler:
    """Carries out outcomes for one consumer, which acknowledges the messages afterwards."""

    def __init__(
        self,
        bus: Bus,
        row: QueueRow,
        until_available: RetryUntilAvailable,
        on_malformed: Callable[[Malformed], Sequence[Message]] | None,
    ) -> None:
        self.queue = row.name
        self._row = row
        self._bus = bus
        self._until_available = until_available
        self._on_malformed = on_malformed
        self._dead_letter_log, self._lost_log = LogInterval(bus.clock), LogInterval(bus.clock)

    async def apply(
        self, items: Sequence[InFlightMessage], outcomes: Sequence[Outcome]
    ) -> dict[InFlightMessage, Exception]:
        """Send the messages of the outcomes. Returns after the confirms, so that the handled messages may be
        acknowledged. One whose outcome can never be sent has become a dead letter; returned are those for which that
        failed, too, with the errors.
        """
        failed = await self._send_all(zip(items, outcomes, strict=True), self._messages_of)
        for item, error in failed.items():
            cause = item.received.meta.cause
            log.error("consumer.cannot_acknowledge", queue=self.queue, cause=cause, exc_info=error)
        return await self._send_all(failed.items(), self._dead_letters_of_failed) if failed else failed

    async def _send_all(
        self,
        ended: Iterable[tuple[InFlightMessage, T]],
        messages_of: Callable[[InFlightMessage, T], Sequence[OutcomeMessage]],
    ) -> dict[InFlightMessage, Exception]:
        """Send the messages of each item. Returns the items for which that fails; it holds up no others."""
        messages: list[OutcomeMessage] = []
        failed: dict[InFlightMessage, Exception] = {}
        for item, how in ended:
            try:
                messages += messages_of(item, how)
            except Exception as error:  # any error: the message is parked with it as the cause
                failed[item] = error
        refused = await self._send(messages) if messages else []
        if len(refused) > 1:  # they may have been one broker message
            log.warning("consumer.handled_apart", queue=self.queue, items=len(refused))
            refused = [one for message, _ in refused for one in await self._send([message])]
        return failed | {message.item: error for message, error in refused}

    async def _send(self, messages: Sequence[OutcomeMessage]) -> list[tuple[OutcomeMessage, Exception]]:
        """Send messages until each is confirmed; what the broker has confirmed is not sent again. Returns those that
        can never be sent, with the errors. Raises BusForbidden.
        """
        left = messages
        failed: list[tuple[OutcomeMessage, Exception]] = []

        async def send() -> None:
            nonlocal left
            waits: list[tuple[OutcomeMessage, Exception]] = []
            for message, error in await self._send_once(left):
                if isinstance(error, BusForbidden):
                    raise error
                ends = message.is_event and isinstance(error, PublishRefused)
                (waits if is_transient(error) and not ends else failed).append((message, error))
            left = [message for message, _ in waits]
            if waits:
                raise waits[0][1]

        await self._until_available.call(send)
        return failed

    async def _send_once(self, messages: Sequence[OutcomeMessage]) -> list[tuple[OutcomeMessage, Exception]]:
        """Send messages, all in one round of confirms. Returns those that must be sent after all, with the errors."""
        group = Waiter()
        confirms = [Confirmation(group) for _ in messages]
        for message, confirm in zip(messages, confirms, strict=True):
            await self._bus.publisher.wait_for_capacity()
            try:
                message.post(confirm)
            except Exception as error:  # an answer that cannot be encoded
                confirm.fail(error)
        await group.wait()
        errors = [(one, confirm.error) for one, confirm in zip(messages, confirms, strict=True)]
        return [
            (one, error) for one, error in errors if isinstance(error, Exception) and not self._may_be_lost(one, error)
        ]

    def _may_be_lost(self, message: OutcomeMessage, error: Exception) -> bool:
        """Whether a message is not sent again after this error."""
        if message.is_reply and isinstance(error, BusError):  # it must not hold up the queue
            if lost := self._lost_log.count():
                log.info("consumer.reply_lost", queue=self.queue, code=error.code, lost=lost)
            return True
        dead_letter = message.dead_letter
        if dead_letter is None or not isinstance(error, PublishRefused):
            return False
        # The queue of dead letters is full, with a million letters. This one replaces no older one, because all workers
        # of a bus park in one queue, and a worker that may take dead letters out could read those of the others.
        metrics.DEAD_DROPPED.labels(self._bus.name, self.queue).inc()
        log.error(
            "dead_letter.dropped",
            queue=self.queue,
            id=shown(dead_letter.meta.id),
            type=shown(dead_letter.type),
            code=dead_letter.headers.get(CODE),
            reason=dead_letter.headers.get(REASON),
            cause=dead_letter.meta.cause,
        )
        return True

    def _messages_of(self, item: InFlightMessage, outcome: Outcome) -> list[OutcomeMessage]:
        received = item.received
        messages: list[OutcomeMessage] = []
        if isinstance(received, Malformed):
            messages += self._refuse_malformed(item, received)
        elif isinstance(outcome, Done):
            messages += self._reply(item, outcome.reply)
        elif isinstance(outcome, Retry) and 0 <= received.meta.retries < len(self._row.retry_s):
            messages.append(self._retry(item, received))
        elif isinstance(outcome, Refuse) or not self._ends_by_dead_letter(received.meta):
            messages += self._refuse(item, outcome.code, outcome.reason)
        else:
            messages += self._dead_letters(item, outcome.code, outcome.reason)
            messages += self._reply(item, Refusal(code=outcome.code, reason=outcome.reason[:MAX_REASON]))
        return messages

    def _dead_letters_of_failed(self, item: InFlightMessage, error: Exception) -> list[OutcomeMessage]:
        """The dead letter of a message whose outcome could not be carried out. Of the message only its body is kept."""
        if not self._row.has_dead_letters:
            return []
        packed, size = _packed(item.received, "")
        bare = Packed(packed.body, Meta(id=new_uuid(self._bus.rng)), "")
        return [self._pack_dead_letter(item, bare, size, CANNOT_APPLY, shown(f"{type(error).__name__}: {error}"))]

    def _reply(self, item: InFlightMessage, reply: Message | None) -> list[OutcomeMessage]:
        meta = item.received.meta
        if meta.reply_to is None or reply is None:
            return []
        return [OutcomeMessage(item, partial(self._bus.post_reply, meta, reply), is_reply=True)]

    def _ends_by_dead_letter(self, meta: Meta) -> bool:
        """Whether the consumer of dead letters announces its end. On a cell's bus what is answered has no event."""
        return self._row.name in ENDED_BY_DEAD_LETTER and (meta.reply_to is None or self._row.where is not Where.CELL)

    def _retry(self, item: InFlightMessage, received: Received) -> OutcomeMessage:
        delay_s = self._row.retry_s[received.meta.retries]
        meta = retried(received, delay_s)
        # What clients sent leaves alone: each is one that is read, but many together may be more than is read of one.
        mode = Mode(may_batch(meta) and not self._row.from_outside, True, True)
        packed = pack(received.message, meta)
        queue = self._row.retries_to or self.queue
        return OutcomeMessage(item, partial(self._bus.publisher.post, delay_exchange(delay_s), queue, mode, packed))

    def _refuse(self, item: InFlightMessage, code: str, reason: str) -> list[OutcomeMessage]:
        """Send a Refusal to the requester; without one, park a dead letter."""
        if item.received.meta.reply_to is None:
            return self._dead_letters(item, code, reason)
        return self._reply(item, Refusal(code=code, reason=reason[:MAX_REASON]))

    def _dead_letters(self, item: InFlightMessage, code: str, reason: str) -> list[OutcomeMessage]:
        """The dead letter to park. For a queue without dead letters the message is logged and lost. When the message is
        a copy of a dead letter, the dead letter itself stays.
        """
        if self._row.has_dead_letters:
            return [self._dead_letter(item, code, reason)]
        if dropped := self._dead_letter_log.count() if self._row.from_outside else 1:
            cause = item.received.meta.cause
            log.warning("consumer.dropped", queue=self.queue, code=code, reason=reason, cause=cause, dropped=dropped)
        return []

    def _dead_letter(self, item: InFlightMessage, code: str, reason: str) -> OutcomeMessage:
        received, delivery = item.received, item.in_flight.delivery
        packed, size = _packed(received, delivery.type or "")
        packed = structs.replace(
            packed, meta=structs.replace(packed.meta, reply_to=None), headers={EXCHANGE: delivery.exchange}
        )
        dead_letter = self._pack_dead_letter(item, packed, size, code, reason)
        if count := self._dead_letter_log.count() if self._row.from_outside else 1:
            queue, cause = self.queue, received.meta.cause
            log.warning("consumer.dead_letter", queue=queue, code=code, reason=reason, cause=cause, dead_letters=count)
        return dead_letter

    def _pack_dead_letter(
        self, item: InFlightMessage, packed: Packed, size: int, code: str, reason: str
    ) -> OutcomeMessage:
        headers = {
            **packed.headers,
            CODE: code,
            REASON: reason[:MAX_REASON],
            ORIGINAL_KEY: shown(published_key(item.in_flight.delivery) or ""),
            DIED_AT: int(self._bus.clock.time() * 1000),
            **({TRUNCATED_FROM: size} if size else {}),
        }
        dead_letter = structs.replace(packed, headers=headers)
        post = partial(self._bus.publisher.post, DEAD, self.queue, Mode(False, True, True), dead_letter)
        return OutcomeMessage(item, post, dead_letter=dead_letter)

    def _refuse_malformed(self, item: InFlightMessage, bad: Malformed) -> list[OutcomeMessage]:
        """Answer an unreadable message by the outcome that the queue's owner returns and on its reply queue; otherwise
        dead-letter it.
        """
        cause = bad.meta.cause or bad.meta.id
        answers = [
            OutcomeMessage(item, partial(self._post_answer, answer, cause), is_event=True)
            for answer in self._answers(structs.replace(bad, queue=self.queue))
        ]
        if not answers or bad.meta.reply_to is not None:
            return answers + self._refuse(item, bad.code, bad.reason)
        return answers

    def _post_answer(self, answer: Message, cause: str, confirm: Waiter) -> None:
        self._bus.post_all([(answer, cause)], [""], [confirm])

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
    """Return a message as its dead letter has it, and the size of its body where that is cut already (0: it is not)."""
    if isinstance(received, Malformed):
        return Packed(received.body, received.meta, type_), received.size
    return pack(received.message, received.meta), 0


class RetryUntilAvailable:
    """The calls of one consumer. Each of its batches may wait for a server that it depends on."""

    def __init__(self, bus: Bus, row: str) -> None:
        self.queue = self._row = row
        self._bus = bus
        self._retrying = Retrying(UNTIL_AVAILABLE, bus.clock, bus.rng)
        self._since: dict[object, float] = {}  # of each call that waits

    @property
    def waited_s(self) -> float:
        """The time (seconds) that the longest waiting call has waited; 0 when none waits."""
        oldest = min(self._since.values(), default=None)
        return 0.0 if oldest is None else self._bus.clock.monotonic() - oldest

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call the function until no transient fault occurs. Other exceptions are raised."""
        call = object()
        try:
            return await self._retrying.call(function, on_failure=lambda error, _: self._stalled(call, error))
        finally:
            self._since.pop(call, None)

    def _stalled(self, call: object, error: BaseException) -> None:
        code = str(getattr(error, "code", ""))
        if call not in self._since:
            self._since[call] = self._bus.clock.monotonic()
            log.warning("consumer.waits", queue=self.queue, code=code, reason=str(error))
        metrics.STALLS.labels(self._bus.name, self._row, code).inc()

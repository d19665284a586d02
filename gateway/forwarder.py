"""Forwards one project's messages: its requests to the API bus, its events and answers to its clients. A request is
acknowledged when the API bus has confirmed it; until then it stays in the project's virtual host, for any gateway. Only
what was parsed is passed on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import structlog
from msgspec import Struct, structs

from bus.bus import Bus
from bus.consuming.outcome import (
    AT_DELIVERY_LIMIT,
    DeadLetterNow,
    Done,
    Outcome,
    Received,
    RetryWhenAvailable,
    dead_letter_reason_of,
)
from bus.contracts.actions import ActionPage, ActionRequest
from bus.contracts.base import Message, encode
from bus.contracts.build import BuildPage, BuildRequest, DeleteRequest, seen_by
from bus.contracts.queues import BY_QUEUE
from bus.fair_queue import Turns, cost_of
from bus.faults import Fault
from bus.publishing import Waiter
from bus.refused_requests import refused_action_event, refused_build_event
from bus.transport import BusError

log = structlog.get_logger(__name__)

# How long a scheduler may take to answer: twice all of its retries.
ANSWER_TIMEOUT_S = 2 * sum(BY_QUEUE["scheduler.door"].retry_s)
# Batches of one project whose answers are awaited; a further one waits for one of these.
MAX_UNANSWERED = 256
# Of what has ended its gateway each time, or so it seems; its dead letter's end is announced.
_DEAD_LETTERED = DeadLetterNow(AT_DELIVERY_LIMIT, "it was delivered to several gateways, and none of them finished it")


class _Part(Struct, frozen=True):
    """Requests that leave together, and the messages that they were."""

    messages: list[Message]
    received: list[Received]
    size: int


class RequestForwarder:
    """Sends the requests of one project on, in their order, when the project has its turn."""

    def __init__(
        self, project: str, api: Bus, clients: Bus, to: Callable[[Message], tuple[str, str]], turns: Turns
    ) -> None:
        self._project = project
        self._api = api
        self._clients = clients
        self._to = to  # (exchange, routing key) of one on the API bus
        self._turns = turns
        self._numbers = count()
        self._since: dict[int, float] = {}  # of each batch that is not sent
        self._room = asyncio.Semaphore(MAX_UNANSWERED)
        self._unanswered: set[asyncio.Task[Fault | BusError | None]] = set()

    @property
    def oldest_s(self) -> float:
        """How long the oldest batch has waited (seconds)."""
        oldest = min(self._since.values(), default=None)
        return 0.0 if oldest is None else self._api.clock.monotonic() - oldest

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Send a batch, one part after the other. What follows one that was not sent waits: it is sent behind it."""
        if any(one.at_delivery_limit for one in batch):  # the others are asked again
            return [_DEAD_LETTERED if one.at_delivery_limit else RetryWhenAvailable(AT_DELIVERY_LIMIT) for one in batch]
        number = next(self._numbers)
        self._since[number] = self._api.clock.monotonic()
        outcomes: list[Outcome] = []
        try:
            for part in self._parts(batch):
                fault = await self._sent(part)
                if fault is not None:
                    return [*outcomes, *[RetryWhenAvailable(fault.code, str(fault))] * (len(batch) - len(outcomes))]
                outcomes += [Done()] * len(part.received)
            return outcomes
        finally:
            del self._since[number]

    async def drain(self, grace_s: float) -> None:
        """Wait for the answers within the grace time (seconds)."""
        if self._unanswered:
            await asyncio.wait(self._unanswered, timeout=max(grace_s, 0.0))
        for one in self._unanswered:
            one.cancel()

    async def _sent(self, part: _Part) -> Fault | BusError | None:
        """Send requests as one message of the broker, which takes or refuses it as a whole: nothing overtakes what a
        full queue refuses. Returns why they were not sent, and does not wait for their answers.
        """
        confirmed = asyncio.Event()
        waiting = asyncio.create_task(confirmed.wait())
        task = asyncio.create_task(self._carry(part, confirmed.set))
        self._unanswered.add(task)
        task.add_done_callback(self._forget)
        try:
            await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
            return None if confirmed.is_set() else task.result()
        finally:
            waiting.cancel()
            if not confirmed.is_set():
                task.cancel()

    def _forget(self, task: asyncio.Task[Fault | BusError | None]) -> None:
        self._unanswered.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("gateway.answers_failed", project=self._project, exc_info=error)

    async def _carry(self, part: _Part, on_confirmed: Callable[[], None]) -> Fault | BusError | None:
        """Have a turn, which lasts until they are answered: what has begun of a project is bounded. Returns the first
        fault.
        """
        cost = cost_of(sum(one.weight for one in part.messages), part.size)
        try:
            async with self._room, self._turns.turn(self._project, cost):
                answers = await self._api.request_all(
                    part.messages,
                    Message,
                    timeout_s=ANSWER_TIMEOUT_S,
                    causes=[_subject_of(one) for one in part.messages],
                    to=self._to,
                    on_confirmed=on_confirmed,
                    remaining_s=[_remaining_s(one) for one in part.received],
                )
        except BusError as error:
            return error
        self._answer(part.received, answers)
        return next((one for one in answers if isinstance(one, Fault)), None)

    def _answer(self, received: Sequence[Received], answers: Sequence[Message | Fault]) -> None:
        """Pass answers on. One that is lost is asked for again by its client, as one that does not come."""
        waiter = Waiter()
        for one, answer in zip(received, answers, strict=True):
            if one.meta.reply_to is not None and not isinstance(answer, Fault):
                self._clients.post_reply(one.meta, as_seen(answer, self._project), waiter)

    def _parts(self, batch: Sequence[Received]) -> Iterator[_Part]:
        """The batch in parts of so many bytes as one message of the broker may have, or of one."""
        part = _Part([], [], 0)
        for one in batch:
            message = of_project(one.message, self._project)
            size = len(encode(message))
            if part.messages and part.size + size > self._api.limits.batch_bytes:
                yield part
                part = _Part([], [], 0)
            part = _Part([*part.messages, message], [*part.received, one], part.size + size)
        if part.messages:
            yield part


class EventForwarder:
    """Publishes events of one project in its virtual host."""

    def __init__(self, clients: Bus, event_of: Callable[[Received], Message] = lambda event: event.message) -> None:
        self._clients = clients
        self._event_of = event_of  # the event to publish for a message

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Publish a batch; an event that the broker does not take waits."""
        errors = await self._clients.publish_each([(self._event_of(one), one.meta.cause) for one in batch])
        return [
            Done() if error is None else RetryWhenAvailable(getattr(error, "code", "bus.error"), str(error))
            for error in errors
        ]


def end_of(received: Received, project: str) -> Message:
    """The event about the end of a request that its queue has given up: it has expired, or ended its gateway each time,
    or so it seems.
    """
    refusal, message = dead_letter_reason_of(received), received.message
    assert refusal is not None
    if isinstance(message, ActionRequest):
        return refused_action_event(message.request_id, message.instance_uuid, project, message.kind, refusal=refusal)
    assert isinstance(message, BuildRequest | DeleteRequest)
    return refused_build_event(message.instance_uuid, project, refusal)


def of_project(message: Message, project: str) -> Message:
    """The message as one of this project, whatever project it names, and as asked for by it: the bus does not tell its
    clients apart.
    """
    if isinstance(message, BuildRequest | DeleteRequest | ActionRequest):
        return structs.replace(message, project_id=project, by=f"project {project}")
    return structs.replace(message, project_id=project)


def as_seen(answer: Message, project: str) -> Message:
    """The answer with what a project may know: nothing of another's instances."""
    if isinstance(answer, BuildPage):
        mine = tuple(seen_by(one, project) for one in answer.builds if one.project_id == project)
        return structs.replace(answer, builds=mine)
    if isinstance(answer, ActionPage):
        return structs.replace(answer, actions=tuple(one for one in answer.actions if one.project_id == project))
    return answer


def _remaining_s(received: Received) -> float:
    """For how long a request is of use. One that nobody awaits is handled however late it is: a scheduler would drop it
    without an event, as it answers the gateway.
    """
    return math.inf if received.meta.reply_to is None else received.remaining_s()


def _subject_of(message: Message) -> str:
    return getattr(message, "request_id", None) or getattr(message, "instance_uuid", None) or ""

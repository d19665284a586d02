"""What a gateway does with the messages of one project: its requests to the API bus, its events to its clients.

A request is acknowledged when a scheduler has answered it: it is on record then. Until that it stays in the project's
virtual host, and another gateway sends it again. Nothing of a message is passed on but what was parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from msgspec import structs

from bus.bus import Bus
from bus.consuming.outcome import Done, Outcome, Received, Wait
from bus.contracts.base import Message, encode
from bus.contracts.build import BuildPage, seen_by
from bus.contracts.moves import MovePage
from bus.contracts.queues import BY_QUEUE
from bus.fair_queue import Turns, cost_of
from bus.faults import Fault
from bus.port import BusError

M = TypeVar("M", bound=Message)

# How long a scheduler may take to answer. Then the request is sent again; it is the same by its id. Twice all of its
# retries: one whose time were over before the last would begin with the first again, and never be refused.
ANSWER_TIMEOUT_S = 2 * sum(BY_QUEUE["scheduler.door"].retry_s)


class RequestForwarder:
    """Sends the requests of one project on, in their order, when the project has its turn. to: (exchange, routing key)
    of one on the API bus.
    """

    def __init__(self, project: str, api: Bus, to: Callable[[Message], tuple[str, str]], turns: Turns) -> None:
        self._project = project
        self._api = api
        self._to = to
        self._turns = turns
        self._since: dict[object, float] = {}  # of each batch that is not answered

    @property
    def oldest_s(self) -> float:
        """How long the oldest batch has waited (seconds)."""
        oldest = min(self._since.values(), default=None)
        return 0.0 if oldest is None else self._api.clock.monotonic() - oldest

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Send a batch and return the answers. What follows one that was not answered waits: it is sent behind it."""
        messages = [of_project(one.message, self._project) for one in batch]
        sizes = [len(encode(one)) for one in messages]
        key = object()
        self._since[key] = self._api.clock.monotonic()
        try:
            async with self._turns.turn(self._project, cost_of(sum(one.weight for one in messages), sum(sizes))):
                answers, fault = await self._answers(messages, sizes)
        finally:
            del self._since[key]
        outcomes: list[Outcome] = [Done(reply=as_seen(answer, self._project)) for answer in answers]
        if fault is not None:
            outcomes += [Wait(fault.code, str(fault))] * (len(batch) - len(outcomes))
        return outcomes

    async def _answers(
        self, messages: Sequence[Message], sizes: Sequence[int]
    ) -> tuple[list[Message], Fault | BusError | None]:
        """Send messages, and return the answers up to the first fault, and that one. What is sent together is one
        message of the broker, which takes or refuses it as a whole: nothing overtakes what a full door refuses.
        """
        answers: list[Message] = []
        for part in _parts(messages, sizes, self._api.limits.batch_bytes):
            try:
                found = await self._api.request_all(
                    part,
                    Message,
                    timeout_s=ANSWER_TIMEOUT_S,
                    causes=[_subject_of(one) for one in part],
                    to=self._to,
                )
            except BusError as error:
                return answers, error
            for answer in found:
                if isinstance(answer, Fault):
                    return answers, answer
                answers.append(answer)
        return answers, None


class EventForwarder:
    """Publishes the events of one project in its virtual host."""

    def __init__(self, clients: Bus) -> None:
        self._clients = clients

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Publish a batch; an event that the broker does not take waits."""
        errors = await self._clients.publish_each([(one.message, one.meta.cause) for one in batch])
        return [Done() if error is None else Wait(getattr(error, "code", "bus.error"), str(error)) for error in errors]


def _parts(messages: Sequence[M], sizes: Sequence[int], most_bytes: int) -> Iterator[list[M]]:
    """The messages in parts of so many bytes at most, or of one."""
    part: list[M] = []
    held = 0
    for message, size in zip(messages, sizes, strict=True):
        if part and held + size > most_bytes:
            yield part
            part, held = [], 0
        part.append(message)
        held += size
    if part:
        yield part


def of_project(message: M, project: str) -> M:
    """The message as one of this project, whatever project it names."""
    return structs.replace(message, project_id=project)


def as_seen(answer: Message, project: str) -> Message:
    """The answer with what a project may know: nothing of another's instances."""
    if isinstance(answer, BuildPage):
        mine = tuple(seen_by(one, project) for one in answer.builds if one.project_id == project)
        return structs.replace(answer, builds=mine)
    if isinstance(answer, MovePage):
        return structs.replace(answer, moves=tuple(one for one in answer.moves if one.project_id == project))
    return answer


def _subject_of(message: Message) -> str:
    return getattr(message, "request_id", None) or getattr(message, "instance_uuid", None) or ""

"""A bus as the relay of an outbox has it: what was posted together, and its confirms when the test sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence

from bus.contracts.base import Message
from bus.publishing import Waiter
from tests.kit.waiting import until


class PostedBus:
    """Confirms what is posted in the next turn of the event loop, while `confirms` is set. Stands for its transport,
    too.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.batches: list[list[Message]] = []
        self.causes: list[str] = []
        self.traces: list[str] = []
        self.confirmed: list[tuple[Message, str]] = []  # each with its cause
        self.has_some, self.confirms = asyncio.Event(), asyncio.Event()
        self.confirms.set()
        self.unavailable_reason = ""
        self.on_back: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def transport(self) -> PostedBus:
        return self

    @property
    def got(self) -> list[Message]:
        return [message for batch in self.batches for message in batch]

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self.on_back.append(callback)

    def go(self, reason: str = "not connected") -> None:
        self.unavailable_reason = reason

    def come_back(self) -> None:
        self.unavailable_reason = ""
        for callback in self.on_back:
            callback()

    def post_all(
        self,
        messages: Sequence[tuple[Message, str]],
        traceparents: Sequence[str],
        waiters: Sequence[Waiter],
        line: Callable[[Message], Hashable],
        incarnations: Sequence[int] = (),
    ) -> None:
        for waiter in waiters:
            waiter.pending += 1
        self.has_some.set()
        task = asyncio.get_running_loop().create_task(self._confirm(messages, traceparents, waiters))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _confirm(
        self, messages: Sequence[tuple[Message, str]], traceparents: Sequence[str], waiters: Sequence[Waiter]
    ) -> None:
        self.batches.append([message for message, _ in messages])
        self.causes += [cause for _, cause in messages]
        self.traces += traceparents
        await self.confirms.wait()
        for (message, cause), waiter in zip(messages, waiters, strict=True):
            fault = self.fault_of(message)
            if fault is None:
                self.confirmed.append((message, cause))
            waiter.resolve(fault)

    async def until(self, count: int) -> None:
        """Until so many messages are confirmed."""
        await until(lambda: len(self.confirmed) >= count)

    def fault_of(self, message: Message) -> BaseException | None:
        """The broker's answer to a message; a test may overwrite it."""
        return None

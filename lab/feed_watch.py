"""Listens to the change feed as any program could, for the invariants: generations rise, numbers have no hole."""

from __future__ import annotations

from collections.abc import Sequence

from bus.bus import Bus
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.feed import Change, FeedChanges

MAX_CHANGES = 1_000_000


class FeedWatch:
    """Keeps every change it receives, in order of number, repeats left out."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._by_number: dict[int, Change] = {}
        self._consumer = Consumer(bus, "scheduler.feed.{process}", self._take, max_batch=1000, concurrency=1)

    @property
    def changes(self) -> list[Change]:
        """The changes received, by number."""
        return [self._by_number[number] for number in sorted(self._by_number)]

    async def open(self) -> None:
        """Start to listen."""
        await self._bus.open()
        await self._consumer.start()

    async def close(self) -> None:
        """Stop listening."""
        await self._consumer.drain(1.0)
        await self._bus.close()

    async def _take(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            if isinstance(received.message, FeedChanges) and len(self._by_number) < MAX_CHANGES:
                for change in received.message.changes:
                    self._by_number[change.sequence] = change
        return [Done() for _ in batch]

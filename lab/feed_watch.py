"""Keeps what any program could hear of a system, for the invariants: each build has one end; on the change feed
generations rise, and numbers have no hole.
"""

from __future__ import annotations

from collections.abc import Sequence

from berth.bus_client import BuildClient
from bus.bus import Bus
from bus.clock import Clock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import BuildEvent
from bus.contracts.feed import Change, FeedChanges

MAX_CHANGES = 1_000_000
MAX_EVENTS = 10_000_000  # past them a build would be judged to have no end


class RecordingClient(BuildClient):
    """A client that keeps every event it receives, of others' builds too."""

    def __init__(self, bus: Bus, *, clock: Clock, process: str, durable: bool = False) -> None:
        super().__init__(bus, clock=clock, process=process, durable=durable)
        self.events: list[BuildEvent] = []

    def note(self, event: BuildEvent) -> bool:
        """Take one event in; whether it is about one of this client's own."""
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
        return super().note(event)


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

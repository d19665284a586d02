"""A client of berth on a memory bus, with a scheduler of a few lines on the other side, on a clock of its own."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Sequence

from bus.bus import API, Bus
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.actions import ActionPage, ActionQuery, ActionRecord
from bus.contracts.base import Message
from bus.contracts.build import (
    BuildEvent,
    BuildPage,
    BuildQuery,
    BuildRecord,
    BuildRequest,
    BuildState,
    DeleteRequest,
    HostsPage,
    HostsQuery,
)
from bus.memory import MemoryBroker, MemoryTransport
from bus.transport import BusUnavailable, PublishRefused
from lab.feed_watch import RecordingClient

# Turns of the loop after which every task that could run without waiting for the time has run.
TURNS = 200


class HandClock:
    """Stands still while any task can run; then it is as late as the first of the sleepers wanted."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._asleep = 0
        self._moves = 0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self._asleep += 1
        awake = asyncio.Event()
        heapq.heappush(self._sleepers, (self.now + seconds, self._asleep, awake))
        while not awake.is_set():
            actions = self._moves
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if actions == self._moves and not awake.is_set():
                self._moves += 1
                until, _, first = heapq.heappop(self._sleepers)
                self.now = max(self.now, until)
                first.set()


class ClientWorld:
    """The client, and what the scheduler on the other side does."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.stall_s: dict[int, float] = {}  # {number of a publish: how long it takes}
        self.full: set[int] = set()  # numbers of publishes that the broker refuses
        self.unconfirmed: set[int] = set()  # of those that arrive, and whose confirms are lost with the connection
        self.answer_at_once = True
        self.mute = False  # events get lost; the record still knows
        self.records: dict[str, BuildRecord] = {}
        self.actions: list[ActionRecord] = []
        self.waiting: list[BuildRequest] = []
        self._requested: dict[str, BuildRequest] = {}
        self.queries = 0
        self._published = 0
        broker = MemoryBroker(self.clock)
        self.scheduler = self._bus(broker, "scheduler")
        self.client = RecordingClient(self._bus(broker, "client"), clock=self.clock, process="client")

    async def open(self) -> None:
        await self.scheduler.open()
        self._consumers = [
            Consumer(self.scheduler, "scheduler.requests", self._requests),
            Consumer(self.scheduler, "scheduler.records", self._queries),
            Consumer(self.scheduler, "scheduler.status", self._queries),
        ]
        for consumer in self._consumers:
            await consumer.start()
        await self.client.open()
        publish = self.client.bus.publish_each

        async def stalled(
            messages: Sequence[tuple[Message, str]], *, within_s: float | None = None
        ) -> list[BaseException | None]:
            self._published += 1
            number = self._published
            self.clock.now += self.stall_s.get(number, 0.0)
            if number in self.full:
                return [PublishRefused("full")] * len(messages)
            errors = await publish(messages, within_s=within_s)
            return [BusUnavailable("cut")] * len(messages) if number in self.unconfirmed else errors

        self.client.bus.publish_each = stalled  # type: ignore[method-assign]

    async def close(self) -> None:
        await self.client.close()
        for consumer in self._consumers:
            await consumer.drain(1.0)
        await self.scheduler.close()

    async def requested_more(self) -> None:
        """Until there is something to finish, or nothing comes any more."""
        for _ in range(100):
            if self.waiting:
                return
            await asyncio.sleep(0)

    async def finish(self, count: int) -> None:
        """End some builds, the oldest first."""
        for request in self.waiting[:count]:
            await self.notify(request, BuildState.ACTIVE, 12)
        del self.waiting[:count]

    async def notify(self, request: BuildRequest, state: BuildState, sequence: int, *, terminal: bool = True) -> None:
        """An event, and the record of it."""
        self.records[request.instance_uuid] = BuildRecord(
            instance_uuid=request.instance_uuid, project_id=request.project_id, flavor=request.flavor, state=state
        )
        if self.mute:
            return
        await self.scheduler.publish(
            BuildEvent(
                instance_uuid=request.instance_uuid,
                project_id=request.project_id,
                state=state,
                sequence=sequence,
                terminal=terminal,
                attempt=1,
            )
        )

    async def _requests(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            if isinstance(received.message, DeleteRequest) and self.answer_at_once:
                await self.notify(self._requested[received.message.instance_uuid], BuildState.DELETED, 20)
            if not isinstance(received.message, BuildRequest):
                continue  # else the test decides what comes of it
            self._requested[received.message.instance_uuid] = received.message
            if self.answer_at_once:
                await self.notify(received.message, BuildState.ACTIVE, 12)
            else:
                self.waiting.append(received.message)
        return [Done()] * len(batch)

    async def _queries(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        self.queries += len(batch)
        pages: list[BuildPage | HostsPage | ActionPage] = []
        for received in batch:
            if isinstance(received.message, HostsQuery):
                pages.append(HostsPage(more=False))
                continue
            query = received.message
            if isinstance(query, ActionQuery):
                named = ("request_id", "instance_uuid", "project_id")
                pages.append(ActionPage(actions=tuple(one for one in self.actions if _is_named(query, one, *named))))
                continue
            assert isinstance(query, BuildQuery)
            builds = (one for one in self.records.values() if _is_named(query, one, "instance_uuid", "project_id"))
            pages.append(BuildPage(builds=tuple(builds)))
        return [Done(page) for page in pages]

    def _bus(self, broker: MemoryBroker, process: str) -> Bus:
        return Bus(API, MemoryTransport(broker, API), process=process, clock=self.clock, rng=random.Random(process))


def _is_named(query: object, record: object, *fields: str) -> bool:
    return all(getattr(query, name) in (None, getattr(record, name)) for name in fields)

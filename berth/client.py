"""A client of berth as any program could be one: publish requests, follow the event stream, ask questions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.build import (
    BuildEvent,
    BuildPage,
    BuildQuery,
    BuildRequest,
    BuildState,
    DeleteRequest,
    HostsPage,
    HostsQuery,
)
from bus.outcome import Done, Outcome, Received

# Requests handed to the bus in one go; between two goes the loop gets to deliver events.
PUBLISH_SLICE = 200
# Events kept for the invariants; a longer run judges the newest.
MAX_EVENTS = 1_000_000


class Track(Struct):
    """What a client knows of one of its builds. Times are the client's monotonic clock, seconds."""

    instance_uuid: str
    flavor: str
    intended_at: float
    published_at: float | None = None
    ended_at: float | None = None
    state: str = "asked"
    terminals: int = 0
    repeats: int = 0
    sequence: int = -1
    last: BuildEvent | None = None
    stages: dict[str, float] = {}

    @property
    def latency_s(self) -> float | None:
        """From when the request was meant to leave until its terminal event arrived."""
        return None if self.ended_at is None else self.ended_at - self.intended_at


class BuildClient:
    """Publishes builds on the API bus and follows them to their terminal events.

    The listening queue is private: `open` declares and binds it before anything is published, so no event of
    this client's own builds is missed while the connection holds. After a reconnection (`resync`) what was
    missed is asked for. `durable`: a queue that outlives connection and broker, for a client that keeps a record.
    """

    def __init__(
        self, bus: Bus, *, clock: Clock, process: str, keep_events: bool = False, durable: bool = False
    ) -> None:
        self.bus = bus
        self.tracks: dict[str, Track] = {}
        self.events: list[BuildEvent] = []
        self.foreign_events = 0
        self._clock = clock
        self._process = process
        self._keep = keep_events
        self._queue = "client.record.{process}" if durable else "client.builds.{process}"
        self._open: set[str] = set()
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[BuildEvent], None]] = []

    async def open(self) -> None:
        """Connect, declare the listening queue and start to listen."""
        await self.bus.open()
        self._consumer = self.bus.consumer(
            self._queue, self._heard, max_batch=1000, concurrency=1, prefetch=2000, process=self._process
        )
        await self._consumer.start()

    async def close(self) -> None:
        """Stop listening and disconnect."""
        await self._consumer.drain(1.0)
        await self.bus.close()

    def on_event(self, listener: Callable[[BuildEvent], None]) -> None:
        """Call `listener` for every event of this client's builds."""
        self._listeners.append(listener)

    def track(self, request: BuildRequest, *, intended_at: float | None = None) -> Track:
        """Start to follow a request that is about to be published."""
        now = self._clock.monotonic()
        track = Track(
            instance_uuid=request.instance_uuid, flavor=request.flavor, intended_at=intended_at or now, stages={}
        )
        self.tracks[request.instance_uuid] = track
        self._open.add(request.instance_uuid)
        return track

    async def boot(self, requests: Sequence[BuildRequest]) -> list[Track]:
        """Publish all (confirmed by the broker when this returns) and follow them.

        Raises BusUnavailable, Unroutable (no scheduler was ever here) or PublishRefused (slow down).
        """
        tracks = [self.track(request) for request in requests]
        for start in range(0, len(requests), PUBLISH_SLICE):
            part = requests[start : start + PUBLISH_SLICE]
            await self.bus.publish_all([(request, request.instance_uuid) for request in part])
            now = self._clock.monotonic()
            for track in tracks[start : start + PUBLISH_SLICE]:
                track.published_at = now
        return tracks

    async def delete(self, instances: Iterable[tuple[str, str]]) -> None:
        """Ask for the deletion of (instance uuid, project) pairs."""
        await self.bus.publish_all(
            [(DeleteRequest(instance_uuid=uuid, project_id=project), uuid) for uuid, project in instances]
        )

    @property
    def unfinished(self) -> int:
        """Followed builds without a terminal event yet."""
        return len(self._open)

    async def wait(self, timeout_s: float) -> bool:
        """Wait until every followed build has ended; False when the time ran out first."""
        return await self.until(lambda: not self._open, timeout_s)

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `condition` holds, looked at after each batch of events."""
        deadline = self._clock.monotonic() + timeout_s
        while not condition():
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return False
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return condition()
        return True

    async def resync(self, *, timeout_s: float = 10.0) -> None:
        """Ask for the state of every unfinished build (its event may have been missed)."""
        for uuid in sorted(self._open):
            page = await self.bus.request(BuildQuery(instance_uuid=uuid), BuildPage, timeout_s=timeout_s)
            for record in page.builds:
                if record.state in {BuildState.ACTIVE, BuildState.FAILED, BuildState.REFUSED, BuildState.DELETED}:
                    self._end(self.tracks[uuid], record.state, None)
        self._changed.set()

    async def query(self, query: BuildQuery, *, timeout_s: float) -> BuildPage:
        """Ask a scheduler about builds. Raises RequestTimeout when none answers."""
        return await self.bus.request(query, BuildPage, timeout_s=timeout_s)

    async def hosts(self, *, limit: int, timeout_s: float) -> HostsPage:
        """Ask a scheduler about hosts. Raises RequestTimeout when none answers."""
        return await self.bus.request(HostsQuery(limit=limit), HostsPage, timeout_s=timeout_s)

    async def _heard(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            if isinstance(received.message, BuildEvent):
                self._note(received.message)
        self._changed.set()
        return [Done() for _ in batch]

    def _note(self, event: BuildEvent) -> None:
        if self._keep and len(self.events) < MAX_EVENTS:
            self.events.append(event)
        track = self.tracks.get(event.instance_uuid)
        if track is None:
            self.foreign_events += 1
            return
        if event.sequence <= track.sequence:  # said twice (its publisher crashed before it knew), or late
            track.repeats += 1
            return
        track.sequence = event.sequence
        track.stages.setdefault(event.state.value, self._clock.monotonic())
        if event.terminal:
            self._end(track, event.state, event)
        elif track.ended_at is None:
            track.state = event.state.value
        for listener in self._listeners:
            listener(event)

    def _end(self, track: Track, state: BuildState, event: BuildEvent | None) -> None:
        track.terminals += 1
        track.state = state.value
        track.last = event or track.last
        if track.ended_at is None:
            track.ended_at = self._clock.monotonic()
        self._open.discard(track.instance_uuid)

"""The events as they happen: one listener on the bus, any number of followers with bounded queues."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct

from bus.bus import Bus
from bus.clock import Clock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import TERMINAL_STATES, BuildEvent, BuildState

# Events that one follower may fall behind by; then it gets an event to read anew.
MAX_BEHIND = 1_000
MAX_FOLLOWERS = 200
# Of these, those of one caller: one reader alone would take all, and nobody would see the first page move.
MAX_FOLLOWERS_OF_CALLER = 50
# Of these, those of one project's callers, and of all projects' callers: the others are for readers and operators.
MAX_FOLLOWERS_OF_PROJECT = 20
MAX_FOLLOWERS_OF_PROJECTS = 150
# Builds that are in flight and remembered; of more than these the oldest are no longer counted.
MAX_IN_FLIGHT = 200_000
# ... and of one that has not ended after so long, its end was missed: the connection was unavailable.
MAX_IN_FLIGHT_S = 3600.0
# Ended builds that are remembered: another scheduler's older event may come after it.
MAX_ENDED = 10_000
IN_FLIGHT = frozenset({BuildState.ACCEPTED, BuildState.SCHEDULED, BuildState.BUILDING})
# Seconds of history on the page, and latencies kept for its percentiles.
HISTORY_S = 300
MAX_LATENCIES = 2_000


class TooManyEventFollowers(Exception):
    """As many follow already as may at once."""


class Second(Struct):
    """The sums of one second. at: seconds since the epoch.

    lost_claims: claims that others were faster with. retries: hosts tried after the first. Both of builds that ended.
    """

    at: int
    active: int = 0
    failed: int = 0
    accepted: int = 0
    lost_claims: int = 0
    retries: int = 0


class EventFollower:
    """One reader of the stream. `lagged`: events were lost; what it shows must be read anew. `closed`: none follow."""

    def __init__(self, wanted: Callable[[BuildEvent], bool]) -> None:
        self._wanted = wanted
        self._waiting: deque[BuildEvent] = deque(maxlen=MAX_BEHIND)
        self._changed = asyncio.Event()
        self.lagged = False
        self.closed = False

    def lag(self) -> None:
        """Have the reader read anew."""
        self.lagged = True
        self._changed.set()

    def close(self) -> None:
        """Have the reader end."""
        self.closed = True
        self._changed.set()

    def put(self, event: BuildEvent) -> None:
        """Take one event in, if it is wanted."""
        if self._wanted(event):
            self.lagged = self.lagged or len(self._waiting) == MAX_BEHIND
            self._waiting.append(event)
            self._changed.set()

    async def next(self, timeout_s: float) -> list[BuildEvent]:
        """The events since the last call; none when there were none in time."""
        if not (self._waiting or self.lagged or self.closed):
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                return []
        events = list(self._waiting)
        self._waiting.clear()
        return events


class Live:
    """Receives every build's events, counts them by second, and hands them on."""

    def __init__(self, bus: Bus, *, clock: Clock, process: str) -> None:
        self._bus = bus
        self._clock = clock
        self._process = process
        self._followers: dict[EventFollower, tuple[str, str | None]] = {}  # with the caller, and whose project it is
        self._closing = False
        self._seconds: deque[Second] = deque(maxlen=HISTORY_S)
        self._accepted_at: dict[str, float] = {}
        self._ended: dict[str, tuple[BuildState, int]] = {}  # with the number of the event: one may be repeated
        self._latencies: deque[float] = deque(maxlen=MAX_LATENCIES)

    async def open(self) -> None:
        """Listen."""
        self._consumer = Consumer(
            self._bus,
            "client.feed.{process}",
            self._on_events,
            max_batch=1000,
            concurrency=1,
            prefetch=2000,
            process=self._process,
        )
        await self._consumer.start()
        self._bus.transport.on_reconnect(self.on_reconnected)

    def on_reconnected(self) -> None:
        """The private queue was deleted with the connection, and events were lost: the end of a build among them."""
        for follower in self._followers:
            follower.lag()

    def end_streams(self) -> None:
        """Have all followers end, and those that begin."""
        self._closing = True
        for follower in self._followers:
            follower.close()

    async def close(self) -> None:
        """Stop listening."""
        await self._consumer.drain(1.0)

    @contextmanager
    def follow(
        self, wanted: Callable[[BuildEvent], bool], *, caller: str = "", project: str | None = None
    ) -> Iterator[EventFollower]:
        """A follower for as long as the block runs. caller: its name; project: whose it is; None: of no project.

        Raises TooManyEventFollowers.
        """
        of_caller = sum(one == caller for one, _ in self._followers.values())
        if len(self._followers) >= MAX_FOLLOWERS or of_caller >= MAX_FOLLOWERS_OF_CALLER:
            raise TooManyEventFollowers
        if project is not None:
            of_projects = Counter(one for _, one in self._followers.values() if one is not None)
            if of_projects[project] >= MAX_FOLLOWERS_OF_PROJECT or of_projects.total() >= MAX_FOLLOWERS_OF_PROJECTS:
                raise TooManyEventFollowers
        follower = EventFollower(wanted)
        self._followers[follower] = caller, project
        if self._closing:
            follower.close()
        try:
            yield follower
        finally:
            self._followers.pop(follower, None)

    @property
    def in_flight(self) -> int:
        """Builds that were accepted and have not ended."""
        return len(self._accepted_at)

    def history(self) -> list[Second]:
        """The last HISTORY_S seconds, each second once, also those in which nothing happened."""
        now = int(self._clock.time())
        known = {second.at: second for second in self._seconds}
        return [known.get(at) or Second(at) for at in range(now - HISTORY_S + 1, now)]

    def percentiles(self) -> dict[str, float]:
        """Seconds from accepted to active of the newest builds: p50, p95, p99; empty when there were none."""
        ordered = sorted(self._latencies)
        if not ordered:
            return {}
        return {name: ordered[int(len(ordered) * at)] for name, at in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}

    async def _on_events(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            if isinstance(received.message, BuildEvent):
                self.note(received.message)
        return [Done() for _ in batch]

    def note(self, event: BuildEvent) -> None:
        """Take one event in: count it, and hand it to those who follow."""
        second = self._second()
        self._forget_missed()
        uuid = event.instance_uuid
        if event.state in IN_FLIGHT:  # the first event of a build, whichever state it has
            if uuid not in self._accepted_at and uuid not in self._ended:
                second.accepted += 1
                if len(self._accepted_at) < MAX_IN_FLIGHT:
                    self._accepted_at[uuid] = event.at
        elif event.state in TERMINAL_STATES and self._ended.get(uuid) != (event.state, event.sequence):
            self._count_end(event, second)
        for follower in self._followers:
            follower.put(event)

    def _count_end(self, event: BuildEvent, second: Second) -> None:
        uuid = event.instance_uuid
        began = self._accepted_at.pop(uuid, None)
        if uuid not in self._ended:
            if began is None and event.stage_times is not None and event.stage_times.requested:
                began = event.stage_times.requested
                second.accepted += 1
            second.lost_claims += event.stage_times.lost_claims if event.stage_times is not None else 0
            second.retries += max(0, event.attempt - 1)
        self._ended[uuid] = event.state, event.sequence
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        if event.state is BuildState.ACTIVE:
            second.active += 1
            if began is not None:
                self._latencies.append(max(0.0, event.at - began))
        elif event.state in (BuildState.FAILED, BuildState.REFUSED):
            second.failed += 1

    def _forget_missed(self) -> None:
        while self._accepted_at:
            oldest = next(iter(self._accepted_at))
            if self._accepted_at[oldest] > self._clock.time() - MAX_IN_FLIGHT_S:
                return
            del self._accepted_at[oldest]

    def _second(self) -> Second:
        now = int(self._clock.time())
        if not self._seconds or self._seconds[-1].at != now:
            self._seconds.append(Second(now))
        return self._seconds[-1]

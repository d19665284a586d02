"""A client of berth as any program could be one: publish requests, follow the event stream, send queries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from msgspec import Struct

from berth.bus_client.host_pages import read_hosts
from berth.bus_client.request_spans import RequestSpans, TracedRequest
from bus.bus import Bus
from bus.clock import Clock, event_or_time
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import (
    TERMINAL_STATES,
    BuildEvent,
    BuildPage,
    BuildQuery,
    BuildRecord,
    BuildRequest,
    BuildState,
    DeleteRequest,
    HostsPage,
    HostsQuery,
    member_uuids,
)
from bus.contracts.operations import (
    AdminStateSet,
    DeleteHost,
    DeleteService,
    HostAdminState,
    HostDeleted,
    ServiceDeleted,
    ServicesPage,
    ServicesQuery,
    SetAdminState,
)
from bus.faults import Fault, Transient
from bus.retrying import CLIENT_PUBLISH, Retrying
from bus.transport import BusError, BusUnavailable, PublishRefused

# Requests handed to the bus in one go; between two goes the loop gets to deliver events.
PUBLISH_SLICE = 1000
# A client that receives nothing for this long queries its builds; this many at a time, and at most this many in all.
SILENCE_S = 1.0
ASK_SLICE = 200
MAX_QUERIED = 2_000
ASK_TIMEOUT_S = 10.0
MIN_ASK_S = 0.5

ENDS_A_DELETE = frozenset({BuildState.DELETED, BuildState.REFUSED})


def instances_of(request: BuildRequest | DeleteRequest) -> tuple[str, ...]:
    """The instances that a request is about: all of a gang's members."""
    return member_uuids(request) if isinstance(request, BuildRequest) else (request.instance_uuid,)


def _traced(request: BuildRequest | DeleteRequest) -> TracedRequest:
    name = "build" if isinstance(request, BuildRequest) else "delete"
    return TracedRequest(name, request.instance_uuid, {"berth.instance": request.instance_uuid})


class RequestWatch(Struct):
    """A client's record of one of its builds. Times are the client's monotonic clock, seconds.

    under_way: the last `resync` found it on record, on its way to the end that is waited for. learned: it ended by the
    scheduler's record, and the event of that end has not arrived.
    """

    instance_uuid: str
    flavor: str
    intended_at: float
    project_id: str = ""
    name: str = ""
    deleting: bool = False
    published_at: float | None = None
    ended_at: float | None = None
    state: str = "requested"
    terminals: int = 0
    repeats: int = 0
    sequence: int = -1
    last: BuildEvent | None = None
    stages: dict[str, float] = {}
    under_way: bool = False
    learned: bool = False

    @property
    def latency_s(self) -> float | None:
        """From when the request was meant to leave until its terminal event arrived."""
        return None if self.ended_at is None else self.ended_at - self.intended_at


def ends_despite_sequence(watch: RequestWatch, event: BuildEvent) -> bool:
    """Whether an event ends the followed request although the instance has had events of higher numbers.

    `deleted` is the last event of an instance: a database that crashed forgets its announcements, and numbers anew.
    A delete that is given up has no number: the record that has them is its build's, which goes on.
    """
    if watch.ended_at is not None:
        return False
    return event.state is BuildState.DELETED or (watch.deleting and event.state is BuildState.REFUSED)


class BuildClient:
    """Publishes builds on the API bus and follows them to their terminal events.

    The listening queue is private: `open` declares and binds it before anything is published, so no event of
    this client's own builds is missed while the connection holds. After a reconnection (`resync`) missed events are
    queried. `durable`: a queue that outlives connection and broker, for a client that keeps a record.
    """

    def __init__(self, bus: Bus, *, clock: Clock, process: str, durable: bool = False) -> None:
        self.bus = bus
        self.watches: dict[str, RequestWatch] = {}
        self.foreign_events = 0
        self.clock = self._clock = clock
        self.process = self._process = process
        self._queue = "client.record.{process}" if durable else "client.feed.{process}"
        self._open: set[str] = set()
        self._spans = RequestSpans(bus)
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[BuildEvent], None]] = []
        self._end_listeners: list[Callable[[RequestWatch], None]] = []

    async def open(self) -> None:
        """Connect, declare the listening queue and start to listen."""
        await self.bus.open()
        self._consumer = Consumer(
            self.bus, self._queue, self._on_events, max_batch=1000, concurrency=1, prefetch=2000, process=self._process
        )
        await self._consumer.start()

    async def close(self) -> None:
        """Stop listening and disconnect."""
        await self._consumer.drain(1.0)
        self._spans.close()
        await self.bus.close()

    def on_event(self, listener: Callable[[BuildEvent], None]) -> None:
        """Call `listener` for every event of this client's builds."""
        self._listeners.append(listener)

    def on_end(self, listener: Callable[[RequestWatch], None]) -> None:
        """Call `listener` with every build (or delete) of this client's that has ended, however that was learned.

        It is called again should a second terminal event come; `terminals` counts them.
        """
        self._end_listeners.append(listener)

    async def boot(self, requests: Sequence[BuildRequest], *, retry_for_s: float = 0.0) -> list[RequestWatch]:
        """Publish all (confirmed by the broker when this returns) and follow them, each member of a gang by itself.

        retry_for_s: how long to publish again while the broker is unavailable or refuses, and to wait for its confirms
        (0: it is tried once, and confirms are waited for as long as any publisher waits); a request that arrives twice
        is one request. Raises BusUnavailable, Unroutable (no scheduler was ever here), PublishRefused (slow down) or
        RequestUnconfirmed; the watches of those that were confirmed before have a `published_at`.
        """
        now = self._clock.monotonic()
        watches = [
            self._follow(uuid, request.flavor, request.project_id, now, request.name)
            for request in requests
            for uuid in instances_of(request)
        ]
        retry_until = self._retry_deadline(retry_for_s)
        for start in range(0, len(requests), PUBLISH_SLICE):
            await self._publish(requests[start : start + PUBLISH_SLICE], retry_until)
        return watches

    async def submit(
        self, requests: Sequence[BuildRequest | DeleteRequest], *, intended_at: Sequence[float], flavors: Sequence[str]
    ) -> list[BaseException | None]:
        """Publish each once, follow it from its intended time, and return an outcome for each: None when it was
        confirmed.

        A message that the broker refused (PublishRefused: its queue is full) or returned (Unroutable) is nowhere: it is
        no longer followed. After BusUnavailable it may have arrived, and is followed.
        """
        for request, at, flavor in zip(requests, intended_at, flavors, strict=True):
            watch = self._follow(request.instance_uuid, flavor, request.project_id, at)
            watch.deleting = isinstance(request, DeleteRequest)
        errors = await self.bus.publish_each([(request, request.instance_uuid) for request in requests])
        now = self._clock.monotonic()
        for request, error in zip(requests, errors, strict=True):
            if error is None:
                self.watches[request.instance_uuid].published_at = now
            elif not isinstance(error, BusUnavailable):
                self.unfollow(request.instance_uuid)
        return errors

    def unfollow(self, uuid: str) -> None:
        """Follow one no longer."""
        self.watches.pop(uuid, None)
        self._open.discard(uuid)

    async def delete(
        self, builds: Sequence[BuildRecord], *, by: str = "", retry_for_s: float = 0.0
    ) -> list[RequestWatch]:
        """Request the deletion of builds and follow them until they are gone; time limits and faults as in `boot`.
        by: who asks, for the record.
        """
        watches: list[RequestWatch] = []
        for build in builds:
            watch = self._follow(build.instance_uuid, build.flavor, build.project_id, None, build.name)
            watches.append(watch)
            watch.deleting = True
            if build.state is BuildState.DELETED:  # no further event will come
                self._end(watch, build.state, None)
        await self._publish(
            [DeleteRequest(instance_uuid=build.instance_uuid, project_id=build.project_id, by=by) for build in builds],
            self._retry_deadline(retry_for_s),
        )
        return watches

    @property
    def unfinished(self) -> int:
        """Followed builds without a terminal event yet."""
        return len(self._open)

    def open_requests(self) -> list[RequestWatch]:
        """The followed requests that have not ended, by instance."""
        return [self.watches[uuid] for uuid in sorted(self._open)]

    async def wait(self, timeout_s: float) -> bool:
        """Wait until everything followed has ended; False when the time ran out first.

        After a long silence it queries the scheduler: an event may have been missed while the connection was
        unavailable.
        """
        deadline = self._clock.monotonic() + timeout_s
        while self._open:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return False
            if not await self._event_within(min(left, SILENCE_S)):
                with contextlib.suppress(Transient, BusError):  # queried again after the next silence
                    await self.resync(timeout_s=min(ASK_TIMEOUT_S, max(left, MIN_ASK_S)))
        return True

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `condition` holds, looked at after each batch of events."""
        deadline = self._clock.monotonic() + timeout_s
        while not condition():
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return False
            await self._event_within(left)
        return True

    async def resync(self, *, timeout_s: float = ASK_TIMEOUT_S, at_most: int = MAX_QUERIED) -> None:
        """Query the state of unfinished requests (their events may have been missed). Raises RequestTimeout."""
        requested = sorted(self._open)[:at_most]
        for uuid in requested:
            self.watches[uuid].under_way = False
        for start in range(0, len(requested), ASK_SLICE):
            # What was dropped during a query is not followed any more.
            watches = [
                one for uuid in requested[start : start + ASK_SLICE] if (one := self.watches.get(uuid)) is not None
            ]
            part = [one.instance_uuid for one in watches]
            queries = [
                BuildQuery(instance_uuid=one.instance_uuid, project_id=one.project_id or None) for one in watches
            ]
            pages = await self.bus.request_all(queries, BuildPage, timeout_s=timeout_s, causes=part)
            for page in pages:
                if isinstance(page, Fault):
                    raise page
                for record in page.builds:
                    if record.instance_uuid in self.watches:
                        self._apply_record(self.watches[record.instance_uuid], record)
        self._changed.set()

    async def query(self, query: BuildQuery, *, timeout_s: float) -> BuildPage:
        """Ask a scheduler about builds. Raises RequestTimeout when none answers."""
        return await self.bus.request(query, BuildPage, timeout_s=timeout_s)

    async def hosts(
        self, *, limit: int, timeout_s: float, cell: str | None = None, up: bool | None = None
    ) -> HostsPage:
        """Ask a scheduler about hosts, of one cell or of all, up or not. Raises as `read_hosts` does."""
        return await read_hosts(self.bus, HostsQuery(limit=limit, cell=cell, up=up), timeout_s=timeout_s)

    async def services(
        self, *, limit: int, timeout_s: float, cell: str | None = None, up: bool | None = None
    ) -> ServicesPage:
        """Ask a scheduler about compute services. Raises RequestTimeout when none answers."""
        return await self.bus.request(ServicesQuery(limit=limit, cell=cell, up=up), ServicesPage, timeout_s=timeout_s)

    async def set_admin_state(self, decision: SetAdminState, *, timeout_s: float) -> HostAdminState:
        """Decide about a host. Raises RequestTimeout, or RequestRefused (`host.unknown`, `host.ambiguous`)."""
        answer = await self.bus.request(decision, AdminStateSet, timeout_s=timeout_s)
        return answer.host

    async def delete_host(self, command: DeleteHost, *, timeout_s: float) -> HostDeleted:
        """Forget a host that is gone for good. Raises RequestTimeout, or RequestRefused with what stands in the way."""
        return await self.bus.request(command, HostDeleted, timeout_s=timeout_s)

    async def delete_service(self, command: DeleteService, *, timeout_s: float) -> ServiceDeleted:
        """Forget a service that is gone for good. Raises RequestTimeout, or RequestRefused with what keeps it."""
        return await self.bus.request(command, ServiceDeleted, timeout_s=timeout_s)

    async def _on_events(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        own = [self.note(received.message) for received in batch if isinstance(received.message, BuildEvent)]
        if any(own):
            self._changed.set()
        return [Done() for _ in batch]

    def note(self, event: BuildEvent) -> bool:
        """Take one event in; whether it is about one of this client's own."""
        watch = self.watches.get(event.instance_uuid)
        # Any project may name any uuid in a request of its own; the events of that go to that project.
        if watch is None or watch.project_id != event.project_id:
            self.foreign_events += 1
            return False
        if event.sequence <= watch.sequence and not ends_despite_sequence(watch, event):
            # published twice (its publisher crashed), or late
            watch.repeats += 1
            return True
        watch.sequence = max(event.sequence, watch.sequence)
        watch.stages.setdefault(event.state.value, self._clock.monotonic())
        if event.terminal and (not watch.deleting or event.state in ENDS_A_DELETE):
            if watch.learned and event.state.value == watch.state:  # delayed: its end was queried before
                watch.learned, watch.last = False, event
            else:
                self._end(watch, event.state, event)
        elif watch.ended_at is None:
            watch.state = event.state.value
        for listener in self._listeners:
            listener(event)
        return True

    def _follow(
        self, uuid: str, flavor: str, project_id: str, intended_at: float | None, name: str = ""
    ) -> RequestWatch:
        now = self._clock.monotonic()
        watch = RequestWatch(
            instance_uuid=uuid,
            flavor=flavor,
            project_id=project_id,
            name=name,
            intended_at=now if intended_at is None else intended_at,
            stages={},
        )
        self.watches[uuid] = watch
        self._open.add(uuid)
        return watch

    def _retry_deadline(self, retry_for_s: float) -> float | None:
        return self._clock.monotonic() + retry_for_s if retry_for_s > 0 else None

    async def _publish(self, requests: Sequence[BuildRequest | DeleteRequest], retry_until: float | None) -> None:
        """Publish until all are confirmed; what already is does not go again. retry_until: None: each goes once."""
        with self._spans.publishing(_traced(request) for request in requests):
            await self._publish_confirmed(requests, retry_until)

    async def _publish_confirmed(
        self, requests: Sequence[BuildRequest | DeleteRequest], retry_until: float | None
    ) -> None:
        left = requests

        async def publish_left() -> bool:
            nonlocal left
            # A broker that is out of disk or memory confirms nothing.
            within_s = None if retry_until is None else max(retry_until - self._clock.monotonic(), 0.0)
            errors = await self.bus.publish_each(
                [(request, request.instance_uuid) for request in left], within_s=within_s
            )
            now = self._clock.monotonic()
            for request, error in zip(left, errors, strict=True):
                if error is None:
                    for uuid in instances_of(request):
                        self.watches[uuid].published_at = now
            failed = [(request, error) for request, error in zip(left, errors, strict=True) if error is not None]
            for _, error in failed:
                if not isinstance(error, BusUnavailable | PublishRefused) or retry_until is None or now >= retry_until:
                    raise error
            left = [request for request, _ in failed]
            return not left

        await Retrying(CLIENT_PUBLISH, self._clock).until(publish_left)

    async def _event_within(self, timeout_s: float) -> bool:
        self._changed.clear()
        return await event_or_time(self._changed, self._clock, timeout_s)

    def _apply_record(self, watch: RequestWatch, record: BuildRecord) -> None:
        """A scheduler's record of one build, instead of the event that was missed."""
        ended = record.state is BuildState.DELETED if watch.deleting else record.state in TERMINAL_STATES
        if ended and watch.ended_at is None:
            self._end(watch, record.state, None)
            watch.learned = True
        # A delete is known by its record; one that never arrived leaves the build as it was.
        watch.under_way = not ended and (record.state is BuildState.DELETING or not watch.deleting)

    def _end(self, watch: RequestWatch, state: BuildState, event: BuildEvent | None) -> None:
        watch.terminals += 1
        watch.state = state.value
        watch.last = event or watch.last
        if watch.ended_at is None:
            watch.ended_at = self._clock.monotonic()
        self._open.discard(watch.instance_uuid)
        self._spans.end(watch.instance_uuid, watch.last.code if watch.last is not None else "")
        for listener in self._end_listeners:
            listener(watch)

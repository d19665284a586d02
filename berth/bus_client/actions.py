"""A client of actions as any program could be one: send a request about an instance, and follow it to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from berth.bus_client.request_spans import RequestSpans, TracedRequest
from bus.bus import Bus
from bus.clock import Clock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.actions import ActionAccepted, ActionEvent, ActionPage, ActionQuery, ActionRecord, ActionRequest
from bus.faults import Transient
from bus.transport import BusError

# After this long without an event, a client queries.
SILENCE_S = 1.0
ASK_TIMEOUT_S = 10.0
# Requests queried in one silence; the others are queried in the next.
MAX_QUERIED = 200


class ActionClient:
    """Publishes requests about instances, and follows them to their terminal events.

    `open` declares the private queue before anything is published, so no event of this client's own requests is missed
    while the connection holds; in a silence it queries. `ended`: {request_id: its end}.
    """

    def __init__(self, bus: Bus, *, clock: Clock, process: str) -> None:
        self.ended: dict[str, ActionEvent | ActionRecord] = {}
        self._bus = bus
        self._clock = clock
        self._process = process
        self._open: dict[str, ActionRequest] = {}
        self._spans = RequestSpans(bus)
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[ActionEvent], None]] = []

    async def open(self) -> None:
        """Declare the listening queue and start to listen; the bus is open."""
        self._consumer = Consumer(
            self._bus,
            "client.actions.{process}",
            self._on_events,
            max_batch=1000,
            concurrency=1,
            prefetch=2000,
            process=self._process,
        )
        await self._consumer.start()

    async def close(self) -> None:
        """Stop listening."""
        await self._consumer.drain(1.0)
        self._spans.close()

    def on_event(self, listener: Callable[[ActionEvent], None]) -> None:
        """Call `listener` for every event of this client's requests."""
        self._listeners.append(listener)

    async def ask(self, request: ActionRequest, *, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Ask, and follow it. Raises RequestTimeout (it may be carried out), or RequestRefused with the code."""
        self._open[request.request_id] = request
        try:
            with self._spans.publishing([_traced(request)]):
                await self._bus.request(request, ActionAccepted, timeout_s=timeout_s, cause=request.request_id)
        except BaseException as error:
            self._open.pop(request.request_id, None)
            self._spans.end(request.request_id, str(getattr(error, "code", "")) or type(error).__name__)
            raise

    async def submit(self, requests: Sequence[ActionRequest]) -> list[BaseException | None]:
        """Publish many without a reply, follow them, and return an outcome for each: None when it was confirmed."""
        self._open.update((one.request_id, one) for one in requests)
        with self._spans.publishing(_traced(one) for one in requests):
            errors = await self._bus.publish_each([(one, one.request_id) for one in requests])
        for request, error in zip(requests, errors, strict=True):
            if error is not None:
                self._open.pop(request.request_id, None)
                self._spans.end(request.request_id, str(getattr(error, "code", "")) or type(error).__name__)
        return errors

    @property
    def unfinished(self) -> int:
        """Followed requests without a terminal event yet."""
        return len(self._open)

    async def wait(self, timeout_s: float) -> bool:
        """Wait until everything followed has ended; False when the time ran out first."""
        deadline = self._clock.monotonic() + timeout_s
        while self._open:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return False
            self._changed.clear()
            try:
                async with asyncio.timeout(min(left, SILENCE_S)):
                    await self._changed.wait()
            except TimeoutError:
                with contextlib.suppress(Transient, BusError):  # queried again after the next silence
                    await self._query_states(min(ASK_TIMEOUT_S, max(left, SILENCE_S)))
        return True

    async def _query_states(self, timeout_s: float) -> None:
        requested = list(self._open)[:MAX_QUERIED]
        queries = [
            ActionQuery(request_id=one.request_id, instance_uuid=one.instance_uuid, project_id=one.project_id)
            for one in map(self._open.__getitem__, requested)
        ]
        pages = await self._bus.request_all(queries, ActionPage, timeout_s=timeout_s, causes=requested)
        for page in pages:
            for record in page.actions if isinstance(page, ActionPage) else ():
                if record.terminal:
                    self._end(record.request_id, record)
        for one in requested[: len(requested) if self.unfinished > MAX_QUERIED else 0]:  # to the end of the line
            if one in self._open:
                self._open[one] = self._open.pop(one)

    async def _on_events(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            event = received.message
            if not isinstance(event, ActionEvent):
                continue
            mine = self._open.get(event.request_id)
            # Any project may name any id in a request of its own, and a client one for two instances.
            is_of = (event.instance_uuid, event.project_id)
            if mine is None or (mine.instance_uuid, mine.project_id) != is_of:
                continue
            for listener in self._listeners:
                listener(event)
            if event.terminal and event.sequence > 0:  # 0: of another request under this id
                self._end(event.request_id, event)
        return [Done()] * len(batch)

    def _end(self, request_id: str, end: ActionEvent | ActionRecord) -> None:
        if self._open.pop(request_id, None) is not None:
            self.ended[request_id] = end
            self._spans.end(request_id, end.code)
            self._changed.set()


def _traced(request: ActionRequest) -> TracedRequest:
    about: dict[str, str | int] = {"berth.instance": request.instance_uuid, "berth.action": request.kind.value}
    return TracedRequest("action", request.request_id, about)

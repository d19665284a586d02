"""Calls of a real Nova: how the frontends decided them, and how a stock nova-scheduler's answers differ from berth's.

The newest are kept, from what frontends announce since this server's start. The frontends' logs have the same, and all
of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from berth.web.api import caller_of, check_again, need, sse, stream_response
from berth.web.event_stream import Live
from berth.web.problems import Problem
from berth.web.rendering import rendered
from berth.web.sign_in_sessions import WebRole
from bus.bus import Bus
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.nova_calls import CallDecision, NovaCall
from bus.contracts.workers import STOPPED, WorkerHeartbeat
from nova_scheduler.decide.decision_log import RecentCalls

MAX_KEPT = 500  # calls, and as many comparisons
MAX_KEPT_BYTES = 4 * 2**20  # of each of the two
MAX_FRONTENDS = 100  # with counts
FRONTEND = "nova-scheduler"  # their role
SHOWN = 50
EVERY_S = 1.0
MAX_SHOWN_ID = 64


class NovaView(Struct, frozen=True):
    """The newest calls first: comparisons in which the stock scheduler's answer differs, and how calls were decided.

    counts: of the shadow, {difference: calls} since the frontends' start. replica_age_s: of the oldest of their copies
    of a Placement without a feed. In the list of all calls `decisions` has what the list shows.
    """

    compared: tuple[NovaCall, ...]
    decisions: tuple[NovaCall, ...]
    counts: dict[str, int] = {}
    replica_age_s: float | None = None


class _Frontend(Struct, frozen=True):
    """What its newest heartbeat tells."""

    counts: dict[str, int]
    ages_s: dict[str, float]
    heard_s: float  # monotonic


def _in_short(call: NovaCall) -> NovaCall:
    """As the list shows it, which is sent each second: without the steps, alternates and scores, which may be many."""
    one = call.decision
    if one is None:
        return call
    hosts = tuple(of[:1] for of in one.hosts)
    shown = CallDecision(
        event=one.event,
        request_id=one.request_id,
        project_id=one.project_id,
        count=one.count,
        reason=one.reason,
        hosts=hosts,
    )
    return replace(call, decision=shown)


def _recent() -> tuple[RecentCalls, RecentCalls]:
    """What is kept, and what the list shows."""
    return RecentCalls(MAX_KEPT, MAX_KEPT_BYTES), RecentCalls(SHOWN, MAX_KEPT_BYTES)


class NovaCalls:
    """Receives what the frontends announce, and keeps the newest."""

    def __init__(self, bus: Bus, process: str) -> None:
        self._bus = bus
        self._process = process
        self.decisions, self.decisions_list = _recent()
        self.compared, self.compared_list = _recent()
        self._frontends: dict[str, _Frontend] = {}  # the one with the newest change last
        self.received = 0

    async def open(self) -> None:
        """Listen."""
        self._consumer = Consumer(
            self._bus, "client.nova.{process}", self._on_events, concurrency=1, process=self._process
        )
        await self._consumer.start()

    async def close(self) -> None:
        """Stop listening."""
        await self._consumer.drain(1.0)

    async def _on_events(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        for received in batch:
            if isinstance(received.message, NovaCall):
                self.note(received.message)
            elif isinstance(received.message, WorkerHeartbeat):
                self.note_frontend(received.message)
        return [Done() for _ in batch]

    def note(self, call: NovaCall) -> None:
        """Take one event in."""
        if call.compared is None and call.decision is None:  # a newer frontend may tell something else
            return
        self.received += 1
        if call.compared is not None:
            self.compared.add(call)
            self.compared_list.add(call)
        else:
            self.decisions.add(call)
            self.decisions_list.add(_in_short(call))

    def note_frontend(self, heartbeat: WorkerHeartbeat) -> None:
        """Take in what a frontend has counted since its start, and how old its copies are."""
        before = self._frontends.get(heartbeat.worker)
        ages_s = {} if heartbeat.phase == STOPPED else heartbeat.ages_s
        now = _Frontend(heartbeat.counts, ages_s, self._bus.clock.monotonic())
        if heartbeat.role != FRONTEND or before == replace(now, heard_s=before.heard_s if before else now.heard_s):
            return
        self.received += 1
        self._frontends.pop(heartbeat.worker, None)
        self._frontends[heartbeat.worker] = now
        if len(self._frontends) > MAX_FRONTENDS:
            del self._frontends[next(iter(self._frontends))]

    def view(self) -> NovaView:
        """The newest, for the page."""
        frontends, now_s = self._frontends.values(), self._bus.clock.monotonic()
        counts = sum((Counter(one.counts) for one in frontends), Counter[str]())
        ages_s = [age_s + now_s - one.heard_s for one in frontends for age_s in one.ages_s.values()]
        return NovaView(
            self.compared_list.newest(), self.decisions_list.newest(), dict(counts), max(ages_s, default=None)
        )

    def of_request(self, request_id: str) -> NovaView:
        """All that is kept about one request of Nova's user."""
        compared, decisions = (
            tuple(one for one in kept.newest() if one.request_id == request_id)
            for kept in (self.compared, self.decisions)
        )
        return NovaView(compared, decisions)


class NovaPages:
    """The handlers of these pages. Both name hosts."""

    def __init__(self, calls: NovaCalls, live: Live, *, has_session: bool) -> None:
        self._calls = calls
        self._live = live
        self._has_session = has_session

    def routes(self) -> list[Route]:
        """The routes of the pages."""
        return [
            Route("/nova", self.nova),
            Route("/nova/events", self.events),
            Route("/nova/calls/{request_id}", self.call),
        ]

    async def nova(self, request: Request) -> Response:
        """The newest comparisons and calls."""
        need(caller_of(request), WebRole.READER)
        return self._page(request, "nova.html", calls=self._calls.view())

    async def events(self, request: Request) -> Response:
        """The same whenever it has changed, a second apart at least."""
        caller = caller_of(request)
        need(caller, WebRole.READER)

        async def views() -> AsyncIterator[bytes]:
            shown = -1
            with self._live.follow(lambda _: False, caller=caller.name) as follower:
                while not follower.closed:
                    if shown != self._calls.received:
                        shown = self._calls.received
                        yield sse("nova", self._calls.view())
                    else:
                        yield b": \n\n"  # a server that writes nothing would not notice that its reader has left
                    await follower.next(EVERY_S)

        return stream_response(views(), partial(check_again, request))

    async def call(self, request: Request) -> Response:
        """How the calls of one request were decided. Raises Problem 404: nothing is kept about it."""
        need(caller_of(request), WebRole.READER)
        request_id = request.path_params["request_id"]
        calls = self._calls.of_request(request_id)
        if not (calls.compared or calls.decisions):
            message = f"nothing is kept here about request {request_id[:MAX_SHOWN_ID]}: see the logs (berth explain)"
            raise Problem(404, "explain.unknown", message)
        return self._page(request, "nova_call.html", request_id=request_id, calls=calls)

    def _page(self, request: Request, template: str, status: int = 200, **fields: Any) -> Response:
        return rendered(request, template, status, has_session=self._has_session, **fields)

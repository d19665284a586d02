"""The pages: rendered here, kept up to date by server-sent events. They show schedulers' answers, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from berth.client.status import StatusKind, SystemStatus
from berth.client.types import FleetPoint
from berth.status.reader import Server, StatusReader
from berth.web.api import (
    SEARCHED_BY,
    WebApi,
    caller_of,
    check_again,
    moment_of,
    need,
    next_page,
    parsed,
    sse,
    stream_response,
    uuid_of,
)
from berth.web.event_stream import Live, Second
from berth.web.history import FleetHistory, charts
from berth.web.operations import WebActions
from berth.web.pages.figures import (
    MetalClass,
    Use,
    capacity_of,
    failures_of,
    is_bare_metal,
    metal_of,
    states_of,
)
from berth.web.pages.fleet import FleetReader, QueueDepth, QueueReader
from berth.web.rendering import HOSTS, Asked, LastAnswers, rendered, unanswered_page
from berth.web.sign_in_sessions import WebCaller, WebRole
from berth.why import explained
from bus.clock import Clock
from bus.contracts.actions import ActionKind, ActionPage, ActionQuery, ActionRequest
from bus.contracts.build import (
    DELETE_REQUESTED,
    TERMINAL_STATES,
    BuildPage,
    BuildQuery,
    BuildRecord,
    BuildState,
    HostRecord,
)
from bus.contracts.catalogue import OPERATORS
from bus.contracts.stages import durations
from bus.contracts.workers import WorkerRecord
from bus.faults import Fault
from bus.transport import BusError

NOW_EVERY_S = 1.0
PAGE = 50
QUEUES_SHOWN = 10
LOST_SHOWN = 10  # lost claims of a build
# The first page groups so many newest failures of a day, read anew at most so often; each record has its timeline.
FAILURES_READ = 200
FAILURES_FOR_S = 86_400.0
FAILURES_AGE_S = 5.0
GROUPS_SHOWN = 8
DELETABLE = frozenset(BuildState).difference({BuildState.REFUSED}, DELETE_REQUESTED)


class Now(Struct, frozen=True):
    """The first page's figures. Rates are a second's; latencies seconds from accepted to active.

    started, failed: builds of the last five minutes. states, capacity: of hosts that are not bare metal.

    lost_per_s: claims that others were faster with; retries_per_s: hosts tried after the first; of builds that ended.
    workers: {role: (up and ready, all)}. answered: whether a scheduler has told hosts and workers.
    """

    in_flight: int
    active_per_s: float
    failed_per_s: float
    latency: dict[str, float]
    hosts: int
    up: int
    disabled: int
    cells: dict[str, tuple[int, int]]
    lost_per_s: float
    retries_per_s: float
    waiting: int
    dead_letters: int
    queues: tuple[QueueDepth, ...]
    workers: dict[str, tuple[int, int]]
    status: SystemStatus
    answered: bool = True
    seconds: tuple[Second, ...] = ()
    started: int = 0
    failed: int = 0
    states: dict[str, int] = {}
    capacity: tuple[Use, ...] = ()
    metal: tuple[MetalClass, ...] = ()


class Stage(Struct, frozen=True):
    """A stage of a build. begin, end: seconds since the request, which was at began_at (seconds since the epoch)."""

    name: str
    begin: float
    end: float
    began_at: float


class LostClaim(Struct, frozen=True):
    """A claim that got nothing. conflicting_consumers: those that held what was lost, as far as the caller may know."""

    at: float
    host: str
    outcome: str
    conflicting_consumers: tuple[str, ...]


class Pages:
    """The handlers of the pages."""

    def __init__(
        self,
        api: WebApi,
        actions: WebActions,
        live: Live,
        fleet: FleetReader,
        *,
        status: StatusReader,
        queues: QueueReader,
        history: FleetHistory,
        clock: Clock,
        last: LastAnswers,
        has_session: bool,
    ) -> None:
        self._queues = queues
        self._history = history
        self._api = api
        self._actions = actions
        self._fleet = fleet
        self._status = status
        self._live = live
        self._has_session = has_session
        self._clock = clock
        self._last = last
        self._reading_failures = asyncio.Lock()
        self._failures: list[BuildRecord] = []
        self._failures_at = float("-inf")

    def routes(self) -> list[Route]:
        """The routes of the pages."""
        return [
            Route("/", self.now),
            Route("/now/events", self.now_events),
            Route("/builds", self.builds),
            Route("/builds/{uuid}", self.build),
        ]

    # --- now

    async def now(self, request: Request) -> Response:
        """The present activity, with faults first."""
        need(caller_of(request), WebRole.READER)
        now, failed, points = await asyncio.gather(self._state(), self._failed_builds(), self._kept())
        asked = Asked()  # the status has what did not answer: the page is whole without it
        return self._page(
            request,
            "now.html",
            asked=asked,
            now=now,
            failures=failures_of(failed)[:GROUPS_SHOWN],
            failures_cut=len(failed) >= FAILURES_READ,
            charts=charts(points, self._clock.time()),
        )

    async def _kept(self) -> tuple[FleetPoint, ...]:
        """The fleet's history; none while it cannot be read, which the status has."""
        try:
            return await self._history.points()
        except Fault:
            return ()

    async def now_events(self, request: Request) -> Response:
        """The figures of the first page, every second for as long as it is open."""
        caller = caller_of(request)
        need(caller, WebRole.READER)

        async def states() -> AsyncIterator[bytes]:
            ended_badly = (BuildState.FAILED, BuildState.REFUSED)
            with self._live.follow(lambda event: event.state in ended_badly, caller=caller.name) as follower:
                yield sse("now", await self._state())
                while not follower.closed:
                    until = self._clock.monotonic() + NOW_EVERY_S
                    failures = await follower.next(NOW_EVERY_S)
                    if (left := until - self._clock.monotonic()) > 0:
                        await self._clock.sleep(left)
                    for event in failures[-5:]:
                        yield sse("failure", event)
                    yield sse("now", await self._state())

        return stream_response(states(), partial(check_again, request))

    async def _state(self) -> Now:
        status = await self._status.read()
        # Where no scheduler answers, that is known by now: the page does not wait for it once more.
        away = any(row.kind in (StatusKind.SCHEDULER_AWAY, StatusKind.BUS_AWAY) for row in status.rows)
        hosts, workers = (None, ()) if away else await asyncio.gather(self._hosts(), self._workers())
        answered = hosts is not None
        if not answered and not away:  # schedulers fell silent after the status had read them
            status = await self._status.read(anew=Server.SCHEDULER)
        if hosts is None:
            _, hosts = self._last.find(HOSTS) or (0.0, ())
        depths = await self._queues.depths(
            sorted({(host.cell, host.service) for host in hosts if host.cell and host.service})
        )
        recent = (history := self._live.history())[-10:]
        return Now(
            in_flight=self._live.in_flight,
            started=sum(second.active for second in history),
            failed=sum(second.failed for second in history),
            states=states_of(virtual := [host for host in hosts if not is_bare_metal(host)]),
            capacity=tuple(capacity_of(virtual)),
            metal=tuple(metal_of(hosts)),
            active_per_s=sum(second.active for second in recent) / len(recent),
            failed_per_s=sum(second.failed for second in recent) / len(recent),
            latency=self._live.percentiles(),
            hosts=len(hosts),
            up=sum(host.up for host in hosts),
            disabled=sum(not host.enabled for host in hosts),
            cells=hosts_by_cell(hosts),
            lost_per_s=sum(second.lost_claims for second in recent) / len(recent),
            retries_per_s=sum(second.retries for second in recent) / len(recent),
            waiting=sum(one.waiting for one in depths.queues),
            dead_letters=depths.dead_letters,
            queues=depths.queues[:QUEUES_SHOWN],
            workers=_by_role(workers),
            status=status,
            answered=answered,
            seconds=tuple(history),
        )

    async def _hosts(self) -> tuple[HostRecord, ...] | None:
        try:
            hosts = await self._fleet.hosts_to_count()
        except (Fault, BusError):
            return None
        self._last.keep(HOSTS, hosts)
        return hosts

    async def _failed_builds(self) -> list[BuildRecord]:
        """Those of the last day, as far as FAILURES_READ of each state go; none while no scheduler answers."""
        async with self._reading_failures:
            if self._clock.monotonic() - self._failures_at > FAILURES_AGE_S:
                self._failures_at = self._clock.monotonic()
                after = self._clock.time() - FAILURES_FOR_S
                states = (BuildState.FAILED, BuildState.REFUSED)
                queries = [BuildQuery(state=state, after=after, limit=FAILURES_READ) for state in states]
                with contextlib.suppress(Fault, BusError):  # the status says that no scheduler answers
                    pages = await asyncio.gather(*map(self._api.builds, queries))
                    self._failures = [build for page in pages for build in page.builds]
        return self._failures

    async def _workers(self) -> tuple[WorkerRecord, ...]:
        try:
            return await self._fleet.known_workers()
        except (Fault, BusError):
            return ()

    # --- builds

    async def builds(self, request: Request) -> Response:
        """A page of builds, newest first."""
        caller, requested = caller_of(request), request.query_params
        if requested.get("uuid"):
            return RedirectResponse(f"/builds/{requested['uuid'].strip()}", 303)
        query = parsed(
            lambda: msgspec.convert(
                {
                    "project_id": caller.sees or requested.get("project") or None,
                    "state": requested.get("state") or None,
                    **{name: requested.get(name) or None for name in SEARCHED_BY},
                    "after": moment_of(requested.get("after")),
                    "before": moment_of(requested.get("before")),
                    "before_instance": requested.get("before_instance") or None,
                    "limit": PAGE,
                },
                BuildQuery,
            )
        )
        asked = Asked(self._last, caller)
        page = await asked.of(self._api.builds(query), without=BuildPage(), question=query)
        return self._page(
            request,
            "builds.html",
            asked=asked,
            builds=page.builds,
            older=next_page(request, page, PAGE),
            searched_to=page.searched_to,
            states=list(BuildState),
            query=requested,
            caller=caller,
        )

    async def build(self, request: Request) -> Response:
        """One build's timeline."""
        caller, uuid = caller_of(request), uuid_of(request)
        asked = Asked(self._last, caller)
        found = await asked.of(self._api.build(uuid, caller), without=None, question=("build", uuid))
        if found is None:
            return unanswered_page(request, asked, f"Instance {uuid}", has_session=self._has_session)
        query = ActionQuery(instance_uuid=found.instance_uuid, project_id=found.project_id)
        page = await asked.of(self._actions.actions(query), without=ActionPage(), question=query)
        return self._page(
            request,
            "build.html",
            asked=asked,
            build=found,
            stages=stages_of(found),
            unplaced=page.unplaced,
            lost=lost_claims(found),
            why=explained(found, next(iter(page.actions), None)),
            actions=page.actions,
            kinds=_kinds_for(found, caller),
            ended=found.state in TERMINAL_STATES,
            deletable=found.state in DELETABLE and caller.role is not WebRole.READER,
        )

    def _page(self, request: Request, template: str, **fields: Any) -> Response:
        return rendered(request, template, has_session=self._has_session, **fields)


def hosts_by_cell(hosts: Sequence[HostRecord]) -> dict[str, tuple[int, int]]:
    """{cell: (hosts that are up, all)}. "?": hosts whose cell is not known."""
    cells: dict[str, tuple[int, int]] = {}
    for host in hosts:
        up, every = cells.get(host.cell or "?", (0, 0))
        cells[host.cell or "?"] = (up + host.up, every + 1)
    return cells


def _by_role(workers: Sequence[WorkerRecord]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for one in workers:
        up, every = found.get(one.heartbeat.role, (0, 0))
        found[one.heartbeat.role] = (up + (not one.silent and not one.heartbeat.not_ready), every + 1)
    return found


def _kinds_for(build: BuildRecord, caller: WebCaller) -> list[ActionKind]:
    """The requests that this caller may send about an existing instance; whether it can be done its cell decides."""
    if caller.role is WebRole.READER or build.state is not BuildState.ACTIVE:
        return []
    # Another flavor, an image, a password: by the API.
    needs_more = {ActionKind.RESIZE, ActionKind.REBUILD, ActionKind.OFFLOAD, ActionKind.RESCUE}
    operators = OPERATORS[ActionRequest]["kind"] or frozenset()
    return [
        kind
        for kind in ActionKind
        if kind not in needs_more and (caller.role is WebRole.OPERATOR or kind not in operators)
    ]


def stages_of(build: BuildRecord) -> list[Stage]:
    """The stages of a build that has ended, for the waterfall; empty while it goes on."""
    stage_times = next((line.stage_times for line in reversed(build.timeline) if line.stage_times is not None), None)
    rows: list[Stage] = []
    at = 0.0
    for name, seconds in durations(stage_times).items() if stage_times is not None else ():
        rows.append(Stage(name, at, at + seconds, stage_times.requested if stage_times is not None else 0.0))
        at += seconds
    return rows


def lost_claims(build: BuildRecord) -> list[LostClaim]:
    """The claims that the build lost, first of all the first ones, and who held what was lost."""
    lines = [line for line in build.timeline if line.what == "not_claimed"][:LOST_SHOWN]
    return [
        LostClaim(line.at, host, outcome, tuple(one.consumer for one in line.conflicting_consumers))
        for line in lines
        for host, _, outcome in [line.detail.rpartition(": ")]
    ]

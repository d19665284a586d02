"""The pages: rendered here, kept up to date by server-sent events. They show schedulers' answers, and nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from berth.status.reader import StatusReader
from berth.status.rows import StatusKind, SystemStatus
from berth.text import printable
from berth.web.api import (
    SEARCHED_BY,
    WebApi,
    caller_of,
    check_again,
    json_response,
    moment_of,
    need,
    next_page,
    parsed,
    sse,
    stream_response,
    uuid_of,
)
from berth.web.event_stream import Live, Second
from berth.web.operations import WebActions
from berth.web.pages.fleet import FleetReader, QueueDepth, QueueReader
from berth.web.rendering import Asked, rendered
from berth.web.sign_in_sessions import WebCaller, WebRole
from bus.clock import Clock
from bus.contracts.actions import ActionKind, ActionQuery, ActionRequest
from bus.contracts.build import TERMINAL_STATES, BuildPage, BuildQuery, BuildRecord, BuildState, HostRecord
from bus.contracts.catalogue import OPERATORS
from bus.contracts.stages import durations
from bus.contracts.workers import WorkerRecord
from bus.faults import Fault
from bus.transport import BusError
from scheduler_worker.records.build_record import DELETE_REQUESTED

NOW_EVERY_S = 1.0
PAGE = 50
QUEUES_SHOWN = 10
LOST_SHOWN = 10  # lost claims of a build
MAX_HOST = 255
DELETABLE = frozenset(BuildState).difference({BuildState.REFUSED}, DELETE_REQUESTED)


class Now(Struct, frozen=True):
    """The first page's figures. Rates are a second's; latencies seconds from accepted to active.

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


class LostClaim(Struct, frozen=True):
    """A claim that got nothing. conflicting_consumers: those that held what was lost, as far as the caller may know."""

    at: float
    host: str
    outcome: str
    conflicting_consumers: tuple[str, ...]


class HostMap(Struct, frozen=True):
    """Hosts as columns. resources: {class: [used, total] of each host, null where it has none}; metrics alike."""

    uuid: list[str]
    name: list[str]
    cell: list[str | None]
    state: list[str]
    failed_builds: list[int]
    resources: dict[str, list[tuple[float, float] | None]]
    metrics: dict[str, list[float | None]]


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
        clock: Clock,
        has_session: bool,
    ) -> None:
        self._queues = queues
        self._api = api
        self._actions = actions
        self._fleet = fleet
        self._status = status
        self._live = live
        self._has_session = has_session
        self._clock = clock

    def routes(self) -> list[Route]:
        """The routes of the pages."""
        return [
            Route("/", self.now),
            Route("/now/events", self.now_events),
            Route("/fleet", self.fleet),
            Route("/fleet/map", self.fleet_map),
            Route("/builds", self.builds),
            Route("/builds/{uuid}", self.build),
        ]

    # --- now

    async def now(self, request: Request) -> Response:
        """The present activity, with faults first."""
        need(caller_of(request), WebRole.READER)
        return self._page(request, "now.html", now=await self._state(), failures=list(self._live.failures))

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
        depths = await self._queues.depths(
            sorted({(host.cell, host.service) for host in hosts or () if host.cell and host.service})
        )
        recent = (history := self._live.history())[-10:]
        return Now(
            in_flight=self._live.in_flight,
            active_per_s=sum(second.active for second in recent) / len(recent),
            failed_per_s=sum(second.failed for second in recent) / len(recent),
            latency=self._live.percentiles(),
            hosts=len(hosts or ()),
            up=sum(host.up for host in hosts or ()),
            disabled=sum(not host.enabled for host in hosts or ()),
            cells=hosts_by_cell(hosts or ()),
            lost_per_s=sum(second.lost_claims for second in recent) / len(recent),
            retries_per_s=sum(second.retries for second in recent) / len(recent),
            waiting=sum(one.waiting for one in depths.queues),
            dead_letters=depths.dead_letters,
            queues=depths.queues[:QUEUES_SHOWN],
            workers=_by_role(workers),
            status=status,
            answered=hosts is not None,
            seconds=tuple(history),
        )

    async def _hosts(self) -> tuple[HostRecord, ...] | None:
        try:
            return await self._fleet.hosts_to_count()
        except (Fault, BusError):  # the status has it: no scheduler answers
            return None

    async def _workers(self) -> tuple[WorkerRecord, ...]:
        try:
            return await self._fleet.known_workers()
        except (Fault, BusError):
            return ()

    # --- fleet

    async def fleet(self, request: Request) -> Response:
        """Every host as a cell of a heat map, and the same as a table."""
        need(caller_of(request), WebRole.READER)
        hosts = await (asked := Asked()).of(self._fleet.hosts(), without=())
        shown = _wanted(hosts, request.query_params)
        return self._page(
            request,
            "fleet.html",
            asked=asked,
            hosts=shown[: 2 * PAGE],
            count=len(shown),
            cells=sorted({host.cell or "?" for host in hosts}),
            zones=sorted({host.zone for host in hosts if host.zone is not None}),
            aggregates=sorted({name for host in hosts for name in host.aggregates}),
            classes=_by_frequency(hosts),
            metrics=sorted({name for host in hosts for name in host.metrics}),
            query=request.query_params,
        )

    async def fleet_map(self, request: Request) -> Response:
        """The heat map's data, of the hosts that the page shows."""
        need(caller_of(request), WebRole.READER)
        hosts = _wanted(await self._fleet.hosts(), request.query_params)
        metrics = sorted({name for host in hosts for name in host.metrics})
        classes = sorted({name for host in hosts for name in host.resources})
        return json_response(
            HostMap(
                uuid=[host.uuid for host in hosts],
                name=[printable(host.name) for host in hosts],
                cell=[host.cell for host in hosts],
                state=[state_of(host) for host in hosts],
                failed_builds=[host.failed_builds for host in hosts],
                resources={name: [host.resources.get(name) for host in hosts] for name in classes},
                metrics={name: [host.metrics.get(name) for host in hosts] for name in metrics},
            )
        )

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
        page = await (asked := Asked()).of(self._api.builds(query), without=BuildPage())
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
        caller = caller_of(request)
        found = await self._api.build(uuid_of(request), caller)
        page = await self._actions.actions(ActionQuery(instance_uuid=found.instance_uuid, project_id=found.project_id))
        return self._page(
            request,
            "build.html",
            build=found,
            stages=stages_of(found),
            unplaced=page.unplaced,
            lost=lost_claims(found),
            actions=page.actions,
            kinds=_kinds_for(found, caller),
            ended=found.state in TERMINAL_STATES,
            deletable=found.state in DELETABLE and caller.role is not WebRole.READER,
        )

    def _page(self, request: Request, template: str, **fields: Any) -> Response:
        return rendered(request, template, has_session=self._has_session, **fields)


def state_of(host: HostRecord) -> str:
    """For the map and the table: not reported, down, disabled or up."""
    return "not reported" if not host.reported else "down" if not host.up else "up" if host.enabled else "disabled"


def _wanted(hosts: Sequence[HostRecord], query: Mapping[str, str]) -> list[HostRecord]:
    """The hosts of the cell, zone and aggregate that the page's form names, whose names have what it names."""
    cell, zone, aggregate = (query.get(name, "") for name in ("cell", "zone", "aggregate"))
    part = query.get("q", "").strip().lower()
    return [
        host
        for host in hosts
        if cell in ("", host.cell)
        and zone in ("", host.zone)
        and (not aggregate or aggregate in host.aggregates)
        and part in host.name.lower()
    ]


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


def _by_frequency(hosts: Sequence[HostRecord]) -> list[str]:
    """The classes that hosts have, those of most hosts first."""
    counted = Counter(name for host in hosts for name in host.resources)
    return sorted(counted, key=lambda name: (-counted[name], name != "VCPU", name))


def stages_of(build: BuildRecord) -> list[tuple[str, float, float]]:
    """(stage, its begin, its end) in seconds since the request, for the waterfall; empty while the build goes on."""
    stage_times = next((line.stage_times for line in reversed(build.timeline) if line.stage_times is not None), None)
    rows: list[tuple[str, float, float]] = []
    at = 0.0
    for stage, seconds in durations(stage_times).items() if stage_times is not None else ():
        rows.append((stage, at, at + seconds))
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

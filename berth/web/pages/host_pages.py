"""The pages of the fleet: all hosts, one host, and the plan of its drain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from berth.client.types import DrainBody, HostDetail
from berth.text import printable
from berth.web.api import caller_of, json_response, need, number_of, parsed
from berth.web.operations import Drains
from berth.web.pages.figures import (
    BY_NAME,
    HOST_STATES,
    NOT_WELL,
    ORDERS,
    UP,
    capacity_of,
    is_bare_metal,
    metal_of,
    ordered,
    row_of,
    state_of,
    states_of,
    wanted,
)
from berth.web.pages.fleet import FleetReader
from berth.web.rendering import HOSTS, Asked, LastAnswers, rendered, unanswered_page
from berth.web.sign_in_sessions import WebRole
from bus.contracts.actions import ActionKind
from bus.contracts.build import HostRecord
from bus.contracts.drains import DrainQuery, DrainTarget

PAGE = 100
MAX_PAGES = 10_000
NOT_WELL_SHOWN = 7


class HostMap(Struct, frozen=True):
    """Hosts as columns. resources: {class: [used, total] of each host, null where it has none}; metrics alike."""

    uuid: list[str]
    name: list[str]
    cell: list[str | None]
    state: list[str]
    failed_builds: list[int]
    resources: dict[str, list[tuple[float, float] | None]]
    metrics: dict[str, list[float | None]]


class HostPages:
    """The handlers of these pages."""

    def __init__(self, fleet: FleetReader, drains: Drains, *, last: LastAnswers, has_session: bool) -> None:
        self._fleet = fleet
        self._drains = drains
        self._last = last
        self._has_session = has_session

    def routes(self) -> list[Route]:
        """The routes of the pages."""
        return [
            Route("/fleet", self.fleet),
            Route("/fleet/map", self.fleet_map),
            Route("/fleet/{host}", self.host),
            Route("/fleet/{host}/drain", self.drain_plan),
        ]

    async def fleet(self, request: Request) -> Response:
        """What is not well, every host as a square of a map, and the same as a table of pages."""
        caller, query = caller_of(request), request.query_params
        need(caller, WebRole.READER)
        asked = Asked(self._last)
        hosts = await asked.of(self._fleet.hosts(), without=(), question="hosts")
        matching = wanted(hosts, query)
        shown = [host for host in matching if not is_bare_metal(host)]
        order = query.get("order", BY_NAME)
        number = number_of(request, "page", 1, most=MAX_PAGES)
        listed = matching if query.get("q") else shown  # who looks for a name finds nodes as well
        rows = ordered(listed, order)[(number - 1) * PAGE : number * PAGE]
        unwell = [host for host in shown if state_of(host) != UP]
        unwell.sort(key=lambda host: (HOST_STATES.index(state_of(host)), host.name))
        return self._page(
            request,
            "fleet.html",
            asked=asked,
            rows=[row_of(host) for host in rows],
            count=len(listed),
            first=(number - 1) * PAGE + 1,
            earlier=_page_link(request, number - 1) if number > 1 else "",
            later=_page_link(request, number + 1) if number * PAGE < len(listed) else "",
            states=states_of(shown),
            capacity=capacity_of(shown),
            metal=metal_of(matching),
            unwell=[] if query.get("state") else [row_of(host) for host in unwell[:NOT_WELL_SHOWN]],
            unwell_count=len(unwell),
            cells=sorted({host.cell or "?" for host in hosts}),
            zones=sorted({host.zone for host in hosts if host.zone is not None}),
            aggregates=sorted({name for host in hosts for name in host.aggregates}),
            wells=[NOT_WELL, *states_of(hosts)],
            orders=ORDERS,
            classes=_scarcest_first(shown),
            metrics=sorted({name for host in shown for name in host.metrics}),
            query=query,
        )

    async def fleet_map(self, request: Request) -> Response:
        """The map's data, of the hosts that the page shows."""
        need(caller_of(request), WebRole.READER)
        asked = Asked(self._last)
        found = await asked.of(self._fleet.hosts(), without=None, question="hosts")
        if found is None:
            assert asked.problem is not None
            raise asked.problem
        hosts = [host for host in wanted(found, request.query_params) if not is_bare_metal(host)]
        hosts.sort(key=lambda host: (host.cell or "", host.name))
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

    async def host(self, request: Request) -> Response:
        """One host: its state and what is decided about it, its tree, what is used, and who holds what of it."""
        caller, ident = caller_of(request), request.path_params["host"]
        need(caller, WebRole.READER)
        asked = Asked(self._last)
        detail = await asked.of(self._fleet.detail(ident, fresh=True), without=None, question=("host", ident))
        detail = detail or self._listed(ident)
        if detail is None:
            return unanswered_page(request, asked, f"Host {ident[:255]}", has_session=self._has_session)
        changes = await asked.of(self._fleet.changes(detail.providers), without=[], question=("changes", ident))
        row = row_of(detail.host)
        return self._page(request, "host.html", asked=asked, detail=detail, host=detail.host, row=row, changes=changes)

    def _listed(self, ident: str) -> HostDetail | None:
        """A host as the last list of all had it, where it was not shown by itself before."""
        _, hosts = self._last.find(HOSTS) or (0.0, ())
        found = next((host for host in hosts if ident in (host.uuid, host.name)), None)
        return None if found is None else HostDetail(host=found, providers=(), consumers=(), more=True)

    async def drain_plan(self, request: Request) -> Response:
        """How a host could be drained now, before it is done."""
        need(caller_of(request), WebRole.READER)
        ident, kind = request.path_params["host"], request.query_params.get("kind", "live-migrate")
        parsed(lambda: msgspec.convert({"kind": kind}, DrainBody))
        asked = Asked()
        host = await asked.of(self._fleet.host(ident, fresh=True), without=None)
        if host is None:
            return unanswered_page(request, asked, f"Drain of host {ident[:255]}", has_session=self._has_session)
        query = DrainQuery(host=host.uuid, target=DrainTarget.HOST, kind=ActionKind(kind))
        plan = await asked.of(self._drains.plan(query), without=None)
        if plan is None:
            return unanswered_page(request, asked, f"Drain of host {host.name}", has_session=self._has_session)
        stuck = sum(not one.hosts for one in plan.moves)
        return self._page(request, "drain_plan.html", host=host, plan=plan, kind=kind, stuck=stuck)

    def _page(self, request: Request, template: str, status: int = 200, **fields: Any) -> Response:
        return rendered(request, template, status, has_session=self._has_session, **fields)


def _page_link(request: Request, number: int) -> str:
    return request.url.include_query_params(page=number).query


def _scarcest_first(hosts: Sequence[HostRecord]) -> list[str]:
    """The classes that hosts have: those that most of them have first, and of these the one with the least left."""
    counted = Counter(name for host in hosts for name in host.resources)
    shares = {one.name: one.share for one in capacity_of(hosts)}
    return sorted(counted, key=lambda name: (2 * counted[name] < len(hosts), -shares[name], name != "VCPU", name))

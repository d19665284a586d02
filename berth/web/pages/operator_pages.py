"""Pages for operators: one host and its drain, actions, bare metal, objects, the parts of the system, and what waits
for a decision.

All changes go through `/api/v1`, which the pages' forms call; here is only what they show.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from berth.client.types import MAX_DECIDED, DrainBody
from berth.web.api import caller_of, need, parsed
from berth.web.operations import Drains, NodesReader, WebActions
from berth.web.pages.dead_letters import DeadLetterActions
from berth.web.pages.fleet import FleetReader
from berth.web.pages.objects import SECTIONS, ObjectApi, zones_of
from berth.web.pages.quarantine import SafetyReader
from berth.web.problems import Problem
from berth.web.rendering import Asked, rendered
from berth.web.sign_in_sessions import WebRole
from bus.contracts.actions import ActionKind, ActionQuery
from bus.contracts.base import Label
from bus.contracts.drains import DrainQuery, DrainTarget
from bus.contracts.objects import SCHEDULING, ObjectKind, ObjectLogQuery
from bus.contracts.operations import ServicesQuery

# Rows of one table; what is beyond is counted.
PAGE = 200
MAX_DEAD_LETTERS = 100
# The initial values of a form for a new object.
NEW: dict[ObjectKind, dict[str, Any]] = {
    ObjectKind.FLAVOR: {"vcpus": 1, "memory_mb": 1024, "disk_gb": 10, "extra_specs": {}, "projects": []},
    ObjectKind.AGGREGATE: {"uuid": "", "metadata": {"availability_zone": ""}},
    ObjectKind.GROUP: {"policy": "anti-affinity", "max_per_host": 1},
    ObjectKind.QUOTA: {"limits": {"INSTANCES": 10, "VCPU": 20}},
    ObjectKind.SCHEDULING: {"multipliers": {}},
    ObjectKind.CELL: {"state": "disabled"},
}


class OperatorPages:
    """The handlers of these pages."""

    def __init__(
        self,
        *,
        fleet: FleetReader,
        actions: WebActions,
        drains: Drains,
        metal: NodesReader,
        objects: ObjectApi,
        dead_letters: DeadLetterActions,
        safety: SafetyReader,
        has_session: bool,
    ) -> None:
        self._fleet = fleet
        self._actions = actions
        self._drains = drains
        self._metal = metal
        self._objects = objects
        self._dead_letters = dead_letters
        self._safety = safety
        self._has_session = has_session

    def routes(self) -> list[Route]:
        """The routes of the pages."""
        return [
            Route("/fleet/{host}", self.host),
            Route("/fleet/{host}/drain", self.drain_plan),
            Route("/actions", self.actions),
            Route("/drains/{uuid}", self.drain),
            Route("/metal", self.metal),
            Route("/objects", self.objects),
            Route("/objects/{section}", self.edit_object),
            Route("/quarantine", self.quarantine),
            Route("/system", self.system),
            Route("/system/dead-letters/{bus}/{queue}", self.dead_letters),
        ]

    async def host(self, request: Request) -> Response:
        """One host: its tree, what is used, and who holds what of it."""
        need(caller_of(request), WebRole.READER)
        detail = await self._fleet.detail(request.path_params["host"], fresh=True)
        changes = await self._fleet.changes(detail.providers)
        return self._page(request, "host.html", detail=detail, host=detail.host, changes=changes)

    async def drain_plan(self, request: Request) -> Response:
        """How a host could be drained now, before it is done."""
        need(caller_of(request), WebRole.READER)
        host = await self._fleet.host(request.path_params["host"], fresh=True)
        kind = request.query_params.get("kind", "live-migrate")
        parsed(lambda: msgspec.convert({"kind": kind}, DrainBody))
        plan = await self._drains.plan(DrainQuery(host=host.uuid, target=DrainTarget.HOST, kind=ActionKind(kind)))
        stuck = sum(not one.hosts for one in plan.moves)
        return self._page(request, "drain_plan.html", host=host, plan=plan, kind=kind, stuck=stuck)

    async def drain(self, request: Request) -> Response:
        """The progress of a drain."""
        need(caller_of(request), WebRole.READER)
        return self._page(request, "drain.html", drain=await self._drains.get(request.path_params["uuid"]))

    async def actions(self, request: Request) -> Response:
        """Requests about instances, newest first, and drains."""
        caller, query = caller_of(request), request.query_params
        fields = {
            "project_id": caller.sees or query.get("project") or None,
            "under_way": True if query.get("under_way") == "true" else None,
            "limit": PAGE,
        }
        page = await self._actions.actions(parsed(lambda: msgspec.convert(fields, ActionQuery)))
        drains = await self._drains.list_all(PAGE) if caller.role is not WebRole.PROJECT else []
        return self._page(request, "actions.html", actions=page.actions, drains=drains, query=query)

    async def metal(self, request: Request) -> Response:
        """Ironic's nodes by provision state, those that are not offered first."""
        need(caller_of(request), WebRole.READER)
        state = request.query_params.get("state", "")
        try:
            view, unavailable = await self._metal.view(), None
        except Problem as problem:
            view, unavailable = None, problem
        nodes = [] if view is None else [one for one in view.nodes if state in ("", one.state)]
        nodes.sort(key=lambda node: not node.problems)
        fields = {"view": view, "away": unavailable, "nodes": nodes[:PAGE], "count": len(nodes), "state": state}
        return self._page(request, "metal.html", 200 if unavailable is None else 503, **fields)

    async def objects(self, request: Request) -> Response:
        """All objects, quotas beside what is used, and the newest changes."""
        need(caller_of(request), WebRole.READER)
        revision, found = await self._objects.stored()
        of_kind = {kind: [one for one in found if one.kind is kind] for kind in SECTIONS}
        log = await self._objects.log(ObjectLogQuery(limit=50))
        return self._page(
            request,
            "objects.html",
            revision=revision,
            flavors=of_kind[ObjectKind.FLAVOR],
            aggregates=of_kind[ObjectKind.AGGREGATE],
            groups=of_kind[ObjectKind.GROUP],
            rules=of_kind[ObjectKind.SCHEDULING],
            zones=zones_of(of_kind[ObjectKind.AGGREGATE]),
            quotas=(await self._objects.quotas())[:PAGE],
            log=log.entries,
        )

    async def edit_object(self, request: Request) -> Response:
        """The form that makes, changes or deletes one object."""
        need(caller_of(request), WebRole.OPERATOR)
        section = request.path_params["section"]
        kind = next((kind for kind, name in SECTIONS.items() if name == section), None)
        if kind is None:
            raise Problem(404, "path.unknown", f"there are no {section[:64]}")
        name = request.query_params.get("name", SCHEDULING if kind is ObjectKind.SCHEDULING else "")
        stored = None
        if name:
            _, found = await self._objects.stored(kind, parsed(lambda: msgspec.convert(name, Label)))
            stored = found[0] if found else None
        body = NEW[kind] if stored is None else stored.body
        members = await self._objects.group(stored) if stored is not None and kind is ObjectKind.GROUP else None
        fields = {
            "kind": kind, "section": section, "name": name, "stored": stored, "body": body, "members": members,
        }  # fmt: skip
        return self._page(request, "object.html", **fields)

    async def system(self, request: Request) -> Response:
        """Cells, compute services, workers and dead letters."""
        need(caller_of(request), WebRole.READER)
        asked = Asked()
        # Together: what does not answer holds it up once.
        services, workers, cells, dead_letters = await asyncio.gather(
            asked.of(self._fleet.services(ServicesQuery(limit=PAGE)), without=()),
            asked.of(self._fleet.known_workers(), without=()),
            asked.of(self._fleet.cells(), without=()),
            self._dead_letters.counts(),
        )
        return self._page(
            request,
            "system.html",
            asked=asked,
            cells=cells,
            services=sorted(services, key=lambda one: one.up),
            workers=sorted(workers, key=lambda one: (not one.silent, not one.heartbeat.not_ready))[:PAGE],
            dead_letters=dead_letters,
        )

    async def quarantine(self, request: Request) -> Response:
        """Breakers that are open, and machines in quarantine, to decide about many of them at once."""
        need(caller_of(request), WebRole.READER)
        query = request.query_params
        cell, service, decided = query.get("cell") or None, query.get("service") or None, query.get("decided") == "true"
        page = await self._safety.page(
            cell=cell, service=service, decided=decided, after=query.get("after"), limit=MAX_DECIDED
        )
        further = None if page.next is None else request.url.include_query_params(after=page.next).query
        breakers = await self._safety.breakers(cell, is_open=True)
        return self._page(
            request,
            "quarantine.html",
            page=page,
            further=further,
            breakers=breakers,
            query=query,
            decided=decided,
        )

    async def dead_letters(self, request: Request) -> Response:
        """The dead letters of one queue."""
        need(caller_of(request), WebRole.READER)
        bus, queue = request.path_params["bus"], request.path_params["queue"]
        found = await self._dead_letters.of_queue(bus, parsed(lambda: msgspec.convert(queue, Label)), MAX_DEAD_LETTERS)
        return self._page(request, "letters.html", bus=bus, queue=queue, dead_letters=found)

    def _page(self, request: Request, template: str, status: int = 200, **fields: Any) -> Response:
        return rendered(request, template, status, has_session=self._has_session, **fields)

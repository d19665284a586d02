"""Pages for operators: what waits for a decision, drains, actions, bare metal, and the parts of the system.

All changes go through `/api/v1`, which the pages' forms call; here is only what they show.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from berth.client.repair_types import MAX_DECIDED, QuarantinePage
from berth.web.api import caller_of, need, parsed
from berth.web.operations import Drains, NodesReader, WebActions
from berth.web.pages.dead_letters import DeadLetterActions
from berth.web.pages.fleet import FleetReader
from berth.web.pages.quarantine import SafetyCounts, SafetyReader
from berth.web.rendering import Asked, LastAnswers, rendered, unanswered_page
from berth.web.sign_in_sessions import WebRole
from bus.contracts.actions import ActionPage, ActionQuery
from bus.contracts.base import Label
from bus.contracts.drains import DrainState
from bus.contracts.operations import AdminState, ServicesQuery

# Rows of one table; what is beyond is counted.
PAGE = 200
MAX_DEAD_LETTERS = 100
UNDER_WAY_SHOWN = 50
ENDED_DRAINS_SHOWN = 5


class OperatorPages:
    """The handlers of these pages."""

    def __init__(
        self,
        *,
        fleet: FleetReader,
        actions: WebActions,
        drains: Drains,
        metal: NodesReader,
        dead_letters: DeadLetterActions,
        safety: SafetyReader,
        last: LastAnswers,
        has_session: bool,
    ) -> None:
        self._fleet = fleet
        self._actions = actions
        self._drains = drains
        self._metal = metal
        self._dead_letters = dead_letters
        self._safety = safety
        self._last = last
        self._has_session = has_session

    def routes(self) -> list[Route]:
        """The routes of the pages."""
        return [
            Route("/operations", self.operations),
            Route("/actions", self.actions),
            Route("/drains/{uuid}", self.drain),
            Route("/metal", self.metal),
            Route("/quarantine", self.quarantine),
            Route("/system", self.system),
            Route("/dead-letters", self.all_dead_letters),
            Route("/dead-letters/{bus}/{queue}", self.dead_letters),
        ]

    async def operations(self, request: Request) -> Response:
        """All that waits for a decision or is under way, each with its decision beside it."""
        need(caller_of(request), WebRole.READER)
        asked, under_way = Asked(self._last), ActionQuery(under_way=True, limit=UNDER_WAY_SHOWN)
        # Together: what does not answer holds it up once.
        (hosts, drains, actions), (waiting, breakers, recoveries, dead_letters) = await asyncio.gather(
            asyncio.gather(
                asked.of(self._fleet.hosts(), without=(), question="hosts"),
                asked.of(self._drains.list_all(PAGE), without=[], question="drains"),
                asked.of(self._actions.actions(under_way), without=ActionPage(), question=under_way),
            ),
            asyncio.gather(
                asked.of(self._safety.counts(), without=SafetyCounts({}, {}), question="safety", by_others=True),
                asked.of(self._safety.breakers(None, True), without=[], question="breakers", by_others=True),
                asked.of(self._safety.recoveries(), without=[], question="recoveries", by_others=True),
                asked.of(self._dead_letters.counts(), without=[], question="dead letters", by_others=True),
            ),
        )
        open_drains = [one for one in drains if one.state is not DrainState.ENDED]
        ended = [one for one in drains if one.state is DrainState.ENDED]
        decided = [host for host in hosts if host.admin is not None and host.admin.state is not AdminState.ENABLED]
        return self._page(
            request,
            "operations.html",
            asked=asked,
            breakers=breakers,
            quarantined=waiting.quarantined,
            never_started=waiting.never_started,
            recoveries=[one for one in recoveries if one.state != "open"],
            fenced=[host for host in decided if host.admin is not None and host.admin.state is AdminState.FENCED],
            held=[host for host in decided if host.admin is not None and host.admin.state is not AdminState.FENCED],
            drains=[*open_drains, *ended[:ENDED_DRAINS_SHOWN]],
            open_drains=len(open_drains),
            actions=actions.actions,
            dead_letters=[one for one in dead_letters if one.dead],
        )

    async def drain(self, request: Request) -> Response:
        """The progress of a drain."""
        need(caller_of(request), WebRole.READER)
        uuid, asked = request.path_params["uuid"], Asked(self._last)
        drain = await asked.of(self._drains.get(uuid), without=None, question=("drain", uuid))
        if drain is None:
            return unanswered_page(request, asked, f"Drain {uuid[:36]}", has_session=self._has_session)
        return self._page(request, "drain.html", asked=asked, drain=drain)

    async def actions(self, request: Request) -> Response:
        """Requests about instances, newest first."""
        caller, query = caller_of(request), request.query_params
        fields = {
            "project_id": caller.sees or query.get("project") or None,
            "under_way": True if query.get("under_way") == "true" else None,
            "limit": PAGE,
        }
        asked, actions = Asked(self._last, caller), parsed(lambda: msgspec.convert(fields, ActionQuery))
        page = await asked.of(self._actions.actions(actions), without=ActionPage(), question=actions)
        return self._page(request, "actions.html", asked=asked, actions=page.actions, query=query)

    async def metal(self, request: Request) -> Response:
        """Ironic's nodes by provision state, those that are not offered first."""
        need(caller_of(request), WebRole.READER)
        chosen, asked = request.query_params.get("state", ""), Asked(self._last)
        view = await asked.of(self._metal.view(), without=None, question="metal")
        nodes = [] if view is None else [one for one in view.nodes if chosen in ("", one.state)]
        nodes.sort(key=lambda node: not node.problems)
        return self._page(
            request, "metal.html", asked=asked, view=view, nodes=nodes[:PAGE], count=len(nodes), chosen=chosen
        )

    async def system(self, request: Request) -> Response:
        """Cells, compute services and workers."""
        need(caller_of(request), WebRole.READER)
        asked = Asked(self._last)
        services, workers, cells = await asyncio.gather(
            asked.of(self._fleet.services(ServicesQuery(limit=PAGE)), without=(), question="services"),
            asked.of(self._fleet.known_workers(), without=(), question="workers"),
            asked.of(self._fleet.cells(), without=(), question="cells"),
        )
        return self._page(
            request,
            "system.html",
            asked=asked,
            cells=cells,
            services=sorted(services, key=lambda one: one.up),
            workers=sorted(workers, key=lambda one: (not one.silent, not one.heartbeat.not_ready))[:PAGE],
        )

    async def quarantine(self, request: Request) -> Response:
        """Breakers that are open, and machines in quarantine, to decide about many of them at once."""
        need(caller_of(request), WebRole.READER)
        query = request.query_params
        cell, service, decided = query.get("cell") or None, query.get("service") or None, query.get("decided") == "true"
        asked = Asked()
        machines = self._safety.page(
            cell=cell, service=service, decided=decided, after=query.get("after"), limit=MAX_DECIDED
        )
        page = await asked.of(machines, without=QuarantinePage((), 0))
        further = None if page.next is None else request.url.include_query_params(after=page.next).query
        breakers = await asked.of(self._safety.breakers(cell, is_open=True), without=[])
        return self._page(
            request,
            "quarantine.html",
            asked=asked,
            page=page,
            further=further,
            breakers=breakers,
            query=query,
            decided=decided,
        )

    async def all_dead_letters(self, request: Request) -> Response:
        """How many dead letters each queue has."""
        need(caller_of(request), WebRole.READER)
        asked = Asked(self._last)
        counts = await asked.of(self._dead_letters.counts(), without=[], question="dead letters", by_others=True)
        return self._page(request, "dead_letters.html", asked=asked, counts=counts)

    async def dead_letters(self, request: Request) -> Response:
        """The dead letters of one queue."""
        need(caller_of(request), WebRole.READER)
        bus, queue = request.path_params["bus"], request.path_params["queue"]
        found = await self._dead_letters.of_queue(bus, parsed(lambda: msgspec.convert(queue, Label)), MAX_DEAD_LETTERS)
        return self._page(request, "letters.html", bus=bus, queue=queue, dead_letters=found)

    def _page(self, request: Request, template: str, status: int = 200, **fields: Any) -> Response:
        return rendered(request, template, status, has_session=self._has_session, **fields)

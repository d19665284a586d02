"""`/api/v1` for drains: their plans, begin, command and follow them. Schedulers keep and carry them out."""

from __future__ import annotations

import random
from typing import Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from berth.client import drains as client_drains
from berth.web.access import WebRole
from berth.web.api import (
    API_ROOT,
    ASK_TIMEOUT_S,
    MAX_PAGE,
    caller_of,
    converted,
    json_response,
    need,
    number_of,
    object_of,
    only,
    parsed,
    uuid_of,
)
from berth.web.problems import Problem
from bus.bus import Bus
from bus.clock import new_uuid
from bus.contracts.base import Label, Reason, Uuid, Word
from bus.contracts.drains import (
    AtOnce,
    DeadlineS,
    DrainAction,
    DrainCommand,
    DrainPlan,
    DrainProgress,
    DrainQuery,
    DrainsQuery,
    DrainStart,
    DrainTarget,
    PerMinute,
)
from bus.contracts.moves import MoveKind

# A plan simulates a placement for each instance of its target: seconds for thousands. A person waits no longer.
PLAN_TIMEOUT_S = 20.0

Kind = Literal["live-migrate", "migrate"]


class DrainBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How hosts are to be drained: the fields of drain.start.v1. id: makes it idempotent (else: a new one)."""

    kind: Kind = "live-migrate"
    at_once: AtOnce = 4
    per_minute: PerMinute | None = None
    deadline_s: DeadlineS | None = None
    force: bool = False
    reason: Reason = "drain"
    cell: Word | None = None
    id: Uuid | None = None


class TargetBody(DrainBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same of a host, a compute service, a cell or an aggregate."""

    name: Label
    target: DrainTarget | None = None


class DrainCommandBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why, and (of a resumed one) how long from now it may begin further moves."""

    reason: Reason = ""
    deadline_s: DeadlineS | None = None


class Drains:
    """The reads and commands of the pages and the API about drains."""

    def __init__(self, bus: Bus, rng: random.Random) -> None:
        self._bus = bus
        self._rng = rng

    async def plan(self, query: DrainQuery) -> DrainPlan:
        """Where each instance of a target would go now; nothing is begun, and nothing is held."""
        return await client_drains.plan(self._bus, query, timeout_s=PLAN_TIMEOUT_S)

    async def start(self, name: str, target: DrainTarget | None, body: DrainBody, by: str) -> DrainProgress:
        """Begin a drain."""
        command = DrainStart(
            drain=body.id or new_uuid(self._rng),
            name=name,
            target=target,
            cell=body.cell,
            kind=MoveKind(body.kind),
            at_once=body.at_once,
            per_minute=body.per_minute,
            deadline_s=body.deadline_s,
            force=body.force,
            reason=body.reason,
            by=by,
        )
        return await client_drains.start(self._bus, command)

    async def list_all(self, limit: int = 100) -> list[DrainProgress]:
        """The drains there are, the newest first, without their instances."""
        return list(await client_drains.drains(self._bus, DrainsQuery(limit=limit), timeout_s=ASK_TIMEOUT_S))

    async def get(self, ident: str) -> DrainProgress:
        """One of them. Raises Problem 404."""
        query = parsed(lambda: msgspec.convert({"drain": ident}, DrainsQuery))
        found = await client_drains.drains(self._bus, query, timeout_s=ASK_TIMEOUT_S)
        if not found:
            raise Problem(404, "drain.unknown", f"no drain {ident} is on record")
        return found[0]

    async def command(self, ident: str, action: DrainAction, body: DrainCommandBody, by: str) -> DrainProgress:
        """Pause, resume, stop or undo it. Raises Problem 404."""
        await self.get(ident)
        command = DrainCommand(drain=ident, action=action, by=by, reason=body.reason, deadline_s=body.deadline_s)
        return await client_drains.command(self._bus, command)


class WebDrains:
    """The handlers. Each takes a request of a caller that is known."""

    def __init__(self, drains: Drains) -> None:
        self._drains = drains

    def routes(self) -> list[Route]:
        """The routes below API_ROOT."""
        return [
            Route("/hosts/{host}/drain-plan", self.plan_drain, methods=["GET"]),
            Route("/hosts/{host}/drain", self.start_drain, methods=["POST"]),
            Route("/drain-plan", self.plan_target, methods=["GET"]),
            Route("/drains", self.list_drains, methods=["GET"]),
            Route("/drains", self.drain_target, methods=["POST"]),
            Route("/drains/{uuid}", self.show_drain, methods=["GET"]),
            Route("/drains/{uuid}", self.stop_drain, methods=["DELETE"]),
            Route("/drains/{uuid}/pause", self.pause_drain, methods=["POST"]),
            Route("/drains/{uuid}/resume", self.resume_drain, methods=["POST"]),
            Route("/drains/{uuid}/undo", self.undo_drain, methods=["POST"]),
        ]

    async def plan_drain(self, request: Request) -> Response:
        """Where each instance of a host would go now: ?kind=live-migrate|migrate&cell=. Not for role project."""
        only(request, "kind", "cell")
        return await self._plan(request, request.path_params["host"], DrainTarget.HOST)

    async def plan_target(self, request: Request) -> Response:
        """The same of ?name=&target=host|service|cell|aggregate. Not for role project."""
        only(request, "kind", "cell", "name", "target")
        return await self._plan(request, request.query_params.get("name", ""), request.query_params.get("target"))

    async def start_drain(self, request: Request) -> Response:
        """Disable a host and move every instance away from it, a few at a time. For operators."""
        need(caller_of(request), WebRole.OPERATOR)
        only(request)
        body = converted(await object_of(request), DrainBody)
        host = parsed(lambda: msgspec.convert(request.path_params["host"], Label))
        return await self._start(request, host, DrainTarget.HOST, body)

    async def drain_target(self, request: Request) -> Response:
        """The same of every host of a compute service, a cell or an aggregate. For operators."""
        need(caller_of(request), WebRole.OPERATOR)
        only(request)
        body = converted(await object_of(request), TargetBody)
        return await self._start(request, body.name, body.target, body)

    async def list_drains(self, request: Request) -> Response:
        """The drains there are, newest first: ?limit=. Not for role project."""
        only(request, "limit")
        need(caller_of(request), WebRole.READER)
        return json_response(await self._drains.list_all(number_of(request, "limit", 100, most=MAX_PAGE)))

    async def show_drain(self, request: Request) -> Response:
        """The progress of a drain, and the state of each instance. Not for role project."""
        only(request)
        need(caller_of(request), WebRole.READER)
        return json_response(await self._drains.get(uuid_of(request)))

    async def stop_drain(self, request: Request) -> Response:
        """Begin nothing more of a drain; what is under way ends by itself. For operators."""
        only(request)
        need(caller_of(request), WebRole.OPERATOR)
        caller = caller_of(request)
        stopped = await self._drains.command(uuid_of(request), DrainAction.STOP, DrainCommandBody(), caller.name)
        return json_response(stopped)

    async def pause_drain(self, request: Request) -> Response:
        """Begin no further move until it is resumed. For operators."""
        return await self._command(request, DrainAction.PAUSE)

    async def resume_drain(self, request: Request) -> Response:
        """Go on, also with one that has ended: what has failed is tried again. For operators."""
        return await self._command(request, DrainAction.RESUME)

    async def undo_drain(self, request: Request) -> Response:
        """Move back what it has moved; its hosts are at once what they were before. For operators."""
        return await self._command(request, DrainAction.UNDO)

    async def _plan(self, request: Request, name: str, target: str | None) -> Response:
        need(caller_of(request), WebRole.READER)
        kind = request.query_params.get("kind", "live-migrate")
        parsed(lambda: msgspec.convert(kind, Kind))
        requested = {"host": name, "kind": kind, "cell": request.query_params.get("cell"), "target": target}
        return json_response(await self._drains.plan(parsed(lambda: msgspec.convert(requested, DrainQuery))))

    async def _start(self, request: Request, name: str, target: DrainTarget | None, body: DrainBody) -> Response:
        begun = await self._drains.start(name, target, body, caller_of(request).name)
        return json_response(begun, 202, {"location": f"{API_ROOT}/drains/{begun.id}"})

    async def _command(self, request: Request, action: DrainAction) -> Response:
        need(caller_of(request), WebRole.OPERATOR)
        only(request)
        body = converted(await object_of(request), DrainCommandBody)
        return json_response(await self._drains.command(uuid_of(request), action, body, caller_of(request).name))

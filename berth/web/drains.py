"""`/api/v1` for draining a host: its plan, and drains that this server carries out.

A drain is a client's work (see `berth.draining`): schedulers and conductors do each move. It belongs to this process:
when the process ends nothing more is begun, and a drain that is requested again goes on with what is left.
"""

from __future__ import annotations

import asyncio
import random
from typing import Annotated, Literal

import msgspec
import structlog
from msgspec import Meta as Bound
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from berth.client_moves import MoveClient
from berth.draining import MAX_AT_ONCE, Drain
from berth.web.access import WebRole
from berth.web.api import (
    API_ROOT,
    ASK_TIMEOUT_S,
    caller_of,
    converted,
    json_response,
    need,
    object_of,
    only,
    parsed,
    uuid_of,
)
from berth.web.problems import Problem
from bus.bus import Bus
from bus.clock import Clock, new_uuid
from bus.contracts.base import Label, Reason, Uuid, Word
from bus.contracts.moves import DrainPlan, DrainQuery, MoveKind
from bus.contracts.operations import AdminState, AdminStateSet, SetAdminState

log = structlog.get_logger("web")

PLAN_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 24 * 3600.0
# Drains under way at a time, and ended ones that are remembered.
MAX_DRAINS = 8
MAX_ENDED = 50


class DrainBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a host is to be drained. kind: live, or cold. at_once: instances under way at a time.

    force: begin though some cannot move. cell: where a name is looked for.
    """

    kind: Literal["live-migrate", "migrate"] = "live-migrate"
    at_once: Annotated[int, Bound(ge=1, le=MAX_AT_ONCE)] = 4
    force: bool = False
    reason: Reason = "drain"
    cell: Word | None = None


class DrainFailure(Struct, frozen=True):
    """An instance that could not move."""

    instance_uuid: Uuid
    code: str
    reason: str


class DrainProgress(Struct, frozen=True, kw_only=True):
    """What a drain has come to. state: running, stopping or ended. started_at: seconds since the epoch.

    more: the host has further instances than were planned: drain it again.
    """

    id: Uuid
    host: str
    host_uuid: Uuid
    kind: MoveKind
    by: str
    reason: str
    state: str
    started_at: float
    planned: int
    moved: tuple[Uuid, ...]
    failed: tuple[DrainFailure, ...]
    under_way: tuple[Uuid, ...]
    not_begun: tuple[Uuid, ...]
    more: bool


class _Running(Struct):
    """A drain of this process, and the task that carries it out."""

    drain: Drain
    by: str
    reason: str
    started_at: float
    task: asyncio.Task[None] | None = None


class Drains:
    """The drains of this server."""

    def __init__(self, bus: Bus, clock: Clock, rng: random.Random, process: str) -> None:
        self._bus = bus
        self._clock = clock
        self._rng = rng
        self._process = process
        self._count = 0
        self._drains: dict[str, _Running] = {}

    async def plan(self, query: DrainQuery) -> DrainPlan:
        """Where each instance of a host would go now; nothing is begun, and nothing is held."""
        return await self._bus.request(query, DrainPlan, timeout_s=PLAN_TIMEOUT_S)

    async def start(self, host: str, body: DrainBody, by: str) -> DrainProgress:
        """Disable a host and begin to drain it. Raises Problem 409 or 429."""
        kind = MoveKind(body.kind)
        query = parsed(lambda: msgspec.convert({"host": host, "cell": body.cell, "kind": kind}, DrainQuery))
        planned = await self.plan(query)
        stuck = sum(not one.hosts for one in planned.moves)
        if stuck and not body.force:
            why = f"{stuck} of {len(planned.moves)} instances cannot move; nothing was begun (see force)"
            raise Problem(409, "drain.stuck", why)
        running = [one for one in self._drains.values() if one.task is not None and not one.task.done()]
        if any(one.drain.plan.host_uuid == planned.host_uuid for one in running):
            raise Problem(409, "drain.running", f"{planned.host} is being drained by this server")
        if len(running) >= MAX_DRAINS:
            raise Problem(429, "drain.too_many", f"{MAX_DRAINS} drains are under way here")
        decision = SetAdminState(host=planned.host_uuid, state=AdminState.DISABLED, reason=body.reason, by=by)
        ident = new_uuid(self._rng)
        known = _Running(Drain(planned, kind, at_once=body.at_once), by, body.reason, self._clock.time())
        self._remember(ident, known)
        try:
            await self._bus.request(decision, AdminStateSet, timeout_s=ASK_TIMEOUT_S)
        except BaseException:
            del self._drains[ident]
            raise
        self._count += 1
        work = self._carry_out(known.drain, f"{self._process[:50]}-d{self._count}")
        known.task = asyncio.create_task(work, name=f"drain {ident}")
        return self._progress(ident, known)

    def list_all(self) -> list[DrainProgress]:
        """The drains of this server, the newest first."""
        return [self._progress(ident, known) for ident, known in reversed(self._drains.items())]

    def get(self, ident: str) -> DrainProgress:
        """One of them. Raises Problem 404."""
        return self._progress(ident, self._known(ident))

    def stop(self, ident: str) -> DrainProgress:
        """Begin nothing more of it. Raises Problem 404."""
        self._known(ident).drain.stop()
        return self.get(ident)

    async def close(self) -> None:
        """Begin nothing more; what is under way ends without this server."""
        tasks = [known.task for known in self._drains.values() if known.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _known(self, ident: str) -> _Running:
        if ident not in self._drains:
            raise Problem(404, "drain.unknown", f"this server knows no drain {ident}")
        return self._drains[ident]

    def _remember(self, ident: str, known: _Running) -> None:
        ended = [key for key, one in self._drains.items() if one.task is not None and one.task.done()]
        for key in ended[: max(0, len(ended) - MAX_ENDED + 1)]:
            del self._drains[key]
        self._drains[ident] = known

    async def _carry_out(self, drain: Drain, process: str) -> None:
        following = MoveClient(self._bus, clock=self._clock, process=process)
        try:
            await following.open()
            await drain.run(following, clock=self._clock, timeout_s=DRAIN_TIMEOUT_S)
        except Exception as fault:  # a task of its own: its page has to show the end, whatever it is
            log.exception("web.drain_failed", host=drain.plan.host)
            code = getattr(fault, "code", "internal")
            drain.failed += [(one, code, str(fault)) for one, _ in _left(drain)]
            drain.waiting.clear()
            drain.under_way.clear()
        finally:
            await following.close()

    @staticmethod
    def _progress(ident: str, known: _Running) -> DrainProgress:
        drain, plan = known.drain, known.drain.plan
        over = known.task is not None and known.task.done()
        return DrainProgress(
            id=ident,
            host=plan.host,
            host_uuid=plan.host_uuid,
            kind=drain.kind,
            by=known.by,
            reason=known.reason,
            state="ended" if over else "stopping" if drain.stopped else "running",
            started_at=known.started_at,
            planned=len(plan.moves),
            moved=tuple(drain.moved),
            failed=tuple(DrainFailure(*one) for one in drain.failed),
            under_way=tuple(one.instance_uuid for one, _ in drain.under_way.values()),
            not_begun=tuple(drain.not_begun),
            more=plan.more,
        )


class WebDrains:
    """The handlers. Each takes a request of a caller that is known."""

    def __init__(self, drains: Drains) -> None:
        self._drains = drains

    def routes(self) -> list[Route]:
        """The routes below API_ROOT."""
        return [
            Route("/hosts/{host}/drain-plan", self.plan_drain, methods=["GET"]),
            Route("/hosts/{host}/drain", self.start_drain, methods=["POST"]),
            Route("/drains", self.list_drains, methods=["GET"]),
            Route("/drains/{uuid}", self.show_drain, methods=["GET"]),
            Route("/drains/{uuid}", self.stop_drain, methods=["DELETE"]),
        ]

    async def plan_drain(self, request: Request) -> Response:
        """Where each instance of a host would go now: ?kind=live-migrate|migrate&cell=. Not for role project."""
        only(request, "kind", "cell")
        need(caller_of(request), WebRole.READER)
        query = request.query_params
        kind = query.get("kind", "live-migrate")
        requested = {"host": request.path_params["host"], "kind": kind, "cell": query.get("cell")}
        parsed(lambda: msgspec.convert({"kind": kind}, DrainBody))
        return json_response(await self._drains.plan(parsed(lambda: msgspec.convert(requested, DrainQuery))))

    async def start_drain(self, request: Request) -> Response:
        """Disable a host and move every instance away from it, a few at a time. For operators."""
        caller = caller_of(request)
        need(caller, WebRole.OPERATOR)
        only(request)
        body = converted(await object_of(request), DrainBody)
        host = parsed(lambda: msgspec.convert(request.path_params["host"], Label))
        begun = await self._drains.start(host, body, caller.name)
        return json_response(begun, 202, {"location": f"{API_ROOT}/drains/{begun.id}"})

    async def list_drains(self, request: Request) -> Response:
        """The drains that this server carries out or has ended, newest first. Not for role project."""
        only(request)
        need(caller_of(request), WebRole.READER)
        return json_response(self._drains.list_all())

    async def show_drain(self, request: Request) -> Response:
        """What a drain has come to. Not for role project."""
        only(request)
        need(caller_of(request), WebRole.READER)
        return json_response(self._drains.get(uuid_of(request)))

    async def stop_drain(self, request: Request) -> Response:
        """Begin nothing more of a drain; what is under way ends by itself. For operators."""
        only(request)
        need(caller_of(request), WebRole.OPERATOR)
        return json_response(self._drains.stop(uuid_of(request)))


def _left(drain: Drain) -> list[tuple[str, MoveKind]]:
    rest = [*drain.waiting, *drain.under_way.values()]
    return [(one.instance_uuid, kind) for one, kind in rest]

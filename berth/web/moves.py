"""`/api/v1` for instances: requests about them once they have been built, and what becomes of those."""

from __future__ import annotations

import random

import msgspec
from msgspec import Struct
from starlette.requests import Request

from berth.web.api import (
    API_ROOT,
    ASK_TIMEOUT_S,
    MAX_PAGE,
    Handlers,
    WebApi,
    caller_of,
    json_response,
    may_change,
    message_of,
    number_of,
    object_of,
    parsed,
    route,
    truth_of,
    uuid_of,
)
from berth.web.problems import Problem
from bus.bus import Bus
from bus.clock import new_uuid
from bus.contracts.base import Uuid
from bus.contracts.moves import MoveAccepted, MovePage, MoveQuery, MoveRequest


class MoveTaken(Struct, frozen=True):
    """The answer to a request that is on record. links: where to look at it and at its instance."""

    request_id: Uuid
    instance_uuid: Uuid
    links: dict[str, str]


class WebMoves(Handlers):
    """The handlers. Each takes a request of a caller that is known."""

    def __init__(self, bus: Bus, api: WebApi, rng: random.Random) -> None:
        self._bus = bus
        self._api = api
        self._rng = rng

    @route("POST", "/builds/{uuid}/moves")
    async def create_move(self, request: Request) -> object:
        """Ask for one thing with one instance. Idempotent by request_id; without one, a new one is made up."""
        caller = caller_of(request)
        uuid = uuid_of(request)
        fields = await object_of(request)
        build = await self._api.build(uuid, caller, to_change=True)
        may_change(caller)
        for name, value in (("instance_uuid", uuid), ("project_id", build.project_id)):
            if fields.setdefault(name, value) != value:
                raise Problem(400, "request.invalid", f"{name} is not that of the instance in the path")
        fields.setdefault("request_id", new_uuid(self._rng))
        move = message_of(fields, MoveRequest, caller)
        await self._bus.request(move, MoveAccepted, timeout_s=ASK_TIMEOUT_S, cause=move.request_id)
        here = f"{API_ROOT}/moves/{move.request_id}"
        body = MoveTaken(move.request_id, uuid, {"self": here, "instance": f"{API_ROOT}/builds/{uuid}"})
        return json_response(body, 202, {"location": here})

    @route("GET", "/moves", "instance", "project", "under_way", "limit")
    async def list_moves(self, request: Request) -> object:
        """Requests about instances, newest first: ?instance=&project=&under_way=true|false&limit=."""
        query, caller = request.query_params, caller_of(request)
        project = query.get("project", caller.sees)
        if caller.sees is not None and project != caller.sees:
            raise Problem(403, "project.forbidden", f"this token sees project {caller.sees}")
        requested = {
            "instance_uuid": query.get("instance"),
            "project_id": project,
            "under_way": truth_of(request, "under_way"),
            "limit": number_of(request, "limit", 100, most=MAX_PAGE),
        }
        page = await self.moves(parsed(lambda: msgspec.convert(requested, MoveQuery)))
        return page.moves

    @route("GET", "/moves/{uuid}")
    async def show_move(self, request: Request) -> object:
        """One request about an instance, and how it has ended."""
        uuid, caller = uuid_of(request), caller_of(request)
        page = await self.moves(MoveQuery(request_id=uuid))
        found = next((one for one in page.moves if caller.sees in (None, one.project_id)), None)
        if found is None:
            raise Problem(404, "move.unknown", f"no request {uuid} is on record")
        return found

    async def moves(self, query: MoveQuery) -> MovePage:
        """Ask a scheduler for requests about instances."""
        return await self._bus.request(query, MovePage, timeout_s=ASK_TIMEOUT_S)

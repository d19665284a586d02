"""`/api/v1` for operators: decisions about hosts, and compute services. Each answer is what a scheduler says."""

from __future__ import annotations

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from berth.web.access import WebRole
from berth.web.api import ASK_TIMEOUT_S, caller_of, converted, json_response, need, number_of, object_of, only, parsed
from berth.web.problems import Problem
from bus.bus import Bus
from bus.contracts.base import Reason, Word
from bus.contracts.operations import AdminState, AdminStateSet, ServicesPage, ServicesQuery, SetAdminState

MAX_SERVICES = 100_000


class AdminStateRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a decision about a host. cell: where a name is looked for; the caller's name goes on record."""

    state: AdminState
    reason: Reason = ""
    cell: Word | None = None


class WebOperations:
    """The handlers. Each takes a request of a caller that is known."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def routes(self) -> list[Route]:
        """The routes below API_ROOT."""
        return [
            Route("/hosts/{host}/admin-state", self.decide_about_host, methods=["PUT"]),
            Route("/services", self.list_services, methods=["GET"]),
        ]

    async def decide_about_host(self, request: Request) -> Response:
        """Disable a host, put it under maintenance, or enable it. For operators."""
        caller = caller_of(request)
        need(caller, WebRole.OPERATOR)
        decision = converted(await object_of(request), AdminStateRequest)
        command = parsed(
            lambda: msgspec.convert(
                {"host": request.path_params["host"], "by": caller.name, **msgspec.to_builtins(decision)},
                SetAdminState,
            )
        )
        answer = await self._bus.request(command, AdminStateSet, timeout_s=ASK_TIMEOUT_S)
        return json_response(answer.host)

    async def list_services(self, request: Request) -> Response:
        """Compute services: ?cell=&up=true|false&limit=. Not for role project."""
        query = request.query_params
        only(request, "cell", "up", "limit")
        need(caller_of(request), WebRole.READER)
        up = query.get("up")
        if up not in (None, "true", "false"):
            raise Problem(400, "request.invalid", "up is true or false")
        asked = {
            "cell": query.get("cell"),
            "up": None if up is None else up == "true",
            "limit": number_of(request, "limit", 1000, most=MAX_SERVICES),
        }
        page = await self._bus.request(
            parsed(lambda: msgspec.convert(asked, ServicesQuery)), ServicesPage, timeout_s=ASK_TIMEOUT_S
        )
        return json_response(page.services)

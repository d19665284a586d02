"""`/api/v1` for operators: one host, decisions about it, services, workers and cells."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta as Bound
from msgspec import Struct
from starlette.requests import Request

from berth.web.access import WebRole
from berth.web.api import (
    ASK_TIMEOUT_S,
    Handlers,
    caller_of,
    converted,
    number_of,
    object_of,
    parsed,
    route,
    truth_of,
)
from berth.web.fleet import MAX_SERVICES, FleetReader
from bus.bus import Bus
from bus.contracts.base import Reason, Word
from bus.contracts.operations import (
    AdminState,
    AdminStateSet,
    ForgetHost,
    ForgetService,
    HostForgotten,
    ServiceForgotten,
    ServicesQuery,
    SetAdminState,
)
from bus.contracts.workers import WorkersQuery

MAX_WORKERS = 100_000


class AdminStateRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a decision about a host. cell: where a name is looked for; the caller's name goes on record.

    force: fence a host although its compute service is up.
    """

    state: AdminState
    reason: Reason = ""
    cell: Word | None = None
    force: bool = False


class ForgetRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to forget a host or a service. cell: where a name is looked for; the caller's name goes on
    record.
    """

    reason: Annotated[Reason, Bound(min_length=1)]
    cell: Word | None = None


class WebOperations(Handlers):
    """The handlers. Each takes a request of a caller that is known."""

    def __init__(self, bus: Bus, fleet: FleetReader) -> None:
        self._bus = bus
        self._fleet = fleet

    @route("GET", "/hosts/{host}", role=WebRole.READER)
    async def show_host(self, request: Request) -> object:
        """One host by uuid or name, with its tree, inventories and allocations. Not for role project."""
        return await self._fleet.detail(request.path_params["host"], fresh=True)

    @route("PUT", "/hosts/{host}/admin-state", role=WebRole.OPERATOR)
    async def decide_about_host(self, request: Request) -> object:
        """Disable a host, put it under maintenance, fence it, or enable it. For operators."""
        caller = caller_of(request)
        decision = converted(await object_of(request), AdminStateRequest)
        command = parsed(
            lambda: msgspec.convert(
                {"host": request.path_params["host"], "by": caller.name, **msgspec.to_builtins(decision)},
                SetAdminState,
            )
        )
        answer = await self._bus.request(command, AdminStateSet, timeout_s=ASK_TIMEOUT_S)
        return answer.host

    @route("POST", "/hosts/{host}/forget", role=WebRole.OPERATOR)
    async def forget_host(self, request: Request) -> object:
        """Forget a host that is gone for good: its providers leave the book, its decision the record. For operators."""
        return await self._forget(request, ForgetHost, HostForgotten)

    @route("GET", "/services", "cell", "up", "limit", role=WebRole.READER)
    async def list_services(self, request: Request) -> object:
        """Compute services: ?cell=&up=true|false&limit=. Not for role project."""
        requested = {
            "cell": request.query_params.get("cell"),
            "up": truth_of(request, "up"),
            "limit": number_of(request, "limit", 1000, most=MAX_SERVICES),
        }
        query = parsed(lambda: msgspec.convert(requested, ServicesQuery))
        return await self._fleet.services(query)

    @route("POST", "/services/{service}/forget", role=WebRole.OPERATOR)
    async def forget_service(self, request: Request) -> object:
        """Forget a compute service that is gone for good: its cell drops its lease. For operators."""
        return await self._forget(request, ForgetService, ServiceForgotten)

    @route("GET", "/workers", "role", "limit", role=WebRole.READER)
    async def list_workers(self, request: Request) -> object:
        """Workers by their heartbeats: ?role=&limit=. Not for role project."""
        limit = number_of(request, "limit", 1000, most=MAX_WORKERS)
        requested = {"role": request.query_params.get("role"), "limit": limit}
        page = await self._fleet.workers(parsed(lambda: msgspec.convert(requested, WorkersQuery)))
        return page.workers

    @route("GET", "/cells", role=WebRole.READER)
    async def list_cells(self, request: Request) -> object:
        """Cells with their services and hosts. Not for role project."""
        return await self._fleet.cells()

    async def _forget(
        self,
        request: Request,
        command: type[ForgetHost | ForgetService],
        answer: type[HostForgotten] | type[ServiceForgotten],
    ) -> object:
        body = converted(await object_of(request), ForgetRequest)
        fields = {**request.path_params, "by": caller_of(request).name, **msgspec.to_builtins(body)}
        parsed_command = parsed(lambda: msgspec.convert(fields, command))
        return await self._bus.request(parsed_command, answer, timeout_s=ASK_TIMEOUT_S)

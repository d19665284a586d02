"""The web application: what happens to every request, whatever its route."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any
from urllib.parse import urlencode, urlsplit

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from berth.asyncapi import document as asyncapi_document
from berth.config.settings import Settings
from berth.status.reader import StatusReader
from berth.web.api import API_ROOT, WebApi, json_response
from berth.web.event_stream import Live
from berth.web.history import FleetHistory, WebHistory
from berth.web.openapi import document
from berth.web.operations import Drains, NodesReader, WebActions, WebDrains, WebNodes, WebOperations, WebStatus
from berth.web.pages.dead_letters import DeadLetterActions, WebDeadLetters
from berth.web.pages.fleet import FleetReader, QueueReader
from berth.web.pages.host_pages import HostPages
from berth.web.pages.instances import Pages
from berth.web.pages.login import LoginPages
from berth.web.pages.nova_calls import NovaCalls, NovaPages
from berth.web.pages.object_pages import ObjectPages
from berth.web.pages.objects import ObjectApi, WebObjects
from berth.web.pages.operator_pages import OperatorPages
from berth.web.pages.quarantine import SafetyReader, WebQuarantine
from berth.web.problems import Problem, problem_of, problem_response
from berth.web.rendering import LastAnswers, Section, problem_page
from berth.web.sign_in_sessions import Access, WebRole
from berth.web.tokens import StoredTokens, WebTokens
from berth.web.tracing import TracedRequests
from bus.bus import Bus
from bus.faults import Fault
from bus.service.environment import Environment
from bus.transport import BusError

log = structlog.get_logger("web")

SAFE_METHODS = frozenset({"GET", "HEAD"})
Nav = tuple[Section, ...]
NAV: Nav = (
    Section("Overview", "/"),
    Section("Instances", "/builds", roles=frozenset(WebRole)),
    # Of the tabs of the operations, the one that is a project's business as well.
    Section("Actions", "/actions", roles=frozenset({WebRole.PROJECT})),
    Section("Fleet", "/fleet", (("Hosts", "/fleet"), ("Bare metal", "/metal"))),
    Section(
        "Operations",
        "/operations",
        (
            ("What waits", "/operations"),
            ("Actions", "/actions"),
            ("Breakers and quarantine", "/quarantine"),
            ("Dead letters", "/dead-letters"),
        ),
        ("/drains",),
    ),
    Section("Objects", "/objects", (("Objects", "/objects"), ("Log of changes", "/objects/log"))),
    Section("System", "/system"),
    Section("Nova", "/nova"),
)
NOVA_NAV: Nav = (Section("Nova", "/nova"),)
# Without a session: what one needs to log in.
OPEN_PATHS = ("/static/", "/login", "/healthz", f"{API_ROOT}/login")
_HEADERS = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    b"img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",
}


class SiteGuard:
    """Finds the caller, refuses what another site's page sends, and adds the headers that a browser wants.

    nav: the pages that all others name.
    """

    def __init__(self, app: ASGIApp, access: Access, hosts: frozenset[str] | None, nav: Nav) -> None:
        self._app = app
        self._access = access
        self._hosts = hosts
        self._nav = nav

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        request = Request(scope)
        request.state.nav = self._nav

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS.items()]
            await send(message)

        try:
            self._check_site(request)
            if not request.url.path.startswith(OPEN_PATHS):
                request.state.find_caller = partial(self._access.caller, request.headers, request.cookies)
                request.state.caller = await request.state.find_caller()
        except Problem as problem:
            wants_page = problem.status == 401 and not request.url.path.startswith(API_ROOT)
            response = RedirectResponse(_login_for(request), 303) if wants_page else problem_response(problem)
            await response(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def _check_site(self, request: Request) -> None:
        """A page of another site must neither ask here (a cookie, or being local, would let it) nor rename itself."""
        if self._hosts is not None and _name_of(request.headers.get("host", "")) not in self._hosts:
            raise Problem(403, "host.forbidden", "this server answers to its own name alone")
        if request.method in SAFE_METHODS:
            return
        site = request.headers.get("sec-fetch-site", "none")
        origin = request.headers.get("origin")
        if site not in ("same-origin", "none") or (origin and _host_of(origin) != request.headers.get("host")):
            raise Problem(403, "origin.forbidden", "another site's page may not ask this")


def _login_for(request: Request) -> str:
    """The login page, which leads back to what was asked for."""
    wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return f"/login?{urlencode({'next': wanted})}" if request.method == "GET" and wanted != "/" else "/login"


def _host_of(origin: str) -> str | None:
    """Name and port of an origin; None: it is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _name_of(host: str) -> str:
    return host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host


async def on_problem(request: Request, error: Exception) -> Response:
    """The answer to a request that ended with a fault: a page for a browser, else problem+json."""
    problem = problem_of(error)
    if problem is None and isinstance(error, HTTPException):
        code = {404: "path.unknown", 405: "method.unknown"}.get(error.status_code, "request.refused")
        problem = Problem(error.status_code, code, error.detail, headers=dict(error.headers or {}))
    if problem is None:
        log.error("web.fault", path=request.url.path, exc_info=error)
        problem = Problem(500, "internal", "a defect of berth; the log has it")
    # A page of a defect could have the same defect.
    if problem.status == 500 or request.url.path.startswith(API_ROOT) or not _wants_html(request.headers):
        return problem_response(problem)
    return problem_page(request, problem)


def _wants_html(headers: Mapping[str, str]) -> bool:
    return "text/html" in headers.get("accept", "")


def application(
    env: Environment,
    settings: Settings,
    *,
    bus: Bus,
    live: Live,
    calls: NovaCalls,
    drains: Drains,
    access: Access,
    queues: QueueReader,
    stored: StoredTokens | None,
    fleet: FleetReader,
    metal: NodesReader,
    status: StatusReader,
    history: FleetHistory,
    hosts: frozenset[str] | None,
) -> Starlette:
    """The application. hosts: the names that the Host header may have (None: any, as tokens are needed anyway)."""
    api, objects = WebApi(bus, live, env.rng), ObjectApi(bus)
    actions, box, safety = WebActions(bus, api, env.rng), DeadLetterActions(env, settings), SafetyReader(env)
    last, has_session = LastAnswers(env.clock), not access.open
    pages = Pages(
        api, actions, live, fleet, status=status, queues=queues, history=history, clock=env.clock, last=last,
        has_session=has_session,
    )  # fmt: skip
    of_hosts = HostPages(fleet, drains, last=last, has_session=has_session)
    of_objects = ObjectPages(objects, last=last, has_session=has_session)
    for_operators = OperatorPages(
        fleet=fleet,
        actions=actions,
        drains=drains,
        metal=metal,
        dead_letters=box,
        safety=safety,
        last=last,
        has_session=has_session,
    )
    parts = (
        api,
        actions,
        WebOperations(bus, fleet, env.clock),
        WebStatus(status),
        WebHistory(history),
        WebDrains(drains),
        WebObjects(objects),
        WebTokens(objects, env.clock, stored, access),
        WebDeadLetters(box),
        WebNodes(metal),
        WebQuarantine(safety),
    )
    routes: list[BaseRoute] = [
        *_api_routes([route for part in parts for route in part.routes()]),
        *pages.routes(),
        *of_hosts.routes(),
        *of_objects.routes(),
        *for_operators.routes(),
    ]
    return _served(env, routes, NAV, live=live, calls=calls, access=access, hosts=hosts)


def nova_application(
    env: Environment, *, live: Live, calls: NovaCalls, access: Access, hosts: frozenset[str] | None
) -> Starlette:
    """The pages about calls of Nova alone, where no scheduler of berth's answers the others."""

    async def first(_: Request) -> Response:
        return RedirectResponse("/nova", 303)

    routes: list[BaseRoute] = [Route("/healthz", _healthz), Route("/", first)]
    return _served(env, routes, NOVA_NAV, live=live, calls=calls, access=access, hosts=hosts)


def _served(
    env: Environment,
    routes: Sequence[BaseRoute],
    nav: Nav,
    *,
    live: Live,
    calls: NovaCalls,
    access: Access,
    hosts: frozenset[str] | None,
) -> Starlette:
    """These routes, and what each server has beside them."""
    routes = [
        *routes,
        *NovaPages(calls, live, has_session=not access.open).routes(),
        *LoginPages(access).routes(),
        Mount("/static", StaticFiles(directory=str(resources.files("berth.web") / "static"))),
    ]
    # Expected faults are named: after the handler of Exception alone the fault is raised on, into the log of uvicorn.
    expected = (HTTPException, Problem, Fault, BusError)
    handlers: dict[Any, Any] = {Exception: on_problem} | dict.fromkeys(expected, on_problem)
    guard = Middleware(SiteGuard, access=access, hosts=hosts, nav=nav)
    traced = Middleware(TracedRequests, tracer=env.tracer)
    return Starlette(routes=routes, middleware=[guard, traced], exception_handlers=handlers)


def _api_routes(routes: list[Route]) -> list[BaseRoute]:
    """The HTTP API below its root, with the documents that describe it and the bus; and the check of health."""
    described, of_the_bus = document(routes), asyncapi_document()

    async def openapi(_: Request) -> Response:
        return json_response(described)

    async def asyncapi(_: Request) -> Response:
        return json_response(of_the_bus)

    documents = (Route("/openapi.json", openapi), Route("/asyncapi.json", asyncapi))
    return [Route("/healthz", _healthz), Mount(API_ROOT, routes=[*routes, *documents])]


async def _healthz(_: Request) -> Response:
    return json_response({"alive": True})

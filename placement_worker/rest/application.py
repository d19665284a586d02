"""The ASGI application: the steps that every request takes, on any route."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping

import structlog
from starlette.types import Message, Receive, Scope, Send

from bus.clock import new_uuid
from bus.faults import BrokenInvariant, Transient
from bus.openstack.keystone import SignInRefused
from placement_worker import metrics
from placement_worker.rest.api import CAUSE, Api
from placement_worker.rest.auth import TOKEN, Auth
from placement_worker.rest.faults import STATUS, HttpFault, best, invalid_query
from placement_worker.rest.http import HEADER, JSON, SERVICE, HttpRequest, Response, render, version_of
from placement_worker.rest.policy import Policy
from placement_worker.rest.routes import USAGES, Route, Router, parts_of
from placement_worker.store.port import Unstorable

log = structlog.get_logger("placement.rest")

# The pattern of oslo.middleware. Other values of the header are ignored.
_GLOBAL_ID = re.compile(r"req-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
RETRY_AFTER_S = "1"

# The bound of the time for a whole body, as a multiple of the time-out of one wait.
BODY_TIMEOUTS = 10


class Gone(Exception):
    """The client disconnected before its request was complete."""


class Application:
    """Placement's REST API as an ASGI application. broken: a function that is called with a broken invariant."""

    def __init__(self, api: Api, auth: Auth, policy: Policy, *, broken: Callable[[BrokenInvariant], None]) -> None:
        self._api = api
        self._broken = broken
        self._auth = auth
        self._policy = policy
        self.opened = True  # until placement is open every answer is 503
        self._incoming_bytes = 0  # bytes of incomplete bodies
        metrics.GATHERING.set_function(lambda: self._incoming_bytes)
        self._router = Router()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http", scope["type"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request = _request(scope, headers, f"req-{new_uuid(self._api.rng)}")
        began = self._api.clock.monotonic()
        _bind_ids(request.id, headers)
        try:
            response = await self._answer(request, scope, headers, receive)
        except Gone:
            return
        except HttpFault as fault:
            response = render(fault, request)
        except BrokenInvariant as error:
            self._broken(error)
            response = render(_unexpected(error), request)
        except Exception as error:  # no request may take the process down
            response = render(_unexpected(error), request)
        metrics.count_answer(request.method, request.route, response.status, self._api.clock.monotonic() - began)
        if not request.parts:
            # The version document, or why there is none: keystoneauth requests it in the parent of a nova-scheduler's
            # workers, which would share the connection and read each other's answers.
            response.headers.append((b"connection", b"close"))
        if response.path:
            base = scope.get("scheme", "http").encode() + b"://" + headers.get(b"host", b"")
            response.headers.append((b"location", base + response.path.encode()))
        await _send(send, request, response)

    async def _answer(
        self, request: HttpRequest, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive
    ) -> Response:
        if not self.opened:
            raise HttpFault(503, "Placement is not open yet.", **{"retry-after": RETRY_AFTER_S})
        if request.parts:
            token = headers.get(TOKEN)
            caller = None if token is None else await self._auth.identify(token, headers)
            if caller is None:
                raise HttpFault(401)
            request.caller = caller
        # A header that occurs several times, here once for each service's version, equals one header with commas.
        versions = b",".join(value for name, value in scope["headers"] if name == HEADER)
        request.version = version_of(versions.decode("latin-1"))
        request.version_known = True
        length = _length(headers)
        if length and not request.content_type:
            raise HttpFault(400, "content-type header required when content-length > 0")
        route = self._router.find(request.method, request.parts, request.version)
        request.route = route.path
        _check_types(route, request)
        self._check_policy(route, request)
        if len(request.query_string) > self._api.config.max_query_bytes:
            raise invalid_query(f"more than {self._api.config.max_query_bytes} bytes")
        request.body = await self._body(receive, length)
        return await route.handler(self._api, request)

    def _check_policy(self, route: Route, request: HttpRequest) -> None:
        if route.rule is None:
            return
        caller = request.caller
        project = request.query.get("project_id") if route.rule == USAGES else caller.project_id
        if not self._policy.allows(route.rule, caller, project):
            raise HttpFault(403, f"Policy does not allow {route.rule} to be performed.")

    async def _body(self, receive: Receive, length: int) -> bytes:
        """Read the whole body, within the bounds of bytes and of time."""
        limit = self._api.config.max_body_bytes
        if length > limit:
            raise _too_large(limit)
        if not length:
            return b""
        config, clock = self._api.config, self._api.clock
        until = clock.monotonic() + BODY_TIMEOUTS * config.body_timeout_s
        parts: list[bytes] = []
        size = 0
        try:
            more = True
            while more:  # ends: bounded in bytes, and in time
                message = await self._next(receive, min(config.body_timeout_s, until - clock.monotonic()))
                part = message.get("body", b"")
                size += len(part)
                self._incoming_bytes += len(part)
                if size > limit:
                    raise _too_large(limit)
                if self._incoming_bytes > config.max_bodies_bytes:
                    raise HttpFault(503, "Too many bodies are on their way at once.", **{"retry-after": RETRY_AFTER_S})
                parts.append(part)
                more = message.get("more_body", False)
        finally:
            self._incoming_bytes -= size
        return b"".join(parts)

    async def _next(self, receive: Receive, timeout_s: float) -> Message:
        try:
            async with asyncio.timeout(timeout_s):
                message = await receive()
        except TimeoutError:
            raise HttpFault(408) from None
        if message["type"] == "http.disconnect":
            raise Gone
        return message


def _request(scope: Scope, headers: Mapping[bytes, bytes], request_id: str) -> HttpRequest:
    accept = headers.get(b"accept", b"").decode("latin-1")
    return HttpRequest(
        scope["method"],
        parts_of(scope["path"]),
        scope["query_string"],
        JSON if accept in {"", "*/*"} else accept,
        headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip(),
        request_id,
    )


def _bind_ids(request_id: str, headers: Mapping[bytes, bytes]) -> None:
    """Bind the fields that every log line of this request has. They need not be unbound: each request is a task with a
    context of its own. For a pipelined request that context is a copy of the preceding request's, so every field is set
    or unbound.
    """
    structlog.contextvars.bind_contextvars(request_id=request_id)
    header = headers.get(b"x-openstack-request-id", b"").decode("latin-1")
    if _GLOBAL_ID.fullmatch(header):
        CAUSE.set(header)
        structlog.contextvars.bind_contextvars(global_request_id=header)
    else:
        CAUSE.set(request_id)
        structlog.contextvars.unbind_contextvars("global_request_id")


def _length(headers: Mapping[bytes, bytes]) -> int:
    """Return the length of the body as the client states it; 0 without a body, -1 when the length is unknown."""
    header = headers.get(b"content-length")
    if header is None:
        return -1 if b"transfer-encoding" in headers else 0
    if not header.strip().isdigit():
        raise HttpFault(400, "content-length header must be an integer")
    return int(header)


def _too_large(limit: int) -> HttpFault:
    return HttpFault(413, f"At most {limit} bytes of body are taken (max_body_bytes).")


def _check_types(route: Route, request: HttpRequest) -> None:
    if route.gives and request.accept != JSON and best(request.accept, (JSON,)) is None:
        raise HttpFault(406, f"Only {JSON} is provided")
    if route.takes is not None and request.content_type != JSON:
        kind = request.content_type or "None"
        raise HttpFault(415, f"The media type {kind} is not supported, use {JSON}")


def _unexpected(error: Exception) -> HttpFault:
    """Return the answer to a fault that the client has not caused, or that no check has foreseen."""
    if isinstance(error, Transient):
        log.warning("rest.unavailable", code=error.code, reason=str(error))
        return HttpFault(503, "Placement is out of reach for the moment.", **{"retry-after": RETRY_AFTER_S})
    if isinstance(error, SignInRefused):
        log.error("rest.keystone_forbidden", code=error.code, reason=str(error))
        return HttpFault(503, "Who is calling cannot be found out.")
    if isinstance(error, Unstorable):
        log.info("rest.bad_data", reason=str(error))
        return HttpFault(400, "A value cannot be stored.")
    log.error("rest.failed", error=type(error).__name__, reason=str(error), exc_info=error)
    return HttpFault(500)


async def _send(send: Send, request: HttpRequest, response: Response) -> None:
    headers = response.headers
    if response.body:
        headers.append((b"content-type", response.content_type.encode()))
    if response.status != 204:
        headers.append((b"content-length", str(len(response.body)).encode()))
    headers.append((b"x-openstack-request-id", request.id.encode()))
    if request.version_known:
        headers.append((HEADER, f"{SERVICE} 1.{request.version}".encode()))
        headers.append((b"vary", HEADER))
    assert response.status in STATUS or response.status < 400, response.status
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    body = response.body if request.method != "HEAD" else b""
    await send({"type": "http.response.body", "body": body})

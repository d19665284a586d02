"""A trace of each request to the HTTP API, from its arrival to its answer; what it sets off goes on in it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from berth.web.api import API_ROOT
from bus.tracing.tracer import Tracer

# A stream of events ends when its reader goes; its time is nothing that is to be measured.
STREAMS = "/events"
FAULTS_FROM = 500


class TracedRequests:
    """Stands behind the guard: a stranger begins no trace. A caller's own `traceparent` is honoured."""

    def __init__(self, app: ASGIApp, tracer: Tracer | None) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        path = scope.get("path", "")
        if self._tracer is None or not path.startswith(API_ROOT) or path.endswith(STREAMS):
            await self._app(scope, receive, send)
            return
        about: dict[str, str | int] = {"http.request.method": scope["method"]}
        with self._tracer.serving(scope["method"], Request(scope).headers.get("traceparent"), about) as span:
            if span is None:
                await self._app(scope, receive, send)
                return

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    about["http.response.status_code"] = status = message["status"]
                    if "endpoint" in scope:
                        about["http.route"] = route = _route_of(path, scope.get("path_params", {}))
                        span.name = f"{scope['method']} {route}"
                    if status >= FAULTS_FROM:
                        span.end(f"http.{status}")
                await send(message)

            await self._app(scope, receive, noting)


def _route_of(path: str, params: dict[str, str]) -> str:
    """The path with the names of its parameters instead of their values."""
    named = {value: f"{{{name}}}" for name, value in params.items() if isinstance(value, str)}
    return "/".join(named.get(part, part) for part in path.split("/"))

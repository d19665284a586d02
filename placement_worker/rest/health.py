"""Serves health and metrics on the port of the REST API. Placement has no such paths, so none of its own is hidden."""

from __future__ import annotations

from bus.service.health import PATHS, Health
from placement_worker.rest.application import App, Receive, Scope, Send


def with_health(application: App, health: Health) -> App:
    """Return the application with /healthz, /readyz and /metrics, which need neither a token nor the book."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in PATHS:
            await application(scope, receive, send)
            return
        status, kind, body = health.answer(scope["method"], scope["path"])
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return served

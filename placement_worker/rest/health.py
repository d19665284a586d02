"""Health and metrics on the REST API's own port. Placement has no such paths, so nothing of its API is hidden."""

from __future__ import annotations

from bus.service.health import PATHS, Health
from placement_worker.rest.application import App, Receive, Scope, Send


def with_health(application: App, health: Health) -> App:
    """The application, but for /healthz, /readyz and /metrics, which need no token and no book."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in PATHS:
            await application(scope, receive, send)
            return
        status, kind, body = health.answer(scope["method"], scope["path"])
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return served

"""Runs the REST API as a part of the placement service: listens, serves, and stops within the grace time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import structlog
import uvicorn
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bus.clock import Clock
from bus.faults import BrokenInvariant, Forbidden
from bus.service.health import PATHS, Health
from bus.service.http_protocol import protocol
from bus.service.settings import SettingsError
from placement_worker import metrics
from placement_worker.rest.api import Api
from placement_worker.rest.application import Application
from placement_worker.rest.auth import Auth, NoAuth2, local_auth
from placement_worker.rest.config import CorsConfig, RestConfig
from placement_worker.rest.keystone import Keystone
from placement_worker.rest.policy import Policy


class InProcessRest:
    """The application for a placement service, which is open while its placement worker runs. It accepts every caller,
    as noauth2 on loopback does, unless it gets another `auth`.
    """

    def __init__(self, api: Api, auth: Auth | None = None) -> None:
        self._failed: BrokenInvariant | None = None
        self._ended = asyncio.Event()
        self.api = api
        policy = Policy(api.config.policy, api.clock)
        self.application = Application(api, auth or NoAuth2(), policy, broken=self._fail)
        self.application.opened = False

    async def run(self) -> None:
        """Answer requests until drained. Raises BrokenInvariant."""
        self.application.opened = True
        try:
            await self._ended.wait()
        finally:
            self.application.opened = False
        if self._failed is not None:
            raise self._failed

    async def drain(self, grace_s: float) -> None:
        """Accept no further requests, and finish those in progress within the grace time (seconds)."""
        self.application.opened = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.api.drain()
        self._ended.set()

    def _fail(self, error: BrokenInvariant) -> None:
        """Stop the process because of this error. Requests in progress are still answered."""
        self._failed = self._failed or error
        self._ended.set()


# Request headers that oslo.middleware allows besides those that every browser may send.
_SIMPLE = ("Cache-Control", "Expires", "Last-Modified", "Pragma")


class _Cors(CORSMiddleware):
    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the answer to a preflight request. As in oslo.middleware it names the requested headers only, and its
        status is 200 also when it is refused: the headers alone tell the browser.
        """
        response = super().preflight_response(request_headers)
        requested = request_headers.get("access-control-request-headers")
        if requested and response.status_code == 200:
            response.headers["access-control-allow-headers"] = requested
        response.status_code = 200
        return response


def with_cors(application: ASGIApp, config: CorsConfig) -> ASGIApp:
    """Return the application for pages of the allowed origins, too; unchanged when there is none."""
    if not config.allowed_origin:
        return application
    return _Cors(
        application,
        allow_origins=config.allowed_origin,
        allow_methods=config.allow_methods,
        allow_headers=(*config.allow_headers, *_SIMPLE),
        allow_credentials=config.allow_credentials,
        expose_headers=config.expose_headers,
        max_age=config.max_age,
    )


def with_health(application: ASGIApp, health: Health) -> ASGIApp:
    """Return the application with /healthz, /readyz and /metrics, which need neither a token nor placement."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        answer = application
        if scope["path"] in PATHS:
            status, kind, body = health.answer(scope["method"], scope["path"])
            answer = Response(body, status, {"content-type": kind})
        await answer(scope, receive, send)

    return served


log = structlog.get_logger("placement.rest")

BACKLOG = 1024
STOP_GRACE_S = 5
NOAUTH2 = "noauth2"  # when no `auth` is set


class CannotListen(Forbidden):
    """The address is in use, or does not belong to this computer. A restart does not help."""

    code = "rest.cannot_listen"


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, because the process handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no signal handlers."""
        yield


class RestServer(InProcessRest):
    """Serves the API at `config.listen`. With port 0 the system chooses a free port, which `port` then names."""

    def __init__(self, api: Api) -> None:
        self.config = api.config
        self.host, self.port = address_of(self.config.listen)
        self._auth = _auth_of(self.config, self.host, api.clock)
        super().__init__(api, self._auth)
        self._served: ASGIApp = with_cors(self.application, self.config.cors)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.ready = asyncio.Event()  # requests are answered from placement; the service ends when `run` does

    def add_health(self, health: Health) -> None:
        """Serve /healthz, /readyz and /metrics, too."""
        self._served = with_health(self._served, health)

    async def open(self) -> None:
        """Start to listen. Every answer is 503 until `run` has loaded placement. Raises CannotListen."""
        listening = self._listen()
        self._server = _Server(self._uvicorn())
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]), name="rest server")
        self._serving.add_done_callback(lambda _: listening.close())
        log.info("rest.listening", host=self.host, port=self.port, auth=self.config.auth or NOAUTH2)

    async def run(self) -> None:
        """Serve until drained; `open` is called first if it was not. Raises CannotListen, BrokenInvariant."""
        try:
            await self.api.replica.fresh()  # loads placement before the first search needs it
            if self._serving is None:
                await self.open()
            assert self._serving is not None
            self.application.opened = True
            self.ready.set()
            await asyncio.wait({self._serving})  # a cancellation of `run` does not end the server; `close` does
            self._serving.result()
        finally:
            await self.close()
            self._ended.set()
        if self._failed is not None:
            raise self._failed

    async def close(self) -> None:
        """Stop listening and end the server, drained or not. It may be called again."""
        self.application.opened = False
        self.ready.clear()
        if self._serving is not None and not self._serving.done():
            assert self._server is not None
            self._server.should_exit = self._server.force_exit = True
            await asyncio.wait({self._serving})
        await self._auth.close()

    def _fail(self, error: BrokenInvariant) -> None:
        """Stop the process because of this error. Requests in progress are still answered."""
        self._failed = self._failed or error
        if self._server is not None:
            self._server.should_exit = True

    def _uvicorn(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._served,
            http=protocol(self.config.write_timeout_s, metrics.LET_GO),
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=self.config.max_connections,
            timeout_keep_alive=self.config.keep_alive_s,
            timeout_graceful_shutdown=STOP_GRACE_S,
        )

    async def drain(self, grace_s: float) -> None:
        """Accept no further requests, and finish those in progress within the grace time (seconds)."""
        self.ready.clear()
        if self._server is not None:
            self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.api.drain()
                await self._ended.wait()

    def _listen(self) -> socket.socket:
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            listening = socket.create_server((self.host, self.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise CannotListen(f"{self.host}:{self.port}: {error.strerror or error}") from error
        self.port = listening.getsockname()[1]
        return listening


def _auth_of(config: RestConfig, host: str, clock: Clock) -> Auth:
    if config.auth != "keystone":
        return local_auth(config, host)
    if not config.keystone.auth_url:
        raise SettingsError("rest.keystone", "auth = keystone needs keystone.auth_url")
    return Keystone(config.keystone, clock)


def address_of(listen: str) -> tuple[str, int]:
    """Split HOST:PORT into its parts. Raises SettingsError."""
    host, _, port = listen.rpartition(":")
    if not port.isdigit() or int(port) > 65_535:
        raise SettingsError("rest.listen", f"not HOST:PORT: {listen!r}")
    return host.strip("[]") or "127.0.0.1", int(port)

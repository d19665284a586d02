"""Serves the web application from one process: a bus, a listener, and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Generator

import structlog
import uvicorn
from prometheus_client import Counter
from starlette.applications import Starlette

from berth.config.at_up import UpAddress, leave_address
from berth.config.settings import Settings
from berth.config.site import Site, ironic_of, process_name
from berth.status.reader import StatusReader
from berth.web.application import application, nova_application
from berth.web.event_stream import Live
from berth.web.history import FleetHistory
from berth.web.operations import Drains, NodesReader
from berth.web.pages.fleet import FleetReader, QueueReader
from berth.web.pages.nova_calls import NovaCalls
from berth.web.pages.objects import ObjectApi
from berth.web.sign_in_sessions import LOCAL, Access, check_listen, digest_of
from berth.web.tokens import StoredTokens
from bus.bus import API
from bus.faults import Fault
from bus.local import LocalTransport
from bus.service.environment import Environment
from bus.service.http_protocol import WRITE_TIMEOUT_S, protocol
from bus.transport import BusUnavailable

log = structlog.get_logger("web")

DEFAULT_PORT = 8780
BACKLOG = 1024
MAX_CONNECTIONS = 1_000
KEEP_ALIVE_S = 15
STOP_GRACE_S = 3
DISCONNECTED = Counter(
    "berth_web_disconnected", "Clients that were disconnected, by the step that they were too slow at.", ["at"]
)


class WebCannotListen(Fault):
    """The address is taken, or not of this computer."""

    code = "web.cannot_listen"


class _Server(uvicorn.Server):
    """Without uvicorn's signal handlers: signals are the process's own business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


@contextlib.asynccontextmanager
async def pages_of_up(site: Site, *, wanted: bool) -> AsyncIterator[str]:
    """The pages of a `berth up`, for as long as the block runs: their address, with the token that logs in there.

    Empty when they are not wanted.

    Other users of this computer reach the port as well, so it wants a token, a new one each time. While it runs
    it is in a file of its user's, for the commands of this user.
    """
    if not wanted:
        yield ""
        return
    token = secrets.token_urlsafe(32)
    process = process_name("web")
    access = Access({digest_of(token): LOCAL}, site.clock)
    for port in (DEFAULT_PORT, 0):
        server = WebServer(site.environment(process), site.settings, host="127.0.0.1", port=port, access=access)
        try:
            await server.open()
            break
        except WebCannotListen:
            if port == 0:
                raise
    try:
        remove = leave_address(site.settings.state, UpAddress(server.url, token))
        try:
            yield f"{server.url}/login#{token}"
        finally:
            remove()
    finally:
        await server.close()


class WebServer:
    """The pages and `/api/v1` at one address; port 0 takes a free one, which `port` then names."""

    def __init__(
        self, env: Environment, settings: Settings, *, host: str, port: int, access: Access, of_nova: bool = False
    ) -> None:
        """of_nova: the pages about calls of Nova alone: no scheduler of berth's is on the bus."""
        self.host, self.port = host, port
        self._env, self._settings, self._access = env, settings, access
        self._bus = env.bus(API)
        self._live = Live(self._bus, clock=env.clock, process=env.process)
        self._calls = NovaCalls(self._bus, env.process)
        self._of_nova = of_nova
        self._drains = Drains(self._bus, env.rng)
        self._queues = QueueReader(env)
        # In front of Nova alone no scheduler of berth's has tokens on record.
        self._stored = None if access.open or of_nova else StoredTokens(self._bus, env.clock)
        access.stored = None if self._stored is None else self._stored.caller
        self._fleet = FleetReader(self._bus, env.clock, env.cells)
        self._metal = NodesReader(settings, ObjectApi(self._bus), env.clock)
        nodes = self._metal.nodes_to_count if ironic_of(settings) is not None else None
        self._status = StatusReader(env, settings, self._bus, hosts=self._fleet.hosts_to_count, nodes=nodes)
        self._history = FleetHistory(env, self._fleet, self._live)
        self._keeping: asyncio.Task[None] | None = None
        check_listen(host, access)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def open(self) -> None:
        """Connect, listen and serve. Raises WebCannotListen, SettingsError and what the bus raises."""
        listening = self._listen()
        self.port = listening.getsockname()[1]
        try:
            await self._bus.open()
            await self._live.open()
            await self._calls.open()
        except BaseException:
            listening.close()
            raise
        # Without tokens a page elsewhere could have its own name point here: only names of this computer are served.
        names = frozenset({"127.0.0.1", "localhost", "[::1]", self.host}) if self._access.open else None
        config = uvicorn.Config(
            self._application(names),
            http=protocol(WRITE_TIMEOUT_S, DISCONNECTED),
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_GRACE_S,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]), name="web server")
        self._serving.add_done_callback(lambda _: listening.close())
        if not self._of_nova:
            self._keeping = asyncio.create_task(self._history.keep(), name="history of the fleet")
        log.info("web.listening", url=self.url, open=self._access.open)

    def _application(self, hosts: frozenset[str] | None) -> Starlette:
        if self._of_nova:
            return nova_application(self._env, live=self._live, calls=self._calls, access=self._access, hosts=hosts)
        return application(
            self._env,
            self._settings,
            bus=self._bus,
            live=self._live,
            calls=self._calls,
            drains=self._drains,
            access=self._access,
            queues=self._queues,
            stored=self._stored,
            fleet=self._fleet,
            metal=self._metal,
            status=self._status,
            history=self._history,
            hosts=hosts,
        )

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Serve until then. Raises what ends the serving before, and BusUnavailable when the `berth up` that holds the
        bus has ended.
        """
        assert self._serving is not None
        transport = self._bus.transport
        ends: list[asyncio.Task[object]] = [asyncio.create_task(stop.wait())]
        if isinstance(transport, LocalTransport):  # another one connects again by itself
            ends.append(asyncio.create_task(transport.closed_by_peer()))
        try:
            await asyncio.wait({*ends, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in ends:
                one.cancel()
        if stop.is_set():
            return
        if self._serving.done():
            self._serving.result()
        raise BusUnavailable("the berth up that these pages are of has ended")

    def _listen(self) -> socket.socket:
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise WebCannotListen(f"cannot listen at {self.host}:{self.port}: {error.strerror or error}") from error

    async def close(self) -> None:
        """Stop serving; streams end, and answers under way are cut off after STOP_GRACE_S."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        self._live.end_streams()
        if self._serving is not None and self._server is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving})
        await self._live.close()
        await self._calls.close()
        await self._queues.close()
        await self._status.close()
        await self._bus.close()

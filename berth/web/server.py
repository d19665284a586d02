"""Serves the web application from one process: a bus, a listener, and uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Generator
from pathlib import Path

import structlog
import uvicorn

from berth.web.access import Access, check_listen
from berth.web.application import application
from berth.web.live import Live
from bus.bus import Bus
from bus.clock import Clock
from bus.faults import Fault

log = structlog.get_logger("web")

BACKLOG = 1024
MAX_CONNECTIONS = 1_000
KEEP_ALIVE_S = 15
STOP_GRACE_S = 3


class WebCannotListen(Fault):
    """The address is taken, or not of this machine."""

    code = "web.cannot_listen"


class _Server(uvicorn.Server):
    """Without uvicorn's signal handlers: signals are the process's own business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


class WebServer:
    """The pages and `/api/v1` at one address; port 0 takes a free one, which `port` then names."""

    def __init__(
        self, bus: Bus, *, clock: Clock, rng: random.Random, process: str, host: str, port: int, tokens: Path | None
    ) -> None:
        self.host, self.port = host, port
        self._bus, self._clock, self._rng = bus, clock, rng
        self._live = Live(bus, clock=clock, process=process)
        self._access = Access(tokens, clock)
        check_listen(host, self._access)
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def open(self) -> None:
        """Connect, listen and serve. Raises WebCannotListen, SettingsError and what the bus raises."""
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            listening = socket.create_server((self.host, self.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise WebCannotListen(f"cannot listen at {self.host}:{self.port}: {error.strerror or error}") from error
        self.port = listening.getsockname()[1]
        try:
            await self._bus.open()
            await self._live.open()
        except BaseException:
            listening.close()
            raise
        # Without tokens a page elsewhere could have its own name point here: only names of this machine are served.
        names = frozenset({"127.0.0.1", "localhost", "[::1]", self.host}) if self._access.open else None
        served = application(self._bus, self._live, self._access, clock=self._clock, rng=self._rng, hosts=names)
        config = uvicorn.Config(
            served,
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
        log.info("web.listening", url=self.url, open=self._access.open)

    async def close(self) -> None:
        """Stop serving; streams are cut off after STOP_GRACE_S."""
        if self._serving is not None and self._server is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving})
        await self._live.close()
        await self._bus.close()

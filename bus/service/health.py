"""/healthz, /readyz and /metrics of one process, on a port of its own. GET only, small, bounded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

log = structlog.get_logger(__name__)

MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 64
REQUEST_TIMEOUT_S = 5.0
JSON = "application/json"
PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}

Answer = tuple[int, str, bytes]


class Health:
    """The health server; without `open` it only computes answers, for another server that serves them."""

    def __init__(
        self,
        not_ready: Callable[[], Sequence[str]],  # names the parts that are not ready; empty: ready
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        refresh: Callable[[], Awaitable[None]] | None = None,  # awaited before metrics, for gauges that ask a server
        ages_s: Callable[[], Mapping[str, float]] = dict,  # of copies that are decided by
    ) -> None:
        self.host = host
        self.port = port
        self._not_ready = not_ready
        self._refresh = refresh
        self._ages_s = ages_s
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first

    async def open(self) -> None:
        """Listen on the port; with port 0 on a free one, which `port` then names."""
        self._server = await asyncio.start_server(self._serve, self.host, self.port, limit=MAX_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        log.info("health.listening", host=self.host, port=self.port)

    async def close(self) -> None:
        """Stop listening. Answers in progress have their own time limit."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def answer(self, method: str, path: str) -> Answer:
        """Return status, content type and body for one request."""
        if method not in {"GET", "HEAD"}:
            return 405, JSON, b'{"error":"only GET"}'
        match path.partition("?")[0]:
            case "/healthz":
                return 200, JSON, b'{"alive":true}'
            case "/readyz":
                missing = list(self._not_ready())
                # The pid is included, because another process may have taken the port meanwhile and answer instead.
                said = {"ready": not missing, "not_ready": missing, "pid": os.getpid()}
                ages_s = self._ages_s()
                body = msgspec.json.encode({**said, "ages_s": ages_s} if ages_s else said)
                return (503 if missing else 200), JSON, body
            case "/metrics":
                return 200, CONTENT_TYPE_LATEST, generate_latest()
            case _:
                return 404, JSON, b'{"error":"there are /healthz, /readyz and /metrics"}'

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:  # of many that never send a whole request none keeps a probe out
            next(iter(self._open)).transport.abort()
            del self._open[next(iter(self._open))]
        self._open[writer] = None
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._exchange(reader, writer)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            pass  # the client disconnected or was too slow
        finally:
            self._open.pop(writer, None)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, path, _version = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        except (asyncio.LimitOverrunError, ValueError):
            method, (status, kind, body) = "GET", (400, JSON, b'{"error":"not an HTTP request that we serve"}')
        else:
            if self._refresh is not None and path.partition("?")[0] == "/metrics":
                await self._refresh()
            status, kind, body = self.answer(method, path)
        headers = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        writer.write(headers.encode() + (b"" if method == "HEAD" else body))
        await writer.drain()

"""uvicorn's HTTP protocol with time limits: it closes the connections of clients that are slow to send or to read."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from prometheus_client import Counter
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 30.0
WRITE_TIMEOUT_S = 30.0

# The bound of the time for reading one answer, as a multiple of the write time-out.
WRITE_TIMEOUTS = 10

# The bound of all unsent answers together. Above it, the client that has kept its answer waiting longest is
# disconnected.
MAX_UNSENT_BYTES = 256 * 2**20


# The bytes of an incomplete head that a client may send: the longest query string, and room for headers. Without a
# bound the parser would gather them for ever, more slowly with every turn of the loop.
MAX_IDLE_BYTES = 128 * 2**10


# Requests that a client may send before the answer to its first one is complete; each is kept whole.
MAX_PIPELINED = 32


class TooManyPipelined(Exception):
    """More than MAX_PIPELINED requests wait on one connection."""


class Unsent:
    """The connections of one server whose clients do not read, the one that has waited longest first."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[Protocol, int] = OrderedDict()
        self._total = 0

    def add(self, connection: Protocol, size: int) -> None:
        """Record that this many bytes wait for the client of the connection."""
        self._total += size - self._sizes.get(connection, 0)
        self._sizes[connection] = size
        while self._total > MAX_UNSENT_BYTES and len(self._sizes) > 1:
            next(iter(self._sizes)).disconnect("unsent")

    def remove(self, connection: Protocol) -> None:
        """Remove a connection: its client has read, or has disconnected."""
        self._total -= self._sizes.pop(connection, 0)


class Protocol(HttpToolsProtocol):
    """Closes a connection when the request line and headers do not arrive in time, when the client does not read the
    answer in time, or when it sends too much ahead.
    """

    write_timeout_s = WRITE_TIMEOUT_S
    unsent: Unsent
    disconnected: Counter

    # The time since which a head is awaited. One timer checks it periodically, because a timer for each request would
    # cost 5 µs.
    _head_since: float | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _checks = 0
    _idle_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handle a new connection, and start the time limit of the first request's head."""
        super().connection_made(transport)
        self._head_since = self.loop.time()
        self._check_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle a closed connection."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._is_read()
        self.pipeline.clear()
        super().connection_lost(exc)

    # --- input of the client

    def data_received(self, data: bytes) -> None:
        """Handle received bytes. A client that sends more than MAX_IDLE_BYTES without a complete head or a part of a
        body is refused.
        """
        self._idle_bytes += len(data)
        super().data_received(data)
        if self._idle_bytes > MAX_IDLE_BYTES and not self.transport.is_closing():
            self.disconnected.labels("size").inc()
            self.send_400_response(f"More than {MAX_IDLE_BYTES} bytes of request line and headers.")

    def on_body(self, body: bytes) -> None:
        """Handle a part of a body."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        """Handle the first bytes of the next request."""
        self._head_since = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Handle a complete head. The body has a time limit of its own. Raises TooManyPipelined."""
        self._head_since = None
        self._idle_bytes = 0
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.disconnected.labels("pipeline").inc()
            self.pipeline.clear()
            raise TooManyPipelined  # the parser stops, and the connection is closed after a 400

    def _check_head(self) -> None:
        left = HEAD_TIMEOUT_S
        if self._head_since is not None:
            left -= self.loop.time() - self._head_since
        if left > 0:
            self._head_timer = self.loop.call_later(left, self._check_head)
        else:
            self.disconnect("head")

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without a further request. It is aborted when the client has not read the rest of the last
        answer.
        """
        if self._unsent_bytes():
            self.disconnect("read")
        else:
            super().timeout_keep_alive_handler()

    # --- reading

    def pause_writing(self) -> None:
        """Handle a full send buffer: from now on the client must read within the time limit."""
        super().pause_writing()
        self._checks = 0
        self._await_reading()

    def resume_writing(self) -> None:
        """Handle a send buffer that the client has nearly emptied."""
        super().resume_writing()
        self._is_read()

    def on_response_complete(self) -> None:
        """Handle a complete answer. When the connection closes after it, no other check would find a client that does
        not read the rest.
        """
        super().on_response_complete()
        if self._write_timer is None and self.transport.is_closing() and self._unsent_bytes():
            self._await_reading()

    def _await_reading(self) -> None:
        size = self._unsent_bytes()
        self.unsent.add(self, size)
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = self.loop.call_later(self.write_timeout_s, self._check_progress, size)

    def _check_progress(self, before: int) -> None:
        """Check that the client reads, and that one answer does not take too long."""
        self._checks += 1
        size = self._unsent_bytes()
        if not size:
            self._is_read()
        elif size >= before or self._checks >= WRITE_TIMEOUTS:
            self.disconnect("read")
        else:
            self._await_reading()

    def _is_read(self) -> None:
        self.unsent.remove(self)
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    def disconnect(self, at: str) -> None:
        """Abort the connection. at: the step at which the client was too slow."""
        self.disconnected.labels(at).inc()
        self._is_read()
        # abort() and not close(), which would wait for the client to read.
        self.transport.abort()


def protocol(write_timeout_s: float, disconnected: Counter) -> type[Protocol]:
    """Return the protocol class for one server. write_timeout_s: the time limit for reading, in seconds. disconnected:
    counts the clients that were disconnected, by the step `at`.
    """
    fields = {"write_timeout_s": write_timeout_s, "unsent": Unsent(), "disconnected": disconnected}
    return type("Protocol", (Protocol,), fields)

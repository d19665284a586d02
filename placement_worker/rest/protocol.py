"""uvicorn's HTTP protocol with time limits: the connection of a client that is slow to send or to read is closed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from placement_worker.rest import metrics

HEAD_TIMEOUT_S = 30.0
WRITE_TIMEOUT_S = 30.0

# A client that reads very slowly is disconnected after this many times the write time-out.
WRITE_TIMEOUTS = 10

# Answers that wait for their clients, together; beyond it the client that has kept its answer waiting longest goes.
MAX_UNSENT_BYTES = 256 * 2**20


# Bytes that bring nothing: no end of a head, no part of a body. The longest query and room for headers beside it; one
# turn of the loop may bring more. Beyond it the parser would gather them for ever, more slowly with every turn.
MAX_IDLE_BYTES = 128 * 2**10


class Unsent:
    """The connections of one server that have bytes to send and cannot, the one that has waited longest first."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[Protocol, int] = OrderedDict()
        self._total = 0

    def add(self, connection: Protocol, size: int) -> None:
        """So much waits for this connection's client."""
        self._total += size - self._sizes.get(connection, 0)
        self._sizes[connection] = size
        while self._total > MAX_UNSENT_BYTES and len(self._sizes) > 1:
            next(iter(self._sizes)).let_go("unsent")

    def remove(self, connection: Protocol) -> None:
        """Its client has read, or has gone."""
        self._total -= self._sizes.pop(connection, 0)


class Protocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers are not there in time, or whose answer is not read in time."""

    write_timeout_s = WRITE_TIMEOUT_S
    unsent: Unsent

    # Since when a head is awaited. One timer looks at it now and then: one for each request would cost 5 µs of each.
    _head_since: float | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _checks = 0
    _idle_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: it has this long to send its first request's head."""
        super().connection_made(transport)
        self._head_since = self.loop.time()
        self._check_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._is_read()
        super().connection_lost(exc)

    # --- input of the client

    def data_received(self, data: bytes) -> None:
        """Something came: at most so much of it in a row that is the middle of a head."""
        self._idle_bytes += len(data)
        super().data_received(data)
        if self._idle_bytes > MAX_IDLE_BYTES and not self.transport.is_closing():
            metrics.LET_GO.labels("size").inc()
            self.send_400_response(f"More than {MAX_IDLE_BYTES} bytes of request line and headers.")

    def on_body(self, body: bytes) -> None:
        """A part of a body is here."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        """The next request's first bytes are here."""
        self._head_since = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole; the body has a time limit of its own."""
        self._head_since = None
        self._idle_bytes = 0
        super().on_headers_complete()

    def _check_head(self) -> None:
        left = HEAD_TIMEOUT_S
        if self._head_since is not None:
            left -= self.loop.time() - self._head_since
        if left > 0:
            self._head_timer = self.loop.call_later(left, self._check_head)
        else:
            self.let_go("head")

    def timeout_keep_alive_handler(self) -> None:
        """No further request came. The rest of the last answer is not read."""
        if self._unsent_bytes():
            self.let_go("read")
        else:
            super().timeout_keep_alive_handler()

    # --- reading

    def pause_writing(self) -> None:
        """More waits to be sent than the system takes: the client has to read now."""
        super().pause_writing()
        self._checks = 0
        self._await_reading()

    def resume_writing(self) -> None:
        """It has read nearly all."""
        super().resume_writing()
        self._is_read()

    def on_response_complete(self) -> None:
        """An answer has been handed over. When the connection closes with it, nothing else would notice a client that
        does not read the little that is left."""
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
        """Whether it reads at all, and is not forever about it."""
        self._checks += 1
        size = self._unsent_bytes()
        if not size:
            self._is_read()
        elif size >= before or self._checks >= WRITE_TIMEOUTS:
            self.let_go("read")
        else:
            self._await_reading()

    def _is_read(self) -> None:
        self.unsent.remove(self)
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    def let_go(self, at: str) -> None:
        """End the connection now. at: what its client was too slow at."""
        metrics.LET_GO.labels(at).inc()
        self._is_read()
        # Not close(): that waits for the client to read.
        self.transport.abort()


def protocol(write_timeout_s: float) -> type[Protocol]:
    """The protocol of one server."""
    return type("Protocol", (Protocol,), {"write_timeout_s": write_timeout_s, "unsent": Unsent()})

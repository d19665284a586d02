"""uvicorn's HTTP protocol, with an end to its patience: a client that is slow to say what it wants is let go."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 30.0


class Protocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers are not there in time."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: it has so long to send its first request's head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._head_is_there()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """The next request's first bytes are here."""
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole; the body has a time limit of its own."""
        self._head_is_there()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_is_there()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._let_go)

    def _head_is_there(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _let_go(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

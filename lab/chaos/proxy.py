"""A TCP proxy in front of a server whose connections can be cut, slowed down and stalled, in the middle of a frame.

Everything a worker sends to the broker or the database passes here. Bytes are never changed, dropped or reordered
within a connection: TCP would not do that either. A real network ends connections, lags, and falls silent.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import cast

# The most that one direction holds back before the sender is no longer read from.
MAX_HELD_BYTES = 1 << 20


class End(asyncio.Protocol):
    """One side of a link. Received bytes go to its peer, sooner or later."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.transport: asyncio.Transport | None = None
        self.peer: End | None = None
        self.sees_pressure = False
        self._held: deque[tuple[float, bytes]] = deque()  # (when it may go on, what), from here to the peer
        self.held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self.link.on_connected(self)

    def data_received(self, data: bytes) -> None:
        """Pass on, or hold."""
        link, peer = self.link, self.peer
        straight = not (self._held or link.stalled or link.delay_s)
        if straight and peer is not None and peer.transport is not None:
            if not peer.transport.is_closing():
                peer.transport.write(data)
            return
        self._held.append((link.loop.time() + link.delay_s, data))
        self.held_bytes += len(data)
        self._pressure()
        self.flush_due()

    def flush_due(self) -> None:
        """Pass on the bytes that are due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        peer, link = self.peer, self.link
        if link.stalled or peer is None or peer.transport is None or peer.transport.is_closing():
            return
        now = link.loop.time()
        while self._held and self._held[0][0] <= now:
            _, data = self._held.popleft()
            self.held_bytes -= len(data)
            peer.transport.write(data)
        if self._held:
            self._timer = link.loop.call_at(self._held[0][0], self.flush_due)
        self._pressure()

    def pause_writing(self) -> None:
        """The other side does not read: read no more for it."""
        if self.peer is not None:
            self.peer.sees_pressure = True
            self.peer._pressure()

    def resume_writing(self) -> None:
        """It reads again."""
        if self.peer is not None:
            self.peer.sees_pressure = False
            self.peer._pressure()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone: so is the other side."""
        if self._timer is not None:
            self._timer.cancel()
        self.link.on_lost(self)

    def _pressure(self) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self.sees_pressure or self.held_bytes > MAX_HELD_BYTES:
            if transport.is_reading():
                transport.pause_reading()
        elif not transport.is_reading():
            transport.resume_reading()


class Link:
    """One connection through the proxy: a client's end and the server's."""

    def __init__(self, proxy: TcpProxy) -> None:
        self.loop = asyncio.get_running_loop()
        self.delay_s = 0.0
        self.stalled = False
        self._proxy = proxy
        self.client = End(self)
        self.server = End(self)
        self.client.peer, self.server.peer = self.server, self.client

    def on_connected(self, end: End) -> None:
        """One end stands: the client's first, then ours to the server."""
        if end is self.client:
            self._proxy.on_opened(self)
        elif self.client.transport is None or self.client.transport.is_closing():
            self.cut()
        else:
            self.client.flush_due()

    def on_lost(self, end: End) -> None:
        """One end is gone: close the other. Bytes that were held back are lost with it, as with any reset."""
        other = end.peer
        if other is not None and other.transport is not None:
            other.transport.close()
        self._proxy.on_closed(self)

    def cut(self) -> None:
        """End both sides at once, whatever was on its way."""
        for end in (self.client, self.server):
            if end.transport is not None:
                end.transport.abort()

    def release(self) -> None:
        """Neither slow nor silent any more."""
        self.stalled, self.delay_s = False, 0.0
        self.client.flush_due()
        self.server.flush_due()


class TcpProxy:
    """Listens on a free port of 127.0.0.1 and connects each client to a server: a TCP port or a Unix socket."""

    def __init__(self, *, port: int = 0, path: str = "") -> None:
        self._upstream = (port, path)
        self._links: set[Link] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        """Start to listen."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Link(self).client, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._listener is not None:
            self._listener.close()
        for task in self._connecting:
            task.cancel()
        for link in list(self._links):
            link.cut()

    @property
    def links(self) -> int:
        """Connections that stand."""
        return len(self._links)

    def some(self, share: float, rng: random.Random) -> list[Link]:
        """A random share of the connections, one at least when there is any."""
        links = list(self._links)
        return rng.sample(links, min(len(links), max(1, round(share * len(links)))))

    def on_opened(self, link: Link) -> None:
        """A client is here: reach the server for it."""
        self._links.add(link)
        task = link.loop.create_task(self._reach(link))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def on_closed(self, link: Link) -> None:
        """A connection is over."""
        self._links.discard(link)

    async def _reach(self, link: Link) -> None:
        port, path = self._upstream
        try:
            if path:
                await link.loop.create_unix_connection(lambda: link.server, path)
            else:
                await link.loop.create_connection(lambda: link.server, "127.0.0.1", port)
        except OSError:  # the server is unavailable, and that is what its client shall see
            link.cut()

"""A server on loopback that answers what a test has it answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def answering(body: Callable[[str], bytes], headers: bytes = b"") -> AsyncIterator[str]:
    """A server that answers every request with 200 and whatever the path has."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        content = body(head.split()[1].decode())
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n%bcontent-length: %d\r\n\r\n" % (headers, len(content)))
        writer.write(content)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**20)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

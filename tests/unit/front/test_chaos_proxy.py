"""The proxy changes no byte, and cuts, delays and stalls on command."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import pytest

from lab.chaos.proxy import MAX_HELD_BYTES, TcpProxy

BIG = bytes(range(256)) * 16_384  # 4 MiB


class Echo:
    """Sends back what it gets."""

    def __init__(self) -> None:
        self.port = 0
        self.received = 0

    async def open(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                self.received += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    echo = Echo()
    server = await echo.open()
    yield echo
    server.close()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(port=echo.port)
    await proxy.open()
    yield proxy
    await proxy.close()


Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def pair(proxy: TcpProxy) -> AsyncIterator[Pair]:
    """A connection through the proxy that stands on both sides."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    await there_and_back(b"x", reader, writer)
    yield reader, writer
    await left(writer)


async def left(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110 - the proxy has no events to wait for
            await asyncio.sleep(0)


async def there_and_back(
    data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float = 10.0
) -> bytes:
    async with asyncio.timeout(timeout_s):
        writer.write(data)
        answer, _ = await asyncio.gather(reader.readexactly(len(data)), writer.drain())
        return answer


async def hung_up(reader: asyncio.StreamReader) -> bool:
    """Whether the other side ends the connection."""
    async with asyncio.timeout(60.0):
        try:
            return await reader.read(1) == b""
        except ConnectionError:
            return True


async def test_bytes_pass_unchanged_both_ways(proxy: TcpProxy, pair: Pair) -> None:
    assert await there_and_back(BIG, *pair) == BIG
    assert proxy.links == 1


async def test_a_cut_ends_both_sides(proxy: TcpProxy, pair: Pair) -> None:
    for link in proxy.some(1.0, random.Random(1)):
        link.cut()
    assert await hung_up(pair[0])
    assert proxy.links == 0


async def test_a_stalled_connection_is_silent_and_then_goes_on_in_order(
    proxy: TcpProxy, echo: Echo, pair: Pair
) -> None:
    (link,) = proxy.some(1.0, random.Random(1))
    link.stalled = True
    passing = asyncio.create_task(there_and_back(BIG, *pair))
    await until(lambda: link.client.held_bytes > 0)
    assert echo.received == 1, "nothing reached the server"
    link.release()
    assert await passing == BIG


async def test_what_is_held_back_is_bounded(proxy: TcpProxy, pair: Pair) -> None:
    (link,) = proxy.some(1.0, random.Random(1))
    link.stalled = True
    passing = asyncio.create_task(there_and_back(BIG, *pair))
    await until(lambda: link.client.transport is not None and not link.client.transport.is_reading())
    assert MAX_HELD_BYTES < link.client.held_bytes < 2 * MAX_HELD_BYTES
    link.release()
    assert await passing == BIG


async def test_a_delay_adds_up_in_each_direction(proxy: TcpProxy, pair: Pair) -> None:
    (link,) = proxy.some(1.0, random.Random(1))
    link.delay_s = 0.05
    began = asyncio.get_running_loop().time()
    await there_and_back(b"yz", *pair)
    assert asyncio.get_running_loop().time() - began >= 0.1
    link.release()
    assert await there_and_back(BIG, *pair) == BIG


async def test_an_unavailable_server_is_a_connection_that_ends() -> None:
    gone = TcpProxy(port=1)
    await gone.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", gone.port)
    assert await hung_up(reader)
    await left(writer)
    await gone.close()


async def test_a_client_that_leaves_is_left(proxy: TcpProxy, pair: Pair) -> None:
    (link,) = proxy.some(1.0, random.Random(1))
    link.stalled = True
    pair[1].close()
    await until(lambda: proxy.links == 0)
    link.release()  # late: the peer is gone

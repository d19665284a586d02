"""The socket's own behaviour: who may open it, what it survives, and that its end is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import stat
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from bus.contracts.catalogue import COMMANDS, QueueKind, QueueRow, Where
from bus.local import MAX_CALL, LocalServer
from bus.memory import MemoryTransport
from bus.port import BusError, BusUnavailable, Outgoing, PublishRefused
from tests.contract.rig import PATIENCE_S, Collector, LocalRig, until


@pytest.fixture
async def rig() -> AsyncIterator[LocalRig]:
    rig = LocalRig()
    await rig.open()
    try:
        yield rig
    finally:
        await rig.close()


def frames(*parts: object) -> bytes:
    bodies = [msgspec.msgpack.encode(one) for one in parts]
    return b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


@contextlib.contextmanager
def reported() -> Iterator[list[object]]:
    """What the loop reports of tasks that ended with an error."""
    errors: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    yield errors
    gc.collect()
    loop.set_exception_handler(None)


ROW = QueueRow(
    name="work", where=Where.BOTH, kind=QueueKind.DURABLE, consumer="tests", bindings=((COMMANDS, "work.#"),)
)


def command(body: bytes) -> Outgoing:
    return Outgoing(exchange=COMMANDS, routing_key="work.do", body=body, mandatory=True)


async def test_only_its_user_may_open_the_socket(rig: LocalRig) -> None:
    assert stat.S_IMODE(rig.socket.stat().st_mode) == 0o600


async def test_a_second_server_is_refused_and_a_dead_ones_socket_is_taken_over(rig: LocalRig) -> None:
    second = LocalServer(rig.socket, lambda name, prefix: MemoryTransport(rig.broker, name, prefix=prefix))
    with pytest.raises(BusError, match="another berth is up"):
        await second.open()
    await rig.server.close()
    rig.socket.touch()  # left by a process that was killed
    await second.open()
    try:
        assert (await rig.transport()).connected
    finally:
        await second.close()


async def test_an_unreachable_server_is_reported_at_once(rig: LocalRig) -> None:
    await rig.server.close()
    with pytest.raises(BusUnavailable, match="no berth is up"):
        await rig.transport()


async def test_the_end_of_the_server_ends_every_call_and_gives_nothing_twice(rig: LocalRig) -> None:
    transport = await rig.transport()
    await transport.declare_queue(ROW, "work", ROW.bindings)
    got = Collector(ack=False)
    await transport.consume("work", got, prefetch=1)
    await transport.publish(command(b"1"))
    await got.wait(1)
    await rig.server.close()
    await until(lambda: not transport.connected)
    got.got[0].ack()  # of a connection that is no more: does nothing
    with pytest.raises(BusUnavailable):
        await transport.publish(command(b"2"))


async def test_what_is_too_large_is_refused_and_the_connection_stays(rig: LocalRig) -> None:
    transport = await rig.transport()
    await transport.declare_queue(ROW, "work", ROW.bindings)
    with pytest.raises(PublishRefused):
        await transport.publish(command(bytes(MAX_CALL)))
    await transport.publish(command(b"small"))
    assert await transport.depth("work") == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x01\x90",
        b"",
        b"\x00\x00\x00\x03\x93\x00\x00\x00",
        frames(["api", ""], [0, 0, "nonsense"]),
        frames(["api", ""], [0, 0, "ack"]),
        frames(["api", ""], [0, 0, "depth"]),
        frames(["api", ""], [0, 0, "depth", 7]),
    ],
)
async def test_who_is_no_client_of_ours_is_shown_the_door(rig: LocalRig, sent: bytes) -> None:
    with reported() as errors:
        await shown_the_door(rig, sent)
    assert errors == []
    assert (await rig.transport()).connected


async def test_a_call_with_wrong_arguments_is_answered(rig: LocalRig) -> None:
    transport = await rig.transport()
    with pytest.raises(BusError):
        await transport.depth(7)  # type: ignore[arg-type]
    with pytest.raises(BusError):
        await transport.consume("work", Collector(), prefetch="all")  # type: ignore[arg-type]
    assert transport.connected


async def shown_the_door(rig: LocalRig, sent: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(rig.socket))
    writer.write(sent)
    writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionResetError):  # the door closed on what it had not read
            assert await reader.read() == b""
    writer.close()

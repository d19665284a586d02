"""Frames cut from a connection's bytes are those that pamqp reads, however the bytes come."""

from __future__ import annotations

import asyncio
import random
import struct
from types import SimpleNamespace
from typing import Any

import pamqp.frame
import pytest
from aiormq.connection import FrameReceiver
from aiormq.exceptions import AMQPConnectionError, InvalidFrameError
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel, Queue
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from bus.rabbitmq import patches
from bus.rabbitmq.patches import MAX_FRAME_BYTES, Cut

FRAMES: list[Any] = [
    Basic.Deliver("ctag1.0", 2**62 + 5, True, "berth.commands", "build.request.17.p"),
    ContentHeader(body_size=3, properties=Basic.Properties(message_id="m", headers={"a": 1})),
    ContentBody(b"\xce\x01\x00"),
    Basic.Ack(7, True),
    Basic.Ack(8, False),
    Basic.Nack(9, False, True),
    Heartbeat(),
    Basic.Deliver("", 1, False, "", "é"),
    Basic.Return(312, "NO_ROUTE", "e", "k"),
    Queue.DeclareOk("q", 1, 0),
    Channel.Close(404, "NOT_FOUND", 50, 10),
]
BYTES = b"".join(pamqp.frame.marshal(frame, number) for number, frame in enumerate(FRAMES))


def shown(frame: Any) -> object:
    if isinstance(frame, ContentHeader):
        return frame.body_size, shown(frame.properties)
    if isinstance(frame, Heartbeat):
        return Heartbeat
    return type(frame), frame.value if isinstance(frame, ContentBody) else list(frame)


def plain(data: bytes) -> list[tuple[int, int, object]]:
    found = []
    while data:
        size, channel, frame = pamqp.frame.unmarshal(data)
        found.append((size, channel, shown(frame)))
        data = data[size:]
    return found


def cut_all(pieces: list[bytes]) -> list[tuple[int, int, object]]:
    cut, found = Cut(), []
    for piece in pieces:
        cut.feed(piece)
        while (frame := cut.next()) is not None:
            found.append((frame[0], frame[1], shown(frame[2])))
    assert cut.left == 0
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_frames_are_pamqps_however_the_bytes_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    ends = sorted(rng.sample(range(1, len(BYTES)), rng.randrange(1, 60)))
    pieces = [BYTES[start:end] for start, end in zip([0, *ends], [*ends, len(BYTES)], strict=True)]
    assert cut_all(pieces) == plain(BYTES)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">BHI", 3, 1, MAX_FRAME_BYTES + 1),
        struct.pack(">BHI", 3, 1, 1) + b"xx",  # another last byte
        struct.pack(">BHI", 4, 1, 1) + b"x\xce",  # no such type
        struct.pack(">BHI", 1, 1, 4) + struct.pack(">HH", 60, 60) + b"\xce",  # a delivery without its fields
        struct.pack(">BHI", 1, 1, 5) + struct.pack(">HHB", 60, 60, 200) + b"\xce",
        struct.pack(">BHI", 1, 1, 4) + struct.pack(">HH", 60, 80) + b"\xce",  # an acknowledgement without a tag
        struct.pack(">BHI", 1, 1, 4) + struct.pack(">HH", 999, 1) + b"\xce",
    ],
)
def test_what_is_no_frame_ends_the_connection(data: bytes) -> None:
    cut = Cut()
    cut.feed(data)
    with pytest.raises(InvalidFrameError):
        cut.next()


async def test_a_connection_receives_all_and_reports_when_it_ends_within_a_frame() -> None:
    reader = asyncio.StreamReader()
    receiver = FrameReceiver(reader)
    reader.feed_data(BYTES + BYTES[:9])
    reader.feed_eof()
    found = [await receiver.get_frame() for _ in FRAMES]
    assert [(size, channel, shown(frame)) for size, channel, frame in found] == plain(BYTES)
    with pytest.raises(AMQPConnectionError):
        await receiver.get_frame()


async def test_of_a_body_beyond_the_bound_no_more_is_kept_than_shows_that() -> None:
    """A broker lets 128 MiB pass, and each lane of a scheduler takes such a message."""
    sizes = (0, 1, 400, 1000, 1001, 5000)
    frames = []
    for size in sizes:
        frames.append(ContentHeader(body_size=size))
        frames += [ContentBody(b"x" * min(400, size - start)) for start in range(0, size, 400)]

    async def next_frame() -> object:
        return frames.pop(0)

    channel = SimpleNamespace(_get_frame=next_frame, _on_deliver_frame=None)
    got: list[int] = []
    patches.hand_over_at_once(channel, lambda message: got.append(len(message.body)), 1000)
    while frames:
        await channel._on_deliver_frame(Basic.Deliver("tag", 1, False, "berth", "key"))  # type: ignore[misc]
    assert got == [0, 1, 400, 1000, 1001, 1001]


async def test_a_lost_connection_is_reported_as_by_aiormq() -> None:
    receiver = FrameReceiver(SimpleNamespace(read=_reset))  # type: ignore[arg-type]
    receiver.started, receiver.cut = True, Cut()  # type: ignore[attr-defined]
    with pytest.raises(AMQPConnectionError):
        await receiver.get_frame()


async def _reset(_count: int) -> bytes:
    raise ConnectionResetError

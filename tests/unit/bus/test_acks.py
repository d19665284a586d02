"""Acknowledgements leave together: soon, or when many have gathered, or when something is given back."""

from __future__ import annotations

import asyncio

from aiormq.abc import ChannelFrame

from bus.rabbitmq.delivery import GATHERED_SHARE, LINGER_S, Acks
from tests.kit.virtual_time import on_virtual_time

TURNS = 20  # of the loop: more than sending at once takes
FRAME_SIZE = 21
MULTIPLE = 1


class Channel:
    """The target of acknowledgements."""

    number = 1
    is_closed = False

    def __init__(self) -> None:
        self.write_queue: asyncio.Queue[ChannelFrame] = asyncio.Queue()

    async def sent_at_once(self) -> list[bytes]:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        return [self.write_queue.get_nowait().payload for _ in range(self.write_queue.qsize())]


def given(prefetch: int) -> tuple[Channel, Acks]:
    channel = Channel()
    acks = Acks(channel, prefetch=prefetch)  # type: ignore[arg-type]
    for tag in range(1, prefetch + 1):
        acks.register(tag)
    return channel, acks


@on_virtual_time
async def test_acknowledgements_gather_and_leave_as_one_frame() -> None:
    channel, acks = given(100)
    started = asyncio.get_running_loop().time()
    acks.ack(1)
    assert await channel.sent_at_once() == []
    acks.ack(2)
    frame = await asyncio.wait_for(channel.write_queue.get(), 10)
    assert asyncio.get_running_loop().time() - started >= LINGER_S * 0.45
    assert len(frame.payload) == FRAME_SIZE
    assert (frame.payload[18], frame.payload[19]) == (2, MULTIPLE), "all up to the second"
    acks.ack(3)
    await asyncio.wait_for(channel.write_queue.get(), 10)


@on_virtual_time
async def test_many_leave_at_once_so_that_deliveries_go_on() -> None:
    channel, acks = given(100)
    for tag in range(1, 100 // GATHERED_SHARE + 1):
        acks.ack(tag)
    sent = await channel.sent_at_once()
    assert [payload[18:20] for payload in sent] == [bytes([100 // GATHERED_SHARE, MULTIPLE])]


@on_virtual_time
async def test_where_one_at_a_time_is_delivered_none_waits() -> None:
    channel, acks = given(1)
    acks.ack(1)
    assert len(await channel.sent_at_once()) == 1


@on_virtual_time
async def test_what_is_given_back_takes_along_what_gathered() -> None:
    channel, acks = given(100)
    acks.ack(1)
    acks.nack(2, requeue=True)
    (payload,) = await channel.sent_at_once()
    assert len(payload) == 2 * FRAME_SIZE


@on_virtual_time
async def test_a_connection_that_closes_sends_them_first() -> None:
    channel, acks = given(100)
    acks.ack(1)
    flushing = asyncio.create_task(acks.flush())
    assert len((await asyncio.wait_for(channel.write_queue.get(), 10)).payload) == FRAME_SIZE
    last = await asyncio.wait_for(channel.write_queue.get(), 10)
    assert not flushing.done(), "nothing is written yet"
    last.drain()
    await asyncio.wait_for(flushing, 10)

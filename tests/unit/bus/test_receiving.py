"""Receiving: turns, peers that hang up, requests that are abandoned."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pamqp.frame
import pytest
import uvloop
from aiormq.connection import FrameReceiver
from aiormq.exceptions import AMQPConnectionError, InvalidFrameError
from msgspec import structs
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel, Queue
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.consuming.outcome import Done, Outcome, Received
from bus.memory import MemoryBroker, MemoryTransport
from bus.rabbitmq import patches
from bus.rabbitmq import transport as module
from bus.rabbitmq.errors import translated
from bus.rabbitmq.patches import MAX_FRAME_BYTES, FrameSplitter
from bus.rabbitmq.transport import RabbitTransport
from bus.transport import BusUnavailable
from bus.yielding import YieldingParts, yield_to_loop
from tests.kit.turns import Turns, unfinished

# --- frames cut from a connection's bytes are those that pamqp reads, however the bytes come

FRAMES: list[Any] = [
    Basic.Deliver("ctag1.0", 2**62 + 5, True, "berth.cli", "build.request.p"),
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
    cut, found = FrameSplitter(), []
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
    cut = FrameSplitter()
    cut.feed(data)
    with pytest.raises(InvalidFrameError):
        cut.next()


async def test_a_connection_receives_all_and_reports_when_it_ends_within_a_frame() -> None:
    patches.install()
    reader = asyncio.StreamReader()
    receiver = FrameReceiver(reader)
    reader.feed_data(BYTES + BYTES[:9])
    reader.feed_eof()
    found = [await receiver.get_frame() for _ in FRAMES]
    assert [(size, channel, shown(frame)) for size, channel, frame in found] == plain(BYTES)
    with pytest.raises(AMQPConnectionError):
        await receiver.get_frame()


async def test_of_a_body_beyond_the_bound_no_more_is_kept_than_shows_that_and_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker lets 128 MiB pass, and each lane of a scheduler takes such a message."""
    monkeypatch.setattr(patches, "END_BYTES", 10)
    sizes = (0, 1, 400, 1000, 1001, 1003, 5000)
    frames = []
    for size in sizes:
        frames.append(ContentHeader(body_size=size))
        body = b"x" * (size - 10) + b"its ending"[:size]
        frames += [ContentBody(body[start : start + 500]) for start in range(0, size, 500)]

    async def next_frame() -> object:
        return frames.pop(0)

    channel = SimpleNamespace(_get_frame=next_frame, _on_deliver_frame=None)
    got: list[bytes] = []
    patches.hand_over_at_once(channel, lambda message: got.append(message.body), 1000)
    while frames:
        await channel._on_deliver_frame(Basic.Deliver("tag", 1, False, "berth", "key"))  # type: ignore[misc]
    assert [len(one) for one in got] == [0, 1, 400, 1000, 1001, 1001, 1001]
    assert [one[-10:] for one in got[2:]] == [b"its ending"] * 5


async def test_a_lost_connection_is_reported_as_by_aiormq() -> None:
    patches.install()
    receiver = FrameReceiver(SimpleNamespace(read=_reset))  # type: ignore[arg-type]
    receiver.started, receiver.cut = True, FrameSplitter()  # type: ignore[attr-defined]
    with pytest.raises(AMQPConnectionError):
        await receiver.get_frame()


async def _reset(_count: int) -> bytes:
    raise ConnectionResetError


# --- long work in parts: one part in a turn of the event loop, of all long work together


class Work:
    """Tasks that do long work; by turn of the loop, the numbers of those that went on in it."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.went_on: list[tuple[int, int]] = []

    async def do(self, number: int, parts: int) -> None:
        for _ in range(parts):
            await yield_to_loop()
            self.went_on.append((self._turns.turn, number))

    def most(self) -> int:
        return max(Counter(turn for turn, _ in self.went_on).values())

    @property
    def order(self) -> Sequence[int]:
        return [number for _, number in self.went_on]


async def test_item_16_one_part_of_several_long_works_is_done_in_a_turn() -> None:
    """Parts of two batches and of a list of hosts were one turn of 32 ms, none of them more than 16."""
    counted = Turns()
    work = Work(counted)
    async with counted.counting():
        await asyncio.gather(*(work.do(number, 4) for number in range(3)))
    assert work.most() == 1
    assert work.order == [0, 1, 2] * 4, "each in its turn"
    first, last = work.went_on[0][0], work.went_on[-1][0]
    assert last - first == 11, "no turn is left empty"


async def test_item_16_the_parts_of_two_lists_come_in_turns_of_their_own() -> None:
    counted, seen = Turns(), Counter[int]()

    async def read(items: range) -> None:
        async for part in YieldingParts(items, 2):
            seen[counted.turn] += len(part)

    async with counted.counting():
        await asyncio.gather(read(range(8)), read(range(8)))
    assert seen.total() == 16 and sorted(seen.values()) == [2] * 6 + [4], "only the first parts wait for nothing"


async def test_a_long_work_that_is_alone_goes_on_in_each_turn() -> None:
    """As after a sleep of no time: an idle system is not slower for it."""
    counted = Turns()
    work = Work(counted)
    async with counted.counting():
        await work.do(0, 5)
    assert [turn for turn, _ in work.went_on] == list(range(work.went_on[0][0], work.went_on[0][0] + 5))


async def test_a_cancelled_task_passes_its_turn_on() -> None:
    """The one that has the next turn, one that waits, and one whose turn has just come."""
    for cancelled_after in range(4):
        for cancelled in range(3):
            work = Work(Turns())
            tasks = [asyncio.create_task(work.do(number, 3)) for number in range(3)]
            for _ in range(cancelled_after):
                await asyncio.sleep(0)
            tasks[cancelled].cancel()
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks, return_exceptions=True)
                assert {0, 1, 2} - {cancelled} <= set(work.order)
                await work.do(9, 2)
            assert work.order.count(9) == 2


async def test_items_come_in_order_and_a_small_number_at_once() -> None:
    """A batch that fits into one part waits for nothing, as nearly every batch does."""
    counted = Turns()
    async with counted.counting():
        before = counted.turn
        assert [part async for part in YieldingParts(range(3), 3)] == [[0, 1, 2]]
        assert [part async for part in YieldingParts(range(0), 3)] == []
        assert counted.turn == before
        assert [part async for part in YieldingParts(range(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]
        assert counted.turn > before


def test_each_event_loop_has_turns_of_its_own() -> None:
    """One that ended in the middle of long work holds up no other."""

    ended: list[bool] = []

    async def leave() -> None:
        asyncio.create_task(yield_to_loop())  # noqa: RUF006  (it is left behind on purpose)
        ended.append(False)

    async def wait() -> None:
        await asyncio.wait_for(yield_to_loop(), 60)
        ended.append(True)

    for _ in range(2):
        left = asyncio.new_event_loop()
        left.run_until_complete(leave())
        asyncio.run(wait())
        left.run_until_complete(asyncio.sleep(0))
        left.close()
    assert ended == [False, True] * 2


# --- found by chaos: a broker's end that hangs up before its first frame must not end the wish to connect

ATTEMPTS = 60


class HangsUp:
    """Accepts and closes at once, in a thread of its own: sometimes before the client has looked for a first byte."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        self.enough = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.close()
            self.accepted += 1
            if self.accepted >= ATTEMPTS:
                self._loop.call_soon_threadsafe(self.enough.set)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def test_a_broker_that_hangs_up_is_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On uvloop, as the workers run: there the end can be read before the first frame is asked for."""
    monkeypatch.setattr(module, "RECONNECT", structs.replace(module.RECONNECT, longest_s=0.001))

    async def scenario() -> None:
        broker = HangsUp()
        transport = RabbitTransport(f"amqp://a:b@127.0.0.1:{broker.port}/x", name="api")
        opening = asyncio.create_task(transport.open())
        try:
            async with asyncio.timeout(20):
                await broker.enough.wait()
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            await transport.close()
            broker.close()

    uvloop.run(scenario())


@pytest.mark.parametrize("raised", [Exception(), StopAsyncIteration(), asyncio.IncompleteReadError(b"", 1)])
def test_what_aiormq_raises_when_a_connection_ends_is_an_unavailable_bus(raised: Exception) -> None:
    with pytest.raises(BusUnavailable), translated():
        raise raised


def test_a_bug_of_our_own_is_not_taken_for_an_outage() -> None:
    with pytest.raises(KeyError), translated():
        raise KeyError("a bug")


# --- a consumer whose loop is gone is collected without a word


async def started() -> Consumer:
    clock = SystemClock()
    transport = MemoryTransport(MemoryBroker(clock), "api")
    bus = Bus("api", transport, process="p", clock=clock, rng=random.Random(1))

    async def handle(received: list[Received]) -> list[Outcome]:
        return [Done()] * len(received)

    await bus.open()
    consumer = Consumer(bus, "scheduler.requests", handle, max_batch=1, concurrency=1)  # type: ignore[arg-type]
    await consumer.start()
    return consumer


def test_a_consumer_that_is_collected_waits_for_nothing() -> None:
    loop = asyncio.new_event_loop()
    running = (loop.run_until_complete(started())).run()
    task = loop.create_task(running)
    loop.run_until_complete(asyncio.sleep(0))
    tasks = asyncio.all_tasks(loop)
    loop.close()
    running.close()  # as the garbage collector does; RuntimeError when it awaits something
    assert not task.done()
    assert unfinished()  # this test's own
    for left in tasks:
        left._log_destroy_pending = False  # type: ignore[attr-defined]

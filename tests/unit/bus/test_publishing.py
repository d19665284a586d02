"""Publishing in groups, confirms that come late or never, and the end of a publisher."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from contextlib import suppress

import pytest
from aiormq.abc import ChannelFrame
from aiormq.exceptions import ChannelPreconditionFailed

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.codec import BATCH, TIMEOUT
from bus.consuming.in_flight import DOUBLES_S, GAP, ITEMS_AS_A_BATCH, LONGEST_S, BatchInterval
from bus.contracts.build import BuildEvent, BuildPage, BuildQuery, BuildState
from bus.contracts.cell import CellDelete
from bus.contracts.queues import project_bus
from bus.faults import DatabaseUnavailable, RequestTimeout, RequestUnconfirmed
from bus.memory import MemoryBroker, MemoryTransport
from bus.persistence.group_flush import GroupFlush
from bus.publishing import SLOW_CONFIRM_S, BusLimits, Waiter
from bus.rabbitmq.channels import GATHERED_SHARE, LINGER_S, WRITE_TIMEOUT_S, Acks
from bus.rabbitmq.session import Session
from bus.topology import QueueNames
from bus.transport import BusUnavailable, NotSent, Outgoing, PublishRefused
from tests.contract.rig import boot
from tests.kit.virtual_time import on_virtual_time

# --- one flush for many commits; what it cannot vouch for fails

PATIENCE_S = 20.0


class Disk:
    """A database that counts its flushes; `away` is what the next one raises."""

    def __init__(self) -> None:
        self.connection_losses = 0
        self.flushes = 0
        self.failure: Exception | None = None
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def flush(self) -> None:
        self.flushes += 1
        self.reached.set()
        await self.go_on.wait()
        if self.failure is not None:
            raise self.failure


async def ended(*flushed: asyncio.Future[None]) -> None:
    await asyncio.wait(flushed, timeout=PATIENCE_S)


async def test_many_commits_share_a_flush() -> None:
    disk = Disk()
    group = GroupFlush(disk)
    flushed = [group.after(0) for _ in range(10)]
    assert not any(one.done() for one in flushed)
    await ended(*flushed)
    assert [one.exception() for one in flushed] == [None] * 10
    assert disk.flushes == 1


async def test_who_commits_while_a_flush_is_under_way_gets_another() -> None:
    disk = Disk()
    group = GroupFlush(disk)
    disk.go_on.clear()
    first = group.after(0)
    await asyncio.wait_for(disk.reached.wait(), PATIENCE_S)
    second = group.after(0)
    disk.go_on.set()
    await ended(first)
    assert not second.done()
    await ended(second)
    assert disk.flushes == 2


async def test_a_flush_that_fails_fails_for_all_and_the_next_is_tried() -> None:
    disk = Disk()
    group = GroupFlush(disk)
    disk.failure = DatabaseUnavailable("away")
    flushed = [group.after(0), group.after(0)]
    await ended(*flushed)
    assert [type(one.exception()) for one in flushed] == [DatabaseUnavailable] * 2
    disk.failure = None
    later = group.after(0)
    await ended(later)
    assert later.exception() is None


async def test_what_was_committed_before_a_connection_was_lost_is_not_vouched_for() -> None:
    """The server may have restarted in between: its next flush does not cover what it has lost."""
    disk = Disk()
    group = GroupFlush(disk)
    before = group.after(disk.connection_losses)
    disk.connection_losses += 1
    after = group.after(disk.connection_losses)
    await ended(before, after)
    assert isinstance(before.exception(), DatabaseUnavailable)
    assert after.exception() is None


@pytest.mark.parametrize("when", ["before the flush", "in the flush"])
async def test_at_the_end_nothing_is_vouched_for(when: str) -> None:
    disk = Disk()
    group = GroupFlush(disk)
    disk.go_on.clear()
    flushed = group.after(0)
    if when == "in the flush":
        await asyncio.wait_for(disk.reached.wait(), PATIENCE_S)
    await group.close()
    assert flushed.cancelled()


async def test_a_commit_that_waits_for_the_disk_is_the_flush_of_those_before_it() -> None:
    disk = Disk()
    group = GroupFlush(disk)
    before = group.after(0)
    with group.by_commit() as commit:
        assert commit.wanted
        meanwhile = group.after(0)
        commit.is_done = True
    assert before.done() and before.exception() is None and not meanwhile.done()
    await ended(meanwhile)
    assert disk.flushes == 1
    with group.by_commit() as commit:
        assert not commit.wanted, "nothing waits"


@pytest.mark.parametrize("fails", [True, False])
async def test_a_commit_that_fails_or_wrote_nothing_leaves_it_to_a_flush(fails: bool) -> None:
    disk = Disk()
    group = GroupFlush(disk)
    waiting = group.after(0)
    with suppress(DatabaseUnavailable), group.by_commit():
        if fails:
            raise DatabaseUnavailable("away")
    assert not waiting.done()
    await ended(waiting)
    assert (waiting.exception(), disk.flushes) == (None, 1)


async def test_a_commit_does_not_flush_what_a_lost_connection_committed() -> None:
    disk = Disk()
    group = GroupFlush(disk)
    waiting = group.after(disk.connection_losses)
    disk.connection_losses += 1
    with group.by_commit() as commit:
        commit.is_done = True
    assert isinstance(waiting.exception(), DatabaseUnavailable)


async def test_a_commit_under_way_at_the_end_leaves_nothing_waiting() -> None:
    disk = Disk()
    group = GroupFlush(disk)
    waiting = group.after(0)
    with group.by_commit():
        await group.close()
    assert waiting.cancelled() and disk.flushes == 0


# --- between two batches lies a multiple of what a batch takes alone, whatever goes on

ALONE_S = 0.01


def observe(interval: BatchInterval, seconds: float, *, batches: int = 1, items: int = 0, more: bool = False) -> None:
    for _ in range(batches):
        interval.start_batch(0.0)
        interval.end_batch(seconds, items, 0.0, more=more)


def known() -> BatchInterval:
    """One that has seen a batch alone."""
    interval = BatchInterval()
    observe(interval, ALONE_S)
    return interval


def test_the_first_batch_of_all_waits_for_nothing() -> None:
    assert BatchInterval().wait_s(-1e6) <= 0.0


def test_what_comes_after_a_pause_waits_for_nothing() -> None:
    assert known().wait_s(GAP * ALONE_S) <= 0.0


def test_what_comes_sooner_waits_for_the_rest_of_the_gap() -> None:
    assert known().wait_s(0.001) == pytest.approx(GAP * ALONE_S - 0.001)


@pytest.mark.parametrize("times", [2, 10, 1000])
def test_a_busy_machine_changes_nothing(times: float) -> None:
    """A gap that grew with the time that batches take would make the next ones larger, and so slower, and so on."""
    interval = known()
    observe(interval, times * ALONE_S, batches=100)
    assert interval.gap_s == pytest.approx(GAP * ALONE_S)


def test_a_large_batch_shows_what_one_alone_would_take() -> None:
    interval = BatchInterval()
    observe(interval, 3 * ALONE_S, items=int(2 * ITEMS_AS_A_BATCH))
    assert interval.gap_s == pytest.approx(GAP * ALONE_S)


def test_the_gap_has_a_bound() -> None:
    interval = BatchInterval()
    observe(interval, 100.0)
    assert interval.gap_s == LONGEST_S


def test_a_gap_that_would_not_make_the_next_batch_larger_is_none() -> None:
    interval = known()
    observe(interval, 3 * ALONE_S, more=True)
    assert interval.gap_s == 0.0


def test_what_it_takes_alone_is_learned_anew() -> None:
    """A machine that has become slower for good is known as that after a while."""
    interval = known()
    for minute in range(1, int(3 * DOUBLES_S / 60.0)):
        interval.end_batch(3 * ALONE_S, 0, 60.0 * minute, more=False)
    assert interval.gap_s == pytest.approx(GAP * 3 * ALONE_S)


# --- acknowledgements leave together: soon, or when many have gathered, or when something is given back

TURNS = 20  # of the loop: more than sending at once takes
FRAME_SIZE = 21
MULTIPLE = 1


class Channel:
    """The target of acknowledgements."""

    number = 1
    is_closed = False

    def __init__(self) -> None:
        self.write_queue: asyncio.Queue[ChannelFrame] = asyncio.Queue()
        self.__close_event = asyncio.Event()  # of this class's name, as aiormq has it
        self.create_future = asyncio.get_running_loop().create_future

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
    last = await asyncio.wait_for(channel.write_queue.get(), 10)
    assert len(last.payload) == FRAME_SIZE
    assert not flushing.done(), "nothing is written yet"
    last.drain()
    await asyncio.wait_for(flushing, 10)


@on_virtual_time
async def test_all_who_wait_in_one_turn_learn_that_their_frames_are_written() -> None:
    channel, acks = given(100)
    acks.ack(1)
    flushing = [asyncio.create_task(acks.flush()) for _ in range(3)]
    await asyncio.sleep(0)
    flushing[1].cancel()  # it ends alone
    last = await asyncio.wait_for(channel.write_queue.get(), 10)
    last.drain()
    ended = await asyncio.wait_for(asyncio.gather(*flushing, return_exceptions=True), 10)
    assert [type(one) for one in ended] == [type(None), asyncio.CancelledError, type(None)]
    assert asyncio.get_running_loop().time() < WRITE_TIMEOUT_S


TIMED_OUT = ChannelPreconditionFailed(406, "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out")


@pytest.mark.parametrize("closed", [asyncio.InvalidStateError("invalid state"), TIMED_OUT], ids=["library", "broker"])
@on_virtual_time
async def test_nothing_waits_on_a_channel_that_was_closed_before_its_connection(closed: Exception) -> None:
    """Whyever it was: who wants to know whether a delivery comes again is told that it may."""
    channel, acks = given(1)
    asked = 0

    def refused() -> asyncio.Future[None]:
        nonlocal asked
        asked += 1
        raise closed

    channel.create_future = refused
    started = asyncio.get_running_loop().time()
    await acks.flush()
    with pytest.raises(BusUnavailable):
        await acks.acknowledged(1)
    assert asked == 2 and asyncio.get_running_loop().time() == started


# --- a publisher that is closed begins nothing more, and ends every message that it was given

MESSAGES = [CellDelete(instance_uuid=boot(number).instance_uuid, project_id="p") for number in range(5)]


class HungTransport(MemoryTransport):
    """Its broker confirms nothing."""

    calls = 0

    async def publish(self, message: Outgoing) -> None:
        self.calls += 1
        await asyncio.Event().wait()


def post(bus: Bus, waiters: list[Waiter]) -> None:
    bus.post_all([(one, "") for one in MESSAGES], [""] * len(MESSAGES), waiters)


@pytest.mark.parametrize("began", [True, False])
async def test_a_publisher_that_closes_begins_nothing_and_ends_all_it_has(began: bool) -> None:
    """What was cancelled made room for the next, which ran beside the close of the connection and was never awaited."""
    transport = HungTransport(MemoryBroker(SystemClock()), "c1")
    limits = BusLimits(batch_items=1, link_in_flight=1, full_in_flight=1, close_s=0.0)
    bus = Bus("c1", transport, process="t", clock=SystemClock(), rng=random.Random(1), limits=limits)
    await bus.open()
    waiters = [Waiter() for _ in MESSAGES]
    post(bus, waiters)
    if began:
        await asyncio.sleep(0)
    await asyncio.wait_for(bus.close(), 30)
    ended = [isinstance(waiter.error, BusUnavailable) for waiter in waiters]
    calls = transport.calls
    await asyncio.sleep(0)
    assert (transport.calls, ended) == (calls, [True] * len(MESSAGES))
    assert calls <= 1
    assert ([waiter.pending for waiter in waiters], bus.publisher._in_flight) == ([0] * len(MESSAGES), 0)


# --- a publish without a confirm: one of the queues that it goes to may hang, and others take what comes after it


class HungOnce(MemoryTransport):
    """Its broker confirms all but the first message."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker, "c1")
        self.calls = 0
        self.began, self.go_on = asyncio.Event(), asyncio.Event()

    async def publish(self, message: Outgoing) -> None:
        self.calls += 1
        if self.calls == 1:
            self.began.set()
            await self.go_on.wait()
        await super().publish(message)


@on_virtual_time
async def test_a_publish_that_hangs_holds_up_no_other_message_of_its_key() -> None:
    """Each row of an outbox waited up to 30 s behind it."""
    clock = SystemClock()
    transport = HungOnce(MemoryBroker(clock))
    bus = Bus("c1", transport, process="t", clock=clock, rng=random.Random(1))
    await bus.open()
    message = CellDelete(instance_uuid=boot(1).instance_uuid, project_id="p")
    await bus.declare("conductor.requests")
    hung = asyncio.create_task(bus.publish(message))
    await transport.began.wait()
    began = clock.monotonic()
    for _ in range(20):
        await bus.publish(message)
    assert clock.monotonic() - began < 2 * SLOW_CONFIRM_S
    assert not hung.done()
    transport.go_on.set()
    await hung
    await bus.close()


# --- a broker that takes a request and confirms nothing: its disk may be full


class Mute(MemoryTransport):
    """It publishes, and no confirm comes."""

    async def publish(self, message: Outgoing) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(("transport", "fault"), [(Mute, RequestUnconfirmed), (MemoryTransport, RequestTimeout)])
@on_virtual_time
async def test_a_request_without_a_confirm_is_distinguished_from_one_without_a_reply(
    transport: type[MemoryTransport], fault: type[RequestTimeout]
) -> None:
    """The command line asked for a scheduler that was running. Where no queue is, confirms do not matter."""
    clock = SystemClock()
    broker = MemoryBroker(clock)
    bus = Bus(API, transport(broker, "t"), process="t", clock=clock, rng=random.Random(1))
    await bus.open()
    with pytest.raises(RequestTimeout) as found:
        await bus.request(BuildQuery(), BuildPage, timeout_s=0.3)
    assert type(found.value) is fault and found.value.code == "request.timeout"
    await bus.close()


class SetBack(SystemClock):
    """The clock of a machine that is set back by an hour."""

    is_set_back = False

    def time(self) -> float:
        return super().time() - 3600.0 * self.is_set_back


class Reluctant(MemoryTransport):
    """A reply queue is open after three seconds. Two messages are refused late, and then none is confirmed."""

    def __init__(self, broker: MemoryBroker, clock: SetBack) -> None:
        super().__init__(broker, API)
        self.clock = clock
        self.ends: list[float] = []  # of each broker message: when it is of no use any more

    async def declare_reply_queue(self, name: str) -> None:
        await asyncio.sleep(3.0)
        await super().declare_reply_queue(name)

    async def publish(self, message: Outgoing) -> None:
        items = json.loads(message.body) if message.content_type == BATCH else [{"meta": message.headers}]
        timeout_s = [one["meta"].get("timeout_s", one["meta"].get(TIMEOUT, 0) / 1000) for one in items]
        self.ends += [self.clock.monotonic() + remaining_s for remaining_s in (message.expiration_s or 0.0, *timeout_s)]
        await asyncio.sleep(0.3)
        self.clock.is_set_back = True
        if len(self.ends) <= 5:
            raise BusUnavailable("away")
        await asyncio.Event().wait()


@on_virtual_time
async def test_a_request_is_of_use_for_as_long_as_its_requester_waits() -> None:
    """A command that its operator had given up was carried out, and undid what another one had decided since: what
    passed until the reply queue was open, or behind other messages, was granted again; as was what a clock went back.
    """
    clock = SetBack()
    transport = Reluctant(MemoryBroker(clock), clock)
    bus = Bus(API, transport, process="t", clock=clock, rng=random.Random(1), limits=BusLimits(batch_items=2))
    await bus.open()
    ends = clock.monotonic() + 10.0
    answers = await bus.request_all([BuildQuery()] * 3, BuildPage, timeout_s=10.0, causes=[""] * 3)
    assert [type(one) for one in answers] == [RequestUnconfirmed] * 3
    assert transport.ends == pytest.approx([ends] * 10, abs=0.001), "twice those of a batch, and of one behind it"
    await bus.close()


class Connection:
    """An aio-pika connection, as far as a session asks before it opens a channel."""

    def __init__(self) -> None:
        self.transport = self.connection = self
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()


@on_virtual_time
async def test_a_message_waits_for_the_end_of_an_alarm_as_long_as_its_requester_does() -> None:
    """It left after it, as late as 30 seconds, with all the time that its requester had had."""
    session = Session(Connection(), Connection(), QueueNames(""))  # type: ignore[arg-type]
    session._alarmed("low on memory")
    with pytest.raises(NotSent):
        await session.publish(Outgoing(exchange="", routing_key="q", body=b"{}", expiration_s=5.0))
    assert asyncio.get_running_loop().time() == pytest.approx(5.0)


@on_virtual_time
async def test_of_many_messages_those_that_were_confirmed_in_time_are_known() -> None:
    """An alarm amid 1,000 boots: no instance that the broker had taken was named, and another try made second ones."""
    clock = SystemClock()
    transport = HungOnce(MemoryBroker(clock))
    bus = Bus("c1", transport, process="t", clock=clock, rng=random.Random(1), limits=BusLimits(batch_items=1))
    await bus.open()
    await bus.declare("conductor.requests")
    message = CellDelete(instance_uuid=boot(1).instance_uuid, project_id="p")
    errors = await bus.publish_each([(message, "")] * 3, within_s=1.0)
    assert [type(error) for error in errors] == [RequestUnconfirmed, type(None), type(None)]
    transport.go_on.set()
    await bus.close()


@on_virtual_time
async def test_a_publisher_that_closes_while_nothing_can_leave_leaves_the_loop_to_others() -> None:
    """The simulation's seed 26: it looked again and again for messages on their way."""
    clock = SystemClock()
    transport = MemoryTransport(MemoryBroker(clock), "c1")
    bus = Bus("c1", transport, process="t", clock=clock, rng=random.Random(1), limits=BusLimits(in_flight=0))
    await bus.open()
    waiters = [Waiter() for _ in range(5)]
    message = CellDelete(instance_uuid=boot(1).instance_uuid, project_id="p")
    bus.post_all([(message, "")] * 5, [""] * 5, waiters)
    await asyncio.sleep(0)
    await bus.close()
    assert [type(waiter.error) for waiter in waiters] == [BusUnavailable] * 5


# --- an event that the broker refuses is its publisher's error at first, and lost once that has lasted


@pytest.mark.parametrize(
    ("bus", "refused_at", "lost_from"),
    [
        (API, (0, 5, 30, 59), None),
        (API, (0, 14, 28, 42, 56, 60, 61), 60),
        (API, (0, 14, 28, 42, 58, 61), None),  # a pause of more than fifteen seconds: it begins anew
        (project_bus("p"), (0, 0, 14, 28, 42, 56, 70), 70),
        ("c1", range(0, 200, 10), None),  # nobody but berth has queues there
    ],
)
async def test_an_event_is_lost_after_a_minute_of_refusals(
    bus: str, refused_at: Sequence[int], lost_from: int | None
) -> None:
    clock = HandClock()
    publisher = Bus(bus, Refusing(), process="p", clock=clock, rng=random.Random(1))
    states = itertools.cycle(BuildState)
    for at in refused_at:
        clock.now = float(at)
        event = BuildEvent(instance_uuid=boot().instance_uuid, project_id="p", state=next(states), sequence=1)
        (error,) = await publisher.publish_each([(event, "")])
        assert (error is None) is (lost_from is not None and at >= lost_from), at
        (error,) = await publisher.publish_each([(boot(), "")])
        assert isinstance(error, PublishRefused), "a request is never lost"


class HandClock(SystemClock):
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Refusing(MemoryTransport):
    """A broker with a queue that takes nothing."""

    def __init__(self) -> None:
        super().__init__(MemoryBroker(SystemClock()), "p")

    async def publish(self, message: Outgoing) -> None:
        raise PublishRefused(message.routing_key)

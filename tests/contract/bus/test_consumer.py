"""A consumer's handling of outcomes, faults and unreadable messages, over both transports alike."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from bus import batcher as gather
from bus import topology
from bus.bus import Bus
from bus.clock import SystemClock
from bus.codec import BATCH, Malformed
from bus.consuming import consumer as consuming
from bus.consuming import dead_letters
from bus.consuming.dead_letters import DeadLetter
from bus.consuming.outcome import Done, Outcome, Received, Refuse, Retry, RetryWhenAvailable
from bus.contracts.base import Message
from bus.contracts.build import BuildAccepted, BuildEvent, BuildRequest, BuildState
from bus.contracts.cell import CellDelete
from bus.contracts.queues import BY_QUEUE, COMMANDS
from bus.faults import BrokenInvariant, DatabaseForbidden, DatabaseUnavailable
from bus.transport import BusForbidden, Outgoing
from scheduler_worker.requests.request_refusal import refused_unreadable
from tests.contract.rig import KINDS, REQUESTS, Answering, Collector, House, boot, collect, depth_is, settled
from tests.kit.cases import case
from tests.kit.waiting import PATIENCE_S, until

pytestmark = KINDS


async def test_a_retry_comes_back_after_its_delay_and_ends_as_a_dead_letter(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "DELAYS_S", (0.02, 0.03))
    monkeypatch.setitem(BY_QUEUE, REQUESTS, replace(BY_QUEUE[REQUESTS], retries_to="", retry_s=(0.02, 0.03)))
    bus = await house.bus()
    handler = await house.answer(bus, REQUESTS, lambda _: Retry("not.yet", "come back"))
    await bus.publish(boot(1), cause="why")
    await settled(bus, dead=1)
    assert [one.meta.retries for one in handler.got] == [0, 1, 2]
    assert len({one.meta.id for one in handler.got}) == 1
    (dead_letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert (dead_letter.code, dead_letter.reason, dead_letter.cause, dead_letter.type) == (
        "not.yet",
        "come back",
        "why",
        "build.request.v1",
    )


async def test_a_refused_command_without_a_reply_queue_is_a_dead_letter(house: House) -> None:
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering(lambda _: Refuse("request.invalid", "because")))
    before = bus.clock.time()
    await bus.publish(boot(1), cause="why")
    await settled(bus, dead=1)
    (dead_letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert (dead_letter.code, dead_letter.reason, dead_letter.cause) == ("request.invalid", "because", "why")
    assert (dead_letter.exchange, dead_letter.routing_key) == (COMMANDS, "build.request.p")
    assert dead_letter.died_at is not None and abs(dead_letter.died_at - before) < 60
    assert json.loads(dead_letter.body)["flavor"] == "m1.small"


UNREADABLE = [
    (b"{", "message.malformed"),
    (b"\xff\xfe", "message.malformed"),
    (b'{"deep":' * 60_000, "message.malformed"),
    (b'{"deep":' * 100_000, "message.too_large"),
    (b"[]", "message.invalid"),
    (b'{"type":"no.such.v1"}', "message.unknown_type"),
    (b'{"type":"placement.claim.v1"}', "message.unknown_type"),
    (b'{"type":7}', "message.invalid"),
    (b'{"flavor":"x","project_id":"p","instance_uuid":"short"}', "message.invalid"),
    (b'{"project_id":"p"}', "message.invalid"),
]


async def the_only_letter(bus: Bus) -> DeadLetter:
    """Read and purged: the next row begins without letters."""
    await settled(bus, dead=1)
    (dead_letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    await settled(bus, dead=1)  # what was looked at is given back
    assert await dead_letters.purge(bus.transport, REQUESTS) == 1
    await settled(bus)
    return dead_letter


async def test_what_cannot_be_read_is_a_dead_letter_with_its_code(house: House) -> None:
    bus = await house.bus()
    handler = await house.answer(bus, REQUESTS)
    for number, (body, code) in enumerate(UNREADABLE, 1):
        with case(body[:80], len(body)):
            await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key="build.request.p", body=body))
            await bus.publish(boot(number))
            await handler.wait(number)
            dead_letter = await the_only_letter(bus)
            assert (dead_letter.code, dead_letter.body, dead_letter.truncated_from) == (code, body, 0)
            assert handler.uuids == [boot(one).instance_uuid for one in range(1, number + 1)]


async def test_an_invalid_request_is_answered_with_a_refusal(house: House) -> None:
    bus = await house.bus()
    await house.consume(bus, REQUESTS, Answering())
    await bus.transport.declare_reply_queue("client.reply.somebodys")
    answers = await collect(bus.transport, "client.reply.somebodys", 10)
    await bus.transport.publish(
        Outgoing(
            exchange=COMMANDS,
            routing_key="build.request.p",
            body=b"{}",
            reply_to="client.reply.somebodys",
            correlation_id="1",
        )
    )
    (answer,) = await answers.wait(1)
    assert (answer.type, answer.correlation_id) == ("refusal.v1", "1")
    assert json.loads(answer.body)["code"] == "message.invalid"
    await settled(bus)


async def test_the_owner_of_a_queue_may_answer_what_cannot_be_read(house: House) -> None:
    bus = await house.bus()
    queue = await bus.declare("client.builds.{process}")
    events = await collect(bus.transport, queue, 10)

    def answer(bad: Malformed) -> list[Message]:
        if b"crash" in bad.body:
            raise ValueError("hostile")
        event = BuildEvent(
            instance_uuid=boot().instance_uuid, project_id="p", state=BuildState.REFUSED, sequence=0, code=bad.code
        )
        return [event]

    await house.consume(bus, REQUESTS, Answering(), on_malformed=answer)
    for body in (b'{"crash":1}', b"{}"):
        await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key="build.request.p", body=body))
    (event,) = await events.wait(1)
    assert json.loads(event.body)["code"] == "message.invalid"
    await settled(bus, dead=1)


@pytest.mark.parametrize("content_type", ["application/json", BATCH])
async def test_a_requested_reply_comes_beside_the_event_also_for_an_invalid_batch(
    house: House, content_type: str
) -> None:
    bus = await house.bus()
    queue = await bus.declare("client.builds.{process}")
    events, answers = Collector(), Collector()
    await bus.transport.consume(queue, events, prefetch=10)
    await bus.transport.declare_reply_queue("client.reply.somebodys")
    await bus.transport.consume("client.reply.somebodys", answers, prefetch=10)
    await house.consume(bus, REQUESTS, Answering(), on_malformed=refused_unreadable)
    await bus.transport.publish(
        Outgoing(
            exchange=COMMANDS,
            routing_key="build.request.p",
            body=json.dumps({"instance_uuid": boot().instance_uuid, "flavour": "m1.small", "project_id": "p"}).encode(),
            content_type=content_type,
            reply_to="client.reply.somebodys",
            correlation_id="1",
        )
    )
    (answer,) = await answers.wait(1)
    (event,) = await events.wait(1)
    assert (answer.type, answer.correlation_id) == ("refusal.v1", "1")
    parsed = json.loads(event.body)
    assert (parsed["state"], parsed["instance_uuid"], parsed["terminal"]) == ("refused", boot().instance_uuid, True)
    assert parsed["code"] == json.loads(answer.body)["code"]
    await settled(bus)


async def test_a_bad_item_does_not_fail_its_neighbours(house: House) -> None:
    bus = await house.bus()
    handler = await house.answer(bus, REQUESTS)
    good = [
        json.dumps(
            {
                "meta": {"id": str(number)},
                "body": {"type": "build.delete.v1", "instance_uuid": boot(number).instance_uuid, "project_id": "p"},
            }
        )
        for number in (1, 2)
    ]
    bad = ['{"meta":{"id":7},"body":{}}', '{"meta":{"id":"8"},"body":{"type":"x"}}', '{"meta":{"id":"9"}}', "{}"]
    body = f"[{','.join([good[0], *bad, good[1]])}]".encode()
    await bus.transport.publish(
        Outgoing(exchange=COMMANDS, routing_key="build.delete.p", body=body, content_type=BATCH)
    )
    await settled(bus, dead=len(bad))
    await handler.wait(len(good))  # they are handled after the bad ones are parked
    assert handler.uuids == [boot(1).instance_uuid, boot(2).instance_uuid]


CANNOT_TRAVEL: list[dict[str, object]] = [
    {"id": "i" * 300},
    {"id": "ü" * 200},
    {"id": "1", "reply_to": "r" * 256},
    {"id": "1", "correlation_id": "c" * 300},
    {"id": "1", "sent_at": 1e308},
    {"id": "1", "timeout_s": 1e308},
    {"id": "1", "waited_s": 1e308},
    {"id": "1", "retries": 10**24},
    {"id": "1", "retries": -1},
]


async def test_metadata_that_cannot_travel_ends_its_message_and_not_the_worker(house: House) -> None:
    bus = await house.bus()
    handler = await house.answer(bus, REQUESTS, lambda _: Done(BuildAccepted(instance_uuid=boot(1).instance_uuid)))
    body = {"type": "build.request.v1", "instance_uuid": boot(1).instance_uuid, "flavor": "f", "project_id": "p"}
    for number, meta in enumerate(CANNOT_TRAVEL, 1):
        with case(meta):
            packed = json.dumps([{"meta": meta, "body": body}]).encode()
            await bus.transport.publish(
                Outgoing(exchange=COMMANDS, routing_key="build.request.p", body=packed, content_type=BATCH)
            )
            assert (await the_only_letter(bus)).code == "message.invalid"
            await bus.publish(boot(2))
            assert [one.message for one in await handler.wait(number)] == [boot(2)] * number


async def test_only_the_item_that_crashes_the_handler_is_given_up(house: House) -> None:
    bus, again = await house.bus(), list[bool]()

    def answer(received: Received) -> Outcome:
        if received.message == boot(7):
            again.append(received.redelivered)
            raise KeyError("seven")
        return Done()

    handler = Answering(answer)
    await bus.declare(REQUESTS)
    await bus.publish_all([(boot(number), "") for number in range(20)])
    await house.consume(bus, REQUESTS, handler)
    await handler.wait(19)  # an empty queue shows only that all are fetched
    await settled(bus, dead=1)
    (dead_letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert dead_letter.code == "handler.crashed"
    assert dead_letter.reason == "KeyError: 'seven'" and again in ([False], [False, True]), (
        "alone, if it came with others"
    )
    assert sorted(handler.uuids) == sorted(boot(number).instance_uuid for number in range(20) if number != 7)


async def test_a_passing_fault_uses_up_no_retry(house: House) -> None:
    bus = await house.bus()
    calls: list[Sequence[Received]] = []

    async def handler(received: Sequence[Received]) -> Sequence[Outcome]:
        calls.append(received)
        if len(calls) < 4:
            raise DatabaseUnavailable("unavailable")
        return [Done()] * len(received)

    consumer = await house.consume(bus, REQUESTS, handler, concurrency=1)
    await bus.publish(boot(1))
    await until(lambda: len(calls) == 4)
    await settled(bus)
    assert all(call[0].message == calls[0][0].message and call[0].meta == calls[0][0].meta for call in calls)
    assert [call[0].redelivered for call in calls] == [False, True, True, True], "the first may have begun it"
    assert calls[3][0].meta.retries == 0
    assert consumer.ready


async def test_a_message_that_waits_for_a_server_holds_up_no_other_of_its_batch(house: House) -> None:
    bus = await house.bus()
    calls: list[list[str]] = []
    is_back = asyncio.Event()

    async def handler(received: Sequence[Received]) -> Sequence[Outcome]:
        uuids = [str(one.message.instance_uuid) for one in received if isinstance(one.message, BuildRequest)]
        calls.append(uuids)
        waits = RetryWhenAvailable("placement.unavailable", "no answer")
        return [waits if uuid == boot(1).instance_uuid and not is_back.is_set() else Done() for uuid in uuids]

    consumer = await house.consume(bus, REQUESTS, handler, concurrency=1)
    await asyncio.gather(*(bus.publish(boot(number)) for number in (1, 2, 3)))
    await until(lambda: consumer.in_flight == 1 and len(calls) > 3)
    is_back.set()
    await settled(bus)
    assert Counter(uuid for call in calls for uuid in call)[boot(2).instance_uuid] == 1
    assert calls[-1] == [boot(1).instance_uuid]


async def test_a_broken_invariant_ends_the_consumer(house: House) -> None:
    bus = await house.bus()

    def answer(_: Received) -> Outcome:
        raise BrokenInvariant("two owners")

    consumer = await house.consume(bus, REQUESTS, Answering(answer))
    running = asyncio.create_task(consumer.run())
    await bus.publish(boot(1))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BrokenInvariant, match="two owners"):
            await running
    await consumer.drain(0.1)
    await settled(bus, dead=1)
    (dead_letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert (dead_letter.code, dead_letter.reason) == ("invariant.broken", "two owners")


async def test_a_message_that_breaks_an_invariant_takes_no_neighbour_along(house: House) -> None:
    """Of one batch, of the batches that had been fetched with it, and in the other worker's hand."""
    bus = await house.bus()
    done: Counter[str] = Counter()
    held = asyncio.Event()

    async def all_fetched() -> bool:
        return await depth_is(bus, REQUESTS, 0)

    async def handle(batch: Sequence[Received]) -> Sequence[Outcome]:
        uuids = [one.message.instance_uuid for one in batch]  # type: ignore[attr-defined]
        if boot(13).instance_uuid in uuids:
            await until(all_fetched)
            held.set()
            raise BrokenInvariant("thirteen")
        await held.wait()  # everything is fetched before anything is settled
        done.update(uuids)
        return [Done()] * len(batch)

    await bus.declare(REQUESTS)
    await bus.publish_all([(boot(number), "") for number in range(60)])
    consumer = await house.consume(bus, REQUESTS, handle, concurrency=2, max_batch=8, prefetch=64)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BrokenInvariant, match="thirteen"):
            await consumer.run()
    await settled(bus, dead=1)
    (dead_letter,) = await dead_letters.list_dead(bus.transport, REQUESTS)
    assert boot(13).instance_uuid in dead_letter.body.decode()
    assert done == Counter(boot(number).instance_uuid for number in range(60) if number != 13)


async def test_when_only_a_whole_batch_breaks_an_invariant_nothing_is_given_up(house: House) -> None:
    bus = await house.bus()
    alone: list[str] = []

    async def handle(batch: Sequence[Received]) -> Sequence[Outcome]:
        if len(batch) > 1:
            raise BrokenInvariant("together")
        alone.append(batch[0].message.instance_uuid)  # type: ignore[attr-defined]
        return [Done()]

    await bus.declare(REQUESTS)
    await bus.publish_all([(boot(number), "") for number in range(5)])
    consumer = await house.consume(bus, REQUESTS, handle, concurrency=1)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BrokenInvariant, match="together"):
            await consumer.run()
    assert alone == [boot(number).instance_uuid for number in range(5)]
    await settled(bus)


@pytest.mark.parametrize("fault", [BusForbidden("no"), DatabaseForbidden("no")], ids=["bus", "database"])
async def test_credentials_that_are_turned_down_end_the_consumer_and_not_its_messages(
    house: House, fault: Exception
) -> None:
    bus = await house.bus()

    def answer(_: Received) -> Outcome:
        raise fault

    consumer = await house.consume(bus, REQUESTS, Answering(answer))
    running = asyncio.create_task(consumer.run())
    await bus.publish(boot(1))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(type(fault)):
            await running
    await consumer.drain(0.1)
    await until(lambda: depth_is(bus, REQUESTS, 1))
    assert await dead_letters.list_dead(bus.transport, REQUESTS) == []


async def test_drain_finishes_what_is_in_hand_and_gives_back_the_rest(house: House) -> None:
    bus = await house.bus("c1")
    go, entered = asyncio.Event(), asyncio.Event()

    async def handler(received: Sequence[Received]) -> Sequence[Outcome]:
        entered.set()
        await go.wait()
        return [Done()] * len(received)

    consumer = await house.consume(bus, "conductor.requests", handler, max_batch=1, concurrency=1)
    for number in range(5):
        await bus.publish(CellDelete(instance_uuid=boot(number).instance_uuid, project_id="p"))
    await entered.wait()
    running = asyncio.create_task(consumer.run())
    draining = asyncio.create_task(consumer.drain(PATIENCE_S))
    await asyncio.sleep(0)
    go.set()
    async with asyncio.timeout(PATIENCE_S):
        await draining
        await running
    await until(lambda: depth_is(bus, "conductor.requests", 4))


async def test_a_message_that_comes_while_a_consumer_drains_is_not_given_up(house: House) -> None:
    """Whenever it comes: the queue has no other consumer, and gives it to this one until that has left."""
    bus = await house.bus("c1")
    handler = Answering()
    for turns in range(20):
        consumer = await house.consume(bus, "conductor.requests", handler)
        message = CellDelete(instance_uuid=boot(turns).instance_uuid, project_id="p")
        publishing = asyncio.create_task(bus.publish(message))
        for _ in range(turns):
            await asyncio.sleep(0)
        await consumer.drain(PATIENCE_S)
        await publishing

    await house.consume(bus, "conductor.requests", handler)
    await handler.wait(20)
    assert await dead_letters.list_dead(bus.transport, "conductor.requests") == []


async def test_what_is_not_finished_within_the_grace_time_goes_back(house: House) -> None:
    bus = await house.bus()
    entered = asyncio.Event()

    async def handler(received: Sequence[Received]) -> Sequence[Outcome]:
        entered.set()
        await asyncio.Event().wait()
        return []

    consumer = await house.consume(bus, REQUESTS, handler)
    await bus.publish(boot(1))
    await entered.wait()
    await consumer.drain(0.01)
    await until(lambda: depth_is(bus, REQUESTS, 1))


class StandingStill(SystemClock):
    """A clock whose long sleeps end when the test ends them."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        await (self.go_on.wait() if seconds > 100 else super().sleep(seconds))


async def test_a_paced_consumer_gathers_what_comes_before_its_turn(house: House) -> None:
    bus = await house.bus()
    bus.clock = clock = StandingStill()
    handler = Answering()
    consumer = await house.consume(bus, REQUESTS, handler, paced=True)
    await bus.publish(boot(1))
    await handler.wait(1)
    assert consumer._batch_interval is not None
    consumer._batch_interval.gap_s = 1000.0
    for number in (2, 3):
        await bus.publish(boot(number))
    await settled(bus)  # both are in its hands
    assert handler.batches == [1]
    clock.go_on.set()
    await handler.wait(3)
    assert handler.batches == [1, 2]


class HeldUp(Answering):
    """A handler whose calls end when the test ends them."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def __call__(self, received: Sequence[Received]) -> Sequence[Outcome]:
        outcomes = await super().__call__(received)
        await self.go_on.wait()
        return outcomes


async def test_what_comes_while_a_batch_is_in_hand_is_the_next_batch(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "SLOW_S", PATIENCE_S)
    bus = await house.bus()
    handler = HeldUp()
    await house.consume(bus, REQUESTS, handler, concurrency=2)
    await bus.publish(boot(1))
    await handler.wait(1)
    for number in (2, 3, 4):
        await bus.publish(boot(number))
    await settled(bus)  # all are in its hands
    assert handler.batches == [1]
    handler.go_on.set()
    await handler.wait(4)
    assert handler.batches == [1, 3]


async def test_a_full_batch_goes_beside_the_one_in_hand(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "SLOW_S", PATIENCE_S)
    bus = await house.bus()
    handler = HeldUp()
    await house.consume(bus, REQUESTS, handler, concurrency=2, max_batch=2)
    await bus.publish(boot(1))
    await handler.wait(1)
    for number in (2, 3):
        await bus.publish(boot(number))
    await handler.wait(3)
    assert handler.batches == [1, 2]
    handler.go_on.set()


async def test_a_batch_that_takes_long_holds_up_nothing(house: House) -> None:
    bus = await house.bus()
    handler = HeldUp()
    await house.consume(bus, REQUESTS, handler, concurrency=2)
    for number in (1, 2):
        await bus.publish(boot(number))
        await handler.wait(number)
    assert handler.batches == [1, 1]
    handler.go_on.set()


async def test_a_message_is_acknowledged_after_what_its_handler_names(house: House) -> None:
    bus = await house.bus()
    flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    handler = Answering(lambda _: Done(after=flushed))
    consumer = await house.consume(bus, REQUESTS, handler)
    await bus.publish(boot(1))
    await handler.wait(1)
    await bus.publish(boot(2))
    await handler.wait(2)  # it goes on meanwhile
    assert len(consumer._in_flight_deliveries) == 2
    flushed.set_result(None)
    await until(lambda: not consumer._in_flight_deliveries)
    assert handler.uuids == [boot(1).instance_uuid, boot(2).instance_uuid]


async def test_what_could_not_be_flushed_is_delivered_again(house: House) -> None:
    bus = await house.bus()
    lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    handler = await house.answer(bus, REQUESTS, lambda received: Done() if received.redelivered else Done(after=lost))
    await bus.publish(boot(1))
    await handler.wait(1)
    lost.set_exception(DatabaseUnavailable("away"))
    await handler.wait(2)
    assert [one.redelivered for one in handler.got] == [False, True]
    await settled(bus)


async def test_a_drain_gives_back_what_is_not_flushed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consuming, "FLUSHED_TIMEOUT_S", 0.01)
    bus = await house.bus()
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    handler = Answering(lambda _: Done(after=never))
    consumer = await house.consume(bus, REQUESTS, handler)
    await bus.publish(boot(1))
    await handler.wait(1)
    await consumer.drain(0.1)
    never.set_result(None)  # too late: it has been given back
    again = await house.answer(bus, REQUESTS)
    await again.wait(1)
    assert again.uuids == [boot(1).instance_uuid]


async def test_deliveries_of_many_bytes_are_opened_in_several_batches(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 of a megabyte would be decoded in one turn of the event loop."""
    bus = await house.bus()
    sizes: list[int] = []

    async def all_fetched() -> bool:
        return await depth_is(bus, REQUESTS, 0)

    async def handle(batch: Sequence[Received]) -> Sequence[Outcome]:
        if not sizes:
            await until(all_fetched)
        sizes.append(len(batch))
        return [Done()] * len(batch)

    await bus.declare(REQUESTS)
    for number in range(6):
        await bus.publish(boot(number))
    monkeypatch.setattr(consuming, "MAX_OPENED_BYTES", 1)
    monkeypatch.setattr(gather, "SLOW_S", PATIENCE_S)
    await house.consume(bus, REQUESTS, handle, concurrency=1, max_batch=64, prefetch=64)
    await until(lambda: sum(sizes) >= 6)  # the queue is empty before the last is handled
    assert sizes == [1] * 6


async def test_an_error_between_batches_ends_the_consumer(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was lost with the task that takes the next batch, and the consumer stood still."""

    def broken(_: object) -> str:
        raise ZeroDivisionError

    bus = await house.bus()
    consumer = await house.consume(bus, REQUESTS, Answering())
    await bus.publish(boot(1))
    await settled(bus)
    monkeypatch.setattr(consuming, "new_uuid", broken)
    await bus.publish(boot(2))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(consumer.run(), PATIENCE_S)


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_delivery_of_which_a_part_was_not_flushed_comes_again_whole(house: House, lost: int) -> None:
    """The flush of a later part took the word of an earlier one's back, and what was lost was acknowledged."""
    bus = await house.bus()
    flushes = [asyncio.get_running_loop().create_future() for _ in range(3)]
    handler = await house.answer(
        bus,
        REQUESTS,
        lambda one: Done() if one.redelivered else Done(after=flushes[int(one.message.instance_uuid[-1], 16) - 1]),  # type: ignore[attr-defined]
    )
    await bus.publish_all([(boot(number), "") for number in (1, 2, 3)])
    await handler.wait(3)
    for number, flushed in enumerate(flushes):
        if number == lost:
            flushed.set_exception(DatabaseUnavailable("away"))
        else:
            flushed.set_result(None)
        await asyncio.sleep(0)
    await handler.wait(6)
    assert [one.redelivered for one in handler.got] == [False] * 3 + [True] * 3
    await settled(bus)

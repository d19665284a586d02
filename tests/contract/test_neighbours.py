"""A project's requests beside those of a noisy one: in another lane they wait for little of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from msgspec import structs

from bus.bus import Bus
from bus.consuming import lanes
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import Message, encode
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.catalogue import COMMANDS, lane_of
from bus.port import Outgoing
from bus.wire import Malformed
from tests.contract.house import KINDS, REQUESTS, Answering, House, boot, depth_is, settled
from tests.contract.queues import EVERY_ADAPTER, command, declare
from tests.contract.rig import Collector, Rig, until

NOISY, QUIET = "p", "quiet"
KEY = f"build.request.{lane_of(NOISY)}.{NOISY}"
BATCH = 8


class Gated:
    """A handler that waits for its gate, and remembers which projects each batch was of."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.batches: list[list[str]] = []

    async def __call__(self, received: Sequence[Received]) -> Sequence[Outcome]:
        self.batches.append([one.message.project_id for one in received])  # type: ignore[attr-defined]
        await self.gate.wait()
        return [Done()] * len(received)


@pytest.fixture
async def bus(house: House) -> AsyncIterator[Bus]:
    yield await house.bus()


@KINDS
async def test_a_quiet_projects_request_is_in_the_next_batch_however_many_wait_of_a_noisy_one(
    house: House, bus: Bus
) -> None:
    """It waited 31 s behind eight noisy connections."""
    await bus.declare(REQUESTS)
    handler = Gated()
    consumer = await house.consume(bus, REQUESTS, handler, max_batch=BATCH, concurrency=1)
    for number in range(100):  # each alone: one of them is one delivery
        message = structs.replace(boot(number), project_id=NOISY)
        await bus.publish(message)
    await until(lambda: len(handler.batches) == 1 and consumer._waiting() == 100 - len(handler.batches[0]))
    await bus.publish(structs.replace(boot(1000), project_id=QUIET))
    await until(lambda: consumer._waiting() == 101 - len(handler.batches[0]))
    handler.gate.set()
    await until(lambda: sum(map(len, handler.batches)) == 101)
    assert QUIET in handler.batches[1]
    assert len(handler.batches[1]) == BATCH, "a batch is filled from all lanes"


@KINDS
async def test_a_lane_that_is_full_refuses_no_other_projects_request(house: House, bus: Bus) -> None:
    await bus.declare(REQUESTS)
    size = 256 * 1024

    async def is_full() -> bool:
        try:
            await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key=KEY, body=b"x" * size, mandatory=True))
        except Exception as error:
            return getattr(error, "code", "") == "bus.full"
        return False

    await until(is_full)
    await bus.publish(structs.replace(boot(1), project_id=QUIET))
    handler = Answering()
    await house.consume(bus, REQUESTS, handler)
    await handler.wait(1)


@KINDS
async def test_a_second_key_brings_a_request_into_no_other_projects_lane(house: House, bus: Bus) -> None:
    """RabbitMQ 3.10 checks no permission for it. It would be handled there as well, in another project's turn."""
    handler = Answering()
    await house.consume(bus, REQUESTS, handler)
    other = f"build.request.{lane_of(QUIET)}.{QUIET}"
    body = encode(structs.replace(boot(1), project_id=NOISY))
    await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key=KEY, also=other, body=body, mandatory=True))
    await bus.publish(structs.replace(boot(2), project_id=QUIET))
    await bus.publish(boot(3))
    await handler.wait(3)
    await settled(bus)
    assert sorted(handler.uuids) == [boot(number).instance_uuid for number in (1, 2, 3)]


@KINDS
async def test_a_consumers_hands_hold_few_bytes_however_large_the_bodies_are(
    house: House, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler grew from 140 to 605 MB: 512 messages of a megabyte, and each was in bounds."""
    size, bound = 50_000, 200_000
    monkeypatch.setattr(lanes, "MAX_LANE_BYTES", bound)
    await bus.declare(REQUESTS)
    handler = Gated()
    consumer = await house.consume(bus, REQUESTS, handler, max_batch=1, concurrency=1)
    lane = consumer._lanes.every[1 + lane_of(NOISY)]
    most = 0
    for number in range(30):
        message = structs.replace(boot(number), project_id=NOISY, name="n" * 200)
        await bus.publish(message)
        body = b'{"instance_uuid":"%d' % number + b"x" * size
        await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key=KEY, body=body, mandatory=True))
        await asyncio.sleep(0.01)
        most = max(most, lane.held)
    assert most <= bound + 8 * size, "what is on its way when the lane is paused comes, too"
    await until(lambda: not_all_taken(bus))
    handler.gate.set()
    await until(lambda: len(handler.batches) == 30)
    await until(lambda: depth_is(bus, REQUESTS, 0))
    await until(lambda: lane.held == 0)


async def not_all_taken(bus: Bus) -> bool:
    return not await depth_is(bus, REQUESTS, 0)


@KINDS
async def test_unreadable_messages_of_one_round_are_settled_together(
    house: House, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waited for three confirms before the next one was looked at, and sound requests waited behind them."""
    count, published = 20, bus.transport.publish
    under_way = most = 0

    async def counting(message: Outgoing) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await asyncio.sleep(0.01)
            await published(message)
        finally:
            under_way -= 1

    def refused(bad: Malformed) -> Sequence[Message]:
        return [] if bad.body == b"{" else [event(boot(int(bad.body[1:])).instance_uuid)]

    await bus.declare(REQUESTS)
    for number in range(count):
        for body in (b"{", b"{%d" % number):
            await bus.transport.publish(Outgoing(exchange=COMMANDS, routing_key=KEY, body=body, mandatory=True))
    monkeypatch.setattr(bus.transport, "publish", counting)
    await house.consume(bus, REQUESTS, Answering(), on_malformed=refused, concurrency=1)
    await settled(bus, dead=count)
    assert most >= count // 2


def event(instance: str) -> BuildEvent:
    return BuildEvent(
        instance_uuid=instance, project_id=NOISY, state=BuildState.REFUSED, sequence=0, terminal=True, code="no"
    )


@EVERY_ADAPTER
async def test_a_paused_subscription_gets_nothing_until_it_is_resumed(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    got = Collector()
    subscription = await transport.consume(queue, got, prefetch=10)
    await transport.publish(command(b"1"))
    await got.wait(1)
    subscription.pause()
    subscription.pause()

    async def is_kept() -> bool:
        await transport.publish(command(b"2"))
        await asyncio.sleep(0.01)
        return await transport.depth(queue) > 0

    await until(is_kept)
    before = len(got.got)
    await transport.publish(command(b"last"))
    assert len(got.got) == before
    subscription.resume()
    await until(lambda: got.bodies[-1] == b"last")
    assert await transport.depth(queue) == 0


@EVERY_ADAPTER
async def test_a_subscription_that_is_cancelled_while_it_is_resumed_gives_nothing_back(rig: Rig) -> None:
    """It would go on at the broker, and each message given back would be one delivery nearer to its limit."""
    transport = await rig.transport()
    queue = await declare(transport)
    subscription = await transport.consume(queue, Collector(), prefetch=10)
    for _ in range(10):
        subscription.pause()
        await asyncio.sleep(0.001)
        subscription.resume()
    await subscription.cancel()
    await transport.publish(command(b"1"))
    got = Collector()
    await transport.consume(queue, got, prefetch=1)
    (delivery,) = await got.wait(1)
    assert not delivery.redelivered


@pytest.mark.parametrize("kind", ["memory", pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)])
async def test_a_lost_connection_neither_ends_a_pause_nor_makes_it_last(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    got = Collector(ack=False)
    back = asyncio.Event()
    transport.on_reconnect(back.set)
    subscription = await transport.consume(queue, got, prefetch=10)
    subscription.pause()
    await rig.cut()
    await back.wait()
    await transport.publish(command(b"1"))
    assert await transport.depth(queue) == 1
    subscription.resume()
    await got.wait(1)
    back.clear()
    subscription.pause()
    await rig.cut()
    subscription.resume()
    await back.wait()
    await got.wait(2)
    assert got.bodies == [b"1", b"1"]

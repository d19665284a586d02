"""Hostile properties, headers and bodies of any client cost that message, and nothing else."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import AsyncIterator
from itertools import product

import pytest

from bus.bus import Bus
from bus.clock import SystemClock
from bus.codec import BATCH
from bus.consuming import dead_letters
from bus.consuming.consumer import Consumer
from bus.consuming.in_flight import ArrivedDelivery, InFlightMessage
from bus.consuming.outcome import Done, Outcome, Received, Retry
from bus.consuming.outcome_handling import OutcomeHandler, OutcomeMessage
from bus.contracts.build import BuildAccepted
from bus.contracts.queues import COMMANDS, DEAD_LETTERS
from bus.published_key import dead_letter_code_of
from bus.rabbitmq.transport import RabbitTransport
from tests.contract.rig import REQUESTS, Answering, boot, collect
from tests.kit.cases import case
from tests.kit.raw_amqp import RawPublisher, long, raw_publisher, short, table
from tests.kit.waiting import until

pytestmark = pytest.mark.rabbitmq
KEY = "build.request.p"
FF = b"\xff" * 200
FULL = b"\xff" * 255
REQUEST = json.dumps({"instance_uuid": boot(1).instance_uuid, "flavor": "m1.small", "project_id": "p"}).encode()


def nested(depth: int, kind: bytes) -> bytes:
    """Tables or arrays in each other."""
    value = b"V"
    for _ in range(depth):
        value = kind + long(value if kind == b"A" else short(b"n") + value)
    return value


HOSTILE: dict[str, dict[str, bytes]] = {
    **{
        f"{name} {what}": {name: value}
        for name in ("content_type", "content_encoding", "correlation_id", "message_id", "type", "app_id", "cluster_id")
        for what, value in (("200 x ff", FF), ("255 x ff", FULL), ("255 letters", b"a" * 255), ("nul", b"\0"))
    },
    "reply_to 200 x ff": {"reply_to": FF},
    "reply_to 255 x ff": {"reply_to": FULL},
    "reply_to direct": {"reply_to": b"amq.rabbitmq.reply-to.!!!.nowhere"},
    "reply_to direct, of base64": {"reply_to": b"amq.rabbitmq.reply-to.g2dkAA1hQGIAAAAAAAAAAAA=.x"},
    "expiration": {"expiration": b"60000"},
    "priority": {"priority": b"\xff"},
    "timestamp, far": {"timestamp": b"\x7f" + b"\xff" * 7},
    "timestamp, negative": {"timestamp": b"\xff" * 8},
    "everything at once": {
        **dict.fromkeys(("content_encoding", "correlation_id", "message_id", "type", "app_id", "cluster_id"), FULL),
        "timestamp": b"\xff" * 8,
        "headers": table({b"berth-cause": b"S" + long(b"\xff" * 500), b"berth-sent-at-ms": b"T" + b"\xff" * 8}),
    },
    **{
        f"header {name} {what}": {"headers": table({name.encode(): value})}
        for name in (
            "berth-cause",
            "berth-sent-at-ms",
            "berth-retries",
            "berth-timeout-ms",
            "berth-key",
            "berth-database-incarnation",
            "berth-sent-sequences",
            "traceparent",
        )
        for what, value in (
            ("of bytes", b"S" + long(FULL * 4)),
            ("long text", b"S" + long(b"x" * 100_000)),
            ("nul", b"S" + long(b"\0")),
            ("time", b"T" + b"\xff" * 8),
            ("a large float", b"d" + struct.pack(">d", 1.7e308)),
            ("negative", b"l" + struct.pack(">q", -(2**63))),
            ("decimal", b"D\xff" + b"\xff" * 4),
            ("table", nested(3, b"F")),
        )
    },
    "header's name of bytes": {"headers": table({b"\xff" * 200: b"V"})},
    "a thousand headers": {"headers": table({b"h%d" % number: b"t\1" for number in range(1000)})},
    "an array of 100,000": {"headers": table({b"a": b"A" + long(b"V" * 100_000)})},
    "deep tables": {"headers": table({b"t": nested(3_000, b"F")})},
    "deep arrays": {"headers": table({b"t": nested(3_000, b"A")})},
    "x-death forged, text": {"headers": table({b"x-death": b"S" + long(b"often")})},
    "x-death forged, array": {"headers": table({b"x-death": b"A" + long(b"t\1")})},
    "x-death forged, tables": {
        "headers": table(
            {b"x-death": b"A" + long(b"F" + table({b"count": b"S" + long(b"?"), b"queue": b"V", b"time": b"V"}))}
        )
    },
    "x-delivery-count forged": {"headers": table({b"x-delivery-count": b"l" + struct.pack(">q", 2**62)})},
    "x-first-death-reason forged": {"headers": table({b"x-first-death-reason": b"S" + long(b"\xff")})},
}
BODIES = {
    "not json": b"{not json",
    "a request": REQUEST,
    "bytes": bytes(range(256)),
    "a batch": json.dumps([{"meta": {"id": "1"}, "body": {}}]).encode(),
}


class Watched:
    """A bus with a consumer of requests, and what happened to both."""

    def __init__(self, bus: Bus, raw: RawPublisher, exchange: str) -> None:
        self.bus = bus
        self.lost: list[str] = []
        self.handler = Answering(self._answer)
        self._raw = raw
        self._exchange = exchange
        self.answer: Outcome = Done(BuildAccepted(instance_uuid=boot(1).instance_uuid))
        bus.transport.on_reconnect(lambda: self.lost.append("connection"))

    def _answer(self, received: Received) -> Outcome:
        return Done() if received.message == boot(2) else self.answer

    async def publish(self, body: bytes, key: bytes | str = KEY, **properties: bytes) -> None:
        await self._raw.publish(self._exchange, key, body, **properties)


@pytest.fixture
async def watched(amqp: tuple[str, str]) -> AsyncIterator[Watched]:
    url, prefix = amqp
    transport = RabbitTransport(url, name="api", prefix=prefix)
    bus = Bus("api", transport, process="p", clock=SystemClock(), rng=random.Random(1))
    await bus.open()
    async with raw_publisher(url) as raw:
        made = Watched(bus, raw, prefix + COMMANDS)
        of_retries = Consumer(bus, "scheduler.operators", made.handler, concurrency=1)
        await of_retries.start()
        consumer = Consumer(bus, REQUESTS, made.handler, concurrency=1)
        await consumer.start()
        running = asyncio.create_task(consumer.run())
        try:
            yield made
            assert not running.done(), "the consumer has ended"
            assert not made.lost
        finally:
            await of_retries.drain(1.0)
            await consumer.drain(1.0)
            await asyncio.gather(running, return_exceptions=True)
            await bus.close()


async def settled_with(watched: Watched, dead: int) -> None:
    transport = watched.bus.transport

    async def as_instructed() -> bool:
        return (await transport.depth(REQUESTS), await transport.depth(DEAD_LETTERS)) == (0, dead)

    await until(as_instructed)


async def test_no_property_or_header_ends_a_consumer(watched: Watched) -> None:
    """Each of them once with each body; a good message sent after each is handled, on the same connection."""
    for number, (body, hostile) in enumerate(product(BODIES, HOSTILE), 1):
        with case(body, hostile):
            await watched.publish(BODIES[body], **HOSTILE[hostile])
            await watched.bus.publish(boot(2))
            await until(
                lambda number=number: (  # type: ignore[misc]
                    sum(one.message == boot(2) for one in watched.handler.got) == number or watched.lost
                )
            )
            assert not watched.lost


async def test_a_message_id_of_bytes_is_parked_with_its_body_and_its_bytes(watched: Watched) -> None:
    """The message that stopped two schedulers for 4 min 43 s."""
    await watched.publish(b"{not json", message_id=FF, type=FULL, correlation_id=FULL)
    await settled_with(watched, dead=1)
    (dead_letter,) = await dead_letters.list_dead(watched.bus.transport, REQUESTS)
    assert (dead_letter.code, dead_letter.body) == ("message.unknown_type", b"{not json")
    assert dead_letter.id == ("\\xff" * 200)[:255]
    delivery = await watched.bus.transport.get(DEAD_LETTERS)
    assert delivery is not None
    assert (delivery.type, delivery.correlation_id) == (FULL.decode(errors="surrogateescape"),) * 2
    delivery.ack()


async def test_a_reply_carries_the_bytes_of_its_correlation_id(watched: Watched) -> None:
    """Sixteen raw bytes of a uuid are a correlation id that clients use."""
    transport = watched.bus.transport
    await transport.declare_reply_queue("client.reply.me")
    answers = await collect(transport, "client.reply.me", 10)
    reply_to = transport._names.queue("client.reply.me").encode()  # type: ignore[attr-defined]
    await watched.publish(REQUEST, correlation_id=FULL, reply_to=reply_to)
    await watched.publish(b"{", correlation_id=FF, reply_to=reply_to)
    got = await answers.wait(2)
    assert {one.correlation_id for one in got} == {raw.decode(errors="surrogateescape") for raw in (FF, FULL)}


async def test_a_retry_keeps_the_bytes_of_its_properties(watched: Watched) -> None:
    """In the JSON of a batch they would be no text, and what is retried leaves in batches."""
    watched.answer = Retry("not.yet")
    await watched.publish(REQUEST, correlation_id=FULL, message_id=FF)
    got = await watched.handler.wait(2)
    assert [one.meta.correlation_id for one in got[:2]] == [FULL.decode(errors="surrogateescape")] * 2
    assert [one.meta.retries for one in got[:2]] == [0, 1]


BAD_ITEMS = (
    b'[{"meta":{"id":"\xff"},"body":{}}]',
    b'[{"meta":{"id":"1","cause":"\xff"},"body":{"type":"\xff"}}]',
    b'[{"meta":{"id":"1","reply_to":"amq.rabbitmq.reply-to"},"body":' + REQUEST + b"}]",
    b'[{"meta":{"id":"1"},"body":{}}]',
)


async def test_one_bad_item_of_a_batch_with_a_long_id_is_a_dead_letter(watched: Watched) -> None:
    watched.answer = Retry("not.yet")
    for number, body in enumerate(BAD_ITEMS, 1):
        with case(body):
            await watched.publish(body, content_type=BATCH.encode(), message_id=b"i" * 255)
            await settled_with(watched, dead=number)


async def test_keys_of_bytes_and_of_full_length_are_read(watched: Watched) -> None:
    for key in (b"build.request." + b"\xff" * 239, b"build.request." + b"p" * 239, b"build.request.\0"):
        await watched.publish(b"{", key=key)
        await watched.publish(REQUEST, key=key)
    await settled_with(watched, dead=6)
    letters = await dead_letters.list_dead(watched.bus.transport, REQUESTS)
    assert letters[0].routing_key == "build.request." + "\\xff" * 239
    assert {one.code for one in letters} == {"message.malformed", "message.wrong_key"}


async def test_letters_of_foreign_bytes_can_be_replayed(watched: Watched) -> None:
    await watched.publish(b"{", message_id=FF, correlation_id=FF, type=b"\xff")
    await settled_with(watched, dead=1)
    (dead_letter,) = await dead_letters.list_dead(watched.bus.transport, REQUESTS)
    await settled_with(watched, dead=1)
    assert await dead_letters.replay(watched.bus.transport, REQUESTS, [dead_letter.id]) == [dead_letter.id]
    await settled_with(watched, dead=1)


async def test_what_cannot_be_settled_is_parked_and_its_neighbours_are_settled(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else may go wrong while a message is settled, it goes wrong for that message."""
    watched.answer = Retry("not.yet")
    retry = OutcomeHandler._retry

    def breaks(self: OutcomeHandler, item: InFlightMessage, received: Received) -> OutcomeMessage:
        if received.message == boot(1):
            raise ValueError("cannot be written")
        return retry(self, item, received)

    monkeypatch.setattr(OutcomeHandler, "_retry", breaks)
    await watched.bus.publish_all([(boot(number), "") for number in (3, 1, 4)])
    await until(lambda: sum(one.meta.retries == 1 for one in watched.handler.got) >= 2)
    watched.answer = Done()
    await settled_with(watched, dead=1)
    (dead_letter,) = await dead_letters.list_dead(watched.bus.transport, REQUESTS)
    assert (dead_letter.code, dead_letter.reason) == ("outcome.not_applied", "ValueError: cannot be written")
    assert boot(1).instance_uuid in dead_letter.body.decode()


async def test_what_cannot_even_be_parked_is_dead_lettered_by_the_broker(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:

    def breaks(*_: object, **__: object) -> OutcomeMessage:
        raise ValueError("cannot be written")

    monkeypatch.setattr(OutcomeHandler, "_pack_dead_letter", breaks)
    transport = watched.bus.transport
    await watched.bus.declare("scheduler.dead_letters")
    await watched.publish(b"{")

    async def was_given_up() -> bool:
        return await transport.depth("scheduler.dead_letters") == 1

    await until(was_given_up)
    delivery = await transport.get("scheduler.dead_letters")
    assert delivery is not None
    assert (dead_letter_code_of(delivery), delivery.body) == ("broker.rejected", b"{")
    delivery.ack()


@pytest.mark.parametrize(
    "reply_to", [b"amq.rabbitmq.reply-to.!!!.nowhere", b"amq.gen-x\n", b"berth.reply.compute-h-1.0a"]
)
async def test_a_reply_to_where_no_worker_may_write_costs_no_delivery(watched: Watched, reply_to: bytes) -> None:
    """The broker closes the channel that replies to it, and with it what others had under way there."""
    for _ in range(3):
        await watched.publish(REQUEST, reply_to=reply_to)
    await watched.bus.publish(boot(2))
    await watched.handler.wait(1)
    await settled_with(watched, dead=3)
    assert [one.redelivered for one in watched.handler.got] == [False]


async def test_a_forged_count_of_deliveries_is_not_trusted(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first delivery would be taken for one that its consumers die of, and a build for one to be given up."""
    counts: list[int] = []
    opened = Consumer._open

    def noting(self: Consumer, arrived: ArrivedDelivery) -> int:
        counts.append(arrived.delivery.delivery_count)
        return opened(self, arrived)

    monkeypatch.setattr(Consumer, "_open", noting)
    await watched.publish(REQUEST, headers=table({b"x-delivery-count": b"l" + struct.pack(">q", 19)}))
    await watched.handler.wait(1)
    assert counts == [0]

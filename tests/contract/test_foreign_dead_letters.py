"""Messages that another program's queue dead-letters into the exchange of commands, on a real RabbitMQ."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import aiormq
import pytest

from bus import metrics
from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Done, Outcome, Received, Retry
from bus.contracts.base import Message, encode
from bus.contracts.catalogue import COMMANDS
from bus.key_trust import UNTRUSTED
from bus.rabbitmq import RabbitTransport
from bus.wire import Malformed
from tests.contract.house import REQUESTS, Answering, boot, settled
from tests.contract.rig import until
from tests.kit.raw_amqp import RawPublisher, long, raw_publisher, short, table

pytestmark = pytest.mark.rabbitmq

KEY = "build.request.17.p"
TEXT = b"S"


class Attacked:
    """A consumer of requests, and private queues that dead-letter into the exchange of commands."""

    def __init__(self, bus: Bus, raw: RawPublisher) -> None:
        self.bus = bus
        self.answered: list[Malformed] = []
        self.handler = Answering(self._answer)
        self.private: dict[str, str] = {}
        self._raw = raw

    def _answer(self, received: Received) -> Outcome:
        return Retry("not.yet") if received.message == boot(3) and not received.meta.attempt else Done()

    def on_malformed(self, bad: Malformed) -> Sequence[Message]:
        self.answered.append(bad)
        return ()

    async def pass_on(self, body: bytes, how: str, headers: bytes = b"") -> None:
        """Publish into the private queue, which gives it up at once."""
        await self._raw.publish("", self.private[how], body, **({"headers": headers} if headers else {}))

    @property
    def dropped(self) -> float:
        value: float = metrics.OUTCOMES.labels(self.bus.name, REQUESTS, UNTRUSTED)._value.get()
        return value


@pytest.fixture
async def attacked(amqp: tuple[str, str]) -> AsyncIterator[Attacked]:
    url, prefix = amqp
    bus = Bus(
        "api",
        RabbitTransport(url, name="api", prefix=prefix),
        process="p",
        clock=SystemClock(),
        rng=random.Random(1),
    )
    await bus.open()
    connection = await aiormq.connect(url)
    async with raw_publisher(url) as raw:
        made = Attacked(bus, raw)
        channel = await connection.channel()
        for how, bound in (("expired", "x-message-ttl"), ("maxlen", "x-max-length")):
            arguments = {bound: 0, "x-dead-letter-exchange": prefix + COMMANDS, "x-dead-letter-routing-key": KEY}
            answer = await channel.queue_declare("", exclusive=True, arguments=arguments)
            made.private[how] = answer.queue or ""
        consumer = bus.consumer(REQUESTS, made.handler, concurrency=1, on_malformed=made.on_malformed)
        await consumer.start()
        running = asyncio.create_task(consumer.run())
        try:
            yield made
        finally:
            await consumer.drain(1.0)
            await asyncio.gather(running, return_exceptions=True)
            await connection.close()
            await bus.close()


def forged(queue: bytes) -> bytes:
    """A death as the broker records it."""
    return b"F" + table({b"count": b"l" + bytes(8), b"queue": TEXT + long(queue), b"reason": TEXT + long(b"expired")})


HIDING: dict[str, bytes] = {
    "nothing": b"",
    "text": table({b"x-death": TEXT + long(b"often")}),
    "an empty record": table({b"x-death": b"A" + long(b"")}),
    "a death in a queue of berth": table({b"x-death": b"A" + long(forged(b"scheduler.requests"))}),
    "two records": long((short(b"x-death") + b"A" + long(forged(b"scheduler.requests"))) * 2),
    "many values before": table({b"a": b"A" + long(b"V" * 5_000)}),
    "a first death": table({b"x-first-death-queue": TEXT + long(b"scheduler.requests")}),
}


@pytest.mark.parametrize("how", ["expired", "maxlen"])
@pytest.mark.parametrize("headers", HIDING.values(), ids=HIDING)
async def test_it_makes_no_event_reply_or_letter(attacked: Attacked, how: str, headers: bytes) -> None:
    before = attacked.dropped
    for body in (b"{", encode(boot(1)), b"[" * 100_000):
        await attacked.pass_on(body, how, headers)
    await until(lambda: attacked.dropped - before == 3)
    await attacked.bus.publish(boot(2))
    assert [received.message for received in await attacked.handler.wait(1)] == [boot(2)]
    assert attacked.answered == []
    await settled(attacked.bus, dead=0)


async def test_a_retry_that_berths_own_queue_has_dead_lettered_is_read(attacked: Attacked) -> None:
    await attacked.bus.publish(boot(3))
    got = await attacked.handler.wait(2)
    assert [(one.message, one.meta.attempt) for one in got] == [(boot(3), 0), (boot(3), 1)]
    await settled(attacked.bus, dead=0)

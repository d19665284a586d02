"""The bare pipeline to compare with: five hops, one boot a message, no logic and no database.

Each hop is a publish (persistent, confirmed, aio-pika) to a quorum queue and a consumption with acknowledgement; what
stands between two hops is a process of its own, as a worker would be. The client publishes into the first queue and
consumes the last one. `scripts/street` measures it; this module as a program is one relay: AMQP_URL HOP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator

import aio_pika
import uvloop
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from msgspec import Struct

from lab.benchmarks import probe
from lab.load import percentiles

HOPS = 5
PREFETCH = 200
IN_FLIGHT = 200
QUEUE = "bare.{}"
BODY = b'{"instance_uuid":"00000000-0000-0000-0000-000000000000","text":"' + b"x" * 440 + b'"}'
TIMEOUT_S = 120.0
RATE_S = 5.0  # how long a rate is held
NUMBER = 8  # digits of a boot's number, which leads its body


class Bare(Struct, frozen=True):
    """The pipeline's figures with many boots at once, and with one at a time.

    `idle_cpu_ms`: CPU of one at a time, of this process and its children: the relays, and a broker that it has started.
    """

    boots_per_s: float
    idle_p50_ms: float
    idle_cpu_ms: float


class AtRate(Struct, frozen=True):
    """The pipeline's figures at a steady rate. `rate_per_s`: the rate that was asked for."""

    rate_per_s: float
    p50_ms: float
    p99_ms: float


class Pipeline:
    """The pipeline while it runs: its four relays are processes, which cost nothing while nothing is sent."""

    def __init__(self, channel: AbstractChannel) -> None:
        self._channel = channel

    async def measure(self, boots: int, idle: int) -> Bare:
        """So many boots at once, and before them `idle` boots one at a time."""
        await self._fire(boots // 10)  # warm
        used = probe.cpu_s(os.getpid())
        alone = [1000.0 * took for _ in range(idle) for took in await self._fire(1)]
        used = probe.cpu_s(os.getpid()) - used
        started = time.monotonic()
        await self._fire(boots)
        boots_per_s = boots / (time.monotonic() - started)
        return Bare(boots_per_s, percentiles(alone)["p50"], 1000.0 * used / idle)

    async def at_rate(self, rate_per_s: float, seconds: float = RATE_S) -> AtRate:
        """A boot every 1 / rate seconds; each is timed from when it was due, so falling behind is seen."""
        took = await self._fire(max(1, int(rate_per_s * seconds)), rate_per_s=rate_per_s)
        found = percentiles([1000.0 * one for one in took])
        return AtRate(rate_per_s, found["p50"], found["p99"])

    async def _fire(self, boots: int, *, rate_per_s: float = 0.0) -> list[float]:
        """Send them all (rate 0: as fast as IN_FLIGHT allows). Returns the seconds that each took."""
        due: dict[int, float] = {}
        took: dict[int, float] = {}
        done = asyncio.Event()

        async def ended(message: AbstractIncomingMessage) -> None:
            await message.ack()
            number = int(message.body[:NUMBER])
            took[number] = time.monotonic() - due[number]
            if len(took) == boots:
                done.set()

        await self._channel.set_qos(prefetch_count=PREFETCH)
        last = await self._channel.get_queue(QUEUE.format(HOPS - 1))
        tag = await last.consume(ended)
        slots = asyncio.Semaphore(boots if rate_per_s else IN_FLIGHT)

        async def publish(number: int) -> None:
            async with slots:
                due.setdefault(number, time.monotonic())
                await _publish(self._channel, 0, b"%0*d" % (NUMBER, number) + BODY)

        try:
            async with asyncio.timeout(TIMEOUT_S):
                started = time.monotonic()
                async with asyncio.TaskGroup() as group:
                    for number in range(boots):
                        if rate_per_s:
                            due[number] = started + number / rate_per_s
                            await asyncio.sleep(due[number] - time.monotonic())
                        group.create_task(publish(number))
                await done.wait()
        finally:
            await last.cancel(tag)
        return list(took.values())


@contextlib.asynccontextmanager
async def running(url: str) -> AsyncIterator[Pipeline]:
    """The pipeline on this broker; its processes end and its queues are deleted afterwards."""
    async with _channel(url) as channel:
        for hop in range(HOPS):
            await channel.declare_queue(QUEUE.format(hop), durable=True, arguments={"x-queue-type": "quorum"})
        relays = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "lab.benchmarks.bare", url, str(hop), stdin=PIPE, stdout=PIPE
            )
            for hop in range(HOPS - 1)
        ]
        try:
            for relay in relays:
                assert relay.stdout is not None
                await relay.stdout.readline()
            yield Pipeline(channel)
        finally:
            for relay in relays:
                relay.terminate()
                await relay.wait()
            for hop in range(HOPS):
                await channel.queue_delete(QUEUE.format(hop))


async def _publish(channel: AbstractChannel, hop: int, body: bytes) -> None:
    message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT, content_type="application/json")
    await channel.default_exchange.publish(message, routing_key=QUEUE.format(hop), mandatory=True)


async def _relay(url: str, hop: int) -> None:
    """Take from one queue, pass on to the next, acknowledge when that is confirmed; until stopped."""

    async with _channel(url) as channel:

        async def pass_on(message: AbstractIncomingMessage) -> None:
            await _publish(channel, hop + 1, message.body)
            await message.ack()

        await channel.set_qos(prefetch_count=PREFETCH)
        await (await channel.get_queue(QUEUE.format(hop))).consume(pass_on)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


@contextlib.asynccontextmanager
async def _channel(url: str) -> AsyncIterator[AbstractChannel]:
    connection = await aio_pika.connect(url)
    async with connection:
        yield await connection.channel(publisher_confirms=True)


if __name__ == "__main__":
    uvloop.run(_relay(sys.argv[1], int(sys.argv[2])))

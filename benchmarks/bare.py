"""The bare pipeline to compare with: five hops, one boot a message, no logic and no database.

Each hop is a publish (persistent, confirmed, aio-pika) to a quorum queue and a consumption with acknowledgement; what
stands between two hops is a process of its own, as a worker would be. The client publishes into the first queue and
consumes the last one.

    python -m benchmarks.bare AMQP_URL [--boots N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator

import aio_pika
import uvloop
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage
from msgspec import Struct

HOPS = 5
PREFETCH = 200
IN_FLIGHT = 200
QUEUE = "bare.{}"
BODY = b'{"instance_uuid":"00000000-0000-0000-0000-000000000000","text":"' + b"x" * 440 + b'"}'
TIMEOUT_S = 120.0
IDLE = 100


class Bare(Struct, frozen=True):
    """What the pipeline does with many boots at once, and with one at a time."""

    boots_per_s: float
    idle_p50_ms: float


async def measure(url: str, boots: int, idle: int) -> Bare:
    """The whole pipeline, its four relays as processes of their own; `idle` boots of those one at a time."""
    async with _channel(url) as channel:
        for hop in range(HOPS):
            await channel.declare_queue(QUEUE.format(hop), durable=True, arguments={"x-queue-type": "quorum"})
        relays = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.bare", url, "--relay", str(hop), stdin=PIPE, stdout=PIPE
            )
            for hop in range(HOPS - 1)
        ]
        try:
            for relay in relays:
                assert relay.stdout is not None
                await relay.stdout.readline()
            await _fire(channel, boots // 10)  # warm
            alone = [1000.0 / await _fire(channel, 1) for _ in range(idle)]
            return Bare(await _fire(channel, boots), statistics.median(alone))
        finally:
            for relay in relays:
                relay.terminate()
                await relay.wait()
            for hop in range(HOPS):
                await channel.queue_delete(QUEUE.format(hop))


async def _fire(channel: AbstractChannel, boots: int) -> float:
    left = boots
    done = asyncio.Event()

    async def ended(message: AbstractIncomingMessage) -> None:
        nonlocal left
        await message.ack()
        left -= 1
        if not left:
            done.set()

    await channel.set_qos(prefetch_count=PREFETCH)
    last = await channel.get_queue(QUEUE.format(HOPS - 1))
    tag = await last.consume(ended)
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def publish() -> None:
        async with slots:
            await _publish(channel, 0)

    started = time.monotonic()  # the consumer is there: what follows is the pipeline's alone
    async with asyncio.timeout(TIMEOUT_S):
        async with asyncio.TaskGroup() as group:
            for _ in range(boots):
                group.create_task(publish())
        await done.wait()
    seconds = time.monotonic() - started
    await last.cancel(tag)
    return boots / seconds


async def _publish(channel: AbstractChannel, hop: int, body: bytes = BODY) -> None:
    message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT, content_type="application/json")
    await channel.default_exchange.publish(message, routing_key=QUEUE.format(hop), mandatory=True)


async def _relay(url: str, hop: int) -> None:
    """Take from one queue, pass on to the next, acknowledge when that is confirmed; until told to end."""

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


def main() -> int:
    """Measure, or be one relay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--boots", type=int, default=5000)
    parser.add_argument("--relay", type=int)
    options = parser.parse_args()
    if options.relay is not None:
        uvloop.run(_relay(options.url, options.relay))
    else:
        found = uvloop.run(measure(options.url, options.boots, IDLE))
        print(f"{found.boots_per_s:.0f} boots/s; one alone {found.idle_p50_ms:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A connection that is lost, and a broker that is unavailable, asked of every adapter that reconnects."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from bus.contracts.catalogue import QueueKind
from bus.port import BusUnavailable, Outgoing, QueueLocked
from tests.contract.queues import EVERY_ADAPTER_THAT_RECONNECTS, command, declare
from tests.contract.rig import PATIENCE_S, Collector, Rig, until

pytestmark = EVERY_ADAPTER_THAT_RECONNECTS


async def test_a_lost_connection_comes_back_with_everything(rig: Rig) -> None:
    transport = await rig.transport()
    durable, private = await declare(transport), await declare(transport, QueueKind.PRIVATE, name="mine")
    await transport.declare_reply_queue("berth.reply.x")
    back = asyncio.Event()
    transport.on_reconnect(back.set)
    held, got, replies = Collector(ack=False), Collector(), Collector()
    await transport.consume(durable, held, prefetch=10)
    await transport.consume(private, got, prefetch=10)
    await transport.consume("berth.reply.x", replies, prefetch=10)
    await transport.publish(command(b"1"))
    await held.wait(1)
    await rig.cut()
    async with asyncio.timeout(PATIENCE_S):
        await back.wait()
    held.got[0].ack()  # of the old connection: does nothing
    assert transport.connected
    await held.wait(2)
    assert held.got[1].redelivered
    held.got[1].ack()
    await transport.publish(command(b"2"))
    await transport.publish(Outgoing(exchange="", routing_key="berth.reply.x", body=b"r", mandatory=True))
    await held.wait(3)
    await got.wait(2)
    await replies.wait(1)


async def test_a_connection_that_comes_back_waits_for_its_private_queue_while_another_has_it(rig: Rig) -> None:
    """As after a fail-over: its former connection may still have it, or a process that was quicker."""
    transport = await rig.transport()
    queue = await declare(transport, QueueKind.PRIVATE, name="mine")
    got, back, locked = Collector(), asyncio.Event(), asyncio.Event()
    await transport.consume(queue, got, prefetch=10)
    transport.on_reconnect(back.set)
    transport.on_locked(locked.set)
    await rig.part(transport)
    await until(lambda: not transport.connected)
    quicker = rig.outside("quicker")
    await quicker.open()
    try:
        await quicker.declare_shared()

        async def has_it() -> bool:  # RabbitMQ may need a moment to notice that the other one has gone
            with contextlib.suppress(QueueLocked):
                return await declare(quicker, QueueKind.PRIVATE, name="mine") == queue
            return False

        await until(has_it)
        await rig.rejoin(transport)
        async with asyncio.timeout(PATIENCE_S):
            await locked.wait()
        assert not transport.connected and not back.is_set()
    finally:
        await quicker.close()
    async with asyncio.timeout(PATIENCE_S):
        await back.wait()
    await transport.publish(command(b"1"))
    await got.wait(1)


async def test_while_the_broker_is_unavailable_publishing_fails(rig: Rig) -> None:
    transport = await rig.transport()
    queue = await declare(transport)
    await transport.publish(command(b"kept"))
    await rig.shut()
    await until(lambda: not transport.connected)
    with pytest.raises(BusUnavailable):
        await transport.publish(command(b"lost"))
    back = asyncio.Event()
    transport.on_reconnect(back.set)
    await rig.reopen()
    async with asyncio.timeout(PATIENCE_S):
        await back.wait()
    assert await transport.depth(queue) == 1


async def test_open_waits_for_an_unavailable_broker(rig: Rig) -> None:
    await rig.shut()
    opening = asyncio.create_task(rig.transport())
    await asyncio.sleep(0)
    assert not opening.done()
    await rig.reopen()
    async with asyncio.timeout(PATIENCE_S):
        assert (await opening).connected

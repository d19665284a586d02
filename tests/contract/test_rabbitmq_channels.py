"""Channels of a real RabbitMQ that change while something is under way on them."""

from __future__ import annotations

import asyncio

import pytest
from aiormq.abc import AbstractChannel

from berth.trial.embedded.rabbitmq import RabbitMQ
from bus.port import Outgoing, PublishRefused
from bus.rabbitmq import RabbitTransport, channels
from bus.rabbitmq.transport import RabbitSubscription
from tests.contract.queues import command, declare, row
from tests.contract.rig import Collector, Rig

pytestmark = pytest.mark.rabbitmq
PATIENCE_S = 60.0

# The members of a quorum queue answer nothing, as when their disk hangs. %s: the queue, the vhost's name is "/".
HANG = """
{ok, Queue} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"%s">>)),
sys:%s(amqqueue:get_pid(Queue)).
"""


@pytest.mark.parametrize("kind", ["rabbitmq"])
async def test_a_subscription_that_is_cancelled_while_it_is_taken_up_again_consumes_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gave back at once whatever came, each time one delivery nearer to the limit."""
    transport = await rig.transport()
    queue = await declare(transport)
    subscription = await transport.consume(queue, Collector(), prefetch=10)
    back, taking_up, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    transport.on_reconnect(back.set)
    consume = RabbitSubscription._consume

    async def late(self: RabbitSubscription, channel: AbstractChannel) -> str:
        taking_up.set()
        await go_on.wait()
        return await consume(self, channel)

    monkeypatch.setattr(RabbitSubscription, "_consume", late)
    await rig.cut()
    await taking_up.wait()
    cancelling = asyncio.create_task(subscription.cancel())
    await asyncio.sleep(0)
    go_on.set()
    await cancelling
    await back.wait()
    await transport.publish(command(b"1"))
    got = Collector()
    await transport.consume(queue, got, prefetch=1)
    (delivery,) = await got.wait(1)
    assert not delivery.redelivered


async def test_a_refusal_beside_a_publish_that_hangs_stops_nothing(
    own_broker: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channel that was refused something is replaced; each publish waited up to 35 s for the one that hung."""
    monkeypatch.setattr(channels, "REPLACE_REFUSED_S", 0.0)
    transport = RabbitTransport(own_broker.url(), name="api")
    await transport.open()
    try:
        await transport.declare_shared()
        for name, most in (("hangs", 1000), ("full", 1), ("takes", 1000)):
            await transport.declare_queue(row(name=name, max_length=most), name, ())
        await transport.publish(to("hangs"))  # the first on a channel is a call, for which all of the channel waits
        await asyncio.to_thread(own_broker.evaluate, HANG % ("hangs", "suspend"))
        hung = asyncio.create_task(transport.publish(to("hangs")))
        with pytest.raises(PublishRefused):
            for _ in range(100):  # a quorum queue notices a little later
                await transport.publish(to("full"))
        for _ in range(3):
            await transport.publish(to("takes"))
        assert not hung.done(), "what waited behind it waited for as long"
        assert transport.connected and await transport.depth("takes") == 3
        await asyncio.to_thread(own_broker.evaluate, HANG % ("hangs", "resume"))
        async with asyncio.timeout(PATIENCE_S):
            await hung
    finally:
        await transport.close()


def to(queue: str) -> Outgoing:
    return Outgoing(exchange="", routing_key=queue, body=b"x", mandatory=True)

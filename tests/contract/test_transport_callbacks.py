"""A callback that raises costs nobody else anything, on every adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bus.port import Delivery
from tests.contract.queues import EVERY_ADAPTER, EVERY_ADAPTER_THAT_RECONNECTS, command, declare
from tests.contract.rig import Collector, Rig, until


class Defect(Exception):
    pass


@pytest.fixture(autouse=True)
async def _reported() -> None:
    """What callbacks raise is reported here, where it would fail the test."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)


def failing_at(body: bytes, collector: Collector) -> Callable[[Delivery], None]:
    def on_delivery(delivery: Delivery) -> None:
        if delivery.body == body:
            raise Defect
        collector(delivery)

    return on_delivery


@EVERY_ADAPTER
async def test_a_delivery_whose_callback_raises_is_one_among_others(rig: Rig) -> None:
    """The local client heard nothing any more; the memory broker waited for a further message."""
    transport = await rig.transport()
    queue, got = await declare(transport), Collector()
    for body in (b"1", b"2"):
        await transport.publish(command(body))
    await transport.consume(queue, failing_at(b"1", got), prefetch=10)
    await got.wait(1)
    assert got.bodies == [b"2"] and await transport.depth(queue) == 0


@EVERY_ADAPTER_THAT_RECONNECTS
async def test_the_connection_comes_back_after_a_callback_has_raised(rig: Rig) -> None:
    """No connection was made after the second loss, and the second callback was never called."""
    transport = await rig.transport()
    called: list[str] = []

    def bad() -> None:
        called.append("bad")
        raise Defect

    transport.on_reconnect(bad)
    transport.on_reconnect(lambda: called.append("good"))
    for times in (1, 2):
        await rig.cut()
        await until(lambda times=times: called == ["bad", "good"] * times and transport.connected)

"""A broker that takes a request and confirms nothing: its disk may be full."""

from __future__ import annotations

import asyncio
import random

import pytest

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.contracts.build import BuildPage, BuildQuery
from bus.faults import RequestTimeout, RequestUnconfirmed
from bus.memory import MemoryBroker, MemoryTransport
from bus.port import Outgoing
from tests.kit.virtual_time import on_virtual_time


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

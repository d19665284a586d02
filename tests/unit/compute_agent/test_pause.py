"""How long the driver of Ironic waits between two lists of nodes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from bus.clock import SystemClock
from compute_agent.drivers.ironic.driver import IronicDriver
from tests.kit.virtual_time import on_virtual_time


@on_virtual_time
async def test_a_change_of_the_ring_ends_one_pause() -> None:
    """Each after that would end at once, and Ironic would be listed without end."""
    loop, ring = asyncio.get_running_loop(), SimpleNamespace(changed=asyncio.Event())
    driver: Any = IronicDriver.__new__(IronicDriver)
    driver._clock, driver.ring = SystemClock(), ring
    took = []
    for change_after_s in (None, 10.0, None, 0.0, None):
        if change_after_s is not None:
            loop.call_later(change_after_s, ring.changed.set)
        began_s = loop.time()
        await driver._pause(60.0)
        took.append(round(loop.time() - began_s))
    assert took == [60, 10, 60, 0, 60]
    driver.ring = None
    began_s = loop.time()
    await driver._pause(60.0)
    assert round(loop.time() - began_s) == 60

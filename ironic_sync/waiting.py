"""Waiting for an event or for time, whichever comes first, on whatever clock there is."""

from __future__ import annotations

import asyncio

from bus.clock import Clock


async def event_or_time(event: asyncio.Event, clock: Clock, seconds: float | None) -> bool:
    """Wait until the event is set (True) or the time is over (False); None waits for the event alone."""
    if event.is_set():
        return True
    if seconds is None:
        await event.wait()
        return True
    if seconds <= 0:
        await asyncio.sleep(0)
        return event.is_set()
    waits = {asyncio.ensure_future(event.wait()), asyncio.ensure_future(clock.sleep(seconds))}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return event.is_set()

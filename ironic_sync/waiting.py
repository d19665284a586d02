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


class Backoff:
    """Waits that double from `first_s` to `longest_s` until told that it went well."""

    def __init__(self, clock: Clock, first_s: float, longest_s: float) -> None:
        self._clock = clock
        self._first_s = first_s
        self._longest_s = longest_s
        self._tries = 0

    async def wait(self) -> None:
        """Wait, longer than the last time."""
        seconds = min(self._longest_s, self._first_s * 2.0 ** min(self._tries, 16))
        self._tries += 1
        await self._clock.sleep(seconds)

    def reset(self) -> None:
        """It went well."""
        self._tries = 0

"""Time and randomness as parameters, so that a simulation can own both."""

from __future__ import annotations

import asyncio
import math
import random
import time
from typing import Protocol

# The most that the clocks of two processes are assumed to differ: minutes.
CLOCKS_APART_S = 300.0


class Clock(Protocol):
    """The wall time for records, the monotonic time for measurements, and the only way to wait."""

    def time(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Monotonic seconds."""

    async def sleep(self, seconds: float) -> None:
        """Wait this many seconds."""


class SystemClock:
    """The computer's clock. It waits on the running loop, so that a loop with virtual time controls the waits."""

    def time(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds of the running loop's clock."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Wait on the running loop."""
        await asyncio.sleep(seconds)


async def event_or_time(event: asyncio.Event, clock: Clock, seconds: float | None) -> bool:
    """Wait until the event is set (True) or the time is over (False); None waits for the event alone."""
    if event.is_set():
        return True
    if seconds is None:
        return await event.wait()
    if seconds <= 0:
        await asyncio.sleep(0)
        return event.is_set()
    waits = [asyncio.create_task(clock.sleep(seconds)), asyncio.create_task(event.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return event.is_set()


def shared_delay_s(now: float, every_s: float) -> float:
    """Seconds until the next multiple of `every_s` that is at least `every_s / 2` away, on the clock that all processes
    of a machine share; so one wake-up of the broker and the database, and one flush, serve all of them. now: the time
    of the running loop.
    """
    remaining_s = every_s - now % every_s
    return remaining_s if remaining_s >= every_s / 2 else remaining_s + every_s


def new_uuid(rng: random.Random) -> str:
    """Return a random (version 4) UUID from the given generator, in canonical form."""
    # This equals uuid.UUID(int=..., version=4) in a third of the time; every message needs one.
    text = f"{rng.getrandbits(128) & _FREE_BITS | _VERSION_4:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


_FREE_BITS = ~(0xF << 76) & ~(0x3 << 62)
_VERSION_4 = (4 << 76) | (2 << 62)


# A client may repeat what is logged as fast as it can publish: one line reports all of a minute.
LOG_INTERVAL_S = 60.0


class LogInterval:
    """Counts occurrences. A line about them is due at the first one, and then once an interval."""

    def __init__(self, clock: Clock, interval_s: float = LOG_INTERVAL_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._unreported = 0
        self._due_at = -math.inf

    def count(self) -> int:
        """Count one occurrence. Returns the number to report now; 0: no line is due."""
        self._unreported += 1
        now = self._clock.monotonic()
        if now < self._due_at:
            return 0
        number, self._unreported = self._unreported, 0
        self._due_at = now + self._interval_s
        return number

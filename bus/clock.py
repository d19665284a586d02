"""Time and randomness as parameters, so that a simulation can own both."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for records, monotonic time for measurements, and the only way to wait."""

    def time(self) -> float:
        """Seconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds that never go back."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's clock; waits on the running loop, so a virtual-time loop moves it too."""

    def time(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds of the running loop's clock."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Wait on the running loop."""
        await asyncio.sleep(seconds)


def shared_delay_s(now: float, every_s: float) -> float:
    """Seconds until the next multiple of `every_s` on the machine's clock that is at least half of it away, so between
    a half and one and a half of it. now: the running loop's time, which all processes of a machine share.

    Work that nothing waits for is done at these times by all processes of a machine: one wake-up of the broker and of
    the database, and one flush, serves all of them.
    """
    left_s = every_s - now % every_s
    return left_s if left_s >= every_s / 2 else left_s + every_s


def new_uuid(rng: random.Random) -> str:
    """A random (version 4) UUID from the given source, in canonical text."""
    # The same as uuid.UUID(int=..., version=4), in a third of the time: every message has one.
    text = f"{rng.getrandbits(128) & _FREE_BITS | _VERSION_4:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


_FREE_BITS = ~(0xF << 76) & ~(0x3 << 62)
_VERSION_4 = (4 << 76) | (2 << 62)

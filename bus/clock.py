"""Time and randomness as parameters, so that a simulation can own both."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from typing import Protocol


class Clock(Protocol):
    """Wall time for what is written down, monotonic time for what is measured, and the only way to wait."""

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


def new_uuid(rng: random.Random) -> str:
    """A random (version 4) UUID from the given source, in canonical text."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))

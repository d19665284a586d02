"""Clocks of simulated processes: virtual time, and each one's error."""

from __future__ import annotations

import asyncio

EPOCH = 1_800_000_000.0  # virtual time 0 on the wall


class SimClock:
    """A process's clock: virtual time, with its own error on the wall."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s

    def time(self) -> float:
        """Seconds since the epoch, by this process's clock."""
        return EPOCH + asyncio.get_running_loop().time() + self.skew_s

    def monotonic(self) -> float:
        """Virtual seconds."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        await asyncio.sleep(seconds)

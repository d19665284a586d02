"""The uses of a pool of connections that are under way, for the one question whether anything ends."""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

HUNG_S = 5.0  # a server that has ended nothing for so long, while something waits for it, does no work


class Uses:
    """When each use began, and when the last one ended (seconds of the event loop's clock)."""

    def __init__(self) -> None:
        self._began: dict[int, float] = {}  # by number; the oldest is the first
        self._number = 0
        self._ended = float("-inf")

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Count a use from its wait for a connection to its end, good or bad."""
        number = self._number = self._number + 1
        self._began[number] = get_running_loop().time()
        try:
            yield
        finally:
            del self._began[number]
            self._ended = get_running_loop().time()

    @property
    def hang(self) -> bool:
        """Whether one has waited for HUNG_S, and none has ended meanwhile: the server hangs, or all wait for a lock."""
        oldest = next(iter(self._began.values()), None)
        return oldest is not None and get_running_loop().time() - max(oldest, self._ended) > HUNG_S

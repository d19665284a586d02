"""Waiting for a condition that has no event of its own: `until` in a coroutine, `wait_until` in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

PATIENCE_S = 60.0  # guards against hanging; a busy machine fails nothing
PAUSE_S = 0.005
MOST_PAUSE_S = 0.05  # between looks that are awaited: each costs its server, and other tests, a request


async def until(there: Callable[[], Awaitable[Any] | Any], patience_s: float = PATIENCE_S) -> Any:
    """Wait until this returns something true, awaited where it can be; returns that."""
    pause_s = PAUSE_S
    async with asyncio.timeout(patience_s):
        while True:
            found = there()
            if isawaitable(found):
                found = await found
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
            if found:
                return found
            await asyncio.sleep(pause_s)


def wait_until(there: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Wait until this returns something true; returns that. Raises TimeoutError."""
    ends = time.monotonic() + patience_s
    while not (found := there()):
        if time.monotonic() > ends:
            raise TimeoutError(f"not within {patience_s} s")
        time.sleep(10 * PAUSE_S)
    return found

"""The uses of a pool of connections that are under way, for the one question whether anything ends."""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Iterator
from contextlib import contextmanager

HUNG_S = 5.0  # a server that has ended nothing well for so long, while something waits for it, does no work


class Uses:
    """How many are under way, and since when none has ended well (seconds of the event loop's clock)."""

    def __init__(self) -> None:
        self._under_way = 0
        self._since = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a use from its wait for a connection to its end. One that times out shows nothing of the server."""
        if not self._under_way:
            self._since = get_running_loop().time()
        self._under_way += 1
        try:
            yield
            self._since = get_running_loop().time()
        finally:
            self._under_way -= 1

    @property
    def hang(self) -> bool:
        """Whether something waits, and nothing has ended well for HUNG_S: the server hangs, or all wait for a lock."""
        return self._under_way > 0 and get_running_loop().time() - self._since > HUNG_S

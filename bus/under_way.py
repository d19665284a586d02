"""The batches of one stage that are under way. While one is, further items gather for the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A batch that takes longer is slow: a server that hangs must not hold up what could be handled beside it.
SLOW_S = 0.05


# until: bus (one `Gather` holds this rule and the gathered items of the consumer, the outbox, the publisher and REST)
class UnderWay:
    """Counts the batches under way. Each holds up the next one until it has ended or is slow.

    So however many batches come and go beside one that hangs, that one holds up none of them. on_slow: called when a
    batch has become slow. count: all batches under way. slow: those of them that are slow.
    """

    __slots__ = ("_on_slow", "count", "slow")

    def __init__(self, on_slow: Callable[[], None]) -> None:
        self.count = 0
        self.slow = 0
        self._on_slow = on_slow

    @property
    def holds_up(self) -> bool:
        """Whether a batch is under way that is not slow."""
        return self.count > self.slow

    @contextmanager
    def batch(self) -> Iterator[None]:
        """One batch, from its beginning to its end."""
        is_slow = False

        def become_slow() -> None:
            nonlocal is_slow
            is_slow = True
            self.slow += 1
            self._on_slow()

        self.count += 1
        timer = asyncio.get_running_loop().call_later(SLOW_S, become_slow)
        try:
            yield
        finally:
            timer.cancel()
            self.count -= 1
            self.slow -= is_slow

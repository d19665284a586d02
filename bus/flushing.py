"""Messages whose handler has committed in no hurry: acknowledged together, after one flush of the database's log.

A flush that succeeds is not enough: a server that crashed after the commit, and is back, has forgotten it and flushes
all the same. So what was committed before a connection was lost is given to the handler again instead, as it is when
the handler itself finds its database away. Which transactions may wait so: docs/decisions/what-waits-for-the-disk.md.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from msgspec import Struct

from bus.parcel import Item, Parcel

# Nothing waits for the flush but acknowledgements, which gather for longer: one serves many batches, and it keeps out
# of the way of what these have said.
LINGER_S = 0.05
HELD_SHARE = 4  # ... but no longer than until this part of what may be delivered ahead is waiting


class Disk(Protocol):
    """Where handlers commit in no hurry; their stores are one."""

    @property
    def losses(self) -> int:
        """How many connections were lost: what was committed before one of them may be forgotten."""

    async def flush(self) -> None:
        """Return when all that was committed is on disk."""


class _Held(Struct, frozen=True):
    """What one batch left to be flushed. losses: as they were before its handler was called."""

    items: Sequence[Item]
    losses: int


class Flushing:
    """One consumer's. settled: these are on disk; again: these may be forgotten. at_most: so many parcels may wait."""

    def __init__(
        self,
        disk: Disk,
        insist: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
        *,
        at_most: int,
        settled: Callable[[Sequence[Item]], None],
        again: Callable[[Sequence[Item]], None],
    ) -> None:
        self._disk = disk
        self._insist = insist
        self._at_most = at_most
        self._settled = settled
        self._again = again
        self._held: list[_Held] = []
        self._parcels: set[Parcel] = set()
        self._some = asyncio.Event()
        self._now = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()
        self._hurried = False

    @property
    def losses(self) -> int:
        """To be read before a handler is called, for `hold`."""
        return self._disk.losses

    @property
    def idle(self) -> bool:
        """Whether nothing waits, and no flush is under way."""
        return self._none.is_set()

    def hold(self, items: Sequence[Item], losses: int) -> None:
        """These are settled but for the disk."""
        self._held.append(_Held(items, losses))
        self._parcels.update(item.parcel for item in items)
        self._none.clear()
        self._some.set()
        if len(self._parcels) >= self._at_most:
            self._now.set()

    def hurry(self) -> None:
        """Let nothing linger from now on."""
        self._hurried = True
        self._now.set()

    async def emptied(self) -> None:
        """Until nothing waits, without lingering."""
        self.hurry()
        await self._none.wait()

    async def run(self) -> None:
        """Until cancelled, or a fault that waiting does not help."""
        try:
            while True:
                await self._some.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        await self._now.wait()
                await self._flush()
        finally:
            self._none.set()  # nobody waits for what will not come

    async def _flush(self) -> None:
        """One flush for what waits now; what comes meanwhile waits for the next."""
        held, self._held = self._held, []
        self._parcels.clear()
        self._some.clear()
        if not self._hurried:
            self._now.clear()
        await self._insist(self._disk.flush)
        forgotten: list[Item] = []
        for one in held:
            if self._is_kept(one):
                self._settled(one.items)
            else:
                forgotten += one.items
        if forgotten:
            self._again(forgotten)
        if not self._held:
            self._none.set()

    def _is_kept(self, one: _Held) -> bool:
        """Whether no crash can have come between its commit and the flush."""
        return one.losses == self._disk.losses

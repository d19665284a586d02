"""Reads of the book that take too long for the event loop: on a copy, in a thread, one at a time.

The copy makes them see one state however much is written meanwhile. The interpreter lets others go on every so often,
so that nobody else's answer waits for theirs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bus.faults import Transient
from placement_worker.replica.book import Book
from placement_worker.replica.copies import copy_of
from placement_worker.rest import metrics

Result = TypeVar("Result")

# Long reads that may wait for the one under way; whoever comes then is told to try again.
MAX_WAITING = 16

# How long the thread keeps the interpreter from the event loop. An answer takes the loop a dozen turns (sockets, the
# database), each of which waits so long for it; the interpreter's usual 5 ms would add up.
SWITCH_S = 0.0005


class TooBusy(Transient):
    """More long reads are waiting than may."""

    code = "rest.too_busy"


class Aside:
    """Where long reads go."""

    def __init__(self) -> None:
        self._one = asyncio.Semaphore(1)
        self._present = 0
        self._closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rest-aside")

    async def read(self, book: Book, work: Callable[[Book], Result]) -> Result:
        """What the work says of the book as it is when its turn comes. Raises TooBusy."""
        if self._present > MAX_WAITING:
            raise TooBusy(f"{MAX_WAITING} long searches are waiting")
        self._present += 1
        try:
            async with self._one:
                if self._closed:
                    raise TooBusy("the service is stopping")
                metrics.LONG_READS.inc()
                copy = copy_of(book)  # nobody writes meanwhile: no await, and the loop is the only writer
                usual = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_S)
                try:
                    return await asyncio.get_running_loop().run_in_executor(self._thread, work, copy)
                finally:
                    sys.setswitchinterval(usual)
        finally:
            self._present -= 1

    def close(self) -> None:
        """Take nothing more; what is under way ends by its own bound of time."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

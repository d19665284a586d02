"""Runs work that takes too long for the event loop in a thread, one piece at a time: long searches of the REST API, and
the examination of invalid bodies.

Reads of the book get a copy of it, so that they see one state whatever is written meanwhile. The interpreter switches
threads at intervals, so that other answers need not wait for this work.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bus.faults import Transient
from placement_worker import metrics
from placement_worker.replica.book import Book
from placement_worker.replica.columns import ClassColumns, Distinct, Moves

D = TypeVar("D", bound=Distinct[Any])

# A column with fewer than one used row in this many is copied row by row, so that a rare class costs little.
SPARSE = 8


def copy_of(book: Book) -> Book:
    """Return a copy of the book as it is now. Call this function on the thread that writes the book. One thread at a
    time may read the copy.
    """
    copied = copy(book)
    copied._caches = {}
    copied.moves, copied.shape_moves = Moves(book.moves.end), Moves(book.shape_moves.end)  # nothing of the copy changes
    for name in book._filled:
        setattr(copied, name, getattr(book, name).copy())
    for name in ("trait_sets", "aggregate_sets", "class_sets"):
        setattr(copied, name, _values(getattr(book, name)))
    copied._by_number = [_column(column, book.top) for column in book._by_number]
    copied._columns = {column.name: column for column in copied._by_number}
    copied._uuids, copied._names, copied._rows = list(book._uuids), list(book._names), dict(book._rows)
    return copied


def _column(column: ClassColumns, top: int) -> ClassColumns:
    copied = copy(column)
    column.kinds.columns()  # so that the copy has those of all its values; they do not change
    copied.kinds = _values(column.kinds)
    for name in ("kind", "used", "free", "root_free"):
        setattr(copied, name, _numbers(getattr(column, name), top))
    return copied


def _values(distinct: D) -> D:
    copied = copy(distinct)
    copied.values = list(distinct.values)
    return copied


def _numbers(values: NDArray[np.generic], top: int) -> NDArray[np.generic]:
    set_places = np.flatnonzero(values[:top])
    if len(set_places) * SPARSE > top:
        return values.copy()
    copied = np.zeros_like(values)
    copied[set_places] = values[set_places]
    return copied


Result = TypeVar("Result")

# The number of calls that may wait. A request beyond this bound is answered 503.
MAX_WAITING = 16

# The interpreter's switch interval, after which the event loop gets the interpreter from a thread. An answer takes a
# dozen turns of the loop (sockets, the database), each of which may wait this long; with the default of 5 ms that would
# add up. While no thread works, no switch is asked for.
SWITCH_S = 0.0005


class TooBusy(Transient):
    """More calls are waiting than the bound allows."""

    code = "rest.too_busy"


class OffloadThread:
    """One thread and the calls that wait for it, a bounded number. name: the kind of work, for metric and errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._one = asyncio.Semaphore(1)
        self._present = 0
        self._closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"rest-{name}")
        sys.setswitchinterval(SWITCH_S)

    async def run(self, work: Callable[..., Result], book: Book | None = None) -> Result:
        """Run the work when its turn comes, on a copy of the book that is made then. Returns its result or raises its
        exception. Raises TooBusy.
        """
        if self._present > MAX_WAITING:
            raise TooBusy(f"{MAX_WAITING} wait for long work: {self._name}")
        self._present += 1
        try:
            async with self._one:
                if self._closed:
                    raise TooBusy("the service is stopping")
                metrics.OFFLOADED.labels(self._name).inc()
                # There is no await before the copy is made, and the event loop is the only writer.
                copies = () if book is None else (copy_of(book),)
                return await asyncio.get_running_loop().run_in_executor(self._thread, work, *copies)
        finally:
            self._present -= 1

    def close(self) -> None:
        """Accept no further work. Running work ends by its own bound."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

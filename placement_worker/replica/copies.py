"""Makes a read-only copy of a book, for reads that would block the event loop for too long.

Numbers are copied, strings are shared, and fields that only writes need are left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placement_worker.replica.book import Book
from placement_worker.replica.columns import ClassColumns

# A column with fewer than one used row in this many is copied row by row, so that a rare class costs little.
SPARSE = 8


def copy_of(book: Book) -> Book:
    """Return a copy of the book as it is now. Call this function on the thread that writes the book. One thread at a
    time may read the copy.
    """
    copy = Book.__new__(Book)
    vars(copy).update(vars(book))
    copy.texts = {}
    copy._caches = {}
    for name, _ in book._filled:
        setattr(copy, name, getattr(book, name).copy())
    copy.trait_sets = book.trait_sets.copy()
    copy.aggregate_sets = book.aggregate_sets.copy()
    copy.class_sets = book.class_sets.copy()
    copy._by_number = [_column(column, book.top) for column in book._by_number]
    copy._columns = {column.name: column for column in copy._by_number}
    copy._uuids, copy._names, copy._rows = list(book._uuids), list(book._names), dict(book._rows)
    return copy


def _column(column: ClassColumns, top: int) -> ClassColumns:
    copy = ClassColumns(column.name, column.number, 0)
    copy.kinds = column.kinds.copy()
    for name in ("kind", "used", "free", "root_free"):
        setattr(copy, name, _numbers(getattr(column, name), top))
    return copy


def _numbers(values: NDArray[np.generic], top: int) -> NDArray[np.generic]:
    set_places = np.flatnonzero(values[:top])
    if len(set_places) * SPARSE > top:
        return values.copy()
    copy = np.zeros_like(values)
    copy[set_places] = values[set_places]
    return copy

"""Loads a snapshot page by page, with turns of the event loop in between, and replaces the book's content when it is
complete.

Until then the book keeps its former content for readers, and claims in flight are still added to it and dropped from
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from bus.contracts.placement import Change, ProviderState
from bus.turns import next_turn
from placement_worker.replica.book import Book, Gap
from placement_worker.replica.sharing import sharing_of

# The providers or changes that are applied in one turn of the event loop, which takes some 4 ms.
AT_ONCE = 256


class Loading:
    """The received part of one snapshot."""

    def __init__(self) -> None:
        self._loaded = Book()

    def __len__(self) -> int:
        return len(self._loaded)

    async def add(self, providers: Sequence[ProviderState]) -> None:
        """Add one page."""
        for start in range(0, len(providers), AT_ONCE):
            self._loaded.add(providers[start : start + AT_ONCE])
            await next_turn()

    def book_at(self, sequence: int, history: str) -> Book:
        """The complete snapshot as a book of one feed number and history, to bring up to date before `finish`."""
        self._loaded.sequence, self._loaded.history = sequence, history
        return self._loaded

    def finish(self, book: Book, sequence: int, history: str) -> None:
        """Replace all providers of a book by the snapshot, which is of one feed number and history, and compute the
        tables that every search needs.
        """
        book.adopt(self._loaded, sequence, history)
        book.rows_of_roots()
        sharing_of(book)


async def apply(book: Book, changes: Sequence[Change]) -> Gap | None:
    """Apply changes as `Book.apply` does, with turns of the event loop in between."""
    for start in range(0, len(changes), AT_ONCE):
        gap = book.apply(changes[start : start + AT_ONCE])
        if gap is not None:
            return gap
        if len(changes) > AT_ONCE:
            await next_turn()
    return None

"""A snapshot on its way into a book: page by page, with turns of the event loop between, and at once when it is whole.

The book that readers have stays as it is until then; claims go in flight and end in it meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bus.contracts.placement import Change, ProviderState
from placement_worker.replica.book import Book, Gap
from placement_worker.replica.sharing import sharing_of

# Providers or changes that are taken in one turn of the event loop: 4 ms of it.
AT_ONCE = 256


class Loading:
    """The received part of one snapshot."""

    def __init__(self) -> None:
        self._loaded = Book()

    def __len__(self) -> int:
        return len(self._loaded)

    async def add(self, providers: Sequence[ProviderState]) -> None:
        """A page."""
        for start in range(0, len(providers), AT_ONCE):
            self._loaded.add(providers[start : start + AT_ONCE])
            await asyncio.sleep(0)

    def finish(self, book: Book, sequence: int, history: str) -> None:
        """Make it all providers of a book, true at `sequence` of a history; what every search needs is built now."""
        book.adopt(self._loaded, sequence, history)
        book.rows_of_roots()
        sharing_of(book)


async def apply(book: Book, changes: Sequence[Change]) -> Gap | None:
    """Fold in changes as `Book.apply`, with turns of the event loop between."""
    for start in range(0, len(changes), AT_ONCE):
        gap = book.apply(changes[start : start + AT_ONCE])
        if gap is not None:
            return gap
        if len(changes) > AT_ONCE:
            await asyncio.sleep(0)
    return None

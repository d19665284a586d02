"""Which roots can take a request, and with which allocations."""

from __future__ import annotations

from bus.contracts.placement import ClaimOption
from placement_worker.replica.book import Book
from placement_worker.replica.query import Found, Query

__all__ = ["Found", "Query", "options", "search"]


def search(book: Book, query: Query, *, explain: bool = False) -> Found:
    """All roots that can take the request now; none only when it is true."""
    raise NotImplementedError


def options(book: Book, query: Query, root_row: int, *, limit: int = 4) -> list[ClaimOption]:
    """The claimable allocations on one root, best first; empty when it does not fit."""
    raise NotImplementedError

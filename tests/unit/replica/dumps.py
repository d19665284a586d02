"""The content of a book for every provider, for comparing two of them."""

from __future__ import annotations

from collections.abc import Iterable

from bus.contracts.placement import ProviderState
from placement_worker.replica.book import Book


def dump(book: Book) -> dict[str, object]:
    """{provider: everything the book holds of it}, of providers that hang under a root."""
    rows = [row for root in book.rows_of_roots() for row in book.tree(int(root))]
    return {book.uuid_of(row): _row(book, row) for row in rows}


def loaded(states: Iterable[ProviderState]) -> Book:
    """A book that begins with these providers."""
    book = Book()
    book.load(list(states), 0)
    return book


def _row(book: Book, row: int) -> tuple[object, ...]:
    parent = book.parent_of(row)
    return (
        book.name_of(row),
        book.generation_of(row),
        book.shape_of(row),
        book.traits_of(row),
        book.aggregates_of(row),
        book.inventory_of(row),
        None if parent is None else book.uuid_of(parent),
        book.uuid_of(book.root_of(row)),
    )

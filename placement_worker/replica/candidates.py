"""Allocation candidates: what a request could be claimed as, over all trees (P-1.10 to P-1.39)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from msgspec import Struct

from placement_worker.replica.book import Book
from placement_worker.replica.columns import Rows
from placement_worker.replica.request import UNNUMBERED, CandidatesRequest, Group

__all__ = ["UNNUMBERED", "Candidate", "CandidateSet", "CandidatesRequest", "Group", "Slot", "candidates"]

# Steps that lead nowhere, and candidates beyond each root's first, before a search stops and says so.
BUDGET = 100_000


class Slot(Struct, frozen=True):
    """What one provider of a candidate gives: a numbered group's whole, or one class of the un-numbered group."""

    suffix: str
    resources: dict[str, int]


class Candidate(Struct, frozen=True):
    """One way to satisfy a request. mappings: per suffix the providers that satisfy that group (P-1.34)."""

    allocations: dict[str, dict[str, int]]
    mappings: dict[str, list[str]]
    shapes: dict[str, int]


class CandidateSet:
    """Candidates in columns: `rows[i, s]` is the row of the provider that gives `slots[s]` in candidate i.

    exhausted: there are no others; False: the limit or the budget cut it, and nobody knows or says what else there is.
    """

    def __init__(self, book: Book, slots: tuple[Slot, ...], rows: Rows, *, exhausted: bool) -> None:
        self.book = book
        self.slots = slots
        self.rows = rows
        self.exhausted = exhausted

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Candidate:
        """One candidate, whole. To render many, go over `columns()` instead."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Candidate]:
        return (self[index] for index in range(len(self)))

    def columns(self) -> list[list[str]]:
        """Per slot, the provider's uuid in every candidate."""
        raise NotImplementedError

    def one_provider(self) -> bool:
        """Whether in every candidate one provider gives all (flat hosts): then any column tells the whole story."""
        raise NotImplementedError

    def touched(self) -> Rows:
        """Rows for the provider summaries: all members of every tree that gives resources, ascending."""
        raise NotImplementedError


def candidates(
    book: Book,
    request: CandidatesRequest,
    *,
    limit: int | None = None,
    rng: random.Random | None = None,
    budget: int = BUDGET,
) -> CandidateSet:
    """Up to `limit` candidates, spread over roots: every root that can take it gives its first before any its second.

    The order is that of the rows of the roots in the book; on one root, those with most room first. With `rng`: a
    random sample, in random order.
    """
    raise NotImplementedError

"""The book in columns (signatures; the body follows within minutes)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bus.contracts.placement import Change, ProviderState

Rows = NDArray[np.intp]
Amounts = NDArray[np.int64]


class Gap(Struct, frozen=True):
    """A hole in the feed: the next change should have been `expected`, and `got` came."""

    expected: int
    got: int


class Book:
    """All providers that the feed has told of, and the claims in flight that it has not."""

    sequence: int

    def __init__(self) -> None:
        raise NotImplementedError

    def load(self, providers: Sequence[ProviderState], sequence: int) -> None: raise NotImplementedError
    def apply(self, changes: Sequence[Change]) -> Gap | None: raise NotImplementedError
    def assume(self, key: str, allocations: Mapping[str, Mapping[str, int]]) -> None: raise NotImplementedError
    def settle(self, key: str, generations: Mapping[str, int] | None) -> None: raise NotImplementedError
    @property
    def version(self) -> int: raise NotImplementedError   # moves with every change of any row
    def changed_roots(self, since: int) -> Rows | None: raise NotImplementedError  # since a version; None: too long ago
    def __len__(self) -> int: raise NotImplementedError   # providers
    def rows_of_roots(self) -> Rows: raise NotImplementedError   # cached, read-only
    def row_of(self, uuid: str) -> int | None: raise NotImplementedError
    def uuid_of(self, row: int) -> str: raise NotImplementedError
    def name_of(self, row: int) -> str: raise NotImplementedError
    def root_of(self, row: int) -> int: raise NotImplementedError
    def parent_of(self, row: int) -> int | None: raise NotImplementedError
    def tree(self, root_row: int) -> list[int]: raise NotImplementedError
    def generation_of(self, row: int) -> int: raise NotImplementedError
    def shape_of(self, row: int) -> int: raise NotImplementedError
    def traits_of(self, row: int) -> tuple[str, ...]: raise NotImplementedError
    def has_trait(self, row: int, trait: str) -> bool: raise NotImplementedError
    def with_trait(self, trait: str, rows: Rows) -> NDArray[np.bool_]: raise NotImplementedError
    def aggregates_of(self, row: int) -> tuple[str, ...]: raise NotImplementedError
    def in_aggregate(self, aggregate: str, rows: Rows) -> NDArray[np.bool_]: raise NotImplementedError
    def resource_classes(self) -> list[str]: raise NotImplementedError
    def free(self, resource_class: str, roots: Rows) -> Amounts: raise NotImplementedError
    def totals(self, resource_class: str, roots: Rows) -> Amounts: raise NotImplementedError  # capacity
    def usage(self, resource_class: str, roots: Rows) -> Amounts: raise NotImplementedError   # used + assumed
    def assumed_keys(self) -> Iterator[str]: raise NotImplementedError

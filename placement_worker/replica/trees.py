"""The provider trees in columns: parents, roots, and the members of each tree."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bus.contracts.placement import ProviderState
from placement_worker.replica.columns import Amounts, Rows, grown

FIRST_SIZE = 1024

NO_ROW = -1


class Trees:
    """Rows by uuid, with their trees. A row is kept while its provider exists or another one names it as its parent or
    root. The other members of a tree are a doubly linked list at its root, in no order.

    A subclass that adds columns calls `_made` when they are made, or extends `_grown` and `_emptied`.
    """

    # The columns by name, with the value of a row that was never used.
    _filled: Mapping[str, int]

    def __init__(self) -> None:
        self.size = FIRST_SIZE
        self.top = 0  # rows at and above this were never used
        self.live = np.zeros(self.size, dtype=np.bool_)
        self.named_by = np.zeros(self.size, dtype=np.int32)  # rows that name this one as parent or root
        self._uuids: list[str] = []
        self._names: list[str] = []
        self._rows: dict[str, int] = {}
        self._free_rows: list[int] = []
        self._providers = 0
        self.parent = np.full(self.size, NO_ROW, dtype=np.int32)
        self.root = np.full(self.size, NO_ROW, dtype=np.int32)
        self.first_member = np.full(self.size, NO_ROW, dtype=np.int32)
        self.next_member = np.full(self.size, NO_ROW, dtype=np.int32)
        self.previous_member = np.full(self.size, NO_ROW, dtype=np.int32)
        self.is_root = np.zeros(self.size, dtype=np.bool_)
        self._roots: Rows | None = None

    def _made(self) -> None:
        """Note all columns, of which no row has been used."""
        self._filled = {name: column[0] for name, column in vars(self).items() if isinstance(column, np.ndarray)}

    def __len__(self) -> int:
        return self._providers

    def row_of(self, uuid: str) -> int | None:
        """The row of a provider, None when it does not exist."""
        row = self._rows.get(uuid)
        return row if row is not None and self.live[row] else None

    def uuid_of(self, row: int) -> str:
        """The provider's uuid."""
        return self._uuids[row]

    def uuids_of(self, rows: Rows) -> list[str]:
        """The providers' uuids."""
        uuids = self._uuids
        return [uuids[row] for row in rows.tolist()]

    def name_of(self, row: int) -> str:
        """The provider's name."""
        return self._names[row]

    # --- writing

    def _named(self, uuid: str) -> int:
        row = self._rows.get(uuid)
        return self._new_row(uuid) if row is None else row

    def _new_row(self, uuid: str) -> int:
        if self._free_rows:
            row = self._free_rows.pop()
            self._uuids[row] = uuid
        else:
            self._reserve_rows(1)
            row = self.top
            self.top += 1
            self._uuids.append(uuid)
            self._names.append("")
        self._rows[uuid] = row
        return row

    def _drop_row_if_unnamed(self, row: int) -> None:
        if not self.live[row] and not self.named_by[row] and (uuid := self._uuids[row]) in self._rows:
            del self._rows[uuid]
            self._uuids[row] = ""
            self._emptied(row)
            self._free_rows.append(row)

    def _reserve_rows(self, rows: int) -> None:
        size = self.size
        while size < self.top + rows:
            size *= 2
        if size == self.size:
            return
        for name, fill in self._filled.items():
            setattr(self, name, grown(getattr(self, name), size, fill))
        self._grown(size)
        self.size = size

    def _grown(self, size: int) -> None:
        """Called when the columns have been extended to this size."""

    def _emptied(self, row: int) -> None:
        """Called when the row is free for another provider."""

    def rows_of_roots(self) -> Rows:
        """The rows of all root providers, ascending. The array is shared and must not be changed."""
        if self._roots is None:
            self._roots = np.flatnonzero(self.is_root[: self.top])
            self._roots.flags.writeable = False
        return self._roots

    def root_of(self, row: int) -> int:
        """The row of the provider's root."""
        return int(self.root[row])

    def members(self, roots: Rows) -> tuple[Rows, Rows]:
        """Return all rows of these trees, the roots first, and for each row the position of its root in `roots`."""
        if len(roots) == 1:  # following one list costs less than columns of length one
            tree = np.array(self._members(int(roots[0])), dtype=np.intp)
            return tree, np.zeros(len(tree), dtype=np.intp)
        rows, owners = [roots], [np.arange(len(roots))]
        frontier, owner = self.first_member[roots], owners[0]
        while True:  # ends: each round advances in the lists by one member
            more = frontier != NO_ROW
            if not more.any():
                return np.concatenate(rows), np.concatenate(owners)
            frontier, owner = frontier[more].astype(np.intp), owner[more]
            rows.append(frontier)
            owners.append(owner)
            frontier = self.next_member[frontier]

    # --- writing

    def _link(self, row: int, state: ProviderState) -> None:
        """Add the row to its tree. Parents and roots that are not known yet get a row that is not live."""
        root = row if state.root_uuid == state.uuid else self._named(state.root_uuid)
        parent = NO_ROW if state.parent_uuid is None else self._named(state.parent_uuid)
        if self.root[row] == root and self.parent[row] == parent and self.is_root[row] == (root == row):
            return
        for named in (root, parent):  # before the old references are dropped, so that a row in both stays
            if named not in {row, NO_ROW}:
                self.named_by[named] += 1
        self._unlink(row)
        self.root[row] = root
        self.parent[row] = parent
        if root == row:
            self.is_root[row] = True
            self._roots = None
            return
        first = self.first_member[root]
        self.next_member[row] = first
        self.previous_member[row] = NO_ROW
        if first != NO_ROW:
            self.previous_member[first] = row
        self.first_member[root] = row

    def _unlink(self, row: int) -> None:
        root, parent = int(self.root[row]), int(self.parent[row])
        self.root[row] = self.parent[row] = NO_ROW
        if root == NO_ROW:
            return
        if root == row:
            self.is_root[row] = False
            self._roots = None
        else:
            after, before = self.next_member[row], self.previous_member[row]
            if before == NO_ROW:
                self.first_member[root] = after
            else:
                self.next_member[before] = after
            if after != NO_ROW:
                self.previous_member[after] = before
            self.next_member[row] = self.previous_member[row] = NO_ROW
        for named in (root, parent):
            if named not in {row, NO_ROW}:
                self.named_by[named] -= 1
                self._drop_row_if_unnamed(named)

    def _members(self, root_row: int) -> list[int]:
        members, row = [root_row], int(self.first_member[root_row])
        while row != NO_ROW:
            members.append(row)
            row = int(self.next_member[row])
        return members

    def _sum_over_trees(self, amounts: Amounts, roots: Rows) -> Amounts:
        if not (self.first_member[roots] != NO_ROW).any():
            return amounts[roots]
        rows, owners = self.members(roots)
        sums = np.zeros(len(roots), dtype=np.int64)
        np.add.at(sums, owners, amounts[rows])
        return sums

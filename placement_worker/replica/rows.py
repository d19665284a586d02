"""The table of rows: the providers' uuids and names, and the reuse of rows of removed providers."""

from __future__ import annotations

import numpy as np

from placement_worker.replica.columns import Rows, grown

FIRST_SIZE = 1024

NO_ROW = -1


class RowTable:
    """Rows by uuid. A row is kept while its provider exists or another one names it as its parent or root.

    A subclass that adds columns names them in `_filled`, or extends `_grown` and `_emptied`.
    """

    # The columns by name, with the value of a row that was never used.
    _filled: tuple[tuple[str, int], ...] = (("live", 0), ("named_by", 0))

    def _clear_rows(self) -> None:
        self.size = FIRST_SIZE
        self.top = 0  # rows at and above this were never used
        self.live = np.zeros(self.size, dtype=np.bool_)
        self.named_by = np.zeros(self.size, dtype=np.int32)  # rows that name this one as parent or root
        self._uuids: list[str] = []
        self._names: list[str] = []
        self._rows: dict[str, int] = {}
        self._free_rows: list[int] = []
        self._providers = 0

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
        for name, fill in self._filled:
            setattr(self, name, grown(getattr(self, name), size, fill))
        self._grown(size)
        self.size = size

    def _grown(self, size: int) -> None:
        """Called when the columns have been extended to this size."""

    def _emptied(self, row: int) -> None:
        """Called when the row is free for another provider."""

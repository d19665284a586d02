"""The rows that a process has written recently, each with the version that it wrote (xmin)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Generic, Protocol, TypeVar

Row = TypeVar("Row")

# The bound of cached rows: more than are in use at once, and few enough to take little memory.
MAX_CACHED = 5_000


class Connections(Protocol):
    """The counter of the lost connections (`bus.persistence.database`, a session of `memory_database`)."""

    @property
    def losses(self) -> int:
        """How many connections have ended by themselves."""


class VersionCache(Generic[Row]):
    """Rows by key with their versions. The oldest rows are evicted first, and all of them when a connection is lost. A
    server that has crashed may have lost its last commits and gives their transaction numbers again, so a row that
    another process has written since may have the version of a lost row.
    """

    def __init__(self, database: Connections) -> None:
        self._database = database
        self._losses = database.losses
        self._rows: OrderedDict[str, tuple[int, Row]] = OrderedDict()

    def get(self, key: str) -> tuple[int, Row] | None:
        """The version and the row, or None."""
        self._clear_after_loss()
        return self._rows.get(key)

    def put(self, version: int, rows: Mapping[str, Row]) -> None:
        """Keep rows that one transaction has written."""
        self._clear_after_loss()
        for key, row in rows.items():
            self._rows[key] = version, row
            self._rows.move_to_end(key)
        while len(self._rows) > MAX_CACHED:
            self._rows.popitem(last=False)

    def invalidate(self, keys: Collection[str]) -> None:
        """Drop rows that may have changed."""
        for key in keys:
            self._rows.pop(key, None)

    def _clear_after_loss(self) -> None:
        if self._losses != self._database.losses:
            self._losses = self._database.losses
            self._rows.clear()

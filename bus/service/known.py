"""What a process has written and believes of its rows: each record with its row's version (xmin, who wrote it)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Generic, Protocol, TypeVar

Record = TypeVar("Record")

# Records kept: more than are on their way at once, few enough to weigh little.
MAX_KNOWN = 5_000


class Connections(Protocol):
    """What counts the connections that were lost (`bus.service.database`, a session of `memory_database`)."""

    @property
    def losses(self) -> int:
        """How many connections have ended by themselves."""


class Known(Generic[Record]):
    """Records with the versions of their rows; the oldest go first, and all of them when a connection is lost.

    A server that crashed may have forgotten its last commits, and gives their transactions' numbers again: the version
    of a row that was forgotten may be that of what another process wrote there since.
    """

    def __init__(self, database: Connections) -> None:
        self._database = database
        self._losses = database.losses
        self._rows: OrderedDict[str, tuple[int, Record]] = OrderedDict()

    def get(self, uuid: str) -> tuple[int, Record] | None:
        """The version and the record."""
        self._doubt()
        return self._rows.get(uuid)

    def put(self, version: int, records: Mapping[str, Record]) -> None:
        """These were written by one transaction."""
        self._doubt()
        for uuid, record in records.items():
            self._rows[uuid] = version, record
            self._rows.move_to_end(uuid)
        while len(self._rows) > MAX_KNOWN:
            self._rows.popitem(last=False)

    def forget(self, uuids: Collection[str]) -> None:
        """What is known of these is not so (any more)."""
        for uuid in uuids:
            self._rows.pop(uuid, None)

    def _doubt(self) -> None:
        if self._losses != self._database.losses:
            self._losses = self._database.losses
            self._rows.clear()

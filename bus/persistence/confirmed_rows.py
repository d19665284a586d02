"""The outbox rows whose messages the broker has confirmed. They gather and are deleted many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

DELETE_BATCH = 2_000  # rows deleted by one statement


class ConfirmedRows:
    """The ids of rows to delete, in order, and of rows that a statement is deleting.

    `wait` returns while there are rows to delete. Its event is set and cleared only here, together with the list, so
    the two cannot differ.
    """

    def __init__(self) -> None:
        self._to_delete: list[int] = []
        self._under_way: set[int] = set()
        self._some = asyncio.Event()  # set while `_to_delete` is not empty

    def __len__(self) -> int:
        return len(self._to_delete) + len(self._under_way)

    def __contains__(self, row_id: int) -> bool:
        return row_id in self._to_delete or row_id in self._under_way

    @property
    def to_delete(self) -> int:
        """The number of rows that no statement is deleting yet."""
        return len(self._to_delete)

    @property
    def fill_a_batch(self) -> bool:
        """Whether there are enough rows for a full statement."""
        return len(self._to_delete) >= DELETE_BATCH

    def add(self, row_id: int) -> None:
        """Record that the messages of this row are confirmed."""
        self._to_delete.append(row_id)
        self._some.set()

    async def wait(self) -> None:
        """Wait until there are rows to delete. Another statement may take them before the caller runs."""
        await self._some.wait()

    @contextmanager
    def batch(self) -> Iterator[list[int]]:
        """Return the oldest rows for a statement that deletes them. If the block fails, they are queued again."""
        ids = self._to_delete[:DELETE_BATCH]
        self._replace(self._to_delete[len(ids) :])
        self._under_way.update(ids)
        try:
            yield ids
        except BaseException:
            self._replace(ids + self._to_delete)
            raise
        finally:
            self._under_way.difference_update(ids)

    def _replace(self, to_delete: list[int]) -> None:
        self._to_delete = to_delete
        if to_delete:
            self._some.set()
        else:
            self._some.clear()

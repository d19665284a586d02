"""The outbox rows whose messages the broker has confirmed. They gather and are deleted many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

DELETE_BATCH = 2_000  # rows deleted by one statement


class ConfirmedRows:
    """The ids of rows to delete, in order, and of rows that a statement is deleting."""

    def __init__(self) -> None:
        self._to_delete: list[int] = []
        self._under_way: set[int] = set()

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

    def take(self) -> list[int]:
        """Take the oldest rows for a statement that deletes them, inside `ended`."""
        ids, self._to_delete = self._to_delete[:DELETE_BATCH], self._to_delete[DELETE_BATCH:]
        self._under_way.update(ids)
        return ids

    @contextmanager
    def ended(self, ids: Sequence[int]) -> Iterator[None]:
        """These rows are gone after the block. If it fails, they are the next to be taken."""
        try:
            yield
        except BaseException:
            self._to_delete = [*ids, *self._to_delete]
            raise
        finally:
            self._under_way.difference_update(ids)

"""Operators' commands that were refused: a copy of one is refused, too."""

from __future__ import annotations

from scheduler_worker.store.port import SchedulerStore

HANDLER = "scheduler.changes.refused"


class RefusedCommands:
    """The refused commands on record, by their messages' ids.

    An operator has the answer to the first copy, and may have decided otherwise before another copy arrives.
    """

    def __init__(self, store: SchedulerStore) -> None:
        self._store = store

    async def has(self, message_id: str) -> bool:
        """Whether a copy of this message was refused. Raises Transient."""
        async with self._store.operation() as unit:
            return await unit.is_handled(HANDLER, message_id)

    async def add(self, message_id: str) -> None:
        """Put a refusal on record, before it is answered. Raises Transient."""
        async with self._store.operation() as unit:
            await unit.first_time(HANDLER, message_id)

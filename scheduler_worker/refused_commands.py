"""Operators' commands that were refused: a copy of one is refused, too."""

from __future__ import annotations

from bus.consuming.outcome import Refuse
from scheduler_worker.store.port import SchedulerStore

HANDLER = "scheduler.changes.refused"
REFUSED_BEFORE = "request.refused_before"
MAX_REASONS = 100  # refusals whose reasons a process remembers


class RefusedCommands:
    """The refused commands on record, by their messages' ids.

    An operator has the answer to the first copy, and may have decided otherwise before another copy arrives.
    """

    def __init__(self, store: SchedulerStore) -> None:
        self._store = store
        self._refusals: dict[str, Refuse] = {}

    async def find(self, message_id: str) -> Refuse | None:
        """The refusal of an earlier copy of this message; None: there is none. Raises Transient."""
        async with self._store.operation() as unit:
            if not await unit.is_handled(HANDLER, message_id):
                return None
        unknown = Refuse(REFUSED_BEFORE, "a copy of this command was refused before; give the command again")
        return self._refusals.get(message_id, unknown)

    async def add(self, message_id: str, refusal: Refuse) -> None:
        """Put a refusal on record, before it is answered. Raises Transient."""
        self._refusals[message_id] = refusal
        if len(self._refusals) > MAX_REASONS:
            del self._refusals[next(iter(self._refusals))]
        async with self._store.operation() as unit:
            await unit.first_time(HANDLER, message_id)

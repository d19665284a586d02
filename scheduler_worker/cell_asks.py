"""Queue `scheduler.asks`: what a cell has to ask of others for an instance that is to leave it (decision 0021).

A queue of its own: placement may be away, and what cells announce waits for no answer of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.moves import CellAsks, CellBook, CellCheck
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.claims import BusClaims
from scheduler_worker.domain.transfers import answered, handed_on, may_ask, refused, rests
from scheduler_worker.store.port import SchedulerStore


class CellAsksHandler:
    """Handles the queue on one cell's bus. A cell asks for its own instances only."""

    def __init__(self, store: SchedulerStore, cell: str, *, claims: BusClaims) -> None:
        self._store = store
        self._cell = cell
        self._claims = claims

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Nothing is retried: a cell without an answer asks again."""
        asked = [received.message.message for received in batch if isinstance(received.message, CellAsks)]
        if checks := [one for one in asked if isinstance(one, CellCheck)]:
            await self._hand_on(checks)
        if books := [one for one in asked if isinstance(one, CellBook)]:
            await self._ask_book(books)
        return [Done()] * len(batch)

    async def _hand_on(self, checks: Sequence[CellCheck]) -> None:
        """Checks of hosts of other cells, and their answers: to the other cell."""
        async with self._store.operation() as unit:
            for check in checks:
                if (message := handed_on(check, self._cell)) is not None:
                    unit.emit(message)

    async def _ask_book(self, books: Sequence[CellBook]) -> None:
        """What only placement as a whole answers, of instances that leave this cell.

        An instance leaves its cell, or what it was to leave for is given back: the first of the two that is on record
        here rules the other out.
        """
        async with self._store.operation() as unit:
            known = await unit.known({one.asked_by.request_id: one.instance_uuid for one in books}, lock=True)
            asked = [one for one in books if may_ask(one, known[one.asked_by.request_id], self._cell)]
            await unit.put_instances(rests(asked, known))
        answers = await self._claims.ask([one.question for one in asked])
        found = [refused(one, known[one.asked_by.request_id]) for one in books if one not in asked]
        found += [answered(one, answer) for one, answer in zip(asked, answers, strict=True)]
        async with self._store.operation() as unit:
            for book in found:
                if book is not None:
                    unit.emit(OutboxMessage(self._cell, book, book.asked_by.request_id))

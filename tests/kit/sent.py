"""The messages that a store's units emit."""

from __future__ import annotations

from collections.abc import Sequence

from bus.persistence.outbox import OutboxMessage


class Sent:
    """Stands where the relay is: what it is given has committed."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, list[OutboxMessage]]] = []

    async def wait_for_capacity(self) -> None:
        return None

    def send(self, row_id: int | None, outgoing: Sequence[OutboxMessage]) -> None:
        if outgoing:
            self.rows.append((row_id, list(outgoing)))

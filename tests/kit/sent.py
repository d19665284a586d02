"""The messages that a store's units emit."""

from __future__ import annotations

from collections.abc import Sequence

from bus.persistence.outbox import OutboxMessage


class Sent:
    """Stands where the relay is: what it is given has committed."""

    def __init__(self) -> None:
        self.rows: list[tuple[Sequence[int], list[OutboxMessage]]] = []

    def send(self, rows: Sequence[int], outgoing: Sequence[OutboxMessage]) -> None:
        if outgoing:
            self.rows.append((rows, list(outgoing)))

"""How many messages wait in the queues of a row, where a look at one queue of a name is not enough."""

from __future__ import annotations

from bus.contracts.queues import QueueRow
from bus.port import Transport


async def waiting_in(transport: Transport, row: QueueRow) -> int:
    """Return the number of ready messages in all queues of a row without placeholders. Raises as the transport does."""
    return sum([await transport.depth(queue.name) for queue in row.queues])

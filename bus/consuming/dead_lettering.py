"""Parks a dead letter. When the queue of dead letters is full, the letter is dropped and logged, and the consumer goes
on.
"""

from __future__ import annotations

import structlog

from bus import metrics
from bus.consuming.dead_letters import REASON
from bus.consuming.port import ConsumedBus
from bus.port import Outgoing, PublishRefused
from bus.wire import CAUSE, CODE, shown

log = structlog.get_logger(__name__)


async def park(bus: ConsumedBus, queue: str, letter: Outgoing) -> None:
    """Park a dead letter of this queue.

    When the queue of dead letters is full, with a million letters, this one is dropped and logged. It does not replace
    an older one, because all workers of a bus park in one queue, and a worker that may take letters out could read
    those of the others. Raises BusUnavailable and the other errors of a publish, except PublishRefused.
    """
    try:
        await bus.transport.publish(letter)
    except PublishRefused:
        metrics.DEAD_DROPPED.labels(bus.name, queue).inc()
        log.error(
            "dead_letter.dropped",
            queue=queue,
            id=shown(letter.message_id),
            type=shown(letter.type),
            code=letter.headers.get(CODE),
            reason=letter.headers.get(REASON),
            cause=letter.headers.get(CAUSE),
        )

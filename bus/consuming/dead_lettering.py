"""Parking a dead letter. Without room for it the letter is dropped and logged, and no consumer stops."""

from __future__ import annotations

import structlog

from bus import metrics
from bus.consuming.dead_letters import REASON
from bus.consuming.port import ConsumedBus
from bus.port import Outgoing, PublishRefused
from bus.wire import CAUSE, CODE, shown

log = structlog.get_logger(__name__)


async def park(bus: ConsumedBus, queue: str, letter: Outgoing) -> None:
    """Park a letter of this queue; never stops a consumer because the others have not been dealt with.

    Where a million letters are parked already this one is dropped and logged. No older one makes way for it: all
    workers of a bus park in one queue, and who may take letters out may read those of the others.

    Raises BusUnavailable, and what else a publish may raise, except that the queue of dead letters is full.
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

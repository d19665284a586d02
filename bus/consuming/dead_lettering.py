"""Parking a dead letter, also when there is no room for it: the oldest letter makes way, and is told in the log."""

from __future__ import annotations

import structlog

from bus import metrics
from bus.consuming.dead_letters import read_letter
from bus.consuming.port import ConsumedBus
from bus.port import BusError, BusUnavailable, Outgoing, PublishRefused, dead_queue
from bus.wire import shown

log = structlog.get_logger(__name__)

# Letters that make way for one: the broker counts a full queue late.
MOST_TO_DROP = 16


async def park(bus: ConsumedBus, queue: str, letter: Outgoing) -> None:
    """Park a letter of this queue; never stops a consumer because the others have not been dealt with.

    Raises BusUnavailable, and what else a publish may raise, except that the queue of dead letters is full.
    """
    for _ in range(MOST_TO_DROP):
        try:
            await bus.transport.publish(letter)
        except PublishRefused:
            if not await _drop_oldest(bus, queue):
                break
        else:
            return
    metrics.DEAD_DROPPED.labels(bus.name, queue).inc()
    log.error("dead_letter.dropped", queue=queue, id=shown(letter.message_id), type=shown(letter.type), newest=True)


async def _drop_oldest(bus: ConsumedBus, queue: str) -> bool:
    """False: there is none to be had."""
    try:
        oldest = await bus.transport.get(dead_queue(queue))
    except BusUnavailable:
        raise
    except BusError as error:  # these credentials may not read it, or it is gone
        log.warning("dead_letter.stuck", queue=queue, code=error.code, reason=str(error))
        return False
    if oldest is None:
        return False
    told = read_letter(0, oldest)
    oldest.ack()
    metrics.DEAD_DROPPED.labels(bus.name, queue).inc()
    log.error(
        "dead_letter.dropped",
        queue=queue,
        id=told.id,
        type=told.type,
        code=told.code,
        reason=told.reason,
        cause=told.cause,
        newest=False,
    )
    return True

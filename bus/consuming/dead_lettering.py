"""Parks a dead letter. When the queue of dead letters is full, the letter is dropped and logged, and the consumer goes
on. Letters of messages that other programs have published take no more than their share of it.
"""

from __future__ import annotations

import math

import structlog

from bus import metrics
from bus.consuming.dead_letters import REASON
from bus.consuming.port import ConsumedBus
from bus.contracts.catalogue import DEAD_LETTERS
from bus.key_trust import CODE
from bus.log_interval import LogInterval
from bus.port import Outgoing, PublishRefused
from bus.wire import CAUSE, shown

log = structlog.get_logger(__name__)

# While the queue of dead letters has as many, no message of a client becomes another one: the room behind is the
# workers' own. With `MAX_LETTER_BYTES` each this is two thirds of the queue's bytes.
MAX_CLIENT_LETTERS = 10_000
# The depth of the queue is read again after this time.
DEPTH_VALID_S = 1.0


class ClientLetters:
    """The letters that one consumer makes of messages of clients, which could be as many as a client can publish."""

    def __init__(self, bus: ConsumedBus) -> None:
        self._bus = bus
        self._room = 0
        self._read_at = -math.inf
        self._log = LogInterval(bus.clock)

    async def has_room(self, queue: str, letter: Outgoing) -> bool:
        """Whether this letter of a queue may be parked. Otherwise it is dropped, counted and logged. Raises
        BusUnavailable.
        """
        now = self._bus.clock.monotonic()
        if now - self._read_at >= DEPTH_VALID_S:
            self._room = MAX_CLIENT_LETTERS - await self._bus.transport.depth(DEAD_LETTERS)
            self._read_at = now
        self._room -= 1
        if self._room >= 0:
            return True
        metrics.DEAD_DROPPED.labels(self._bus.name, queue).inc()
        if dropped := self._log.count():
            log.error("dead_letter.dropped", queue=queue, dropped=dropped, code=letter.headers.get(CODE))
        return False


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

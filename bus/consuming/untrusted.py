"""Messages whose routing key proves nothing about their publisher: each is counted and acknowledged, and nothing else.

Such a message makes no event, no reply and no dead letter, because each of these would be for the project that the key
names (`bus.key_trust`). A client can publish many of them, so one log line reports all of a minute.
"""

from __future__ import annotations

import structlog

from bus import metrics
from bus.consuming.port import ConsumedBus
from bus.key_trust import UNTRUSTED, published_key
from bus.log_interval import LogInterval
from bus.port import Delivery

log = structlog.get_logger("bus.consuming.consumer")


class UntrustedMessages:
    """Drops the untrusted messages of one queue. row: the name of the queue's row."""

    def __init__(self, bus: ConsumedBus, row: str) -> None:
        self._row = row
        self._dropped = metrics.OUTCOMES.labels(bus.name, row, UNTRUSTED)
        self._log = LogInterval(bus.clock)

    def drop(self, delivery: Delivery, lane: str) -> bool:
        """Acknowledge and count a delivery of a lane (the name of its row's queue) if its key is untrusted. False: it
        is not.
        """
        if published_key(delivery, lane) is not None:
            return False
        delivery.ack()
        self._dropped.inc()
        if dropped := self._log.count():
            log.warning(UNTRUSTED, queue=self._row, dropped=dropped, see="docs/operate/permissions.md")
        return True

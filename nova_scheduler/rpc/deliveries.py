"""The deliveries of a call, and what a delivery says."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from bus.rabbitmq.channels import RabbitDelivery
from nova_scheduler.metrics import CALLS
from nova_scheduler.rpc.intake import LIMIT
from nova_scheduler.wire.envelope import CALL_LIMIT_S, Call, CallUnreadable, parse_call

log = structlog.get_logger("nova")


class DeliveredCall:
    """A call in flight, and its deliveries: more than one after the connection was lost; none: it does not come again,
    as the queue of the frontends has refused it, or its acknowledgement is on the way.
    """

    def __init__(self, call: Call, deliveries: Iterable[RabbitDelivery]) -> None:
        self.call = call
        self.deliveries = list(deliveries)
        self.acknowledged = False

    def join(self, deliveries: Iterable[RabbitDelivery]) -> None:
        """The same call was delivered again."""
        self.deliveries += deliveries
        if self.acknowledged:
            self.acknowledge()

    async def acknowledge_first(self) -> None:
        """Acknowledge it: it has no slot of the topic any more, and is not delivered again. Raises BusUnavailable: it
        may be.
        """
        if self.deliveries and not self.acknowledged:
            newest, self.deliveries = self.deliveries[-1], []
            await newest.acknowledged()
        self.acknowledge()

    def acknowledge(self) -> None:
        """Acknowledge it."""
        self.acknowledged = True
        for delivery in self.deliveries:
            delivery.ack()

    def requeue(self) -> None:
        """Have it delivered again."""
        for delivery in self.deliveries:
            delivery.nack(requeue=True)


def parse_delivery(delivery: RabbitDelivery, *, fanout: bool) -> Call | None:
    """The call of a delivery. One that is none is rejected."""
    compression = delivery.headers.get("compression", "")
    try:
        return parse_call(
            delivery.body,
            compression=compression if isinstance(compression, str) else "?",
            fanout=fanout,
            redelivered=delivery.redelivered,
            limit_s=_limit_s(delivery),
        )
    except CallUnreadable as error:
        log.warning("nova.call_unreadable", reason=str(error), queue=delivery.routing_key)
        CALLS.labels("other", "unreadable").inc()
        delivery.nack(requeue=False)
        return None


def _limit_s(delivery: RabbitDelivery) -> float | None:
    """How long (seconds) the client of a call waits: by the header, which it has in the queue of the frontends
    alone.
    """
    told = delivery.headers.get(LIMIT)
    return told if isinstance(told, int | float) and 0 < told <= CALL_LIMIT_S else delivery.expiration_s

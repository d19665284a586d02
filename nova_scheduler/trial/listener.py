"""Copies of the calls of topic `scheduler`, in a queue of the trial's own. Nova's services do not learn of it: nothing
is answered, and no call is taken from a scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bus.rabbitmq.channels import RabbitDelivery
from bus.rabbitmq.transport import RabbitSubscription, RabbitTransport
from nova_scheduler.metrics import CALLS
from nova_scheduler.rpc.deliveries import parse_delivery
from nova_scheduler.rpc.replies import remember
from nova_scheduler.wire.envelope import Call
from nova_scheduler.wire.methods import label_of
from nova_scheduler.wire.queues import trial_queue

PREFETCH: Final = 64


class CallListener:
    """Hands over each call once, as it comes."""

    def __init__(
        self,
        transport: RabbitTransport,  # of Nova's virtual host; it is opened and closed here
        *,
        control_exchange: str,
        unique: str,  # what tells the queue from those of other trials
        heard: Callable[[Call], None],
    ) -> None:
        self._transport = transport
        self._queue = trial_queue(control_exchange, unique)
        self._heard = heard
        self._subscription: RabbitSubscription | None = None
        self._known: dict[str, None] = {}  # unique ids: oslo.messaging publishes again what was not confirmed

    async def open(self) -> None:
        """Connect, and declare the queue; waits for the broker. Raises BusForbidden."""
        await self._transport.open()

    async def start(self) -> None:
        """Listen from now on; waits for Nova's exchange."""
        await self._transport.declare_listening(self._queue)
        self._subscription = await self._transport.consume_external(
            self._queue.name, self._on_delivery, prefetch=PREFETCH
        )

    async def stop(self, _grace_s: float) -> None:
        """Listen no more."""
        if self._subscription is not None:
            await self._subscription.cancel()

    async def close(self) -> None:
        """Close; the broker deletes the queue."""
        await self._transport.close()

    @property
    def unavailable_reason(self) -> str:
        """Why no call can be heard now; "": it can."""
        return "" if self._transport.connected else "not connected"

    def _on_delivery(self, delivery: RabbitDelivery) -> None:
        call = parse_delivery(delivery, fanout=False)
        if call is None:
            return
        delivery.ack()
        is_new = not call.unread and call.is_answered and call.unique_id not in self._known
        CALLS.labels(label_of(call), "heard" if is_new else "not compared").inc()
        if is_new:
            remember(self._known, call.unique_id)
            self._heard(call)

"""From the topic to the queue of the frontends: the calls that this frontend takes, one after the other. Each is
acknowledged on the topic first, and published once the broker has confirmed that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from bus.clock import Clock
from bus.rabbitmq.channels import RabbitDelivery
from bus.rabbitmq.transport import RabbitTransport
from bus.transport import BusError, NotSent, Outgoing, PublishRefused, Unroutable
from nova_scheduler.wire.envelope import CALL_LIMIT_S, Call
from nova_scheduler.wire.queues import POLL_S

log = structlog.get_logger("nova")

LIMIT = "berth-limit-s"  # the header of a call in the queue of the frontends: how long (seconds) its client waits


async def unblocked(transport: RabbitTransport, clock: Clock) -> None:
    """Wait until the broker takes messages. In its alarm it reads nothing of a connection that publishes: what is given
    up meanwhile, as an acknowledgement is after a while, takes effect when the alarm is over.
    """
    while transport.blocked:
        await clock.sleep(POLL_S)


class TopicIntake:
    """Takes calls from the topic and publishes them to the frontends' queue. One per frontend."""

    # The other way round, a copy that the topic delivers again could go to a stock nova-scheduler while a frontend
    # carries the published one out, and both would claim. A frontend killed between the two steps loses the one call
    # under way; a stock nova-scheduler that is killed loses each call in flight. What has certainly not left when the
    # connection is lost is carried out here.

    def __init__(
        self,
        transport: RabbitTransport,
        frontends: str,  # the queue of the frontends
        *,
        clock: Clock,
        refused: Callable[[Call], None],  # takes a call that the queue does not take, and that nobody else has
        changed: Callable[[], None],  # called when a call is over
    ) -> None:
        self._transport = transport
        self._frontends = frontends
        self._clock = clock
        self._refused = refused
        self._changed = changed
        self._arrived: asyncio.Queue[tuple[RabbitDelivery, Call]] = asyncio.Queue()  # bounded by the prefetch
        self._in_progress = 0

    def __len__(self) -> int:
        """Calls that have arrived and are not over."""
        return self._arrived.qsize() + self._in_progress

    def add(self, delivery: RabbitDelivery, call: Call) -> None:
        """A call has come to the topic."""
        self._arrived.put_nowait((delivery, call))

    async def run(self) -> None:
        """Take calls over until cancelled."""
        while True:
            delivery, call = await self._arrived.get()
            self._in_progress = 1
            try:
                await self._forward(delivery, call)
            finally:
                self._in_progress = 0
                self._arrived.task_done()
            self._changed()

    async def end(self) -> None:
        """Give back what is not begun, and wait for the call under way, for which `run` goes on."""
        self.requeue()
        await self._arrived.join()

    def requeue(self) -> None:
        """Give back to the topic what is not begun."""
        while not self._arrived.empty():
            delivery, _ = self._arrived.get_nowait()
            delivery.nack(requeue=True)
            self._arrived.task_done()

    async def _forward(self, delivery: RabbitDelivery, call: Call) -> None:
        compression = delivery.headers.get("compression")
        headers: dict[str, str | int | float] = {LIMIT: call.limit_s or CALL_LIMIT_S}
        if isinstance(compression, str):
            headers["compression"] = compression
        message = Outgoing(
            exchange="",
            routing_key=self._frontends,
            body=delivery.body,
            headers=headers,
            mandatory=True,
            # In a queue its client gets no sign of life. Taken later, it would claim a host for nobody.
            expiration_s=call.answer_timeout_s or CALL_LIMIT_S,
        )
        await unblocked(self._transport, self._clock)
        try:
            await delivery.acknowledged()
            await self._transport.publish(message)
        except (PublishRefused, Unroutable, NotSent) as error:  # no queue has it
            log.warning("nova.call_kept", code=error.code, reason=str(error), request_id=call.request_id)
            self._refused(call)
        except BusError as error:  # of the channel: it comes again, is among the frontends, or is lost
            log.warning("nova.call_uncertain", code=error.code, reason=str(error), request_id=call.request_id)

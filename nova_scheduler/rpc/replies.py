"""What the clients of calls are sent: heartbeats, and one reply."""

from __future__ import annotations

import contextlib
import random

import structlog
from msgspec import structs

from bus.clock import Clock
from bus.rabbitmq.transport import RabbitTransport
from bus.retrying import NOVA_REPLY, Retrying
from bus.transport import BusError, BusForbidden, Outgoing
from nova_scheduler.wire.envelope import Call, encode_heartbeat

log = structlog.get_logger("nova")

SHORTEST_HEARTBEAT_S = 1.0  # as oslo.messaging: a client that wants more has given a wrong timeout
REMEMBERED = 1024  # ids of calls that were answered, and reply queues that are gone


class ReplySender:
    """Publishes to the clients' reply queues."""

    def __init__(self, transport: RabbitTransport, clock: Clock, rng: random.Random) -> None:
        self._transport = transport
        self._clock = clock
        self._rng = rng
        self._gone: dict[str, None] = {}  # reply queues that do not exist any more

    async def send(self, call: Call, body: bytes) -> bool:
        """Whether the client's queue has the reply. It is tried again while the queue does not exist."""
        policy = structs.replace(NOVA_REPLY, lasts_s=0.0) if call.reply_queue in self._gone else NOVA_REPLY
        try:
            await Retrying(policy, self._clock).call(
                lambda: self._publish(call, body),
                lambda error: isinstance(error, BusError) and not isinstance(error, BusForbidden),
            )
        except BusError as error:
            remember(self._gone, call.reply_queue)
            log.warning("nova.reply_undeliverable", code=error.code, queue=call.reply_queue, request_id=call.request_id)
            return False
        self._gone.pop(call.reply_queue, None)
        return True

    async def send_heartbeats(self, call: Call) -> None:
        """Tell the client twice within its timeout that its call is under way; the first time soon, as it may have
        waited in a queue.
        """
        every_s, wait_s = call.timeout_s / 2, SHORTEST_HEARTBEAT_S
        while every_s >= SHORTEST_HEARTBEAT_S:
            await self._clock.sleep(wait_s)
            wait_s = every_s
            with contextlib.suppress(BusError):  # the next one is soon
                await self._publish(call, encode_heartbeat(call.message_id, self.new_id()))

    async def _publish(self, call: Call, body: bytes) -> None:
        await self._transport.publish(
            Outgoing(exchange="", routing_key=call.reply_queue, body=body, mandatory=True, message_id=call.message_id)
        )

    def new_id(self) -> str:
        """The id of a message."""
        return f"{self._rng.getrandbits(128):032x}"


def remember(known: dict[str, None], name: str) -> None:
    """Add a name; the oldest are forgotten."""
    if name:
        known.pop(name, None)
        known[name] = None
        while len(known) > REMEMBERED:
            del known[next(iter(known))]

"""The port to a broker: the operations of a transport. Adapters: `bus.memory`, `bus.rabbitmq`, `bus.local`.

One transport is one connection to one bus (a virtual host). All of them pass `tests/contract/bus/test_transport.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from bus.contracts.queues import QueueRow


def call_back(callback: Callable[..., None], *arguments: object) -> bool:
    """Call what a user has given to a transport. An error ends only this call: the event loop's handler reports it.

    Returns whether there was none.
    """
    try:
        callback(*arguments)
        return True
    except Exception as error:  # a user's defect must not end a connection that others use, too
        context = {"message": f"a callback of a transport failed: {callback!r}", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)
        return False


class BusError(Exception):
    """Base of the errors of a transport. `code` is stable; the text is never parsed."""

    code = "bus.error"


class BusUnavailable(BusError):
    """The broker cannot be reached, or the connection was lost before the confirm. Transient: the message may have
    arrived.
    """

    code = "bus.unavailable"


class NotSent(BusUnavailable):
    """There is no connection, or no channel on it: what was called has certainly not been done."""


class QueueLocked(BusUnavailable):
    """Another connection has this private queue: that of another process, or a lost one of this process that the broker
    has not closed yet (this takes up to half a minute).
    """

    code = "bus.queue_locked"


class Unroutable(BusError):
    """A mandatory message reached no queue."""

    code = "bus.unroutable"


class PublishRefused(BusError):
    """The broker refused the message: its queue is full. The publisher must slow down."""

    code = "bus.full"


class QueueMissing(BusError):
    """The queue or exchange does not exist (a passive declaration failed)."""

    code = "bus.missing"


class QueueDiffers(BusError):
    """A queue of this name exists with other properties than those declared."""

    code = "bus.queue_differs"


class BusForbidden(BusError):
    """The broker refuses the operation to these credentials. A wait does not help."""

    code = "bus.forbidden"


class BusRightsMissing(BusForbidden):
    """The broker knows the user, which lacks a permission. A person grants it while the process runs."""


class BusTopicsOpen(BusRightsMissing):
    """The user may publish to few exchanges, and there under any key: its topic permissions were not set."""

    code = "bus.topics_open"


class BusOwned(BusError):
    """This name has another owner. The error's text is the owner."""

    code = "bus.owned"


# The header of a delivery of which not all headers could be read.
UNREAD = "berth-unread"


class Outgoing(Struct, frozen=True, kw_only=True):
    """One broker message to publish. `exchange` "" is the default exchange: routing_key names a queue."""

    exchange: str
    routing_key: str
    body: bytes
    content_type: str = "application/json"
    message_id: str = ""
    type: str = ""
    correlation_id: str | None = None
    reply_to: str | None = None
    headers: Mapping[str, str | int | float] = {}
    persistent: bool = True
    mandatory: bool = False
    expiration_s: float | None = None  # seconds in a queue after which the broker drops it (None: never)


class Delivery(Protocol):
    """One received broker message. Either ack or nack is called, once; neither waits."""

    body: bytes
    exchange: str
    routing_key: str
    content_type: str | None
    message_id: str | None
    type: str | None
    correlation_id: str | None
    reply_to: str | None
    headers: Mapping[str, object]
    redelivered: bool
    delivery_count: int  # earlier deliveries without an acknowledgement, where the broker counts them
    expiration_s: float | None  # that its publisher gave it; None: none, or it is a dead letter, which has lost it

    @property
    def is_lost(self) -> bool:
        """Whether the connection of the delivery is lost. The broker then delivers the message again, whatever the
        result of this delivery.
        """

    def ack(self) -> None:
        """Acknowledge the message. On a lost connection this does nothing, and the broker delivers the message
        again.
        """

    def nack(self, *, requeue: bool) -> None:
        """Requeue it (which counts towards the delivery limit), or let the broker dead-letter it."""


# The fields of every delivery. The adapters declare them as slots, because there are thousands of deliveries a second.
DELIVERY_FIELDS = tuple(Delivery.__annotations__)


class Subscription(Protocol):
    """A subscription to a queue. It survives reconnections until it is cancelled."""

    def pause(self) -> None:
        """Have the broker deliver no further messages until `resume`. It does not wait: messages on their way still
        come, and those handed over may be settled.
        """

    def resume(self) -> None:
        """Have the broker deliver again."""

    async def cancel(self) -> None:
        """End the subscription. There are no new deliveries after this returns; earlier ones may still be
        acknowledged. The queue is declared no more when the connection is new.
        """


class Transport(Protocol):
    """One connection to one bus. Reconnects by itself and then restores declarations and consumption.

    Without a connection each coroutine but `open` and `close` raises BusUnavailable; without permission, BusForbidden.
    """

    name: str

    async def open(self) -> None:
        """Connect. Waits for the broker while it is unavailable, and logs that; raises BusForbidden."""

    async def close(self) -> None:
        """Close; unacknowledged deliveries go back to their queues."""

    @property
    def connected(self) -> bool:
        """Whether the broker can be reached now (for /readyz)."""

    @property
    def blocked(self) -> str:
        """Why the broker accepts no messages now, in its own words (short of memory or disk); "" when it accepts them.
        A broker reports it after the next publish. Published messages then wait, and none is lost.
        """

    async def declare_shared(self) -> None:
        """Declare the shared topology of the bus (exchanges, queues of delayed messages, queue of dead letters),
        leaving what exists as it is. Raises BusRightsMissing when these credentials may not declare what is missing.
        """

    async def check_publishes(self, keys: Sequence[tuple[str, str]]) -> None:
        """Raise BusRightsMissing unless these credentials may publish to each of these (exchange, key), and
        BusTopicsOpen where topic permissions are missing. Nothing is published.
        """

    async def set_owner(self, name: str, owner: str) -> None:
        """Set the owner of a name, durably, unless it has one. It routes no messages, and is restored after each
        reconnection. Of several transports that set one at the same time, one succeeds. Raises BusOwned when the
        name has another owner.
        """

    async def owner_of(self, name: str) -> str:
        """Return the owner of a name; "" when it has none."""

    async def clear_owner(self, name: str) -> None:
        """Take the owner of a name away, whichever it is."""

    async def declare_queue(self, row: QueueRow, name: str, bindings: Sequence[tuple[str, str]]) -> None:
        """Declare a queue as its row describes it, bound, placeholders filled in; the shared topology exists already.
        Raises QueueLocked, at once, while another connection has a private queue of this name.
        """

    async def declare_reply_queue(self, name: str) -> None:
        """Declare a private queue for replies: exclusive, transient, bound to the exchange of replies by its name."""

    async def bind_external(self, queue: str, exchange: str, keys: Sequence[str]) -> None:
        """Declare a durable queue and bind it to an exchange of another system. The exchange is checked passively and
        never declared. Raises QueueMissing while the exchange does not exist.
        """

    async def publish(self, message: Outgoing) -> None:
        """Publish and wait for the broker's confirm. Raises BusUnavailable, Unroutable or PublishRefused."""

    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], *, prefetch: int) -> Subscription:
        """Deliver messages of a queue to a callback that must not block. prefetch: unacknowledged messages at most.

        Raises QueueMissing.
        """

    async def get(self, queue: str) -> Delivery | None:
        """Take one message; None when the queue is empty. It serves to inspect dead letters. Raises QueueMissing."""

    async def depth(self, queue: str) -> int:
        """Return the number of ready messages in a queue. Raises QueueMissing."""

    async def purge(self, queue: str) -> int:
        """Drop the ready messages of a queue, and return their number. Raises QueueMissing."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Have a function called (in the event loop) after each reconnection, when all declarations and subscriptions
        are restored.
        """

    def on_locked(self, callback: Callable[[], None]) -> None:
        """Have a function called (in the event loop) each time a reconnection fails because another connection has a
        private queue of this one. The transport tries again.
        """

"""One session with the broker, from its opening to its loss. It has two connections, one that only publishes: a broker
short of memory or disk no longer reads a connection that has published, so acknowledgements go by the other and its
queues can shrink. When one is lost the other is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aio_pika
import structlog
from aiormq import Channel
from aiormq.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import ChannelInvalidStateError
from msgspec import structs
from pamqp.commands import Queue

from bus.rabbitmq.address import BrokerAddress
from bus.rabbitmq.channels import CLOSE_TIMEOUT_S, CONFIRM_TIMEOUT_S, PublishChannel
from bus.rabbitmq.errors import port_error, translated
from bus.rabbitmq.patches import has_ended, listen_for_alarms
from bus.server_url import Endpoint
from bus.topology import (
    NEVER_GIVEN_UP,
    OWNER_ID,
    ExchangePlan,
    ExternalQueue,
    QueueNames,
    QueuePlan,
    shared_exchanges,
    shared_queues,
)
from bus.transport import (
    BusError,
    BusForbidden,
    BusOwned,
    BusRightsMissing,
    BusTopicsOpen,
    BusUnavailable,
    NotSent,
    Outgoing,
    QueueDiffers,
    QueueMissing,
)

log = structlog.get_logger("bus.rabbitmq")

CONNECT_TIMEOUT_S = 10.0
# An answer to a declaration or a get may take this long on a broker that is busy syncing disks.
RPC_TIMEOUT_S = 30.0
# Silence of the broker is noticed within about three of these.
HEARTBEAT_S = 10

# How the broker reports the argument that an exchange has, when another one is declared; at most 255 bytes of it.
CURRENT_VALUE = re.compile(r"current is (?:the value )?'([^']*)")
# A key of no message, and an exchange of RabbitMQ's own that only a user writes to who may do everything.
UNLISTED, FOREIGN = "berth-unlisted", "amq.topic"
UNKNOWN_OWNER, NO_OWNER = "unknown", "?"

# The page with the remedies for queues that an earlier berth declared otherwise.
UPGRADE = "docs/operate/upgrade.md"


class Session:
    """Two connections, a channel to publish on and one to declare on; the channels are replaced when the broker closes
    them.
    """

    def __init__(
        self,
        connection: aio_pika.abc.AbstractConnection,
        publishing: aio_pika.abc.AbstractConnection,
        names: QueueNames,
    ) -> None:
        assert connection.transport is not None and publishing.transport is not None, "connected"
        self.names = names
        self.lost = asyncio.Event()
        self.lost_reason = ""  # as the broker or the network states it
        self.blocked = ""  # why the broker takes no messages now
        self._takes = asyncio.Event()  # it does, or the connection is lost
        self._takes.set()
        self.on_blocked: Callable[[], None] = lambda: None
        self._both = (connection, publishing)
        self._connection: AbstractConnection = connection.transport.connection
        self._publishes: AbstractConnection = publishing.transport.connection
        for one in (self._connection, self._publishes):
            one.closing.add_done_callback(self._closed)
        listen_for_alarms(self._publishes, self._alarmed)
        self._channels: dict[str, AbstractChannel] = {}
        self._opening = asyncio.Lock()
        self._publisher: PublishChannel | None = None
        self._publishing = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()
        self._unsent = 0  # publishes that wait for a channel
        self._trial: asyncio.Timeout | None = None

    @classmethod
    async def connect(cls, address: BrokerAddress, names: QueueNames, connection_name: str) -> Session:
        """Connect to one of the broker's nodes, which are tried in a random order. Raises BusUnavailable or
        BusForbidden. Of several errors the one about an unavailable node is raised, because that node may become
        available.
        """
        errors: list[BusError] = []
        for host in random.sample(address.hosts, len(address.hosts)):
            try:
                return await cls._connect_to(address, host, names, connection_name)
            except BusError as error:
                errors.append(error)
        raise next((error for error in errors if not isinstance(error, BusForbidden)), errors[-1])

    @classmethod
    async def _connect_to(
        cls, address: BrokerAddress, host: Endpoint, names: QueueNames, connection_name: str
    ) -> Session:
        consuming, publishing = (
            aio_pika.Connection(
                address.url(host, heartbeat=str(HEARTBEAT_S), name=name),
                ssl_context=address.tls(),
            )
            for name in (connection_name, f"{connection_name} publishes")
        )
        with translated():
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await consuming.connect()
                    await publishing.connect()
            except BaseException:
                await asyncio.gather(_close_quietly(consuming), _close_quietly(publishing))
                raise
        return cls(consuming, publishing, names)

    def _closed(self, closing: asyncio.Future[Any]) -> None:
        error = None if closing.cancelled() else closing.exception()
        if error is not None and not self.lost.is_set():
            self.lost_reason = str(port_error(error))
        self.lost.set()
        self._takes.set()

    def _alarmed(self, reason: str) -> None:
        self.blocked = reason
        (self._takes.clear if reason else self._takes.set)()
        if reason and self._trial is not None:
            self._trial.reschedule(0.0)
            self._trial = None
        self.on_blocked()

    async def close(self) -> None:
        """Close, and never wait long for a broker that does not answer."""
        await asyncio.gather(*map(_close_quietly, self._both))
        self.lost.set()

    async def channel(self, *, confirms: bool) -> AbstractChannel:
        """A new channel: to publish on (confirms), or for anything else."""
        connection = self._publishes if confirms else self._connection
        with translated():
            return await connection.channel(publisher_confirms=confirms, timeout=RPC_TIMEOUT_S)

    async def named(self, name: str) -> AbstractChannel:
        """A channel kept for one purpose; opened anew when the broker has closed it."""
        async with self._opening:
            found = self._channels.get(name)
            if found is None or has_ended(found):
                found = self._channels[name] = await self.channel(confirms=False)
            return found

    @contextlib.asynccontextmanager
    async def _on(self, name: str, about: str = "") -> AsyncIterator[AbstractChannel]:
        """Calls on a channel kept for one purpose, with the port's errors. about: as of `translated`."""
        channel = await self.named(name)
        with translated(about):
            yield channel

    @contextlib.asynccontextmanager
    async def _on_external(self, name: str) -> AsyncIterator[AbstractChannel]:
        """The same, for a declaration of another system's: what differs is used as it is."""
        try:
            async with self._on("foreign", name) as channel:
                yield channel
        except QueueDiffers as error:
            log.warning("bus.external_differs", name=name, reason=str(error))

    async def publish(self, message: Outgoing) -> None:
        """Publish and wait for the confirm. Raises NotSent: nothing has left. In an alarm nothing is written that the
        broker does not read: each message that is sent again when it was late would be one more in the connection. One
        that expires waits for the end of an alarm for no longer than that.
        """
        publisher = self._publisher
        if publisher is None or self._unsent or self.blocked or not publisher.usable:
            self._unsent += 1  # messages that come meanwhile wait behind this one
            remaining_s = message.expiration_s if self.blocked else None
            wait_s = CONFIRM_TIMEOUT_S if remaining_s is None else min(CONFIRM_TIMEOUT_S, remaining_s)
            try:
                with translated():
                    async with asyncio.timeout(wait_s):
                        publisher = await self._open_publisher()
            except BusUnavailable as error:
                raise NotSent(str(error)) from error
            finally:
                self._unsent -= 1
        await publisher.publish(message)

    async def _open_publisher(self) -> PublishChannel:
        async with self._publishing:
            while True:
                await self._takes.wait()
                old = self._publisher
                if old is None or not old.usable:
                    channel = await self.channel(confirms=True)
                    assert isinstance(channel, Channel)
                    if old is not None and not has_ended(old.channel):
                        await self._retire(old)
                    old = self._publisher = PublishChannel(channel, self.names)
                if self._takes.is_set():  # the next alarm may have begun before this task had its turn
                    return old

    async def _retire(self, publisher: PublishChannel) -> None:
        """Close a channel when its publishes under way have ended, for which further ones do not wait: one may hang.

        The messages sent on it are before theirs nevertheless: it answers when it has passed them on to their queues.
        """
        with contextlib.suppress(BusError):  # closed meanwhile
            with translated():
                await publisher.channel.basic_qos(timeout=RPC_TIMEOUT_S)
            closing = asyncio.get_running_loop().create_task(publisher.close())
            self._retiring.add(closing)
            closing.add_done_callback(self._retiring.discard)

    async def declare_shared(self, bus: str) -> None:
        """Declare the shared topology of the bus, unless it exists: some users may use it and not declare it.

        Raises BusRightsMissing: something is missing, and these credentials may not declare it.
        """
        may_bind = True
        try:
            for exchange in shared_exchanges(bus):
                await self._declare_exchange(self.names.plan_exchange(exchange))
            for planned in shared_queues(bus):
                real = self.names.plan(planned)
                if not await self._is_there(real.name):
                    await self.declare(real)
                elif may_bind:  # who made it may have ended before it was bound
                    may_bind = await self._declare_if_allowed(real)
        except BusForbidden as error:
            raise BusRightsMissing(
                f"another worker declares the bus's shared topology, and has not yet: {error}"
            ) from error

    async def check_publishes(self, keys: Sequence[tuple[str, str]]) -> None:
        """Try keys under their local names. Raises BusRightsMissing; TimeoutError in an alarm, in which the broker does
        not read them. A topic exchange without topic permissions is open to all keys, which is right for an
        unrestricted user only.
        """
        async with asyncio.timeout(0.0 if self.blocked else CONFIRM_TIMEOUT_S) as trial:
            self._trial = trial
            try:
                await self._check_publishes(
                    [(self.names.exchange(exchange), self.names.key(exchange, key)) for exchange, key in keys]
                )
            finally:
                self._trial = None

    async def _check_publishes(self, keys: Sequence[tuple[str, str]]) -> None:
        await self._try_publishes(keys)
        for exchange in dict.fromkeys(exchange for exchange, _ in keys):
            if not await self._may_publish(exchange, UNLISTED):
                continue
            if await self._may_publish(FOREIGN, UNLISTED):
                return
            raise BusTopicsOpen(f"exchange {exchange} takes any key of this user: its topic permissions are not set")

    async def _may_publish(self, exchange: str, key: str) -> bool:
        try:
            await self._try_publishes([(exchange, key)])
        except BusRightsMissing:
            return False
        return True

    async def _try_publishes(self, keys: Sequence[tuple[str, str]]) -> None:
        """The broker checks a publish when it comes, also in a transaction, which is then rolled back."""
        with translated():
            channel = await self._publishes.channel(publisher_confirms=False, timeout=RPC_TIMEOUT_S)
            try:
                await channel.tx_select(timeout=RPC_TIMEOUT_S)
                for exchange, key in keys:
                    await channel.basic_publish(b"", exchange=exchange, routing_key=key)
                await channel.tx_rollback(timeout=RPC_TIMEOUT_S)
                await channel.close()
            except ChannelInvalidStateError:  # the refusal was there before the roll-back was sent
                async with asyncio.timeout(RPC_TIMEOUT_S):
                    await channel.closing
                raise

    async def _is_there(self, queue: str) -> bool:
        """Whether a shared queue exists, as far as these credentials may know: see `_declare_exchange`."""
        try:
            await self.depth(queue)
        except (QueueMissing, BusForbidden) as error:
            return isinstance(error, BusForbidden)
        return True

    async def _declare_if_allowed(self, planned: QueuePlan) -> bool:
        """Bind a shared queue that exists, and log how it differs. False: these credentials may not."""
        try:
            await self.declare(planned)
        except BusForbidden:
            return False
        except QueueDiffers as error:
            log.warning("bus.shared_queue_differs", code=error.code, queue=planned.name, reason=str(error), see=UPGRADE)
            await self._bind(planned)
        return True

    async def set_owner(self, name: str, owner: str) -> None:
        """Set an owner: an exchange, under its real name, whose alternate exchange names its owner. Raises BusOwned.

        Of an exchange the broker compares type, durability and alternate exchange with the new declaration.
        """
        try:
            await self._declare_owner(name, owner)
        except QueueDiffers as error:
            raise BusOwned(await self.owner_of(name) or UNKNOWN_OWNER) from error

    async def _declare_owner(self, name: str, owner: str) -> None:
        async with self._on("owners", name) as channel:
            await channel.exchange_declare(
                name,
                exchange_type="direct",
                durable=True,
                internal=True,
                arguments={"alternate-exchange": f"{OWNER_ID}{owner}"},
                timeout=RPC_TIMEOUT_S,
            )

    async def owner_of(self, name: str) -> str:
        """The owner of a name; "" if there is none. No call returns an exchange's arguments, so it is declared as no
        worker would: the broker's code states that it differs; its text is only for a person.
        """
        try:
            async with self._on("owners", name) as channel:
                await channel.exchange_declare(name, passive=True, timeout=RPC_TIMEOUT_S)
        except QueueMissing:
            return ""
        try:
            await self._declare_owner(name, NO_OWNER)
        except QueueDiffers as error:
            current = CURRENT_VALUE.search(str(error))
            return current[1].removeprefix(OWNER_ID) if current else UNKNOWN_OWNER
        await self.clear_owner(name)  # it was taken away just then
        return ""

    async def clear_owner(self, name: str) -> None:
        """A name has no owner any more."""
        async with self._on("owners", name) as channel:
            await channel.exchange_delete(name, timeout=RPC_TIMEOUT_S)

    async def _declare_exchange(self, planned: ExchangePlan) -> None:
        try:
            async with self._on("shared", planned.name) as channel:
                await channel.exchange_declare(planned.name, passive=True, timeout=RPC_TIMEOUT_S)
        except BusForbidden:
            # RabbitMQ 4.3 tells nothing of it to a user that has no permission of it at all, and so does not use it.
            return
        except QueueMissing:
            async with self._on("shared", planned.name) as channel:
                await channel.exchange_declare(
                    planned.name,
                    exchange_type="topic",
                    durable=True,
                    arguments={"alternate-exchange": planned.alternate} if planned.alternate else {},
                    timeout=RPC_TIMEOUT_S,
                )

    async def declare(self, planned: QueuePlan) -> None:
        """A queue and its bindings, under its real names."""
        try:
            await self._declare(planned)
        except QueueDiffers:
            if not await self._lacks_limit(planned):
                if not planned.disposable:
                    raise
                async with self._on("control", planned.name) as channel:
                    await channel.queue_delete(planned.name, timeout=RPC_TIMEOUT_S)
                await self._declare(planned)
        await self._bind(planned)

    async def _lacks_limit(self, planned: QueuePlan) -> bool:
        """Whether the queue exists and differs only in what an earlier berth did not state: a delivery limit, and a
        bound in bytes. It is used as it is: it may hold what must not be lost, and such a worker may use it beside this
        one.
        """
        if planned.delivery_limit != NEVER_GIVEN_UP:
            return False
        try:
            await self._declare(structs.replace(planned, delivery_limit=None, max_bytes=0))
        except QueueDiffers:
            return False
        if not planned.disposable:
            reason = "RabbitMQ 4 drops its messages when they have been given back 20 times"
            log.warning("bus.queue_without_limit", queue=planned.name, reason=reason, see=UPGRADE)
        return True

    async def _declare(self, planned: QueuePlan) -> None:
        async with self._on("control", planned.name) as channel:
            await channel.queue_declare(
                planned.name,
                durable=planned.durable,
                exclusive=planned.exclusive,
                arguments=_arguments(planned),
                timeout=RPC_TIMEOUT_S,
            )

    async def _bind(self, planned: QueuePlan) -> None:
        channel = await self.named("control")
        for exchange, key in planned.bindings:
            with translated():
                await channel.queue_bind(planned.name, exchange, key, timeout=RPC_TIMEOUT_S)

    async def bind_external(self, planned: QueuePlan, exchange: str, keys: Sequence[str]) -> None:
        """Bind to an exchange that is not ours and only looked at. Raises QueueMissing."""
        async with self._on("control") as channel:
            await channel.exchange_declare(exchange, passive=True, timeout=RPC_TIMEOUT_S)
        await self.declare(structs.replace(planned, bindings=tuple((exchange, key) for key in keys)))

    async def declare_external(self, planned: ExternalQueue) -> None:
        """A queue of another system, its exchange, and the binding of both. What exists is used as it is, whatever its
        properties: the processes of that system may be configured otherwise than this one.
        """
        async with self._on_external(planned.exchange) as channel:
            await channel.exchange_declare(
                planned.exchange,
                exchange_type=planned.exchange_type,
                durable=planned.exchange_durable,
                auto_delete=planned.exchange_auto_delete,
                timeout=RPC_TIMEOUT_S,
            )
        async with self._on_external(planned.name) as channel:
            await channel.queue_declare(
                planned.name,
                durable=planned.durable,
                auto_delete=planned.auto_delete,
                arguments=dict(planned.arguments),
                timeout=RPC_TIMEOUT_S,
            )
        async with self._on("foreign") as channel:
            await channel.queue_bind(planned.name, planned.exchange, planned.routing_key, timeout=RPC_TIMEOUT_S)

    async def delete_queue(self, queue: str) -> None:
        """Take a queue away, with what is in it."""
        async with self._on("foreign", queue) as channel:
            await channel.queue_delete(queue, timeout=RPC_TIMEOUT_S)

    async def depth(self, queue: str) -> int:
        """Messages ready."""
        return (await self._looked_at(queue)).message_count or 0

    async def consumers(self, queue: str) -> int:
        """Consumptions."""
        return (await self._looked_at(queue)).consumer_count or 0

    async def _looked_at(self, queue: str) -> Queue.DeclareOk:
        async with self._on("control", queue) as channel:
            return await channel.queue_declare(queue, passive=True, timeout=RPC_TIMEOUT_S)

    async def purge(self, queue: str) -> int:
        """Drop the ready messages."""
        async with self._on("control") as channel:
            answer = await channel.queue_purge(queue, timeout=RPC_TIMEOUT_S)
        return answer.message_count or 0


def _arguments(planned: QueuePlan) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "x-queue-type": "quorum" if planned.durable else "classic",
        "x-max-length": planned.max_length,
        "x-overflow": "drop-head" if planned.drop_head else "reject-publish",
    }
    if planned.max_bytes:
        arguments["x-max-length-bytes"] = planned.max_bytes
    if planned.delivery_limit is not None:
        arguments["x-delivery-limit"] = planned.delivery_limit
    if planned.ttl_s is not None:
        arguments["x-message-ttl"] = int(planned.ttl_s * 1000)
    if planned.dead_exchange is not None:
        arguments["x-dead-letter-exchange"] = planned.dead_exchange
        if planned.dead_key:
            arguments["x-dead-letter-routing-key"] = planned.dead_key
        if not planned.drop_head:
            # The broker confirms to itself the messages that it moves: a crash in between loses nothing.
            arguments["x-dead-letter-strategy"] = "at-least-once"
    if planned.single_active:
        arguments["x-single-active-consumer"] = True
    return arguments


async def _close_quietly(pika: aio_pika.abc.AbstractConnection) -> None:
    """Close, within a bound, and leave aio-pika nothing to close.

    A connection that it finds open when it is collected it would close then, in whatever loop runs, or in none.
    """
    with contextlib.suppress(BusError), translated():
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await pika.close()
    await pika.close()  # its transport is gone by now: this call only marks it as closed

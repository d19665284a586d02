"""How the stand-in's notifications reach an exchange that is not berth's own."""

from __future__ import annotations

from typing import Protocol

import aio_pika
from aio_pika.abc import AbstractExchange, AbstractRobustConnection
from aio_pika.exceptions import AMQPError

from bus.memory import MemoryBroker, MemoryTransport
from bus.rabbitmq.address import parse_bus_url
from bus.transport import BusUnavailable, Outgoing, Transport

EXCHANGE = "ironic"
CONNECT_TIMEOUT_S = 60.0  # a broker that has just started on a busy machine took more than 10


class NotificationAnnouncer(Protocol):
    """Publishes into Ironic's exchange."""

    async def open(self) -> None:
        """Connect and declare the exchange as Ironic does."""

    async def publish(self, routing_key: str, body: bytes) -> None:
        """Publish one notification."""

    async def close(self) -> None:
        """Disconnect."""


class Silent:
    """A stand-in without notifications, as Ironic's default is."""

    async def open(self) -> None:
        """Nothing to connect."""

    async def publish(self, routing_key: str, body: bytes) -> None:
        """Publish nothing."""

    async def close(self) -> None:
        """Nothing to close."""


class MemoryAnnouncer:
    """Into a memory broker."""

    def __init__(self, broker: MemoryBroker, exchange: str = EXCHANGE) -> None:
        self._broker = broker
        self._exchange = exchange
        self._transport: Transport = MemoryTransport(broker, "ironic_stand_in")

    async def open(self) -> None:
        """Connect and declare the exchange."""
        self._broker.declare_exchange(self._exchange)
        await self._transport.open()

    async def publish(self, routing_key: str, body: bytes) -> None:
        """Publish one notification."""
        await self._transport.publish(Outgoing(exchange=self._exchange, routing_key=routing_key, body=body))

    async def close(self) -> None:
        """Disconnect."""
        await self._transport.close()


class AmqpAnnouncer:
    """Into RabbitMQ, at the first node of the URL. The exchange is not durable, as Ironic's is not; after a
    reconnection it is declared again."""

    def __init__(self, url: str, exchange: str = EXCHANGE) -> None:
        self._url = url
        self._name = exchange
        self._connection: AbstractRobustConnection | None = None
        self._exchange: AbstractExchange | None = None

    async def open(self) -> None:
        """Connect and declare the exchange. Raises BusUnavailable: the broker is out of reach or refuses."""
        broker = parse_bus_url(self._url)
        try:
            self._connection = await aio_pika.connect_robust(
                broker.url(broker.hosts[0]), timeout=CONNECT_TIMEOUT_S, ssl_context=broker.tls()
            )
            channel = await self._connection.channel(publisher_confirms=True)
            self._exchange = await channel.declare_exchange(self._name, aio_pika.ExchangeType.TOPIC, durable=False)
        except (AMQPError, OSError, TimeoutError) as error:
            await self.close()
            raise BusUnavailable(f"the simulated Ironic cannot announce: {error or type(error).__name__}") from error

    async def publish(self, routing_key: str, body: bytes) -> None:
        """Publish one notification with the AMQP properties of the recorded ones."""
        assert self._exchange is not None, "not open"
        message = aio_pika.Message(
            body,
            content_type="application/json",
            content_encoding="utf-8",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            priority=0,
        )
        await self._exchange.publish(message, routing_key, mandatory=False)

    async def close(self) -> None:
        """Disconnect."""
        if self._connection is not None:
            await self._connection.close()

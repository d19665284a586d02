"""The RabbitMQ adapter: connections and channels from aio-pika, messages through aiormq below it.

aio-pika's own message and queue objects cost several times what aiormq does per message; see docs/decisions.
"""

from bus.rabbitmq.address import BadBusUrl, parse_bus_url
from bus.rabbitmq.errors import BrokerUntrusted
from bus.rabbitmq.transport import RabbitTransport

__all__ = ["BadBusUrl", "BrokerUntrusted", "RabbitTransport", "parse_bus_url"]

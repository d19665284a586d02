"""A broker in memory with RabbitMQ's semantics, for one process: first looks, simulation, tests.

Only bytes cross it, so no object is shared by accident. It passes the same suite as the RabbitMQ adapter.
"""

from bus.memory.broker import MemoryBroker
from bus.memory.transport import MemoryTransport

__all__ = ["MemoryBroker", "MemoryTransport"]

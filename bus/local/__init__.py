"""A memory broker shared with other processes of this machine, over a Unix socket.

`berth up` serves the brokers it holds in its memory, so that `berth boot` in another terminal reaches them without
RabbitMQ. See docs/decisions/0006-local-bus.md.
"""

from bus.local.server import LocalServer
from bus.local.transport import LocalTransport

__all__ = ["LocalServer", "LocalTransport"]

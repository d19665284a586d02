"""Whether a broker confirms the messages that it gets: one that takes connections may have lost the log of its quorum
queues.

RabbitMQ 3.10 loses it on a full disk (`ra_log_wal` ends with `enospc`) and goes on so when there is room again: every
quorum queue refuses, or never confirms, until the broker is started anew.
"""

from __future__ import annotations

from bus.rabbitmq.address import parse_bus_url
from bus.rabbitmq.session import Session
from bus.topology import QueueNames, QueuePlan
from bus.transport import BusError, Outgoing

PROBE_QUEUE = "berth.probe"


async def probe(url: str) -> None:
    """Have a durable message confirmed, in a quorum queue of its own that keeps one. Raises BusError.

    A broker that is short of memory or disk takes no messages and reports that: it is no failure, as it ends by itself.
    """
    session = await Session.connect(parse_bus_url(url), QueueNames(""), "berth probe")
    try:
        await session.declare(QueuePlan(name=PROBE_QUEUE, durable=True, exclusive=False, max_length=1, drop_head=True))
        await session.publish(Outgoing(exchange="", routing_key=PROBE_QUEUE, body=b""))
    except BusError:
        if not session.blocked:
            raise
    finally:
        await session.close()

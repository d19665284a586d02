"""Exchanges and queues of oslo.messaging's rabbit driver, as the settings of `[oslo_messaging_rabbit]` make them.

RabbitMQ refuses a declaration that differs from the one before. So Nova's services and this one have to have the same
settings: whoever comes second with others is refused.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from bus.topology import ForeignQueue

TOPIC = "scheduler"
# Of the calls that a front has taken from the topic, and that only fronts take from there on.
FRONTS = "scheduler_fronts"
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class RabbitOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nova's `[oslo_messaging_rabbit]`, by its names and with its defaults. Give each the value that Nova's services
    have.
    """

    amqp_durable_queues: bool = False
    """Whether exchanges and queues of topics are durable."""
    amqp_auto_delete: bool = False
    """Whether exchanges and queues of topics go with their last user."""
    rabbit_ha_queues: bool = False
    """Whether queues are declared as mirrored (`x-ha-policy`)."""
    rabbit_quorum_queue: bool = False
    """Whether queues of topics are quorum queues. They are durable then."""
    rabbit_transient_quorum_queue: bool = False
    """Whether the fanout queue is a quorum queue."""
    rabbit_quorum_delivery_limit: Count = 0
    """How often a quorum queue delivers a message again. 0: not stated."""
    rabbit_quorum_max_memory_length: Count = 0
    """Messages of a quorum queue in memory. 0: not stated."""
    rabbit_quorum_max_memory_bytes: Count = 0
    """Bytes of a quorum queue in memory. 0: not stated."""
    rabbit_transient_queues_ttl: Count = 1800
    """Seconds after which an unused fanout queue goes; of a stream, the age of its oldest message. 0: not stated."""
    rabbit_stream_fanout: bool = False
    """Whether all schedulers share one stream instead of a fanout queue each."""

    def __post_init__(self) -> None:
        """Raises ValueError: two options exclude each other, as in oslo.messaging."""
        if self.rabbit_ha_queues and (self.rabbit_quorum_queue or self.rabbit_transient_quorum_queue):
            raise ValueError("rabbit_ha_queues: a queue is mirrored or a quorum queue, not both")
        if self.rabbit_stream_fanout and not self.rabbit_transient_quorum_queue:
            raise ValueError("rabbit_stream_fanout needs rabbit_transient_quorum_queue")


def topic_queue(options: RabbitOptions, control_exchange: str, key: str) -> ForeignQueue:
    """The queue of a topic (`scheduler`), of one server of it (`scheduler.HOST`), or of FRONTS."""
    durable = options.amqp_durable_queues or options.rabbit_quorum_queue
    return ForeignQueue(
        name=key,
        durable=durable,
        auto_delete=options.amqp_auto_delete,
        arguments=_kind(options, quorum=options.rabbit_quorum_queue),
        exchange=control_exchange,
        exchange_type="topic",
        exchange_durable=durable,
        exchange_auto_delete=options.amqp_auto_delete,
        routing_key=key,
    )


def fanout_queue(options: RabbitOptions, topic: str, unique: str) -> ForeignQueue:
    """The queue of the casts to all servers of a topic. unique: what tells it from those of other processes."""
    exchange = f"{topic}_fanout"
    ttl_s = options.rabbit_transient_queues_ttl
    arguments: dict[str, str | int]
    if options.rabbit_stream_fanout:
        arguments = {"x-queue-type": "stream"}
        arguments |= {"x-max-age": f"{ttl_s}s"} if ttl_s else {}
    else:
        arguments = _kind(options, quorum=options.rabbit_transient_quorum_queue)
        arguments |= {"x-expires": ttl_s * 1000} if ttl_s else {}
    return ForeignQueue(
        name=exchange if options.rabbit_stream_fanout else f"{exchange}_{unique}",
        durable=options.rabbit_transient_quorum_queue,
        auto_delete=False,
        arguments=arguments,
        exchange=exchange,
        exchange_type="fanout",
        exchange_durable=options.rabbit_transient_quorum_queue,
        exchange_auto_delete=True,
        routing_key=topic,
    )


def _kind(options: RabbitOptions, *, quorum: bool) -> dict[str, str | int]:
    arguments: dict[str, str | int] = {}
    if options.rabbit_ha_queues:
        arguments["x-ha-policy"] = "all"
    if quorum:
        limits: dict[str, str | int] = {
            "x-delivery-limit": options.rabbit_quorum_delivery_limit,
            "x-max-in-memory-length": options.rabbit_quorum_max_memory_length,
            "x-max-in-memory-bytes": options.rabbit_quorum_max_memory_bytes,
        }
        arguments["x-queue-type"] = "quorum"
        arguments |= {name: limit for name, limit in limits.items() if limit}
    return arguments

"""Exchanges and queues of oslo.messaging's rabbit driver, as the settings of `[oslo_messaging_rabbit]` make them.

RabbitMQ refuses a declaration that differs from the one before. So Nova's services and this one have to have the same
settings: whoever comes second with others is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated

from msgspec import Meta, Struct, structs

from bus.topology import ExternalQueue, QueuePlan

POLL_S = 0.5  # from one look at a broker's alarm to the next

TOPIC = "scheduler"
# Of the calls that a frontend has taken from the topic, and that only frontends take from there on.
FRONTENDS = "scheduler_frontends"
# A frontend that has ended leaves its queue of casts behind. Newer casts take the place of older ones there: what they
# tell is in Nova's API, too.
UNUSED_TTL_S = 1800
MAX_UNREAD_CASTS = 1_000
# Of the copies that wait in a trial's queue.
MAX_TRIAL_CALLS = 1_000
MAX_TRIAL_BYTES = 64 * 2**20
TRIAL_TTL_S = 30.0
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
MAX_TTL_S = (2**32 - 1) // 1000  # RabbitMQ takes 32 bits of milliseconds
Unused = bool | int | float | str | None
# Values with which a frontend would read or check something else than Nova's services do; the others are as berth does
# it.
AS_BERTH: Mapping[str, tuple[Collection[object], str]] = {
    "kombu_compression": (("",), "compressed messages are not read"),
    "rabbit_login_method": (("AMQPLAIN", "PLAIN"), "the login is by user and password"),
    "ssl_enforce_hostname_verification": ((True,), "the broker's name is verified wherever its authority is"),
    "ssl_enforce_fips_mode": ((False,), "whether OpenSSL is in FIPS mode is not enforced"),
}


class RabbitOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nova's `[oslo_messaging_rabbit]`, by its names and with its defaults. Give each the value that Nova's services
    have. Some have no effect, and are known so that the section can be copied.
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
    rabbit_transient_queues_ttl: Annotated[int, Meta(ge=0, le=MAX_TTL_S)] = UNUSED_TTL_S
    """Seconds after which an unused fanout queue goes; of a stream, the age of its oldest message. 0: not stated of a
    stream; a fanout queue of berth's, which nobody else declares, goes after half an hour all the same.
    """
    rabbit_stream_fanout: bool = False
    """Whether all schedulers share one stream instead of a fanout queue each."""

    # The connection
    ssl: bool = False
    """Whether hosts of a `rabbit://` URL are connected to by TLS, with these files. An `amqps://` URL names its own."""
    ssl_ca_file: str = ""
    """Certificates (PEM) of the authorities that sign the broker's. Empty: those that the system trusts; oslo.messaging
    verifies nothing then.
    """
    ssl_cert_file: str = ""
    """The client's certificate (PEM)."""
    ssl_key_file: str = ""
    """The key to it, not encrypted."""
    ssl_enforce_hostname_verification: bool = True
    """Only true: the name of the broker is verified."""
    ssl_enforce_fips_mode: bool = False
    """Only false: berth does not set the mode of OpenSSL."""
    kombu_compression: str = ""
    """Only empty: compressed messages are not read."""
    rabbit_login_method: str = "AMQPLAIN"
    """Only AMQPLAIN or PLAIN: the login is by user and password."""

    # Of no effect
    conn_pool_min_size: Unused = None
    """Without effect: berth has one connection."""
    conn_pool_ttl: Unused = None
    """Without effect: berth has one connection."""
    rpc_conn_pool_size: Unused = None
    """Without effect: berth has one connection."""
    direct_mandatory_flag: Unused = None
    """Without effect: replies are sent so in any case."""
    enable_cancel_on_failover: Unused = None
    """Without effect: a consumer that the broker cancels is started again in any case."""
    heartbeat_in_pthread: Unused = None
    """Without effect: berth has heartbeats of its own."""
    heartbeat_rate: Unused = None
    """Without effect: berth has heartbeats of its own."""
    heartbeat_timeout_threshold: Unused = None
    """Without effect: berth has heartbeats of its own."""
    kombu_failover_strategy: Unused = None
    """Without effect: berth reconnects in its own way."""
    kombu_missing_consumer_retry_timeout: Unused = None
    """Without effect: berth reconnects in its own way."""
    kombu_reconnect_delay: Unused = None
    """Without effect: berth reconnects in its own way."""
    kombu_reconnect_splay: Unused = None
    """Without effect: berth reconnects in its own way."""
    kombu_reconnect_timeout: Unused = None
    """Without effect: berth reconnects in its own way."""
    rabbit_interval_max: Unused = None
    """Without effect: berth reconnects in its own way."""
    rabbit_max_retries: Unused = None
    """Without effect: berth reconnects in its own way."""
    rabbit_qos_prefetch_count: Unused = None
    """Without effect: berth has a prefetch of its own."""
    rabbit_retry_backoff: Unused = None
    """Without effect: berth reconnects in its own way."""
    rabbit_retry_interval: Unused = None
    """Without effect: berth reconnects in its own way."""
    ssl_version: Unused = None
    """Without effect: the newest version that both sides have, 1.2 or 1.3."""
    use_queue_manager: Unused = None
    """Without effect: names of queues that are one process's own."""
    hostname: Unused = None
    """Without effect: a part of such names."""
    processname: Unused = None
    """Without effect: a part of such names."""

    def __post_init__(self) -> None:
        """Raises ValueError: two options exclude each other, as in oslo.messaging."""
        if self.rabbit_ha_queues and (self.rabbit_quorum_queue or self.rabbit_transient_quorum_queue):
            raise ValueError("rabbit_ha_queues: a queue is mirrored or a quorum queue, not both")
        if self.rabbit_stream_fanout and not self.rabbit_transient_quorum_queue:
            raise ValueError("rabbit_stream_fanout needs rabbit_transient_quorum_queue")

    def refused(self) -> str:
        """Which option has a value that a frontend cannot have, and why; "": none."""
        for name, (values, reason) in AS_BERTH.items():
            if (value := getattr(self, name)) not in values:
                return f"{name} = {value!r}: {reason}"
        return ""


def topic_queue(options: RabbitOptions, control_exchange: str, key: str) -> ExternalQueue:
    """The queue of a topic (`scheduler`), or of one server of it (`scheduler.HOST`)."""
    durable = options.amqp_durable_queues or options.rabbit_quorum_queue
    return ExternalQueue(
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


def frontends_queue(options: RabbitOptions, control_exchange: str) -> ExternalQueue:
    """The queue FRONTENDS. It stays without a user: what is in it when the last frontend ends, or is killed, waits
    there.
    """
    return structs.replace(topic_queue(options, control_exchange, FRONTENDS), auto_delete=False)


def fanout_queue(options: RabbitOptions, topic: str, unique: str) -> ExternalQueue:
    """The queue of the casts to all servers of a topic. unique: what tells it from those of other processes."""
    exchange = f"{topic}_fanout"
    ttl_s = options.rabbit_transient_queues_ttl
    arguments: dict[str, str | int]
    if options.rabbit_stream_fanout:
        arguments = {"x-queue-type": "stream"}
        arguments |= {"x-max-age": f"{ttl_s}s"} if ttl_s else {}
    else:
        arguments = _kind(options, quorum=options.rabbit_transient_quorum_queue)
        arguments |= {"x-expires": (ttl_s or UNUSED_TTL_S) * 1000, "x-max-length": MAX_UNREAD_CASTS}
    return ExternalQueue(
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


def trial_queue(control_exchange: str, unique: str) -> QueuePlan:
    """The queue of a trial, which gets a copy of each call. It goes with its connection, and holds no more than a trial
    may still decide: the oldest calls are dropped.
    """
    return QueuePlan(
        name=f"scheduler_trial_{unique}",
        durable=False,
        exclusive=True,
        max_length=MAX_TRIAL_CALLS,
        max_bytes=MAX_TRIAL_BYTES,
        drop_head=True,
        ttl_s=TRIAL_TTL_S,
        bindings=((control_exchange, TOPIC),),
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

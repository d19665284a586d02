"""Queues and exchanges as oslo.messaging's rabbit driver declares them, for each of its options."""

from __future__ import annotations

import msgspec
import pytest

from scheduler_worker.nova.queues import RabbitOptions, fanout_queue, topic_queue

QUORUM = {"x-queue-type": "quorum"}
LIMITED = {**QUORUM, "x-delivery-limit": 3, "x-max-in-memory-length": 4, "x-max-in-memory-bytes": 5}
LIMITS = {
    "rabbit_quorum_delivery_limit": 3,
    "rabbit_quorum_max_memory_length": 4,
    "rabbit_quorum_max_memory_bytes": 5,
}
EXPIRES = {"x-expires": 1_800_000}


@pytest.mark.parametrize(
    ("options", "durable", "auto_delete", "arguments"),
    [
        ({}, False, False, {}),
        (LIMITS, False, False, {}),
        ({"amqp_durable_queues": True}, True, False, {}),
        ({"amqp_auto_delete": True}, False, True, {}),
        ({"rabbit_ha_queues": True}, False, False, {"x-ha-policy": "all"}),
        ({"rabbit_quorum_queue": True}, True, False, QUORUM),
        ({"rabbit_quorum_queue": True, **LIMITS}, True, False, LIMITED),
        ({"rabbit_transient_quorum_queue": True}, False, False, {}),
    ],
)
def test_the_queue_of_a_topic(
    options: dict[str, object], durable: bool, auto_delete: bool, arguments: dict[str, object]
) -> None:
    planned = topic_queue(msgspec.convert(options, RabbitOptions), "nova", "scheduler.h")
    assert (planned.name, planned.routing_key, planned.exchange) == ("scheduler.h", "scheduler.h", "nova")
    assert (planned.durable, planned.exchange_durable) == (durable, durable)
    assert (planned.auto_delete, planned.exchange_auto_delete) == (auto_delete, auto_delete)
    assert (planned.exchange_type, planned.arguments) == ("topic", arguments)


@pytest.mark.parametrize(
    ("options", "name", "durable", "arguments"),
    [
        ({}, "scheduler_fanout_u", False, EXPIRES),
        ({"amqp_durable_queues": True, "amqp_auto_delete": True}, "scheduler_fanout_u", False, EXPIRES),
        ({"rabbit_transient_queues_ttl": 0}, "scheduler_fanout_u", False, {}),
        ({"rabbit_ha_queues": True}, "scheduler_fanout_u", False, {"x-ha-policy": "all", **EXPIRES}),
        ({"rabbit_transient_quorum_queue": True, **LIMITS}, "scheduler_fanout_u", True, {**LIMITED, **EXPIRES}),
        (
            {"rabbit_transient_quorum_queue": True, "rabbit_stream_fanout": True},
            "scheduler_fanout",
            True,
            {"x-queue-type": "stream", "x-max-age": "1800s"},
        ),
        (
            {
                "rabbit_transient_quorum_queue": True,
                "rabbit_stream_fanout": True,
                "rabbit_transient_queues_ttl": 0,
            },
            "scheduler_fanout",
            True,
            {"x-queue-type": "stream"},
        ),
    ],
)
def test_the_queue_of_casts_to_all(
    options: dict[str, object], name: str, durable: bool, arguments: dict[str, object]
) -> None:
    planned = fanout_queue(msgspec.convert(options, RabbitOptions), "scheduler", "u")
    assert (planned.name, planned.exchange, planned.exchange_type) == (name, "scheduler_fanout", "fanout")
    assert (planned.durable, planned.exchange_durable, planned.auto_delete) == (durable, durable, False)
    assert planned.exchange_auto_delete and planned.arguments == arguments


@pytest.mark.parametrize(
    "options",
    [
        {"rabbit_ha_queues": True, "rabbit_quorum_queue": True},
        {"rabbit_ha_queues": True, "rabbit_transient_quorum_queue": True},
        {"rabbit_stream_fanout": True},
        {"rabbit_transient_queues_ttl": -1},
        {"rabbit_quorum": True},
    ],
)
def test_options_that_oslo_messaging_refuses_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(options, RabbitOptions)

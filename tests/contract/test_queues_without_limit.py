"""Queues that an earlier berth declared without a delivery limit are used and named; a policy mends them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiormq
import pytest
from structlog.testing import capture_logs

from berth.trial.embedded.rabbitmq import RabbitMQ
from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming import dead_letters
from bus.contracts.catalogue import BY_QUEUE, DEAD, DEAD_LETTERS, QUEUES, QueueKind
from bus.port import Outgoing
from bus.rabbitmq import RabbitTransport
from bus.topology import MAX_PARKED, NEVER_GIVEN_UP, delayed_queue, foreign_plan, plan, shared_queues
from tests.contract.rig import until

FOREIGN = "ironic.notifications"
NOTIFIES = "foreign.notifications"
EXPIRING = BY_QUEUE["placement.reads"]
LOOKS = 30

on_rabbitmq = pytest.mark.rabbitmq

KEPT = {"x-queue-type": "quorum", "x-max-length": MAX_PARKED}
AS_BEFORE: dict[str, dict[str, str | int]] = {
    DEAD_LETTERS: {**KEPT, "x-overflow": "reject-publish"},
    FOREIGN: {**KEPT, "x-overflow": "drop-head"},
    EXPIRING.name: {
        "x-queue-type": "quorum",
        "x-max-length": EXPIRING.max_length,
        "x-overflow": "reject-publish",
        "x-message-ttl": round((EXPIRING.ttl_s or 0.0) * 1000),
    },
}


@asynccontextmanager
async def channel_on(url: str) -> AsyncIterator[aiormq.abc.AbstractChannel]:
    connection = await aiormq.connect(url)
    try:
        yield await connection.channel()
    finally:
        await connection.close()


async def declare_as_before(url: str, prefix: str) -> None:
    """The queues that an earlier berth declared without a limit."""
    async with channel_on(url) as channel:
        for name, arguments in AS_BEFORE.items():
            await channel.queue_declare(prefix + name, durable=True, arguments=arguments)  # type: ignore[arg-type]


def transport_on(url: str, prefix: str = "") -> RabbitTransport:
    return RabbitTransport(url, name="api", prefix=prefix)


def test_every_consumed_queue_states_how_often_a_message_may_be_given_back() -> None:
    """RabbitMQ 4 gives up a message of any other after 20 times. -1 gives up all at once in RabbitMQ 3.10."""
    delayed = {planned.name for planned in shared_queues() if planned.ttl_s is not None}
    assert all(name.startswith(delayed_queue(0).removesuffix("0")) for name in delayed)
    planned = (*shared_queues(), *(plan(row, row.name, row.bindings) for row in QUEUES), foreign_plan(FOREIGN))
    for one in planned:
        if one.durable and one.name not in delayed:
            assert one.delivery_limit is not None and one.delivery_limit > 0, one.name
    rows = {row.name: row for row in QUEUES if row.kind is QueueKind.DURABLE}
    limits = {one.name: one.delivery_limit for one in planned if one.durable and one.name not in delayed}
    assert {name: limit for name, limit in limits.items() if limit != NEVER_GIVEN_UP} == {
        name: row.delivery_limit for name, row in rows.items()
    }


@on_rabbitmq
async def test_a_queue_of_an_earlier_berth_is_used_with_what_it_holds_and_named(amqp: tuple[str, str]) -> None:
    url, prefix = amqp
    await declare_as_before(url, prefix)
    transport = transport_on(url, prefix)
    with capture_logs() as logged:
        await transport.open()
        try:
            await transport.publish(Outgoing(exchange="", routing_key=EXPIRING.name, body=b"{}"))
            await transport.declare_shared()
            await transport.declare_queue(EXPIRING, EXPIRING.name, EXPIRING.bindings)
            async with channel_on(url) as channel:  # the exchange of another system has no prefix
                await channel.exchange_declare(NOTIFIES, exchange_type="topic", auto_delete=True)
                await transport.bind_foreign(FOREIGN, NOTIFIES, ["#"])
                await channel.basic_publish(b"{}", exchange=NOTIFIES, routing_key="baremetal.info")
            await until(lambda: _depth_is(transport, FOREIGN, 1))
            assert await transport.depth(EXPIRING.name) == 1, "a queue of requests was deleted"
        finally:
            await transport.close()
    named = {one["queue"]: one["see"] for one in logged if one["event"] == "bus.queue_without_limit"}
    assert named == {prefix + name: "docs/operate/upgrade.md" for name in (DEAD_LETTERS, FOREIGN)}


@on_rabbitmq
async def test_a_shared_queue_that_differs_otherwise_is_left_and_named(amqp: tuple[str, str]) -> None:
    url, prefix = amqp
    async with channel_on(url) as channel:
        await channel.queue_declare(prefix + DEAD_LETTERS, durable=True, arguments={"x-queue-type": "quorum"})
    transport = transport_on(url, prefix)
    with capture_logs() as logged:
        await transport.open()
        try:
            await transport.declare_shared()
            await transport.publish(Outgoing(exchange=DEAD, routing_key="q", body=b"{}", mandatory=True))
        finally:
            await transport.close()
    differs = [(one["code"], one["queue"]) for one in logged if one["event"] == "bus.shared_queue_differs"]
    assert differs == [("bus.queue_differs", prefix + DEAD_LETTERS)]


@on_rabbitmq
async def test_a_policy_keeps_the_letters_of_a_queue_without_a_limit(own_broker: RabbitMQ) -> None:
    """The remedy of docs/operate/upgrade.md, which needs neither a worker stopped nor a letter moved."""
    url = own_broker.url()
    await declare_as_before(url, "")
    own_broker.control(
        *("set_policy", "--apply-to", "queues", "berth-kept"),
        r"^(berth\.dead-letters|ironic\.notifications)$",
        f'{{"delivery-limit": {NEVER_GIVEN_UP}}}',
    )
    bus = Bus("api", transport_on(url), process="p", clock=SystemClock(), rng=random.Random(1))
    await bus.open()
    try:
        await bus.transport.publish(Outgoing(exchange=DEAD, routing_key="q", body=b"{}", mandatory=True))
        for _ in range(LOOKS):
            await until(lambda: _depth_is(bus.transport, DEAD_LETTERS, 1))
            assert (await dead_letters.count(bus.transport)).by_queue == {"q": 1}
    finally:
        await bus.close()


async def _depth_is(transport: RabbitTransport, queue: str, count: int) -> bool:
    return await transport.depth(queue) == count

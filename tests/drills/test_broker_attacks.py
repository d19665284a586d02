"""What a project's own user can do to others through the broker, with exactly the printed permissions (Found A7).

It comes in by a virtual host of its own on the same broker, whose load is not apart; the attacks are not.

Small counts that show the same: half a gigabyte of disk at most. `scripts/nightly broker-attacks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiormq
import pytest
from aiormq.abc import AbstractChannel
from aiormq.exceptions import AMQPError, DeliveryError
from pamqp.commands import Basic

from berth.project_vhost import MAX_QUEUES
from berth.up.servers import API_VHOST
from bus.contracts.queues import project_bus
from tests.kit.lent import lent_servers
from tests.kit.waiting import until
from tests.system.small import PLAN
from tests.system.test_permissions import MINE, THEIRS, Guarded, Tenant, key_of, tenant

pytestmark = [
    pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.nightly, pytest.mark.timeout(600)
]  # fmt: skip

BATCH = "application/vnd.berth.batch+json"
ROUNDS, BOOTS = 4, 5
TIMES = 3.0  # the boots of others may take so many times as long as alone
QUOTA = 40  # nearly all of the attacker's are refused, so that hosts are left
REQUESTS_WAITING = """
lists:sum([Count || Queue <- rabbit_amqqueue:list(), {resource, _, _, Name} <- [amqqueue:get_name(Queue)],
    lists:member(Name, [<<"scheduler.requests">>, <<"gateway.requests">>]),
    {messages, Count} <- rabbit_amqqueue:info(Queue, [messages])]).
"""
MB = 2**20
ROOM_MB = 150  # the attack writes three times as much
LARGE, LARGE_MESSAGES = 500_000, 30
QUEUES, MALFORMED = 400, 200
BINDINGS = 100
EXCHANGE_BINDINGS = """
length([1 || One <- rabbit_binding:info_all(<<"%s">>), lists:member({destination_kind, exchange}, One),
    lists:member({source_name, <<"berth.events">>}, One)]).
"""
ALARMS = "length(rabbit_alarm:get_alarms())."


@pytest.fixture(scope="module")
def system() -> Iterator[Guarded]:
    with lent_servers(PLAN.cells) as servers, tempfile.TemporaryDirectory(prefix="berth-attacks-") as name:
        guarded = Guarded(servers, Path(name))
        try:
            guarded.start()
            yield guarded
        finally:
            guarded.processes.stop()


def number(system: Guarded, expression: str) -> int:
    """What an Erlang expression is in the broker."""
    return int(re.findall(r"\d+", system.servers.broker.evaluate(expression))[-1])


async def boots_s(one: Tenant, count: int = BOOTS) -> list[float]:
    """How long each boot of a project took, from its request to its end; each machine is deleted again."""
    took = []
    for _ in range(count):
        began = time.monotonic()
        instance = await one.boot()
        took.append(time.monotonic() - began)
        await one.delete(instance)
    return took


def batch_of_many() -> tuple[bytes, str]:
    """As many requests as a batch may have."""
    items = [
        {
            "meta": {"id": str(uuid.uuid4())},
            "body": {
                "type": "build.request.v1",
                "instance_uuid": str(uuid.uuid4()),
                "project_id": MINE,
                "flavor": "m1.tiny",
            },
        }
        for _ in range(512)
    ]
    return json.dumps(items).encode(), BATCH


def gang() -> tuple[bytes, str]:
    """As many machines as one request may ask for."""
    body = {"instance_uuid": str(uuid.uuid4()), "project_id": MINE, "flavor": "m1.tiny", "count": 100}
    return json.dumps(body).encode(), "application/json"


class Flood:
    """Connections of a project that publish one message after the other, each when the broker has answered the last."""

    def __init__(self, url: str, make: Callable[[], tuple[bytes, str]], connections: int) -> None:
        self._url = url
        self._make = make
        self._connections = connections
        self.sent = self.refused = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._publish()) for _ in range(self._connections)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _publish(self) -> None:
        connection = await aiormq.connect(self._url)
        try:
            channel = await connection.channel(publisher_confirms=True)
            key = key_of("build.request", MINE)
            while True:
                body, kind = self._make()
                properties = Basic.Properties(content_type=kind, delivery_mode=2)
                try:
                    await channel.basic_publish(body, exchange="berth", routing_key=key, properties=properties)
                    self.sent += 1
                except DeliveryError:
                    self.refused += 1
        finally:
            await connection.close()


@contextlib.asynccontextmanager
async def attacker(system: Guarded, vhost: str = project_bus(MINE)) -> AsyncIterator[AbstractChannel]:
    connection = await aiormq.connect(system.url(f"berth-project-{MINE}", vhost))
    try:
        yield await connection.channel(publisher_confirms=False)
    finally:
        with contextlib.suppress(AMQPError, RuntimeError, TimeoutError):
            await connection.close()


async def test_bindings_stay_in_the_projects_virtual_host(system: Guarded) -> None:
    """9,655 durable ones in 25 s, which nothing removed: others' boots took 207 ms instead of 78."""
    async with attacker(system) as channel:
        for word in range(BINDINGS):
            key = f"build.event.{word}.{MINE}"
            await channel.exchange_bind(destination="berth", source="berth.events", routing_key=key)
    assert number(system, EXCHANGE_BINDINGS % project_bus(MINE)) == BINDINGS  # they end with it
    assert number(system, EXCHANGE_BINDINGS % API_VHOST) == 0


async def test_own_queues_that_multiply_own_events_slow_no_other_project(system: Guarded) -> None:
    """Each event was a thousand messages for the broker: others' boots took 13.5 s instead of 68 ms."""
    async with tenant(system, THEIRS) as quiet:
        await boots_s(quiet, 3)
        alone = statistics.median(await boots_s(quiet, 11))
        async with attacker(system) as channel:
            declared = 0
            with contextlib.suppress(AMQPError):
                for _ in range(QUEUES):
                    queue = await channel.queue_declare("", exclusive=True)
                    await channel.queue_bind(queue.queue, "berth.events", f"build.event.*.{MINE}")
                    declared += 1
            assert declared < MAX_QUEUES
            async with attacker(system) as other:
                for _ in range(MALFORMED):
                    body = b'{"instance_uuid": "%s", "project_id": "%s", "flavor": 5}' % (
                        str(uuid.uuid4()).encode(), MINE.encode()
                    )  # fmt: skip
                    await other.basic_publish(body, exchange="berth", routing_key=key_of("build.request", MINE))
                beside = statistics.median(await boots_s(quiet, 5))
        assert beside < TIMES * alone


async def test_many_requests_in_one_message_are_many_turns(system: Guarded) -> None:
    """Others' boots took 35 s beside batches of 512, 5 s beside gangs of 100: a message was one turn."""
    done = system.berth("quota", "set", MINE, f"INSTANCES={QUOTA}")
    assert done.returncode == 0, done.stderr
    url = system.url(f"berth-project-{MINE}", project_bus(MINE))
    async with tenant(system, THEIRS) as quiet:
        await boots_s(quiet, 3)
        for make, connections in ((batch_of_many, 1), (gang, 5)):
            alone: list[float] = []
            beside: list[float] = []
            for _ in range(ROUNDS):
                alone += await boots_s(quiet)
                async with Flood(url, make, connections).running():
                    await boots_s(quiet, 2)
                    beside += await boots_s(quiet)
                purge = ("purge_queue", "-p", project_bus(MINE), "gateway.requests")
                await asyncio.to_thread(system.servers.broker.control, *purge)
            assert statistics.median(beside) < TIMES * statistics.median(alone), make.__name__


async def test_a_second_key_fills_no_disk(system: Guarded) -> None:
    """400 messages of 1 MB were 3.5 GB in 7 s, and everybody stood still."""
    broker = system.servers.broker
    try:
        limit_disk(system)
        await write_by_second_keys(system)
        with contextlib.suppress(TimeoutError):  # the broker looks at its disk every few seconds
            await until(lambda: number(system, ALARMS) > 0, patience_s=15)
        assert number(system, REQUESTS_WAITING) <= LARGE_MESSAGES
        assert number(system, ALARMS) == 0
        async with tenant(system, THEIRS) as quiet:
            await quiet.delete(await quiet.boot())
    finally:
        broker.evaluate(LIMIT % (50 * MB))


LIMIT = "rabbit_disk_monitor:set_disk_free_limit(%d)."


def limit_disk(system: Guarded) -> None:
    """Leave the broker so much disk. Others write on this disk as well: what is free now is what counts."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    system.servers.broker.evaluate(LIMIT % (free - ROOM_MB * MB))


async def write_by_second_keys(system: Guarded) -> None:
    keys = [f"build.request.{word}.{MINE}" for word in range(32)]
    properties = Basic.Properties(content_type="application/json", delivery_mode=2, headers={"CC": keys})
    body = b'{"x": "%s"}' % (b"A" * LARGE)
    with contextlib.suppress(AMQPError, RuntimeError, TimeoutError, ConnectionError):
        async with attacker(system) as channel:
            for _ in range(LARGE_MESSAGES):
                await channel.basic_publish(
                    body, exchange="berth", routing_key=key_of("build.request", MINE), properties=properties, timeout=20
                )
            await channel.basic_qos(prefetch_count=1, timeout=20)

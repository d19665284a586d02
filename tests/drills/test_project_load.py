"""What a project's own user does to others by its requests, with exactly the printed permissions (Found A7).

Each limit is a share of what was measured in the same run: no time by the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiormq
import pytest
from aiormq.exceptions import DeliveryError
from pamqp.commands import Basic

from berth.trial.servers import API_VHOST
from tests.kit.lent import lent_servers
from tests.kit.waiting import until
from tests.system.small import PLAN
from tests.system.test_permissions import MINE, THEIRS, Guarded, Tenant, key_of, tenant

# A ratio of two times: the machine must have nothing else to do.
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.system,
    pytest.mark.rabbitmq,
    pytest.mark.postgres,
    pytest.mark.timeout(600),
]

BATCH = "application/vnd.berth.batch+json"
ROUNDS, BOOTS = 4, 5
MESSAGES_IN_LANES = """
lists:sum([Count || Queue <- rabbit_amqqueue:list(<<"berth">>), {resource, _, _, Name} <- [amqqueue:get_name(Queue)],
    binary:match(Name, <<"scheduler.requests">>) =/= nomatch,
    {messages, Count} <- rabbit_amqqueue:info(Queue, [messages])]).
"""
TIMES = 3.0  # the boots of others may take so many times as long as alone
QUOTA = 40  # nearly all of the attacker's are refused, so that hosts are left


@pytest.fixture(scope="module")
def system() -> Iterator[Guarded]:
    with lent_servers(PLAN.cells) as servers, tempfile.TemporaryDirectory(prefix="berth-load-") as name:
        guarded = Guarded(servers, Path(name))
        try:
            guarded.start()
            done = guarded.berth("quotas", "set", MINE, f"INSTANCES={QUOTA}", "--yes")
            if done.returncode:
                done = guarded.berth("quotas", "set", MINE, f"INSTANCES={QUOTA}")
            assert done.returncode == 0, done.stderr
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


async def test_many_requests_in_one_message_are_many_turns(system: Guarded) -> None:
    """Others' boots took 35 s beside batches of 512, 5 s beside gangs of 100: a message was one turn of its lane.

    What else the machine does meanwhile comes to both sides, as they take turns.
    """
    async with tenant(system, THEIRS) as quiet:
        await boots_s(quiet, 3)
        for make, connections in ((batch_of_many, 1), (gang, 5)):
            alone: list[float] = []
            beside: list[float] = []
            for _ in range(ROUNDS):
                alone += await boots_s(quiet)
                async with Flood(system.url(f"berth-project-{MINE}"), make, connections).running():
                    await boots_s(quiet, 2)
                    beside += await boots_s(quiet)
                lane = "scheduler.requests"  # what is left there would be beside the next ones
                await asyncio.to_thread(system.servers.broker.control, "purge_queue", "-p", API_VHOST, lane)
                await until(lambda: number(system, MESSAGES_IN_LANES) == 0, patience_s=300)
            assert statistics.median(beside) < TIMES * statistics.median(alone), make.__name__

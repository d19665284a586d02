"""Every recorded scenario through running workers: Ironic's notifications on RabbitMQ and its REST API over HTTP, in;
what a running scheduler can place on, out. After each step it is what Nova's own code makes of the nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop

import ironic_sync.app
import placement_worker.app
import scheduler_worker.app
from berth.in_process import InProcessWorkers
from berth.trial.ironic_stand_in import AmqpAnnouncer, IronicStandIn, replay, shapes
from bus.clock import SystemClock, new_uuid
from bus.contracts.build import HostsPage, HostsQuery
from bus.rabbitmq import RabbitTransport
from bus.service.environment import Environment
from ironic_sync.config import IronicSyncConfig
from placement_worker.config import PlacementConfig
from placement_worker.replica.book import Book
from scheduler_worker.config import SchedulerConfig
from tests.unit.ironic.world import EXPECTED, RECORDINGS, SCENARIOS

pytestmark = [pytest.mark.rabbitmq, pytest.mark.postgres]

PATIENCE_S = 60.0
POLL_S = 0.005
RNG = random.Random(1)


class Workers:
    """Placement, ironic-sync and a scheduler on one broker and one database; the scheduler's replica is `book`."""

    def __init__(self, url: str, prefix: str, database_url: str) -> None:
        self._url, self._prefix, self._database_url = url, prefix, database_url
        self.announcer = AmqpAnnouncer(url, f"{prefix}ironic")
        self.ironic = IronicStandIn(self.announcer, clock=SystemClock(), rng=RNG)
        self.book = Book()

    def environment(self, process: str, cells: tuple[str, ...] = ()) -> Environment:
        def transport(name: str) -> RabbitTransport:
            return RabbitTransport(self._url, name=name, prefix=f"{self._prefix}{name}.")

        return Environment(process, transports=transport, database_url=self._database_url, cells=cells, pool_size=5)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All of them, ready."""
        sync = IronicSyncConfig(
            url=await self.ironic.start(),
            exchange=f"{self._prefix}ironic",
            bind_retry_s=0.05,
            resync_interval_s=3600.0,  # nothing is found by chance
            announced_retry_s=0.05,
            transient_retry_s=0.05,
            transient_retry_max_s=0.5,
            allocation_retry_s=0.05,
        )
        workers = InProcessWorkers()
        cells = ("cell1",)
        placement = placement_worker.app.build(self.environment("placement", cells), PlacementConfig(), cells)
        scheduler = scheduler_worker.app.build(
            self.environment("scheduler", cells), SchedulerConfig(), cells, book=self.book
        )
        try:
            await workers.start(("placement", placement))
            reading = ironic_sync.app.build(self.environment("ironic-sync"), sync)
            await workers.start(("ironic-sync", reading), ("scheduler", scheduler))
            yield
        finally:
            await workers.stop()
            await self.ironic.stop()

    async def announce(self, uuid: str) -> None:
        """A node whose making was not recorded."""
        node = self.ironic.pool.nodes[uuid]
        key, body = shapes.notification(
            node, "update", "end", request_id=f"req-{new_uuid(RNG)}", now=SystemClock().time(), rng=RNG
        )
        await self.announcer.publish(key, body)

    def seen(self, uuid: str) -> Any:
        """A provider of the scheduler's replica in the form of nova-expected.json."""
        row = self.book.row_of(uuid)
        if row is None:
            return None
        traits = list(self.book.traits_of(row))
        ((name, (numbers, _, _)),) = self.book.inventory_of(row).items() or [("", (None, 0, 0))]
        if numbers is None:
            return {"resource_class": None, "traits": traits}
        assert numbers.capacity == numbers.total - numbers.reserved
        return {"resource_class": name, "total": numbers.total, "reserved": numbers.reserved, "traits": traits}

    async def reaches(self, expected: dict[str, Any]) -> bool:
        """Whether the scheduler comes to see these providers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while any(self.seen(uuid) != provider for uuid, provider in expected.items()):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
                return True
        return False


async def play(workers: Workers, name: str) -> int:
    """One scenario, step by step; how many nodes were compared."""
    held: dict[str, Any] = {}  # a node that Nova cannot place keeps the provider it had
    compared = 0
    steps = iter(EXPECTED[name])
    async for step in replay(RECORDINGS / f"{name}.jsonl", workers.ironic.pool, workers.announcer):
        answers = next(steps)
        assert answers["step"] == step
        if step.startswith("start:"):
            for uuid in answers["nodes"]:
                await workers.announce(uuid)
        held |= {uuid: it for uuid, it in answers["nodes"].items() if it is None or "error" not in it}
        expected = {uuid: held.get(uuid) for uuid in answers["nodes"]}
        assert await workers.reaches(expected), (name, step, {uuid: workers.seen(uuid) for uuid in expected}, expected)
        compared += len(expected)
    return compared


def test_after_every_step_of_every_scenario_the_scheduler_sees_what_nova_would(
    amqp: tuple[str, str], postgres_url: str
) -> None:
    async def body() -> int:
        workers = Workers(*amqp, postgres_url)
        async with workers.running():
            compared = [await play(workers, name) for name in SCENARIOS]
            bus = workers.environment("client", ("cell1",)).bus()
            await bus.open()
            try:
                page = await bus.request(HostsQuery(limit=1000), HostsPage, timeout_s=PATIENCE_S)
            finally:
                await bus.close()
        answered = {host.uuid: sum(most for _, most in host.resources.values()) for host in page.hosts}
        for name in SCENARIOS:
            for uuid, answer in EXPECTED[name][-1]["nodes"].items():
                if answer is not None and "error" not in answer:
                    assert answered[uuid] == answer["total"] - answer["reserved"], (name, uuid)
        return sum(compared)

    assert uvloop.run(body()) == sum(len(step["nodes"]) for name in SCENARIOS for step in EXPECTED[name])

"""The writing ironic-sync process is paused: another one goes on, and the first writes nothing when it is resumed."""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections.abc import Iterator

import pytest

from berth.trial.ironic_stand_in import AmqpAnnouncer, IronicStandIn
from berth.trial.servers import API_VHOST, RealServers, SystemPlan, running_processes
from bus.clock import SystemClock
from bus.rabbitmq import RabbitTransport
from tests.integration.ironic.test_whole import Site, book_on
from tests.kit.forks import ForkedProcess
from tests.kit.lent import lent_servers

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres]

CELL = "cell1"
PATIENCE_S = 60.0
POLL_S = 0.05
FIRST, SECOND = "sync1", "sync2"
# Nothing but ironic-sync runs, and the test takes what it reports.
PLAN = SystemPlan(cells=(CELL,), schedulers=0, placements=0, conductors_per_cell=0, computes_per_cell=0, durable=False)


@pytest.fixture
def servers() -> Iterator[RealServers]:
    with lent_servers(PLAN.cells) as lent:
        yield lent


async def test_a_paused_writer_is_replaced_and_stands_by_when_it_is_resumed(servers: RealServers) -> None:
    """Its connection kept the lock: another process had not become the writer after 45 s."""
    url = servers.urls[API_VHOST]
    site = Site(lambda name: RabbitTransport(url, name=name), AmqpAnnouncer(url), "ironic", servers.database_url)
    ironic = IronicStandIn(site.announcer, clock=SystemClock(), rng=random.Random(1))
    node, other = (str(made["uuid"]) for made in (ironic.pool.add(**FREE), ironic.pool.add(**FREE)))
    settings = {"BERTH_IRONIC_SYNC__URL": await ironic.start()}
    try:
        async with running_processes(servers, PLAN, spawn=ForkedProcess) as (processes, _), book_on(site) as book:
            for name in (FIRST, SECOND):  # the first one is the writer by the time it is ready
                processes.start(name, "ironic-sync", settings=settings)
                await processes.ready([name])
            await book.until(lambda: book.offered() == {node, other})
            processes.pause(FIRST)
            began = time.monotonic()
            await ironic.pool.set_maintenance(ironic.pool.nodes[node], True, "fan", "req-1")
            await book.until(lambda: book.offered() == {other})
            sys.stdout.write(f"reported by the second after {time.monotonic() - began:.2f} s\n")
            processes.resume(FIRST)
            await ironic.pool.set_maintenance(ironic.pool.nodes[node], False, None, "req-2")
            await book.until(lambda: book.offered() == {node, other})
            async with asyncio.timeout(PATIENCE_S):
                while writers(await processes.metrics(FIRST)):  # noqa: ASYNC110  (another process is read)
                    await asyncio.sleep(POLL_S)
            assert writers(await processes.metrics(SECOND)) == 1.0
    finally:
        await ironic.stop()


FREE = {"provision_state": "available", "power_state": "power off", "resource_class": "baremetal-gold"}


def writers(metrics: str) -> float:
    """1.0: this process is the writer."""
    found = re.search(r"^berth_ironic_leader (\S+)$", metrics, re.MULTILINE)
    assert found is not None, metrics
    return float(found[1])

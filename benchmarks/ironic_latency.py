"""How soon a state change of a bare-metal node is on the bus: from Ironic's notification to a confirmed update.

    python -m benchmarks.ironic_latency [--rounds 100] [--nodes 40]

Each round: maintenance on (held back from the notification alone), then off (given back after a read), against the
stand-in over HTTP, PostgreSQL, and the memory bus as well as RabbitMQ. The far end is a consumer on another connection.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import structlog

from berth.embedded.postgres import Postgres
from berth.embedded.rabbitmq import RabbitMQ
from berth.ironic_stand_in import AmqpAnnouncer, Announcer, IronicStandIn, MemoryAnnouncer
from bus.clock import SystemClock
from bus.contracts.placement import InventoryUpdate
from bus.memory import MemoryBroker
from bus.outcome import Done, Outcome, Received
from bus.port import Transport
from bus.rabbitmq import RabbitTransport
from bus.service.environment import Environment
from ironic_sync.app import build
from ironic_sync.config import IronicSyncConfig

WAIT_S = 10.0


class Watch:
    """Waits for a node to be held or offered."""

    def __init__(self) -> None:
        self.held: dict[str, bool] = {}
        self.changed = asyncio.Event()

    async def take(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Note what the updates say."""
        for received in batch:
            update = received.message
            assert isinstance(update, InventoryUpdate)
            inventories = [inventory for report in update.providers for inventory in report.inventories.values()]
            self.held[update.root_uuid] = all(inventory.reserved for inventory in inventories)
        self.changed.set()
        return [Done()] * len(batch)

    async def until(self, uuid: str, held: bool) -> None:
        """Wait until the node is held (or offered)."""
        async with asyncio.timeout(WAIT_S):
            while self.held.get(uuid) is not held:
                self.changed.clear()
                await self.changed.wait()


async def measure(
    name: str,
    transports: Callable[[str], Transport],
    announcer: Announcer,
    database_url: str,
    *,
    rounds: int,
    nodes: int,
) -> None:
    """Measure on one bus and print the figures."""
    clock, rng = SystemClock(), random.Random(1)
    ironic = IronicStandIn(announcer, clock=clock, rng=rng)
    ironic.farm.plan(nodes)
    url = await ironic.start()
    bus = Environment("watch", transports=transports).bus()
    await bus.open()
    watch = Watch()
    consumer = bus.consumer("placement.inventory", watch.take)
    await consumer.start()
    stop = asyncio.Event()
    service = build(
        Environment("sync", transports=transports, database_url=database_url),
        IronicSyncConfig(url=url, resync_s=3600.0, bind_retry_s=0.1),
    )
    running = asyncio.create_task(service.run(stop))
    uuids = list(ironic.farm.nodes)
    for uuid in uuids:
        await watch.until(uuid, False)
    taken, given = [], []
    for index in range(rounds):
        node = ironic.farm.nodes[uuids[index % len(uuids)]]
        for on, times in ((True, taken), (False, given)):
            began = time.perf_counter()
            await ironic.farm.set_maintenance(node, on, "bench", f"req-{index}")
            await watch.until(node["uuid"], on)
            times.append((time.perf_counter() - began) * 1000)
    for what, times in (("taken away", taken), ("given back", given)):
        p50, p95 = statistics.median(times), statistics.quantiles(times, n=20)[18]
        print(f"{name:>8}  {what}: p50 {p50:6.2f} ms  p95 {p95:6.2f} ms  max {max(times):6.2f} ms  ({rounds} rounds)")
    stop.set()
    await running
    await consumer.drain(1.0)
    await bus.close()
    await ironic.stop()


def main() -> None:
    """Measure on both buses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=40)
    asked = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with ExitStack() as servers:
        database_url = servers.enter_context(Postgres()).url("postgres")
        rabbit = servers.enter_context(RabbitMQ()).url()

        async def both() -> None:
            broker = MemoryBroker(SystemClock())
            await measure(
                "memory",
                broker.transport,
                MemoryAnnouncer(broker),
                database_url,
                rounds=asked.rounds,
                nodes=asked.nodes,
            )
            await measure(
                "rabbitmq",
                lambda name: RabbitTransport(rabbit, name=name),
                AmqpAnnouncer(rabbit),
                database_url,
                rounds=asked.rounds,
                nodes=asked.nodes,
            )

        asyncio.run(both())


if __name__ == "__main__":
    main()

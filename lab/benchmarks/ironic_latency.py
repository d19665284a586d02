"""How soon a scheduler knows of a state change: from Ironic's notification to the scheduler's changed replica.

    python -m lab.benchmarks.ironic_latency [--rounds 100] [--nodes 40] [--json FILE]

The whole path is real: the stand-in publishes as Ironic does, ironic-sync turns it into an inventory update (and reads
the node over HTTP before it gives it back), placement writes it to PostgreSQL and numbers it, the feed carries it to
a follower like a scheduler's own. Each worker has its own connections. Each round: maintenance on (held back by the
notification alone), then off (given back after a read). On the memory bus, and on RabbitMQ.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import structlog

import ironic_sync.app
import placement_worker.app
from berth.in_process import InProcessWorkers
from berth.trial.embedded.postgres import Postgres
from berth.trial.embedded.rabbitmq import RabbitMQ
from berth.trial.ironic_stand_in import AmqpAnnouncer, IronicStandIn, MemoryAnnouncer, NotificationAnnouncer
from bus.clock import SystemClock
from bus.memory import MemoryBroker, MemoryTransport
from bus.port import Transport
from bus.rabbitmq import RabbitTransport
from bus.service.environment import Environment
from ironic_sync.config import IronicSyncConfig
from placement_worker.config import PlacementConfig
from placement_worker.replica.book import Book
from placement_worker.replica.follower import Follower

WAIT_S = 15.0


class Watch:
    """A scheduler's replica, watched."""

    def __init__(self, environment: Environment) -> None:
        self.book = Book()
        self._bus = environment.bus()
        self._follower = Follower(self._bus, self.book, process=environment.process, clock=environment.clock)
        self._changed = asyncio.Event()
        self._follower.on_change(self._changed.set)

    async def open(self) -> None:
        """Follow the feed."""
        await self._bus.open()
        await self._follower.start()
        self._running = asyncio.create_task(self._follower.run())
        await self._follower.ready.wait()

    async def close(self) -> None:
        """Stop following."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._follower.close()
        await self._bus.close()

    async def until(self, uuid: str, held: bool) -> None:
        """Wait until the replica has the node held back (or on offer)."""
        async with asyncio.timeout(WAIT_S):
            while self._held(uuid) is not held:
                self._changed.clear()
                await self._changed.wait()

    def _held(self, uuid: str) -> bool | None:
        row = self.book.row_of(uuid)
        if row is None:
            return None
        inventories = self.book.inventory_of(row)
        return None if not inventories else all(numbers.capacity == 0 for numbers, _, _ in inventories.values())


async def measure(
    name: str,
    transports: Callable[[str], Transport],
    announcer: NotificationAnnouncer,
    database_url: str,
    *,
    rounds: int,
    nodes: int,
) -> dict[str, dict[str, float]]:
    """Measure on one bus, print and return the figures (milliseconds)."""
    ironic = IronicStandIn(announcer, clock=SystemClock(), rng=random.Random(1))
    ironic.pool.plan(nodes)
    url = await ironic.start()
    in_process = InProcessWorkers()
    sync = IronicSyncConfig(url=url, resync_interval_s=3600.0, bind_retry_s=0.1)

    def environment(process: str) -> Environment:
        return Environment(process, transports=transports, database_url=database_url)

    await in_process.start(("placement", placement_worker.app.build(environment("placement"), PlacementConfig(), ())))
    await in_process.start(("ironic-sync", ironic_sync.app.build(environment("ironic-sync"), sync)))
    watch = Watch(environment("watch"))
    await watch.open()
    uuids = list(ironic.pool.nodes)
    for uuid in uuids:
        await watch.until(uuid, False)
    taken: list[float] = []
    given: list[float] = []
    for index in range(rounds):
        node = ironic.pool.nodes[uuids[index % len(uuids)]]
        for on, times in ((True, taken), (False, given)):
            began = time.perf_counter()
            await ironic.pool.set_maintenance(node, on, "bench", f"req-{index}")
            await watch.until(node["uuid"], on)
            times.append((time.perf_counter() - began) * 1000)
    found = {what: summary(times) for what, times in (("taken away", taken), ("given back", given))}
    for what, figures in found.items():
        print(f"{name:>8}  {what}: " + "  ".join(f"{word} {value:.2f} ms" for word, value in figures.items()))
    await watch.close()
    await in_process.stop()
    await ironic.stop()
    return found


def summary(times: list[float]) -> dict[str, float]:
    """p50, p95 and the longest."""
    return {"p50": statistics.median(times), "p95": statistics.quantiles(times, n=20)[18], "max": max(times)}


def main() -> None:
    """Measure on both buses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=40)
    parser.add_argument("--json", type=Path)
    requested = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with ExitStack() as servers:
        postgres = servers.enter_context(Postgres(durable=True))
        rabbit = servers.enter_context(RabbitMQ()).url()

        async def both() -> dict[str, dict[str, dict[str, float]]]:
            broker = MemoryBroker(SystemClock())
            count = {"rounds": requested.rounds, "nodes": requested.nodes}
            memory = await measure(
                "memory", partial(MemoryTransport, broker), MemoryAnnouncer(broker), postgres.url("postgres"), **count
            )
            other = postgres.url("template1")
            real = await measure(
                "rabbitmq", lambda name: RabbitTransport(rabbit, name=name), AmqpAnnouncer(rabbit), other, **count
            )
            return {"memory": memory, "rabbitmq": real}

        found = asyncio.run(both())
    if requested.json:
        requested.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2))


if __name__ == "__main__":
    main()

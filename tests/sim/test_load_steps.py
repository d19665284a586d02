"""Steps of load on the virtual clock: batches find their size and keep it, and nothing is left when the load falls.

Two stages as the scheduler and a conductor are, real consumers over memory buses, on a machine of two cores that a
batch occupies for a fixed time and each of its items for a 25th of that (docs/concepts/performance.md, "Batches"),
up to three times as long for reasons of the machine's own.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import uuid
from collections.abc import Sequence

import pytest

from bus.bus import Bus
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.consuming.in_flight import BatchInterval
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.build import BuildRequest
from bus.contracts.cell import CellDelete
from bus.memory import MemoryBroker, MemoryTransport
from lab.simulation.loop import run

BATCH_S = 0.024  # what a batch costs in each stage, whatever is in it
ITEM_S = BATCH_S / 25
SLOWEST = 3.0  # times as long: cold caches, a busy disk, a neighbour
MEAN = (1.0 + SLOWEST) / 2
CORES = 2
HIGHEST_PER_S = CORES / (2 * ITEM_S * MEAN)  # with batches so large that they cost nothing
STEP_S = 4.0
WARM_S = 1.0


class Cluster:
    """The two stages, and how long each request took through both, by the time at which it was sent."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.took: list[tuple[float, float]] = []
        self.batches: list[int] = []
        self._cores = asyncio.Semaphore(CORES)
        self._sent: dict[str, float] = {}
        self._tasks: list[asyncio.Future[None]] = []
        self._clock = SystemClock()
        self._api, self._cell = self._bus("api"), self._bus("c1")

    def _bus(self, name: str) -> Bus:
        return Bus(name, MemoryTransport(MemoryBroker(self._clock), name), process="p", clock=self._clock, rng=self.rng)

    async def open(self) -> None:
        for bus in (self._api, self._cell):
            await bus.open()
        entry = Consumer(self._api, "scheduler.requests", self._schedule, max_batch=512, prefetch=4096, paced=True)
        stage = Consumer(self._cell, "conductor.requests", self._build, max_batch=128, prefetch=4096)
        for consumer in (entry, stage):
            await consumer.start()

    async def hold(self, share: float) -> None:
        """Requests at this share of the highest rate, not quite evenly, for a while; none is waited for."""
        rate = share * HIGHEST_PER_S
        started, count = self._clock.monotonic(), int(rate * STEP_S)
        for number in range(count):
            due = started + (number + self.rng.random()) / rate
            await asyncio.sleep(max(0.0, due - self._clock.monotonic()))
            uuid_ = str(uuid.UUID(int=self.rng.getrandbits(128), version=4))
            self._sent[uuid_] = self._clock.monotonic()
            self._tasks.append(asyncio.ensure_future(self._api.publish(_request(uuid_))))

    async def steps(self, *shares: float) -> list[list[float]]:
        """Hold each rate in turn; the seconds that requests took, of each, in the order they were sent."""
        spans = []
        for share in shares:
            began = self._clock.monotonic()
            await self.hold(share)
            spans.append((began + WARM_S, self._clock.monotonic()))
        await asyncio.gather(*self._tasks)
        while self._sent:  # noqa: ASYNC110  (virtual time)
            await asyncio.sleep(0.1)
        self.took.sort()
        return [[took for at, took in self.took if start <= at < end] for start, end in spans]

    async def _work(self, items: int) -> None:
        async with self._cores:
            await asyncio.sleep((BATCH_S + items * ITEM_S) * self.rng.uniform(1.0, SLOWEST))

    async def _schedule(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        self.batches.append(len(batch))
        await self._work(len(batch))
        deletes = [CellDelete(instance_uuid=_uuid(one), project_id="p") for one in batch]
        await self._cell.publish_all([(one, one.instance_uuid) for one in deletes])
        return [Done()] * len(batch)

    async def _build(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        await self._work(len(batch))
        now = self._clock.monotonic()
        for one in batch:
            sent = self._sent.pop(_uuid(one))
            self.took.append((sent, now - sent))
        return [Done()] * len(batch)


def _request(uuid_: str) -> BuildRequest:
    return BuildRequest(instance_uuid=uuid_, flavor="m1.tiny", project_id="p")


def _uuid(received: Received) -> str:
    assert isinstance(received.message, BuildRequest | CellDelete)
    return received.message.instance_uuid


def latencies(*shares: float, seed: int = 1) -> list[list[float]]:
    found: list[list[float]] = []

    async def main() -> None:
        cluster = Cluster(seed)
        await cluster.open()
        found.extend(await cluster.steps(*shares))

    unseen: list[str] = []
    run(main, on_unseen=unseen.append)
    return found


ALONE_S = 2 * (BATCH_S + ITEM_S) * MEAN


@pytest.mark.parametrize(("share", "times"), [(0.005, 1.5), (0.05, 3.0), (0.5, 5.0), (0.8, 15.0)])
def test_a_request_takes_a_multiple_of_what_it_takes_alone_early_and_late(share: float, times: float) -> None:
    """No swing that grows, and no queue: what is sent late in the step takes as long as what is sent early."""
    (took,) = latencies(share)
    assert statistics.median(took) <= times * ALONE_S
    half = len(took) // 2
    early, late = sorted(took[:half]), sorted(took[half:])
    assert statistics.median(late) <= 2.0 * statistics.median(early)
    assert late[int(0.99 * half)] <= 4.0 * statistics.median(late)


def test_a_step_down_leaves_nothing_behind() -> None:
    before, _, _, after = latencies(0.05, 0.8, 0.5, 0.05)
    assert statistics.median(after) <= 1.25 * statistics.median(before)


def test_a_burst_beyond_what_is_carried_is_worked_off() -> None:
    before, _, _, after = latencies(0.05, 1.5, 0.05, 0.05)
    assert statistics.median(after) <= 1.25 * statistics.median(before)


def test_the_law_has_no_memory_of_load() -> None:
    interval = BatchInterval()
    interval.end_batch(BATCH_S, 0, 0.0, more=False)
    calm = interval.gap_s
    interval.end_batch(100 * BATCH_S, 10, 1.0, more=False)
    assert interval.gap_s == pytest.approx(calm, rel=0.01)

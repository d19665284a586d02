"""The reporter's messages about its own scans."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from bus.contracts.base import Message
from bus.contracts.cell import ComputeHosts, ComputeResult, RescanHosts
from bus.contracts.placement import InventoryUpdate, ProviderReport
from compute_sim import reporter as reporting
from compute_sim.answers import Answers
from compute_sim.domain.attempts import Entry, Phase
from compute_sim.driver import DriverHost, DriverUnavailable, Tree
from compute_sim.host_changes import UNDONE_S, HostChanges, PendingReport
from compute_sim.inventory import InventoryReporter
from compute_sim.offering import Offering
from compute_sim.publishing import PendingPublisher
from compute_sim.records import Records
from compute_sim.reporter import Reporter

HOST = "10000000-0000-4000-8000-000000000001"


class SlowWorld:
    """A driver that takes a minute to list, its clock, and a bus that keeps what is published."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.published: list[Message] = []
        self.sent = asyncio.Event()

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()

    async def load_hosts(self) -> Sequence[DriverHost]:
        self.now += 30.0
        return [DriverHost(uuid=HOST, name="h", enabled=True, disabled_reason="", attributes={})]

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[tuple[str, int]]]:
        self.now += 30.0
        return {}

    async def publish(self, message: Message, *, cause: str = "") -> None:
        self.published.append(message)
        self.sent.set()

    async def publish_all(self, messages: Sequence[tuple[Message, str]]) -> None:
        raise AssertionError


def everything_offered(world: Any, records: Records) -> Offering:
    offering = Offering(world, service="s", records=records, clock=world, on_offered=lambda _: None)
    offering.begun.set()
    return offering


async def announced(world: Any, records: Records) -> None:
    """A reporter starts, publishes everything once, and ends."""
    reporter = Reporter(
        world,
        service="s",
        cell="c1",
        survey=world,
        records=records,
        changes=HostChanges(world),
        offering=everything_offered(world, records),
        clock=world,
        rng=random.Random(1),
        heartbeat_interval_s=1.0,
        report_interval_s=60.0,
    )
    world.sent.clear()
    task = asyncio.create_task(reporter.announce())
    async with asyncio.timeout(60):
        await world.sent.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_report_is_as_old_as_the_beginning_of_the_look() -> None:
    world = SlowWorld()
    await announced(world, Records())
    (report,) = world.published
    assert isinstance(report, ComputeHosts)
    assert (report.seen_at, world.now) == (1000.0, 1060.0)
    assert [host.running for host in report.hosts] == [None], "a host that the driver did not see proves nothing lost"


async def test_item_16_many_hosts_are_put_into_pages_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 hosts were one turn of some 50 ms, at every report."""
    monkeypatch.setattr(reporting, "HOSTS_AT_ONCE", 2)
    world, turn, read = SlowWorld(), 0, Counter[int]()
    hosts = [DriverHost(uuid=f"{at:08x}{HOST[8:]}", name="h", enabled=True, disabled_reason="") for at in range(7)]

    async def load_hosts() -> Sequence[DriverHost]:
        return hosts

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def failed_builds(host: str) -> int:
        read[turn] += 1
        return 0

    monkeypatch.setattr(world, "load_hosts", load_hosts)
    records = Records()
    monkeypatch.setattr(records, "failed_builds", failed_builds)
    counting = asyncio.create_task(count())
    await announced(world, records)
    counting.cancel()
    (report,) = world.published
    assert isinstance(report, ComputeHosts)
    assert [host.uuid for host in report.hosts] == [host.uuid for host in hosts]
    assert sum(read.values()) == 7 and max(read.values()) <= 2


class Building(SlowWorld):
    """A machine comes to be while the driver lists."""

    def __init__(self) -> None:
        super().__init__()
        self.records = Records()
        self.results: list[ComputeResult] = []
        self.answers = Answers("s", self.results.append, self, self.records)

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[tuple[str, int]]]:
        self.answers.report_end((HOST, HOST), Entry(1, Phase.RUNNING))
        return {}


async def test_a_result_that_is_published_during_a_scan_is_not_older_than_it() -> None:
    """The look may have missed the machine: only a later one proves it lost, whatever the clock reads."""
    world = Building()
    world.records.start(world.now)
    world.answers.report_end((HOST, HOST), Entry(1, Phase.RUNNING))
    for _ in range(2):
        await announced(world, world.records)
    reports = [message for message in world.published if isinstance(message, ComputeHosts)]
    assert [result.scan for result in world.results] == [0, 1, 2]
    assert [report.scan for report in reports] == [1, 2]
    assert {sent.epoch for sent in (*world.results, *reports)} == {world.records.epoch}


class QuickWorld(SlowWorld):
    """The same without waiting; its updates are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = asyncio.Queue[InventoryUpdate]()
        self.announced = asyncio.Queue[Message]()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    async def load_hosts(self) -> Sequence[DriverHost]:
        return await self.hosts()

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[tuple[str, int]]]:
        return {}

    async def hosts(self) -> Sequence[DriverHost]:
        return [DriverHost(uuid=HOST, name="h")]

    async def inventory(self, hosts: Sequence[str] | None = None) -> Sequence[Tree]:
        return [(ProviderReport(uuid=uuid, name="h"),) for uuid in hosts or (HOST,)]

    async def publish(self, message: Message, *, cause: str = "") -> None:
        self.announced.put_nowait(message)

    async def publish_all(self, messages: Sequence[tuple[Message, str]]) -> None:
        for message, _ in messages:
            assert isinstance(message, InventoryUpdate)
            self.updates.put_nowait(message)


async def test_the_inventory_of_a_host_that_changed_is_published_once_more() -> None:
    """A late message of the service's former process undid the first one; for ten reports that stayed so."""
    world: Any = QuickWorld()
    records = Records()
    changes, offering = HostChanges(world), everything_offered(world, records)
    reporter = Reporter(
        world,
        service="s",
        cell="c1",
        survey=world,
        records=records,
        changes=changes,
        offering=offering,
        clock=world,
        rng=random.Random(1),
        heartbeat_interval_s=1.0,
        report_interval_s=60.0,
    )
    inventory = InventoryReporter(
        world,
        service="s",
        driver=world,
        records=records,
        changes=changes,
        offering=offering,
        clock=world,
        rng=random.Random(1),
        report_interval_s=60.0,
    )
    tasks = [asyncio.create_task(work()) for work in (reporter.announce, inventory.report)]
    async with asyncio.timeout(60):
        await world.updates.get()  # all, at start
        await world.announced.get()
        changes.on_host_changed([HOST])
        first = await world.updates.get()
        await world.announced.get()
        changes.on_request()
        await world.announced.get()
        assert world.updates.empty(), "not yet: who undoes it is still on the way"
        world.now += UNDONE_S
        changes.on_request()
        again = await world.updates.get()
        assert again.version > first.version
        await world.announced.get()
        world.now += UNDONE_S
        changes.on_request()
        await world.announced.get()
    assert world.updates.empty()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Requested(SlowWorld):
    """A conductor's request for a later scan comes while the driver lists."""

    def __init__(self) -> None:
        super().__init__()
        self.scans = 0
        self.on_scan: Any = None

    async def running(self, hosts: Sequence[str] | None = None) -> dict[str, list[Any]]:
        self.scans += 1
        if self.scans == 1:
            self.on_scan()
        return {HOST: []}

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


async def test_a_scan_names_the_looks_that_were_requested_before_it_began() -> None:
    """A scan that was under way may have passed the host before the machine came to be."""
    world, records = Requested(), Records()
    changes = HostChanges(world)  # type: ignore[arg-type]
    reporter = Reporter(
        world, service="s", cell="c1", survey=world, records=records, changes=changes, clock=world,
        offering=everything_offered(world, records), rng=random.Random(1), heartbeat_interval_s=1.0,
        report_interval_s=60.0,
    )  # fmt: skip
    order = RescanHosts(service="s", cell="c1", hosts=(HOST,), rescans=("60000000-0000-4000-8000-000000000001",))
    world.on_scan = lambda: changes.on_rescan(order)
    task = asyncio.create_task(reporter.announce())
    async with asyncio.timeout(60):
        while len(world.published) < 2:
            world.sent.clear()
            await world.sent.wait()
        changes.on_request()
        while len(world.published) < 3:
            world.sent.clear()
            await world.sent.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    reports = [one for one in world.published if isinstance(one, ComputeHosts)]
    assert [one.rescans for one in reports] == [(), order.rescans, ()], "each rescan is named once"
    assert [one.uuid for one in reports[1].hosts] == [HOST]


async def test_an_unavailable_driver_is_queried_again_within_a_second() -> None:
    """It was asked at intervals of up to ten seconds, so that a free node was offered long after Ironic's return."""
    slept: list[float] = []
    failures = 12
    done = asyncio.Event()

    class NotingClock(SlowWorld):
        async def sleep(self, seconds: float) -> None:
            slept.append(seconds)
            await asyncio.sleep(0)

    async def publish(_: list[str] | None) -> None:
        if len(slept) < failures:
            raise DriverUnavailable("away")
        done.set()

    clock: Any = NotingClock()
    publisher = PendingPublisher(PendingReport(), clock=clock, rng=random.Random(1), interval_s=60.0)
    running = asyncio.create_task(publisher.run(publish))
    async with asyncio.timeout(60):
        await done.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert max(slept[:failures]) <= 1.0

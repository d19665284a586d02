"""`berth up` is up when builds can go to every host of the compute services that it started."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from berth.settings import Settings
from berth.site import Brokers, Site
from berth.trial.up import WAIT_S, sentence, unusable_hosts
from bus.clock import SystemClock, new_uuid
from bus.contracts.cell import ServiceDown, ServicesDigest
from scheduler_worker.domain.workers import WorkerTable
from scheduler_worker.status import StatusHandler
from tests.unit.front.world import HandClock
from tests.unit.scheduler.hosts import Hosts

CELLS = ["cell1", "cell1", "cell2"]
STARTED = {"cell1": ["compute-cell1"], "cell2": ["compute-cell2"]}


class House:
    """A scheduler that answers from its host table and its copy of the book."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.site = Site(Settings(), brokers=Brokers(self.clock), clock=self.clock, seed=1)
        self.hosts = Hosts([{"VCPU": 1}] * 3, cells=CELLS)

    @asynccontextmanager
    async def scheduler(self) -> AsyncIterator[None]:
        unused = cast("Any", None)
        handler = StatusHandler(self.hosts.selector, WorkerTable(), unused, clock=SystemClock())
        bus = self.site.bus("scheduler1")
        await bus.open()
        consumer = bus.consumer("scheduler.status", handler)
        await consumer.start()
        try:
            yield
        finally:
            await consumer.drain(1.0)
            await bus.close()

    def announce_one_more(self) -> None:
        """The service of cell1 has a host that the book does not have yet."""
        self.hosts.uuids.append(new_uuid(self.hosts.rng))
        self.hosts.announce([*CELLS, "cell1"], {}, sequence=2)

    def load_all(self) -> None:
        """The host is in the book."""
        added = self.hosts._state(3, {"VCPU": 1}, [])
        self.hosts.book.load([*self.hosts.states, added], 1)


@pytest.fixture
def house() -> House:
    return House()


async def test_hosts_that_are_announced_and_in_the_book_are_usable_at_once(house: House) -> None:
    began_at = house.clock.now
    async with house.scheduler():
        assert await unusable_hosts(house.site, STARTED) == []
    assert house.clock.now == began_at


async def test_a_host_that_is_not_in_the_book_is_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for one host of each cell: one start in four was followed by no_valid_host."""
    house.announce_one_more()
    began_at, sleep = house.clock.now, house.clock.sleep

    async def sleep_and_load(seconds: float) -> None:
        await sleep(seconds)
        if house.clock.now >= began_at + 8.0:
            house.load_all()

    monkeypatch.setattr(house.clock, "sleep", sleep_and_load)
    async with house.scheduler():
        assert await unusable_hosts(house.site, STARTED) == []
    assert 8.0 <= house.clock.now - began_at < WAIT_S


async def test_what_was_waited_for_in_vain_is_named(house: House) -> None:
    house.announce_one_more()
    down = (ServiceDown(service="compute-cell2", epoch=1, code="service.silent"),)
    house.hosts.table.apply(ServicesDigest(cell="cell2", term=1, number=1, down=down), 1.0)
    async with house.scheduler():
        missing = await unusable_hosts(house.site, {**STARTED, "cell3": ["cell3-c1"], "cell4": []})
    assert missing == [
        "compute-cell1 has 3 hosts, of which 2 are in the resource book",
        "compute-cell2 is down (service.silent)",
        "cell3-c1 has not announced its hosts",
    ]
    assert sentence(missing * 2).endswith("; and 1 more")


async def test_without_a_scheduler_that_is_named(house: House) -> None:
    """Nothing takes the requests of this bus."""
    (missing,) = await unusable_hosts(house.site, STARTED, wait_s=0.0)
    assert missing.startswith("no scheduler answers: ")

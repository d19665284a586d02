"""One suite for the scheduler's port to placement: over the bus, and the fake that the unit tests use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.contracts.placement import (
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    LocatePage,
    LocateRequest,
)
from bus.faults import Transient
from bus.memory import MemoryBroker, MemoryTransport
from placement_worker.book import ResourceBook
from placement_worker.handlers import PlacementHandlers
from placement_worker.store.memory_rows import MemoryBookRows
from placement_worker.store.memory_table import MemoryBookTable
from scheduler_worker.claims import BusClaims, ClaimPort
from tests.contract.books import HOSTS, VMS, roomy_host
from tests.contract.rig import PATIENCE_S
from tests.kit.claims import BookClaims

HOST = HOSTS[0]


class Rig:
    """A port, and how placement goes away."""

    def __init__(self, port: ClaimPort) -> None:
        self.port = port

    async def stop_placement(self) -> None:
        assert isinstance(self.port, BookClaims)
        self.port.unavailable = True


class BusRig(Rig):
    """Placement's handlers on a bus in memory."""

    def __init__(self, book: ResourceBook) -> None:
        clock = SystemClock()
        broker = MemoryBroker(clock)
        self.buses = [
            Bus(API, MemoryTransport(broker, process), process=process, clock=clock, rng=random.Random(process))
            for process in ("scheduler", "placement")
        ]
        handlers = PlacementHandlers(book, clock=clock, committed=lambda: None, claimed=lambda: None)
        self.consumers = [
            self.buses[1].consumer("placement.requests", handlers.requests),
            self.buses[1].consumer("placement.reads", handlers.reads),
        ]
        self.tasks: list[asyncio.Task[None]] = []
        super().__init__(BusClaims(self.buses[0], timeout_s=PATIENCE_S))

    async def open(self) -> None:
        for bus in self.buses:
            await bus.open()
        for consumer in self.consumers:
            await consumer.start()
            self.tasks.append(asyncio.create_task(consumer.run()))

    async def stop_placement(self) -> None:
        for consumer in self.consumers:
            await consumer.drain(1.0)
        await asyncio.gather(*self.tasks)
        self.port = BusClaims(self.buses[0], timeout_s=0.05)  # long enough for an answer that does not come

    async def close(self) -> None:
        if not all(task.done() for task in self.tasks):
            await self.stop_placement()
        for bus in self.buses:
            await bus.close()


@pytest.fixture(params=["fake", "bus"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    book = ResourceBook(MemoryBookRows(MemoryBookTable(SystemClock()).session()))
    await book.report([roomy_host(HOST)])
    if request.param == "fake":
        yield Rig(BookClaims(book))
        return
    over_bus = BusRig(book)
    await over_bus.open()
    yield over_bus
    await over_bus.close()


def claim(consumer: str, amount: int = 1, attempt: int = 1) -> Claim:
    option = ClaimOption(allocations={HOST: {"VCPU": amount}})
    return Claim(consumer=consumer, attempt=attempt, options=(option,), project_id="p")


async def outcomes(port: ClaimPort, *claims: Claim) -> list[ClaimOutcome]:
    results = await port.submit(claims)
    assert all(isinstance(result, ClaimResult) for result in results)
    return [result.outcome for result in results if isinstance(result, ClaimResult)]


async def test_each_claim_has_its_own_result_in_order(rig: Rig) -> None:
    results = await outcomes(rig.port, claim(VMS[0]), claim(VMS[1], 101), claim(VMS[2], 99), claim(VMS[3]))
    assert results == [ClaimOutcome.CLAIMED, ClaimOutcome.FULL, ClaimOutcome.CLAIMED, ClaimOutcome.FULL]
    assert await rig.port.submit([]) == []


async def test_a_repeated_claim_has_the_same_result(rig: Rig) -> None:
    first = await rig.port.submit([claim(VMS[0], 60)])
    again = await rig.port.submit([claim(VMS[0], 60)])
    for (result,) in (first, again):
        assert isinstance(result, ClaimResult)
        assert (result.outcome, result.option, set(result.generations)) == (ClaimOutcome.CLAIMED, 0, {HOST})


async def test_a_gang_is_claimed_whole_or_not_at_all(rig: Rig) -> None:
    gangs = [ClaimAll(claims=(claim(VMS[0], 60), claim(VMS[1], 60))), ClaimAll(claims=(claim(VMS[2]), claim(VMS[3])))]
    partial, whole = await rig.port.submit_gangs(gangs)
    assert isinstance(partial, ClaimAllResult) and isinstance(whole, ClaimAllResult)
    assert [one.outcome for one in partial.results] == [ClaimOutcome.INCOMPLETE, ClaimOutcome.FULL]
    assert [one.outcome for one in whole.results] == [ClaimOutcome.CLAIMED, ClaimOutcome.CLAIMED]
    assert await rig.port.submit_gangs([]) == []


async def test_instances_are_located_by_what_they_hold(rig: Rig) -> None:
    await rig.port.submit([claim(VMS[0])])
    requests = [LocateRequest(project_id=p, besides=VMS[2], consumers=(VMS[0], VMS[1])) for p in ("p", "q")]
    mine, another = await rig.port.locate(requests)
    assert isinstance(mine, LocatePage) and isinstance(another, LocatePage)
    assert (dict(mine.hosts), dict(another.hosts)) == ({VMS[0]: (HOST,)}, {})


async def test_without_an_answer_each_message_has_a_transient_fault(rig: Rig) -> None:
    await rig.stop_placement()
    answers = [
        *await rig.port.submit([claim(VMS[0]), claim(VMS[1])]),
        *await rig.port.submit_gangs([ClaimAll(claims=(claim(VMS[2]),))]),
        *await rig.port.locate([LocateRequest(project_id="p", besides=VMS[2], consumers=(VMS[0],))]),
    ]
    assert [isinstance(answer, Transient) for answer in answers] == [True] * 4

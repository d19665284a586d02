"""One suite for the scheduler's port to placement; and any history of claims, and of clients' uuids."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.consuming.consumer import Consumer
from bus.contracts.placement import (
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    LocatePage,
    LocateRequest,
    Release,
    ReleaseResult,
    Revert,
)
from bus.faults import Transient
from bus.memory import MemoryBroker, MemoryTransport
from placement_worker.domain.migration import total_of
from placement_worker.domain.server_groups import counted_by_class
from placement_worker.handlers import PlacementHandlers
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable
from scheduler_worker.placement_client import BusClaims, ClaimPort
from tests.contract.books import (
    HOSTS,
    MOVE,
    VMS,
    Amounts,
    at,
    build,
    claimed,
    move,
    option,
    revert,
    reverted,
    roomy_host,
    used,
)
from tests.contract.random_client import ROOTS, RandomClient
from tests.kit.claims import PlacementClaims
from tests.kit.waiting import PATIENCE_S

# --- One suite for the scheduler's port to placement: over the bus, and the fake that the unit tests use.


HOST = HOSTS[0]


class Rig:
    """A port, and how placement goes away."""

    def __init__(self, port: ClaimPort) -> None:
        self.port = port

    async def stop_placement(self) -> None:
        assert isinstance(self.port, PlacementClaims)
        self.port.unavailable = True


class BusRig(Rig):
    """Placement's handlers on a bus in memory."""

    def __init__(self, service: PlacementService) -> None:
        clock = SystemClock()
        broker = MemoryBroker(clock)
        self.buses = [
            Bus(API, MemoryTransport(broker, process), process=process, clock=clock, rng=random.Random(process))
            for process in ("scheduler", "placement")
        ]
        handlers = PlacementHandlers(service, clock=clock, committed=lambda: None, claimed=lambda: None)
        self.consumers = [
            Consumer(self.buses[1], "placement.requests", handlers.requests),
            Consumer(self.buses[1], "placement.reads", handlers.reads),
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
    service = PlacementService(MemoryPlacementRows(MemoryPlacementTable(SystemClock()).session()))
    await service.apply_reports([roomy_host(HOST)])
    if request.param == "fake":
        yield Rig(PlacementClaims(service))
        return
    over_bus = BusRig(service)
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
    assert results == [ClaimOutcome.CLAIMED, ClaimOutcome.NO_CAPACITY, ClaimOutcome.CLAIMED, ClaimOutcome.NO_CAPACITY]
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
    assert [one.outcome for one in partial.results] == [ClaimOutcome.INCOMPLETE, ClaimOutcome.NO_CAPACITY]
    assert [one.outcome for one in whole.results] == [ClaimOutcome.CLAIMED, ClaimOutcome.CLAIMED]
    assert await rig.port.submit_gangs([]) == []


async def test_instances_are_located_by_what_they_hold(rig: Rig) -> None:
    await rig.port.submit([claim(VMS[0])])
    requests = [LocateRequest(project_id=p, excluding=VMS[2], consumers=(VMS[0], VMS[1])) for p in ("p", "q")]
    mine, another = await rig.port.locate(requests)
    assert isinstance(mine, LocatePage) and isinstance(another, LocatePage)
    assert (dict(mine.hosts), dict(another.hosts)) == ({VMS[0]: (HOST,)}, {})


async def test_without_an_answer_each_message_has_a_transient_fault(rig: Rig) -> None:
    await rig.stop_placement()
    answers = [
        *await rig.port.submit([claim(VMS[0]), claim(VMS[1])]),
        *await rig.port.submit_gangs([ClaimAll(claims=(claim(VMS[2]),))]),
        *await rig.port.locate([LocateRequest(project_id="p", excluding=VMS[2], consumers=(VMS[0],))]),
    ]
    assert [isinstance(answer, Transient) for answer in answers] == [True] * 4


# --- Whatever sequence of claims, moves, reverts, releases and swaps is sent, each has an outcome and placement
# stays true. A client may name any source, attempt and generation, those of other consumers too.


STEPS = 60


class Walk(RandomClient):
    """It checks after each step."""

    def check(self) -> None:
        """Usage is the sum of what is held, and a project's the sum of what counts."""
        states = [row.consumer for row in self.table.consumers.values()]
        held = total_of(state.allocations for state in states)
        for uuid, provider in self.table.providers.items():
            assert {name: used for name, used in provider.used.items() if used} == held.get(uuid, {})
        by_project: Amounts = {}
        for state in states:
            row = by_project.setdefault(state.project_id, {})
            for name, amount in counted_by_class(state).items():
                row[name] = row.get(name, 0) + amount
        counted = {project: {k: n for k, n in row.items() if n} for project, row in self.table.project_usage.items()}
        assert {project: row for project, row in counted.items() if row} == {p: r for p, r in by_project.items() if r}


@pytest.mark.parametrize("seed", range(40))
async def test_each_item_of_a_hostile_client_has_an_outcome(seed: int) -> None:
    walk = Walk(seed)
    await walk.store.open()
    await walk.store.apply_reports([walk.report(uuid) for uuid in ROOTS])
    for _ in range(STEPS):
        if walk.random.random() < 0.05:
            await walk.store.apply_reports(
                [walk.report(walk.random.choice(ROOTS), walk.random.choice((0.3, 1.0, 1.5)))]
            )
        else:
            assert len(await walk.store.apply([walk.item()])) == 1
        walk.check()


# --- An instance that a client has built under the uuid of a move's request: its allocation is not the migration's.


async def resized_and_built(pooled: PlacementService, project: str) -> None:
    """A resize in place, whose migration holds nothing; then a build under the request's uuid."""
    await claimed(pooled, build(0, 0))
    (resized,) = await claimed(pooled, move(option(0, 6), source=option(0)))
    (built,) = await claimed(pooled, replace(build(1, 1), consumer=MOVE, project_id=project))
    assert (resized.outcome, built.outcome) == ("claimed", "claimed")


@pytest.mark.parametrize("project", ["p", "q"])
async def test_the_end_of_a_move_does_not_release_it(pooled: PlacementService, project: str) -> None:
    await resized_and_built(pooled, project)
    (reply,) = await pooled.apply([Release(consumer=MOVE, project_id="p", of_migration=True)])
    assert isinstance(reply, ReleaseResult)
    assert reply.outcome == "consumer_conflict"
    assert await used(pooled) == at(0, 6) | at(1, 4)
    (reply,) = await pooled.apply([Release(consumer=MOVE, project_id=project)])
    assert isinstance(reply, ReleaseResult)
    assert reply.outcome == "released"
    assert await used(pooled) == at(0, 6)


@pytest.mark.parametrize("project", ["p", "q"])
async def test_a_revert_does_not_take_it(pooled: PlacementService, project: str) -> None:
    await resized_and_built(pooled, project)
    requested: Revert = revert(option(0), 3)
    for _ in range(2):  # also when it is repeated after a lost answer
        back = await reverted(pooled, requested)
        assert back.outcome == "reverted"
        assert back.consumer_generation is not None
        assert await used(pooled) == at(0, 4) | at(1, 4)


async def test_an_alternate_does_not_take_it(pooled: PlacementService) -> None:
    await resized_and_built(pooled, "p")
    (refused,) = await claimed(pooled, move(option(2), source=option(0), attempt=3, generation=2, again=True))
    assert (refused.outcome, refused.reason.split(":")[0]) == ("consumer_conflict", "claim.migration_in_use")
    assert await used(pooled) == at(0, 6) | at(1, 4)
    assert HOSTS[2] not in await used(pooled)

"""Placement refuses what a cell requests by a lower incarnation of its database than it has requested by before."""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from msgspec import Struct

from bus.bus import API
from bus.clock import SystemClock
from bus.consuming.outcome import Done, Outcome, Received, Refuse
from bus.contracts.base import ORDER_OUTDATED, DatabaseMark, Message, Meta, Refusal
from bus.contracts.objects import ObjectsRevision
from bus.contracts.placement import Claim, ClaimOption, ClaimResult, InventoryReleased, Release, ReleaseResult
from bus.contracts.placement_queries import CellConsumersQuery
from bus.persistence.marks import RECORD_S
from placement_worker import handlers as handling
from placement_worker.cell_follower import CellFollower
from placement_worker.handlers import PlacementHandlers
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from tests.contract.books import HOSTS, KINDS, VMS, Placements, books, claimed, revert
from tests.unit.bus.test_outbox import HandClock

OPTION = ClaimOption(allocations={HOSTS[0]: {"VCPU": 1}}, host=HOSTS[0])


def claim(vm: int, attempt: int = 1) -> Claim:
    return Claim(consumer=VMS[vm], options=(OPTION,), project_id="p", attempt=attempt)


async def requested(store: PlacementService, *stated: tuple[Message, int], bus: str = "c1") -> list[str]:
    """The outcome of each, requested in one batch."""
    items = [item for item, _ in stated]
    replies = await store.apply(items, bus=bus, marks=[DatabaseMark(number) for _, number in stated])  # type: ignore[arg-type]
    return [one.code if isinstance(one, Refusal) else str(one.outcome) for one in replies]  # type: ignore[union-attr]


async def held(store: PlacementService, vm: int) -> int:
    return sum(bool(one.allocations) for one in await store.reads.allocations([VMS[vm]]))


async def test_a_lower_incarnation_is_refused_and_an_equal_or_higher_one_taken(store: PlacementService) -> None:
    await claimed(store, claim(0), claim(1), claim(2))
    assert await requested(store, (Release(consumer=VMS[0]), 2)) == ["released"]
    assert await requested(store, (Release(consumer=VMS[1]), 1)) == [ORDER_OUTDATED]
    assert await requested(store, (claim(3), 1)) == [ORDER_OUTDATED]
    assert await requested(store, (revert(OPTION, 2), 1)) == [ORDER_OUTDATED]
    assert (await held(store, 1), await held(store, 3)) == (1, 0), "nothing of it took effect"
    assert await requested(store, (Release(consumer=VMS[1]), 2)) == ["released"]
    assert await requested(store, (Release(consumer=VMS[2]), 3)) == ["released"]
    assert await requested(store, (claim(3), 2)) == [ORDER_OUTDATED]


@pytest.mark.parametrize("before", [[], [claim(0)]])
async def test_what_states_none_is_lower_than_the_first(store: PlacementService, before: list[Claim]) -> None:
    for one in before:
        assert await requested(store, (one, 0)) == ["claimed"]
    assert await requested(store, (claim(1), 1)) == ["claimed"]
    assert await requested(store, (claim(2), 0)) == [ORDER_OUTDATED]


async def test_each_cell_has_its_own_and_the_schedulers_none(store: PlacementService) -> None:
    assert await requested(store, (claim(0), 5)) == ["claimed"]
    assert await requested(store, (claim(1), 1), bus="c2") == ["claimed"]
    (reply,) = await store.apply([claim(2)])
    assert isinstance(reply, ClaimResult) and reply.option == 0


async def test_of_one_batch_the_lower_ones_are_left_out(store: PlacementService) -> None:
    await claimed(store, claim(0), claim(1), claim(2))
    outcomes = await requested(
        store,
        (Release(consumer=VMS[0]), 1),
        (Release(consumer=VMS[1]), 2),
        (claim(3), 1),
        (Release(consumer=VMS[2]), 2),
    )
    assert outcomes == [ORDER_OUTDATED, "released", ORDER_OUTDATED, "released"]
    assert [await held(store, vm) for vm in range(4)] == [1, 0, 0, 0]


async def test_what_one_process_was_told_counts_in_all_of_them(make: Placements, store: PlacementService) -> None:
    other = make()
    await other.open()
    await claimed(store, claim(0))
    assert await requested(other, (claim(1), 1)) == ["claimed"]
    assert await requested(store, (claim(2), 2)) == ["claimed"]
    assert await requested(other, (Release(consumer=VMS[0]), 1)) == [ORDER_OUTDATED]
    again = make()
    await again.open()
    assert await requested(again, (Release(consumer=VMS[0]), 1)) == [ORDER_OUTDATED]


async def test_it_is_recorded_again_where_placements_own_database_has_lost_it(store: PlacementService) -> None:
    await claimed(store, claim(0), claim(1))
    assert await requested(store, (claim(2), 2)) == ["claimed"]
    if isinstance(store.rows, MemoryPlacementRows):
        store.rows.table.marks.clear()
    else:
        async with store.rows.transaction() as transaction:
            await transaction.connection.execute("DELETE FROM cells")  # type: ignore[attr-defined]
    for vm in (3, 4):
        assert await requested(store, (claim(vm), 2)) == ["claimed"]
    assert await requested(store, (Release(consumer=VMS[0]), 1)) == [ORDER_OUTDATED]


class TimedBooks(Struct):
    make: Placements
    clock: HandClock


@pytest.fixture(params=KINDS)
async def timed(request: pytest.FixtureRequest) -> AsyncIterator[TimedBooks]:
    clock = HandClock()
    async with books(request, clock) as make:
        yield TimedBooks(make, clock)


async def test_the_highest_mark_is_recorded_once_a_second_and_a_later_incarnation_at_once(timed: TimedBooks) -> None:
    one, other, clock = timed.make(), timed.make(), timed.clock
    await one.open()
    await other.open()

    async def marks(*stated: DatabaseMark, store: PlacementService = one) -> DatabaseMark:
        """On record, after requests with these."""
        await store.apply([Release(consumer=VMS[0])] * len(stated), bus="c1", marks=stated)
        return (await other.reads.consumers_in_cell(CellConsumersQuery(cell="c1"))).mark

    assert await marks(DatabaseMark(2, (5,)), DatabaseMark(2, (0, 1))) == DatabaseMark(2, (5, 1))
    assert await marks(DatabaseMark(2, (7,))) == DatabaseMark(2, (5, 1))
    assert await marks(DatabaseMark(2, (0, 0, 9)), store=other) == DatabaseMark(2, (5, 1, 9))
    clock.now += RECORD_S
    assert await marks(DatabaseMark(2, (6,))) == DatabaseMark(2, (7, 1, 9)), "the highest that it has heard"
    clock.now += RECORD_S
    assert await marks(DatabaseMark(2, (7,))) == DatabaseMark(2, (7, 1, 9))
    assert await marks(DatabaseMark(3)) == DatabaseMark(3)
    assert await marks(DatabaseMark(2, (99,))) == DatabaseMark(3)
    assert await marks(DatabaseMark(3, (4,)), store=other) == DatabaseMark(3, (4,))
    await other.release_roots("compute-s", [], bus="c1", mark=DatabaseMark(3, (8,)))
    assert await marks() == DatabaseMark(3, (8,))


async def test_many_that_raise_it_at_once_are_all_taken(make: Placements, store: PlacementService) -> None:
    others = [make() for _ in range(3)]
    for other in others:
        await other.open()
    stores = [store, *others]
    for number in range(1, 6):
        outcomes = await asyncio.gather(
            *(requested(one, (Release(consumer=VMS[vm]), number)) for vm, one in enumerate(stores))
        )
        assert ORDER_OUTDATED not in functools.reduce(operator.iadd, outcomes, [])


def received(message: Message, incarnation: int, bus: str) -> Received:
    return Received(message, Meta(id="m", database_incarnation=incarnation), bus, "placement.requests")


@pytest.mark.parametrize(("bus", "is_taken"), [("c1", False), (API, True)])
async def test_the_handlers_refuse_with_the_code(store: PlacementService, bus: str, *, is_taken: bool) -> None:
    handlers = PlacementHandlers(store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None)

    async def outcome(message: Message, incarnation: int, *, of_inventory: bool = False) -> Outcome:
        batch: Sequence[Received] = [received(message, incarnation, bus)]
        (found,) = await (handlers.inventory(batch) if of_inventory else handlers.requests(batch))
        return found

    first = await outcome(Release(consumer=VMS[0]), 4)
    assert isinstance(first, Done) and isinstance(first.reply, ReleaseResult)
    assert isinstance(await outcome(Release(consumer=VMS[0]), 3), Done) is is_taken
    if not is_taken:
        assert await outcome(Release(consumer=VMS[0]), 3) == await outcome(claim(1), 3)
        refused = await outcome(InventoryReleased(reporter="compute-s", roots=(HOSTS[0],)), 3, of_inventory=True)
        assert isinstance(refused, Refuse) and refused.code == ORDER_OUTDATED
        assert "incarnation 4 " in refused.reason, "an operator who states which one is the newest has to exceed it"
        assert await outcome(InventoryReleased(reporter="compute-s", roots=(HOSTS[0],)), 4, of_inventory=True) == Done()


async def test_a_batch_that_is_taken_in_parts_is_answered_whole_and_in_order(
    store: PlacementService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handling, "MAX_CLAIMED", 2)
    handlers = PlacementHandlers(store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None)
    found = await handlers.requests([received(claim(vm), 1, "c1") for vm in range(5)])
    replies = [one.reply for one in found if isinstance(one, Done)]
    assert [one.option for one in replies if isinstance(one, ClaimResult)] == [0] * 5
    assert [await held(store, vm) for vm in range(5)] == [1] * 5


async def test_cells_that_may_have_changed_are_asked_for() -> None:
    never: Any = None
    follower = CellFollower(never, never)
    for message, is_set in ((Release(consumer=VMS[0]), False), (ObjectsRevision(revision=1), True)):
        assert await follower([received(message, 0, API)]) == [Done()]
        assert follower._announced.is_set() is is_set

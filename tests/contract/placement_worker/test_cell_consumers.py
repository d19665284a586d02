"""The consumers that hold something in a cell, page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received
from bus.contracts.base import Meta
from bus.contracts.placement import ClaimOutcome, Release
from bus.contracts.placement_queries import CellConsumersPage, CellConsumersQuery
from placement_worker.domain.values import ABOVE_CELLS
from placement_worker.handlers import PlacementHandlers
from placement_worker.service import PlacementService
from placement_worker.store import port
from tests.contract.books import HOSTS, KINDS, MOVE, VMS, books, build, claimed, move, option, roomy_host


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[PlacementService]:
    """Hosts 0 and 1 are of c1, 2 is of c2, and 3 was reported above cells."""
    async with books(request) as make:
        made = make()
        await made.open()
        for at, cell in enumerate(("c1", "c1", "c2", ABOVE_CELLS)):
            await made.apply_reports([replace(roomy_host(HOSTS[at]), reporter=f"s{at}")], bus=cell)
        yield made


async def page(store: PlacementService, cell: str = "c1", **more: object) -> tuple[list[str], str]:
    handlers = PlacementHandlers(store, clock=SystemClock(), committed=lambda: None, claimed=lambda: None)
    query = CellConsumersQuery(cell=cell, **more)  # type: ignore[arg-type]
    (done,) = await handlers.reads([Received(query, Meta(id="q"), ABOVE_CELLS, "placement.reads")])
    assert isinstance(done, Done) and isinstance(done.reply, CellConsumersPage)
    return list(done.reply.consumers), done.reply.last


async def test_a_cell_has_what_holds_something_there_or_above_all_cells(store: PlacementService) -> None:
    results = await claimed(store, *(build(vm, at) for vm, at in enumerate((0, 2, 3, 1))))
    assert {one.outcome for one in results} == {ClaimOutcome.CLAIMED}
    assert await page(store) == ([VMS[0], VMS[2], VMS[3]], "")
    assert await page(store, "c2") == ([VMS[1], VMS[2]], "")
    assert await page(store, "nobody") == ([VMS[2]], "")


async def test_a_migration_is_a_consumer_of_its_own_and_what_is_released_is_none(store: PlacementService) -> None:
    await claimed(store, build(0, 0), build(1, 1))
    moved = await claimed(store, move(option(1), source=option(0)))
    assert moved[0].outcome is ClaimOutcome.CLAIMED
    assert await page(store) == (sorted([VMS[0], VMS[1], MOVE]), "")
    await store.apply([Release(consumer=VMS[1])])
    assert await page(store) == (sorted([VMS[0], MOVE]), "")


async def test_one_that_holds_something_in_two_cells_is_of_both(store: PlacementService) -> None:
    both = {HOSTS[0]: {"VCPU": 1}, HOSTS[2]: {"VCPU": 1}}
    (result,) = await claimed(store, replace(build(0, 0), options=(replace(option(0), allocations=both, host=None),)))
    assert result.outcome is ClaimOutcome.CLAIMED
    assert await page(store) == await page(store, "c2") == ([VMS[0]], "")


async def test_pages_follow_each_other_and_none_looks_at_more_than_so_many(
    store: PlacementService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await claimed(store, *(build(vm, 0 if vm % 3 == 0 else 2) for vm in range(12)))
    for most in (100, 3):
        monkeypatch.setattr(port, "MAX_EXAMINED", most)
        for limit in (1, 2, 100):
            found: list[str] = []
            after, pages = "", 0
            while True:
                consumers, last = await page(store, after=after, limit=limit)
                assert len(consumers) <= limit and consumers == sorted(consumers)
                found, pages = found + consumers, pages + 1
                if not last:
                    break
                assert last > after
                after = last
            assert found == [VMS[vm] for vm in range(0, 12, 3)]
            assert pages >= (12 // most)

"""A claim belongs to a run: it is repeated and released by that name alone, and a query shows whose it is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.placement import Migration, Release, ReleaseResult
from placement_worker.book import ResourceBook
from tests.contract.books import HOSTS
from tests.contract.test_moves import at, build, claimed, make, store, used

__all__ = ["make", "store"]  # fixtures

MINE, ANOTHER = "run-1", "run-2"
INSTANCE = build(0, 0).consumer


def release(by: str | None, attempt: int | None = 1) -> Release:
    return Release(consumer=INSTANCE, attempt=attempt, project_id="p", by=by)


async def released(store: ResourceBook, by: str | None, attempt: int | None = 1) -> str:
    (reply,) = await store.apply([release(by, attempt)])
    assert isinstance(reply, ReleaseResult)
    return reply.outcome


@pytest.mark.parametrize("by", [MINE, ANOTHER, None])
async def test_a_run_releases_its_own_allocation_and_no_other(store: ResourceBook, by: str | None) -> None:
    await claimed(store, build(0, 0, by=MINE))
    is_kept = by == ANOTHER
    assert await released(store, by) == ("consumer_changed" if is_kept else "released")
    assert await used(store) == (at(0, 4) if is_kept else {})
    (again,) = await claimed(store, build(0, 0, by=MINE))
    assert again.outcome == ("claimed" if is_kept else "consumer_changed"), "only a release fences"


async def test_a_release_by_name_of_nothing_fences_the_claim_that_is_still_in_flight(store: ResourceBook) -> None:
    assert await released(store, MINE) == "absent"
    (late,) = await claimed(store, build(0, 0, by=MINE))
    assert (late.outcome, late.consumer_generation, await used(store)) == ("consumer_changed", None, {})


async def test_an_allocation_without_a_known_owner_is_released_by_no_name(store: ResourceBook) -> None:
    await claimed(store, build(0, 0))
    assert (await released(store, MINE), await used(store)) == ("consumer_changed", at(0, 4))


async def test_a_claim_of_another_run_is_shown_what_is_held_and_gets_none_of_it(store: ResourceBook) -> None:
    await claimed(store, build(0, 0, by=MINE))
    (again,) = await claimed(store, build(0, 1, by=MINE))
    assert (again.outcome, again.holding, again.attempt) == ("claimed", at(0, 4), 0)
    (another,) = await claimed(store, build(0, 1, by=ANOTHER))
    assert (another.outcome, another.holding, another.attempt) == ("consumer_changed", at(0, 4), 1)
    assert another.consumer_generation == 1 and await used(store) == at(0, 4)


async def test_a_run_takes_over_what_a_run_that_it_names_has_claimed(store: ResourceBook) -> None:
    """As after a restore, when the record of the other is lost; its Release may still be on its way."""
    await claimed(store, build(0, 0, by=MINE))
    (wrong,) = await claimed(store, build(0, 0, by=ANOTHER, takes_over="run-3"))
    (later,) = await claimed(store, build(0, 0, by=ANOTHER, takes_over=MINE, attempt=2))
    assert [wrong.outcome, later.outcome] == ["consumer_changed", "consumer_changed"]
    (taken,) = await claimed(store, build(0, 0, by=ANOTHER, takes_over=MINE))
    assert (taken.outcome, taken.consumer_generation, await used(store)) == ("claimed", 1, at(0, 4))
    (held,) = await store.reads.holding([INSTANCE])
    assert (held.run, held.attempt, held.holding) == (ANOTHER, 1, at(0, 4))
    assert [await released(store, by) for by in (MINE, ANOTHER)] == ["consumer_changed", "released"]


async def test_a_claim_of_the_cell_leaves_the_owner_whose_it_was(store: ResourceBook) -> None:
    await claimed(store, build(0, 0, by=MINE))
    (later,) = await claimed(store, build(0, 1, attempt=2, consumer_generation=1))
    assert later.outcome == "claimed"
    assert await released(store, MINE) == "consumer_changed", "of an older attempt"
    assert await released(store, ANOTHER, attempt=None) == "consumer_changed"
    assert await released(store, MINE, attempt=2) == "released"


async def test_a_new_claim_of_an_instance_belongs_to_the_run_that_makes_it(store: ResourceBook) -> None:
    await claimed(store, build(0, 0, by=MINE))
    await released(store, MINE)
    (anew,) = await claimed(store, build(0, 0, attempt=2, by=ANOTHER))
    assert anew.outcome == "claimed"
    assert [await released(store, by, attempt=2) for by in (MINE, ANOTHER)] == ["consumer_changed", "released"]


async def test_in_one_group_a_release_takes_what_its_run_has_just_claimed(store: ResourceBook) -> None:
    _, kept, gone = await store.apply([build(0, 0, by=MINE), release(ANOTHER), release(MINE)])
    assert isinstance(kept, ReleaseResult) and isinstance(gone, ReleaseResult)
    assert (kept.outcome, gone.outcome, await used(store)) == ("consumer_changed", "released", {})


async def test_the_query_names_the_owner_the_attempt_and_the_place_and_fences_nothing(store: ResourceBook) -> None:
    assert await store.reads.holding([INSTANCE]) == []
    (claim,) = await claimed(store, build(0, 0, by=MINE))
    assert claim.outcome == "claimed"
    (held,) = await store.reads.holding([INSTANCE, build(1, 1).consumer])
    assert (held.consumer, held.project_id, held.run, held.attempt) == (INSTANCE, "p", MINE, 1)
    assert (held.consumer_generation, held.holding, held.hosts) == (1, at(0, 4), (HOSTS[0],))
    await released(store, MINE)
    assert await store.reads.holding([INSTANCE]) == []


async def test_the_query_shows_a_migration_and_another_client_as_no_build(store: ResourceBook) -> None:
    """A client may request a build under the uuid of its move."""
    request = build(1, 1).consumer
    await claimed(store, build(0, 0, by=MINE))
    move = Migration(uuid=request, source={HOSTS[0]: {"VCPU": 4}})
    (reply,) = await claimed(store, build(0, 1, attempt=2, consumer_generation=1, migration=move))
    await claimed(store, replace(build(2, 2, attempt=0), user_id="u"))
    assert reply.outcome == "claimed"
    held = {one.consumer: one for one in await store.reads.holding([INSTANCE, request, build(2, 2).consumer])}
    assert [(held[uuid].attempt, held[uuid].run) for uuid in (INSTANCE, request)] == [(2, MINE), (0, "")]
    assert held[build(2, 2).consumer].attempt == 0

"""A release that spares what its consumer has held for longer than the request that is released."""

from __future__ import annotations

import time

import pytest

from bus.contracts.placement import Migration, Release, ReleaseResult
from placement_worker.book import ResourceBook
from tests.contract.books import HOSTS
from tests.contract.test_moves import at, build, claimed, make, store, used

__all__ = ["make", "store"]  # fixtures

HOUR_S = 3600.0
OLD_S = 0.2


@pytest.mark.parametrize("within_s", [0.0, HOUR_S, None])
async def test_an_allocation_is_released_unless_it_is_older(store: ResourceBook, within_s: float | None) -> None:
    await claimed(store, build(0, 0))
    is_kept = within_s == 0.0
    outcome = "older" if is_kept else "released"
    release = Release(consumer=build(0, 0).consumer, attempt=1, project_id="p", claimed_within_s=within_s)
    for _ in range(2):
        (reply,) = await store.apply([release])
        assert isinstance(reply, ReleaseResult)
        assert reply.outcome == outcome
        assert reply.hosts == ((HOSTS[0],) if is_kept else ())
        assert 0.0 <= reply.age_s < HOUR_S
        assert await used(store) == (at(0, 4) if is_kept else {})
        outcome = "older" if is_kept else "absent"
    (again,) = await claimed(store, build(0, 0))
    assert again.outcome == ("claimed" if is_kept else "consumer_changed"), "only a release fences"


async def test_a_later_claim_of_its_consumer_makes_it_no_newer(store: ResourceBook) -> None:
    await claimed(store, build(0, 0))
    began = time.monotonic()
    while time.monotonic() - began < OLD_S:
        await used(store)
    (later,) = await claimed(store, build(0, 0, 2, attempt=2, consumer_generation=1))
    assert later.outcome == "claimed"
    (reply,) = await store.apply([Release(consumer=build(0, 0).consumer, attempt=2, claimed_within_s=OLD_S)])
    assert isinstance(reply, ReleaseResult)
    assert (reply.outcome, await used(store)) == ("older", at(0, 2))


async def test_a_claim_of_the_same_group_is_not_older(store: ResourceBook) -> None:
    claim = build(0, 0)
    release = Release(consumer=claim.consumer, attempt=1, project_id="p", claimed_within_s=HOUR_S)
    _, reply = await store.apply([claim, release])
    assert isinstance(reply, ReleaseResult)
    assert reply.outcome == "released"


async def test_an_allocation_of_another_client_is_not_released(store: ResourceBook) -> None:
    """It has no attempt, though it is of the same project."""
    await claimed(store, build(0, 0, attempt=0))
    release = Release(consumer=build(0, 0).consumer, attempt=1, project_id="p", claimed_within_s=HOUR_S)
    (reply,) = await store.apply([release])
    assert isinstance(reply, ReleaseResult)
    assert (reply.outcome, await used(store)) == ("consumer_changed", at(0, 4))


@pytest.mark.parametrize("within_s", [0.0, HOUR_S])
async def test_an_allocation_of_a_later_attempt_is_an_older_one(store: ResourceBook, within_s: float) -> None:
    await claimed(store, build(0, 0, attempt=2))
    release = Release(consumer=build(0, 0).consumer, attempt=1, project_id="p", claimed_within_s=within_s)
    (reply,) = await store.apply([release])
    assert isinstance(reply, ReleaseResult)
    assert (reply.outcome, reply.hosts, await used(store)) == ("older", (HOSTS[0],), at(0, 4))


@pytest.mark.parametrize("within_s", [0.0, HOUR_S])
async def test_the_allocation_of_a_migration_is_no_earlier_build_of_its_uuid(
    store: ResourceBook, within_s: float
) -> None:
    """A client has requested a build under the uuid of its move; its delete went to the cell, which released that."""
    moved, request = build(0, 0), build(1, 1).consumer
    await claimed(store, moved)
    move = Migration(uuid=request, source={HOSTS[0]: {"VCPU": 4}})
    (reply,) = await claimed(store, build(0, 1, attempt=2, consumer_generation=1, migration=move))
    assert reply.outcome == "claimed"
    (answer,) = await store.apply([Release(consumer=request, attempt=1, project_id="p", claimed_within_s=within_s)])
    assert isinstance(answer, ReleaseResult)
    assert (answer.outcome, await used(store)) == ("consumer_changed", {**at(0, 4), **at(1, 4)})


async def test_a_release_without_an_attempt_of_what_is_younger_than_zero_seconds_changes_nothing(
    store: ResourceBook,
) -> None:
    """So a scheduler looks up what an instance holds, of whatever attempt; what holds nothing is not fenced."""
    look_up = Release(consumer=build(0, 0).consumer, project_id="p", claimed_within_s=0.0)
    (absent,) = await store.apply([look_up])
    (claim,) = await claimed(store, build(0, 0))
    (held,) = await store.apply([look_up])
    assert isinstance(absent, ReleaseResult) and isinstance(held, ReleaseResult)
    assert (absent.outcome, claim.outcome, held.outcome) == ("absent", "claimed", "older")
    assert (held.hosts, await used(store)) == ((HOSTS[0],), at(0, 4))

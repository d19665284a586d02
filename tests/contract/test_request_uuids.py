"""An instance that a client has built under the uuid of a move's request: its allocation is not the migration's."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.placement import Release, ReleaseResult, Revert
from placement_worker.book import ResourceBook
from tests.contract.books import HOSTS
from tests.contract.test_moves import (
    MOVE,
    at,
    build,
    claimed,
    make,
    move,
    option,
    revert,
    reverted,
    store,
    used,
)

__all__ = ["make", "store"]  # fixtures


async def resized_and_built(store: ResourceBook, project: str) -> None:
    """A resize in place, whose migration holds nothing; then a build under the request's uuid."""
    await claimed(store, build(0, 0))
    (resized,) = await claimed(store, move(option(0, 6), source=option(0)))
    (built,) = await claimed(store, replace(build(1, 1), consumer=MOVE, project_id=project))
    assert (resized.outcome, built.outcome) == ("claimed", "claimed")


@pytest.mark.parametrize("project", ["p", "q"])
async def test_the_end_of_a_move_does_not_release_it(store: ResourceBook, project: str) -> None:
    await resized_and_built(store, project)
    (reply,) = await store.apply([Release(consumer=MOVE, project_id="p", of_migration=True)])
    assert isinstance(reply, ReleaseResult)
    assert reply.outcome == "consumer_changed"
    assert await used(store) == at(0, 6) | at(1, 4)
    (reply,) = await store.apply([Release(consumer=MOVE, project_id=project)])
    assert isinstance(reply, ReleaseResult)
    assert reply.outcome == "released"
    assert await used(store) == at(0, 6)


@pytest.mark.parametrize("project", ["p", "q"])
async def test_a_revert_does_not_take_it(store: ResourceBook, project: str) -> None:
    await resized_and_built(store, project)
    requested: Revert = revert(option(0), 3)
    for _ in range(2):  # also when it is repeated after a lost answer
        back = await reverted(store, requested)
        assert back.outcome == "reverted"
        assert back.consumer_generation is not None
        assert await used(store) == at(0, 4) | at(1, 4)


async def test_an_alternate_does_not_take_it(store: ResourceBook) -> None:
    await resized_and_built(store, "p")
    (refused,) = await claimed(store, move(option(2), source=option(0), attempt=3, generation=2, again=True))
    assert (refused.outcome, refused.reason.split(":")[0]) == ("consumer_changed", "claim.migration_in_use")
    assert await used(store) == at(0, 6) | at(1, 4)
    assert HOSTS[2] not in await used(store)

"""What a recovering cell states of its instances in placement, on both adapters."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.placement import Claim, Restate, RestateResult
from placement_worker.service import PlacementService
from tests.contract.books import MOVE, OTHER_MOVE, VMS, at, build, claimed, move, option, used


@pytest.fixture
def store(pooled: PlacementService) -> PlacementService:
    return pooled


def stated(number: int | None = None, attempt: int = 3000, **other: Any) -> Restate:
    allocations = None if number is None else option(number).allocations
    made = Restate(consumer=VMS[0], attempt=attempt, project_id=build(0, 0).project_id, allocations=allocations)
    return replace(made, **other)


async def restated(store: PlacementService, item: Restate) -> RestateResult:
    (reply,) = await store.apply([item])
    assert isinstance(reply, RestateResult)
    return reply


async def test_an_instance_holds_what_its_cell_states_and_its_moves_nothing(store: PlacementService) -> None:
    await claimed(store, build(0, 0))
    await claimed(store, move(option(1), source=option(0)))
    back = await restated(store, stated(0, migrations=(MOVE, OTHER_MOVE)))
    assert (back.outcome, back.consumer_generation) == ("restated", 3)
    assert await used(store) == at(0, 4)
    again = await restated(store, stated(0, migrations=(MOVE,)))
    assert (again.outcome, again.consumer_generation) == ("restated", 3)
    (late,) = await claimed(store, move(option(1), source=option(0), attempt=2, generation=3))
    assert late.outcome == "consumer_conflict", "a copy of an older claim is refused"
    (next_one,) = await claimed(store, move(option(1), source=option(0), attempt=3001, generation=3))
    assert next_one.outcome == "claimed"


@pytest.mark.parametrize(("number", "left"), [(2, at(2, 4)), (None, at(1, 4))])
async def test_what_is_not_on_record_is_stated_as_well(store: PlacementService, number: int | None, left: Any) -> None:
    if number is None:
        await claimed(store, build(0, 0))
        await claimed(store, move(option(1), source=option(0)))
    reply = await restated(store, stated(number, migrations=(MOVE,)))
    assert reply.outcome == "restated" and reply.consumer_generation is not None
    assert await used(store) == left


async def test_nothing_is_held_where_nothing_is_stated(store: PlacementService) -> None:
    await claimed(store, build(0, 0))
    released = await restated(store, stated(allocations={}))
    assert (released.outcome, released.consumer_generation) == ("restated", None)
    assert await used(store) == {}
    (late,) = await claimed(store, build(0, 0))
    assert late.outcome == "consumer_conflict"


async def test_what_runs_on_a_host_that_is_full_is_held_there_and_marked(store: PlacementService) -> None:
    await claimed(store, build(0, 0), build(1, 1, 6))
    reply = await restated(store, stated(1))
    assert (reply.outcome, reply.over_capacity, reply.consumer_generation) == ("restated", True, 2)
    assert await used(store) == at(1, 10)
    (more,) = await claimed(store, build(2, 1))
    assert more.outcome == "no_capacity"


@pytest.mark.parametrize(("name", "outcome"), [("CUSTOM_NOTHING", "invalid"), ("VGPU", "no_capacity")])
async def test_what_a_host_has_nothing_of_changes_nothing(store: PlacementService, name: str, outcome: str) -> None:
    """Of a class that is known elsewhere it failed the whole batch, each time that it was delivered."""
    await claimed(store, build(0, 0))
    (host,) = option(1).allocations
    reply = await restated(store, stated(allocations={host: {name: 1}}))
    assert (reply.outcome, reply.over_capacity) == (outcome, False)
    assert await used(store) == at(0, 4)


@pytest.mark.parametrize(
    "held",
    [
        build(0, 0, attempt=4000),
        replace(build(0, 0), project_id="another"),
        build(0, 0, external=True, owner="nova"),
    ],
    ids=["newer", "project", "foreign"],
)
async def test_what_another_client_holds_stays(store: PlacementService, held: Claim) -> None:
    await claimed(store, held)
    assert (await restated(store, stated(1))).outcome == "consumer_conflict"
    assert await used(store) == at(0, 4)


async def test_an_instance_that_was_built_under_the_uuid_of_a_move_keeps_what_it_holds(store: PlacementService) -> None:
    await claimed(store, build(0, 0), replace(build(1, 1), consumer=MOVE))
    assert (await restated(store, stated(0, migrations=(MOVE,)))).outcome == "restated"
    assert await used(store) == at(0, 4) | at(1, 4)

"""Moves in placement, on both adapters: the migration keeps the source until the move is confirmed or reverted."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.contracts.placement import (
    ClaimOption,
    ConsumerAllocations,
    Inventory,
    InventoryUpdate,
    ProviderReport,
    Release,
    Swap,
)
from placement_worker.domain.migration import allocations_at_source, kept_alongside, total_of, whole_source
from placement_worker.service import PlacementService
from tests.contract.books import (
    APART,
    CHILDREN,
    HOSTS,
    MOVE,
    OTHER_MOVE,
    TOGETHER,
    VMS,
    Amounts,
    Placements,
    at,
    build,
    claimed,
    move,
    option,
    revert,
    reverted,
    used,
)


@pytest.fixture
def store(pooled: PlacementService) -> PlacementService:
    return pooled


async def test_a_move_that_takes_longer_than_fences_are_kept_is_reverted_all_the_same(store: PlacementService) -> None:
    """Its destination was released and no other had room: the instance itself holds nothing all that time."""
    await claimed(store, build(0, 0), build(1, 2, 6))
    await claimed(store, move(option(1), source=option(0)))
    (full,) = await claimed(store, move(option(2), source=option(0), attempt=3, generation=2, again=True))
    assert full.outcome == "no_capacity"
    await store.trim(keep_changes=0, keep_ended_attempts_s=0.0, keep_reporters_s=1e6, limit=100)
    back = await reverted(store, revert(option(0), 4))
    assert (back.outcome, back.consumer_generation is not None) == ("reverted", True)
    assert await used(store) == at(0, 4) | at(2, 6)
    again = await reverted(store, revert(option(0), 4))
    assert (again.outcome, again.consumer_generation) == ("reverted", back.consumer_generation)
    await store.apply([Release(consumer=VMS[0], attempt=5), Release(consumer=MOVE)])
    assert await used(store) == at(2, 6)


async def test_a_member_that_holds_nothing_for_a_while_is_one_again_after_a_revert(store: PlacementService) -> None:
    await claimed(store, build(0, 0, server_group=APART), build(2, 2, 6))
    await claimed(store, move(option(1), source=option(0), server_group=APART))
    again = move(option(2), source=option(0), attempt=3, generation=2, again=True, server_group=APART)
    assert [reply.outcome for reply in await claimed(store, again)] == ["no_capacity"]
    await store.trim(keep_changes=0, keep_ended_attempts_s=3600.0, keep_reporters_s=3600.0, limit=100)
    assert (await reverted(store, revert(option(0), 4))).outcome == "reverted"
    (other,) = await claimed(store, build(1, 0, server_group=APART))
    assert other.outcome.value == "policy_violated"


async def test_a_source_left_alone_keeps_the_instances_share_of_the_quota(store: PlacementService) -> None:
    limits = {"VCPU": 4, "INSTANCES": 1}
    await claimed(store, build(0, 0, limits=limits), replace(build(1, 2, 6), project_id="q"))
    await claimed(store, move(option(1), source=option(0), limits=limits))
    again = move(option(2), source=option(0), attempt=3, generation=2, again=True, limits=limits)
    full, other = await claimed(store, again, build(2, 3, 1, limits=limits))
    assert (full.outcome, other.outcome) == ("no_capacity", "over_quota")
    (other,) = await claimed(store, build(2, 3, 1, limits=limits))
    assert other.outcome == "over_quota"
    await store.apply([Release(consumer=VMS[1])])
    moved, other = await claimed(store, again, build(2, 3, 1, limits=limits))
    assert (moved.outcome, other.outcome) == ("claimed", "over_quota")
    (other,) = await claimed(store, build(2, 3, 1, limits={"VCPU": 9, "INSTANCES": 2}))
    assert other.outcome == "claimed"


@pytest.mark.parametrize("confirmed", [True, False], ids=["confirmed", "reverted"])
async def test_no_member_joins_one_that_may_end_on_either_of_two_hosts(
    store: PlacementService, confirmed: bool
) -> None:
    """Of a group that stays together: who joined the source, or the destination, was alone when the move ended."""
    await claimed(store, build(0, 0, server_group=TOGETHER))
    await claimed(store, move(option(1), source=option(0), server_group=TOGETHER))
    at_source, at_destination = await claimed(
        store, build(1, 0, server_group=TOGETHER), build(2, 1, server_group=TOGETHER)
    )
    assert (at_source.outcome, at_destination.outcome) == ("policy_violated", "policy_violated")
    await store.apply([Release(consumer=MOVE) if confirmed else revert(option(0), attempt=3)])
    joining = [build(1, 0, server_group=TOGETHER), build(2, 1, server_group=TOGETHER)]
    ended = [reply.outcome.value for one in joining for reply in await claimed(store, one)]
    assert ended == (["policy_violated", "claimed"] if confirmed else ["claimed", "policy_violated"])


async def test_a_revert_finds_room_or_changes_nothing(store: PlacementService) -> None:
    await claimed(store, build(0, 0))
    await claimed(store, move(option(0, 2), source=option(0)))
    shrunk = ProviderReport(uuid=HOSTS[0], name="host-1", inventories={"VCPU": Inventory(total=8, reserved=8)})
    await store.apply_reports([InventoryUpdate(reporter="s", version=2, root_uuid=HOSTS[0], providers=(shrunk,))])
    back = await reverted(store, revert(option(0), 3))
    assert back.outcome == "reverted"  # what both held before is enough for it, whatever the capacity is now
    assert await used(store) == at(0, 4)


async def test_a_claim_restores_nothing_of_a_source_that_another_client_made_smaller(store: PlacementService) -> None:
    """Others have taken the room since. A revert alone restores it, where it fits."""
    await claimed(store, build(0, 0))
    (moved,) = await claimed(store, move(option(1), source=option(0)))
    smaller = ConsumerAllocations(
        consumer=MOVE, consumer_generation=1, project_id="p", consumer_type="MIGRATION", allocations=at(0, 1)
    )
    (swapped, taken) = await store.apply([Swap(consumers=(smaller,)), build(1, 0, 7)])
    assert (moved.outcome, swapped.outcome, taken.outcome) == ("claimed",) * 3
    again = move(option(2), source=option(0), attempt=3, generation=2, again=True)
    assert [reply.outcome for reply in await claimed(store, again)] == ["claimed"]
    assert await used(store) == at(0, 8) | at(2, 4)
    assert (await reverted(store, revert(option(0), 4))).outcome == "no_capacity"
    await store.apply([Release(consumer=VMS[1])])
    assert (await reverted(store, revert(option(0), 5))).allocations == at(0, 4)


async def test_a_claim_that_names_a_larger_source_than_was_ever_held_keeps_what_is_held(
    store: PlacementService,
) -> None:
    await claimed(store, build(0, 0, 1), build(1, 0, 5))
    (moved,) = await claimed(store, move(option(1, 5), source=option(0, 6), again=True))
    assert moved.outcome == "claimed"
    assert await used(store) == at(0, 6) | at(1, 5)


async def test_moves_of_two_instances_cross_without_a_deadlock(make: Placements) -> None:
    store = make()
    await store.open()
    for uuid in HOSTS[:2]:
        root = ProviderReport(uuid=uuid, name=f"host-{uuid[0]}", inventories={"VCPU": Inventory(total=8)})
        await store.apply_reports([InventoryUpdate(reporter="s", version=1, root_uuid=uuid, providers=(root,))])
    await claimed(store, build(0, 0), build(1, 1))
    for turn in range(10):
        here, there = (0, 1) if turn % 2 == 0 else (1, 0)
        requested = [
            move(option(there), source=option(here), attempt=2 + turn, generation=1 + turn),
            move(option(here), source=option(there), attempt=2 + turn, generation=1 + turn, vm=1, migration=OTHER_MOVE),
        ]
        results = await asyncio.gather(*(store.apply([one]) for one in requested))
        assert [reply.outcome for (reply,) in results] == ["claimed", "claimed"]
        await asyncio.gather(*(store.apply([Release(consumer=uuid)]) for uuid in (OTHER_MOVE, MOVE)))
    assert await used(store) == at(0, 4) | at(1, 4)


def numa(version: int, *cells: str, each: int = 4) -> InventoryUpdate:
    """The first host as it is once its processors are those of NUMA cells."""
    root = ProviderReport(uuid=HOSTS[0], name="host-1", inventories={"DISK_GB": Inventory(total=20)})
    children = (
        ProviderReport(
            uuid=uuid,
            name=f"host-1-numa{n}",
            parent_uuid=HOSTS[0],
            inventories={"VCPU": Inventory(total=each)},
            receives_from=HOSTS[0],
        )
        for n, uuid in enumerate(cells)
    )
    return InventoryUpdate(reporter="s", version=version, root_uuid=HOSTS[0], providers=(root, *children))


def vcpus(holding: Amounts) -> int:
    return sum(resources.get("VCPU", 0) for resources in holding.values())


@pytest.mark.parametrize("new", [1, 4, 6])
@pytest.mark.parametrize("each", [4, 8])
async def test_a_resize_in_place_is_reverted_whole_on_a_host_that_turned_nested(
    store: PlacementService, new: int, each: int
) -> None:
    """The migration's part and the instance's have gone to children, each to another one, or in pieces to both."""
    await claimed(store, build(0, 0))
    await claimed(store, move(option(0, new), source=option(0)))
    await store.apply_reports([numa(2, *CHILDREN, each=each)])
    back = await reverted(store, revert(option(0), 3))
    assert back.outcome == "reverted"
    assert (vcpus(back.allocations), back.allocations.keys() <= set(CHILDREN)) == (4, True)
    assert await used(store) == back.allocations


async def test_a_resize_in_place_is_reverted_whole_on_a_host_that_turned_nested_before_it(
    store: PlacementService,
) -> None:
    """The cell's record still names the root, of which the instance has long held nothing."""
    await claimed(store, build(0, 0))
    await store.apply_reports([numa(2, CHILDREN[0], each=8)])
    smaller = ClaimOption(allocations={CHILDREN[0]: {"VCPU": 1}}, host=HOSTS[0])
    (moved,) = await claimed(store, move(smaller, source=option(0)))
    assert moved.outcome == "claimed"
    assert (await reverted(store, revert(option(0), 3))).allocations == {CHILDREN[0]: {"VCPU": 4}}
    assert await used(store) == {CHILDREN[0]: {"VCPU": 4}}


async def test_what_moved_to_a_child_is_not_given_back_twice(store: PlacementService) -> None:
    """No room for all of it: a part of the migration's processors is orphaned at the root."""
    await claimed(store, build(0, 0))
    await claimed(store, move(option(1), source=option(0)))
    await store.apply_reports([numa(2, CHILDREN[0], each=3)])
    back = await reverted(store, revert(option(0), 3))
    assert (back.outcome, back.allocations) == ("reverted", at(0, 1) | {CHILDREN[0]: {"VCPU": 3}})
    assert await used(store) == back.allocations


HOLDINGS = st.dictionaries(
    st.sampled_from("abc"), st.dictionaries(st.sampled_from("VD"), st.integers(1, 9), min_size=1), min_size=1
)
ROOTS = st.fixed_dictionaries({uuid: st.sampled_from("abc") for uuid in "abc"})


@given(HOLDINGS, st.lists(HOLDINGS, min_size=1, max_size=4), ROOTS)
def test_together_they_hold_the_larger_of_each_whatever_is_tried(
    source: Amounts, tried: list[Amounts], roots: dict[str, str]
) -> None:
    kept: Amounts = {}
    held: Amounts = source
    for taken in tried:
        base = source if held is source else allocations_at_source(source, held, kept, roots)
        assert base == source
        kept, held = kept_alongside(base, taken), taken
        both = total_of((kept, held))
        for uuid in {*source, *taken}:
            for name in {*source.get(uuid, {}), *taken.get(uuid, {})}:
                larger = max(source.get(uuid, {}).get(name, 0), taken.get(uuid, {}).get(name, 0))
                assert both[uuid][name] == larger
    assert allocations_at_source(source, held, kept, roots) == source == whole_source(source, source)

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
    LocateRequest,
    Migration,
    ProviderReport,
    Release,
    Revert,
    Swap,
)
from placement_worker.domain.migration import allocations_at_source, kept_alongside, total_of, whole_source
from placement_worker.service import PlacementService
from tests.contract.books import (
    APART,
    CHILDREN,
    GROUP,
    HOSTS,
    MOVE,
    OTHER_MOVE,
    POOL,
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


async def test_the_source_is_kept_until_the_move_is_confirmed(store: PlacementService) -> None:
    await claimed(store, build(0, 0))
    (moved,) = await claimed(store, move(option(1), source=option(0)))
    assert (moved.outcome, moved.consumer_generation) == ("claimed", 2)
    assert await used(store) == at(0, 4) | at(1, 4)
    await store.apply([Release(consumer=MOVE)])
    assert await used(store) == at(1, 4)


async def test_a_claim_by_an_old_generation_is_answered_with_what_its_project_holds(store: PlacementService) -> None:
    await claimed(store, build(0, 0))
    (refused,) = await claimed(store, move(option(1), source=option(0), generation=7))
    assert (refused.outcome, refused.consumer_generation, refused.allocations) == ("consumer_conflict", 1, at(0, 4))
    (small,) = await claimed(store, build(0, 1, attempt=2, consumer_generation=7))
    assert (small.outcome, small.consumer_generation, small.allocations) == ("consumer_conflict", 1, at(0, 4))
    other = replace(move(option(1), source=option(0), generation=7), project_id="q")
    assert [one.allocations for one in await claimed(store, other)] == [{}], "it is another project's"


async def test_a_reverted_move_gives_the_destination_back(store: PlacementService) -> None:
    await claimed(store, build(0, 0))
    await claimed(store, move(option(1), source=option(0)))
    back = await reverted(store, revert(option(0), 3))
    assert (back.outcome, back.consumer_generation, back.allocations) == ("reverted", 3, option(0).allocations)
    assert await used(store) == at(0, 4)
    assert (await reverted(store, revert(option(0), 3))).outcome == "reverted"  # asked again after a lost answer
    (late,) = await claimed(store, move(option(1), source=option(0)))
    assert late.outcome == "consumer_conflict"  # a copy of the move's claim finds its attempt ended
    assert await used(store) == at(0, 4)


async def test_a_move_that_finds_no_host_changes_nothing(store: PlacementService) -> None:
    await claimed(store, build(0, 0), build(1, 1, 6))
    (full,) = await claimed(store, move(option(1), source=option(0)))
    assert (full.outcome, full.consumer_generation) == ("no_capacity", 1)
    assert await used(store) == at(0, 4) | at(1, 6)
    assert (await reverted(store, revert(option(0), 3))).outcome == "reverted"
    assert await used(store) == at(0, 4) | at(1, 6)
    (late,) = await claimed(store, move(option(2), source=option(0)))
    assert late.outcome == "consumer_conflict"


async def test_an_alternate_releases_the_failed_destination_and_keeps_the_source(store: PlacementService) -> None:
    await claimed(store, build(0, 0), build(1, 2, 6))
    await claimed(store, move(option(1), source=option(0)))
    again = move(option(2), option(3), source=option(0), attempt=3, generation=2, again=True)
    (moved,) = await claimed(store, again)
    assert (moved.outcome, moved.option) == ("claimed", 1)
    assert await used(store) == at(0, 4) | at(2, 6) | at(3, 4)
    (requested_again,) = await claimed(store, again)
    assert (requested_again.outcome, requested_again.option) == ("claimed", 1)
    assert await used(store) == at(0, 4) | at(2, 6) | at(3, 4)


async def test_a_member_that_holds_nothing_for_a_while_is_one_again_after_a_revert(store: PlacementService) -> None:
    await claimed(store, build(0, 0, server_group=APART), build(2, 2, 6))
    await claimed(store, move(option(1), source=option(0), server_group=APART))
    again = move(option(2), source=option(0), attempt=3, generation=2, again=True, server_group=APART)
    assert [reply.outcome for reply in await claimed(store, again)] == ["no_capacity"]
    await store.trim(keep_changes=0, keep_ended_attempts_s=3600.0, keep_reporters_s=3600.0, limit=100)
    assert (await reverted(store, revert(option(0), 4))).outcome == "reverted"
    (other,) = await claimed(store, build(1, 0, server_group=APART))
    assert other.outcome.value == "policy_violated"


@pytest.mark.parametrize("again", [False, True])
async def test_a_claim_without_options_is_invalid(store: PlacementService, *, again: bool) -> None:
    await claimed(store, build(0, 0))
    (answer,) = await claimed(store, move(source=option(0), again=again))
    assert (answer.outcome.value, answer.reason.split(":")[0]) == ("invalid", "claim.options")
    assert await used(store) == at(0, 4)


async def test_without_an_alternate_the_source_alone_is_left_and_can_be_reverted_to(store: PlacementService) -> None:
    await claimed(store, build(0, 0), build(1, 2, 6))
    await claimed(store, move(option(1), source=option(0)))
    (full,) = await claimed(store, move(option(2), source=option(0), attempt=3, generation=2, again=True))
    assert full.outcome == "no_capacity"
    assert await used(store) == at(0, 4) | at(2, 6)
    assert (await reverted(store, revert(option(0), 4))).allocations == option(0).allocations
    assert await used(store) == at(0, 4) | at(2, 6)


@pytest.mark.parametrize(("new", "together"), [(6, 6), (2, 4), (4, 4)])
async def test_a_resize_in_place_claims_the_larger_of_both_not_their_sum(
    store: PlacementService, new: int, together: int
) -> None:
    await claimed(store, build(0, 0))
    (moved,) = await claimed(store, move(option(0, new), source=option(0)))
    assert moved.outcome == "claimed"
    assert await used(store) == at(0, together)
    assert (await reverted(store, revert(option(0), 3))).allocations == option(0).allocations
    assert await used(store) == at(0, 4)
    (moved,) = await claimed(store, move(option(0, new), source=option(0), attempt=4, generation=3))
    assert moved.outcome == "claimed"
    await store.apply([Release(consumer=MOVE)])
    assert await used(store) == at(0, new)


async def test_a_resize_in_place_needs_room_for_the_difference_alone(store: PlacementService) -> None:
    await claimed(store, build(0, 0), build(1, 0, 2))
    (full,) = await claimed(store, move(option(0, 7), source=option(0)))
    assert full.outcome == "no_capacity"
    (moved,) = await claimed(store, move(option(0, 6), source=option(0)))
    assert moved.outcome == "claimed"


async def test_after_a_failed_resize_in_place_the_alternate_leaves_the_whole_source(store: PlacementService) -> None:
    await claimed(store, build(0, 0))
    await claimed(store, move(option(0, 6), source=option(0)))
    (moved,) = await claimed(store, move(option(1, 6), source=option(0), attempt=3, generation=2, again=True))
    assert moved.outcome == "claimed"
    assert await used(store) == at(0, 4) | at(1, 6)


async def test_a_pool_that_both_hosts_share_is_not_counted_twice(store: PlacementService) -> None:
    await claimed(store, build(0, 0, disk=15))
    (moved,) = await claimed(store, move(option(1, disk=15), source=option(0, disk=15)))
    assert moved.outcome == "claimed"
    assert await used(store) == at(0, 4) | at(1, 4) | {POOL: {"DISK_GB": 15}}
    (moved,) = await claimed(
        store, move(option(2, disk=15), source=option(0, disk=15), attempt=3, generation=2, again=True)
    )
    assert moved.outcome == "claimed"
    await reverted(store, revert(option(0, disk=15), 4))
    assert await used(store) == at(0, 4) | {POOL: {"DISK_GB": 15}}


async def test_a_quota_counts_both_sizes_and_one_instance_until_the_move_is_confirmed(store: PlacementService) -> None:
    limits = {"VCPU": 6, "INSTANCES": 1}
    await claimed(store, build(0, 0, limits=limits))
    (moved,) = await claimed(store, move(option(1), source=option(0), limits=limits))
    assert moved.outcome == "claimed"
    (over,) = await claimed(store, build(1, 2, 1, limits={"INSTANCES": 1}))
    assert over.outcome == "over_quota"
    (besides,) = await claimed(store, build(2, 2, 2, limits={"VCPU": 6}))
    assert besides.outcome == "over_quota"
    (larger,) = await claimed(
        store, move(option(3, 7), source=option(0), attempt=3, generation=2, again=True, limits=limits)
    )
    assert larger.outcome == "over_quota"
    await store.apply([Release(consumer=MOVE, of_migration=True)])
    (within,) = await claimed(store, build(2, 2, 2, limits={"VCPU": 6}))
    assert within.outcome == "claimed"


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


async def test_the_group_rule_holds_for_the_destination(store: PlacementService) -> None:
    await claimed(store, build(0, 0, server_group=APART), build(1, 1, server_group=APART))
    (moved,) = await claimed(store, move(option(1), option(2), source=option(0), server_group=APART))
    assert (moved.outcome, moved.option) == ("claimed", 1)
    assert [outcome.value for outcome in moved.outcomes] == ["policy_violated", "claimed"]


async def test_no_member_takes_the_source_before_the_move_is_confirmed(store: PlacementService) -> None:
    await claimed(store, build(0, 0, server_group=APART))
    await claimed(store, move(option(1), source=option(0), server_group=APART))
    (kept_out,) = await claimed(store, build(1, 0, server_group=APART))
    assert kept_out.outcome == "policy_violated"
    (back,) = await claimed(
        store, move(option(0), source=option(0), attempt=3, generation=2, again=True, server_group=APART)
    )
    assert back.outcome == "claimed"  # its own migration is no foreign one
    await store.apply([Release(consumer=MOVE)])
    page = (await store.reads.locate([LocateRequest(project_id="p", server_group=GROUP)]))[0]
    assert page.members == {HOSTS[0]: 1}


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


async def test_a_resize_in_place_of_a_member_keeps_its_own_host(store: PlacementService) -> None:
    await claimed(store, build(0, 0, server_group=APART))
    (moved,) = await claimed(store, move(option(0, 6), source=option(0), server_group=APART))
    assert moved.outcome == "claimed"


async def test_a_migration_of_another_consumer_is_left_alone(store: PlacementService) -> None:
    await claimed(store, build(0, 0), build(1, 1))
    (taken,) = await claimed(store, move(option(2), source=option(0), migration=VMS[1]))
    assert taken.outcome == "consumer_conflict"
    (itself,) = await claimed(store, move(option(2), source=option(0), migration=VMS[0]))
    assert itself.outcome == "invalid"
    (nothing,) = await claimed(store, move(option(2), source=option(0), vm=3, generation=None))
    assert nothing.outcome == "consumer_conflict"
    assert await used(store) == at(0, 4) | at(1, 4)


async def test_an_instance_is_not_its_own_migration(store: PlacementService) -> None:
    await claimed(store, build(0, 0))
    itself = Revert(
        consumer=VMS[0],
        migration=Migration(uuid=VMS[0], source=option(0).allocations),
        source_attempt=0,
        attempt=2,
    )
    assert (await reverted(store, itself)).outcome == "consumer_conflict"
    assert await used(store) == at(0, 4)


async def test_another_client_changed_the_instance_before_the_move(store: PlacementService) -> None:
    await claimed(store, build(0, 0))
    (changed,) = await claimed(store, move(option(1), source=option(0), generation=7))
    assert changed.outcome == "consumer_conflict"
    assert await used(store) == at(0, 4)


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


async def test_an_alternate_leaves_the_whole_source_on_a_host_that_turned_nested(store: PlacementService) -> None:
    await claimed(store, build(0, 0))
    await claimed(store, move(option(0, 6), source=option(0)))
    await store.apply_reports([numa(2, CHILDREN[0], each=8)])
    (moved,) = await claimed(store, move(option(1, 6), source=option(0), attempt=3, generation=2, again=True))
    assert moved.outcome == "claimed"
    assert await used(store) == {CHILDREN[0]: {"VCPU": 4}} | at(1, 6)


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


def test_placement_names_where_the_source_is_now() -> None:
    requested = {"host": {"VCPU": 4, "VGPU": 1}}
    # A reshape has moved the VGPU to a child of the host meanwhile.
    kept = {"host": {"VCPU": 4}, "child": {"VGPU": 1}}
    roots = {"host": "host", "child": "host", "elsewhere": "elsewhere"}
    assert allocations_at_source(requested, {"elsewhere": {"VCPU": 4}}, kept, roots) == kept


def test_what_another_host_holds_is_none_of_the_source() -> None:
    """Another client took the migration's VGPU away: what the destination holds does not make up for it."""
    requested, kept = {"host": {"VCPU": 4, "VGPU": 1}}, {"host": {"VCPU": 4}}
    roots = {"host": "host", "elsewhere": "elsewhere"}
    assert allocations_at_source(requested, {"elsewhere": {"VCPU": 4, "VGPU": 1}}, kept, roots) == kept

"""Server groups in the claim, on both stores: apart, together, and no third instance in between."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    ConsumerAllocations,
    GroupPolicy,
    Inventory,
    InventoryUpdate,
    LocateRequest,
    Migration,
    ProviderReport,
    Release,
    Revert,
    ServerGroup,
    Swap,
)
from placement_worker.service import PlacementService
from tests.contract.books import HOSTS, VMS, Placements

GROUP = "e0000000-0000-4000-8000-000000000000"
APART = ServerGroup(uuid=GROUP, policy=GroupPolicy.ANTI_AFFINITY)
TOGETHER = ServerGroup(uuid=GROUP, policy=GroupPolicy.AFFINITY)


def member(vm: int, *hosts: int, group: ServerGroup | None = APART, project: str = "p", **fields: object) -> Claim:
    options = tuple(ClaimOption(allocations={HOSTS[n]: {"VCPU": 1}}, host=HOSTS[n]) for n in hosts)
    return Claim(consumer=VMS[vm], options=options, project_id=project, server_group=group, **fields)  # type: ignore[arg-type]


async def claim(store: PlacementService, *claims: Claim, bus: str = "api") -> list[ClaimResult]:
    replies = await store.apply(claims, bus=bus)
    return [reply for reply in replies if isinstance(reply, ClaimResult)]


async def outcomes(store: PlacementService, *claims: Claim) -> list[str]:
    return [reply.outcome.value for reply in await claim(store, *claims)]


async def test_a_cell_does_not_learn_where_the_others_are(store: PlacementService) -> None:
    assert await outcomes(store, member(0, 0)) == ["claimed"]
    (policy_violated,) = await claim(store, member(1, 0), bus="c1")
    assert (policy_violated.outcome, policy_violated.members) == (ClaimOutcome.POLICY_VIOLATED, {})


@pytest.mark.parametrize("group", [APART, TOGETHER], ids=["apart", "together"])
async def test_processes_that_claim_at_once_keep_the_rule(
    make: Placements, store: PlacementService, group: ServerGroup
) -> None:
    """Forty members, each wanting any host, by four processes at once: the check and the claim are one."""
    stores = [store, make(), make(), make()]
    for other in stores[1:]:
        await other.open()

    async def work(number: int) -> list[ClaimResult]:
        mine = [member(vm, *(HOSTS.index(h) for h in HOSTS[vm % 5 :] + HOSTS[: vm % 5]), group=group)
                for vm in range(number, 40, 4)]  # fmt: skip
        return [reply for one in mine for reply in await claim(stores[number], one)]

    replies = [reply for part in await asyncio.gather(*(work(number) for number in range(4))) for reply in part]
    counted = Counter(reply.outcome for reply in replies)
    members = (await store.reads.locate([LocateRequest(project_id="p", server_group=GROUP)]))[0].members
    if group is APART:
        assert counted == {ClaimOutcome.CLAIMED: 5, ClaimOutcome.POLICY_VIOLATED: 35}
        assert members == dict.fromkeys(HOSTS, 1)
    else:
        assert counted == {ClaimOutcome.CLAIMED: 40}
        assert list(members.values()) == [40]


async def test_those_who_left_are_trimmed_and_those_who_stay_are_not(store: PlacementService) -> None:
    await outcomes(store, member(0, 0), member(1, 1))
    await store.apply([Release(consumer=VMS[0])])
    await store.trim(keep_changes=1000, keep_ended_attempts_s=0.0, keep_reporters_s=1e6, limit=10)
    assert (await store.reads.locate([LocateRequest(project_id="p", server_group=GROUP)]))[0].members == {HOSTS[1]: 1}
    assert await outcomes(store, member(2, 1), member(2, 0)) == ["policy_violated", "claimed"]


async def test_two_first_members_at_once_on_hosts_of_their_own_do_not_split(
    make: Placements, store: PlacementService
) -> None:
    """Nothing but the group is common to the two: its lock alone keeps them apart."""
    other = make()
    await other.open()
    for number in range(10):
        group = ServerGroup(uuid=GROUP[:-1] + str(number), policy=GroupPolicy.AFFINITY)
        ours, theirs = member(2 * number, 0, group=group), member(2 * number + 1, 1, group=group)
        both = await asyncio.gather(claim(store, ours), claim(other, theirs))
        assert sorted(reply.outcome.value for part in both for reply in part) == ["claimed", "policy_violated"]


# --- members that are moved: where they are follows from what they hold


def swap(vm: int, *hosts: int, generation: int = 1) -> Swap:
    holding = {HOSTS[n]: {"VCPU": 1} for n in hosts}
    return Swap(
        consumers=(
            ConsumerAllocations(consumer=VMS[vm], consumer_generation=generation, allocations=holding, project_id="p"),
        )
    )


async def members(store: PlacementService) -> dict[str, int]:
    return dict((await store.reads.locate([LocateRequest(project_id="p", server_group=GROUP)]))[0].members)


@pytest.mark.parametrize("at_once", [False, True], ids=["then claimed", "claimed in the same transaction"])
async def test_a_member_that_is_swapped_to_another_host_is_counted_there(
    store: PlacementService, at_once: bool
) -> None:
    """It stayed on record where its claim was: two members on one host, and a free host refused."""
    assert await outcomes(store, member(0, 0)) == ["claimed"]
    writes = [swap(0, 1), member(1, 1), member(2, 0)]
    replies = [
        reply for part in ([writes] if at_once else [[one] for one in writes]) for reply in await store.apply(part)
    ]
    assert [str(reply.outcome) for reply in replies] == ["claimed", "policy_violated", "claimed"]
    assert await members(store) == {HOSTS[0]: 1, HOSTS[1]: 1}


@pytest.mark.parametrize("at_once", [False, True], ids=["then claimed", "claimed in the same transaction"])
async def test_what_a_member_holds_of_a_shared_pool_makes_it_no_member_there(
    store: PlacementService, at_once: bool
) -> None:
    pool = ProviderReport(
        uuid=HOSTS[4], name="pool", inventories={"VCPU": Inventory(total=9)}, traits=("MISC_SHARES_VIA_AGGREGATE",)
    )
    await store.apply_reports([InventoryUpdate(reporter="s", version=2, root_uuid=HOSTS[4], providers=(pool,))])
    assert await outcomes(store, member(0, 0)) == ["claimed"]
    writes = [swap(0, 1, 4), member(1, 4)]
    replies = [
        reply for part in ([writes] if at_once else [[one] for one in writes]) for reply in await store.apply(part)
    ]
    assert [str(reply.outcome) for reply in replies] == ["claimed", "claimed"], "it is not there"
    assert await members(store) == {HOSTS[1]: 1, HOSTS[4]: 1}, "who holds nothing else is"
    (page,) = await store.reads.locate([LocateRequest(project_id="p", consumers=(VMS[0], VMS[1]))])
    assert page.hosts == {VMS[0]: (HOSTS[1],), VMS[1]: (HOSTS[4],)}, "nor where it is named"


async def test_a_member_follows_its_device_to_another_host(store: PlacementService) -> None:
    device = "d0000000-0000-4000-8000-000000000000"

    def report(host: int, version: int, *, has_it: bool) -> InventoryUpdate:
        inventory = {"VCPU": Inventory(total=100)}
        root = ProviderReport(uuid=HOSTS[host], name=f"host-{HOSTS[host][0]}", inventories=inventory)
        child = ProviderReport(uuid=device, name="device", parent_uuid=HOSTS[host], inventories=inventory)
        parts = (root, child) if has_it else (root,)
        return InventoryUpdate(reporter="s", version=version, root_uuid=HOSTS[host], providers=parts)

    await store.apply_reports([report(0, 2, has_it=True)])
    option = ClaimOption(allocations={device: {"VCPU": 1}}, host=HOSTS[0])
    assert await outcomes(store, Claim(consumer=VMS[0], options=(option,), project_id="p", server_group=APART)) == [
        "claimed"
    ]
    await store.apply_reports([report(1, 2, has_it=True)])
    assert await members(store) == {HOSTS[1]: 1}
    assert await outcomes(store, member(1, 1), member(1, 0)) == ["policy_violated", "claimed"]


async def test_several_questions_are_answered_together_and_each_alone(store: PlacementService) -> None:
    await outcomes(store, member(0, 0), member(1, 1), member(2, 2, project="q"))
    ours = LocateRequest(project_id="p", server_group=GROUP)
    requests = [
        ours,
        LocateRequest(project_id="q", server_group=GROUP, consumers=(VMS[2], VMS[0])),
        LocateRequest(project_id="p", server_group=GROUP, excluding=VMS[1], consumers=(VMS[1], VMS[1])),
        LocateRequest(project_id="p"),
        ours,
    ]
    pages = await store.reads.locate(requests)
    assert [(page.members, page.hosts) for page in pages] == [
        ({HOSTS[0]: 1, HOSTS[1]: 1}, {}),
        ({HOSTS[2]: 1}, {VMS[2]: (HOSTS[2],)}),
        ({HOSTS[0]: 1}, {VMS[1]: (HOSTS[1],)}),
        ({}, {}),
        ({HOSTS[0]: 1, HOSTS[1]: 1}, {}),
    ]
    assert await store.reads.locate([]) == []


async def test_a_member_that_is_swapped_beside_a_claim_for_its_new_host_alone(store: PlacementService) -> None:
    assert await outcomes(store, member(0, 0)) == ["claimed"]
    replies = await store.apply([swap(0, 1), member(1, 1)])
    assert [str(reply.outcome) for reply in replies] == ["claimed", "policy_violated"]
    assert await members(store) == {HOSTS[1]: 1}


async def test_a_member_whose_move_is_reverted_beside_a_claim_for_its_source(store: PlacementService) -> None:
    """A revert names no group: its consumer may be a member of any that the transaction names."""
    other = ServerGroup(uuid=GROUP.replace("e", "a"), policy=GroupPolicy.ANTI_AFFINITY)
    move = Migration(uuid=VMS[9], source={HOSTS[0]: {"VCPU": 1}})
    assert await outcomes(store, member(0, 0)) == ["claimed"]
    assert await outcomes(store, member(0, 1, attempt=2, consumer_generation=1, migration=move)) == ["claimed"]
    back = Revert(consumer=VMS[0], attempt=3, source_attempt=1, migration=move)
    replies = await store.apply([back, member(1, 0, group=other), member(2, 0)])
    assert [str(reply.outcome) for reply in replies] == ["reverted", "claimed", "policy_violated"]
    assert await members(store) == {HOSTS[0]: 1}


@pytest.mark.parametrize("at_once", [False, True], ids=["then claimed", "claimed in the same transaction"])
async def test_a_member_that_holds_nothing_is_one_again_where_its_move_is_reverted(
    store: PlacementService, at_once: bool
) -> None:
    """Its last alternate had no room. Of one transaction the revert was not seen: two members on one host."""
    move = Migration(uuid=VMS[9], source={HOSTS[0]: {"VCPU": 1}})
    assert await outcomes(store, member(0, 0), member(1, 2)) == ["claimed", "claimed"]
    assert await outcomes(store, member(0, 1, attempt=2, consumer_generation=1, migration=move)) == ["claimed"]
    last = member(0, 2, attempt=3, consumer_generation=2, migration=move, release_first=True)
    assert await outcomes(store, last) == ["policy_violated"]
    assert await members(store) == {HOSTS[0]: 1, HOSTS[2]: 1}
    writes = [Revert(consumer=VMS[0], attempt=4, source_attempt=1, migration=move), member(3, 0)]
    replies = [
        reply for part in ([writes] if at_once else [[one] for one in writes]) for reply in await store.apply(part)
    ]
    assert [str(reply.outcome) for reply in replies] == ["reverted", "policy_violated"]
    assert await members(store) == {HOSTS[0]: 1, HOSTS[2]: 1}


async def test_a_member_that_claims_again_without_naming_its_group_is_one_where_it_goes(
    store: PlacementService,
) -> None:
    assert await outcomes(store, member(0, 0)) == ["claimed"]
    again = member(0, 1, group=None, attempt=2, consumer_generation=1, release_first=True)
    assert await outcomes(store, again, member(1, 1)) == ["claimed", "policy_violated"]

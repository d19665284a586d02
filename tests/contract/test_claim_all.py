"""The claims of a gang, on both books: all of them or none, whatever else is claimed at once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import (
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimOption,
    ClaimResult,
    LocateRequest,
    Release,
)
from placement_worker.book import ResourceBook
from tests.contract.books import HOSTS, VMS, Books

APART = ServerGroup(uuid="e0000000-0000-4000-8000-000000000000", policy=GroupPolicy.ANTI_AFFINITY)


def member(vm: int, at: int = 0, vcpu: int = 1, **fields: object) -> Claim:
    option = ClaimOption(allocations={HOSTS[at]: {"VCPU": vcpu}}, host=HOSTS[at])
    return Claim(consumer=VMS[vm], options=(option,), project_id="p", **fields)  # type: ignore[arg-type]


async def claim_all(store: ResourceBook, *claims: Claim) -> list[ClaimResult]:
    (reply,) = await store.apply([ClaimAll(claims=claims)])
    assert isinstance(reply, ClaimAllResult)
    return list(reply.results)


async def outcomes(store: ResourceBook, *claims: Claim) -> list[str]:
    return [result.outcome.value for result in await claim_all(store, *claims)]


async def holders(store: ResourceBook, *vms: int) -> set[int]:
    """Which of these hold something."""
    (page,) = await store.reads.locate([LocateRequest(project_id="p", consumers=tuple(VMS[vm] for vm in vms))])
    return {vm for vm in vms if VMS[vm] in page.hosts}


async def test_all_members_are_claimed_at_once(store: ResourceBook) -> None:
    results = await claim_all(store, member(0, 0), member(1, 1), member(2, 0))
    assert [result.outcome for result in results] == ["claimed"] * 3
    assert results[0].sequence == results[1].sequence == results[2].sequence > 0
    assert results[2].generations[HOSTS[0]] == results[0].generations[HOSTS[0]] + 1
    assert await holders(store, 0, 1, 2) == {0, 1, 2}


async def test_one_that_does_not_fit_leaves_all_of_them_unclaimed(store: ResourceBook) -> None:
    """The answer names what stood in the way, and nothing is used: the same room is claimed afterwards."""
    assert await outcomes(store, member(0, 0, 100), member(1, 1), member(2, 0)) == ["incomplete", "incomplete", "full"]
    assert await holders(store, 0, 1, 2) == set()
    assert await outcomes(store, member(0, 0, 100), member(1, 1)) == ["claimed", "claimed"]


async def test_members_are_counted_together_against_the_limit(store: ResourceBook) -> None:
    limits = {"INSTANCES": 2}
    assert await outcomes(store, *(member(n, n, limits=limits) for n in range(3))) == [
        *("incomplete", "incomplete", "over_limit")
    ]
    assert await outcomes(store, *(member(n, n, limits=limits) for n in range(2))) == ["claimed", "claimed"]
    assert await outcomes(store, member(2, 2, limits=limits)) == ["over_limit"]


async def test_members_keep_the_rule_of_their_server_group_among_themselves(store: ResourceBook) -> None:
    """Where the gang's own members were tried is no place of the group: the answer does not name it."""
    results = await claim_all(store, *(member(n, n // 2, server_group=APART) for n in range(3)))
    assert [result.outcome for result in results] == ["incomplete", "ruled_out", "incomplete"]
    assert results[1].members == {}
    assert await outcomes(store, *(member(n, n, server_group=APART) for n in range(3))) == ["claimed"] * 3
    (refused,) = await claim_all(store, member(3, 0, server_group=APART))
    assert (refused.outcome, refused.members) == ("ruled_out", {HOSTS[0]: 1})


async def test_a_repeat_is_answered_with_what_is_held(store: ResourceBook) -> None:
    first = await claim_all(store, member(0, 0), member(1, 1))
    again = await claim_all(store, member(0, 0), member(1, 1))
    assert [one.generations for one in again] == [one.generations for one in first]
    assert [one.option for one in again] == [0, 0]


async def test_a_member_of_an_earlier_run_keeps_what_it_holds_when_the_rest_does_not_fit(store: ResourceBook) -> None:
    assert await outcomes(store, member(0, 0), member(1, 1)) == ["claimed", "claimed"]
    assert await outcomes(store, member(0, 2), member(1, 2), member(2, 0, 1000)) == ["claimed", "claimed", "full"]
    assert await holders(store, 0, 1, 2) == {0, 1}


async def test_a_fenced_member_stands_in_the_way_of_all(store: ResourceBook) -> None:
    await store.apply([Release(consumer=VMS[1], attempt=1)])
    assert await outcomes(store, member(0), member(1)) == ["incomplete", "consumer_changed"]
    assert await holders(store, 0, 1) == set()


async def test_what_stands_beside_a_gang_in_one_transaction_is_decided_in_order(store: ResourceBook) -> None:
    gang = ClaimAll(claims=(member(1, 0, 50), member(2, 0, 50)))
    before, all_or_none, after = await store.apply([member(0, 0), gang, member(3, 0, 99)])
    assert isinstance(all_or_none, ClaimAllResult)
    assert [one.outcome for one in all_or_none.results] == ["incomplete", "full"]
    assert [str(one.outcome) for one in (before, after) if isinstance(one, ClaimResult)] == ["claimed", "claimed"]


@pytest.mark.parametrize(
    "claims",
    [
        (member(0), member(0, 1)),
        (member(0), member(1, release_first=True, attempt=2, consumer_generation=1)),
    ],
)
async def test_a_gang_that_is_none_is_invalid(store: ResourceBook, claims: tuple[Claim, ...]) -> None:
    assert await outcomes(store, *claims) == ["invalid", "invalid"]
    assert await holders(store, 0, 1) == set()


async def test_processes_that_claim_for_gangs_at_once_leave_no_partial_one(make: Books, store: ResourceBook) -> None:
    """Gangs of four on two hosts, each wanting a quarter of both: four fit in all, and no fifth in part."""
    stores = [store, make(), make(), make()]
    for other in stores[1:]:
        await other.open()

    async def work(number: int) -> list[str]:
        first = 8 * number
        ended = []
        for vms in (range(first, first + 4), range(first + 4, first + 8)):
            found = await outcomes(stores[number], *(member(vm, (vm + number) % 2, 12) for vm in vms))
            ended.append("claimed" if set(found) == {"claimed"} else "none")
        return ended

    ended = await asyncio.gather(*(work(number) for number in range(4)))
    assert Counter(one for part in ended for one in part) == {"claimed": 4, "none": 4}
    held = await holders(store, *range(32))
    assert sorted(len(held & set(range(first, first + 4))) for first in range(0, 32, 4)) == [0] * 4 + [4] * 4

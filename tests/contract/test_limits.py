"""A project's limits in the claim, on both books: never passed, however many claim at once."""

from __future__ import annotations

import asyncio
from collections import Counter

from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    Release,
)
from placement_worker.book import ResourceBook
from tests.contract.books import HOSTS, VMS, Books

FOUR = {"VCPU": 4}


def claim(vm: int, at: int = 0, *, limits: dict[str, int] = FOUR, project: str = "p", **amounts: int) -> Claim:
    option = ClaimOption(allocations={HOSTS[at]: amounts or {"VCPU": 1}})
    return Claim(consumer=VMS[vm], options=(option,), project_id=project, limits=limits)


async def outcomes(store: ResourceBook, *claims: Claim) -> list[str]:
    return [str(reply.outcome) for reply in await store.apply(claims)]


async def test_a_project_holds_no_more_than_it_may(store: ResourceBook) -> None:
    assert await outcomes(store, claim(0, VCPU=3)) == ["claimed"]
    (over,) = await store.apply([claim(1, 1, VCPU=2)])
    assert isinstance(over, ClaimResult)
    assert (over.outcome, over.reason) == (ClaimOutcome.OVER_LIMIT, "VCPU: 3 of 4 held, 2 more requested")
    assert await outcomes(store, claim(1, 1, VCPU=1), claim(2, 2, DISK_GB=50)) == ["claimed", "claimed"]


async def test_of_one_transaction_each_sees_what_the_ones_before_it_took_and_gave_back(store: ResourceBook) -> None:
    assert await outcomes(store, *(claim(n, VCPU=2) for n in range(3))) == ["claimed", "claimed", "over_limit"]
    replies = await store.apply([Release(consumer=VMS[0]), claim(2, VCPU=2), claim(3, VCPU=1)])
    assert [str(reply.outcome) for reply in replies] == ["released", "claimed", "over_limit"]


async def test_of_one_transaction_each_is_held_to_its_own_limit(store: ResourceBook) -> None:
    claims = claim(0), claim(1, limits={"VCPU": 1}), claim(2)
    assert await outcomes(store, *claims) == ["claimed", "over_limit", "claimed"]


async def test_how_many_instances(store: ResourceBook) -> None:
    two = {"INSTANCES": 2}
    assert await outcomes(store, *(claim(n, limits=two) for n in range(3))) == ["claimed", "claimed", "over_limit"]
    await store.apply([Release(consumer=VMS[0])])
    assert await outcomes(store, claim(3, limits=two), claim(4, limits=two)) == ["claimed", "over_limit"]


async def test_other_projects_and_claims_without_limits_are_not_held_to_them(store: ResourceBook) -> None:
    assert await outcomes(store, claim(0, VCPU=4), claim(1, VCPU=4, project="q")) == ["claimed", "claimed"]
    assert await outcomes(store, claim(2, VCPU=4, limits={})) == ["claimed"]


async def test_a_repeat_and_an_alternate_of_the_same_size_take_nothing_more(store: ResourceBook) -> None:
    assert await outcomes(store, claim(0, VCPU=4), claim(0, VCPU=4)) == ["claimed", "claimed"]
    option = ClaimOption(allocations={HOSTS[1]: {"VCPU": 4}})
    alternate = Claim(consumer=VMS[0], attempt=2, consumer_generation=1, release_first=True, options=(option,),
                      project_id="p", limits=FOUR)  # fmt: skip
    assert await outcomes(store, alternate) == ["claimed"]


async def test_an_alternate_that_is_requested_again_has_given_back_what_others_have_taken(
    store: ResourceBook,
) -> None:
    """The first asking finds no room and gives back; the second comes when there is room, and the quota is used up."""
    assert await outcomes(store, claim(0, VCPU=4), claim(9, 1, VCPU=98, project="q", limits={})) == [
        "claimed",
        "claimed",
    ]
    option = ClaimOption(allocations={HOSTS[1]: {"VCPU": 4}})
    alternate = Claim(consumer=VMS[0], attempt=2, consumer_generation=1, release_first=True, options=(option,),
                      project_id="p", limits=FOUR)  # fmt: skip
    assert await outcomes(store, alternate, claim(1, VCPU=4)) == ["full", "claimed"]
    await store.apply([Release(consumer=VMS[9])])
    assert await outcomes(store, alternate) == ["over_limit"]


async def test_processes_that_claim_at_once_on_hosts_of_their_own_do_not_pass_it(
    make: Books, store: ResourceBook
) -> None:
    """Nothing but the project is common to them: its lock alone keeps them apart."""
    stores = [store, make(), make(), make()]
    for other in stores[1:]:
        await other.open()

    async def work(number: int) -> list[str]:
        return [one for vm in range(10) for one in await outcomes(stores[number], claim(10 * number + vm, number))]

    ended = await asyncio.gather(*(work(number) for number in range(4)))
    assert Counter(one for part in ended for one in part) == {"claimed": 4, "over_limit": 36}

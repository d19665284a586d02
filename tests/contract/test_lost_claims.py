"""To whom a claim was lost, on both books: the consumers that last took what it lacked."""

from __future__ import annotations

import pytest

from bus.contracts.placement import (
    MAX_HOLDERS,
    MAX_LOST_NAMED,
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    Release,
)
from placement_worker.book import ResourceBook
from placement_worker.store import claims
from tests.contract.books import HOSTS, VMS, Books

HOST, OTHER = HOSTS[:2]


def wants(vm: int, *taken: dict[str, dict[str, int]], project: str = "p", **fields: object) -> Claim:
    options = tuple(ClaimOption(allocations=one) for one in taken)
    return Claim(consumer=VMS[vm], options=options, project_id=project, **fields)  # type: ignore[arg-type]


async def apply(store: ResourceBook, *claims: Claim, bus: str = "api") -> list[ClaimResult]:
    return [reply for reply in await store.apply(claims, bus=bus) if isinstance(reply, ClaimResult)]


async def lost_to(store: ResourceBook, claim: Claim, bus: str = "api") -> list[str]:
    (reply,) = await apply(store, claim, bus=bus)
    assert reply.outcome is ClaimOutcome.FULL
    return [one.consumer for one in reply.holders]


async def test_a_full_claim_names_who_took_it_and_for_which_project(store: ResourceBook) -> None:
    await apply(store, wants(0, {HOST: {"VCPU": 90}}, project="first"))
    (reply,) = await apply(store, wants(1, {HOST: {"VCPU": 20}}, project="second"))
    assert reply.outcome is ClaimOutcome.FULL
    assert [(one.consumer, one.project_id) for one in reply.holders] == [(VMS[0], "first")]


async def test_the_newest_come_first_and_there_are_few(store: ResourceBook) -> None:
    for vm in range(MAX_HOLDERS + 2):
        await apply(store, wants(vm, {HOST: {"VCPU": 20}}))
    newest = [VMS[vm] for vm in range(MAX_HOLDERS + 1, 1, -1)]
    assert await lost_to(store, wants(30, {HOST: {"VCPU": 1}})) == newest


async def test_only_holders_of_what_was_lacking_are_named(store: ResourceBook) -> None:
    """Neither those of the host's other classes, nor of other hosts, nor the claimant, nor those that are gone."""
    await apply(store, wants(0, {HOST: {"VCPU": 60}}))
    await apply(store, wants(1, {HOST: {"DISK_GB": 100}}), wants(2, {OTHER: {"VCPU": 100}}))
    await apply(store, wants(3, {HOST: {"VCPU": 40}}))
    await store.apply([Release(consumer=VMS[3])])
    assert await lost_to(store, wants(4, {HOST: {"VCPU": 50}})) == [VMS[0]]
    grown = wants(0, {HOST: {"VCPU": 101}}, attempt=2, consumer_generation=1)
    assert await lost_to(store, grown) == []


async def test_of_one_group_the_winner_is_named(store: ResourceBook) -> None:
    """Two claims that came together: nothing of the first was written when the second was decided."""
    for first, second in ((0, 1), (3, 2)):
        host = HOSTS[first]
        won, lost = await apply(store, wants(first, {host: {"VCPU": 80}}), wants(second, {host: {"VCPU": 80}}))
        assert (won.outcome, lost.outcome) == (ClaimOutcome.CLAIMED, ClaimOutcome.FULL)
        assert [one.consumer for one in lost.holders] == [VMS[first]]


async def of_gang(store: ResourceBook, *claims: Claim, bus: str = "api") -> list[tuple[str, list[str]]]:
    """The outcome of each member's claim, and whom it names."""
    (reply,) = await store.apply([ClaimAll(claims=claims)], bus=bus)
    assert isinstance(reply, ClaimAllResult)
    return [(one.outcome.value, [holder.consumer for holder in one.holders]) for one in reply.results]


async def test_the_member_of_a_gang_that_lost_names_who_took_it(store: ResourceBook) -> None:
    """The other members would have fitted: they lost nothing."""
    await apply(store, wants(0, {HOST: {"VCPU": 60}}), wants(1, {OTHER: {"VCPU": 60}}))
    members = [wants(2, {OTHER: {"VCPU": 40}}), wants(3, {HOST: {"VCPU": 50}}), wants(4, {HOST: {"VCPU": 30}})]
    assert await of_gang(store, *members) == [("incomplete", []), ("full", [VMS[0]]), ("incomplete", [])]


async def test_a_gang_and_claims_beside_it_name_the_winner_of_their_group(store: ResourceBook) -> None:
    gang = ClaimAll(claims=(wants(1, {OTHER: {"VCPU": 10}}), wants(2, {HOST: {"VCPU": 80}})))
    items = [wants(0, {HOST: {"VCPU": 80}}), gang, wants(3, {OTHER: {"VCPU": 5}}), wants(4, {HOST: {"VCPU": 90}})]
    _, lost, won, last = await store.apply(items)
    assert isinstance(lost, ClaimAllResult) and isinstance(won, ClaimResult) and isinstance(last, ClaimResult)
    named = [[holder.consumer for holder in one.holders] for one in (*lost.results, won, last)]
    assert named == [[], [VMS[0]], [], [VMS[0]]]


async def test_a_cell_learns_nothing_of_others_consumers(store: ResourceBook) -> None:
    await apply(store, wants(0, {HOST: {"VCPU": 100}}))
    assert await lost_to(store, wants(1, {HOST: {"VCPU": 1}}), bus="cell1") == []
    assert await of_gang(store, wants(1, {HOST: {"VCPU": 1}}), bus="cell1") == [("full", [])]


async def test_of_a_group_of_many_lost_claims_the_first_few_are_looked_up(store: ResourceBook) -> None:
    await apply(store, wants(0, {HOST: {"VCPU": 100}}))
    replies = await apply(store, *(wants(vm, {HOST: {"VCPU": 1}}) for vm in range(1, MAX_LOST_NAMED + 5)))
    assert [len(reply.holders) for reply in replies] == [1] * MAX_LOST_NAMED + [0] * 4
    members = [wants(vm, {HOST: {"VCPU": 1}}) for vm in range(1, MAX_LOST_NAMED + 5)]
    assert [len(named) for _, named in await of_gang(store, *members)] == [1] * MAX_LOST_NAMED + [0] * 4


@pytest.mark.parametrize("make", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_a_pool_that_many_share_has_no_newest_holder(
    store: ResourceBook, make: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    await apply(store, wants(0, {HOST: {"VCPU": 50}}), wants(1, {HOST: {"VCPU": 50}}))
    for most, found in ((2, 2), (1, 0)):
        monkeypatch.setattr(claims, "MAX_ALLOCATIONS", most)
        assert len(await lost_to(store, wants(2, {HOST: {"VCPU": 1}}))) == found

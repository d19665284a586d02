"""Claims on both stores: gangs, runs, limits, and to whom a claim was lost."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from msgspec.structs import replace

from bus.contracts.placement import (
    MAX_CONFLICTING_CONSUMERS,
    MAX_LOST_NAMED,
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    LocateRequest,
    Migration,
    Release,
    ReleaseResult,
)
from placement_worker import service as placement_service
from placement_worker.service import PlacementService
from placement_worker.store import claims
from tests.contract.books import HOSTS, VMS, Placements, at, build, claimed, used

# --- The claims of a gang, on both stores: all of them or none, whatever else is claimed at once.


def member(vm: int, at: int = 0, vcpu: int = 1, **fields: object) -> Claim:
    option = ClaimOption(allocations={HOSTS[at]: {"VCPU": vcpu}}, host=HOSTS[at])
    return Claim(consumer=VMS[vm], options=(option,), project_id="p", **fields)  # type: ignore[arg-type]


async def claim_all(store: PlacementService, *claims: Claim) -> list[ClaimResult]:
    (reply,) = await store.apply([ClaimAll(claims=claims)])
    assert isinstance(reply, ClaimAllResult)
    return list(reply.results)


async def outcomes(store: PlacementService, *claims: Claim) -> list[str]:
    return [result.outcome.value for result in await claim_all(store, *claims)]


async def holders(store: PlacementService, *vms: int) -> set[int]:
    """Which of these hold something."""
    (page,) = await store.reads.locate([LocateRequest(project_id="p", consumers=tuple(VMS[vm] for vm in vms))])
    return {vm for vm in vms if VMS[vm] in page.hosts}


async def test_processes_that_claim_for_gangs_at_once_leave_no_partial_one(
    make: Placements, store: PlacementService
) -> None:
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


# --- A claim belongs to a run: it is repeated and released by that name alone, and a query shows whose it is.


MINE, ANOTHER = "run-1", "run-2"
INSTANCE = build(0, 0).consumer


def release(by: str | None, attempt: int | None = 1) -> Release:
    return Release(consumer=INSTANCE, attempt=attempt, project_id="p", owner=by)


async def released(pooled: PlacementService, by: str | None, attempt: int | None = 1) -> str:
    (reply,) = await pooled.apply([release(by, attempt)])
    assert isinstance(reply, ReleaseResult)
    return reply.outcome


async def test_a_run_takes_over_what_a_run_that_it_names_has_claimed(pooled: PlacementService) -> None:
    """As after a restore, when the record of the other is lost; its Release may still be on its way."""
    await claimed(pooled, build(0, 0, owner=MINE))
    (wrong,) = await claimed(pooled, build(0, 0, owner=ANOTHER, transfers_from="run-3"))
    (later,) = await claimed(pooled, build(0, 0, owner=ANOTHER, transfers_from=MINE, attempt=2))
    assert [wrong.outcome, later.outcome] == ["consumer_conflict", "consumer_conflict"]
    (taken,) = await claimed(pooled, build(0, 0, owner=ANOTHER, transfers_from=MINE))
    assert (taken.outcome, taken.consumer_generation, await used(pooled)) == ("claimed", 1, at(0, 4))
    (held,) = await pooled.reads.allocations([INSTANCE])
    assert (held.claim_owner, held.attempt, held.allocations) == (ANOTHER, 1, at(0, 4))
    assert [await released(pooled, by) for by in (MINE, ANOTHER)] == ["consumer_conflict", "released"]


async def test_the_query_names_the_owner_the_attempt_and_the_place_and_ends_nothing(pooled: PlacementService) -> None:
    assert await pooled.reads.allocations([INSTANCE]) == []
    (claim,) = await claimed(pooled, build(0, 0, owner=MINE))
    assert claim.outcome == "claimed"
    (held,) = await pooled.reads.allocations([INSTANCE, build(1, 1).consumer])
    assert (held.consumer, held.project_id, held.claim_owner, held.attempt) == (INSTANCE, "p", MINE, 1)
    assert (held.consumer_generation, held.allocations, held.hosts) == (1, at(0, 4), (HOSTS[0],))
    await released(pooled, MINE)
    assert await pooled.reads.allocations([INSTANCE]) == []


async def test_the_query_shows_a_migration_and_another_client_as_no_build(pooled: PlacementService) -> None:
    """A client may request a build under the uuid of its move."""
    request = build(1, 1).consumer
    await claimed(pooled, build(0, 0, owner=MINE))
    move = Migration(uuid=request, source={HOSTS[0]: {"VCPU": 4}})
    (reply,) = await claimed(pooled, build(0, 1, attempt=2, consumer_generation=1, migration=move))
    await claimed(pooled, replace(build(2, 2, attempt=0), user_id="u"))
    assert reply.outcome == "claimed"
    held = {one.consumer: one for one in await pooled.reads.allocations([INSTANCE, request, build(2, 2).consumer])}
    assert [(held[uuid].attempt, held[uuid].claim_owner) for uuid in (INSTANCE, request)] == [(2, MINE), (0, "")]
    assert held[build(2, 2).consumer].attempt == 0


# --- To whom a claim was lost, on both stores: the consumers that last took what it lacked.


HOST, OTHER = HOSTS[:2]


def wants(vm: int, *taken: dict[str, dict[str, int]], project: str = "p", **fields: object) -> Claim:
    options = tuple(ClaimOption(allocations=one) for one in taken)
    return Claim(consumer=VMS[vm], options=options, project_id=project, **fields)  # type: ignore[arg-type]


async def apply(store: PlacementService, *claims: Claim, bus: str = "api") -> list[ClaimResult]:
    return [reply for reply in await store.apply(claims, bus=bus) if isinstance(reply, ClaimResult)]


async def lost_to(store: PlacementService, claim: Claim, bus: str = "api") -> list[str]:
    (reply,) = await apply(store, claim, bus=bus)
    assert reply.outcome is ClaimOutcome.NO_CAPACITY
    return [one.consumer for one in reply.conflicting_consumers]


async def test_a_full_claim_names_who_took_it_and_for_which_project(store: PlacementService) -> None:
    await apply(store, wants(0, {HOST: {"VCPU": 90}}, project="first"))
    (reply,) = await apply(store, wants(1, {HOST: {"VCPU": 20}}, project="second"))
    assert reply.outcome is ClaimOutcome.NO_CAPACITY
    assert [(one.consumer, one.project_id) for one in reply.conflicting_consumers] == [(VMS[0], "first")]


async def test_the_newest_come_first_and_there_are_few(store: PlacementService) -> None:
    for vm in range(MAX_CONFLICTING_CONSUMERS + 2):
        await apply(store, wants(vm, {HOST: {"VCPU": 20}}))
    newest = [VMS[vm] for vm in range(MAX_CONFLICTING_CONSUMERS + 1, 1, -1)]
    assert await lost_to(store, wants(30, {HOST: {"VCPU": 1}})) == newest


async def test_only_holders_of_what_was_lacking_are_named(store: PlacementService) -> None:
    """Neither those of the host's other classes, nor of other hosts, nor the claimant, nor those that are gone."""
    await apply(store, wants(0, {HOST: {"VCPU": 60}}))
    await apply(store, wants(1, {HOST: {"DISK_GB": 100}}), wants(2, {OTHER: {"VCPU": 100}}))
    await apply(store, wants(3, {HOST: {"VCPU": 40}}))
    await store.apply([Release(consumer=VMS[3])])
    assert await lost_to(store, wants(4, {HOST: {"VCPU": 50}})) == [VMS[0]]
    grown = wants(0, {HOST: {"VCPU": 101}}, attempt=2, consumer_generation=1)
    assert await lost_to(store, grown) == []


async def of_gang(store: PlacementService, *claims: Claim, bus: str = "api") -> list[tuple[str, list[str]]]:
    """The outcome of each member's claim, and whom it names."""
    (reply,) = await store.apply([ClaimAll(claims=claims)], bus=bus)
    assert isinstance(reply, ClaimAllResult)
    return [(one.outcome.value, [holder.consumer for holder in one.conflicting_consumers]) for one in reply.results]


async def test_a_cell_learns_nothing_of_others_consumers(store: PlacementService) -> None:
    await apply(store, wants(0, {HOST: {"VCPU": 100}}))
    assert await lost_to(store, wants(1, {HOST: {"VCPU": 1}}), bus="cell1") == []
    assert await of_gang(store, wants(1, {HOST: {"VCPU": 1}}), bus="cell1") == [("no_capacity", [])]


async def test_of_a_group_of_many_lost_claims_the_first_few_are_looked_up(store: PlacementService) -> None:
    await apply(store, wants(0, {HOST: {"VCPU": 100}}))
    replies = await apply(store, *(wants(vm, {HOST: {"VCPU": 1}}) for vm in range(1, MAX_LOST_NAMED + 5)))
    assert [len(reply.conflicting_consumers) for reply in replies] == [1] * MAX_LOST_NAMED + [0] * 4
    members = [wants(vm, {HOST: {"VCPU": 1}}) for vm in range(1, MAX_LOST_NAMED + 5)]
    assert [len(named) for _, named in await of_gang(store, *members)] == [1] * MAX_LOST_NAMED + [0] * 4


@pytest.mark.parametrize("make", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
async def test_a_pool_that_many_share_has_no_newest_holder(
    store: PlacementService, make: Placements, monkeypatch: pytest.MonkeyPatch
) -> None:
    await apply(store, wants(0, {HOST: {"VCPU": 50}}), wants(1, {HOST: {"VCPU": 50}}))
    for most, found in ((2, 2), (1, 0)):
        monkeypatch.setattr(claims, "MAX_ALLOCATIONS", most)
        assert len(await lost_to(store, wants(2, {HOST: {"VCPU": 1}}))) == found


# --- A project's limits in the claim, on both stores: never passed, however many claim at once.


FOUR = {"VCPU": 4}


def claim(vm: int, at: int = 0, *, limits: dict[str, int] = FOUR, project: str = "p", **amounts: int) -> Claim:
    option = ClaimOption(allocations={HOSTS[at]: amounts or {"VCPU": 1}})
    return Claim(consumer=VMS[vm], options=(option,), project_id=project, limits=limits)


async def each(store: PlacementService, *claims: Claim) -> list[str]:
    return [str(reply.outcome) for reply in await store.apply(claims)]


async def test_processes_that_claim_at_once_on_hosts_of_their_own_do_not_pass_it(
    make: Placements, store: PlacementService
) -> None:
    """Nothing but the project is common to them: its lock alone keeps them apart."""
    stores = [store, make(), make(), make()]
    for other in stores[1:]:
        await other.open()

    async def work(number: int) -> list[str]:
        return [one for vm in range(10) for one in await each(stores[number], claim(10 * number + vm, number))]

    ended = await asyncio.gather(*(work(number) for number in range(4)))
    assert Counter(one for part in ended for one in part) == {"claimed": 4, "over_quota": 36}


async def test_a_page_of_the_snapshot_has_no_more_bytes_than_a_message(
    store: PlacementService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_service, "_bytes_of", lambda _: 10)
    monkeypatch.setattr(placement_service, "MAX_PAGE_BYTES", 25)
    uuids: list[str] = []
    sizes: list[int] = []
    more = True
    while more:
        page = await store.snapshot(uuids[-1] if uuids else None, 100)
        uuids += [one.uuid for one in page.providers]
        sizes.append(len(page.providers))
        more = page.more
    assert uuids == sorted(HOSTS) and set(sizes[:-1]) == {2}

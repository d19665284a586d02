"""Claims for a control plane that writes its allocations by Placement's API, on both stores."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.placement import (
    MAX_MEMBERS,
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    GroupPolicy,
    Release,
    ServerGroup,
)
from placement_worker.domain.allocations import Remove, Replace
from placement_worker.domain.claim_ledger import ConsumerWrite
from placement_worker.domain.values import ABOVE_CELLS
from placement_worker.service import PlacementService
from tests.contract.books import HOSTS, VMS, Placements

GROUP = ServerGroup(uuid="e0000000-0000-4000-8000-000000000000", policy=GroupPolicy.ANTI_AFFINITY)
TOGETHER = replace(GROUP, policy=GroupPolicy.AFFINITY)


def asked(vm: str, *hosts: int, claim_owner: str = "r", **fields: object) -> Claim:
    options = tuple(ClaimOption(allocations={HOSTS[n]: {"VCPU": 1}}, host=HOSTS[n]) for n in hosts)
    return Claim(consumer=vm, options=options, project_id="p", owner=claim_owner, external=True, **fields)  # type: ignore[arg-type]


async def claimed(store: PlacementService, claim: Claim) -> ClaimResult:
    (reply,) = await store.apply([claim])
    assert isinstance(reply, ClaimResult)
    return reply


async def written(store: PlacementService, vm: str, host: int) -> None:
    """As a client of the REST API claims."""
    write = ConsumerWrite(vm, {HOSTS[host]: {"VCPU": 1}}, "p", "u", "INSTANCE", None)
    assert await store.write_allocations([Replace((write,))]) == [None]


async def test_clients_of_the_rest_api_write_it_as_their_own(store: PlacementService) -> None:
    await claimed(store, asked(VMS[0], 0))
    write = ConsumerWrite(VMS[0], {HOSTS[1]: {"VCPU": 1}}, "p", "u", "INSTANCE", 1)
    assert await store.write_allocations([Replace((write,))]) == [None]
    assert await store.write_allocations([Remove(VMS[0])]) == [None]
    assert (await claimed(store, asked(VMS[0], 2))).option == 0, "no ended attempt is left"
    (released,) = await store.apply([Release(consumer=VMS[0], owner="r")])
    assert str(released.outcome) == "released"
    assert (await claimed(store, asked(VMS[0], 3))).option == 0


@pytest.mark.parametrize("group", [GROUP, TOGETHER])
async def test_members_that_berth_never_claimed_count(store: PlacementService, group: ServerGroup) -> None:
    await written(store, VMS[0], 0)
    there, elsewhere = (0, 1) if group is GROUP else (1, 0)
    known = {"server_group": group, "group_members": (VMS[0], VMS[1], VMS[9])}
    refused = await claimed(store, asked(VMS[1], there, **known))
    assert (refused.outcome, refused.members) == (ClaimOutcome.POLICY_VIOLATED, {HOSTS[0]: 1})
    assert (await claimed(store, asked(VMS[1], elsewhere, **known))).outcome is ClaimOutcome.CLAIMED
    # It is a member from then on, also for a claim that does not name it.
    assert (await claimed(store, asked(VMS[2], there, server_group=group))).outcome is ClaimOutcome.POLICY_VIOLATED


async def test_where_a_member_is_another_may_be_wherever_the_others_are(store: PlacementService) -> None:
    """As Nova has it: after a forced move, or an evacuation, a group is on two hosts. Berth's own members wait."""
    await written(store, VMS[0], 0)
    await written(store, VMS[1], 1)
    known = {"server_group": TOGETHER, "group_members": (VMS[0], VMS[1])}
    apart = await claimed(store, asked(VMS[2], 2, **known))
    assert (apart.outcome, apart.members) == (ClaimOutcome.POLICY_VIOLATED, {HOSTS[0]: 1, HOSTS[1]: 1})
    assert (await claimed(store, asked(VMS[2], 1, **known))).outcome is ClaimOutcome.CLAIMED
    ours = replace(asked(VMS[3], 1, server_group=TOGETHER), external=False)
    assert (await claimed(store, ours)).outcome is ClaimOutcome.POLICY_VIOLATED


async def test_a_named_member_that_holds_nothing_is_none(store: PlacementService, make: Placements) -> None:
    known = {"server_group": GROUP, "group_members": (VMS[0], VMS[1])}
    assert (await claimed(store, asked(VMS[1], 0, **known))).outcome is ClaimOutcome.CLAIMED
    other = make()
    await other.open()
    assert (await claimed(other, asked(VMS[0], 1, **known))).outcome is ClaimOutcome.CLAIMED


async def test_more_than_a_hundred_are_claimed_together(store: PlacementService) -> None:
    uuids = [f"f0000000-0000-4000-8000-{n:012x}" for n in range(MAX_MEMBERS + 1)]
    gang = ClaimAll(claims=tuple(asked(uuid, n % len(HOSTS)) for n, uuid in enumerate(uuids)))
    (reply,) = await store.apply([gang])
    assert isinstance(reply, ClaimAllResult)
    assert {one.outcome for one in reply.results} == {ClaimOutcome.CLAIMED}


@pytest.mark.parametrize(
    ("foreign", "bus", "outcome"),
    [(True, ABOVE_CELLS, "policy_violated"), (False, ABOVE_CELLS, "claimed"), (True, "c1", "claimed")],
)
async def test_only_a_foreign_claim_above_the_cells_names_members(
    store: PlacementService, foreign: bool, bus: str, outcome: str
) -> None:
    """A cell could make any other project's instance a member of a group, and shut hosts to it."""
    await written(store, VMS[1], 0)
    naming = replace(asked(VMS[0], server_group=GROUP, group_members=(VMS[1],)), external=foreign)
    await store.apply([naming], bus=bus)
    after = await claimed(store, asked(VMS[2], 0, server_group=GROUP))
    assert after.outcome == outcome

"""Nova's changes of allocations in a move, through the REST API: group membership and quota stay right."""

from __future__ import annotations

from typing import Any

import pytest

from bus.clock import new_uuid
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimOutcome,
    ClaimResult,
    GroupPolicy,
    LocateRequest,
    ServerGroup,
)
from tests.integration.placement_rest.conftest import PROJECT, Placement

GROUP = ServerGroup(uuid="e0000000-0000-4000-8000-000000000000", policy=GroupPolicy.ANTI_AFFINITY)
LIMITS = {"INSTANCES": 2, "VCPU": 2}


async def claimed(placement: Placement, host: str, consumer: str) -> str:
    """How a claim of a member ends, as a scheduler makes it."""
    claim = Claim(
        consumer=consumer,
        options=(ClaimOption(allocations={host: {"VCPU": 1}}, host=host),),
        project_id=PROJECT,
        user_id=PROJECT,
        server_group=GROUP,
        limits=LIMITS,
    )
    (answer,) = await placement.store.apply([claim], bus="api")
    assert isinstance(answer, ClaimResult)
    return answer.outcome.value


async def members(placement: Placement) -> dict[str, int]:
    (page,) = await placement.store.reads.locate([LocateRequest(project_id=PROJECT, server_group=GROUP.uuid)])
    return dict(page.members)


async def generation_of(placement: Placement, consumer: str) -> int | None:
    found = (await placement.call("GET", f"/allocations/{consumer}", status=200)).json()
    generation: int | None = found.get("consumer_generation")
    return generation


async def holds(placement: Placement, consumer: str, host: str | None, kind: str) -> dict[str, Any]:
    """The part of a POST /allocations that makes a consumer hold one VCPU of a host, or nothing."""
    return {
        "allocations": {} if host is None else {host: {"resources": {"VCPU": 1}}},
        "project_id": PROJECT,
        "user_id": PROJECT,
        "consumer_generation": await generation_of(placement, consumer),
        "consumer_type": kind,
    }


async def swap(placement: Placement, instance: str, here: str | None, migration: str, there: str | None) -> None:
    """One POST /allocations for both."""
    body = {
        instance: await holds(placement, instance, here, "INSTANCE"),
        migration: await holds(placement, migration, there, "MIGRATION"),
    }
    await placement.call("POST", "/allocations", body, status=204)


@pytest.mark.parametrize("end", ["confirm", "revert"])
async def test_a_member_that_nova_moves_stays_one_and_counts_once(placement: Placement, end: str) -> None:
    source, destination, third = [await placement.host(VCPU=4) for _ in range(3)]
    instance, migration, other, late = (new_uuid(placement.rng) for _ in range(4))
    assert await claimed(placement, source, instance) == ClaimOutcome.CLAIMED
    # Nova's conductor moves what the instance holds to the migration, and its scheduler claims the destination.
    await swap(placement, instance, None, migration, source)
    await placement.claim(instance, destination, await generation_of(placement, instance), VCPU=1)
    assert (await members(placement)).get(destination) == 1, "the instance is a member where it goes to"
    assert await claimed(placement, destination, other) == ClaimOutcome.RULED_OUT
    assert await claimed(placement, third, other) == ClaimOutcome.CLAIMED, "the project holds one of two"
    if end == "confirm":
        await placement.call("DELETE", f"/allocations/{migration}", status=204)
    else:
        await swap(placement, instance, source, migration, None)
    stays, left = (destination, source) if end == "confirm" else (source, destination)
    assert await members(placement) == {stays: 1, third: 1}
    assert await claimed(placement, stays, late) == ClaimOutcome.RULED_OUT
    assert await claimed(placement, left, late) == ClaimOutcome.OVER_LIMIT
    assert await placement.findings() == []

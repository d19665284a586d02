"""Server groups and hints, from the request to the book, while two schedulers race."""

from __future__ import annotations

from collections import Counter

import pytest

from bus.clock import new_uuid
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.groups import GroupPolicy, ServerGroup
from scheduler_worker.config import SchedulerConfig
from tests.integration.scheduler.world import World

pytestmark = pytest.mark.postgres


def group(world: World, policy: GroupPolicy, **fields: int) -> ServerGroup:
    return ServerGroup(uuid=new_uuid(world.rng), policy=policy, **fields)


async def places(world: World, requests: list[BuildRequest]) -> list[str]:
    """Where each was sent, and in all of them an end: no request is lost."""
    await world.ask(*requests)
    ended = [await world.ended(r.instance_uuid, BuildState.SCHEDULED, BuildState.FAILED) for r in requests]
    return [event.host or event.code for event in ended]


async def test_members_that_keep_apart_fill_all_hosts_and_no_more(world: World) -> None:
    await world.scheduler("s1")
    await world.scheduler("s2")
    await world.add_hosts("c1", 4)
    await world.add_hosts("c2", 2)
    apart = group(world, GroupPolicy.ANTI_AFFINITY)
    found = await places(world, [world.request(server_group=apart) for _ in range(8)])
    counted = Counter(found)
    assert counted.pop("no_valid_host") == 2
    assert sorted(counted.values()) == [1] * 6, found
    # The one that fits nowhere is answered why, on the newest state of where the others are.
    failed = await places(world, [late := world.request(server_group=apart)])
    event = await world.ended(late.instance_uuid)
    assert failed == ["no_valid_host"]
    assert event.funnel[-1].step == "ServerGroupAntiAffinityFilter"
    assert event.funnel[-1].rejected == {"group.no_room": 6}
    assert "6 have as many of the server group as they may" in event.reason
    # Alternates go along with the rule, so that the cell's own claims keep it.
    assert all(build.server_group == apart for _, build in world.builds)
    assert len({build.selections[0].host_uuid for _, build in world.builds}) == 6


async def test_members_that_stay_together_share_a_host_though_all_are_first_at_once(world: World) -> None:
    await world.scheduler("s1")
    await world.scheduler("s2")
    await world.add_hosts("c1", 3)
    await world.add_hosts("c2", 3)
    together = group(world, GroupPolicy.AFFINITY)
    found = await places(world, [world.request(server_group=together) for _ in range(8)])
    assert len(set(found)) == 1
    assert found[0] != "no_valid_host"


async def test_wishes_are_met_as_far_as_they_can_be(world: World) -> None:
    # Without other weighers; one after another, since wishes are not held to by claims.
    weighers = tuple(
        f"scheduler_worker.weighers.{one}"
        for one in (
            "group_members_here.ServerGroupSoftAffinityWeigher",
            "group_members_elsewhere.ServerGroupSoftAntiAffinityWeigher",
        )
    )
    await world.scheduler(config=SchedulerConfig(enabled_weighers=weighers))
    await world.add_hosts("c1", 3, VCPU=2, MEMORY_MB=32768, DISK_GB=500)
    apart, together = group(world, GroupPolicy.SOFT_ANTI_AFFINITY), group(world, GroupPolicy.SOFT_AFFINITY)
    first = [(await places(world, [world.request(server_group=apart)]))[0] for _ in range(3)]
    assert sorted(first) == ["c1-0", "c1-1", "c1-2"]
    second = [(await places(world, [world.request(server_group=together)]))[0] for _ in range(2)]
    assert len(set(second)) == 2, "one place was left on each host: the second went elsewhere all the same"
    assert "no_valid_host" not in second


async def test_hints_name_hosts_by_who_is_there(world: World) -> None:
    await world.scheduler()
    await world.add_hosts("c1", 3)
    one, two = world.request(), world.request()
    here, there = await places(world, [one, two])
    assert await places(world, [world.request(same_host=(one.instance_uuid,))]) == [here]
    both = (one.instance_uuid, two.instance_uuid)
    (other,) = await places(world, [world.request(different_host=both)])
    assert other not in {here, there}
    nowhere = world.request(same_host=(new_uuid(world.rng),))
    assert await places(world, [nowhere]) == ["no_valid_host"]
    event = await world.ended(nowhere.instance_uuid)
    assert event.funnel[-1].rejected == {"hint.same_host": 3}
    # Another project's instance is none: a request learns nothing of it.
    assert await places(world, [world.request(project_id="other", same_host=(one.instance_uuid,))]) == ["no_valid_host"]


async def test_without_an_answer_where_the_others_are_it_is_tried_again(world: World) -> None:
    await world.scheduler(config=SchedulerConfig(claim_timeout_s=0.3))
    await world.add_hosts("c1", 1)
    await world.stop("p1")
    request = world.request(server_group=group(world, GroupPolicy.AFFINITY))
    await world.ask(request)
    await world.ended(request.instance_uuid, BuildState.ACCEPTED)
    await world.placement("p2")
    assert (await world.ended(request.instance_uuid, BuildState.SCHEDULED, BuildState.FAILED)).host == "c1-0"

"""A project's quota, from the request to the book, while two schedulers race."""

from __future__ import annotations

from collections import Counter

import pytest

from bus.contracts.build import BuildState
from scheduler_worker.config import SchedulerConfig
from tests.integration.scheduler.world import World

pytestmark = pytest.mark.postgres

CONFIG = SchedulerConfig(default_quota={"VCPU": 5}, quotas={"small": {"INSTANCES": 1}, "unbound": {}})


async def test_two_schedulers_together_never_give_a_project_more_than_its_quota(world: World) -> None:
    await world.scheduler("s1", CONFIG)
    await world.scheduler("s2", CONFIG)
    await world.add_hosts("c1", 4)
    await world.add_hosts("c2", 4)
    requests = [world.request() for _ in range(12)]
    requests += [world.request(project_id="small") for _ in range(2)]
    requests += [world.request(project_id="unbound") for _ in range(7)]
    await world.ask(*requests)
    ended = [await world.ended(r.instance_uuid, BuildState.SCHEDULED, BuildState.FAILED) for r in requests]
    counted = Counter((event.project_id, event.code) for event in ended)
    assert counted == {
        ("demo", ""): 5,
        ("demo", "quota.exceeded"): 7,
        ("small", ""): 1,
        ("small", "quota.exceeded"): 1,
        ("unbound", ""): 7,
    }
    refused = next(event for event in ended if event.code == "quota.exceeded" and event.project_id == "demo")
    assert refused.reason == "project demo, VCPU: 5 of 5 held, 1 more requested"
    assert sum(amounts["VCPU"] for amounts in (await world.used()).values()) == 13, "what was refused holds nothing"
    assert {tuple(build.limits.items()) for _, build in world.builds} == {(("VCPU", 5),), (("INSTANCES", 1),), ()}

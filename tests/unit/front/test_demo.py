"""The demonstration's undisturbed part."""

from __future__ import annotations

import math

from berth.client import Track
from berth.demo import Undisturbed, planned, undisturbed
from berth.load import LoadPlan


def track(flavor: str, published: float, ended: float | None, state: str = "active") -> Track:
    return Track(
        instance_uuid=flavor, flavor=flavor, intended_at=0.0, published_at=published, ended_at=ended, state=state
    )


def test_the_undisturbed_part_is_virtual_machines_up_to_the_accident() -> None:
    tracks = [
        track("m1.small", 10.0, 11.0),
        track("m1.small", 10.5, 12.0),
        track("m1.small", 10.5, 11.5, "failed"),
        track("bm.gold", 9.0, 11.0),
        track("m1.tiny", 10.5, 13.0),  # after the accident
        track("m1.tiny", 10.5, None, "building"),
    ]
    assert undisturbed(tracks, 12.5) == Undisturbed(2, 2.0, 1.0)
    assert undisturbed(tracks, math.inf) == Undisturbed(3, 3.0, 1.0)
    assert undisturbed(tracks, 10.0) == Undisturbed(0, 0.0, 0.0)


def test_how_many_builds_are_meant_to_fail_follows_from_the_plan_and_the_nodes() -> None:
    plan = LoadPlan(boots=40, mix={"bm.gold": 1.0})
    free = {"provision_state": "available", "maintenance": False, "resource_class": "baremetal-gold"}
    nodes = [free] * 30 + [{**free, "maintenance": True}, {**free, "provision_state": "active"}]
    assert "40 are of bm.gold, and there are 30 such nodes. So 10 of them" in planned(plan, 1, nodes)
    assert "So 0 of them" in planned(plan, 1, [free] * 40)

"""The demonstration's undisturbed part."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from berth.client import Track
from berth.load import LoadPlan
from berth.load.summary import Failure, sum_up
from lab.demo.run import Undisturbed, failed_as_planned, failures_in_words, planned, render_load, short, undisturbed


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
    assert short(plan, 1, nodes) == {"bm.gold": (40, 30)}
    assert "40 are of bm.gold, and there are 30 such nodes. So at least 10 of them" in planned(
        plan, short(plan, 1, nodes)
    )
    assert "So at least 0 of them" in planned(plan, short(plan, 1, [free] * 40))


@pytest.mark.parametrize(
    ("failed", "words"),
    [(10, "10 failed as planned"), (12, "12 failed, 10 of them as planned")],
)
def test_planned_failures_are_counted_as_planned(failed: int, words: str) -> None:
    """A reader stopped at "9 failed", before the explanation."""
    tracks = [track("bm.gold", 1.0, 2.0, "failed" if number < failed else "active") for number in range(40)]
    report = sum_up(tracks, started=1.0, now=2.0)
    console = Console(file=io.StringIO(), width=200)
    render_load(report, console, planned_failures=10)
    assert f"a second, {words}\n" in console.file.getvalue()  # type: ignore[attr-defined]
    assert failures_in_words(failed, 0) == f"{failed} failed"


def test_what_failed_as_planned_lacked_a_node_of_a_short_flavor() -> None:
    """A run had 8 failures where 7 were the difference: a node was being cleaned after a planned fault."""

    def failure(flavor: str, code: str) -> Failure:
        return Failure(instance_uuid="", flavor=flavor, state="failed", code=code, reason="", attempts=1)

    failures = [
        *[failure("bm.gold", "no_valid_host")] * 8,
        failure("bm.gold", "max_retries_exceeded"),
        failure("bm.gold", "delivery.exhausted"),
        failure("m1.tiny", "no_valid_host"),
    ]
    assert failed_as_planned(failures, {"bm.gold": (47, 40)}) == 9
    assert failed_as_planned(failures, {}) == 0

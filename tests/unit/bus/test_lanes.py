"""The lanes of projects: the function, the queues, and how a consumer takes from them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.consuming import lanes
from bus.consuming.lanes import ArrivedDelivery, ConsumerLane, ConsumerLanes
from bus.contracts.build import BuildRequest, DeleteRequest
from bus.contracts.catalogue import (
    BY_QUEUE,
    BY_TYPE,
    COMMANDS,
    LANES,
    MESSAGES,
    OF_PROJECT,
    lane_of,
    projects_key,
    routing_key,
)
from bus.contracts.moves import MoveKind, MoveRequest
from bus.topology import matches, plan

UUID = "00000000-0000-4000-8000-000000000001"
REQUESTS = BY_QUEUE["scheduler.requests"]


class Sent:
    """A delivery of a name and a number of bytes."""

    def __init__(self, name: str, size: int = 1, *, is_lost: bool = False) -> None:
        self.name = name
        self.body = b"x" * size
        self.is_lost = is_lost


class Regulated:
    """A subscription that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


def lanes_of(count: int) -> ConsumerLanes:
    return ConsumerLanes([ConsumerLane(str(number)) for number in range(count)])


def arrive(into: ConsumerLanes, lane: int, delivery: Sent) -> None:
    given: Any = delivery
    into.add(ArrivedDelivery(given, 0.0, 0.0, into.every[lane]))


def taken(of: ConsumerLanes, count: int) -> list[str]:
    return [of.take().delivery.name for _ in range(count)]  # type: ignore[attr-defined]


def test_a_client_in_any_language_computes_the_lane() -> None:
    """These values are part of the interface: each client has its own copy of the function."""
    assert LANES == 32
    assert {name: lane_of(name) for name in ("demo", "p", "bad", "a-b_C9")} == {
        "demo": 0,
        "p": 17,
        "bad": 27,
        "a-b_C9": 2,
    }


def test_a_projects_commands_carry_its_lane() -> None:
    commands = {
        "build.request.17.p": BuildRequest(instance_uuid=UUID, flavor="f", project_id="p"),
        "build.delete.17.p": DeleteRequest(instance_uuid=UUID, project_id="p"),
        "instance.move.17.p": MoveRequest(request_id=UUID, instance_uuid=UUID, project_id="p", kind=MoveKind.STOP),
    }
    assert {key: routing_key(message) for key, message in commands.items()} == {key: key for key in commands}
    assert {projects_key(BY_TYPE[type(message)].key, "p") for message in commands.values()} == set(commands)


@given(st.from_regex(r"[A-Za-z0-9_\-]{1,64}", fullmatch=True))
def test_each_key_of_a_project_leads_to_the_queue_of_its_lane_alone(project: str) -> None:
    for row in MESSAGES:
        if row.exchange == COMMANDS and row.key.endswith(OF_PROJECT):
            words = projects_key(row.key, project).split(".")
            takers = [
                queue.name
                for queue in REQUESTS.queues
                if any(matches(pattern.split("."), words) for _, pattern in queue.bindings)
            ]
            assert takers == [f"scheduler.requests.{lane_of(project)}"]


def test_a_lane_is_bounded_as_the_queue_was_and_the_queue_of_the_name_is_for_no_project() -> None:
    shared, *of_lanes = (plan(queue, queue.name, queue.bindings) for queue in REQUESTS.queues)
    assert len(of_lanes) == LANES
    assert {(one.max_bytes, one.max_length, one.drop_head) for one in of_lanes} == {
        (REQUESTS.max_bytes, REQUESTS.max_length, False)
    }
    assert [exchange for exchange, _ in shared.bindings if exchange == COMMANDS] == []


def test_a_quiet_lane_waits_for_one_delivery_of_each_other() -> None:
    """In one line its request stood behind all that a noisy neighbour had sent before."""
    waiting = lanes_of(4)
    for lane in (0, 1):
        for number in range(100):
            arrive(waiting, lane, Sent(f"{lane}.{number}"))
    assert taken(waiting, 5) == ["0.0", "1.0", "0.1", "1.1", "0.2"]
    arrive(waiting, 3, Sent("quiet"))
    assert "quiet" in taken(waiting, 3)
    assert len(waiting) == 193


@given(st.lists(st.integers(0, 3), max_size=60))
def test_all_are_taken_each_lane_in_its_order_and_none_twice_while_another_waits(arrivals: list[int]) -> None:
    waiting = lanes_of(4)
    for number, lane in enumerate(arrivals):
        arrive(waiting, lane, Sent(f"{lane}.{number}"))
    order = [tuple(map(int, name.split("."))) for name in taken(waiting, len(waiting))]
    for lane in range(4):
        assert [number for one, number in order if one == lane] == [
            number for number, one in enumerate(arrivals) if one == lane
        ]
    left = [arrivals.count(lane) for lane in range(4)]
    before = None
    for lane, _ in order:
        assert lane != before or sum(count > 0 for count in left) == 1
        left[lane] -= 1
        before = lane


def test_the_lost_deliveries_of_each_lane_are_dropped() -> None:
    waiting = lanes_of(2)
    arrive(waiting, 0, Sent("a", is_lost=True))
    arrive(waiting, 1, Sent("b", is_lost=True))
    arrive(waiting, 1, Sent("c"))
    assert [one.name for one in waiting.take_lost()] == ["a", "b"]  # type: ignore[attr-defined]
    assert (taken(waiting, 1), len(waiting), waiting.every[0].held) == (["c"], 0, 0)


def test_a_lane_with_many_bytes_in_hand_is_paused_until_half_of_them_are_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 of a megabyte were in a scheduler's memory."""
    monkeypatch.setattr(lanes, "MAX_LANE_BYTES", 100)
    lane, subscription = ConsumerLane("q"), Regulated()
    lane.subscription = subscription  # type: ignore[assignment]
    sent: list[Any] = [Sent("x", 40) for _ in range(4)]
    for one in sent:
        lane.hold(one)
    assert (subscription.calls, lane.held) == (["pause"], 160)
    lane.release(sent[0])
    lane.release(sent[1])
    assert subscription.calls == ["pause"]
    lane.release(sent[2])
    assert (subscription.calls, lane.held) == (["pause", "resume"], 40)

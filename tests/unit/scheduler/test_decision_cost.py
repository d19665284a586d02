"""The cost of a decision in function calls, which no other program on the machine can change."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from bus.clock import new_uuid
from bus.contracts.groups import GroupPolicy, ServerGroup
from scheduler_worker.domain.decision_round import DecisionRound
from scheduler_worker.domain.placement import PlacementRequest, PlacementState, initial_state
from scheduler_worker.domain.ranking import CellRuns
from scheduler_worker.domain.request_spec import Peers, RequestSpec
from tests.unit.scheduler.hosts import PLENTY, Hosts

HOSTS = 2_000  # so many that no cell's hosts are one chunk
# As it is, and a tenth more. Below full load a process's code has left the caches, and a call costs microseconds.
MOST_CALLS = 900
BATCH = 100
MOST_CALLS_OF_BATCH = 1_200  # for each request of a batch, whatever the size of its group


class Calls:
    """Counts calls of Python and C functions while it is the profiler."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _frame: FrameType, event: str, _argument: object) -> None:
        self.count += event in {"call", "c_call"}


def decide(hosts: Hosts, runs: CellRuns) -> None:
    """One request in a round of its own, as it comes at a low rate."""
    request = hosts.request()
    spec = hosts.selector.request_spec(request)
    assert isinstance(spec, RequestSpec)
    round_ = DecisionRound(hosts.selector, hosts.rng, subset=1, runs=runs)
    state = initial_state(PlacementRequest(request=request, spec=spec), hosts.selector)
    assert round_.decide(state).choice is not None


def test_one_request_alone_is_decided_within_so_many_calls() -> None:
    hosts, runs = Hosts([PLENTY] * HOSTS, cells=["c1", "c2", "c3", "c4"] * (HOSTS // 4)), CellRuns()
    for _ in range(len(hosts.table.cells) + 1):  # what is kept from decision to decision is there
        decide(hosts, runs)
    calls = Calls()
    sys.setprofile(calls)
    try:
        decide(hosts, runs)
    finally:
        sys.setprofile(None)
    assert calls.count <= MOST_CALLS, calls.count


def of_group(hosts: Hosts, members: int) -> list[PlacementState]:
    """A batch of members of one anti-affinity group that has so many others, on hosts that are as good as any."""
    group = ServerGroup(uuid=new_uuid(hosts.rng), policy=GroupPolicy.ANTI_AFFINITY)
    peers = Peers(server_group=group, members=dict.fromkeys(hosts.uuids[:members], 1))
    states: list[PlacementState] = []
    for _ in range(BATCH):
        request = hosts.request(server_group=group)
        spec = hosts.selector.request_spec(request)
        assert isinstance(spec, RequestSpec)
        spec = spec.with_peers(peers, request.instance_uuid)
        states.append(initial_state(PlacementRequest(request=request, spec=spec), hosts.selector))
    return states


@pytest.mark.parametrize("members", [0, 100, HOSTS - BATCH])
def test_a_member_of_a_large_group_is_decided_within_as_many_calls(members: int) -> None:
    hosts = Hosts([PLENTY] * HOSTS, cells=["c1", "c2", "c3", "c4"] * (HOSTS // 4))
    states = of_group(hosts, members)
    round_ = DecisionRound(hosts.selector, hosts.rng, subset=1, runs=CellRuns())
    calls = Calls()
    sys.setprofile(calls)
    try:
        decided = [round_.decide(state) for state in states]
    finally:
        sys.setprofile(None)
    chosen = {one.choice.selected.uuid for one in decided if one.choice is not None}
    assert len(chosen) == BATCH and not chosen & set(hosts.uuids[:members])
    assert calls.count <= MOST_CALLS_OF_BATCH * BATCH, calls.count / BATCH


def test_hosts_that_are_full_for_one_group_are_there_for_all_others() -> None:
    """In one round, and with one ranking: members of a large group, of another one, and requests without a group."""
    hosts = Hosts([PLENTY] * 6)
    by_group = [of_group(hosts, 4)[:2], of_group(hosts, 0)[:6]]
    round_ = DecisionRound(hosts.selector, hosts.rng, subset=1)
    first, second = ([round_.decide(state) for state in states] for states in by_group)
    assert {one.choice.selected.uuid for one in first if one.choice} == set(hosts.uuids[4:])
    assert {one.choice.selected.uuid for one in second if one.choice} == set(hosts.uuids)
    spec = hosts.spec()
    plain = [initial_state(PlacementRequest(request=hosts.request(), spec=spec), hosts.selector) for _ in range(40)]
    assert {one.choice.selected.uuid for one in map(round_.decide, plain) if one.choice} == set(hosts.uuids)
    assert len(round_.rankings) == 1

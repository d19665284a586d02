"""The cost of a decision in function calls, which no other program on the machine can change."""

from __future__ import annotations

import sys
from types import FrameType

from scheduler_worker.domain.cell_runs import CellRuns
from scheduler_worker.domain.decision_round import DecisionRound
from scheduler_worker.domain.placement import PlacementRequest, initial_state
from scheduler_worker.domain.request_spec import RequestSpec
from tests.unit.scheduler.hosts import PLENTY, Hosts

HOSTS = 2_000  # so many that no cell's hosts are one chunk
# As it is, and a tenth more. Below full load a process's code has left the caches, and a call costs microseconds.
MOST_CALLS = 900


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

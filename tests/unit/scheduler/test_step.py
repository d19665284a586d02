"""The pure step of a placement, runs of one cell, and choices that are held."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from msgspec.structs import replace

from bus.clock import new_uuid
from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import ClaimOutcome, ClaimResult
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.decision_round import DecisionRound, step
from scheduler_worker.domain.placement import (
    HostClaimed,
    PlacementRequest,
    PlacementState,
    PlacementStep,
    initial_state,
)
from scheduler_worker.domain.plugins import Verdict
from scheduler_worker.domain.ranking import CellRuns
from scheduler_worker.domain.selector import Holds
from scheduler_worker.domain.view import HostsView, Peers, RequestSpec
from tests.unit.scheduler.hosts import PLENTY, Hosts
from tests.unit.scheduler.test_placing import Cluster

# --- The pure step of a placement: the answer to its claim decides its next state and its commands.


CONFIG = SchedulerConfig(raced_retries=2)


class ClaimCase:
    """Three hosts, and a placement that has chosen one of them."""

    def __init__(self) -> None:
        self.hosts = Hosts([PLENTY] * 3, config=CONFIG)
        request = self.hosts.request()
        placement = PlacementRequest(request=request, spec=self.hosts.spec())
        self.round = DecisionRound(self.hosts.selector, self.hosts.rng, subset=1)
        self.state = self.round.choose(initial_state(placement, self.hosts.selector))
        assert self.state.choice is not None
        self.chosen = self.state.choice.selected.uuid

    def step(self, outcome: ClaimOutcome, *, state: PlacementState | None = None, **more: Any) -> PlacementStep:
        answer = ClaimResult(outcome=outcome, **more)
        return step(state or self.state, answer, self.hosts.selector, now=7.0)


def test_the_only_host_that_passes_is_claimed_without_weights() -> None:
    case = ClaimCase()
    assert case.state.choice is not None
    alone = replace(case.state, choice=replace(case.state.choice, alternates=(), passed=1, weights=()))
    result = case.step(ClaimOutcome.CLAIMED, state=alone, option=0).state.result
    assert isinstance(result, HostClaimed) and result.scores == ()


def test_like_requests_of_a_batch_are_filtered_once() -> None:
    hosts = Hosts([PLENTY] * 3, config=CONFIG)
    filtered: list[str] = []

    class Counting:
        name: ClassVar[str] = "Counting"

        def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
            filtered.append(spec.flavor)
            return Verdict(np.ones(len(view), dtype=np.bool_), {})

    hosts.selector.filters = (Counting(),)
    round_ = DecisionRound(hosts.selector, hosts.rng, subset=1)
    for flavor in ("m1.small", "m1.tiny") * 5:
        request = PlacementRequest(request=hosts.request(flavor), spec=hosts.spec(flavor))
        assert round_.choose(initial_state(request, hosts.selector)).choice is not None
    assert filtered == ["m1.small", "m1.tiny"]


PACKED = SchedulerConfig(multipliers={"ram": -1.0, "cpu": -1.0, "disk": -1.0})


def members_of(hosts: Hosts, count: int, at: Mapping[str, int], *, most: int = 1) -> list[PlacementState]:
    group = ServerGroup(uuid=new_uuid(hosts.rng), policy=GroupPolicy.ANTI_AFFINITY, max_per_host=most)
    requests = [hosts.request(server_group=group) for _ in range(count)]
    return [
        initial_state(
            PlacementRequest(
                request=one,
                spec=hosts.spec().with_peers(Peers(server_group=group, members=at), one.instance_uuid),
            ),
            hosts.selector,
        )
        for one in requests
    ]


@pytest.mark.parametrize("most", [1, 2])
def test_members_that_stay_apart_share_a_ranking_and_see_each_other(most: int) -> None:
    """Packed, all of them would choose the same host; and each claim but the first would be ruled out."""
    hosts = Hosts([PLENTY] * 4, config=PACKED)
    full = hosts.uuids[1]
    round_ = DecisionRound(hosts.selector, hosts.rng, subset=1)
    chosen = [round_.choose(state) for state in members_of(hosts, 3 * most + 1, {full: most}, most=most)]
    picked = Counter(one.choice.selected.uuid for one in chosen if one.choice is not None)
    assert picked == {uuid: most for uuid in hosts.uuids if uuid != full}
    assert chosen[-1].choice is None and len(round_.rankings) == 1
    assert {one.choice.passed for one in chosen if one.choice is not None} == {3}


# --- Equal hosts are chosen from one cell at a time, so that what a round sends to a cell is one large batch.


CELLS = ("c1", "c2", "c3", "c4")
FLAVORS = ("m1.tiny", "m1.small")


def equal_hosts(of_each: int, *, config: SchedulerConfig | None = None) -> Hosts:
    """So many in each cell, in no order of cells."""
    return Hosts([PLENTY] * (of_each * len(CELLS)), cells=CELLS * of_each, config=config)


def one_round(hosts: Hosts, runs: CellRuns | None, count: int, flavors: Sequence[str] = FLAVORS) -> list[str]:
    """The cells that one round chooses for requests of two flavors, which have a ranking each."""
    round_ = DecisionRound(hosts.selector, hosts.rng, subset=1, runs=runs)
    chosen = []
    for at in range(count):
        request = hosts.request(flavors[at % len(flavors)])
        spec = hosts.selector.request_spec(request)
        assert isinstance(spec, RequestSpec)
        after = round_.decide(initial_state(PlacementRequest(request=request, spec=spec), hosts.selector))
        assert after.choice is not None
        chosen.append(hosts.selector.cell_of(after.choice.selected.uuid) or "")
    return chosen


def test_a_round_stays_in_one_cell_and_the_next_ones_go_to_the_others_in_turn() -> None:
    hosts, runs = equal_hosts(100), CellRuns()
    rounds = [set(one_round(hosts, runs, 20)) for _ in range(8)]
    assert all(len(cells) == 1 for cells in rounds)
    turns = [cells.pop() for cells in rounds]
    assert sorted(turns[:4]) == sorted(CELLS) and turns[4:] == turns[:4]
    assert len(set(one_round(equal_hosts(100), None, 20))) == len(CELLS), "without runs they are spread by chance"


def test_the_run_is_kept_where_the_best_are_drawn_from_several() -> None:
    hosts, runs = equal_hosts(100), CellRuns()
    ranking = hosts.selector.rank(hosts.spec(), random.Random(2), runs)
    cells = set()
    for _ in range(20):
        choice = ranking.pick({}, subset=4, alternates=2)
        assert choice is not None
        ranking.consumed(choice.selected)
        cells.add(hosts.selector.cell_of(choice.selected.uuid))
    assert len(cells) == 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_where_the_order_is_that_of_the_replica_it_stays_so(shuffle: bool) -> None:
    hosts = equal_hosts(50, config=SchedulerConfig(shuffle_best_same_weighed_hosts=shuffle))
    assert len(set(one_round(hosts, CellRuns(), 12))) == (1 if shuffle else len(CELLS))


async def test_what_is_placed_together_is_claimed_in_one_cell() -> None:
    hosts = equal_hosts(100)
    cluster = Cluster(hosts, SchedulerConfig())
    for _ in range(2):
        await cluster.placer.place([cluster.asking(hosts.request()) for _ in range(20)])
    cells = [hosts.selector.cell_of(next(iter(claim.options[0].allocations))) for claim in cluster.claims]
    assert len(set(cells[:20])) == len(set(cells[20:])) == 1 and cells[0] != cells[-1]


# --- A choice for a move counts as used until the feed has its claim, and no longer.


EIGHT = {"VCPU": 8}


class Room:
    """Two hosts of 8 VCPU and the holds on them."""

    def __init__(self) -> None:
        self.hosts = Hosts([EIGHT, EIGHT])
        self.book = self.hosts.book
        self.holds = Holds(self.book)
        self._used = [0, 0]

    def hold(self, key: str, host: int, vcpus: int = 1, until: float = 5.0) -> None:
        self.holds.add(key, {self.hosts.uuids[host]: {"VCPU": vcpus}}, until)

    def claimed(self, host: int, vcpus: int) -> None:
        """A change of the feed: so much more is in use there."""
        self._used[host] += vcpus
        states = [
            replace(state, used={"VCPU": used} if used else {}, generation=state.generation + used)
            for state, used in zip(self.hosts.states, self._used, strict=True)
        ]
        self.book.load(states, self.book.sequence + 1)
        self.holds.settle()

    def free(self, host: int) -> int:
        row = self.book.row_of(self.hosts.uuids[host])
        assert row is not None
        return self.book.inventory_of(row)["VCPU"][2]


def test_a_hold_ends_at_its_time_and_all_end_when_they_are_released() -> None:
    room = Room()
    room.hold("a", 0, until=1.0)
    room.hold("b", 1, until=2.0)
    room.holds.expire(1.0)
    assert (room.free(0), room.free(1)) == (8, 7)
    room.hold("b", 0, until=3.0)
    assert (room.free(0), room.free(1)) == (7, 8), "one request is held once"
    room.holds.release()
    assert (room.free(0), room.free(1)) == (8, 8) and room.holds.next_until is None


def test_many_holds_of_one_time_end_together() -> None:
    room = Room()
    for number in range(8):
        room.hold(str(number), number % 2, until=1.0)
    room.holds.expire(1.0)
    assert (room.free(0), room.free(1), room.holds.next_until) == (8, 8, None)

"""Equal hosts are chosen from one cell at a time, so that what a round sends to a cell is one large batch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.decision_round import DecisionRound
from scheduler_worker.domain.placement import PlacementRequest, initial_state
from scheduler_worker.domain.ranking import LONGEST_RUN, CellRuns
from scheduler_worker.domain.request_spec import RequestSpec
from tests.unit.scheduler.hosts import PLENTY, Hosts
from tests.unit.scheduler.test_placing import Cluster

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


def test_a_large_round_takes_all_cells_alike() -> None:
    counted = Counter(one_round(equal_hosts(200), CellRuns(), 4 * LONGEST_RUN))
    assert counted == dict.fromkeys(CELLS, LONGEST_RUN)


def test_a_run_ends_where_another_cell_has_the_better_host() -> None:
    """Ten hosts a cell: by the eleventh choice of a cell those of the others are better, as each has more room."""
    hosts = equal_hosts(10)
    chosen = one_round(hosts, CellRuns(), 40, FLAVORS[:1])
    assert [len(set(chosen[at : at + 10])) for at in range(0, 40, 10)] == [1] * 4
    assert set(chosen) == set(CELLS)


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

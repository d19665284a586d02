"""The selector of hosts: its rankings by rows, its isolation of projects, flavors and images, and its costs."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.clock import new_uuid
from bus.contracts.cell import HostReport, HostStates, ServiceRemoved
from bus.contracts.placement import GroupPolicy, LocatePage, ServerGroup
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.filters.affinity import (
    DifferentHostFilter,
    SameHostFilter,
    ServerGroupAffinityFilter,
    ServerGroupAntiAffinityFilter,
)
from scheduler_worker.selection import ranking, weighing
from scheduler_worker.selection.choice import CellBatching, Choice, Spread
from scheduler_worker.selection.host_heap import HostHeap
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.plugin import Filter, Weighing, applies_to, filter_result_of
from scheduler_worker.selection.ranking import Ranking
from scheduler_worker.selection.request_spec import RequestSpec, has_related, related_of
from scheduler_worker.selection.weighing import clamp, multipliers, score
from tests.unit.scheduler_worker.hosts import PLENTY, Hosts, aggregate

# --- The selector of hosts: its ranking, its isolation of projects, flavors and images, and its costs.


# --- from a flavor to a choice: queries, pre-filters, rankings, alternates, explanations


def pick(hosts: Hosts, count: int = 1, subset: int = 1, **request: Any) -> list[Choice | None]:
    """As the claim loop picks for a batch of like requests: each is assumed before the next."""
    ranking: Ranking = hosts.selector.rank(hosts.spec(**request), hosts.rng)
    choices = []
    for number in range(count):
        choice = ranking.pick({}, subset=subset, alternates=2)
        if choice is not None:
            hosts.replica.assume(f"pick {number}", choice.selected.options[0].allocations)
            ranking.consumed(choice.selected)
        choices.append(choice)
    return choices


def services_of(hosts: Hosts, choice: Choice | None) -> list[str]:
    assert choice is not None
    chosen = (choice.selected, *choice.alternates)
    return [hosts.selector.selection(candidate).service for candidate in chosen]


def test_a_service_with_the_best_hosts_does_not_have_all_alternates() -> None:
    """Builds that had gone from a dead service left it emptier: all further ones had all their hosts there."""
    config = SchedulerConfig(enabled_weighers=("scheduler_worker.weighers.free_amounts.RAMWeigher",))
    hosts = Hosts([{**PLENTY, "MEMORY_MB": 90_000 if at < 100 else 30_000} for at in range(120)], config=config)
    hosts.give_up()
    parts = {"dead": range(100), "b": range(100, 110), "c": range(110, 120)}
    for sequence, (service, numbers) in enumerate(parts.items()):
        reported = tuple(HostReport(uuid=hosts.uuids[at], name=f"h{at}") for at in numbers)
        hosts.table.apply(HostStates(service=service, cell="c1", epoch=1, sequence=sequence, hosts=reported), 0.0)
    choices = pick(hosts, 40)
    assert all(sorted(services_of(hosts, choice)) == ["b", "c", "dead"] for choice in choices)
    named = Counter(hosts.name(one.row) for choice in choices if choice for one in choice.alternates)
    assert len(named) == 20 and set(named.values()) == {4}, "each in turn, so that not all fail over to the same few"


def test_a_batch_spreads_over_equal_hosts() -> None:
    """Also over those beyond the first chunk that is sorted: a host taken from falls behind one never drawn."""
    hosts = Hosts([PLENTY] * 300)
    taken = Counter(hosts.name(choice.selected.row) for choice in pick(hosts, 600) if choice)
    assert len(taken) == 300 and set(taken.values()) == {2}


def test_the_order_of_equal_hosts_is_by_chance_only_when_shuffled() -> None:
    def first(seed: int, *, shuffle: bool) -> str:
        config = SchedulerConfig(shuffle_best_same_weighed_hosts=shuffle)
        hosts = Hosts([PLENTY] * 300, config=config, seed=3)
        hosts.rng.seed(seed)
        (choice,) = pick(hosts)
        assert choice is not None
        return hosts.name(choice.selected.row)

    assert len({first(seed, shuffle=True) for seed in range(12)}) > 6
    assert len({first(seed, shuffle=False) for seed in range(3)}) == 1


@given(
    memory=st.lists(st.integers(0, 6), min_size=1, max_size=300),
    picks=st.integers(1, 40),
    excluded=st.sets(st.integers(0, 299), max_size=20),
)
def test_a_pick_is_the_best_that_fits(memory: list[int], picks: int, excluded: set[int]) -> None:
    """Against the plain way: the most free memory among those that fit and are not excluded (one weigher)."""
    config = SchedulerConfig(
        enabled_weighers=("scheduler_worker.weighers.free_amounts.RAMWeigher",),
        flavors={"f": Flavor(memory_mb=2)},
        enabled_filters=(),
    )
    cells = [f"c{at % 3}" for at in range(len(memory))]
    hosts = Hosts([{"MEMORY_MB": max(1, amount)} for amount in memory], config=config, cells=cells)
    free = {hosts.replica.row_of(uuid): max(1, amount) for uuid, amount in zip(hosts.uuids, memory, strict=True)}
    out = {row: "x" for at, row in enumerate(list(free)) if at in excluded}
    ranking = hosts.selector.rank(hosts.spec("f"), hosts.rng, CellBatching(64))
    for number in range(picks):
        best = max((amount for row, amount in free.items() if row not in out and amount >= 2), default=None)
        choice = ranking.pick(out, subset=1, alternates=2)
        if best is None:
            assert choice is None
            return
        assert choice is not None
        assert free[choice.selected.row] == best
        assert all(free[a.row] >= 2 and a.row not in out for a in choice.alternates)
        hosts.replica.assume(f"pick {number}", choice.selected.options[0].allocations)
        ranking.consumed(choice.selected)
        free[choice.selected.row] -= 2


def test_item_16_hosts_are_found_in_the_table_again_without_a_call_for_each() -> None:
    """One more of 40,000 hosts took the next decisions, or the next list of services, 8 to 17 ms, in one turn."""
    hosts = Hosts([PLENTY] * 500)
    selector, called = hosts.selector, Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        called[frame.f_code.co_name] += event == "call"

    assert selector.reported_in_placement().tolist() == list(range(500))
    hosts.announce(["c1"] * 500 + ["c2"], {}, sequence=2)
    hosts.replica.load(hosts.states[1:], 2)
    sys.setprofile(count)
    try:
        found = selector.reported_in_placement()
    finally:
        sys.setprofile(None)
    assert found.tolist() == list(range(1, 500))
    assert called.total() < 50, called


# --- Isolation by aggregates where several aggregates, properties or traits meet: a rule that knows one would err.


def passing(hosts: Hosts, **request: Any) -> list[str]:
    ranking = hosts.selector.rank(hosts.spec(**request), hosts.rng)
    return sorted(hosts.name(row) for row in ranking.view.rows.tolist())


# --- Filters and weighers about where others are, against Nova's rules.


OURS = (ServerGroupAntiAffinityFilter, ServerGroupAffinityFilter, DifferentHostFilter, SameHostFilter)


def test_hints() -> None:
    hosts = Hosts([PLENTY] * 3)
    here, there, nowhere = (new_uuid(hosts.rng) for _ in range(3))
    page = LocatePage(hosts={here: (hosts.uuids[0],), there: (hosts.uuids[2], "a foreign pool")})

    def passing(host_filter: Filter, rejected: dict[str, int], **asked: Any) -> list[bool]:
        request = hosts.request(**asked)
        assert has_related(request)
        spec = hosts.spec().with_related(related_of(request, page), "me")
        assert applies_to(host_filter, spec)
        result = host_filter.filter(hosts.view(), spec)
        assert result.rejected == rejected
        return [bool(passed) for passed in result.passed]

    different, same = DifferentHostFilter(), SameHostFilter()
    assert passing(different, {"hint.different_host": 2}, different_host=(here, there)) == [False, True, False]
    assert passing(different, {"hint.different_host": 0}, different_host=(nowhere,)) == [True, True, True]
    assert passing(same, {"hint.same_host": 2}, same_host=(here, nowhere)) == [True, False, False]
    assert passing(same, {"hint.same_host": 3}, same_host=(nowhere,)) == [False, False, False]
    apart = ServerGroup(uuid=new_uuid(hosts.rng), policy=GroupPolicy.ANTI_AFFINITY)
    page = LocatePage(members={hosts.uuids[1]: 1})
    assert passing(ServerGroupAntiAffinityFilter(), {"group.no_capacity": 1}, server_group=apart) == [True, False, True]


def test_a_request_without_a_group_is_not_looked_up_and_pays_for_no_filter() -> None:
    hosts = Hosts([PLENTY] * 2)
    assert not has_related(hosts.request())
    spec = hosts.spec()
    assert not any(applies_to(one(), spec) for one in OURS)
    steps = [step.step for step in hosts.selector.explain(spec, {}).funnel]
    assert not {one.name for one in OURS} & set(steps)


# --- Weights as Nova combines them.


@pytest.mark.parametrize("kept", [20_000, 1])
def test_a_choice_keeps_what_each_weigher_gave_its_host_and_the_runners_up(
    monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Why here, answered like why nowhere; as it was at this choice, the ones just before counted."""
    monkeypatch.setattr("scheduler_worker.selection.weighing.KEPT_HOSTS", kept)
    monkeypatch.setattr("scheduler_worker.selection.ranking.KEPT_HOSTS", kept)
    hosts = Hosts([PLENTY] * 3)
    hosts.replica.assume("one", {hosts.uuids[0]: {"VCPU": 4}})
    hosts.replica.assume("two", {hosts.uuids[1]: {"VCPU": 8}})
    ranking = hosts.selector.rank(hosts.spec(), hosts.rng)
    choice = ranking.pick({}, subset=1, alternates=2)
    assert choice is not None
    order = [choice.selected, *choice.alternates]
    assert [hosts.name(host.row) for host in order] == ["h2", "h0", "h1"]
    assert [weights["cpu"] for weights in choice.weights] == [1.0, 0.75, 0.5]
    assert {name for weights in choice.weights for name in weights} == {"ram", "cpu", "disk"}, "nothing of idle ones"
    assert [host.score for host in order] == pytest.approx([sum(weights.values()) for weights in choice.weights])
    hosts.replica.assume("three", {hosts.uuids[2]: {"VCPU": 12}})
    ranking.consumed(choice.selected)
    again = ranking.pick({}, subset=1, alternates=2)
    assert again is not None and hosts.name(again.alternates[1].row) == "h2"
    assert again.weights[2]["cpu"] == 0.25


# --- A ranking by rows: which host is chosen, which alternates are named with it, and what the weights are.


@pytest.mark.parametrize(
    ("before", "claims", "lost", "after"),
    [(0.0, 10, 10, 0.2), (0.5, 10, 0, 0.4), (0.5, 10, 5, 0.5), (0.5, 0, 0, 0.5), (1.0, 4, 4, 1.0)],
)
def test_the_share_of_lost_claims_is_smoothed(before: float, claims: int, lost: int, after: float) -> None:
    assert Spread(before).after(claims, lost).lost == pytest.approx(after)


@pytest.mark.parametrize(
    ("lost", "least", "most", "subset"),
    [(0.0, 1, 64, 1), (0.5, 1, 64, 32), (1.0, 1, 64, 64), (0.5, 40, 64, 40), (1.0, 5, 2, 5), (0.5, 1, 3, 2)],
)
def test_a_choice_is_drawn_from_more_hosts_the_more_claims_are_lost(
    lost: float, least: int, most: int, subset: int
) -> None:
    assert Spread(lost).subset(least, most) == subset


def test_runs_of_cells() -> None:
    batching = CellBatching(64)
    assert [batching.place(cell) for cell in (0, 1)] == [0, 0]
    for _ in range(63):
        batching.chose(0)
    assert batching.place(0) < batching.place(1) == 0, "the run goes on"
    batching.chose(0)
    assert batching.place(0) > batching.place(1), "it has its length"
    batching.chose(1)
    assert batching.place(1) < batching.place(2) < batching.place(0)
    batching.begin_round()
    assert batching.place(2) < batching.place(0) < batching.place(1), "the oldest run first"
    batching.chose(0)
    batching.chose(2)
    batching.begin_round()
    assert batching.place(1) < batching.place(0) < batching.place(2)


def test_cells_take_turns_where_runs_are_of_one_choice() -> None:
    batching, chosen = CellBatching(1), []
    for _ in range(6):
        chosen.append(min((0, 1, 2), key=batching.place))
        batching.chose(chosen[-1])
    assert chosen == [0, 1, 2, 0, 1, 2]


# --- choices


def by_memory(memory: Sequence[int], services: str = "", **more: Any) -> Hosts:
    """Hosts with so much memory, which alone is weighed; of the compute services (and with c: cells) named."""
    config = SchedulerConfig(
        enabled_weighers=("scheduler_worker.weighers.free_amounts.RAMWeigher",),
        shuffle_best_same_weighed_hosts=more.pop("shuffle", False),
    )
    hosts = Hosts([{**PLENTY, "MEMORY_MB": 10_000 * one} for one in memory], config=config, **more)
    if services:
        hosts.give_up()
        for sequence, (at, service) in enumerate(enumerate(services)):
            reported = (HostReport(uuid=hosts.uuids[at], name=f"h{at}"),)
            hosts.table.apply(
                HostStates(service=service, cell="c1", epoch=1, sequence=sequence + 1, hosts=reported), 0.0
            )
    return hosts


def names(hosts: Hosts, choice: Choice | None) -> str:
    return "" if choice is None else "".join(hosts.name(one.row)[1:] for one in (choice.selected, *choice.alternates))


@pytest.mark.parametrize(
    ("memory", "services", "given", "chosen"),
    [
        ([9, 8, 7, 6], "", {}, "012"),
        ([6, 7, 8, 9], "", {}, "321"),
        ([9, 8, 7, 6], "", {"excluded": [0, 2]}, "13"),
        ([9, 8, 7, 6], "", {"group": [0, 1]}, "23"),
        ([9, 8, 7, 6], "", {"full": [0, 1]}, "23"),
        ([9, 8, 7, 6], "", {"excluded": [0], "group": [1], "full": [2, 3]}, ""),
        ([9, 8, 7, 6], "", {"alternates": 0}, "0"),
        ([9, 8, 7, 6], "", {"alternates": 9}, "0123"),
        ([9, 8, 7, 6], "", {"cells": ["c1", "c2", "c1", "c1"]}, "023"),
        ([9, 8, 7, 6], "", {"cells": ["c1", "c2", "c2", "c2"]}, "0"),
        ([9, 8, 7, 6], "", {"cells": ["c1", "c2", "c1", "c2"], "full": [0, 1, 2, 3]}, ""),
        # Of other compute services first.
        ([9, 8, 7, 6], "aabc", {}, "023"),
        ([9, 8, 7, 6], "aabb", {}, "012"),
        ([9, 8, 7, 6, 5], "aabbc", {}, "024"),
        ([9, 8, 7, 6], "aaab", {"alternates": 3}, "0123"),
        ([9, 8, 7, 6], "aabc", {"excluded": [2]}, "013"),
        ([9, 8, 7, 6], "aabc", {"group": [2]}, "013"),
        ([9, 8, 7, 6], "aabc", {"full": [2]}, "013"),
        ([9, 8, 7, 6], "aabb", {"excluded": [2]}, "013"),
        ([9, 8, 7, 6], "aabc", {"alternates": 1}, "02"),
        ([9, 8, 7, 6], "aabc", {"alternates": 0}, "0"),
        ([9, 8, 7, 6], "abcd", {"alternates": 2}, "012"),
    ],
)
def test_the_best_host_and_its_alternates(memory: list[int], services: str, given: Any, chosen: str) -> None:
    """full: since they were ranked. group: hosts that each pick excludes."""
    hosts = by_memory(memory, services, **({"cells": given["cells"]} if "cells" in given else {}))
    found = hosts.selector.rank(hosts.spec(), hosts.rng)
    for at in given.get("full", ()):
        hosts.replica.assume(f"full {at}", {hosts.uuids[at]: {"VCPU": 16}})
    rows = [hosts.replica.row_of(uuid) for uuid in hosts.uuids]
    excluded, group = ([rows[at] for at in given.get(key, ())] for key in ("excluded", "group"))
    for _ in range(1 if services else 2):  # what was drawn is put back; services take turns
        choice = found.pick(excluded, subset=1, alternates=given.get("alternates", 2), full_hosts=group)
        assert names(hosts, choice) == chosen
        assert choice is None or (choice.passing_hosts, len(choice.weights)) == (len(memory), len(chosen))
    if "group" in given and "excluded" not in given:
        others = found.pick((), subset=1, alternates=0)
        assert names(hosts, others) == "0", "another group excludes others"


@pytest.mark.parametrize(("subset", "seen"), [(1, "0"), (2, "01"), (3, "012"), (9, "0123")])
def test_a_choice_is_drawn_from_so_many_of_the_best(subset: int, seen: str) -> None:
    hosts = by_memory([9, 8, 7, 6], cells=["c1", "c2", "c1", "c2"])
    found = hosts.selector.rank(hosts.spec(), random.Random(4))
    choices = [names(hosts, found.pick((), subset=subset, alternates=3)) for _ in range(60)]
    assert "".join(sorted({one[0] for one in choices})) == seen
    assert all(sorted(one) == (["0", "2"] if one[0] in "02" else ["1", "3"]) for one in choices)


def test_an_alternate_is_the_best_drawn_host_of_another_service() -> None:
    hosts = by_memory([9, 8, 7], "sst")
    found = hosts.selector.rank(hosts.spec(), hosts.rng)
    assert {names(hosts, found.pick((), subset=3, alternates=1)) for _ in range(60)} == {"02", "12", "20"}


@pytest.mark.parametrize(("off", "chosen"), [("c2", "02"), ("c1", "13")])
def test_hosts_without_a_service_are_never_chosen_whatever_filters_there_are(off: str, chosen: str) -> None:
    hosts = by_memory([9, 8, 7, 6], cells=["c1", "c2", "c1", "c2"], filters=[])
    hosts.table.delete_service(ServiceRemoved(service=f"compute-{off}", cell=off), 0.0)
    assert names(hosts, hosts.selector.rank(hosts.spec(), hosts.rng).pick((), subset=1, alternates=3)) == chosen


def test_cells_are_kept_apart_however_many_services_there_are() -> None:
    hosts = by_memory([9, 8, 7, 6], cells=["c1", "c2", "c1", "c2"])
    hosts.table.services.states += [hosts.table.services.states[1]] * 69_998
    hosts.table.service[[1, 3]] = 61_071  # in 16 bits its place would be that of the other cell's service
    assert names(hosts, hosts.selector.rank(hosts.spec(), hosts.rng).pick((), subset=1, alternates=3)) == "02"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_no_more_alternates_are_named_than_were_requested(count: int) -> None:
    hosts = by_memory([9, 8, 7, 6], "abcd")
    for _ in range(8):
        choice = hosts.selector.rank(hosts.spec(), hosts.rng).pick((), subset=4, alternates=count)
        assert choice is not None and len(choice.alternates) == count


def test_alternates_that_were_drawn_from_are_not_named_twice() -> None:
    hosts = by_memory([9, 8, 7, 6, 5], "aabbc")
    found = hosts.selector.rank(hosts.spec(), random.Random(4))
    for _ in range(30):
        choice = found.pick((), subset=4, alternates=3)
        assert choice is not None and len(choice.alternates) == 3
        chosen = names(hosts, choice)
        assert len(set(chosen)) == 4 and {"aabbc"[int(at)] for at in chosen} == {"a", "b", "c"}
        assert list(chosen[1:]) == sorted(chosen[1:]), "the best first"


@pytest.mark.parametrize("kept", [9, 1])
def test_a_host_that_was_chosen_is_weighed_again(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """kept: of how many hosts at most the weights are kept."""
    monkeypatch.setattr(weighing, "KEPT_HOSTS", kept)
    monkeypatch.setattr(ranking, "KEPT_HOSTS", kept)
    hosts = by_memory([9, 8, 5])
    found = hosts.selector.rank(hosts.spec("m1.large"), hosts.rng)
    order = []
    for at in range(6):
        choice = found.pick((), subset=1, alternates=1)
        assert choice is not None
        order.append(names(hosts, choice))
        free = hosts.view().free("MEMORY_MB")
        assert [one["ram"] for one in choice.weights] == pytest.approx([free[int(name)] / 90_000 for name in order[-1]])
        assert choice.selected.score == pytest.approx(choice.weights[0]["ram"])
        hosts.replica.assume(str(at), choice.selected.options[0].allocations)
        found.consumed(choice.selected)
    assert order == ["01", "01", "10", "01", "10", "01"]


@pytest.mark.parametrize(("memory", "weight"), [([5, 5], {"ram": 1.0}), ([5], {})])
def test_a_host_that_is_alone_is_not_weighed(memory: list[int], weight: dict[str, float]) -> None:
    hosts = by_memory(memory)
    choice = hosts.selector.rank(hosts.spec(), hosts.rng).pick((), subset=1, alternates=1)
    assert choice is not None and choice.selected.score == sum(weight.values())
    assert choice.weights == (weight,) * len(memory)


@pytest.mark.parametrize(("count", "chunk"), [(64, 16), (17, 16), (16, 16), (1, 16), (0, 16)])
def test_a_heap_gives_all_hosts_best_first(count: int, chunk: int) -> None:
    scores = np.array([float(at * 7 % 64) for at in range(64)])
    for rng in (None, random.Random(1)):
        heap = HostHeap(np.arange(count), scores, chunk, rng)
        drawn = []
        while not heap.is_empty:
            assert heap.best_score == -heap.top()[0]
            drawn.append(heap.draw())
        assert [entry[0] for entry in drawn if entry] == sorted(-scores[:count]) and heap.draw() is None
        assert heap.best_score == -np.inf


def test_equal_hosts_beyond_a_chunk_are_cut_elsewhere_by_each_scheduler() -> None:
    drawn = set()
    for seed in range(12):
        heap = HostHeap(np.arange(64), np.zeros(64), 16, random.Random(seed))
        drawn |= {entry[2] for _ in range(16) if (entry := heap.draw())}
    assert len(drawn) > 32


def test_a_result_counts_those_that_did_not_pass() -> None:
    assert filter_result_of(np.array([True, False, True]), "x").rejected == {"x": 1}


# --- weights


class Fixed:
    """Weighs hosts as it is told."""

    name: ClassVar[str] = "fixed"
    multiplier: ClassVar[float] = 1.0

    def __init__(self, raw: Sequence[float], low: float | None = None, high: float | None = None, sign: float = 1.0):
        self.raw, self.minimum, self.maximum, self.sign = np.array(raw), low, high, sign

    def weigh(self, view: HostsView, spec: RequestSpec) -> Any:
        return self.raw[: len(view)]

    def applies_to(self, spec: RequestSpec) -> bool:
        return spec.flavor != "m1.tiny"


@pytest.mark.parametrize(
    ("weigher", "multiplier", "weights"),
    [
        (Fixed([1, 2, 3]), 1.0, [0.0, 0.5, 1.0]),
        (Fixed([1, 2, 3]), 4.0, [0.0, 2.0, 4.0]),
        (Fixed([1, 2, 3], sign=-1.0), 2.0, [0.0, -1.0, -2.0]),
        (Fixed([1, 2, 3], low=2), 1.0, [0.0, 0.0, 1.0]),
        (Fixed([1, 2, 3], low=0), 3.0, [1.0, 2.0, 3.0]),
        (Fixed([1, 2, 3], high=2), 1.0, [0.0, 1.0, 1.0]),
        (Fixed([1, 2, 3], low=0, high=6), 6.0, [1.0, 2.0, 3.0]),
        (Fixed([2, 2, 2]), 1.0, [0.0, 0.0, 0.0]),
    ],
)
def test_weights_are_clamped_scaled_and_multiplied(weigher: Fixed, multiplier: float, weights: list[float]) -> None:
    hosts = Hosts([PLENTY] * 3)
    total, scales = score(hosts.view(), hosts.spec(), [Weighing(weigher, multiplier)])
    assert total.tolist() == weights and len(scales) == (0 if len({*weigher.raw}) == 1 else 1)
    assert clamp(weigher, np.array([0.0, 9.0])).tolist() == [weigher.minimum or 0.0, weigher.maximum or 9.0]
    assert score(hosts.view(), hosts.spec("m1.tiny"), [Weighing(weigher, 1.0)])[1] == [], "it does not apply"
    alone = score(Hosts([PLENTY]).view(), hosts.spec(), [Weighing(weigher, 1.0)])
    assert (alone[0].tolist(), alone[1]) == ([0.0], [])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [2.0, 2.0, 2.0]),
        ({"a": ("5", [0, 1])}, [5.0, 5.0, 2.0]),
        ({"a": ("5", [0, 1]), "b": ("3", [1])}, [5.0, 3.0, 2.0]),
        ({"a": ("3", [1]), "b": ("5", [0, 1])}, [5.0, 3.0, 2.0]),
        ({"a": ("x", [0]), "b": ("3", [0, 1])}, [2.0, 3.0, 2.0]),
        ({"a": ("nan", [0]), "b": ("3", [0, 1])}, [2.0, 3.0, 2.0]),
    ],
)
def test_an_aggregate_sets_a_multiplier(values: Mapping[str, tuple[str, list[int]]], expected: list[float]) -> None:
    every = {name: aggregate(name, fixed_weight_multiplier=value) for name, (value, _) in values.items()}
    config = SchedulerConfig(aggregates=tuple(every.values()))
    members = {every[name].uuid: at for name, (_, at) in values.items()}
    view = Hosts([PLENTY] * 3, config=config, members=members).view()
    for sign in (1.0, -1.0):
        found = multipliers(view, Weighing(Fixed([], sign=sign), 2.0))
        assert (np.zeros(3) + found).tolist() == [sign * one for one in expected]

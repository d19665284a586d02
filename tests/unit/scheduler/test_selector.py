"""The selector of hosts: its ranking, its isolation of projects, flavors and images, and its costs."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.clock import new_uuid
from bus.contracts.cell import ComputeHosts, HostReport
from bus.contracts.placement import LocatePage
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.domain.plugins import Filter, applies_to
from scheduler_worker.domain.ranking import CellRuns, Choice, Ranking
from scheduler_worker.domain.view import has_peers, peers_of
from scheduler_worker.filters.group import ServerGroupAffinityFilter, ServerGroupAntiAffinityFilter
from scheduler_worker.filters.hinted_hosts import DifferentHostFilter, SameHostFilter
from tests.unit.scheduler.hosts import PLENTY, Hosts

# --- from a flavor to a choice: queries, pre-filters, rankings, alternates, explanations


def pick(hosts: Hosts, count: int = 1, subset: int = 1, **request: Any) -> list[Choice | None]:
    """As the claim loop picks for a batch of like requests: each is assumed before the next."""
    ranking: Ranking = hosts.selector.rank(hosts.spec(**request), hosts.rng)
    choices = []
    for number in range(count):
        choice = ranking.pick({}, subset=subset, alternates=2)
        if choice is not None:
            hosts.book.assume(f"pick {number}", choice.selected.options[0].allocations)
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
        announced = tuple(HostReport(uuid=hosts.uuids[at], name=f"h{at}") for at in numbers)
        hosts.table.apply(ComputeHosts(service=service, cell="c1", epoch=1, sequence=sequence, hosts=announced), 0.0)
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
    free = {hosts.book.row_of(uuid): max(1, amount) for uuid, amount in zip(hosts.uuids, memory, strict=True)}
    out = {row: "x" for at, row in enumerate(list(free)) if at in excluded}
    ranking = hosts.selector.rank(hosts.spec("f"), hosts.rng, CellRuns())
    for number in range(picks):
        best = max((amount for row, amount in free.items() if row not in out and amount >= 2), default=None)
        choice = ranking.pick(out, subset=1, alternates=2)
        if best is None:
            assert choice is None
            return
        assert choice is not None
        assert free[choice.selected.row] == best
        assert all(free[a.row] >= 2 and a.row not in out for a in choice.alternates)
        hosts.book.assume(f"pick {number}", choice.selected.options[0].allocations)
        ranking.consumed(choice.selected)
        free[choice.selected.row] -= 2


def test_item_16_hosts_are_found_in_the_table_again_without_a_call_for_each() -> None:
    """One more of 40,000 hosts took the next decisions, or the next list of services, 8 to 17 ms, in one turn."""
    hosts = Hosts([PLENTY] * 500)
    selector, called = hosts.selector, Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        called[frame.f_code.co_name] += event == "call"

    assert selector.announced_in_book().tolist() == list(range(500))
    hosts.announce(["c1"] * 500 + ["c2"], {}, sequence=2)
    hosts.book.load(hosts.states[1:], 2)
    sys.setprofile(count)
    try:
        found = selector.announced_in_book()
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

    def passing(host_filter: Filter, **hints: tuple[str, ...]) -> list[bool]:
        request = hosts.request(**hints)
        assert has_peers(request)
        spec = hosts.spec().with_peers(peers_of(request, page), "me")
        assert applies_to(host_filter, spec)
        return [bool(passed) for passed in host_filter.filter(hosts.view(), spec).passed]

    assert passing(DifferentHostFilter(), different_host=(here, there)) == [False, True, False]
    assert passing(DifferentHostFilter(), different_host=(nowhere,)) == [True, True, True]
    assert passing(SameHostFilter(), same_host=(here, nowhere)) == [True, False, False]
    assert passing(SameHostFilter(), same_host=(nowhere,)) == [False, False, False]


def test_a_request_without_a_group_is_not_looked_up_and_pays_for_no_filter() -> None:
    hosts = Hosts([PLENTY] * 2)
    assert not has_peers(hosts.request())
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
    monkeypatch.setattr("scheduler_worker.domain.plugins.KEPT_HOSTS", kept)
    monkeypatch.setattr("scheduler_worker.domain.ranking.KEPT_HOSTS", kept)
    hosts = Hosts([PLENTY] * 3)
    hosts.book.assume("one", {hosts.uuids[0]: {"VCPU": 4}})
    hosts.book.assume("two", {hosts.uuids[1]: {"VCPU": 8}})
    ranking = hosts.selector.rank(hosts.spec(), hosts.rng)
    choice = ranking.pick({}, subset=1, alternates=2)
    assert choice is not None
    order = [choice.selected, *choice.alternates]
    assert [hosts.name(host.row) for host in order] == ["h2", "h0", "h1"]
    assert [weights["cpu"] for weights in choice.weights] == [1.0, 0.75, 0.5]
    assert {name for weights in choice.weights for name in weights} == {"ram", "cpu", "disk"}, "nothing of idle ones"
    assert [host.score for host in order] == pytest.approx([sum(weights.values()) for weights in choice.weights])
    hosts.book.assume("three", {hosts.uuids[2]: {"VCPU": 12}})
    ranking.consumed(choice.selected)
    again = ranking.pick({}, subset=1, alternates=2)
    assert again is not None and hosts.name(again.alternates[1].row) == "h2"
    assert again.weights[2]["cpu"] == 0.25

"""The candidate search against Placement's rules tried out one by one, and the promises of its own."""

from __future__ import annotations

import random
import sys
from collections import Counter
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from bus.contracts.feed import Change
from bus.contracts.placement import ProviderState
from placement_worker.replica.candidates import MAX_CELLS, candidates
from placement_worker.replica.compiled import MAX_SLOTS
from placement_worker.replica.replica import SWEEP_FROM, Replica
from placement_worker.replica.request import CandidatesRequest, Group, QueryTooWide
from placement_worker.replica.tree_solver import TimeBudget, TooLong, TreeProblem, TreeSolver, can_match
from placement_worker.rest.api import copy_of
from tests.unit.replica.worlds import (
    all_candidates,
    changed,
    each_of,
    found,
    loaded,
    provider,
    random_request,
    random_world,
    removed,
    used,
    uuid,
)

# --- the candidate search against Placement's rules tried out one by one, and the promises of its own


def plain(**resources: int) -> CandidatesRequest:
    return CandidatesRequest(groups=(Group(resources=resources),))


def numbered(*resources: dict[str, int], **more: object) -> CandidatesRequest:
    groups = tuple(Group(suffix=f"_{number}", resources=requested) for number, requested in enumerate(resources))
    return CandidatesRequest(groups=groups, **{"group_policy": "none", **more})  # type: ignore[arg-type]


def devices(count: int, *, each: int = 8, host: int = 0) -> list[ProviderState]:
    """A host with so many like devices."""
    root = provider(host, inventories={"VCPU": 8})
    return [root, *(provider(host + n, root=host, parent=host, inventories={"VF": each}) for n in range(1, count + 1))]


# --- complete, and nothing else


@given(st.integers(0, 2**32))
def test_finds_all_that_the_rules_allow_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    states = random_world(rng)
    replica = loaded(states)
    for _ in range(3):
        request = random_request(rng, states)
        answer = candidates(replica, request)
        all_of_them = [found(candidate) for candidate in each_of(answer)]
        assert set(all_of_them) == all_candidates(states, request)
        assert len(set(all_of_them)) == len(all_of_them)
        assert answer.exhausted


@given(st.integers(0, 2**32))
def test_stays_right_while_the_replica_moves(seed: int) -> None:
    """Usage, traits, aggregates, providers that come and go: what is kept between searches must move along."""
    rng = random.Random(seed)
    states = {state.uuid: state for state in random_world(rng)}
    replica = loaded(list(states.values()))
    requests = [random_request(rng, list(states.values())) for _ in range(3)]
    requests = [request for request in requests if not any(group.in_tree for group in request.groups)]
    for _ in range(6):
        one = rng.choice(sorted(states))
        if rng.random() < 0.2 and not any(state.parent_uuid == one for state in states.values()) and len(states) > 1:
            replica.apply([removed(replica.sequence + 1, int(one[-12:]), states[one].generation + 1)])
            del states[one]
        else:
            other = rng.choice(random_world(rng))
            states[one] = structs.replace(
                states[one],
                generation=states[one].generation + 1,
                traits=other.traits,
                aggregates=other.aggregates,
                inventories=other.inventories,
                used=other.used,
            )
            replica.apply([changed(replica.sequence + 1, states[one])])
        for request in requests:
            answer = {found(candidate) for candidate in each_of(candidates(replica, request))}
            assert answer == all_candidates(states.values(), request)


def test_tables_follow_when_distinct_values_are_numbered_anew() -> None:
    states = [provider(number, inventories={"VCPU": 8}, traits=("CUSTOM_A",), aggregates=("a",)) for number in range(3)]
    replica = loaded(states)
    request = CandidatesRequest(
        groups=(Group(suffix="1", resources={"VCPU": 1}, required=(("CUSTOM_B",),), member_of=(("b",),)),)
    )
    epoch = replica.epoch
    for turn in range(SWEEP_FROM):
        state = structs.replace(states[0], generation=2 + turn, traits=(f"CUSTOM_{turn}",), aggregates=(f"x{turn}",))
        replica.apply([changed(replica.sequence + 1, state)])
        assert turn % 500 or not len(candidates(replica, request))
    assert replica.epoch > epoch
    found = structs.replace(states[1], generation=2, traits=("CUSTOM_B",), aggregates=("b",))
    replica.apply([changed(replica.sequence + 1, found)])
    assert candidates(replica, request).columns() == [[uuid(1)]]


def test_trees_of_like_members_hung_differently_are_not_alike() -> None:
    """A device under its NUMA cell, and the same device beside it."""
    states = []
    for host, above in ((0, 1), (10, 10)):
        states += [
            provider(host),
            provider(host + 1, root=host, parent=host, inventories={"VCPU": 8}),
            provider(host + 2, root=host, parent=above, inventories={"VF": 8}),
        ]
    for first in (states, list(reversed(states))):
        request = numbered({"VCPU": 1}, {"VF": 1}, same_subtree=(("_0", "_1"),))
        assert candidates(loaded(first), request).columns() == [[uuid(1)], [uuid(2)]]


def test_like_members_with_unlike_children_are_not_alike() -> None:
    """The group that does not care must leave the cell with the device to those that do."""
    states = [
        provider(0),
        provider(1, root=0, parent=0, inventories={"VCPU": 8}),
        provider(2, root=0, parent=0, inventories={"VCPU": 8}),
        provider(3, root=0, parent=1, inventories={"VF": 8}),
    ]
    for with_device, other in ((1, 2), (2, 1)):
        states[3] = structs.replace(states[3], parent_uuid=uuid(with_device))
        request = numbered({"VCPU": 1}, {"VCPU": 1}, {"VF": 1}, group_policy="isolate", same_subtree=(("_1", "_2"),))
        assert candidates(loaded(states), request).columns() == [[uuid(other)], [uuid(with_device)], [uuid(3)]]


# --- limits, order, chance


def test_a_limit_hides_no_root() -> None:
    states = [state for host in range(0, 200, 10) for state in devices(4, host=host)]
    request = numbered({"VF": 1}, {"VF": 1}, group_policy="isolate")
    replica = loaded(states)
    for limit in (1, 20, 30, 100, 1000):
        answer = candidates(replica, request, limit=limit)
        roots = Counter(replica.root_of(int(row)) for row in answer.rows[:, 0])
        assert len(answer) == min(limit, 20 * 12)
        assert len(roots) == min(limit, 20)
        assert max(roots.values()) - min(roots.values()) <= 1
        assert answer.exhausted is (limit >= 240)


def test_the_order_is_stable_and_a_longer_answer_begins_with_the_shorter() -> None:
    states = [state for host in range(0, 50, 10) for state in devices(3, host=host)]
    replica = loaded(states)
    request = numbered({"VF": 1}, {"VF": 2})
    everything = candidates(replica, request).rows.tolist()
    for limit in range(len(everything) + 2):
        assert candidates(replica, request, limit=limit).rows.tolist() == everything[:limit]


def test_those_with_most_room_come_first() -> None:
    states = devices(3)
    states[2] = structs.replace(states[2], used={"VF": 1})
    states[1] = structs.replace(states[1], used={"VF": 2})
    answer = candidates(loaded(states), numbered({"VF": 1}))
    assert answer.columns() == [[uuid(3), uuid(2), uuid(1)]]


def test_a_sample_is_drawn_from_all_candidates() -> None:
    replica = loaded([provider(number, inventories={"VCPU": 8}) for number in range(100)])
    seen: Counter[int] = Counter()
    for seed in range(200):
        answer = candidates(replica, plain(VCPU=1), limit=10, rng=random.Random(seed))
        assert len(set(answer.rows[:, 0].tolist())) == 10
        assert not answer.exhausted
        seen.update(answer.rows[:, 0].tolist())
    assert len(seen) == 100
    again = candidates(replica, plain(VCPU=1), limit=10, rng=random.Random(199))
    assert again.rows.tolist() == answer.rows.tolist()
    assert candidates(replica, plain(VCPU=1), rng=random.Random(1)).exhausted


# --- no explosion


@pytest.mark.parametrize(("have", "ask", "some"), [(8, 8, True), (7, 8, False), (40, 40, True), (39, 40, False)])
def test_like_devices_and_like_groups_do_not_explode(have: int, ask: int, some: bool) -> None:
    request = numbered(*[{"VF": 1}] * ask, group_policy="isolate")
    answer = candidates(loaded(devices(have)), request, limit=1000, budget=200)
    assert len(answer) == (1000 if some else 0)
    assert answer.exhausted is not some


@pytest.mark.parametrize(("each", "some"), [(3, True), (2, False)])
def test_what_devices_have_left_is_counted_without_trying_all(each: int, some: bool) -> None:
    """24 units asked by 12 groups of 2, on 12 devices of 3 (each takes one) or of 2, of which one is used."""
    states = devices(12, each=each)
    states[5] = structs.replace(states[5], used={"VF": each - 1})
    requested = [{"VF": 2}] * (11 if some else 12)
    answer = candidates(loaded(states), numbered(*requested), limit=10, budget=500)
    assert bool(len(answer)) is some
    assert answer.exhausted is not some


def test_a_budget_that_ends_the_search_is_admitted_and_hides_no_other_root() -> None:
    names = [f"CUSTOM_{number}" for number in range(6)]
    hard = [
        provider(0),
        *(provider(n + 1, root=0, parent=0, inventories={"VF": 6}, traits=(name,)) for n, name in enumerate(names)),
    ]
    easy = [
        structs.replace(state, traits=tuple(names)) if state.inventories.get("VF") else state
        for state in devices(13, host=100)
    ]
    # Thirteen groups of 3, each for all but one of the traits: on six devices of 6 they fit nowhere, in many ways.
    groups = tuple(
        Group(
            suffix=f"_{n}", resources={"VF": 3}, required=(tuple(name for name in names if name != f"CUSTOM_{n % 6}"),)
        )
        for n in range(13)
    )
    request = CandidatesRequest(groups=groups, group_policy="none")
    cut = candidates(loaded(hard), request, budget=100)
    assert (len(cut), cut.exhausted) == (0, False)
    whole = candidates(loaded(hard), request)
    assert (len(whole), whole.exhausted) == (0, True)
    replica = loaded([*hard, *easy])
    both = candidates(replica, request, limit=5, budget=100)
    assert len(both) == 5
    assert {replica.root_of(int(row)) for row in both.rows[:, 0]} == {replica.row_of(uuid(100))}
    assert not both.exhausted


def test_a_request_of_absurd_width_is_refused() -> None:
    with pytest.raises(QueryTooWide):
        candidates(loaded(devices(1)), numbered(*[{"VF": 1}] * (MAX_SLOTS + 1)))


def test_more_candidates_than_the_budget_are_cut_after_each_root_has_one() -> None:
    states = [state for host in range(0, 100, 10) for state in devices(8, host=host)]
    request = numbered(*[{"VF": 1}] * 5)
    answer = candidates(loaded(states), request, budget=100)
    assert len(answer) == 110
    assert not answer.exhausted


def test_time_ends_too() -> None:
    """No dead end anywhere, and more candidates than a client can wait for."""
    times = iter(range(10**6))
    request = numbered(*[{"VF": 1}] * 20, group_policy="isolate")
    short = TimeBudget(lambda: float(next(times)), 2000, keeps_partial=True)
    answer = candidates(loaded(devices(30)), request, limit=10**6, budget=1, time_budget=short)
    assert 0 < len(answer) < MAX_CELLS // 20
    assert not answer.exhausted


def calls_of_a_first_asking(hosts: int) -> int:
    """Functions called by a search for new amounts where no two hosts have the same inventories and traits."""
    states = [
        provider(
            number,
            inventories={"VCPU": 8 + number, "MEMORY_MB": 1000 + number},
            traits=("CUSTOM_A", f"CUSTOM_{number}"),
            aggregates=(uuid(number),),
        )
        for number in range(hosts)
    ]
    replica = loaded(states)
    requested = Group(resources={"VCPU": 1, "MEMORY_MB": 1}, required=(("CUSTOM_A",),), forbidden=("CUSTOM_B",))
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    for amount in (1, 2):
        request = CandidatesRequest(
            groups=(structs.replace(requested, resources={"VCPU": amount, "MEMORY_MB": amount}),)
        )
        calls = 0
        sys.setprofile(count)
        try:
            found = candidates(replica, request, limit=10)
        finally:
            sys.setprofile(None)
        assert len(found) == 10
    return calls


def test_amounts_never_requested_before_cost_no_call_per_inventory() -> None:
    """They cost a function call for each distinct inventory and set of traits: 5 to 8 ms at 10,000 hosts."""
    assert calls_of_a_first_asking(1000) <= calls_of_a_first_asking(20) + 10


# --- the rules, one by one, where they are easily got wrong


def test_before_trees_at_most_one_provider_of_a_tree_gives() -> None:
    replica = loaded(devices(1))
    request = plain(VCPU=1, VF=1)
    assert len(candidates(replica, request)) == 1
    assert len(candidates(replica, structs.replace(request, one_per_tree=True))) == 0
    flat = structs.replace(plain(VF=1), one_per_tree=True)
    assert candidates(replica, flat).touched().tolist() == [1]


def test_claims_in_flight_count() -> None:
    replica = loaded(devices(1, each=2))
    assert len(candidates(replica, numbered({"VF": 2}))) == 1
    replica.assume("k", {uuid(1): {"VF": 1}})
    assert len(candidates(replica, numbered({"VF": 2}))) == 0
    replica.apply([used(replica.sequence + 1, 0, 2, {"VCPU": 1})])
    replica.drop_assumed("k")
    assert len(candidates(replica, numbered({"VF": 2}))) == 1


def test_nothing_requested_and_an_empty_replica_find_nothing() -> None:
    assert len(candidates(Replica(), plain(VCPU=1))) == 0
    assert candidates(Replica(), plain(VCPU=1)).exhausted
    assert len(candidates(loaded(devices(1)), CandidatesRequest(groups=(Group(),)))) == 0
    assert len(candidates(loaded(devices(1)), CandidatesRequest(groups=()))) == 0


class CountedSolver(TreeSolver):
    """Fails when it tries too often."""

    tries = 0

    def _take(self, state: Any, place: int, member: int) -> Any:
        self.tries += 1
        assert self.tries < 100_000, "lost in dead ends"
        return super()._take(state, place, member)


def test_a_walk_looks_ahead() -> None:
    """Eight devices of 4; eight slots of 1, then eight of 3: greedy choices of the first eight lead nowhere."""
    problem = TreeProblem(
        eligible=[list(range(8))] * 16, kinds=[0] * 8, needs=[(1,)] * 8 + [(3,)] * 8, limits=[(4,)] * 8
    )
    solver = CountedSolver(problem)
    assert solver.find(50, 1000) == 50
    assert not solver.cut
    for assignment in solver.found:
        assert sorted(assignment[:8]) == sorted(assignment[8:]) == list(range(8))


# --- matching slots to members, against all ways to do so


@given(st.lists(st.integers(0, 2**6 - 1), max_size=6))
def test_as_if_all_ways_were_tried(choices: list[int]) -> None:
    ways = permutations(range(6), len(choices))
    some = any(all(mask >> bit & 1 for mask, bit in zip(choices, way, strict=True)) for way in ways)
    assert can_match(choices) is some


def test_a_long_chain_moves_up_by_one() -> None:
    """Every slot wants its own member or the next; the last has only the first."""
    count = 60
    chain = [1 << at | 1 << (at + 1) for at in range(count)]
    assert can_match([*chain, 1])
    assert not can_match([*chain, 1, 1])


# --- a copy of a replica keeps its answers while placement moves on; a search ends when its time budget is used up

INVENTORY = (8.0, 1, 8, 1, 8, 0, 1.0)


def state(number: int, parent: int | None = None, *, generation: int = 1, **amounts: int) -> ProviderState:
    root = number if parent is None else parent
    return ProviderState(
        uuid=uuid(number),
        name=f"p{number}",
        root_uuid=uuid(root),
        parent_uuid=None if parent is None else uuid(parent),
        generation=generation,
        spec_generation=generation,
        inventories=dict.fromkeys(amounts, INVENTORY),
        used=amounts,
        traits=(f"CUSTOM_{number % 3}",),
        aggregates=(uuid(900 + number % 2),),
    )


def replica() -> Replica:
    """Forty hosts with a device each; one class is rare."""
    made = Replica()
    states = [state(number, VCPU=number % 5) for number in range(40)]
    states += [state(100 + number, number, VGPU=number % 3) for number in range(40)]
    made.load([*states, state(200, CUSTOM_RARE=1)], 1)
    return made


REQUEST = CandidatesRequest(
    groups=(
        Group(resources={"VCPU": 4}, required=(("CUSTOM_0", "CUSTOM_1"),), member_of=((uuid(900),),)),
        Group(suffix="_D", resources={"VGPU": 6}),
    )
)


def answers(replica: Replica) -> list[object]:
    rows = [replica.row_of(uuid(number)) for number in (*range(40), *range(100, 140), 200)]
    inventories = [None if row is None else (replica.inventory_of(row), replica.traits_of(row)) for row in rows]
    return [
        [candidate.allocations for candidate in each_of(candidates(replica, REQUEST))],
        inventories,
        [replica.uuids_of(replica.members(replica.rows_of_roots())[0])],
        len(replica),
    ]


def test_a_copy_keeps_its_answers_while_the_replica_moves_on() -> None:
    made = replica()
    before = answers(made)
    assert before[0]
    copy = copy_of(made)
    changes = [Change(sequence=2, provider=uuid(0), generation=2, state=state(0, generation=2, VCPU=8))]
    changes.append(Change(sequence=3, provider=uuid(101), generation=2, removed=True))
    changes.append(Change(sequence=4, provider=uuid(1), generation=2, removed=True))
    new = [state(300 + number, 2, CUSTOM_NEW=1, VGPU=0) for number in range(1200)]  # the columns grow
    changes += [
        Change(sequence=5 + number, provider=each.uuid, generation=1, state=each) for number, each in enumerate(new)
    ]
    changes.append(Change(sequence=1205, provider=uuid(200), generation=2, used={"CUSTOM_RARE": 3}))
    made._sweep_at = 1
    assert made.apply(changes) is None
    assert answers(made) != before
    assert answers(copy) == before


def test_a_search_over_its_time_budget_returns_what_it_has_or_nothing() -> None:
    made = replica()
    times = iter(range(10**6))
    whole = len(candidates(made, REQUEST))
    short = TimeBudget(lambda: float(next(times)), 8, keeps_partial=True)
    found = candidates(made, REQUEST, time_budget=short)
    assert 0 < len(found) < whole
    assert not found.exhausted
    with pytest.raises(TooLong):
        candidates(made, REQUEST, time_budget=TimeBudget(lambda: float(next(times)), 8, keeps_partial=False))
    assert len(candidates(made, REQUEST)) == whole

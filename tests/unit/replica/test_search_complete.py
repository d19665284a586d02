"""Whether a search finds all that there is, and what it explains where it finds nothing."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from bus.contracts.placement import ProviderState
from placement_worker.replica import replica as replica_module
from placement_worker.replica.replica import Replica
from placement_worker.replica.request import Group, Query
from placement_worker.replica.search import options, search
from tests.unit.replica.worlds import Assignment, changed, inventory, provider, removed, used, uuid, ways

# --- the search against Placement's rules tried out one by one, while placement moves under it

CLASSES = ("VCPU", "MEMORY_MB", "VGPU")
TRAITS = ("T1", "T2", "T3", "T4")
AGGREGATES = ("a1", "a2", "a3")
TREE = 5
TREES = 3


class World:
    """A replica, and the same things written plainly."""

    def __init__(self) -> None:
        self.replica = Replica()
        self.states: dict[str, ProviderState] = {}
        self.claims: dict[str, dict[str, dict[str, int]]] = {}

    @property
    def assumed(self) -> dict[str, dict[str, int]]:
        sums: dict[str, dict[str, int]] = {}
        for claim in self.claims.values():
            for uuid_, share in claim.items():
                for name, amount in share.items():
                    sums.setdefault(uuid_, {})[name] = sums.get(uuid_, {}).get(name, 0) + amount
        return sums

    def put(self, state: ProviderState) -> None:
        assert self.replica.apply([changed(self.replica.sequence + 1, state)]) is None
        self.states[state.uuid] = state

    def step(self, rng: random.Random) -> None:
        """One random thing happens."""
        kind = rng.choice(("put", "put", "put", "use", "use", "remove", "assume", "fail", "land", "reload"))
        if kind == "put":
            self.put(self.random_state(rng))
        elif kind == "assume" and self.states:
            claim = {self.pick(rng): {rng.choice(CLASSES): rng.randint(1, 3)} for _ in range(rng.randint(1, 2))}
            key = f"k{rng.randint(0, 3)}"
            self.replica.assume(key, claim)
            self.claims[key] = claim
        elif kind == "fail" and self.claims:
            key = rng.choice(sorted(self.claims))
            self.replica.drop_assumed(key)
            del self.claims[key]
        elif kind == "land" and self.claims:
            self.land(rng.choice(sorted(self.claims)), rng)
        elif kind == "reload":
            states = list(self.states.values())
            rng.shuffle(states)
            self.replica.load(states, self.replica.sequence)
        elif self.states and kind in {"use", "remove"}:
            self.use_or_remove(kind, rng)

    def use_or_remove(self, kind: str, rng: random.Random) -> None:
        state = self.states[self.pick(rng)]
        number = int(state.uuid[-12:])
        if kind == "remove":
            self.replica.apply([removed(self.replica.sequence + 1, number, state.generation + 1)])
            del self.states[state.uuid]
            return
        amounts = {rng.choice(CLASSES): rng.randint(0, 6)}
        self.replica.apply([used(self.replica.sequence + 1, number, state.generation + 1, amounts)])
        self.states[state.uuid] = structs.replace(
            state, generation=state.generation + 1, used={**state.used, **amounts}
        )

    def land(self, key: str, rng: random.Random) -> None:
        """A claim succeeds; the result comes before or after the feed brings it, as chance will."""
        claim = {one: share for one, share in self.claims.pop(key).items() if one in self.states}
        generations = {one: self.states[one].generation + 1 for one in claim}
        if rng.random() < 0.5:
            self.replica.confirm(key, generations)
        for one, share in claim.items():
            state = self.states[one]
            amounts = {name: state.used.get(name, 0) + amount for name, amount in share.items()}
            self.replica.apply([used(self.replica.sequence + 1, int(one[-12:]), generations[one], amounts)])
            self.states[one] = structs.replace(state, generation=generations[one], used={**state.used, **amounts})
        self.replica.confirm(key, generations)

    def pick(self, rng: random.Random) -> str:
        return rng.choice(sorted(self.states))

    def random_state(self, rng: random.Random) -> ProviderState:
        tree, member = rng.randrange(TREES), rng.randrange(TREE)
        root = tree * TREE
        number = root + member
        old = self.states.get(uuid(number))
        # Sometimes a member moves to another tree; roots stay roots.
        if member and rng.random() < 0.15:
            root = rng.randrange(TREES) * TREE
        return ProviderState(
            uuid=uuid(number),
            name=f"p{rng.randrange(100)}",
            root_uuid=uuid(root),
            parent_uuid=uuid(root) if member else None,
            generation=1 if old is None else old.generation + 1,
            spec_generation=1 if old is None else old.spec_generation + 1,
            inventories={
                name: inventory(
                    rng.randint(0, 8), low=rng.randint(1, 2), high=rng.randint(2, 8), step=rng.randint(1, 2)
                )
                for name in CLASSES
                if rng.random() < 0.6
            },
            used={} if old is None else old.used,
            traits=tuple(trait for trait in TRAITS if rng.random() < 0.4),
            aggregates=tuple(aggregate for aggregate in AGGREGATES if rng.random() < 0.4),
        )


def groups(names: tuple[str, ...], most: int) -> st.SearchStrategy[tuple[tuple[str, ...], ...]]:
    group = st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True).map(tuple)
    return st.one_of(st.just(()), st.lists(group, max_size=most).map(tuple))


def few(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.one_of(st.just(()), st.lists(st.sampled_from(names), max_size=1).map(tuple))


PINS = st.one_of(st.just(()), st.lists(st.sampled_from([uuid(0), uuid(5), uuid(10), uuid(99)]), max_size=2).map(tuple))
QUERIES = st.builds(
    Query,
    resources=st.dictionaries(st.sampled_from(CLASSES), st.integers(0, 4), min_size=1, max_size=3),
    required=groups(TRAITS, 3),
    forbidden=few(TRAITS),
    member_of=groups(AGGREGATES, 2),
    forbidden_aggregates=few(AGGREGATES),
    in_tree=st.one_of(st.none(), st.none(), st.sampled_from([uuid(1), uuid(5), uuid(77)])),
    root_required=groups(TRAITS, 1),
    root_forbidden=few(TRAITS),
    only_roots=PINS,
    ignore_roots=PINS,
)


def compare(world: World, query: Query) -> None:
    replica = world.replica
    expected = ways(world.states, world.assumed, query)
    for explain in (False, True):
        found = search(replica, query, explain=explain)
        assert [replica.uuid_of(row) for row in found.roots] == sorted(
            expected, key=lambda one: replica.row_of(one) or 0
        )
    steps = found.funnel
    assert steps[-1].remaining == len(expected)
    for before, after in pairwise(steps):
        assert before.remaining - after.remaining == sum(after.rejected.values())
    for root, all_ways in expected.items():
        check_options(world, query, root, all_ways)


def check_options(world: World, query: Query, root: str, all_ways: set[Assignment]) -> None:
    row = world.replica.row_of(root)
    assert row is not None
    offered = options(world.replica, query, row, limit=64)
    reasons = []
    for option in offered:
        assert option.spec_generations == {one: world.states[one].spec_generation for one in option.allocations}
        reasons.append(tuple(sorted((name, one) for one, share in option.allocations.items() for name in share)))
        for share in option.allocations.values():
            assert all(query.resources[name] == amount for name, amount in share.items())
    assert len(reasons) == len(set(reasons)), "an option twice"
    assert set(reasons) <= all_ways
    assert len(reasons) == min(64, len(all_ways)), "a way is left out"
    assert options(world.replica, query, row, limit=1) == offered[:1]


def check_columns(world: World) -> None:
    replica = world.replica
    assert len(replica) == len(world.states)
    assert sorted(replica.uuid_of(row) for row in replica.rows_of_roots()) == sorted(
        one for one, state in world.states.items() if state.root_uuid == one
    )
    roots = replica.rows_of_roots()
    for name in CLASSES:
        for place, root in enumerate(roots):
            members = [state for state in world.states.values() if state.root_uuid == replica.uuid_of(root)]
            rooms = [room(world, state, name) for state in members]
            assert replica.free(name, roots)[place] == sum(max(0, free) for _, free in rooms)
            assert replica.totals(name, roots)[place] == sum(capacity for capacity, _ in rooms)
            assert replica.usage(name, roots)[place] == sum(capacity - free for capacity, free in rooms)
            assert sorted(map(replica.uuid_of, replica.members(np.array([root]))[0])) == sorted(
                state.uuid for state in members
            )


def room(world: World, state: ProviderState, name: str) -> tuple[int, int]:
    capacity = int(state.inventories[name][0]) if name in state.inventories else 0
    return capacity, capacity - state.used.get(name, 0) - world.assumed.get(state.uuid, {}).get(name, 0)


@given(seed=st.integers(0, 2**32), queries=st.lists(QUERIES, min_size=1, max_size=4), steps=st.integers(1, 40))
def test_the_search_is_right_after_every_move(seed: int, queries: list[Query], steps: int) -> None:
    rng = random.Random(seed)
    world = World()
    for _ in range(steps):
        for _ in range(rng.choice((1, 1, 3, 12))):
            world.step(rng)
        for query in queries:
            compare(world, query)
    check_columns(world)


@given(seed=st.integers(0, 2**32), query=QUERIES)
@example(seed=213822, query=Query(resources={"VCPU": 0}))  # of its thirty steps none is a change to sweep after
def test_sweeping_distinct_values_changes_no_answer(seed: int, query: Query) -> None:
    rng = random.Random(seed)
    world = World()
    world.replica._sweep_at = 1
    before, replica_module.SWEEP_FROM = replica_module.SWEEP_FROM, 1
    try:
        world.put(world.random_state(rng))
        for _ in range(30):
            world.step(rng)
            compare(world, query)
        check_columns(world)
        assert world.replica.epoch > 1
    finally:
        replica_module.SWEEP_FROM = before


def test_many_moves_between_two_searches(monkeypatch: object) -> None:
    """More changes than are remembered: everything is looked at anew."""
    rng = random.Random(5)
    world = World()
    query = Query(resources={"VCPU": 1})
    for _ in range(20):
        world.step(rng)
    compare(world, query)
    world.put(structs.replace(world.random_state(rng), uuid=uuid(0), root_uuid=uuid(0), parent_uuid=None))
    for _ in range(40_000):
        world.replica.assume("x", {uuid(0): {"VCPU": 1}})
    world.claims["x"] = {uuid(0): {"VCPU": 1}}
    compare(world, query)
    assert np.array_equal(world.replica.rows_of_roots(), np.sort(world.replica.rows_of_roots()))


# --- which of several reasons a host is rejected for: the first step that no provider of its tree passes


def host(**fields: Any) -> ProviderState:
    return provider(0, **fields)


def child(number: int, **fields: Any) -> ProviderState:
    return provider(number, root=0, parent=0, **fields)


def network(**fields: Any) -> Query:
    return Query(resources={"VCPU": 1}, groups=(Group(suffix="_NET", **{"resources": {"VF": 1}, **fields}),))


VCPU, VF = {"VCPU": 8}, {"VF": 4}
NOT_TOGETHER = "traits and resources not on the same providers"
AGGREGATES_NOT_MET = {"VCPU": {}, "group NET": {"aggregates not met": 1}}
# {name: (the tree, the request, {step: reasons})}
CASES: dict[str, tuple[list[ProviderState], Query, dict[str, dict[str, int]]]] = {
    "the root lacks the second of two traits": (
        [host(inventories=VCPU, traits=("A",))],
        Query(resources={"VCPU": 1}, root_required=(("A",), ("B", "C"))),
        {"traits": {"root lacks one of B, C": 1}, "VCPU": {}},
    ),
    "the root has a trait": (
        [host(inventories=VCPU, traits=("A",))],
        Query(resources={"VCPU": 1}, root_forbidden=("A",)),
        {"traits": {"root has A": 1}, "VCPU": {}},
    ),
    "the root is in none of two aggregates": (
        [host(inventories=VCPU)],
        Query(resources={"VCPU": 1}, root_member_of=(("a",), ("b",))),
        {"aggregates": {"not in a and b": 1}, "VCPU": {}},
    ),
    "the root is in an aggregate": (
        [host(inventories=VCPU, aggregates=("a",))],
        Query(resources={"VCPU": 1}, root_forbidden_aggregates=("a",)),
        {"aggregates": {"in a": 1}, "VCPU": {}},
    ),
    "all have the trait, whatever they give": (
        [host(traits=("BAD",))],
        Query(resources={"VCPU": 1}, forbidden=("BAD",)),
        {"traits": {"has BAD": 1}, "VCPU": {}},
    ),
    "a forbidden trait comes before a required one, and traits before aggregates and resources": (
        [host(traits=("BAD",))],
        Query(resources={"VCPU": 1}, required=(("GOOD",),), forbidden=("BAD",), member_of=(("a",),)),
        {"traits": {"has BAD": 1}, "aggregates": {}, "VCPU": {}},
    ),
    "only one with a forbidden trait has the required one": (
        [host(), child(1, inventories=VCPU, traits=("GOOD", "BAD")), child(2, inventories=VCPU)],
        Query(resources={"VCPU": 1}, required=(("GOOD",),), forbidden=("BAD",)),
        {"traits": {"lacks GOOD": 1}, "VCPU": {}},
    ),
    "none is in the aggregate, whatever they give": (
        [host()],
        Query(resources={"VCPU": 1}, member_of=(("a",),)),
        {"aggregates": {"not in a": 1}, "VCPU": {}},
    ),
    "only one with a forbidden trait is in the aggregate": (
        [host(), child(1, traits=("BAD",), aggregates=("a",))],
        Query(resources={"VCPU": 1}, forbidden=("BAD",), member_of=(("a",),)),
        {"traits": {}, "aggregates": {"not in a": 1}, "VCPU": {}},
    ),
    "the one in the aggregate gives nothing": (
        [host(), child(1, inventories=VCPU), child(2, aggregates=("a",))],
        Query(resources={"VCPU": 1}, member_of=(("a",),)),
        {"aggregates": {"not in a": 1}, "VCPU": {}},
    ),
    "all are in a forbidden aggregate, whatever they give": (
        [host(aggregates=("b",))],
        Query(resources={"VCPU": 1}, forbidden_aggregates=("b",)),
        {"aggregates": {"in b": 1}, "VCPU": {}},
    ),
    "the one in the aggregate is in a forbidden one": (
        [host(), child(1, aggregates=("a", "b"))],
        Query(resources={"VCPU": 1}, member_of=(("a",),), forbidden_aggregates=("b",)),
        {"aggregates": {"in b": 1}, "VCPU": {}},
    ),
    "each trait has its provider, and one can give": (
        [
            host(inventories=VCPU),
            child(1, inventories={"VGPU": 1}, traits=("A",)),
            child(2, inventories={"VGPU": 1}, traits=("B",)),
        ],
        Query(resources={"VCPU": 1, "VGPU": 1}, required=(("A",), ("B",))),
        {"traits": {}, "VCPU": {}, "VGPU": {}, "together": {NOT_TOGETHER: 1}},
    ),
    "a group's provider has the trait that the rest lacks": (
        [host(inventories=VCPU), child(1, inventories=VF, traits=("GOOD",))],
        Query(resources={"VCPU": 1}, required=(("GOOD",),), groups=(Group(suffix="_NET", resources={"VF": 1}),)),
        {"traits": {}, "VCPU": {}, "group NET": {}, "together": {NOT_TOGETHER: 1}},
    ),
    "the traits are met, and the groups do not fit": (
        [host(inventories=VCPU, traits=("GOOD",)), child(1, inventories=VF)],
        Query(
            resources={"VCPU": 1},
            required=(("GOOD",),),
            groups=tuple(Group(suffix=f"_{number}", resources={"VF": 3}) for number in range(2)),
            group_policy="none",
        ),
        {"traits": {}, "VCPU": {}, "group 0": {}, "group 1": {}, "groups 0, 1": {"groups do not fit together": 1}},
    ),
    "a group's provider is in another tree": (
        [host(inventories=VCPU), child(1, inventories=VF), provider(9)],
        network(in_tree=uuid(9)),
        {"VCPU": {"none here": 1}, "group NET": {"not in the requested tree": 1}},
    ),
    "a group's provider is not in the aggregate": (
        [host(inventories=VCPU, aggregates=("a",)), child(1, inventories=VF)],
        network(member_of=(("a",),)),
        AGGREGATES_NOT_MET,
    ),
    "a group's provider is in a forbidden aggregate": (
        [host(inventories=VCPU), child(1, inventories=VF, aggregates=("a",))],
        network(forbidden_aggregates=("a",)),
        AGGREGATES_NOT_MET,
    ),
    "a group's provider has too little of one of two classes": (
        [host(inventories=VCPU), child(1, inventories={**VF, "BW": 10})],
        network(resources={"BW": 10, "VF": 5}),
        {"VCPU": {}, "group NET": {"capacity too small": 1}},
    ),
}


@pytest.mark.parametrize(("states", "query", "expected"), CASES.values(), ids=CASES)
def test_item_22_a_host_is_rejected_for_the_first_reason_that_applies(
    states: list[ProviderState], query: Query, expected: dict[str, dict[str, int]]
) -> None:
    replica = Replica()
    replica.load(states, 0)
    funnel = search(replica, query, explain=True).funnel[1:]
    assert [(one.step, one.rejected) for one in funnel] == list(expected.items())

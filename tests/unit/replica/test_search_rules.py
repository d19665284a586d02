"""Rules of a search: traits, aggregates, capacity, trees, and groups of a request."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from bus.contracts.placement import ProviderState
from placement_worker.domain.values import SHARING
from placement_worker.replica import compiled
from placement_worker.replica.replica import Replica
from placement_worker.replica.request import Group, Query, request_of, total_resources
from placement_worker.replica.search import QUERIES_KEPT, ResultsCache, options, results_of, search
from tests.unit.replica.worlds import (
    AGGREGATES,
    TRAITS,
    Found,
    all_candidates,
    changed,
    inventory,
    loaded,
    provider,
    random_request,
    random_world,
    removed,
    used,
    uuid,
)

# --- placement's rules for un-numbered requests, one by one (microversion 1.31, microversion 1.35), and the funnel


def replica_of(*states: ProviderState) -> Replica:
    replica = Replica()
    replica.load(states, 0)
    return replica


def found(replica: Replica, query: Query) -> list[str]:
    return [replica.name_of(row) for row in search(replica, query).roots]


def ways(replica: Replica, query: Query, root: int = 0, limit: int = 64) -> list[dict[str, dict[str, int]]]:
    row = replica.row_of(uuid(root))
    assert row is not None
    named = options(replica, query, row, limit=limit)
    return [
        {replica.name_of(replica.row_of(one) or 0): share for one, share in way.allocations.items()} for way in named
    ]


def test_a_class_requested_with_nothing_is_not_searched() -> None:
    replica = replica_of(provider(0, inventories={"CUSTOM_BAREMETAL_GOLD": 1}))
    query = Query(resources={"CUSTOM_BAREMETAL_GOLD": 1, "VCPU": 0, "MEMORY_MB": 0})
    assert ways(replica, query) == [{"p0": {"CUSTOM_BAREMETAL_GOLD": 1}}]
    nothing = search(replica, Query(resources={"VCPU": 0}), explain=True)
    assert (len(nothing.roots), nothing.funnel[-1].rejected) == (0, {"nothing is requested": 1})


def test_options_are_near_roomy_and_real_alternatives() -> None:
    """NUMA cells: both classes from one cell first; the emptier cell first; the second option is the other cell."""
    cells = [
        provider(1, root=0, parent=0, inventories={"VCPU": 8, "MEMORY_MB": 64}, used={"VCPU": 4}),
        provider(2, root=0, parent=0, inventories={"VCPU": 8, "MEMORY_MB": 64}),
    ]
    replica = replica_of(provider(0), *cells)
    requested = ways(replica, Query(resources={"VCPU": 2, "MEMORY_MB": 8}))
    assert [list(way) for way in requested[:2]] == [["p2"], ["p1"]]
    assert [len(way) for way in requested] == [1, 1, 2, 2]
    assert ways(replica, Query(resources={"VCPU": 2}))[0] == {"p2": {"VCPU": 2}}


def test_a_provider_that_gives_more_classes_comes_before_one_that_has_more_room() -> None:
    cells = [
        provider(1, root=0, parent=0, inventories={"VCPU": 800}),
        provider(2, root=0, parent=0, inventories={"VCPU": 8, "MEMORY_MB": 64}),
    ]
    requested = ways(replica_of(provider(0), *cells), Query(resources={"VCPU": 2, "MEMORY_MB": 8}))
    assert [set(way) for way in requested] == [{"p2"}, {"p1", "p2"}]


def test_many_like_children_do_not_explode() -> None:
    devices = [provider(number, root=0, parent=0, inventories={"VGPU": 1, "FPGA": 1}) for number in range(1, 201)]
    replica = replica_of(provider(0, inventories={"VCPU": 8}), *devices)
    requested = ways(replica, Query(resources={"VCPU": 1, "VGPU": 1, "FPGA": 1}), limit=4)
    assert len(requested) == 4
    assert len({name for way in requested for name in way}) == 5  # the root and four different devices


def test_a_root_past_the_budget_is_called_unknown_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither "cannot" nor a search that fails: the funnel shows that there were too many combinations."""
    monkeypatch.setattr(compiled, "BUDGET", 1)
    owned = {"A": 1, "B": 1, "C": 1}
    traits = {number: (f"T{number}", f"T{number % 8 + 1}") for number in range(1, 9)}
    members = [provider(one, root=0, parent=0, inventories=owned, traits=its) for one, its in traits.items()]
    everything = tuple(f"T{number}" for number in range(1, 9))
    states = [provider(0), *members, provider(100, inventories=owned, traits=everything)]
    query = Query(resources=owned, required=tuple((name,) for name in everything))
    replica = replica_of(*states)
    answer = search(replica, query, explain=True)
    assert [replica.name_of(row) for row in answer.roots] == ["p100"]
    assert answer.funnel[-1].rejected == {"too many combinations to try": 1}


def test_the_funnel_gives_the_reasons() -> None:
    replica = replica_of(
        provider(0, inventories={"VCPU": 8, "MEMORY_MB": 64}, traits=("SSD",), aggregates=("az1",)),
        provider(1, inventories={"VCPU": 8, "MEMORY_MB": 64}, aggregates=("az1",)),
        provider(2, inventories={"VCPU": 8, "MEMORY_MB": 64}, traits=("SSD",)),
        provider(
            3, inventories={"VCPU": 8, "MEMORY_MB": 64}, used={"MEMORY_MB": 60}, traits=("SSD",), aggregates=("az1",)
        ),
        provider(4, inventories={"VCPU": 8, "MEMORY_MB": 4}, traits=("SSD",), aggregates=("az1",)),
        provider(5, inventories={"VCPU": 8}, traits=("SSD",), aggregates=("az1",)),
        provider(6, inventories={"VCPU": 8, "MEMORY_MB": 64}, traits=("SSD", "OLD"), aggregates=("az1",)),
    )
    query = Query(
        resources={"VCPU": 1, "MEMORY_MB": 8},
        required=(("SSD",),),
        forbidden=("OLD",),
        member_of=(("az1", "az2"),),
        ignore_roots=(uuid(0),),
    )
    funnel = search(replica, query, explain=True).funnel
    assert [(step.step, step.remaining, step.rejected) for step in funnel] == [
        ("providers", 6, {"ignored": 1}),
        ("traits", 4, {"has OLD": 1, "lacks SSD": 1}),
        ("aggregates", 3, {"not in one of az1, az2": 1}),
        ("MEMORY_MB", 0, {"none here": 1, "capacity too small": 1, "in use": 1}),
        ("VCPU", 0, {}),
    ]


CHILD = provider(1, root=0, parent=0, inventories={"VCPU": 8}, traits=("CUSTOM_OLD",), aggregates=("az1",))


@pytest.mark.parametrize(
    ("query", "step", "reason"),
    [
        ({"forbidden": ("CUSTOM_OLD",)}, "traits", "has CUSTOM_OLD"),
        ({"forbidden_aggregates": ("az1",)}, "aggregates", "in az1"),
        ({"member_of": (("az2",),)}, "aggregates", "not in az2"),
        ({"required": (("CUSTOM_NEW",),)}, "traits", "lacks CUSTOM_NEW"),
        ({"required": (("CUSTOM_ROOT",),)}, "together", "traits and resources not on the same providers"),
    ],
)
def test_what_is_forbidden_on_a_child_is_not_called_absent(query: dict[str, object], step: str, reason: str) -> None:
    """The host has VCPU: a trait or an aggregate stands in the way. It was reported to have none."""
    replica = replica_of(
        provider(0, traits=("CUSTOM_ROOT",), aggregates=("az2",) if "az1" in str(query) else ()), CHILD
    )
    funnel = search(replica, Query(resources={"VCPU": 1}, **query), explain=True).funnel  # type: ignore[arg-type]
    assert [(one.step, one.rejected) for one in funnel if one.rejected] == [(step, {reason: 1})]


def test_the_only_child_with_the_trait_is_full() -> None:
    """It is in use; that traits and resources are not on the same providers would be wrong."""
    states = [
        provider(0, inventories={"VCPU": 8}),
        provider(1, root=0, parent=0, inventories={"VGPU": 1}, used={"VGPU": 1}, traits=("CUSTOM_FAST",)),
        provider(2, root=0, parent=0, inventories={"VGPU": 1}),
    ]
    query = Query(resources={"VCPU": 1, "VGPU": 1}, required=(("CUSTOM_FAST",),))
    funnel = search(replica_of(*states), query, explain=True).funnel
    assert [(one.step, one.rejected) for one in funnel if one.rejected] == [("VGPU", {"in use": 1})]


def test_a_reason_moves_with_the_host() -> None:
    """Reasons are worked out when they are asked for: one that was must not stay when the host has changed."""
    host = provider(0, inventories={"VCPU": 4}, used={"VCPU": 4})
    replica = replica_of(host)
    query = Query(resources={"VCPU": 2})
    assert search(replica, query, explain=True).funnel[-1].rejected == {"in use": 1}
    smaller = structs.replace(host, generation=2, spec_generation=2, inventories={"VCPU": inventory(1)}, used={})
    replica.apply([changed(1, smaller)])
    assert search(replica, query, explain=True).funnel[-1].rejected == {"capacity too small": 1}
    replica.apply([removed(2, 0, 3)])
    assert search(replica, query, explain=True).funnel[-1].rejected == {}


def test_what_is_held_back_is_not_called_too_small() -> None:
    """A bare-metal node in use or being cleaned has its one unit reserved."""
    held = structs.replace(provider(0), inventories={"CUSTOM_GOLD": (0.0, 1, 1, 1, 1, 1, 1.0)})
    query = Query(resources={"CUSTOM_GOLD": 1})
    assert search(replica_of(held), query, explain=True).funnel[-1].rejected == {"reserved": 1}


def test_plans_are_bounded_and_forgotten_ones_answer_the_same() -> None:
    replica = replica_of(provider(0, inventories={"VCPU": 2 * QUERIES_KEPT}))
    for _ in range(2):
        for amount in range(1, 2 * QUERIES_KEPT + 1):
            assert found(replica, Query(resources={"VCPU": amount})) == ["p0"]
            assert len(replica.cache(ResultsCache)) <= QUERIES_KEPT
        replica.apply([used(1, 0, 2, {"VCPU": 0})])


def test_inventories_are_read_anew_after_a_sweep() -> None:
    """A sweep numbers distinct inventories anew: what was known by number must not stay."""
    replica = replica_of(provider(0, inventories={"VCPU": 1}), provider(1, inventories={"VCPU": 8}))
    query = Query(resources={"VCPU": 4})
    assert found(replica, query) == ["p1"]
    replica._sweep_at, epoch = 1, replica.epoch
    replica.apply([changed(1, provider(0, generation=2, spec_generation=2, inventories={"VCPU": 8}))])
    assert replica.epoch == epoch + 1
    assert found(replica, query) == ["p0", "p1"]


# --- searching for hosts with numbered groups and sharing providers: complete, and right while placement moves


def random_query(rng: random.Random, states: list[ProviderState]) -> Query:
    """A query with what a random request requires."""
    request = random_request(rng, states)
    own = next((group for group in request.groups if not group.suffix), Group())
    return Query(
        resources=own.resources,
        required=own.required,
        forbidden=own.forbidden,
        member_of=own.member_of,
        forbidden_aggregates=own.forbidden_aggregates,
        in_tree=own.in_tree,
        root_required=tuple((trait,) for trait in TRAITS if rng.random() < 0.05),
        root_forbidden=tuple(trait for trait in TRAITS if rng.random() < 0.05),
        root_member_of=tuple((aggregate,) for aggregate in AGGREGATES if rng.random() < 0.04),
        root_forbidden_aggregates=tuple(aggregate for aggregate in AGGREGATES if rng.random() < 0.04),
        groups=tuple(group for group in request.groups if group.suffix),
        group_policy=request.group_policy,
        same_subtree=request.same_subtree,
    )


def by_root(states: list[ProviderState], query: Query) -> dict[str, set[frozenset[tuple[str, str, int]]]]:
    """Per root, every allocation that the rules allow."""
    found = {}
    for root in states:
        if root.root_uuid != root.uuid or set(query.root_forbidden) & set(root.traits):
            continue
        if not all(set(names) & set(root.traits) for names in query.root_required):
            continue
        if not all(set(names) & set(root.aggregates) for names in query.root_member_of):
            continue
        if set(query.root_forbidden_aggregates) & set(root.aggregates):
            continue
        # Only this root may anchor: the others are excluded by a trait that no provider has.
        marked = [
            structs.replace(state, traits=(*state.traits, "CUSTOM_HERE")) if state is root else state
            for state in states
        ]
        request = structs.replace(request_of(query), root_required=(("CUSTOM_HERE",),))
        ways: set[Found] = all_candidates(marked, request)
        if ways:
            found[root.uuid] = {gives for gives, _ in ways}
    return found


def check(replica: Replica, states: list[ProviderState], query: Query) -> None:
    wanted = by_root(states, query)
    if query.in_tree is not None:
        tree = next((state.root_uuid for state in states if state.uuid == query.in_tree), None)
        wanted = {root: ways for root, ways in wanted.items() if root == tree}
    answer = search(replica, query, explain=True)
    assert {replica.uuid_of(int(row)) for row in answer.roots} == set(wanted)
    assert answer.funnel[0].remaining + sum(answer.funnel[0].rejected.values()) == len(replica.rows_of_roots())
    assert answer.funnel[-1].remaining == len(wanted)
    results = results_of(replica, query)
    assert results.reasons.unknown not in results.results
    assert results.reasons.not_examined not in results.results
    for row in answer.roots.tolist():
        found = [
            frozenset((one, name, n) for one, given in option.allocations.items() for name, n in given.items())
            for option in options(replica, query, row, limit=1000)
        ]
        assert found
        assert set(found) <= wanted[replica.uuid_of(row)]
        if len(found) < 64:
            assert set(found) == wanted[replica.uuid_of(row)]


@given(st.integers(0, 2**32))
@example(831118)  # one aggregate is forbidden to the root and to the group: two rejections of one wording
def test_finds_every_host_and_claims_only_what_the_rules_allow(seed: int) -> None:
    rng = random.Random(seed)
    states = random_world(rng)
    replica = loaded(states)
    for _ in range(3):
        check(replica, states, random_query(rng, states))


@given(st.integers(0, 2**32))
def test_stays_right_while_usage_shapes_and_claims_move(seed: int) -> None:
    rng = random.Random(seed)
    world = {state.uuid: state for state in [*random_world(rng), *(provider(n) for n in range(50, 62))]}
    replica = loaded(list(world.values()))
    queries = [random_query(rng, list(world.values())) for _ in range(3)]
    queries = [q for q in queries if q.in_tree is None and all(group.in_tree is None for group in q.groups)]
    for _ in range(8):
        one = rng.choice(sorted(uuid for uuid in world if int(uuid[-12:]) < 50) or sorted(world))
        old, number = world[one], int(one[-12:])
        kind = rng.choice(("use", "use", "use", "spec_generation", "remove"))
        has_children = any(state.parent_uuid == one for state in world.values())
        if kind == "use" and old.inventories:
            amounts = {rng.choice(sorted(old.inventories)): rng.randint(0, 4)}
            replica.apply([used(replica.sequence + 1, number, old.generation + 1, amounts)])
            world[one] = structs.replace(old, generation=old.generation + 1, used={**old.used, **amounts})
        elif kind == "spec_generation":
            other = rng.choice(random_world(rng))
            world[one] = structs.replace(
                old,
                generation=old.generation + 1,
                traits=other.traits,
                aggregates=other.aggregates,
                inventories=other.inventories,
                used=other.used,
            )
            replica.apply([changed(replica.sequence + 1, world[one])])
        elif kind == "remove" and not has_children:
            replica.apply([removed(replica.sequence + 1, number, old.generation + 1)])
            del world[one]
        for query in queries:
            check(replica, list(world.values()), query)


@pytest.mark.parametrize(
    ("change", "step", "reason"),
    [
        ({"inventories": {}}, "group NET", "none here"),
        ({"used": {"VF": 4}}, "group NET", "in use"),
        ({"traits": ()}, "group NET", "traits not met"),
    ],
)
def test_the_funnel_names_the_group_that_no_provider_satisfies(
    change: dict[str, object], step: str, reason: str
) -> None:
    device = provider(1, root=0, parent=0, inventories={"VF": 4}, traits=("CUSTOM_FAST",))
    replica = loaded([provider(0, inventories={"VCPU": 8}), structs.replace(device, **change)])
    group = Group(suffix="_NET", resources={"VF": 1}, required=(("CUSTOM_FAST",),))
    answer = search(replica, Query(resources={"VCPU": 1}, groups=(group,)), explain=True)
    assert not len(answer.roots)
    assert [(s.step, s.rejected) for s in answer.funnel if s.rejected] == [(step, {reason: 1})]


def test_groups_that_fit_alone_but_not_together() -> None:
    device = provider(1, root=0, parent=0, inventories={"VF": 4})
    replica = loaded([provider(0, inventories={"VCPU": 8}), device])
    groups = tuple(Group(suffix=f"_{n}", resources={"VF": 3}) for n in range(2))
    query = Query(resources={"VCPU": 1}, groups=groups, group_policy="none")
    assert search(replica, query, explain=True).funnel[-1].rejected == {"groups do not fit together": 1}
    assert total_resources(query) == {"VCPU": 1, "VF": 6}


def test_what_one_claim_takes_the_next_search_sees() -> None:
    states = [
        state
        for host in range(0, 400, 10)
        for state in (
            provider(host, inventories={"VCPU": 8}),
            provider(host + 1, root=host, parent=host, inventories={"VF": 2}),
        )
    ]
    replica = loaded(states)
    query = Query(resources={"VCPU": 1}, groups=(Group(suffix="1", resources={"VF": 2}),))
    for taken in range(40):
        roots = search(replica, query).roots
        assert len(roots) == 40 - taken
        (option,) = options(replica, query, int(roots[0]))
        replica.assume(f"k{taken}", option.allocations)
    assert not np.any(search(replica, query).roots)


def test_a_pool_that_loses_a_trait_loses_the_requests_for_it() -> None:
    pool = provider(0, inventories={"DISK_GB": 10}, traits=(SHARING, "CUSTOM_SSD"), aggregates=("a",))
    hosts = [provider(number, inventories={"VCPU": 8}, aggregates=("a",)) for number in range(1, 40)]
    replica = loaded([pool, *hosts])
    query = Query(resources={"VCPU": 1, "DISK_GB": 4}, required=(("CUSTOM_SSD",),))
    assert len(search(replica, query).roots) == 39
    replica.apply([changed(replica.sequence + 1, structs.replace(pool, generation=2, traits=(SHARING,)))])
    assert len(search(replica, query).roots) == 0

"""Searching for hosts with numbered groups and sharing providers: complete, and right while the book moves."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from bus.contracts.placement import ProviderState
from placement_worker.replica.book import Book
from placement_worker.replica.query import Query, request_of, total_resources
from placement_worker.replica.request import Group
from placement_worker.replica.search import options, search
from placement_worker.replica.sharing import SHARING_TRAIT
from placement_worker.replica.verdicts import verdicts_of
from tests.unit.replica.books import changed, provider, removed, used, uuid
from tests.unit.replica.candidates_oracle import Found, all_candidates
from tests.unit.replica.worlds import AGGREGATES, TRAITS, loaded, random_request, random_world


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


def check(book: Book, states: list[ProviderState], query: Query) -> None:
    wanted = by_root(states, query)
    if query.in_tree is not None:
        tree = next((state.root_uuid for state in states if state.uuid == query.in_tree), None)
        wanted = {root: ways for root, ways in wanted.items() if root == tree}
    answer = search(book, query, explain=True)
    assert {book.uuid_of(int(row)) for row in answer.roots} == set(wanted)
    assert answer.funnel[0].remaining + sum(answer.funnel[0].rejected.values()) == len(book.rows_of_roots())
    assert answer.funnel[-1].remaining == len(wanted)
    verdicts = verdicts_of(book, query)
    assert verdicts.reasons.unknown not in verdicts.verdicts
    assert verdicts.reasons.unexplained not in verdicts.verdicts
    for row in answer.roots.tolist():
        found = [
            frozenset((one, name, n) for one, given in option.allocations.items() for name, n in given.items())
            for option in options(book, query, row, limit=1000)
        ]
        assert found
        assert set(found) <= wanted[book.uuid_of(row)]
        if len(found) < 64:
            assert set(found) == wanted[book.uuid_of(row)]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
@example(831118)  # one aggregate is forbidden to the root and to the group: two rejections of one wording
def test_finds_every_host_and_claims_only_what_the_rules_allow(seed: int) -> None:
    rng = random.Random(seed)
    states = random_world(rng)
    book = loaded(states)
    for _ in range(3):
        check(book, states, random_query(rng, states))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
def test_stays_right_while_usage_shapes_and_claims_move(seed: int) -> None:
    rng = random.Random(seed)
    world = {state.uuid: state for state in [*random_world(rng), *(provider(n) for n in range(50, 62))]}
    book = loaded(list(world.values()))
    queries = [random_query(rng, list(world.values())) for _ in range(3)]
    queries = [q for q in queries if q.in_tree is None and all(group.in_tree is None for group in q.groups)]
    for _ in range(8):
        one = rng.choice(sorted(uuid for uuid in world if int(uuid[-12:]) < 50) or sorted(world))
        old, number = world[one], int(one[-12:])
        kind = rng.choice(("use", "use", "use", "shape", "remove"))
        has_children = any(state.parent_uuid == one for state in world.values())
        if kind == "use" and old.inventories:
            amounts = {rng.choice(sorted(old.inventories)): rng.randint(0, 4)}
            book.apply([used(book.sequence + 1, number, old.generation + 1, amounts)])
            world[one] = structs.replace(old, generation=old.generation + 1, used={**old.used, **amounts})
        elif kind == "shape":
            other = rng.choice(random_world(rng))
            world[one] = structs.replace(
                old,
                generation=old.generation + 1,
                traits=other.traits,
                aggregates=other.aggregates,
                inventories=other.inventories,
                used=other.used,
            )
            book.apply([changed(book.sequence + 1, world[one])])
        elif kind == "remove" and not has_children:
            book.apply([removed(book.sequence + 1, number, old.generation + 1)])
            del world[one]
        for query in queries:
            check(book, list(world.values()), query)


def test_a_shared_pool_that_fills_up_takes_its_hosts_along() -> None:
    pool = provider(0, inventories={"DISK_GB": 10}, traits=(SHARING_TRAIT,), aggregates=("a",))
    hosts = [provider(number, inventories={"VCPU": 8}, aggregates=("a",)) for number in range(1, 40)]
    book = loaded([pool, *hosts])
    query = Query(resources={"VCPU": 1, "DISK_GB": 4})
    assert len(search(book, query).roots) == 39
    (option,) = options(book, query, int(search(book, query).roots[0]))
    assert option.allocations == {uuid(0): {"DISK_GB": 4}, uuid(1): {"VCPU": 1}}
    assert option.shapes == {uuid(0): 1, uuid(1): 1}
    book.assume("k", option.allocations)
    assert len(search(book, query).roots) == 39
    book.assume("l", option.allocations)
    assert len(search(book, query).roots) == 0
    book.forget("k")
    assert len(search(book, query).roots) == 39


def test_a_pool_that_leaves_the_aggregate_leaves_its_hosts() -> None:
    pool = provider(0, inventories={"DISK_GB": 10}, traits=(SHARING_TRAIT,), aggregates=("a",))
    hosts = [provider(number, inventories={"VCPU": 8}, aggregates=("a",)) for number in range(1, 40)]
    book = loaded([pool, *hosts])
    query = Query(resources={"VCPU": 1, "DISK_GB": 4})
    assert len(search(book, query).roots) == 39
    book.apply([changed(book.sequence + 1, structs.replace(pool, generation=2, aggregates=("b",)))])
    assert len(search(book, query).roots) == 0


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
    book = loaded([provider(0, inventories={"VCPU": 8}), structs.replace(device, **change)])
    group = Group(suffix="_NET", resources={"VF": 1}, required=(("CUSTOM_FAST",),))
    answer = search(book, Query(resources={"VCPU": 1}, groups=(group,)), explain=True)
    assert not len(answer.roots)
    assert [(s.step, s.rejected) for s in answer.funnel if s.rejected] == [(step, {reason: 1})]


def test_groups_that_fit_alone_but_not_together() -> None:
    device = provider(1, root=0, parent=0, inventories={"VF": 4})
    book = loaded([provider(0, inventories={"VCPU": 8}), device])
    groups = tuple(Group(suffix=f"_{n}", resources={"VF": 3}) for n in range(2))
    query = Query(resources={"VCPU": 1}, groups=groups, group_policy="none")
    assert search(book, query, explain=True).funnel[-1].rejected == {"groups do not fit together": 1}
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
    book = loaded(states)
    query = Query(resources={"VCPU": 1}, groups=(Group(suffix="1", resources={"VF": 2}),))
    for taken in range(40):
        roots = search(book, query).roots
        assert len(roots) == 40 - taken
        (option,) = options(book, query, int(roots[0]))
        book.assume(f"k{taken}", option.allocations)
    assert not np.any(search(book, query).roots)


def test_a_pool_that_loses_a_trait_loses_the_requests_for_it() -> None:
    pool = provider(0, inventories={"DISK_GB": 10}, traits=(SHARING_TRAIT, "CUSTOM_SSD"), aggregates=("a",))
    hosts = [provider(number, inventories={"VCPU": 8}, aggregates=("a",)) for number in range(1, 40)]
    book = loaded([pool, *hosts])
    query = Query(resources={"VCPU": 1, "DISK_GB": 4}, required=(("CUSTOM_SSD",),))
    assert len(search(book, query).roots) == 39
    book.apply([changed(book.sequence + 1, structs.replace(pool, generation=2, traits=(SHARING_TRAIT,)))])
    assert len(search(book, query).roots) == 0

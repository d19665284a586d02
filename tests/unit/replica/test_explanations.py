"""Which of several reasons a host is rejected for: the first step that no provider of its tree passes."""

from __future__ import annotations

from typing import Any

import pytest

from bus.contracts.placement import ProviderState
from placement_worker.replica.book import Book
from placement_worker.replica.query import Query
from placement_worker.replica.request import Group
from placement_worker.replica.search import search
from tests.unit.replica.books import provider, uuid


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
    book = Book()
    book.load(states, 0)
    funnel = search(book, query, explain=True).funnel[1:]
    assert [(one.step, one.rejected) for one in funnel] == list(expected.items())

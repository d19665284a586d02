"""Placement's rules for un-numbered requests, one by one (microversion 1.31, microversion 1.35), and the funnel."""

from __future__ import annotations

import pytest
from msgspec import structs

from bus.contracts.placement import ProviderState
from placement_worker.replica import compiled
from placement_worker.replica.book import Book
from placement_worker.replica.search import Query, options, search
from placement_worker.replica.verdicts import QUERIES_KEPT, VerdictsCache
from tests.unit.replica.books import changed, inventory, provider, removed, used, uuid


def book_of(*states: ProviderState) -> Book:
    book = Book()
    book.load(states, 0)
    return book


def found(book: Book, query: Query) -> list[str]:
    return [book.name_of(row) for row in search(book, query).roots]


def ways(book: Book, query: Query, root: int = 0, limit: int = 64) -> list[dict[str, dict[str, int]]]:
    row = book.row_of(uuid(root))
    assert row is not None
    named = options(book, query, row, limit=limit)
    return [{book.name_of(book.row_of(one) or 0): share for one, share in way.allocations.items()} for way in named]


@pytest.mark.parametrize(
    ("amount", "fits"), [(1, False), (2, True), (3, False), (4, True), (6, True), (8, False), (10, False)]
)
def test_an_amount_is_within_min_max_step_and_room(amount: int, fits: bool) -> None:
    state = structs.replace(provider(0), inventories={"VCPU": inventory(10, low=2, high=8, step=2)}, used={"VCPU": 4})
    assert bool(found(book_of(state), Query(resources={"VCPU": amount}))) is fits


def test_a_required_trait_counts_only_on_a_provider_that_gives() -> None:
    """The trait on a bystander is no use."""
    book = book_of(
        provider(0, inventories={"VCPU": 8}),
        provider(1, root=0, parent=0, inventories={"VGPU": 4}, traits=("GOOD",)),
    )
    query = Query(resources={"VCPU": 1}, required=(("GOOD",),))
    assert found(book, query) == []
    assert search(book, query, explain=True).funnel[-1].remaining == 0
    assert found(book, structs.replace(query, resources={"VCPU": 1, "VGPU": 1})) == ["p0"]


def test_required_traits_may_be_met_by_different_givers_but_all_must_be() -> None:
    left = provider(1, root=0, parent=0, inventories={"VGPU": 1}, traits=("A",))
    right = provider(2, root=0, parent=0, inventories={"VGPU": 1}, traits=("B",))
    book = book_of(provider(0, inventories={"VCPU": 8}, traits=("C",)), left, right)
    both = Query(resources={"VCPU": 1, "VGPU": 1}, required=(("A",), ("B",)))
    assert found(book, both) == []
    one = Query(resources={"VCPU": 1, "VGPU": 1}, required=(("C",), ("B",)))
    assert ways(book, one) == [{"p0": {"VCPU": 1}, "p2": {"VGPU": 1}}]
    either = Query(resources={"VCPU": 1, "VGPU": 1}, required=(("A", "B"),))
    assert len(ways(book, either)) == 2


def test_the_provider_with_most_of_the_traits_is_not_always_the_one() -> None:
    """Taking the richest provider first would leave T3 unmet."""
    book = book_of(
        provider(0),
        provider(1, root=0, parent=0, inventories={"A": 1}, traits=("T1", "T2")),
        provider(2, root=0, parent=0, inventories={"A": 1}, traits=("T3",)),
        provider(3, root=0, parent=0, inventories={"B": 1}, traits=("T1", "T2")),
    )
    query = Query(resources={"A": 1, "B": 1}, required=(("T1",), ("T2",), ("T3",)))
    assert found(book, query) == ["p0"]
    assert ways(book, query) == [{"p2": {"A": 1}, "p3": {"B": 1}}]


def test_a_forbidden_trait_rules_out_the_provider_not_the_tree() -> None:
    bad = provider(1, root=0, parent=0, inventories={"VGPU": 4}, traits=("BAD",))
    good = provider(2, root=0, parent=0, inventories={"VGPU": 1})
    book = book_of(provider(0, inventories={"VCPU": 8}), bad, good)
    query = Query(resources={"VCPU": 1, "VGPU": 1}, forbidden=("BAD",))
    assert ways(book, query) == [{"p0": {"VCPU": 1}, "p2": {"VGPU": 1}}]
    assert found(book, structs.replace(query, resources={"VGPU": 2})) == []


def test_an_aggregate_on_a_root_spans_its_tree_and_on_a_child_it_does_not() -> None:
    """Membership in an aggregate, required and forbidden."""
    book = book_of(
        provider(0, inventories={"VCPU": 8}, aggregates=("wide",)),
        provider(1, root=0, parent=0, inventories={"VGPU": 4}, aggregates=("narrow",)),
    )
    both = {"VCPU": 1, "VGPU": 1}
    assert found(book, Query(resources=both, member_of=(("wide",),))) == ["p0"]
    assert found(book, Query(resources=both, member_of=(("narrow",),))) == []
    assert found(book, Query(resources={"VGPU": 1}, member_of=(("narrow",),))) == ["p0"]
    # Both at once must be met by one provider, not by the root and the child together.
    assert found(book, Query(resources={"VGPU": 1}, member_of=(("narrow",), ("wide",)))) == []
    assert found(book, Query(resources={"VGPU": 1}, forbidden_aggregates=("wide",))) == []
    assert found(book, Query(resources=both, forbidden_aggregates=("narrow",))) == []
    assert found(book, Query(resources={"VCPU": 1}, forbidden_aggregates=("narrow",))) == ["p0"]


def test_root_traits_are_the_roots_own() -> None:
    book = book_of(
        provider(0, inventories={"VCPU": 8}, traits=("COMPUTE_STATUS_DISABLED",)),
        provider(1, inventories={"VCPU": 8}),
        provider(2, root=1, parent=1, inventories={"VGPU": 1}, traits=("COMPUTE_STATUS_DISABLED", "X")),
    )
    assert found(book, Query(resources={"VCPU": 1}, root_forbidden=("COMPUTE_STATUS_DISABLED",))) == ["p1"]
    assert found(book, Query(resources={"VGPU": 1}, root_required=(("X",),))) == []


def test_each_class_comes_from_one_provider_whole() -> None:
    cells = [provider(number, root=0, parent=0, inventories={"VCPU": 4}) for number in (1, 2)]
    book = book_of(provider(0), *cells)
    assert found(book, Query(resources={"VCPU": 5})) == []
    assert book.free("VCPU", book.rows_of_roots()).tolist() == [8]


def test_pins() -> None:
    book = book_of(*(provider(number, inventories={"VCPU": 8}) for number in range(4)), provider(9, root=2, parent=2))
    requested = {"VCPU": 1}
    assert found(book, Query(resources=requested, in_tree=uuid(9))) == ["p2"]
    assert found(book, Query(resources=requested, in_tree=uuid(77))) == []
    assert found(book, Query(resources=requested, only_roots=(uuid(3), uuid(1), uuid(77), uuid(9)))) == ["p1", "p3"]
    assert found(book, Query(resources=requested, only_roots=(uuid(77),))) == []
    assert found(book, Query(resources=requested, ignore_roots=(uuid(0), uuid(77)))) == ["p1", "p2", "p3"]
    assert found(book, Query(resources=requested, only_roots=(uuid(0), uuid(1)), ignore_roots=(uuid(0),))) == ["p1"]


def test_a_class_requested_with_nothing_is_not_searched() -> None:
    book = book_of(provider(0, inventories={"CUSTOM_BAREMETAL_GOLD": 1}))
    query = Query(resources={"CUSTOM_BAREMETAL_GOLD": 1, "VCPU": 0, "MEMORY_MB": 0})
    assert ways(book, query) == [{"p0": {"CUSTOM_BAREMETAL_GOLD": 1}}]
    nothing = search(book, Query(resources={"VCPU": 0}), explain=True)
    assert (len(nothing.roots), nothing.funnel[-1].rejected) == (0, {"nothing is requested": 1})


def test_options_are_near_roomy_and_real_alternatives() -> None:
    """NUMA cells: both classes from one cell first; the emptier cell first; the second option is the other cell."""
    cells = [
        provider(1, root=0, parent=0, inventories={"VCPU": 8, "MEMORY_MB": 64}, used={"VCPU": 4}),
        provider(2, root=0, parent=0, inventories={"VCPU": 8, "MEMORY_MB": 64}),
    ]
    book = book_of(provider(0), *cells)
    requested = ways(book, Query(resources={"VCPU": 2, "MEMORY_MB": 8}))
    assert [list(way) for way in requested[:2]] == [["p2"], ["p1"]]
    assert [len(way) for way in requested] == [1, 1, 2, 2]
    assert ways(book, Query(resources={"VCPU": 2}))[0] == {"p2": {"VCPU": 2}}


def test_a_provider_that_gives_more_classes_comes_before_one_that_has_more_room() -> None:
    cells = [
        provider(1, root=0, parent=0, inventories={"VCPU": 800}),
        provider(2, root=0, parent=0, inventories={"VCPU": 8, "MEMORY_MB": 64}),
    ]
    requested = ways(book_of(provider(0), *cells), Query(resources={"VCPU": 2, "MEMORY_MB": 8}))
    assert [set(way) for way in requested] == [{"p2"}, {"p1", "p2"}]


def test_many_like_children_do_not_explode() -> None:
    devices = [provider(number, root=0, parent=0, inventories={"VGPU": 1, "FPGA": 1}) for number in range(1, 201)]
    book = book_of(provider(0, inventories={"VCPU": 8}), *devices)
    requested = ways(book, Query(resources={"VCPU": 1, "VGPU": 1, "FPGA": 1}), limit=4)
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
    book = book_of(*states)
    answer = search(book, query, explain=True)
    assert [book.name_of(row) for row in answer.roots] == ["p100"]
    assert answer.funnel[-1].rejected == {"too many combinations to try": 1}


def test_the_funnel_gives_the_reasons() -> None:
    book = book_of(
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
    funnel = search(book, query, explain=True).funnel
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
    book = book_of(provider(0, traits=("CUSTOM_ROOT",), aggregates=("az2",) if "az1" in str(query) else ()), CHILD)
    funnel = search(book, Query(resources={"VCPU": 1}, **query), explain=True).funnel  # type: ignore[arg-type]
    assert [(one.step, one.rejected) for one in funnel if one.rejected] == [(step, {reason: 1})]


def test_the_only_child_with_the_trait_is_full() -> None:
    """It is in use; that traits and resources are not on the same providers would be wrong."""
    states = [
        provider(0, inventories={"VCPU": 8}),
        provider(1, root=0, parent=0, inventories={"VGPU": 1}, used={"VGPU": 1}, traits=("CUSTOM_FAST",)),
        provider(2, root=0, parent=0, inventories={"VGPU": 1}),
    ]
    query = Query(resources={"VCPU": 1, "VGPU": 1}, required=(("CUSTOM_FAST",),))
    funnel = search(book_of(*states), query, explain=True).funnel
    assert [(one.step, one.rejected) for one in funnel if one.rejected] == [("VGPU", {"in use": 1})]


def test_a_reason_moves_with_the_host() -> None:
    """Reasons are worked out when they are asked for: one that was must not stay when the host has changed."""
    host = provider(0, inventories={"VCPU": 4}, used={"VCPU": 4})
    book = book_of(host)
    query = Query(resources={"VCPU": 2})
    assert search(book, query, explain=True).funnel[-1].rejected == {"in use": 1}
    smaller = structs.replace(host, generation=2, shape=2, inventories={"VCPU": inventory(1)}, used={})
    book.apply([changed(1, smaller)])
    assert search(book, query, explain=True).funnel[-1].rejected == {"capacity too small": 1}
    book.apply([removed(2, 0, 3)])
    assert search(book, query, explain=True).funnel[-1].rejected == {}


def test_what_is_held_back_is_not_called_too_small() -> None:
    """A bare-metal node in use or being cleaned has its one unit reserved."""
    held = structs.replace(provider(0), inventories={"CUSTOM_GOLD": (0.0, 1, 1, 1, 1, 1, 1.0)})
    query = Query(resources={"CUSTOM_GOLD": 1})
    assert search(book_of(held), query, explain=True).funnel[-1].rejected == {"reserved": 1}


def test_plans_are_bounded_and_forgotten_ones_answer_the_same() -> None:
    book = book_of(provider(0, inventories={"VCPU": 2 * QUERIES_KEPT}))
    for _ in range(2):
        for amount in range(1, 2 * QUERIES_KEPT + 1):
            assert found(book, Query(resources={"VCPU": amount})) == ["p0"]
            assert len(book.cache(VerdictsCache)) <= QUERIES_KEPT
        book.apply([used(1, 0, 2, {"VCPU": 0})])


def test_inventories_are_read_anew_after_a_sweep() -> None:
    """A sweep numbers distinct inventories anew: what was known by number must not stay."""
    book = book_of(provider(0, inventories={"VCPU": 1}), provider(1, inventories={"VCPU": 8}))
    query = Query(resources={"VCPU": 4})
    assert found(book, query) == ["p1"]
    book._sweep_at = 1
    book.apply([changed(1, provider(0, generation=2, shape=2, inventories={"VCPU": 8}))])
    assert book.epoch == 3
    assert found(book, query) == ["p0", "p1"]


def test_a_class_that_appears_later_is_found() -> None:
    book = book_of(provider(0))
    query = Query(resources={"CUSTOM_NEW": 1})
    assert found(book, query) == []
    book.load([provider(0, inventories={"CUSTOM_NEW": 1})], 5)
    assert found(book, query) == ["p0"]

"""The results of the REST API's writes, decided without a database: Placement's generations, capacity, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from placement_worker.domain.allocations import Remove, Replace, Reshape, decide, reshape
from placement_worker.domain.claim_ledger import ConsumerWrite
from placement_worker.domain.refusal import Why, WriteRefusal
from placement_worker.domain.reports import changes_of
from placement_worker.domain.trees import (
    CreateProvider,
    DeleteInventory,
    DeleteProvider,
    ProviderTrees,
    SetAggregates,
    SetInventories,
    SetTraits,
    TreeWrite,
    UpdateProvider,
    WriteInventory,
)
from placement_worker.domain.values import (
    ClaimedProvider,
    ConsumerState,
    InventoryUsage,
    Provider,
    StoredInventory,
    state_of,
)
from placement_worker.replica.book import Book
from tests.unit.replica.worlds import dump, loaded

# --- the results of the REST API's writes, decided without a database: Placement's generations, capacity, and
# refusals

CLASSES = {"VCPU": 1, "DISK_GB": 2}
TRAITS = {"CUSTOM_T": 1}


def inventory(total: int, **fields: Any) -> StoredInventory:
    return StoredInventory(
        **{
            "total": total,
            "reserved": 0,
            "min_unit": 1,
            "max_unit": 100,
            "step_size": 1,
            "allocation_ratio": 1.0,
            "capacity": total,
            **fields,
        }
    )


def provider(uuid: str, **fields: Any) -> Provider:
    made = {
        "parent": None,
        "root": uuid,
        "generation": 5,
        "shape": 5,
        "inventories": {},
        "used": {},
        "traits": (),
        "aggregates": (),
    }
    return Provider(uuid=uuid, name=f"name-{uuid}", **{**made, **fields})


def trees_of(*providers: Provider) -> ProviderTrees:
    return ProviderTrees({p.uuid: p for p in providers}, CLASSES, TRAITS, shape=6)


def why(outcome: object) -> Why | None:
    return outcome.why if isinstance(outcome, WriteRefusal) else None


def moved(outcome: object, before: Provider) -> tuple[int, bool]:
    assert isinstance(outcome, Provider), outcome
    return outcome.generation - before.generation, outcome.shape > before.shape


def test_generations_move_as_placement_moves_them() -> None:
    a = provider("a", inventories={"VCPU": inventory(4)}, traits=("CUSTOM_T",), aggregates=("g",))
    same = SetInventories("a", {"VCPU": inventory(4)}, 5)
    assert moved(trees_of(a).apply(same), a) == (1, False)
    assert moved(trees_of(a).apply(SetInventories("a", {"VCPU": inventory(5)}, 5)), a) == (1, True)
    assert moved(trees_of(a).apply(SetInventories("a", {})), a) == (1, True)
    assert moved(trees_of(a).apply(SetTraits("a", ["CUSTOM_T"], 5)), a) == (0, False)
    assert moved(trees_of(a).apply(SetTraits("a", [], 5)), a) == (1, True)
    assert moved(trees_of(a).apply(SetAggregates("a", ["g"], 5)), a) == (1, False)
    assert moved(trees_of(a).apply(SetAggregates("a", ["h"])), a) == (0, True)
    assert moved(trees_of(a).apply(UpdateProvider("a", "other")), a) == (0, False)


def test_a_parent_may_be_given_once_and_changed_from_1_37() -> None:
    a, b, c = provider("a"), provider("b"), provider("c")
    trees = trees_of(a, b, c)
    assert moved(trees.apply(UpdateProvider("b", "name-b", "a")), b) == (0, True)
    assert moved(trees.apply(UpdateProvider("c", "name-c", "b")), c) == (0, True)
    assert why(trees.apply(UpdateProvider("b", "name-b", "c"))) is Why.BAD_PARENT
    assert why(trees.apply(UpdateProvider("a", "name-a", "c", may_move=True))) is Why.BAD_PARENT, "a loop"
    assert why(trees.apply(UpdateProvider("b", "name-b", None))) is Why.BAD_PARENT
    assert why(trees.apply(DeleteProvider("b"))) is Why.IS_PARENT
    assert why(trees.apply(UpdateProvider("c", "name-c", "a"))) is Why.BAD_PARENT
    trees.apply(UpdateProvider("c", "name-c", "a", may_move=True))
    trees.apply(UpdateProvider("c", "name-c", "b", may_move=True))
    trees.apply(UpdateProvider("b", "name-b", None, may_move=True))
    assert {p.uuid: p.root for p in trees.providers.values()} == {"a": "a", "b": "b", "c": "b"}


def test_a_group_sees_what_it_has_done() -> None:
    trees = trees_of()
    assert why(trees.apply(SetInventories("a", {}))) is Why.NO_PROVIDER
    assert isinstance(trees.apply(CreateProvider("a", "n")), Provider)
    assert why(trees.apply(CreateProvider("b", "n"))) is Why.DUPLICATE
    assert isinstance(trees.apply(UpdateProvider("a", "m")), Provider)
    child = trees.apply(CreateProvider("b", "n", "a"))
    assert isinstance(child, Provider)
    assert child.root == "a"
    assert isinstance(trees.apply(DeleteProvider("b")), Provider)
    assert isinstance(trees.apply(DeleteProvider("a")), Provider)
    assert trees.providers == {}


@pytest.mark.parametrize(
    ("item", "refused"),
    [
        (SetInventories("a", {"DISK_GB": inventory(1)}, 5), None),
        (SetInventories("a", {"DISK_GB": inventory(1)}), None),
        (SetInventories("a", {"DISK_GB": inventory(1)}, 4), Why.GENERATION),
        (SetInventories("a", {"DISK_GB": inventory(1)}, 5, flaw="it is odd"), Why.BAD_INVENTORY),
        (SetInventories("a", {"CUSTOM_NONE": inventory(1)}, 5), Why.NO_SUCH),
        (WriteInventory("a", "DISK_GB", inventory(1)), None),
        (WriteInventory("a", "DISK_GB", inventory(1), flaw="it is odd"), Why.BAD_INVENTORY),
        (WriteInventory("a", "CUSTOM_NONE", inventory(1)), Why.NO_SUCH),
        (WriteInventory("a", "VCPU", inventory(1)), Why.DUPLICATE),
        (WriteInventory("a", "VCPU", inventory(1), 5), None),
        (WriteInventory("a", "VCPU", inventory(1), 4), Why.GENERATION),
        (WriteInventory("a", "VCPU", inventory(1), 5, flaw="it is odd"), Why.BAD_INVENTORY),
        (WriteInventory("a", "DISK_GB", inventory(1), 5), Why.NO_INVENTORY),
        (WriteInventory("a", "CUSTOM_NONE", inventory(1), 5), Why.NO_SUCH),
        (DeleteInventory("a", "VCPU"), None),
        (DeleteInventory("a", "DISK_GB"), Why.NO_INVENTORY),
        (DeleteInventory("a", "CUSTOM_NONE"), Why.NO_INVENTORY),
    ],
)
def test_a_write_of_inventories_is_refused_as_placement_refuses_it(item: TreeWrite, refused: Why | None) -> None:
    trees = trees_of(provider("a", inventories={"VCPU": inventory(4)}))
    assert why(trees.apply(item)) is refused
    assert (trees.providers["a"].generation == 6) is (refused is None)


def test_what_is_held_stays() -> None:
    a = provider("a", inventories={"VCPU": inventory(4), "DISK_GB": inventory(4)}, used={"DISK_GB": 1, "VCPU": 1})
    outcome = trees_of(a).apply(SetInventories("a", {}))
    assert isinstance(outcome, WriteRefusal)
    assert (outcome.why, "'VCPU, DISK_GB'" in outcome.words) == (Why.IN_USE, True)
    assert why(trees_of(a).apply(DeleteProvider("a"))) is Why.PROVIDER_IN_USE
    assert isinstance(
        trees_of(a).apply(SetInventories("a", {"VCPU": inventory(1), "DISK_GB": inventory(1, capacity=0)})), Provider
    )


def test_a_reshape_leaves_nothing_behind_that_is_held() -> None:
    a = provider("a", inventories={"VCPU": inventory(4)}, used={"VCPU": 2})
    b = provider("b")
    held = ConsumerState(1, 0, "p", "u", "X", {"a": {"VCPU": 2}})
    inventories = {"a": (5, {}), "b": (5, {"VCPU": inventory(4)})}
    book = {"a": a, "b": b}
    left = reshape(Reshape(inventories, ()), {"c": held}, book, CLASSES, shape=6)
    assert why(left) is Why.IN_USE
    move = ConsumerWrite("c", {"b": {"VCPU": 2}}, "p", "u", "X", 1)
    done = reshape(Reshape(inventories, (move,)), {"c": held}, book, CLASSES, shape=6)
    assert not isinstance(done, WriteRefusal)
    assert {u: (p.generation, p.used, set(p.inventories)) for u, p in done.final.items()} == {
        "a": (6, {}, set()),
        "b": (8, {"VCPU": 2}, {"VCPU"}),
    }
    assert why(reshape(Reshape({"a": (4, {})}, ()), {}, book, CLASSES, shape=6)) is Why.GENERATION
    assert why(reshape(Reshape({"z": (0, {})}, ()), {}, book, CLASSES, shape=6)) is Why.NO_PROVIDER


def claimed(**used: int) -> dict[str, ClaimedProvider]:
    return {
        uuid: ClaimedProvider(
            5, 5, {"VCPU": InventoryUsage(10, 1, 8, 1, amount), "DISK_GB": InventoryUsage(10, 2, 10, 2, 0)}, root=uuid
        )
        for uuid, amount in used.items()
    }


def write(consumer: str, amount: int, host: str = "a", name: str = "VCPU", **fields: Any) -> Replace:
    held = {host: {name: amount}} if amount else {}
    return Replace((ConsumerWrite(consumer, held, "p", "u", **fields),))


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (write("c", 8), None),
        (write("c", 9), Why.DOES_NOT_FIT),  # max_unit
        (write("c", 3, name="DISK_GB"), Why.DOES_NOT_FIT),  # step_size
        (write("c", 1, name="CUSTOM_NONE"), Why.NO_SUCH),
        (write("c", 1, host="z"), Why.NO_PROVIDER),
        (write("c", 1, expects=None), None),
        (write("c", 1, expects=1), Why.CONSUMER_GENERATION),
        (write("held", 1, expects=None), Why.CONSUMER_GENERATION),
        (write("held", 1, expects=3), None),
        (write("fenced", 1, expects=None), None),
        (Remove("c"), Why.NO_ALLOCATIONS),
        (Remove("held"), None),
    ],
)
def test_an_allocation_write_ends_as_placements_would(item: Replace | Remove, expected: Why | None) -> None:
    consumers = {
        "held": ConsumerState(3, 0, "p", "u", "X", {"a": {"VCPU": 2}}),
        "fenced": ConsumerState(4, 2, "p", "u", "X"),
    }
    [outcome], decision = decide([item], consumers, claimed(a=2), {**CLASSES})
    assert why(outcome) is expected
    assert bool(decision.consumers) is (expected is None)


@pytest.mark.parametrize(
    ("known", "stated", "kind"),
    [
        (None, None, ""),
        ({"a": {"VCPU": 2}}, None, "X"),
        ({}, None, ""),
        ({"a": {"VCPU": 2}}, "Y", "Y"),
    ],
)
def test_a_write_before_1_38_leaves_the_type_of_what_holds_something(
    known: dict[str, Any] | None, stated: str | None, kind: str
) -> None:
    consumers = {} if known is None else {"c": ConsumerState(3, 1, "p", "u", "X", known)}
    _, decision = decide([write("c", 1, consumer_type=stated)], consumers, claimed(a=2), CLASSES)
    after = decision.consumers["c"]
    assert after is not None and after.consumer_type == kind


def test_only_what_is_requested_or_emptied_moves_a_generation() -> None:
    held = ConsumerState(3, 0, "p", "u", "X", {"a": {"VCPU": 2}})
    for item, generations in (
        (write("c", 2, host="b"), {"a": 5, "b": 6}),
        (write("c", 0), {"a": 6}),
        (Remove("c"), {"a": 5}),
    ):
        _, decision = decide([item], {"c": held}, claimed(a=2, b=0), CLASSES)
        assert decision.generations == generations
        assert decision.used["a"]["VCPU"] == 0


def test_what_does_not_worsen_an_overage_is_allowed() -> None:
    held = ConsumerState(1, 0, "p", "u", "X", {"a": {"VCPU": 6}})
    for amount, fits in ((6, True), (5, True), (7, False)):
        [outcome], _ = decide([write("c", amount)], {"c": held}, claimed(a=20), CLASSES)
        assert (outcome is None) is fits


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("cde"), st.integers(0, 9), st.sampled_from("ab")), max_size=12))
def test_a_group_is_what_its_members_are_one_after_the_other(requested: list[tuple[str, int, str]]) -> None:
    items = [write(consumer, amount, host) for consumer, amount, host in requested]
    together, decision = decide(items, {}, claimed(a=0, b=0), CLASSES)
    consumers: dict[str, ConsumerState] = {}
    providers = claimed(a=0, b=0)
    apart = []
    for item in items:
        [outcome], step = decide([item], consumers, providers, CLASSES)
        apart.append(outcome)
        for uuid, after in step.consumers.items():
            consumers.pop(uuid, None)
            if after is not None:
                consumers[uuid] = after
        for uuid, used in step.used.items():
            inventories = {
                n: InventoryUsage(r.capacity, r.min_unit, r.max_unit, r.step_size, used.get(n, r.used))
                for n, r in providers[uuid].inventories.items()
            }
            providers[uuid] = ClaimedProvider(step.generations[uuid], 5, inventories, root=uuid)
    assert together == apart
    assert {u: c for u, c in decision.consumers.items() if c is not None} == consumers
    for uuid, used in decision.used.items():
        assert used["VCPU"] == providers[uuid].inventories["VCPU"].used <= 10
        assert decision.generations[uuid] == providers[uuid].generation


# --- whatever the REST API writes in one group: the feed carries what the book then is, and shapes never come back

A, B = UUIDS = [f"{letter * 8}-0000-4000-8000-000000000000" for letter in "ab"]
SOME = st.sampled_from(UUIDS)
STOCK_CLASSES, STOCK_TRAITS = {"VCPU": 0}, ("CUSTOM_X", "CUSTOM_Y")


def stock(total: int) -> StoredInventory:
    return StoredInventory(total, 0, 1, total, 1, 1.0, total)


def created(uuid: str, parent: str | None = None) -> CreateProvider:
    return CreateProvider(uuid, f"name-{uuid[0]}", parent)


# Objects that are written together: one write, or a provider deleted and created again.
WRITES: st.SearchStrategy[list[TreeWrite]] = st.one_of(
    st.builds(created, SOME, st.none() | SOME).map(lambda write: [write]),
    st.builds(lambda uuid: [DeleteProvider(uuid), created(uuid)], SOME),
    st.builds(lambda uuid: [DeleteProvider(uuid)], SOME),
    st.builds(lambda uuid, parent: [UpdateProvider(uuid, f"name-{uuid[0]}", parent, True)], SOME, st.none() | SOME),
    st.builds(lambda uuid, total: [SetInventories(uuid, {"VCPU": stock(total)})], SOME, st.integers(1, 3)),
    st.builds(lambda uuid, trait: [SetTraits(uuid, [trait])], SOME, st.sampled_from(STOCK_TRAITS)),
    st.builds(lambda uuid, other: [SetAggregates(uuid, [other])], SOME, SOME),
)
GROUPS = st.lists(
    st.lists(WRITES, min_size=1, max_size=5).map(lambda parts: [write for part in parts for write in part]),
    min_size=1,
    max_size=6,
)


@given(GROUPS)
def test_the_feed_carries_what_a_group_of_writes_comes_to(groups: list[list[TreeWrite]]) -> None:
    providers: Mapping[str, Provider] = {}
    book = Book()
    given: dict[str, set[int]] = {}
    for shape, group in enumerate(groups, 1):
        trees = ProviderTrees(providers, STOCK_CLASSES, STOCK_TRAITS, shape=shape)
        for write in group:
            trees.apply(write)
        changes = changes_of(providers, trees.providers)
        published = [replace(change, sequence=book.sequence + at) for at, change in enumerate(changes, 1)]
        assert book.apply(published) is None
        assert dump(book) == dump(loaded(map(state_of, trees.providers.values())))
        for uuid, provider in trees.providers.items():
            if uuid not in providers or providers[uuid].shape != provider.shape:
                assert provider.shape not in given.setdefault(uuid, set())
                given[uuid].add(provider.shape)
        providers = trees.providers


def test_deleted_and_created_again_in_one_group_is_published_as_both() -> None:
    """Its generation starts from 0 as Placement's does; replicas kept the old one, whose generation was higher."""
    first = ProviderTrees({}, STOCK_CLASSES, STOCK_TRAITS, shape=1)
    for write in (CreateProvider(A, "a"), SetTraits(A, ["CUSTOM_X"]), SetInventories(A, {"VCPU": stock(2)})):
        first.apply(write)
    second = ProviderTrees(first.providers, STOCK_CLASSES, STOCK_TRAITS, shape=2)
    for write in (DeleteProvider(A), CreateProvider(A, "a")):
        second.apply(write)
    assert second.providers[A].generation == 0
    changes = changes_of(first.providers, second.providers)
    assert [(change.removed, change.state is not None) for change in changes] == [(True, False), (False, True)]
    assert second.providers[A].shape > first.providers[A].shape

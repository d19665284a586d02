"""The results of the REST API's writes, decided without a database: Placement's generations, capacity, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from placement_worker.domain.allocations import Replace, decide
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

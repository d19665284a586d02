"""What a group of REST writes of providers names, and the provider that each write leaves, whole, as tables."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from placement_worker.domain.refusal import Why, WriteRefusal
from placement_worker.domain.trees import (
    ChangeMembership,
    CreateProvider,
    DeleteInventory,
    DeleteProvider,
    DeleteTree,
    ProviderTrees,
    SetAggregates,
    SetInventories,
    SetTraits,
    TreeWrite,
    UpdateProvider,
    WantedTrees,
    WriteInventory,
    adopted_providers,
    classes_of_trees,
    deleted_trees,
    entries_of_tree,
    in_use,
    traits_of_trees,
    wanted_trees,
)
from placement_worker.domain.values import Provider
from tests.unit.placement_rest.test_decisions import CLASSES, inventory, provider, why

SIX = inventory(6)


@pytest.mark.parametrize(
    ("write", "wanted", "entries", "named"),
    [
        (CreateProvider("a", "n"), WantedTrees({"a"}, {"n"}, set(), ["a"]), 1, (set(), set(), [])),
        (CreateProvider("a", "n", "p"), WantedTrees({"a", "p"}, {"n"}, set(), ["a"]), 1, (set(), set(), [])),
        (UpdateProvider("a", "n"), WantedTrees({"a"}, {"n"}, {"a"}, []), 1, (set(), set(), [])),
        (UpdateProvider("a", "n", None), WantedTrees({"a"}, {"n"}, {"a"}, []), 1, (set(), set(), [])),
        (UpdateProvider("a", "n", "p"), WantedTrees({"a", "p"}, {"n"}, {"a", "p"}, []), 1, (set(), set(), ["a"])),
        (DeleteProvider("a"), WantedTrees({"a"}, set(), {"a"}, []), 1, (set(), set(), [])),
        (DeleteTree("a"), WantedTrees({"a"}, set(), {"a"}, []), 1, (set(), set(), [])),
        (SetInventories("a", {"VCPU": SIX}), WantedTrees({"a"}, set(), set(), []), 2, ({"VCPU"}, set(), [])),
        (WriteInventory("a", "VCPU", SIX), WantedTrees({"a"}, set(), set(), []), 1, ({"VCPU"}, set(), [])),
        (DeleteInventory("a", "VCPU"), WantedTrees({"a"}, set(), set(), []), 1, (set(), set(), [])),
        (SetTraits("a", ["T", "U"]), WantedTrees({"a"}, set(), set(), []), 3, (set(), {"T", "U"}, [])),
        (SetAggregates("a", ["g"]), WantedTrees({"a"}, set(), set(), []), 2, (set(), set(), [])),
        (ChangeMembership("a", "g", True), WantedTrees({"a"}, set(), set(), []), 1, (set(), set(), [])),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TreeWrite) else "",
)
def test_what_a_write_names(write: TreeWrite, wanted: WantedTrees, entries: int, named: Any) -> None:
    assert wanted_trees([write]) == wanted
    assert entries_of_tree(write) == entries
    assert (classes_of_trees([write]), traits_of_trees([write]), adopted_providers([write])) == named


@pytest.mark.parametrize(("name", "words"), [("NONE", "No such resource class"), ("DISK_GB", "No inventory of class")])
def test_why_an_inventory_cannot_be_deleted(name: str, words: str) -> None:
    """Clients of Placement tell them by the text."""
    refused = trees(BEFORE).apply(DeleteInventory("a", name))
    assert isinstance(refused, WriteRefusal) and refused.why is Why.NO_INVENTORY and words in refused.words


def test_only_what_was_deleted_is_a_deleted_tree() -> None:
    writes = [DeleteTree("a"), DeleteTree("b"), DeleteProvider("c")]
    outcomes = [provider("a"), WriteRefusal(Why.PROVIDER_IN_USE), provider("c")]
    assert deleted_trees(writes, outcomes) == ["a"]
    with pytest.raises(ValueError, match="zip"):
        deleted_trees(writes, [])


BEFORE = provider("a", inventories={"VCPU": SIX}, aggregates=("g",), traits=("CUSTOM_T",), shape=5)
NEXT = {"generation": 6, "shape": 9}


def trees(*providers: Provider, reported: Any = ()) -> ProviderTrees:
    traits = {"CUSTOM_T": 1, "CUSTOM_U": 2}
    return ProviderTrees({one.uuid: one for one in providers}, CLASSES, traits, shape=9, reported=reported)


@pytest.mark.parametrize(
    ("write", "fields"),
    [
        (UpdateProvider("a", "name-a"), None),
        (UpdateProvider("a", "name-a", None), None),
        (UpdateProvider("a", "other"), {"name": "other"}),
        (SetInventories("a", {"VCPU": SIX}), {"generation": 6}),
        (SetInventories("a", {"DISK_GB": SIX}, 5), {"inventories": {"DISK_GB": SIX}, **NEXT}),
        (WriteInventory("a", "DISK_GB", SIX), {"inventories": {"VCPU": SIX, "DISK_GB": SIX}, **NEXT}),
        (WriteInventory("a", "VCPU", inventory(7), 5), {"inventories": {"VCPU": inventory(7)}, **NEXT}),
        (DeleteInventory("a", "VCPU"), {"inventories": {}, **NEXT}),
        (SetTraits("a", ["CUSTOM_T"], 5), None),
        (SetTraits("a", ["CUSTOM_U"]), {"traits": ("CUSTOM_U",), "lasting": ("CUSTOM_U",), **NEXT}),
        (SetTraits("a", [], 5), {"traits": (), **NEXT}),
        (SetAggregates("a", ["g"]), None),
        (SetAggregates("a", ["g"], 5), {"generation": 6}),
        (SetAggregates("a", ["h", "g"]), {"aggregates": ("g", "h"), "shape": 9}),
        (SetAggregates("a", ["h"], 5), {"aggregates": ("h",), **NEXT}),
        (ChangeMembership("a", "g", True), None),
        (ChangeMembership("a", "h", False), None),
        (ChangeMembership("a", "f", True), {"aggregates": ("f", "g"), **NEXT}),
        (ChangeMembership("a", "g", False), {"aggregates": (), **NEXT}),
        (SetInventories("a", {"VCPU": SIX}, 4), Why.GENERATION),
        (SetTraits("a", [], 4), Why.GENERATION),
        (SetTraits("a", ["CUSTOM_T", "CUSTOM_V"]), Why.NO_SUCH),
        (SetAggregates("a", [], 4), Why.GENERATION),
        (SetTraits("z", []), Why.NO_PROVIDER),
        (UpdateProvider("a", "name-b"), Why.DUPLICATE),
        (UpdateProvider("a", "name-a", "z"), Why.BAD_PARENT),
    ],
)
def test_the_provider_after_a_write(write: TreeWrite, fields: Any) -> None:
    book = trees(BEFORE, provider("b"))
    outcome = book.apply(write)
    if isinstance(fields, dict):
        assert outcome == replace(BEFORE, **fields)
        assert book.providers["a"] is outcome
    else:
        assert why(outcome) is fields
        assert book.providers["a"] is BEFORE, "it is not written"


ROOT = provider("a")
CHILD = provider("b", parent="a", root="a")
BELOW = provider("c", parent="b", root="a")
OTHER = provider("d")


@pytest.mark.parametrize(
    ("write", "roots"),
    [
        (UpdateProvider("a", "name-a", "d"), {"a": "d", "b": "d", "c": "d", "d": "d"}),
        (UpdateProvider("b", "name-b", "d", True), {"a": "a", "b": "d", "c": "d", "d": "d"}),
        (UpdateProvider("b", "name-b", None, True), {"a": "a", "b": "b", "c": "b", "d": "d"}),
        (UpdateProvider("c", "name-c", "a", True), {"a": "a", "b": "a", "c": "a", "d": "d"}),
        (UpdateProvider("c", "name-c", "b"), {}),
        (UpdateProvider("d", "name-d", "c"), {"a": "a", "b": "a", "c": "a", "d": "a"}),
        (UpdateProvider("d", "name-d", None, True), {}),
        (UpdateProvider("b", "name-b", "c", True), Why.BAD_PARENT),
        (UpdateProvider("b", "name-b", "b", True), Why.BAD_PARENT),
        (UpdateProvider("b", "name-b", None), Why.BAD_PARENT),
        (UpdateProvider("b", "name-b", "d"), Why.BAD_PARENT),
        (UpdateProvider("c", "name-c", "a"), Why.BAD_PARENT),
        (UpdateProvider("b", "name-d", "d", True), Why.DUPLICATE),
        (DeleteProvider("b"), Why.IS_PARENT),
        (DeleteProvider("c"), {"a": "a", "b": "a", "d": "d"}),
        (DeleteTree("b"), {"a": "a", "d": "d"}),
        (DeleteTree("a"), {"d": "d"}),
        (CreateProvider("e", "name-e", "c"), {"a": "a", "b": "a", "c": "a", "d": "d", "e": "a"}),
        (CreateProvider("e", "name-e"), {"a": "a", "b": "a", "c": "a", "d": "d", "e": "e"}),
        (CreateProvider("e", "name-e", "z"), Why.BAD_PARENT),
        (CreateProvider("e", "name-e", "e"), Why.BAD_PARENT),
        (CreateProvider("d", "name-e", "d"), Why.BAD_PARENT),
        (CreateProvider("e", "name-d", "z"), Why.BAD_PARENT),
        (CreateProvider("e", "name-d"), Why.DUPLICATE),
        (CreateProvider("d", "name-e"), Why.DUPLICATE),
    ],
)
def test_the_trees_after_a_write(write: TreeWrite, roots: Any) -> None:
    """A provider has the new shape when its parent or root is another."""
    before = {one.uuid: one for one in (ROOT, CHILD, BELOW, OTHER)}
    book = trees(*before.values())
    outcome = book.apply(write)
    if isinstance(roots, Why) or not roots:
        assert why(outcome) is (roots or None)
        assert all(book.providers[uuid] is one for uuid, one in before.items()) and len(book.providers) == 4
        return
    assert {uuid: one.root for uuid, one in book.providers.items()} == roots
    for uuid, one in book.providers.items():
        old = before.get(uuid)
        is_placed = old is None or (one.parent, one.root) != (old.parent, old.root)
        assert (one.shape, one.generation) == (9 if is_placed else 5, 5 if old else 0)
    assert outcome == (before if isinstance(write, DeleteProvider | DeleteTree) else book.providers)[write.uuid]


def test_what_is_below_a_provider_that_moves_within_its_tree_stays_as_it_is() -> None:
    book = trees(ROOT, CHILD, BELOW, provider("e", parent="a", root="a"))
    book.apply(UpdateProvider("b", "name-b", "e", True))
    assert book.providers["b"] == replace(CHILD, parent="e", shape=9) and book.providers["c"] is BELOW


@pytest.mark.parametrize(
    ("uuid", "parent", "reported", "refused"),
    [
        ("a", "d", {"a"}, Why.BAD_PARENT),
        ("a", "d", {"d"}, None),
        ("a", None, {"a"}, None),
        ("b", "d", {"a"}, None),
    ],
    ids=["a host", "below a host", "stays a root", "below a host, away"],
)
def test_a_host_that_its_source_reports_stays_a_root(
    uuid: str, parent: str, reported: Any, refused: Why | None
) -> None:
    book = trees(ROOT, CHILD, OTHER, reported=reported)
    assert why(book.apply(UpdateProvider(uuid, f"name-{uuid}", parent, True))) is refused


@pytest.mark.parametrize(
    ("write", "used", "refused"),
    [
        (DeleteProvider("c"), {"VCPU": 1}, Why.PROVIDER_IN_USE),
        (DeleteProvider("c"), {"VCPU": 0}, None),
        (DeleteTree("b"), {"DISK_GB": 0, "VCPU": 1}, Why.PROVIDER_IN_USE),
        (DeleteTree("b"), {"VCPU": 0}, None),
        (SetInventories("c", {}), {"VCPU": 1}, Why.IN_USE),
        (SetInventories("c", {}), {"VCPU": 0}, None),
        (DeleteInventory("c", "VCPU"), {"VCPU": 1}, Why.IN_USE),
        (SetInventories("c", {"VCPU": inventory(1)}), {"VCPU": 4}, None),
    ],
)
def test_what_consumers_hold_is_not_deleted(write: TreeWrite, used: dict[str, int], refused: Why | None) -> None:
    book = trees(ROOT, CHILD, replace(BELOW, inventories={"VCPU": SIX}, used=used))
    outcome = book.apply(write)
    assert why(outcome) is refused
    if isinstance(write, DeleteTree) and refused:
        assert isinstance(outcome, WriteRefusal) and "VCPU 1 " in outcome.words and "DISK_GB" not in outcome.words


@pytest.mark.parametrize(
    "write", [DeleteProvider("a"), DeleteTree("a"), UpdateProvider("a", "other")], ids=lambda one: type(one).__name__
)
def test_a_name_that_was_given_up_is_free(write: TreeWrite) -> None:
    book = trees(ROOT)
    book.apply(write)
    assert why(book.apply(CreateProvider("e", "name-a"))) is None
    assert why(book.apply(CreateProvider("f", "name-a"))) is Why.DUPLICATE
    assert (why(book.apply(CreateProvider("f", "other"))) is Why.DUPLICATE) is isinstance(write, UpdateProvider)


def test_what_is_in_use_is_listed_in_placements_order() -> None:
    assert "'VCPU, DISK_GB, CUSTOM_A, CUSTOM_B'" in in_use("a", ["CUSTOM_B", "DISK_GB", "CUSTOM_A", "VCPU"]).words

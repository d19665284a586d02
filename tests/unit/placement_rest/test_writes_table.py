"""What a group of REST writes names, touches and leaves, as tables."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from placement_worker.domain.allocations import (
    AllocationWrite,
    Remove,
    Replace,
    Reshape,
    Reshaped,
    classes_of_allocations,
    decide,
    entries_of_allocations,
    expected_rows,
    reshape,
    touched,
)
from placement_worker.domain.claim_ledger import ConsumerWrite
from placement_worker.domain.refusal import RefusalCode, WriteRefusal
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
    TreesToLock,
    TreeWrite,
    UpdateProvider,
    WriteInventory,
    classes_of_trees,
    deleted_trees,
    entries_of_tree,
    in_use,
    reparented_providers,
    traits_of_trees,
    trees_to_lock,
)
from placement_worker.domain.values import ConsumerState, Provider, ProviderAllocations
from tests.unit.placement_rest.test_decisions import CLASSES, claimed, inventory, provider, why

# --- What a group of REST allocation writes names, touches and refuses, as tables.


HELD: ProviderAllocations = {"a": {"VCPU": 2}}


def wants(consumer: str, holding: ProviderAllocations, **fields: Any) -> ConsumerWrite:
    return ConsumerWrite(consumer, holding, "p", "u", **fields)


BOTH = Replace((wants("c", {"a": {"VCPU": 1, "DISK_GB": 2}, "b": {"VCPU": 1}}), wants("d", {})), cause="both")
TYPED = Replace((wants("c", HELD, consumer_type="X"),))
GONE = Remove("held", cause="gone")
NEW = ConsumerState(1, 0, "p", "u", "")


@pytest.mark.parametrize(
    ("item", "rows", "providers", "classes", "entries"),
    [
        (BOTH, {"c": NEW, "d": NEW}, {"a", "b"}, {"VCPU", "DISK_GB"}, 7),
        (TYPED, {"c": ConsumerState(1, 0, "p", "u", "X")}, {"a"}, {"VCPU"}, 3),
        (GONE, {"held": ConsumerState(0, 0, "", "", "")}, set(), set(), 1),
    ],
    ids=["several", "one with a type", "removal"],
)
def test_what_a_write_names(
    item: AllocationWrite, rows: dict[str, ConsumerState], providers: set[str], classes: set[str], entries: int
) -> None:
    assert expected_rows([item]) == (rows, providers)
    assert classes_of_allocations([GONE, item]) == classes
    assert entries_of_allocations(item) == entries
    earlier = Replace(tuple(wants(one, {}, consumer_type="FIRST") for one in rows))
    first = ConsumerState(1, 0, "p", "u", "FIRST")
    assert expected_rows([earlier, item])[0] == dict.fromkeys(rows, first), "the first write gives the new row"


@pytest.mark.parametrize(
    ("item", "outcome", "expected"),
    [
        (BOTH, None, [("both", {"a", "b", "z"})]),
        (BOTH, WriteRefusal(RefusalCode.DOES_NOT_FIT), []),
        (GONE, None, [("gone", {"y"})]),
        (Remove("unknown"), None, [("", set())]),
    ],
    ids=["several", "refused", "removal", "of nobody"],
)
def test_the_providers_that_a_write_touches(item: AllocationWrite, outcome: Any, expected: list[Any]) -> None:
    """Those that it names, and those that its consumers held."""
    held = {"d": ConsumerState(1, 0, "p", "u", "", {"z": {"VCPU": 1}})}
    gone = {"held": ConsumerState(1, 0, "p", "u", "", {"y": {"VCPU": 1}})}
    assert list(touched([item], [outcome], held | gone)) == expected
    assert list(touched([BOTH, item], [WriteRefusal(RefusalCode.GENERATION), outcome], held | gone)) == expected
    with pytest.raises(ValueError, match="zip"):
        list(touched([item], [], {}))


KNOWN = {
    "held": ConsumerState(3, 0, "p", "u", "X", HELD),
    "tried": ConsumerState(4, 2, "p", "u", "X", HELD, "r"),
    "released": ConsumerState(4, 2, "p", "u", "X", claim_owner="r"),
}


@pytest.mark.parametrize(
    ("writes", "refused", "about"),
    [
        ([wants("held", {}, expects=3), wants("new", {"a": {"VCPU": 8}})], None, ""),
        ([wants("held", {}, expects=3), wants("new", {"a": {"VCPU": 7}}), wants("c", {"a": {"VCPU": 2}})], None, ""),
        (
            [wants("held", {}), wants("new", {"a": {"VCPU": 7}}), wants("c", {"a": {"VCPU": 3}})],
            RefusalCode.DOES_NOT_FIT,
            "a",
        ),
        ([wants("new", {"a": {"VCPU": 7}}), wants("c", {"b": {"VCPU": 1}})], None, ""),
        ([wants("new", {"a": {"VCPU": 8}}), wants("c", {"a": {"VCPU": 1}})], RefusalCode.DOES_NOT_FIT, "a"),
        ([wants("c", {"b": {"DISK_GB": 2}}), wants("held", {"a": {"VCPU": 9}})], RefusalCode.DOES_NOT_FIT, "a"),
        ([wants("held", {"a": {"DISK_GB": 3}})], RefusalCode.DOES_NOT_FIT, "a"),
        ([wants("c", {"a": {"MEMORY_MB": 1}})], RefusalCode.DOES_NOT_FIT, "a"),
        ([wants("c", {"a": {"VCPU": 1}}), wants("d", {"b": {"VCPU": 1, "NONE": 1}})], RefusalCode.NO_SUCH, "NONE"),
        ([wants("c", {"a": {"NONE": 1}}), wants("d", {"z": {"VCPU": 1}})], RefusalCode.NO_PROVIDER, "z"),
        ([wants("c", {"z": {"VCPU": 1}}), wants("held", HELD, expects=4)], RefusalCode.CONSUMER_GENERATION, "held"),
        ([wants("released", HELD, expects=4)], RefusalCode.CONSUMER_GENERATION, "released"),
        ([wants("tried", HELD, attempt=2)], None, ""),
        ([wants("tried", HELD, attempt=1)], RefusalCode.CONSUMER_GENERATION, "tried"),
        ([wants("new", HELD, attempt=1)], None, ""),
    ],
)
def test_a_write_of_several_consumers_is_refused_for_its_first_flaw(
    writes: list[ConsumerWrite], refused: RefusalCode | None, about: str
) -> None:
    [outcome], decision = decide([Replace(tuple(writes))], KNOWN, claimed(a=3, b=0), {**CLASSES, "MEMORY_MB": 3})
    assert (why(outcome), getattr(outcome, "about", "")) == (refused, about)
    assert bool(decision.consumers) is (refused is None)


@pytest.mark.parametrize(("consumer", "generation"), [("held", "3"), ("released", "null"), ("new", "null")])
def test_a_conflict_names_the_generation_of_what_is_held(consumer: str, generation: str) -> None:
    """Clients of Placement read it there."""
    [outcome], _ = decide([Replace((wants(consumer, HELD, expects=9),))], KNOWN, claimed(a=2), CLASSES)
    assert isinstance(outcome, WriteRefusal) and f"expected {generation} " in outcome.words


@pytest.mark.parametrize(
    ("consumer", "wanted", "after"),
    [
        ("new", {"a": {"VCPU": 1}}, ConsumerState(1, 0, "p", "u", "", {"a": {"VCPU": 1}})),
        ("held", {"a": {"VCPU": 1}}, ConsumerState(4, 0, "p", "u", "X", {"a": {"VCPU": 1}})),
        ("tried", {"a": {"VCPU": 1}}, ConsumerState(5, 2, "p", "u", "X", {"a": {"VCPU": 1}}, "r")),
        ("released", {"a": {"VCPU": 1}}, ConsumerState(5, 2, "p", "u", "", {"a": {"VCPU": 1}})),
        ("held", {}, None),
        ("tried", {}, ConsumerState(4, 2, "p", "u", "X", claim_owner="r")),
        ("released", {}, "same"),
        ("new", {}, "same"),
    ],
)
def test_the_row_after_a_write(consumer: str, wanted: ProviderAllocations, after: Any) -> None:
    """A consumer whose attempts a claim has numbered stays, as they have ended. What is written over ended attempts
    is not the claim of its run: a late release by that run would give the room away.
    """
    _, decision = decide([Replace((wants(consumer, wanted),))], KNOWN, claimed(a=2), CLASSES)
    assert decision.consumers == ({} if after == "same" else {consumer: after})


@pytest.mark.parametrize(
    ("consumer", "refused", "after"),
    [
        ("held", None, None),
        ("tried", None, ConsumerState(4, 2, "p", "u", "X", claim_owner="r")),
        ("released", "released", None),
        ("new", "new", None),
    ],
)
def test_only_a_consumer_that_holds_something_is_removed(
    consumer: str, refused: str | None, after: ConsumerState | None
) -> None:
    """It leaves the same as a write of nothing: a late claim of an attempt cannot create it again."""
    [outcome], decision = decide([Remove(consumer)], KNOWN, claimed(a=2), CLASSES)
    assert getattr(outcome, "about", None) == refused
    assert decision.consumers == ({} if refused else {consumer: after})


# --- a reshape

HOLDER = {"c": ConsumerState(1, 0, "p", "u", "X", HELD)}
PROVIDERS = {
    "a": provider("a", inventories={"VCPU": inventory(4), "DISK_GB": inventory(9)}, used={"VCPU": 2, "DISK_GB": 0}),
    "b": provider("b", generation=7),
}
MOVE = wants("c", {"b": {"VCPU": 2}}, expects=1)
SPLIT = {"a": (5, {"DISK_GB": inventory(8)}), "b": (7, {"VCPU": inventory(2)})}


def test_the_rows_of_a_reshape() -> None:
    done = reshape(Reshape(SPLIT, (MOVE,)), HOLDER, PROVIDERS, CLASSES, spec_generation=6)
    assert isinstance(done, Reshaped)
    interim = {u: (p.generation, p.spec_generation, p.used, p.inventories) for u, p in done.interim.items()}
    assert interim == {
        "a": (5, 6, {"VCPU": 2, "DISK_GB": 0}, {"VCPU": inventory(4), "DISK_GB": inventory(8)}),
        "b": (7, 6, {}, {"VCPU": inventory(2)}),
    }
    assert done.decision.generations == {"a": 5, "b": 8}
    assert {u: (p.generation, p.spec_generation, p.used, p.inventories) for u, p in done.final.items()} == {
        "a": (7, 6, {}, {"DISK_GB": inventory(8)}),
        "b": (10, 6, {"VCPU": 2}, {"VCPU": inventory(2)}),
    }


@pytest.mark.parametrize(
    ("inventories", "writes", "expected"),
    [
        ({"a": (5, {"VCPU": inventory(2)})}, (), {"a": (7, {"VCPU": 2})}),
        ({"b": (7, {})}, (), {"b": (8, {})}),
        ({"b": (7, {"VCPU": inventory(2)})}, (MOVE,), {"b": (10, {"VCPU": 2})}),
        ({"a": (5, {})}, (wants("c", {}, expects=1),), {"a": (7, {})}),
        ({"a": (5, {})}, (), (RefusalCode.IN_USE, "a")),
        ({"a": (5, {"DISK_GB": inventory(8)}), "b": (7, {})}, (), (RefusalCode.IN_USE, "a")),
        ({"a": (6, {})}, (), (RefusalCode.GENERATION, "")),
        ({"a": (5, {"VCPU": inventory(2)}), "z": (0, {})}, (), (RefusalCode.NO_PROVIDER, "z")),
        ({"a": (5, {"VCPU": inventory(2)}), "b": (7, {"NONE": inventory(2)})}, (), (RefusalCode.NO_SUCH, "NONE")),
        (SPLIT, (wants("c", {"b": {"VCPU": 3}}, expects=1),), (RefusalCode.DOES_NOT_FIT, "b")),
    ],
    ids=[
        "smaller",
        "of nothing",
        "of another provider than the consumer's former one",
        "emptied",
        "in use",
        "one class in use",
        "another generation",
        "unknown provider",
        "unknown class",
        "too much",
    ],
)
def test_the_end_of_a_reshape(inventories: dict[str, Any], writes: tuple[ConsumerWrite, ...], expected: Any) -> None:
    done = reshape(Reshape(inventories, writes), HOLDER, PROVIDERS, CLASSES, spec_generation=6)
    if isinstance(done, WriteRefusal):
        assert (done.code, done.about) == expected
    else:
        assert {uuid: (after.generation, after.used) for uuid, after in done.final.items()} == expected


# --- What a group of REST writes of providers names, and the provider that each write leaves, whole, as tables.


SIX = inventory(6)


@pytest.mark.parametrize(
    ("write", "wanted", "entries", "named"),
    [
        (CreateProvider("a", "n"), TreesToLock({"a"}, {"n"}, set(), ["a"]), 1, (set(), set(), [])),
        (CreateProvider("a", "n", "p"), TreesToLock({"a", "p"}, {"n"}, set(), ["a"]), 1, (set(), set(), [])),
        (UpdateProvider("a", "n"), TreesToLock({"a"}, {"n"}, {"a"}, []), 1, (set(), set(), [])),
        (UpdateProvider("a", "n", None), TreesToLock({"a"}, {"n"}, {"a"}, []), 1, (set(), set(), [])),
        (UpdateProvider("a", "n", "p"), TreesToLock({"a", "p"}, {"n"}, {"a", "p"}, []), 1, (set(), set(), ["a"])),
        (DeleteProvider("a"), TreesToLock({"a"}, set(), {"a"}, []), 1, (set(), set(), [])),
        (DeleteTree("a"), TreesToLock({"a"}, set(), {"a"}, []), 1, (set(), set(), [])),
        (SetInventories("a", {"VCPU": SIX}), TreesToLock({"a"}, set(), set(), []), 2, ({"VCPU"}, set(), [])),
        (WriteInventory("a", "VCPU", SIX), TreesToLock({"a"}, set(), set(), []), 1, ({"VCPU"}, set(), [])),
        (DeleteInventory("a", "VCPU"), TreesToLock({"a"}, set(), set(), []), 1, (set(), set(), [])),
        (SetTraits("a", ["T", "U"]), TreesToLock({"a"}, set(), set(), []), 3, (set(), {"T", "U"}, [])),
        (SetAggregates("a", ["g"]), TreesToLock({"a"}, set(), set(), []), 2, (set(), set(), [])),
        (ChangeMembership("a", "g", True), TreesToLock({"a"}, set(), set(), []), 1, (set(), set(), [])),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TreeWrite) else "",
)
def test_what_a_write_of_providers_names(write: TreeWrite, wanted: TreesToLock, entries: int, named: Any) -> None:
    assert trees_to_lock([write]) == wanted
    assert entries_of_tree(write) == entries
    assert (classes_of_trees([write]), traits_of_trees([write]), reparented_providers([write])) == named


@pytest.mark.parametrize(("name", "words"), [("NONE", "No such resource class"), ("DISK_GB", "No inventory of class")])
def test_why_an_inventory_cannot_be_deleted(name: str, words: str) -> None:
    """Clients of Placement tell them by the text."""
    refused = trees(BEFORE).apply(DeleteInventory("a", name))
    assert isinstance(refused, WriteRefusal) and refused.code is RefusalCode.NO_INVENTORY and words in refused.words


def test_only_what_was_deleted_is_a_deleted_tree() -> None:
    writes = [DeleteTree("a"), DeleteTree("b"), DeleteProvider("c")]
    outcomes = [provider("a"), WriteRefusal(RefusalCode.PROVIDER_IN_USE), provider("c")]
    assert deleted_trees(writes, outcomes) == ["a"]
    with pytest.raises(ValueError, match="zip"):
        deleted_trees(writes, [])


BEFORE = provider("a", inventories={"VCPU": SIX}, aggregates=("g",), traits=("CUSTOM_T",), spec_generation=5)
NEXT = {"generation": 6, "spec_generation": 9}


def trees(*providers: Provider, reported: Any = ()) -> ProviderTrees:
    traits = {"CUSTOM_T": 1, "CUSTOM_U": 2}
    return ProviderTrees({one.uuid: one for one in providers}, CLASSES, traits, spec_generation=9, reported=reported)


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
        (SetTraits("a", ["CUSTOM_U"]), {"traits": ("CUSTOM_U",), "own_traits": ("CUSTOM_U",), **NEXT}),
        (SetTraits("a", [], 5), {"traits": (), **NEXT}),
        (SetAggregates("a", ["g"]), None),
        (SetAggregates("a", ["g"], 5), {"generation": 6}),
        (SetAggregates("a", ["h", "g"]), {"aggregates": ("g", "h"), "spec_generation": 9}),
        (SetAggregates("a", ["h"], 5), {"aggregates": ("h",), **NEXT}),
        (ChangeMembership("a", "g", True), None),
        (ChangeMembership("a", "h", False), None),
        (ChangeMembership("a", "f", True), {"aggregates": ("f", "g"), **NEXT}),
        (ChangeMembership("a", "g", False), {"aggregates": (), **NEXT}),
        (SetInventories("a", {"VCPU": SIX}, 4), RefusalCode.GENERATION),
        (SetTraits("a", [], 4), RefusalCode.GENERATION),
        (SetTraits("a", ["CUSTOM_T", "CUSTOM_V"]), RefusalCode.NO_SUCH),
        (SetAggregates("a", [], 4), RefusalCode.GENERATION),
        (SetTraits("z", []), RefusalCode.NO_PROVIDER),
        (UpdateProvider("a", "name-b"), RefusalCode.DUPLICATE),
        (UpdateProvider("a", "name-a", "z"), RefusalCode.BAD_PARENT),
    ],
)
def test_the_provider_after_a_write(write: TreeWrite, fields: Any) -> None:
    recorded = trees(BEFORE, provider("b"))
    outcome = recorded.apply(write)
    if isinstance(fields, dict):
        assert outcome == replace(BEFORE, **fields)
        assert recorded.providers["a"] is outcome
    else:
        assert why(outcome) is fields
        assert recorded.providers["a"] is BEFORE, "it is not written"


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
        (UpdateProvider("b", "name-b", "c", True), RefusalCode.BAD_PARENT),
        (UpdateProvider("b", "name-b", "b", True), RefusalCode.BAD_PARENT),
        (UpdateProvider("b", "name-b", None), RefusalCode.BAD_PARENT),
        (UpdateProvider("b", "name-b", "d"), RefusalCode.BAD_PARENT),
        (UpdateProvider("c", "name-c", "a"), RefusalCode.BAD_PARENT),
        (UpdateProvider("b", "name-d", "d", True), RefusalCode.DUPLICATE),
        (DeleteProvider("b"), RefusalCode.IS_PARENT),
        (DeleteProvider("c"), {"a": "a", "b": "a", "d": "d"}),
        (DeleteTree("b"), {"a": "a", "d": "d"}),
        (DeleteTree("a"), {"d": "d"}),
        (CreateProvider("e", "name-e", "c"), {"a": "a", "b": "a", "c": "a", "d": "d", "e": "a"}),
        (CreateProvider("e", "name-e"), {"a": "a", "b": "a", "c": "a", "d": "d", "e": "e"}),
        (CreateProvider("e", "name-e", "z"), RefusalCode.BAD_PARENT),
        (CreateProvider("e", "name-e", "e"), RefusalCode.BAD_PARENT),
        (CreateProvider("d", "name-e", "d"), RefusalCode.BAD_PARENT),
        (CreateProvider("e", "name-d", "z"), RefusalCode.BAD_PARENT),
        (CreateProvider("e", "name-d"), RefusalCode.DUPLICATE),
        (CreateProvider("d", "name-e"), RefusalCode.DUPLICATE),
    ],
)
def test_the_trees_after_a_write(write: TreeWrite, roots: Any) -> None:
    """A provider has the new spec generation when its parent or root is another."""
    before = {one.uuid: one for one in (ROOT, CHILD, BELOW, OTHER)}
    recorded = trees(*before.values())
    outcome = recorded.apply(write)
    if isinstance(roots, RefusalCode) or not roots:
        assert why(outcome) is (roots or None)
        assert all(recorded.providers[uuid] is one for uuid, one in before.items()) and len(recorded.providers) == 4
        return
    assert {uuid: one.root for uuid, one in recorded.providers.items()} == roots
    for uuid, one in recorded.providers.items():
        old = before.get(uuid)
        is_placed = old is None or (one.parent, one.root) != (old.parent, old.root)
        assert (one.spec_generation, one.generation) == (9 if is_placed else 5, 5 if old else 0)
    assert outcome == (before if isinstance(write, DeleteProvider | DeleteTree) else recorded.providers)[write.uuid]


def test_what_is_below_a_provider_that_moves_within_its_tree_stays_as_it_is() -> None:
    recorded = trees(ROOT, CHILD, BELOW, provider("e", parent="a", root="a"))
    recorded.apply(UpdateProvider("b", "name-b", "e", True))
    assert recorded.providers["b"] == replace(CHILD, parent="e", spec_generation=9) and recorded.providers["c"] is BELOW


@pytest.mark.parametrize(
    ("uuid", "parent", "reported", "refused"),
    [
        ("a", "d", {"a"}, RefusalCode.BAD_PARENT),
        ("a", "d", {"d"}, None),
        ("a", None, {"a"}, None),
        ("b", "d", {"a"}, None),
    ],
    ids=["a host", "below a host", "stays a root", "below a host, away"],
)
def test_a_host_that_its_source_reports_stays_a_root(
    uuid: str, parent: str, reported: Any, refused: RefusalCode | None
) -> None:
    recorded = trees(ROOT, CHILD, OTHER, reported=reported)
    assert why(recorded.apply(UpdateProvider(uuid, f"name-{uuid}", parent, True))) is refused


@pytest.mark.parametrize(
    ("write", "used", "refused"),
    [
        (DeleteProvider("c"), {"VCPU": 1}, RefusalCode.PROVIDER_IN_USE),
        (DeleteProvider("c"), {"VCPU": 0}, None),
        (DeleteTree("b"), {"DISK_GB": 0, "VCPU": 1}, RefusalCode.PROVIDER_IN_USE),
        (DeleteTree("b"), {"VCPU": 0}, None),
        (SetInventories("c", {}), {"VCPU": 1}, RefusalCode.IN_USE),
        (SetInventories("c", {}), {"VCPU": 0}, None),
        (DeleteInventory("c", "VCPU"), {"VCPU": 1}, RefusalCode.IN_USE),
        (SetInventories("c", {"VCPU": inventory(1)}), {"VCPU": 4}, None),
    ],
)
def test_what_consumers_hold_is_not_deleted(
    write: TreeWrite, used: dict[str, int], refused: RefusalCode | None
) -> None:
    recorded = trees(ROOT, CHILD, replace(BELOW, inventories={"VCPU": SIX}, used=used))
    outcome = recorded.apply(write)
    assert why(outcome) is refused
    if isinstance(write, DeleteTree) and refused:
        assert isinstance(outcome, WriteRefusal) and "VCPU 1 " in outcome.words and "DISK_GB" not in outcome.words


@pytest.mark.parametrize(
    "write", [DeleteProvider("a"), DeleteTree("a"), UpdateProvider("a", "other")], ids=lambda one: type(one).__name__
)
def test_a_name_that_was_given_up_is_free(write: TreeWrite) -> None:
    recorded = trees(ROOT)
    recorded.apply(write)
    assert why(recorded.apply(CreateProvider("e", "name-a"))) is None
    assert why(recorded.apply(CreateProvider("f", "name-a"))) is RefusalCode.DUPLICATE
    assert (why(recorded.apply(CreateProvider("f", "other"))) is RefusalCode.DUPLICATE) is isinstance(
        write, UpdateProvider
    )


def test_what_is_in_use_is_listed_in_placements_order() -> None:
    assert "'VCPU, DISK_GB, CUSTOM_A, CUSTOM_B'" in in_use("a", ["CUSTOM_B", "DISK_GB", "CUSTOM_A", "VCPU"]).words

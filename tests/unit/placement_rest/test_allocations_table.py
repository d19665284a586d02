"""What a group of REST allocation writes names, touches and refuses, as tables."""

from __future__ import annotations

from typing import Any

import pytest

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
from placement_worker.domain.refusal import Why, WriteRefusal
from placement_worker.domain.values import ConsumerState, Holding
from tests.unit.placement_rest.test_decisions import CLASSES, claimed, inventory, provider, why

HELD: Holding = {"a": {"VCPU": 2}}


def wants(consumer: str, holding: Holding, **fields: Any) -> ConsumerWrite:
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
        (BOTH, WriteRefusal(Why.DOES_NOT_FIT), []),
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
    assert list(touched([BOTH, item], [WriteRefusal(Why.GENERATION), outcome], held | gone)) == expected
    with pytest.raises(ValueError, match="zip"):
        list(touched([item], [], {}))


KNOWN = {
    "held": ConsumerState(3, 0, "p", "u", "X", HELD),
    "tried": ConsumerState(4, 2, "p", "u", "X", HELD, "r"),
    "fenced": ConsumerState(4, 2, "p", "u", "X", run="r"),
}


@pytest.mark.parametrize(
    ("writes", "refused", "about"),
    [
        ([wants("held", {}, expects=3), wants("new", {"a": {"VCPU": 8}})], None, ""),
        ([wants("held", {}, expects=3), wants("new", {"a": {"VCPU": 7}}), wants("c", {"a": {"VCPU": 2}})], None, ""),
        ([wants("held", {}), wants("new", {"a": {"VCPU": 7}}), wants("c", {"a": {"VCPU": 3}})], Why.DOES_NOT_FIT, "a"),
        ([wants("new", {"a": {"VCPU": 7}}), wants("c", {"b": {"VCPU": 1}})], None, ""),
        ([wants("new", {"a": {"VCPU": 8}}), wants("c", {"a": {"VCPU": 1}})], Why.DOES_NOT_FIT, "a"),
        ([wants("c", {"b": {"DISK_GB": 2}}), wants("held", {"a": {"VCPU": 9}})], Why.DOES_NOT_FIT, "a"),
        ([wants("held", {"a": {"DISK_GB": 3}})], Why.DOES_NOT_FIT, "a"),
        ([wants("c", {"a": {"MEMORY_MB": 1}})], Why.DOES_NOT_FIT, "a"),
        ([wants("c", {"a": {"VCPU": 1}}), wants("d", {"b": {"VCPU": 1, "NONE": 1}})], Why.NO_SUCH, "NONE"),
        ([wants("c", {"a": {"NONE": 1}}), wants("d", {"z": {"VCPU": 1}})], Why.NO_PROVIDER, "z"),
        ([wants("c", {"z": {"VCPU": 1}}), wants("held", HELD, expects=4)], Why.CONSUMER_GENERATION, "held"),
        ([wants("fenced", HELD, expects=4)], Why.CONSUMER_GENERATION, "fenced"),
        ([wants("tried", HELD, attempt=2)], None, ""),
        ([wants("tried", HELD, attempt=1)], Why.CONSUMER_GENERATION, "tried"),
        ([wants("new", HELD, attempt=1)], None, ""),
    ],
)
def test_a_write_of_several_consumers_is_refused_for_its_first_flaw(
    writes: list[ConsumerWrite], refused: Why | None, about: str
) -> None:
    [outcome], decision = decide([Replace(tuple(writes))], KNOWN, claimed(a=3, b=0), {**CLASSES, "MEMORY_MB": 3})
    assert (why(outcome), getattr(outcome, "about", "")) == (refused, about)
    assert bool(decision.consumers) is (refused is None)


@pytest.mark.parametrize(("consumer", "generation"), [("held", "3"), ("fenced", "null"), ("new", "null")])
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
        ("fenced", {"a": {"VCPU": 1}}, ConsumerState(5, 2, "p", "u", "", {"a": {"VCPU": 1}})),
        ("held", {}, None),
        ("tried", {}, ConsumerState(4, 2, "p", "u", "X", run="r")),
        ("fenced", {}, "same"),
        ("new", {}, "same"),
    ],
)
def test_the_row_after_a_write(consumer: str, wanted: Holding, after: Any) -> None:
    """A consumer whose attempts a claim has numbered stays as their fence. What is written over a fence is not the
    claim of its run: a late release by that run would give the room away.
    """
    _, decision = decide([Replace((wants(consumer, wanted),))], KNOWN, claimed(a=2), CLASSES)
    assert decision.consumers == ({} if after == "same" else {consumer: after})


@pytest.mark.parametrize(
    ("consumer", "refused", "after"),
    [
        ("held", None, None),
        ("tried", None, ConsumerState(4, 2, "p", "u", "X", run="r")),
        ("fenced", "fenced", None),
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
BOOK = {
    "a": provider("a", inventories={"VCPU": inventory(4), "DISK_GB": inventory(9)}, used={"VCPU": 2, "DISK_GB": 0}),
    "b": provider("b", generation=7),
}
MOVE = wants("c", {"b": {"VCPU": 2}}, expects=1)
SPLIT = {"a": (5, {"DISK_GB": inventory(8)}), "b": (7, {"VCPU": inventory(2)})}


def test_the_rows_of_a_reshape() -> None:
    done = reshape(Reshape(SPLIT, (MOVE,)), HOLDER, BOOK, CLASSES, shape=6)
    assert isinstance(done, Reshaped)
    interim = {u: (p.generation, p.shape, p.used, p.inventories) for u, p in done.interim.items()}
    assert interim == {
        "a": (5, 6, {"VCPU": 2, "DISK_GB": 0}, {"VCPU": inventory(4), "DISK_GB": inventory(8)}),
        "b": (7, 6, {}, {"VCPU": inventory(2)}),
    }
    assert done.decision.generations == {"a": 5, "b": 8}
    assert {u: (p.generation, p.shape, p.used, p.inventories) for u, p in done.final.items()} == {
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
        ({"a": (5, {})}, (), (Why.IN_USE, "a")),
        ({"a": (5, {"DISK_GB": inventory(8)}), "b": (7, {})}, (), (Why.IN_USE, "a")),
        ({"a": (6, {})}, (), (Why.GENERATION, "")),
        ({"a": (5, {"VCPU": inventory(2)}), "z": (0, {})}, (), (Why.NO_PROVIDER, "z")),
        ({"a": (5, {"VCPU": inventory(2)}), "b": (7, {"NONE": inventory(2)})}, (), (Why.NO_SUCH, "NONE")),
        (SPLIT, (wants("c", {"b": {"VCPU": 3}}, expects=1),), (Why.DOES_NOT_FIT, "b")),
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
    done = reshape(Reshape(inventories, writes), HOLDER, BOOK, CLASSES, shape=6)
    if isinstance(done, WriteRefusal):
        assert (done.why, done.about) == expected
    else:
        assert {uuid: (after.generation, after.used) for uuid, after in done.final.items()} == expected

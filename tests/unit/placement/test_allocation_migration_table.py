"""Which consumer's allocations go where when providers take over from another: a row for each bound and each order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bus.contracts.placement import Inventory, ProviderReport
from placement_worker.domain.allocation_migration import (
    between,
    migrate_allocations,
    migrated,
    migrating_classes,
    usage_after,
)
from placement_worker.domain.claim_ledger import Decision
from placement_worker.domain.values import ConsumerState, Holding, stored_inventory
from tests.unit.placement_rest.test_decisions import inventory, provider

Holdings = dict[str, Holding]


def report(uuid: str, takes_from: str | None = "old", takes: tuple[str, ...] = (), **rooms: Any) -> ProviderReport:
    """Each of `rooms` is a class: its total, or all fields of its inventory."""
    fields = {name: room if isinstance(room, dict) else {"total": room} for name, room in rooms.items()}
    inventories = {name: Inventory(**room) for name, room in fields.items()}
    return ProviderReport(uuid=uuid, name=uuid, takes_from=takes_from, takes=takes, inventories=inventories)


@pytest.mark.parametrize(
    ("reports", "pairs"),
    [
        ([report("a", None, VCPU=1)], []),
        ([report("old", None, DISK_GB=1), report("a", VCPU=1)], [("old", "VCPU")]),
        ([report("old", None, VCPU=1), report("a", VCPU=1, DISK_GB=1)], [("old", "DISK_GB")]),
        ([report("a", VCPU=1), report("b", VCPU=1)], [("old", "VCPU")]),
        ([report("a", VCPU=1), report("b", "a", VCPU=1)], [("old", "VCPU")]),
    ],
    ids=["nobody takes", "taken", "kept by its source", "by two", "kept by the other source"],
)
def test_the_classes_that_migrate(reports: list[ProviderReport], pairs: list[tuple[str, str]]) -> None:
    assert migrating_classes(reports) == pairs


def old(**amounts: int) -> Holding:
    return {"old": amounts}


STEPS = {"total": 8, "step_size": 2}


@pytest.mark.parametrize(
    ("takers", "used", "holdings", "moved"),
    [
        ([report("a", VCPU=4), report("b", VCPU=4)], {}, {"c": old(VCPU=4)}, {"c": {"a": {"VCPU": 4}}}),
        ([report("a", VCPU=4)], {"a": {"VCPU": 1}}, {"c": old(VCPU=3)}, {"c": {"a": {"VCPU": 3}}}),
        (
            [report("a", VCPU=4), report("b", VCPU=9)],
            {"a": {"VCPU": 2}},
            {"c": old(VCPU=3)},
            {"c": {"b": {"VCPU": 3}}},
        ),
        ([report("a", VCPU=4)], {"a": {"VCPU": 4}}, {"c": old(VCPU=1)}, {}),
        ([report("a", VCPU=4)], {"a": {"VCPU": 9}}, {"c": {**old(VCPU=1), "a": {"VCPU": 3}}}, {}),
        (
            [report("a", VCPU=3), report("b", VCPU=1), report("d", VCPU=3), report("e", VCPU=3)],
            {},
            {"c": old(VCPU=6)},
            {"c": {"a": {"VCPU": 3}, "b": {"VCPU": 1}, "d": {"VCPU": 2}}},
        ),
        (
            [report("a", VCPU=3)],
            {"a": {"VCPU": 1}},
            {"c": {**old(VCPU=4, DISK_GB=2), "a": {"DISK_GB": 7}, "b": {"VCPU": 1}}},
            {"c": {"old": {"VCPU": 2, "DISK_GB": 2}, "a": {"DISK_GB": 7, "VCPU": 2}, "b": {"VCPU": 1}}},
        ),
        ([report("a", VCPU={"total": 8, "max_unit": 3})], {}, {"c": old(VCPU=3)}, {"c": {"a": {"VCPU": 3}}}),
        (
            [report("a", VCPU={"total": 8, "max_unit": 3})],
            {},
            {"c": old(VCPU=4)},
            {"c": {"old": {"VCPU": 1}, "a": {"VCPU": 3}}},
        ),
        ([report("a", VCPU={"total": 8, "min_unit": 3})], {}, {"c": old(VCPU=3)}, {"c": {"a": {"VCPU": 3}}}),
        ([report("a", VCPU={"total": 8, "min_unit": 3})], {}, {"c": old(VCPU=2)}, {}),
        ([report("a", VCPU=STEPS)], {}, {"c": old(VCPU=5)}, {"c": {"old": {"VCPU": 1}, "a": {"VCPU": 4}}}),
        ([report("a", VCPU=STEPS)], {}, {"c": old(VCPU=1)}, {}),
        (
            [report("a", VCPU=STEPS)],
            {"a": {"VCPU": 1}},
            {"c": {**old(VCPU=2), "a": {"VCPU": 1}}},
            {"c": {"old": {"VCPU": 1}, "a": {"VCPU": 2}}},
        ),
        (
            [report("a", VCPU={"total": 8, "max_unit": 3})],
            {"a": {"VCPU": 4}},
            {"c": {**old(VCPU=2), "a": {"VCPU": 4}}},
            {},
        ),
        (
            [report("a", VCPU=4)],
            {"a": {"VCPU": 2}},
            {"c": {**old(VCPU=2), "a": {"VCPU": 2}}},
            {"c": {"a": {"VCPU": 4}}},
        ),
    ],
    ids=[
        "to the first with room",
        "exactly its room",
        "to the next with room",
        "full",
        "over its capacity",
        "split over as many as it takes",
        "what does not fit stays with the rest",
        "its largest amount",
        "one more than its largest amount",
        "its least amount",
        "less than its least amount",
        "in steps",
        "less than a step",
        "in steps with what is there",
        "more there than its largest amount",
        "to what is there",
    ],
)  # fmt: skip
def test_how_much_a_taker_takes(
    takers: list[ProviderReport], used: dict[str, dict[str, int]], holdings: Holdings, moved: Holdings
) -> None:
    assert migrate(takers, used, holdings) == moved


@pytest.mark.parametrize(
    ("takers", "holdings", "moved"),
    [
        ([report("a", VCPU=3)], {"c": old(VCPU=2), "d": old(VCPU=3)}, {"d"}),
        ([report("a", VCPU=3)], {"d": old(VCPU=3), "c": old(VCPU=3)}, {"c"}),
        ([report("a", takes=("d",), VCPU=2)], {"c": old(VCPU=3), "d": old(VCPU=2)}, {"d"}),
        (
            [report("a", MEMORY_MB=1, VCPU=1)],
            {"c": old(VCPU=3), "d": old(VCPU=1, MEMORY_MB=1)},
            {"d"},
        ),
        ([report("a", MEMORY_MB=3), report("b", DISK_GB=3)], {"c": old(MEMORY_MB=3), "d": old(DISK_GB=3)}, {"c", "d"}),
        ([report("a", VCPU=3)], {"c": old(DISK_GB=3), "d": {"a": {"VCPU": 3}}}, set()),
        ([report("old", None, VCPU=3), report("a", VCPU=3)], {"c": old(VCPU=3)}, set()),
        ([report("a", "other", VCPU=3)], {"c": old(VCPU=3)}, set()),
        ([report("a", takes=("c",), VCPU=1), report("b", VCPU=3)], {"c": old(VCPU=2), "d": old(VCPU=3)}, {"c", "d"}),
    ],
    ids=[
        "the largest",
        "of equals by uuid",
        "whose place is known",
        "the largest of the first class by name",
        "each of another class",
        "nothing of the class",
        "kept by its source",
        "taken from another",
        "where it is known, as far as there is room",
    ],
)  # fmt: skip
def test_who_moves_first(takers: list[ProviderReport], holdings: Holdings, moved: set[str]) -> None:
    """There is room for one of them, or each has its own."""
    assert set(migrate(takers, {}, holdings)) == moved


def migrate(takers: list[ProviderReport], used: dict[str, dict[str, int]], holdings: Holdings) -> Mapping[str, Holding]:
    inventories = {one.uuid: {name: stored_inventory(room) for name, room in one.inventories.items()} for one in takers}
    return migrate_allocations(takers, "old", inventories, used, holdings)


def test_classes_of_other_takers_move_apart_and_each_known_place_is_kept() -> None:
    takers = [report("a", takes=("c",), VCPU=9, MEMORY_MB=9), report("b", takes=("d",), VCPU=9), report("e", DISK_GB=9)]
    both = migrate(takers, {}, {"c": old(VCPU=2, MEMORY_MB=3, DISK_GB=4), "d": old(VCPU=1, MEMORY_MB=1)})
    assert both == {
        "c": {"a": {"VCPU": 2, "MEMORY_MB": 3}, "e": {"DISK_GB": 4}},
        "d": {"b": {"VCPU": 1}, "a": {"MEMORY_MB": 1}},
    }


@pytest.mark.parametrize(
    ("used", "before", "after", "left"),
    [
        ({"VCPU": 3, "DISK_GB": 1}, [old(VCPU=3)], [{"a": {"VCPU": 3}}], {"DISK_GB": 1}),
        ({"VCPU": 3}, [old(VCPU=3), {"a": {"VCPU": 9}}], [old(VCPU=2), old(DISK_GB=2)], {"VCPU": 2, "DISK_GB": 2}),
        ({}, [], [], {}),
    ],
    ids=["all gone", "some gone and some come", "none"],
)
def test_the_usage_after_a_migration(
    used: dict[str, int], before: list[Holding], after: list[Holding], left: dict[str, int]
) -> None:
    assert usage_after(used, "old", before, after) == left


def test_between_two_reports_a_provider_has_the_inventories_of_both() -> None:
    one, two = inventory(1), inventory(2)
    before = {"a": provider("a", inventories={"VCPU": one, "DISK_GB": one}), "b": provider("b"), "d": provider("d")}
    before["e"] = provider("e", inventories={"VCPU": two})
    after = {
        "a": provider("a", inventories={"VCPU": two}),
        "c": provider("c", inventories={"VCPU": one}),
        "d": provider("d", inventories={"VCPU": one}),
        "e": provider("e", inventories={"VCPU": one}),
    }
    both = between(before, after)
    assert list(both) == ["a", "c", "d", "e", "b"]
    assert both["a"].inventories == {"VCPU": two, "DISK_GB": one}
    assert both["b"] is before["b"]
    assert all(both[uuid] is after[uuid] for uuid in "cde"), "they are written once"


def test_the_rows_of_a_migration() -> None:
    before = {
        "old": provider("old", used={"VCPU": 3, "DISK_GB": 1}, generation=5),
        "gone": provider("gone", used={"VCPU": 1}, generation=8),
        "same": provider("same", used={"VCPU": 2, "DISK_GB": 0}),
    }
    after = {
        "old": provider("old", used={"DISK_GB": 1}, generation=6),
        "same": provider("same", used={"VCPU": 2, "MEMORY_MB": 0}),
        "new": provider("new", used={"VCPU": 4}, generation=1),
    }
    known = ConsumerState(7, 2, "p", "u", "INSTANCE", old(VCPU=3))
    now = {"new": {"VCPU": 3}}
    assert migrated(before, after, {"c": now}, {"c": known, "d": known}) == Decision(
        [],
        {"c": ConsumerState(7, 2, "p", "u", "INSTANCE", now)},
        {"old": {"VCPU": 0}, "gone": {"VCPU": 0}, "new": {"VCPU": 4}},
        {"old": 6, "gone": 8, "new": 1},
    )

"""The small rules of the book, as tables: amounts, capacities, cells, names, groups, quotas and causes."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.feed import MAX_CAUSES, Change
from bus.contracts.placement import (
    MAX_LOCATED_HOSTS,
    Claim,
    ClaimOption,
    GroupPolicy,
    Inventory,
    ProviderState,
    ServerGroup,
)
from placement_worker.domain.refusal import caused
from placement_worker.domain.server_groups import (
    GroupCount,
    held_by_class,
    hosts_of,
    hosts_that_matter,
    permitted,
    usage_changes,
    visible_members,
)
from placement_worker.domain.values import (
    MAX_CAPACITY,
    SHARING,
    ClaimedProvider,
    ConsumerState,
    Fit,
    InventoryUsage,
    StoredInventory,
    capacity,
    claimed_provider,
    fit,
    is_class,
    is_closed,
    is_custom,
    is_foreign,
    state_of,
    stored_inventory,
    suggestion,
)
from tests.unit.placement_rest.test_decisions import provider

RULES = InventoryUsage(10, 2, 8, 2, 0)


@pytest.mark.parametrize(
    ("amount", "rules", "used", "more", "expected"),
    [
        (4, RULES, 6, 4, Fit.FITS),
        (2, RULES, 0, 2, Fit.FITS),
        (8, RULES, 0, 8, Fit.FITS),
        (4, RULES, 7, 4, Fit.FULL),
        (9, RULES, 99, 0, Fit.FITS),
        (9, None, 0, -1, Fit.FITS),
        (3, RULES, 9, 1, Fit.NOT_IN_UNITS),
        (1, None, 0, 1, Fit.NO_INVENTORY),
        (10, RULES, 0, 10, Fit.NOT_IN_UNITS),
    ],
)  # fmt: skip
def test_whether_an_amount_fits(amount: int, rules: InventoryUsage | None, used: int, more: int, expected: Fit) -> None:
    assert fit(amount, rules, used, more) is expected


@pytest.mark.parametrize(
    ("total", "reserved", "ratio", "expected"),
    [
        (10, 3, 1.0, 7),
        (10, 3, 1.5, 10),
        (10, 10, 2.0, 0),
        (1, 2, 3.0, 0),
        (1, 0, 0.4, 0),
        (2**53, 0, 1.0, MAX_CAPACITY),
        (2**53 - 1, 0, 1.0, MAX_CAPACITY - 1),
        (2**53, 0, 2.0, MAX_CAPACITY),
    ],
)
def test_the_capacity_of_an_inventory(total: int, reserved: int, ratio: float, expected: int) -> None:
    assert capacity(total, reserved, ratio) == expected


def test_an_inventory_is_stored_with_its_capacity_and_published_whole() -> None:
    reported = Inventory(total=10, reserved=1, min_unit=2, max_unit=6, step_size=2, allocation_ratio=2.0)
    stored = stored_inventory(reported)
    assert stored == StoredInventory(10, 1, 2, 6, 2, 2.0, 18) and not stored.stranded
    whole = replace(
        provider("a", inventories={"VCPU": stored}, used={"VCPU": 4, "DISK_GB": 0}, traits=("T",), aggregates=("g",)),
        parent="p", root="r",
    )  # fmt: skip
    assert state_of(whole) == ProviderState(
        uuid="a", name="name-a", parent_uuid="p", root_uuid="r", generation=5, shape=5,
        inventories={"VCPU": (18.0, 2, 6, 2, 10, 1, 2.0)}, used={"VCPU": 4}, traits=("T",), aggregates=("g",),
    )  # fmt: skip
    assert claimed_provider(whole) == ClaimedProvider(5, 5, {"VCPU": InventoryUsage(18, 2, 6, 2, 4)}, "r")
    free = claimed_provider(replace(whole, used={}, traits=(SHARING,)))
    assert free == ClaimedProvider(5, 5, {"VCPU": InventoryUsage(18, 2, 6, 2, 0)}, "r", shares=True)


@pytest.mark.parametrize(
    ("cell", "bus", "foreign", "closed"),
    [
        (None, "api", False, False),
        ("api", "api", False, False),
        ("c1", "api", False, False),
        (None, "c1", False, False),
        ("c1", "c1", False, False),
        ("c2", "c1", True, True),
        ("api", "c1", True, False),
    ],
)
def test_what_a_cells_bus_may_report_and_claim(cell: str | None, bus: str, foreign: bool, closed: bool) -> None:
    assert (is_foreign(cell, bus), is_closed(cell, bus)) == (foreign, closed)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("VCPU", True),
        ("CUSTOM_A1_", True),
        ("CUSTOM_", False),
        ("CUSTOM_a", False),
        ("NONE", False),
        ("CUSTOM_" + "X" * 248, True),
        ("CUSTOM_" + "X" * 249, False),
    ],
)
def test_the_names_of_classes(name: str, known: bool) -> None:
    assert is_class(name) is known
    assert is_custom(name) is name.startswith("CUSTOM_")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("vcpus", "VCPU"),
        ("-gold  thing-", "CUSTOM_GOLD_THING"),
        ("CUSTOM_gold", "CUSTOM_GOLD"),
        ("q" * 248, "CUSTOM_" + "Q" * 248),
        ("q" * 249, ""),
        ("--", ""),
    ],
)
def test_the_name_that_was_meant(name: str, meant: str) -> None:
    assert suggestion(name) == (f"; did you mean {meant}?" if meant else "")
    assert suggestion("GOLD", ["GOLDEN", "GOLDS"]) == "; did you mean GOLDS?"


# --- groups and quotas


def asked(policy: str, *hosts: str | None, most: int = 1) -> Claim:
    options = tuple(ClaimOption(allocations={}, host=host) for host in hosts)
    group = ServerGroup(uuid="g", policy=GroupPolicy(policy), max_per_host=most)
    return Claim(consumer="c", options=options, project_id="p", server_group=group)


@pytest.mark.parametrize(
    ("claim", "others", "expected"),
    [
        (asked("affinity", None), {}, "invalid"),
        (asked("soft-affinity", None), {}, "invalid"),
        (asked("affinity", "a"), {}, "claimed"),
        (asked("affinity", "a"), {"a": 3}, "claimed"),
        (asked("affinity", "a"), {"b": 1}, "ruled_out"),
        (asked("affinity", "a"), {"a": 1, "b": 1}, "ruled_out"),
        (replace(asked("affinity", "a"), foreign=True), {}, "claimed"),
        (replace(asked("affinity", "a"), foreign=True), {"b": 1}, "ruled_out"),
        (replace(asked("affinity", "a"), foreign=True), {"a": 1, "b": 1}, "claimed"),
        (asked("soft-affinity", "a"), {"b": 1}, "claimed"),
        (asked("soft-anti-affinity", "a"), {"a": 1}, "claimed"),
        (asked("anti-affinity", "a"), {}, "claimed"),
        (asked("anti-affinity", "a"), {"a": 1}, "ruled_out"),
        (asked("anti-affinity", "a"), {"b": 1}, "claimed"),
        (asked("anti-affinity", "a", most=2), {"a": 1}, "claimed"),
        (asked("anti-affinity", "a", most=2), {"a": 2}, "ruled_out"),
    ],
)
def test_what_a_groups_policy_permits(claim: Claim, others: dict[str, int], expected: str) -> None:
    assert permitted(claim, claim.options[0], others) == expected


def test_the_hosts_that_decide() -> None:
    assert list(hosts_that_matter(asked("anti-affinity", "a", None, "b", "a")) or ()) == ["a", "b"]
    assert hosts_that_matter(asked("affinity", "a")) is None
    assert visible_members({f"{n}": 1 for n in range(MAX_LOCATED_HOSTS + 1)}).keys() == set(
        map(str, range(MAX_LOCATED_HOSTS))
    )


@pytest.mark.parametrize(
    ("held", "hosts"),
    [
        ([], ()),
        ([provider("b"), provider("c", root="b"), provider("a")], ("a", "b")),
        ([provider("a"), provider("pool", traits=(SHARING,))], ("a",)),
        ([provider("pool", traits=(SHARING,))], ("pool",)),
    ],
)
def test_the_hosts_of_a_consumer(held: Any, hosts: tuple[str, ...]) -> None:
    assert hosts_of(held) == hosts


def test_members_are_counted_by_host() -> None:
    count = GroupCount({"one": ("a", "b"), "two": ("a",)})
    assert count.without([]) == {"a": 2, "b": 1}
    assert count.without(["one"]) == {"a": 1}
    assert count.without(["one", "unknown"], ["b", "c"]) == {}
    assert count.without(["unknown"], ["a", "c"]) == {"a": 2}
    count.put("one", ("c",))
    count.put("three", ("c",))
    assert count.without([]) == {"a": 1, "c": 2}


def state(hold: Any, project: str = "p", kind: str = "INSTANCE") -> ConsumerState:
    return ConsumerState(1, 1, project, "u", kind, hold)


TWO = {"a": {"VCPU": 2, "DISK_GB": 1}, "b": {"VCPU": 1}}


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        (None, state(TWO), {("p", "INSTANCES"): 1, ("p", "VCPU"): 3, ("p", "DISK_GB"): 1}),
        (state(TWO), None, {("p", "INSTANCES"): -1, ("p", "VCPU"): -3, ("p", "DISK_GB"): -1}),
        (state(TWO), state({"a": {"VCPU": 2}}), {("p", "VCPU"): -1, ("p", "DISK_GB"): -1}),
        (state(TWO), state(TWO), {}),
        (state({}), state({}), {}),
        (None, state(TWO, kind="MIGRATION"), {}),
        (None, state({"a": {"VCPU": 1}}, kind="MIGRATION_COUNTED"), {("p", "INSTANCES"): 1, ("p", "VCPU"): 1}),
        (
            state({"a": {"VCPU": 1}}, "q"),
            state({"a": {"VCPU": 1}}),
            {("q", "INSTANCES"): -1, ("q", "VCPU"): -1, ("p", "INSTANCES"): 1, ("p", "VCPU"): 1},
        ),
    ],
)
def test_the_usage_of_projects(before: ConsumerState | None, after: ConsumerState | None, changes: Any) -> None:
    assert usage_changes({"c": before} if before else {}, {"c": after}) == changes
    assert held_by_class({}) == {}


# --- causes


def test_changes_carry_the_requests_that_caused_them() -> None:
    changes = [Change(provider=uuid, generation=1) for uuid in "abz"]
    touched = [("one", "a"), ("", "b"), ("two", "ab"), ("one", "a")]
    assert [change.causes for change in caused(changes, touched)] == [("one", "two"), ("two",), ("one", "two")]
    assert caused(changes, [("", "ab")]) == changes
    many = caused(changes[:1], [(f"{n}", "a") for n in range(MAX_CAUSES + 1)])
    assert many[0].causes == tuple(map(str, range(MAX_CAUSES)))

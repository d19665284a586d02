"""The small rules of placement, and single conditions of its decisions, as tables."""

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
    InventoryUpdate,
    Migration,
    ProviderReport,
    ProviderState,
    Revert,
    ServerGroup,
)
from placement_worker.domain.refusal import caused
from placement_worker.domain.report_group import LastReport, ReportGroup
from placement_worker.domain.reports import Applied
from placement_worker.domain.server_groups import (
    GroupCount,
    decisive_hosts,
    hosts_of,
    permitted,
    usage_by_class,
    usage_changes,
    visible_members,
)
from placement_worker.domain.trees import DeleteInventory, ProviderTrees, SetTraits, UpdateProvider
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
from placement_worker.operations.export import InvalidExport, PlacementExport, checked
from tests.unit.placement_rest.test_decisions import CLASSES, inventory, provider
from tests.unit.placement_worker.test_claims import MIGRATION, VM, A, B, claim, holder, room, run
from tests.unit.placement_worker.test_claims import provider as holding_provider
from tests.unit.placement_worker.test_reports import ROOT, SECOND, node, update

# --- The small rules of placement, as tables: amounts, capacities, cells, names, groups, quotas and causes.


RULES = InventoryUsage(10, 2, 8, 2, 0)


@pytest.mark.parametrize(
    ("amount", "rules", "used", "more", "expected"),
    [
        (4, RULES, 6, 4, Fit.FITS),
        (2, RULES, 0, 2, Fit.FITS),
        (8, RULES, 0, 8, Fit.FITS),
        (4, RULES, 7, 4, Fit.NO_CAPACITY),
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
    assert stored == StoredInventory(10, 1, 2, 6, 2, 2.0, 18) and not stored.orphaned
    whole = replace(
        provider("a", inventories={"VCPU": stored}, used={"VCPU": 4, "DISK_GB": 0}, traits=("T",), aggregates=("g",)),
        parent="p", root="r",
    )  # fmt: skip
    assert state_of(whole) == ProviderState(
        uuid="a", name="name-a", parent_uuid="p", root_uuid="r", generation=5, spec_generation=5,
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
        (asked("affinity", "a"), {"b": 1}, "policy_violated"),
        (asked("affinity", "a"), {"a": 1, "b": 1}, "policy_violated"),
        (replace(asked("affinity", "a"), external=True), {}, "claimed"),
        (replace(asked("affinity", "a"), external=True), {"b": 1}, "policy_violated"),
        (replace(asked("affinity", "a"), external=True), {"a": 1, "b": 1}, "claimed"),
        (asked("soft-affinity", "a"), {"b": 1}, "claimed"),
        (asked("soft-anti-affinity", "a"), {"a": 1}, "claimed"),
        (asked("anti-affinity", "a"), {}, "claimed"),
        (asked("anti-affinity", "a"), {"a": 1}, "policy_violated"),
        (asked("anti-affinity", "a"), {"b": 1}, "claimed"),
        (asked("anti-affinity", "a", most=2), {"a": 1}, "claimed"),
        (asked("anti-affinity", "a", most=2), {"a": 2}, "policy_violated"),
    ],
)
def test_what_a_groups_policy_permits(claim: Claim, others: dict[str, int], expected: str) -> None:
    assert permitted(claim, claim.options[0], others) == expected


def test_the_hosts_that_decide() -> None:
    assert list(decisive_hosts(asked("anti-affinity", "a", None, "b", "a")) or ()) == ["a", "b"]
    assert decisive_hosts(asked("affinity", "a")) is None
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
        (None, state(TWO, kind="MIGRATION"), {("p", "VCPU"): 3, ("p", "DISK_GB"): 1}),
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
    assert usage_by_class({}) == {}


# --- causes


def test_changes_carry_the_requests_that_caused_them() -> None:
    changes = [Change(provider=uuid, generation=1) for uuid in "abz"]
    touched = [("one", "a"), ("", "b"), ("two", "ab"), ("one", "a")]
    assert [change.causes for change in caused(changes, touched)] == [("one", "two"), ("two",), ("one", "two")]
    assert caused(changes, [("", "ab")]) == changes
    many = caused(changes[:1], [(f"{n}", "a") for n in range(MAX_CAUSES + 1)])
    assert many[0].causes == tuple(map(str, range(MAX_CAUSES)))


# --- Decisions with several conditions: a row for each condition that alone makes the difference.


# --- claims

HELD = {A: {"VCPU": 2}}
THERE = {B: {"VCPU": 2}}
HOSTS = {A: holding_provider(VCPU=room(8, 2)), B: replace(holding_provider(VCPU=room(8)), root=B)}


def test_a_revert_of_an_instance_whose_fence_was_trimmed_makes_its_consumer_anew() -> None:
    revert = Revert(consumer=VM, migration=Migration(uuid=MIGRATION, source=HELD), source_attempt=1, attempt=3)
    kept = replace(holder(HELD, attempt=2), consumer_type="MIGRATION")
    decision = run(revert, providers=HOSTS, consumers={MIGRATION: kept})
    (verdict,), after = decision.replies, decision.consumers[VM]
    assert (verdict.outcome, verdict.consumer_generation) == ("reverted", 1)
    assert after is not None and (after.generation, after.attempt, after.allocations) == (1, 3, HELD)


def test_a_migration_keeps_all_that_its_instance_held_and_not_what_the_move_was_told_alone() -> None:
    """Another client has given it more since."""
    providers = {**HOSTS, A: holding_provider(VCPU=room(8, 4))}
    migration = Migration(uuid=MIGRATION, source=HELD)
    asked = claim(THERE, attempt=2, consumer_generation=1, migration=migration)
    kept = run(asked, providers=providers, consumers={VM: holder({A: {"VCPU": 4}})}).consumers[MIGRATION]
    assert kept is not None and kept.allocations == {A: {"VCPU": 4}}


# --- reports


def reported(uuid: str, **fields: Any) -> ProviderReport:
    return ProviderReport(uuid=uuid, name=f"n-{uuid[0]}", inventories={"VCPU": Inventory(total=4)}, **fields)


def group(*updates: InventoryUpdate, reporters: Any = None, cells: Any = None) -> ReportGroup:
    return ReportGroup(updates, reporters or {}, cells=cells or {}, bus="c1")


def test_a_flawed_report_of_another_cells_root_is_refused_for_its_flaw() -> None:
    flawed = update(replace(node(ROOT), inventories={"nothing": Inventory(total=1)}))
    both = group(flawed, update(node(SECOND)), cells={ROOT: "c2", SECOND: "c2"})
    both.refuse_invalid(())
    codes = [both.results[number].code for number in range(2)]  # type: ignore[union-attr]
    assert codes[0] == "class.unknown" and codes[1] not in ("", "class.unknown")


def test_a_stale_report_after_a_flawed_one_is_still_stale() -> None:
    flawed = update(replace(node(ROOT), inventories={"nothing": Inventory(total=1)}))
    both = group(flawed, update(node(SECOND)), reporters={(SECOND, "s"): LastReport(9, b"x", True, (SECOND,))})
    both.refuse_invalid(())
    both.refuse_stale()
    assert set(both.results) == {0, 1}


@pytest.mark.parametrize(("changed", "complete"), [(True, False), (False, True)])
def test_a_report_proves_the_tree_no_more_when_another_source_has_changed_it(changed: bool, complete: bool) -> None:
    mine, others = (replace(update(node(ROOT)), reporter=reporter) for reporter in ("mine", "others"))
    both = group(mine, others)
    done = [Applied(changed=is_changed, orphaned=(), reported=()) for is_changed in (False, changed)]
    both.record_results([0, 1], done)
    assert both.written()[ROOT, "mine"].complete is complete


# --- writes of the REST API


def trees(*providers: Any, reported: Any = ()) -> ProviderTrees:
    known = {one.uuid: one for one in providers}
    return ProviderTrees(
        known, CLASSES, {"CUSTOM_T": 1, "CUSTOM_U": 2, "CUSTOM_V": 3}, spec_generation=6, reported=reported
    )


def test_traits_that_a_client_sets_last_and_others_keep_their_mark() -> None:
    before = provider(A, traits=("CUSTOM_T", "CUSTOM_U"), own_traits=("CUSTOM_T",))
    after = trees(before).set_traits(
        before, SetTraits(uuid=A, traits=("CUSTOM_T", "CUSTOM_U", "CUSTOM_V"), generation=5)
    )
    assert after.own_traits == ("CUSTOM_T", "CUSTOM_V")  # type: ignore[union-attr]


@pytest.mark.parametrize(("generation", "is_written"), [(None, True), (5, True), (4, False)])
def test_a_write_is_of_the_generation_that_it_names(generation: int | None, is_written: bool) -> None:
    before = provider(A)
    after = trees(before).set_traits(before, SetTraits(uuid=A, traits=("CUSTOM_T",), generation=generation))
    assert (getattr(after, "traits", None) == ("CUSTOM_T",)) is is_written


def test_one_inventory_is_deleted_and_the_others_stay() -> None:
    before = provider(A, inventories={"VCPU": inventory(4), "DISK_GB": inventory(10)})
    after = trees(before).delete_inventory(before, DeleteInventory(uuid=A, resource_class="VCPU"))
    assert set(after.inventories) == {"DISK_GB"}  # type: ignore[union-attr]


def test_a_reported_root_may_be_renamed_as_the_root_that_it_is() -> None:
    before = provider(A)
    after = trees(before, reported={A}).update(before, UpdateProvider(uuid=A, name="other", parent=None))
    assert getattr(after, "name", after) == "other"


def test_a_placement_whose_parents_go_round_in_a_circle_is_not_imported() -> None:
    """Each of these found itself again as its root. No walk up their tree would have ended afterwards."""
    both = [provider(one, parent=other, root=one) for one, other in ((ROOT, SECOND), (SECOND, ROOT))]
    with pytest.raises(InvalidExport, match="is not under its root"):
        checked(PlacementExport(frozenset(), frozenset(), {one.uuid: one for one in both}, {}))

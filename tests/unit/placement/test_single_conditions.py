"""Decisions with several conditions: a row for each condition that alone makes the difference."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.placement import (
    Inventory,
    InventoryUpdate,
    Migration,
    ProviderReport,
    Revert,
)
from placement_worker.domain.report_group import ReportGroup, ReportSource
from placement_worker.domain.reports import Applied
from placement_worker.domain.trees import DeleteInventory, ProviderTrees, SetTraits, UpdateProvider
from tests.unit.placement.test_claims import MIGRATION, VM, A, B, claim, holder, room, run
from tests.unit.placement.test_claims import provider as claimed_provider
from tests.unit.placement.test_reports import ROOT, SECOND, node, update
from tests.unit.placement_rest.test_decisions import CLASSES, inventory, provider

# --- claims

HELD = {A: {"VCPU": 2}}
THERE = {B: {"VCPU": 2}}
HOSTS = {A: claimed_provider(VCPU=room(8, 2)), B: replace(claimed_provider(VCPU=room(8)), root=B)}


def test_a_revert_of_an_instance_whose_fence_was_trimmed_makes_its_consumer_anew() -> None:
    revert = Revert(consumer=VM, migration=Migration(uuid=MIGRATION, source=HELD), source_attempt=1, attempt=3)
    kept = replace(holder(HELD, attempt=2), consumer_type="MIGRATION")
    decision = run(revert, providers=HOSTS, consumers={MIGRATION: kept})
    (verdict,), after = decision.replies, decision.consumers[VM]
    assert (verdict.outcome, verdict.consumer_generation) == ("reverted", 1)
    assert after is not None and (after.generation, after.attempt, after.holding) == (1, 3, HELD)


def test_a_migration_keeps_all_that_its_instance_held_and_not_what_the_move_was_told_alone() -> None:
    """Another client has given it more since."""
    providers = {**HOSTS, A: claimed_provider(VCPU=room(8, 4))}
    migration = Migration(uuid=MIGRATION, source=HELD)
    asked = claim(THERE, attempt=2, consumer_generation=1, migration=migration)
    kept = run(asked, providers=providers, consumers={VM: holder({A: {"VCPU": 4}})}).consumers[MIGRATION]
    assert kept is not None and kept.holding == {A: {"VCPU": 4}}


# --- reports


def reported(uuid: str, **fields: Any) -> ProviderReport:
    return ProviderReport(uuid=uuid, name=f"n-{uuid[0]}", inventories={"VCPU": Inventory(total=4)}, **fields)


def group(*updates: InventoryUpdate, sources: Any = None, cells: Any = None) -> ReportGroup:
    return ReportGroup(updates, sources or {}, cells=cells or {}, bus="c1")


def test_a_flawed_report_of_another_cells_root_is_refused_for_its_flaw() -> None:
    flawed = update(replace(node(ROOT), inventories={"nothing": Inventory(total=1)}))
    both = group(flawed, update(node(SECOND)), cells={ROOT: "c2", SECOND: "c2"})
    both.refuse_invalid(())
    codes = [both.results[number].code for number in range(2)]  # type: ignore[union-attr]
    assert codes[0] == "class.unknown" and codes[1] not in ("", "class.unknown")


def test_a_stale_report_after_a_flawed_one_is_still_stale() -> None:
    flawed = update(replace(node(ROOT), inventories={"nothing": Inventory(total=1)}))
    both = group(flawed, update(node(SECOND)), sources={(SECOND, "s"): ReportSource(9, b"x", True, (SECOND,))})
    both.refuse_invalid(())
    both.sort_out_stale()
    assert set(both.results) == {0, 1}


@pytest.mark.parametrize(("changed", "settled"), [(True, False), (False, True)])
def test_a_report_proves_the_tree_no_more_when_another_source_has_changed_it(changed: bool, settled: bool) -> None:
    mine, others = (replace(update(node(ROOT)), source=source) for source in ("mine", "others"))
    both = group(mine, others)
    done = [Applied(changed=is_changed, stranded=(), reported=(ROOT,)) for is_changed in (False, changed)]
    both.settle([0, 1], done)
    assert both.written()[ROOT, "mine"].settled is settled


# --- writes of the REST API


def trees(*providers: Any, reported: Any = ()) -> ProviderTrees:
    known = {one.uuid: one for one in providers}
    return ProviderTrees(known, CLASSES, {"CUSTOM_T": 1, "CUSTOM_U": 2, "CUSTOM_V": 3}, shape=6, reported=reported)


def test_traits_that_a_client_sets_last_and_others_keep_their_mark() -> None:
    before = provider(A, traits=("CUSTOM_T", "CUSTOM_U"), lasting=("CUSTOM_T",))
    after = trees(before).set_traits(
        before, SetTraits(uuid=A, traits=("CUSTOM_T", "CUSTOM_U", "CUSTOM_V"), generation=5)
    )
    assert after.lasting == ("CUSTOM_T", "CUSTOM_V")  # type: ignore[union-attr]


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

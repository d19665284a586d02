"""Decisions with several conditions: a row for each condition that alone makes the difference."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from bus.contracts.groups import GroupPolicy, ServerGroup
from bus.contracts.placement import (
    COMPUTE_SOURCE,
    Inventory,
    InventoryUpdate,
    Migration,
    ProviderReport,
    Revert,
)
from placement_worker.domain.allocation_migration import migrated, sources_of
from placement_worker.domain.claim_group import MAX_GROUP_MEMBERS_READ, ClaimGroup
from placement_worker.domain.names import suggestion
from placement_worker.domain.report_group import ReportGroup, ReportSource
from placement_worker.domain.reports import Applied, plan
from placement_worker.domain.trees import DeleteInventory, ProviderTrees, SetTraits, UpdateProvider
from placement_worker.domain.values import state_of
from tests.unit.placement.test_claims import MIGRATION, OTHER, VM, A, B, claim, holder, room, run
from tests.unit.placement.test_claims import provider as claimed_provider
from tests.unit.placement.test_reports import CHILD, ROOT, SECOND, node, update
from tests.unit.placement_rest.test_decisions import CLASSES, inventory, provider

# --- claims

HELD = {A: {"VCPU": 2}}
THERE = {B: {"VCPU": 2}}
HOSTS = {A: claimed_provider(VCPU=room(8, 2)), B: replace(claimed_provider(VCPU=room(8)), root=B)}


def test_a_claim_that_nothing_fits_names_the_generation_of_what_the_consumer_holds() -> None:
    asked = claim({A: {"VCPU": 99}}, attempt=3, consumer_generation=1)
    holds, fence = (
        run(one, providers=HOSTS, consumers={VM: known}).verdicts[0]
        for one, known in (
            (asked, holder(HELD)),
            (replace(asked, consumer_generation=None), holder({}, attempt=1)),
        )
    )
    assert (holds.outcome, holds.consumer_generation) == ("full", 1)
    assert (fence.outcome, fence.consumer_generation) == ("full", None)


def test_a_revert_takes_from_a_consumer_of_another_type_only_what_it_alone_holds() -> None:
    revert = Revert(consumer=VM, migration=Migration(uuid=MIGRATION, source=HELD), source_attempt=1, attempt=3)
    other = replace(holder(HELD, attempt=2), consumer_type="")
    there = {A: claimed_provider(VCPU=room(8, 4)), B: replace(claimed_provider(VCPU=room(8, 2)), root=B)}
    alone, both = (
        run(revert, providers=there, consumers={VM: holder(hold, attempt=2), MIGRATION: other}).consumers
        for hold in (THERE, HELD)
    )
    assert alone[MIGRATION] is None and alone[VM] is not None and alone[VM].holding == HELD
    assert both.get(MIGRATION, other) == other
    elsewhere = replace(holder(THERE, attempt=2), consumer_type="")
    neither = run(revert, providers=there, consumers={VM: holder({}, attempt=2), MIGRATION: elsewhere}).consumers
    assert neither.get(MIGRATION, elsewhere) == elsewhere, "it holds nothing of the source"


def test_a_revert_of_an_instance_whose_fence_was_trimmed_makes_its_consumer_anew() -> None:
    revert = Revert(consumer=VM, migration=Migration(uuid=MIGRATION, source=HELD), source_attempt=1, attempt=3)
    kept = replace(holder(HELD, attempt=2), consumer_type="MIGRATION")
    decision = run(revert, providers=HOSTS, consumers={MIGRATION: kept})
    (verdict,), after = decision.verdicts, decision.consumers[VM]
    assert (verdict.outcome, verdict.consumer_generation) == ("reverted", 1)
    assert after is not None and (after.generation, after.attempt, after.holding) == (1, 3, HELD)


def test_the_claim_of_an_alternate_writes_the_migration_under_its_next_generation() -> None:
    """The alternate takes of the source: a resize in place."""
    kept = replace(holder(HELD, attempt=2, generation=4), consumer_type="MIGRATION")
    asked = claim({A: {"VCPU": 1}}, attempt=3, release_first=True, migration=Migration(uuid=MIGRATION, source=HELD))
    known = {VM: holder({}, attempt=2), MIGRATION: kept}
    after = run(asked, providers=HOSTS, consumers=known).consumers[MIGRATION]
    assert after is not None and (after.generation, after.holding) == (5, {A: {"VCPU": 1}})


def test_a_migration_keeps_all_that_its_instance_held_and_not_what_the_move_was_told_alone() -> None:
    """Another client has given it more since."""
    providers = {**HOSTS, A: claimed_provider(VCPU=room(8, 4))}
    migration = Migration(uuid=MIGRATION, source=HELD)
    asked = claim(THERE, attempt=2, consumer_generation=1, migration=migration)
    kept = run(asked, providers=providers, consumers={VM: holder({A: {"VCPU": 4}})}).consumers[MIGRATION]
    assert kept is not None and kept.holding == {A: {"VCPU": 4}}


def test_as_many_members_are_read_as_could_move_and_one_more() -> None:
    items = [claim({A: {"VCPU": 1}}, consumer=one) for one in (VM, MIGRATION)]
    assert ClaimGroup(items).members().most == MAX_GROUP_MEMBERS_READ + 2


def test_of_the_consumers_that_may_move_those_are_read_that_hold_something() -> None:
    group = ServerGroup(uuid=B, policy=GroupPolicy.AFFINITY)
    both = ClaimGroup([claim({A: {"VCPU": 1}}, consumer=one, server_group=group) for one in (VM, OTHER)])
    assert both.members({OTHER}).moved == [("p", B, OTHER)]
    assert both.members().moved == [("p", B, VM), ("p", B, OTHER)], "which of them do is not known yet"


# --- reports


def reported(uuid: str, **fields: Any) -> ProviderReport:
    return ProviderReport(uuid=uuid, name=f"n-{uuid[0]}", inventories={"VCPU": Inventory(total=4)}, **fields)


def test_the_providers_that_others_take_over_from_are_named_once() -> None:
    reports = [reported(ROOT), reported(CHILD, takes_from=ROOT), reported(SECOND, takes_from=ROOT)]
    assert sources_of(reports) == [ROOT]


def test_the_usage_of_a_provider_that_goes_is_written_under_its_last_generation() -> None:
    before, after = provider(A, used={"VCPU": 2}), provider(B, used={"VCPU": 2}, generation=7)
    decision = migrated({A: before}, {B: after}, {}, {})
    assert (decision.used, decision.generations) == ({A: {"VCPU": 0}, B: {"VCPU": 2}}, {A: 5, B: 7})


@pytest.mark.parametrize(("bus", "is_applied"), [("c1", True), ("api", False)])
def test_the_cell_that_a_report_names_counts_above_cells_alone(bus: str, is_applied: bool) -> None:
    book = plan([update(node(ROOT))], [()], {}, bus="c1", shape=1).after
    (result,) = plan([replace(update(node(ROOT)), cell="c2")], [()], book, bus=bus, shape=2).results
    assert isinstance(result, Applied) is is_applied


def test_usage_of_nothing_is_not_published() -> None:
    assert state_of(provider(A, used={"VCPU": 2, "DISK_GB": 0})).used == {"VCPU": 2}


def group(*updates: InventoryUpdate, sources: Any = None, cells: Any = None) -> ReportGroup:
    return ReportGroup(updates, sources or {}, cells=cells or {}, bus="c1")


def test_a_flawed_report_of_another_cells_root_is_refused_for_its_flaw() -> None:
    flawed = update(replace(node(ROOT), inventories={"nothing": Inventory(total=1)}))
    both = group(flawed, update(node(SECOND)), cells={ROOT: "c2", SECOND: "c2"})
    both.refuse_invalid(())
    codes = [both.results[number].code for number in range(2)]  # type: ignore[union-attr]
    assert codes[0] == "class.unknown" and codes[1] not in ("", "class.unknown")


def test_a_report_after_a_flawed_one_is_still_compared_with_its_roots_owner() -> None:
    flawed = replace(
        update(replace(node(ROOT), inventories={"nothing": Inventory(total=1)})), source=f"{COMPUTE_SOURCE}s1"
    )
    second = replace(update(node(SECOND)), source=f"{COMPUTE_SOURCE}s1")
    owned = {(SECOND, f"{COMPUTE_SOURCE}s2"): ReportSource(1, b"x", True, (SECOND,))}
    both = group(flawed, second, sources=owned)
    both.refuse_invalid(())
    both.refuse_owned()
    assert set(both.results) == {0, 1}


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


@pytest.mark.parametrize(
    ("name", "suggested"), [("gold thing", True), ("x" * 400, False), ("", False)], ids=["short", "too long", "nothing"]
)
def test_a_name_that_could_not_exist_is_not_suggested(name: str, suggested: bool) -> None:
    assert bool(suggestion(name)) is suggested

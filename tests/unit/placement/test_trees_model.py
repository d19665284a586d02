"""Whatever trees are reported in whatever order: the book stays a forest, and nothing in use is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from placement_worker.domain.reports import Applied, changes_of, plan
from placement_worker.domain.values import Provider

UUIDS = [f"{letter * 8}-0000-4000-8000-000000000000" for letter in "abcde"]


@st.composite
def updates(draw: st.DrawFn) -> InventoryUpdate:
    """A root and some of the others below it, each under one that comes before it; or the tree's removal."""
    order = draw(st.permutations(UUIDS))
    size = draw(st.integers(0, len(order)))
    reports = [
        ProviderReport(
            uuid=uuid,
            name=f"n-{uuid[0]}",
            parent_uuid=order[draw(st.integers(0, at - 1))] if at else None,
            inventories={"VCPU": Inventory(total=draw(st.integers(1, 9)))} if draw(st.booleans()) else {},
        )
        for at, uuid in enumerate(order[:size])
    ]
    return InventoryUpdate(source="s", version=1, root_uuid=order[0], providers=tuple(reports))


STEPS = st.lists(st.tuples(updates(), st.dictionaries(st.sampled_from(UUIDS), st.integers(0, 3))), max_size=8)


@given(STEPS)
def test_trees_stay_a_forest_and_nothing_in_use_is_lost(steps: list[tuple[InventoryUpdate, dict[str, int]]]) -> None:
    book: dict[str, Provider] = {}
    reported: dict[str, tuple[str, ...]] = {}
    for shape, (update, usage) in enumerate(steps, 1):
        for uuid, amount in usage.items():
            if uuid in book and "VCPU" in book[uuid].inventories:
                book[uuid] = replace(book[uuid], used={"VCPU": amount} if amount else {})
        planned = plan([update], [reported.get(update.root_uuid, ())], book, shape=shape)
        (result,) = planned.results
        check_forest(planned.after)
        check_nothing_lost(book, planned.after)
        check_changes(book, planned.after)
        if isinstance(result, Applied):
            reported[update.root_uuid] = result.reported
            for report in update.providers:
                assert planned.after[report.uuid].root == update.root_uuid
                assert planned.after[report.uuid].parent == report.parent_uuid
        else:
            assert planned.after == book, "a refused update leaves no trace"
        book = planned.after


def check_forest(book: dict[str, Provider]) -> None:
    for uuid, provider in book.items():
        seen = [uuid]
        while (parent := book[seen[-1]].parent) is not None:
            assert parent in book, f"{seen[-1]} hangs under nothing"
            assert parent not in seen, "round in circles"
            seen.append(parent)
        assert provider.root == seen[-1]
    assert len({provider.name for provider in book.values()}) == len(book)


def check_nothing_lost(before: dict[str, Provider], after: dict[str, Provider]) -> None:
    for uuid, provider in before.items():
        if provider.used:
            assert after[uuid].used == provider.used
            assert provider.used.keys() <= after[uuid].inventories.keys()


def check_changes(before: dict[str, Provider], after: dict[str, Provider]) -> None:
    """A changed row has a higher generation, and a replica that applies the changes has the book."""
    for uuid in before.keys() & after.keys():
        if after[uuid] != before[uuid]:
            assert after[uuid].generation > before[uuid].generation
    changes = {change.provider: change for change in changes_of(before, after)}
    assert {uuid for uuid, change in changes.items() if change.removed} == before.keys() - after.keys()
    assert {uuid for uuid, change in changes.items() if change.state} >= after.keys() - before.keys()

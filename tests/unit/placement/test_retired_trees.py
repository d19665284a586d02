"""Which trees are retired: taken out by their source, unused, and without new inventory."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from placement_worker.domain.reports import plan
from placement_worker.domain.retired_trees import is_retired
from placement_worker.domain.values import Provider

ROOT, CHILD = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "ab")


def taken_out() -> dict[str, Provider]:
    """A tree that was taken out while its child was in use, and whose child was freed then."""
    reports = (
        ProviderReport(uuid=ROOT, name="host"),
        ProviderReport(uuid=CHILD, name="gpu", parent_uuid=ROOT, inventories={"VGPU": Inventory(total=1)}),
    )
    whole = InventoryUpdate(source="s", version=1, root_uuid=ROOT, providers=reports)
    book = plan([whole], [()], {}, shape=1).after
    in_use = {**book, CHILD: replace(book[CHILD], used={"VGPU": 1})}
    left = plan([InventoryUpdate(source="s", version=2, root_uuid=ROOT)], [()], in_use, shape=2).after
    return {uuid: replace(provider, used={}) for uuid, provider in left.items()}


def test_what_was_taken_out_and_is_free_is_an_empty_shell() -> None:
    assert is_retired(taken_out().values())


def test_it_is_not_while_a_consumer_uses_it() -> None:
    tree = taken_out()
    assert not is_retired({**tree, CHILD: replace(tree[CHILD], used={"VGPU": 1})}.values())


def test_it_is_not_once_it_has_inventory_to_offer() -> None:
    tree = taken_out()
    live = {name: replace(inventory, stranded=False) for name, inventory in tree[CHILD].inventories.items()}
    assert not is_retired({**tree, CHILD: replace(tree[CHILD], inventories=live)}.values())


def test_a_bare_provider_is_none_for_it_may_be_about_to_be_filled() -> None:
    assert not is_retired([replace(taken_out()[ROOT], inventories={})])
    assert not is_retired([])

"""Names of classes that another process of the same book has renamed, made or removed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from berth.trial.embedded.process import free_port
from bus.clock import new_uuid
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from placement_worker.rest.config import RestConfig
from tests.integration.placement_rest.conftest import Placement

OLD, NEW = "CUSTOM_OLD", "CUSTOM_NEW"


@pytest.fixture
async def other(placement: Placement) -> AsyncIterator[Placement]:
    """A second process on the same book, which knows the class by its old name when a test begins."""
    await placement.call("PUT", f"/resource_classes/{OLD}", status=201)
    made = Placement(placement.book, RestConfig(listen=f"127.0.0.1:{free_port()}"))
    made.rng.seed(8)
    await made.start()
    yield made
    await made.stop()


async def rename(placement: Placement) -> None:
    await placement.call("PUT", f"/resource_classes/{OLD}", {"name": NEW}, version="1.6", status=200)


async def test_a_renamed_class_keeps_its_inventories_and_allocations(placement: Placement, other: Placement) -> None:
    host, consumer = await other.host(**{OLD: 10}), new_uuid(other.rng)
    assert (await other.claim(consumer, host, **{OLD: 2})).status_code == 204
    await rename(placement)
    for each in (placement, other):
        held = (await each.call("GET", f"/allocations/{consumer}", status=200)).json()
        assert held["allocations"][host]["resources"] == {NEW: 2}
        shown = (await each.call("GET", f"/resource_providers/{host}/inventories", status=200)).json()
        assert list(shown["inventories"]) == [NEW]
        await each.call("GET", f"/resource_classes/{OLD}", status=404)
        await each.call("GET", f"/resource_classes/{NEW}", status=200)
    assert await placement.findings() == []


async def test_a_process_that_knew_the_old_name_publishes_the_new_one_on_the_feed(
    placement: Placement, other: Placement
) -> None:
    host, consumer = await other.host(**{OLD: 10}), new_uuid(other.rng)
    assert (await other.claim(consumer, host, **{OLD: 2})).status_code == 204
    replica = await placement.replica()
    await rename(placement)
    assert (await other.claim(consumer, host, 1)).status_code == 204  # emptied, by a process that has not learned it
    book = await replica.fresh()
    row = book.row_of(host)
    assert row is not None
    assert {name: used for name, (_, used, _) in book.inventory_of(row).items()} == {NEW: 0}
    assert (await other.claim(consumer, host, None, **{NEW: 3})).status_code == 204
    assert await placement.findings() == []


async def test_the_old_name_is_unknown_everywhere(placement: Placement, other: Placement) -> None:
    host = await other.host(**{OLD: 10})
    await other.call("GET", f"/allocation_candidates?resources={OLD}:1", status=200)
    await rename(placement)
    await other.call("GET", f"/allocation_candidates?resources={OLD}:1", status=400)
    body = {"resource_provider_generation": 1, "inventories": {OLD: {"total": 1}}}
    await other.call("PUT", f"/resource_providers/{host}/inventories", body, status=400)
    answer = await other.claim(new_uuid(other.rng), host, **{OLD: 1})
    assert answer.status_code == 400, answer.text


async def test_a_report_with_a_name_that_has_gone_makes_it_anew(placement: Placement, other: Placement) -> None:
    await other.host(**{OLD: 10})
    await rename(placement)
    root = new_uuid(other.rng)
    report = ProviderReport(uuid=root, name="metal", inventories={OLD: Inventory(total=4)})
    [result] = await other.store.report([InventoryUpdate(source="c1", version=1, root_uuid=root, providers=(report,))])
    assert getattr(result, "outcome", None) == "applied"
    await placement.call("GET", f"/resource_classes/{OLD}", status=200)
    assert await placement.findings() == []


async def test_inventory_of_a_class_that_another_process_made_can_go(placement: Placement, other: Placement) -> None:
    await placement.call("PUT", "/resource_classes/CUSTOM_MADE", status=201)
    host = await placement.host(CUSTOM_MADE=1, VCPU=1)
    await other.call("DELETE", f"/resource_providers/{host}/inventories", status=204)
    host = await placement.host(CUSTOM_MADE=1, VCPU=1)
    await placement.call("PUT", "/resource_classes/CUSTOM_MADE_2", status=201)
    host = await placement.host(CUSTOM_MADE_2=1, VCPU=1)
    body = {"resource_provider_generation": 1, "inventories": {"VCPU": {"total": 2}}}
    await other.call("PUT", f"/resource_providers/{host}/inventories", body, status=200)
    assert await placement.findings() == []

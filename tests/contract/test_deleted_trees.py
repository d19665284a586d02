"""A host whose tree is deleted: all of it or nothing, and the service that reports it next has it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bus.contracts.placement import (
    Claim,
    ClaimOption,
    Inventory,
    InventoryResult,
    InventoryUpdate,
    ProviderReport,
    Release,
)
from placement_worker.book import ResourceBook
from placement_worker.domain.refusal import Why, WriteRefusal
from placement_worker.domain.trees import CreateProvider, DeleteTree
from placement_worker.domain.values import Provider
from tests.contract.books import HOSTS, KINDS, VMS, books

HOST, NEIGHBOUR, DEVICE, THEIRS = HOSTS[:4]


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[ResourceBook]:
    async with books(request) as made:
        found = made()
        await found.open()
        yield found


def tree(version: int, *, source: str = "compute-c1", root: str = HOST) -> InventoryUpdate:
    host = ProviderReport(uuid=root, name=f"host-{root[0]}", inventories={"VCPU": Inventory(total=8)})
    device = ProviderReport(uuid=DEVICE, name="gpu", parent_uuid=root, inventories={"VGPU": Inventory(total=2)})
    providers = (host, device) if root == HOST else (host,)
    return InventoryUpdate(source=source, version=version, root_uuid=root, providers=providers)


async def reported(store: ResourceBook, update: InventoryUpdate) -> str:
    (result,) = await store.report([update])
    assert isinstance(result, InventoryResult), result
    return result.outcome


async def providers(store: ResourceBook) -> list[str]:
    return [one.uuid for one in (await store.snapshot(None, 100)).providers]


async def test_a_tree_is_deleted_with_what_other_sources_have_below_it(store: ResourceBook) -> None:
    await reported(store, tree(1))
    await reported(store, tree(1, root=NEIGHBOUR))
    await store.write_trees([CreateProvider(THEIRS, "agent", DEVICE)])
    (done,) = await store.write_trees([DeleteTree(HOST)])
    assert isinstance(done, Provider) and done.uuid == HOST
    assert await providers(store) == [NEIGHBOUR]
    removed = [one.provider for one in (await store.changes(0, 100)).changes if one.removed]
    assert sorted(removed) == sorted([HOST, DEVICE, THEIRS])
    (again,) = await store.write_trees([DeleteTree(HOST)])
    assert isinstance(again, WriteRefusal) and again.why is Why.NO_PROVIDER


async def test_a_tree_stays_whole_while_a_consumer_holds_something_of_it(store: ResourceBook) -> None:
    await reported(store, tree(1))
    option = ClaimOption(allocations={DEVICE: {"VGPU": 2}})
    await store.apply([Claim(consumer=VMS[0], options=(option,), project_id="p")])
    (refused,) = await store.write_trees([DeleteTree(HOST)])
    assert refused == WriteRefusal(Why.PROVIDER_IN_USE, "consumers hold VGPU 2 of it", HOST)
    assert sorted(await providers(store)) == sorted([HOST, DEVICE])
    await store.apply([Release(consumer=VMS[0])])
    (done,) = await store.write_trees([DeleteTree(HOST)])
    assert isinstance(done, Provider)


async def test_a_deleted_host_has_no_owner_and_no_late_report_brings_it_back(store: ResourceBook) -> None:
    await reported(store, tree(5))
    assert await reported(store, tree(1, source="compute-c2")) == "host.other_service"
    await store.write_trees([DeleteTree(HOST)])
    assert await reported(store, tree(5)) == "stale"  # delivered once more
    assert await providers(store) == []
    assert await reported(store, tree(2, source="compute-c2")) == "applied"
    assert await reported(store, tree(6)) == "host.other_service"
    assert sorted(await providers(store)) == sorted([HOST, DEVICE])


async def test_a_host_that_is_reported_once_more_by_its_service_is_there_again(store: ResourceBook) -> None:
    """The same content under a later version: what was deleted is not taken for what the book still holds."""
    await reported(store, tree(1))
    await store.write_trees([DeleteTree(HOST)])
    assert await reported(store, tree(2)) == "applied"
    assert sorted(await providers(store)) == sorted([HOST, DEVICE])

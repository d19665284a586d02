"""Providers that are deleted and created again by one group of REST writes."""

from __future__ import annotations

from bus.clock import new_uuid
from placement_worker.domain.trees import CreateProvider, DeleteProvider, SetTraits
from placement_worker.domain.values import Provider
from placement_worker.replica.book import Book
from tests.integration.placement_rest.conftest import Placement
from tests.unit.replica.worlds import dump


async def test_delete_and_post_in_one_transaction_are_followed_by_replicas(placement: Placement) -> None:
    store = placement.store
    rest = store
    uuid = new_uuid(placement.rng)
    traits = [["HW_CPU_X86_AVX"], ["HW_CPU_X86_SGX"], ["HW_CPU_X86_AVX2"]]
    await rest.write_trees([CreateProvider(uuid, "one")])
    for named in traits:
        await rest.write_trees([SetTraits(uuid, named)])
    followed = Book()
    followed.apply((await store.changes(0, 100)).changes)
    old = (await store.snapshot(None, 10)).providers[0]
    deleted, created = await rest.write_trees([DeleteProvider(uuid), CreateProvider(uuid, "two")])
    assert isinstance(deleted, Provider)
    assert isinstance(created, Provider)
    assert created.generation == 0, "as Placement begins"
    followed.apply((await store.changes(followed.sequence, 100)).changes)
    snapshot = await store.snapshot(None, 10)
    whole = Book()
    whole.load(snapshot.providers, snapshot.sequence)
    assert dump(followed) == dump(whole)
    assert snapshot.providers[0].shape > old.shape

"""Whatever the REST API writes in one group: the feed carries what the book then is, and shapes never come back."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from placement_worker.domain.reports import changes_of
from placement_worker.domain.trees import (
    CreateProvider,
    DeleteProvider,
    ProviderTrees,
    SetAggregates,
    SetInventories,
    SetTraits,
    TreeWrite,
    UpdateProvider,
)
from placement_worker.domain.values import Provider, StoredInventory, state_of
from placement_worker.replica.book import Book
from tests.unit.replica.dumps import dump, loaded

A, B = UUIDS = [f"{letter * 8}-0000-4000-8000-000000000000" for letter in "ab"]
SOME = st.sampled_from(UUIDS)
CLASSES, TRAITS = {"VCPU": 0}, ("CUSTOM_X", "CUSTOM_Y")


def inventory(total: int) -> StoredInventory:
    return StoredInventory(total, 0, 1, total, 1, 1.0, total)


def created(uuid: str, parent: str | None = None) -> CreateProvider:
    return CreateProvider(uuid, f"name-{uuid[0]}", parent)


# Objects that are written together: one write, or a provider deleted and created again.
WRITES: st.SearchStrategy[list[TreeWrite]] = st.one_of(
    st.builds(created, SOME, st.none() | SOME).map(lambda write: [write]),
    st.builds(lambda uuid: [DeleteProvider(uuid), created(uuid)], SOME),
    st.builds(lambda uuid: [DeleteProvider(uuid)], SOME),
    st.builds(lambda uuid, parent: [UpdateProvider(uuid, f"name-{uuid[0]}", parent, True)], SOME, st.none() | SOME),
    st.builds(lambda uuid, total: [SetInventories(uuid, {"VCPU": inventory(total)})], SOME, st.integers(1, 3)),
    st.builds(lambda uuid, trait: [SetTraits(uuid, [trait])], SOME, st.sampled_from(TRAITS)),
    st.builds(lambda uuid, other: [SetAggregates(uuid, [other])], SOME, SOME),
)
GROUPS = st.lists(
    st.lists(WRITES, min_size=1, max_size=5).map(lambda parts: [write for part in parts for write in part]),
    min_size=1,
    max_size=6,
)


@given(GROUPS)
def test_the_feed_carries_what_a_group_of_writes_comes_to(groups: list[list[TreeWrite]]) -> None:
    providers: Mapping[str, Provider] = {}
    book = Book()
    given: dict[str, set[int]] = {}
    for shape, group in enumerate(groups, 1):
        trees = ProviderTrees(providers, CLASSES, TRAITS, shape=shape)
        for write in group:
            trees.apply(write)
        changes = changes_of(providers, trees.providers)
        published = [replace(change, sequence=book.sequence + at) for at, change in enumerate(changes, 1)]
        assert book.apply(published) is None
        assert dump(book) == dump(loaded(map(state_of, trees.providers.values())))
        for uuid, provider in trees.providers.items():
            if uuid not in providers or providers[uuid].shape != provider.shape:
                assert provider.shape not in given.setdefault(uuid, set())
                given[uuid].add(provider.shape)
        providers = trees.providers


def test_deleted_and_created_again_in_one_group_is_published_as_both() -> None:
    """Its generation starts from 0 as Placement's does; replicas kept the old one, whose generation was higher."""
    first = ProviderTrees({}, CLASSES, TRAITS, shape=1)
    for write in (CreateProvider(A, "a"), SetTraits(A, ["CUSTOM_X"]), SetInventories(A, {"VCPU": inventory(2)})):
        first.apply(write)
    second = ProviderTrees(first.providers, CLASSES, TRAITS, shape=2)
    for write in (DeleteProvider(A), CreateProvider(A, "a")):
        second.apply(write)
    assert second.providers[A].generation == 0
    changes = changes_of(first.providers, second.providers)
    assert [(change.removed, change.state is not None) for change in changes] == [(True, False), (False, True)]
    assert second.providers[A].shape > first.providers[A].shape

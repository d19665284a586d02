"""A snapshot that took longer than the feed reaches back is read again, and not answered from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from bus.contracts.feed import ChangesPage, FeedChanges, FeedHead, SnapshotPage
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from placement_worker.book import ResourceBook
from placement_worker.replica.book import Book
from placement_worker.replica.catch_up import LocalReplica
from tests.contract.books import HOSTS
from tests.contract.conftest import make, store

__all__ = ["make", "store"]

FIRST, BUSY, LAST = HOSTS[0], HOSTS[2], HOSTS[4]
KEPT = 20  # changes; 1,000, the least of the setting `feed_retention`, take the processor four seconds to write


class Slow:
    """A store whose snapshot has one provider a page, and where something happens after the first page."""

    def __init__(self, store: ResourceBook, meanwhile: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._meanwhile = meanwhile
        self._done = False

    async def head(self) -> FeedHead:
        return await self._store.head()

    async def changes(self, after: int, limit: int, history: str = "") -> ChangesPage:
        return await self._store.changes(after, limit, history)

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        page = await self._store.snapshot(after, 1)
        if not self._done:
            self._done = True
            await self._meanwhile()
        return page


async def report(store: ResourceBook, uuid: str, version: int, total: int) -> None:
    inventory = {"VCPU": Inventory(total=total), "DISK_GB": Inventory(total=100)}
    root = ProviderReport(uuid=uuid, name=f"host-{uuid[0]}", inventories=inventory)
    await store.report([InventoryUpdate(source="s", version=version, root_uuid=uuid, providers=(root,))])


async def trimmed(store: ResourceBook) -> None:
    async def send(changes: FeedChanges) -> None:
        del changes

    while (await store.publish(send, 1000)).more:
        pass
    while await store.trim(keep_changes=KEPT, keep_fences_s=3600.0, keep_sources_s=3600.0, limit=1000):
        pass


def capacity(book: Book, uuid: str) -> int:
    row = book.row_of(uuid)
    assert row is not None
    return book.inventory_of(row)["VCPU"][0].capacity


@pytest.mark.parametrize("is_trimmed", [False, True], ids=["feed reaches back", "feed does not"])
async def test_a_book_is_of_one_number_however_long_its_snapshot_took(store: ResourceBook, is_trimmed: bool) -> None:
    """At each moment the first host or the last one has 100 VCPUs, and the other one has 1; never both have 100."""
    await report(store, LAST, 2, 1)

    async def meanwhile() -> None:
        await report(store, FIRST, 2, 1)
        if is_trimmed:
            for version in range(2, KEPT + 3):
                await report(store, BUSY, version, 50 + version % 2)
        await report(store, LAST, 3, 100)
        if is_trimmed:
            await trimmed(store)

    replica = LocalReplica(Slow(store, meanwhile))
    book = await replica.fresh()
    assert (capacity(book, FIRST), capacity(book, LAST)) in {(100, 1), (1, 1), (1, 100)}, "a state that never was"


async def test_a_writer_reads_its_own_write(store: ResourceBook) -> None:
    """The other half of the claim: it wrote while another's read loaded the book, and its own read comes then."""
    own = asyncio.Event()

    async def meanwhile() -> None:
        await report(store, FIRST, 2, 7)
        for version in range(2, KEPT + 3):
            await report(store, BUSY, version, 50 + version % 2)
        await trimmed(store)
        own.set()

    replica = LocalReplica(Slow(store, meanwhile))
    other = asyncio.create_task(replica.fresh())
    await own.wait()
    book = await replica.fresh()
    await other
    assert capacity(book, FIRST) == 7

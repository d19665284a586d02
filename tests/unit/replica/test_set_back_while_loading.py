"""A book that is set back while a replica reads its snapshot: the snapshot begins again from its first page."""

from __future__ import annotations

from bus.contracts.feed import ChangesPage, FeedHead, SnapshotPage
from placement_worker.replica.local import LocalReplica
from tests.unit.replica.books import provider


class SetBackAfter:
    """A store of ten providers that becomes another history's after so many pages of a snapshot."""

    def __init__(self, pages: int) -> None:
        self.states = [provider(number, inventories={"VCPU": 8}) for number in range(10)]
        self.pages, self.left = 0, pages

    @property
    def history(self) -> str:
        return "h1" if self.left > 0 else "h2"

    async def head(self) -> FeedHead:
        return FeedHead(sequence=5, history=self.history)

    async def changes(self, after: int, limit: int, history: str = "") -> ChangesPage:
        return ChangesPage(head=5, too_old=history not in ("", self.history), history=self.history)

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        limit = 3
        left = [one for one in self.states if after is None or one.uuid > after]
        page = SnapshotPage(sequence=5, providers=tuple(left[:limit]), more=len(left) > limit, history=self.history)
        self.left -= 1
        return page


async def test_a_local_replica_reads_all_of_a_book_that_was_set_back_while_it_read() -> None:
    for pages in range(6):
        replica = LocalReplica(SetBackAfter(pages))
        for _ in range(3):
            book = await replica.fresh()
        assert (len(book), book.history) == (10, "h2" if pages < 5 else book.history), pages

"""A snapshot and many changes leave the event loop its turns, and readers see the old book or the new one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable

import numpy as np
import pytest

from bus.contracts.feed import ChangesPage, FeedHead, SnapshotPage, feed_rows
from bus.contracts.placement import ProviderState
from placement_worker.replica import catch_up
from placement_worker.replica.book import CLASS_WEIGHS, SWEEP_FROM, Book, Gap
from placement_worker.replica.catch_up import AT_ONCE, Loading, apply
from placement_worker.replica.copies import copy_of
from placement_worker.replica.local import LocalReplica
from placement_worker.replica.sharing import Sharing, sharing_of
from tests.unit.replica.books import changed, provider, removed, used, uuid

MANY = 10 * AT_ONCE


class Turns:
    """The work on books in each turn of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        self._now = 0
        for name in ("_put", "_use"):
            monkeypatch.setattr(Book, name, self._counted(getattr(Book, name)))

    def _counted(self, done: object) -> object:
        def count(*arguments: object) -> object:
            self._now += 1
            self.most = max(self.most, self._now)
            return done(*arguments)  # type: ignore[operator]

        return count

    async def during(self, work: Awaitable[object]) -> object:
        """Until the work is done, with a task beside it that wants every turn."""
        task = asyncio.ensure_future(work)
        while not task.done():
            self._now = 0
            await asyncio.sleep(0)
        return await task


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    return Turns(monkeypatch)


def free(book: Book, number: int = 0) -> int:
    row = book.row_of(uuid(number))
    assert row is not None
    return int(book.free("VCPU", np.array([row]))[0])


def hosts(count: int, capacity: int = 8) -> list[ProviderState]:
    return [provider(number, inventories={"VCPU": capacity}) for number in range(count)]


class Source:
    """A store with one page of providers and one of changes."""

    async def head(self) -> FeedHead:
        return FeedHead(sequence=MANY, history="h")

    async def changes(self, after: int, limit: int, history: str = "") -> ChangesPage:
        changes = [used(number + 1, number, 2, {"VCPU": 1}) for number in range(after, min(after + limit, MANY))]
        return ChangesPage(rows=feed_rows(changes), head=MANY, history="h")

    async def snapshot(self, after: str | None, limit: int) -> SnapshotPage:
        return SnapshotPage(sequence=0, providers=tuple(hosts(MANY)), history="h")


async def test_a_replica_is_loaded_and_brought_up_to_date_in_turns(turns: Turns) -> None:
    replica = LocalReplica(Source())
    await turns.during(replica.fresh())
    assert 0 < turns.most <= AT_ONCE
    assert len(replica.book) == MANY
    assert replica.book.sequence == MANY
    assert free(replica.book, MANY - 1) == 7
    assert catch_up.PAGE <= 1000


async def test_readers_have_the_old_book_until_the_new_one_is_whole() -> None:
    book = Book()
    book.load(hosts(3), 5, "h")
    book.assume("k", {uuid(1): {"VCPU": 2}})
    loading = Loading()
    await loading.add(hosts(MANY, capacity=16))
    assert (len(book), free(book), free(book, 1), book.sequence) == (3, 8, 6, 5)
    book.assume("l", {uuid(2): {"VCPU": 3}})  # while it is loaded
    book.forget("k")
    epoch, version = book.epoch, book.version
    loading.begin(SnapshotPage(sequence=9, providers=(), history="h"))
    loading.finish(book)
    assert (len(book), free(book), free(book, 1), free(book, 2), book.sequence) == (MANY, 16, 16, 13, 9)
    assert book.epoch > epoch and book.changed_roots(version) is None
    book.forget("l")
    assert free(book, 2) == 16


async def test_the_first_search_after_a_load_builds_nothing_that_the_next_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book, loading = Book(), Loading()
    await loading.add(hosts(3))
    loading.begin(SnapshotPage(sequence=1, providers=(), history="h"))
    loading.finish(book)
    built: list[str] = []
    monkeypatch.setattr(Sharing, "__init__", lambda *_: built.append("sharing"))
    flatnonzero = np.flatnonzero
    monkeypatch.setattr(np, "flatnonzero", lambda flags: built.append("rows") or flatnonzero(flags))
    roots = book.rows_of_roots()
    assert sharing_of(book).true_at == book.shape_moves.end
    assert (roots.tolist(), built) == ([0, 1, 2], [])


def test_a_row_of_a_new_snapshot_has_no_stamp_of_before() -> None:
    book = Book()
    book.load(hosts(3), 1)
    before = set(book.stamp[:3].tolist())
    book.load(hosts(3), 2)
    book.apply([used(3, 0, 2, {"VCPU": 1})])
    assert not before & set(book.stamp[:3].tolist())
    assert len(set(book.stamp[:3].tolist())) == 3


async def test_changes_are_applied_in_turns_up_to_a_hole(turns: Turns) -> None:
    book = Book()
    book.load(hosts(MANY), 0)
    changes = [used(number + 1, number, 2, {"VCPU": 1}) for number in range(MANY)]
    turns.most = 0
    hole = [*changes[: 2 * AT_ONCE], *changes[2 * AT_ONCE + 1 :]]
    assert await turns.during(apply(book, hole)) == Gap(2 * AT_ONCE + 1, 2 * AT_ONCE + 2)
    assert book.sequence == 2 * AT_ONCE
    assert await turns.during(apply(book, changes)) is None
    assert book.sequence == MANY
    assert 0 < turns.most <= AT_ONCE


def test_columns_of_classes_that_came_and_went_are_freed() -> None:
    book = Book()
    book.load([*hosts(2), provider(2, inventories={"CUSTOM_STAYS": 4})], 0)
    rounds = 4 * SWEEP_FROM // CLASS_WEIGHS
    for turn in range(rounds):
        name = f"CUSTOM_{turn}"
        state = provider(0, generation=2 + turn, shape=2 + turn, inventories={"VCPU": 8, name: 4}, used={name: 1})
        book.apply([changed(book.sequence + 1, state)])
    assert len(book.resource_classes()) < rounds // 2
    assert {"VCPU", "CUSTOM_STAYS", f"CUSTOM_{rounds - 1}"} < set(book.resource_classes())
    rows = {number: book.row_of(uuid(number)) for number in range(3)}
    assert {number: list(book.inventory_of(row or 0)) for number, row in rows.items()} == {
        0: [f"CUSTOM_{rounds - 1}", "VCPU"],
        1: ["VCPU"],
        2: ["CUSTOM_STAYS"],
    }
    # A class that was freed comes again, also with a claim in flight.
    book.assume("k", {uuid(1): {"CUSTOM_0": 1}})
    book.apply([changed(book.sequence + 1, provider(1, generation=9, inventories={"CUSTOM_0": 4}))])
    assert int(book.free("CUSTOM_0", np.array([rows[1]]))[0]) == 3
    book.apply([removed(book.sequence + 1, 2, 2)])
    book._sweep_at = 0
    book.apply([used(book.sequence + 1, 1, 10, {"CUSTOM_0": 2})])
    assert "CUSTOM_STAYS" not in book.resource_classes()
    assert int(book.free("CUSTOM_0", np.array([rows[1]]))[0]) == 1


def uncounted(book: Book) -> int:
    """Distinct inventories that the next search would have to turn into columns."""
    return sum(len(column.kinds) - column.kinds._filled for column in book._by_number)


async def test_a_load_leaves_nothing_to_be_built_by_the_first_search() -> None:
    loading, book = Loading(), Book()
    await loading.add([provider(number, inventories={"VCPU": 8 + number}) for number in range(MANY)])
    loading.begin(SnapshotPage(sequence=1, providers=(), history="h"))
    loading.finish(book)
    column = book.column("VCPU")
    assert column is not None and len(column.kinds) == MANY + 1 and uncounted(book) == 0
    copied = copy_of(book)
    assert uncounted(copied) == 0
    rows = book.rows_of_roots()
    assert book.totals("VCPU", rows).tolist() == copied.totals("VCPU", rows).tolist() == list(range(8, 8 + MANY))


async def test_forgotten_inventories_leave_the_columns_of_the_others() -> None:
    book = Book()
    book.load([provider(number, inventories={"VCPU": 8 + number}) for number in range(SWEEP_FROM)], 1)
    smaller = [provider(number, generation=2, inventories={"VCPU": 5}) for number in range(0, SWEEP_FROM, 2)]
    changes = [changed(sequence, state) for sequence, state in enumerate(smaller, 2)]
    assert book.apply(changes) is None
    column = book.column("VCPU")
    assert column is not None and len(column.kinds) == SWEEP_FROM // 2 + 2, "swept: the odd ones, 5 and none"
    assert uncounted(book) == 0
    expected = [5 if number % 2 == 0 else 8 + number for number in range(SWEEP_FROM)]
    assert book.totals("VCPU", np.array([book.row_of(uuid(n)) for n in range(SWEEP_FROM)])).tolist() == expected


def test_the_first_search_imports_nothing() -> None:
    """NumPy imports a part of itself when `numpy.unique` is first called: 8 ms of the first search."""
    script = (
        "import sys; from placement_worker.replica.book import Book; from placement_worker.replica.search import *; "
        "before = set(sys.modules); search(Book(), Query(resources={'VCPU': 1})); print(set(sys.modules) - before)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "set()"

"""Writes that gather: one transaction for what came meanwhile, one outcome each, and no write fails for a neighbour."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bus.faults import DatabaseUnavailable, Transient
from placement_worker.rest.groups import GATHER_S, MAX_ENTRIES, TRIES, Groups, TooMany

HANG_S = 60.0


class Book:
    """Doubles what it is given; refuses to store 13, and fails as often as it is instructed."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.commits = 0
        self.failures: list[Exception] = []
        self.go = asyncio.Event()
        self.go.set()
        self.began = asyncio.Event()

    async def apply(self, items: Sequence[int]) -> list[int]:
        self.groups.append(list(items))
        self.began.set()
        await self.go.wait()
        if self.failures:
            raise self.failures.pop(0)
        if 13 in items:
            raise ValueError("13")
        return [2 * item for item in items]

    def committed(self) -> None:
        self.commits += 1


def make(book: Book, *, gather_s: float = GATHER_S, **limits: int) -> Groups[int, int]:
    limits = {"max_group": 4, "max_waiting": 8, **limits}
    return Groups("test", book.apply, committed=book.committed, gather_s=gather_s, **limits)


async def test_what_gathers_is_the_next_group() -> None:
    book = Book()
    groups = make(book)
    book.go.clear()
    tasks = [asyncio.create_task(groups.submit(number)) for number in range(7)]
    await book.began.wait()
    book.go.set()
    assert await asyncio.gather(*tasks) == [0, 2, 4, 6, 8, 10, 12]
    assert [len(group) for group in book.groups] == [4, 3]
    assert book.commits == 2
    await groups.drain()


async def test_item_16_a_group_has_no_more_entries_than_a_turn_of_the_loop_may_take() -> None:
    book = Book()
    groups = Groups("test", book.apply, max_group=8, max_waiting=8, committed=book.committed, entries=lambda item: item)
    book.go.clear()
    large, half = MAX_ENTRIES + 1, MAX_ENTRIES // 2
    tasks = [asyncio.create_task(groups.submit(number)) for number in (1, half, half, 1, large, 1, 1)]
    await book.began.wait()
    book.go.set()
    await asyncio.gather(*tasks)
    assert book.groups == [[1, half], [half, 1], [large], [1, 1]]
    await groups.drain()


async def test_a_transaction_that_hangs_holds_up_only_its_own_writes() -> None:
    """It waits for a lock that another program holds: the writes that come after it, one by one, are answered."""
    book = Book()
    began, go_on = asyncio.Event(), asyncio.Event()

    async def apply(items: Sequence[int]) -> list[int]:
        if 1 in items:
            began.set()
            await go_on.wait()
        return await book.apply(items)

    groups = Groups("test", apply, max_group=4, max_waiting=8, committed=book.committed)
    hung = asyncio.create_task(groups.submit(1))
    await began.wait()
    async with asyncio.timeout(HANG_S):
        assert [await groups.submit(number) for number in (2, 3, 4)] == [4, 6, 8]
    go_on.set()
    assert await hung == 2
    await groups.drain()


async def test_one_bad_item_fails_alone() -> None:
    book = Book()
    groups = make(book)
    results = await asyncio.gather(*(groups.submit(n) for n in (1, 13, 2)), return_exceptions=True)
    assert results[0] == 2
    assert isinstance(results[1], ValueError)
    assert results[2] == 4
    assert book.commits == 2


async def test_what_breaks_after_the_commit_leaves_no_caller_waiting_and_concerns_no_other_group() -> None:
    """The callers of the group waited for ever, and those of the next one got the error."""
    book = Book()

    async def too_few(items: Sequence[int]) -> list[int]:
        return (await book.apply(items))[: 3 if len(items) == 4 else None]

    def broken() -> None:
        raise KeyError(book.commits)

    groups = Groups("test", too_few, max_group=4, max_waiting=8, committed=broken)
    book.go.clear()
    tasks = [asyncio.create_task(groups.submit(number)) for number in range(6)]
    await book.began.wait()
    book.go.set()
    async with asyncio.timeout(HANG_S):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[:3] + results[4:] == [0, 2, 4, 8, 10]
    assert isinstance(results[3], ValueError)
    assert book.groups == [[0, 1, 2, 3], [4, 5]]
    await groups.drain()


async def test_a_transaction_that_was_given_up_is_tried_again_but_not_for_ever() -> None:
    book = Book()
    groups = make(book)
    book.failures = [Transient(code="database.deadlock")] * (TRIES - 1)
    assert await groups.submit(1) == 2
    book.failures = [Transient(code="database.deadlock")] * TRIES
    with pytest.raises(Transient):
        await groups.submit(1)
    assert await groups.submit(3) == 6


async def test_a_database_that_disconnected_may_have_committed_and_is_not_tried_again() -> None:
    book = Book()
    groups = make(book)
    book.failures = [DatabaseUnavailable("gone")]
    with pytest.raises(DatabaseUnavailable):
        await groups.submit(1)
    assert len(book.groups) == 1


async def test_a_request_at_once_after_an_answer_is_served() -> None:
    """It hung: the worker had looked for more, and was still counted as working."""
    groups = make(Book())
    async with asyncio.timeout(HANG_S):
        assert [await groups.submit(number) for number in range(9)] == [2 * number for number in range(9)]


async def test_no_more_wait_than_may() -> None:
    book = Book()
    groups = make(book, max_waiting=2)
    book.go.clear()
    first = asyncio.create_task(groups.submit(0))
    await book.began.wait()
    waiting = [asyncio.create_task(groups.submit(n)) for n in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(TooMany):
        await groups.submit(3)
    book.go.set()
    assert await asyncio.gather(first, *waiting) == [0, 2, 4]


async def test_a_caller_that_stops_waiting_cancels_no_other() -> None:
    book = Book()
    groups = make(book)
    book.go.clear()
    tasks = [asyncio.create_task(groups.submit(n)) for n in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    book.go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[0::2] == [0, 4]
    assert isinstance(results[1], asyncio.CancelledError)


async def test_those_answered_together_are_waited_for_together() -> None:
    """The first to ask again took a group for itself, and so on for ever: 1, 7, 1, 7 ... of eight callers."""
    book = Book()
    groups = make(book, max_group=16, max_waiting=16, gather_s=60)  # as long as it takes: all of them come back

    async def caller(number: int) -> None:
        for _ in range(20):
            await groups.submit(number)
            for _ in range(number):  # the way to the caller and back, in turns of the loop: no two are alike
                await asyncio.sleep(0)

    async with asyncio.timeout(30):
        await asyncio.gather(*(caller(number) for number in range(8)))
    assert [len(group) for group in book.groups] == [8] * 20


async def test_no_caller_waits_long_for_callers_who_do_not_come_back() -> None:
    book = Book()
    groups = make(book)
    assert await asyncio.gather(*(groups.submit(number) for number in range(2))) == [0, 2]
    async with asyncio.timeout(HANG_S):
        await groups.drain()
        assert await groups.submit(3) == 6
        await groups.drain()

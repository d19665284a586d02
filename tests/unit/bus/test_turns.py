"""Long work in parts: one part in a turn of the event loop, of all long work together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from bus.turns import InParts, next_turn
from tests.kit.turns import Turns


class Work:
    """Tasks that do long work; by turn of the loop, the numbers of those that went on in it."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.went_on: list[tuple[int, int]] = []

    async def do(self, number: int, parts: int) -> None:
        for _ in range(parts):
            await next_turn()
            self.went_on.append((self._turns.turn, number))

    def most(self) -> int:
        return max(Counter(turn for turn, _ in self.went_on).values())

    @property
    def order(self) -> Sequence[int]:
        return [number for _, number in self.went_on]


async def test_item_16_one_part_of_several_long_works_is_done_in_a_turn() -> None:
    """Parts of two batches and of a list of hosts were one turn of 32 ms, none of them more than 16."""
    counted = Turns()
    work = Work(counted)
    async with counted.counting():
        await asyncio.gather(*(work.do(number, 4) for number in range(3)))
    assert work.most() == 1
    assert work.order == [0, 1, 2] * 4, "each in its turn"
    first, last = work.went_on[0][0], work.went_on[-1][0]
    assert last - first == 11, "no turn is left empty"


async def test_item_16_the_parts_of_two_lists_come_in_turns_of_their_own() -> None:
    counted, seen = Turns(), Counter[int]()

    async def read(items: range) -> None:
        async for part in InParts(items, 2):
            seen[counted.turn] += len(part)

    async with counted.counting():
        await asyncio.gather(read(range(8)), read(range(8)))
    assert seen.total() == 16 and sorted(seen.values()) == [2] * 6 + [4], "only the first parts wait for nothing"


async def test_a_long_work_that_is_alone_goes_on_in_each_turn() -> None:
    """As after a sleep of no time: an idle system is not slower for it."""
    counted = Turns()
    work = Work(counted)
    async with counted.counting():
        await work.do(0, 5)
    assert [turn for turn, _ in work.went_on] == list(range(work.went_on[0][0], work.went_on[0][0] + 5))


async def test_a_cancelled_task_passes_its_turn_on() -> None:
    """The one that has the next turn, one that waits, and one whose turn has just come."""
    for cancelled_after in range(4):
        for cancelled in range(3):
            work = Work(Turns())
            tasks = [asyncio.create_task(work.do(number, 3)) for number in range(3)]
            for _ in range(cancelled_after):
                await asyncio.sleep(0)
            tasks[cancelled].cancel()
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks, return_exceptions=True)
                assert {0, 1, 2} - {cancelled} <= set(work.order)
                await work.do(9, 2)
            assert work.order.count(9) == 2


async def test_items_come_in_order_and_a_small_number_at_once() -> None:
    """A batch that fits into one part waits for nothing, as nearly every batch does."""
    counted = Turns()
    async with counted.counting():
        before = counted.turn
        assert [part async for part in InParts(range(3), 3)] == [[0, 1, 2]]
        assert [part async for part in InParts(range(0), 3)] == []
        assert counted.turn == before
        assert [part async for part in InParts(range(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]
        assert counted.turn > before


def test_each_event_loop_has_turns_of_its_own() -> None:
    """One that ended in the middle of long work holds up no other."""

    ended: list[bool] = []

    async def leave() -> None:
        asyncio.create_task(next_turn())  # noqa: RUF006  (it is left behind on purpose)
        ended.append(False)

    async def wait() -> None:
        await asyncio.wait_for(next_turn(), 60)
        ended.append(True)

    for _ in range(2):
        left = asyncio.new_event_loop()
        left.run_until_complete(leave())
        asyncio.run(wait())
        left.run_until_complete(asyncio.sleep(0))
        left.close()
    assert ended == [False, True] * 2

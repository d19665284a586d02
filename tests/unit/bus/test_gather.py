"""When batches begin: every interleaving of what arrives, ends, becomes slow and closes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.batcher import SLOW_S, Batcher

TURNS = 6  # of the loop: more than everything that may begin needs to begin
SIZE = 3  # the items of a full batch


class HandLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes when the test lets it pass."""

    now = 0.0

    def time(self) -> float:
        return self.now


class Broken(Exception):
    pass


class Batch:
    def __init__(self, items: Sequence[int], *, was_full: bool, quick: int) -> None:
        self.items = items
        self.was_full = was_full  # what waited before it was taken
        self.quick = quick  # batches under way beside it that were not slow
        self.is_slow = False
        self.end = asyncio.Event()
        self.fate = ""


class World:
    """A line of numbers and the batches that a `Batcher` makes of them, which end when the test ends them."""

    def __init__(self, at_once: int, most: int, *, paused: bool) -> None:
        self.line: deque[int] = deque()
        self.put = 0
        self.batches: list[Batch] = []
        self.at_once, self.most = at_once, most
        self.go_on = asyncio.Event()
        self.is_enough = False
        self.idle = 0
        self.closed = False
        self.broken = ""  # what raises
        self.errors: list[Exception] = []
        self.gather: Batcher[int] = Batcher(
            self.take,
            self.handle,
            waiting=self.line.__len__,
            most=most,
            at_once=at_once,
            is_full=lambda: len(self.line) >= SIZE,
            pause_s=self.pause_s if paused else lambda: 0.0,
            enough=lambda: self.is_enough,
            sleep=self.sleep,
            on_idle=self.on_idle,
            on_error=self.errors.append,
        )
        if not paused:
            self.go_on.set()

    @property
    def under_way(self) -> list[Batch]:
        return [batch for batch in self.batches if not batch.fate]

    def pause_s(self) -> float:
        if self.broken == "pause":
            raise Broken
        return 1.0

    async def sleep(self, seconds: float) -> None:
        assert seconds == 1.0
        await self.go_on.wait()

    @property
    def is_pausing(self) -> bool:
        return not (self.go_on.is_set() or self.is_enough)

    def on_idle(self) -> None:
        assert not self.under_way
        self.idle += 1

    def take(self) -> list[int]:
        if self.broken == "take":
            raise Broken
        was_full = len(self.line) >= SIZE
        items = [self.line.popleft() for _ in range(min(SIZE, len(self.line)))]
        self.batches.append(Batch(items, was_full=was_full, quick=sum(not batch.is_slow for batch in self.under_way)))
        return items

    async def handle(self, items: Sequence[int]) -> None:
        batch = next(batch for batch in self.batches if batch.items is items)
        try:
            await batch.end.wait()
            batch.fate = "ended"
        except asyncio.CancelledError:
            batch.fate = "cancelled"
            raise

    def arrive(self, count: int) -> None:
        for _ in range(count):
            self.line.append(self.put)
            self.put += 1
            self.gather.wake()

    def check(self) -> None:
        under_way = self.under_way
        slow = sum(batch.is_slow for batch in under_way)
        assert (self.gather.in_progress, self.gather.slow) == (len(under_way), slow)
        assert len(under_way) <= self.most
        assert all(batch.quick < self.at_once or batch.was_full for batch in self.batches), "it began too early"
        assert [item for batch in self.batches for item in batch.items] + list(self.line) == list(range(self.put))
        may_begin = self.line and len(under_way) < self.most and not self.closed and not self.is_pausing
        if may_begin:
            assert len(under_way) - slow >= self.at_once and len(self.line) < SIZE, "what may begin has begun"

    def make_slow(self) -> None:
        for batch in self.under_way:
            batch.is_slow = True

    async def breaks(self, broken: str) -> None:
        """For a while this raises, which ends nothing and keeps no slot."""
        await self.settle()
        seen = len(self.errors)
        self.broken = broken
        self.arrive(SIZE)
        await self.turns()
        raises = broken == "take" or not self.is_enough  # where there is no pause, nothing asks how long it is
        if raises and not self.is_pausing and len(self.under_way) < self.most and not self.closed:
            assert len(self.errors) > seen, "it is told of the error"
        self.broken = ""
        self.gather.wake()
        await self.settle()

    async def turns(self) -> None:
        for _ in range(TURNS * self.most):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        await self.turns()
        self.check()


NAMES = ["arrive", "arrive", "end", "slow", "turn", "turns", "pause", "break", "close"]
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 2 * SIZE)), min_size=4, max_size=30)


async def play(steps: Sequence[tuple[str, int]], at_once: int, extra: int, *, paused: bool) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, HandLoop)
    world = World(at_once, at_once + extra, paused=paused)
    for step, number in steps:
        under_way = world.under_way
        if step == "arrive":
            world.arrive(number)
        elif step == "end" and under_way:
            under_way[number % len(under_way)].end.set()
        elif step == "slow":
            await world.settle()
            world.make_slow()
            loop.now += SLOW_S
        elif step == "pause" and paused:
            (world.go_on.set if number % 2 else world.go_on.clear)()
            world.is_enough = number > SIZE
            world.gather.wake()
        elif step == "break":
            await world.breaks("pause" if number % 2 and paused else "take")
        elif step == "close":
            world.closed = True
            began = len(world.batches)
            await world.gather.close()
            assert not world.under_way
            assert len(world.batches) == began, "nothing begins after it"
        elif step == "turn":
            await asyncio.sleep(0)
        elif step == "turns":
            await world.settle()
    await world.settle()
    if world.closed:
        return
    world.go_on.set()
    ending = asyncio.ensure_future(world.gather.idle())
    while not ending.done():
        await world.settle()
        for batch in world.under_way:
            batch.end.set()
    assert not world.line and not world.under_way
    assert {batch.fate for batch in world.batches} <= {"ended"}
    assert world.idle or not world.put


@given(steps=STEPS, at_once=st.integers(1, 2), extra=st.integers(0, 2), paused=st.booleans())
def test_what_may_begin_begins_and_nothing_else_does(
    steps: list[tuple[str, int]], at_once: int, extra: int, paused: bool
) -> None:
    loop = HandLoop()
    try:
        loop.run_until_complete(play(steps, at_once, extra, paused=paused))
    finally:
        loop.close()


def raise_it(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("raises", [1, 2, 3])
async def test_a_take_or_handling_that_raises_is_told_of_and_loses_no_batch(raises: int) -> None:
    """At the first or second take, or the first handling: asyncio swallowed it, and the slot was never given back."""
    line, handled, errors = deque([1, 2, 3]), list[int](), list[Exception]()
    left = raises if raises < 3 else 0

    def take() -> list[int]:
        nonlocal left
        left -= 1
        if left == 0:
            raise Broken
        return [line.popleft()]

    async def handle(items: Sequence[int]) -> None:
        handled.extend(items)
        if items == [1] and raises == 3:
            raise Broken

    batcher: Batcher[int] = Batcher(take, handle, waiting=line.__len__, most=2, at_once=2, on_error=errors.append)
    batcher.wake()
    await asyncio.wait_for(batcher.idle(), 30)
    batcher.wake()
    await asyncio.wait_for(batcher.idle(), 30)
    assert [type(error) for error in errors] == [Broken]
    assert (sorted(handled), batcher.in_progress) == ([1, 2, 3], 0)


async def test_a_batch_runs_in_the_context_in_which_the_gather_was_made() -> None:
    """The one that wakes it handles another message, whose trace and process are no business of the batch."""
    where: ContextVar[str] = ContextVar("where", default="made")
    line, seen = deque([1]), asyncio.Queue[str]()

    async def handle(items: Sequence[int]) -> None:
        seen.put_nowait(where.get())

    batcher: Batcher[int] = Batcher(lambda: [line.popleft()], handle, waiting=line.__len__, most=1, on_error=raise_it)
    where.set("woken")
    batcher.wake()
    assert await asyncio.wait_for(seen.get(), 30) == "made"

"""Turns by project: a table, a machine that compares with a model, and tasks that end in every way."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bus import fair_queue
from bus.fair_queue import BYTES_PER_REQUEST, FairQueue, Turns, cost_of

PROJECTS = ("a", "b", "c")


@pytest.mark.parametrize(
    ("requests", "size", "cost"),
    [
        (1, 0, 1),
        (1, BYTES_PER_REQUEST, 1),
        (1, BYTES_PER_REQUEST + 1, 2),
        (64, 64 * 300, 64),  # a batch counts its items
        (100, 300, 100),  # a gang its machines
        (1, 2**20, 1024),  # a body of a megabyte as much as a thousand requests
        (0, 0, 1),
    ],
)
def test_what_something_counts_as(requests: int, size: int, cost: int) -> None:
    assert cost_of(requests, size) == cost


@pytest.mark.parametrize(
    ("waiting", "order"),
    [
        ({"a": [1, 1, 1], "b": [1, 1, 1]}, "ababab"),
        ({"a": [100, 100], "b": [1, 1, 1, 1]}, "abbbba"),  # a gang gives others as many turns as it has machines
        ({"a": [64, 64, 64], "b": [64], "c": [1, 1]}, "abccaa"),
        ({"a": [1], "b": [1000], "c": [1, 1]}, "abcc"),
    ],
)
def test_the_order_of_turns(waiting: dict[str, list[int]], order: str) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for project, costs in waiting.items():
        for cost in costs:
            queue.put(project, cost, (project, cost))
    taken = ""
    while (item := queue.take()) is not None:
        queue.end(*item)
        taken += item[0]
    assert (taken, len(queue)) == (order, 0)


def test_what_has_begun_is_bounded_in_all_and_of_one_project() -> None:
    queue: FairQueue[str] = FairQueue(most=4, most_of_one=2)
    for project in PROJECTS:
        for _ in range(4):
            queue.put(project, 1, project)
    assert [queue.take() for _ in range(5)] == ["a", "b", "c", "a", None]
    queue.end("a", 1)
    assert [queue.take(), queue.take()] == ["b", None]
    for project in ("b", "c"):
        queue.end(project, 1)
    queue.put("d", 1000, "d")  # larger than all that may have begun: it begins all the same
    assert [queue.take(), queue.take(), queue.take()] == ["c", "d", None]


def test_projects_that_are_idle_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_IDLE", 4)
    queue: FairQueue[str] = FairQueue()
    queue._drop_idle_from = 4
    for number in range(100):
        queue.put(f"p{number}", 1, f"p{number}")
        taken = queue.take()
        assert taken is not None
        queue.end(taken, 1)
    assert len(queue._lines) <= 5


class AgainstAModel(RuleBasedStateMachine):
    """The model counts what each project had while it waited. No project that waits is behind by more than one cost of
    the largest that another was given.
    """

    MOST, MOST_OF_ONE, LARGEST = 8, 4, 6

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue(self.MOST, self.MOST_OF_ONE)
        self.waiting: dict[str, list[tuple[int, int]]] = {project: [] for project in PROJECTS}
        self.started: list[tuple[str, int]] = []
        self.had_beside: dict[tuple[str, str], int] = {}  # what one had more than the other, since both wait
        self.number = 0

    @rule(project=st.sampled_from(PROJECTS), cost=st.integers(1, LARGEST))
    def put(self, project: str, cost: int) -> None:
        self.number += 1
        if not self.waiting[project]:
            for other in PROJECTS:
                self.had_beside[project, other] = self.had_beside[other, project] = 0
        self.waiting[project].append((self.number, cost))
        self.queue.put(project, cost, self.number)

    @rule()
    def take(self) -> None:
        found = self.queue.take()
        total, by_one = sum(cost for _, cost in self.started), Counter[str]()
        for project, cost in self.started:
            by_one[project] += cost
        may = [one for one in PROJECTS if self.waiting[one] and by_one[one] < self.MOST_OF_ONE]
        if total >= self.MOST or not may:
            assert found is None
            return
        (project,) = (one for one in may if self.waiting[one][0][0] == found)  # the first of one that may
        _, cost = self.waiting[project].pop(0)
        self.started.append((project, cost))
        for other in PROJECTS:
            if other != project:
                self.had_beside[project, other] += cost
                self.had_beside[other, project] -= cost
                if other in may and self.waiting[project]:
                    assert self.had_beside[project, other] <= 2 * self.LARGEST

    @precondition(lambda self: self.started)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.queue.end(*self.started.pop(data.draw(st.integers(0, len(self.started) - 1))))

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        project = data.draw(st.sampled_from([one for one in PROJECTS if self.waiting[one]]))
        number, cost = self.waiting[project].pop(data.draw(st.integers(0, len(self.waiting[project]) - 1)))
        self.queue.drop(project, cost, number)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.queue) == sum(map(len, self.waiting.values()))

    def teardown(self) -> None:
        while self.started:
            self.queue.end(*self.started.pop())
        left = 0
        while self.queue.take() is not None:
            left += 1
            for project in PROJECTS:
                line = self.queue._lines.get(project)
                if line is not None and line.started:
                    self.queue.end(project, line.started)
        assert left == sum(map(len, self.waiting.values()))


TestAgainstAModel = AgainstAModel.TestCase


async def test_a_turn_that_ends_gives_way_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, order = Turns(most=1, most_of_one=1), []
    gates = {name: asyncio.Event() for name in "abcd"}

    async def work(name: str) -> None:
        async with turns.turn(name, 1):
            order.append(name)
            await gates[name].wait()
            if name == "b":
                raise ValueError(name)

    tasks = {name: asyncio.create_task(work(name)) for name in "abcd"}
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["a"]
    tasks["c"].cancel()  # while it waits
    await asyncio.gather(tasks["c"], return_exceptions=True)
    assert order == ["a"], "it had no turn that it could give to another"
    gates["a"].set()
    await tasks["a"]
    gates["b"].set()
    await asyncio.gather(tasks["b"], tasks["c"], return_exceptions=True)
    gates["d"].set()
    await tasks["d"]
    assert order == ["a", "b", "d"]
    assert (len(turns._queue), turns._queue._started) == (0, 0)


async def test_a_task_cancelled_just_as_it_begins_gives_way() -> None:
    turns, first = Turns(most=1, most_of_one=1), asyncio.Event()

    async def hold(until: asyncio.Event) -> None:
        async with turns.turn("a", 1):
            await until.wait()

    holding = asyncio.create_task(hold(first))
    await asyncio.sleep(0)
    second = asyncio.create_task(hold(asyncio.Event()))
    await asyncio.sleep(0)
    first.set()
    await holding  # its end has begun the second, which has not run yet
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert (len(turns._queue), turns._queue._started) == (0, 0)


async def test_a_turn_that_lasts_long_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_TURN_S", 0.01)
    turns, never = Turns(most=1, most_of_one=1), asyncio.Event()

    async def hold() -> None:
        async with turns.turn("a", 1):
            await never.wait()

    holding = asyncio.create_task(hold())
    await asyncio.sleep(0)
    async with turns.turn("b", 1):
        assert not holding.done()
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    assert turns._queue._started == 0

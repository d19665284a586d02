"""Groups concurrent writes: the writes that arrive while one transaction runs make the next group."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import structlog

from bus.batcher import Batcher
from bus.faults import DatabaseUnavailable, Transient
from placement_worker import metrics

Item = TypeVar("Item")
Result = TypeVar("Result")

log = structlog.get_logger("placement.rest")

# The attempts at a transaction that the database aborts (deadlock, serialization failure).
TRIES = 5

# Callers that are answered together send their next writes together, a moment later. A group that started with the
# first of these writes would leave the others to the next group, and so on: twice the groups, at twice the cost. So a
# group waits for as many writes as the last one had, at most this long. After it has waited in vain, the next 1, 2, 4
# ... groups do not wait.
BATCH_S = 0.003
MAX_SKIPPED = 64

# The entries of a group: a further write that has more waits for the next group, because some of the work on a group is
# one turn of the event loop. One write alone may have more.
MAX_ENTRIES = 4096

# The groups that may be slow while others run beside them, because they wait for locks that another program holds. Each
# has a connection of the database's pool, which placement's other work shares.
MAX_SLOW = 2


class TooMany(Transient):
    """More writes are waiting than the bound allows."""

    code = "rest.too_many"


class Groups(Generic[Item, Result]):
    """Gathers items into groups, of which one runs at a time, beside at most MAX_SLOW slow ones. The writes that arrive
    meanwhile make a larger group, which saves more than a second transaction beside it would gain (measured: 30 % less
    CPU). More processes increase the throughput.
    """

    def __init__(
        self,
        name: str,
        apply: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        max_group: int,
        max_waiting: int,
        committed: Callable[[], None],
        entries: Callable[[Item], int] = lambda _: 1,
        gather_s: float = BATCH_S,
    ) -> None:
        self._name = name
        self._apply = apply
        self._group_max = max_group
        self._waiting_max = max_waiting
        self._committed = committed
        self._entries = entries
        self._batch_s = gather_s
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._awaited = 0, 0.0  # the number of writes that a group waits for, and until when
        self._groups: Batcher[tuple[Item, asyncio.Future[Result]]] = Batcher(
            self._next_group,
            self._handle,
            waiting=self._waiting.__len__,
            at_once=1,
            most=1 + MAX_SLOW,
            pause_s=self._pause_s,
            enough=lambda: len(self._waiting) >= self._awaited[0],
            on_error=self._fail_waiting,
        )
        self._paused = False  # before the next group
        self._skip = self._skipped = 0

    async def submit(self, item: Item) -> Result:
        """Apply an item with its group. Returns the item's own outcome after the commit. Raises Transient."""
        if len(self._waiting) >= self._waiting_max:
            raise TooMany(f"{len(self._waiting)} writes are waiting")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._groups.wake()
        return await future

    async def drain(self) -> None:
        """Wait until no item is waiting or being applied."""
        await self._groups.idle()

    async def _handle(self, group: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        metrics.REST_GROUP_ITEMS.labels(self._name).observe(len(group))
        await self._run(group)
        wanted = min(len(group) + len(self._waiting), self._group_max)
        self._awaited = wanted, asyncio.get_running_loop().time() + self._batch_s

    def _fail_waiting(self, error: Exception) -> None:
        """No group can be made of what waits: its callers get the error."""
        waiting = list(self._waiting)
        self._waiting.clear()
        _fail(waiting, error)

    def _next_group(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        """Take the writes that have waited longest, within the bounds of a group."""
        if self._paused:
            in_vain = len(self._waiting) < self._awaited[0]
            self._skip = min(2 * self._skip + 1, MAX_SKIPPED) if in_vain else 0
            self._paused, self._skipped = False, 0
        group: list[tuple[Item, asyncio.Future[Result]]] = []
        entries = 0
        while self._waiting and len(group) < self._group_max:
            entries += self._entries(self._waiting[0][0])
            if group and entries > MAX_ENTRIES:
                break
            group.append(self._waiting.popleft())
        return group

    def _pause_s(self) -> float:
        """How long to wait for as many items as the last group had: GATHER_S, unless recent waits were in vain."""
        remaining_s = self._awaited[1] - asyncio.get_running_loop().time()
        if remaining_s <= 0:
            return 0.0
        if self._skipped < self._skip:
            self._skipped += 1
            return 0.0
        self._paused = True
        return remaining_s

    async def _run(self, group: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._tried([item for item, _ in group])
        except Exception as error:  # the fault is raised to the item's own caller
            if len(group) > 1 and not isinstance(error, Transient):
                for one in group:
                    await self._run([one])
                return
            _fail(group, error)
            return
        try:
            for (_, future), result in zip(group, results, strict=True):
                if not future.done():
                    future.set_result(result)
            self._committed()
        except Exception as error:  # it is committed: what failed is tried no more, and others are not concerned
            log.exception("rest.failed", group=self._name)
            _fail(group, error)

    async def _tried(self, items: list[Item]) -> Sequence[Result]:
        for left in range(TRIES - 1, -1, -1):
            try:
                return await self._apply(items)
            except Transient as error:
                if not left or isinstance(error, DatabaseUnavailable):
                    raise
                log.info("rest.group_again", group=self._name, code=error.code)
        raise AssertionError("the last try returns or raises")


def _fail(group: Sequence[tuple[Item, asyncio.Future[Result]]], error: Exception) -> None:
    """Raise an error to the callers that have no outcome yet."""
    for _, future in group:
        if not future.done():
            future.set_exception(error)

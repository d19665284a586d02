"""The resources that handlers share: the store, the groups of concurrent writes, the replica, and the answers to
refusals.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from copy import copy
from functools import partial
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from bus.clock import Clock
from bus.faults import Transient
from bus.yielding import YieldingParts
from placement_worker import metrics
from placement_worker.domain.allocations import AllocationOutcome, AllocationWrite, Reshape, entries_of_allocations
from placement_worker.domain.refusal import WriteRefusal, no_provider
from placement_worker.domain.trees import TreeOutcome, TreeWrite, entries_of_tree
from placement_worker.domain.values import Provider
from placement_worker.replica.catch_up import LocalReplica
from placement_worker.replica.columns import ChangedRows, ClassColumns, Distinct
from placement_worker.replica.replica import Replica
from placement_worker.rest.bodies import Body
from placement_worker.rest.candidates_query import is_canonical
from placement_worker.rest.config import RestConfig
from placement_worker.rest.faults import NO_RESULTS, HttpFault, Results, refused
from placement_worker.rest.write_batcher import Groups
from placement_worker.service import PlacementService

T = TypeVar("T")
Row = TypeVar("Row")

# The bytes of an invalid body that is examined on the event loop, and the rows of an answer that are rendered in one
# turn: 2 to 5 ms each.
EXPLAINED_AT_ONCE = 8 * 2**10
LISTED_AT_ONCE = 500

# The id of the request that is being answered: the caller's global request id, or else the id that this process gave.
CAUSE: ContextVar[str] = ContextVar("cause", default="")


class Api:
    """The parts of the REST API that handlers use. committed: a function that is called after each write."""

    def __init__(
        self,
        store: PlacementService,
        config: RestConfig,
        *,
        clock: Clock,
        rng: random.Random,
        committed: Callable[[], None],
    ) -> None:
        self.store = store
        self.replica = LocalReplica(store)
        self.searches = OffloadThread("search")
        self.texts = OffloadThread("text")  # examines invalid bodies
        self.epoch_seen = 0  # of the replica's classes when the names were last read because of them
        self.config = config
        self.clock = clock
        self.rng = rng
        self.committed = committed
        groups = partial(Groups, max_group=config.max_group, max_waiting=config.max_waiting, committed=committed)
        self._trees: Groups[TreeWrite, TreeOutcome] = groups("trees", store.write_trees, entries=entries_of_tree)
        self._allocations: Groups[AllocationWrite, AllocationOutcome] = groups(
            "allocations", store.write_allocations, entries=entries_of_allocations
        )

    async def drain(self) -> None:
        """Wait until no write is in progress."""
        await self._trees.drain()
        await self._allocations.drain()
        self.searches.close()
        self.texts.close()

    async def parse(self, kind: Body[T], body: bytes, about: str = "") -> T:
        """Decode a body as its type. A long invalid one is examined in a thread. about: the provider that the body is
        about, which must exist before the body must be valid. Raises HttpFault 400, 404 and 413, TooBusy.
        """
        try:
            parsed = kind.decode(body)
            if parsed is not None:
                return parsed
            if len(body) <= EXPLAINED_AT_ONCE:
                return kind.explain(body)
            return await self.texts.run(lambda: kind.explain(body))
        except HttpFault:
            if about:
                await self.provider(about)
            raise

    async def listed(self, rows: Iterable[Row], text: Callable[[Row], bytes]) -> bytes:
        """Return the rows as text, separated by commas. Other requests are answered while many rows are rendered."""
        return b",".join([b",".join(map(text, part)) async for part in YieldingParts(rows, LISTED_AT_ONCE)])

    async def write_tree(self, write: TreeWrite, answers: Results = NO_RESULTS) -> Provider:
        """Write one provider, in one transaction with concurrent writes. Returns the provider that was written. Raises
        the HttpFault of a refusal.
        """
        outcome: TreeOutcome = no_provider(write.uuid)
        if is_canonical(write.uuid):
            outcome = await self._trees.submit(replace(write, cause=CAUSE.get()))
        if isinstance(outcome, WriteRefusal):
            raise refused(outcome, answers)
        return outcome

    async def write_allocations(self, write: AllocationWrite, answers: Results = NO_RESULTS) -> None:
        """Write allocations, in one transaction with concurrent writes. Raises the HttpFault of a refusal."""
        outcome = await self._allocations.submit(replace(write, cause=CAUSE.get()))
        if outcome is not None:
            raise refused(outcome, answers)

    async def reshape(self, item: Reshape) -> WriteRefusal | None:
        """Apply a reshape in a transaction of its own."""
        outcome = await self.store.reshape(replace(item, cause=CAUSE.get()))
        self.committed()
        return outcome

    async def provider(self, uuid: str, words: str = "{0}") -> tuple[Provider, float]:
        """Return a provider and when it was last written. Raises HttpFault 404, as `of_provider`."""
        return await self.of_provider(uuid, self.store.reads.provider, words=words)

    async def of_provider(self, uuid: str, read: Callable[[str], Awaitable[T | None]], *, words: str = "{0}") -> T:
        """Return the result of a read of a provider. Raises HttpFault 404, with the text `words` where Placement has
        one of its own.
        """
        found = await read(uuid) if is_canonical(uuid) else None
        if found is None:
            raise HttpFault(404, words.format(no_provider(uuid).words, uuid=uuid))
        return found


D = TypeVar("D", bound=Distinct[Any])

# A column with fewer than one used row in this many is copied row by row, so that a rare class costs little.
SPARSE = 8


def copy_of(replica: Replica) -> Replica:
    """Return a copy of the replica as it is now. Call this function on the thread that writes the replica. One thread
    at a time may read the copy.
    """
    copied = copy(replica)
    copied._caches = {}
    copied.changes, copied.spec_changes = (
        ChangedRows(replica.changes.end),
        ChangedRows(replica.spec_changes.end),
    )  # nothing of the copy changes
    for name in replica._filled:
        setattr(copied, name, getattr(replica, name).copy())
    for name in ("trait_sets", "aggregate_sets", "class_sets"):
        setattr(copied, name, _values(getattr(replica, name)))
    copied._by_number = [_column(column, replica.top) for column in replica._by_number]
    copied._columns = {column.name: column for column in copied._by_number}
    copied._uuids, copied._names, copied._rows = list(replica._uuids), list(replica._names), dict(replica._rows)
    return copied


def _column(column: ClassColumns, top: int) -> ClassColumns:
    copied = copy(column)
    column.kinds.columns()  # so that the copy has those of all its values; they do not change
    copied.kinds = _values(column.kinds)
    for name in ("kind", "used", "free", "root_free"):
        setattr(copied, name, _numbers(getattr(column, name), top))
    return copied


def _values(distinct: D) -> D:
    copied = copy(distinct)
    copied.values = list(distinct.values)
    return copied


def _numbers(values: NDArray[np.generic], top: int) -> NDArray[np.generic]:
    set_places = np.flatnonzero(values[:top])
    if len(set_places) * SPARSE > top:
        return values.copy()
    copied = np.zeros_like(values)
    copied[set_places] = values[set_places]
    return copied


Result = TypeVar("Result")

# The number of calls that may wait. A request beyond this bound is answered 503.
MAX_WAITING = 16

# The interpreter's switch interval, after which the event loop gets the interpreter from a thread. An answer takes a
# dozen turns of the loop (sockets, the database), each of which may wait this long; with the default of 5 ms that would
# add up. While no thread works, no switch is asked for.
SWITCH_S = 0.0005


class TooBusy(Transient):
    """More calls are waiting than the bound allows."""

    code = "rest.too_busy"


class OffloadThread:
    """One thread and the calls that wait for it, a bounded number. name: the kind of work, for metric and errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._one = asyncio.Semaphore(1)
        self._present = 0
        self._closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"rest-{name}")
        sys.setswitchinterval(SWITCH_S)

    async def run(self, work: Callable[..., Result], replica: Replica | None = None) -> Result:
        """Run the work when its turn comes, on a copy of the replica that is made then. Returns its result or raises
        its exception. Raises TooBusy.
        """
        if self._present > MAX_WAITING:
            raise TooBusy(f"{MAX_WAITING} wait for long work: {self._name}")
        self._present += 1
        try:
            async with self._one:
                if self._closed:
                    raise TooBusy("the service is stopping")
                metrics.OFFLOADED.labels(self._name).inc()
                # There is no await before the copy is made, and the event loop is the only writer.
                copies = () if replica is None else (copy_of(replica),)
                return await asyncio.get_running_loop().run_in_executor(self._thread, work, *copies)
        finally:
            self._present -= 1

    def close(self) -> None:
        """Accept no further work. Running work ends by its own bound."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

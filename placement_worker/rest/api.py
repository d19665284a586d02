"""The resources that handlers share: the store, the groups of concurrent writes, the replica, and the answers to
refusals.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from bus.clock import Clock
from bus.turns import InParts
from placement_worker.book import ResourceBook
from placement_worker.domain.allocations import AllocationOutcome, AllocationWrite, Reshape, entries_of_allocations
from placement_worker.domain.refusal import WriteRefusal, no_provider
from placement_worker.domain.trees import TreeOutcome, TreeWrite, entries_of_tree
from placement_worker.domain.values import Provider
from placement_worker.offload import OffloadThread
from placement_worker.replica.catch_up import LocalReplica
from placement_worker.rest.bodies import Body
from placement_worker.rest.candidates_query import is_canonical
from placement_worker.rest.config import RestConfig
from placement_worker.rest.faults import NO_ANSWERS, Answers, HttpFault, refused
from placement_worker.rest.groups import Groups

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
        store: ResourceBook,
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
        return b",".join([b",".join(map(text, part)) async for part in InParts(rows, LISTED_AT_ONCE)])

    async def write_tree(self, write: TreeWrite, answers: Answers = NO_ANSWERS) -> Provider:
        """Write one provider, in one transaction with concurrent writes. Returns the provider that was written. Raises
        the HttpFault of a refusal.
        """
        outcome: TreeOutcome = no_provider(write.uuid)
        if is_canonical(write.uuid):
            outcome = await self._trees.submit(replace(write, cause=CAUSE.get()))
        if isinstance(outcome, WriteRefusal):
            raise refused(outcome, answers)
        return outcome

    async def write_allocations(self, write: AllocationWrite, answers: Answers = NO_ANSWERS) -> None:
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

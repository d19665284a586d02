"""Asks the schedulers what they have of this cell, for a recovery, and takes their pages: queue
`conductor.known.{process}`. One page is asked for at a time, again and again until it has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from itertools import count

import structlog
from msgspec import Struct

from bus.bus import Bus
from bus.clock import event_or_time, new_uuid
from bus.consuming.outcome import Done, Outcome, Received
from bus.contracts.base import DatabaseMark
from bus.contracts.operations import CellFence
from bus.contracts.recovery import MAX_ASKED, CellKnown, CellRecovering
from bus.faults import Transient
from bus.retrying import doubled_s
from bus.transport import BusError
from cell_conductor.recovery.known_instance import PageContents, contents_of
from cell_conductor.rules.recovery_facts import KnownInstance

log = structlog.get_logger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 30.0  # for an answer; a scheduler that dies with it gives it to another
MAX_PARTS = 20_000  # of some hundred instances each: no cell has so many
MAX_OWN = 2_000  # of the cell's instances in one part
LAST_UUID = "ffffffff-ffff-ffff-ffff-ffffffffffff"

# The cell's instances behind one uuid and up to another ("": no end), in order, and at most so many.
OwnInstances = Callable[[str, str, int], Awaitable[Sequence[str]]]


class KnownPart(Struct, frozen=True):
    """What the schedulers know of the instances with the uuids of one range."""

    after: str  # the range begins behind this uuid
    last: str  # the range ends with this uuid ("": it has no end)
    instances: Mapping[str, KnownInstance]  # those that the schedulers have in the cell, and those that the cell has
    fences: tuple[CellFence, ...] = ()  # fences of hosts in the range
    marks: tuple[DatabaseMark, ...] = ()  # marks of the cell's database that were heard above (for `is_behind`)


class _PendingQuery:
    def __init__(self, query: CellRecovering) -> None:
        self.query = query
        self.contents: PageContents | None = None
        self.is_answered = asyncio.Event()


class KnownReader:
    """The reader of one conductor. bus: the cell's."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._pending: _PendingQuery | None = None

    async def handle(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """A page that answers another query than the present one is too late."""
        for received in batch:
            page, pending = received.message, self._pending
            if (
                isinstance(page, CellKnown)
                and pending is not None
                and (found := contents_of(pending.query, page)) is not None
            ):
                self._pending, pending.contents = None, found
                pending.is_answered.set()
        return [Done()] * len(batch)

    async def parts(self, own: OwnInstances) -> AsyncIterator[KnownPart]:
        """The whole answer, in the order of uuids. Without a scheduler it waits, until cancelled. One at a time. Raises
        Transient: it has no end.
        """
        # What schedulers have committed before this begins is in it. What they commit later is in it, or in a command
        # that comes to `conductor.requests` and is carried out after it, or in both.
        after = ""
        for _ in range(MAX_PARTS):
            page = await self._ask(after=after)
            mine = await own(after, page.last, MAX_OWN)
            last = mine[-1] if len(mine) == MAX_OWN else page.last
            found = {uuid: one for uuid, one in page.instances.items() if not last or uuid <= last}
            found |= await self.asked(sorted(uuid for uuid in mine if uuid not in found))
            fences = tuple(one for one in page.fences if not last or one.host_uuid <= last)
            yield KnownPart(after, last, found, fences, page.marks)
            if not last:
                return
            after = last
        raise Transient(f"{MAX_PARTS} pages have come, and there are more", code="known.endless")

    async def marks(self) -> Collection[DatabaseMark]:
        """What the schedulers have heard of the cell's database; none, if nobody answers at once. As `parts`, one
        at a time.
        """
        answer = await self._ask(after=LAST_UUID, times=1)
        return answer.marks

    async def asked(self, instances: Sequence[str]) -> Mapping[str, KnownInstance]:
        """What the schedulers have of these, wherever they are. As `parts`, one at a time."""
        found, left = dict[str, KnownInstance](), list(instances)
        while left:
            answer = await self._ask(asked=tuple(left[:MAX_ASKED]))
            found |= answer.instances
            left = [uuid for uuid in left if uuid not in answer.instances]
        return found

    async def _ask(self, *, after: str = "", asked: tuple[str, ...] = (), times: int | None = None) -> PageContents:
        """times: that it is asked, after which nothing is known; None: until it is answered."""
        query = CellRecovering(
            cell=self._bus.name,
            process=self._bus.process,
            query_id=new_uuid(self._bus.rng),
            after=after,
            asked=asked,
        )
        pending = self._pending = _PendingQuery(query)
        for number in count():
            if pending.contents is not None:
                return pending.contents
            if number == times:
                break
            try:
                await self._bus.publish(query, cause=query.query_id)
            except BusError as fault:
                log.warning("recovery.not_asked", code=fault.code, reason=str(fault))
            await event_or_time(pending.is_answered, self._bus.clock, doubled_s(FIRST_WAIT_S, LONGEST_WAIT_S, number))
        self._pending = None
        return PageContents({})

"""The relay of an outbox: it publishes messages after the commit, deletes a row after the broker's confirms, and
sweeps.

One row is one `Ticket` while its messages are under way; each bus has a `Lane`; rows that are confirmed gather in
`ConfirmedRows` until one statement deletes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog
from prometheus_client import Counter, Gauge

from bus.clock import Clock, shared_delay_s
from bus.faults import Transient
from bus.persistence.confirmed_rows import ConfirmedRows
from bus.persistence.group_flush import GATHER_S
from bus.persistence.outbox import UNREADABLE, OutboxMessage, Rows, buses_of, decode_row, traced
from bus.persistence.relay_lane import LANE_PUBLISHES, NO_LINGERING, Lane, Lingering, QueuedMessage, Ticket
from bus.retrying import RELAY, Backoff

if TYPE_CHECKING:
    from bus.bus import Bus

log = structlog.get_logger(__name__)

MAX_ROWS = 10_000  # the bound of rows in a relay's memory; further rows stay in the table for the sweep
# Confirmed rows gather about this long before they are deleted together, at the times at which commits are flushed
# (bus.persistence.group_flush): one statement does both. Rows that a process had not deleted when it died are published
# again; and they must be far too young for another's sweep meanwhile.
DELETE_PAUSE_S = GATHER_S
SWEEP_EVERY_S = 2.0
AFTER_SWEEP_S = 0.005  # a sweep at the same moment runs first, and also deletes the confirmed rows
# A row of this age belongs to a process that died, or to one whose broker is unavailable, and is published again.
SWEEP_AGE_S = 5.0
SWEEP_BATCH = 200
HANDLED_KEEP_S = 3600.0  # longer than any redelivery: retries end after half a minute, an outage is not a duplicate
HANDLED_BATCH = 5_000
HANDLED_EVERY_S = 30.0

_swept = Counter("berth_outbox_recovered_rows", "Outbox rows that a sweep found left behind")
_left = Counter("berth_outbox_deferred_rows", "Outbox rows left to the sweep", ["reason"])
_held = Gauge("berth_outbox_pending_rows", "Outbox rows that wait for the broker's confirm")


class Relay:
    """Publishes after the commit, deletes the row after the confirm, and sweeps rows that a dead process left.

    Each bus has its own lane: a cell that is unavailable does not hold up the others.
    """

    def __init__(
        self,
        rows: Rows,
        buses: Mapping[str, Bus],
        *,
        clock: Clock,
        max_rows: int = MAX_ROWS,
        sweep_interval_s: float = SWEEP_EVERY_S,
        sweep_age_s: float = SWEEP_AGE_S,
        lingering: Lingering = NO_LINGERING,
    ) -> None:
        self._rows = rows
        self._lanes = {name: Lane(bus, clock, self._settle, lingering) for name, bus in buses.items()}
        self._lane_share = _lane_share(max_rows, len(self._lanes))
        self._lane_tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._lingering = lingering
        self._clock = clock
        self._max_rows = max_rows
        self._sweep_every_s = sweep_interval_s
        self._sweep_age_s = sweep_age_s
        self._unknown: set[str] = set()
        self._tickets: dict[int, Ticket] = {}
        self._to_shorten: asyncio.Queue[Ticket] = asyncio.Queue()  # bounded by the tickets
        self._confirmed = ConfirmedRows()
        self._gathering: asyncio.Task[None] | None = None
        self._at_once = False  # a drain waits until all rows have ended
        self._changed = asyncio.Event()  # pulsed when a ticket ends
        self._running = False

    @property
    def held(self) -> int:
        """The number of rows that wait for the broker's confirm or for their deletion."""
        return len(self._tickets) + len(self._confirmed)

    def add_bus(self, bus: Bus) -> None:
        """Publish on a further bus from now on. A sweep publishes the rows that wait for it in the table."""
        assert bus.name not in self._lanes, bus.name
        self._lanes[bus.name] = Lane(bus, self._clock, self._settle, self._lingering)
        self._lane_share = _lane_share(self._max_rows, len(self._lanes))
        self._unknown.discard(bus.name)
        self._run_lane(bus.name)

    def remove_bus(self, name: str) -> None:
        """Stop publishing on this bus. Rows that wait for it stay in the table."""
        for task in self._lane_tasks.pop(name, ()):
            task.cancel()
        self._lanes.pop(name).close()
        self._lane_share = _lane_share(self._max_rows, len(self._lanes))

    def _run_lane(self, name: str) -> None:
        if self._group is None:
            return
        lane = self._lanes[name]
        bodies = [lane.run() for _ in range(LANE_PUBLISHES)]
        if lane.lingers is not None:
            bodies.append(lane.end_lingering())
        self._lane_tasks[name] = [self._group.create_task(body) for body in bodies]

    def send(self, row_id: int | None, outgoing: Sequence[OutboxMessage]) -> None:
        """Publish the messages of a committed row soon. It never blocks: above the bound the row is left to the
        sweep.
        """
        if row_id is None or row_id in self._tickets:
            assert row_id is not None or not outgoing, "messages without their outbox row would not survive a crash"
            return
        if len(self._tickets) >= self._max_rows:
            _left.labels("full").inc()
            return
        closed = {bus for bus in buses_of(outgoing) if self._is_closed(bus, row_id)}
        leaving, left = outgoing, []
        if closed:
            leaving = [item for item in outgoing if item.bus not in closed]
            left = [item for item in outgoing if item.bus in closed]
            _left.labels("unknown_bus" if closed & self._unknown else "bus_unavailable").inc()
        if not leaving:
            return
        ticket = self._tickets[row_id] = Ticket(row_id, len(leaving), left)
        _held.inc()
        for item in traced(leaving):
            self._lanes[item.bus].put((ticket, item))

    def _is_closed(self, bus: str, row_id: int) -> bool:
        """Whether messages for this bus are to be left in the table."""
        lane = self._lanes.get(bus)
        if lane is not None:
            return lane.is_behind(self._lane_share)
        if bus not in self._unknown:  # once is enough, until the bus is added
            self._unknown.add(bus)
            log.error("outbox.unknown_bus", row=row_id, bus=bus)
        return True

    async def wait_for_capacity(self) -> None:
        """Wait until `send` would keep a row in memory."""
        while len(self._tickets) >= self._max_rows:
            await self._change()

    async def keep_up(self, bus: str) -> None:
        """Wait while a bus's lane is full. A worker calls it before it takes a batch whose messages go there: what it
        is faster than its broker would gather in its memory, and the reports of all would wait behind those of one.
        """
        while self._running and self._lanes[bus].is_full:
            await self._change()

    async def run(self) -> None:
        """Publish, delete and sweep until cancelled."""
        self._running = True
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for name in self._lanes:
                    self._run_lane(name)
                group.create_task(self._delete_confirmed())
                group.create_task(self._shorten())
                group.create_task(self._sweep())
                group.create_task(self._purge_handled())
        finally:
            self._running = False
            self._group = None
            self._changed.set()

    async def drain(self, grace_s: float) -> None:
        """Wait until all sent rows are confirmed and deleted. After the grace time (seconds) the rest is left to the
        sweep.
        """
        self._at_once = True
        self._end_gathering()
        for lane in self._lanes.values():
            lane.publish_at_once()
        try:
            async with asyncio.timeout(grace_s):
                while self._running and self.held:
                    await self._change()
        except TimeoutError:
            log.warning("outbox.left_behind", rows=self.held)
        finally:
            self._at_once = False

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _settle(self, items: Iterable[QueuedMessage], *, failed: bool = False) -> None:
        for ticket, _message in items:
            ticket.waiting -= 1
            ticket.failed |= failed
            if ticket.waiting:
                continue
            if ticket.left and not ticket.failed:
                self._to_shorten.put_nowait(ticket)
                continue
            self._end(ticket)
            if ticket.failed:  # a later sweep tries again: the row stays
                _left.labels("failed").inc()
                continue
            self._confirmed.add(ticket.row_id)
            if self._is_due():
                self._end_gathering()

    def _end(self, ticket: Ticket) -> None:
        del self._tickets[ticket.row_id]
        _held.dec()
        self._changed.set()

    async def _shorten(self) -> None:
        """Remove confirmed messages from rows that stay, so that sweeps do not publish them again."""
        while True:
            ticket = await self._to_shorten.get()
            try:
                await self._rows.replace(ticket.row_id, ticket.left)
            except Transient as fault:  # the row stays as it is; a sweep repeats it
                log.warning("outbox.database_unavailable", code=fault.code)
            self._end(ticket)

    def _is_due(self) -> bool:
        """Whether confirmed rows are to be deleted without gathering."""
        return self._at_once or self._confirmed.fill_a_batch

    def _end_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()

    async def _gather(self) -> None:
        pause_s = shared_delay_s(self._clock.monotonic(), DELETE_PAUSE_S) + AFTER_SWEEP_S
        self._gathering = asyncio.create_task(self._clock.sleep(pause_s))
        try:
            await asyncio.wait([self._gathering])
        finally:
            self._gathering.cancel()
            self._gathering = None

    async def _delete_confirmed(self) -> None:
        backoff = Backoff(RELAY, self._clock)
        while True:
            await self._confirmed.wait()
            if not self._is_due():
                await self._gather()
            if not self._confirmed.to_delete:  # a sweep has taken them along
                continue
            try:
                with self._deleting() as ids:
                    await self._rows.delete(ids)
            except Transient as fault:
                log.warning("outbox.database_unavailable", code=fault.code, rows=self._confirmed.to_delete)
                await backoff.wait()
                continue
            backoff.reset()

    @contextmanager
    def _deleting(self) -> Iterator[list[int]]:
        """Yield confirmed rows for one statement that deletes them. A drain checks again afterwards."""
        try:
            with self._confirmed.batch() as ids:
                yield ids
        finally:
            self._changed.set()

    async def _sweep(self) -> None:
        while True:
            closed = sorted({*self._unknown, *(name for name, lane in self._lanes.items() if lane.is_unavailable)})
            try:
                with self._deleting() as confirmed:
                    found = await self._rows.claim_stale(self._sweep_age_s, SWEEP_BATCH, closed, confirmed)
            except Transient as fault:
                log.warning("outbox.database_unavailable", code=fault.code)
                found = []
            for row_id, body in found:
                if row_id not in self._tickets and row_id not in self._confirmed:
                    await self._send_again(row_id, body)
            if len(found) < SWEEP_BATCH:
                await self._clock.sleep(shared_delay_s(self._clock.monotonic(), self._sweep_every_s))

    async def _send_again(self, row_id: int, body: bytes) -> None:
        """Publish a row that was left behind. A row that another version of berth has written is left to that
        version.
        """
        try:
            outgoing = decode_row(body)
        except UNREADABLE as error:
            log.error("outbox.unreadable", row=row_id, reason=str(error))
            return
        _swept.inc()
        await self.wait_for_capacity()
        self.send(row_id, outgoing)

    async def _purge_handled(self) -> None:
        while True:
            await self._clock.sleep(HANDLED_EVERY_S)
            try:
                await self._rows.purge_handled(HANDLED_KEEP_S, HANDLED_BATCH)
            except Transient as fault:
                log.warning("outbox.database_unavailable", code=fault.code)


def _lane_share(max_rows: int, lanes: int) -> int:
    """So much waits in memory for a bus that is unavailable: it must not take the room of all the others."""
    return max_rows // (2 * max(1, lanes))

"""The relay of an outbox: it publishes messages after the commit, deletes a row after the broker's confirms, and
sweeps.

A row has the messages of one transaction for one bus. They go straight to that bus's publisher, with one confirmation
for the row. While a bus is unavailable its rows stay in the table, and a sweep publishes them when it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog
from prometheus_client import Counter, Gauge

from bus.clock import Clock, LogInterval, event_or_time, shared_delay_s
from bus.contracts.base import Message
from bus.faults import Transient
from bus.gather import Gather
from bus.persistence.group_flush import GATHER_S
from bus.persistence.lingering import Lingering, LingeringItems
from bus.persistence.outbox import UNREADABLE, OutboxMessage, Rows, by_bus, decode_row, traced
from bus.port import BusUnavailable
from bus.publishing import Waiter
from bus.retrying import RELAY, Backoff

if TYPE_CHECKING:
    from bus.bus import Bus

log = structlog.get_logger(__name__)

# The bounds of a relay's memory. Each bus has a share (`Relay._has_its_share`); further rows stay in the table for the
# sweep. Of messages the publisher has room for as many of others.
MAX_ROWS = 10_000
MAX_UNDER_WAY = 20_000
MAX_BEHIND = 2_000  # messages under way on a bus above which its workers make no further ones by choice
# Confirmed rows gather about this long before they are deleted together, at the times at which commits are flushed
# (bus.persistence.group_flush): one statement does both. Rows that a process had not deleted when it died are published
# again; and they must be far too young for another's sweep meanwhile.
DELETE_PAUSE_S = GATHER_S
DELETE_BATCH = 2_000  # rows deleted by one statement
SWEEP_EVERY_S = 2.0
AFTER_SWEEP_S = 0.005  # a sweep at the same moment runs first, and also deletes the confirmed rows
# A row of this age belongs to a process that died, or has a message that the broker refused, and is published again.
SWEEP_AGE_S = 5.0
SWEEP_BATCH = 200
HANDLED_KEEP_S = 3600.0  # longer than any redelivery: retries end after half a minute, an outage is not a duplicate
HANDLED_BATCH = 5_000
HANDLED_EVERY_S = 30.0
UNAVAILABLE_LOG_INTERVAL_S = 30.0  # the interval at which an unavailable bus is logged, whatever waits for it

_swept = Counter("berth_outbox_recovered_rows", "Outbox rows that a sweep found left behind")
_left = Counter("berth_outbox_deferred_rows", "Outbox rows left to the sweep", ["reason"])
_held = Gauge("berth_outbox_pending_rows", "Outbox rows that wait for the broker's confirm")
_published = Counter("berth_outbox_messages", "Outbox messages confirmed by the broker", ["bus"])
_overtaken = Counter("berth_outbox_overtaken_messages", "Outbox messages that a newer one replaced", ["bus"])


class ConfirmedRows:
    """The ids of rows to delete, in order, and of rows that a statement is deleting."""

    def __init__(self) -> None:
        self._to_delete: list[int] = []
        self._under_way: set[int] = set()

    def __len__(self) -> int:
        return len(self._to_delete) + len(self._under_way)

    def __contains__(self, row_id: int) -> bool:
        return row_id in self._to_delete or row_id in self._under_way

    @property
    def to_delete(self) -> int:
        """The number of rows that no statement is deleting yet."""
        return len(self._to_delete)

    @property
    def fill_a_batch(self) -> bool:
        """Whether there are enough rows for a full statement."""
        return len(self._to_delete) >= DELETE_BATCH

    def add(self, row_id: int) -> None:
        """Record that the messages of this row are confirmed."""
        self._to_delete.append(row_id)

    def take(self) -> list[int]:
        """Take the oldest rows for a statement that deletes them, inside `ended`."""
        ids, self._to_delete = self._to_delete[:DELETE_BATCH], self._to_delete[DELETE_BATCH:]
        self._under_way.update(ids)
        return ids

    @contextmanager
    def ended(self, ids: Sequence[int]) -> Iterator[None]:
        """These rows are gone after the block. If it fails, they are the next to be taken."""
        try:
            yield
        except BaseException:
            self._to_delete = [*ids, *self._to_delete]
            raise
        finally:
            self._under_way.difference_update(ids)


class _Ticket(Waiter):
    """One row whose messages are under way. count: how many of them were given to the publisher."""

    __slots__ = ("_ended", "count", "lane", "row_id")

    def __init__(self, row_id: int, lane: _Lane, ended: Callable[[_Ticket], None]) -> None:
        super().__init__()
        self.row_id = row_id
        self.lane = lane
        self.count = 0
        self._ended = ended

    def _end(self) -> None:
        self._ended(self)


_Item = tuple[_Ticket, OutboxMessage]


class _Lane:
    """What a relay knows of one bus. under_way: the messages that its broker has not confirmed. rows: their rows, and
    those of messages that linger.
    """

    def __init__(self, bus: Bus, clock: Clock, lingering: Lingering) -> None:
        self.bus = bus
        self.rows = self.under_way = 0
        self.lingering: LingeringItems[_Item] = LingeringItems(lingering, self._drop)
        self._clock = clock
        self._outage: LogInterval | None = None  # None: it is available, as far as is known

    def _drop(self, item: _Item) -> None:
        _overtaken.labels(self.bus.name).inc()
        item[0].settle(None)

    def note_available(self) -> None:
        """Its broker has confirmed something."""
        if self._outage is not None:
            self._outage = None
            log.info("outbox.bus_back", bus=self.bus.name)

    def note_unavailable(self, reason: str) -> None:
        """A row stays in the table. Logged once at first, and then at intervals."""
        if self._outage is None:
            self._outage = LogInterval(self._clock, UNAVAILABLE_LOG_INTERVAL_S)
        if rows := self._outage.count():
            log.warning("outbox.bus_unavailable", bus=self.bus.name, rows=rows, reason=reason)


class Relay:
    """Publishes after the commit, deletes the row after the confirm, and sweeps rows that were left behind.

    line: the line in which a message waits to leave; the lines have their turns, and a line keeps its order.
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
        lingering: Lingering = Lingering(),  # noqa: B008  (frozen)
        line: Callable[[Message], Hashable] = lambda _: None,
    ) -> None:
        self._rows = rows
        self._clock = clock
        self._lingering = lingering
        self._line = line
        self._max_rows = max_rows
        self._sweep_every_s = sweep_interval_s
        self._sweep_age_s = sweep_age_s
        self._unknown: set[str] = set()
        self._tickets: dict[int, _Ticket] = {}
        self._left: dict[int, str] = {}  # {row: bus} of rows that go when their bus is back
        self._confirmed = ConfirmedRows()
        self._deleting: Gather[int] = Gather(
            self._confirmed.take,
            self._delete,
            waiting=lambda: self._confirmed.to_delete if self._running else 0,
            most=1,
            pause_s=lambda: shared_delay_s(clock.monotonic(), DELETE_PAUSE_S) + AFTER_SWEEP_S,
            enough=lambda: self._at_once or self._confirmed.fill_a_batch,
            sleep=clock.sleep,
            on_error=self._fail,
        )
        self._backoff = Backoff(RELAY, clock)
        self._failed: asyncio.Future[None] | None = None  # while it runs
        self._at_once = False  # a drain waits until all rows have ended
        self._changed = asyncio.Event()  # pulsed when a ticket ends
        self._sweep_now = asyncio.Event()
        self._some_linger = asyncio.Event()
        self._running = False
        self._lanes: dict[str, _Lane] = {}
        for bus in buses.values():
            self.add_bus(bus)

    @property
    def held(self) -> int:
        """The number of rows that wait for the broker's confirm or for their deletion."""
        return len(self._tickets) + len(self._confirmed)

    def add_bus(self, bus: Bus) -> None:
        """Publish on a further bus from now on. A sweep publishes the rows that wait for it in the table."""
        assert bus.name not in self._lanes, bus.name
        self._lanes[bus.name] = _Lane(bus, self._clock, self._lingering)
        self._unknown.discard(bus.name)
        bus.transport.on_reconnect(self._sweep_now.set)
        self._sweep_now.set()

    def remove_bus(self, name: str) -> None:
        """Stop publishing on this bus. Rows that wait for it stay in the table."""
        lane = self._lanes.pop(name)
        for ticket in [one for one in self._tickets.values() if one.lane is lane]:
            self._forget(ticket)
            _left.labels("failed").inc()

    def send(self, rows: Sequence[int], outgoing: Sequence[OutboxMessage]) -> None:
        """Publish the messages of committed rows soon, one row for each bus as `outbox.add` returned them. It never
        blocks: what cannot be published now is left to the sweep.
        """
        messages = by_bus(outgoing)
        assert len(rows) == len(messages), "messages without their outbox row would not survive a crash"
        for row_id, (bus, of_bus) in zip(rows, messages.items(), strict=True):
            self._send(row_id, bus, of_bus)

    def _send(self, row_id: int, bus: str, messages: Sequence[OutboxMessage]) -> None:
        if row_id in self._tickets:
            return
        lane = self._lanes.get(bus)
        if lane is None:
            _left.labels("unknown_bus").inc()
            if bus not in self._unknown:  # once is enough, until the bus is added
                self._unknown.add(bus)
                log.error("outbox.unknown_bus", row=row_id, bus=bus)
        elif self._has_its_share(lane):
            self._leave(row_id, bus, "full")
        elif reason := lane.bus.unavailable_reason:
            lane.note_unavailable(reason)
            self._leave(row_id, bus, "bus_unavailable")
        else:
            ticket = self._tickets[row_id] = _Ticket(row_id, lane, self._end)
            lane.rows += 1
            _held.inc()
            ticket.pending = len(messages)  # each until it is dropped, or given to the publisher
            leaving = [one for item in traced(messages) for one in lane.lingering.put(item.message, (ticket, item))]
            self._post(lane, leaving)
            if lane.lingering:
                self._some_linger.set()

    def _post(self, lane: _Lane, items: Sequence[_Item]) -> None:
        if not items:
            return
        for ticket, _ in items:
            ticket.count += 1
        lane.under_way += len(items)
        lane.bus.post_all(
            [(item.message, item.cause) for _, item in items],
            [item.traceparent for _, item in items],
            [ticket for ticket, _ in items],
            self._line,
        )
        for ticket, _ in items:
            ticket.pending -= 1  # it is the publisher's now, which has counted it

    def _leave(self, row_id: int, bus: str, reason: str) -> None:
        _left.labels(reason).inc()
        if len(self._left) < self._max_rows:  # of further ones the age decides
            self._left[row_id] = bus

    def _end(self, ticket: _Ticket) -> None:
        """All messages of a row are confirmed, or one of them has failed."""
        if self._tickets.get(ticket.row_id) is not ticket:  # its bus was removed
            return
        self._forget(ticket)
        lane, error = ticket.lane, ticket.error
        if error is None:
            lane.note_available()
            _published.labels(lane.bus.name).inc(ticket.count)
            self._confirmed.add(ticket.row_id)
            self._deleting.wake()
        elif isinstance(error, BusUnavailable):
            lane.note_unavailable(str(error))
            self._leave(ticket.row_id, lane.bus.name, "bus_unavailable")
        else:  # a message has no queue, or a full one: a later sweep tries again
            _left.labels("failed").inc()
            code = getattr(error, "code", "bus.error")
            log.warning("outbox.refused_by_broker", bus=lane.bus.name, row=ticket.row_id, code=code, reason=str(error))

    def _forget(self, ticket: _Ticket) -> None:
        del self._tickets[ticket.row_id]
        ticket.lane.rows -= 1
        ticket.lane.under_way -= ticket.count
        _held.dec()
        self._changed.set()

    @property
    def _closed(self) -> set[str]:
        """The buses on which nothing can be published now."""
        return {*self._unknown, *(name for name, lane in self._lanes.items() if lane.bus.unavailable_reason)}

    def _has_its_share(self, lane: _Lane) -> bool:
        """Whether a bus has as much in memory as all buses leave free: so a busy one gets half, and of those that
        confirm nothing, however many they are, each leaves room for a further one.
        """
        under_way = sum(one.under_way for one in self._lanes.values())
        return lane.rows >= self._max_rows - len(self._tickets) or lane.under_way >= MAX_UNDER_WAY - under_way

    async def keep_up(self, bus: str) -> None:
        """Wait while much is under way on a bus. A worker calls it before it takes a batch whose messages go there:
        what it is faster than its broker would gather in its memory, and the reports of all would wait behind those of
        one.
        """
        while self._running and self._lanes[bus].under_way >= MAX_BEHIND:
            await self._change()

    async def run(self) -> None:
        """Delete, sweep and end what lingers until cancelled."""
        self._running = True
        self._failed = asyncio.get_running_loop().create_future()
        self._deleting.wake()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_raised(self._failed))
                group.create_task(self._sweep())
                group.create_task(self._purge_handled())
                group.create_task(self._end_lingering())
        finally:
            self._running = False
            self._changed.set()
            await self._deleting.close()

    async def drain(self, grace_s: float) -> None:
        """Wait until all sent rows are confirmed and deleted, but those of a bus that is unavailable: they are safe in
        the table. After the grace time (seconds) the rest is left to the sweep.
        """
        self._at_once = True
        self._deleting.wake()
        for lane in self._lanes.values():
            lane.lingering.at_once = True
            self._post(lane, lane.lingering.end_all())
        self._sweep_now.set()
        try:
            async with asyncio.timeout(grace_s):
                while self._running and (self.held or not self._closed.issuperset(self._left.values())):
                    await self._change()
        except TimeoutError:
            log.warning("outbox.left_behind", rows=self.held + len(self._left))
        finally:
            self._at_once = False

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _end_lingering(self) -> None:
        while True:
            await self._some_linger.wait()
            await self._clock.sleep(self._lingering.linger_s / 2)
            for lane in self._lanes.values():
                self._post(lane, lane.lingering.end_half())
            if not any(lane.lingering for lane in self._lanes.values()):
                self._some_linger.clear()

    def _fail(self, error: Exception) -> None:
        """End `run` with an error that none of its tasks has raised."""
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _delete(self, ids: Sequence[int]) -> None:
        try:
            with self._ended(ids):
                await self._rows.delete(ids)
        except Transient as fault:
            log.warning("outbox.database_unavailable", code=fault.code, rows=self._confirmed.to_delete)
            await self._backoff.wait()
        else:
            self._backoff.reset()

    @contextmanager
    def _ended(self, ids: Sequence[int]) -> Iterator[None]:
        """While a statement deletes confirmed rows. A drain checks again afterwards, and rows that are left are due."""
        try:
            with self._confirmed.ended(ids):
                yield
        finally:
            self._changed.set()
            self._deleting.wake()

    async def _sweep(self) -> None:
        """Publish the rows that were left behind: at intervals, and when a bus is back."""
        while True:
            self._sweep_now.clear()
            left = dict(self._left)  # what is left meanwhile, again or at first, waits for the next sweep
            is_all = False
            while not is_all:
                is_all = await self._sweep_batch(left)
            delay_s = shared_delay_s(self._clock.monotonic(), self._sweep_every_s)
            await event_or_time(self._sweep_now, self._clock, delay_s)

    async def _sweep_batch(self, left: dict[int, str]) -> bool:
        """Publish what one statement takes of old rows and of those in `left`, which loses them. Returns whether that
        was all.
        """
        closed = self._closed | {name for name, lane in self._lanes.items() if self._has_its_share(lane)}
        back = [row for row, bus in left.items() if bus not in closed]
        try:
            confirmed = self._confirmed.take()
            with self._ended(confirmed):
                found = await self._rows.claim_stale(self._sweep_age_s, SWEEP_BATCH, sorted(closed), confirmed, back)
        except Transient as fault:
            log.warning("outbox.database_unavailable", code=fault.code)
            return True
        is_all = len(found) < SWEEP_BATCH
        for row in back if is_all else [row for row, _ in found]:  # what is not found is gone
            left.pop(row, None)
            self._left.pop(row, None)
        for row, body in found:
            if row not in self._tickets and row not in self._confirmed:
                self._send_again(row, body)
        return is_all

    def _send_again(self, row_id: int, body: bytes) -> None:
        """Publish a row that was left behind. A row that another version of berth has written is left to that
        version.
        """
        try:
            outgoing = decode_row(body)
        except UNREADABLE as error:
            log.error("outbox.unreadable", row=row_id, reason=str(error))
            return
        _swept.inc()
        self._send(row_id, outgoing[0].bus, outgoing)

    async def _purge_handled(self) -> None:
        while True:
            await self._clock.sleep(HANDLED_EVERY_S)
            try:
                await self._rows.purge_handled(HANDLED_KEEP_S, HANDLED_BATCH)
            except Transient as fault:
                log.warning("outbox.database_unavailable", code=fault.code)


async def _raised(failed: asyncio.Future[None]) -> None:
    await failed

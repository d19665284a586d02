"""The relay of an outbox: publishes messages after the commit, deletes a row after the broker's confirms, sweeps old
rows. While a bus is unavailable its rows stay in the table. Messages that nobody waits for linger, and leave with the
next one on their subject, or are dropped because a newer one says the same and more.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import structlog
from msgspec import Struct
from prometheus_client import Counter, Gauge

from bus.clock import Clock, LogInterval, event_or_time, shared_delay_s
from bus.contracts.base import Message
from bus.faults import Transient
from bus.persistence.group_flush import BATCH_S
from bus.persistence.outbox import UNREADABLE, OutboxMessage, Rows, Sweep, by_bus, decode_row, traced
from bus.publishing import Waiter
from bus.retrying import RELAY, Backoff
from bus.transport import BusUnavailable

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
DELETE_PAUSE_S = BATCH_S
DELETE_BATCH = 2_000  # rows deleted by one statement
SWEEP_EVERY_S = 2.0
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


StreamPosition = tuple[Hashable, int]  # the subject of a message, and its number among the reports on that

Item = TypeVar("Item")


class Lingering(Struct, frozen=True):
    """Which messages wait for the next one on their subject, and how long."""

    linger_s: float = 0.0
    # messages that nobody waits for; each waits for half of `linger_s` or longer, up to all of it
    lingers: Callable[[Message], bool] = lambda _: False
    # the subject of a message, and its number among the reports on it (None: it waits for no other). When one with a
    # higher number comes meanwhile, the lingering one is dropped: its row adds nothing to the newer one's.
    place: Callable[[Message], StreamPosition | None] = lambda _: None
    # instead of being dropped it leaves with the newer one, before it, because the receiver records each
    keeps: bool = False


class _Reports(Struct, Generic[Item]):
    """The lingering items on one subject, and the newest one's number."""

    number: int
    items: list[Item]
    since: int  # how many halves had passed then


class LingeringItems(Generic[Item]):
    """The lingering items of one bus, each with its message."""

    def __init__(self, policy: Lingering, dropped: Callable[[Item], None]) -> None:
        self._policy = policy
        self._dropped = dropped
        # By their subjects, the oldest first; those without one each under a number of its own.
        self._reports: dict[Hashable, _Reports[Item]] = {}
        self._numbers = itertools.count()
        self._halves = 0  # the number of half linger times that have passed
        self.at_once = policy.linger_s <= 0  # the process is ending, and nothing lingers

    def __len__(self) -> int:
        return len(self._reports)

    def put(self, message: Message, item: Item) -> list[Item]:
        """Return the items that are to leave now, in order; none when this one lingers."""
        lingers = not self.at_once and self._policy.lingers(message)
        if not lingers and not self._reports:
            return [item]
        place = self._policy.place(message)
        subject, number = place or (next(self._numbers), 0)
        found = self._reports.get(subject)
        if found is None:
            if lingers:
                self._reports[subject] = _Reports(number, [item], self._halves)
            return [] if lingers else [item]
        if self._policy.keeps:
            found.items.append(item)  # since the first
            return [] if lingers else self._reports.pop(subject).items
        if found.number < number:
            self._drop(self._reports.pop(subject).items)
            if lingers:
                self._reports[subject] = _Reports(number, [item], self._halves)
        elif lingers:
            self._drop([item])
        return [] if lingers else [item]

    def end_half(self) -> list[Item]:
        """Half of the linger time has passed: returns the items that have lingered for a whole half and a part of
        another.
        """
        # If all left whenever the time is over, most would have just come, and the ends of those builds would follow in
        # a message of their own.
        self._halves += 1
        return self._leave(lambda one: self._halves >= one.since + 2)

    def end_all(self) -> list[Item]:
        """Return all items: they are to leave now."""
        return self._leave(lambda _: True)

    def _leave(self, is_due: Callable[[_Reports[Item]], bool]) -> list[Item]:
        due = [subject for subject, one in self._reports.items() if is_due(one)]
        return [item for subject in due for item in self._reports.pop(subject).items]

    def _drop(self, items: list[Item]) -> None:
        for item in items:
            self._dropped(item)


class _Ticket(Waiter):
    """One row whose messages are under way."""

    __slots__ = ("_ended", "count", "row_id", "slot")

    def __init__(self, row_id: int, slot: _BusSlot, ended: Callable[[_Ticket], None]) -> None:
        super().__init__()
        self.row_id = row_id
        self.slot = slot
        self.count = 0  # how many of them were given to the publisher
        self._ended = ended

    def _end(self) -> None:
        self._ended(self)


_Item = tuple[_Ticket, OutboxMessage]


class _BusSlot:
    """What a relay knows of one bus. under_way: the messages that its broker has not confirmed. rows: their rows, and
    those of messages that linger.
    """

    def __init__(self, bus: Bus, clock: Clock, lingering: Lingering) -> None:
        self.bus = bus
        self.rows = self.under_way = 0
        self.lingering: LingeringItems[_Item] = LingeringItems(lingering, self._drop)
        self._clock = clock
        self._outage: LogInterval | None = None  # None: it is available, as far as is known
        self._refusals = LogInterval(clock)

    def _drop(self, item: _Item) -> None:
        _overtaken.labels(self.bus.name).inc()
        item[0].resolve(None)

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

    def note_refused(self, row: int, error: BaseException) -> None:
        """A message of a row has no queue, or one that does not take it: a later sweep tries again."""
        _left.labels("failed").inc()
        if rows := self._refusals.count():
            code = getattr(error, "code", "bus.error")
            log.warning("outbox.refused_by_broker", bus=self.bus.name, row=row, rows=rows, code=code, reason=str(error))


class Relay:
    """Publishes after the commit, deletes the row after the confirm, and sweeps rows that were left behind."""

    def __init__(
        self,
        rows: Rows,
        buses: Mapping[str, Bus],
        *,
        clock: Clock,
        lingering: Lingering = Lingering(),  # noqa: B008  (frozen)
    ) -> None:
        self._rows = rows
        self._clock = clock
        self._lingering = lingering
        self._unknown: set[str] = set()
        self._tickets: dict[int, _Ticket] = {}
        self._left: dict[int, str] = {}  # {row: bus} of rows that go when their bus is back
        self._confirmed: list[int] = []  # rows to delete, and those that a statement is deleting, in order
        self._backoff = Backoff(RELAY, clock)
        self._at_once = False  # a drain waits until all rows have ended
        self._changed = asyncio.Event()  # pulsed when a ticket ends, or rows are deleted
        self._due = asyncio.Event()  # something for the table may not wait for its time
        self._sweep_at = -math.inf
        self._some_linger = asyncio.Event()
        self._running = False
        self._slots: dict[str, _BusSlot] = {}
        for bus in buses.values():
            self.add_bus(bus)

    @property
    def missing(self) -> Collection[str]:
        """The buses that rows wait for, and on which nothing can be published now."""
        return {*self._unknown, *self._left.values()}

    @property
    def held(self) -> int:
        """The number of rows that wait for the broker's confirm or for their deletion."""
        return len(self._tickets) + len(self._confirmed)

    def add_bus(self, bus: Bus) -> None:
        """Publish on a further bus from now on. A sweep publishes the rows that wait for it in the table."""
        assert bus.name not in self._slots, bus.name
        self._slots[bus.name] = _BusSlot(bus, self._clock, self._lingering)
        self._unknown.discard(bus.name)
        bus.transport.on_reconnect(self._sweep_soon)
        self._sweep_soon()

    def remove_bus(self, name: str) -> None:
        """Stop publishing on this bus. Rows that wait for it stay in the table."""
        slot = self._slots.pop(name)
        for ticket in [one for one in self._tickets.values() if one.slot is slot]:
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
        slot = self._slots.get(bus)
        if slot is None:
            self._leave(row_id, bus, "unknown_bus")
            if bus not in self._unknown:  # once is enough, until the bus is added
                self._unknown.add(bus)
                log.error("outbox.unknown_bus", row=row_id, bus=bus)
        elif self._has_its_share(slot):
            self._leave(row_id, bus, "full")
        elif reason := slot.bus.unavailable_reason:
            slot.note_unavailable(reason)
            self._leave(row_id, bus, "bus_unavailable")
        else:
            ticket = self._tickets[row_id] = _Ticket(row_id, slot, self._end)
            slot.rows += 1
            _held.inc()
            ticket.pending = len(messages)  # each until it is dropped, or given to the publisher
            leaving = [one for item in traced(messages) for one in slot.lingering.put(item.message, (ticket, item))]
            self._post(slot, leaving)
            if slot.lingering:
                self._some_linger.set()

    def _post(self, slot: _BusSlot, items: Sequence[_Item]) -> None:
        if not items:
            return
        for ticket, _ in items:
            ticket.count += 1
        slot.under_way += len(items)
        slot.bus.post_all(
            [(item.message, item.cause) for _, item in items],
            [item.traceparent for _, item in items],
            [ticket for ticket, _ in items],
            [item.database_incarnation for _, item in items],
        )
        for ticket, _ in items:
            ticket.pending -= 1  # it is the publisher's now, which has counted it

    def _leave(self, row_id: int, bus: str, reason: str) -> None:
        _left.labels(reason).inc()
        if len(self._left) < MAX_ROWS:  # of further ones the age decides
            self._left[row_id] = bus

    def _end(self, ticket: _Ticket) -> None:
        """All messages of a row are confirmed, or one of them has failed."""
        if self._tickets.get(ticket.row_id) is not ticket:  # its bus was removed
            return
        self._forget(ticket)
        slot, error = ticket.slot, ticket.error
        if error is None:
            slot.note_available()
            _published.labels(slot.bus.name).inc(ticket.count)
            self._confirmed.append(ticket.row_id)
            count = len(self._confirmed)
            if count in (1, DELETE_BATCH) or self._at_once:
                self._due.set()
        elif isinstance(error, BusUnavailable):
            slot.note_unavailable(str(error))
            self._leave(ticket.row_id, slot.bus.name, "bus_unavailable")
        else:
            slot.note_refused(ticket.row_id, error)

    def _forget(self, ticket: _Ticket) -> None:
        del self._tickets[ticket.row_id]
        ticket.slot.rows -= 1
        ticket.slot.under_way -= ticket.count
        _held.dec()
        self._changed.set()

    @property
    def _closed(self) -> set[str]:
        """The buses on which nothing can be published now."""
        return {*self._unknown, *(name for name, slot in self._slots.items() if slot.bus.unavailable_reason)}

    def _has_its_share(self, slot: _BusSlot) -> bool:
        """Whether a bus has as much in memory as all buses leave free: so a busy one gets half, and of those that
        confirm nothing, however many they are, each leaves room for a further one.
        """
        under_way = sum(one.under_way for one in self._slots.values())
        return slot.rows >= MAX_ROWS - len(self._tickets) or slot.under_way >= MAX_UNDER_WAY - under_way

    async def wait_for_backlog(self, bus: str) -> None:
        """Wait while much is under way on a bus. A worker calls it before it takes a batch whose messages go there:
        what it is faster than its broker would gather in its memory, and the reports of all would wait behind those of
        one.
        """
        while self._running and self._slots[bus].under_way >= MAX_BEHIND:
            await self._change()

    async def run(self) -> None:
        """Delete, sweep and end what lingers until cancelled."""
        self._running = True
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._tend_table())
                group.create_task(self._purge_handled())
                group.create_task(self._end_lingering())
        finally:
            self._running = False
            self._changed.set()

    async def drain(self, grace_s: float) -> None:
        """Wait until all sent rows are confirmed and deleted, but those of a bus that is unavailable: they are safe in
        the table. After the grace time (seconds) the rest is left to the sweep.
        """
        self._at_once = True
        for slot in self._slots.values():
            slot.lingering.at_once = True
            self._post(slot, slot.lingering.end_all())
        self._sweep_soon()
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
            for slot in self._slots.values():
                self._post(slot, slot.lingering.end_half())
            if not any(slot.lingering for slot in self._slots.values()):
                self._some_linger.clear()

    def _sweep_soon(self) -> None:
        self._sweep_at = -math.inf
        self._due.set()

    async def _tend_table(self) -> None:
        """Sweep at intervals and when a bus is back, and delete confirmed rows, with one statement at a time. A sweep
        takes confirmed rows along; without one they gather.
        """
        delete_at, now = math.inf, self._clock.monotonic()
        while True:
            self._due.clear()
            if now >= self._sweep_at:
                self._sweep_at = now + shared_delay_s(now, SWEEP_EVERY_S)
                await self._sweep()
            elif len(self._confirmed) >= DELETE_BATCH or (self._confirmed and (self._at_once or now >= delete_at)):
                await self._delete()
            else:
                if self._confirmed and delete_at == math.inf:
                    delete_at = now + shared_delay_s(now, DELETE_PAUSE_S)
                ends = min(delete_at, self._sweep_at)
                is_early = await event_or_time(self._due, self._clock, ends - now)
                now = self._clock.monotonic() if is_early else ends  # a sum of floats may end a little before
                continue
            delete_at, now = math.inf, self._clock.monotonic()

    async def _delete(self) -> None:
        confirmed = self._confirmed[:DELETE_BATCH]
        try:
            await self._rows.delete(confirmed)
        except Transient as fault:
            log.warning("outbox.database_unavailable", code=fault.code, rows=len(self._confirmed))
            await self._backoff.wait()
        else:
            self._backoff.reset()
            self._forget_confirmed(confirmed)

    def _forget_confirmed(self, deleted: Sequence[int]) -> None:
        del self._confirmed[: len(deleted)]
        self._changed.set()

    async def _sweep(self) -> None:
        left = dict(self._left)  # what is left meanwhile, again or at first, waits for the next sweep
        while not await self._sweep_batch(left):
            pass  # more may be left

    async def _sweep_batch(self, left: dict[int, str]) -> bool:
        """Publish what one statement takes of old rows and of those in `left`, which loses them. Returns whether that
        was all.
        """
        closed = self._closed | {name for name, slot in self._slots.items() if self._has_its_share(slot)}
        back = [row for row, bus in left.items() if bus not in closed]
        confirmed = self._confirmed[:DELETE_BATCH]
        sweep = Sweep(SWEEP_AGE_S, SWEEP_BATCH, sorted(closed), confirmed, back)
        try:
            found = await self._rows.claim_stale(sweep)
        except Transient as fault:
            log.warning("outbox.database_unavailable", code=fault.code)
            return True
        self._forget_confirmed(confirmed)
        is_all = len(found) < SWEEP_BATCH
        for row in back if is_all else [row for row, _ in found]:  # what is not found is gone
            left.pop(row, None)
            self._left.pop(row, None)
        for row, body in found:
            if row not in self._tickets and row not in self._confirmed:
                self._resend(row, body)
        return is_all

    def _resend(self, row_id: int, body: bytes) -> None:
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

"""The outbox: messages commit with the state that caused them, and leave afterwards, at least once.

`add` writes all messages of a transaction as one row. After the commit the process hands the same messages to its
`Relay`, which publishes them and forgets the row once the broker has confirmed. A process that dies in between leaves
its rows behind; the relay of any process of that role finds them when they are old enough. Readers are idempotent, so
twice is harmless and never is not possible.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, Union

import asyncpg
import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace
from prometheus_client import Counter, Gauge

from bus.clock import Clock, shared_delay_s
from bus.contracts.base import Message
from bus.contracts.catalogue import MESSAGES
from bus.faults import Transient
from bus.persistence.group_flush import GATHER_S
from bus.persistence.guarded_statement import GuardedStatement
from bus.port import BusError, BusUnavailable
from bus.retrying import RELAY, Backoff, Retrying
from bus.tracing.context import CURRENT, traceparent_of

if TYPE_CHECKING:
    from bus.bus import Bus

log = structlog.get_logger(__name__)

MAX_ROWS = 10_000  # rows a relay holds in memory; one more stays in the table for the sweep
LANE_PUBLISHES = 4  # publishes of one bus under way at a time, if all but the last are full or slow
LANE_SLOW_S = 0.05  # a publish that takes so long no longer holds up what has gathered behind it
LANE_BATCH = 512  # messages handed to the bus at once
FORGET_BATCH = 2_000  # rows deleted by one statement
# Confirmed rows gather about this long before they are deleted together, at the times at which commits are flushed
# (bus.persistence.group_flush): one statement does both. Rows that a process had not deleted when it died are published
# again; and they must be far too young for another's sweep meanwhile.
FORGET_PAUSE_S = GATHER_S
SWEEP_EVERY_S = 2.0
AFTER_SWEEP_S = 0.005  # a sweep at the same moment comes first, and takes the rows to delete along
SWEEP_AGE_S = (
    5.0  # a row this old belongs to a process that died, or to one whose broker is unavailable: publish it again
)
SWEEP_BATCH = 200
UNAVAILABLE_LOG_INTERVAL_S = 30.0  # an unavailable bus is logged this often, whatever the number of tries
HANDLED_KEEP_S = 3600.0  # longer than any redelivery: retries end after half a minute, an outage is not a duplicate
HANDLED_BATCH = 5_000
HANDLED_EVERY_S = 30.0

_published = Counter("berth_outbox_messages", "Outbox messages confirmed by the broker", ["bus"])
_swept = Counter("berth_outbox_recovered_rows", "Outbox rows that a sweep found left behind")
_left = Counter("berth_outbox_deferred_rows", "Outbox rows left to the sweep", ["reason"])
_overtaken = Counter("berth_outbox_overtaken_messages", "Outbox messages that a newer one replaced", ["bus"])
_held = Gauge("berth_outbox_pending_rows", "Outbox rows that wait for the broker's confirm")


class OutboxMessage(Struct, frozen=True, omit_defaults=True):
    """A message, and the bus it is for ("api" or a cell's name). `cause` and `traceparent` as in Meta.

    The trace is kept with the message: whichever process publishes it, and whenever, does so in the trace.
    """

    bus: str
    message: Message
    cause: str = ""
    traceparent: str = ""


class _Stored(Struct, frozen=True):
    """An OutboxMessage as it is read back: the message's type is its tag, so any process of the role can publish it."""

    bus: str
    message: Union[tuple(row.message for row in MESSAGES)]  # type: ignore[valid-type]  # noqa: UP007
    cause: str = ""
    traceparent: str = ""


encode_row = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[_Stored]).decode

# Not the sequence alone: a database that crashed gives numbers again that it had given to transactions that did not
# wait for the disk. A relay still holds the old row under its number, and would forget the new one with it. Time does
# not come again.
NEW_ID = "((extract(epoch FROM clock_timestamp()) * 1000000)::bigint << 10) | (nextval('outbox_id_seq') & 1023)"
INSERT = f"INSERT INTO outbox (id, buses, body) OVERRIDING SYSTEM VALUE VALUES ({NEW_ID}, {{}}, {{}}) RETURNING id"


def buses_of(outgoing: Sequence[OutboxMessage]) -> list[str]:
    """The buses that these messages are for, each once, in order."""
    return sorted({item.bus for item in outgoing})


def traced(outgoing: Sequence[OutboxMessage]) -> Sequence[OutboxMessage]:
    """The messages, each in the trace of what is being handled that caused it (the same ones, where nothing is)."""
    if CURRENT.get() is None:
        return outgoing
    return [item if item.traceparent else replace(item, traceparent=traceparent_of(item.cause)) for item in outgoing]


async def add(conn: asyncpg.Connection, outgoing: Sequence[OutboxMessage]) -> int | None:
    """Record this transaction's messages, as one row; returns its id for `Relay.send`, None when it is empty."""
    if not outgoing:
        return None
    row_id: int = await conn.fetchval(INSERT.format("$1", "$2"), buses_of(outgoing), encode_row(traced(outgoing)))
    return row_id


def add_to(statement: GuardedStatement, outgoing: Sequence[OutboxMessage]) -> None:
    """The same as a part of a guarded statement; the row's id is its column `outbox_row`."""
    if not outgoing:
        statement.column("NULL::bigint AS outbox_row")
        return
    statement.add("outgoing", INSERT, buses_of(outgoing), encode_row(traced(outgoing)))
    statement.column("(SELECT id FROM outgoing) AS outbox_row")


async def first_time(conn: asyncpg.Connection, handler: str, message_ids: Sequence[str]) -> set[str]:
    """Record message ids as handled by this transaction; returns those not seen before."""
    # In one order, so that two processes with the same messages wait for each other instead of deadlocking.
    rows = await conn.fetch(
        "INSERT INTO handled (handler, message_id) SELECT $1, unnest($2::text[]) ON CONFLICT DO NOTHING "
        "RETURNING message_id",
        handler,
        sorted(set(message_ids)),
    )
    return {row["message_id"] for row in rows}


class Rows(Protocol):
    """What a relay needs of an outbox. Adapters: `outbox_rows`, `memory_database`. All raise Transient."""

    async def forget(self, row_ids: Sequence[int]) -> None:
        """Delete rows whose messages are confirmed."""

    async def replace(self, row_id: int, outgoing: Sequence[OutboxMessage]) -> None:
        """Keep only these messages of a row: the others are confirmed."""

    async def claim_stale(
        self, age_s: float, limit: int, closed: Sequence[str], confirmed: Sequence[int] = ()
    ) -> list[tuple[int, bytes]]:
        """Rows older than this, by id, at most `limit` for each set of buses.

        Taking one makes it young again, so that two relays do not take it at once. closed: buses that take nothing now;
        rows for these alone are left untouched. confirmed: rows to delete in the same statement.
        """

    async def purge_handled(self, keep_s: float, limit: int) -> None:
        """Drop records of handled messages older than this, at most so many."""


class _Ticket:
    """One outbox row under way: it is forgotten when all its messages are confirmed."""

    __slots__ = ("failed", "left", "row_id", "waiting")

    def __init__(self, row_id: int, waiting: int, left: Sequence[OutboxMessage]) -> None:
        self.row_id = row_id
        self.waiting = waiting
        self.left = left  # messages of the row for buses that take nothing now: they stay in the table
        self.failed = False


_Item = tuple[_Ticket, OutboxMessage]
StreamPosition = tuple[Hashable, int]  # what a message reports on, and its number among the reports on that


class Relay:
    """Publishes after the commit, forgets the row after the confirm, and sweeps what a dead process left.

    Each bus has its own lane: a cell that is unavailable does not hold up the others.
    lingers: messages that are not waited for; each leaves with the next message that does not linger, in order, or
    after `linger_s`. place: what a message reports on, and its number among the reports on that; None: on nothing. With
    it a message that lingers waits for `linger_s` whatever else leaves, and is dropped when a message with a higher
    number of the same subject comes meanwhile: its row adds nothing to the newer one's.
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
        linger_s: float = 0.0,
        lingers: Callable[[Message], bool] | None = None,
        place: Callable[[Message], StreamPosition | None] | None = None,
    ) -> None:
        self._rows = rows
        lingers = lingers if linger_s > 0 else None
        self._lanes = {name: _Lane(bus, clock, self._settle, lingers, place, linger_s) for name, bus in buses.items()}
        self._clock = clock
        self._max_rows = max_rows
        # So much waits in memory for a bus that is unavailable: it must not take the room of all the others.
        self._lane_share = max_rows // (2 * max(1, len(self._lanes)))
        self._sweep_every_s = sweep_interval_s
        self._sweep_age_s = sweep_age_s
        self._unknown: set[str] = set()
        self._tickets: dict[int, _Ticket] = {}
        self._to_shorten: asyncio.Queue[_Ticket] = asyncio.Queue()  # bounded by the tickets
        self._confirmed: list[int] = []
        self._forgetting: set[int] = set()  # taken from those by a statement that is under way
        self._some_confirmed = asyncio.Event()
        self._gathering: asyncio.Task[None] | None = None
        self._at_once = False  # a drain waits for the end of all rows
        self._changed = asyncio.Event()  # pulsed when a ticket ends
        self._running = False

    @property
    def held(self) -> int:
        """Rows that wait for the broker's confirm or for being forgotten."""
        return len(self._tickets) + len(self._confirmed) + len(self._forgetting)

    def send(self, row_id: int | None, outgoing: Sequence[OutboxMessage]) -> None:
        """Publish the messages of a committed row soon. Never blocks: past the bound the row waits for the sweep."""
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
        ticket = self._tickets[row_id] = _Ticket(row_id, len(leaving), left)
        _held.inc()
        for item in traced(leaving):
            self._lanes[item.bus].put((ticket, item))

    def _is_closed(self, bus: str, row_id: int) -> bool:
        """Whether messages for this bus are better left in the table."""
        lane = self._lanes.get(bus)
        if lane is not None:
            return lane.is_behind(self._lane_share)
        if bus not in self._unknown:  # a process's buses stay as they are: once is enough
            self._unknown.add(bus)
            log.error("outbox.unknown_bus", row=row_id, bus=bus)
        return True

    async def wait_for_capacity(self) -> None:
        """Return when `send` would keep a row in memory."""
        while len(self._tickets) >= self._max_rows:
            await self._change()

    async def run(self) -> None:
        """Publish, forget and sweep until cancelled."""
        self._running = True
        try:
            async with asyncio.TaskGroup() as group:
                for lane in self._lanes.values():
                    for _ in range(LANE_PUBLISHES):
                        group.create_task(lane.run())
                    if lane.lingers is not None:
                        group.create_task(lane.end_lingering())
                group.create_task(self._delete_confirmed())
                group.create_task(self._shorten())
                group.create_task(self._sweep())
                group.create_task(self._purge_handled())
        finally:
            self._running = False

    async def drain(self, grace_s: float) -> None:
        """Return when all that was sent is confirmed and forgotten; after the grace time the rest is the sweep's."""
        self._at_once = True
        self._flush_lingering()
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

    def _settle(self, items: Iterable[_Item], *, failed: bool = False) -> None:
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
            self._confirmed.append(ticket.row_id)
            self._some_confirmed.set()
            if self._is_due():
                self._flush_lingering()

    def _end(self, ticket: _Ticket) -> None:
        del self._tickets[ticket.row_id]
        _held.dec()
        self._changed.set()

    async def _shorten(self) -> None:
        """Take what is confirmed out of rows that stay, so that it is not repeated with each sweep."""
        while True:
            ticket = await self._to_shorten.get()
            try:
                await self._rows.replace(ticket.row_id, ticket.left)
            except Transient as fault:  # the row stays as it is; a sweep repeats it
                log.warning("outbox.database_unavailable", code=fault.code)
            self._end(ticket)

    def _is_due(self) -> bool:
        """Whether confirmed rows have nothing to gather for."""
        return self._at_once or len(self._confirmed) >= FORGET_BATCH

    def _flush_lingering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()

    async def _gather(self) -> None:
        pause_s = shared_delay_s(self._clock.monotonic(), FORGET_PAUSE_S) + AFTER_SWEEP_S
        self._gathering = asyncio.create_task(self._clock.sleep(pause_s))
        try:
            await asyncio.wait([self._gathering])
        finally:
            self._gathering.cancel()
            self._gathering = None

    async def _delete_confirmed(self) -> None:
        backoff = Backoff(RELAY, self._clock)
        while True:
            await self._some_confirmed.wait()
            if not self._is_due():
                await self._gather()
            if not self._confirmed:  # a sweep has taken them along
                continue
            try:
                with self._forgotten() as ids:
                    await self._rows.forget(ids)
            except Transient as fault:
                log.warning("outbox.database_unavailable", code=fault.code, rows=len(self._confirmed))
                await backoff.wait()
                continue
            backoff.reset()

    @contextmanager
    def _forgotten(self) -> Iterator[list[int]]:
        """Confirmed rows that a statement deletes; where it fails they are confirmed rows again."""
        ids = self._confirmed[:FORGET_BATCH]
        del self._confirmed[: len(ids)]
        if not self._confirmed:
            self._some_confirmed.clear()  # set only while there are some, or `_delete_confirmed` never waits
        self._forgetting.update(ids)
        try:
            yield ids
        except BaseException:
            self._confirmed[:0] = ids
            raise
        finally:
            self._forgetting.difference_update(ids)
            if self._confirmed:
                self._some_confirmed.set()
            else:
                self._some_confirmed.clear()
            self._changed.set()

    async def _sweep(self) -> None:
        while True:
            closed = sorted({*self._unknown, *(name for name, lane in self._lanes.items() if lane.is_unavailable)})
            try:
                with self._forgotten() as confirmed:
                    found = await self._rows.claim_stale(self._sweep_age_s, SWEEP_BATCH, closed, confirmed)
            except Transient as fault:
                log.warning("outbox.database_unavailable", code=fault.code)
                found = []
            for row_id, body in found:
                if row_id in self._tickets or row_id in self._confirmed or row_id in self._forgetting:
                    continue
                try:
                    outgoing = [
                        OutboxMessage(item.bus, item.message, item.cause, item.traceparent) for item in _decode(body)
                    ]
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    # Written by another version: it stays for that one.
                    log.error("outbox.unreadable", row=row_id, reason=str(error))
                    continue
                _swept.inc()
                await self.wait_for_capacity()
                self.send(row_id, outgoing)
            if len(found) < SWEEP_BATCH:
                await self._clock.sleep(shared_delay_s(self._clock.monotonic(), self._sweep_every_s))

    async def _purge_handled(self) -> None:
        while True:
            await self._clock.sleep(HANDLED_EVERY_S)
            try:
                await self._rows.purge_handled(HANDLED_KEEP_S, HANDLED_BATCH)
            except Transient as fault:
                log.warning("outbox.database_unavailable", code=fault.code)


class _Lane:
    """What waits for one bus. Bounded by the relay's rows."""

    def __init__(  # noqa: PLR0917  (its relay's own arguments)
        self,
        bus: Bus,
        clock: Clock,
        settle: Any,
        lingers: Callable[[Message], bool] | None,
        place: Callable[[Message], StreamPosition | None] | None,
        linger_s: float,
    ) -> None:
        self.lingers = lingers
        self._bus = bus
        self._clock = clock
        self._settle = settle
        self._place = place
        self._linger_s = linger_s
        # By what they report on, the newest of each; the others each under a number of its own.
        self._lingering: dict[Hashable, tuple[int, _Item]] = {}
        self._numbers = itertools.count()
        self._some_linger = asyncio.Event()
        self._is_due = False  # what lingers has lingered long enough
        self._waiting: deque[_Item] = deque()
        self._some = asyncio.Event()
        self._publishing = 0
        self._slow = False  # the youngest publish has been under way for LANE_SLOW_S
        self.is_unavailable = False  # while True one of its publishers tries again and again
        self._logged_at = -math.inf

    def is_behind(self, most: int) -> bool:
        """Whether its bus is unavailable and so much waits for it that more is better left to the sweep."""
        return self.is_unavailable and len(self._waiting) + len(self._lingering) >= most

    def put(self, item: _Item) -> None:
        message = item[1].message
        place = None if self._place is None else self._place(message)
        is_lingering = self.lingers is not None and self.lingers(message)
        if place is not None and not self._overtake(place, item, is_lingering=is_lingering):
            return
        if is_lingering:
            key, number = place or (next(self._numbers), 0)
            self._lingering[key] = (number, item)
            self._some_linger.set()
            return
        if self._place is None:
            self._waiting.extend(lingering for _, lingering in self._lingering.values())
            self._lingering.clear()
        self._waiting.append(item)
        self._wake()

    def _overtake(self, place: StreamPosition, item: _Item, *, is_lingering: bool) -> bool:
        """Drop the older one of a lingering report and this one on the same subject; False: that is this one."""
        subject, number = place
        found = self._lingering.get(subject)
        if found is None or (found[0] >= number and not is_lingering):
            return True
        is_newer = found[0] < number
        if is_newer:
            del self._lingering[subject]
        _overtaken.labels(self._bus.name).inc()
        self._settle([found[1] if is_newer else item])
        return is_newer

    async def end_lingering(self) -> None:
        """What lingers leaves in the end, whatever else is to be sent."""
        while True:
            await self._some_linger.wait()
            self._some_linger.clear()
            await self._clock.sleep(self._linger_s)
            self._is_due = bool(self._lingering)
            self._wake()

    def _wake(self) -> None:
        if self._may_publish():
            self._some.set()

    def _may_publish(self) -> bool:
        """One publish at a time, so that what comes meanwhile gathers; a full one beside it, or when it is slow."""
        count = len(self._waiting) + (len(self._lingering) if self._is_due else 0)
        if not count or not self._publishing:
            return count > 0
        return not self.is_unavailable and (self._slow or count >= LANE_BATCH)

    def _take(self) -> list[_Item]:
        """The next batch. What lingers is younger than what waits, or has nothing to do with it."""
        items = [self._waiting.popleft() for _ in range(min(LANE_BATCH, len(self._waiting)))]
        while self._is_due and self._lingering and len(items) < LANE_BATCH:
            items.append(self._lingering.pop(next(iter(self._lingering)))[1])
        self._is_due = self._is_due and bool(self._lingering)
        return items

    def _is_slow(self) -> None:
        self._slow = True
        self._wake()

    async def run(self) -> None:
        while True:
            if not self._may_publish():
                self._some.clear()
                await self._some.wait()
                continue
            items = self._take()
            self._publishing += 1
            self._slow = False
            self._wake()
            slow = asyncio.get_running_loop().call_later(LANE_SLOW_S, self._is_slow)
            try:
                await self._publish(items)
            finally:
                slow.cancel()
                self._publishing -= 1

    async def _publish(self, items: list[_Item]) -> None:
        batch = [(item.message, item.cause) for _ticket, item in items]
        traces = [item.traceparent for _ticket, item in items]
        try:  # while it is unavailable it is not known which of them arrived: all of them again, when it is back
            await Retrying(RELAY, self._clock).call(
                lambda: self._bus.publish_all(batch, traces),
                lambda error: isinstance(error, BusUnavailable),
                on_failure=lambda error, _: self._log_unavailable(error),
            )
        except BusError as error:
            self._log_available()
            log.warning("outbox.refused", bus=self._bus.name, code=error.code, reason=str(error))
            await self._one_by_one(items)
        else:
            self._log_available()
            _published.labels(self._bus.name).inc(len(items))
            self._settle(items)

    def _log_unavailable(self, error: BaseException) -> None:
        """Logged when it becomes unavailable, and at intervals while it stays so."""
        now = self._clock.monotonic()
        if not self.is_unavailable or now - self._logged_at >= UNAVAILABLE_LOG_INTERVAL_S:
            self._logged_at = now
            log.warning("outbox.bus_unavailable", bus=self._bus.name, waiting=len(self._waiting), reason=str(error))
        self.is_unavailable = True

    def _log_available(self) -> None:
        if self.is_unavailable:
            log.info("outbox.bus_back", bus=self._bus.name)
        self.is_unavailable = False

    async def _one_by_one(self, items: list[_Item]) -> None:
        """Something of the batch has no queue, or a full one: it alone stays behind for the sweep."""
        for item in items:
            try:
                await self._bus.publish_all([(item[1].message, item[1].cause)], [item[1].traceparent])
            except BusError as error:
                log.warning(
                    "outbox.refused_by_broker",
                    bus=self._bus.name,
                    row=item[0].row_id,
                    code=error.code,
                    reason=str(error),
                )
                self._settle([item], failed=True)
            else:
                _published.labels(self._bus.name).inc()
                self._settle([item])

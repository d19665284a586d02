"""Queue `scheduler.builds`: what cells announce is recorded in order and published again on the API bus.

Queue `scheduler.asks`: what a cell has to ask of others for an instance that is to leave it (decision 0021). A queue of
its own: placement may be away, and what cells announce waits for no answer of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Container, Sequence

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received, Retry
from bus.contracts.build import BuildEvent, TimelineEntry
from bus.contracts.moves import CellAsks, CellBook, CellCheck, MoveEvent
from bus.contracts.operations import HostFence
from bus.contracts.stages import Stamps
from bus.faults import Transient
from bus.persistence.outbox import OutboxMessage
from bus.persistence.unit_of_work import OptimisticFirst
from scheduler_worker import metrics
from scheduler_worker.claims import BusClaims
from scheduler_worker.domain.builds import (
    BuildUpdate,
    RecordedBuild,
    apply_announcement,
    is_early,
    is_known,
)
from scheduler_worker.domain.object_changes import removal_of
from scheduler_worker.domain.recorded_moves import (
    AnnouncedMoves,
    answered,
    answered_for_removed,
    handed_on,
    instance_of,
    may_ask,
    refused,
    rests,
)
from scheduler_worker.domain.requests import retried_often, timeline_of
from scheduler_worker.store.port import BuildUnit, SchedulerStore

log = structlog.get_logger(__name__)

# How often an announcement that waits for an earlier one is delivered; after that it is applied without the earlier
# one. With the queue's delays that is half a minute: by then the scheduler that held the earlier one has recorded it,
# or has ended.
MAX_EARLY = 4
EARLY = Retry("announcement.early", "the event that ended the request is not on record yet")


class AppliedAnnouncements(Struct, frozen=True):
    """The result of a batch: the announcements that changed nothing, and why; those that were published on the API bus;
    and the stamps of builds that ended. early: those that wait for an earlier one.
    """

    ignored: list[tuple[BuildEvent, str]]
    announced: list[BuildEvent]
    ended: list[Stamps]
    early: list[BuildEvent]


class _Waiting(Struct, eq=False):
    """A batch of one cell's events that is to be recorded. waited: ids of events that no longer wait for an earlier
    one. applied: the changes of the batch, once it is recorded.
    """

    cell: str
    events: Sequence[BuildEvent]
    waited: Collection[int]
    applied: AppliedAnnouncements | None = None


class AnnouncementWriter:
    """Records the build events of all cells of a process: one transaction at a time, and the next one takes all events
    that have arrived meanwhile, from every cell. Bounded by the cells: the queue of each has one batch under way.
    """

    def __init__(self, store: SchedulerStore, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._writing = asyncio.Lock()
        self._waiting: list[_Waiting] = []

    async def write(
        self, cell: str, events: Sequence[BuildEvent], waited: Collection[int] = ()
    ) -> AppliedAnnouncements:
        """Record a cell's events, in order, and publish them on the API bus. Raises Transient.

        The batch is recorded together with those of other cells; if that fails for a reason of another batch, it is
        recorded alone. waited: `id` of the events that no longer wait for an earlier one.
        """
        mine = _Waiting(cell, events, waited)
        self._waiting.append(mine)
        try:
            async with self._writing:
                if mine.applied is None:
                    await self._write_together(mine)
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
        assert mine.applied is not None, "written by this task, or by one that had the lock before"
        return mine.applied

    async def _write_together(self, mine: _Waiting) -> None:
        together = list(self._waiting)
        try:
            applied = await self._write(together)
        except Transient:
            raise
        except Exception:  # a batch that cannot be written fails alone, whatever the error
            if together == [mine]:
                raise
            together = [mine]
            applied = await self._write(together)
        for one, result in zip(together, applied, strict=True):
            one.applied = result
            if one in self._waiting:  # its task may have been cancelled meanwhile
                self._waiting.remove(one)

    async def _write(self, together: Sequence[_Waiting]) -> list[AppliedAnnouncements]:
        # An event is published before it is on disk, and the cell's message is acknowledged afterwards: if the database
        # crashes in between, the message is delivered again and the same event is published again
        # (docs/decisions/0011-what-waits-for-the-disk.md).
        units = OptimisticFirst(lambda optimistic: self._store.unit(durable=False, optimistic=optimistic))
        while units.go_on():
            async with units as unit:
                now = self._clock.time()
                builds = await unit.lock([event.instance_uuid for one in together for event in one.events])
                timelines: dict[str, list[TimelineEntry]] = {}
                applied = [self._apply_cell(unit, one, builds, timelines, now) for one in together]
                await unit.update(
                    [BuildUpdate(build=builds[uuid], timeline=tuple(lines)) for uuid, lines in timelines.items()], now
                )
        return applied

    def _apply_cell(
        self,
        unit: BuildUnit,
        batch: _Waiting,
        builds: dict[str, RecordedBuild],
        timelines: dict[str, list[TimelineEntry]],
        now: float,
    ) -> AppliedAnnouncements:
        """The changes that one cell's events make to `builds` and `timelines`; and the events to publish."""
        applied = AppliedAnnouncements([], [], [], [])
        for event in batch.events:
            found = builds.get(event.instance_uuid)
            if found is None:
                applied.ignored.append((event, "unknown"))
                continue
            if is_early(found, event, batch.cell) and id(event) not in batch.waited:
                applied.early.append(event)
                continue
            after, announced = apply_announcement(found, event, batch.cell)
            if announced is None and found.cell != batch.cell:
                applied.ignored.append((event, "foreign"))
                continue
            if announced is None:
                # An outdated or repeated event changes nothing, but the timeline shows it. A repeated entry is shown
                # once.
                applied.ignored.append((event, "late"))
                timelines.setdefault(event.instance_uuid, []).extend(timeline_of(event, len(event.history), now))
                continue
            if announced.stamps is not None:
                applied.ended.append(replace(announced.stamps, announced=now))
                announced = replace(announced, stamps=applied.ended[-1])
            builds[event.instance_uuid] = after
            applied.announced.append(announced)
            lines = timelines.setdefault(event.instance_uuid, [])
            if after.state is not found.state or not is_known(found, after):
                lines.extend(timeline_of(announced, len(found.history), now))
            unit.emit(OutboxMessage(API, announced, event.instance_uuid))
        return applied


class AnnouncementHandler:
    """Handles queue `scheduler.builds` of one cell's bus. A cell announces its own instances only."""

    def __init__(
        self,
        store: SchedulerStore,
        writer: AnnouncementWriter,
        cell: str,
        *,
        clock: Clock,
        on_fences: Callable[[Sequence[HostFence]], Awaitable[None]],
    ) -> None:
        self._store = store
        self._writer = writer
        self._cell = cell
        self._on_fences = on_fences
        self._clock = clock

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """All of a batch in one transaction; several events of one instance are applied in order."""
        events = [received.message for received in batch if isinstance(received.message, BuildEvent)]
        events.sort(key=lambda event: (event.instance_uuid, event.sequence))
        losses = self._store.losses
        waited = retried_often(batch, MAX_EARLY)
        applied = AppliedAnnouncements([], [], [], [])
        if events:
            applied = await self._writer.write(self._cell, events, waited)
        moves = [received.message for received in batch if isinstance(received.message, MoveEvent)]
        if moves:
            await self._apply_moves(sorted(moves, key=lambda event: (event.instance_uuid, event.sequence)))
        if fences := [received.message for received in batch if isinstance(received.message, HostFence)]:
            await self._on_fences([one for one in fences if one.cell == self._cell])
        flushed = self._store.flushed(losses)
        for event, why in applied.ignored:
            self._log_ignored(event, why)
        metrics.ANNOUNCED.labels("announced").inc(len(events) - len(applied.ignored) - len(applied.early))
        metrics.ANNOUNCED.labels("early").inc(len(applied.early))
        metrics.count_ended(applied.announced)
        metrics.observe_announced(applied.ended)
        if not applied.early:
            return [Done(after=flushed)] * len(batch)
        early = {id(event) for event in applied.early}
        return [EARLY if id(received.message) in early else Done(after=flushed) for received in batch]

    async def _apply_moves(self, events: Sequence[MoveEvent]) -> None:
        """One durable transaction for all: requests about instances after their builds are rarer than builds."""
        now = self._clock.time()
        async with self._store.operation() as unit:
            found = await unit.known({event.request_id: event.instance_uuid for event in events}, lock=True)
            applied = AnnouncedMoves(self._cell, found, now)
            for event in events:
                applied.apply(event)
            for message in applied.messages:
                unit.emit(message)
            await unit.update(
                [
                    BuildUpdate(build=applied.builds[uuid], timeline=tuple(lines))
                    for uuid, lines in applied.timelines.items()
                ],
                now,
            )
            await unit.update_moves([applied.moves[one] for one in applied.changed], now)
        for event, why in applied.ignored:
            self._log_ignored(event, why, cause=event.request_id)
        for uuid, cell in applied.departed.items():
            log.info("instance.departed", instance=uuid, cell=self._cell, to=cell)
        metrics.ANNOUNCED.labels("announced").inc(len(events) - len(applied.ignored))

    def _log_ignored(self, event: BuildEvent | MoveEvent, why: str, **more: str) -> None:
        metrics.ANNOUNCED.labels(why).inc()
        if why != "late":
            log.warning("announcement.ignored", why=why, cell=self._cell, instance=event.instance_uuid, **more)


class CellAsksHandler:
    """Handles the queue on one cell's bus. A cell asks for its own instances only."""

    def __init__(
        self, store: SchedulerStore, cell: str, *, clock: Clock, cells: Container[str], claims: BusClaims
    ) -> None:
        """`cells`: those that are in use here."""
        self._clock = clock
        self._store = store
        self._cell = cell
        self._cells = cells
        self._claims = claims

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """Nothing is retried: a cell without an answer asks again."""
        asked = [received.message.message for received in batch if isinstance(received.message, CellAsks)]
        if checks := [one for one in asked if isinstance(one, CellCheck)]:
            await self._hand_on(checks)
        if books := [one for one in asked if isinstance(one, CellBook)]:
            await self._ask_book(books)
        return [Done()] * len(batch)

    async def _hand_on(self, checks: Sequence[CellCheck]) -> None:
        """Checks of hosts of other cells, and their answers: to the other cell. For one that was removed the schedulers
        answer. That it was says the record: an operator may have entered it again, and it has not been heard here yet.
        """
        async with self._store.operation() as unit:
            unused = {one.cell for one in checks if one.answer is None and one.cell not in self._cells}
            objects = (await unit.lock_objects()).objects if unused else {}
            removed = {cell: removal for cell in unused if (removal := removal_of(objects, cell)) is not None}
            lost = [one for one in checks if one.answer is None and one.cell in removed]
            known = await unit.known({one.asked_by.request_id: instance_of(one) for one in lost}, lock=True)
            for check in checks:
                message = handed_on(check, self._cell)
                if message is not None and check in lost:
                    message = answered_for_removed(check, known[message.cause], removed[check.cell])
                    if message is None:
                        log.warning(
                            "cell.check_unanswered", instance=instance_of(check), cell=check.cell, by=self._cell
                        )
                if message is not None:
                    unit.emit(message)

    async def _ask_book(self, books: Sequence[CellBook]) -> None:
        """What only placement as a whole answers, of instances that leave this cell.

        An instance leaves its cell, or what it was to leave for is given back: the first of the two that is on record
        here rules the other out.
        """
        async with self._store.operation() as unit:
            known = await unit.known({one.asked_by.request_id: one.instance_uuid for one in books}, lock=True)
            asked = [one for one in books if may_ask(one, known[one.asked_by.request_id], self._cell)]
            await unit.update(rests(asked, known), self._clock.time())
        answers = await self._claims.ask([one.question for one in asked])
        found = [refused(one, known[one.asked_by.request_id]) for one in books if one not in asked]
        found += [answered(one, answer) for one, answer in zip(asked, answers, strict=True)]
        async with self._store.operation() as unit:
            for book in found:
                if book is not None:
                    unit.emit(OutboxMessage(self._cell, book, book.asked_by.request_id))

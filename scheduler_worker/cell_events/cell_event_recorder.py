"""Queue `scheduler.builds`: what cells report is recorded in order and published again on the API bus."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeAlias

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Received, Retry
from bus.contracts.actions import ActionEvent, ActionKind, ActionRequest
from bus.contracts.build import BuildEvent
from bus.contracts.cell import Selection
from bus.contracts.operations import HostFence
from bus.faults import Transient
from bus.persistence.marks import HeardMarks
from bus.persistence.unit_of_work import OptimisticFirst
from scheduler_worker import metrics as metrics_module
from scheduler_worker.action.pending_action import PendingAction
from scheduler_worker.build import build_metrics
from scheduler_worker.cell_events.cell_event_batch import APPLIED, LATE, OUT_OF_ORDER, AppliedEvent, CellEventBatch
from scheduler_worker.records.action_record import ActionContext
from scheduler_worker.records.build_record import BuildUpdate
from scheduler_worker.requests.request_delivery import over_retry_limit
from scheduler_worker.store.port import BuildUnit, SchedulerStore

# Chooses hosts for a request at once.
Choose: TypeAlias = Callable[[PendingAction, ActionContext], Sequence[Selection]]

log = structlog.get_logger(__name__)

# How often an event that waits for an earlier one is delivered; after that it is applied without the earlier
# one. With the queue's delays that is half a minute: by then the scheduler that held the earlier one has recorded it,
# or has ended.
MAX_OUT_OF_ORDER = 4
NOT_YET = Retry("cell_event.early", "the event that ended the request is not on record yet")


class _Waiting(Struct, eq=False):
    """A batch of one cell's events that is to be recorded."""

    cell: str
    events: Sequence[BuildEvent | ActionEvent]
    waited: Collection[int]  # ids of events that no longer wait for an earlier one
    applied: Sequence[AppliedEvent] | None = None  # what became of each, once the batch is recorded


class CellEventRecorder:
    """Records the events of all cells of a process: one transaction at a time, and the next one takes all events
    that have arrived meanwhile, from every cell. Bounded by the cells: the queue of each has one batch under way.
    """

    def __init__(self, store: SchedulerStore, *, clock: Clock, choose: Choose = lambda _request, _known: ()) -> None:
        self._choose = choose
        self._store = store
        self._clock = clock
        self._writing = asyncio.Lock()
        self._waiting: list[_Waiting] = []

    async def write(
        self, cell: str, events: Sequence[BuildEvent | ActionEvent], waited: Collection[int] = ()
    ) -> Sequence[AppliedEvent]:
        """Record a cell's events, in order, and publish them on the API bus. Raises Transient. waited: ids of the
        events that no longer wait for an earlier one. Batches of several cells are recorded together; if that fails
        because of another, alone.
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

    async def _write(self, together: Sequence[_Waiting]) -> list[list[AppliedEvent]]:
        events = [event for one in together for event in one.events]
        instances = [event.instance_uuid for event in events]
        requests = [(event.request_id, event.instance_uuid) for event in events if isinstance(event, ActionEvent)]
        if requests:
            # Durable: requests about instances after their builds are rarer than builds.
            async with self._store.operation() as operation:
                builds = await operation.lock(instances)
                known = await operation.known(requests)
                actions = {one: context.action for (one, _), context in known.items() if context.action is not None}
                batch = CellEventBatch(
                    builds, actions, self._clock.time(), lambda about, home: self._at_home(known[about], home)
                )
                applied = await self._apply(operation, batch, together)
                await operation.update_actions(list(batch.changed.values()), self._clock.time())
            return applied
        # An event is published before it is on disk, and the cell's message is acknowledged afterwards: if the database
        # crashes in between, the message is delivered again and the same event is published again
        # (docs/decisions/0011-what-waits-for-the-disk.md).
        units = OptimisticFirst(lambda optimistic: self._store.unit(durable=False, optimistic=optimistic))
        while units.has_next_try():
            async with units as unit:
                batch = CellEventBatch(await unit.lock(instances), {}, self._clock.time())
                applied = await self._apply(unit, batch, together)
        return applied

    def _at_home(self, known: ActionContext, home: str) -> Sequence[Selection]:
        """The hosts of its own cell for an instance that no host of another one has taken: as if it was unshelved."""
        build = known.build
        if build is None or known.build_request is None:
            return ()
        request = ActionRequest(
            request_id=f"{build.instance_uuid} home",
            instance_uuid=build.instance_uuid,
            project_id=build.project_id,
            kind=ActionKind.UNSHELVE,
        )
        pending = PendingAction(batch_index=0, request=request, taken_at=self._clock.time())
        return self._choose(pending, replace(known, build=replace(build, cell=home)))

    async def _apply(
        self, unit: BuildUnit, batch: CellEventBatch, together: Sequence[_Waiting]
    ) -> list[list[AppliedEvent]]:
        applied = [
            [batch.apply(event, one.cell, waited=id(event) in one.waited) for event in one.events] for one in together
        ]
        for message in batch.messages:
            unit.emit(message)
        await unit.update(
            [BuildUpdate(build=batch.builds[uuid], timeline=tuple(lines)) for uuid, lines in batch.timelines.items()],
            self._clock.time(),
        )
        return applied


class CellEventHandler:
    """Handles queue `scheduler.builds` of one cell's bus. A cell reports its own instances only."""

    def __init__(
        self,
        store: SchedulerStore,
        writer: CellEventRecorder,
        cell: str,
        *,
        clock: Clock,
        on_fences: Callable[[Sequence[HostFence]], Awaitable[None]],
    ) -> None:
        self._store = store
        self._writer = writer
        self._cell = cell
        self._on_fences = on_fences
        self._marks = HeardMarks(clock)

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """All of a batch in one transaction; several events of one instance are applied in order."""
        if (mark := self._marks.hear(self._cell, [one.meta.mark for one in batch])) is not None:
            self._marks.note_recorded(self._cell, mark, await self._store.raise_mark(self._cell, mark))
        events = [one.message for one in batch if isinstance(one.message, BuildEvent | ActionEvent)]
        events.sort(key=lambda event: (event.instance_uuid, event.sequence))
        losses = self._store.connection_losses
        applied = (
            await self._writer.write(self._cell, events, over_retry_limit(batch, MAX_OUT_OF_ORDER)) if events else ()
        )
        if fences := [received.message for received in batch if isinstance(received.message, HostFence)]:
            await self._on_fences([one for one in fences if one.cell == self._cell])
        flushed = self._store.flushed(losses)
        self._note(applied)
        done = Done(after=flushed)
        if not (early := {id(one.event) for one in applied if one.outcome == OUT_OF_ORDER}):
            return [done] * len(batch)
        return [NOT_YET if id(received.message) in early else done for received in batch]

    def _note(self, applied: Sequence[AppliedEvent]) -> None:
        for result, count in Counter([one.outcome for one in applied]).items():
            metrics_module.CELL_EVENTS.labels(result).inc(count)
        for one in applied:
            if one.transferred:
                log.info("instance.transferred", instance=one.event.instance_uuid, cell=self._cell, to=one.transferred)
            if one.outcome not in (APPLIED, OUT_OF_ORDER, LATE):
                uuid = one.event.instance_uuid
                log.warning("cell_event.ignored", outcome=one.outcome, cell=self._cell, instance=uuid)
        builds = [one.event for one in applied if one.outcome == APPLIED and isinstance(one.event, BuildEvent)]
        build_metrics.count_ended(builds)
        metrics_module.observe_stage_times([one.stage_times for one in builds if one.stage_times is not None])

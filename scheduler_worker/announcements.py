"""What cells announce: recorded in order, and said again on the API bus (DESIGN, "One boot" 7)."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.clock import Clock
from bus.contracts.build import BuildEvent, StoryLine
from bus.contracts.stages import Stamps
from bus.outbox import Addressed
from bus.outcome import Done, Outcome, Received
from scheduler_worker import metrics
from scheduler_worker.domain.records import record, told
from scheduler_worker.store.port import Change, SchedulerStore, Unit, quickly

log = structlog.get_logger(__name__)


class Folded(Struct, frozen=True):
    """What came of a batch: which announcements changed nothing, and why; the stamps of builds that ended."""

    ignored: list[tuple[BuildEvent, str]]
    ended: list[Stamps]


class AnnouncementHandler:
    """Handles queue `scheduler.builds` of one cell's bus. A cell speaks for its own instances only."""

    def __init__(self, store: SchedulerStore, cell: str, *, clock: Clock) -> None:
        self._store = store
        self._cell = cell
        self._clock = clock

    async def __call__(self, batch: Sequence[Received]) -> Sequence[Outcome]:
        """All of a batch in one transaction; several events of one instance are folded in their order."""
        events = [received.message for received in batch if isinstance(received.message, BuildEvent)]
        events.sort(key=lambda event: (event.instance_uuid, event.sequence))
        # Clients are told before it is on disk, the cell's message is acknowledged after: forgotten in a crash of the
        # database it comes again, and says the same (docs/decisions/0011-what-waits-for-the-disk.md).
        folded = await quickly(self._store, lambda unit: self._fold(unit, events), durable=False)
        await self._store.flush()
        for event, why in folded.ignored:
            self._ignored(event, why)
        metrics.ANNOUNCED.labels("announced").inc(len(events) - len(folded.ignored))
        metrics.announced(folded.ended)
        return [Done()] * len(batch)

    async def _fold(self, unit: Unit, events: Sequence[BuildEvent]) -> Folded:
        """Write down what they change, and say it again."""
        now = self._clock.time()
        kept = await unit.lock([event.instance_uuid for event in events])
        stories: dict[str, list[StoryLine]] = {}
        folded = Folded([], [])
        for event in events:
            found = kept.get(event.instance_uuid)
            if found is None:
                folded.ignored.append((event, "unknown"))
                continue
            standing, announced = record(found.standing, event, self._cell)
            if announced is None and found.standing.cell != self._cell:
                folded.ignored.append((event, "foreign"))
                continue
            if announced is None:
                # Overtaken, or said twice: it changes nothing, but it happened. A line told twice is read once.
                folded.ignored.append((event, "late"))
                stories.setdefault(event.instance_uuid, []).extend(told(event, len(event.history), now))
                continue
            if announced.stamps is not None:
                folded.ended.append(replace(announced.stamps, announced=now))
                announced = replace(announced, stamps=folded.ended[-1])
            kept[event.instance_uuid] = type(found)(standing=standing, delete_requested=found.delete_requested)
            stories.setdefault(event.instance_uuid, []).extend(told(announced, len(found.standing.history), now))
            unit.say(Addressed(API, announced, event.instance_uuid))
        changes = [
            Change(standing=kept[uuid].standing, delete_requested=kept[uuid].delete_requested, story=tuple(lines))
            for uuid, lines in stories.items()
        ]
        await unit.change(changes, now)
        return folded

    def _ignored(self, event: BuildEvent, why: str) -> None:
        metrics.ANNOUNCED.labels(why).inc()
        if why != "late":
            log.warning("announcement.ignored", why=why, cell=self._cell, instance=event.instance_uuid)

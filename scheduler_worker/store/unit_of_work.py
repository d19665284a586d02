"""The scheduler's optimistic unit: requests expected to be new, decisions expected to be awaited, cached records."""

from __future__ import annotations

from collections.abc import Sequence

from bus.persistence.guarded_statement import Conflict
from bus.persistence.outbox import OutboxMessage
from bus.persistence.unit_of_work import OptimisticUnitOfWork, RowStore, VersionCache, WriteSet
from scheduler_worker.domain.builds import BuildDecision, BuildStatus, BuildUpdate, NewBuild, RecordedBuild


class BuildWrites(WriteSet, kw_only=True):
    """The writes of one unit: inserts must be new, decisions must be awaited. at: the time of all writes."""

    inserts: Sequence[NewBuild] = ()
    decisions: Sequence[BuildDecision] = ()
    updates: Sequence[BuildUpdate] = ()
    at: float = 0.0

    def is_empty(self) -> bool:
        """Whether there is nothing to write and nothing to compare."""
        return not (self.inserts or self.decisions or self.versions or self.outbox)


class OptimisticBuildUnit(OptimisticUnitOfWork[RecordedBuild, BuildWrites]):
    """A BuildUnit that writes at its end."""

    def __init__(
        self, rows: RowStore[RecordedBuild, BuildWrites], cache: VersionCache[RecordedBuild], *, durable: bool
    ) -> None:
        super().__init__(rows, cache, BuildWrites(durable=durable))

    async def insert(self, builds: Sequence[NewBuild], now: float) -> set[str]:
        """All of them are expected to be new."""
        self.writes.inserts, self.writes.at = [*self.writes.inserts, *builds], now
        self._after.update((new.build.instance_uuid, new.build) for new in builds)
        return {new.build.instance_uuid for new in builds}

    async def read(self, instances: Sequence[str]) -> dict[str, BuildStatus]:
        """Raises Conflict: a read of existing records takes the locking unit."""
        if instances:
            raise Conflict
        return {}

    async def write_decisions(self, decisions: Sequence[BuildDecision], now: float) -> set[str]:
        """All of them are expected to be awaited."""
        self.writes.decisions, self.writes.at = decisions, now
        # A record that is not cached belongs to a redelivered request: another scheduler may be processing it too, so
        # it is read again next time.
        cached = [one.build for one in decisions if self._cache.get(one.build.instance_uuid) is not None]
        self._after.update((build.instance_uuid, build) for build in cached)
        return {one.build.instance_uuid for one in decisions}

    async def lock(self, instances: Sequence[str]) -> dict[str, RecordedBuild]:
        """As cached, else as read; compared at the end."""
        return await self._read(instances)

    async def update(self, updates: Sequence[BuildUpdate], now: float) -> None:
        """Kept for the end."""
        self.writes.updates, self.writes.at = updates, now
        self._after.update((one.build.instance_uuid, one.build) for one in updates)

    def emit(self, message: OutboxMessage) -> None:
        """Kept for the end, in the outbox."""
        self.writes.outbox.append(message)

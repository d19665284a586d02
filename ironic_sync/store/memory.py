"""Positions in memory: for tests, and to show what PostgreSQL is expected to do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from ironic_sync.domain.position import Position
from ironic_sync.store.port import NotLeader


class MemoryPositions:
    """Positions of several would-be writers in one process; share the object to share the positions."""

    def __init__(self) -> None:
        self.positions: dict[str, Position] = {}
        self.versions: dict[str, int] = {}
        self.epoch = 0
        self._held = False

    def lead(self) -> AbstractAsyncContextManager[MemoryTerm]:
        """Become the only writer. Raises NotLeader at once while another one is."""
        return self._lead()

    def depose(self) -> None:
        """Let another take over while the writer does not know it yet (as when its connection is cut)."""
        self._held = False
        self.epoch += 1

    @asynccontextmanager
    async def _lead(self) -> AsyncIterator[MemoryTerm]:
        if self._held:
            raise NotLeader("another process is the writer")
        self._held = True
        self.epoch += 1
        epoch = self.epoch
        try:
            yield MemoryTerm(self, epoch)
        finally:
            if self.epoch == epoch:
                self._held = False


class MemoryTerm:
    """One term of being the only writer."""

    def __init__(self, positions: MemoryPositions, epoch: int) -> None:
        self._all = positions
        self._epoch = epoch

    async def load(self) -> tuple[Mapping[str, Position], Mapping[str, int]]:
        """All positions by node, and the version of each that was published."""
        await self.check()
        return dict(self._all.positions), dict(self._all.versions)

    async def save(self, positions: Sequence[Position]) -> None:
        """Keep these."""
        await self.check()
        self._all.positions.update({position.uuid: position for position in positions})

    async def published(self, versions: Mapping[str, int]) -> None:
        """These were published and confirmed."""
        await self.check()
        for uuid, version in versions.items():
            self._all.versions[uuid] = max(version, self._all.versions.get(uuid, 0))

    async def forget(self, told_before: float) -> int:
        """Drop positions of removed nodes."""
        await self.check()
        limit = int(told_before * 1_000_000)
        old = [
            p.uuid
            for p in self._all.positions.values()
            if p.report is None and p.version == self._all.versions.get(p.uuid, 0) and p.version < limit
        ]
        for uuid in old:
            del self._all.positions[uuid]
            self._all.versions.pop(uuid, None)
        return len(old)

    async def check(self) -> None:
        """Whether this is still the only writer."""
        if self._all.epoch != self._epoch:
            raise NotLeader("another process has become the writer")

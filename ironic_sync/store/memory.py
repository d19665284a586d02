"""Positions in memory, as PostgreSQL keeps them: for tests and simulation. It passes the same suite."""

# The writer has a lease, and every write compares the term that each new writer raises. As in the table, values that a
# process only counted for itself (reads, tries) are not kept.

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial

from msgspec.structs import replace

from bus.clock import SystemClock
from bus.faults import Transient
from bus.persistence.memory_database import MemoryDatabase, MemoryDatabaseTransaction, MemorySession
from ironic_sync.domain.position import Position
from ironic_sync.store.port import LEASE_S, PAGE, NotLeader

LEADER = ("leader",)


class MemoryPositionTable(MemoryDatabase):
    """The committed positions; they outlive the processes."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self.positions: dict[str, Position] = {}
        self.versions: dict[str, int] = {}
        self.term = 0
        self.expires_at = float("-inf")


class MemoryPositions:
    """Positions of several would-be writers; one session a process, or one object shared in a test."""

    def __init__(self, session: MemorySession | None = None) -> None:
        self._session = session if session is not None else MemoryPositionTable(SystemClock()).session()
        assert isinstance(self._session.database, MemoryPositionTable)
        self._table = self._session.database
        self.database_id = self._table.database_id

    @property
    def positions(self) -> Mapping[str, Position]:
        """The committed rows."""
        return self._table.positions

    def become_leader(self) -> AbstractAsyncContextManager[MemoryTerm]:
        """Become the only writer, and let go of the lease at the end. Raises NotLeader at once while another one is."""
        return self._become_leader()

    def depose(self) -> None:
        """Let another take over while the writer does not know it yet (as when it was stopped for long)."""
        self._table.term += 1
        self._table.expires_at = float("-inf")

    @asynccontextmanager
    async def _become_leader(self) -> AsyncIterator[MemoryTerm]:
        table = self._table
        async with self._session.transaction() as transaction:
            await transaction.lock([LEADER])
            if 0.0 < table.expires_at - table.clock.time() <= LEASE_S:
                raise NotLeader("another process is the writer")
            number = table.term + 1
            transaction.will(partial(setattr, table, "term", number))
            transaction.will(partial(setattr, table, "expires_at", table.clock.time() + LEASE_S))
        term = MemoryTerm(self._session, number)
        try:
            yield term
        finally:
            with suppress(Transient, NotLeader):
                await term.renew(for_s=0.0)


class MemoryTerm:
    """One term of being the only writer."""

    def __init__(self, session: MemorySession, number: int) -> None:
        assert isinstance(session.database, MemoryPositionTable)
        self._session = session
        self._table = session.database
        self._number = number

    async def load(self) -> tuple[Mapping[str, Position], Mapping[str, int]]:
        """All positions by node, and the version of each that was published."""
        nodes = sorted(self._table.positions)
        for _ in range(0, len(nodes), PAGE):
            async with self._session.transaction() as transaction:
                await transaction.statement()
        async with self._as_leader():
            return dict(self._table.positions), dict(self._table.versions)

    async def save(self, positions: Sequence[Position]) -> None:
        """Keep these, all or none; a row that is older than the kept one is not."""
        async with self._as_leader() as transaction:
            transaction.will(partial(self._write, [_kept(position) for position in positions]))

    async def mark_published(self, versions: Mapping[str, int]) -> None:
        """These were published and confirmed."""
        async with self._as_leader() as transaction:
            transaction.will(partial(self._note, dict(versions)))

    async def purge(self, reported_before: float) -> int:
        """Drop positions of removed nodes."""
        async with self._as_leader() as transaction:
            limit = int(reported_before * 1_000_000)
            old = [
                p.uuid
                for p in self._table.positions.values()
                if p.report is None and p.version == self._table.versions.get(p.uuid, 0) and p.version < limit
            ]
            transaction.will(partial(self._drop, old))
        return len(old)

    async def renew(self, for_s: float = LEASE_S) -> None:
        """Keep the lease for this long from now on."""
        async with self._as_leader() as transaction:
            transaction.will(partial(setattr, self._table, "expires_at", self._table.clock.time() + for_s))

    @asynccontextmanager
    async def _as_leader(self) -> AsyncIterator[MemoryDatabaseTransaction]:
        async with self._session.transaction() as transaction:
            await transaction.lock([LEADER])
            if self._table.term != self._number:
                raise NotLeader("another process has become the writer")
            yield transaction

    def _write(self, positions: Iterable[Position]) -> None:
        for position in positions:
            known = self._table.positions.get(position.uuid)
            if known is None or known.version <= position.version:
                self._table.positions[position.uuid] = position

    def _note(self, versions: Mapping[str, int]) -> None:
        for uuid, version in versions.items():
            self._table.versions[uuid] = max(version, self._table.versions.get(uuid, 0))

    def _drop(self, nodes: Iterable[str]) -> None:
        for uuid in nodes:
            self._table.positions.pop(uuid, None)
            self._table.versions.pop(uuid, None)


def _kept(position: Position) -> Position:
    return replace(position, tries=0, notified_seq=0, read_seq=0)

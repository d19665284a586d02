"""Leases of compute services in memory. It passes the same suite as PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from msgspec import Struct

from bus.clock import Clock
from cell_conductor.domain.leases import Lease, LeaseState

from .keyed import MemoryKeyed, drop


class Keeper(Struct, frozen=True):
    """The keeper of the leases, and until when."""

    process: str
    term: int
    until: float


class LeaseTables(Protocol):
    """The committed rows."""

    clock: Clock
    leases: dict[str, Lease]
    lease_keeper: dict[str, Keeper]


ONE = "one"
_ROW = ("lease_keeper", ONE)


class MemoryLeases(MemoryKeyed[LeaseTables]):
    """In a cell's tables."""

    async def keep(self, process: str, for_s: float, term: int | None) -> int | None:
        """One transaction."""
        async with self._begun(_ROW) as transaction:
            now = self._table.clock.time()
            held = self._table.lease_keeper.get(ONE)
            if held is not None and held.process != process and held.until >= now:
                return None
            if term is None or held is None or (held.process, held.term) != (process, term) or held.until < now:
                term = max(held.term + 1 if held is not None else 0, (term or 0) + 1, int(now * 1000))
            made = Keeper(process, term, now + for_s)
            transaction.will(partial(self._table.lease_keeper.update, {ONE: made}))
            return term

    async def leases(self) -> list[Lease]:
        """All of them."""
        return await self._read(self._table.leases)

    async def record(self, term: int, leases: Sequence[Lease]) -> bool:
        """One transaction."""
        async with self._begun(_ROW) as transaction:
            if not self._is_mine(term):
                return False
            transaction.will(partial(self._table.leases.update, {lease.service: lease for lease in leases}))
            return True

    async def purge(self, term: int, before: float, limit: int) -> list[str]:
        """One transaction."""
        async with self._begun(_ROW) as transaction:
            down = [one for one in self._table.leases.values() if one.state is not LeaseState.UP]
            gone = [one.service for one in sorted(down, key=lambda one: one.since) if one.since < before][:limit]
            if not self._is_mine(term):
                return []
            transaction.will(partial(drop, self._table.leases, gone))
            return sorted(gone)

    async def forget(self, service: str) -> bool:
        """One transaction."""
        async with self._begun() as transaction:
            transaction.will(partial(drop, self._table.leases, [service]))
            return service in self._table.leases

    def _is_mine(self, term: int) -> bool:
        held = self._table.lease_keeper.get(ONE)
        return held is not None and held.term == term

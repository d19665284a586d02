"""Fences and losses in memory. They pass the same suite as PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from bus.persistence.memory_database import MemoryDatabaseTransaction
from cell_conductor.domain.desires import AT_REST
from cell_conductor.domain.evacuations import is_evacuated_from
from cell_conductor.domain.fences import Fence, Loss
from cell_conductor.domain.instance import Instance

from .fences import MAX_LOSSES
from .keyed import MemoryKeyed

MachineKey = tuple[str, str]


class FenceTables(Protocol):
    """The committed rows."""

    instances: dict[str, Instance]
    fences: dict[str, Fence]
    lifted_fences: dict[str, int]
    fence_losses: dict[MachineKey, Loss]


class MemoryFences(MemoryKeyed[FenceTables]):
    """In a cell's tables."""

    async def fences(self) -> list[Fence]:
        """All of them."""
        return await self._read(self._table.fences)

    async def losses(self) -> list[Loss]:
        """All of them."""
        async with self._begun():
            return sorted(self._table.fence_losses.values(), key=lambda one: (one.at, one.place))[:MAX_LOSSES]

    async def put(self, fence: Fence) -> bool:
        """One transaction."""
        async with self._begun(_key(fence.host_uuid)) as transaction:
            known = self._table.fences.get(fence.host_uuid)
            newest = known.version if known is not None else self._table.lifted_fences.get(fence.host_uuid, 0)
            if newest >= fence.version:
                return False
            transaction.will(partial(self._table.fences.update, {fence.host_uuid: fence}))
            return True

    async def delete_losses(self, losses: Sequence[Loss]) -> None:
        """One transaction."""
        async with self._begun() as transaction:
            transaction.will(partial(_drop, self._table.fence_losses, losses))

    async def lift(self, host_uuid: str, version: int) -> bool:
        """One transaction."""
        async with self._begun(_key(host_uuid)) as transaction:
            known = self._table.fences.get(host_uuid)
            if known is None or not known.lifting or known.version != version:
                return False
            if any(place[0] == host_uuid for place in self._table.fence_losses):
                return False
            if any(is_evacuated_from(one, host_uuid) for one in self._table.instances.values()):
                return False
            transaction.will(partial(_lift, self._table, host_uuid, version))
            return True

    async def lift_unknown(self, fence: Fence) -> None:
        """One transaction."""
        async with self._begun(_key(fence.host_uuid)) as transaction:
            newest = self._table.lifted_fences.get(fence.host_uuid, 0)
            if fence.host_uuid not in self._table.fences and newest < fence.version:
                transaction.will(partial(_lift, self._table, fence.host_uuid, fence.version))

    async def lifted(self, host_uuid: str) -> int:
        """One transaction."""
        async with self._begun():
            return 0 if host_uuid in self._table.fences else self._table.lifted_fences.get(host_uuid, 0)

    async def touching(self, host_uuid: str, after: str, limit: int) -> list[str]:
        """All of them are looked at."""
        async with self._begun():
            return [
                uuid
                for uuid, one in sorted(self._table.instances.items())
                if uuid > after and one.phase not in AT_REST and host_uuid in (one.host_uuid, one.source_host_uuid)
            ][:limit]


async def lose(
    table: FenceTables,
    transaction: MemoryDatabaseTransaction,
    hosts: Sequence[str],
    losses: Sequence[Loss],
    proofs: Sequence[str] = (),
) -> bool:
    """As `Transaction.lose`."""
    await transaction.statement()
    await transaction.lock([_key(host) for host in sorted(set(hosts))])
    if any(host not in table.fences for host in hosts) or any(table.fences[host].lifting for host in proofs):
        return False
    transaction.will(partial(_put, table.fence_losses, losses))
    return True


def _key(host_uuid: str) -> tuple[str, str]:
    return "fence", host_uuid


def _lift(table: FenceTables, host_uuid: str, version: int) -> None:
    table.fences.pop(host_uuid, None)
    table.lifted_fences[host_uuid] = version


def _put(rows: dict[MachineKey, Loss], losses: Sequence[Loss]) -> None:
    for loss in losses:
        known = rows.get(loss.place)
        if known is None or known.attempt <= loss.attempt:
            rows[loss.place] = loss


def _drop(rows: dict[MachineKey, Loss], losses: Sequence[Loss]) -> None:
    for loss in losses:
        known = rows.get(loss.place)
        if known is not None and known.attempt <= loss.attempt:
            del rows[loss.place]

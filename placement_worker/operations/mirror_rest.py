"""Passes over a Placement's REST API: the list of providers with their generations, the parts and allocations of those
that have moved, and the allocations of some others in turn: `DELETE /allocations` moves no generation.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from bus.faults import first_fault
from placement_worker.domain.values import Provider
from placement_worker.operations.export import InvalidExport, ListedProvider, PlacementReader
from placement_worker.operations.mirror import MAX_PROVIDERS, Held, PlacementCopy, PlacementPass

T = TypeVar("T")


class RestSource:
    """A Placement by its API (`PlacementSource`)."""

    def __init__(
        self,
        reader: PlacementReader,
        *,
        interval_s: float,  # from the begin of one pass to that of the next
        whole_s: float,  # within which the allocations of every provider are read
    ) -> None:
        self._reader = reader
        self._interval_s = interval_s
        self._whole_s = whole_s

    async def close(self) -> None:
        """Close the connections."""
        await self._reader.close()

    async def read(self, known: PlacementCopy, since_s: float) -> PlacementPass:
        """As PlacementSource has it. Raises InvalidExport."""
        rows = {row.uuid: row for row in await self._reader.rows()}
        if len(rows) > MAX_PROVIDERS:
            raise InvalidExport(f"it has more than {MAX_PROVIDERS} providers")
        moved = [row for row in rows.values() if not _is_known(row, known)]
        read = {one.uuid: one for one in await _all(map(self._reader.provider, moved)) if one is not None}
        present = rows.keys() - {row.uuid for row in moved if row.uuid not in read}
        held = await self._holdings(self._due(read, present, known, since_s))
        held |= await self._holdings(_elsewhere(held, present, known))
        return PlacementPass(present, read, held)

    async def _holdings(self, providers: Collection[str]) -> dict[str, Held]:
        """What consumers hold of these. Raises InvalidExport."""
        parts = await _all(map(self._reader.allocations, providers))
        return {
            uuid: {consumer: one.resources for consumer, one in part.items()}
            for uuid, part in zip(providers, parts, strict=True)
        }

    def _due(
        self, read: Mapping[str, Provider], present: Collection[str], known: PlacementCopy, since_s: float
    ) -> list[str]:
        """Whose allocations are read: of providers that have moved, and of those that were read longest ago."""
        left = [uuid for uuid in known.held if uuid not in read and uuid in present]
        share = min(1.0, max(since_s, self._interval_s) / self._whole_s)
        return [*read, *left[: math.ceil(len(present) * share)]]


def _is_known(row: ListedProvider, known: PlacementCopy) -> bool:
    provider = known.providers.get(row.uuid)
    return provider is not None and row.is_of(provider)


def _elsewhere(held: Mapping[str, Held], present: Collection[str], known: PlacementCopy) -> Collection[str]:
    """Where consumers held something before that hold something anew: a claim moves no generation of the providers
    that it lets go.
    """
    anew = {one for uuid, part in held.items() for one in part.keys() - known.held.get(uuid, {}).keys()}
    there = {uuid for one in anew for uuid in known.of_consumer.get(one, ())}
    return (there & set(present)) - held.keys()


async def _all(reads: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them read; the first that fails ends the others. Raises InvalidExport."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in reads]
    except BaseExceptionGroup as failed:
        raise first_fault(failed) from failed
    return [task.result() for task in tasks]

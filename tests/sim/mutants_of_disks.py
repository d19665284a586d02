"""Deliberate defects about what is on disk, and about cached rows that are not compared."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from bus.persistence.memory_database import MemoryDatabase
from bus.persistence.unit_of_work import VersionCache
from cell_conductor import engine
from cell_conductor.store.memory import MemoryInstanceRows, MemoryInstances
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildRows
from scheduler_worker.upkeep.silent_requests import SilentRequests


async def _at_once(self: Any) -> None:
    return None


def _already(self: Any, losses: int) -> asyncio.Future[None]:
    flushed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    flushed.set_result(None)
    return flushed


def _hasty(store: type) -> AbstractContextManager[Any]:
    patches = ExitStack()
    patches.enter_context(patch.object(store, "flush", _at_once))
    patches.enter_context(patch.object(store, "flushed", _already))
    return patches


async def unwatched(_watch: Any) -> list[Any]:
    """No build is asked about."""
    return []


def conductor_does_not_wait_for_the_disk() -> AbstractContextManager[Any]:
    """A conductor acknowledges a result whose record may still be forgotten."""
    return _hasty(MemoryInstances)


def scheduler_does_not_wait_for_the_disk() -> AbstractContextManager[Any]:
    """A scheduler acknowledges an announcement, or a repeat, whose record may still be forgotten.

    Without the watch of builds, which asks their cells again, and so mends this.
    """
    patches = ExitStack()
    patches.enter_context(_hasty(MemoryBuilds))
    patches.enter_context(patch.object(SilentRequests, "_open_builds", unwatched))
    return patches


def decision_not_durable() -> AbstractContextManager[Any]:
    """A decision leaves for its cell, and its request is acknowledged, before it is on disk."""
    unit = MemoryBuilds.unit

    def hastily(self: MemoryBuilds, *, durable: bool = True, optimistic: bool = False) -> Any:
        return unit(self, durable=False, optimistic=optimistic)

    return patch.object(MemoryBuilds, "unit", hastily)


def everything_may_be_redone() -> AbstractContextManager[Any]:
    """A conductor commands hosts, and claims at placement, before it has that on disk."""
    return patch.object(engine, "is_repeatable", lambda recorded, known: True)


def cache_outlives_the_database() -> AbstractContextManager[Any]:
    """A process keeps its cached rows for ever, also when the server died and gives transaction numbers again."""
    return patch.object(VersionCache, "_clear_after_loss", lambda self: None)


def instance_versions_not_checked() -> AbstractContextManager[Any]:
    """A conductor writes on cached instances, and their versions are not compared."""
    return _unchecked(MemoryInstanceRows, "instance")


def build_versions_not_checked() -> AbstractContextManager[Any]:
    """A scheduler applies announcements to cached builds, and their versions are not compared."""
    return _unchecked(MemoryBuildRows, "build")


def _unchecked(store: type[Any], kind: str) -> AbstractContextManager[Any]:
    write = store.write

    async def unchecked(self: Any, writes: Any) -> Any:
        writes.versions = {uuid: self._table.row_versions[kind, uuid] for uuid in writes.versions}
        return await write(self, writes)

    return patch.object(store, "write", unchecked)


def outbox_numbers_come_again() -> AbstractContextManager[Any]:
    """An outbox row's number is its sequence's alone: after a crash of the server another row bears it."""

    def next_row(self: MemoryDatabase) -> int:
        return max([self.commits, *self.outbox], default=0) + 1

    return patch.object(MemoryDatabase, "next_row", next_row)


MUTANTS_OF_DISKS = (scheduler_does_not_wait_for_the_disk,)
# Looked for in fewer than sixty seeds so far, but the last: a host that is commanded too early costs a build, no more.
UNPROVEN_OF_DISKS = (
    decision_not_durable,
    conductor_does_not_wait_for_the_disk,
    cache_outlives_the_database,
    instance_versions_not_checked,
    build_versions_not_checked,
    outbox_numbers_come_again,
    everything_may_be_redone,
)

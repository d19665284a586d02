"""Deliberate defects about what is on disk, and about what a process believes without looking."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from bus.service.known import Known
from bus.service.memory_database import MemoryDatabase
from cell_conductor import engine
from cell_conductor.store.believing import BelievingTransaction
from cell_conductor.store.memory import MemoryInstances
from scheduler_worker import handlers
from scheduler_worker.store import port
from scheduler_worker.store.believing import BelievingUnit
from scheduler_worker.store.memory import MemoryBuilds


async def _at_once(self: Any) -> None:
    return None


def conductor_does_not_wait_for_the_disk() -> AbstractContextManager[Any]:
    """A conductor acknowledges a result whose record may still be forgotten."""
    return patch.object(MemoryInstances, "flush", _at_once)


def scheduler_does_not_wait_for_the_disk() -> AbstractContextManager[Any]:
    """A scheduler acknowledges an announcement, or a repeat, whose record may still be forgotten."""
    return patch.object(MemoryBuilds, "flush", _at_once)


def decision_in_no_hurry() -> AbstractContextManager[Any]:
    """A decision leaves for its cell, and its request is acknowledged, before it is on disk."""
    quickly = port.quickly

    async def hastily(store: Any, work: Any, *, durable: bool = True) -> Any:
        return await quickly(store, work, durable=False)

    return patch.object(handlers, "quickly", hastily)


def everything_may_be_redone() -> AbstractContextManager[Any]:
    """A conductor commands hosts, and asks placement, before it has that on disk."""
    return patch.object(engine, "_may_be_redone", lambda recorded: True)


def belief_outlives_the_database() -> AbstractContextManager[Any]:
    """What a process knows of its rows it knows for ever, also when the server died and gives numbers again."""
    return patch.object(Known, "_doubt", lambda self: None)


def belief_not_checked() -> AbstractContextManager[Any]:
    """A conductor writes on what it believes, and nobody looks whether it is so."""
    write = BelievingTransaction.write

    async def trusting(self: BelievingTransaction) -> None:
        table = self._ground._table  # type: ignore[attr-defined]
        self._versions = {uuid: table.row_versions["instance", uuid] for uuid in self._versions}
        await write(self)

    return patch.object(BelievingTransaction, "write", trusting)


def request_believed_as_it_was() -> AbstractContextManager[Any]:
    """A scheduler folds announcements into what it believes, and nobody looks whether it is so."""
    write = BelievingUnit.write

    async def trusting(self: BelievingUnit, *, durable: bool) -> None:
        table = self._ground._table  # type: ignore[attr-defined]
        self._versions = {uuid: table.row_versions["build", uuid] for uuid in self._versions}
        await write(self, durable=durable)

    return patch.object(BelievingUnit, "write", trusting)


def outbox_numbers_come_again() -> AbstractContextManager[Any]:
    """An outbox row's number is its sequence's alone: after a crash of the server another row bears it."""

    def next_row(self: MemoryDatabase) -> int:
        return max([self.commits, *self.outbox], default=0) + 1

    return patch.object(MemoryDatabase, "next_row", next_row)


MUTANTS_OF_DISKS = (scheduler_does_not_wait_for_the_disk,)
# Looked for in fewer than sixty seeds so far, but the last: a host that is commanded too early costs a build, no more.
UNPROVEN_OF_DISKS = (
    decision_in_no_hurry,
    conductor_does_not_wait_for_the_disk,
    belief_outlives_the_database,
    belief_not_checked,
    request_believed_as_it_was,
    outbox_numbers_come_again,
    everything_may_be_redone,
)

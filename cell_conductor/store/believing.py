"""A transaction on what this process believes of its instances: written at its end, which holds only if it is so.

Most messages find their instance where this conductor has left it a moment ago. What is known is kept here with the
row's version; a row that another conductor has written since makes the end write nothing, and the batch is done again
with locks. Nothing here may be guessed that is not checked at the end: every row that was looked at is locked in its
version, whether it changes or not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from msgspec import Struct

from bus.outbox import Addressed
from bus.service.known import Known
from bus.service.once import Mistaken
from cell_conductor.domain.instance import Instance
from cell_conductor.domain.table import IllegalStep

from .port import StaleWrite


class Belief(Struct, frozen=True, kw_only=True):
    """All that one transaction writes, if it is as believed. held: the version of every row that was looked at."""

    message_ids: Sequence[str]
    held: Mapping[str, int]
    created: Sequence[Instance]
    changed: Sequence[Instance]
    outgoing: Sequence[Addressed]
    durable: bool


class Written(Struct, frozen=True):
    """What came of it: the version of the rows that were written, and the outbox row."""

    version: int
    row: int | None


class Ground(Protocol):
    """The rows themselves. Adapters: `store.one_statement`, `store.memory`."""

    async def look(self, uuids: Sequence[str]) -> list[tuple[int, Instance]]:
        """Instances with the versions of their rows, without locks."""

    async def write(self, belief: Belief) -> Written:
        """All of it or nothing, locking messages before instances, each by id. Raises Mistaken."""


class BelievingTransaction:
    """Reads from memory, keeps what is to be written, and writes it all at once."""

    def __init__(self, ground: Ground, known: Known[Instance], new: Collection[str]) -> None:
        self._ground = ground
        self._known = known
        self._new = frozenset(new)
        self._message_ids: list[str] = []
        self._versions: dict[str, int] = {}
        self._created: list[Instance] = []
        self._changed: list[Instance] = []
        self._outgoing: Sequence[Addressed] = ()
        self.row: int | None = None
        self.durable = True

    async def first_time(self, message_ids: Sequence[str]) -> set[str]:
        """Believed to be new; checked at the end."""
        self._message_ids = sorted(set(message_ids))
        return set(self._message_ids)

    async def lock(self, uuids: Sequence[str]) -> dict[str, Instance]:
        """As this process knows them; what it does not know is read, unless it is believed to be new."""
        found: dict[str, Instance] = {}
        unknown: list[str] = []
        for uuid in uuids:
            known = self._known.get(uuid)
            if known is not None:
                self._versions[uuid], found[uuid] = known
            elif uuid not in self._new:
                unknown.append(uuid)
        if unknown:
            for version, instance in await self._ground.look(unknown):
                self._versions[instance.uuid], found[instance.uuid] = version, instance
        return found

    async def insert(self, instances: Sequence[Instance]) -> None:
        """Kept for the end."""
        self._created = list(instances)

    async def update(self, instances: Sequence[Instance]) -> None:
        """Kept for the end."""
        self._changed = list(instances)

    async def send_later(self, outgoing: Sequence[Addressed]) -> int | None:
        """Kept for the end; `row` says then which it is."""
        self._outgoing = outgoing
        return None

    def doubt(self) -> None:
        """What is known of these instances may be wrong."""
        self._known.forget({*self._versions, *self._new})

    async def write(self) -> None:
        """The whole transaction. Raises StaleWrite when anything was not as believed."""
        if self._new - self._versions.keys() - {instance.uuid for instance in self._created}:
            raise StaleWrite  # believed absent, and nothing is written that would prove it
        self.doubt()  # whatever comes of it, cancelled or the connection lost
        try:
            written = await self._ground.write(
                Belief(
                    message_ids=self._message_ids,
                    held=self._versions,
                    created=self._created,
                    changed=self._changed,
                    outgoing=self._outgoing,
                    durable=self.durable,
                )
            )
        except Mistaken:
            raise StaleWrite from None
        self.row = written.row
        self._known.put(written.version, {one.uuid: one for one in (*self._created, *self._changed)})


@asynccontextmanager
async def believing(
    ground: Ground, known: Known[Instance], new: Collection[str]
) -> AsyncIterator[BelievingTransaction]:
    """Writes at its end, nothing on an exception. new: instances that are believed not to be on record."""
    transaction = BelievingTransaction(ground, known, new)
    try:
        yield transaction
    except IllegalStep:  # by what is believed; with locks it is seen whether it is so
        transaction.doubt()
        raise StaleWrite from None
    await transaction.write()

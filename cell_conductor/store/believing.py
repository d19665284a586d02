"""A transaction on what this process believes of its instances: one statement at its end, which holds only if it is so.

Most messages find their instance where this conductor has left it a moment ago. What is known is kept here with the
row's version (its xmin: the transaction that wrote it); a row that another conductor has written since makes the
statement undo itself, and the batch is done again with locks. Nothing here may be guessed that is not checked at the
end: every row that was looked at is locked in its version, whether it changes or not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

import asyncpg

from bus import outbox
from bus.outbox import Addressed
from bus.service.database import Database
from bus.service.known import Known
from bus.service.once import Mistaken, Once
from cell_conductor.domain.instance import Instance
from cell_conductor.domain.table import IllegalStep

from . import rows
from .port import StaleWrite

LOOK = "SELECT xmin, record::text FROM instances WHERE uuid = ANY($1::uuid[])"

# Locks what was looked at, in uuid order, where it is still the same.
HELD = """
SELECT i.uuid FROM instances i JOIN unnest({}::uuid[], {}::xid[]) AS b (uuid, version) ON i.uuid = b.uuid
WHERE i.xmin = b.version ORDER BY i.uuid FOR UPDATE OF i
"""

INSERT = f"""
INSERT INTO instances ({rows.NAMES}) SELECT * FROM {rows.GIVEN} ON CONFLICT (uuid) DO NOTHING RETURNING 1
"""

# All or nothing. Not joined with what is held: planned by key, two lists of values are compared pair by pair.
UPDATE = f"""
UPDATE instances SET {rows.ASSIGNED} FROM {rows.GIVEN} AS n ({rows.NAMES})
WHERE instances.uuid = n.uuid AND (SELECT count(*) FROM held) = {{}}::bigint RETURNING 1
"""

UPDATE_ONE = f"""
UPDATE instances SET {rows.ASSIGNED} FROM {rows.GIVEN} AS n ({rows.NAMES})
WHERE instances.uuid = n.uuid AND instances.xmin = {{}}::xid RETURNING 1
"""


class BelievingTransaction:
    """Reads from memory, keeps what is to be written, and writes it all at once."""

    def __init__(self, connection: asyncpg.Connection, known: Known[Instance], new: Collection[str]) -> None:
        self._connection = connection
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
            for version, record in await self._connection.fetch(LOOK, unknown):
                instance = rows.decode(record)
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
        once = Once()
        held = sorted(self._versions)
        versions = [self._versions[uuid] for uuid in held]
        # One row needs no order of locks, so it is checked where it is changed.
        alone = len(held) == 1 and len(self._changed) == 1
        # Messages before instances, as with locks.
        if self._message_ids:
            once.part("seen", rows.SEEN, self._message_ids, rows=len(self._message_ids))
        if held and not alone:
            once.part("held", HELD, held, versions, rows=len(held))
        if self._created:
            once.part("created", INSERT, *rows.columns(self._created), rows=len(self._created))
        if alone:
            once.part("changed", UPDATE_ONE, *rows.columns(self._changed), versions[0], rows=1)
        elif self._changed:
            once.part("changed", UPDATE, *rows.columns(self._changed), len(held), rows=len(self._changed))
        outbox.add_once(once, self._outgoing)
        once.column("pg_current_xact_id()::xid AS version")
        self.doubt()  # whatever comes of it, cancelled or the connection lost
        try:
            written = await once.run(self._connection, durable=self.durable)
        except Mistaken:
            raise StaleWrite from None
        self.row = written["said"]
        self._known.put(written["version"], {one.uuid: one for one in (*self._created, *self._changed)})


@asynccontextmanager
async def believing(
    database: Database, known: Known[Instance], new: Collection[str]
) -> AsyncIterator[BelievingTransaction]:
    """Writes at its end, nothing on an exception. new: instances that are believed not to be on record."""
    async with database.single() as connection:
        transaction = BelievingTransaction(connection, known, new)
        try:
            yield transaction
        except IllegalStep:  # by what is believed; with locks it is seen whether it is so
            transaction.doubt()
            raise StaleWrite from None
        await transaction.write()

"""A belief as one statement: PostgreSQL's side of `believing`."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from bus import outbox
from bus.service.once import Once
from cell_conductor.domain.instance import Instance

from . import rows
from .believing import Belief, Written

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


class OneStatement:
    """The rows of one connection outside of any transaction; the version of a row is its xmin: who wrote it."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def look(self, uuids: Sequence[str]) -> list[tuple[int, Instance]]:
        """Instances with the versions of their rows, without locks."""
        return [(version, rows.decode(record)) for version, record in await self._connection.fetch(LOOK, uuids)]

    async def write(self, belief: Belief) -> Written:
        """All of it or nothing."""
        once = Once()
        held = sorted(belief.held)
        versions = [belief.held[uuid] for uuid in held]
        # One row needs no order of locks, so it is checked where it is changed.
        alone = len(held) == 1 and len(belief.changed) == 1
        # Messages before instances, as with locks.
        if belief.message_ids:
            once.part("seen", rows.SEEN, belief.message_ids, rows=len(belief.message_ids))
        if held and not alone:
            once.part("held", HELD, held, versions, rows=len(held))
        if belief.created:
            once.part("created", INSERT, *rows.columns(belief.created), rows=len(belief.created))
        if alone:
            once.part("changed", UPDATE_ONE, *rows.columns(belief.changed), versions[0], rows=1)
        elif belief.changed:
            once.part("changed", UPDATE, *rows.columns(belief.changed), len(held), rows=len(belief.changed))
        outbox.add_once(once, belief.outgoing)
        once.column("pg_current_xact_id()::xid AS version")
        written = await once.run(self._connection, durable=belief.durable)
        return Written(written["version"], written["said"])

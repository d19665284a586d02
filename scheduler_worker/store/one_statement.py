"""A belief as one statement: PostgreSQL's side of `believing`."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from bus import outbox
from bus.service.once import Once
from scheduler_worker.store import rows
from scheduler_worker.store.believing import Belief, Written
from scheduler_worker.store.port import Kept

LOOK = f"SELECT xmin, {rows.KEPT} FROM build_requests WHERE instance_uuid = ANY($1::uuid[])"

# Locks what was looked at, in uuid order, where it is still the same.
HELD = """
SELECT b.instance_uuid FROM build_requests b
JOIN unnest({}::uuid[], {}::xid[]) AS k (instance_uuid, version) ON b.instance_uuid = k.instance_uuid
WHERE b.xmin = k.version ORDER BY b.instance_uuid FOR UPDATE OF b
"""

# All or nothing. Not joined with what is held: planned by key, two lists of values are compared pair by pair.
CHANGE = f"{rows.CHANGE} AND (SELECT count(*) FROM held) = {{}}::bigint RETURNING 1"
CHANGE_ONE = f"{rows.CHANGE} AND b.xmin = {{}}::xid RETURNING 1"


class OneStatement:
    """The rows of one connection outside of any transaction; the version of a row is its xmin: who wrote it."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def look(self, instances: Sequence[str]) -> list[tuple[int, Kept]]:
        """Records with the versions of their rows, without locks."""
        return [(row["xmin"], rows.kept(row)) for row in await self._connection.fetch(LOOK, instances)]

    async def write(self, belief: Belief) -> Written:
        """All of it or nothing."""
        once, now = Once(), belief.at
        if belief.fresh:
            fresh = sorted(belief.fresh, key=lambda build: build.request.instance_uuid)
            once.part("fresh", rows.INSERT, *rows.new(fresh), now, rows=len(fresh))
        if belief.decided:
            decided = sorted(belief.decided, key=lambda one: one.instance_uuid)
            once.part("decided", rows.DECIDE, *rows.decided(decided), now, rows=len(decided))
            placed = [one for one in decided if one.host_uuid is not None]
            if placed:
                once.part("mapped", rows.MAP, *rows.mapping(placed), now, rows=len(placed))
        _change(once, belief)
        outbox.add_once(once, belief.said)
        once.column("pg_current_xact_id()::xid AS version")
        written = await once.run(self._connection, durable=belief.durable)
        return Written(written["version"], written["said"])


def _change(once: Once, belief: Belief) -> None:
    held, changes = sorted(belief.held), belief.changed
    versions = [belief.held[one] for one in held]
    # One row needs no order of locks, so it is checked where it is changed.
    if len(held) == len(changes) == 1:
        once.part("changed", CHANGE_ONE, *rows.changed(changes), belief.at, versions[0], rows=1)
    elif held:
        once.part("held", HELD, held, versions, rows=len(held))
        if changes:
            once.part("changed", CHANGE, *rows.changed(changes), belief.at, len(held), rows=len(changes))

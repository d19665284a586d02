"""An outbox in PostgreSQL, as a relay uses it: confirmed rows are deleted, those that were left behind taken."""

from __future__ import annotations

from collections.abc import Sequence

from bus.persistence.database import Database

# Each is a transaction of its own. Losing a deletion in a crash of the database means that a sweep repeats the row: not
# worth a disk flush, unless something else waits for one ($2).
DELETE_CONFIRMED = """
WITH gone AS (DELETE FROM outbox WHERE id = ANY($1::bigint[]) RETURNING 1)
SELECT count(*), CASE WHEN NOT $2 THEN set_config('synchronous_commit', 'off', true) END FROM gone
"""
# Of the rows for a bus the longest untaken go first, so that those which fail again and again go round; and each bus
# has the limit to itself, so that one with many rows does not hold up the others.
TAKE_OLD = """
WITH gone AS (DELETE FROM outbox WHERE id = ANY($4::bigint[]) RETURNING 1),
taken AS (
    UPDATE outbox SET taken_at = now() WHERE id IN (SELECT id FROM outbox WHERE id IN (
        SELECT id FROM (
            SELECT id, row_number() OVER (PARTITION BY bus ORDER BY taken_at, id) AS place FROM outbox
            WHERE (taken_at < now() - make_interval(secs => $1) OR id = ANY($5::bigint[]))
                AND NOT bus = ANY($3::text[]) AND NOT id = ANY($4::bigint[])
        ) AS ranked WHERE place <= $2
    ) AND (taken_at < now() - make_interval(secs => $1) OR id = ANY($5::bigint[]))
    ORDER BY id FOR UPDATE SKIP LOCKED) RETURNING id, body
)
SELECT deleted.rows, taken.id, taken.body
FROM (SELECT count(*) AS rows FROM gone) AS deleted LEFT JOIN taken ON true
"""


class PostgresRows:
    """The outbox of one schema."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def delete(self, row_ids: Sequence[int]) -> None:
        """Delete rows whose messages are confirmed; where a flush is waited for, the commit is that flush."""
        async with self._database.single() as connection:
            with self._database.flush_by_commit(connection) as commit:
                deleted = await connection.fetchval(DELETE_CONFIRMED, row_ids, commit.wanted)
                if commit.wanted and deleted:
                    commit.done()

    async def claim_stale(
        self,
        age_s: float,
        limit: int,
        closed: Sequence[str],
        confirmed: Sequence[int] = (),
        back: Sequence[int] = (),
    ) -> list[tuple[int, bytes]]:
        """Rows older than this, by id, at most `limit` for each bus, and these; taking one makes it young again."""
        async with self._database.single() as connection:
            with self._database.flush_by_commit(connection) as commit:
                rows = await connection.fetch(TAKE_OLD, age_s, limit, closed, confirmed, back)
                if rows[0]["rows"]:
                    commit.done()
        return sorted((row["id"], row["body"]) for row in rows if row["id"] is not None)

    async def purge_handled(self, keep_s: float, limit: int) -> None:
        """Drop old records of handled messages, where this schema keeps any."""
        async with self._database.raw() as connection:
            if await connection.fetchval("SELECT to_regclass('handled') IS NOT NULL"):
                await connection.execute(
                    "DELETE FROM handled WHERE ctid = ANY(ARRAY(SELECT ctid FROM handled "
                    "WHERE at < now() - make_interval(secs => $1) LIMIT $2))",
                    keep_s,
                    limit,
                )

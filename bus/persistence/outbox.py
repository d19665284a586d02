"""The outbox: messages commit with the state that caused them, and leave afterwards, at least once. `add` writes a row
for each bus; the relay (`bus.persistence.relay`) publishes it and deletes it once the broker has confirmed. Rows of a
process that died are swept by any process of that role. Consumers are idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Union

import asyncpg
import msgspec
from msgspec import Struct
from msgspec.structs import astuple, replace

from bus.contracts.base import Message
from bus.contracts.catalogue import MESSAGES
from bus.persistence.guarded_statement import GuardedStatement
from bus.tracing.context import CURRENT

if TYPE_CHECKING:
    from bus.persistence.database import Database

    AnyMessage = Message
else:  # a message's type is its tag, so any process of the role can read and publish it
    AnyMessage = Union[tuple(row.message for row in MESSAGES)]  # noqa: UP007  (made of a list)


class OutboxMessage(Struct, frozen=True, omit_defaults=True):
    """A message for a bus. The metadata is kept with it, whichever process publishes it: the row of a restored backup
    commands by the incarnation that had decided it.
    """

    bus: str  # "api" or a cell's name
    message: AnyMessage
    cause: str = ""  # this and the following as in Meta
    traceparent: str = ""
    database_incarnation: int = 0


encode_row = msgspec.json.Encoder().encode
decode_row = msgspec.json.Decoder(list[OutboxMessage]).decode
# What `decode_row` raises for a row that another version has written.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# Not the sequence alone: a database that crashed gives numbers again that it had given to transactions that did not
# wait for the disk. A relay still holds the old row under its number, and would forget the new one with it. Time does
# not come again.
NEW_ID = "((extract(epoch FROM clock_timestamp()) * 1000000)::bigint << 10) | (nextval('outbox_id_seq') & 1023)"
INSERT = f"""
INSERT INTO outbox (id, bus, body) OVERRIDING SYSTEM VALUE
SELECT {NEW_ID}, bus, body FROM unnest({{}}::text[], {{}}::bytea[]) AS messages (bus, body)
WHERE {{met}} RETURNING id, bus
"""
IDS = '(SELECT array_agg(id ORDER BY bus COLLATE "C") FROM outgoing)'  # as `by_bus` has them


def by_bus(outgoing: Sequence[OutboxMessage]) -> dict[str, list[OutboxMessage]]:
    """The messages of each bus, in order; the buses by name."""
    found: dict[str, list[OutboxMessage]] = {bus: [] for bus in sorted({item.bus for item in outgoing})}
    for item in outgoing:
        found[item.bus].append(item)
    return found


def traced(outgoing: Sequence[OutboxMessage]) -> Sequence[OutboxMessage]:
    """The messages, each in the trace of the handled message that caused it (the same ones, if none is handled)."""
    if (scope := CURRENT.get()) is None:
        return outgoing
    header_of = scope.header_of
    return [
        replace(item, traceparent=header) if not item.traceparent and (header := header_of(item.cause)) else item
        for item in outgoing
    ]


def _rows(outgoing: Sequence[OutboxMessage]) -> tuple[list[str], list[bytes]]:
    rows = by_bus(traced(outgoing))
    return list(rows), [encode_row(messages) for messages in rows.values()]


async def add(conn: asyncpg.Connection, outgoing: Sequence[OutboxMessage]) -> list[int]:
    """Record this transaction's messages, as one row for each bus. Returns the rows' ids for `Relay.send`."""
    if not outgoing:
        return []
    query = f"WITH outgoing AS ({INSERT.format('$1', '$2', met='true')}) SELECT {IDS}"
    row_ids: list[int] = await conn.fetchval(query, *_rows(outgoing))
    return row_ids


def add_to(statement: GuardedStatement, outgoing: Sequence[OutboxMessage]) -> None:
    """The same as a part of a guarded statement; the rows' ids are its column `outbox_rows`."""
    if not outgoing:
        statement.column("'{}'::bigint[] AS outbox_rows")
        return
    statement.add("outgoing", INSERT, *_rows(outgoing))
    statement.column(f"{IDS} AS outbox_rows")


async def first_time(conn: asyncpg.Connection, handler: str, message_ids: Sequence[str]) -> set[str]:
    """Record message ids as handled by this transaction; returns those not seen before."""
    # The rows are inserted in one order, so that two processes with the same messages wait for each other instead of
    # deadlocking.
    rows = await conn.fetch(
        "INSERT INTO handled (handler, message_id) SELECT $1, unnest($2::text[]) ON CONFLICT DO NOTHING "
        "RETURNING message_id",
        handler,
        sorted(set(message_ids)),
    )
    return {row["message_id"] for row in rows}


class Sweep(Struct, frozen=True):
    """Which rows a relay takes: those that nobody has taken for `age_s` seconds, at most `limit` for each bus."""

    age_s: float
    limit: int
    closed: Sequence[str] = ()  # buses that take nothing now; rows for these are left untouched
    confirmed: Sequence[int] = ()  # rows to delete in the same statement
    restored: Sequence[int] = ()  # rows to take however young they are


class Rows(Protocol):
    """The operations that a relay needs of an outbox.

    Adapters: `PostgresRows`, and `MemoryRows` of `memory_database`. All raise Transient.
    """

    async def delete(self, row_ids: Sequence[int]) -> None:
        """Delete rows whose messages are confirmed."""

    async def claim_stale(self, sweep: Sweep) -> list[tuple[int, bytes]]:
        """Rows with their bodies, by id. Taking one makes it young again, so that two relays do not take it at once."""

    async def purge_handled(self, keep_s: float, limit: int) -> None:
        """Delete records of handled messages older than this, up to a bound."""


# Each is a transaction of its own. Losing a deletion in a crash of the database means that a sweep repeats the row: not
# worth a disk flush, unless something else waits for one ($2).
DELETE_CONFIRMED = """
WITH gone AS (DELETE FROM outbox WHERE id = ANY($1::bigint[]) RETURNING 1)
SELECT count(*), CASE WHEN NOT $2 THEN set_config('synchronous_commit', 'off', true) END FROM gone
"""
# Of the rows for a bus the longest untaken go first, so that those which fail again and again go round; and each bus
# has the limit to itself, so that one with many rows does not hold up the others.
TAKE_OLD = """
WITH RECURSIVE gone AS (DELETE FROM outbox WHERE id = ANY($4::bigint[]) RETURNING 1),
buses AS (
    (SELECT bus FROM outbox ORDER BY bus LIMIT 1)
    UNION ALL
    SELECT next.bus FROM buses CROSS JOIN LATERAL (
        SELECT bus FROM outbox WHERE outbox.bus > buses.bus ORDER BY bus LIMIT 1
    ) AS next
),
back AS MATERIALIZED (SELECT id, bus, taken_at FROM outbox WHERE id = ANY($5::bigint[])),
found AS (
    SELECT old.id FROM buses CROSS JOIN LATERAL (
        SELECT id FROM (
            (SELECT id, taken_at FROM outbox WHERE bus = buses.bus
                AND taken_at < now() - make_interval(secs => $1) AND NOT id = ANY($4::bigint[])
             ORDER BY bus, taken_at LIMIT $2)
            UNION
            SELECT id, taken_at FROM back WHERE bus = buses.bus AND NOT id = ANY($4::bigint[])
        ) AS both_kinds ORDER BY taken_at LIMIT $2
    ) AS old WHERE NOT buses.bus = ANY($3::text[])
),
taken AS (
    UPDATE outbox SET taken_at = now() WHERE id IN (
        SELECT outbox.id FROM found JOIN outbox USING (id)
        WHERE taken_at < now() - make_interval(secs => $1) OR outbox.id = ANY($5::bigint[])
        ORDER BY outbox.id FOR UPDATE OF outbox SKIP LOCKED
    ) RETURNING id, body
)
SELECT deleted.rows, taken.id, taken.body
FROM (SELECT count(*) AS rows FROM gone) AS deleted LEFT JOIN taken ON true
"""
DELETE_HANDLED = """
DELETE FROM handled WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM handled WHERE at < now() - make_interval(secs => $1) LIMIT $2))
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
                    commit.is_done = True

    async def claim_stale(self, sweep: Sweep) -> list[tuple[int, bytes]]:
        """Rows older than this, by id, at most `limit` for each bus, and these; taking one makes it young again."""
        async with self._database.single() as connection:
            with self._database.flush_by_commit(connection) as commit:
                rows = await connection.fetch(TAKE_OLD, *astuple(sweep))
                if rows[0]["rows"]:
                    commit.is_done = True
        return sorted((row["id"], row["body"]) for row in rows if row["id"] is not None)

    async def purge_handled(self, keep_s: float, limit: int) -> None:
        """Drop old records of handled messages."""
        async with self._database.raw() as connection:
            await connection.execute(DELETE_HANDLED, keep_s, limit)

"""The outbox: messages commit with the state that caused them, and leave afterwards, at least once.

`add` writes the messages of a transaction, as one row for each bus. After the commit the process hands the same
messages to its relay (`bus.persistence.relay`), which publishes them and deletes a row once the broker has confirmed
it. A process that dies in between leaves its rows behind; the relay of any process of that role finds them when they
are old enough. Consumers are idempotent, so a message that is sent twice does no harm, and no message is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Union

import asyncpg
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import Message
from bus.contracts.catalogue import MESSAGES
from bus.persistence.guarded_statement import GuardedStatement
from bus.tracing.context import CURRENT


class OutboxMessage(Struct, frozen=True, omit_defaults=True):
    """A message, and the bus it is for ("api" or a cell's name). `cause` and `traceparent` as in Meta.

    The trace is kept with the message: whichever process publishes it, and whenever, does so in the trace.
    """

    bus: str
    message: Message
    cause: str = ""
    traceparent: str = ""


class _Stored(Struct, frozen=True):
    """An OutboxMessage as it is read back: the message's type is its tag, so any process of the role can publish it."""

    bus: str
    message: Union[tuple(row.message for row in MESSAGES)]  # type: ignore[valid-type]  # noqa: UP007
    cause: str = ""
    traceparent: str = ""


encode_row = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[_Stored]).decode
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what `decode_row` raises

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


def decode_row(body: bytes) -> list[OutboxMessage]:
    """The messages of a row. Raises UNREADABLE for a row that another version has written."""
    return [OutboxMessage(item.bus, item.message, item.cause, item.traceparent) for item in _decode(body)]


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


class Rows(Protocol):
    """The operations that a relay needs of an outbox.

    Adapters: `outbox_rows`, `memory_database`. All raise Transient.
    """

    async def delete(self, row_ids: Sequence[int]) -> None:
        """Delete rows whose messages are confirmed."""

    async def claim_stale(
        self,
        age_s: float,
        limit: int,
        closed: Sequence[str],
        confirmed: Sequence[int] = (),
        back: Sequence[int] = (),
    ) -> list[tuple[int, bytes]]:
        """Rows older than this, by id, at most `limit` for each bus.

        Taking one makes it young again, so that two relays do not take it at once. closed: buses that take nothing now;
        rows for these are left untouched. confirmed: rows to delete in the same statement. back: rows to take however
        young they are.
        """

    async def purge_handled(self, keep_s: float, limit: int) -> None:
        """Delete records of handled messages older than this, up to a bound."""

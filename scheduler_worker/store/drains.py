"""Instances of drains as rows: the statements of the store's PostgreSQL adapter, and the rows of its memory adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import asyncpg
import msgspec

from bus.contracts.drains import DrainMoveState, DrainRecord
from bus.contracts.moves import MoveKind
from bus.contracts.objects import ObjectKind
from scheduler_worker.domain.drains import DrainMove, OpenDrain
from scheduler_worker.store.rows import clean

COLUMNS = (
    "drain", "instance_uuid", "position", "source_uuid", "kind", "state", "host_uuid", "tries", "failures", "code",
    "reason", "due_at", "begun_at",
)  # fmt: skip
_TYPES = (
    "uuid", "uuid", "integer", "uuid", "text", "text", "uuid", "integer", "integer", "text", "text", "float8", "float8",
)  # fmt: skip
WAITING, UNDER_WAY = DrainMoveState.WAITING, DrainMoveState.UNDER_WAY

LOCK = f"SELECT body FROM objects WHERE kind = '{ObjectKind.DRAIN.value}' AND name = $1 FOR UPDATE"
IN_STATE = f"""
SELECT {", ".join(COLUMNS)} FROM drain_moves
WHERE drain = $1 AND state = $2 AND due_at <= $3 ORDER BY position, instance_uuid LIMIT $4
"""
ALL = f"SELECT {', '.join(COLUMNS)} FROM drain_moves WHERE drain = $1 ORDER BY position, instance_uuid LIMIT $2"
COUNTS = "SELECT drain, state, count(*) FROM drain_moves WHERE drain = ANY($1::uuid[]) GROUP BY drain, state"
LAST_BEGUN = "SELECT coalesce(max(begun_at), 0) FROM drain_moves WHERE drain = $1"
PUT = f"""
INSERT INTO drain_moves ({", ".join(COLUMNS)})
SELECT * FROM unnest({", ".join(f"${at}::{kind}[]" for at, kind in enumerate(_TYPES, 1))})
ON CONFLICT (drain, instance_uuid) DO UPDATE SET
    {", ".join(f"{name} = excluded.{name}" for name in COLUMNS[3:])}
"""
DROP = "DELETE FROM drain_moves WHERE drain = ANY($1::uuid[])"
NO_LIMIT = 2**31 - 1

_record = msgspec.json.Decoder(DrainRecord).decode


async def lock(connection: asyncpg.Connection, drain: str, now: float, limit: int) -> OpenDrain | None:
    """A drain, locked by its object's row, with its instances that are under way and that are due."""
    body = await connection.fetchval(LOCK, drain)
    if body is None:
        return None
    rows = await connection.fetch(IN_STATE, drain, UNDER_WAY.value, float("inf"), NO_LIMIT)
    rows += await connection.fetch(IN_STATE, drain, WAITING.value, now, limit)
    found = await counts(connection, [drain])
    return OpenDrain(
        record=_record(body),
        open=tuple(map(_move, rows)),
        counts=found.get(drain, {}),
        last_begun_at=await connection.fetchval(LAST_BEGUN, drain),
    )


async def put(connection: asyncpg.Connection, moves: Sequence[DrainMove]) -> None:
    """One statement, whatever their number."""
    if moves:
        await connection.execute(PUT, *map(list, zip(*map(_row, moves), strict=True)))


async def read(connection: asyncpg.Connection, drain: str, limit: int) -> list[DrainMove]:
    """The instances of a drain, in their order."""
    return [_move(row) for row in await connection.fetch(ALL, drain, limit)]


async def counts(connection: asyncpg.Connection, drains: Sequence[str]) -> dict[str, dict[DrainMoveState, int]]:
    """How many instances they have, by state."""
    found: dict[str, dict[DrainMoveState, int]] = {}
    for drain, state, count in await connection.fetch(COUNTS, drains):
        found.setdefault(drain, {})[DrainMoveState(state)] = count
    return found


async def drop(connection: asyncpg.Connection, drains: Sequence[str]) -> None:
    """Delete the rows of these drains."""
    await connection.execute(DROP, drains)


def opened(record: DrainRecord, moves: Iterable[DrainMove], now: float, limit: int) -> OpenDrain:
    """The result of `lock`, from all instances of a drain."""
    ordered = in_order(moves)
    due = [one for one in ordered if one.state is WAITING and one.due_at <= now]
    return OpenDrain(
        record=record,
        open=(*(one for one in ordered if one.state is UNDER_WAY), *due[:limit]),
        counts=Counter(one.state for one in ordered),
        last_begun_at=max((one.begun_at for one in ordered), default=0.0),
    )


def in_order(moves: Iterable[DrainMove]) -> list[DrainMove]:
    """In the order in which a drain moves them."""
    return sorted(moves, key=lambda one: (one.position, one.instance_uuid))


def _row(one: DrainMove) -> tuple[Any, ...]:
    return (
        one.drain, one.instance_uuid, one.position, one.source_uuid, one.kind.value, one.state.value, one.host_uuid,
        one.tries, one.failures, clean(one.code), clean(one.reason), one.due_at, one.begun_at,
    )  # fmt: skip


def _move(row: asyncpg.Record) -> DrainMove:
    fields = dict(row)
    return DrainMove(**{**fields, "kind": MoveKind(row["kind"]), "state": DrainMoveState(row["state"])})

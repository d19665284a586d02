"""Who is in which server group, as a part of the book as a value.

What projects hold against their quotas follows from what their consumers hold: it is counted anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import asyncpg
from msgspec import Struct

# Claims read their group's members and their project's consumers before they lock any consumer. Who has read them is
# waited for, and who has not waits: else a claim would be decided by the members of a book that is no more. After the
# writers of trees and before any provider's row, as everywhere.
HOLD_CLAIMS = "LOCK TABLE group_members, consumers IN ACCESS EXCLUSIVE MODE"

# Rows of those who hold nothing count no more, and are left to be trimmed.
READ = """
SELECT m.project_id, m.group_uuid, m.consumer FROM group_members m
WHERE EXISTS (SELECT FROM allocations a WHERE a.consumer = m.consumer)
"""
DELETE = "DELETE FROM group_members WHERE consumer = ANY($1::uuid[])"
INSERT = """
INSERT INTO group_members (project_id, group_uuid, consumer)
SELECT * FROM unnest($1::text[], $2::uuid[], $3::uuid[])
"""


class Member(Struct, frozen=True, order=True):
    """One member of a server group of a project. Where it is follows from what it holds."""

    project: str
    group: str
    consumer: str


async def read(connection: asyncpg.Connection) -> frozenset[Member]:
    """All members that hold something."""
    return frozenset(Member(*row) for row in await connection.fetch(READ))


def joined(before: Iterable[Member], after: Iterable[Member]) -> set[str]:
    """The consumers whose groups are others than they were."""
    return {member.consumer for member in frozenset(before) ^ frozenset(after)}


async def write(connection: asyncpg.Connection, wanted: Iterable[Member], changed: Collection[str]) -> None:
    """Make the groups of these consumers be those that are wanted, whatever older rows say."""
    await connection.execute(DELETE, list(changed))
    rows = [(m.project, m.group, m.consumer) for m in sorted(wanted) if m.consumer in changed]
    if rows:
        await connection.execute(INSERT, *map(list, zip(*rows, strict=True)))


async def follow(connection: asyncpg.Connection, changed: Collection[str], before: Mapping[str, object]) -> None:
    """Members stay what they are; who held nothing before is no member of what it once was."""
    await connection.execute(DELETE, [uuid for uuid in changed if uuid not in before])

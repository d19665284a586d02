"""The whole book, a page at a time, each page true at one feed number."""

from __future__ import annotations

import asyncpg

from bus.contracts.placement import SnapshotPage
from placement_worker.domain.values import state_of
from placement_worker.store import feed
from placement_worker.store.rows import READ_PROVIDERS_AFTER, read_providers


async def page(connection: asyncpg.Connection, after: str | None, limit: int) -> SnapshotPage:
    """Read one page; the caller's transaction is REPEATABLE READ, so that page and number belong together."""
    sequence = await feed.head(connection)
    _, providers = await read_providers(connection, READ_PROVIDERS_AFTER, after, limit + 1)
    states = [state_of(provider) for provider in providers.values()]
    return SnapshotPage(sequence=sequence, providers=tuple(states[:limit]), more=len(states) > limit)

"""Reads the whole book page by page. Each page is of one number of the feed."""

from __future__ import annotations

import asyncpg

from bus.contracts.placement import ProviderState, SnapshotPage
from placement_worker.domain.values import Provider, state_of
from placement_worker.store import feed
from placement_worker.store.rows import READ_PROVIDERS_AFTER, read_providers

# A page ends before its reply exceeds the size of a bus message. The sizes are generous estimates of JSON bytes, not
# measurements.
MAX_PAGE_BYTES = 8 * 2**20
BYTES_A_PROVIDER = 600
BYTES_AN_INVENTORY = 400
BYTES_A_NAME = 300


async def page(connection: asyncpg.Connection, after: str | None, limit: int) -> SnapshotPage:
    """Read one page. The caller's transaction is REPEATABLE READ, so that the page and the number are of one moment."""
    head = await feed.head(connection)
    _, providers = await read_providers(connection, READ_PROVIDERS_AFTER, after, limit + 1)
    states: list[ProviderState] = []
    size = 0
    for provider in providers.values():
        size += _size(provider)
        if len(states) == limit or (states and size > MAX_PAGE_BYTES):
            return SnapshotPage(sequence=head.sequence, providers=tuple(states), more=True, history=head.history)
        states.append(state_of(provider))
    return SnapshotPage(sequence=head.sequence, providers=tuple(states), history=head.history)


def _size(provider: Provider) -> int:
    names = len(provider.traits) + len(provider.aggregates)
    return BYTES_A_PROVIDER + BYTES_AN_INVENTORY * len(provider.inventories) + BYTES_A_NAME * names

"""One world a test: brokers in memory, a real PostgreSQL, placement."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.scheduler_worker.world import World


@pytest.fixture
async def world(postgres_url: str) -> AsyncIterator[World]:
    """Brokers, cells and placement; a test starts its schedulers itself."""
    made = World(postgres_url)
    await made.open()
    try:
        await made.placement()
        yield made
    finally:
        await made.close()

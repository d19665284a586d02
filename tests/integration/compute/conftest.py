from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.integration.compute.harness import Cell


@pytest_asyncio.fixture
async def cell() -> AsyncIterator[Cell]:
    made = Cell()
    await made.open()
    yield made
    await made.close()

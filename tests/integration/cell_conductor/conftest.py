"""A cell on a database of its own, for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.cell_conductor.neighbours import Cell, opened


@pytest.fixture
async def cell(postgres_url: str) -> AsyncIterator[Cell]:
    async with opened(postgres_url) as made:
        yield made

"""Fixtures of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.berth.world import ClientWorld


@pytest.fixture
async def client_world() -> AsyncIterator[ClientWorld]:
    """A client and its other side, open."""
    world = ClientWorld()
    await world.open()
    try:
        yield world
    finally:
        await world.close()

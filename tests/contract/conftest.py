"""What the suites of the contracts open and put away."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contract.house import House
from tests.contract.rig import Rig, rig_for


@pytest.fixture
async def rig(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with rig_for(kind, lambda: request.getfixturevalue("amqp")) as found:
        yield found


@pytest.fixture
async def house(rig: Rig) -> AsyncIterator[House]:
    made = House(rig)
    try:
        yield made
    finally:
        await made.close()

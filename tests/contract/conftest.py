"""What the suites of the contracts open and put away."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contract.house import House
from tests.contract.rig import rig_for


@pytest.fixture
async def house(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[House]:
    async with rig_for(kind, lambda: request.getfixturevalue("amqp")) as rig:
        made = House(rig)
        try:
            yield made
        finally:
            await made.close()

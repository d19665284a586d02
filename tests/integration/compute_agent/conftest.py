from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from compute_agent.drivers.ironic import driver as driver_module
from tests.integration.compute_agent.harness import Cell, Driver, Metal


@pytest_asyncio.fixture
async def cell() -> AsyncIterator[Cell]:
    made = Cell()
    await made.open()
    yield made
    await made.close()


@pytest_asyncio.fixture
async def metal() -> AsyncIterator[Metal]:
    made = Metal()
    await made.open()
    yield made
    await made.close()


@pytest_asyncio.fixture
async def driver(metal: Metal) -> Driver:
    return await metal.driver()


@pytest.fixture
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a look during which the process stood still for 3 s, the next one came 60 s later."""
    monkeypatch.setattr(driver_module, "LOOK_SHARE", 0)

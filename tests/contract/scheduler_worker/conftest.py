"""A scheduler's store, in memory and in PostgreSQL, for the suites that both pass."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from bus.clock import SystemClock
from bus.persistence.database import Database
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from scheduler_worker.store.port import SchedulerStore
from scheduler_worker.store.postgres import PostgresBuilds
from tests.kit.sent import Sent

Make = Callable[[], SchedulerStore]


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
async def make(request: pytest.FixtureRequest, sent: Sent) -> AsyncIterator[Make]:
    """Another store on the same requests, as another scheduler has it."""
    made: list[SchedulerStore] = []
    table = MemoryBuildTable(SystemClock())
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""

    def another() -> SchedulerStore:
        made.append(MemoryBuilds(table.session()) if not url else PostgresBuilds(Database(url, "scheduler")))
        made[-1].publish_through(sent)  # type: ignore[arg-type]
        return made[-1]

    yield another
    for store in made:
        await store.close()


@pytest.fixture
async def store(make: Make) -> SchedulerStore:
    made = make()
    await made.open()
    assert made.ready
    return made

"""A state directory whose embedded database an earlier berth made: the sentence names the directory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.in_process import WorkerEnded
from berth.settings import Settings
from berth.trial import up
from bus.faults import DatabaseForbidden
from bus.persistence.database import Database

pytestmark = pytest.mark.postgres
MIGRATIONS = "placement_worker.store.migrations"


@pytest.fixture
def state() -> Iterator[Path]:
    """A directory that the user of root's embedded PostgreSQL may enter."""
    with tempfile.TemporaryDirectory(prefix="berth-state-", dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


async def test_a_schema_of_yesterday_names_the_state_directory(state: Path) -> None:
    """`berth up` ended with "name an empty database or schema", and its user had named neither."""
    directory = state / "postgres"
    with pytest.raises(DatabaseForbidden, match="set state_dir") as caught:
        async with up.database(Settings(), durable=True, directory=directory) as url:
            made = Database(url, "placement")
            await made.open(MIGRATIONS)
            async with made.raw() as connection:
                await connection.execute("ALTER TABLE identity ADD COLUMN of_yesterday text")
            await made.close()
            again = Database(url, "placement")
            try:
                await again.open(MIGRATIONS)
            except DatabaseForbidden as error:
                raise WorkerEnded("placement1") from error
            finally:
                await again.close()
    assert str(state) in str(caught.value) and caught.value.code == "database.other_schema"


async def test_another_fault_of_a_worker_stays_what_it_is(state: Path) -> None:
    fault = WorkerEnded("placement1")
    with pytest.raises(WorkerEnded) as caught:
        async with up.database(Settings(), durable=True, directory=state / "postgres"):
            raise fault
    assert caught.value is fault

"""A cell's workers have their cell's credentials and no others: its virtual host, its schema."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from berth.trial.embedded.postgres import Postgres
from berth.trial.embedded.rabbitmq import RabbitMQ
from berth.trial.worker_processes import WorkerProcesses

CELL = "west"
USER = "only-west"

pytestmark = [pytest.mark.system, pytest.mark.postgres, pytest.mark.rabbitmq]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


async def test_conductor_and_compute_start_with_their_cells_bus_and_schema_alone(
    own_broker: RabbitMQ, postgres: Postgres, tmp_path: Path
) -> None:
    password = uuid.uuid4().hex
    await asyncio.to_thread(own_broker.add_vhost, CELL)
    await asyncio.to_thread(own_broker.add_user, USER, password, [CELL])
    admin = await asyncpg.connect(postgres.url())
    await admin.execute(f'CREATE ROLE "{USER}" LOGIN; CREATE SCHEMA "cell_{CELL}" AUTHORIZATION "{USER}"')
    await admin.close()
    settings = {
        f"BERTH_CELLS__{CELL.upper()}__URL": own_broker.url(CELL, user=USER, password=password),
        "BERTH_DATABASE__URL": postgres.url().replace("berth@", f"{USER}@"),
        "BERTH_STATE_DIR": str(tmp_path / "state"),
        "BERTH_COMPUTE__HOSTS": "1",
    }
    processes = WorkerProcesses(tmp_path, settings)
    try:
        processes.start("conductor", "conductor", "--cell", CELL)
        processes.start("compute", "compute", "--cell", CELL)
        await processes.ready()
        assert all(worker.process.running for worker in processes.workers.values())
    finally:
        await asyncio.to_thread(processes.stop)

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from berth.config.ports import free_port
from berth.up.worker_processes import NO_TLS
from bus.clock import SystemClock, new_uuid
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from placement_worker.app import build
from placement_worker.config import PlacementConfig
from placement_worker.domain.server_groups import counted_by_class
from placement_worker.operations import audit
from placement_worker.replica.catch_up import LocalReplica
from placement_worker.rest.config import RestConfig
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable
from placement_worker.store.postgres_rows import PostgresPlacementRows
from tests.contract.books import KINDS

START_TIMEOUT_S = 60.0
PATIENCE_S = 60.0
PROJECT = "0b6d1c1e-4f0a-4c8e-9c64-2a4c6a1f6a10"


class Placement:
    """A whole placement worker that serves its REST API, and a client of it.

    database: its URL, or the table of a placement in memory.
    """

    def __init__(
        self, database: str | MemoryPlacementTable, config: RestConfig, *, health_with_rest: bool = False
    ) -> None:
        self.database = database
        url = database if isinstance(database, str) else ""
        self.rng = random.Random(7)
        self.broker = MemoryBroker(SystemClock())
        env = Environment(
            "placement-1",
            transports=lambda _: MemoryTransport(self.broker, "placement-1"),
            database_url=url,
            clock=SystemClock(),
            rng=self.rng,
        )
        self.store: PlacementService = (
            PlacementService(PostgresPlacementRows(env.database("placement")))
            if isinstance(database, str)
            else PlacementService(MemoryPlacementRows(database.session()))
        )
        self.service = build(env, PlacementConfig(rest=config), (), store=self.store, health_with_rest=health_with_rest)
        self._stop = asyncio.Event()
        host, _, port = config.listen.rpartition(":")
        self.base_url = f"http://{host}:{port}"

    async def start(self) -> None:
        self._running = asyncio.create_task(self.service.run(self._stop))
        self.client = httpx.AsyncClient(base_url=self.base_url, timeout=START_TIMEOUT_S, verify=NO_TLS)
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                if self._running.done():
                    await self._running
                try:
                    await self.client.get("/")
                except httpx.TransportError:
                    await asyncio.sleep(0.02)  # until it listens
                else:
                    return

    async def stop(self) -> None:
        await self.client.aclose()
        self._stop.set()
        await self._running

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        version: str = "1.39",
        status: int | None = None,
        **headers: str,
    ) -> httpx.Response:
        """One request as the administrator."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await self.client.request(
            method,
            path,
            json=body,
            headers={"x-auth-token": "admin", "openstack-api-version": f"placement {version}", **named},
        )
        if status is not None:
            assert answer.status_code == status, answer.text
        return answer

    async def host(self, **amounts: int) -> str:
        """A provider with these inventories, at generation 1."""
        uuid = new_uuid(self.rng)
        await self.call("POST", "/resource_providers", {"name": f"host-{uuid}", "uuid": uuid}, status=200)
        body = {
            "resource_provider_generation": 0,
            "inventories": {name: {"total": total} for name, total in amounts.items()},
        }
        await self.call("PUT", f"/resource_providers/{uuid}/inventories", body, status=200)
        return uuid

    async def claim(self, consumer: str, host: str, generation: int | None = None, **amounts: int) -> httpx.Response:
        """PUT /allocations."""
        held = {host: {"resources": amounts}} if amounts else {}
        return await self.call("PUT", f"/allocations/{consumer}", holding(held, generation))

    @property
    def postgres(self) -> PlacementService:
        """The store, of a placement in PostgreSQL."""
        assert isinstance(self.store.rows, PostgresPlacementRows)
        return self.store

    async def findings(self) -> list[str]:
        """The problems of placement."""
        if not isinstance(self.database, str):
            return findings_in_memory(self.database)
        async with self.postgres.rows.database.raw() as connection:
            return await audit.findings(connection)

    async def replica(self) -> LocalReplica:
        """A replica fed by snapshot and feed alone."""
        replica = LocalReplica(self.store)
        await replica.fresh()
        return replica


def findings_in_memory(table: MemoryPlacementTable) -> list[str]:
    """As `audit.findings` has them."""
    used: dict[str, Counter[str]] = {uuid: Counter() for uuid in table.providers}
    projects: dict[str, Counter[str]] = {}
    for row in table.consumers.values():
        for provider, resources in row.consumer.allocations.items():
            used.setdefault(provider, Counter()).update(resources)
        projects.setdefault(row.consumer.project_id, Counter()).update(counted_by_class(row.consumer))
    lines = [f"{uuid}: {p.used} used" for uuid, p in table.providers.items() if p.used != used[uuid]]
    lines += [f"{uuid}: allocations of no provider" for uuid in used.keys() - table.providers.keys()]
    lines += [
        f"{uuid}: a consumer that holds nothing"
        for uuid, row in table.consumers.items()
        if row.released_at is None and not row.consumer.allocations
    ]
    for project in projects.keys() | table.project_usage.keys():
        counted, held = Counter(table.project_usage.get(project, {})), projects.get(project, Counter())
        if +counted != +held:
            lines.append(f"project {project}: {counted} counted, {held} held")
    kept = [change.sequence for change in table.changes]
    if kept != [*range(table.head - len(kept) + 1, table.head + 1)]:
        lines.append(f"feed: {kept} up to {table.head}")
    return lines


def holding(allocations: dict[str, Any], generation: int | None) -> dict[str, Any]:
    return {
        "allocations": allocations,
        "project_id": PROJECT,
        "user_id": PROJECT,
        "consumer_generation": generation,
        "consumer_type": "INSTANCE",
    }


@asynccontextmanager
async def serving(database: str | MemoryPlacementTable, **config: float) -> AsyncIterator[Placement]:
    """A placement worker with these settings of its REST API."""
    made = Placement(database, RestConfig(listen=f"127.0.0.1:{free_port()}", **config))  # type: ignore[arg-type]
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@pytest.fixture(params=KINDS)
async def placement(request: pytest.FixtureRequest) -> AsyncIterator[Placement]:
    """On a placement of each kind: the REST API answers alike on both."""
    database = (
        MemoryPlacementTable(SystemClock()) if request.param == "memory" else request.getfixturevalue("postgres_url")
    )
    async with serving(database) as made:
        yield made


# For tests that look into the database, or whose subject is an operator's tool.
on_postgres = pytest.mark.parametrize("placement", KINDS[1:], indirect=True)

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from berth.embedded.process import free_port
from bus.clock import SystemClock, new_uuid
from bus.memory import MemoryBroker, MemoryTransport
from bus.service.environment import Environment
from placement_worker.app import build
from placement_worker.config import PlacementConfig
from placement_worker.operations import audit
from placement_worker.replica.local import LocalReplica
from placement_worker.rest.config import RestConfig
from placement_worker.store.postgres import PostgresStore

START_TIMEOUT_S = 60.0
PATIENCE_S = 60.0
PROJECT = "0b6d1c1e-4f0a-4c8e-9c64-2a4c6a1f6a10"


class Placement:
    """A whole placement worker that serves its REST API, and a client of it."""

    def __init__(self, url: str, config: RestConfig, *, health_with_rest: bool = False) -> None:
        self.database_url = url
        self.rng = random.Random(7)
        self.broker = MemoryBroker(SystemClock())
        env = Environment(
            "placement-1",
            transports=lambda _: MemoryTransport(self.broker, "placement-1"),
            database_url=url,
            clock=SystemClock(),
            rng=self.rng,
        )
        self.store = PostgresStore(env.database("placement"))
        self.service = build(env, PlacementConfig(rest=config), (), store=self.store, health_with_rest=health_with_rest)
        self._stop = asyncio.Event()
        host, _, port = config.listen.rpartition(":")
        self.base_url = f"http://{host}:{port}"

    async def start(self) -> None:
        self._running = asyncio.create_task(self.service.run(self._stop))
        self.client = httpx.AsyncClient(base_url=self.base_url, timeout=START_TIMEOUT_S)
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

    async def findings(self) -> list[str]:
        """What is wrong with the book."""
        async with self.store.database.raw() as connection:
            return await audit.findings(connection)

    async def replica(self) -> LocalReplica:
        """A replica fed by snapshot and feed alone."""
        replica = LocalReplica(self.store)
        await replica.fresh()
        return replica


def holding(allocations: dict[str, Any], generation: int | None) -> dict[str, Any]:
    return {
        "allocations": allocations,
        "project_id": PROJECT,
        "user_id": PROJECT,
        "consumer_generation": generation,
        "consumer_type": "INSTANCE",
    }


@asynccontextmanager
async def serving(url: str, **config: float) -> AsyncIterator[Placement]:
    """A placement worker with these settings of its REST API."""
    made = Placement(url, RestConfig(listen=f"127.0.0.1:{free_port()}", **config))  # type: ignore[arg-type]
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Until a condition holds, asked again and again: sockets and threads tell nobody."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  (sockets and threads tell nobody)
            await asyncio.sleep(0.01)


@pytest.fixture
async def placement(postgres_url: str) -> AsyncIterator[Placement]:
    async with serving(postgres_url) as made:
        yield made

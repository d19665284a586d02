"""One port for the REST API, health and metrics: `berth run placement --http`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import httpx
import pytest

from berth.trial.embedded.process import free_port
from berth.trial.worker_processes import NO_TLS
from placement_worker.rest.config import RestConfig
from tests.integration.placement_rest.conftest import START_TIMEOUT_S, Placement


@pytest.fixture
async def both(postgres_url: str) -> AsyncIterator[Placement]:
    made = Placement(postgres_url, RestConfig(listen=f"127.0.0.1:{free_port()}"), health_with_rest=True)
    await made.start()
    yield made
    await made.stop()


async def opened(placement: Placement) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        await placement.service.ready.wait()


async def test_health_needs_no_token_and_the_api_at_the_root_path_does(both: Placement) -> None:
    await opened(both)
    answers = {path: await both.client.get(path) for path in ("/healthz", "/readyz?verbose", "/metrics", "/")}
    assert {answer.status_code for answer in answers.values()} == {200}
    assert answers["/readyz?verbose"].json() == {"ready": True, "not_ready": [], "pid": os.getpid()}
    assert "berth_placement_rest" in answers["/metrics"].text
    assert answers["/"].json()["versions"][0]["max_version"] == "1.39"
    assert (await both.client.head("/metrics")).content == b""
    assert (await both.client.post("/healthz")).status_code == 405
    assert (await both.client.get("/resource_providers")).status_code == 401
    host = await both.host(VCPU=4)
    assert (await both.call("GET", f"/resource_providers/{host}")).json()["uuid"] == host
    assert (await both.call("GET", "/healthz/more")).status_code == 404


async def test_before_the_book_is_there_health_answers_and_the_api_answers_503() -> None:
    nowhere = f"postgresql://127.0.0.1:{free_port()}/none"
    waiting = Placement(nowhere, RestConfig(listen=f"127.0.0.1:{free_port()}"), health_with_rest=True)
    await waiting.start()
    assert (await waiting.client.get("/healthz")).json() == {"alive": True}
    ready = await waiting.client.get("/readyz")
    assert ready.status_code == 503 and "database" in ready.json()["not_ready"]
    for path in ("/", "/resource_providers"):
        answer = await waiting.call("GET", path, status=503)
        assert answer.json()["errors"][0]["status"] == 503 and answer.headers["retry-after"] == "1"
    await waiting.stop()
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient(verify=NO_TLS, timeout=START_TIMEOUT_S) as client:
            await client.get(waiting.base_url)


async def test_without_health_the_port_is_the_apis_alone(placement: Placement) -> None:
    assert (await placement.call("GET", "/healthz")).status_code == 404

"""Long work on a client's body or request leaves the event loop: others are answered meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from bus.clock import new_uuid
from placement_worker import metrics
from placement_worker.rest import api, bodies, providers
from tests.integration.placement_rest.conftest import PATIENCE_S, Placement, serving, until

pytestmark = pytest.mark.postgres

ADMIN = {"x-auth-token": "admin", "openstack-api-version": "placement 1.39", "content-type": "application/json"}


class Gate:
    """Stands before a function: who comes through on the event loop's thread is a fault, others wait until it opens."""

    def __init__(self, behind: Callable[..., Any]) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self._behind = behind
        self._loop = threading.current_thread()

    def __call__(self, *arguments: Any) -> Any:
        assert threading.current_thread() is not self._loop, "on the event loop"
        self.reached.set()
        assert self.open.wait(PATIENCE_S)
        return self._behind(*arguments)


async def answered_beside(placement: Placement, gate: Gate, long: asyncio.Task[Any]) -> None:
    """A host can be made and searched for while the long request stands at the gate."""
    try:
        await until(lambda: gate.reached.is_set() or long.done())
        assert not long.done(), long.result().text
        host = await placement.host(VCPU=4)
        answer = await placement.call("GET", "/allocation_candidates?resources=VCPU:4", status=200)
        assert host in answer.json()["provider_summaries"]
        assert not long.done()
    finally:
        gate.open.set()


async def test_what_is_wrong_with_a_long_body_is_found_off_the_event_loop(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(postgres_url) as placement:
        host = await placement.host(MEMORY_MB=4)
        wrong = json.dumps([*({} for _ in range(api.EXPLAINED_AT_ONCE))])
        gate = Gate(bodies._check_depth)
        before = metrics.OFFLOADED.labels("text")._value.get()
        put = placement.client.put(f"/resource_providers/{host}/aggregates", content=wrong, headers=ADMIN)
        long = asyncio.create_task(put)
        with monkeypatch.context() as patch:
            patch.setattr(bodies, "_check_depth", gate)
            await answered_beside(placement, gate, long)
            answer = await long
        assert answer.status_code == 400
        assert "is not of type" in answer.text
        assert metrics.OFFLOADED.labels("text")._value.get() == before + 1


async def test_others_are_answered_while_a_long_list_of_providers_is_written(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(postgres_url) as placement:
        hosts = [await placement.host(MEMORY_MB=8) for _ in range(4)]
        path = "/resource_providers?resources=MEMORY_MB:8"
        at_once = await placement.call("GET", path, status=200)
        turns: list[int] = []
        count = itertools.count()
        shown = providers.shown

        def counted(*arguments: Any) -> Any:
            turns.append(passed)
            return shown(*arguments)

        async def others() -> None:
            nonlocal passed
            while True:
                passed = next(count)
                await asyncio.sleep(0)

        passed = 0
        monkeypatch.setattr(api, "LISTED_AT_ONCE", 1)
        monkeypatch.setattr(providers, "shown", counted)
        beside = asyncio.create_task(others())
        listed = await placement.call("GET", path, status=200)
        beside.cancel()
        assert listed.json() == at_once.json()
        assert [row["uuid"] for row in listed.json()["resource_providers"]] == hosts
        assert len(set(turns)) == len(hosts), turns


async def test_a_body_of_more_than_a_megabyte_is_413(postgres_url: str) -> None:
    async with serving(postgres_url) as placement:
        path = f"/resource_providers/{new_uuid(placement.rng)}/aggregates"
        for size, status in ((2**20, 404), (2**20 + 1, 413)):
            content = b'["' + b"x" * (size - 4) + b'"]'
            answer = await placement.client.put(path, content=content, headers=ADMIN)
            assert answer.status_code == status
        assert "At most 1048576 bytes of body are taken (max_body_bytes)." in answer.text


async def test_words_about_a_long_body_are_short(postgres_url: str) -> None:
    async with serving(postgres_url) as placement:
        content = json.dumps({"name": "x" * 500_000})
        answer = await placement.client.post("/resource_providers", content=content, headers=ADMIN)
        assert answer.status_code == 400
        assert len(answer.json()["errors"][0]["detail"]) <= 8192

"""Large writes are locked and written in parts, and decided in a thread: they end as those in one statement do."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from bus.clock import SystemClock, new_uuid
from placement_worker import offload
from placement_worker.rest import api, groups
from placement_worker.store import claims
from placement_worker.store.memory_table import MemoryBookTable
from tests.integration.placement_rest.conftest import Placement, holding, serving

pytestmark = pytest.mark.postgres

ROUNDS = 16


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write is a large one."""
    monkeypatch.setattr(offload, "ROWS_AT_ONCE", 0)
    monkeypatch.setattr(api, "DECODED_AT_ONCE", 0)
    monkeypatch.setattr(groups, "MAX_ENTRIES", 2)
    monkeypatch.setattr(claims, "MAX_ROWS", 3)
    monkeypatch.setattr(claims, "MAX_CONSUMERS", 2)


class Caller:
    """Sends the same random requests to every placement, and compares their answers."""

    def __init__(self, placements: list[Placement]) -> None:
        self.rng = random.Random(4)
        self.placements = placements
        self.hosts = [new_uuid(self.rng) for _ in range(5)]
        self.consumers = [new_uuid(self.rng) for _ in range(7)]

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        answers = []
        for placement in self.placements:
            answer = await placement.call(method, path, body, x_roles="admin,service")
            answers.append((answer.status_code, {} if not answer.content else without_ids(answer.json())))
        assert all(one == other for one, other in pairwise(answers)), (method, path, body, answers)
        return answers[0]

    async def make_hosts(self) -> None:
        for host in self.hosts:
            await self.call("POST", "/resource_providers", {"name": f"host-{host}", "uuid": host})
            amounts = {"VCPU": {"total": 9}, "DISK_GB": {"total": 9}}
            body = {"resource_provider_generation": 0, "inventories": amounts}
            await self.call("PUT", f"/resource_providers/{host}/inventories", body)

    async def generation(self, consumer: str) -> int | None:
        found: int | None = (await self.call("GET", f"/allocations/{consumer}"))[1].get("consumer_generation")
        return found

    async def written(self) -> dict[str, Any]:
        """Allocations for some consumers, of which a few fit nowhere or name what is not known."""
        body = {}
        for consumer in self.rng.sample(self.consumers, self.rng.randint(1, 6)):
            held = {}
            for host in self.rng.sample(self.hosts, self.rng.randint(0, 4)):
                names = self.rng.sample(["VCPU", "DISK_GB"], self.rng.randint(1, 2))
                held[host] = {"resources": {name: self.rng.choice((1, 1, 1, 2, 5)) for name in names}}
            generation = await self.generation(consumer)
            body[consumer] = holding(held, generation if self.rng.random() < 0.95 else 77)
        if self.rng.random() < 0.1:
            body[self.consumers[0]] = holding({new_uuid(self.rng): {"resources": {"VCPU": 1}}}, None)
        return body

    async def reshaped(self) -> dict[str, Any]:
        """New inventories of some hosts, and the allocations of all consumers as they are."""
        inventories, allocations = {}, {}
        for host in self.rng.sample(self.hosts, 3):
            _, shown = await self.call("GET", f"/resource_providers/{host}/inventories")
            for each in shown["inventories"].values():
                each["total"] += self.rng.choice((-3, 0, 4))
            inventories[host] = shown
        for consumer in self.consumers:
            _, shown = await self.call("GET", f"/allocations/{consumer}")
            if shown["allocations"]:
                allocations[consumer] = shown
        return {"inventories": inventories, "allocations": allocations}


def without_ids(answer: dict[str, Any]) -> Any:
    for error in answer.get("errors", ()):
        error.pop("request_id")
    return json.loads(json.dumps(answer, sort_keys=True))


async def test_item_16_writes_in_parts_end_as_writes_in_one(in_parts: None, postgres_url: str) -> None:
    async with serving(postgres_url) as parts, serving(MemoryBookTable(SystemClock())) as whole:
        caller = Caller([parts, whole])
        await caller.make_hosts()
        statuses = []
        for _ in range(ROUNDS):
            kind = caller.rng.choice(("POST", "POST", "POST", "PUT", "DELETE", "reshape"))
            if kind == "reshape":
                statuses.append(await caller.call("POST", "/reshaper", await caller.reshaped()))
            elif kind == "POST":
                statuses.append(await caller.call("POST", "/allocations", await caller.written()))
            else:
                consumer, body = next(iter((await caller.written()).items()))
                statuses.append(await caller.call(kind, f"/allocations/{consumer}", body if kind == "PUT" else None))
            for host in caller.hosts:
                await caller.call("GET", f"/resource_providers/{host}/usages")
        found = {status for status, _ in statuses}
        assert {204, 409} <= found <= {204, 400, 404, 409}, statuses
        assert await parts.findings() == [] == await whole.findings()

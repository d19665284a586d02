"""Writes end the same in PostgreSQL and in memory; a body that names more than the bound is refused."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from bus.clock import SystemClock, new_uuid
from placement_worker.rest.groups import MAX_ENTRIES
from placement_worker.store.memory_table import MemoryBookTable
from tests.integration.placement_rest.conftest import Placement, holding, serving

pytestmark = pytest.mark.postgres

ROUNDS = 16


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


async def test_writes_end_the_same_on_both_adapters(postgres_url: str) -> None:
    async with serving(postgres_url) as database, serving(MemoryBookTable(SystemClock())) as memory:
        caller = Caller([database, memory])
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
        assert await database.findings() == [] == await memory.findings()


def too_many(of: list[str]) -> dict[str, tuple[str, str, Any]]:
    """Requests (method, path, body) with one entry more than the bound, each kind of body that may have many."""
    rng = random.Random(5)
    provider, consumer = f"/resource_providers/{of[0]}", new_uuid(rng)
    more = range(MAX_ENTRIES + 1)
    offered = {"resource_provider_generation": 0, "inventories": {"VCPU": {"total": 1}}}
    one = holding({of[0]: {"resources": {"VCPU": 1}}}, None)  # three entries
    uuids = [new_uuid(rng) for _ in more]
    classes = {f"CUSTOM_{number}": {"total": 1} for number in more}
    resources = {f"CUSTOM_{number}": 1 for number in range(MAX_ENTRIES - 1)}
    return {
        "aggregates": ("PUT", f"{provider}/aggregates", {"aggregates": uuids, "resource_provider_generation": 0}),
        "traits": (
            "PUT",
            f"{provider}/traits",
            {"traits": [f"CUSTOM_{number}" for number in more], "resource_provider_generation": 0},
        ),
        "inventories": ("PUT", f"{provider}/inventories", {**offered, "inventories": classes}),
        "classes": ("PUT", f"/allocations/{consumer}", holding({of[0]: {"resources": resources}}, None)),
        "consumers": ("POST", "/allocations", dict.fromkeys(uuids[: MAX_ENTRIES // 3 + 1], one)),
        "reshape": (
            "POST",
            "/reshaper",
            {"inventories": dict.fromkeys(uuids[: MAX_ENTRIES // 2], offered), "allocations": {consumer: one}},
        ),
    }


async def test_a_body_with_more_entries_than_the_bound_is_413(postgres_url: str) -> None:
    async with serving(postgres_url) as placement:
        caller = Caller([placement])
        await caller.make_hosts()
        for name, (method, path, body) in too_many(caller.hosts).items():
            status, answer = await caller.call(method, path, body)
            assert status == 413, (name, answer)
        aggregates = {"aggregates": [new_uuid(caller.rng) for _ in range(MAX_ENTRIES)]}
        path = f"/resource_providers/{caller.hosts[0]}/aggregates"
        assert (await caller.call("PUT", path, {**aggregates, "resource_provider_generation": 1}))[0] == 200

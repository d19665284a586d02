"""The cost of large requests: turns of the event loop, and the same end on both adapters."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from bus.clock import SystemClock, new_uuid
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from placement_worker.rest.write_batcher import MAX_ENTRIES
from placement_worker.store.memory_table import MemoryPlacementTable
from tests.integration.placement_rest.conftest import Placement, holding, serving

pytestmark = pytest.mark.postgres

# --- the cost of the longest turn of the event loop in function calls, which no other program on the machine can
# change
# A turn is one step of one task, from one wait to the next: nothing else of the process runs meanwhile, but the
# garbage collector. A collection can come in any turn and calls the finalizers of whatever became garbage since the
# last one, by the hundred of each earlier test of the process; so there is none while turns are counted.

PROVIDERS = 3_000
REPORTED_AT_ONCE = 250
AMOUNTS = {"VCPU": 1, "MEMORY_MB": 1}
HEADERS = {
    "x-auth-token": "admin",
    "x-roles": "admin,service",
    "openstack-api-version": "placement 1.39",
    "content-type": "application/json",
}
# What it takes to decide about as many entries as one body may have, and a tenth more: 3 to 5 ms.
MOST_CALLS = 80_000


class Turns:
    """Counts calls of Python and C functions on the loop's thread, and keeps the most of one turn."""

    def __init__(self) -> None:
        self.most = 0
        self._count = 0

    def __call__(self, _frame: FrameType, event: str, _argument: object) -> None:
        self._count += event in {"call", "c_call"}

    @contextmanager
    def counted(self) -> Iterator[None]:
        run = asyncio.Handle._run

        def turn(handle: asyncio.Handle) -> None:
            before = self._count
            run(handle)
            self.most = max(self.most, self._count - before)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.Handle, "_run", turn)
            gc.disable()
            sys.setprofile(self)
            try:
                yield
            finally:
                sys.setprofile(None)
                gc.enable()


async def filled(placement: Placement) -> list[str]:
    """The uuids of so many providers, reported as compute services do."""
    uuids = [new_uuid(placement.rng) for _ in range(PROVIDERS)]
    inventories = {name: Inventory(total=1_000, max_unit=1_000) for name in AMOUNTS}
    reports = [
        InventoryUpdate(
            reporter="reporter",
            version=1,
            root_uuid=uuid,
            providers=(ProviderReport(uuid=uuid, name=uuid, inventories=inventories),),
        )
        for uuid in uuids
    ]
    for first in range(0, PROVIDERS, REPORTED_AT_ONCE):
        await placement.store.apply_reports(reports[first : first + REPORTED_AT_ONCE])
    return uuids


def largest(uuids: list[str], rng: random.Random) -> dict[str, tuple[str, str, object, int]]:
    """Requests (method, path, body) about as many providers as they may name, and the status of each; and some with
    bodies of a megabyte that name more.
    """
    held, other = new_uuid(rng), new_uuid(rng)
    provider = f"/resource_providers/{uuids[0]}"
    one_each = {uuid: {"resources": {"VCPU": 1}} for uuid in uuids[: (MAX_ENTRIES - 1) // 2]}
    two_each = {uuid: {"resources": AMOUNTS} for uuid in uuids[: (MAX_ENTRIES - 1) // 3]}
    few_each = {uuid: {"resources": {"VCPU": 1}} for uuid in uuids[: MAX_ENTRIES // 10 - 1]}
    inventories = {name: {"total": 2_000, "max_unit": 1_000} for name in AMOUNTS}
    reshaped_uuids = uuids[: MAX_ENTRIES // 4]
    moved = {uuid: {"resources": {"VCPU": 1}} for uuid in reshaped_uuids[: MAX_ENTRIES // 8 - 1]}

    def aggregates(generation: int, count: int = MAX_ENTRIES) -> dict[str, object]:
        return {"aggregates": [new_uuid(rng) for _ in range(count)], "resource_provider_generation": generation}

    def reshaped(uuid: str) -> dict[str, object]:
        # one for its report, and one for each write of allocations or aggregates
        generation = 1 + 2 * (uuid in two_each) + 2 * (uuid in one_each) - 2 + (uuid in few_each) + 1
        generation += 3 * (uuid == uuids[0])
        return {"resource_provider_generation": generation, "inventories": inventories}

    return {
        "list": ("GET", "/resource_providers", None, 200),
        "search": ("GET", "/allocation_candidates?resources=VCPU:1", None, 200),
        "aggregates": ("PUT", f"{provider}/aggregates", aggregates(1), 200),
        "other aggregates": ("PUT", f"{provider}/aggregates", aggregates(2), 200),
        "no aggregates": ("PUT", f"{provider}/aggregates", aggregates(3, 0), 200),
        "more aggregates": ("PUT", f"{provider}/aggregates", aggregates(4, 25_000), 413),
        "unknown traits": (
            "PUT",
            f"{provider}/traits",
            {"traits": [f"A{number}" for number in range(MAX_ENTRIES)], "resource_provider_generation": 4},
            400,
        ),
        "more traits": (
            "PUT",
            f"{provider}/traits",
            {"traits": [f"A{number}" for number in range(90_000)], "resource_provider_generation": 4},
            413,
        ),
        "unknown inventories": (
            "PUT",
            f"{provider}/inventories",
            {"inventories": {f"A{n}": {"total": 1} for n in range(MAX_ENTRIES)}, "resource_provider_generation": 4},
            400,
        ),
        "allocations": ("PUT", f"/allocations/{held}", holding(two_each, None), 204),
        "shown": ("GET", f"/allocations/{held}", None, 200),
        "replaced": ("PUT", f"/allocations/{held}", holding(one_each, 1), 204),
        "deleted": ("DELETE", f"/allocations/{held}", None, 204),
        "unknown classes": (
            "PUT",
            f"/allocations/{held}",
            holding({uuids[0]: {"resources": {f"A{number}": 1 for number in range(MAX_ENTRIES - 2)}}}, None),
            400,
        ),
        "more classes": (
            "PUT",
            f"/allocations/{held}",
            holding({uuids[0]: {"resources": {f"A{number}": 1 for number in range(80_000)}}}, None),
            413,
        ),
        "many": ("POST", "/allocations", {new_uuid(rng): holding(few_each, None) for _ in range(5)}, 204),
        "consumers": (
            "POST",
            "/allocations",
            {new_uuid(rng): holding({uuid: {"resources": {"VCPU": 1}}}, None) for uuid in uuids[: MAX_ENTRIES // 3]},
            204,
        ),
        "more consumers": (
            "POST",
            "/allocations",
            {new_uuid(rng): holding({uuid: {"resources": {"VCPU": 1}}}, None) for uuid in uuids},
            413,
        ),
        "reshape": (
            "POST",
            "/reshaper",
            {
                "inventories": {uuid: reshaped(uuid) for uuid in reshaped_uuids},
                "allocations": {other: holding(moved, None)},
            },
            204,
        ),
    }


async def test_item_16_no_turn_of_the_largest_requests_takes_many_calls(postgres_url: str) -> None:
    async with serving(postgres_url) as placement:
        uuids = await filled(placement)
        found: dict[str, int] = {}
        for name, (method, path, body, status) in largest(uuids, placement.rng).items():
            content, turns = None if body is None else json.dumps(body, separators=(",", ":")), Turns()
            with turns.counted():
                answer = await placement.client.request(method, path, content=content, headers=HEADERS)
            assert answer.status_code == status, (name, answer.text[:1_000])
            found[name] = turns.most
        assert {name: calls for name, calls in found.items() if calls > MOST_CALLS} == {}, found
        assert await placement.findings() == []


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


async def test_item_16_a_turn_is_counted_without_finalizers_of_other_garbage() -> None:
    finalized: list[object] = []

    def finalize(gone: object) -> None:
        finalized.append(gone)

    kept = [weakref.ref(Cycle(), finalize) for _ in range(1_000)]
    turns = Turns()
    with turns.counted():
        await asyncio.sleep(0)
        held = [[number] for number in range(3 * gc.get_threshold()[0])]  # Python would collect garbage twice meanwhile
        await asyncio.sleep(0)
        assert (len(held), finalized) == (3 * gc.get_threshold()[0], [])
    assert 0 < turns.most < 100
    gc.collect()
    assert len(finalized) == len(kept)


# --- writes end the same in PostgreSQL and in memory; a body that names more than the bound is refused

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
    async with serving(postgres_url) as database, serving(MemoryPlacementTable(SystemClock())) as memory:
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

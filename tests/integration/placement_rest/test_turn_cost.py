"""The cost of the longest turn of the event loop in function calls, which no other program on the machine can change.

A turn is one step of one task, from one wait to the next: nothing else of the process runs meanwhile, but the garbage
collector. A collection can come in any turn and calls the finalizers of whatever became garbage since the last one, by
the hundred of each earlier test of the process; so there is none while turns are counted.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from bus.clock import new_uuid
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from placement_worker.rest.groups import MAX_ENTRIES
from tests.integration.placement_rest.conftest import Placement, holding, serving

pytestmark = pytest.mark.postgres

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
            source="reporter",
            version=1,
            root_uuid=uuid,
            providers=(ProviderReport(uuid=uuid, name=uuid, inventories=inventories),),
        )
        for uuid in uuids
    ]
    for first in range(0, PROVIDERS, REPORTED_AT_ONCE):
        await placement.store.report(reports[first : first + REPORTED_AT_ONCE])
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

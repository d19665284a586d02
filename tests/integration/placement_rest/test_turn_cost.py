"""The cost of the longest turn of the event loop in function calls, which no other program on the machine can change.

A turn is one step of one task, from one wait to the next: nothing else of the process runs meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from bus.bus import API, Bus
from bus.clock import SystemClock, new_uuid
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from bus.memory import MemoryTransport
from tests.integration.placement_rest.conftest import PATIENCE_S, Placement, holding, serving

pytestmark = pytest.mark.postgres

PROVIDERS = 3_000
AMOUNTS = {"VCPU": 1, "MEMORY_MB": 1}
HEADERS = {"x-auth-token": "admin", "openstack-api-version": "placement 1.39", "content-type": "application/json"}
# As it is, and a quarter more. The largest legal bodies take the longest turns: docs/lab/harm-clause-by-clause.md.
MOST_CALLS = {"list": 9_000, "search": 24_000, "aggregates": 2_000, "allocations": 175_000, "many": 675_000}


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
            sys.setprofile(self)
            try:
                yield
            finally:
                sys.setprofile(None)


async def filled(placement: Placement) -> list[str]:
    """The uuids of so many providers, reported as compute services do."""
    transport = MemoryTransport(placement.broker, "reporter")
    bus = Bus(API, transport, process="reporter", clock=SystemClock(), rng=random.Random(2))
    await bus.open()
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
    await bus.publish_all([(report, "") for report in reports])
    async with asyncio.timeout(PATIENCE_S):
        while len((await placement.call("GET", "/resource_providers")).json()["resource_providers"]) < PROVIDERS:
            pass  # each look takes a while, and the reports are applied meanwhile
    await bus.close()
    return uuids


async def test_the_longest_turn_of_large_requests_takes_so_many_calls(postgres_url: str) -> None:
    async with serving(postgres_url) as placement:
        uuids, rng = await filled(placement), placement.rng
        aggregates = {"aggregates": [new_uuid(rng) for _ in range(26_000)], "resource_provider_generation": 1}
        one_each = {uuid: {"resources": {"VCPU": 1}} for uuid in uuids}
        requests = {
            "list": ("GET", "/resource_providers", None),
            "search": ("GET", "/allocation_candidates?resources=VCPU:1", None),
            "aggregates": ("PUT", f"/resource_providers/{uuids[0]}/aggregates", aggregates),
            "allocations": (
                "PUT",
                f"/allocations/{new_uuid(rng)}",
                holding({uuid: {"resources": AMOUNTS} for uuid in uuids}, None),
            ),
            "many": ("POST", "/allocations", {new_uuid(rng): holding(one_each, None) for _ in range(5)}),
        }
        found: dict[str, int] = {}
        for name, (method, path, body) in requests.items():
            content, turns = None if body is None else json.dumps(body), Turns()
            with turns.counted():
                answer = await placement.client.request(method, path, content=content, headers=HEADERS)
            assert answer.is_success, answer.text
            found[name] = turns.most
        assert {name: calls for name, calls in found.items() if calls > MOST_CALLS[name]} == {}, found

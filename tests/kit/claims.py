"""Placement as the scheduler calls it, without a bus: the memory book behind the scheduler's port for claims;
and amounts beside random inventories, for the rule of units.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from bus.clock import SystemClock
from bus.contracts.base import Refusal
from bus.contracts.placement import (
    Claim,
    ClaimAll,
    ClaimAllResult,
    ClaimResult,
    LocatePage,
    LocateRequest,
)
from bus.contracts.placement_queries import ConsumerRecord, ProjectUsagePage, ProjectUsageQuery
from bus.faults import Fault, RequestRefused, RequestTimeout
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable

Answer = Callable[[Claim], ClaimResult | Refusal | None]


class PlacementClaims:
    """A ClaimPort on a memory book. It passes tests/contract/placement_worker/test_claim_port.py.

    held: what `holding` answers instead of placement.
    answer: a script that answers claims instead of placement (None: no answer). unavailable: nothing is answered.
    refused: the code with which every read is refused for good ("": none is).
    """

    def __init__(self, book: PlacementService | None = None) -> None:
        self.placement = book or PlacementService(MemoryPlacementRows(MemoryPlacementTable(SystemClock()).session()))
        self.submitted: list[Claim] = []
        self.located: list[LocateRequest] = []
        self.asked: list[str] = []
        self.held: dict[str, ConsumerRecord] = {}
        self.answer: Answer | None = None
        self.unavailable = False
        self.refused = ""

    async def submit(self, claims: Sequence[Claim]) -> list[ClaimResult | Fault]:
        self.submitted += claims
        if self.unavailable:
            return [RequestTimeout("unavailable") for _ in claims]
        if self.answer is not None:
            return [_answered(self.answer(claim)) for claim in claims]
        replies = await self.placement.apply(list(claims))
        return [reply for reply in replies if isinstance(reply, ClaimResult)]

    async def submit_gangs(self, gangs: Sequence[ClaimAll]) -> list[ClaimAllResult | Fault]:
        self.submitted += (claim for gang in gangs for claim in gang.claims)
        if self.unavailable:
            return [RequestTimeout("unavailable") for _ in gangs]
        replies = await self.placement.apply(list(gangs))
        return [reply for reply in replies if isinstance(reply, ClaimAllResult)]

    async def locate(self, requests: Sequence[LocateRequest]) -> list[LocatePage | Fault]:
        self.located += requests
        if (fault := self._fault()) is not None:
            return [fault for _ in requests]
        return list(await self.placement.reads.locate(requests))

    async def allocations(self, consumers: Sequence[str]) -> list[ConsumerRecord | Fault | None]:
        self.asked += consumers
        if (fault := self._fault()) is not None:
            return [fault for _ in consumers]
        held = {one.consumer: one for one in await self.placement.reads.allocations(consumers)} | self.held
        return [held.get(uuid) for uuid in consumers]

    async def usage(self, projects: Sequence[str]) -> ProjectUsagePage | Fault:
        if (fault := self._fault()) is not None:
            return fault
        return await self.placement.reads.usage(ProjectUsageQuery(projects=tuple(projects)))

    def _fault(self) -> Fault | None:
        """Why no read is answered."""
        if self.unavailable:
            return RequestTimeout("unavailable")
        return RequestRefused("refused", code=self.refused) if self.refused else None


def _answered(reply: ClaimResult | Refusal | None) -> ClaimResult | Fault:
    if reply is None:
        return RequestTimeout("no answer")
    return RequestRefused(reply.reason, code=reply.code) if isinstance(reply, Refusal) else reply


def amounts_and_units(number: int, seed: int = 1) -> list[tuple[int, int, int, int]]:
    """Rows of (amount, min_unit, max_unit, step_size), many at the edges of what is allowed."""
    rng = random.Random(f"units {seed}")
    rows = []
    for _ in range(number):
        low, step = rng.choice((1, 2, 7, rng.randint(1, 500))), rng.choice((1, 2, 3, rng.randint(1, 400)))
        high = rng.choice((low, low + step, rng.randint(1, 2000), 2**31 - 1))
        near = rng.choice((low, high, step, step * rng.randint(1, 9), rng.randint(1, 2000)))
        rows.append((max(1, near + rng.choice((-1, 0, 0, 1))), low, high, step))
    return rows

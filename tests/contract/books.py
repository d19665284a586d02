"""Placement in memory and in PostgreSQL, for the suites that both pass."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bus.clock import Clock, SystemClock
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimResult,
    GroupPolicy,
    Inventory,
    InventoryUpdate,
    Migration,
    ProviderReport,
    Revert,
    RevertResult,
    ServerGroup,
)
from bus.persistence.database import Database
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable
from placement_worker.store.postgres_rows import PostgresPlacementRows

KINDS = ["memory", pytest.param("postgres", marks=pytest.mark.postgres)]
HOSTS = [f"{n}0000000-0000-4000-8000-000000000000" for n in range(1, 6)]
VMS = [f"c00000{n:02d}-0000-4000-8000-000000000000" for n in range(40)]

POOL = "90000000-0000-4000-8000-000000000000"
MOVE = "d0000000-0000-4000-8000-000000000000"
CHILDREN = ("91000000-0000-4000-8000-000000000000", "92000000-0000-4000-8000-000000000000")
OTHER_MOVE = "d0000001-0000-4000-8000-000000000000"
GROUP = "e0000000-0000-4000-8000-000000000000"
APART = ServerGroup(uuid=GROUP, policy=GroupPolicy.ANTI_AFFINITY)
TOGETHER = ServerGroup(uuid=GROUP, policy=GroupPolicy.AFFINITY)
Amounts = dict[str, dict[str, int]]


class Placements:
    """Called, it makes another store on the same book, as another process has it."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.made: list[PlacementService] = []
        self._url = url
        self._table = MemoryPlacementTable(clock)

    def __call__(self) -> PlacementService:
        url, table = self._url, self._table
        self.made.append(
            PlacementService(PostgresPlacementRows(Database(url, "placement")), table.clock)
            if url
            else PlacementService(MemoryPlacementRows(table.session()), table.clock)
        )
        return self.made[-1]


@asynccontextmanager
async def books(request: pytest.FixtureRequest, clock: Clock | None = None) -> AsyncIterator[Placements]:
    """A book of the kind that the fixture's parameter names; what is made on it is closed at the end."""
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""
    found = Placements(url, clock or SystemClock())
    yield found
    for store in found.made:
        await store.close()


def roomy_host(uuid: str) -> InventoryUpdate:
    """A host with plenty of room."""
    inventory = {name: Inventory(total=100) for name in ("VCPU", "DISK_GB")}
    root = ProviderReport(uuid=uuid, name=f"host-{uuid[0]}", inventories=inventory)
    return InventoryUpdate(reporter="s", version=1, root_uuid=uuid, providers=(root,))


# --- claims, moves and reverts of one project


def option(at: int, vcpu: int = 4, disk: int = 0) -> ClaimOption:
    allocations: Amounts = {HOSTS[at]: {"VCPU": vcpu}}
    return ClaimOption(allocations=allocations | ({POOL: {"DISK_GB": disk}} if disk else {}), host=HOSTS[at])


def build(vm: int, at: int, vcpu: int = 4, disk: int = 0, **fields: object) -> Claim:
    return Claim(consumer=VMS[vm], options=(option(at, vcpu, disk),), project_id="p", **fields)  # type: ignore[arg-type]


def move(
    *options: ClaimOption,
    source: ClaimOption,
    attempt: int = 2,
    generation: int | None = 1,
    again: bool = False,
    migration: str = MOVE,
    vm: int = 0,
    **fields: object,
) -> Claim:
    """The claim of a move; again: of its alternates, after an attempt has failed."""
    return Claim(
        consumer=VMS[vm],
        attempt=attempt,
        consumer_generation=generation,
        release_first=again,
        options=options,
        project_id="p",
        migration=Migration(uuid=migration, source=source.allocations),
        **fields,  # type: ignore[arg-type]
    )


def revert(source: ClaimOption, attempt: int) -> Revert:
    return Revert(
        consumer=VMS[0],
        migration=Migration(uuid=MOVE, source=source.allocations),
        source_attempt=1,
        attempt=attempt,
    )


async def claimed(store: PlacementService, *claims: Claim) -> list[ClaimResult]:
    replies = await store.apply(claims)
    return [reply for reply in replies if isinstance(reply, ClaimResult)]


async def reverted(store: PlacementService, requested: Revert) -> RevertResult:
    (reply,) = await store.apply([requested])
    assert isinstance(reply, RevertResult)
    return reply


async def used(store: PlacementService) -> Amounts:
    page = await store.snapshot(None, 100)
    return {state.uuid: dict(state.used) for state in page.providers if state.used}


def at(host: int, vcpu: int) -> Amounts:
    return {HOSTS[host]: {"VCPU": vcpu}}

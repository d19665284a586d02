"""What a move that awaits its confirm holds counts for a quota; so a revert needs no more of it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from bus.clock import SystemClock
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimResult,
    Inventory,
    InventoryUpdate,
    Migration,
    ProviderReport,
    Release,
    Revert,
    RevertResult,
)
from bus.contracts.placement_queries import ProjectUsageQuery
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable

HOSTS = [f"{n}0000000-0000-4000-8000-000000000000" for n in (1, 2)]
VMS = [f"c00000{n:02d}-0000-4000-8000-000000000000" for n in range(20)]
MOVES = [f"d00000{n:02d}-0000-4000-8000-000000000000" for n in range(20)]


class Project:
    """The instances of one project in a placement of two large hosts. where: {instance: (host, VCPU, attempt)}."""

    def __init__(self, quota: int) -> None:
        self.service = PlacementService(MemoryPlacementRows(MemoryPlacementTable(SystemClock()).session()))
        self.limits = {"VCPU": quota}
        self.where: dict[int, tuple[int, int, int]] = {}
        self.sources: dict[int, tuple[int, int, int]] = {}
        self.generations: dict[int, int | None] = {}

    async def open(self) -> None:
        for at, host in enumerate(HOSTS):
            report = ProviderReport(uuid=host, name=f"h{at}", inventories={"VCPU": Inventory(total=1000)})
            await self.service.apply_reports(
                [InventoryUpdate(reporter=f"s{at}", version=1, root_uuid=host, providers=(report,))]
            )

    async def claim(self, vm: int, host: int, vcpus: int, migration: Migration | None = None) -> bool:
        attempt = self.where[vm][2] + 1 if vm in self.where else 1
        claim = Claim(
            consumer=VMS[vm],
            attempt=attempt,
            consumer_generation=self.generations.get(vm),
            options=(ClaimOption(allocations={HOSTS[host]: {"VCPU": vcpus}}),),
            project_id="p",
            user_id="u",
            limits=self.limits,
            migration=migration,
        )
        (claimed,) = await self.service.apply([claim])
        assert isinstance(claimed, ClaimResult) and claimed.outcome in ("claimed", "over_quota"), claimed
        if claimed.outcome == "claimed":
            self.generations[vm] = claimed.consumer_generation
            self.where[vm] = host, vcpus, attempt
        return claimed.outcome == "claimed"

    async def resize(self, vm: int, vcpus: int) -> bool:
        host, had, attempt = self.where[vm]
        source = Migration(uuid=MOVES[vm], source={HOSTS[host]: {"VCPU": had}})
        resized = await self.claim(vm, 1 - host, vcpus, source)
        if resized:
            self.sources[vm] = host, had, attempt
        return resized

    async def confirm(self, vm: int) -> None:
        del self.sources[vm]
        await self.service.apply([Release(consumer=MOVES[vm], of_migration=True)])

    async def revert(self, *vms: int) -> None:
        reverts = []
        for vm in vms:
            (host, vcpus, source_attempt), attempt = self.sources.pop(vm), self.where[vm][2] + 1
            migration = Migration(uuid=MOVES[vm], source={HOSTS[host]: {"VCPU": vcpus}})
            self.where[vm] = host, vcpus, attempt
            reverts.append(
                Revert(consumer=VMS[vm], migration=migration, source_attempt=source_attempt, attempt=attempt)
            )
        for vm, one in zip(vms, await self.service.apply(reverts), strict=True):
            assert isinstance(one, RevertResult) and one.outcome == "reverted"
            self.generations[vm] = one.consumer_generation

    async def used(self) -> int:
        """The project's usage, which is all that its instances and their migrations hold."""
        usage = (await self.service.reads.usage(ProjectUsageQuery(projects=("p",)))).usage.get("p", {})
        held = Counter[str]()
        for one in await self.service.reads.allocations([*VMS, *MOVES]):
            for amounts in one.allocations.values():
                held.update(amounts)
        assert (usage.get("VCPU", 0), usage.get("INSTANCES", 0)) == (held["VCPU"], len(self.where))
        return held["VCPU"]


async def test_a_project_holds_no_more_of_the_hosts_than_its_quota() -> None:
    project = Project(10)
    await project.open()
    for vm in range(6):
        if not await project.claim(vm, 0, 5):
            break
        assert await project.resize(vm, 1)
    assert await project.used() <= 10


async def test_reverts_together_stay_within_the_quota() -> None:
    project = Project(12)
    await project.open()
    for vm in range(3):
        assert await project.claim(vm, 0, 4)
    for vm in range(3):
        assert await project.resize(vm, 1), "a smaller size needs no room"
    assert not await project.claim(3, 0, 1), "the room of what may come back is not free"
    await project.revert(0, 1, 2)
    assert await project.used() == 12


@pytest.mark.parametrize("seed", range(20))
async def test_a_revert_never_needs_more_of_a_quota_than_is_held(seed: int) -> None:
    rng, project, limit = random.Random(seed), Project(24), 24
    await project.open()
    for _ in range(60):
        before, vm = await project.used(), rng.randrange(10)
        if vm not in project.where:
            if await project.claim(vm, 0, rng.randint(1, 6)):
                assert await project.used() <= limit
        elif vm in project.sources and rng.random() < 0.5:
            await project.revert(vm)
            assert await project.used() <= before
        elif vm in project.sources:
            await project.confirm(vm)
            assert await project.used() <= before
        else:
            had, wanted = project.where[vm][1], rng.randint(1, 6)
            resized = await project.resize(vm, wanted)
            assert resized is (wanted <= had or before + wanted - had <= limit)

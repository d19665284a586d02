"""Whatever sequence of claims, moves, reverts, releases and swaps is sent, each has an outcome and the book stays true.

A client may name any source, attempt and generation, those of other consumers too.
"""

from __future__ import annotations

import random

import pytest

from bus.clock import SystemClock
from bus.contracts.placement import (
    Claim,
    ClaimAll,
    ClaimOption,
    ConsumerAllocations,
    Inventory,
    InventoryUpdate,
    Migration,
    ProviderReport,
    Release,
    Revert,
    Swap,
)
from placement_worker.book import ResourceBook
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.moves import total_of
from placement_worker.domain.server_groups import counted_by_class
from placement_worker.domain.values import Holding
from placement_worker.store.memory_rows import MemoryBookRows
from placement_worker.store.memory_table import MemoryBookTable
from tests.contract.books import HOSTS, VMS

Amounts = dict[str, dict[str, int]]

STEPS = 60
MOVES = [f"d00000{n:02d}-0000-4000-8000-000000000000" for n in range(3)]
CHILD = "91000000-0000-4000-8000-000000000000"
ROOTS = HOSTS[:4]
ROOM = {"VCPU": 8, "DISK_GB": 20}


class Walk:
    """A random client, which sees all and lies about some of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.table = MemoryBookTable(SystemClock())
        self.store = ResourceBook(MemoryBookRows(self.table.session()))
        self.version = 0

    def amounts(self) -> Amounts:
        providers = self.random.sample([*ROOTS, CHILD], self.random.choice((1, 1, 1, 2)))
        classes = self.random.sample(list(ROOM), self.random.choice((1, 2)))
        return {uuid: {name: self.random.randint(1, ROOM[name]) for name in classes} for uuid in providers}

    def options(self, least: int) -> tuple[ClaimOption, ...]:
        found = [self.amounts() for _ in range(self.random.randint(least, 2))]
        return tuple(ClaimOption(allocations=one, host=next(iter(one))) for one in found)

    def item(self) -> ClaimItem:
        draw, known = self.random, {uuid: row.consumer for uuid, row in self.table.consumers.items()}
        consumer, migration = draw.choice(VMS[:6]), draw.choice(MOVES)
        state = known.get(consumer)
        attempt = (state.attempt if state else 0) + draw.choice((0, 1, 1, 1))
        generation = state.generation if state and state.holding else None
        sources: list[Holding] = [self.amounts()]
        sources += [known[one].holding for one in (consumer, migration) if one in known and known[one].holding]
        moved = Migration(uuid=migration, source=total_of([draw.choice(sources)]))
        limits = draw.choice(({}, {"VCPU": draw.randint(4, 30), "INSTANCES": 5}))
        claim = Claim(
            consumer=consumer,
            attempt=attempt,
            consumer_generation=generation,
            options=self.options(1),
            project_id=draw.choice(("p", "p", "p", "q")),
            limits=limits,
        )
        fields = {name: getattr(claim, name) for name in claim.__struct_fields__}
        swapped = draw.choice((consumer, migration))
        before = known.get(swapped)
        kinds = (
            lambda: claim,
            lambda: Claim(**fields | {"migration": moved}),
            lambda: Claim(**fields | {"migration": moved, "release_first": True, "options": self.options(0)}),
            lambda: Claim(**fields | {"release_first": True}),
            lambda: ClaimAll(claims=(claim, Claim(**fields | {"consumer": draw.choice(VMS[:6])}))),
            lambda: Revert(
                consumer=consumer, migration=moved, source_attempt=draw.randint(0, attempt), attempt=attempt
            ),
            lambda: Release(consumer=swapped, attempt=draw.choice((None, attempt))),
            lambda: Swap(
                consumers=(
                    ConsumerAllocations(
                        consumer=swapped,
                        consumer_generation=before.generation if before and before.holding else None,
                        project_id="p",
                        allocations=self.amounts(),
                    ),
                )
            ),
        )
        return draw.choice(kinds)()

    async def report(self, uuid: str, share: float = 1.0) -> None:
        """A host with this share of its room; the first one may have its processors in a child."""
        self.version += 1
        inventories = {name: Inventory(total=max(1, int(total * share))) for name, total in ROOM.items()}
        providers = [ProviderReport(uuid=uuid, name=f"host-{uuid[0]}", inventories=inventories)]
        if uuid == ROOTS[0]:
            child = ProviderReport(
                uuid=CHILD, name="child", parent_uuid=uuid, inventories={"VCPU": inventories["VCPU"]}, takes_from=uuid
            )
            providers.append(child)
            if self.random.random() < 0.5:
                providers[0] = ProviderReport(uuid=uuid, name="host-1", inventories={"DISK_GB": inventories["DISK_GB"]})
        update = InventoryUpdate(source="s", version=self.version, root_uuid=uuid, providers=tuple(providers))
        await self.store.report([update])

    def check(self) -> None:
        """Usage is the sum of what is held, and a project's the sum of what counts."""
        states = [row.consumer for row in self.table.consumers.values()]
        held = total_of(state.holding for state in states)
        for uuid, provider in self.table.providers.items():
            assert {name: used for name, used in provider.used.items() if used} == held.get(uuid, {})
        by_project: Amounts = {}
        for state in states:
            row = by_project.setdefault(state.project_id, {})
            for name, amount in counted_by_class(state).items():
                row[name] = row.get(name, 0) + amount
        counted = {project: {k: n for k, n in row.items() if n} for project, row in self.table.project_usage.items()}
        assert {project: row for project, row in counted.items() if row} == {p: r for p, r in by_project.items() if r}


@pytest.mark.parametrize("seed", range(40))
async def test_each_item_of_a_hostile_client_has_an_outcome(seed: int) -> None:
    walk = Walk(seed)
    await walk.store.open()
    for uuid in ROOTS:
        await walk.report(uuid)
    for _ in range(STEPS):
        if walk.random.random() < 0.05:
            await walk.report(walk.random.choice(ROOTS), walk.random.choice((0.3, 1.0, 1.5)))
        else:
            assert len(await walk.store.apply([walk.item()])) == 1
        walk.check()

"""A random client of placement, which sees all that a placement in memory holds, and lies about some of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec.structs import replace

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
    Restate,
    Revert,
    Swap,
)
from placement_worker.domain.claims import ClaimItem
from placement_worker.domain.migration import total_of
from placement_worker.domain.values import ProviderAllocations
from placement_worker.service import PlacementService
from placement_worker.store.memory_rows import MemoryPlacementRows
from placement_worker.store.memory_table import MemoryPlacementTable
from tests.contract.books import APART, HOSTS, MOVE, TOGETHER, VMS, Amounts

MOVES = [f"d00000{n:02d}-0000-4000-8000-000000000000" for n in range(3)]
CHILD = "91000000-0000-4000-8000-000000000000"
ROOTS = HOSTS[:4]
ROOM = {"VCPU": 8, "DISK_GB": 20}
OWNERS = ("r", "s")


class RandomClient:
    """Claims, gangs, moves, reverts, releases and swaps, of sources, attempts, owners and groups of other consumers."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.table = MemoryPlacementTable(SystemClock())
        self.store = PlacementService(MemoryPlacementRows(self.table.session()))
        self.version = 0

    def amounts(self) -> Amounts:
        providers = self.random.sample([*ROOTS, CHILD], self.random.choice((1, 1, 1, 2)))
        classes = self.random.sample(list(ROOM), self.random.choice((1, 2)))
        return {uuid: {name: self.random.randint(1, ROOM[name]) for name in classes} for uuid in providers}

    def options(self, least: int) -> tuple[ClaimOption, ...]:
        found = [self.amounts() for _ in range(self.random.randint(least, 2))]
        return tuple(
            ClaimOption(
                allocations=one,
                host=next(iter(one)),
                spec_generations=dict.fromkeys(one, 1) if self.random.random() < 0.1 else {},
            )
            for one in found
        )

    def claim(self, consumer: str) -> Claim:
        draw, row = self.random, self.table.consumers.get(consumer)
        state = row.consumer if row else None
        return Claim(
            consumer=consumer,
            attempt=(state.attempt if state else 0) + draw.choice((0, 1, 1, 1)),
            consumer_generation=state.generation if state and state.allocations else None,
            options=self.options(1),
            project_id=draw.choice(("p", "p", "p", "q")),
            owner=draw.choice((None, None, *OWNERS)),
            transfers_from=draw.choice((None, None, *OWNERS)),
            limits=draw.choice(({}, {"VCPU": draw.randint(2, 20), "INSTANCES": 4})),
            server_group=draw.choice((None, None, APART, replace(TOGETHER, uuid=MOVE))),
        )

    def item(self) -> ClaimItem:
        draw, known = self.random, {uuid: row.consumer for uuid, row in self.table.consumers.items()}
        consumer, migration = draw.choice(VMS[:6]), draw.choice(MOVES)
        claim = self.claim(consumer)
        reporters: list[ProviderAllocations] = [self.amounts()]
        reporters += [
            known[one].allocations for one in (consumer, migration) if one in known and known[one].allocations
        ]
        moved = Migration(uuid=migration, source=total_of([draw.choice(reporters)]))
        swapped = draw.choice((consumer, migration))
        before = known.get(swapped)
        generation = before.generation if before and before.allocations else draw.choice((None, 1))
        kinds = (
            lambda: claim,
            lambda: replace(claim, migration=moved),
            lambda: replace(claim, migration=moved, release_first=True, options=self.options(0)),
            lambda: replace(claim, release_first=True),
            lambda: replace(claim, external=True, group_members=tuple(draw.sample(VMS[:6], 2))),
            lambda: ClaimAll(claims=(claim, self.claim(draw.choice(VMS[:6])))),
            lambda: Revert(
                consumer=consumer, migration=moved, source_attempt=draw.randint(0, claim.attempt), attempt=claim.attempt
            ),
            lambda: Release(
                consumer=swapped,
                attempt=draw.choice((None, claim.attempt)),
                owner=draw.choice((None, *OWNERS)),
                of_migration=draw.random() < 0.2,
            ),
            lambda: Restate(
                consumer=consumer,
                attempt=claim.attempt + draw.choice((0, 3000)),
                project_id=claim.project_id,
                allocations=draw.choice((None, {}, self.amounts())),
                migrations=(migration,),
            ),
            lambda: Swap(
                consumers=(
                    ConsumerAllocations(
                        consumer=swapped,
                        consumer_generation=generation,
                        project_id="p",
                        allocations=self.amounts() if draw.random() < 0.8 else {},
                    ),
                )
            ),
        )
        return draw.choice(kinds)()

    def report(self, uuid: str, share: float = 1.0) -> InventoryUpdate:
        """A host with this share of its room; the first one may have its processors in a child."""
        self.version += 1
        inventories = {name: Inventory(total=max(1, int(total * share))) for name, total in ROOM.items()}
        providers = [ProviderReport(uuid=uuid, name=f"host-{uuid[0]}", inventories=inventories)]
        if uuid == ROOTS[0]:
            child = ProviderReport(
                uuid=CHILD,
                name="child",
                parent_uuid=uuid,
                inventories={"VCPU": inventories["VCPU"]},
                receives_from=uuid,
            )
            providers.append(child)
            if self.random.random() < 0.5:
                providers[0] = ProviderReport(uuid=uuid, name="host-1", inventories={"DISK_GB": inventories["DISK_GB"]})
        return InventoryUpdate(reporter="s", version=self.version, root_uuid=uuid, providers=tuple(providers))

    def group(self) -> Sequence[ClaimItem] | Sequence[InventoryUpdate]:
        """What one transaction is asked."""
        if self.random.random() < 0.1:
            update = self.report(self.random.choice(ROOTS), self.random.choice((0.3, 1.0, 1.5)))
            return [replace(update, providers=()) if self.random.random() < 0.3 else update]
        return [self.item() for _ in range(self.random.randint(1, 4))]

"""What a move that awaits its confirm holds counts for a quota."""

from __future__ import annotations

import pytest

from bus.clock import SystemClock
from bus.contracts.book import ProjectUsageQuery
from bus.contracts.placement import (
    Claim,
    ClaimOption,
    ClaimResult,
    Inventory,
    InventoryUpdate,
    Migration,
    ProviderReport,
)
from placement_worker.book import ResourceBook
from placement_worker.store.memory_rows import MemoryBookRows
from placement_worker.store.memory_table import MemoryBookTable

HOSTS = [f"{n}0000000-0000-4000-8000-000000000000" for n in (1, 2)]
VMS = [f"c00000{n:02d}-0000-4000-8000-000000000000" for n in range(20)]
MOVES = [f"d00000{n:02d}-0000-4000-8000-000000000000" for n in range(20)]
QUOTA = {"VCPU": 10}


@pytest.mark.xfail(strict=True, reason="Found A6")
async def test_a_project_holds_no_more_of_the_hosts_than_its_quota() -> None:
    book = ResourceBook(MemoryBookRows(MemoryBookTable(SystemClock()).session()))
    for at, host in enumerate(HOSTS):
        report = ProviderReport(uuid=host, name=f"h{at}", inventories={"VCPU": Inventory(total=1000)})
        await book.report([InventoryUpdate(source=f"s{at}", version=1, root_uuid=host, providers=(report,))])
    for vm, move in zip(VMS[:6], MOVES, strict=False):
        built = Claim(
            consumer=vm,
            attempt=1,
            options=(ClaimOption(allocations={HOSTS[0]: {"VCPU": 5}}),),
            project_id="p",
            user_id="u",
            limits=QUOTA,
        )
        (claimed,) = await book.apply([built])
        assert isinstance(claimed, ClaimResult)
        if claimed.outcome != "claimed":
            break
        resized = Claim(
            consumer=vm,
            attempt=2,
            consumer_generation=claimed.consumer_generation,
            options=(ClaimOption(allocations={HOSTS[1]: {"VCPU": 1}}),),
            project_id="p",
            user_id="u",
            limits=QUOTA,
            migration=Migration(uuid=move, source={HOSTS[0]: {"VCPU": 5}}),
        )
        (after,) = await book.apply([resized])
        assert isinstance(after, ClaimResult) and after.outcome == "claimed", after
    used = (await book.reads.usage(ProjectUsageQuery(projects=("p",)))).usage["p"]
    held = 0
    for one in await book.reads.holding([*VMS, *MOVES]):
        held += sum(amounts.get("VCPU", 0) for amounts in one.holding.values())
    assert held <= 10, f"the project keeps {held} VCPU of the hosts, and its usage is {used}"

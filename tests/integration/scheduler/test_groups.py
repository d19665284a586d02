"""Flavors with numbered groups and shared pools, from the request to what is used in the book."""

from __future__ import annotations

from collections import Counter

import pytest

from bus.bus import API
from bus.clock import new_uuid
from bus.contracts.build import BuildState
from bus.contracts.cell import HostReport
from bus.contracts.placement import Inventory, InventoryResult, InventoryUpdate, ProviderReport
from scheduler_worker.config import Flavor, SchedulerConfig
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres

FLAVOR = Flavor(
    disk_gb=10,
    extra_specs={
        "resources_CPU:VCPU": "2",
        "resources_CPU:MEMORY_MB": "1024",
        "resources_NIC:SRIOV_NET_VF": "1",
        "trait_NIC:CUSTOM_PHYSNET_A": "required",
        "same_subtree": "_CPU,_NIC",
        "group_policy": "none",
    },
)


def inventory(**amounts: int) -> dict[str, Inventory]:
    return {name: Inventory(total=total, max_unit=total) for name, total in amounts.items()}


async def add_tree(world: World, rack: str) -> dict[str, str]:
    """A host of two NUMA cells with a device each, without disk of its own. Returns {provider: its part}."""
    root = new_uuid(world.rng)
    name = f"c1-{len(world.hosts['c1'])}"
    parts = {root: "root"}
    providers = [ProviderReport(uuid=root, name=name, traits=("COMPUTE_NODE",), aggregates=(rack,))]
    for cell in (0, 1):
        numa, device = new_uuid(world.rng), new_uuid(world.rng)
        parts |= {numa: f"numa{cell}", device: f"nic{cell}"}
        providers += [
            ProviderReport(
                uuid=numa, name=f"{name}-numa{cell}", parent_uuid=root, inventories=inventory(VCPU=4, MEMORY_MB=4096)
            ),
            ProviderReport(
                uuid=device,
                name=f"{name}-nic{cell}",
                parent_uuid=numa,
                inventories=inventory(SRIOV_NET_VF=3),
                traits=("CUSTOM_PHYSNET_A",),
            ),
        ]
    await report(world, root, tuple(providers))
    world.hosts["c1"][root] = HostReport(uuid=root, name=name)
    return parts


async def add_pool(world: World, rack: str, disk_gb: int) -> str:
    pool = new_uuid(world.rng)
    provider = ProviderReport(
        uuid=pool,
        name=f"pool-{rack[:8]}",
        inventories=inventory(DISK_GB=disk_gb),
        traits=("MISC_SHARES_VIA_AGGREGATE",),
        aggregates=(rack,),
    )
    await report(world, pool, (provider,))
    return pool


async def report(world: World, root: str, providers: tuple[ProviderReport, ...]) -> None:
    update = InventoryUpdate(source="world", version=1, root_uuid=root, providers=providers)
    answer = await world.buses[API].request(update, InventoryResult, timeout_s=PATIENCE_S)
    assert answer.outcome == "applied", answer


async def test_numa_affinity_and_a_shared_pool_hold_while_two_schedulers_race(world: World) -> None:
    """Three hosts take four each (two a cell); the pool of the third's rack has disk for one alone."""
    racks = [new_uuid(world.rng) for _ in range(2)]
    trees = [await add_tree(world, rack) for rack in (racks[0], racks[0], racks[1])]
    pools = {await add_pool(world, racks[0], 1000): racks[0], await add_pool(world, racks[1], 15): racks[1]}
    part = {provider: what for tree in trees for provider, what in tree.items()}
    config = SchedulerConfig(flavors={"numa": FLAVOR})
    await world.scheduler("s1", config)
    await world.scheduler("s2", config)
    await world.announce("c1")
    requests = [world.request("numa") for _ in range(12)]
    await world.ask(*requests)
    ended = [await world.ended(request.instance_uuid, BuildState.SCHEDULED, BuildState.FAILED) for request in requests]
    # 2 hosts x 2 cells x 2, and one on the third host: then its pool is empty.
    assert Counter(event.state for event in ended) == {BuildState.SCHEDULED: 9, BuildState.FAILED: 3}
    totals: Counter[tuple[str, str]] = Counter()
    await world.until(lambda: len(world.builds) == 9)
    for _, build in world.builds:
        chosen = build.selections[0]
        (disk,) = [uuid for uuid, given in chosen.allocations.items() if "DISK_GB" in given]
        numa, nic = (
            next(part[uuid] for uuid, given in chosen.allocations.items() if name in given)
            for name in ("VCPU", "SRIOV_NET_VF")
        )
        assert (numa, nic) in {("numa0", "nic0"), ("numa1", "nic1")}
        tree = next(tree for tree in trees if chosen.host_uuid in tree)
        assert all(uuid in tree or uuid == disk for uuid in chosen.allocations)
        assert pools[disk] == racks[1 if tree is trees[2] else 0]
        totals.update({(u, name): n for u, given in chosen.allocations.items() for name, n in given.items()})
    used = {(uuid, name): n for uuid, given in (await world.used()).items() for name, n in given.items()}
    assert used == dict(totals)
    failed = next(event for event in ended if event.state is BuildState.FAILED)
    assert "group CPU" in failed.reason or "DISK_GB" in failed.reason

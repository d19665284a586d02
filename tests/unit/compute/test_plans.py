"""Planned fleets and planned faults."""

from __future__ import annotations

from itertools import pairwise

import pytest

from compute_sim.config import ComputeConfig, Device, HostSize
from compute_sim.domain.faults import FAULTLESS, Faults, PlannedEnding, plan_attempt
from compute_sim.domain.hosts import DISABLED_TRAIT, GPU_TRAITS, NUMA_TRAIT, plan_hosts, tree

INSTANCES = [f"00000000-0000-4000-8000-{n:012d}" for n in range(4000)]


def share(faults: Faults, ending: PlannedEnding) -> float:
    return sum(plan_attempt(faults, 1, "h", i, 1).ending is ending for i in INSTANCES) / len(INSTANCES)


def test_the_same_attempt_has_the_same_outcome_and_others_have_others() -> None:
    faults = Faults(fail_rate=0.5, delay_max_s=1.0)
    first = [plan_attempt(faults, 7, "h", i, 1) for i in INSTANCES[:100]]
    assert first == [plan_attempt(faults, 7, "h", i, 1) for i in INSTANCES[:100]]
    assert first != [plan_attempt(faults, 8, "h", i, 1) for i in INSTANCES[:100]]
    assert first != [plan_attempt(faults, 7, "h", i, 2) for i in INSTANCES[:100]]
    assert first != [plan_attempt(faults, 7, "g", i, 1) for i in INSTANCES[:100]]


def test_rates_are_kept_side_by_side() -> None:
    faults = Faults(fail_rate=0.2, abort_rate=0.1, hang_rate=0.3)
    for ending, rate in (
        (PlannedEnding.FAILS, 0.2),
        (PlannedEnding.ABORTS, 0.1),
        (PlannedEnding.HANGS, 0.3),
        (PlannedEnding.WORKS, 0.4),
    ):
        assert abs(share(faults, ending) - rate) < 0.04


def test_delays_stay_in_their_range_and_spread_over_it() -> None:
    delays = [plan_attempt(Faults(delay_min_s=1.0, delay_max_s=3.0), 1, "h", i, 1).delay_s for i in INSTANCES]
    assert 1.0 <= min(delays) < 1.1 and 2.9 < max(delays) <= 3.0


def test_a_host_that_always_fails_does_and_nothing_planned_is_nothing_done() -> None:
    assert share(Faults(fail_hosts=("h",)), PlannedEnding.FAILS) == 1.0
    assert plan_attempt(Faults(fail_hosts=("h",)), 1, "other", INSTANCES[0], 1).ending is PlannedEnding.WORKS
    assert plan_attempt(Faults(), 1, "h", INSTANCES[0], 1) is FAULTLESS


def test_a_plan_is_the_same_every_time_and_differs_by_cell_service_and_seed() -> None:
    config = ComputeConfig(hosts=50, gpu_share=0.2)
    plans = plan_hosts(config, "c1", "s")
    assert plans == plan_hosts(config, "c1", "s")
    others = [*plan_hosts(config, "c2", "s"), *plan_hosts(config, "c1", "t")]
    others += plan_hosts(ComputeConfig(hosts=50, seed=2), "c1", "s")
    assert not {plan.uuid for plan in plans} & {plan.uuid for plan in others}
    assert len({uuid for plan in plans for uuid in (plan.uuid, *plan.gpus)}) == 50 + 10 * 2


def test_shares_are_spread_evenly() -> None:
    plans = plan_hosts(ComputeConfig(hosts=100, gpu_share=0.1, numa_share=0.25), "c", "s")
    gpus = [n for n, plan in enumerate(plans) if plan.gpus]
    assert len(gpus) == 10 and {b - a for a, b in pairwise(gpus)} == {10}
    assert sum(bool(plan.numa) for plan in plans) == 25


def test_sizes_are_dealt_out_as_often_as_they_are_counted() -> None:
    big, small = HostSize(vcpus=64), HostSize(vcpus=8)
    config = ComputeConfig(hosts=12, sizes=(big, small), counts=(1, 3), gpu_share=0.0)
    found = [plan.size.vcpus for plan in plan_hosts(config, "c", "s")]
    assert found == [8, 64, 8, 8] * 3, "mixed, each round the same"
    alike = ComputeConfig(hosts=4, sizes=(big, small), gpu_share=0.0)
    assert [plan.size.vcpus for plan in plan_hosts(alike, "c", "s")] == [64, 8, 64, 8]
    with pytest.raises(ValueError, match="1 counts for 2 sizes"):
        ComputeConfig(sizes=(big, small), counts=(1,))


def test_trees_are_roots_first_and_hold_the_hardware_once() -> None:
    config = ComputeConfig(hosts=4, gpu_share=1.0, numa_share=1.0, sizes=(HostSize(vcpus=8, memory_mb=4096),))
    plan = plan_hosts(config, "c", "s")[0]
    providers = tree(plan, plan.size, enabled=True)
    assert providers[0].parent_uuid is None and all(p.parent_uuid == plan.uuid for p in providers[1:])
    cells = [p for p in providers if NUMA_TRAIT in p.traits]
    assert len(cells) == 2 and sum(p.inventories["VCPU"].total for p in cells) == 8
    assert "VCPU" not in providers[0].inventories and "DISK_GB" in providers[0].inventories
    assert [p.traits for p in providers if "VGPU" in p.inventories] == [(trait,) for trait in GPU_TRAITS]
    assert DISABLED_TRAIT in tree(plan, plan.size, enabled=False)[0].traits


NESTED = HostSize(
    vcpus=8,
    numa=2,
    devices=(
        Device(name="agent", under="numa1"),
        Device(name="port", under="agent", inventories={"SRIOV_NET_VF": 8}, traits=("CUSTOM_RED",)),
    ),
)


def test_devices_hang_where_they_are_configured_and_take_over_from_the_root() -> None:
    (plan,) = plan_hosts(ComputeConfig(hosts=1, gpu_share=0.0, sizes=(NESTED,)), "c", "s")
    root, _, cell, agent, port = tree(plan, plan.size, enabled=True)
    assert (cell.parent_uuid, agent.parent_uuid, port.parent_uuid) == (root.uuid, cell.uuid, agent.uuid)
    assert [report.takes_from for report in (cell, agent, port)] == [root.uuid, None, root.uuid]
    assert plan.children == (*plan.numa, agent.uuid, port.uuid)


def test_a_host_not_yet_nested_has_the_same_at_its_root() -> None:
    (plan,) = plan_hosts(ComputeConfig(hosts=1, gpu_share=1.0, sizes=(NESTED,)), "c", "s")
    (root,) = tree(plan, plan.size, enabled=True, nested=False)
    totals = {name: inventory.total for name, inventory in root.inventories.items()}
    assert totals == {"VCPU": 8, "MEMORY_MB": 262_144, "DISK_GB": 4_000, "SRIOV_NET_VF": 8, "VGPU": 16}


@pytest.mark.parametrize(
    "devices", [(Device(name="a", under="b"),), (Device(name="a"), Device(name="a")), (Device(name="numa0"),)]
)
def test_a_device_under_nothing_or_named_twice_is_refused(devices: tuple[Device, ...]) -> None:
    with pytest.raises(ValueError, match="device"):
        HostSize(devices=devices)


def test_a_hosts_overcommit_is_the_allocation_ratio_of_its_inventories() -> None:
    size = HostSize(vcpus=8, memory_mb=4096, disk_gb=100, cpu_ratio=16.0, memory_ratio=1.5, disk_ratio=2.0)
    (plan,) = plan_hosts(ComputeConfig(hosts=1, sizes=(size,), gpu_share=0.0), "c1", "s")
    (root,) = tree(plan, size, enabled=True)
    ratios = {name: inventory.allocation_ratio for name, inventory in root.inventories.items()}
    assert ratios == {"VCPU": 16.0, "MEMORY_MB": 1.5, "DISK_GB": 2.0}

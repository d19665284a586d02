"""The time that a simulated machine's memory takes to be copied while it migrates."""

from __future__ import annotations

import pytest

from bus.contracts.cell import InstanceSpec
from bus.contracts.moves import ChangeKind
from compute_sim.config import ComputeConfig
from compute_sim.domain.faults import Faults
from compute_sim.driver import ChangeOrder
from compute_sim.drivers.hypervisor import Hypervisors
from compute_sim.fleet import Fleet, Guest

VM = "c0000000-0000-4000-8000-000000000000"


class Waits:
    """A clock that only notes how long it was to wait."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def monotonic(self) -> float:
        return 0.0

    def time(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("kind", "rate", "expected"),
    [
        (ChangeKind.HAND_OVER_LIVE, 256.0, [8.0]),
        (ChangeKind.HAND_OVER_LIVE, 512.0, [4.0]),
        (ChangeKind.HAND_OVER_LIVE, 0.0, []),
        (ChangeKind.HAND_OVER, 256.0, []),
    ],
)
async def test_a_live_migration_takes_the_time_of_copying_its_memory(
    kind: ChangeKind, rate: float, expected: list[float]
) -> None:
    fleet, clock = Fleet.planned(ComputeConfig(hosts=1), "c1", "s1"), Waits()
    (host,) = fleet.hosts
    held = {host.plan.uuid: {"VCPU": 1, "MEMORY_MB": 1024}, "numa": {"MEMORY_MB": 1024}}
    fleet.put(host.plan.uuid, Guest(VM, 1, held))
    driver = Hypervisors(fleet, Faults(copy_mb_s=rate), seed=1, clock=clock)
    spec = InstanceSpec(instance_uuid=VM, project_id="p")
    order = ChangeOrder(kind=kind, host_uuid=host.plan.uuid, spec=spec, attempt=1, order=1, allocations={})
    assert not (await driver.change(order)).runs
    assert clock.slept == expected

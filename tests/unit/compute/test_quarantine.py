"""The resources of machines in quarantine are kept out of their host's inventory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.contracts.base import Resources
from bus.contracts.cell import ReservedMachine, ReservedOnHost, ReserveMachines
from bus.contracts.placement import Inventory, ProviderReport
from compute_sim import quarantine
from compute_sim.config import ComputeConfig
from compute_sim.domain.faults import Faults
from compute_sim.domain.reserved import uncounted_classes, with_reserved
from compute_sim.drivers.hypervisor import Hypervisors
from compute_sim.fleet import Fleet, Guest
from compute_sim.quarantine import Quarantine
from compute_sim.records import Records

HOST = "10000000-0000-4000-8000-000000000001"
A = "00000000-0000-4000-8000-00000000000a"
B = "00000000-0000-4000-8000-00000000000b"


def capacity(inventory: Inventory) -> int:
    return math.floor((inventory.total - inventory.reserved) * inventory.allocation_ratio)


def machine(uuid: str, allocations: dict[str, Resources] | None, attempt: int = 1) -> ReservedMachine:
    return ReservedMachine(instance_uuid=uuid, attempt=attempt, allocations=allocations)


@given(
    total=st.integers(1, 10_000),
    reserved=st.integers(0, 10_000),
    ratio=st.sampled_from([0.5, 0.9, 1.0, 1.5, 4.0, 16.0]),
    amounts=st.lists(st.integers(1, 4_000), min_size=1, max_size=5),
)
def test_as_much_less_is_offered_as_they_take_and_less_than_one_unit_more(
    total: int, reserved: int, ratio: float, amounts: list[int]
) -> None:
    there = Inventory(total=total, reserved=min(reserved, total), allocation_ratio=ratio)
    tree = (ProviderReport(uuid=HOST, name="h", inventories={"VCPU": there, "DISK_GB": there}),)
    (found,) = with_reserved(tree, [machine(f"{A[:-4]}{n:04d}", {HOST: {"VCPU": n}}) for n in amounts])
    assert found.inventories["DISK_GB"] == there, "a class that they do not take stays as it is"
    left = capacity(found.inventories["VCPU"])
    assert left >= 0 and found.inventories["VCPU"].reserved <= total
    assert left <= max(0, capacity(there) - sum(amounts))
    assert left > capacity(there) - sum(amounts) - ratio - 1, "no more than what rounding costs"


def test_what_its_host_does_not_report_is_named() -> None:
    tree = (ProviderReport(uuid=HOST, name="h", inventories={"VCPU": Inventory(total=8)}),)
    assert uncounted_classes(tree, machine(A, {HOST: {"VCPU": 1, "VGPU": 1}, B: {"DISK_GB": 1}})) == ("DISK_GB", "VGPU")
    assert uncounted_classes(tree, machine(A, {HOST: {"VCPU": 1}})) == ()


class Rig:
    """A service's fleet and what it keeps reserved there."""

    def __init__(self, path: Path | None = None) -> None:
        config = ComputeConfig(hosts=2, state_dir=str(path) if path else None)
        self.fleet = Fleet.planned(config, "c", "s")
        self.fleet.open()
        self.records: Records = self.fleet.records
        self.host, self.other = (host.plan.uuid for host in self.fleet.hosts)
        self.driver = Hypervisors(self.fleet, Faults(), seed=1, clock=SystemClock())
        self.changed: list[str] = []
        self.quarantine = Quarantine(
            service="s", driver=self.driver, records=self.records, on_changed=self.changed.extend
        )

    def put(self, uuid: str, taken: Resources | None, attempt: int = 1) -> None:
        self.fleet.put(self.host, Guest(uuid, attempt, {self.host: taken} if taken else {}))

    async def order(self, *machines: ReservedMachine, sequence: int = 1, epoch: int = 1) -> None:
        hosts = (ReservedOnHost(host_uuid=self.host, machines=machines),)
        await self.quarantine.reserve(
            ReserveMachines(service="s", cell="c", epoch=epoch, sequence=sequence, hosts=hosts)
        )

    async def look(self) -> None:
        self.quarantine.drop_gone(await self.driver.list())

    async def reserved(self) -> int:
        """Of the host's processors, by the inventory that is reported."""
        (tree,) = await self.driver.inventory((self.host,))
        return with_reserved(tree, self.records.reserved(self.host))[0].inventories["VCPU"].reserved


async def test_the_hosts_own_word_on_what_it_takes_comes_before_the_records() -> None:
    rig = Rig()
    rig.put(A, {"VCPU": 8})
    await rig.order(machine(A, {rig.host: {"VCPU": 4}}))
    assert await rig.reserved() == 2 and rig.changed == [rig.host]  # four processors for each real one
    await rig.order(machine(A, None), sequence=2)
    assert await rig.reserved() == 2 and rig.changed == [rig.host], "nothing has changed"


async def test_item_16_an_order_of_a_conductor_that_sends_no_pages_is_applied_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """5,000 machines held the loop for 28 ms. Counted in machines of one write, not in time."""
    monkeypatch.setattr(quarantine, "MAX_RESERVED_AT_ONCE", 1)
    rig = Rig()
    rig.put(A, {"VCPU": 4})
    rig.fleet.put(rig.other, Guest(B, 1, {rig.other: {"VCPU": 8}}))
    hosts = (
        ReservedOnHost(host_uuid=rig.host, machines=(machine(A, None),)),
        ReservedOnHost(host_uuid=rig.other, machines=(machine(B, None),)),
    )
    writes: list[int] = []
    reserve = rig.records.reserve

    def counted(part: Mapping[str, tuple[ReservedMachine, ...]]) -> list[str]:
        writes.append(sum(map(len, part.values())))
        return reserve(part)

    monkeypatch.setattr(rig.records, "reserve", counted)
    await rig.quarantine.reserve(ReserveMachines(service="s", cell="c", epoch=1, sequence=1, hosts=hosts))
    assert writes == [1, 1]
    assert await rig.reserved() == 1 and rig.changed == [rig.host, rig.other]


async def test_where_the_host_does_not_know_the_records_word_counts() -> None:
    rig = Rig()
    rig.put(A, None)
    await rig.order(machine(A, {rig.host: {"VCPU": 4}}))
    assert await rig.reserved() == 1
    await rig.order(machine(A, None), sequence=2)
    assert await rig.reserved() == 1, "what was known of it once is not forgotten while it is there"


async def test_a_machine_of_which_nothing_is_known_is_named_and_does_not_hide_the_others() -> None:
    rig = Rig()
    rig.put(A, None)
    rig.put(B, {"VCPU": 4})
    with capture_logs() as logs:
        await rig.order(machine(A, None), machine(B, None))
    assert await rig.reserved() == 1
    assert [(one["instance"], one["log_level"]) for one in logs if one["event"] == "quarantine.size_unknown"] == [
        (A, "warning")
    ]
    assert (rig.records.count_reserved(sized=True), rig.records.count_reserved(sized=False)) == (1, 1)


@pytest.mark.parametrize("there", [None, 2], ids=["gone", "a newer attempt"])
async def test_what_is_gone_is_offered_again_with_the_next_look(there: int | None) -> None:
    rig = Rig()
    rig.put(A, {"VCPU": 4})
    await rig.order(machine(A, None))
    await rig.look()
    assert await rig.reserved() == 1
    rig.fleet.remove(rig.host, A)
    if there is not None:
        rig.put(A, {"VCPU": 4}, attempt=there)
    await rig.look()
    assert await rig.reserved() == 0 and rig.changed == [rig.host, rig.host]


async def test_an_order_of_an_older_report_and_one_about_another_machine_change_nothing() -> None:
    rig = Rig()
    rig.put(A, {"VCPU": 4})
    await rig.order(machine(A, None, attempt=2))
    assert await rig.reserved() == 0, "this attempt is not there"
    await rig.order(machine(A, None), sequence=2)
    await rig.order(sequence=1)
    assert await rig.reserved() == 1
    await rig.order(sequence=3)
    assert await rig.reserved() == 0


async def test_it_is_kept_over_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.put(A, {"VCPU": 4})
    await rig.order(machine(A, None))
    rig.fleet.close()
    rig = Rig(tmp_path)
    assert await rig.reserved() == 1
    await rig.order(sequence=1, epoch=2)  # a new start counts its reports anew
    assert await rig.reserved() == 0
    rig.fleet.close()
    assert await Rig(tmp_path).reserved() == 0

"""A compute service's hosts: which have a machine, what is kept in quarantine, and how many are looked at in a turn."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs

from bus.clock import SystemClock
from bus.contracts.base import Message, Resources
from bus.contracts.cell import (
    LookUpMachines,
    QueueBarrier,
    ReservedMachine,
    ReservedOnHost,
    ReserveMachines,
)
from bus.contracts.placement import Inventory, InventoryUpdate, ProviderReport
from compute_agent.driver import DriverUnavailable, Machine
from compute_agent.hosts import heartbeats as reporter
from compute_agent.hosts import inventory_reporter as inventory
from compute_agent.hosts import quarantine
from compute_agent.hosts import scan as survey
from compute_agent.hosts.heartbeats import Reporter
from compute_agent.hosts.inventory_reporter import InventoryReporter
from compute_agent.hosts.machine_lookup import MachineLookup
from compute_agent.hosts.pending_reports import PendingHostReports
from compute_agent.hosts.quarantine import Quarantine, uncounted_classes, with_reserved
from compute_agent.hosts.scan import MachineScanner
from compute_agent.hosts.startup_gate import StartupGate
from compute_agent.records.attempt import AttemptPhase, HostAttempt
from compute_agent.records.records import Records
from compute_sim import driver as hypervisor
from compute_sim.config import SimulatedConfig
from compute_sim.driver import SimulatedDriver
from compute_sim.faults import Faults
from compute_sim.fleet import Fleet, SimulatedMachine
from tests.kit.turns import Turns
from tests.unit.compute_agent.test_agent import HOSTS, INSTANCES, Scripted, Service, spawn, started

# --- a compute service's answer to the query which of its hosts have a machine of an instance


OURS = "dddddddd-0000-4000-8000-000000000001"
THEIRS = "dddddddd-0000-4000-8000-000000000002"
TAKEN = {HOSTS[0]: {"VCPU": 2}}


class Marking(Scripted):
    """Its machines carry marks, and it knows what they take."""

    mark = OURS
    unseen: Sequence[str] | set[str] = ()

    async def list(self, hosts: Sequence[str] | None = None) -> Mapping[str, Sequence[Machine]]:
        listed = await super().list(hosts)
        return {
            host: [replace(one, database_id=self.mark, allocations=TAKEN) for one in machines]
            for host, machines in listed.items()
            if (hosts is None or host in hosts) and host not in self.unseen
        }


def lookup_of(service: Service) -> MachineLookup:
    return MachineLookup(service="s", driver=service.driver, records=service.records, scanner=service.scanner)


async def built() -> Service:
    service = await started(Marking())
    await service.carry_out(replace(spawn(0), database_id=OURS))
    return service


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        (
            HostAttempt(1, AttemptPhase.GONE, max_ended_attempt=1, reported=True, database_id=OURS),
            True,
        ),  # older than the machine
        (
            HostAttempt(3, AttemptPhase.FAILED, reported=True, code="instance.lost", database_id=OURS),
            True,
        ),  # away for a moment
        (HostAttempt(2, AttemptPhase.RUNNING, database_id=OURS), True),
        (HostAttempt(3, AttemptPhase.GONE, max_ended_attempt=3, reported=True, database_id=OURS), False),
        (HostAttempt(4, AttemptPhase.FAILED, max_ended_attempt=3, reported=True, database_id=OURS), False),
        (
            HostAttempt(3, AttemptPhase.GONE, max_ended_attempt=3, reported=True, database_id=THEIRS),
            True,
        ),  # an order of theirs
    ],
)
async def test_a_machine_that_its_host_lists_is_reported_whatever_the_journal_has(
    entry: HostAttempt, found: bool
) -> None:
    driver = Marking()
    driver.machines[HOSTS[0], INSTANCES[0]] = 3
    service = Service(driver)
    service.records.put((HOSTS[0], INSTANCES[0]), entry)
    await service.agent.resume()
    listed = (await service.scanner.running())[HOSTS[0]]
    assert [(one.attempt, one.destroying) for one in listed] == [(3, not found)]


async def look(service: Service, *hosts: str, database_id: str = OURS) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    """The machines that these hosts list, and the hosts that were looked at."""
    query = LookUpMachines(
        service="s", database_id=database_id, instance_uuids=(INSTANCES[0],), on_hosts=hosts or (HOSTS[0],)
    )
    answer = await lookup_of(service).look_up(query)
    assert answer.hosts is not None
    return [(one.host_uuid, one.attempt) for one in answer.machines], answer.hosts


async def test_a_query_that_names_hosts_is_answered_by_what_they_list_and_not_by_the_record() -> None:
    service = await built()
    assert await look(service) == ([(HOSTS[0], 1)], (HOSTS[0],))
    assert await look(service, HOSTS[1]) == ([], (HOSTS[1],))
    assert await look(service, database_id=THEIRS) == ([], (HOSTS[0],))
    lost = service.driver.machines.pop((HOSTS[0], INSTANCES[0]))
    assert await look(service) == ([], (HOSTS[0],))
    service.driver.machines[HOSTS[0], INSTANCES[0]] = lost + 1
    assert await look(service) == ([], (HOSTS[0],)), "another attempt than the one on record"


async def test_a_query_that_names_a_host_which_the_service_no_longer_has_does_not_count_it_as_looked_at() -> None:
    service = await built()
    gone = "20000000-0000-4000-8000-000000000001"
    service.records.put((gone, INSTANCES[0]), HostAttempt(1, AttemptPhase.RUNNING, database_id=OURS))
    assert await look(service, gone) == ([], ())
    assert await look(service, gone, HOSTS[0]) == ([(HOSTS[0], 1)], (HOSTS[0],))


async def test_a_query_that_names_hosts_does_not_count_what_an_order_has_ended_or_what_is_not_complete() -> None:
    driver = Marking()
    driver.machines[HOSTS[0], INSTANCES[0]] = 1
    service = await started(driver)
    assert await look(service) == ([(HOSTS[0], 1)], (HOSTS[0],)), "without a record its mark counts"
    for entry in (
        HostAttempt(1, AttemptPhase.BUILDING, database_id=OURS),
        HostAttempt(1, AttemptPhase.DESTROYING, max_ended_attempt=1, database_id=OURS),
        HostAttempt(1, AttemptPhase.FAILED, code="instance.lost", database_id=OURS),
    ):
        service.records.put((HOSTS[0], INSTANCES[0]), entry)
        assert await look(service) == ([], (HOSTS[0],)), entry


async def test_without_its_driver_a_service_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    service = await built()

    async def unavailable(hosts: object = None) -> None:
        raise DriverUnavailable("unavailable")

    monkeypatch.setattr(service.driver, "list", unavailable)
    with pytest.raises(DriverUnavailable):
        await look(service)


# --- the resources of machines in quarantine are kept out of their host's inventory


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
        state_dir = str(path) if path else None
        self.records = Records.of_service(state_dir, "c", "s", synced=False)
        self.records.open()
        self.fleet = Fleet.planned(SimulatedConfig(hosts=2), "c", "s", self.records, state_dir)
        self.fleet.open()
        self.host, self.other = (host.plan.uuid for host in self.fleet.hosts)
        self.driver = SimulatedDriver(self.fleet, Faults(), seed=1, clock=SystemClock())
        self.changed: list[str] = []
        self.quarantine = Quarantine(
            service="s", driver=self.driver, records=self.records, on_changed=self.changed.extend
        )

    def put(self, uuid: str, taken: Resources | None, attempt: int = 1) -> None:
        self.fleet.put(self.host, SimulatedMachine(uuid, attempt, {self.host: taken} if taken else {}))

    async def order(self, *machines: ReservedMachine, sequence: int = 1, epoch: int = 1) -> None:
        hosts = (ReservedOnHost(host_uuid=self.host, machines=machines),)
        await self.quarantine.reserve(ReserveMachines(service="s", epoch=epoch, sequence=sequence, hosts=hosts))

    async def look(self) -> None:
        self.quarantine.drop_absent(await self.driver.list())

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
    rig.fleet.put(rig.other, SimulatedMachine(B, 1, {rig.other: {"VCPU": 8}}))
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
    await rig.quarantine.reserve(ReserveMachines(service="s", epoch=1, sequence=1, hosts=hosts))
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
    rig.records.close()
    rig = Rig(tmp_path)
    assert await rig.reserved() == 1
    await rig.order(sequence=1, epoch=2)  # a new start counts its reports anew
    assert await rig.reserved() == 0
    rig.fleet.close()
    rig.records.close()
    assert await Rig(tmp_path).reserved() == 0


# --- a service of many hosts looks at so many in one turn of the event loop, and not at all of them


MANY_HOSTS, AT_ONCE = 9, 2


class ManyService:
    """The parts of a service that report its hosts, each of which has a machine; it is the bus, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (hypervisor, survey, reporter, inventory):
            monkeypatch.setattr(module, "HOSTS_AT_ONCE", AT_ONCE)
        self.published: list[Message] = []
        self.clock = SystemClock()
        self.records = Records()
        self.fleet = Fleet.planned(SimulatedConfig(hosts=MANY_HOSTS), "c", "s", self.records)
        for host in self.fleet.hosts:
            self.fleet.put(host.plan.uuid, SimulatedMachine(host.plan.uuid, 1, {}, database_id="d"))
        self.records.start(self.clock.time())
        self.driver = SimulatedDriver(self.fleet, Faults(), seed=1, clock=self.clock)
        self.scanner = MachineScanner(self.driver, self.records)
        bus: Any = self
        self.offering = StartupGate(bus, service="s", records=self.records, clock=self.clock, on_ready=lambda _: None)
        common: dict[str, Any] = {
            "service": "s",
            "records": self.records,
            "changes": PendingHostReports(self.clock),
            "startup_gate": self.offering,
            "clock": self.clock,
            "rng": random.Random(1),
            "report_interval_s": 60.0,
        }
        self.reporter = Reporter(bus, cell="c", scanner=self.scanner, heartbeat_interval_s=1.0, **common)
        self.inventory = InventoryReporter(bus, driver=self.driver, **common)

    async def publish(self, message: Message, *, cause: str = "") -> None:
        self.published.append(message)

    async def publish_all(self, messages: list[tuple[Message, str]]) -> None:
        self.published += [message for message, _ in messages]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> ManyService:
    return ManyService(monkeypatch)


async def test_item_16_a_whole_report_looks_at_so_many_hosts_in_one_turn(
    service: ManyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first report of 20,000 hosts was one turn of 60 to 100 ms."""
    service.offering.opened.set()
    counted = ((hypervisor, "DriverHost"), (hypervisor, "Machine"), (survey, "_running"), (StartupGate, "is_ready"))
    turns = Turns(monkeypatch, *counted)
    async with turns.counting():
        await service.reporter._publish_hosts(None)
    for _, name in counted:
        assert turns.total(name) == MANY_HOSTS and turns.most(name) <= AT_ONCE, name
    (report,) = service.published
    uuids = [host.plan.uuid for host in service.fleet.hosts]
    assert [host.uuid for host in report.hosts] == uuids  # type: ignore[attr-defined]
    assert [[one.instance_uuid for one in host.running] for host in report.hosts] == [[uuid] for uuid in uuids]  # type: ignore[attr-defined]
    assert service.scanner.hosts == frozenset(uuids) and service.scanner.name_of(uuids[3]) == "s-00003"


async def test_item_16_inventories_of_so_many_hosts_are_chosen_in_one_turn(
    service: ManyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.offering.opened.set()
    turns = Turns(monkeypatch, (StartupGate, "is_ready"))
    async with turns.counting():
        await service.inventory._publish(None)
    assert turns.total("is_ready") == MANY_HOSTS and turns.most("is_ready") <= AT_ONCE
    assert len([one for one in service.published if isinstance(one, InventoryUpdate)]) == MANY_HOSTS


async def test_item_16_so_many_hosts_are_measured_in_one_turn(
    service: ManyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(monkeypatch, (hypervisor, "HostReading"))
    async with turns.counting():
        readings = await service.driver.measure(1.0)
    assert len(readings) == MANY_HOSTS and turns.most("HostReading") <= AT_ONCE


class CountedHost(str):
    """The uuid of a host that counts what it is compared with."""

    __slots__ = ("compared",)

    def __new__(cls, uuid: str) -> CountedHost:
        made = super().__new__(cls, uuid)
        made.compared = 0
        return made

    def __eq__(self, other: object) -> bool:
        self.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


async def test_item_16_a_host_is_offered_without_a_look_at_all_that_is_to_be_destroyed(service: ManyService) -> None:
    """1,000 destructions at a start were compared with each of 20,000 hosts, at each report."""
    pending_destroys = [(f"h{at}", f"i{at % 2}") for at in range(1000)] + [("h0", "i1")]
    service.offering.on_barrier(QueueBarrier(service="s", epoch=service.records.epoch), pending_destroys)
    host = CountedHost("h1000")
    assert service.offering.is_ready(host) and host.compared <= 2
    assert not service.offering.is_ready("h0")
    offered: list[str] = []
    service.offering._on_ready = offered.extend
    for key in (("h0", "i0"), ("h1", "i0"), ("h0", "i1"), ("h0", "i1")):
        service.offering.on_destroys_done(key)
    assert offered == ["h0"] and service.offering.is_ready("h0") and not service.offering.is_ready("h1")

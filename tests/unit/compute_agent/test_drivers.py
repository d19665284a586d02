"""Drivers of a compute service: what they report, how long one waits for a server, and when a host that owes the end of
a machine is offered again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.actions import ChangeKind, ChangeMachine, MachineChanged
from bus.contracts.base import Message
from bus.contracts.cell import ComputeOutcome, InstanceSpec, QueueBarrier, RingMembers
from bus.contracts.waiting_builds import MAX_WAITING, BuildsWaiting, WaitingBuild
from bus.transport import BusError
from compute_agent.attempts.jobs import Jobs
from compute_agent.attempts.machine_changes import MachineChanges
from compute_agent.driver import ChangeOrder, ChangeResult, DriverUnavailable, HandOverRefused
from compute_agent.drivers.ironic.api import _parse
from compute_agent.drivers.ironic.node import IronicNode
from compute_agent.hosts.hash_ring import Ring, owner_of
from compute_agent.hosts.startup_gate import StartupGate
from compute_agent.hosts.waiting_builds import WaitingReporter
from compute_agent.records.attempt import AttemptPhase, HostAttempt
from compute_agent.records.records import Records
from compute_sim.config import Device, HostSize, SimulatedConfig
from compute_sim.driver import SimulatedDriver
from compute_sim.faults import FAULTLESS, Faults, PlannedEnding, PlannedSourceAnswer, plan_attempt, plan_source_check
from compute_sim.fleet import Fleet, SimulatedMachine
from compute_sim.host_plan import DISABLED_TRAIT, GPU_TRAITS, NUMA_TRAIT, plan_hosts, tree
from tests.kit.waiting import until
from tests.unit.compute_agent.test_agent import HOSTS, Scripted, Service, destroy, spawn
from tests.unit.compute_agent.test_agent import INSTANCES as OF_AGENT

# --- planned fleets and planned faults


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
    config = SimulatedConfig(hosts=50, gpu_share=0.2)
    plans = plan_hosts(config, "c1", "s")
    assert plans == plan_hosts(config, "c1", "s")
    others = [*plan_hosts(config, "c2", "s"), *plan_hosts(config, "c1", "t")]
    others += plan_hosts(SimulatedConfig(hosts=50, seed=2), "c1", "s")
    assert not {plan.uuid for plan in plans} & {plan.uuid for plan in others}
    assert len({uuid for plan in plans for uuid in (plan.uuid, *plan.gpus)}) == 50 + 10 * 2


def test_shares_are_spread_evenly() -> None:
    plans = plan_hosts(SimulatedConfig(hosts=100, gpu_share=0.1, numa_share=0.25), "c", "s")
    gpus = [n for n, plan in enumerate(plans) if plan.gpus]
    assert len(gpus) == 10 and {b - a for a, b in pairwise(gpus)} == {10}
    assert sum(bool(plan.numa) for plan in plans) == 25


def test_sizes_are_dealt_out_as_often_as_they_are_counted() -> None:
    big, small = HostSize(vcpus=64), HostSize(vcpus=8)
    config = SimulatedConfig(hosts=12, sizes=(big, small), counts=(1, 3), gpu_share=0.0)
    found = [plan.size.vcpus for plan in plan_hosts(config, "c", "s")]
    assert found == [8, 64, 8, 8] * 3, "mixed, each round the same"
    alike = SimulatedConfig(hosts=4, sizes=(big, small), gpu_share=0.0)
    assert [plan.size.vcpus for plan in plan_hosts(alike, "c", "s")] == [64, 8, 64, 8]
    with pytest.raises(ValueError, match="1 counts for 2 sizes"):
        SimulatedConfig(sizes=(big, small), counts=(1,))


def test_trees_are_roots_first_and_hold_the_hardware_once() -> None:
    config = SimulatedConfig(hosts=4, gpu_share=1.0, numa_share=1.0, sizes=(HostSize(vcpus=8, memory_mb=4096),))
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
    (plan,) = plan_hosts(SimulatedConfig(hosts=1, gpu_share=0.0, sizes=(NESTED,)), "c", "s")
    root, _, cell, agent, port = tree(plan, plan.size, enabled=True)
    assert (cell.parent_uuid, agent.parent_uuid, port.parent_uuid) == (root.uuid, cell.uuid, agent.uuid)
    assert [report.receives_from for report in (cell, agent, port)] == [root.uuid, None, root.uuid]
    assert plan.children == (*plan.numa, agent.uuid, port.uuid)


def test_a_host_not_yet_nested_has_the_same_at_its_root() -> None:
    (plan,) = plan_hosts(SimulatedConfig(hosts=1, gpu_share=1.0, sizes=(NESTED,)), "c", "s")
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
    (plan,) = plan_hosts(SimulatedConfig(hosts=1, sizes=(size,), gpu_share=0.0), "c1", "s")
    (root,) = tree(plan, size, enabled=True)
    ratios = {name: inventory.allocation_ratio for name, inventory in root.inventories.items()}
    assert ratios == {"VCPU": 16.0, "MEMORY_MB": 1.5, "DISK_GB": 2.0}


# --- the time that a simulated machine's memory takes to be copied while it migrates


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
    fleet, clock = Fleet.planned(SimulatedConfig(hosts=1), "c1", "s1", Records()), Waits()
    (host,) = fleet.hosts
    held = {host.plan.uuid: {"VCPU": 1, "MEMORY_MB": 1024}, "numa": {"MEMORY_MB": 1024}}
    fleet.put(host.plan.uuid, SimulatedMachine(VM, 1, held))
    driver = SimulatedDriver(fleet, Faults(copy_mb_s=rate), seed=1, clock=clock)
    spec = InstanceSpec(instance_uuid=VM, project_id="p")
    command = ChangeOrder(kind=kind, host_uuid=host.plan.uuid, spec=spec, attempt=1, change_number=1, allocations={})
    assert not (await driver.change(command)).runs
    assert clock.slept == expected


# --- the source's side of the check before a live migration: made before the machine is touched, and only then


ELSEWHERE = "b0000000-0000-4000-8000-00000000000{}"


class Checked(SimulatedDriver):
    """Its order of calls, and a refusal where a test wants one."""

    def __init__(self, fleet: Fleet, faults: Faults) -> None:
        super().__init__(fleet, faults, seed=1, clock=SystemClock())
        self.calls: list[str] = []
        self.refusal: HandOverRefused | None = None
        self.gate: asyncio.Event | None = None

    async def check_source(self, change: ChangeOrder) -> None:
        self.calls.append("check_source")
        if self.refusal is not None:
            raise self.refusal
        await super().check_source(change)

    async def change(self, change: ChangeOrder) -> ChangeResult:
        self.calls.append(change.kind.value)
        if self.gate is not None:
            await self.gate.wait()
        return await super().change(change)


class Rig:
    """One host with one machine, and the answers about its changes."""

    def __init__(self, faults: Faults = Faults()) -> None:  # noqa: B008  (frozen)
        self.fleet = Fleet.planned(SimulatedConfig(hosts=1), "c1", "s1", Records())
        (host,) = self.fleet.hosts
        self.host = host.plan.uuid
        self.fleet.put(self.host, SimulatedMachine(VM, 1, {self.host: {"VCPU": 1}}))
        self.driver = Checked(self.fleet, faults)
        self.answers: list[MachineChanged] = []
        started = asyncio.Event()
        started.set()
        self.jobs = Jobs()
        self.changes = MachineChanges(
            service="s1",
            driver=self.driver,
            records=self.fleet.records,
            jobs=self.jobs,
            send=self.answers.append,
            clock=SystemClock(),
            started=started,
        )
        self._order = 0

    def command(self, kind: ChangeKind, to_host: str = ELSEWHERE.format(1)) -> ChangeMachine:
        self._order += 1
        return ChangeMachine(
            change=kind,
            spec=InstanceSpec(instance_uuid=VM, project_id="p"),
            attempt=1,
            change_number=self._order,
            host_uuid=self.host,
            service="s1",
            allocations={self.host: {"VCPU": 1}},
            to_host=to_host,
        )

    async def apply(self, kind: ChangeKind) -> MachineChanged:
        count = len(self.answers)
        self.changes.handle(self.command(kind), is_host=True)
        await reached(lambda: len(self.answers) > count)
        return self.answers[-1]


async def reached(there: Callable[[], bool]) -> None:
    await until(there)


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_refusal_comes_before_the_machine_is_touched(elsewhere: bool) -> None:
    rig = Rig()
    rig.driver.refusal = HandOverRefused("live.pinned", "a device", retry_other_host=elsewhere)
    answer = await rig.apply(ChangeKind.HAND_OVER_LIVE)
    assert rig.driver.calls == ["check_source"]
    assert (answer.done, answer.refused, answer.retry_other_host, answer.runs) == (False, True, elsewhere, True)
    assert (answer.code, answer.reason) == ("live.pinned", "a device")
    machine = rig.fleet.machine(rig.host, VM)
    assert machine is not None and machine.runs


async def test_a_source_that_passes_is_migrated_and_other_changes_are_not_checked() -> None:
    rig = Rig()
    answer = await rig.apply(ChangeKind.HAND_OVER_LIVE)
    assert (answer.done, answer.refused, answer.retry_other_host) == (True, False, False)
    await rig.apply(ChangeKind.START)
    await rig.apply(ChangeKind.HAND_OVER)
    assert rig.driver.calls == ["check_source", "hand-over-live", "start", "hand-over"]


async def test_a_copy_of_a_change_that_was_answered_changes_nothing() -> None:
    """Seed 4840086: a change had failed and ended, its cell forgot that the command was sent, and its copy was carried
    out: the instance was on record as running, and stood still.
    """
    rig = Rig(Faults(change_fail_rate=1.0))
    command = rig.command(ChangeKind.STOP)
    rig.changes.handle(command, is_host=True)
    await reached(lambda: bool(rig.answers))
    assert not rig.answers[0].done and rig.changes.handle(command, is_host=True) is None
    await rig.apply(ChangeKind.START)
    assert rig.driver.calls == ["stop", "start"] and len(rig.answers) == 2


async def test_a_late_copy_for_an_older_attempt_cancels_no_change_of_the_newer() -> None:
    rig, answered = Rig(), asyncio.Event()
    late = rig.command(ChangeKind.STOP)
    rig.fleet.records.put((rig.host, VM), HostAttempt(2, AttemptPhase.RUNNING))
    rig.fleet.put(rig.host, SimulatedMachine(VM, 2, {rig.host: {"VCPU": 1}}))
    rig.driver.gate = answered
    rig.changes.handle(replace(rig.command(ChangeKind.START), attempt=2), is_host=True)
    await reached(lambda: bool(rig.driver.calls))
    assert rig.changes.handle(late, is_host=True) is None
    answered.set()
    await reached(lambda: not rig.jobs.tasks)
    assert [(one.attempt, one.done, one.code) for one in rig.answers] == [(1, False, "machine.other"), (2, True, "")]


async def test_a_machine_that_was_handed_over_is_not_refused_when_the_command_comes_twice() -> None:
    rig = Rig(Faults(source_refuse_rate=1.0))
    assert (await rig.apply(ChangeKind.HAND_OVER_LIVE)).refused
    rig.fleet.put(rig.host, SimulatedMachine(VM, 1, {rig.host: {"VCPU": 1}}, runs=False))
    assert (await rig.apply(ChangeKind.HAND_OVER_LIVE)).done


def test_some_sources_refuse_every_destination_and_some_only_one() -> None:
    found = {
        plan_source_check(
            Faults(source_refuse_rate=0.3, source_refuse_host_rate=0.3), 1, "h", f"vm{vm}", ELSEWHERE.format(to)
        )
        for vm in range(20)
        for to in range(5)
    }
    assert found == set(PlannedSourceAnswer)
    assert plan_source_check(Faults(change_fail_rate=1.0), 1, "h", VM, "x") is PlannedSourceAnswer.PASSES


def test_a_refusal_of_every_destination_does_not_depend_on_it() -> None:
    faults = Faults(source_refuse_rate=0.5)
    for vm in range(20):
        actions = {plan_source_check(faults, 1, "h", f"vm{vm}", ELSEWHERE.format(to)) for to in range(5)}
        assert len(actions) == 1


# --- which service of a ring has which free node


NODES = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(3_000)]
FEW = ("m1", "m2", "m3")
MORE = (*FEW, "m4")


def members(*services: str, term: int = 1, number: int = 1, ring: str = "r") -> RingMembers:
    return RingMembers(ring=ring, term=term, number=number, members=services)


def test_nodes_are_spread_evenly_whatever_the_order_of_the_members() -> None:
    counts = Counter(owner_of(node, MORE) for node in NODES)
    assert set(counts) == set(MORE) and min(counts.values()) > 0.8 * len(NODES) / len(MORE)
    assert all(owner_of(node, MORE) == owner_of(node, tuple(reversed(MORE))) for node in NODES)
    assert owner_of(NODES[0], ()) is None


def test_one_more_or_one_less_moves_its_own_nodes_and_no_others() -> None:
    before = {node: owner_of(node, FEW) for node in NODES}
    after = {node: owner_of(node, MORE) for node in NODES}
    moved = [node for node in NODES if before[node] != after[node]]
    assert all(after[node] == "m4" for node in moved)
    assert 0.8 < len(moved) / (len(NODES) / len(MORE)) < 1.2


def test_all_that_go_by_one_membership_have_each_node_once() -> None:
    rings = [Ring("r", service) for service in MORE]
    for ring in rings:
        assert not any(ring.owns(node) for node in NODES), "before it knows the members it has none"
        assert ring.apply(members(*MORE))
    assert all(sum(ring.owns(node) for ring in rings) == 1 for node in NODES)


def test_an_older_membership_and_another_rings_change_nothing() -> None:
    ring = Ring("r", "m1")
    assert ring.apply(members("m1", number=2)) and ring.changed.is_set()
    ring.changed.clear()
    for old in (members("m1", "m2"), members("m1", "m2", number=2), members("m2", term=9, ring="other")):
        assert not ring.apply(old)
    assert all(ring.owns(node) for node in NODES) and not ring.changed.is_set()
    assert not ring.apply(members("m1", term=2)) and ring.version == (2, 1), "the same members, of a new keeper"
    assert ring.apply(members("m1", "m2", term=2, number=2))
    assert 0 < sum(ring.owns(node) for node in NODES) < len(NODES)


def test_what_is_remembered_of_nodes_is_bounded() -> None:
    ring = Ring("r", "m1")
    ring.apply(members("m1", "m2"))
    for number in range(100_001):
        ring.owns(str(number))
    assert len(ring._owned) <= 100_000


# --- ironic's answers and others' fields of a node, if they are no text or nested without end


NOT_JSON = (b'{"berth":"\xff"}', b'{"berth":{"database_id":"\xff"}}', b'{"more":' + b"[" * 5_000)


@pytest.mark.parametrize("info", NOT_JSON)
def test_an_entry_of_a_node_that_cannot_be_read_is_no_mark(info: bytes) -> None:
    node = IronicNode(uuid="n", instance_uuid="00000000-0000-4000-8000-000000000001", instance_info=msgspec.Raw(info))
    assert node.owner_tag is None


@pytest.mark.parametrize("answer", [b'{"uuid":"\xff"}', b'{"more":' + b"[" * 5_000])
def test_an_answer_that_cannot_be_read_is_an_unavailable_ironic(answer: bytes) -> None:
    with pytest.raises(DriverUnavailable, match="not understood"):
        _parse(httpx.Response(200, content=answer), IronicNode)


# --- a compute service's messages about its builds that wait


WAITS = WaitingBuild(
    instance_uuid="10000000-0000-4000-8000-000000000001", attempt=1, since=990.0, reason="waits for Ironic"
)


async def test_a_change_that_its_service_did_not_live_to_end_is_answered_by_the_next_start() -> None:
    """Without an answer its conductor waits for as long as the change may take: up to a day."""
    rig = Rig(Faults(change_min_s=60.0, change_max_s=60.0))
    command = rig.command(ChangeKind.STOP)
    rig.changes.handle(command, is_host=True)
    await reached(lambda: "stop" in rig.driver.calls)
    await rig.jobs.stop(0.0)
    again = Service(rig.driver, rig.fleet.records)
    await again.agent.resume()
    (answer,) = [one for one in again.results if isinstance(one, MachineChanged)]
    assert (answer.change_number, answer.attempt, answer.host_uuid) == (command.change_number, 1, rig.host)
    assert (answer.done, answer.runs, answer.code) == (False, None, "service.restarted")
    rig.fleet.records.reported([answer])
    last = Service(rig.driver, rig.fleet.records)
    await last.agent.resume()
    assert not [one for one in last.results if isinstance(one, MachineChanged)]


class World:
    """A driver and a bus."""

    def __init__(self) -> None:
        self.now: list[WaitingBuild] = []
        self.published: list[Message] = []
        self.is_down = False

    def waiting(self) -> Sequence[WaitingBuild]:
        return self.now

    async def publish(self, message: Message, *, cause: str = "") -> None:
        if self.is_down:
            raise BusError("down")
        self.published.append(message)

    async def publish_all(self, messages: Sequence[tuple[Message, str]]) -> None:
        raise AssertionError


async def test_waiting_builds_are_published_while_they_wait_and_once_more_when_none_does() -> None:
    world = World()
    reporter = WaitingReporter(world, world, service="metal1", cell="cell1", clock=SystemClock(), interval_s=2.0)
    await reporter.look()
    assert world.published == []
    world.now = [WAITS]
    await reporter.look()
    await reporter.look()
    world.now, world.is_down = [], True
    await reporter.look()
    world.is_down = False
    await reporter.look()
    await reporter.look()
    some = BuildsWaiting(service="metal1", cell="cell1", waiting=(WAITS,), lasts_s=6.0)
    assert world.published == [some, some, BuildsWaiting(service="metal1", cell="cell1", lasts_s=6.0)]


async def test_more_than_a_message_may_hold_are_left_out() -> None:
    world = World()
    world.now = [WAITS] * (MAX_WAITING + 1)
    await WaitingReporter(world, world, service="m", cell="c", clock=SystemClock(), interval_s=2.0).look()
    (message,) = world.published
    assert isinstance(message, BuildsWaiting) and len(message.waiting) == MAX_WAITING


# --- hosts that a service offers again once what it owes there is destroyed


KEY = (HOSTS[0], OF_AGENT[0])
TRIES = 3  # of one destruction


class Owing:
    """A service that has just started and owes a destruction, which its driver refuses."""

    def __init__(self) -> None:
        bus: Any = None
        self.driver = Scripted()
        self.service = Service(self.driver)
        self.offered: list[str] = []
        records = self.service.records
        self.offering = StartupGate(
            bus, service="s", records=records, clock=SystemClock(), on_ready=self.offered.extend
        )
        self.service.destroys._on_done = self.offering.on_destroys_done

    async def gives_up(self) -> None:
        """The marker comes back while it tries, and then it has tried often enough."""
        await self.service.agent.resume()
        await self.service.carry_out(spawn(0))
        self.driver.failures = TRIES
        self.service.agent.handle([destroy(0)])
        self.offering.on_barrier(QueueBarrier(service="s", epoch=0), self.service.destroys.pending())
        await self.service.rest()
        assert self.service.results[-1].code == "destroy.failed"
        assert not self.offering.is_ready(HOSTS[0]) and self.offering.is_ready(HOSTS[1])


async def test_a_host_is_offered_when_what_was_given_up_is_destroyed_by_a_further_command() -> None:
    """The conductor was quicker with its second command than the service with its own, and no build came any more."""
    here = Owing()
    await here.gives_up()
    await here.service.carry_out(destroy(0))
    assert here.service.results[-1].outcome is ComputeOutcome.DESTROYED
    assert here.offering.is_ready(HOSTS[0]) and here.offered == [HOSTS[0]] and not here.service.destroys.pending()


async def test_a_host_is_offered_when_a_newer_attempt_has_cleared_away_what_was_given_up() -> None:
    here = Owing()
    await here.gives_up()
    await here.service.carry_out(spawn(0, 2))
    assert here.driver.machines == {KEY: 2}
    assert here.offering.is_ready(HOSTS[0]) and not here.service.destroys.pending()


async def test_a_host_is_offered_when_nothing_is_owed_there_any_more_though_nothing_was_cleared_away() -> None:
    """A newer attempt failed because it could not clear the older one away: that is its conductor's to undo."""
    here = Owing()
    await here.gives_up()
    here.driver.failures = TRIES
    await here.service.carry_out(spawn(0, 2))
    entry = here.service.records.get(KEY)
    assert entry is not None and entry.phase is AttemptPhase.FAILED
    here.service.destroys.resume_owed()
    await here.service.rest()
    assert here.offering.is_ready(HOSTS[0]) and not here.service.destroys.pending()
    await here.service.carry_out(destroy(0))
    assert here.service.results[-1].outcome is ComputeOutcome.DESTROYED and not here.driver.machines


async def test_a_retry_in_the_turn_in_which_a_destruction_fails_does_not_drop_it() -> None:
    here = Owing()
    loop, retry = asyncio.get_running_loop(), here.service.destroys.resume_owed
    here.service.agent._results._send = lambda one: (here.service.results.append(one), loop.call_soon(retry))[0]
    await here.gives_up()
    retry()
    await here.service.rest()
    assert here.offering.is_ready(HOSTS[0]) and not here.driver.machines


async def test_a_host_is_offered_when_the_service_itself_has_destroyed_what_was_given_up() -> None:
    here = Owing()
    await here.gives_up()
    here.service.destroys.resume_owed()
    await here.service.rest()
    assert here.service.results[-1].outcome is ComputeOutcome.DESTROYED
    assert here.offering.is_ready(HOSTS[0]) and not here.service.destroys.pending()

"""The states that the simulation calls a breach, and those that it does not."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext

import pytest
from msgspec.structs import replace

from berth.sim import loop as virtual
from berth.sim.breaker_watch import BreakerWatch
from berth.sim.clock import SimClock
from berth.sim.draw import plan_of
from berth.sim.event_log import EventLog
from berth.sim.harm_watch import LATE_REPORT_S, RACE_S, HarmWatch
from berth.sim.load import Client
from berth.sim.loop import Process
from berth.sim.message_watch import MessageWatch
from berth.sim.moves import Mover
from berth.sim.network import SimTransport
from berth.sim.operator import Operator
from berth.sim.other_tenants import OtherTenants
from berth.sim.plan import Action, Order
from berth.sim.rest import _breaches, _inventories, _leftovers, _running, _stuck, _unfenced, facts_of
from berth.sim.run import run
from berth.sim.shrink import _without_metal
from berth.sim.watch import SENT_AGAIN_S, Breach, MachineWatch
from berth.sim.wiring import conductor
from berth.sim.world import World
from bus.bus import API
from bus.contracts.base import MAX_AMOUNT, Message, Meta
from bus.contracts.build import AttemptRecord, HostRecord, HostsPage
from bus.contracts.catalogue import BY_QUEUE
from bus.contracts.cell import CellBuild, ComputeOutcome, ComputeResult, InstanceSpec, Selection
from bus.contracts.moves import MoveKind
from bus.contracts.operations import AdminState, AdminStateSet, HostAdminState, SetAdminState
from bus.contracts.placement import Claim, ClaimOption, Inventory
from bus.memory import MemoryTransport
from bus.topology import QueuePlan
from bus.wire import pack, single
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.fences import Fence
from cell_conductor.domain.instance import Instance, Move, State
from cell_conductor.domain.leases import Lease, LeaseState
from cell_conductor.domain.report import UNSURE, Unexplained, UnexplainedKind
from cell_conductor.side_tasks import purge_forever
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from cell_conductor.store.safety import UnexplainedRecord
from compute_sim.drivers.ironic.node import Mark
from compute_sim.drivers.ironic.request import take_patch
from compute_sim.fleet import Fleet, Guest
from placement_worker.domain.values import ConsumerState, Provider, stored_inventory
from placement_worker.store.memory_table import ConsumerRow

INSTANCE = "00000000-0000-4000-9000-000000000001"
HERE, LEFT = (f"00000000-0000-4000-8000-00000000000{n}" for n in range(2))

MARK = Mark("00000000-0000-4000-c000-000000000000", "c1", "m0", INSTANCE, 1)


def claim(amount: int) -> Claim:
    return Claim(consumer=INSTANCE, options=(ClaimOption(allocations={LEFT: {"VCPU": amount}}),), project_id="red")


def build(*hosts: str) -> CellBuild:
    selections = tuple(
        Selection(host_uuid=host, host="h", service="s", allocations={host: {"VCPU": 1}}) for host in hosts
    )
    spec = InstanceSpec(instance_uuid=INSTANCE, project_id="red")
    return CellBuild(spec=spec, selections=selections, consumer_generation=1)


@pytest.mark.parametrize(
    ("message", "sent_before", "breaks"),
    [
        pytest.param(claim(1), None, True, id="a claim"),
        pytest.param(claim(MAX_AMOUNT), None, False, id="a question whether something is held"),  # seed 1026
        pytest.param(build(HERE), None, False, id="a build elsewhere"),
        pytest.param(build(HERE, LEFT), None, True, id="a build with it as an alternate"),
        # Seed 1795412056: the schedulers' database was what it had been before the command was confirmed.
        pytest.param(build(HERE, LEFT), build(HERE, LEFT), False, id="the same command, published once more"),
        pytest.param(
            build(HERE, LEFT), replace(build(HERE, LEFT), requested_at=1.0), True, id="another decision of one build"
        ),
    ],
)
async def test_no_build_goes_to_a_host_that_has_left_for_good(
    message: Message, sent_before: Message | None, *, breaks: bool
) -> None:
    world = World(replace(plan_of(1), metal=None), EventLog())
    watch = MessageWatch(world)
    if sent_before is not None:
        watch.published(API, single(pack(sent_before, Meta(id="1")), "berth", "key"))
    world.left[LEFT] = "dead"
    world.probing = True
    watch.published(API, single(pack(message, Meta(id="1")), "berth", "key"))
    assert world.breach.done() is breaks


@pytest.mark.parametrize(
    ("destroyer", "breaks"),
    [
        pytest.param("twin-s00", False, id="the other process of the name answered"),  # seed 1795412589
        pytest.param("compute-s00", True, id="the process itself, or its next life"),
        pytest.param("compute-s01", True, id="another service, which the host had belonged to"),
    ],
)
def test_a_build_in_which_a_process_stood_still_may_end_after_its_name_has_destroyed_it(
    destroyer: str, *, breaks: bool
) -> None:
    async def main() -> None:
        watch = MachineWatch()
        result = ComputeResult(
            instance_uuid=INSTANCE, attempt=1, host_uuid=HERE, service="s00", outcome=ComputeOutcome.DESTROYED
        )
        Process(destroyer).context.run(watch.result, result)
        guest = Guest(INSTANCE, 1, {HERE: {"VCPU": 1}}, deployment="d")
        with pytest.raises(Breach, match="was destroyed") if breaks else nullcontext():
            Process("compute-s00").context.run(watch.put, HERE, guest)
        assert watch.is_untold(HERE, INSTANCE, 1) is not breaks

    virtual.run(main, on_unseen=pytest.fail)


@pytest.mark.parametrize(
    ("runs", "breaks"),
    [
        pytest.param(False, False, id="switched off"),  # seed 1795417062
        pytest.param(True, True, id="built again"),
    ],
)
def test_what_the_former_service_of_a_host_destroyed_may_be_switched_off_there(*, runs: bool, breaks: bool) -> None:
    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        service = world.plan.services[0][1]
        fleet = world.fleets[service]
        host = next(iter(fleet.hosts)).plan.uuid
        guest = Guest(INSTANCE, 1, {host: {"VCPU": 1}}, deployment="d")
        Process(f"compute-{service}").context.run(fleet.put, host, guest)
        result = ComputeResult(
            instance_uuid=INSTANCE, attempt=1, host_uuid=host, service="s99", outcome=ComputeOutcome.DESTROYED
        )
        Process("compute-s99").context.run(world.machines.result, result)
        found: list[Breach] = []
        fleet.fail = found.append
        Process("mover").context.run(fleet.put, host, replace(guest, runs=runs))
        assert [one.name for one in found] == (["fenced_for_good"] if breaks else [])

    virtual.run(main, on_unseen=pytest.fail)


@pytest.mark.parametrize(
    ("stranded", "used", "breaks"),
    [
        pytest.param(False, 0, True, id="still reported"),
        pytest.param(True, 1, False, id="in use"),
        pytest.param(True, 0, True, id="a retired tree without a consumer"),
    ],
)
async def test_what_was_taken_out_stays_only_while_it_is_in_use(*, stranded: bool, used: int, breaks: bool) -> None:
    world = World(replace(plan_of(1), metal=None), EventLog())
    world.fleets.clear()
    inventory = replace(stored_inventory(Inventory(total=4)), stranded=stranded)
    world.book.providers[LEFT] = Provider(
        uuid=LEFT, name="h", parent=None, root=LEFT, generation=1, shape=1, inventories={"VCPU": inventory},
        used={"VCPU": used} if used else {}, traits=(), aggregates=(),
    )  # fmt: skip
    world.left[LEFT] = "drained"
    assert any("left_for_good" in words for words in _inventories(world)) is breaks


@pytest.mark.parametrize(("used", "breaks"), [(1, False), (0, True)])
async def test_what_was_taken_out_stays_while_a_part_of_its_tree_is_in_use(*, used: int, breaks: bool) -> None:
    """Another client had a reservation on a NUMA node of it (seed 1795337330465)."""
    world = World(replace(plan_of(1), metal=None), EventLog())
    world.fleets.clear()
    root = Provider(
        uuid=LEFT, name="h", parent=None, root=LEFT, generation=1, shape=1, inventories={}, used={}, traits=(),
        aggregates=(),
    )  # fmt: skip
    world.book.providers[LEFT] = root
    world.book.providers[HERE] = replace(root, uuid=HERE, name="h-node", parent=LEFT, used={"VCPU": used})
    world.left[LEFT] = "drained"
    assert any("left_for_good" in words for words in _inventories(world)) is breaks


async def test_a_half_built_machine_that_came_back_with_an_older_disk_is_not_waited_for() -> None:
    """Its service had removed it, and no driver lists what is half-built (seed 1795337330351)."""
    world = World(replace(plan_of(1), metal=None), EventLog())
    fleet = world.fleets[world.plan.services[0][1]]
    host = next(iter(fleet.hosts)).plan.uuid

    def left() -> list[str]:
        return [words.partition(":")[0] for words in _leftovers(world)]

    Fleet.put(fleet, host, Guest(INSTANCE, 1, {}, False))
    assert left() == ["no_leftovers"]
    world.move_watch.brought_back.add((host, INSTANCE, 1))
    assert left() == []
    Fleet.put(fleet, host, Guest(INSTANCE, 2, {}, False))
    assert left() == ["no_leftovers"]


@pytest.mark.parametrize(
    ("is_fenced", "is_dead", "waits"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_move_waits_for_the_fence_of_a_burnt_host(*, is_fenced: bool, is_dead: bool, waits: bool) -> None:
    """It came back after its fence, and burnt down again without one (seed 1795402091)."""

    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        cell, service = world.plan.services[0]
        here = Selection(host_uuid=HERE, host="h", service=service, allocations={HERE: {"VCPU": 1}})
        spec = InstanceSpec(instance_uuid=INSTANCE, project_id="red")
        move = Move(request_id="m", kind=MoveKind.RESIZE, source=here, source_attempt=1, spec=spec)
        moving = Instance(uuid=INSTANCE, state=State.FINISHING, spec=spec, selections=(here,), attempt=2, move=move)
        world.cells[cell].instances[INSTANCE] = moving
        if is_dead:
            world.left[HERE] = "dead"
        if is_fenced:
            world.cells[cell].fences[HERE] = Fence(host_uuid=HERE, host="h", version=1)
        assert _unfenced(world) == ({INSTANCE} if waits else set())

    virtual.run(main, on_unseen=pytest.fail)


@pytest.mark.parametrize(("state", "may"), [(LeaseState.UP, True), (LeaseState.SILENT, False), (None, False)])
def test_no_operator_states_falsely_that_a_silent_host_is_off(state: LeaseState | None, *, may: bool) -> None:
    """The statement is all the proof that the cell can have; it evacuated a machine that ran (seed 1795400627)."""

    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        cell, service = world.plan.services[0]
        here = Selection(host_uuid=HERE, host="h", service=service, allocations={HERE: {"VCPU": 1}})
        if state is not None:
            world.cells[cell].leases[service] = Lease(service=service, epoch=1, interval_s=1.0, state=state)
        active = Instance(uuid=INSTANCE, state=State.ACTIVE, selections=(here,), attempt=1)
        assert Mover(world)._is_up(cell, active) is may

    virtual.run(main, on_unseen=pytest.fail)


def test_a_host_is_not_taken_out_while_its_fence_is_on_record() -> None:
    """Its service could not destroy what it had lost on a host that it does not have any more (seed 1795400646)."""

    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        cell, service = world.plan.services[0]
        host = next(iter(world.fleets[service].hosts)).plan.uuid
        world.cells[cell].fences[host] = Fence(host_uuid=host, host="h", version=1, lifting=True)
        emptied = asyncio.create_task(Operator(world, Client(world))._emptied(service, host))
        await asyncio.sleep(30.0)
        assert not emptied.done()
        del world.cells[cell].fences[host]
        assert await emptied

    virtual.run(main, on_unseen=pytest.fail)


def test_rows_of_an_outbox_that_come_and_go_are_not_stuck() -> None:
    """A move that waits for a fence is queried for ever (seed 1795400820)."""

    async def main() -> None:
        world = World(plan_of(1), EventLog())
        stuck = []
        for row in (1, 2, 3, 3, 3, 3):
            stuck.append(_stuck(world, "cell", {row}))
            await asyncio.sleep(1.0)
        assert stuck == [0, 0, 0, 0, 0, 1]

    virtual.run(main, on_unseen=pytest.fail)


def test_a_host_that_a_move_has_left_is_not_empty_until_the_move_has_ended() -> None:
    """Its machine was lost, and the move went back to a host that its service did not have any more (seed
    1795337330129).
    """
    found: list[list[str]] = []

    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        cell, service = world.plan.services[0]
        source, here = (
            Selection(host_uuid=uuid, host="h", service=service, allocations={uuid: {"VCPU": 1}})
            for uuid in (LEFT, HERE)
        )
        spec = InstanceSpec(instance_uuid=INSTANCE, project_id="red")
        move = Move(request_id="m", kind=MoveKind.MIGRATE, source=source, source_attempt=1, spec=spec)
        moving = Instance(
            uuid=INSTANCE, state=State.PREPARING, spec=spec, selections=(source, here), position=1, attempt=2, move=move
        )
        arrived = replace(moving, state=State.ACTIVE, selections=(here,), position=0, move=None)
        operator = Operator(world, Client(world))
        world.harm.requested[INSTANCE] = None
        for instance in (moving, arrived):
            world.cells[cell].instances[INSTANCE] = instance
            found.extend(operator._tenants(service, host) for host in (LEFT, HERE))

    virtual.run(main, on_unseen=pytest.fail)
    assert found == [[INSTANCE], [INSTANCE], [], [INSTANCE]]


@pytest.mark.parametrize("state", [AdminState.FENCED, AdminState.ENABLED])
def test_an_operator_ends_a_fence_without_force(state: AdminState, monkeypatch: pytest.MonkeyPatch) -> None:
    """By force its cell is notified every five minutes only, longer than the bound on rest (seed 1795337330435)."""
    sent: list[Message] = []

    async def answered(_mover: Mover, command: Message, _reply: type[Message], _tries: int | None) -> Message:
        sent.append(command)
        return AdminStateSet(host=HostAdminState(host_uuid=HERE, host="h", state=state))

    async def main() -> None:
        assert await Mover(World(plan_of(1), EventLog()))._decide(HERE, "c1", state, None)

    monkeypatch.setattr(Mover, "_answered", answered)
    virtual.run(main, on_unseen=pytest.fail)
    (command,) = sent
    assert isinstance(command, SetAdminState)
    assert command.force is (state is AdminState.FENCED)


def test_an_operator_leaves_a_host_off_until_its_cell_has_acknowledged_the_fence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 1795360866: the host built what waited for it, and the fence that came later took that for dead."""
    states = [None, (3, 3), (7, 3), (7, 7)]  # the last but one is this fence, not acknowledged; before it another's

    async def answered(_mover: Mover, _query: Message, _reply: type[Message], _tries: int | None) -> Message:
        shown = states.pop(0)
        if shown is None:
            return HostsPage()
        admin = HostAdminState(host_uuid=HERE, host="h", state=AdminState.FENCED, fence=shown[0], acknowledged=shown[1])
        return HostsPage(hosts=(HostRecord(uuid=HERE, name="h", admin=admin),))

    async def main() -> None:
        await Mover(World(plan_of(1), EventLog()))._acknowledged(HERE, 7, "s")

    monkeypatch.setattr(Mover, "_answered", answered)
    virtual.run(main, on_unseen=pytest.fail)
    assert not states


def test_a_service_that_dies_while_it_stops_has_stopped() -> None:
    """Seed 2050: it was waited for until the bound on rest, and taken for something that does not come to an end."""
    plan = plan_of(1).without_faults()
    service = plan.services[0][1]
    acts = [Order(at=10.0, action=Action.LEAVE, service=service), Order(at=10.0004, action=Action.DIE, service=service)]
    builds = [order for order in plan.orders if order.action is Action.BUILD and order.at < acts[0].at]
    result = run(replace(plan, orders=(*builds, *acts)))
    assert result.breach == "", result.detail


def test_what_a_host_lost_just_before_it_burnt_down_cannot_be_known() -> None:
    """Seeds 2384 and 2436: a host is reinstalled and its service dies before it could report that machines are gone."""
    plan = plan_of(1).without_faults()
    service, hosts = plan.cells[0].services[0]
    builds = [order for order in plan.orders if order.action is Action.BUILD]
    acts = [Order(at=58.0, action=Action.LOSE, service=service, host=host) for host in range(hosts)]
    acts.append(Order(at=58.001, action=Action.DIE, service=service))
    result = run(replace(plan, orders=(*builds, *acts)))
    assert result.breach == "", result.detail


async def test_what_another_client_claims_without_limits_is_no_breach_of_a_quota() -> None:
    """Seed 2168: a claim carries the limits that it is held to, and another client's carried none."""
    world = World(replace(plan_of(1), metal=None, quota={"VCPU": 6}), EventLog())
    world.peer_watch.requested(Order(at=0.0, action=Action.BUILD, uuid=INSTANCE, flavor="m1.tiny", project="red"))
    for project, breaks in (("theirs", False), ("red", True)):
        consumer = ConsumerState(1, 1, project, "u", "INSTANCE", {HERE: {"VCPU": 7}})
        world.book.providers[HERE] = Provider(
            uuid=HERE, name="h", parent=None, root=HERE, generation=1, shape=1, inventories={}, used={}, traits=(),
            aggregates=(),
        )  # fmt: skip
        world.book.consumers[INSTANCE] = ConsumerRow(consumer, None, 0.0)
        if breaks:
            with pytest.raises(Breach, match="red holds 7 VCPU of 6"):
                world.peer_watch()
        else:
            world.peer_watch()


def test_a_plan_without_bare_metal_names_no_schema_of_it() -> None:
    """Seed 1210 could not be shrunk: without metal there is no schema `ironic_sync` to set back."""
    acts = (Action.BACKUP, Action.RESTORE)
    orders = tuple(Order(at=1.0, action=act, service=schema) for act in acts for schema in ("ironic_sync", "placement"))
    assert [order.service for order in _without_metal(replace(plan_of(1), orders=orders)).orders] == ["placement"] * 2


def test_a_service_that_burnt_down_does_not_start_with_its_cell() -> None:
    """Seed 3106: its cell joined later, and what was to be gone was announced once more."""

    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        service = world.plan.services[0][1]
        world.dead.add(service)
        OtherTenants(world, Client(world))._start(f"compute-{service}")
        assert not world.lives

    virtual.run(main, on_unseen=pytest.fail)


def test_a_process_that_was_killed_while_another_had_its_name_never_gets_it() -> None:
    """Seed 10751: its connection went on waiting for the name, and had it once the other process was cut off."""

    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        broker = world.brokers[API]
        first, second = (
            SimTransport(broker, Process(name), world.network_faults, world.event_log) for name in ("first", "second")
        )
        world.network_faults.calm()
        for transport in (first, second):
            await transport.open()
        await second.declare_queue(BY_QUEUE["compute.control.{service}"], "compute.control.s", [])
        second.cut(0.5)
        await first.declare_queue(BY_QUEUE["compute.control.{service}"], "compute.control.s", [])
        await asyncio.sleep(5.0)
        assert not second.connected, "the first one has the name"
        second.kill()
        first.cut(5.0)
        await asyncio.sleep(10.0)
        assert first.connected and not second.connected

    virtual.run(main, on_unseen=pytest.fail)


@pytest.mark.parametrize("skew_s", [0.0, 30.0, 240.0])
def test_a_delete_that_came_first_is_remembered_as_long_as_planned_whatever_the_clocks(skew_s: float) -> None:
    """Seed 70159: buried by one clock and forgotten by another a second later, so its build was built, and stayed."""
    plan = replace(plan_of(1), skew_s=skew_s, keep_s=50.0)

    async def main() -> None:
        table = MemoryInstanceTable(SimClock())
        buried = Instance(uuid=INSTANCE, state=State.TOMBSTONE, since=SimClock(-skew_s).time())
        table.instances[INSTANCE] = buried
        config = conductor(plan)
        store = MemoryInstances(table.session())
        forgetting = asyncio.create_task(purge_forever(store, SimClock(skew_s), config))
        await asyncio.sleep(plan.keep_s - 1.0)
        assert INSTANCE in table.instances
        await asyncio.sleep(1.0 + 2 * config.purge_interval_s)
        assert INSTANCE not in table.instances
        forgetting.cancel()

    virtual.run(main, on_unseen=pytest.fail)


@pytest.mark.parametrize(
    ("looked_at", "state", "late_s", "breaks"),
    [
        pytest.param("available", "manageable", 0.3, False, id="it left while the request was on its way"),  # seed 90
        pytest.param("available", "manageable", RACE_S + 0.1, True, id="looked at long ago"),
        pytest.param("manageable", "manageable", 0.3, True, id="seen to be not free"),
        pytest.param(None, "manageable", 0.3, True, id="never looked at"),
    ],
)
def test_a_node_that_leaves_available_under_a_take_is_no_breach(
    looked_at: str | None, state: str, late_s: float, *, breaks: bool
) -> None:
    now = 100.0
    harm = HarmWatch(lambda: now + late_s)
    node = {"uuid": HERE, "instance_uuid": None, "provision_state": state}
    if looked_at is not None:
        harm.looked("compute-m0", {**node, "provision_state": looked_at}, now)
    take = json.dumps(take_patch(InstanceSpec(instance_uuid=INSTANCE, project_id="red"), MARK, None)).encode()
    with pytest.raises(Breach, match="of no owner") if breaks else nullcontext():
        harm.acted("compute-m0", "PATCH", node, None, take)
    with pytest.raises(Breach, match="of no owner"):
        harm.acted("compute-m0", "PUT", node, None, b'{"target":"active"}')


@pytest.mark.parametrize(("job", "breaks"), [("build", False), ("other", True)])
def test_what_a_build_acts_upon_is_what_it_has_seen_itself(job: str, *, breaks: bool) -> None:
    """Seed 61056 at d0562af: the service's own listing came between, and saw the node that was enrolled anew."""
    harm = HarmWatch(lambda: 102.0)
    node = {"uuid": HERE, "instance_uuid": None, "provision_state": "manageable"}
    harm.looked("compute-m0", {**node, "provision_state": "available"}, 100.0, "build")
    harm.looked("compute-m0", node, 101.0, "listing")
    take = json.dumps(take_patch(InstanceSpec(instance_uuid=INSTANCE, project_id="red"), MARK, None)).encode()
    with pytest.raises(Breach, match="of no owner") if breaks else nullcontext():
        harm.acted("compute-m0", "PATCH", node, None, take, job=job)


@pytest.mark.parametrize("set_back", [True, False])
def test_a_breaker_that_its_cell_has_forgotten_holds_nothing(*, set_back: bool) -> None:
    """Seed 81373: the cell's database was set back to before the breaker opened."""
    now = 100.0

    async def main() -> None:
        nonlocal now
        watch = BreakerWatch(replace(plan_of(1), breaker_limit=2, fault_events=()), lambda: now)
        table, other = MemoryInstanceTable(SimClock()), MemoryInstanceTable(SimClock())
        chosen = Selection(host_uuid=HERE, host="h", service="s", allocations={})
        active = Instance(uuid=INSTANCE, state=State.ACTIVE, attempt=1, selections=(chosen,))
        table.instances[INSTANCE] = active
        table.breakers["s"] = Breaker(service="s", tripped_at=now)
        watch.committed(table, ())
        watch.committed(other, ())  # of another cell
        if set_back:
            del table.breakers["s"]
            watch.committed(table, ())
        now += RACE_S + 1.0
        table.instances[INSTANCE] = replace(active, state=State.FAILED, code="instance.lost")
        with nullcontext() if set_back else pytest.raises(Breach, match="breaker_holds"):
            watch.committed(table, ())

    virtual.run(main, on_unseen=pytest.fail)


@pytest.mark.parametrize(
    ("owners", "late_s", "breaks"),
    [
        pytest.param((LEFT, None), 8.7, False, id="the scan saw the node of another, who then left it"),  # seed 80661
        pytest.param((LEFT, INSTANCE), 2.4, False, id="the scan saw the node of another, who gave it back"),
        pytest.param((LEFT, None), LATE_REPORT_S + 0.1, True, id="it has been left for long"),
        pytest.param((LEFT, INSTANCE), LATE_REPORT_S + 0.1, True, id="it has been given back for long"),
        pytest.param((None,), 0.0, True, id="its owner is cleared and its mark is there"),
        pytest.param((), 0.0, True, id="it was never taken away"),
    ],
)
def test_what_was_lost_when_its_host_looked_may_be_there_again(
    owners: tuple[str | None, ...], late_s: float, *, breaks: bool
) -> None:
    async def main() -> None:
        world = World(next(plan for seed in range(1, 40) if (plan := plan_of(seed)).metal), EventLog())
        assert world.ironic is not None
        pool = world.ironic.pool
        node = next(one for one in pool.nodes.values() if one["instance_uuid"] is None)
        mark = {"berth": {"instance": INSTANCE}}
        pool._change(node, instance_uuid=INSTANCE, provision_state="active", instance_info=mark)
        for owner in owners:
            pool._change(node, instance_uuid=owner)
        chosen = Selection(host_uuid=node["uuid"], host="h", service="m0", allocations={})
        active = Instance(uuid=INSTANCE, state=State.ACTIVE, attempt=0, selections=(chosen,))
        world.machines.instances("c1", {INSTANCE: active})
        await asyncio.sleep(late_s)
        lost = replace(active, state=State.FAILED, code="instance.lost")
        with pytest.raises(Breach, match="lost_was_lost") if breaks else nullcontext():
            world.machines.instances("c1", {INSTANCE: lost})

    virtual.run(main, on_unseen=pytest.fail)


@pytest.mark.parametrize(
    ("gone", "late_s", "breaks"),
    [
        pytest.param(True, 4.7, False, id="the scan was made before"),  # seed 1795406552
        pytest.param(True, LATE_REPORT_S + 0.1, True, id="it has been back for long"),
        pytest.param(False, 4.7, True, id="it was there all the time"),
    ],
)
def test_what_was_lost_may_be_back_with_its_hosts_disks(late_s: float, *, gone: bool, breaks: bool) -> None:
    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        world.harm.requested[INSTANCE] = None
        service = world.plan.services[0][1]
        fleet = world.fleets[service]
        host = next(iter(fleet.hosts)).plan
        tenants = OtherTenants(world, Client(world))
        fleet.put(host.uuid, Guest(INSTANCE, 1, {host.uuid: {"VCPU": 1}}, deployment="d"))
        chosen = Selection(host_uuid=host.uuid, host="h", service=service, allocations={})
        active = Instance(uuid=INSTANCE, state=State.ACTIVE, attempt=1, selections=(chosen,))
        world.machines.instances("c1", {INSTANCE: active})
        await tenants._copy(Order(at=0.0, action=Action.COPY, uuid="copy", service=service))
        if gone:
            fleet.lose(host.uuid)
        await tenants._bring_back(Order(at=0.0, action=Action.BRING_BACK, uuid="copy", service=service))
        await asyncio.sleep(late_s)
        lost = replace(active, state=State.FAILED, code="instance.lost")
        with pytest.raises(Breach, match="lost_was_lost") if breaks else nullcontext():
            world.machines.instances("c1", {INSTANCE: lost})

    virtual.run(main, on_unseen=pytest.fail)


def went_on(code: str) -> tuple[Instance, Instance]:
    """(active, as its restored record has it a while later: built elsewhere because its attempt ended with this)."""
    chosen = Selection(host_uuid=HERE, host="h", service="s", allocations={})
    active = Instance(uuid=INSTANCE, state=State.ACTIVE, attempt=1, selections=(chosen,))
    ended = AttemptRecord(attempt=1, host="h", outcome="failed", code=code, at=1.0)
    return active, replace(active, state=State.RECLAIMING, history=(ended,))


@pytest.mark.parametrize(
    ("code", "breaks"), [("instance.lost", False), ("host.fenced", False), ("spawn.timeout", True)]
)
def test_the_history_of_a_restored_build_gives_a_reason(code: str, *, breaks: bool) -> None:
    """Seed 1795361046: the cell was set back to before the build was active, and its host reported it lost. The order
    of that day ended the machine when the host's disks were set back as well.
    """
    harm = HarmWatch(lambda: 0.0)
    harm.requested[INSTANCE] = None
    active, reclaiming = went_on(code)
    for record in (active, replace(active, state=State.BUILDING, doubted=True), reclaiming):
        harm.record({INSTANCE: record})
    guest = Guest(INSTANCE, 1, {HERE: {"VCPU": 1}}, deployment="d")
    with pytest.raises(Breach, match="was active as attempt 1") if breaks else nullcontext():
        harm.destroyed(HERE, guest)


@pytest.mark.parametrize(
    ("went_on", "outcome", "set_back", "breaks"),
    [
        # Seeds 1795410025, 1795410630
        pytest.param(State.BUILDING, "timed_out", True, False, id="destroyed by the command of that day"),
        pytest.param(State.BUILDING, "timed_out", False, True, id="no database was set back"),
        pytest.param(None, "timed_out", True, True, id="its build never went on elsewhere"),
        pytest.param(State.FAILED, "timed_out", True, False, id="no host was left"),  # seed 1795415582
        pytest.param(State.FAILED, "active", True, True, id="failed otherwise than by time"),
    ],
)
def test_an_attempt_that_is_active_again_may_be_destroyed_by_an_earlier_command(
    *, went_on: State | None, outcome: str, set_back: bool, breaks: bool
) -> None:
    harm = HarmWatch(lambda: 0.0)
    harm.requested[INSTANCE] = None
    chosen = Selection(host_uuid=HERE, host="h", service="s", allocations={})
    building = Instance(uuid=INSTANCE, state=State.BUILDING, attempt=1, selections=(chosen, chosen))
    tried = AttemptRecord(attempt=1, host="h", outcome=outcome, code="spawn.timeout")
    if went_on is State.BUILDING:
        harm.record({INSTANCE: replace(building, attempt=2, position=1, history=(tried,))})
    elif went_on is not None:
        harm.record({INSTANCE: replace(building, state=went_on, history=(tried,))})
    if set_back:
        harm.taken_back = {INSTANCE}
    harm.record({INSTANCE: building})
    harm.record({INSTANCE: replace(building, state=State.ACTIVE)})
    with pytest.raises(Breach, match="was active as attempt 1") if breaks else nullcontext():
        harm.destroyed(HERE, Guest(INSTANCE, 1, {HERE: {"VCPU": 1}}, deployment="d"))


@pytest.mark.parametrize("runs", [None, 1])
def test_what_a_restored_build_has_lost_does_not_run(runs: int | None) -> None:
    active, reclaiming = went_on("instance.lost")
    watch = MachineWatch()
    watch.put(HERE, Guest(INSTANCE, 1, {HERE: {"VCPU": 1}}, deployment="d"))
    watch.instances("c1", {INSTANCE: active})
    watch.instances("c1", {INSTANCE: replace(active, state=State.BUILDING, doubted=True)})
    watch.runs = lambda _host, _instance: runs
    with pytest.raises(Breach, match="lost_was_lost") if runs else nullcontext():
        watch.instances("c1", {INSTANCE: reclaiming})
    if runs is None:  # it is known by then, and its machine may be brought back
        watch.runs = lambda _host, _instance: 1
        watch.instances("c1", {INSTANCE: replace(reclaiming, deadline=2.0)})


@pytest.mark.parametrize(
    ("other", "breaks"),
    [
        pytest.param("twin", False, id="another process of the name"),  # seed 1795412951
        pytest.param("compute", True, id="the next life of the process"),
    ],
)
def test_what_another_process_of_the_name_answered_for_may_stay_half_built(other: str, *, breaks: bool) -> None:
    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        service = world.plan.services[0][1]
        host = next(iter(world.fleets[service].hosts)).plan.uuid
        guest = Guest(INSTANCE, 1, {host: {"VCPU": 1}}, deployment="d", complete=False)
        Process(f"compute-{service}").context.run(world.fleets[service].put, host, guest)
        result = ComputeResult(
            instance_uuid=INSTANCE, attempt=1, host_uuid=host, service=service, outcome=ComputeOutcome.DESTROYED
        )
        Process(f"{other}-{service}").context.run(world.machines.result, result)
        assert any("half-built" in words for words in _leftovers(world)) is breaks

    virtual.run(main, on_unseen=pytest.fail)


@pytest.mark.parametrize(("loser", "breaks"), [("c1", False), ("c2", True)])
def test_what_one_cell_has_lost_may_run_in_another(loser: str, *, breaks: bool) -> None:
    """Seed 1795360373: schedulers had forgotten a lost instance, and its request came again and led to another cell."""
    watch = MachineWatch()
    active = {}
    for cell, host in (("c1", HERE), ("c2", LEFT)):
        watch.put(host, Guest(INSTANCE, 1, {host: {"VCPU": 1}}, deployment="d"))
        chosen = Selection(host_uuid=host, host="h", service="s", allocations={})
        active[cell] = Instance(uuid=INSTANCE, state=State.ACTIVE, attempt=1, selections=(chosen,))
    lost = {cell: replace(one, state=State.FAILED, code="instance.lost") for cell, one in active.items()}
    watch.instances("c1", {INSTANCE: active["c1"]})
    watch.instances("c1", {INSTANCE: lost["c1"]})
    watch.runs = lambda host, _: 1 if host == LEFT else None
    watch.instances("c2", {INSTANCE: active["c2"]})
    with pytest.raises(Breach, match="lost_was_lost") if breaks else nullcontext():
        watch.instances(loser, {INSTANCE: lost[loser]})


@pytest.mark.parametrize(
    ("first_died", "has_name", "machines"), [(True, False, 1), (False, False, 1), (False, True, 2)]
)
def test_what_a_dead_process_of_a_name_built_unreported_may_be_destroyed_in_vain(
    *, first_died: bool, has_name: bool, machines: int
) -> None:
    """Seed 35 at daf09d6: the next process of the name answered that nothing is there, and another host built it.

    Seed 1795425616: the first one was alive, and had lost the name with its connection.
    """

    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        service = world.plan.services[0][1]
        world.start_duplicate(service)
        host, other = (one.plan.uuid for one in list(world.fleets[service].hosts)[:2])
        first = Process("twin")
        guest = Guest(INSTANCE, 1, {host: {"VCPU": 1}}, deployment="d")
        first.context.run(world.duplicates[service].put, host, guest)
        first.dead = first_died
        world.duplicates[service].has_name = lambda _process: has_name
        world.machines.result(
            ComputeResult(
                instance_uuid=INSTANCE,
                attempt=1,
                host_uuid=host,
                service=service,
                outcome=ComputeOutcome.DESTROYED,
            )
        )
        again = Guest(INSTANCE, 2, {other: {"VCPU": 1}}, deployment="d")
        Process("compute").context.run(world.fleets[service].put, other, again)
        assert len([one for one in _running(world) if one.instance_uuid == INSTANCE]) == machines

    virtual.run(main, on_unseen=pytest.fail)


@pytest.mark.parametrize(
    ("first_died", "has_name", "active_s", "forgot", "attempts", "machines"),
    [
        pytest.param(True, False, None, False, (1, 1), 1, id="the first one died unheard"),  # seed 35 at 937c756
        pytest.param(False, False, None, False, (1, 1), 1, id="the first one lost the name unheard"),  # seed 60078
        pytest.param(False, True, None, False, (1, 1), 2, id="two processes act under one name"),
        pytest.param(
            True, False, SENT_AGAIN_S + 0.1, False, (1, 1), 2, id="what a conductor has on record is built again"
        ),
        # Seed 92123 at 3e863844: the cell's database forgot that the outbox had sent the command.
        pytest.param(True, False, SENT_AGAIN_S + 0.1, True, (1, 1), 1, id="a command is sent again after its record"),
        # Seed 1795406924: the broker died before it had confirmed the command.
        pytest.param(True, False, 8.5, False, (1, 1), 1, id="a command is sent again with its broker"),
        pytest.param(True, False, None, False, (1, 2), 2, id="another attempt"),
    ],
)
def test_what_a_dead_process_of_a_name_built_unreported_is_no_second_machine(
    *, first_died: bool, has_name: bool, active_s: float | None, forgot: bool, attempts: tuple[int, int], machines: int
) -> None:
    """The command came again, to the next process of the name, on other machines: neither could know of the first.

    active_s: for how long its record has been active by then.
    """

    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        service = world.plan.services[0][1]
        world.start_duplicate(service)
        host = next(iter(world.fleets[service].hosts)).plan.uuid
        first, second = Process("twin"), Process("compute")
        guests = [Guest(INSTANCE, attempt, {host: {"VCPU": 1}}, deployment="d") for attempt in attempts]
        first.context.run(world.duplicates[service].put, host, guests[0])
        if active_s is not None:
            chosen = Selection(host_uuid=host, host="h", service=service, allocations={})
            active = Instance(uuid=INSTANCE, state=State.ACTIVE, attempt=1, selections=(chosen,))
            world.machines.instances("c1", {INSTANCE: active})
            await asyncio.sleep(active_s)
        first.dead = first_died
        world.cells[world.cell_of(service).name].taken_back = int(forgot)
        if has_name:
            cell = world.cell_of(service).name
            connection = MemoryTransport(world.brokers[cell], first.name)
            name = QueuePlan(name=f"compute.control.{service}", durable=False, exclusive=True, max_length=1)
            world.brokers[cell].declare(name, connection)
        second.context.run(world.fleets[service].put, host, guests[1])
        assert len([one for one in _running(world) if one.instance_uuid == INSTANCE]) == machines

    virtual.run(main, on_unseen=pytest.fail)


@pytest.mark.parametrize(("burnt", "machines"), [(True, 0), (False, 2)])
def test_an_attempt_on_a_burnt_host_does_not_bring_a_second_services_machines_back(
    *, burnt: bool, machines: int
) -> None:
    """Seed 1795422970: the first attempt's service died for good, and the second was built by a second service of a
    name, whose machines are not seen any more once it has gone.
    """

    async def main() -> None:
        plan = next(plan for seed in range(1, 50) if len((plan := replace(plan_of(seed), metal=None)).services) > 1)
        world = World(plan, EventLog())
        (_, lost), (_, name) = world.plan.services[:2]
        world.start_duplicate(name)
        first, second = (next(iter(world.fleets[service].hosts)).plan.uuid for service in (lost, name))
        Fleet.put(world.fleets[lost], first, Guest(INSTANCE, 1, {first: {"VCPU": 1}}, deployment="d"))
        Fleet.put(world.duplicates[name], second, Guest(INSTANCE, 2, {second: {"VCPU": 1}}, deployment="d"))
        if burnt:
            world.dead.add(lost)
        assert len([one for one in _running(world) if one.instance_uuid == INSTANCE]) == machines

    virtual.run(main, on_unseen=pytest.fail)


@pytest.mark.parametrize(
    ("has_second", "doubted", "quarantined", "attempt", "breaks"),
    [
        pytest.param(True, True, True, 1, False, id="the second service answered in doubt"),
        pytest.param(False, True, True, 1, True, id="one service of the name"),
        pytest.param(True, False, True, 1, True, id="not in doubt: it is over"),
        pytest.param(True, True, False, 1, True, id="not listed"),
        pytest.param(True, True, True, 2, True, id="another attempt"),
    ],
)
def test_a_machine_of_a_build_given_up_in_doubt_may_run_beside_a_second_service(
    *, has_second: bool, doubted: bool, quarantined: bool, attempt: int, breaks: bool
) -> None:
    """Seed 1795370018: the cell was set back amid a build whose record the backup had as it was. A second service of
    the name answered that it has no machine, so the build failed, and the first one came back with its machine.
    """

    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        world.harm.requested[INSTANCE] = None
        service = world.plan.services[0][1]
        if has_second:
            world.start_duplicate(service)
        host = next(iter(world.fleets[service].hosts)).plan.uuid
        Fleet.put(world.fleets[service], host, Guest(INSTANCE, attempt, {host: {"VCPU": 1}}, deployment="d"))
        chosen = Selection(host_uuid=host, host="h", service=service, allocations={})
        failed = Instance(uuid=INSTANCE, state=State.FAILED, attempt=1, selections=(chosen,), doubted=doubted)
        table = world.cells[world.cell_of(service).name]
        table.instances[INSTANCE] = failed
        if quarantined:
            machine = Unexplained(INSTANCE, attempt, host, UnexplainedKind.QUARANTINED, UNSURE)
            record = UnexplainedRecord(machine=machine, service=service, first_seen=1.0, last_seen=1.0)
            table.unexplained[record.place] = record
        runs = f"hosts_instances_allocations_agree: {INSTANCE}: runs, but is no active instance"
        assert (runs in _breaches(facts_of(world, [], ()))) is breaks

    virtual.run(main, on_unseen=pytest.fail)


@pytest.mark.parametrize("state", [State.ACTIVE, State.FAILED])
@pytest.mark.parametrize(
    ("has_second", "reused_from", "quarantined", "tried", "breaks"),
    [
        pytest.param(True, 1, True, True, False, id="the second service answered in doubt"),
        pytest.param(False, 1, True, True, True, id="one service of the name"),
        pytest.param(True, 0, True, True, True, id="never in doubt: it is over"),
        pytest.param(True, 1, False, True, True, id="not listed"),
        pytest.param(True, 1, True, False, True, id="not an attempt of the record"),
    ],
)
def test_a_machine_that_a_build_in_doubt_has_left_for_an_alternate_may_run_beside_a_second_service(
    *, state: State, has_second: bool, reused_from: int, quarantined: bool, tried: bool, breaks: bool
) -> None:
    """As in seed 1795370018, with an alternate: the record goes on as attempt 2, and proves nothing about attempt 1."""

    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        world.harm.requested[INSTANCE] = None
        (cell, service), other = world.plan.services[0], world.plan.services[1][1]
        if has_second:
            world.start_duplicate(service)
        host = next(iter(world.fleets[service].hosts)).plan
        Fleet.put(world.fleets[service], host.uuid, Guest(INSTANCE, 1, {host.uuid: {"VCPU": 1}}, deployment="d"))
        second = Selection(host_uuid="elsewhere", host="other", service=other, allocations={})
        history = (
            AttemptRecord(attempt=1, host=host.name if tried else "h", outcome="timed_out", code="spawn.timeout"),
        )
        record = Instance(
            uuid=INSTANCE, state=state, attempt=2, selections=(second,), history=history, reused_from=reused_from
        )
        table = world.cells[cell]
        table.instances[INSTANCE] = record
        if quarantined:
            machine = Unexplained(INSTANCE, 1, host.uuid, UnexplainedKind.QUARANTINED, UNSURE)
            kept = UnexplainedRecord(machine=machine, service=service, first_seen=1.0, last_seen=1.0)
            table.unexplained[kept.place] = kept
        counted = [one for one in facts_of(world, [], ()).running or () if one.instance_uuid == INSTANCE]
        assert bool(counted) is breaks

    virtual.run(main, on_unseen=pytest.fail)


@pytest.mark.parametrize(
    ("answered_by", "quarantined", "breaks"),
    [
        pytest.param("twin", True, False, id="another process of the name answered"),  # seed 1795412986
        pytest.param("twin", False, True, id="not listed"),
        pytest.param("compute", True, True, id="the next life of the process"),
    ],
)
def test_a_machine_built_after_another_process_of_the_name_answered_may_run_in_quarantine(
    answered_by: str, *, quarantined: bool, breaks: bool
) -> None:
    async def main() -> None:
        world = World(replace(plan_of(1), metal=None), EventLog())
        world.harm.requested[INSTANCE] = None
        cell, service = world.plan.services[0]
        world.start_duplicate(service)
        host = next(iter(world.fleets[service].hosts)).plan.uuid
        result = ComputeResult(
            instance_uuid=INSTANCE, attempt=1, host_uuid=host, service=service, outcome=ComputeOutcome.DESTROYED
        )
        Process(f"{answered_by}-{service}").context.run(world.machines.result, result)
        guest = Guest(INSTANCE, 1, {host: {"VCPU": 1}}, deployment="d")
        Process(f"compute-{service}").context.run(world.fleets[service].put, host, guest)
        if quarantined:
            machine = Unexplained(INSTANCE, 1, host, UnexplainedKind.QUARANTINED, UNSURE)
            kept = UnexplainedRecord(machine=machine, service=service, first_seen=1.0, last_seen=1.0)
            world.cells[cell].unexplained[kept.place] = kept
        counted = [one for one in facts_of(world, [], ()).running or () if one.instance_uuid == INSTANCE]
        assert bool(counted) is breaks

    virtual.run(main, on_unseen=pytest.fail)

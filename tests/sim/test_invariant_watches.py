"""The states that the simulation calls a breach, and those that it does not."""

from __future__ import annotations

import asyncio
import json

import pytest
from msgspec.structs import replace

from bus.bus import API
from bus.clock import CLOCKS_APART_S
from bus.codec import pack, single
from bus.contracts.actions import ActionKind
from bus.contracts.base import MAX_AMOUNT, Message, Meta
from bus.contracts.cell import CellBuild
from bus.contracts.operations import FenceState
from bus.contracts.placement import Claim, ClaimOption, Inventory
from cell_conductor.periodic import FENCE_PROVES_S, purge_forever
from cell_conductor.state.fence import Fence
from cell_conductor.state.instance import ActionInProgress, Instance, State
from cell_conductor.store.memory import MemoryInstances, MemoryInstanceTable
from compute_agent.drivers.ironic.node import OwnerTag
from compute_agent.drivers.ironic.request import take_patch
from compute_sim.fleet import Fleet, SimulatedMachine
from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.harm_watch import RACE_S, HarmWatch
from lab.simulation.loop import SimClock
from lab.simulation.message_watch import MessageWatch
from lab.simulation.plan import Action, Order
from lab.simulation.rest import _inventories, _leftovers, _stuck, _unfenced
from lab.simulation.watch import Breach, MachineWatch
from lab.simulation.wiring import conductor
from lab.simulation.world import World
from placement_worker.domain.values import ConsumerState, Provider, stored_inventory
from placement_worker.store.memory_table import ConsumerRow
from tests.kit.virtual_time import on_virtual_time
from tests.sim.stage import (
    HERE,
    INSTANCE,
    LEFT,
    SPEC,
    Stage,
    breach,
    by,
    chosen,
    destroyed,
    instance,
    machine,
    provider,
)

MARK = OwnerTag("00000000-0000-4000-c000-000000000000", "c1", "m0", INSTANCE, 1)
TAKE = json.dumps(take_patch(SPEC, MARK, None)).encode()


def claim(amount: int) -> Claim:
    return Claim(consumer=INSTANCE, options=(ClaimOption(allocations={LEFT: {"VCPU": amount}}),), project_id="red")


def build(*hosts: str) -> CellBuild:
    return CellBuild(spec=SPEC, selections=tuple(chosen(host) for host in hosts), consumer_generation=1)


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
    world = Stage().world
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
@on_virtual_time
async def test_a_build_in_which_a_process_stood_still_may_end_after_its_name_has_destroyed_it(
    destroyer: str, *, breaks: bool
) -> None:
    watch = MachineWatch()
    by(destroyer, watch.result, destroyed(HERE, "s00"))
    with breach("was destroyed", when=breaks):
        by("compute-s00", watch.put, HERE, machine())
    assert watch.is_untold(HERE, INSTANCE, 1) is not breaks


@pytest.mark.parametrize(
    ("runs", "breaks"),
    [
        pytest.param(False, False, id="switched off"),  # seed 1795417062
        pytest.param(True, True, id="built again"),
    ],
)
@on_virtual_time
async def test_what_the_former_service_of_a_host_destroyed_may_be_switched_off_there(
    *, runs: bool, breaks: bool
) -> None:
    stage = Stage()
    by(f"compute-{stage.service}", stage.fleet.put, stage.host, machine(stage.host))
    by("compute-s99", stage.world.machines.result, destroyed(stage.host, "s99"))
    found: list[Breach] = []
    stage.fleet.fail = found.append
    by("mover", stage.fleet.put, stage.host, machine(stage.host, runs=runs))
    assert [one.name for one in found] == (["destroyed_for_good"] if breaks else [])


def is_left(*providers: Provider) -> bool:
    """Whether placement has them though their host was taken out."""
    world = Stage().world
    world.fleets.clear()
    world.placement.providers.update({one.uuid: one for one in providers})
    world.left[LEFT] = "drained"
    return any("left_for_good" in words for words in _inventories(world))


@pytest.mark.parametrize(
    ("orphaned", "used", "given", "breaks"),
    [
        pytest.param(False, 0, (), True, id="still reported"),
        pytest.param(True, 1, (), False, id="in use"),
        pytest.param(True, 0, (), True, id="a retired tree without a consumer"),
        pytest.param(True, 0, (HERE,), False, id="in an aggregate"),
        pytest.param(False, 0, (HERE,), True, id="in an aggregate, and still reported"),
    ],
)
async def test_what_was_taken_out_stays_only_while_it_is_in_use_or_has_what_others_gave_it(
    *, orphaned: bool, used: int, given: tuple[str, ...], breaks: bool
) -> None:
    inventories = {"VCPU": replace(stored_inventory(Inventory(total=4)), orphaned=orphaned)}
    used_here = {"VCPU": used} if used else {}
    assert is_left(provider(LEFT, inventories=inventories, used=used_here, aggregates=given)) is breaks


@pytest.mark.parametrize(("used", "breaks"), [(1, False), (0, True)])
async def test_what_was_taken_out_stays_while_a_part_of_its_tree_is_in_use(*, used: int, breaks: bool) -> None:
    """Another client had a reservation on a NUMA node of it (seed 1795337330465)."""
    root = provider(LEFT)
    assert is_left(root, replace(root, uuid=HERE, name="h-node", parent=LEFT, used={"VCPU": used})) is breaks


async def test_a_half_built_machine_that_came_back_with_an_older_disk_is_not_waited_for() -> None:
    """Its service had removed it, and no driver lists what is half-built (seed 1795337330351)."""
    stage = Stage()

    def left() -> list[str]:
        return [words.partition(":")[0] for words in _leftovers(stage.world)]

    Fleet.put(stage.fleet, stage.host, SimulatedMachine(INSTANCE, 1, {}, False))
    assert left() == ["no_leftovers"]
    stage.world.move_watch.brought_back.add((stage.host, INSTANCE, 1))
    assert left() == []
    Fleet.put(stage.fleet, stage.host, SimulatedMachine(INSTANCE, 2, {}, False))
    assert left() == ["no_leftovers"]


@pytest.mark.parametrize(
    ("is_fenced", "is_dead", "waits"), [(False, True, True), (True, True, False), (False, False, False)]
)
@on_virtual_time
async def test_a_move_waits_for_the_fence_of_a_burnt_host(*, is_fenced: bool, is_dead: bool, waits: bool) -> None:
    """It came back after its fence, and burnt down again without one (seed 1795402091)."""
    stage = Stage()
    here = stage.selection(HERE)
    move = ActionInProgress(request_id="m", kind=ActionKind.RESIZE, source=here, source_attempt=1, spec=SPEC)
    stage.table.instances[INSTANCE] = instance(State.FINISHING, here, 2, spec=SPEC, action=move)
    if is_dead:
        stage.world.left[HERE] = "dead"
    if is_fenced:
        stage.table.fences[HERE] = Fence(host_uuid=HERE, host="h", version=1)
    assert _unfenced(stage.world) == ({INSTANCE} if waits else set())


@on_virtual_time
async def test_rows_of_an_outbox_that_come_and_go_are_not_stuck() -> None:
    """A move that waits for a fence is queried for ever (seed 1795400820)."""
    world = World(plan_of(1), EventLog())
    stuck = []
    for row in (1, 2, 3, 3, 3, 3):
        stuck.append(_stuck(world, "cell", {row}))
        await asyncio.sleep(1.0)
    assert stuck == [0, 0, 0, 0, 0, 1]


async def test_what_another_client_claims_without_limits_is_no_breach_of_a_quota() -> None:
    """Seed 2168: a claim carries the limits that it is held to, and another client's carried none."""
    world = World(replace(plan_of(1), metal=None, quota={"VCPU": 6}), EventLog())
    world.peer_watch.requested(Order(at=0.0, action=Action.BUILD, uuid=INSTANCE, flavor="m1.tiny", project="red"))
    for project, breaks in (("theirs", False), ("red", True)):
        consumer = ConsumerState(1, 1, project, "u", "INSTANCE", {HERE: {"VCPU": 7}})
        world.placement.providers[HERE] = provider(HERE)
        world.placement.consumers[INSTANCE] = ConsumerRow(consumer, None, 0.0, 0.0)
        with breach("red holds 7 VCPU of 6", when=breaks):
            world.peer_watch()


@pytest.mark.parametrize("skew_s", [0.0, 30.0, 240.0])
@on_virtual_time
async def test_a_delete_that_came_first_is_remembered_as_long_as_planned_whatever_the_clocks(skew_s: float) -> None:
    """Seed 70159: buried by one clock and forgotten by another a second later, so its build was built, and stayed."""
    plan = replace(plan_of(1), skew_s=skew_s, keep_s=50.0)
    table, config = MemoryInstanceTable(SimClock()), conductor(plan)
    table.instances[INSTANCE] = Instance(uuid=INSTANCE, state=State.TOMBSTONE, since=SimClock(-skew_s).time())
    forgetting = asyncio.create_task(purge_forever(MemoryInstances(table.session()), SimClock(skew_s), config))
    await asyncio.sleep(plan.keep_s - 1.0)
    assert INSTANCE in table.instances
    await asyncio.sleep(1.0 + 2 * config.purge_interval_s)
    assert INSTANCE not in table.instances
    forgetting.cancel()


@pytest.mark.parametrize("state", [State.DELETED, State.FAILED])
@pytest.mark.parametrize("is_lifted", [True, False])
@pytest.mark.parametrize(("ended_s", "is_kept"), [(1.0, True), (-1.0 - CLOCKS_APART_S, False)])
@on_virtual_time
async def test_a_record_that_ended_under_a_fence_outlives_it(
    state: State, ended_s: float, *, is_kept: bool, is_lifted: bool
) -> None:
    """The host may have its machine, and nothing else proves that over: it went to quarantine."""
    config = replace(conductor(plan_of(1)), deleted_retention_s=50.0, failed_retention_s=50.0)
    table, since = MemoryInstanceTable(SimClock()), SimClock().time()
    table.instances[INSTANCE] = Instance(uuid=INSTANCE, state=state, since=since + ended_s)
    store = MemoryInstances(table.session())
    await store.fences.put(Fence(host_uuid=HERE, host="h", version=1, since=since))
    await store.fences.put(Fence(host_uuid=HERE, host="h", version=2, since=since + 40.0))
    forgetting = asyncio.create_task(purge_forever(store, SimClock(), config))
    await asyncio.sleep(60.0 + 2 * config.purge_interval_s)
    assert (INSTANCE in table.instances) is is_kept
    lifting = Fence(host_uuid=HERE, host="h", version=3, state=FenceState.UNFENCING, at=SimClock().time())
    await store.fences.put(lifting)
    await asyncio.sleep(config.failed_retention_s / 2)
    assert (INSTANCE in table.instances) is is_kept
    if is_lifted:  # else its host was scrapped: no record was purged any more
        assert await store.fences.unfence(HERE, 3, SimClock().time())
    await asyncio.sleep(config.failed_retention_s / 2 + 2 * config.purge_interval_s)
    assert INSTANCE not in table.instances
    forgetting.cancel()


@on_virtual_time
async def test_a_fence_that_has_ended_is_remembered_as_long_as_schedulers_may_be_restored() -> None:
    """It was forgotten after a day: the schedulers of an older backup repeat it, and fenced a host that was in use."""
    config = replace(conductor(plan_of(1)), deleted_retention_s=50.0, failed_retention_s=500.0)
    store = MemoryInstances(MemoryInstanceTable(SimClock()).session())
    fence = Fence(host_uuid=HERE, host="h", version=1)
    await store.fences.put(fence)
    await store.fences.put(replace(fence, version=2, state=FenceState.UNFENCING))
    assert await store.fences.unfence(HERE, 2, SimClock().time())
    forgetting = asyncio.create_task(purge_forever(store, SimClock(), config))
    await asyncio.sleep(400.0)
    assert (await store.fences.put(fence)).version == 2 and await store.fences.fences() == []
    await asyncio.sleep(100.0 + 2 * config.purge_interval_s)
    assert await store.fences.put(fence) is fence
    forgetting.cancel()


@on_virtual_time
async def test_a_fence_that_is_never_lifted_keeps_no_record_for_ever() -> None:
    config, table = replace(conductor(plan_of(1)), purge_interval_s=3600.0), MemoryInstanceTable(SimClock())
    table.instances[INSTANCE] = Instance(uuid=INSTANCE, state=State.DELETED, since=SimClock().time())
    store = MemoryInstances(table.session())
    await store.fences.put(Fence(host_uuid=HERE, host="h", version=1, since=SimClock().time()))
    forgetting = asyncio.create_task(purge_forever(store, SimClock(), config))
    await asyncio.sleep(FENCE_PROVES_S - 1.0)
    assert INSTANCE in table.instances
    await asyncio.sleep(1.0 + 2 * config.purge_interval_s)
    assert INSTANCE not in table.instances
    forgetting.cancel()


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
    with breach("of no owner", when=breaks):
        harm.acted("compute-m0", "PATCH", node, None, TAKE)
    with breach("of no owner"):
        harm.acted("compute-m0", "PUT", node, None, b'{"target":"active"}')


@pytest.mark.parametrize(
    ("state", "was_active", "breach_text"),
    [
        ("deploy failed", False, ""),  # seed 905: the record of its build was lost with the database
        ("deploy failed", True, "was active as attempt 1"),
        ("available", False, ""),  # seed 554: its marks are all that there is of it
        ("available", True, "was active as attempt 1"),
        ("deploying", False, "no record ever gave it up"),
        ("active", False, "no record ever gave it up"),
    ],
)
def test_a_node_is_given_up_by_a_record_or_by_its_failure(state: str, breach_text: str, *, was_active: bool) -> None:
    harm = HarmWatch(lambda: 100.0)
    harm.requested[INSTANCE] = None
    if was_active:
        harm.record({INSTANCE: instance(State.ACTIVE)})
    node = {"uuid": HERE, "instance_uuid": INSTANCE, "provision_state": state}
    harm.looked("compute-m0", node, 100.0)
    with breach(breach_text, when=bool(breach_text)):
        harm.acted("compute-m0", "PUT", node, 1, b'{"target":"deleted"}')


@pytest.mark.parametrize(("job", "breaks"), [("build", False), ("other", True)])
def test_what_a_build_acts_upon_is_what_it_has_seen_itself(job: str, *, breaks: bool) -> None:
    """Seed 61056 at d0562af: the service's own listing came between, and saw the node that was enrolled anew."""
    harm = HarmWatch(lambda: 102.0)
    node = {"uuid": HERE, "instance_uuid": None, "provision_state": "manageable"}
    harm.looked("compute-m0", {**node, "provision_state": "available"}, 100.0, "build")
    harm.looked("compute-m0", node, 101.0, "listing")
    with breach("of no owner", when=breaks):
        harm.acted("compute-m0", "PATCH", node, None, TAKE, job=job)

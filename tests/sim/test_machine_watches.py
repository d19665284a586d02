"""Machines that are lost, or run twice: what the simulation calls a breach after a restore, a fire or a second service
of a name.
"""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord
from bus.contracts.operations import Losses
from bus.memory import MemoryTransport
from bus.topology import QueuePlan
from cell_conductor.state.breaker import Breaker
from cell_conductor.state.instance import Instance, State
from cell_conductor.store.memory import MemoryInstanceTable
from compute_sim.fleet import Fleet
from lab.simulation.breaker_watch import BreakerWatch
from lab.simulation.draw import plan_of
from lab.simulation.harm_watch import LATE_REPORT_S, RACE_S, HarmWatch
from lab.simulation.load import Client
from lab.simulation.loop import SimClock
from lab.simulation.other_tenants import OtherTenants
from lab.simulation.plan import Action, Order
from lab.simulation.rest import _breaches, _leftovers, facts_of
from lab.simulation.watch import SENT_AGAIN_S, MachineWatch
from tests.kit.virtual_time import on_virtual_time
from tests.sim.stage import HERE, INSTANCE, LEFT, Stage, breach, by, chosen, destroyed, instance, machine


@pytest.mark.parametrize("set_back", [True, False])
@on_virtual_time
async def test_a_breaker_that_its_cell_has_forgotten_holds_nothing(*, set_back: bool) -> None:
    """Seed 81373: the cell's database was set back to before the breaker opened."""
    now = 100.0
    watch = BreakerWatch(replace(plan_of(1), breaker_limit=2, fault_events=()), lambda: now)
    table, other = MemoryInstanceTable(SimClock()), MemoryInstanceTable(SimClock())
    table.instances[INSTANCE] = active = instance()
    table.breakers["s"] = Breaker(service="s", tripped_at=now)
    watch.committed(table, ())
    watch.committed(other, ())  # of another cell
    if set_back:
        del table.breakers["s"]
        watch.committed(table, ())
    now += RACE_S + 1.0
    table.instances[INSTANCE] = replace(active, state=State.FAILED, code="instance.lost")
    with breach("breaker_holds", when=not set_back):
        watch.committed(table, ())


@pytest.mark.parametrize(("accepts", "breaks"), [(True, False), (False, True)])
@on_virtual_time
async def test_a_recovery_loses_no_more_than_an_operator_has_accepted(*, accepts: bool, breaks: bool) -> None:
    watch = BreakerWatch(replace(plan_of(1), breaker_limit=1, fault_events=()), lambda: 100.0)
    table = MemoryInstanceTable(SimClock())
    table.recovers, table.losses, table.accepts = True, Losses(2, (INSTANCE, LEFT)), accepts
    table.instances.update({uuid: replace(instance(), uuid=uuid) for uuid in (INSTANCE, LEFT)})
    watch.committed(table, ())
    for uuid in (INSTANCE, LEFT):
        table.instances[uuid] = replace(table.instances[uuid], state=State.RELEASING, code="instance.lost")
    with breach("breaker_holds", when=breaks):
        watch.committed(table, ())


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
@on_virtual_time
async def test_what_was_lost_when_its_host_looked_may_be_there_again(
    owners: tuple[str | None, ...], late_s: float, *, breaks: bool
) -> None:
    stage = Stage(next(plan for seed in range(1, 40) if (plan := plan_of(seed)).metal))
    assert stage.world.ironic is not None
    pool = stage.world.ironic.pool
    node = next(one for one in pool.nodes.values() if one["instance_uuid"] is None)
    mark = {"berth": {"instance": INSTANCE}}
    pool._change(node, instance_uuid=INSTANCE, provision_state="active", instance_info=mark)
    for owner in owners:
        pool._change(node, instance_uuid=owner)
    active = instance(on=chosen(node["uuid"], "m0"), attempt=0)
    stage.show(active)
    await asyncio.sleep(late_s)
    with breach("lost_was_lost", when=breaks):
        stage.show(replace(active, state=State.FAILED, code="instance.lost"))


@pytest.mark.parametrize(
    ("gone", "late_s", "breaks"),
    [
        pytest.param(True, 4.7, False, id="the scan was made before"),  # seed 1795406552
        pytest.param(True, LATE_REPORT_S + 0.1, True, id="it has been back for long"),
        pytest.param(False, 4.7, True, id="it was there all the time"),
    ],
)
@on_virtual_time
async def test_what_was_lost_may_be_back_with_its_hosts_disks(late_s: float, *, gone: bool, breaks: bool) -> None:
    stage = Stage()
    tenants = OtherTenants(stage.world, Client(stage.world))
    stage.fleet.put(stage.host, machine(stage.host))
    active = instance(on=stage.selection())
    stage.show(active)
    copied = Order(at=0.0, action=Action.COPY, uuid="copy", service=stage.service)
    await tenants._copy(copied)
    if gone:
        stage.fleet.wipe(stage.host)
    await tenants._bring_back(replace(copied, action=Action.BRING_BACK))
    await asyncio.sleep(late_s)
    with breach("lost_was_lost", when=breaks):
        stage.show(replace(active, state=State.FAILED, code="instance.lost"))


def went_on(code: str) -> tuple[Instance, Instance]:
    """(active, as its restored record has it a while later: built elsewhere because its attempt ended with this)."""
    active = instance()
    ended = AttemptRecord(attempt=1, host="h", outcome="failed", code=code, at=1.0)
    return active, replace(active, state=State.CLAIMING, next_state=State.BUILDING, history=(ended,))


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
    for record in (active, replace(active, state=State.BUILDING), reclaiming):
        harm.record({INSTANCE: record})
    with breach("was active as attempt 1", when=breaks):
        harm.destroyed(HERE, machine())


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
    building = replace(instance(State.BUILDING), selections=(chosen(), chosen()))
    tried = AttemptRecord(attempt=1, host="h", outcome=outcome, code="spawn.timeout")
    if went_on is State.BUILDING:
        harm.record({INSTANCE: replace(building, attempt=2, selection_index=1, history=(tried,))})
    elif went_on is not None:
        harm.record({INSTANCE: replace(building, state=went_on, history=(tried,))})
    if set_back:
        harm.taken_back = {INSTANCE}
    harm.record({INSTANCE: building})
    harm.record({INSTANCE: replace(building, state=State.ACTIVE)})
    with breach("was active as attempt 1", when=breaks):
        harm.destroyed(HERE, machine())


@pytest.mark.parametrize("runs", [None, 1])
def test_what_a_restored_build_has_lost_does_not_run(runs: int | None) -> None:
    active, reclaiming = went_on("instance.lost")
    watch = MachineWatch()
    watch.put(HERE, machine())
    watch.instances("c1", {INSTANCE: active})
    watch.instances("c1", {INSTANCE: replace(active, state=State.BUILDING)})
    watch.runs = lambda _host, _instance: runs
    with breach("lost_was_lost", when=runs is not None):
        watch.instances("c1", {INSTANCE: reclaiming})
    if runs is None:  # it is known by then, and its machine may be brought back
        watch.runs = lambda _host, _instance: 1
        watch.instances("c1", {INSTANCE: replace(reclaiming, deadline=2.0)})


@pytest.mark.parametrize(("on", "breaks"), [(HERE, True), (LEFT, True), ("", False)])
def test_what_was_moved_before_a_restore_is_lost_only_if_it_runs_nowhere(on: str, *, breaks: bool) -> None:
    """Seed 7, steered: the record is older than the move, and its old host has reported it lost."""
    watch = MachineWatch()
    for attempt, host in ((1, HERE), (2, LEFT)):
        watch.put(host, machine(host, attempt))
        watch.instances("c1", {INSTANCE: instance(on=chosen(host), attempt=attempt)})
    watch.runs = lambda host, _instance: {HERE: 1, LEFT: 2}[host] if host == on else None
    restored = instance(on=chosen(HERE), attempt=1)
    lost = replace(restored, state=State.RELEASING, next_state=State.FAILED, code="instance.lost")
    with breach("lost_was_lost", when=breaks):
        watch.instances("c1", {INSTANCE: lost})


@pytest.mark.parametrize(
    ("other", "breaks"),
    [
        pytest.param("twin", False, id="another process of the name"),  # seed 1795412951
        pytest.param("compute", True, id="the next life of the process"),
    ],
)
@on_virtual_time
async def test_what_another_process_of_the_name_answered_for_may_stay_half_built(other: str, *, breaks: bool) -> None:
    stage = Stage()
    by(f"compute-{stage.service}", stage.fleet.put, stage.host, machine(stage.host, complete=False))
    by(f"{other}-{stage.service}", stage.world.machines.result, destroyed(stage.host, stage.service))
    assert any("half-built" in words for words in _leftovers(stage.world)) is breaks


@pytest.mark.parametrize(("loser", "breaks"), [("c1", False), ("c2", True)])
def test_what_one_cell_has_lost_may_run_in_another(loser: str, *, breaks: bool) -> None:
    """Seed 1795360373: schedulers had forgotten a lost instance, and its request came again and led to another cell."""
    watch = MachineWatch()
    active = {cell: instance(on=chosen(host)) for cell, host in (("c1", HERE), ("c2", LEFT))}
    for host in (HERE, LEFT):
        watch.put(host, machine(host))
    lost = {cell: replace(one, state=State.FAILED, code="instance.lost") for cell, one in active.items()}
    watch.instances("c1", {INSTANCE: active["c1"]})
    watch.instances("c1", {INSTANCE: lost["c1"]})
    watch.runs = lambda host, _: 1 if host == LEFT else None
    watch.instances("c2", {INSTANCE: active["c2"]})
    with breach("lost_was_lost", when=breaks):
        watch.instances(loser, {INSTANCE: lost[loser]})


@pytest.mark.parametrize(
    ("first_died", "has_name", "machines"), [(True, False, 1), (False, False, 1), (False, True, 2)]
)
@on_virtual_time
async def test_what_a_dead_process_of_a_name_built_unreported_may_be_destroyed_in_vain(
    *, first_died: bool, has_name: bool, machines: int
) -> None:
    """Seed 35 at daf09d6: the next process of the name answered that nothing is there, and another host built it.

    Seed 1795425616: the first one was alive, and had lost the name with its connection.
    """
    stage = Stage(duplicate=True)
    twin = stage.world.duplicates[stage.service]
    by("twin", twin.put, stage.host, machine(stage.host)).dead = first_died
    twin.has_name = lambda _process: has_name
    stage.world.machines.result(destroyed(stage.host, stage.service))
    by("compute", stage.fleet.put, stage.other, machine(stage.other, 2))
    assert stage.running() == machines


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
@on_virtual_time
async def test_what_a_dead_process_of_a_name_built_unreported_is_no_second_machine(
    *, first_died: bool, has_name: bool, active_s: float | None, forgot: bool, attempts: tuple[int, int], machines: int
) -> None:
    """The command came again, to the next process of the name, on other machines: neither could know of the first.

    active_s: for how long its record has been active by then.
    """
    stage = Stage(duplicate=True)
    first = by("twin", stage.world.duplicates[stage.service].put, stage.host, machine(stage.host, attempts[0]))
    if active_s is not None:
        stage.show(instance(on=stage.selection()))
        await asyncio.sleep(active_s)
    first.dead = first_died
    stage.table.taken_back = int(forgot)
    if has_name:
        broker = stage.world.brokers[stage.cell]
        name = QueuePlan(name=f"compute.control.{stage.service}", durable=False, exclusive=True, max_length=1)
        broker.declare(name, MemoryTransport(broker, first.name))
    by("compute", stage.fleet.put, stage.host, machine(stage.host, attempts[1]))
    assert stage.running() == machines


@pytest.mark.parametrize(("is_dead", "machines"), [(True, 1), (False, 2)])
@on_virtual_time
async def test_a_second_services_machines_of_a_dead_service_are_not_judged(*, is_dead: bool, machines: int) -> None:
    """Seed 212712: the first service had died for good, and the second one died before its build was heard of."""
    stage = Stage(next(plan for seed in range(1, 50) if len((plan := replace(plan_of(seed), metal=None)).services) > 1))
    world, (_, name) = stage.world, stage.world.plan.services[1]
    world.start_duplicate(name)
    second = next(iter(world.fleets[name].hosts)).plan.uuid
    Fleet.put(world.duplicates[name], second, machine(second))
    Fleet.put(stage.fleet, stage.host, machine(stage.host, 2))
    if is_dead:
        world.dead.add(name)
    assert stage.running() == machines


@pytest.mark.parametrize(("burnt", "machines"), [(True, 0), (False, 2)])
@on_virtual_time
async def test_an_attempt_on_a_burnt_host_does_not_bring_a_second_services_machines_back(
    *, burnt: bool, machines: int
) -> None:
    """Seed 1795422970: the first attempt's service died for good, and the second was built by a second service of a
    name, whose machines are not seen any more once it has gone.
    """
    stage = Stage(next(plan for seed in range(1, 50) if len((plan := replace(plan_of(seed), metal=None)).services) > 1))
    world, (_, name) = stage.world, stage.world.plan.services[1]
    world.start_duplicate(name)
    second = next(iter(world.fleets[name].hosts)).plan.uuid
    Fleet.put(stage.fleet, stage.host, machine(stage.host))
    Fleet.put(world.duplicates[name], second, machine(second, 2))
    if burnt:
        world.dead.add(stage.service)
    assert stage.running() == machines


@pytest.mark.parametrize(
    ("reason", "proves_from", "attempt", "quarantined", "breaks"),
    [
        pytest.param("", 2000, 1, True, False, id="from before its cell has recovered, and listed"),
        pytest.param("host_absent", 0, 1, True, False, id="it is not known yet what is true of it"),
        pytest.param("", 2000, 1, False, True, id="not listed"),
        pytest.param("", 0, 1, True, True, id="its cell has never recovered: it is over"),
        pytest.param("", 2000, 2001, True, True, id="from after its cell has recovered"),
    ],
)
@on_virtual_time
async def test_a_machine_from_before_a_recovery_may_run_in_quarantine(
    reason: str, proves_from: int, attempt: int, *, quarantined: bool, breaks: bool
) -> None:
    """Seed 1795370018: a second service of the name answered that it has no machine, so the build failed, and the first
    one came back with its machine.
    """
    stage = Stage()
    Fleet.put(stage.fleet, stage.host, machine(stage.host, attempt))
    record = instance(
        State.FAILED, stage.selection(), blocked_reason=reason, proves_from=proves_from, highest_attempt=2001
    )
    stage.table.instances[INSTANCE] = record
    if quarantined:
        stage.quarantine(attempt)
    runs = f"hosts_instances_allocations_agree: {INSTANCE}: runs, but is no active instance"
    assert (runs in _breaches(facts_of(stage.world, [], ()))) is breaks


@pytest.mark.parametrize(
    ("answered_by", "quarantined", "breaks"),
    [
        pytest.param("twin", True, False, id="another process of the name answered"),  # seed 1795412986
        pytest.param("twin", False, True, id="not listed"),
        pytest.param("compute", True, True, id="the next life of the process"),
    ],
)
@on_virtual_time
async def test_a_machine_built_after_another_process_of_the_name_answered_may_run_in_quarantine(
    answered_by: str, *, quarantined: bool, breaks: bool
) -> None:
    stage = Stage(duplicate=True)
    by(f"{answered_by}-{stage.service}", stage.world.machines.result, destroyed(stage.host, stage.service))
    by(f"compute-{stage.service}", stage.fleet.put, stage.host, machine(stage.host))
    if quarantined:
        stage.quarantine()
    assert stage.counted() is breaks

"""Machines that are lost, or run twice: what the simulation calls a breach after a restore, a fire or a second service
of a name.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord
from bus.contracts.cell import ComputeOutcome, ComputeResult, Selection
from bus.memory import MemoryTransport
from bus.topology import QueuePlan
from cell_conductor.domain.breaker import Breaker
from cell_conductor.domain.instance import Instance, State
from cell_conductor.domain.report import UNSURE, Unexplained, UnexplainedKind
from cell_conductor.store.memory import MemoryInstanceTable
from cell_conductor.store.safety import UnexplainedRecord
from compute_sim.fleet import Fleet, Guest
from lab.simulation import loop as virtual
from lab.simulation.breaker_watch import BreakerWatch
from lab.simulation.draw import plan_of
from lab.simulation.event_log import EventLog
from lab.simulation.harm_watch import LATE_REPORT_S, RACE_S, HarmWatch
from lab.simulation.load import Client
from lab.simulation.loop import Process, SimClock
from lab.simulation.other_tenants import OtherTenants
from lab.simulation.plan import Action, Order
from lab.simulation.rest import _breaches, _leftovers, _running, facts_of
from lab.simulation.watch import SENT_AGAIN_S, Breach, MachineWatch
from lab.simulation.world import World
from tests.sim.test_invariant_watches import HERE, INSTANCE, LEFT


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
    return active, replace(active, state=State.CLAIMING, then=State.BUILDING, history=(ended,))


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
    ("on", "searched", "ended"),
    [
        pytest.param(LEFT, False, True, id="where the record had it before it was set back"),
        pytest.param(HERE, True, True, id="where the record has it"),
        pytest.param("", False, False, id="nowhere"),
    ],
)
def test_what_was_moved_before_a_restore_is_searched_for_before_it_is_lost(
    on: str, *, searched: bool, ended: bool
) -> None:
    """Seed 7, steered: the record is older than the move, and its old host has reported it lost."""
    watch, active = MachineWatch(), {}
    for attempt, host in ((1, HERE), (2, LEFT)):
        watch.put(host, Guest(INSTANCE, attempt, {host: {"VCPU": 1}}, deployment="d"))
        chosen = Selection(host_uuid=host, host="h", service="s", allocations={})
        active[attempt] = Instance(uuid=INSTANCE, state=State.ACTIVE, attempt=attempt, selections=(chosen,))
        watch.instances("c1", {INSTANCE: active[attempt]})
    watch.runs = lambda host, _instance: {HERE: 1, LEFT: 2}[host] if host == on else None
    lost = replace(active[1], state=State.RELEASING, then=State.FAILED, doubted=True, code="instance.lost")
    with pytest.raises(Breach, match="lost_was_lost") if searched else nullcontext():
        watch.instances("c1", {INSTANCE: lost})
    with pytest.raises(Breach, match="lost_was_lost") if ended and not searched else nullcontext():
        watch.instances("c1", {INSTANCE: replace(lost, state=State.FAILED, then=None)})


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

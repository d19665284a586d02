"""Drains: planned and begun by one scheduler, carried out by any, and commanded while they are under way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from bus.bus import API
from bus.clock import new_uuid
from bus.contracts.actions import ActionKind, ActionState, CellAction, Condition
from bus.contracts.build import BuildRequest
from bus.contracts.cell import ServiceDown, ServiceStates
from bus.contracts.deploy import NetworkRequest
from bus.contracts.drains import (
    DrainAction,
    DrainCommand,
    DrainPlan,
    DrainProgress,
    DrainQuery,
    DrainResult,
    DrainsPage,
    DrainsQuery,
    DrainStart,
    DrainState,
    DrainTarget,
)
from bus.contracts.objects import Aggregate, ObjectKind, ObjectLogPage, ObjectLogQuery
from bus.contracts.operations import AdminState, FenceState, HostFence
from bus.contracts.placement import GroupPolicy, ServerGroup
from bus.faults import RequestRefused, RequestTimeout
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.drain import drain_controller as drains
from scheduler_worker.drain import host_emptier as emptying
from scheduler_worker.drain.drain_steps import EmptyingLevel, free_slots
from scheduler_worker.records.object_records import RecordedObjects
from scheduler_worker.store.postgres import PostgresUnit
from tests.integration.scheduler_worker.steps import becomes as fence_becomes
from tests.integration.scheduler_worker.steps import code_of, decide, digests
from tests.integration.scheduler_worker.world import World
from tests.kit.waiting import until

pytestmark = pytest.mark.postgres

RACK = "aaaaaaaa-0000-4000-8000-000000000000"
AMOUNTS = {"VCPU": 16, "MEMORY_MB": 32768, "DISK_GB": 500}
WARM = SchedulerConfig(hosts_warmup_s=0.001, aggregates=(Aggregate(uuid=RACK, name="rack"),))


PASSES: list[int] = []  # of the schedulers over their drains


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("PASS_S", 0.02), ("LOOK_S", 0.03), ("READ_ALL_S", 0.05), ("IDLE_S", 0.05)):
        monkeypatch.setattr(drains, name, seconds)
    monkeypatch.setattr(emptying, "STAGGER_S", 0.01)
    monkeypatch.setattr(emptying, "LOOK_S", 0.03)
    PASSES.clear()

    def counted(level: EmptyingLevel, *arguments: Any) -> int:
        PASSES.append(1)
        return free_slots(level, *arguments)

    monkeypatch.setattr(drains, "free_slots", counted)


async def plan_of(world: World, name: str, **more: Any) -> DrainPlan:
    return await world.answer(DrainQuery(host=name, **more), DrainPlan)


async def begin(world: World, name: str, **more: Any) -> DrainProgress:
    start = DrainStart(drain=more.pop("drain", None) or new_uuid(world.rng), name=name, by="ann", **more)
    return (await world.answer(start, DrainResult)).drain


async def command(world: World, drain: DrainProgress, action: DrainAction, **more: Any) -> DrainProgress:
    message = DrainCommand(drain=drain.id, action=action, by="bob", **more)
    return (await world.answer(message, DrainResult)).drain


async def shown(world: World, drain: DrainProgress) -> DrainProgress:
    page = await world.answer(DrainsQuery(drain=drain.id), DrainsPage)
    return page.drains[0]


async def start_code(world: World, name: str, **more: Any) -> str:
    return await code_of(begin(world, name, **more))


async def drain_becomes(world: World, drain: DrainProgress, there: Callable[[DrainProgress], object]) -> DrainProgress:
    """Wait for what no message reports of a drain."""

    async def look() -> DrainProgress | None:
        found = await shown(world, drain)
        return found if there(found) else None

    found: DrainProgress = await until(look)
    return found


async def drain_is(world: World, drain: DrainProgress, state: DrainState) -> DrainProgress:
    return await drain_becomes(world, drain, lambda found: found.state is state)


async def left_by(world: World, drain: DrainProgress) -> list[tuple[str, str]]:
    """The instances that a drain cannot move, which goes on; and the code of each."""
    found = await drain_becomes(world, drain, lambda one: one.failed and not (one.not_started or one.under_way))
    assert found.state is DrainState.RUNNING
    return [(one.instance_uuid, one.code) for one in found.failed]


async def active(world: World, count: int, host: str, **more: Any) -> list[BuildRequest]:
    builds = [world.request(host=host, **more) for _ in range(count)]
    for one in builds:
        await world.active(one)
    return builds


def commanded(world: World) -> list[CellAction]:
    """The moves that the cells were commanded, in order; one that a killed process sent twice is one."""
    return list({one.request_id: one for _, one in world.actions}.values())


def has_begun(world: World, count: int) -> bool:
    return len(commanded(world)) >= count


async def ends(world: World, action: CellAction, state: ActionState = ActionState.DONE, **more: Any) -> None:
    """The cell reports how a move ended; a move that is done is at its first host."""
    fields = {"terminal": True, "condition": Condition.ACTIVE, "sequence": 30, **more}
    if state is ActionState.DONE:
        fields.setdefault("host", action.selections[0].host)
        await world.claim_destination(action)
        await world.release(action.request_id)
    request = world.action(BuildRequest(instance_uuid=action.instance_uuid, flavor="", project_id="demo"), action.kind)
    request = replace(request, request_id=action.request_id)
    await world.action_announced("c1", request, state, **fields)
    await world.moved(request, state)


async def passed(world: World) -> None:
    """Every scheduler has looked at the drain again, so whatever it would begin has begun."""
    last = len(PASSES) + 3 * len(world.tables)
    await until(lambda: len(PASSES) > last)


async def carried_out(world: World, drain: DrainProgress, *, at_once: int, count: int) -> DrainProgress:
    """The cell moves one after another; never were more under way than the drain allows."""
    for done in range(count):
        await until(partial(has_begun, world, done + 1))
        if done == 0:
            await passed(world)
        assert len(commanded(world)) - done <= at_once
        await ends(world, commanded(world)[done])
    return await drain_is(world, drain, DrainState.ENDED)


async def test_a_plan_lists_where_each_instance_would_go_and_what_cannot_move(world: World) -> None:
    """It counts its own choices before each next one, begins nothing, and holds nothing afterwards."""
    (host,) = await world.scheduler_and_hosts(1, WARM, VCPU=8, MEMORY_MB=16384, DISK_GB=160)
    builds = [world.request("m1.small") for _ in range(3)]
    for one in builds:
        await world.active(one)
    await world.add_hosts("c1", 2, VCPU=1, MEMORY_MB=2048, DISK_GB=20)
    busy = world.request("m1.small", host="c1-0")
    await world.active(busy)
    stop = world.action(busy, ActionKind.STOP)
    await world.commanded(stop)
    await until(lambda: not list(world.replicas["s1"].assumptions.keys()))  # the builds' claims have come
    for _ in range(2):  # the second is not misled by what the first has left behind
        plan = await plan_of(world, "c1-0")
        assert (plan.host_uuid, plan.host, plan.more) == (host, "c1-0", False)
        found = {one.instance_uuid: one for one in plan.moves}
        assert found.keys() == {one.instance_uuid for one in (*builds, busy)}
        assert found[busy.instance_uuid].code == "instance.busy"
        firsts = [found[one.instance_uuid].hosts[:1] for one in builds]
        assert sorted(firsts) == [(), ("c1-1",), ("c1-2",)]
        assert [one.code for one in plan.moves if not one.hosts and one.code != "instance.busy"] == ["no_valid_host"]
    assert [one.kind for _, one in world.actions] == [ActionKind.STOP]
    assert not list(world.replicas["s1"].assumptions.keys())
    few = await plan_of(world, host, limit=2)
    assert (len(few.moves), few.more) == (2, True)
    assert await code_of(plan_of(world, "nowhere")) == "host.unknown"
    down = ServiceDown(service="compute-c1", epoch=1, code="service.unresponsive", reason="no heartbeat")
    await world.buses["c1"].publish(ServiceStates(cell="c1", term=1, number=1, down=(down,), up=0))
    await until(lambda: world.tables["s1"].is_down(host))
    assert {one.code for one in (await plan_of(world, "c1-0")).moves} == {"instance.busy", "service.down"}


async def test_a_plan_of_many_hosts_keeps_their_instances_apart_and_off_the_drained_hosts(world: World) -> None:
    """An anti-affinity group on two hosts of a rack has two hosts left: its members go to one each."""
    first, second = await world.scheduler_and_hosts(2, WARM)
    await world.add_hosts("c1", 1, VCPU=64, MEMORY_MB=262144, DISK_GB=4000)  # every weigher prefers it
    await world.add_hosts("c1", 1)
    for uuid in (first, second):
        await world.report(
            uuid, world.hosts["c1"][uuid].name, {"VCPU": 16, "MEMORY_MB": 32768, "DISK_GB": 500}, aggregates=(RACK,)
        )
    row = world.replicas["s1"].row_of
    await until(lambda: all(RACK in world.replicas["s1"].aggregates_of(row(u) or 0) for u in (first, second)))
    group = ServerGroup(uuid=new_uuid(world.rng), policy=GroupPolicy.ANTI_AFFINITY)
    apart = [*await active(world, 1, "c1-0", server_group=group), *await active(world, 1, "c1-1", server_group=group)]
    large = await active(world, 1, "c1-0", flavor="m1.large")
    small = await active(world, 2, "c1-1")
    await until(lambda: not list(world.replicas["s1"].assumptions.keys()))  # the builds' claims have come
    plan = await plan_of(world, "rack")
    assert (plan.target, plan.hosts, len(plan.moves)) == (DrainTarget.AGGREGATE, 2, 5)
    to = {one.instance_uuid: one.hosts for one in plan.moves}
    assert all(hosts and set(hosts) <= {"c1-2", "c1-3"} for hosts in to.values())
    assert {to[one.instance_uuid][0] for one in apart} == {"c1-2", "c1-3"}
    order = [one.instance_uuid for one in plan.moves]
    assert {*order[:2]} == {one.instance_uuid for one in apart} and order[2] == large[0].instance_uuid
    assert {*order[3:]} == {one.instance_uuid for one in small}
    assert not list(world.replicas["s1"].assumptions.keys())
    await digests(world)
    assert await code_of(plan_of(world, "c1", target=DrainTarget.CELL)) == "action.across_cells"
    assert await start_code(world, "c1", target=DrainTarget.CELL, force=True) == "action.across_cells"
    assert (await plan_of(world, "compute-c1")).target is DrainTarget.SERVICE


async def test_a_drain_moves_so_many_at_a_time_and_ends_when_nothing_is_left(world: World) -> None:
    await world.scheduler("s1", WARM)
    await world.scheduler("s2", WARM)
    await world.add_hosts("c1", 3)
    builds = await active(world, 5, "c1-0")
    begun = await begin(world, "c1-0", at_once=2, reason="fan")
    assert (begun.planned, begun.hosts, begun.state, begun.by) == (5, 1, DrainState.RUNNING, "ann")
    ended = await carried_out(world, begun, at_once=2, count=5)
    assert (ended.code, sorted(ended.moved)) == ("drain.done", sorted(one.instance_uuid for one in builds))
    assert all("c1-0" not in {one.host for one in action.selections} for action in commanded(world))
    await until(lambda: world.tables["s2"].hosts_of_drain(begun.id))
    decision = next(iter(world.tables["s2"].hosts_of_drain(begun.id).values()))
    assert (decision.host, decision.state, decision.reason) == ("c1-0", AdminState.DISABLED, "fan")
    log = await world.answer(ObjectLogQuery(kind=ObjectKind.DRAIN), ObjectLogPage)
    assert [(one.actor[:9], one.name) for one in log.entries] == [("scheduler", begun.id), ("ann", begun.id)]
    page = await world.answer(DrainsQuery(), DrainsPage)
    assert [(one.id, one.counts) for one in page.drains] == [(begun.id, {"moved": 5})]


async def test_each_move_chooses_when_it_begins_whatever_host_was_planned(world: World) -> None:
    """Nothing is held for a move that waits: the planned host is out of use by then, and another one has come."""
    await world.scheduler_and_hosts(2, WARM)
    await active(world, 2, "c1-0")
    plan = await plan_of(world, "c1-0")
    assert [one.hosts for one in plan.moves] == [("c1-1",)] * 2
    begun = await begin(world, "c1-0", at_once=1)
    await until(partial(has_begun, world, 1))
    await decide(world, "c1-1", AdminState.DISABLED)
    await world.add_hosts("c1", 1)
    ended = await carried_out(world, begun, at_once=1, count=2)
    assert ended.code == "drain.done"
    assert [[one.host for one in action.selections] for action in commanded(world)] == [["c1-1"], ["c1-2"]]


async def test_a_repeated_start_is_one_drain_and_a_killed_scheduler_leaves_the_rest_to_another(world: World) -> None:
    await world.scheduler_and_hosts(3, WARM)
    await active(world, 4, "c1-0")
    begun = await begin(world, "c1-0", at_once=1)
    assert (await begin(world, "c1-0", drain=begun.id)).started_at == begun.started_at
    assert await start_code(world, "c1-1", drain=begun.id) == "request.duplicate"
    await until(partial(has_begun, world, 1))
    await world.kill("s1")
    await world.scheduler("s2", WARM)
    ended = await carried_out(world, begun, at_once=1, count=4)
    assert (ended.code, len(ended.moved)) == ("drain.done", 4)
    assert len(commanded(world)) == 4


async def test_what_cannot_move_stops_a_drain_before_its_start_and_with_force_is_what_is_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_worker.drain.drain_steps.doubled_s", lambda *_: 0.01)
    await world.scheduler_and_hosts(1, WARM)
    (built,) = await active(world, 1, "c1-0")
    with pytest.raises(RequestRefused, match=f"1 of 1 .*{built.instance_uuid} on c1-0: no_valid_host") as stuck:
        await begin(world, "c1-0")
    assert stuck.value.code == "drain.stuck"
    assert world.tables["s1"].decision_of(next(iter(world.hosts["c1"]))) is None
    begun = await begin(world, "c1-0", force=True)
    assert await left_by(world, begun) == [(built.instance_uuid, "no_valid_host")]
    await world.add_hosts("c1", 1)
    assert (await carried_out(world, begun, at_once=4, count=1)).code == "drain.done", "it has gone on by itself"


async def test_only_so_many_drains_are_under_way_whether_begun_or_resumed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "MAX_OPEN", 1)
    await world.scheduler_and_hosts(3, WARM)
    ended = await begin(world, "c1-0")
    await drain_is(world, ended, DrainState.ENDED)
    await active(world, 1, "c1-1")
    going = await begin(world, "c1-1")
    assert await start_code(world, "c1-2") == "drain.too_many"
    with pytest.raises(RequestRefused) as fault:
        await command(world, ended, DrainAction.RESUME)
    assert (fault.value.code, (await shown(world, ended)).state) == ("drain.too_many", DrainState.ENDED)
    await command(world, going, DrainAction.PAUSE)  # of one that is under way every command is taken
    await command(world, going, DrainAction.STOP)


async def test_two_drains_share_no_host_and_one_that_has_ended_gives_its_hosts_up(world: World) -> None:
    await world.scheduler_and_hosts(2, replace(WARM, actions_across_cells=True))
    await world.add_hosts("c2", 1)
    await active(world, 1, "c1-0")
    first = await begin(world, "c1-0")
    await digests(world)
    assert await start_code(world, "c1", target=DrainTarget.CELL, force=True) == "drain.overlap"
    assert (await carried_out(world, first, at_once=4, count=1)).code == "drain.done"
    second = await begin(world, "c1", target=DrainTarget.CELL, force=True)
    assert second.hosts == 2
    assert {one.state for one in world.tables["s1"].hosts_of_drain(second.id).values()} == {AdminState.DISABLED}
    assert not world.tables["s1"].hosts_of_drain(first.id)


async def test_what_cannot_leave_a_cell_that_is_drained_is_not_moved_within_it(world: World) -> None:
    """It was moved to a host that joined the cell, and the drain was done with that instance in the cell."""
    await world.scheduler_and_hosts(1, replace(WARM, actions_across_cells=True))
    await world.add_hosts("c2", 1)
    await active(world, 1, "c1-0", networks=(NetworkRequest(network="e0000000-0000-4000-8000-000000000001"),))
    await digests(world)
    await begin(world, "c1", target=DrainTarget.CELL, force=True)
    await world.add_hosts("c1", 1)

    def refused() -> int:
        return len({one.request_id for one in world.action_events if one.code == "action.across_cells"})

    await until(refused)
    before = refused()
    await until(lambda: refused() > before or commanded(world))
    assert commanded(world) == world.departs == []


async def test_the_instances_of_a_cell_leave_it_also_where_a_host_joins_it(world: World) -> None:
    """They were moved to the new host; and with no other cell the drain began, and each instance was refused."""
    await world.scheduler_and_hosts(1, replace(WARM, actions_across_cells=True))
    await active(world, 1, "c1-0")
    await digests(world)
    whole_cell = {"target": DrainTarget.CELL, "force": True}
    assert await start_code(world, "c1", **whole_cell) == "action.across_cells"
    await world.add_hosts("c2", 1, VCPU=1, MEMORY_MB=1, DISK_GB=1)
    await digests(world)
    await begin(world, "c1", **whole_cell)

    def refused() -> int:
        return len({one.request_id for one in world.action_events if one.code == "no_valid_host"})

    await until(refused)
    await world.add_hosts("c1", 1)
    before = refused()
    await until(lambda: refused() > before or commanded(world))
    assert commanded(world) == []
    (there,) = await world.add_hosts("c2", 1)
    await until(lambda: world.departs or commanded(world))
    assert commanded(world) == [] and world.departs, there


async def test_nothing_is_moved_from_a_host_until_its_fence_is_lifted(world: World) -> None:
    """The decision on record is still the drain's: its cell has reported a fence of which the record, set back, has
    nothing. Machines that the host lost may still be there.
    """
    (uuid, _) = await world.scheduler_and_hosts(2, WARM)
    await active(world, 2, "c1-0")
    begun = await begin(world, "c1-0", at_once=1)
    await until(partial(has_begun, world, 1))
    fence = HostFence(cell="c1", host_uuid=uuid, version=900, state=FenceState.FENCED, stale_machines=1)
    await world.buses["c1"].publish(fence)
    await fence_becomes(world, uuid, AdminState.FENCED, drain=begun.id, pending=AdminState.DISABLED)
    (decision,) = {table.decision_of(uuid) for table in world.tables.values()}
    assert decision is not None
    await ends(world, commanded(world)[0])
    waits = await drain_becomes(world, begun, lambda one: {failed.code for failed in one.failed} == {"host.fenced"})
    assert (waits.state, len(commanded(world))) == (DrainState.RUNNING, 1)
    await world.buses["c1"].publish(replace(fence, version=decision.fence, state=FenceState.UNFENCED, stale_machines=0))
    await until(partial(has_begun, world, 2))


async def given_up(world: World, monkeypatch: pytest.MonkeyPatch, request: DrainStart | DrainCommand) -> None:
    """The objects are locked by others until the request's time is over, and its requester has given it up."""
    name = "start" if isinstance(request, DrainStart) else "command"
    handle, lock = getattr(drains.DrainController, name), PostgresUnit.lock_objects
    late: list[Callable[[], bool]] = []
    locked: list[RecordedObjects] = []

    async def handled(keeper: Any, *arguments: Any) -> Any:
        late.append(next(one for one in arguments if callable(one)))
        return await handle(keeper, *arguments)

    async def locked_late(unit: PostgresUnit) -> RecordedObjects:
        locked.append(await lock(unit))
        await until(late[-1])
        return locked[-1]

    with monkeypatch.context() as patched:
        patched.setattr(drains.DrainController, name, handled)
        patched.setattr(PostgresUnit, "lock_objects", locked_late)
        while not late:  # a request that did not arrive in time was not handled at all
            with suppress(RequestTimeout, RequestRefused):
                await world.buses[API].request(request, DrainResult, timeout_s=0.5)
        await until(lambda: locked)


async def test_a_request_about_a_drain_that_was_given_up_is_not_carried_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operator may have decided otherwise since: it waited for the record's lock for longer than that."""
    await world.scheduler_and_hosts(1, WARM, **AMOUNTS)
    build = (await active(world, 1, "c1-0"))[0]
    await world.add_hosts("c1", 1, **AMOUNTS)
    start = DrainStart(drain=new_uuid(world.rng), name="c1-0", by="ann")
    await given_up(world, monkeypatch, start)
    drain = await begin(world, "c1-0")  # otherwise the host belongs to the other one
    await given_up(world, monkeypatch, DrainCommand(drain=drain.id, action=DrainAction.PAUSE, by="bob"))
    assert (await shown(world, drain)).state is DrainState.RUNNING
    await until(partial(has_begun, world, 1))
    await ends(world, commanded(world)[0])
    assert (await drain_is(world, drain, DrainState.ENDED)).moved == (build.instance_uuid,)


async def test_other_kinds_of_moves_and_unknown_drains_are_refused(world: World) -> None:
    await world.scheduler_and_hosts(1, WARM)
    assert await start_code(world, "c1-0", kind=ActionKind.EVACUATE) == "request.invalid"
    assert await start_code(world, "nowhere") == "host.unknown"
    assert await start_code(world, "nowhere", target=DrainTarget.CELL) == "cell.unknown"
    empty = await begin(world, "rack")
    assert (await drain_is(world, empty, DrainState.ENDED)).code == "drain.done"
    unknown = replace(await begin(world, "c1-0"), id=new_uuid(world.rng))
    with pytest.raises(RequestRefused, match="no drain"):
        await command(world, unknown, DrainAction.PAUSE)

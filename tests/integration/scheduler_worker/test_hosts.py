"""Operators' decisions about hosts, hosts that are forgotten, fences, and evacuations of what was on a fenced host."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from msgspec.structs import replace

from bus.bus import API
from bus.clock import new_uuid
from bus.contracts.actions import ActionKind, ActionState, CellAction, Condition
from bus.contracts.base import encode
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.catalogue import routing_key
from bus.contracts.cell import ServiceDown, ServiceStates
from bus.contracts.objects import (
    ObjectChange,
    ObjectKind,
    ObjectLogPage,
    ObjectLogQuery,
    ObjectsChange,
    ObjectsChanged,
    ObjectsPage,
    ObjectsQuery,
)
from bus.contracts.operations import AdminState, AdminStateSet, DeleteHost, EvacuationPolicy, FenceState, SetAdminState
from bus.contracts.placement import GroupPolicy, Release, ReleaseResult, ServerGroup
from bus.contracts.queues import COMMANDS
from bus.faults import RequestRefused, RequestTimeout
from bus.persistence.database import Database
from bus.transport import Outgoing
from scheduler_worker.drain import host_emptier as emptying
from scheduler_worker.fleet import fence_publisher
from scheduler_worker.selection.flavor import POLICY_SPEC
from scheduler_worker.store.postgres import PostgresBuilds
from tests.integration.scheduler_worker.steps import (
    WARM,
    becomes,
    code_of,
    decide,
    digests,
    fence_sent,
    forget_host,
    hosts_of,
    publish_fence,
)
from tests.integration.scheduler_worker.world import World
from tests.kit.sent import Sent
from tests.kit.waiting import PATIENCE_S, until

# --- An operator's decisions about hosts: in effect on every scheduler at once, on record, and beyond a restart.


pytestmark = pytest.mark.postgres
LATE_S = 0.3  # a requester's patience that is shorter than a lock is held


async def test_a_disabled_host_takes_nothing_from_any_scheduler_until_it_is_enabled(world: World) -> None:
    """Whatever its compute service goes on to report; and a scheduler that starts later knows it, too."""
    await world.scheduler("s1")
    await world.scheduler("s2")
    first, second = await world.add_hosts("c1", 2)
    decided = await decide(world, "c1-0", AdminState.DISABLED)
    assert (decided.host_uuid, decided.host, decided.by) == (first, "c1-0", "ann")
    tables = world.tables.values()
    await until(lambda: all(table.decision_of(first) == decided for table in tables))
    await world.announce("c1")  # by its service it is enabled
    builds = [world.request() for _ in range(6)]
    await world.ask(*builds)
    events = [await world.ended(one.instance_uuid, BuildState.SCHEDULED) for one in builds]
    assert {one.host for one in events} == {"c1-1"}
    record = (await hosts_of(world))["c1-0"]
    assert not record.enabled and record.admin == decided
    await world.stop("s1")
    await world.stop("s2")
    await world.scheduler("s3")
    await world.announce("c1")
    only = await world.requested(host="c1-0")
    failed = await world.ended(only.instance_uuid)
    assert failed.state is BuildState.FAILED
    assert [step.rejected for step in failed.funnel if step.step == "ComputeFilter"] == [{"host.disabled": 1}]
    again = await decide(world, first, AdminState.ENABLED, reason="")
    assert again.version > decided.version
    back = await world.requested(host="c1-0")
    assert (await world.ended(back.instance_uuid, BuildState.SCHEDULED)).host == "c1-0"
    assert second != first


async def test_a_decision_that_waits_longer_than_its_requester_is_not_made(world: World) -> None:
    """Its requester decides anew, and perhaps otherwise by then: a host that was enabled again would be fenced."""
    (host,) = await world.scheduler_and_hosts(1)
    await decide(world, host, AdminState.ENABLED)
    store = PostgresBuilds(Database(world.url, "scheduler", pool_size=1))
    store.publish_through(Sent())  # type: ignore[arg-type]
    await store.open()
    fence = SetAdminState(host=host, state=AdminState.FENCED, reason="late", by="ann", force=True)
    async with store.operation() as unit:
        await unit.lock_objects()
        with pytest.raises(RequestTimeout):
            await world.buses[API].request(fence, AdminStateSet, timeout_s=LATE_S)
        over = world.clock.monotonic() + LATE_S  # it came a moment after it was sent
        while world.clock.monotonic() < over:
            await world.answer(ObjectsQuery(), ObjectsPage)
    await decide(world, host, AdminState.ENABLED, reason="last")
    log = await world.answer(ObjectLogQuery(name=host), ObjectLogPage)
    assert [one.reason for one in log.entries] == ["last", "fan"]
    assert world.fences == []
    await store.close()


async def test_a_host_whose_compute_service_is_up_is_fenced_only_by_force(world: World) -> None:
    """A name may be mistyped: what is evacuated from a host that runs, runs twice."""
    await world.scheduler_and_hosts(2)
    for change in (
        SetAdminState(host="c1-0", state=AdminState.FENCED, reason="dead", by="ann"),
        ObjectsChange(
            changes=(
                ObjectChange(
                    kind=ObjectKind.HOST,
                    name=(await hosts_of(world))["c1-0"].uuid,
                    body={"host": "c1-0", "state": "fenced"},
                ),
            ),
            actor="ann",
        ),
    ):
        reply = AdminStateSet if isinstance(change, SetAdminState) else ObjectsChanged
        with pytest.raises(RequestRefused, match="the compute service compute-c1 is up") as refusal:
            await world.answer(change, reply)
        assert refusal.value.code == "host.service_up"
    assert (await hosts_of(world))["c1-0"].admin is None
    without_reason = decide(world, "c1-0", AdminState.ENABLED, reason="", force=True)
    assert await code_of(without_reason) == "host.reason_missing"
    forced = await decide(world, "c1-0", AdminState.FENCED, force=True)
    again = await decide(world, "c1-0", AdminState.FENCED, reason="PSU", force=False)  # it is fenced already
    assert (forced.state, again.state, again.reason) == (AdminState.FENCED, AdminState.FENCED, "PSU")


# --- Hosts that an operator forgets: what stands in the way, what goes, and the entry in the log.


ZONE = "a0000000-0000-4000-8000-00000000000a"


async def refused_code(world: World, host: str) -> str:
    return await code_of(forget_host(world, host))


async def test_a_host_that_is_gone_leaves_placement_the_record_and_its_aggregates(world: World) -> None:
    await world.scheduler("s1", WARM)
    await world.scheduler("s2", WARM)
    gone, other = await world.add_hosts("c1", 2)
    aggregate = {"name": "rack", "uuid": ZONE, "hosts": ["c1-0", "c1-1"]}
    change = ObjectsChange(changes=(ObjectChange(kind=ObjectKind.AGGREGATE, name="rack", body=aggregate),), actor="ann")
    await world.answer(change, ObjectsChanged)
    await decide(world, "c1-0", AdminState.DISABLED, reason="smoke")
    await digests(world, "compute-c1")
    done = await forget_host(world, "c1-0")
    assert (done.host_uuid, done.host, done.removed, done.aggregates) == (gone, "c1-0", True, ("rack",))
    await until(lambda: all(replica.row_of(gone) is None for replica in world.replicas.values()))
    await until(lambda: all(table.decision_of(gone) is None for table in world.tables.values()))
    assert list(await hosts_of(world)) == ["c1-1"]
    assert all(replica.row_of(other) is not None for replica in world.replicas.values())
    log = await world.answer(ObjectLogQuery(name=gone), ObjectLogPage)
    newest = log.entries[0]
    assert (newest.actor, newest.reason, newest.after) == ("ann", "scrapped", None)
    assert newest.before is not None and newest.before["host"] == "c1-0"
    again = await forget_host(world, gone)
    assert (again.host_uuid, again.removed) == (gone, False)
    log = await world.answer(ObjectLogQuery(name=gone), ObjectLogPage)
    assert log.entries[0] == newest, "nothing was on record, and nothing is logged"


async def test_a_copy_of_a_command_deletes_nothing_that_was_decided_since(world: World) -> None:
    """It was carried out, and its scheduler was killed before it acknowledged it."""
    await world.scheduler("s1", WARM)
    (gone,) = await world.add_hosts("c1", 1)
    await digests(world, "compute-c1")
    command = DeleteHost(host=gone, reason="scrapped", by="ann")
    message = Outgoing(
        exchange=COMMANDS, routing_key=routing_key(command), body=encode(command), message_id="m", mandatory=True
    )
    changes = world.brokers[API].queue("scheduler.changes")
    for is_copy in (False, True):
        await world.buses[API].transport.publish(message)
        await until(lambda: len(changes) == 0 and not any(one.unacked for one in changes.consumers))
        assert world.replicas["s1"].row_of(gone) is None
        if not is_copy:
            assert (await decide(world, gone, AdminState.DISABLED)).state is AdminState.DISABLED
    page = await world.answer(ObjectsQuery(kind=ObjectKind.HOST), ObjectsPage)
    assert [one.name for one in page.objects] == [gone]


async def test_a_host_that_a_service_may_still_report_is_kept(world: World) -> None:
    """A service that is up; and a cell whose services this scheduler does not know, or not all of them."""
    (host,) = await world.scheduler_and_hosts(1, WARM)
    await digests(world)
    assert await refused_code(world, "c1-0") == "host.service_up"
    await world.stop("s1")
    await world.scheduler("s2", WARM)
    await until(lambda: world.tables["s2"].index_of(host) is not None)
    silent = ServiceDown(service="compute-c1", epoch=2**62, code="service.silent", reason="no heartbeat")
    await world.buses["c1"].publish(ServiceStates(cell="c1", term=1, number=1, page=1, pages=1, up=0, down=(silent,)))
    await until(lambda: world.tables["s2"].is_down(host))
    assert await refused_code(world, "c1-0") == "host.cell_silent"  # c2 may have it
    await world.buses["c2"].publish(ServiceStates(cell="c2", term=1, number=1, page=1, pages=1, up=2))
    await decide(world, "c1-0", AdminState.DISABLED)
    assert await refused_code(world, "c1-0") == "host.cell_silent"  # a service of c2 has not reported its hosts here
    assert world.replicas["s2"].row_of(host) is not None


async def test_a_host_that_something_is_on_record_of_is_kept(world: World) -> None:
    """Its instance by the schedulers' record; its fence; and what a consumer holds by placement, whichever that is."""
    (host,) = await world.scheduler_and_hosts(1, WARM)
    build = world.request()
    await world.active(build)
    await digests(world, "compute-c1")
    assert await refused_code(world, "c1-0") == "host.has_instances"
    number = (await decide(world, host, AdminState.FENCED)).fence
    await publish_fence(world, host, number, FenceState.FENCED, stale_machines=1)
    await world.announced("c1", build, BuildState.DELETED, 12, terminal=True)
    await world.ended(build.instance_uuid, BuildState.DELETED)
    assert await refused_code(world, "c1-0") == "host.fence_open"
    await decide(world, host, AdminState.ENABLED, reason="burnt", force=True)
    assert await refused_code(world, "c1-0") == "host.fence_open"  # its cell would put the fence on record again
    (lift,) = {one.version for _, one in await until(lambda: [one for one in world.fences if one[1].unfence])}
    await publish_fence(world, host, lift, FenceState.UNFENCING, stale_machines=1)
    async with asyncio.timeout(PATIENCE_S):
        while await refused_code(world, "c1-0") == "host.fence_open":
            pass
    assert await refused_code(world, "c1-0") == "host.in_use"  # no cell has released what the instance held
    assert all(replica.row_of(host) is not None for replica in world.replicas.values())
    await world.answer(Release(consumer=build.instance_uuid), ReleaseResult)
    assert (await forget_host(world, "c1-0")).removed
    # A report about the fence that was under way does not bring it back.
    await publish_fence(world, host, lift, FenceState.UNFENCING, stale_machines=1)
    await decide(world, (await world.add_hosts("c2", 1))[0], AdminState.DISABLED)
    page = await world.answer(ObjectsQuery(kind=ObjectKind.FENCE), ObjectsPage)
    assert page.objects == ()


async def test_an_unknown_name_is_refused_and_an_unknown_uuid_is_nothing_on_record(world: World) -> None:
    await world.scheduler_and_hosts(1, WARM)
    await digests(world)
    assert await refused_code(world, "nowhere") == "host.unknown"
    assert not (await forget_host(world, ZONE)).removed
    log = await world.answer(ObjectLogQuery(kind=ObjectKind.HOST), ObjectLogPage)
    assert log.entries == ()


# --- A compute service whose reports are older than what a scheduler knows of its name.


# --- Fences at the top: sent to a cell until it acknowledges; a fenced host is used once its cell has lifted it.


async def test_a_cell_is_notified_of_a_fence_until_it_acknowledges_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence_publisher, "REPUBLISH_S", 0.02)
    (uuid,) = await world.scheduler_and_hosts(1, WARM)
    decided = await decide(world, uuid, AdminState.FENCED, reason="PSU")
    assert (decided.state, decided.acknowledged) == (AdminState.FENCED, 0)
    number = decided.fence
    command = await fence_sent(world, number)
    assert (command.host_uuid, command.host, command.unfence, command.by) == (uuid, "c1-0", False, "ann")
    await until(lambda: len(world.fences) >= 3)  # repeated
    assert {bus for bus, _ in world.fences} == {"c1"}
    await publish_fence(world, uuid, number, FenceState.FENCED, stale_machines=2)
    await becomes(world, uuid, AdminState.FENCED, acknowledged=number, stale_machines=2)
    await world.stop("s1")
    # A scheduler that starts now has it from the record, and does not publish it again before `REPEAT_S`.
    before = len(world.fences)
    await world.scheduler("s2", WARM)
    await becomes(world, uuid, AdminState.FENCED, acknowledged=number)
    monkeypatch.setattr(fence_publisher, "REPEAT_S", 0.0)
    await until(lambda: len(world.fences) > before)


# --- Instances of a fenced host are evacuated by their policy: by any scheduler, once, and only under the cell's
# fence.


SMALL = WARM.flavors["m1.small"]
EVACUATING = replace(
    WARM,
    flavors={
        **WARM.flavors,
        "kept": replace(SMALL, extra_specs={POLICY_SPEC: "restart"}),
        "left": replace(SMALL, extra_specs={POLICY_SPEC: "wait"}),
    },
)
RESTART = EvacuationPolicy.RESTART


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emptying, "STAGGER_S", 0.01)
    monkeypatch.setattr(emptying, "LOOK_S", 0.05)
    monkeypatch.setattr(emptying, "READ_ALL_S", 0.05)


async def active(world: World, count: int, flavor: str = "m1.small", **more: object) -> list[BuildRequest]:
    """Instances on the only host there is."""
    builds = [world.request(flavor, **more) for _ in range(count)]
    for one in builds:
        await world.active(one)
    return builds


async def fence(world: World, uuid: str, *, by_cell: bool = True) -> int:
    """The version of the fence, which the cell has recorded."""
    version = (await decide(world, uuid, AdminState.FENCED, reason="PSU")).fence
    if by_cell:
        await publish_fence(world, uuid, version, FenceState.FENCED)
    return version


def evacuated(world: World) -> list[CellAction]:
    """The requests, in the order in which the cell got them; one that a killed process sent twice is one."""
    return list({one.request_id: one for _, one in world.actions if one.kind is ActionKind.EVACUATE}.values())


def is_begun(world: World, count: int) -> bool:
    return len(evacuated(world)) >= count


async def ends(world: World, command: CellAction, state: ActionState, **more: object) -> None:
    """The cell reports how it ended."""
    action = world.action(BuildRequest(instance_uuid=command.instance_uuid, flavor="", project_id="demo"), command.kind)
    action = replace(action, request_id=command.request_id)
    fields = {"terminal": True, "condition": Condition.ACTIVE, **more}
    await world.action_announced("c1", action, state, 30, **fields)
    await world.moved(action, state)


async def test_several_schedulers_evacuate_each_instance_once(world: World) -> None:
    for name in ("s1", "s2", "s3"):
        await world.scheduler(name, EVACUATING)
    (uuid,) = await world.add_hosts("c1", 1)
    builds = await active(world, 6, on_host_failure=RESTART)
    await world.add_hosts("c1", 2)
    await fence(world, uuid)
    await until(lambda: len(evacuated(world)) >= len(builds))
    for command in list(evacuated(world)):
        await ends(world, command, ActionState.DONE, host="c1-1")
    # One more host: when what is there has been evacuated, all of them have looked at the first one again.
    last = (await active(world, 1, on_host_failure=RESTART, host="c1-2"))[0]
    await fence(world, next(uuid for uuid, host in world.hosts["c1"].items() if host.name == "c1-2"))
    await until(partial(is_begun, world, len(builds) + 1))
    builds.append(last)
    assert sorted(one.instance_uuid for one in evacuated(world)) == sorted(one.instance_uuid for one in builds)


async def test_no_more_evacuations_are_under_way_than_may_be_whoever_makes_them(world: World) -> None:
    """Two hosts are fenced, and three schedulers count together: under one lock, what is on record."""
    for name in ("s1", "s2", "s3"):
        await world.scheduler(name, replace(EVACUATING, evacuations_at_once=2))
    first, second = await world.add_hosts("c1", 2)
    builds = await active(world, 6, on_host_failure=RESTART)
    await world.add_hosts("c1", 2)
    for uuid in (first, second):
        await fence(world, uuid)
    for done in range(len(builds)):
        await until(partial(is_begun, world, min(done + 2, len(builds))))
        assert len(evacuated(world)) - done <= 2
        await ends(world, evacuated(world)[done], ActionState.DONE, host="c1-2")
    assert sorted(one.instance_uuid for one in evacuated(world)) == sorted(one.instance_uuid for one in builds)


async def test_a_group_with_affinity_leaves_a_fenced_host_for_one_other_host(world: World) -> None:
    await world.scheduler("s1", replace(EVACUATING, host_subset_size=5, max_attempts=1))
    (uuid,) = await world.add_hosts("c1", 1)
    group = ServerGroup(uuid=new_uuid(world.rng), policy=GroupPolicy.AFFINITY)
    builds = await active(world, 4, on_host_failure=RESTART, server_group=group)
    await world.add_hosts("c1", 6)
    await fence(world, uuid)
    await until(lambda: len(evacuated(world)) >= len(builds))
    chosen = {tuple(one.host_uuid for one in command.selections) for command in evacuated(world)}
    assert len(chosen) == 1 and uuid not in chosen.pop()
    assert {command.fenced_hosts for command in evacuated(world)} == {(uuid,)}


async def test_a_shelved_instance_gives_its_host_up_and_is_unshelved_elsewhere(world: World) -> None:
    """No host is chosen for it: its cell has the proof that its host is off, and offloads it."""
    (uuid,) = await world.scheduler_and_hosts(1, EVACUATING)
    (built,) = await active(world, 1, on_host_failure=RESTART)
    shelve = world.action(built, ActionKind.SHELVE)
    await world.commanded(shelve)
    await world.action_announced("c1", shelve, ActionState.DONE, 20, terminal=True, condition=Condition.SHELVED)
    await world.moved(shelve)
    await world.add_hosts("c1", 1)
    await fence(world, uuid)
    found = await until(lambda: [one for _, one in world.actions if one.request_id != shelve.request_id])
    assert (found[0].kind, found[0].instance_uuid, found[0].selections) == (
        ActionKind.EVACUATE,
        built.instance_uuid,
        (),
    )
    await ends(world, found[0], ActionState.DONE, condition=Condition.OFFLOADED)
    unshelve = world.action(built, ActionKind.UNSHELVE)
    assert [one.host for one in (await world.commanded(unshelve)).selections] == ["c1-1"]


async def test_an_instance_that_cannot_be_evacuated_is_given_up_after_so_many_tries(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_worker.drain.drain_steps.doubled_s", lambda *_: 0.0)
    monkeypatch.setattr("scheduler_worker.drain.drain_steps.MAX_REFUSALS", 3)
    await world.scheduler("s1", EVACUATING)
    await world.scheduler("s2", EVACUATING)
    (uuid,) = await world.add_hosts("c1", 1)
    await active(world, 1, on_host_failure=RESTART)
    await fence(world, uuid)
    await until(lambda: len({one.request_id for one in world.action_events if one.terminal}) >= 3)
    await world.stop("s1")
    await world.scheduler("s3", EVACUATING)  # it counts what is on record
    await world.add_hosts("c1", 1)
    (other,) = await active(world, 1, on_host_failure=RESTART)
    await fence(world, next(uuid for uuid, host in world.hosts["c1"].items() if host.name == "c1-1"))
    await until(lambda: any(one.instance_uuid == other.instance_uuid for one in world.action_events))
    ended = {one.request_id for one in world.action_events if one.instance_uuid != other.instance_uuid}
    assert len(ended) == 3

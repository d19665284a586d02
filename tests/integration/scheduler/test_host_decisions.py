"""An operator's decisions about hosts: in effect on every scheduler at once, on record, and beyond a restart."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from bus.bus import API
from bus.contracts.build import BuildState, HostRecord, HostsPage, HostsQuery
from bus.contracts.cell import ServiceDown, ServicesDigest
from bus.contracts.objects import (
    ChangedObject,
    ObjectChange,
    ObjectKind,
    ObjectLogPage,
    ObjectLogQuery,
    ObjectsChange,
    ObjectsChanged,
    ObjectsPage,
    ObjectsQuery,
)
from bus.contracts.operations import (
    AdminState,
    AdminStateSet,
    HostAdminState,
    ServicesPage,
    ServicesQuery,
    SetAdminState,
)
from bus.contracts.placement import InventoryResult, InventoryUpdate
from bus.faults import RequestRefused, RequestTimeout
from bus.persistence.database import Database
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.hosts import HostTable
from scheduler_worker.domain.objects import ChangeAuthor
from scheduler_worker.store.postgres import PostgresBuilds
from tests.contract.test_published_once import watched
from tests.integration.scheduler.world import PATIENCE_S, World
from tests.kit.sent import Sent

pytestmark = pytest.mark.postgres

LATE_S = 0.3  # a requester's patience that is shorter than a lock is held


async def decide(world: World, host: str, state: AdminState, reason: str = "fan", **more: Any) -> HostAdminState:
    forced = {"force": True} if state is AdminState.FENCED else {}  # the hosts of these tests have a service that is up
    command = SetAdminState(host=host, state=state, reason=reason, by="ann", **{**forced, **more})
    return (await world.buses[API].request(command, AdminStateSet, timeout_s=PATIENCE_S)).host


async def hosts_of(world: World) -> dict[str, HostRecord]:
    page = await world.buses[API].request(HostsQuery(), HostsPage, timeout_s=PATIENCE_S)
    return {host.name: host for host in page.hosts}


async def test_a_disabled_host_takes_nothing_from_any_scheduler_until_it_is_enabled(world: World) -> None:
    """Whatever its compute service goes on to announce; and a scheduler that starts later knows it, too."""
    await world.scheduler("s1")
    await world.scheduler("s2")
    first, second = await world.add_hosts("c1", 2)
    decided = await decide(world, "c1-0", AdminState.DISABLED)
    assert (decided.host_uuid, decided.host, decided.by) == (first, "c1-0", "ann")
    tables = world.tables.values()
    await world.eventually(lambda: all(table.decision_of(first) == decided for table in tables))
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
    only = world.request(host="c1-0")
    await world.ask(only)
    failed = await world.ended(only.instance_uuid)
    assert failed.state is BuildState.FAILED
    assert [step.rejected for step in failed.funnel if step.step == "ComputeFilter"] == [{"host.disabled": 1}]
    again = await decide(world, first, AdminState.ENABLED, reason="")
    assert again.version > decided.version
    back = world.request(host="c1-0")
    await world.ask(back)
    assert (await world.ended(back.instance_uuid, BuildState.SCHEDULED)).host == "c1-0"
    assert second != first


async def test_a_host_under_maintenance_takes_no_forced_request_either(world: World) -> None:
    await world.scheduler(config=SchedulerConfig(force_host_projects=("demo",)))
    await world.add_hosts("c1", 1)
    await decide(world, "c1-0", AdminState.DISABLED)
    forced = world.request(host="c1-0", forced=True)
    await world.ask(forced)
    await world.ended(forced.instance_uuid, BuildState.SCHEDULED)
    for state in (AdminState.MAINTENANCE, AdminState.FENCED):
        await decide(world, "c1-0", state)
        again = world.request(host="c1-0", forced=True)
        await world.ask(again)
        failed = await world.ended(again.instance_uuid)
        assert (failed.state, failed.code) == (BuildState.FAILED, "no_valid_host")
        assert failed.funnel[-1].rejected == {f"host.{state}": 1}
        plain = world.request(host="c1-0")
        await world.ask(plain)
        funnel = (await world.ended(plain.instance_uuid)).funnel
        assert [step.rejected for step in funnel if step.step == "ComputeFilter"] == [{f"host.{state}": 1}]


async def test_a_fence_is_ended_by_a_scheduler_that_has_never_received_the_host(world: World) -> None:
    """It is off, or offered only after its fence has been lifted: no service announces it, and the book has lost it."""
    config = SchedulerConfig(hosts_warmup_s=0.001)
    await world.scheduler("s1", config=config)
    (host,) = await world.add_hosts("c1", 1)
    await decide(world, "c1-0", AdminState.FENCED)
    await world.stop("s1")
    del world.hosts["c1"][host]
    await world.buses[API].request(
        InventoryUpdate(source="world", version=2, root_uuid=host, providers=()), InventoryResult, timeout_s=PATIENCE_S
    )
    await world.scheduler("s2", config=config)
    await world.eventually(lambda: world.tables["s2"].decision_of(host) is not None)
    assert world.tables["s2"].index_of(host) is None
    decided = await decide(world, "c1-0", AdminState.ENABLED, force=True)
    assert (decided.host_uuid, decided.host, decided.state) == (host, "c1-0", AdminState.ENABLED)
    await world.eventually(lambda: any(bus == "c1" and fence.lift for bus, fence in world.fences))


async def test_a_decision_that_is_delivered_again_does_not_undo_a_later_one(world: World) -> None:
    """The process that handled it may die before it acknowledges."""
    await world.scheduler()
    (host,) = await world.add_hosts("c1", 1)
    first = await decide(world, host, AdminState.DISABLED)
    sent = watched(world.buses[API].transport)
    await world.ask(SetAdminState(host=host, state=AdminState.DISABLED, reason="twice", by="ann"))
    table = world.tables["s1"]
    await world.eventually(lambda: (found := table.decision_of(host)) is not None and found.reason == "twice")
    (copy,) = sent
    await decide(world, host, AdminState.ENABLED)
    await world.buses[API].transport.publish(copy)
    last = await decide(world, host, AdminState.ENABLED, reason="last")
    assert last.version == first.version + 3
    log = await world.buses[API].request(ObjectLogQuery(name=host), ObjectLogPage, timeout_s=PATIENCE_S)
    assert [(one.after or {})["state"] for one in log.entries] == ["enabled", "enabled", "disabled", "disabled"]
    assert {(one.kind, one.who) for one in log.entries} == {(ObjectKind.HOST, "ann")}


async def test_a_decision_that_waits_longer_than_its_requester_is_not_made(world: World) -> None:
    """Its requester decides anew, and perhaps otherwise by then: a host that was enabled again would be fenced."""
    await world.scheduler()
    (host,) = await world.add_hosts("c1", 1)
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
            await world.buses[API].request(ObjectsQuery(), ObjectsPage, timeout_s=PATIENCE_S)
    await decide(world, host, AdminState.ENABLED, reason="last")
    log = await world.buses[API].request(ObjectLogQuery(name=host), ObjectLogPage, timeout_s=PATIENCE_S)
    assert [one.why for one in log.entries] == ["last", "fan"]
    assert world.fences == []
    await store.close()


async def test_unknown_and_ambiguous_hosts_are_refused_by_name(world: World) -> None:
    await world.scheduler(config=SchedulerConfig(hosts_warmup_s=0.001))
    await world.add_hosts("c1", 1)
    await world.add_hosts("c2", 1)
    world.hosts["c2"] = {uuid: type(one)(uuid=uuid, name="c1-0") for uuid, one in world.hosts["c2"].items()}
    await world.announce("c2")
    await world.eventually(lambda: len(world.tables["s1"].find("c1-0")) == 2)
    with pytest.raises(RequestRefused) as ambiguous:
        await decide(world, "c1-0", AdminState.DISABLED)
    assert ambiguous.value.code == "host.ambiguous"
    assert (await decide(world, "c1-0", AdminState.DISABLED, cell="c2")).host_uuid in world.hosts["c2"]
    with pytest.raises(RequestRefused) as unknown:
        await decide(world, "nowhere", AdminState.DISABLED)
    assert unknown.value.code == "host.unknown"


def is_decided(table: HostTable, host: str, decided: bool) -> bool:
    return (table.decision_of(host) is not None, bool(table.admin[0])) == (decided, decided)


async def test_a_decision_whose_announcement_is_lost_is_read_with_the_next_reading(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_worker.objects.RELOAD_S", 0.1)
    await world.scheduler("s1")
    (host,) = await world.add_hosts("c1", 1)
    store = PostgresBuilds(Database(world.url, "scheduler", pool_size=1))
    store.publish_through(Sent())  # type: ignore[arg-type]
    await store.open()
    table = world.tables["s1"]
    for after, decided in (({"host": "c1-0", "state": "disabled"}, True), (None, False)):
        async with store.operation() as unit:
            await unit.lock_objects()
            changed = ChangedObject(kind=ObjectKind.HOST, name=host, after=after)
            await unit.write_objects([changed], ChangeAuthor("by hand", "", 1.0))
        await world.eventually(partial(is_decided, table, host, decided))
        found = table.decision_of(host)
        assert (None if found is None else found.state) == (AdminState.DISABLED if decided else None)
    await store.close()


async def test_compute_services_are_listed_with_their_hosts(world: World) -> None:
    await world.scheduler()
    await world.add_hosts("c1", 3)
    await world.add_hosts("c2", 1)
    await decide(world, "c1-1", AdminState.DISABLED)
    page = await world.buses[API].request(ServicesQuery(), ServicesPage, timeout_s=PATIENCE_S)
    assert [(one.name, one.cell, one.up, one.hosts, one.enabled) for one in page.services] == [
        ("compute-c1", "c1", True, 3, 2),
        ("compute-c2", "c2", True, 1, 1),
    ]
    page = await world.buses[API].request(ServicesQuery(cell="c2", up=False), ServicesPage, timeout_s=PATIENCE_S)
    assert page.services == ()


async def test_a_host_whose_compute_service_is_up_is_fenced_only_by_force(world: World) -> None:
    """A name may be mistyped: what is evacuated from a host that runs, runs twice."""
    await world.scheduler()
    await world.add_hosts("c1", 2)
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
            who="ann",
        ),
    ):
        reply = AdminStateSet if isinstance(change, SetAdminState) else ObjectsChanged
        with pytest.raises(RequestRefused, match="the compute service compute-c1 is up") as refusal:
            await world.buses[API].request(change, reply, timeout_s=PATIENCE_S)
        assert refusal.value.code == "host.service_up"
    assert (await hosts_of(world))["c1-0"].admin is None
    forced = await decide(world, "c1-0", AdminState.FENCED, force=True)
    again = await decide(world, "c1-0", AdminState.FENCED, reason="PSU", force=False)  # it is fenced already
    assert (forced.state, again.state, again.reason) == (AdminState.FENCED, AdminState.FENCED, "PSU")


async def test_a_host_whose_compute_service_is_down_is_fenced_without_force(world: World) -> None:
    await world.scheduler()
    await world.add_hosts("c1", 1)
    down = ServiceDown(service="compute-c1", epoch=2**62, code="service.silent", reason="no heartbeat for 6 s")
    await world.buses["c1"].publish(ServicesDigest(cell="c1", term=1, number=1, page=1, pages=1, up=0, down=(down,)))
    await world.eventually(lambda: all(table.down()[0] for table in world.tables.values()))
    assert (await decide(world, "c1-0", AdminState.FENCED, force=False)).state is AdminState.FENCED

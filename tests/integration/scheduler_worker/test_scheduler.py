"""A whole scheduler against the real placement: what it dispatches, what it publishes, what it leaves behind."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from bus.bus import API
from bus.contracts.build import BuildAccepted, BuildRequest, BuildState, DeleteRequest, HostsPage, HostsQuery
from bus.faults import RequestRefused
from scheduler_worker.cell_events import cell_event_recorder as announcements
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.store.port import OptimisticBuildUnit
from tests.integration.scheduler_worker.world import World
from tests.kit.waiting import PATIENCE_S, until

pytestmark = pytest.mark.postgres


def world_delete(request: BuildRequest) -> DeleteRequest:
    return DeleteRequest(instance_uuid=request.instance_uuid, project_id=request.project_id)


async def test_a_request_is_claimed_dispatched_and_reported(world: World) -> None:
    hosts = await world.scheduler_and_hosts(3)
    request = await world.requested("m1.small")
    await until(lambda: world.builds)
    cell, build = world.builds[0]
    assert cell == "c1" and build.spec.instance_uuid == request.instance_uuid
    assert [s.host_uuid in hosts for s in build.selections] == [True] * 3
    assert len({s.host_uuid for s in build.selections}) == 3
    assert {s.service for s in build.selections} == {"compute-c1"}
    scheduled = await world.ended(request.instance_uuid, BuildState.SCHEDULED)
    assert scheduled.host == build.selections[0].host and not scheduled.terminal
    # Only the selected host is claimed; alternates are not.
    assert await world.used() == {build.selections[0].host_uuid: {"VCPU": 1, "MEMORY_MB": 2048, "DISK_GB": 20}}
    assert build.selections[0].allocations == {
        build.selections[0].host_uuid: {"VCPU": 1, "MEMORY_MB": 2048, "DISK_GB": 20}
    }
    await world.announced("c1", request, BuildState.BUILDING, 10, host=scheduled.host, attempt=1)
    await world.announced("c1", request, BuildState.ACTIVE, 11, terminal=True, host=scheduled.host, attempt=1)
    active = await world.ended(request.instance_uuid)
    assert active.state is BuildState.ACTIVE and active.cell == "c1"
    # A state that the next one overtook is not published; which ones that were depends on what is quicker.
    assert world.states(request.instance_uuid)[-2:] in (["scheduled", "active"], ["building", "active"])
    record = await world.show(request.instance_uuid)
    assert record is not None and record.state is BuildState.ACTIVE and record.host == scheduled.host
    assert [line.what for line in record.timeline] == [
        "requested", "chosen", "claimed", "dispatched", "building", "active",
    ]  # fmt: skip
    await world.ask(world.request("m1.large", instance_uuid=request.instance_uuid))
    refused = await world.ended(request.instance_uuid, BuildState.REFUSED)
    assert (refused.code, refused.sequence) == ("request.duplicate", 0)


async def test_a_loss_whose_request_has_no_other_end_ends_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `active` is a dead letter, or older than the scheduler's backup."""
    monkeypatch.setattr(announcements, "MAX_OUT_OF_ORDER", 1)
    await world.scheduler_and_hosts(1)
    request = await world.requested()
    await until(lambda: world.builds)
    await world.announced("c1", request, BuildState.FAILED, 12, attempt=1, code="instance.lost")
    assert (await world.ended(request.instance_uuid, BuildState.FAILED)).terminal


async def test_two_schedulers_fill_few_hosts_without_overcommitting(world: World) -> None:
    await world.add_hosts("c1", 4, CUSTOM_BAREMETAL_GOLD=1)
    await world.add_hosts("c2", 4, CUSTOM_BAREMETAL_GOLD=1)
    await world.scheduler("s1")
    await world.scheduler("s2")
    requests = [world.request("bm.gold") for _ in range(20)]
    await world.ask(*requests)
    ends = [await world.ended(request.instance_uuid, BuildState.SCHEDULED, BuildState.FAILED) for request in requests]
    assert Counter(end.state.value for end in ends) == {"scheduled": 8, "failed": 12}
    assert {end.code for end in ends if end.state is BuildState.FAILED} == {"no_valid_host"}
    await until(lambda: len(world.builds) == 8)
    taken = [build.selections[0].host_uuid for _, build in world.builds]
    assert len(set(taken)) == 8
    assert await world.used() == {uuid: {"CUSTOM_BAREMETAL_GOLD": 1} for uuid in taken}
    for cell, build in world.builds:
        assert all(selection.host.startswith(cell) for selection in build.selections)  # same cell


async def test_delete_before_after_and_of_nothing(world: World) -> None:
    await world.scheduler_and_hosts(2)
    # In one batch with its build: never dispatched, claim freed, one terminal event.
    request = world.request()
    await world.buses[API].publish_all([(request, ""), (world_delete(request), ""), (world_delete(request), "")])
    answer = await world.ended(request.instance_uuid, BuildState.DELETED)
    assert answer.terminal
    assert world.builds == [] or world.deletes or await world.used() == {}
    # After dispatch: the cell's business; its `deleted` ends it.
    built = await world.requested()
    await until(lambda: any(b.spec.instance_uuid == built.instance_uuid for _, b in world.builds))
    await world.announced("c1", built, BuildState.ACTIVE, 11, terminal=True)
    await world.ended(built.instance_uuid, BuildState.ACTIVE)
    await world.delete(built)
    await until(lambda: any(d.instance_uuid == built.instance_uuid for _, d in world.deletes))
    await world.announced("c1", built, BuildState.DELETED, 13, terminal=True)
    await world.ended(built.instance_uuid, BuildState.DELETED)
    await world.delete(built)
    # Late and repeated reports change nothing.
    await world.announced("c1", built, BuildState.ACTIVE, 11, terminal=True)
    await world.announced("c1", built, BuildState.DELETED, 13, terminal=True)
    # Unknown, and another project's.
    nothing = world.request()
    await world.delete(nothing)
    refused = await world.ended(nothing.instance_uuid)
    assert (refused.state, refused.code) == (BuildState.REFUSED, "instance.unknown")
    with pytest.raises(RequestRefused) as other:
        await world.answer(
            type(world_delete(built))(instance_uuid=built.instance_uuid, project_id="other"), BuildAccepted
        )
    assert other.value.code == "instance.unknown"
    terminals = [e.state.value for e in world.events if e.instance_uuid == built.instance_uuid and e.terminal]
    assert terminals == ["active", "deleted"]
    record = await world.show(built.instance_uuid)
    assert record is not None and record.state is BuildState.DELETED


async def test_an_accepted_request_survives_its_scheduler(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the claim and the record of it: the next scheduler adopts the claim, even of the only host."""
    await world.add_hosts("c1", 1, CUSTOM_BAREMETAL_GOLD=1)
    await world.scheduler("s1")
    claimed = asyncio.Event()

    async def dies(*_: object) -> set[str]:
        claimed.set()
        await asyncio.Event().wait()  # until the process dies
        return set()

    request = world.request("bm.gold")
    with monkeypatch.context() as patched:
        patched.setattr(OptimisticBuildUnit, "write_decisions", dies)
        await world.ask(request)
        async with asyncio.timeout(PATIENCE_S):
            await claimed.wait()
        await world.kill("s1")
    (held,) = await world.used()
    assert world.builds == []
    await world.scheduler("s2")
    await world.ended(request.instance_uuid, BuildState.SCHEDULED)
    await until(lambda: world.builds)
    ((_, build),) = world.builds
    assert build.selections[0].host_uuid == held and build.selections[0].allocations == {
        held: {"CUSTOM_BAREMETAL_GOLD": 1}
    }
    assert await world.used() == {held: {"CUSTOM_BAREMETAL_GOLD": 1}}


async def test_hosts_query_and_a_foreign_cell_is_ignored(world: World) -> None:
    (uuid,) = await world.scheduler_and_hosts(1)
    request = await world.scheduled()
    page = await world.answer(HostsQuery(), HostsPage)
    (host,) = page.hosts
    assert (host.uuid, host.cell, host.service, host.up) == (uuid, "c1", "compute-c1", True)
    assert host.resources["VCPU"] == (1.0, 16.0)
    await world.announced("c2", request, BuildState.FAILED, 99, terminal=True)
    await world.announced("c1", request, BuildState.BUILDING, 10)
    await world.ended(request.instance_uuid, BuildState.BUILDING)
    assert "failed" not in world.states(request.instance_uuid)


async def test_nothing_is_lost_or_doubled_when_connections_break(world: World) -> None:
    """Every accepted request is dispatched once, by whichever scheduler; what is claimed is what is dispatched."""
    await world.scheduler("s1", SchedulerConfig(claim_timeout_s=0.5, batch=8))
    await world.scheduler("s2", SchedulerConfig(claim_timeout_s=0.5, batch=8))
    await world.add_hosts("c1", 5, VCPU=64, MEMORY_MB=262_144, DISK_GB=4000)
    await world.add_hosts("c2", 5, VCPU=64, MEMORY_MB=262_144, DISK_GB=4000)
    requests = [world.request("m1.small") for _ in range(200)]
    asking = asyncio.gather(*(world.ask(request) for request in requests), return_exceptions=True)
    await until(lambda: len(world.builds) > 10)
    world.brokers[API].drop_connections()
    await until(lambda: len(world.builds) > 60)
    world.brokers["c1"].drop_connections()
    world.brokers[API].drop_connections()
    # A client whose publish failed requests again.
    for request, error in zip(requests, await asking, strict=True):
        if error is not None:
            await world.ask(request)
    wanted = {request.instance_uuid for request in requests}
    await until(lambda: {build.spec.instance_uuid for _, build in world.builds} == wanted)
    # The outbox may repeat a command; it never reports two results.
    commands: dict[str, set[tuple[str, str]]] = {}
    for cell, build in world.builds:
        commands.setdefault(build.spec.instance_uuid, set()).add((cell, build.selections[0].host_uuid))
    assert all(len(places) == 1 for places in commands.values())
    taken = Counter(host for places in commands.values() for _, host in places)
    assert {uuid: used["VCPU"] for uuid, used in (await world.used()).items()} == dict(taken)

"""Fences at the top: sent to a cell until it acknowledges; a fenced host is used once its cell has lifted it."""

from __future__ import annotations

import pytest

from bus.bus import API
from bus.contracts.build import BuildState
from bus.contracts.fences import CellFence, FenceState, HostFence
from bus.contracts.moves import MoveKind
from bus.contracts.objects import (
    ObjectChange,
    ObjectKind,
    ObjectLogPage,
    ObjectLogQuery,
    ObjectsChange,
    ObjectsChanged,
)
from bus.contracts.operations import AdminState
from bus.faults import RequestRefused
from scheduler_worker import fences
from scheduler_worker.config import SchedulerConfig
from tests.integration.scheduler.test_host_decisions import decide
from tests.integration.scheduler.test_moves import refused
from tests.integration.scheduler.world import PATIENCE_S, World

pytestmark = pytest.mark.postgres

WARM = SchedulerConfig(hosts_warmup_s=0.001)


async def fence_sent(world: World, version: int, cell: str = "c1") -> CellFence:
    found = await world.until(lambda: [one for bus, one in world.fences if (bus, one.version) == (cell, version)])
    return found[0]


async def publish_fence(
    world: World, uuid: str, version: int, state: FenceState, *, losses: int = 0, cell: str = "c1"
) -> None:
    announced = HostFence(cell=cell, host_uuid=uuid, version=version, state=state, losses=losses)
    await world.buses[cell].publish(announced)


async def becomes(world: World, uuid: str, state: AdminState, **fields: object) -> None:
    def there() -> bool:
        found = [table.decision_of(uuid) for table in world.tables.values()]
        return all(
            one is not None
            and one.state is state
            and all(getattr(one, name) == value for name, value in fields.items())
            for one in found
        )

    await world.eventually(there)


async def test_a_cell_is_notified_of_a_fence_until_it_acknowledges_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fences, "REPUBLISH_S", 0.02)
    await world.scheduler("s1", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    decided = await decide(world, uuid, AdminState.FENCED, reason="PSU")
    assert (decided.state, decided.acknowledged) == (AdminState.FENCED, 0)
    number = decided.fence
    command = await fence_sent(world, number)
    assert (command.host_uuid, command.host, command.lift, command.by) == (uuid, "c1-0", False, "ann")
    await world.until(lambda: len(world.fences) >= 3)  # repeated
    assert {bus for bus, _ in world.fences} == {"c1"}
    await publish_fence(world, uuid, number, FenceState.FENCED, losses=2)
    await becomes(world, uuid, AdminState.FENCED, acknowledged=number, losses=2)
    await world.stop("s1")
    # A scheduler that starts now has it from the record, and does not publish it again before `REPEAT_S`.
    before = len(world.fences)
    await world.scheduler("s2", WARM)
    await becomes(world, uuid, AdminState.FENCED, acknowledged=number)
    monkeypatch.setattr(fences, "REPEAT_S", 0.0)
    await world.until(lambda: len(world.fences) > before)


async def test_a_fenced_host_is_used_only_when_its_cell_has_lifted_the_fence(world: World) -> None:
    await world.scheduler("s1", WARM)
    await world.scheduler("s2", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    first = (await decide(world, uuid, AdminState.FENCED)).fence
    await publish_fence(world, uuid, first, FenceState.FENCED)
    await becomes(world, uuid, AdminState.FENCED, acknowledged=first)
    back = await decide(world, uuid, AdminState.ENABLED, reason="repaired")
    assert (back.state, back.pending, back.fence > first) == (AdminState.FENCED, AdminState.ENABLED, True)
    assert (await fence_sent(world, back.fence)).lift
    await publish_fence(world, uuid, back.fence, FenceState.LIFTING, losses=3)
    await becomes(world, uuid, AdminState.FENCED, losses=3, pending=AdminState.ENABLED)
    early = world.request(host="c1-0")
    await world.ask(early)
    assert (await world.ended(early.instance_uuid)).state is BuildState.FAILED
    await publish_fence(world, uuid, first, FenceState.LIFTED)  # of an older decision
    await publish_fence(world, uuid, back.fence, FenceState.LIFTED, cell="c2")  # of a cell that the host is not in
    await publish_fence(world, uuid, back.fence, FenceState.LIFTING, losses=1)
    await becomes(world, uuid, AdminState.FENCED, losses=1)
    await publish_fence(world, uuid, back.fence, FenceState.LIFTED)
    await becomes(world, uuid, AdminState.ENABLED, pending=None)
    build = world.request(host="c1-0")
    await world.ask(build)
    await world.ended(build.instance_uuid, BuildState.SCHEDULED)


async def test_a_host_that_is_fenced_again_is_not_given_back_by_the_older_decision(world: World) -> None:
    await world.scheduler("s1", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    await decide(world, uuid, AdminState.FENCED)
    older = (await decide(world, uuid, AdminState.DISABLED)).fence
    newest = (await decide(world, uuid, AdminState.FENCED)).fence
    await publish_fence(world, uuid, older, FenceState.LIFTED)
    await publish_fence(world, uuid, newest, FenceState.FENCED)
    await becomes(world, uuid, AdminState.FENCED, acknowledged=newest, pending=None)
    await publish_fence(world, uuid, newest, FenceState.LIFTED)  # its record was set back: it is sent again
    await publish_fence(world, uuid, newest, FenceState.FENCED, losses=1)
    await becomes(world, uuid, AdminState.FENCED, losses=1)


async def test_a_fence_that_is_commanded_once_more_is_a_new_decision_also_with_the_same_reason(world: World) -> None:
    """The host ran when it was fenced first, and is off now: its cell is notified, and its evacuations begin anew. A
    configuration that has the fence already states nothing new; a command that is delivered twice is in
    `test_host_decisions.py`.
    """
    await world.scheduler("s1", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    first = await decide(world, uuid, AdminState.FENCED, reason="PSU")
    again = await decide(world, uuid, AdminState.FENCED, reason="PSU")
    assert again.fence > first.fence
    sent = [await fence_sent(world, one.fence) for one in (first, again)]
    assert sent[1].at > sent[0].at
    disabled = [await decide(world, uuid, AdminState.DISABLED) for _ in range(2)]
    assert disabled[0].fence == disabled[1].fence, "it is requested to be lifted once"
    await decide(world, uuid, AdminState.FENCED, reason="PSU")
    body = {"host": "c1-0", "state": "fenced", "reason": "PSU"}
    applied = ObjectsChange(changes=(ObjectChange(kind=ObjectKind.HOST, name=uuid, body=body),), who="ann", force=True)
    assert (await world.buses[API].request(applied, ObjectsChanged, timeout_s=PATIENCE_S)).changed == ()


async def test_a_cell_that_knows_a_later_decision_gets_a_version_above_it(world: World) -> None:
    """The record of decisions was set back."""
    await world.scheduler("s1", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    number = (await decide(world, uuid, AdminState.FENCED)).fence
    await publish_fence(world, uuid, number + 100, FenceState.FENCED)
    await becomes(world, uuid, AdminState.FENCED, fence=number + 101)


async def test_a_fence_that_only_its_cell_knows_is_lifted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record was set back to before the decision: the fence was neither repeated nor lifted, for ever."""
    monkeypatch.setattr(fences, "REPUBLISH_S", 0.02)
    await world.scheduler("s1", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    await publish_fence(world, uuid, 1000, FenceState.FENCED, losses=2)
    command = await fence_sent(world, 1001)
    assert (command.host_uuid, command.host, command.lift) == (uuid, "c1-0", True)
    await becomes(world, uuid, AdminState.FENCED, pending=AdminState.ENABLED, losses=2)
    await publish_fence(world, uuid, 1001, FenceState.LIFTED)
    await world.eventually(lambda: [table.decision_of(uuid) for table in world.tables.values()] == [None])
    build = world.request(host="c1-0")
    await world.ask(build)
    await world.ended(build.instance_uuid, BuildState.SCHEDULED)
    await publish_fence(world, uuid, 1002, FenceState.LIFTING)  # and one that is being lifted is left to its cell
    again = (await decide(world, uuid, AdminState.FENCED)).fence
    assert (await fence_sent(world, again)).lift is False and again < 1000


@pytest.mark.parametrize("forgotten", [ObjectKind.HOST, ObjectKind.FENCE])
async def test_no_change_of_objects_removes_a_fence(world: World, forgotten: ObjectKind) -> None:
    """Without the decision the fence is to be lifted, and the host stays fenced until it is."""
    await world.scheduler("s1", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    await decide(world, uuid, AdminState.FENCED)
    change = ObjectsChange(changes=(ObjectChange(kind=forgotten, name=uuid),), who="ann", force=True)
    if forgotten is ObjectKind.FENCE:
        with pytest.raises(RequestRefused, match="follows from a decision"):
            await world.buses[API].request(change, ObjectsChanged, timeout_s=PATIENCE_S)
        return
    await world.buses[API].request(change, ObjectsChanged, timeout_s=PATIENCE_S)
    await becomes(world, uuid, AdminState.FENCED, pending=AdminState.ENABLED)


async def test_nothing_is_evacuated_from_a_host_that_is_to_be_used_again(world: World) -> None:
    await world.scheduler("s1", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    built = world.request()
    await world.active(built)
    await world.add_hosts("c1", 2)
    await decide(world, uuid, AdminState.FENCED)
    await decide(world, uuid, AdminState.ENABLED)
    assert await refused(world, world.move(built, MoveKind.EVACUATE)) == "host.not_fenced"


async def test_a_fence_whose_cell_is_gone_for_good_is_ended_by_force_with_a_reason(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fences, "REPUBLISH_S", 0.02)
    monkeypatch.setattr(fences, "REPEAT_S", 0.1)
    await world.scheduler("s1", WARM)
    await world.scheduler("s2", WARM)
    (uuid,) = await world.add_hosts("c1", 1)
    number = (await decide(world, uuid, AdminState.FENCED)).fence
    await publish_fence(world, uuid, number, FenceState.FENCED, losses=2)
    await becomes(world, uuid, AdminState.FENCED, acknowledged=number)
    with pytest.raises(RequestRefused) as fault:
        await decide(world, uuid, AdminState.ENABLED, reason="", force=True)
    assert fault.value.code == "host.reason_missing"
    await decide(world, uuid, AdminState.ENABLED)
    await becomes(world, uuid, AdminState.FENCED, pending=AdminState.ENABLED)
    forced = await decide(world, uuid, AdminState.ENABLED, reason="burnt", force=True)
    assert forced.state is AdminState.ENABLED
    await becomes(world, uuid, AdminState.ENABLED)
    query = ObjectLogQuery(kind=ObjectKind.HOST)
    log = await world.buses[API].request(query, ObjectLogPage, timeout_s=PATIENCE_S)
    assert (log.entries[0].who, log.entries[0].why, log.entries[0].forced) == ("ann", "burnt", True)
    build = world.request(host="c1-0")
    await world.ask(build)
    await world.ended(build.instance_uuid, BuildState.SCHEDULED)
    # Should the cell come back after all, it is commanded to lift the fence, and does so when it can.
    last, before = max(one.version for _, one in world.fences), len(world.fences)
    await world.until(lambda: len(world.fences) > before)
    assert world.fences[-1][1].lift and world.fences[-1][1].version == last
    await publish_fence(world, uuid, last, FenceState.LIFTING, losses=1)
    await publish_fence(world, uuid, last, FenceState.LIFTED)
    again = (await decide(world, uuid, AdminState.FENCED)).fence
    assert again > last
    await becomes(world, uuid, AdminState.FENCED, fence=again)

"""Reverts that are under way together share the room of one quota."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from bus.clock import SystemClock
from bus.contracts.book import ProjectUsagePage
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.moves import CellMove, Condition, MoveKind, MoveRequest
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import State
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.builds import BuildUpdate, NewBuild, RecordedBuild, SinceBuild
from scheduler_worker.domain.recorded_moves import PendingMove
from scheduler_worker.moves import MoveEngine
from scheduler_worker.store.memory import MemoryBuilds
from scheduler_worker.store.memory_units import MemoryBuildTable
from tests.kit.claims import BookClaims
from tests.kit.sent import Sent
from tests.unit.conductor.move_scenario import to_resized
from tests.unit.scheduler.hosts import PLENTY, Hosts

N = 5
VMS = [f"a0000000-0000-4000-8000-00000000000{n}" for n in range(N)]
REQUESTS = [f"e0000000-0000-4000-8000-00000000000{n}" for n in range(N)]


class Usage(BookClaims):
    async def usage(self, projects):  # 5 instances of 1 VCPU each by now
        return ProjectUsagePage(usage={"p": {"VCPU": N}})


class Follower:
    async def refresh(self, *, timeout_s: float) -> bool:
        return True


@pytest.mark.xfail(strict=True, reason="Found A6")
async def test_reverts_together_stay_within_the_quota() -> None:
    config = SchedulerConfig(quotas={"p": {"VCPU": 12}})
    hosts, clock = Hosts([PLENTY] * 2, config=config), SystemClock()
    store, sent = MemoryBuilds(MemoryBuildTable(clock).session()), Sent()
    store.publish_through(sent)  # type: ignore[arg-type]
    for vm in VMS:
        build = RecordedBuild(
            instance_uuid=vm,
            project_id="p",
            state=BuildState.ACTIVE,
            sequence=9,
            terminal=True,
            cell="c1",
            host="h0",
            instance=SinceBuild(condition=Condition.RESIZED, flavor="m1.tiny"),
        )
        async with store.unit() as unit:
            await unit.insert(
                [NewBuild(request=BuildRequest(instance_uuid=vm, flavor="m1.large", project_id="p"), build=build)], 1.0
            )
        async with store.operation() as unit:  # insert writes no `instance`
            held = (await unit.lock([vm]))[vm]
            await unit.update([BuildUpdate(build=replace(held, instance=build.instance, cell="c1"))], 1.0)

    async def reload() -> None: ...

    engine = MoveEngine(store, Usage(), hosts.selector, Follower(), clock=clock, rng=random.Random(5), reload=reload)  # type: ignore[arg-type]
    pending = [
        PendingMove(
            position=at,
            request=MoveRequest(request_id=REQUESTS[at], instance_uuid=vm, project_id="p", kind=MoveKind.REVERT),
            taken_at=clock.time(),
        )
        for at, vm in enumerate(VMS)
    ]
    await engine.process(pending)
    commands = [one.message for _, rows in sent.rows for one in rows if isinstance(one.message, CellMove)]
    assert len(commands) == N
    # Each was of 4 VCPU before (source), and has 1 now: 3 more each; room: 12 - 5 = 7, so two may go back, not five.
    began = 0
    for command in commands:
        made = to_resized(MoveKind.RESIZE)
        move = made.instance.move
        assert made.instance.state is State.RESIZED and move is not None and move.source is not None
        small = replace(made.instance.here, allocations={made.instance.here.host_uuid: {"VCPU": 1}})
        large = replace(move.source, allocations={move.source.host_uuid: {"VCPU": 4}})
        made.instance = replace(
            made.instance, selections=(made.instance.selections[0], small), move=replace(move, source=large)
        )
        made.apply(e.move_event(replace(command, instance_uuid=made.instance.uuid), 300.0, command.request_id))
        began += made.instance.move is not None and made.instance.move.by_kind is MoveKind.REVERT
    assert N + 3 * began <= 12, f"{began} reverts begun: the project ends with {N + 3 * began} VCPU of 12"

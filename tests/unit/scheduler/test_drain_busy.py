"""A drain waits for a request of a client that is under way."""

from __future__ import annotations

from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.drains import DrainMoveState
from bus.contracts.moves import MoveKind
from scheduler_worker.domain.builds import RecordedBuild, SinceBuild
from scheduler_worker.domain.drains import DrainedHost, Look, held_on, new_row, next_of
from scheduler_worker.domain.recorded_moves import MoveContext

VM, HOST, DRAIN, REQUEST = (f"{n}0000000-0000-4000-8000-000000000000" for n in "abcd")


def test_a_drain_waits_for_a_request_that_is_under_way() -> None:
    host = DrainedHost(HOST, "h")
    build = RecordedBuild(
        instance_uuid=VM,
        project_id="p",
        state=BuildState.ACTIVE,
        sequence=9,
        cell="c1",
        host="h",
        host_uuid=HOST,
        instance=SinceBuild(under_way=REQUEST),
    )
    known = MoveContext(build=build, build_request=BuildRequest(instance_uuid=VM, project_id="p", flavor="m1.small"))
    held = held_on(host, known)
    assert held is not None
    row, now = new_row(DRAIN, MoveKind.MIGRATE, held, 0), 1000.0
    while now < 1020.0:
        after = next_of(row, known, {HOST: host}, Look(DRAIN), now)
        assert after is not None
        row, now = after, now + 0.25
    assert row.state is DrainMoveState.WAITING, (row.state, row.code)

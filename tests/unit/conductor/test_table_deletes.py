"""The instance state machine: deletes, hosts' own reports, and compute services that are down."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.cell import Destroy
from cell_conductor.domain import events as e
from cell_conductor.domain.instance import State
from cell_conductor.domain.report import rescan_id
from cell_conductor.domain.steps import Step
from cell_conductor.domain.table import step
from tests.unit.conductor.scenario import (
    DELETE,
    DEPLOYMENT,
    PATIENCE,
    RELEASED,
    claimed,
    failed,
    host,
    queried,
    run,
    spawned,
)

# --- The instance state machine: what a host's own report of its machines changes.


def runs(attempt: int, n: int = 1, *, built: bool = True) -> e.HostRuns:
    return e.HostRuns(at=320.0, attempt=attempt, host_uuid=host(n), service="s1", built=built)


def test_what_its_record_proves_over_is_destroyed() -> None:
    second = run(queried(), failed(), claimed(), spawned(2)).instance
    over = run(queried(hosts=1), failed(), RELEASED).instance
    gone = run(
        queried(), spawned(), DELETE, e.Destroyed(at=1.0, attempt=1, host_uuid=host(1), service="s1"), RELEASED
    ).instance
    buried = run(DELETE).instance
    for before, older in ((second, runs(1)), (over, runs(1)), (gone, runs(1)), (gone, runs(5, 3)), (buried, runs(1))):
        event = replace(older, rescans=(rescan_id(before),))
        if before.state in (State.ACTIVE, State.FAILED):
            assert step(before, older, PATIENCE) == Step(before), "it may be gone by now"
        (order,) = step(before, event, PATIENCE).commands
        assert isinstance(order, Destroy) and (order.attempt, order.host_uuid) == (event.attempt, event.host_uuid)
        assert order.deployment == DEPLOYMENT

"""Requests that came again, that wait, or that are silent."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.contracts.build import AttemptRecord, BuildRecord, BuildState
from bus.contracts.cell import BuildsWaiting, WaitingBuild
from scheduler_worker.domain import fleet
from scheduler_worker.domain.fleet import WaitingTable

# --- The builds that wait: what is shown of them, for how long, and by whose announcement.


WAITING_UUID = "10000000-0000-4000-8000-000000000001"
WAITING_BUILD = BuildRecord(
    instance_uuid=WAITING_UUID, project_id="p", flavor="bm.gold", state=BuildState.BUILDING, cell="cell1", host="node1"
)
WAITS = WaitingBuild(instance_uuid=WAITING_UUID, attempt=2, since=990.0, reason="waits for Ironic: ConnectError")
MESSAGE = BuildsWaiting(service="metal1", cell="cell1", waiting=(WAITS,), lasts_s=3.0)


def attempt(number: int) -> AttemptRecord:
    return AttemptRecord(attempt=number, host="node1", outcome="failed")


@pytest.mark.parametrize(
    "build",
    [
        replace(WAITING_BUILD, state=BuildState.ACTIVE),
        replace(WAITING_BUILD, cell="cell2"),
        replace(WAITING_BUILD, instance_uuid="20000000-0000-4000-8000-000000000001"),
        replace(WAITING_BUILD, history=(attempt(1), attempt(2))),
    ],
    ids=["has ended", "of another cell", "another instance", "the attempt has ended"],
)
def test_nothing_is_shown_of_a_build_that_does_not_wait(build: BuildRecord) -> None:
    table = WaitingTable()
    table.apply(MESSAGE, 10.0)
    assert table.line_of(build, 10.0) is None
    assert table.line_of(replace(WAITING_BUILD, history=(attempt(1),)), 10.0) is not None


def test_services_that_a_bus_makes_up_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_SERVICES", 1)
    table = WaitingTable()
    table.apply(
        replace(MESSAGE, service="other", waiting=(replace(WAITS, instance_uuid=WAITING_BUILD.instance_uuid[::-1]),)),
        10.0,
    )
    table.apply(MESSAGE, 10.0)
    assert table.line_of(WAITING_BUILD, 10.0) is None
    table.apply(MESSAGE, 13.0)  # what was made up is over
    assert table.line_of(WAITING_BUILD, 13.0) is not None

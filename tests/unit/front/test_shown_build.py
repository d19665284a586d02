"""What `berth show` prints of a build."""

from __future__ import annotations

import pytest

from berth.commands.builds import show_record
from bus.contracts.build import BuildRecord, BuildState, TimelineEntry

UUID = "10000000-0000-4000-8000-000000000001"
BUILDING = TimelineEntry(at=1.0, who="conductor cell1", what="building", detail="node1 (attempt 1)")
WAITING = TimelineEntry(at=2.5, who="compute metal1", what="waiting", detail="waits for Ironic: ConnectError")


def test_what_a_build_waits_for_is_shown_while_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    record = BuildRecord(
        instance_uuid=UUID, project_id="p", flavor="bm.gold", state=BuildState.BUILDING, timeline=(BUILDING, WAITING)
    )
    show_record(record, history=False)
    assert "  waiting  since 00:00:02.500: waits for Ironic: ConnectError\n" in capsys.readouterr().out

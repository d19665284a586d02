"""The output of `berth show` for a build."""

from __future__ import annotations

import pytest

from berth.commands.instances import show_record
from bus.contracts.build import BuildRecord, BuildState, TimelineEntry
from bus.contracts.placement import ClaimHolder

UUID = "10000000-0000-4000-8000-000000000001"
OTHER = "20000000-0000-4000-8000-000000000002"
BUILDING = TimelineEntry(at=1.0, who="conductor cell1", what="building", detail="node1 (attempt 1)")
WAITING = TimelineEntry(at=2.5, who="compute metal1", what="waiting", detail="waits for Ironic: ConnectError")


def test_what_a_build_waits_for_is_shown_while_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    record = BuildRecord(
        instance_uuid=UUID, project_id="p", flavor="bm.gold", state=BuildState.BUILDING, timeline=(BUILDING, WAITING)
    )
    show_record(record, history=False)
    assert "  waiting  since 00:00:02.500: waits for Ironic: ConnectError\n" in capsys.readouterr().out


def test_a_lost_claim_names_who_holds_what_was_lost(capsys: pytest.CaptureFixture[str]) -> None:
    lost = TimelineEntry(
        at=1.0,
        who="scheduler s",
        what="not_claimed",
        detail="node1: full",
        holders=(ClaimHolder(consumer=OTHER, project_id="q"),),
    )
    record = BuildRecord(
        instance_uuid=UUID, project_id="p", flavor="bm.gold", state=BuildState.BUILDING, timeline=(lost, BUILDING)
    )
    show_record(record, history=True)
    assert f"node1: full; held by {OTHER}\n" in capsys.readouterr().out

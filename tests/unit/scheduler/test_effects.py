"""What follows from a build's record: the messages of a change, and what placement is told. A table."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bus.bus import API
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.cell import CellBuild, CellDelete, InstanceSpec, Selection
from bus.contracts.placement import ReleaseRun
from bus.contracts.stages import Stamps
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.effects import effects, releases_of

UUID = "00000000-0000-4000-8000-000000000001"
BUILD = RecordedBuild(instance_uuid=UUID, project_id="p", state=BuildState.ACCEPTED, sequence=1, run="mine")
STAMPS = Stamps(requested=1.0, queued=2.0, decided=3.0)
S = BuildState


def after(state: BuildState, cell: str | None = None) -> RecordedBuild:
    terminal = state in (S.FAILED, S.DELETED, S.REFUSED)
    host = None if cell is None else "h"
    return replace(BUILD, state=state, cell=cell, host=host, attempt=1, terminal=terminal, code="why", reason="so")


@pytest.mark.parametrize(
    ("before", "record", "to", "kinds"),
    [
        (None, after(S.ACCEPTED), [API], [BuildEvent]),
        (None, after(S.REFUSED), [API], [BuildEvent]),
        (S.ACCEPTED, after(S.FAILED), [API, API], [BuildEvent, ReleaseRun]),
        (S.ACCEPTED, after(S.DELETED), [API, API], [BuildEvent, ReleaseRun]),
        (S.ACCEPTED, replace(after(S.FAILED), attempt=0), [API], [BuildEvent]),  # nobody has claimed for it
        (S.FAILED, after(S.DELETED), [API], [BuildEvent]),
        # What it held is gone, and a claim of its run may still be on its way.
        (S.FAILED, replace(after(S.DELETED), code="claim.stranded"), [API, API], [BuildEvent, ReleaseRun]),
        (S.SCHEDULED, after(S.DELETING, "c1"), ["c1"], [CellDelete]),
        (S.DELETING, after(S.DELETING, "c1"), [], []),
        (S.DELETED, after(S.DELETED), [], []),
        (S.FAILED, after(S.FAILED), [], []),
    ],
)
def test_a_change_tells_the_cell_and_clients(
    before: BuildState | None, record: RecordedBuild, to: list[str], kinds: list[type]
) -> None:
    found = effects(before, record, 7.0, None, STAMPS)
    assert [(one.bus, type(one.message), one.cause) for one in found] == [
        (bus, kind, UUID) for bus, kind in zip(to, kinds, strict=True)
    ]
    for event in (one.message for one in found if isinstance(one.message, BuildEvent)):
        assert (event.state, event.terminal, event.at) == (record.state, record.terminal, 7.0)
        assert event.stamps == (STAMPS if record.terminal else None)
        assert event.code == ("" if record.state is S.DELETED else "why")


def test_a_dispatch_is_the_command_and_the_event() -> None:
    selection = Selection(host_uuid=UUID, host="h", service="s", allocations={UUID: {"VCPU": 1}})
    spec = InstanceSpec(instance_uuid=UUID, project_id="p", flavor="f")
    command = CellBuild(spec=spec, selections=(selection,), consumer_generation=1)
    sent, event = effects(S.ACCEPTED, after(S.SCHEDULED, "c1"), 7.0, command, STAMPS)
    assert (sent.bus, sent.message, event.bus) == ("c1", command, API)
    assert isinstance(event.message, BuildEvent) and (event.message.cell, event.message.attempt) == ("c1", 1)


@pytest.mark.parametrize("before", [S.ACCEPTED, S.SCHEDULED, S.BUILDING, S.ACTIVE, S.FAILED])
def test_a_delete_shows_its_cell_whether_that_has_announced_the_build(before: BuildState) -> None:
    (sent,) = effects(before, after(S.DELETING, "c1"), 7.0)
    assert isinstance(sent.message, CellDelete) and sent.message.begun is (before is not S.SCHEDULED)


@pytest.mark.parametrize(
    ("record", "is_released"),
    [
        (after(S.FAILED), True),
        (after(S.DELETED), True),
        (after(S.ACCEPTED), False),
        (after(S.REFUSED), False),
        (after(S.FAILED, "c1"), False),  # the cell releases it
        (after(S.DELETED, "c1"), False),
        (after(S.SCHEDULED, "c1"), False),
        (replace(after(S.DELETED), run=""), False),  # a delete came, and no build
        (replace(after(S.FAILED), code="claim.stranded"), False),  # its machine may run, and its cell is not known
        (replace(after(S.DELETED), code="claim.stranded"), True),  # it held nothing any more when it was deleted
    ],
)
def test_what_has_ended_without_a_cell_is_released_by_its_run(record: RecordedBuild, is_released: bool) -> None:
    releases = [one.message for one in releases_of(record)]
    assert len(releases) == is_released
    for release in releases:
        assert isinstance(release, ReleaseRun)
        assert (release.consumer, release.attempt, release.project_id, release.by) == (UUID, 1, "p", "mine")

"""What follows from a build's record: the messages of a change to it, and what placement is told of it. Pure.

The twin of the cell's `question_of`: nothing else decides whether the claim of a build is released. The release is
committed with what it follows from, is sent at least once, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from bus.bus import API
from bus.contracts.build import BuildEvent, BuildState, FunnelStep
from bus.contracts.cell import CellBuild, CellDelete
from bus.contracts.cell_queries import CellBuildQuery
from bus.contracts.placement import ReleaseRun
from bus.contracts.stages import Stamps
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.placement import FIRST_ATTEMPT, STRANDED


def effects(  # noqa: PLR0917  (hot, so no keywords)
    before: BuildState | None,
    after: RecordedBuild,
    at: float,
    command: CellBuild | CellBuildQuery | None = None,
    stamps: Stamps | None = None,
    funnel: Sequence[FunnelStep] = (),
) -> list[OutboxMessage]:
    """The messages of a change to a record, which are published with it: to its cell, to clients, and to placement.

    before: its state (None: it is new). command: to its cell, of one that is scheduled. stamps, funnel: of its event.
    at: seconds since the epoch.
    """
    uuid = after.instance_uuid
    if after.state is before:
        return []
    if after.state is BuildState.DELETING:
        assert after.cell is not None, after
        # A build that its cell has not announced may not have come there yet. One without a cell before is another
        # record's, which was dispatched.
        begun = before is not BuildState.SCHEDULED
        delete = CellDelete(instance_uuid=uuid, project_id=after.project_id, begun=begun)
        return [OutboxMessage(after.cell, delete, uuid)]
    ends_well = after.state is BuildState.DELETED
    event = BuildEvent(
        instance_uuid=uuid,
        project_id=after.project_id,
        state=after.state,
        sequence=after.sequence,
        terminal=after.terminal,
        cell=after.cell,
        host=after.host,
        attempt=after.attempt if after.host is not None else 0,
        code="" if ends_well else after.code,
        reason="" if ends_well else after.reason,
        funnel=tuple(funnel),
        at=at,
        stamps=stamps if after.terminal else None,
    )
    to_clients = OutboxMessage(API, event, uuid)
    if command is not None:
        assert after.cell is not None, after
        return [OutboxMessage(after.cell, command, uuid), to_clients]
    if after.attempt and not _is_over(before, after):
        return [to_clients, *releases_of(after)]
    return [to_clients]


def releases_of(build: RecordedBuild) -> list[OutboxMessage]:
    """What placement is told of a record that another process may have claimed for, and of one that is read again: if
    it has ended and no cell has it, no claim of its run is granted any more. Its instance held nothing when it ended,
    so what it holds now was never dispatched.
    """
    if not _is_over(build.state, build) or not build.run:
        return []
    uuid = build.instance_uuid
    release = ReleaseRun(consumer=uuid, attempt=FIRST_ATTEMPT, project_id=build.project_id, by=build.run)
    return [OutboxMessage(API, release, uuid)]


def _is_over(state: BuildState | None, build: RecordedBuild) -> bool:
    """Whether in this state of it the instance held nothing, and no cell has it. What a stranded one holds stays until
    its delete finds nothing any more.
    """
    has_failed = state in (BuildState.FAILED, BuildState.REFUSED) and build.code != STRANDED
    return build.cell is None and (has_failed or state is BuildState.DELETED)

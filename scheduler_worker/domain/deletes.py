"""Delete requests: the effect of a delete depends on the state of its build. Pure.

A delete of an unknown instance is put on record itself. Its client is answered that there is no such instance, so a
build request that comes later must not be built: another scheduler may have been processing it, or its record may have
been lost in a crash of the database.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.consuming.outcome import Done, Outcome, Received, Refuse, Retry
from bus.contracts.base import Refusal
from bus.contracts.build import BuildAccepted, BuildEvent, BuildRequest, BuildState, DeleteRequest
from bus.contracts.cell import CellDelete
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.domain.builds import (
    DELETED,
    FAILED_OR_REFUSED,
    OFF_RECORD,
    Author,
    BuildUpdate,
    NewBuild,
    RecordedBuild,
)

# A delete may overtake its build request on the way to another scheduler: the record is looked for this often.
DELETE_RETRIES = 2
UNKNOWN = "instance.unknown"
STRANDED = "claim.stranded"  # a claim is held on a host that no compute service announces, or of no known cell
UNKNOWN_REASON = "there is no such instance in this project"
UNKNOWN_FLAVOR = "unknown"


class PendingDelete(Struct, frozen=True, kw_only=True):
    """A delete request that has no outcome yet. position: in its batch; delivery: how often its queue retried it."""

    position: int
    request: DeleteRequest
    delivery: int


class DeletePlan(Struct, frozen=True, kw_only=True):
    """The effect of a batch of deletes. outcomes: by position; accepted: the instances; unknown: without a record,
    late.
    """

    outcomes: dict[int, Outcome]
    accepted: set[str]
    updates: list[BuildUpdate]
    messages: list[OutboxMessage]
    unknown: list[PendingDelete]


class BuildEnd(Struct, frozen=True):
    """The effect of a delete on one build: its new record, and the messages that it leads to."""

    update: BuildUpdate
    messages: tuple[OutboxMessage, ...] = ()


def pending_delete(received: Received, position: int) -> PendingDelete:
    """A delete that has just been taken."""
    assert isinstance(received.message, DeleteRequest)
    return PendingDelete(position=position, request=received.message, delivery=received.meta.attempt)


def plan_deletes(deletes: Sequence[PendingDelete], builds: Mapping[str, RecordedBuild], author: Author) -> DeletePlan:
    """Apply deletes to the builds on record; its `unknown` is left to `tombstones` and `refuse_unknown`."""
    plan = DeletePlan(outcomes={}, accepted=set(), updates=[], messages=[], unknown=[])
    ended: set[str] = set()
    for pending in deletes:
        request = pending.request
        uuid, build = request.instance_uuid, builds.get(request.instance_uuid)
        if build is None or build.code == UNKNOWN:
            plan.outcomes[pending.position] = Retry(UNKNOWN, "not on record (yet)")
            if pending.delivery >= DELETE_RETRIES:
                plan.unknown.append(pending)
        elif build.project_id != request.project_id:
            # The answer reveals nothing to another project, and no event is published: the instance's event stream is
            # its owner's.
            plan.outcomes[pending.position] = Refuse(UNKNOWN, UNKNOWN_REASON)
        else:
            plan.outcomes[pending.position] = Done(reply=BuildAccepted(instance_uuid=uuid))
            plan.accepted.add(uuid)
            if uuid not in ended and (end := _delete(build, author)) is not None:
                ended.add(uuid)
                plan.updates.append(end.update)
                plan.messages.extend(end.messages)
    return plan


def _delete(build: RecordedBuild, author: Author) -> BuildEnd | None:
    """The effect of a delete on one build; None: it was requested before."""
    if build.state in (BuildState.DELETING, BuildState.DELETED):
        return None
    if build.state is BuildState.ACCEPTED:
        # The scheduler that decides the build sees this before it dispatches; it releases the claim and publishes
        # `deleted`.
        if build.delete_requested:
            return None
        return BuildEnd(
            BuildUpdate(build=replace(build, delete_requested=True), timeline=(author.entry("delete_requested"),))
        )
    if build.cell is None:
        return end_unbuilt(build, author, "it was never built")
    begun = build.state in (BuildState.BUILDING, BuildState.ACTIVE, BuildState.FAILED)
    return delete_in_cell(build, build.cell, author, begun=begun)


def delete_in_cell(build: RecordedBuild, cell: str, author: Author, *, begun: bool) -> BuildEnd:
    """Pass a delete to the cell that has the instance. begun: as in CellDelete."""
    command = CellDelete(instance_uuid=build.instance_uuid, project_id=build.project_id, begun=begun)
    line = author.entry("delete_requested", f"passed to cell {cell}")
    deleting = replace(build, state=BuildState.DELETING, delete_requested=True, cell=cell)
    return BuildEnd(BuildUpdate(build=deleting, timeline=(line,)), (OutboxMessage(cell, command, build.instance_uuid),))


def with_cell(build: RecordedBuild, cell: str, author: Author) -> BuildEnd | None:
    """A build that has failed, with the cell in which its instance has an older allocation: its delete goes there.

    A delete that came meanwhile is passed on: it ended the build as one that no cell has. None: nothing changes.
    """
    is_deleted = build.state is BuildState.DELETED and build.delete_requested and build.code != UNKNOWN
    if build.cell is not None or not (is_deleted or build.state is BuildState.FAILED):
        return None
    line = author.entry("kept", f"an allocation that is older than this request, in {cell}")
    update = BuildUpdate(build=replace(build, cell=cell), timeline=(line,))
    command = CellDelete(instance_uuid=build.instance_uuid, project_id=build.project_id, begun=True)
    return BuildEnd(update, (OutboxMessage(cell, command, build.instance_uuid),) if is_deleted else ())


def end_cancelled(build: RecordedBuild, author: Author, kept: Mapping[str, str | None]) -> BuildEnd:
    """The end of a build that a delete stops while it is being scheduled.

    kept: the cells of instances that hold an older allocation, which is not released; None: it is not known which cell.
    """
    uuid = build.instance_uuid
    if uuid not in kept:
        return end_unbuilt(build, author, "while it was being scheduled")
    cell = kept[uuid]
    if cell is not None:
        return delete_in_cell(build, cell, author, begun=True)
    reason = f"instance {uuid} holds an allocation that is older than this request, on a host of no known cell"
    event = BuildEvent(
        instance_uuid=uuid,
        project_id=build.project_id,
        state=BuildState.FAILED,
        sequence=FAILED_OR_REFUSED,
        terminal=True,
        code=STRANDED,
        reason=reason,
        at=author.at,
    )
    failed = replace(
        build, state=BuildState.FAILED, sequence=FAILED_OR_REFUSED, terminal=True, code=STRANDED, reason=reason
    )
    update = BuildUpdate(build=failed, timeline=(author.entry("failed", f"{STRANDED}: {reason}"),))
    refused = replace(event, state=BuildState.REFUSED, sequence=OFF_RECORD)  # the end of the delete
    return BuildEnd(update, (OutboxMessage(API, event, uuid), OutboxMessage(API, refused, uuid)))


def end_unbuilt(build: RecordedBuild, author: Author, detail: str) -> BuildEnd:
    """The end of a build that no cell has: one terminal event, for the build and for its delete."""
    event = BuildEvent(
        instance_uuid=build.instance_uuid,
        project_id=build.project_id,
        state=BuildState.DELETED,
        sequence=DELETED,
        terminal=True,
        at=author.at,
    )
    deleted = replace(build, state=BuildState.DELETED, sequence=DELETED, terminal=True, delete_requested=True)
    update = BuildUpdate(build=deleted, timeline=(author.entry("deleted", detail),))
    return BuildEnd(update, (OutboxMessage(API, event, build.instance_uuid),))


def tombstones(unknown: Sequence[PendingDelete], on_record: Collection[str], author: Author) -> list[NewBuild]:
    """The records of builds that were deleted before any request for them came."""
    requests = {one.request.instance_uuid: one.request for one in unknown if one.request.instance_uuid not in on_record}
    return [_tombstone(request, author) for request in requests.values()]


def refuse_unknown(
    unknown: Sequence[PendingDelete], on_record: Collection[str], author: Author
) -> tuple[dict[int, Outcome], list[OutboxMessage]]:
    """The outcomes and events of deletes of unknown instances.

    Where no tombstone is on record, the build request has just been recorded.
    """
    final = [one for one in unknown if one.request.instance_uuid in on_record]
    refused: dict[int, Outcome] = {
        one.position: Done(reply=Refusal(code=UNKNOWN, reason=UNKNOWN_REASON)) for one in final
    }
    return refused, [
        OutboxMessage(API, _no_such_instance(one.request, author), one.request.instance_uuid) for one in final
    ]


def refusal_of(request: DeleteRequest, why: Refusal, build: RecordedBuild | None, author: Author) -> BuildEvent | None:
    """The end of a delete whose retries are exhausted; None: it has ended, or another scheduler will end it, or the
    project has no such build.

    Sequence 0: the build goes on as it is, and its events with it.
    """
    if build is not None and (
        build.project_id != request.project_id
        or build.delete_requested
        or build.code == UNKNOWN
        or build.state in (BuildState.DELETING, BuildState.DELETED)
    ):
        return None
    return BuildEvent(
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        state=BuildState.REFUSED,
        sequence=OFF_RECORD,
        terminal=True,
        code=why.code,
        reason=why.reason,
        at=author.at,
    )


def _tombstone(request: DeleteRequest, author: Author) -> NewBuild:
    return NewBuild(
        request=BuildRequest(instance_uuid=request.instance_uuid, project_id=request.project_id, flavor=UNKNOWN_FLAVOR),
        digest=b"",
        build=RecordedBuild(
            instance_uuid=request.instance_uuid,
            project_id=request.project_id,
            state=BuildState.DELETED,
            sequence=DELETED,
            terminal=True,
            code=UNKNOWN,
            reason=UNKNOWN_REASON,
        ),
        timeline=(author.entry("refused", "a delete came, and no build"),),
    )


def _no_such_instance(request: DeleteRequest, author: Author) -> BuildEvent:
    return BuildEvent(
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        state=BuildState.REFUSED,
        sequence=DELETED,
        terminal=True,
        code=UNKNOWN,
        reason=UNKNOWN_REASON,
        at=author.at,
    )

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
from scheduler_worker.domain.placement import FIRST_ATTEMPT

# A delete may overtake its build request on the way to another scheduler: the record is looked for this often.
DELETE_RETRIES = 2
UNKNOWN = "instance.unknown"
STRANDED = "claim.stranded"  # a claim is held on a host that no compute service announces, or of no known cell
STRANDED_REASON = "the instance holds an allocation of an earlier request, on a host of no known cell"
UNKNOWN_REASON = "there is no such instance in this project"
UNKNOWN_FLAVOR = "unknown"


class PendingDelete(Struct, frozen=True, kw_only=True):
    """A delete request that has no outcome yet. position: in its batch; delivery: how often its queue retried it."""

    position: int
    request: DeleteRequest
    delivery: int


class DeletePlan(Struct, frozen=True, kw_only=True):
    """The effect of a batch of deletes. outcomes: by position; accepted: the instances; unknown: without a record,
    late; unbuilt: of builds that no cell has, which are planned once it is known what their instances hold.
    """

    outcomes: dict[int, Outcome]
    accepted: set[str]
    updates: list[BuildUpdate]
    messages: list[OutboxMessage]
    unknown: list[PendingDelete]
    unbuilt: list[PendingDelete]


class KeptAllocation(Struct, frozen=True):
    """What an instance holds: by which run and attempt, and in which cell (None: it is not known)."""

    run: str
    attempt: int
    cell: str | None


class BuildEnd(Struct, frozen=True):
    """The effect of a delete on one build: its new record, and the messages that it leads to."""

    update: BuildUpdate
    messages: tuple[OutboxMessage, ...] = ()


def pending_delete(received: Received, position: int) -> PendingDelete:
    """A delete that has just been taken."""
    assert isinstance(received.message, DeleteRequest)
    return PendingDelete(position=position, request=received.message, delivery=received.meta.attempt)


def plan_deletes(
    deletes: Sequence[PendingDelete],
    builds: Mapping[str, RecordedBuild],
    author: Author,
    kept: Mapping[str, KeptAllocation] | None = None,
) -> DeletePlan:
    """Apply deletes to the builds on record; its `unknown` is left to `tombstones` and `refuse_unknown`.

    kept: as of `end_without_cell`; None: it is not known yet, and deletes that depend on it are left as `unbuilt`.
    """
    plan = DeletePlan(outcomes={}, accepted=set(), updates=[], messages=[], unknown=[], unbuilt=[])
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
        elif kept is None and _may_be_forgotten(build):
            plan.unbuilt.append(pending)
        else:
            plan.outcomes[pending.position] = Done(reply=BuildAccepted(instance_uuid=uuid))
            plan.accepted.add(uuid)
            if uuid not in ended and (end := _delete(build, author, kept or {})) is not None:
                ended.add(uuid)
                plan.updates.append(end.update)
                plan.messages.extend(end.messages)
    return plan


def _may_be_forgotten(build: RecordedBuild) -> bool:
    """Whether an instance of an earlier request, whose record is lost, may run under this build's uuid."""
    return build.cell is None and build.state in (BuildState.FAILED, BuildState.REFUSED)


def _delete(build: RecordedBuild, author: Author, kept: Mapping[str, KeptAllocation]) -> BuildEnd | None:
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
        return end_without_cell(build, author, kept, "it was never built")
    begun = build.state in (BuildState.BUILDING, BuildState.ACTIVE, BuildState.FAILED)
    return delete_in_cell(build, build.cell, author, begun=begun)


def delete_in_cell(build: RecordedBuild, cell: str, author: Author, *, begun: bool) -> BuildEnd:
    """Pass a delete to the cell that has the instance. begun: as in CellDelete."""
    command = CellDelete(instance_uuid=build.instance_uuid, project_id=build.project_id, begun=begun)
    line = author.entry("delete_requested", f"passed to cell {cell}")
    deleting = replace(build, state=BuildState.DELETING, delete_requested=True, cell=cell)
    return BuildEnd(BuildUpdate(build=deleting, timeline=(line,)), (OutboxMessage(cell, command, build.instance_uuid),))


def end_without_cell(build: RecordedBuild, author: Author, kept: Mapping[str, KeptAllocation], detail: str) -> BuildEnd:
    """The end, by a delete, of a build that its record gives to no cell.

    kept: what instances hold. An allocation of another run is not released: its record is lost, as after a restore,
    and the instance may run. detail: for the timeline.
    """
    uuid = build.instance_uuid
    held = kept.get(uuid)
    if held is None or (held.run, held.attempt) == (build.run, FIRST_ATTEMPT):
        deleted = replace(build, state=BuildState.DELETED, sequence=DELETED, terminal=True, delete_requested=True)
        event = _end(build, BuildState.DELETED, DELETED, author)
        return BuildEnd(
            BuildUpdate(build=deleted, timeline=(author.entry("deleted", detail),)), (OutboxMessage(API, event, uuid),)
        )
    if held.cell is not None:
        return delete_in_cell(build, held.cell, author, begun=True)
    why = Refusal(code=STRANDED, reason=STRANDED_REASON)
    refused = OutboxMessage(API, _end(build, BuildState.REFUSED, OFF_RECORD, author, why), uuid)  # of the delete
    if build.terminal:
        line = author.entry("delete_refused", f"{STRANDED}: {STRANDED_REASON}")
        return BuildEnd(BuildUpdate(build=build, timeline=(line,)), (refused,))
    failed = replace(
        build,
        state=BuildState.FAILED,
        sequence=FAILED_OR_REFUSED,
        terminal=True,
        code=why.code,
        reason=why.reason,
    )
    event = _end(build, BuildState.FAILED, FAILED_OR_REFUSED, author, why)
    line = author.entry("failed", f"{STRANDED}: {STRANDED_REASON}")
    return BuildEnd(BuildUpdate(build=failed, timeline=(line,)), (OutboxMessage(API, event, uuid), refused))


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
    why = Refusal(code=UNKNOWN, reason=UNKNOWN_REASON)
    final = [one for one in unknown if one.request.instance_uuid in on_record]
    refused: dict[int, Outcome] = {one.position: Done(reply=why) for one in final}
    return refused, [
        OutboxMessage(API, _end(one.request, BuildState.REFUSED, DELETED, author, why), one.request.instance_uuid)
        for one in final
    ]


def refusal_of(request: DeleteRequest, why: Refusal, build: RecordedBuild | None, author: Author) -> BuildEvent | None:
    """The end of a delete whose retries are exhausted; None: it has ended, or another scheduler will end it, or the
    project has no such build.

    Sequence 0: the build goes on as it is, and its events with it.
    """
    if build is not None and (
        build.project_id != request.project_id
        or (build.delete_requested and build.state is BuildState.ACCEPTED)
        or build.code == UNKNOWN
        or build.state in (BuildState.DELETING, BuildState.DELETED)
    ):
        return None
    return _end(request, BuildState.REFUSED, OFF_RECORD, author, why)


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


def _end(
    of: RecordedBuild | DeleteRequest, state: BuildState, sequence: int, author: Author, why: Refusal | None = None
) -> BuildEvent:
    """The terminal event of a build or of a delete."""
    return BuildEvent(
        instance_uuid=of.instance_uuid,
        project_id=of.project_id,
        state=state,
        sequence=sequence,
        terminal=True,
        code="" if why is None else why.code,
        reason="" if why is None else why.reason,
        at=author.at,
    )

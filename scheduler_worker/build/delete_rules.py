"""Delete requests: what a delete does depends on the state of its build. A delete of an unknown instance is put on
record and answered as unknown, so a later build request for it is not built. If the build's record was lost, what the
instance holds is its cell's to delete, and the delete stays on record until it has ended. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.consuming.outcome import Done, Outcome, Retry
from bus.contracts.base import Refusal
from bus.contracts.build import DELETE_REQUESTED, BuildAccepted, BuildRequest, BuildState, DeleteRequest, TimelineEntry
from bus.contracts.placement_queries import ConsumerRecord
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.records.build_record import (
    DELETED,
    FAILED_OR_REFUSED,
    FIRST_ATTEMPT,
    UNLOCATABLE,
    Actor,
    BuildUpdate,
    NewBuild,
    ProjectsBuild,
    RecordedBuild,
    delete_of,
    effects,
)
from scheduler_worker.requests.request_delivery import RequestDelivery
from scheduler_worker.requests.request_refusal import refused_build

UNKNOWN = "instance.unknown"
UNLOCATABLE_REASON = "the instance holds an allocation of an earlier request, on a host of no known cell"
UNKNOWN_REASON = "there is no such instance in this project"
UNKNOWN_FLAVOR = "unknown"


class PendingDelete(Struct, frozen=True, kw_only=True):
    """A delete request that has no outcome yet."""

    batch_index: int  # in its batch
    request: DeleteRequest
    delivery: RequestDelivery

    @property
    def key(self) -> ProjectsBuild:
        """What it names."""
        return self.request.instance_uuid, self.request.project_id


class DeletePlan(Struct, frozen=True, kw_only=True):
    """The effect of a batch of deletes."""

    outcomes: dict[int, Outcome]  # by index
    accepted: set[str]  # the instances
    updates: list[BuildUpdate]
    messages: list[OutboxMessage]
    unknown: list[PendingDelete]  # without a record, late
    # of builds that no cell has, or without a record, late: planned once it is known what instances hold
    without_cell: list[PendingDelete]


def plan_deletes(
    deletes: Sequence[PendingDelete],
    builds: Mapping[str, RecordedBuild],
    actor: Actor,
    consumers: Mapping[ProjectsBuild, ConsumerRecord] | None = None,
) -> DeletePlan:
    """Apply deletes to the builds on record; `unknown` is left to `tombstones` and `answer_unknown`. consumers: what
    their instances hold; None: not known yet, and deletes that depend on it are left as `without_cell`.
    """
    plan = DeletePlan(outcomes={}, accepted=set(), updates=[], messages=[], unknown=[], without_cell=[])
    replies: dict[str, BuildAccepted | Refusal] = {}
    for pending in deletes:
        request = pending.request
        uuid, build = request.instance_uuid, builds.get(request.instance_uuid)
        if (refusal := pending.delivery.ending_refusal()) is not None:
            plan.outcomes[pending.batch_index] = Done()
            plan.messages.extend(_end_of(pending, refusal, build, actor))
        elif (
            consumers and pending.key in consumers and consumers[pending.key].cell is None and not pending.delivery.last
        ):
            # The cell that can be told may be reported yet, or a scheduler that knows it is claiming now.
            plan.outcomes[pending.batch_index] = Retry(UNLOCATABLE, UNLOCATABLE_REASON)
        elif build is None or build.code == UNKNOWN or _is_foreign(build, request.project_id):
            # Another project's build is no record of this one's: it neither shows, nor hides what was claimed for it.
            plan.outcomes[pending.batch_index] = Retry(UNKNOWN, "not on record (yet)")
            if not pending.delivery.may_be_out_of_order:
                _delete_unknown(plan, pending, actor, consumers)
        elif consumers is None and build.cell is None and build.state is not BuildState.DELETED:
            plan.without_cell.append(pending)
        else:
            if uuid not in plan.accepted:
                replies[uuid] = _delete(plan, build, actor, (consumers or {}).get(pending.key), request.by)
            plan.accepted.add(uuid)
            plan.outcomes[pending.batch_index] = Done(reply=replies[uuid])
    return plan


def _delete_unknown(
    plan: DeletePlan, pending: PendingDelete, actor: Actor, consumers: Mapping[ProjectsBuild, ConsumerRecord] | None
) -> None:
    """The effect of a late delete without a record. The record may be lost, and not what was claimed for it, or built:
    it is not answered that there is none while no cell can be told.
    """
    if consumers is None:
        plan.without_cell.append(pending)
    elif pending.key not in consumers or consumers[pending.key].cell is not None:
        plan.unknown.append(pending)
    else:
        refusal = Refusal(code=UNLOCATABLE, reason=UNLOCATABLE_REASON)
        plan.outcomes[pending.batch_index] = Done(reply=refusal)
        plan.messages.append(refused_build(*pending.key, refusal, actor.at))


def _delete(
    plan: DeletePlan, build: RecordedBuild, actor: Actor, consumer: ConsumerRecord | None, by: str
) -> BuildAccepted | Refusal:
    """The effect of a delete on one build, and the reply. consumer: what its instance holds, if no cell has the build.
    by: who asked.
    The cell of the claim deletes it: the record of its dispatch may be lost, as after a restore, and the instance may
    run.
    """
    located = build if build.cell is not None or consumer is None else _as_held(build, consumer)
    claimed = FIRST_ATTEMPT if build.awaits_decision else build.attempt  # a scheduler may be claiming for it
    after, lines = build, tuple[TimelineEntry, ...]()
    reply: BuildAccepted | Refusal = BuildAccepted(instance_uuid=build.instance_uuid)
    if build.state in DELETE_REQUESTED:
        pass  # it was requested before
    elif located.cell is not None:
        after = replace(located, state=BuildState.DELETING)
        lines = (actor.entry("delete_requested", f"passed to cell {located.cell}", by=by),)
    elif consumer is None:
        after = replace(build, state=BuildState.DELETED, sequence=DELETED, terminal=True, attempt=claimed)
        lines = (actor.entry("deleted", f"it was {build.state.value}, and no cell has it", by=by),)
    else:
        reply = Refusal(code=UNLOCATABLE, reason=UNLOCATABLE_REASON)
        plan.messages.append(refused_build(build.instance_uuid, build.project_id, reply, actor.at))
        after, what = build, "delete_refused"
        if build.awaits_decision:
            after, what = _failed(replace(build, attempt=claimed), reply), "failed"
        lines = (actor.entry(what, f"{UNLOCATABLE}: {UNLOCATABLE_REASON}", by=by),)
    if lines:
        plan.updates.append(BuildUpdate(build=after, timeline=lines))
    plan.messages.extend(effects(build.state, after, actor.at))
    return reply


def _as_held(build: RecordedBuild, consumer: ConsumerRecord) -> RecordedBuild:
    """The build in the cell of what its instance holds (None: of none that is known), which has to be released."""
    return replace(build, cell=consumer.cell, attempt=max(build.attempt, consumer.attempt))


def _failed(build: RecordedBuild, refusal: Refusal) -> RecordedBuild:
    return replace(
        build,
        state=BuildState.FAILED,
        sequence=FAILED_OR_REFUSED,
        terminal=True,
        code=refusal.code,
        reason=refusal.reason,
    )


def tombstones(unknown: Sequence[PendingDelete], on_record: Collection[str], actor: Actor) -> list[NewBuild]:
    """The records of builds that were deleted before any request for them came."""
    requests = {one.request.instance_uuid: one.request for one in unknown if one.request.instance_uuid not in on_record}
    return [_tombstone(request, actor) for request in requests.values()]


def answer_unknown(
    plan: DeletePlan,
    on_record: Mapping[str, RecordedBuild],
    actor: Actor,
    consumers: Mapping[ProjectsBuild, ConsumerRecord],
) -> None:
    """Add the effect of deletes of unknown instances: they are refused, and the cells of what is held delete that.
    on_record: tombstones included.
    """
    # An instance without a record has just been recorded by its build request. The tombstone of one that holds
    # something becomes the record of that delete, also where it is another project's.
    for one in (one for one in plan.unknown if one.request.instance_uuid in on_record):
        uuid, project = one.key
        build, consumer = on_record[uuid], consumers.get(one.key)
        cell = None if consumer is None else consumer.cell
        if _is_foreign(build, project):  # no event: those about an instance are its owner's
            plan.outcomes[one.batch_index] = Done(reply=Refusal(code=UNKNOWN, reason=UNKNOWN_REASON))
            if consumer is not None and cell is not None:
                tombstone = _as_held(_tombstone(one.request, actor).build, consumer)
                plan.messages.append(OutboxMessage(cell, delete_of(tombstone, may_have_started=True), uuid))
        elif consumer is None or cell is None:
            refusal = Refusal(code=UNKNOWN, reason=UNKNOWN_REASON)
            plan.outcomes[one.batch_index] = Done(reply=refusal)
            plan.messages.append(refused_build(uuid, project, refusal, actor.at, DELETED))
        else:
            plan.outcomes[one.batch_index] = Done(reply=BuildAccepted(instance_uuid=uuid))
            if uuid not in plan.accepted:
                plan.accepted.add(uuid)
                deleting = replace(_as_held(build, consumer), project_id=project, state=BuildState.DELETING)
                after = replace(deleting, terminal=False, code="", reason="")
                detail = f"it has no record, and holds something; passed to cell {cell}"
                line = actor.entry("delete_requested", detail, by=one.request.by)
                plan.updates.append(BuildUpdate(build=after, timeline=(line,)))
                plan.messages.extend(effects(build.state, after, actor.at))


def _end_of(pending: PendingDelete, refusal: Refusal, build: RecordedBuild | None, actor: Actor) -> list[OutboxMessage]:
    """The end of a delete that is not carried out; none: its requester has left it, it has ended, or will, or the
    project has no such build. Sequence 0: the build goes on as it is, and its events with it.
    """
    has_ended = build is not None and build.state in DELETE_REQUESTED
    is_foreign = build is not None and _is_foreign(build, pending.request.project_id)
    if pending.delivery.is_abandoned or is_foreign or has_ended:
        return []
    return [refused_build(*pending.key, refusal, actor.at)]


def _is_foreign(build: RecordedBuild, project: str) -> bool:
    """Whether it is a build of another project than this one, and no tombstone."""
    return build.code != UNKNOWN and build.project_id != project


def _tombstone(request: DeleteRequest, actor: Actor) -> NewBuild:
    return NewBuild(
        request=BuildRequest(instance_uuid=request.instance_uuid, project_id=request.project_id, flavor=UNKNOWN_FLAVOR),
        build=RecordedBuild(
            instance_uuid=request.instance_uuid,
            project_id=request.project_id,
            state=BuildState.DELETED,
            sequence=DELETED,
            terminal=True,
            code=UNKNOWN,
            reason=UNKNOWN_REASON,
        ),
        timeline=(actor.entry("refused", "a delete came, and no build", by=request.by),),
    )

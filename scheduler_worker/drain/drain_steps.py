"""Hosts to be emptied (a drain, or the fences of dead hosts): which instances are requested to move next, and why the
others wait. Each pass reads what the hosts hold and the requests on record; no progress is stored. A request's id
follows from the level, the instance and its newest ended request, so schedulers that decide alike make one request.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID, uuid5

from msgspec import Struct
from msgspec.structs import replace

from bus.clock import CLOCKS_APART_S
from bus.contracts.actions import ActionKind, ActionRequest, ActionState, Condition
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.build import TERMINAL_STATES, BuildState
from bus.contracts.drains import DrainAction, DrainCommand, DrainRecord, DrainState, DrainTarget
from bus.contracts.objects import FenceRecord, HostDecision
from bus.contracts.operations import AdminState, EvacuationPolicy
from bus.contracts.placement_queries import TreeConsumer
from bus.retrying import doubled_s
from scheduler_worker.action.action_checks import BUSY, CELL_DRAIN_USER, DRAIN_USER
from scheduler_worker.build.decision import NO_HOST
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.records.action_record import ActionContext, RecordedAction, flavor_of
from scheduler_worker.records.build_record import RecordedBuild
from scheduler_worker.records.drain_record import BegunMoves, DrainedHost, EndedRequest, InstanceOnHost
from scheduler_worker.records.fence_record import policy_of

DRAIN_KINDS = frozenset({ActionKind.LIVE_MIGRATE, ActionKind.MIGRATE})
NOT_RUNNING = "instance.not_running"  # a cell's refusal of a live migration: the next one is cold
# Codes of instances that wait because a host holds something of them while they are not active there.
BUILDING = "instance.building"  # a build on the host is in progress
ARRIVING = "instance.arriving"  # a request that brings it to the host is under way
RELEASING = "instance.releasing"  # it is being deleted
UNRELEASED = "instance.unreleased"  # it is deleted, or has moved away, and its resources are not released yet
UNCONFIRMED = "instance.unconfirmed"  # the host keeps the source of a move that awaits confirm or revert
MISPLACED = "instance.misplaced"  # placement has it on the host, its record on another one, or none has it
# These end by themselves. Any other reason is that of an instance that cannot move.
PASSING = frozenset({BUILDING, ARRIVING, RELEASING, UNRELEASED, BUSY})
# Conditions in which a cell refuses every move of an instance (`_action_blocker` and `end_resized` in its rules).
UNMOVABLE = {
    Condition.SHELVED: Refusal(code="instance.shelved", reason="it is shelved: unshelve or offload it first"),
    Condition.RESCUED: Refusal(code="instance.rescued", reason="it is rescued: unrescue it first"),
    Condition.RESIZED: Refusal(code="instance.resized", reason="a move of it awaits confirm or revert"),
}
# Refusals, after which an instance counts as one that cannot move. It is tried again all the same, unless these were
# cold moves that began and failed: each has stopped it.
STUCK = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0  # between a refusal and the next try; doubled with each
PATIENT, RARE_PAUSE_S = 30, 900.0  # after so many refusals an instance is tried so often: each leaves a record
BURST_S = 1.0  # with a rate, no more begin at once than in this time, however long none could
READ_ENDS = 48  # requests that have ended that are read of one instance
_NAMESPACE = UUID("0f1f2b0e-7d0c-5c57-8f5e-0b8a1c2f9d63")

DONE, DEADLINE, STOPPED = "drain.done", "drain.deadline", "drain.stopped"


class EmptyingLevel(Struct, frozen=True, kw_only=True):
    """How hosts are emptied."""

    kind: ActionKind
    user: str  # of the requests
    at_once: int
    per_minute: int | None = None
    begins: bool = True  # whether further moves may begin
    longest_pause_s: float = LONGEST_PAUSE_S
    most_refusals: int | None = None  # of one instance, after which it is tried no more


class NextMove(Struct, frozen=True):
    """A move that may be requested now."""

    instance: InstanceOnHost
    request: ActionRequest
    refused_at: float = 0.0  # the last one (0: none was)


class WaitingInstance(Struct, frozen=True, kw_only=True):
    """An instance that is not requested now. code "": only because enough others are."""

    instance: InstanceOnHost
    code: str = ""
    reason: str = ""
    is_stuck: bool = False  # it cannot move now
    is_last: bool = False  # it is tried no more


class NextMoves(Struct, frozen=True):
    """The result of a pass over what hosts hold."""

    moves: tuple[NextMove, ...] = ()
    waiting: tuple[WaitingInstance, ...] = ()


def next_moves(
    level: EmptyingLevel,
    instances: Iterable[InstanceOnHost],
    ended: Mapping[str, Sequence[EndedRequest]],
    begun: BegunMoves,
    now: float,
) -> NextMoves:
    """The moves that begin now: those that were not refused yet, in the order of what is held, then those whose refusal
    is the longest ago, so that what cannot move keeps no others from their turn. ended: by instance, the newest first.
    """
    found = [_next_step(level, one, ended.get(one.instance_uuid, ()), now) for one in _each_once(instances)]
    due = sorted((move for move, _ in found if move is not None), key=lambda one: one.refused_at)
    moves = due[: max(0, free_slots(level, begun, now))]
    begin = {one.instance.instance_uuid for one in moves}
    return NextMoves(tuple(moves), tuple(waits for _, waits in found if waits.instance.instance_uuid not in begin))


def end_of(record: DrainRecord, begun: BegunMoves, now: float, *, is_empty: bool) -> str | None:
    """Why a drain is over, if it is. is_empty: its hosts hold nothing. It waits for the moves that it has begun."""
    if begun.under_way or record.state is DrainState.ENDED:
        return None
    if record.state is DrainState.STOPPING:
        return STOPPED
    if is_empty and record.state is DrainState.RUNNING:
        return DONE
    return DEADLINE if _is_late(record, now) else None


def request_id(drain: str, instance_uuid: str, last: str = "") -> str:
    """The id of the next request about an instance. last: the newest one that has ended, or an id that is taken."""
    return str(uuid5(_NAMESPACE, f"{drain} {instance_uuid} {last}"))


def _each_once(instances: Iterable[InstanceOnHost]) -> Iterable[InstanceOnHost]:
    """Of several hosts that hold something of an instance the one where it is active counts, else the first."""
    found: dict[str, InstanceOnHost] = {}
    for one in instances:
        if one.instance_uuid not in found or (found[one.instance_uuid].code and not one.code):
            found[one.instance_uuid] = one
    return found.values()


def _next_step(
    level: EmptyingLevel, one: InstanceOnHost, ended: Sequence[EndedRequest], now: float
) -> tuple[NextMove | None, WaitingInstance]:
    """Its move if it may begin now; and why it waits, where it does not."""
    ended = _as_followed(one, ended)
    refused = _refused(one.source.drain, ended)
    counted = sum(request.code not in (BUSY, NOT_RUNNING) for request in refused)
    blocked = _blocked(level, one)
    if blocked is not None:
        is_stuck = bool(one.source.code) or blocked.code not in PASSING
        return None, WaitingInstance(instance=one, code=blocked.code, reason=blocked.reason, is_stuck=is_stuck)
    waits, kind, is_due = WaitingInstance(instance=one), level.kind, True
    if refused and refused[0].code == NOT_RUNNING:
        kind = ActionKind.MIGRATE
    elif refused:
        last = refused[0]
        stops = 0 if kind is not ActionKind.MIGRATE else sum(map(_has_begun, refused))
        is_last = stops >= STUCK or (level.most_refusals is not None and counted >= level.most_refusals)
        is_stuck = is_last or counted >= STUCK
        waits = WaitingInstance(instance=one, code=last.code, reason=last.reason, is_stuck=is_stuck, is_last=is_last)
        pause_s = doubled_s(FIRST_PAUSE_S, level.longest_pause_s, len(refused) - 1)
        pause_s = max(pause_s, RARE_PAUSE_S if counted >= PATIENT else 0.0)
        # What ended long after now ended before the clock was set back.
        is_due = not is_last and not -CLOCKS_APART_S <= now - last.updated_at < pause_s
    ident = request_id(one.source.drain, one.instance_uuid, ended[0].request_id if ended else "")
    refused_at = refused[0].updated_at if refused else 0.0
    return (NextMove(one, _request(level, kind, one, ident), refused_at) if is_due else None), waits


def _as_followed(one: InstanceOnHost, ended: Sequence[EndedRequest]) -> list[EndedRequest]:
    """The newest first, also where a clock stepped back or schedulers' clocks differ: a request is newer than the one
    that its id follows from. Else its id would be made again, which is on record and moves nothing.
    """
    by_id, found = {request.request_id: request for request in ended}, list(ended)
    while found:
        later = by_id.pop(request_id(one.source.drain, one.instance_uuid, found[0].request_id), None)
        if later is None:
            break
        found.remove(later)
        found.insert(0, later)
    return found


def _refused(drain: str, ended: Sequence[EndedRequest]) -> list[EndedRequest]:
    """The requests of a level about an instance since the last one that has moved it, the newest first."""
    found: list[EndedRequest] = []
    for one in ended:
        if one.drain == drain:
            if one.state is ActionState.DONE:
                break
            found.append(one)
    return found


def _has_begun(request: EndedRequest) -> bool:
    """Whether a request that moved nothing was sent to a cell, which may have stopped the instance for it."""
    return request.state is ActionState.FAILED and request.code != NO_HOST


def _blocked(level: EmptyingLevel, one: InstanceOnHost) -> Refusal | None:
    """Why no move of it is requested, whatever was requested before."""
    host = one.source
    if one.code:
        reason = f"{one.reason}; {host.name}: {host.code}" if host.code else one.reason
        return Refusal(code=one.code, reason=reason[:MAX_REASON])
    if one.known.current.under_way is not None:
        return Refusal(code=BUSY, reason="another request about it is under way")
    if level.kind is not ActionKind.EVACUATE and one.known.current.condition in UNMOVABLE:
        return UNMOVABLE[one.known.current.condition]
    return Refusal(code=host.code, reason=host.reason) if host.code else None


def free_slots(level: EmptyingLevel, begun: BegunMoves, now: float) -> int:
    """How many moves may begin now; none: 0 or fewer."""
    if not level.begins:
        return 0
    free = level.at_once - begun.under_way
    if level.per_minute is not None:
        due = int((now - begun.last_at) * level.per_minute / 60.0) if begun.last_at else 1
        # A drain does not make up at once for a pause, or for moves that took long.
        free = min(free, due, max(1, int(BURST_S * level.per_minute / 60.0)))
    return free


def _request(level: EmptyingLevel, kind: ActionKind, one: InstanceOnHost, ident: str) -> ActionRequest:
    """The request, the same from every scheduler. A cold move is confirmed at once. An evacuation states no fence: its
    cell's own record of one is the proof; it offloads a shelved instance, which has nothing to be started elsewhere.
    """
    return ActionRequest(
        request_id=ident,
        instance_uuid=one.instance_uuid,
        project_id=one.project_id,
        user_id=level.user,
        by=level.user,
        kind=kind,
        auto_confirm_s=0.0 if kind is ActionKind.MIGRATE else None,
    )


# --- drains


def level_of(record: DrainRecord, now: float) -> EmptyingLevel:
    """The level that a drain is now. Those of a cell leave it, which none does while it runs."""
    is_cell = record.target is DrainTarget.CELL
    return EmptyingLevel(
        kind=kind_for(record.target, record.kind),
        user=CELL_DRAIN_USER if is_cell else DRAIN_USER,
        at_once=record.at_once,
        per_minute=record.per_minute,
        begins=record.state is DrainState.RUNNING and not _is_late(record, now),
    )


def kind_for(target: DrainTarget, kind: ActionKind) -> ActionKind:
    """How the instances of a target are moved."""
    return ActionKind.MIGRATE if target is DrainTarget.CELL else kind


def commanded(record: DrainRecord, command: DrainCommand, now: float) -> DrainRecord | Refusal:
    """A drain after an operator's command; the same one if the command has no effect."""
    state, action = record.state, command.action
    if action is DrainAction.PAUSE:
        if state is DrainState.ENDED:
            return Refusal(code="drain.ended", reason="it has ended")
        if state is DrainState.STOPPING:  # paused, it would not end
            return Refusal(code="drain.stopping", reason="it is being stopped: nothing begins to move any more")
        return replace(record, state=DrainState.PAUSED)
    if action is DrainAction.STOP:
        return record if state is DrainState.ENDED else replace(record, state=DrainState.STOPPING)
    deadline_at = None if command.deadline_s is None else now + command.deadline_s
    if deadline_at is None and record.deadline_at is not None and record.deadline_at > now:
        deadline_at = record.deadline_at
    return replace(record, state=DrainState.RUNNING, code="", deadline_at=deadline_at)


def drained(decision: HostDecision | None, drain: str, host: str, reason: str) -> HostDecision:
    """The decision about a host that a drain begins with: disabled, unless builds are kept away from it already."""
    if decision is None or decision.state is AdminState.ENABLED:
        return HostDecision(host=host, state=AdminState.DISABLED, reason=reason, drain=drain)
    return replace(decision, drain=drain)


def is_down(known: ActionContext) -> bool:
    """Whether no host has the instance, though it has not been deleted."""
    is_active = known.build is not None and known.build.state is BuildState.ACTIVE
    return is_active and known.current.condition is Condition.OFFLOADED


def _is_late(record: DrainRecord, now: float) -> bool:
    return record.deadline_at is not None and now >= record.deadline_at


# --- evacuations

EVACUATION_USER = "evacuation"  # the user_id of these requests
MAX_REFUSALS = 24  # of one instance under one fence; after that it waits for an operator
LONGEST_EVACUATION_PAUSE_S = 600.0
# The states of an instance that has a machine, or the claim of one, on its host. A move that has not been confirmed is
# ended by its cell.
_ON_HOST = frozenset({Condition.ACTIVE, Condition.STOPPED, Condition.SHELVED, Condition.RESCUED})


def evacuating(at_once: int) -> EmptyingLevel:
    """The level of all fences together."""
    return EmptyingLevel(
        kind=ActionKind.EVACUATE,
        user=EVACUATION_USER,
        at_once=at_once,
        longest_pause_s=LONGEST_EVACUATION_PAUSE_S,
        most_refusals=MAX_REFUSALS,
    )


def fenced_hosts(fences: Mapping[str, FenceRecord]) -> dict[str, DrainedHost]:
    """The hosts (by uuid) whose instances may be evacuated: their cells have acknowledged their fences, and they are
    not to be used again. Nobody can guess the ids of their requests: these follow from the fence's token.
    """
    return {
        uuid: DrainedHost(uuid, fence.host, drain=str(uuid5(_NAMESPACE, f"{fence.token} {uuid} {fence.version}")))
        for uuid, fence in sorted(fences.items())
        if fence.acknowledged >= fence.version and not fence.unfencing
    }


def is_restarted(known: ActionContext, config: SchedulerConfig) -> bool:
    """Whether this instance is on record on its host, and is to be rebuilt elsewhere when that host is fenced."""
    if known.build is None or known.build_request is None or known.build.state is not BuildState.ACTIVE:
        return False
    if known.current.condition not in _ON_HOST:
        return False
    flavor = config.flavors.get(flavor_of(known))
    return policy_of(known.build_request.on_host_failure, flavor, config.on_host_failure) is EvacuationPolicy.RESTART


# --- what hosts hold

_WITHOUT_MACHINE = frozenset({BuildState.ACCEPTED, BuildState.SCHEDULED, BuildState.BUILDING})


def is_migration(holder: TreeConsumer) -> bool:
    """Whether it is a migration, which keeps the source of an instance that moves. A claim has a number (attempt);
    without one it was written by a client of placement's API, which is no concern of a drain.
    """
    return holder.attempt > 0 and holder.consumer_type.startswith("MIGRATION")


def instances_on(
    host: DrainedHost, known: ActionContext, by: RecordedAction | None = None, holder: TreeConsumer | None = None
) -> InstanceOnHost | None:
    """The instance of which a host holds something (None: none, on record or claimed). by: the request that holds it,
    by its migration or because it brings the instance there (None: the instance's own allocation). holder: by
    placement.
    """
    # If the records of a migration are lost, its move counts as unconfirmed; if its request is not on record, either,
    # the migration is named.
    build = known.build
    if build is not None:
        code, reason = _hold_reason(host, known, build, by)
        uuid, project_id = build.instance_uuid, build.project_id
    elif holder is not None and holder.attempt > 0:
        code, reason = MISPLACED, "placement has it here, and it is not on record"
        if is_migration(holder):
            code = UNCONFIRMED
            reason = f"migration {holder.consumer} keeps a source here, and its request is not on record"
        uuid, project_id = holder.consumer if by is None else by.instance_uuid, holder.project_id
    else:
        return None
    return InstanceOnHost(instance_uuid=uuid, project_id=project_id, source=host, code=code, reason=reason, known=known)


def _hold_reason(
    host: DrainedHost, known: ActionContext, build: RecordedBuild, by: RecordedAction | None
) -> tuple[str, str]:
    """A code and its reason; "": the instance is active on this host."""
    if build.state in _WITHOUT_MACHINE:
        return BUILDING, f"its build is {build.state}"
    if build.state is not BuildState.ACTIVE:
        code = UNRELEASED if build.state in TERMINAL_STATES else RELEASING
        return code, f"it is {build.state}, and its resources are not released yet"
    if build.host_uuid == host.uuid:
        return "", ""
    # It comes, or is being confirmed, or reverted to this host.
    if by is not None and not by.terminal:
        return ARRIVING, f"{by.kind} {by.request_id} is {by.state}"
    if known.current.under_way is not None:
        return ARRIVING, f"request {known.current.under_way} about it is under way"
    if by is None:
        return MISPLACED, f"placement has it here, the record on {build.host}"
    if known.current.condition is Condition.RESIZED:
        return UNCONFIRMED, f"{by.kind} {by.request_id} to {build.host} awaits confirm or revert"
    return UNRELEASED, f"the source of {by.kind} {by.request_id} is not released yet"

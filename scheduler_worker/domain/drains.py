"""The course of a drain: which of its instances are requested to move next, and how the ends of their moves change it.
Pure.

Any number of schedulers carry out a drain together. Each pass locks the drain's row, and writes its decisions together
with the requests that follow, so a scheduler may end between any two passes. The id of a request follows from the
drain, the instance and the number of the try.

What becomes of an instance follows from one read each time (`next_of`): its row, what is on record of it, and, unless
it is on record as active on its host, what the hosts of the drain hold of it. So a drain does not end as done before
its hosts hold nothing: of what cannot be moved away yet the row waits, and is looked at again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf
from uuid import UUID, uuid5

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.book import TreeHolder
from bus.contracts.build import TERMINAL_STATES, BuildState
from bus.contracts.drains import DrainAction, DrainCommand, DrainMoveState, DrainRecord, DrainState, DrainTarget
from bus.contracts.moves import Condition, MoveKind, MoveRequest, MoveState
from bus.contracts.objects import HostDecision, StoredObject
from bus.contracts.operations import AdminState
from bus.retrying import doubled_s
from scheduler_worker.domain.admission import DUPLICATE
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.moves import BUSY, CELL_DRAIN_USER, DRAIN_USER
from scheduler_worker.domain.recorded_moves import MoveContext, RecordedMove

DRAIN_KINDS = frozenset({MoveKind.LIVE_MIGRATE, MoveKind.MIGRATE})
NOT_RUNNING = "instance.not_running"  # a cell's refusal of a live migration
MAX_FAILURES = 4  # tries of one instance; then it has failed
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0  # before an instance is tried again; doubled with each failure
# Codes of instances that wait because a host of the drain holds something of them while they are not active there.
BUILDING = "instance.building"  # a build on the host is in progress
ARRIVING = "instance.arriving"  # a request that brings it to the host is under way
RELEASING = "instance.releasing"  # it is being deleted
UNRELEASED = "instance.unreleased"  # it is deleted, or has moved away, and its resources are not released yet
UNCONFIRMED = "instance.unconfirmed"  # the host keeps the source of a move that awaits confirm or revert
MISPLACED = "instance.misplaced"  # the book has it on the host, its record on another one
# How often each is looked at until it has failed. The first three are in progress and end by themselves. What is not
# released should be soon: some nine minutes. A client's confirm may never come, and nothing ends what is misplaced.
LOOKS: dict[str, float] = {
    BUILDING: inf,
    ARRIVING: inf,
    RELEASING: inf,
    UNRELEASED: 14,
    UNCONFIRMED: MAX_FAILURES,
    MISPLACED: MAX_FAILURES,
}
LOOK_S = 2.0  # between two looks at what ends by itself
BURST_S = 1.0  # with a rate, no more begin at once than in this time, however long none could
AGAIN_S = 60.0  # a request that is not on record this long after it was sent is sent again
_NAMESPACE = UUID("0f1f2b0e-7d0c-5c57-8f5e-0b8a1c2f9d63")

State = DrainMoveState
DONE, LEFT, DEADLINE, STOPPED = "drain.done", "drain.left", "drain.deadline", "drain.stopped"


HOST_FENCED, SERVICE_DOWN = "host.fenced", "service.down"  # why nothing can be moved away from a host
_WHY = {
    HOST_FENCED: "{} is fenced: its instances are evacuated, not moved",
    SERVICE_DOWN: "the compute service of {} is down: fence the host and evacuate, or wait for it",
}


class DrainedHost(Struct, frozen=True):
    """A host that is drained, or is to be. code: why nothing can be moved away from it now; "": it can."""

    uuid: str
    name: str
    code: str = ""

    @property
    def reason(self) -> str:
        """The code in words."""
        return _WHY[self.code].format(self.name)


class DrainMove(Struct, frozen=True, kw_only=True):
    """One instance of a drain. position: in the order of the plan. source_uuid: the host that is drained; host_uuid:
    where it was moved. tries: requests made so far, failures: those that failed. due_at, begun_at: when it may be tried
    next, and when it was tried last (seconds since the epoch).
    """

    drain: str
    instance_uuid: str
    position: int
    source_uuid: str
    kind: MoveKind
    state: DrainMoveState = DrainMoveState.WAITING
    host_uuid: str | None = None
    tries: int = 0
    failures: int = 0
    code: str = ""
    reason: str = ""
    due_at: float = 0.0
    begun_at: float = 0.0

    @property
    def request_id(self) -> str:
        """The id of its request under way, or of its next one."""
        made = self.tries - (self.state is DrainMoveState.UNDER_WAY)
        return str(uuid5(_NAMESPACE, f"{self.drain} {self.instance_uuid} {made}"))


class OpenDrain(Struct, frozen=True, kw_only=True):
    """A drain in one transaction. open: its instances under way, and the first of those that are due, in order.

    counts: of all its instances, by state. last_begun_at: when its newest request was made.
    """

    record: DrainRecord
    open: tuple[DrainMove, ...]
    counts: Mapping[DrainMoveState, int]
    last_begun_at: float


class HeldInstance(Struct, frozen=True, kw_only=True):
    """An instance, and a host that holds something of it. code, reason: why it cannot be moved away now; "": it is
    active there. known: what is on record of it.
    """

    instance_uuid: str
    project_id: str
    source: DrainedHost
    code: str = ""
    reason: str = ""
    known: MoveContext = MoveContext()


class Look(Struct, frozen=True):
    """One look at hosts of a drain, or none yet. uuids: of the hosts. held: by instance, what these hold of it."""

    drain: str
    uuids: Collection[str] = ()
    held: Mapping[str, HeldInstance] = {}


def looked(drain: str, uuids: Collection[str], held: Sequence[HeldInstance]) -> Look:
    """Of several hosts that hold something of an instance the first counts."""
    found: dict[str, HeldInstance] = {}
    for one in held:
        found.setdefault(one.instance_uuid, one)
    return Look(drain, uuids, found)


class DrainStep(Struct, frozen=True):
    """The changes of one pass: rows to write, requests to publish. unclear: hosts (uuids) that have to be looked at."""

    changed: tuple[DrainMove, ...] = ()
    requests: tuple[MoveRequest, ...] = ()
    unclear: frozenset[str] = frozenset()


def step(
    drain: OpenDrain, known: Mapping[str, MoveContext], hosts: Mapping[str, DrainedHost], look: Look, now: float
) -> DrainStep:
    """One pass. known: by instance, the record of the move that the row requested, or of its next one. Of another row
    it is as old as the look: it waits, and is judged and moved by a later pass. hosts: that are in the drain now.
    """
    rows = {row.instance_uuid: row for row in drain.open}
    unknown, size = [one for uuid, one in look.held.items() if uuid not in rows], sum(drain.counts.values())
    new = [new_row(look.drain, drain.record.kind, one, size + at) for at, one in enumerate(unknown)]
    changed: list[DrainMove] = []
    requests: list[MoveRequest] = []
    unclear: set[str] = set()
    under_way = begun = 0
    for row in (*drain.open, *new):
        was_under_way = row.state is State.UNDER_WAY
        if not was_under_way and drain.record.state is not DrainState.RUNNING:
            continue
        context = known.get(row.instance_uuid) or look.held[row.instance_uuid].known
        is_later = row.instance_uuid not in known and not look.held[row.instance_uuid].code
        after = row if is_later and row.state is State.WAITING else next_of(row, context, hosts, look, now)
        if after is None:
            unclear.add(row.source_uuid)
            continue
        is_due = after.state is State.WAITING and after.due_at <= now and row.instance_uuid in known
        if was_under_way:
            under_way += after.state is State.UNDER_WAY
        elif is_due and begun < _free_slots(drain, under_way, now):
            begun += 1
            after = replace(after, state=State.UNDER_WAY, tries=after.tries + 1, begun_at=now)
        if after != rows.get(row.instance_uuid):
            changed.append(after)
            requests += [_request(after, context, drain.record.target)] if after.state is State.UNDER_WAY else []
    return DrainStep(tuple(changed), tuple(requests), frozenset(unclear))


def end_of(drain: OpenDrain, now: float) -> str | None:
    """Why the drain is over, if it is; when all instances of a running drain have ended, its hosts still have to be
    searched for others.
    """
    counts, record = drain.counts, drain.record
    if counts.get(State.UNDER_WAY) or record.state is DrainState.ENDED:
        return None
    if record.state is DrainState.STOPPING:
        return STOPPED
    if record.state is DrainState.RUNNING and not counts.get(State.WAITING):
        return LEFT if counts.get(State.FAILED) else DONE
    return DEADLINE if _is_late(record, now) else None


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


def retried(row: DrainMove) -> DrainMove:
    """An instance of a drain that is resumed: it is tried again if it has failed."""
    if row.state is not State.FAILED:
        return row
    return replace(row, state=State.WAITING, failures=0, due_at=0.0, code="", reason="")


def drained(decision: HostDecision | None, drain: str, host: str, reason: str) -> HostDecision:
    """The decision about a host that a drain begins with: disabled, unless builds are kept away from it already."""
    if decision is None or decision.state is AdminState.ENABLED:
        return HostDecision(host=host, state=AdminState.DISABLED, reason=reason, drain=drain)
    return replace(decision, drain=drain)


def drain_of(stored: StoredObject) -> DrainRecord:
    """The drain that an object holds. Raises ValueError when its body is not valid."""
    return msgspec.convert(stored.body, DrainRecord)


def _is_late(record: DrainRecord, now: float) -> bool:
    return record.deadline_at is not None and now >= record.deadline_at


def _free_slots(drain: OpenDrain, under_way: int, now: float) -> int:
    """How many moves may begin now; none: 0 or fewer."""
    record = drain.record
    if _is_late(record, now):
        return 0
    free_slots = record.at_once - under_way
    if record.per_minute is not None:
        due = int((now - drain.last_begun_at) * record.per_minute / 60.0) if drain.last_begun_at else 1
        # A drain does not make up at once for a pause, or for moves that took long.
        free_slots = min(free_slots, due, max(1, int(BURST_S * record.per_minute / 60.0)))
    return free_slots


def next_of(
    row: DrainMove, known: MoveContext, hosts: Mapping[str, DrainedHost], look: Look, now: float
) -> DrainMove | None:
    """What becomes of an instance now. One that waits, and is due, can be moved. None: its host has to be looked at.

    hosts: those that are in the drain now. Where it is active the record tells, which may be newer than the look.
    """
    if row.state is State.UNDER_WAY:
        return _followed(row, known, now)
    if row.state is State.FAILED or (row.state is State.WAITING and row.due_at > now):
        return row
    host = hosts.get(row.source_uuid)
    there = None if known.build is None else hosts.get(known.build.host_uuid or "")
    held = None if there is None else held_on(there, known)
    if held is None or held.code:
        held = look.held.get(row.instance_uuid)
        held = held if held is not None and held.code and held.source.uuid in hosts else None
    if held is not None:
        return _waiting(row, held, now)
    return None if host is not None and host.uuid not in look.uuids else _done_with(row, known, host)


def _followed(row: DrainMove, known: MoveContext, now: float) -> DrainMove:
    """The end of a request's move, applied to its row."""
    move = known.move_of(row.instance_uuid)
    if known.build is None:
        return replace(row, state=State.LEFT, code="instance.deleted")
    if move is None and known.move is not None:
        return failed(row, DUPLICATE, "its request's id is that of a request about another instance", now)
    if move is None:  # it is not on record yet; sent long ago, it is sent again
        return replace(row, begun_at=now) if now - row.begun_at >= AGAIN_S else row
    if not move.terminal:
        return row
    if move.state is MoveState.DONE:
        return replace(row, state=State.MOVED, host_uuid=move.host_uuid, failures=0, due_at=0.0, code="", reason="")
    if known.build.state is not BuildState.ACTIVE:
        return replace(row, state=State.LEFT, code="instance.deleted")
    if row.kind is MoveKind.LIVE_MIGRATE and move.code == NOT_RUNNING:
        return replace(row, state=State.WAITING, kind=MoveKind.MIGRATE)
    if move.code == BUSY:
        return _busy(row, move.reason, now)
    is_down = known.build.now.condition is Condition.OFFLOADED  # no host has taken it, and no pass finds it any more
    return failed(row, move.code, move.reason, now, most=1 if is_down else MAX_FAILURES)


def _waiting(row: DrainMove, one: HeldInstance, now: float) -> DrainMove:
    """The row, waiting on the host that holds it. The host where the drain has moved it stays known."""
    host = one.source
    is_tried = row.state is State.WAITING and row.code not in LOOKS  # and not looked at
    row = replace(
        row,
        state=State.WAITING,
        source_uuid=host.uuid,
        host_uuid=row.host_uuid if row.source_uuid == host.uuid else None,
        failures=row.failures if (row.code == one.code if one.code else is_tried) else 0,
        code=one.code,
        reason=one.reason,
        due_at=0.0,
    )
    if not one.code:
        if one.known.now.under_way is not None:
            return _busy(row, "another request about it is under way", now)
        return failed(row, host.code, host.reason, now) if host.code else row
    if host.code:
        return failed(row, one.code, f"{one.reason}; {host.name}: {host.code}", now)
    most = LOOKS[one.code]
    if most == inf:  # what other schedulers have counted of it stays: they may not reach its service
        return replace(row, due_at=now + LOOK_S)
    return failed(row, one.code, one.reason, now, most)


def _busy(row: DrainMove, reason: str, now: float) -> DrainMove:
    """The row of an instance whose other request is under way: that ends by itself, and is no failure of this one.

    It waits longer the more requests were made in vain.  (until: simpler)
    """
    due_at = now + doubled_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, row.tries)
    return replace(row, state=State.WAITING, code=BUSY, reason=reason[:MAX_REASON], due_at=due_at)


def _done_with(row: DrainMove, known: MoveContext, host: DrainedHost | None) -> DrainMove:
    """The row of an instance of which its host holds nothing, or is drained no more."""
    build = known.build
    if build is None or build.state is not BuildState.ACTIVE:
        return replace(row, state=State.LEFT, code="instance.deleted")
    if row.host_uuid is not None and build.host_uuid == row.host_uuid:
        return replace(row, state=State.MOVED, code="", reason="")
    return replace(row, state=State.LEFT, code="host.left_drain" if host is None else "instance.elsewhere")


def failed(row: DrainMove, code: str, reason: str, now: float, most: float = MAX_FAILURES) -> DrainMove:
    """The row after a failure. It waits for its next try, or has failed for good. most: failures until then."""
    failures = row.failures + 1
    state = State.FAILED if failures >= most else State.WAITING
    due_at = now + doubled_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, row.failures)
    return replace(row, state=state, failures=failures, due_at=due_at, code=code, reason=reason[:MAX_REASON])


def kind_for(target: DrainTarget, kind: MoveKind) -> MoveKind:
    """How the instances of a target are moved: those of a cell leave it, which none does while it runs."""
    return MoveKind.MIGRATE if target is DrainTarget.CELL else kind


def user_for(target: DrainTarget) -> str:
    """The user of its requests."""
    return CELL_DRAIN_USER if target is DrainTarget.CELL else DRAIN_USER


def _request(row: DrainMove, known: MoveContext, target: DrainTarget) -> MoveRequest:
    """The request, the same from every scheduler. A cold move is confirmed at once."""
    assert known.build is not None
    return MoveRequest(
        request_id=row.request_id,
        instance_uuid=row.instance_uuid,
        project_id=known.build.project_id,
        user_id=user_for(target),
        kind=row.kind,
        auto_confirm_s=0.0 if row.kind is MoveKind.MIGRATE else None,
    )


_UNBUILT = frozenset({BuildState.ACCEPTED, BuildState.SCHEDULED, BuildState.BUILDING})


def is_migration(holder: TreeHolder) -> bool:
    """Whether it is a migration, which keeps the source of an instance that moves. A claim has a number; without one
    it was written by a client of placement's API, which is no concern of a drain.
    """
    return holder.attempt > 0 and holder.consumer_type.startswith("MIGRATION")


def held_on(
    host: DrainedHost, known: MoveContext, by: RecordedMove | None = None, holder: TreeHolder | None = None
) -> HeldInstance | None:
    """The instance of which a host holds something; None: it is no instance on record.

    by: the request that holds it, by its migration or because it brings the instance there; None: the instance's own
    allocation. holder: by the book. Of a migration whose records are lost the move is unconfirmed; where its request is
    not on record either, the migration is named.
    """
    build = known.build
    if build is not None:
        code, reason = _why_held(host, known, build, by)
        uuid, project_id = build.instance_uuid, build.project_id
    elif holder is not None and is_migration(holder):
        code, reason = UNCONFIRMED, f"migration {holder.consumer} keeps a source here, and its request is not on record"
        uuid, project_id = holder.consumer if by is None else by.instance_uuid, holder.project_id
    else:
        return None
    return HeldInstance(instance_uuid=uuid, project_id=project_id, source=host, code=code, reason=reason, known=known)


def _why_held(host: DrainedHost, known: MoveContext, build: RecordedBuild, by: RecordedMove | None) -> tuple[str, str]:
    """A code and its reason; "": the instance is active on this host."""
    if build.state in _UNBUILT:
        return BUILDING, f"its build is {build.state}"
    if build.state is not BuildState.ACTIVE:
        code = UNRELEASED if build.state in TERMINAL_STATES else RELEASING
        return code, f"it is {build.state}, and its resources are not released yet"
    if build.host_uuid == host.uuid:
        return "", ""
    # It comes, or is being confirmed, or reverted to this host.
    if by is not None and not by.terminal:
        return ARRIVING, f"{by.kind} {by.request_id} is {by.state}"
    if known.now.under_way is not None:
        return ARRIVING, f"request {known.now.under_way} about it is under way"
    if by is None:
        return MISPLACED, f"the book has it here, the record on {build.host}"
    if known.now.condition is Condition.RESIZED:
        return UNCONFIRMED, f"{by.kind} {by.request_id} to {build.host} awaits confirm or revert"
    return UNRELEASED, f"the source of {by.kind} {by.request_id} is not released yet"


def new_row(drain: str, kind: MoveKind, one: HeldInstance, position: int) -> DrainMove:
    """The row of an instance that the drain did not have yet. It waits."""
    uuid, source = one.instance_uuid, one.source.uuid
    return DrainMove(drain=drain, instance_uuid=uuid, position=position, source_uuid=source, kind=kind)

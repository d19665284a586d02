"""Drains: many hosts emptied as one, by the schedulers, with the state of each instance.

A drain is an object of kind `drain` (bus.contracts.objects). Its hosts are those whose decisions carry its id, so a
later decision about one of them takes that host out of the drain.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.actions import ActionKind
from bus.contracts.base import Count, Label, Message, Reason, Uuid, Word

MAX_DRAINED = 5000  # hosts of one drain
MAX_PLANNED = 10_000  # instances of one plan
MAX_AT_ONCE = 100
MAX_DEADLINE_S = 30 * 86_400.0

AtOnce = Annotated[int, Bound(ge=1, le=MAX_AT_ONCE)]
PerMinute = Annotated[int, Bound(ge=1, le=10_000)]
DeadlineS = Annotated[float, Bound(gt=0, le=MAX_DEADLINE_S)]


class DrainTarget(StrEnum):
    """The target of a drain: one host, or every host of a compute service, a cell or an aggregate."""

    HOST = "host"
    SERVICE = "service"
    CELL = "cell"
    AGGREGATE = "aggregate"


class DrainState(StrEnum):
    """How far a drain has come. Only a running one begins moves."""

    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"  # begins no further moves, and ends with those under way
    ENDED = "ended"


class DrainAction(StrEnum):
    """An operator's command to a drain."""

    PAUSE = "pause"
    RESUME = "resume"  # also of one that has ended
    STOP = "stop"


class DrainMoveState(StrEnum):
    """The state of one instance of a drain."""

    WAITING = "waiting"
    UNDER_WAY = "under-way"
    MOVED = "moved"
    FAILED = "failed"  # it cannot move now, or was refused three times: it is tried again


class DrainQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="hosts.drain.query.v1"):
    """Ask a scheduler how hosts could be drained now: each active instance on them, and where it would go. Nothing is
    begun, and nothing is held for the plan.
    """

    host: Label  # the target's name or uuid
    cell: Word | None = None  # where names of hosts and services are looked for
    kind: ActionKind = ActionKind.LIVE_MIGRATE  # by which move
    limit: Annotated[int, Bound(ge=1, le=MAX_PLANNED)] = MAX_PLANNED
    target: DrainTarget | None = None  # None: the one kind that has something of this name


class PlannedMove(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instance to be moved."""

    instance_uuid: Uuid
    project_id: str
    flavor: str
    hosts: tuple[str, ...] = ()  # where it would go, best first; empty: code and reason state why not
    code: str = ""
    reason: Reason = ""
    source: str = ""  # its present host


class DrainPlan(Message, frozen=True, kw_only=True, tag="hosts.drain.plan.v1"):
    """Reply to a DrainQuery: at most `limit` instances, in the order in which they are moved."""

    host: Label  # the target's name
    host_uuid: Uuid | None = None  # of a single host
    target: DrainTarget = DrainTarget.HOST
    # how many are drained. Each instance moves once, to a host that is not drained, so the moves are as few as
    # possible.
    hosts: Count = 1
    moves: tuple[PlannedMove, ...] = ()
    more: bool = False  # there are further instances


class DrainStart(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="drain.start.v1"):
    """Disable hosts and move every instance away from them. Idempotent by `drain`, which the client chooses. Refused
    with `drain.stuck`, and nothing is begun, when an instance cannot move.
    """

    drain: Uuid
    # name, target, cell, kind: as in DrainQuery
    name: Label
    by: Label
    target: DrainTarget | None = None
    cell: Word | None = None
    kind: ActionKind = ActionKind.LIVE_MIGRATE
    at_once: AtOnce = 4  # moves under way at a time
    per_minute: PerMinute | None = None  # at most this many are begun in a minute
    deadline_s: DeadlineS | None = None  # seconds after which it begins nothing more, and ends with the moves under way
    force: bool = False  # begin also when an instance cannot move: what can move is moved
    reason: Reason = "drain"


class DrainCommand(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="drain.command.v1"):
    """Pause, resume or stop a drain. Idempotent by the message's id, and by its content."""

    drain: Uuid
    action: DrainAction
    by: Label
    reason: Reason = ""
    # seconds from now on, of a resumed one; without it a resumed drain that had a deadline has none
    deadline_s: DeadlineS | None = None


class DrainTerms(Struct, frozen=True, kw_only=True):
    """What a drain was ordered to do, and how it stands. See `DrainRecord`."""

    target: DrainTarget
    kind: ActionKind
    by: Label
    reason: Reason = ""
    at_once: AtOnce = 4
    per_minute: PerMinute | None = None
    state: DrainState = DrainState.RUNNING
    code: str = ""  # why it has ended (`drain.done`, `drain.deadline`, `drain.stopped`)
    started_at: float = 0.0  # started_at, deadline_at: seconds since the epoch
    deadline_at: float | None = None
    hosts: Count = 0  # how many it has disabled


class DrainRecord(DrainTerms, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A drain as it is on record: the body of an object of kind `drain`, whose name is the drain's id."""

    name: Label


class DrainFailure(Struct, frozen=True, kw_only=True):
    """An instance that cannot move now."""

    instance_uuid: Uuid
    code: str
    reason: str


class DrainProgress(DrainTerms, frozen=True, kw_only=True):
    """The progress of a drain: what it has moved by the requests on record, and what its hosts hold now."""

    id: Uuid
    host: str  # the target's name
    planned: Count  # the sum of `counts`
    counts: dict[str, int]  # {state of an instance: how many}; of a single drain also those that wait and have failed
    # moved, failed, under_way, not_started: the instances, of a single drain only; at most MAX_PLANNED of each
    moved: tuple[Uuid, ...] = ()
    failed: tuple[DrainFailure, ...] = ()
    under_way: tuple[Uuid, ...] = ()
    not_started: tuple[Uuid, ...] = ()
    more: bool = False  # there are, or may be, further instances


class DrainResult(Message, frozen=True, kw_only=True, tag="drain.result.v1"):
    """Reply to a DrainStart or a DrainCommand that is on record."""

    drain: DrainProgress


class DrainsQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="drains.query.v1"):
    """Ask a scheduler for one drain with its instances, or for all of them, newest first, without."""

    drain: Uuid | None = None
    limit: Annotated[int, Bound(ge=1, le=1000)] = 100


class DrainsPage(Message, frozen=True, kw_only=True, tag="drains.page.v1"):
    """Reply to a DrainsQuery. Empty when the drain is unknown."""

    drains: tuple[DrainProgress, ...] = ()

"""Drains: many hosts emptied as one, by the schedulers, with the state of each instance.

A drain is an object of kind `drain` (bus.contracts.objects). Its hosts are those whose decisions carry its id, so a
later decision about one of them takes that host out of the drain.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from .base import Count, Label, Message, Reason, Uuid, Word
from .moves import ActionKind

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
    """Ask a scheduler how hosts could be drained now: each active instance on them, and where it would go."""

    host: Label  # the target's name or uuid
    cell: Word | None = None  # where names of hosts and services are looked for
    kind: ActionKind = ActionKind.LIVE_MIGRATE  # by which move. Nothing is begun, and nothing is held for the plan.
    limit: Annotated[int, Bound(ge=1, le=MAX_PLANNED)] = MAX_PLANNED
    target: DrainTarget | None = None  # None: the one kind that has something of this name


class PlannedMove(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instance to be moved."""

    instance_uuid: Uuid
    project_id: str
    flavor: str
    hosts: tuple[str, ...] = ()  # where it would go, the first first; without any: why not
    code: str = ""
    reason: Reason = ""
    source: str = ""  # its host


class DrainPlan(Message, frozen=True, kw_only=True, tag="hosts.drain.plan.v1"):
    """Reply to a DrainQuery: at most `limit` instances, in the order in which they are moved."""

    host: Label  # the target's name
    host_uuid: Uuid | None = None  # of a single host
    target: DrainTarget = DrainTarget.HOST
    # how many are drained. Each instance is moved once, to a host that is not drained, so that as many moves as there
    # are instances are the fewest that do it.
    hosts: Count = 1
    moves: tuple[PlannedMove, ...] = ()
    more: bool = False  # there are others


class DrainStart(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="drain.start.v1"):
    """Disable hosts and move every instance away from them. Idempotent by `drain`, which the client chooses.

    Refused with `drain.stuck`, and then nothing is begun, when an instance cannot move;
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
    deadline_s: DeadlineS | None = None  # after this long it begins nothing more, and ends with the moves under way
    force: bool = False  # what can move is moved
    reason: Reason = "drain"


class DrainCommand(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="drain.command.v1"):
    """Pause, resume or stop a drain. Idempotent by the message's id, and by its content."""

    drain: Uuid
    action: DrainAction
    by: Label
    reason: Reason = ""
    # of a resumed one, from now on; without it a resumed drain that had one has none
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
    code: str = ""
    started_at: float = 0.0
    deadline_at: float | None = None
    hosts: Count = 0


class DrainRecord(DrainTerms, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A drain as it is on record: the body of an object of kind `drain`, whose name is the drain's id.

    started_at, deadline_at: seconds since the epoch. code: why it has ended (`drain.done`, `drain.deadline`,
    `drain.stopped`). hosts: how many it has disabled.
    """

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
    # their sum. Where one drain was asked for also what waits and what has failed, and which these are: moved, failed,
    # under_way, not_begun; at most MAX_PLANNED of each.
    planned: Count
    counts: dict[str, int]  # {state of an instance: how many}
    moved: tuple[Uuid, ...] = ()
    failed: tuple[DrainFailure, ...] = ()
    under_way: tuple[Uuid, ...] = ()
    not_begun: tuple[Uuid, ...] = ()
    more: bool = False  # there are, or may be, further ones


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

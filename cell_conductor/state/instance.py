"""The record of one instance in its cell, and what is read from it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

from bus.contracts.actions import ActionKind, ActionState, CellTransfer
from bus.contracts.base import MAX_ATTEMPT, Refusal
from bus.contracts.build import AttemptRecord
from bus.contracts.cell import InstanceSpec, Selection
from bus.contracts.placement import ClaimOutcome, ServerGroup
from bus.contracts.stages import StageTimes
from cell_conductor.state.events import ClaimRefused


class State(StrEnum):
    """The state of an instance. With its next state it determines what is allocated for it
    (docs/reference/states.md).
    """

    ABSENT = "absent"  # no record
    TOMBSTONE = "tombstone"  # deleted before its build arrived
    BUILDING = "building"  # a host was commanded to build the current attempt
    # Three answers are waited for, and the record names the state that it comes to by them (`Instance.next_state`).
    CLAIMING = "claiming"  # placement is requested to claim a host, or to change whose a claim is
    RELEASING = "releasing"  # placement is requested to release what is held
    DESTROYING = "destroying"  # a host was commanded to destroy a machine; what it takes is held until it has
    ACTIVE = "active"
    FAILED = "failed"
    DELETED = "deleted"
    # An action: two machines, of which at most one runs. `ActionInProgress` names them.
    PREPARING = "preparing"  # the destination checks whether it can build the instance
    HANDING_OVER = "handing_over"  # the source was commanded to stop and hand over
    FINISHING = "finishing"  # the destination was commanded to build and start; the source is stopped
    RESIZING = "resizing"  # its host was commanded to change the machine's size in place
    RESIZED = "resized"  # the destination runs; confirm or revert is awaited, and the migration holds the source
    REVERTING = "reverting"  # the destination is gone; the revert is requested of placement
    RESTARTING = "restarting"  # reverted; the source was commanded to be as it was, or to start
    # One machine.
    CHANGING = "changing"  # the host was commanded to start, stop, rebuild or snapshot it
    OFFLOADED = "offloaded"  # it has no host and holds nothing; its image is kept
    # another cell has it, and this record names that cell; next state `absent`: the build there has ended
    TRANSFERRED = "transferred"


# A state, and the one that follows when the answer has come which it waits for (None: it waits for none of those).
Phase: TypeAlias = tuple[State, State | None]


class Power(StrEnum):
    """Whether an instance is meant to run."""

    RUNNING = "running"
    STOPPED = "stopped"
    SHELVED = "shelved"  # stopped, and its image is kept
    RESCUED = "rescued"  # its rescue system runs, and not its own


# The events of one instance are numbered from here; the numbers below belong to the scheduler.
FIRST_SEQUENCE = 10

# Why a build is refused: it has a machine already that is not proved to be its project's; an operator decides about it.
MACHINE_EXISTS = "build.machine_exists"
FENCED = "host.fenced"  # the code of what ended because its host was fenced
PROTECTED = (
    "host.machine_protected"  # the code of a host that was passed over, as an operator keeps a machine of the instance
)
# Of an alternate, or a first host, whose service was down when its turn came.
NOT_COMMANDED = "not_commanded"

# This many ended requests of one instance are kept: a copy of one is answered as the first was.
MAX_ENDED = 16
# Of actions that are over: as many attempts as two of them can have.
MAX_ENDED_ATTEMPTS = 32


class BlockedReason(StrEnum):
    """Why nothing is started with an instance."""

    SCHEDULERS_SILENT = "schedulers_silent"  # no scheduler has answered: nothing is released or ended
    BUSY = "busy"  # a machine is being changed or destroyed
    HOST_ABSENT = "host_absent"  # a host that may have its machine has not listed
    INCOMPLETE = "incomplete"  # a machine is destroyed unless it is complete: the answer is awaited
    CONFLICT = "conflict"  # two decisions contradict each other


class EndedAction(Struct, frozen=True, omit_defaults=True):
    """A request that has ended, with its result."""

    request_id: str
    kind: ActionKind
    state: ActionState
    code: str = ""
    reason: str = ""


class ActionInProgress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The request under way, and the state of the instance when it began."""

    request_id: str  # also the migration's uuid in placement
    kind: ActionKind
    source: Selection | None = None  # the selection of its machine at that time (None: it was offloaded)
    source_attempt: int = 0  # the attempt of that machine
    allocation_attempt: int = 0  # the attempt under which placement had the source
    spec: InstanceSpec  # spec of the instance when the action began
    power: Power = Power.RUNNING  # power of the instance when the action began
    image: str = ""  # image of the instance when the action began
    auto_confirm_s: float | None = None
    step_timeout_s: float = 300.0
    offload: bool = False
    soft: bool = False
    rescue_password: str = ""
    change_number: int = 0  # number of the change that was last commanded and is awaited
    handed_over: bool = False  # the source was commanded to hand over, so a rollback starts it
    finishing: bool = False  # the current destination was commanded to build
    refreshed: bool = False  # the source's newer generation in placement was taken over
    restoring_size: bool = False  # a resize in place failed; its host restores the old size
    rollback_code: str = ""  # why the move is being rolled back ("": it is not)
    rollback_reason: str = ""  # sentence to that code
    # Of an instance that has come home: why no host of the other cell has taken it, which is its end.
    failure: Refusal | None = None
    answered: bool = False  # the request has had its terminal event
    ending_request_id: str = ""  # the request that ends this one (confirm, revert, abort), answered at its end
    ending_kind: ActionKind | None = None  # kind of that request
    history: tuple[AttemptRecord, ...] = ()  # the hosts tried
    started_at: float = 0.0
    claimed: bool = False  # the migration holds the source in placement
    delete: bool = False  # the instance was deleted while a request to placement was under way
    source_destroyed: bool = False  # while the instance is deleted or released: its source is destroyed
    current_destroyed: bool = False  # while it is deleted or released: its current machine is destroyed
    instance_released: bool = False  # while it is deleted or released: placement holds nothing for it
    to_cell: str | None = None  # the cell that it leaves for once it holds nothing here (None: it rests offloaded)
    fenced: bool = False  # of an evacuation, as in the request
    force: bool = False  # of an evacuation, as in the request
    fenced_hosts: tuple[str, ...] = ()  # of an evacuation, as in the request


class Instance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of one instance in its cell."""

    uuid: str
    state: State = State.ABSENT
    next_state: State | None = None  # the state that follows claiming, releasing or destroying
    spec: InstanceSpec | None = None
    selections: tuple[Selection, ...] = ()
    selection_index: int = 0  # the selection of the current attempt
    attempt: int = 0  # the attempt last commanded, or claimed; a fencing number
    consumer_generation: int | None = None  # of the consumer in placement, as last received
    sequence: int = FIRST_SEQUENCE  # number of the next event
    # Number of the last event of its build (0: none); events of actions are numbered on from it.
    build_sequence: int = 0
    build_timeout_s: float = 0.0
    requested_at: float = 0.0
    deadline: float | None = None  # when the sweep looks at it again (None: never)
    since: float = 0.0  # when the current state was entered
    answered: bool = False  # the build request got its terminal event
    queried: bool = False  # the attempt's deadline has passed, and its host was queried
    code: str = ""
    reason: str = ""
    history: tuple[AttemptRecord, ...] = ()
    cause: str = ""  # the last request about it
    stage_times: StageTimes | None = None  # when each stage of the build ended, until it is answered
    server_group: ServerGroup | None = None  # the group whose rule its alternates obey
    limits: dict[str, int] = {}  # its project's quota, which its alternates obey
    # The highest attempt number ever given out, if that is not `attempt`: a move that was rolled back has used numbers
    # under which nothing runs.
    highest_attempt: int = 0
    power: Power = Power.RUNNING  # whether it is meant to run
    image: str = ""  # of a shelved one: its snapshot
    change_number: int = 0  # the highest number given to a change of its machine
    action: ActionInProgress | None = None  # the request under way
    ended: tuple[EndedAction, ...] = ()  # requests that have ended, the newest last
    traceparent: str = ""  # trace of the last request about it, for steps of a deadline ("": not sampled)
    transfer: CellTransfer | None = None  # the record with which it left for another cell
    transferred_by: str = ""  # the request by which it left
    ended_attempts: tuple[int, ...] = ()  # the attempts whose machines its actions have ended, the newest last
    blocked_reason: str = ""  # why nothing is started since a recovery ("": it is not blocked); a BlockedReason
    # The first attempt number of the incarnation in which it was blocked; a lower one proves only what the record
    # names.
    proves_from: int = 0

    @property
    def phase(self) -> Phase:
        """Its state, and what follows."""
        return self.state, self.next_state

    @property
    def last_attempt(self) -> int:
        """The highest attempt number that was ever given out."""
        return max(self.attempt, self.highest_attempt)

    @property
    def next_attempt(self) -> int:
        """The number of the next attempt. Placement may have been restated up to the incarnation's first."""
        return min(max(self.last_attempt + 1, self.proves_from), MAX_ATTEMPT)

    @property
    def is_in_place(self) -> bool:
        """Whether the destination of the move is the source's own host: then there is one machine."""
        source = self.action.source if self.action is not None else None
        return source is not None and self.selection_index > 0 and self.current.host_uuid == source.host_uuid

    @property
    def separate_source(self) -> Selection | None:
        """The move's source, if that is not on the current host."""
        source = self.action.source if self.action is not None and self.selection_index > 0 else None
        return source if source is not None and self.current.host_uuid != source.host_uuid else None

    @property
    def source_host_uuid(self) -> str | None:
        """The host of the move's source, if that is not the current host."""
        source = self.separate_source
        return None if source is None else source.host_uuid

    @property
    def source_service(self) -> str:
        """The compute service of the host of the move's source ("": there is none)."""
        source = self.action.source if self.action is not None else None
        return "" if source is None else source.service

    @property
    def source_attempt(self) -> int:
        """The attempt that the move's source carries."""
        return self.action.source_attempt if self.action is not None else 0

    @property
    def current(self) -> Selection:
        """The selection of the current attempt."""
        return self.selections[self.selection_index]

    @property
    def service(self) -> str:
        """The compute service of the current host ("": there is none)."""
        return self.current.service if self.selections else ""

    @property
    def host_uuid(self) -> str | None:
        """The host of the current attempt, once there was one."""
        return self.selections[self.selection_index].host_uuid if self.selections else None

    @property
    def current_and_alternates(self) -> tuple[Selection, ...]:
        """The selection of the current attempt, and those not tried yet."""
        return self.selections[self.selection_index :]

    @property
    def alternates(self) -> tuple[Selection, ...]:
        """The selections not tried yet, in order."""
        return self.selections[self.selection_index + 1 :]


class InstanceSummary(Struct, frozen=True):
    """The part of an instance that its comparison with a host's report needs. Fields without a comment: as Instance has
    them.
    """

    uuid: str
    state: State
    host_uuid: str | None
    service: str
    attempt: int
    since: float
    highest_attempt: int = 0
    source_host_uuid: str | None = None  # host of a move's source
    source_service: str = ""  # service of a move's source
    source_attempt: int = 0  # attempt of a move's source
    code: str = ""  # only of an instance that has failed or is to be deleted
    protected_hosts: Sequence[str] = ()  # the hosts where an operator keeps a machine of it
    next_state: State | None = None
    blocked_reason: str = ""
    proves_from: int = 0

    @property
    def phase(self) -> Phase:
        """Its state, and what follows."""
        return self.state, self.next_state

    @property
    def last_attempt(self) -> int:
        """The highest attempt number that was ever given out."""
        return max(self.attempt, self.highest_attempt)


def unreadable_summary(uuid: str, protected: Sequence[str]) -> InstanceSummary:
    """Of an instance whose record cannot be read: it expects no machine, explains none, and none is over by it."""
    return InstanceSummary(uuid, State.ABSENT, None, "", 0, 0.0, protected_hosts=protected)


NO_HOST = "max_retries_exceeded"
OVER_QUOTA = "quota.exceeded"


def claim_failure_reason(event: ClaimRefused, tries: str) -> tuple[str, str]:
    """Code and reason of a request that ends as no further host could be claimed. tries: how each host's try ended."""
    # A project's limit is the same on every host: where it was met, it is the reason.
    if ClaimOutcome.OVER_QUOTA in event.outcomes:
        return OVER_QUOTA, event.reason or "the project may not hold so much"
    return NO_HOST, tries


def summary_of_attempts(instance: Instance) -> str:
    """One sentence for people: the tries, and how each ended."""
    tries = "; ".join(
        ", ".join(filter(None, (f"{record.host}: {record.outcome}", record.code, record.reason)))
        for record in instance.history
    )
    passed = sum(record.outcome == NOT_COMMANDED for record in instance.history)
    hosts = {selection.host for selection in instance.selections} | {record.host for record in instance.history}
    return f"{len(instance.history) - passed} of {len(hosts)} hosts tried, none is left. {tries}"


def action_of(instance: Instance) -> ActionInProgress:
    """The action that is under way."""
    assert instance.action is not None, instance
    return instance.action

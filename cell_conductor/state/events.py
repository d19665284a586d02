"""The events of an instance. Each has its time (`at`, seconds since the epoch)."""

from __future__ import annotations

from msgspec import Struct

from bus.contracts.actions import ActionKind, CellAction
from bus.contracts.base import Allocations, Refusal
from bus.contracts.cell import InstanceSpec, Selection
from bus.contracts.placement import ClaimOutcome, ServerGroup
from bus.contracts.stages import StageTimes


class Event(Struct, frozen=True, kw_only=True):
    """Base."""

    at: float  # when the conductor received it


class BuildRequested(Event, frozen=True, kw_only=True):
    """The scheduler hands over a build whose first selection is claimed under `attempt`, as in CellBuild."""

    spec: InstanceSpec
    selections: tuple[Selection, ...]
    consumer_generation: int | None
    build_timeout_s: float
    requested_at: float = 0.0
    cause: str = ""
    stage_times: StageTimes | None = None
    server_group: ServerGroup | None = None
    limits: dict[str, int] = {}
    dead_letter_reason: Refusal | None = None  # why its retries are exhausted, or about to be (None: they are not)
    attempt: int = 1
    is_query: bool = False  # nothing is begun: the scheduler queries the build's state
    sequence: int = 0  # number of its newest event, as the scheduler that queries knows it


class DeleteRequested(Event, frozen=True, kw_only=True):
    """The instance is to be deleted."""

    cause: str = ""
    project_id: str = ""
    may_have_started: bool = False  # as in CellDelete
    attempt: int = 0  # as in CellDelete


class Spawned(Event, frozen=True, kw_only=True):
    """A host reports that an attempt runs."""

    attempt: int
    host_uuid: str
    service: str
    warning: str = ""  # the driver's warning, for the timeline
    started_at: float = 0.0  # by the host's clock (0: not known)
    ended_at: float = 0.0  # by the host's clock (0: not known)


class SpawnFailed(Event, frozen=True, kw_only=True):
    """A host reports that an attempt failed."""

    attempt: int
    host_uuid: str
    service: str = ""
    code: str = ""
    reason: str = ""
    final: bool = False  # no other host would do better
    started_at: float = 0.0  # as in Spawned
    ended_at: float = 0.0  # as in Spawned


class TimedOut(Event, frozen=True, kw_only=True):
    """The instance's deadline has passed."""


class Answer(Event, frozen=True, kw_only=True):
    """Placement's answer to a request."""

    consumer: str = ""  # whom the request was about ("": the instance)
    attempt: int = 0  # the attempt that the request was for (0: none)


class Claimed(Answer, frozen=True, kw_only=True):
    """Placement claimed an alternate for `attempt`."""

    option: int
    consumer_generation: int | None
    outcomes: tuple[ClaimOutcome, ...] = ()  # of the options up to and including the claimed one


class ClaimRefused(Answer, frozen=True, kw_only=True):
    """Placement claimed nothing for `attempt`, and holds no allocation of the instance any more."""

    consumer_conflict: bool = False  # another client owns the consumer now; this build must stop
    consumer_generation: int | None = None  # of the consumer, as placement has it now (None: it holds nothing)
    allocations: Allocations = {}  # what the consumer holds now
    outcomes: tuple[ClaimOutcome, ...] = ()
    reason: str = ""


class Destroyed(Event, frozen=True, kw_only=True):
    """A host reports that no attempt up to this one runs or will run there."""

    attempt: int
    host_uuid: str
    service: str  # the service that answers for the host


class Released(Answer, frozen=True, kw_only=True):
    """Placement holds nothing for this consumer any more, up to this attempt: the instance, or the migration of its
    move, which has no attempts.
    """


class Reverted(Answer, frozen=True, kw_only=True):
    """Placement has given the instance its source again."""

    consumer_generation: int | None = None  # None: another client holds the consumer


class RevertRefused(Answer, frozen=True, kw_only=True):
    """Placement cannot give the instance its source again, and has changed nothing."""

    outcome: str  # the reason, as of a claim
    reason: str = ""


class ActionRequested(Event, frozen=True, kw_only=True):
    """A request about the instance."""

    request: CellAction
    cause: str = ""
    dead_letter_reason: Refusal | None = None
    is_query: bool = False


class ActionQueried(ActionRequested, frozen=True, kw_only=True):
    """A request of which nothing is to be begun: the scheduler queries its state, or its message was given up for the
    reason `dead_letter_reason`, as of a BuildRequested.
    """


class InstanceTransferredIn(ActionRequested, frozen=True, kw_only=True):
    """The instance comes from another cell, with a request, or with one that is not begun, as of an ActionQueried."""


class TransferRequested(ActionRequested, frozen=True, kw_only=True):
    """The instance is to leave for another cell by the request."""

    attempt: int  # the instance's newest attempt, as its schedulers know it


class TransferEnded(Event, frozen=True, kw_only=True):
    """The build in the cell that the instance has left for has ended."""

    attempt: int  # the last attempt of this cell
    request_id: str  # the request by which the instance has left
    kind: ActionKind  # kind of that request
    to_cell: str  # the cell that the instance has left for


def action_event(
    request: CellAction, at: float, cause: str, *, dead_letter_reason: Refusal | None = None, is_query: bool = False
) -> ActionRequested:
    """The event of a command to the cell, or of a query about one."""
    is_started = dead_letter_reason is None and not is_query
    kind = ActionRequested if is_started else ActionQueried
    if request.transfer is not None:
        kind = InstanceTransferredIn
    return kind(at=at, request=request, cause=cause, dead_letter_reason=dead_letter_reason, is_query=is_query)


class ChangeEnded(Event, frozen=True, kw_only=True):
    """A host reports how a change of a machine ended."""

    attempt: int
    change_number: int
    host_uuid: str
    service: str
    done: bool
    runs: bool | None = None  # whether it runs now (None: not known)
    image: str = ""
    code: str = ""
    reason: str = ""
    refused: bool = False  # the check before a hand-over refused it; nothing was started
    retry_other_host: bool = False  # a hand-over to another host may pass


class MachineRunning(Event, frozen=True, kw_only=True):
    """A host's report lists this instance, with the tag of this database."""

    attempt: int
    host_uuid: str
    service: str
    built: bool = True  # the machine is certainly complete
    rescans: tuple[str, ...] = ()  # the rescans after whose request the scan that found it began


class MachineMissing(Event, frozen=True, kw_only=True):
    """A host's report does not list an instance that should be there."""

    host_uuid: str
    service: str  # the service that reports it
    rescans: tuple[str, ...] = ()  # the rescans after whose request the scan that missed it began


class ServiceLost(Event, frozen=True, kw_only=True):
    """A compute service is silent, or was stopped and did not come back. It proves nothing about its machines."""

    service: str
    code: str  # silent or stopped (see `lease`)
    reason: str = ""


class MachineDecided(Event, frozen=True, kw_only=True):
    """An operator has decided that a machine in quarantine is the instance's."""


class SourceQuery(Struct, frozen=True):
    """The query for the source of a move, before the move is rolled back."""

    host_uuid: str
    service: str  # the service that manages the host, by the record
    attempt: int
    change_number: int  # number of this query in the record; a later query has a higher one


class SourceAnswered(Event, frozen=True, kw_only=True):
    """The compute services were queried for the machine of a move's source."""

    query: SourceQuery  # what was asked
    service: str = ""  # the service that lists the machine on its host
    code: str = ""  # why the source counts as not being there ("": it is)
    reason: str = ""


class HostFenced(Event, frozen=True, kw_only=True):
    """A host is fenced: it is off, and receives its stale machines before it is used again (see `fence`)."""

    host_uuid: str


EVENTS: tuple[type[Event], ...] = (
    BuildRequested,
    DeleteRequested,
    Spawned,
    SpawnFailed,
    TimedOut,
    Claimed,
    ClaimRefused,
    Destroyed,
    Released,
    MachineRunning,
    MachineMissing,
    ServiceLost,
    ActionRequested,
    ActionQueried,
    InstanceTransferredIn,
    TransferRequested,
    TransferEnded,
    ChangeEnded,
    Reverted,
    RevertRefused,
    HostFenced,
    MachineDecided,
    SourceAnswered,
)


class InstanceEvent(Struct, frozen=True):
    """One event for one instance."""

    uuid: str
    event: Event
    message_id: str = ""  # the message that brought the event ("": none did)
    cause: str = ""

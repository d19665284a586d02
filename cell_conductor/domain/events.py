"""The events of an instance. Each has its time (`at`, seconds since the epoch)."""

from __future__ import annotations

from msgspec import Struct

from bus.contracts.base import Allocations, Refusal
from bus.contracts.cell import InstanceSpec, Selection
from bus.contracts.moves import ActionKind, CellAction
from bus.contracts.placement import ClaimOutcome, ServerGroup
from bus.contracts.stages import StageTimes


class Event(Struct, frozen=True, kw_only=True):
    """Base. `at`: when the conductor received it."""

    at: float


class BuildRequested(Event, frozen=True, kw_only=True):
    """The scheduler hands over a build whose first selection is claimed under `attempt`, as in CellBuild.

    dead_letter_reason: why the message's retries are exhausted, or are about to be; None: they are not. is_query:
    nothing is to be begun; the scheduler queries the state of the build, of which its newest event has the number
    `sequence`.
    """

    spec: InstanceSpec
    selections: tuple[Selection, ...]
    consumer_generation: int | None
    build_timeout_s: float
    requested_at: float = 0.0
    cause: str = ""
    stage_times: StageTimes | None = None
    server_group: ServerGroup | None = None
    limits: dict[str, int] = {}
    dead_letter_reason: Refusal | None = None
    attempt: int = 1
    is_query: bool = False
    sequence: int = 0


class DeleteRequested(Event, frozen=True, kw_only=True):
    """The instance is to be deleted. may_have_started, attempt: as in CellDelete."""

    cause: str = ""
    project_id: str = ""
    may_have_started: bool = False
    attempt: int = 0


class Spawned(Event, frozen=True, kw_only=True):
    """A host reports that an attempt runs. started_at, ended_at: by its own clock (0: not known).

    warning: the driver's, for the timeline.
    """

    attempt: int
    host_uuid: str
    service: str
    warning: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0


class SpawnFailed(Event, frozen=True, kw_only=True):
    """A host reports that an attempt failed. `final`: no other host would do better. Times as in Spawned."""

    attempt: int
    host_uuid: str
    service: str = ""
    code: str = ""
    reason: str = ""
    final: bool = False
    started_at: float = 0.0
    ended_at: float = 0.0


class TimedOut(Event, frozen=True, kw_only=True):
    """The instance's deadline has passed."""


class Answer(Event, frozen=True, kw_only=True):
    """Placement's answer to a request, which is named by consumer ("": the instance) and attempt (0: it has none)."""

    consumer: str = ""
    attempt: int = 0


class Claimed(Answer, frozen=True, kw_only=True):
    """Placement claimed an alternate for `attempt`. `outcomes`: the outcomes of the options up to and including it."""

    option: int
    consumer_generation: int | None
    outcomes: tuple[ClaimOutcome, ...] = ()


class ClaimRefused(Answer, frozen=True, kw_only=True):
    """Placement claimed nothing for `attempt`, and holds no allocation of the instance any more.

    consumer_conflict: another client owns the consumer now; this build must stop. consumer_generation, allocations:
    what that consumer is in placement then (None: it holds nothing).
    """

    consumer_conflict: bool = False
    consumer_generation: int | None = None
    allocations: Allocations = {}
    outcomes: tuple[ClaimOutcome, ...] = ()
    reason: str = ""


class Destroyed(Event, frozen=True, kw_only=True):
    """A host reports that no attempt up to this one runs or will run there. service: which answers for the host."""

    attempt: int
    host_uuid: str
    service: str


class Released(Answer, frozen=True, kw_only=True):
    """Placement holds nothing for this consumer any more, up to this attempt: the migration of its move (which has no
    attempts), or the instance.
    """


class Reverted(Answer, frozen=True, kw_only=True):
    """Placement has given the instance its source again. None: another client holds the consumer."""

    consumer_generation: int | None = None


class RevertRefused(Answer, frozen=True, kw_only=True):
    """Placement cannot give the instance its source again, and has changed nothing. outcome: why, as of a claim."""

    outcome: str
    reason: str = ""


class ActionRequested(Event, frozen=True, kw_only=True):
    """A request about the instance."""

    request: CellAction
    cause: str = ""
    dead_letter_reason: Refusal | None = None
    is_query: bool = False


class ActionQueried(ActionRequested, frozen=True, kw_only=True):
    """A request of which nothing is to be may_have_started: the scheduler queries its state, or its message was given
    up, for the reason `dead_letter_reason`, as of a BuildRequested.
    """


class InstanceTransferredIn(ActionRequested, frozen=True, kw_only=True):
    """The instance comes from another cell, with a request, or with one that is not begun, as of a ActionQueried."""


class TransferRequested(ActionRequested, frozen=True, kw_only=True):
    """The instance is to leave for another cell by the request. attempt: its newest one, as its schedulers know it."""

    attempt: int


class TransferEnded(Event, frozen=True, kw_only=True):
    """The build in the cell that the instance has left for has ended. attempt: the last one of this cell. The others:
    of the request by which it has left.
    """

    attempt: int
    request_id: str
    kind: ActionKind
    to_cell: str


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
    """A host reports how a change of a machine ended. runs: whether it runs now (None: not known).

    refused: its check before a hand-over refused it, and nothing was started. retry_other_host: a hand-over to another
    host may pass.
    """

    attempt: int
    change_number: int
    host_uuid: str
    service: str
    done: bool
    runs: bool | None = None
    image: str = ""
    code: str = ""
    reason: str = ""
    refused: bool = False
    retry_other_host: bool = False


class MachineRunning(Event, frozen=True, kw_only=True):
    """A host's report lists this instance, with the tag of this database.

    built: the machine is certainly complete. rescans: those that the scan which found it began after.
    """

    attempt: int
    host_uuid: str
    service: str
    built: bool = True
    rescans: tuple[str, ...] = ()


class MachineMissing(Event, frozen=True, kw_only=True):
    """A host's report does not list an instance that should be there.

    service: whose report. rescans: those that the scan which missed it began after.
    """

    host_uuid: str
    service: str
    rescans: tuple[str, ...] = ()


class ServiceLost(Event, frozen=True, kw_only=True):
    """A compute service is silent, or was stopped and did not come back: the conductor does not wait for its builds.

    code, reason: which of the two (see `leases`). It proves nothing about its machines.
    """

    service: str
    code: str
    reason: str = ""


class MachineDecided(Event, frozen=True, kw_only=True):
    """An operator has decided that a machine in quarantine is the instance's."""


class SourceQuery(Struct, frozen=True):
    """The query for the source of a move, before the move is rolled back. change_number: of this query in the record; a
    later one has a higher number. service: that manages its host, by the record.
    """

    host_uuid: str
    service: str
    attempt: int
    change_number: int


class SourceAnswered(Event, frozen=True, kw_only=True):
    """The compute services were queried for the machine of a move's source. query: what was asked.

    service: which lists the machine on its host. code, reason: why it counts as not being there ("": it is).
    """

    query: SourceQuery
    service: str = ""
    code: str = ""
    reason: str = ""


class HostFenced(Event, frozen=True, kw_only=True):
    """A host is fenced: it is off, and receives its stale machines before it is used again (see `fences`)."""

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
    """One event for one instance. message_id: of the message that brought it, "" when none did."""

    uuid: str
    event: Event
    message_id: str = ""
    cause: str = ""

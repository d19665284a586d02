"""Messages about an instance after its build: migrations, resizes, rebuilds, shelving and power. A client requests
(`instance.action.v1`); the scheduler chooses hosts where needed and commands the cell (`cell.action.v1`); the conductor
claims, commands machines (`compute.change.v1`, `compute.spawn.v1`) and announces (`instance.event.v1`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import (
    AskedBy,
    Attempt,
    ClassName,
    Count,
    ImageName,
    Label,
    Message,
    Reason,
    Uuid,
    Word,
    matching,
)
from bus.contracts.build import EventOfInstance, ImageProperties, RecordOfInstance
from bus.contracts.cell import AttemptOnHost, InstanceSpec, MachineCommand, Selection
from bus.contracts.deploy import ImageSource
from bus.contracts.placement import MAX_LOCATED_HOSTS, ServerGroup


class ActionKind(StrEnum):
    """A request about an instance."""

    MIGRATE = "migrate"  # stop it, hand it over to another host, start it there; confirm or revert follows
    LIVE_MIGRATE = "live-migrate"  # the same while it runs; over with its end, nothing to confirm
    RESIZE = "resize"  # another flavor, on another host or in place; confirm or revert follows
    CONFIRM = "confirm"  # the source of a migration or resize is given up
    REVERT = "revert"  # the destination is given up
    ABORT = "abort"  # a move that has not reached its destination ends, and the instance stays where it was
    EVACUATE = "evacuate"  # build it again elsewhere (a shelved one: offload it): its host is dead, and has been fenced
    REBUILD = "rebuild"  # another image, on the same host
    SHELVE = "shelve"  # stop it and keep its image; with `offload` its host is given up as well
    OFFLOAD = "offload"  # give up the host of a shelved instance
    UNSHELVE = "unshelve"  # start it again; from its image on a host that is chosen anew where it was offloaded
    START = "start"
    STOP = "stop"
    REBOOT = "reboot"  # off and on again; a stopped instance starts
    RESCUE = "rescue"  # boot it from a rescue system, its own disks beside it
    UNRESCUE = "unrescue"  # boot it from its own disks again


# Kinds whose request names hosts to go to; an instance that is shelved and not offloaded is unshelved without any.
CHOOSES_HOSTS = frozenset(
    {ActionKind.MIGRATE, ActionKind.LIVE_MIGRATE, ActionKind.RESIZE, ActionKind.EVACUATE, ActionKind.UNSHELVE}
)


# Ironic takes no control characters there.
RescuePassword = Annotated[str, matching(r"^[^\x00-\x1f\x7f]*\Z", "a text without control characters", max_length=128)]


class ResizePolicy(StrEnum):
    """Where a resize may end."""

    ANY = "any"
    OTHER_HOST = "other-host"
    SAME_HOST = "same-host"


class RequestOfInstance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which request about which instance a message is about."""

    request_id: Uuid
    instance_uuid: Uuid
    project_id: Word
    kind: ActionKind


class ActionOrder(RequestOfInstance, frozen=True, kw_only=True, omit_defaults=True):
    """What a client's request states and its cell carries out as it is. See `ActionRequest`."""

    # a confirm, revert or abort is meant for this move alone (None: for the one there is)
    migration: Uuid | None = None
    # of a migrate or resize: it is confirmed by itself this long after it has arrived (0: at once; None: it waits for a
    # client)
    auto_confirm_s: Annotated[float, Bound(ge=0, le=30 * 86_400)] | None = None
    offload: bool = False  # of a shelve
    soft: bool = False  # of a reboot: its own system shuts down first; only of a running instance
    # of a rescue: what its rescue system lets a person in with. A secret, and in the cell's record until the rescue has
    # ended.
    rescue_password: RescuePassword = ""
    # of an evacuation: the client states that the host is off, and stays off until it has been notified of its stale
    # machines. Without it the evacuation is refused unless the cell has the operator's fence on record.
    fenced: bool = False
    force: bool = False  # of an evacuation: also of a machine that its fenced host has reported to run since the fence


class ActionRequest(
    Message, ActionOrder, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="instance.action.v1"
):
    """Do one thing with one instance. `request_id` is chosen by the client and makes the request idempotent. It is also
    the uuid of the migration under which placement keeps the source, so it must be no instance's. Ends in one terminal
    `instance.event.v1`.
    """

    user_id: Word = "unknown"
    by: AskedBy = ""  # who asks, as in a build request
    flavor: Label | None = None  # of a resize
    # image, image_properties, image_source: of a rebuild (properties and source None: those that the instance has, if
    # it has that image, else none)
    image: ImageName | None = None
    image_properties: ImageProperties | None = None
    image_source: ImageSource | None = None
    # host, forced, ignore_hosts, max_attempts: of kinds that choose a host, as in a build request
    host: Annotated[str, Bound(max_length=255)] | None = None
    forced: bool = False
    ignore_hosts: Annotated[tuple[str, ...], Bound(max_length=256)] = ()
    max_attempts: Annotated[int, Bound(ge=1, le=9)] | None = None
    policy: ResizePolicy = ResizePolicy.ANY  # of a resize
    timeout_s: Annotated[float, Bound(gt=0, le=86_400)] | None = None  # how long one step on one host may take


class ActionAccepted(Message, frozen=True, kw_only=True, tag="instance.action.accepted.v1"):
    """Reply to an ActionRequest that carried `reply_to`: it is on record and ends in one terminal event."""

    request_id: Uuid
    instance_uuid: Uuid


class ActionState(StrEnum):
    """How far a request has come."""

    ACCEPTED = "accepted"  # by the scheduler
    SCHEDULED = "scheduled"  # its cell was commanded, with hosts where it needs some
    CLAIMING = "claiming"  # the conductor claims a destination
    PREPARING = "preparing"  # the destination checks whether it can
    MIGRATING = "migrating"  # the source hands the machine over
    FINISHING = "finishing"  # the destination starts it
    CHANGING = "changing"  # the machine is changed where it is
    ROLLING_BACK = "rolling-back"  # the move has failed or was given up; the instance goes back to its source
    DONE = "done"
    FAILED = "failed"  # the instance is in its state from before, or `power` is the remaining state
    REFUSED = "refused"  # nothing was begun
    CONFIRMED = "confirmed"  # not terminal: a finished move was confirmed by itself after its time
    SOURCE_DESTROYED = (
        "source-destroyed"  # not terminal: the source of a finished move is destroyed, its allocation released
    )


ENDS_OF_ACTIONS = frozenset({ActionState.DONE, ActionState.FAILED, ActionState.REFUSED})


class Condition(StrEnum):
    """The state of an instance after its build, as its client sees it."""

    ACTIVE = "active"
    STOPPED = "stopped"
    RESIZED = "resized"  # it runs on the destination, and confirm or revert is awaited
    SHELVED = "shelved"
    RESCUED = "rescued"
    OFFLOADED = "offloaded"
    MOVING = "moving"  # a request is under way
    FAILED = "failed"
    DELETED = "deleted"
    UNKNOWN = "unknown"  # its cell has no record of it


class CellTransfer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An instance that its cell has given up for another one, as it has it on record. Nothing is left there."""

    cell: Word  # where it goes
    spec: InstanceSpec  # as it was before the request by which it leaves
    image: ImageName  # its snapshot
    last: Selection  # the host that it had
    attempt: Attempt  # the last one; in the next cell it is built under a later one
    sequence: Annotated[int, Bound(ge=0, le=2**62)] = 0  # of the event that announces this departure
    kind: ActionKind = ActionKind.UNSHELVE  # of the request
    is_stopped: bool = False  # the instance was stopped before
    at: float = 0.0  # when it left, in seconds since the epoch
    # code, reason: why no host of this cell has taken it ("": it was to leave)
    code: Annotated[str, Bound(max_length=255)] = ""
    reason: Reason = ""


class ActionEvent(Message, EventOfInstance, frozen=True, kw_only=True, tag="instance.event.v1"):
    """A request changed state. Published by a conductor on its cell's bus, and by the scheduler on the API bus."""

    request_id: Uuid
    kind: ActionKind | None  # None: that of the request could not be read
    state: ActionState
    # rises with every event of one request, a conductor's with every event of one instance, those of its build
    # included; so a late event is recognised
    sequence: int = 0
    condition: Condition = Condition.MOVING  # the present state of the instance
    flavor: str = ""  # flavor, image, host: the present ones, or those at its destination
    image: ImageName = ""
    snapshot: ImageName = ""  # the image that is kept of a shelved one
    transfer: CellTransfer | None = None  # the instance has left its cell; never on the API bus


class ActionQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="instance.query.v1"):
    """Ask the scheduler for one request, or for a page of them, newest first."""

    request_id: Uuid | None = None
    instance_uuid: Uuid | None = None
    project_id: Word | None = None
    under_way: bool | None = None  # those that have not ended
    limit: Annotated[int, Bound(ge=1, le=1000)] = 100


class ActionRecord(RecordOfInstance, frozen=True, kw_only=True, omit_defaults=True):
    """A request as the scheduler has it on record. The other fields are those of its newest event."""

    request_id: Uuid
    kind: ActionKind
    state: ActionState
    terminal: bool = False


class ActionPage(Message, frozen=True, kw_only=True, tag="instance.page.v1"):
    """Reply to an ActionQuery. Empty when the request is unknown."""

    actions: tuple[ActionRecord, ...] = ()

    @property
    def unplaced(self) -> ActionRecord | None:
        """The newest request, where no host could take it."""
        return next((one for one in self.actions[:1] if one.funnel), None)


MAX_SELECTIONS = 9  # of one request, beside the host that the instance has


class CellAction(Message, ActionOrder, frozen=True, kw_only=True, tag="cell.action.v1"):
    """Do one thing with one instance of this cell. Idempotent by request_id; ends in one terminal ActionEvent. Fields
    without a meaning here are those of ActionRequest.
    """

    # the target state of the instance: of a rebuild its image counts, of a request with hosts its flavor, as chosen for
    # it (None: as it is)
    spec: InstanceSpec | None = None
    # the flavor of the instance on the sender's record, for which hosts and spec were chosen; the cell refuses the
    # request where it has another one ("": not compared)
    expected_flavor: str = ""
    # hosts in order, not claimed: the conductor claims them one after the other, in attempt numbers that it alone
    # knows. The source's own host among them is a resize in place.
    selections: Annotated[tuple[Selection, ...], Bound(max_length=MAX_SELECTIONS)] = ()
    # server_group, limits: what those claims are held to, as for a build
    server_group: ServerGroup | None = None
    limits: Annotated[dict[ClassName, Count], Bound(max_length=64)] = {}
    # as in the Claim of an evacuation
    fenced_hosts: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_LOCATED_HOSTS)] = ()
    # how long one step on one host may take; a change in place that is not answered is given twice as long each time
    step_timeout_s: Annotated[float, Bound(gt=0, le=86_400)] = 300.0
    # its departure from its former cell for this one, which is put on record here; it is built here
    transfer: CellTransfer | None = None
    # the cell that it leaves for where no host takes it (None: it rests offloaded, and its move fails as `transfer`
    # states)
    to_cell: Word | None = None
    # its events are numbered above this: no more than the cell has on record, unless that was restored
    sequence: Annotated[int, Bound(ge=0, le=2**62)] = 0


class CellTransferOut(Message, RequestOfInstance, frozen=True, kw_only=True, tag="cell.transfer.v1"):
    """Have an instance leave its cell for another one: its image is kept, and its host given up. The cell announces the
    departure, and no end of the request.
    """

    to_cell: Word  # where it goes
    attempt: Attempt  # the newest of the instance; a cell that has another one announces that, and begins nothing
    # expected_flavor, sequence, step_timeout_s: as in a CellAction
    expected_flavor: str = ""
    ended: bool = False  # the build there has ended; the record of the departure need not be kept any longer
    step_timeout_s: Annotated[float, Bound(gt=0, le=86_400)] = 300.0
    sequence: Annotated[int, Bound(ge=0, le=2**62)] = 0


class CellActionQuery(Message, RequestOfInstance, frozen=True, kw_only=True, tag="cell.action.query.v1"):
    """Queries the state of a CellAction that has had no event for a long time; begins nothing. The answer is an
    ActionEvent: how far it has come, or its end once more. A request without a record there ends as failed
    (`action.lost`), also for a later copy.
    """

    transfer: CellTransfer | None = None  # as in a CellAction


class ChangeKind(StrEnum):
    """The change of a machine on its host."""

    CHECK = "check"  # can this host take the machine of `spec` with these allocations? Nothing is changed
    HAND_OVER = "hand-over"  # stop it and make it ready to be taken over by another host
    HAND_OVER_LIVE = "hand-over-live"  # copy it while it runs, and stop it only at the end
    START = "start"  # (again), also where it was stopped to be handed over: every change that was begun is undone
    STOP = "stop"
    # A command that comes again reboots once more.
    REBOOT = "reboot"  # off and on again; it runs, whatever it did before
    REBOOT_SOFT = "reboot-soft"  # the same, and its own system shuts down first
    RESIZE = "resize"  # to `spec` and `allocations`
    REBUILD = "rebuild"  # from the image of `spec`
    SNAPSHOT = "snapshot"  # stop it and keep its image
    RESCUE = "rescue"  # boot its rescue system, with `rescue_password`; it runs
    UNRESCUE = "unrescue"  # boot it from its own disks; it runs


class ChangeMachine(Message, MachineCommand, frozen=True, kw_only=True, tag="compute.change.v1"):
    """Change the machine of one attempt where it is (or, with CHECK, answer whether its host could take it)."""

    change: ChangeKind
    # rises with every change that is requested of one instance. A host carries out none at or below the last it took
    # for that attempt, and does not answer it again.
    change_number: int
    to_host: Uuid | None = None  # of a hand-over
    rescue_password: RescuePassword = ""
    timeout_s: Annotated[float, Bound(gt=0, le=86_400)] = 300.0


# The code of a change whose machine is not on its host: nothing could be changed, or changed back.
MACHINE_ABSENT = "machine.absent"
# The code of a change that the driver does not have: nothing was begun, and another time would bring the same.
UNSUPPORTED = "change.unsupported"
# The code of what could be done in another cell only, and may not be.
ACROSS_CELLS = "action.across_cells"
# The code of a departure that was commanded for another attempt than the newest of the instance.
OTHER_ATTEMPT = "action.other_attempt"
# The code of a rescue that was begun and has failed: its own system may not run either, and unrescuing is the way back.
RESCUE_FAILED = "rescue.failed"


class MachineChanged(Message, AttemptOnHost, frozen=True, kw_only=True, tag="compute.changed.v1"):
    """How a change ended. May come late, twice, or never."""

    change_number: int
    change: ChangeKind
    # it is as requested. False: code and reason state why, and the machine is as it was before, except for `runs`.
    done: bool
    runs: bool | None = None  # whether it runs now (None: not known)
    image: ImageName = ""  # of a snapshot
    code: str = ""
    reason: Reason = ""
    refused: bool = False  # the host's check before a hand-over refused it, and nothing was begun
    retry_other_host: bool = False  # with `refused`: a hand-over to another host may pass that check

"""The records of requests about instances, and the changes to them by the decision. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.actions import (
    ActionEvent,
    ActionKind,
    ActionRequest,
    ActionState,
    CellAction,
    CellTransferOut,
    Condition,
)
from bus.contracts.build import BuildEvent, BuildRequest, FunnelStep
from bus.contracts.cell import Selection
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.records.build_record import Actor, RecordedBuild, SinceBuild, present_flavor
from scheduler_worker.records.request_record import RecordedRequest, is_newer

# (its id, its instance). The id alone names no request: a client may give it to two, about two instances.
RequestKey: TypeAlias = tuple[str, str]


class Transfer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A move into another cell, which this record leads (decision 0021)."""

    # home, away: the cell that it begins in, and the other one
    home: str
    away: str
    build: CellAction  # what the other cell is commanded for
    command: CellTransferOut | CellAction  # what the cell of the move does now
    home_hosts: tuple[Selection, ...] = ()  # the host that the instance had at home


class RecordedAction(RecordedRequest, frozen=True, kw_only=True):
    """The record of one request."""

    request_id: str
    kind: ActionKind
    state: ActionState
    funnel: tuple[FunnelStep, ...] = ()
    created_at: float = 0.0  # seconds since the epoch
    # of one that leads into another cell (None: of every other one, and once it has ended)
    transfer: Transfer | None = None
    drain: str | None = None  # of one that a scheduler made to empty a host (None: a client's)


class ActionContext(Struct, frozen=True, kw_only=True):
    """The records that a request concerns."""

    action: RecordedAction | None = None
    build: RecordedBuild | None = None
    build_request: BuildRequest | None = None  # as it was built
    names_instance: bool = False  # the request_id is the uuid of an instance

    @property
    def current(self) -> SinceBuild:
        """The instance's present state."""
        assert self.build is not None
        return self.build.current

    def action_of(self, instance_uuid: str) -> RecordedAction | None:
        """The request, if it is about this instance."""
        return about(self.action, instance_uuid)


def about(action: RecordedAction | None, instance_uuid: str) -> RecordedAction | None:
    """A request that was found by its id, if it is about this instance: a client may have given its id to another."""
    return action if action is not None and action.instance_uuid == instance_uuid else None


def flavor_of(known: ActionContext) -> str:
    """The flavor that the instance has now."""
    assert known.build_request is not None
    return present_flavor(known.build_request.flavor, known.current)


def image_of(known: ActionContext) -> str:
    """The image that the instance has now."""
    assert known.build_request is not None
    return known.current.image or known.build_request.image


def image_properties_of(known: ActionContext) -> Mapping[str, str]:
    """The properties of the image that the instance has now."""
    assert known.build_request is not None
    return known.current.image_properties.get(image_of(known), known.build_request.image_properties)


class WrittenActions(Struct):
    """The rows that one transaction has written of a batch so far, by their ids."""

    actor: Actor
    actions: dict[str, RecordedAction] = {}
    builds: dict[str, RecordedBuild] = {}
    labels: list[str] = []  # for the metrics

    def with_written(self, found: ActionContext, request: ActionRequest) -> ActionContext:
        """The records for a request, as the earlier requests of the batch leave them."""
        action, build = self.actions.get(request.request_id), self.builds.get(request.instance_uuid)
        return replace(found, action=action or found.action, build=build or found.build)


def event_of(action: RecordedAction, known: ActionContext, at: float) -> ActionEvent:
    """The scheduler's event about its decision on a request."""
    is_of_project = known.build is not None and known.build.project_id == action.project_id
    return ActionEvent(
        request_id=action.request_id,
        instance_uuid=action.instance_uuid,
        project_id=action.project_id,
        kind=action.kind,
        state=action.state,
        sequence=action.sequence,
        terminal=action.terminal,
        condition=(known.current.condition if action.terminal else Condition.MOVING)
        if is_of_project
        else Condition.UNKNOWN,
        cell=action.cell,
        host=action.host,
        flavor=flavor_of(known) if is_of_project and known.build_request is not None else "",
        code=action.code,
        reason=action.reason,
        funnel=action.funnel,
        at=at,
    )


# --- what cells report

# A resize may still give the instance its new flavor, or its old one again.
_MAY_CHANGE_FLAVOR = (Condition.MOVING, Condition.RESIZED, Condition.UNKNOWN)


def apply_instance_event(
    build: RecordedBuild, event: ActionEvent, cell: str | None, *, has_ended: bool
) -> RecordedBuild:
    """The instance as a cell reports it with a request, on record or not: what it is, its own cell alone says.
    has_ended: the end of the request is known.
    """
    instance, host, host_uuid = build.current, event.host, event.host_uuid
    is_newest = build.cell == cell and is_newer(event, build.sequence)
    is_awaited = instance.under_way == event.request_id
    if is_newest or (event.terminal and is_awaited and instance.condition is Condition.MOVING):
        # A cell whose database was restored numbers from lower numbers again; its event ends the request under way.
        instance = replace(instance, condition=event.condition)
    if is_newest and build.host is None and event.state is ActionState.FINISHING:  # it holds that one by now
        build = replace(build, host=host, host_uuid=host_uuid)
    # Before the end, host and cell are the destination's. An event after the end (source gone, undone by itself) names
    # the reason itself.
    names_what_it_is = event.terminal or (has_ended and event.condition is not Condition.MOVING)
    if names_what_it_is and (is_newest or (event.terminal and is_awaited)):
        if event.condition is Condition.OFFLOADED:
            build = replace(build, host=None, host_uuid=None)
        elif host:
            build = replace(build, host=host, host_uuid=host_uuid)
        instance = replace(
            instance,
            flavor=event.flavor or instance.flavor,
            image=event.image or instance.image,
            snapshot=event.snapshot,
        )
    if event.terminal and is_awaited:
        instance = replace(instance, under_way=None)
    if instance.under_way is None and instance.condition not in _MAY_CHANGE_FLAVOR:
        instance = replace(instance, new_flavor="", old_flavor="")
    return replace(build, instance=instance, sequence=event.sequence if is_newest else build.sequence)


# The hosts of a cell that fit an instance now, of the request that has taken it away.
HostsOf: TypeAlias = Callable[[RequestKey, str], Sequence[Selection]]


def no_hosts(_about: RequestKey, _cell: str) -> Sequence[Selection]:
    """Where no schedulers choose."""
    return ()


def begin_transfer(
    action: RecordedAction, command: CellAction, cell: str, build: RecordedBuild
) -> tuple[RecordedAction, CellTransferOut]:
    """The record of a move into this cell, and what the instance's own one is told first. command: for this one."""
    assert build.cell is not None
    leaving = CellTransferOut(
        request_id=command.request_id,
        instance_uuid=command.instance_uuid,
        project_id=command.project_id,
        kind=command.kind,
        to_cell=cell,
        attempt=build.attempt,
        expected_flavor=command.expected_flavor,
        step_timeout_s=command.step_timeout_s,
        sequence=command.sequence,
    )
    there = replace(command, to_cell=build.cell)
    return replace(action, transfer=Transfer(home=build.cell, away=cell, build=there, command=leaving)), leaving


def is_transferred_in(action: RecordedAction) -> bool:
    """Whether its cell is to build the instance, which the other one has given up."""
    return action.transfer is not None and isinstance(action.transfer.command, CellAction)


def transfer_ended(action: RecordedAction) -> OutboxMessage | None:
    """That the cell which has given the instance up for the one of this move need not keep that on record any more."""
    transfer = action.transfer
    if transfer is None or not isinstance(transfer.command, CellAction) or transfer.command.transfer is None:
        return None
    former = transfer.home if action.cell == transfer.away else transfer.away
    ended = _ended(action.request_id, action, action.kind, action.cell or "", transfer.command.transfer.attempt)
    return OutboxMessage(former, ended, action.request_id)


def given_up(event: BuildEvent | ActionEvent, cell: str, build: RecordedBuild) -> OutboxMessage | None:
    """That a cell which still tells of an instance has handed it to the one that has it now, as its database has
    lost, or as these schedulers' had. None: it has not, by this record; or it goes on as long as the request does
    that is under way.
    """
    if build.cell in (None, cell) or not (event.terminal or build.current.under_way is None):
        return None
    request_id, kind, last = build.instance_uuid, None, build.current.first_attempt - 1
    if isinstance(event, ActionEvent):
        request_id, kind = event.request_id, event.kind
        last = last if event.transfer is None else event.transfer.attempt
    if last < 0:
        return None
    return OutboxMessage(cell, _ended(request_id, build, kind or ActionKind.MIGRATE, build.cell, last), request_id)


def _ended(request_id: str, about: RecordedRequest, kind: ActionKind, to_cell: str, attempt: int) -> CellTransferOut:
    return CellTransferOut(
        request_id=request_id,
        instance_uuid=about.instance_uuid,
        project_id=about.project_id,
        kind=kind,
        to_cell=to_cell,
        attempt=attempt,
        ended=True,
    )

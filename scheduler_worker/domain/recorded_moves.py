"""The records of requests about instances, and the changes to them by the decision; and those of a batch of
events, to builds as well. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent, BuildRequest, BuildState, FunnelStep, TimelineEntry
from bus.contracts.cell import Selection
from bus.contracts.moves import (
    MAX_SELECTIONS,
    OTHER_ATTEMPT,
    ActionEvent,
    ActionKind,
    ActionRequest,
    ActionState,
    CellAction,
    CellActionQuery,
    CellTransfer,
    CellTransferOut,
    Condition,
)
from bus.persistence.outbox import OutboxMessage
from bus.refused_requests import OFF_RECORD
from scheduler_worker.domain.builds import (
    FAILED_OR_REFUSED,
    SCHEDULED,
    Actor,
    RecordedBuild,
    SinceBuild,
    apply_build_event,
    delete_of,
    is_known,
    is_out_of_order,
    present_flavor,
)
from scheduler_worker.domain.requests import RecordedRequest, RequestDelivery, digest_of, is_newer, timeline_of

# (its id, its instance). The id alone names no request: a client may give it to two, about two instances.
RequestKey: TypeAlias = tuple[str, str]


class Transfer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A move into another cell, which this record leads (decision 0021)."""

    # home, away: the cell that it begins in, and the other one
    home: str
    away: str
    build: CellAction  # what the other cell is commanded for
    command: CellTransferOut | CellAction  # what the cell of the move does now
    back: tuple[Selection, ...] = ()  # the host that the instance had at home


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


class PendingAction(Struct, frozen=True, kw_only=True):
    """A request that has no outcome yet."""

    batch_index: int  # in its batch
    request: ActionRequest
    taken_at: float
    delivery: RequestDelivery = RequestDelivery()
    drain: str | None = None  # as in RecordedAction

    @property
    def key(self) -> RequestKey:
        """The key of the records that it concerns."""
        return self.request.request_id, self.request.instance_uuid

    @property
    def digest(self) -> bytes:
        """Of its whole content."""
        return digest_of(self.request)


class ActionContext(Struct, frozen=True, kw_only=True):
    """The records that a request concerns."""

    action: RecordedAction | None = None
    build: RecordedBuild | None = None
    build_request: BuildRequest | None = None  # as it was built
    names_instance: bool = False  # the request_id is the uuid of an instance

    @property
    def now(self) -> SinceBuild:
        """The instance's present state."""
        assert self.build is not None
        return self.build.now

    def action_of(self, instance_uuid: str) -> RecordedAction | None:
        """The request, if it is about this instance."""
        return about(self.action, instance_uuid)


def about(action: RecordedAction | None, instance_uuid: str) -> RecordedAction | None:
    """A request that was found by its id, if it is about this instance: a client may have given its id to another."""
    return action if action is not None and action.instance_uuid == instance_uuid else None


def flavor_of(known: ActionContext) -> str:
    """The flavor that the instance has now."""
    assert known.build_request is not None
    return present_flavor(known.build_request.flavor, known.now)


def image_of(known: ActionContext) -> str:
    """The image that the instance has now."""
    assert known.build_request is not None
    return known.now.image or known.build_request.image


def image_properties_of(known: ActionContext) -> Mapping[str, str]:
    """The properties of the image that the instance has now."""
    assert known.build_request is not None
    return known.now.image_properties.get(image_of(known), known.build_request.image_properties)


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


def recorded(pending: PendingAction, state: ActionState, actor: Actor, **more: object) -> RecordedAction:
    """The record of a request that was dispatched, refused, or failed because no host fits."""
    request = pending.request
    ended = state is not ActionState.SCHEDULED
    return RecordedAction(
        request_id=request.request_id,
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        kind=request.kind,
        digest=pending.digest,
        state=state,
        sequence=FAILED_OR_REFUSED if ended else SCHEDULED,
        terminal=ended,
        created_at=actor.at,
        drain=pending.drain,
        **more,  # type: ignore[arg-type]
    )


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
        condition=(known.now.condition if action.terminal else Condition.MOVING)
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

APPLIED, LATE, OUT_OF_ORDER = "applied", "late", "early"


def apply_action_event(
    action: RecordedAction, build: RecordedBuild, event: ActionEvent
) -> tuple[RecordedAction, RecordedBuild, ActionEvent | None]:
    """Apply what its cell reports of a request; returns the request, the instance, and the event to publish (None: it
    is outdated). A cell that was restored to the middle of a request ends it again: that is news of the instance alone.
    """
    instance_after = apply_instance_event(build, event, action.cell, has_ended=action.terminal)
    # An event after the end (source gone, confirmed by itself) may overtake the end on the way here; the end is still
    # applied.
    if (event.terminal and action.terminal) or not is_newer(event, action.sequence, ends=event.terminal):
        return action, instance_after, None
    host_uuid, number = event.host_uuid, event.sequence
    event = replace(event, cell=action.cell, project_id=action.project_id, transfer=None, host_uuid=None)
    if number == OFF_RECORD:  # its cell has no record of the instance, and so no number: clients have had more
        event = replace(event, sequence=action.sequence + 1)
    if not action.terminal:
        # An event after the terminal one (confirmed by itself, source gone) does not reopen the request.
        after = replace(
            action,
            state=event.state,
            sequence=max(event.sequence, action.sequence),
            terminal=event.terminal,
            host=event.host or action.host,
            host_uuid=host_uuid or action.host_uuid,
            code=event.code,
            reason=event.reason,
            history=event.history or action.history,
            transfer=None if event.terminal else action.transfer,
        )
    else:
        after = replace(action, sequence=event.sequence)
    return after, instance_after, event


def apply_instance_event(
    build: RecordedBuild, event: ActionEvent, cell: str | None, *, has_ended: bool
) -> RecordedBuild:
    """The instance as a cell reports it with a request, on record or not: what it is, its own cell alone says.
    has_ended: the end of the request is known.
    """
    instance, host, host_uuid = build.now, event.host, event.host_uuid
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


# --- Requests that end in another cell than they begin in (decision 0021).
#
# The instance's cell is commanded to give it up (`CellDepart`), and reports what it had. With that the other cell is
# commanded to build it, and the map names that one, in one transaction. Where it has no host for it, the instance comes
# home in the same way.


def is_owner(cell: str, departure: CellTransfer, build: RecordedBuild | None) -> bool:
    """Whether a cell has the instance that it gives up: no departure from before it came there counts."""
    return build is not None and build.cell == cell and departure.attempt >= build.now.first_attempt


# The hosts of a cell that fit an instance now, of the request that has taken it away.
HostsOf: TypeAlias = Callable[[RequestKey, str], Sequence[Selection]]


def no_hosts(_about: RequestKey, _cell: str) -> Sequence[Selection]:
    """Where no schedulers choose."""
    return ()


def transferred(
    action: RecordedAction | None, build: RecordedBuild, event: ActionEvent, hosts_of: HostsOf = no_hosts
) -> tuple[RecordedAction | None, RecordedBuild, list[Message]]:
    """The instance has left its cell: the request, the instance, and the commands to the next cell to build it, or to
    delete it. action: as the event leaves it. With no request under way that leads there (a restored database) the next
    cell is only queried.
    """
    assert event.transfer is not None
    sequence = max(event.sequence, build.sequence)
    spec = replace(event.transfer.spec, instance_uuid=build.instance_uuid, project_id=build.project_id)
    departure: CellTransfer = replace(event.transfer, spec=spec, sequence=sequence)
    transfer = None if action is None or action.terminal else action.transfer
    commands: list[Message] = []
    if action is not None and transfer is not None and departure.cell in (transfer.home, transfer.away):
        transfer = _next_of(transfer, departure, hosts_of)
        # The host that it is to have there: a drain of it waits, also while that cell has not answered.
        first = next(iter(transfer.command.selections if isinstance(transfer.command, CellAction) else ()), None)
        host, host_uuid = (None, None) if first is None else (first.host, first.host_uuid)
        action = replace(action, cell=departure.cell, host=host, host_uuid=host_uuid, transfer=transfer)
        commands.append(transfer.command)
    else:
        query = CellActionQuery(
            request_id=event.request_id,
            instance_uuid=build.instance_uuid,
            project_id=build.project_id,
            kind=event.kind or ActionKind.UNSHELVE,
            transfer=departure,
        )
        commands.append(query)
    instance = replace(build.now, first_attempt=departure.attempt + 1)
    there = replace(build, cell=departure.cell, host=None, host_uuid=None, sequence=sequence, instance=instance)
    if build.state is BuildState.DELETING:
        commands.append(delete_of(there, may_have_started=False))
    return action, there, commands


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


def _next_of(transfer: Transfer, departure: CellTransfer, hosts_of: HostsOf) -> Transfer:
    """The transfer when a cell has given the instance up: built in the other one; or at home again, on the host that it
    had there, or on another one that fits by now.
    """
    build = transfer.build
    if departure.cell == transfer.away:
        had_host = departure.kind is not ActionKind.UNSHELVE
        back = (departure.last,) if had_host else ()
        return replace(transfer, command=replace(build, transfer=departure, sequence=departure.sequence), back=back)
    failed = replace(departure, code=departure.code or "max_retries_exceeded")
    hosts = {one.host_uuid: one for one in transfer.back}
    for one in hosts_of((build.request_id, build.instance_uuid), transfer.home):
        hosts.setdefault(one.host_uuid, one)
    selections = tuple(hosts.values())[:MAX_SELECTIONS]
    home = replace(build, spec=None, selections=selections, limits={}, to_cell=None)
    return replace(transfer, command=replace(home, transfer=failed, sequence=departure.sequence))


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
    if build.cell in (None, cell) or not (event.terminal or build.now.under_way is None):
        return None
    request_id, kind, last = build.instance_uuid, None, build.now.first_attempt - 1
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


class AppliedEvent(Struct, frozen=True):
    """What became of one event."""

    outcome: str  # `APPLIED`, or why it is not
    event: BuildEvent | ActionEvent  # as it was published, or as it came
    transferred: str = ""  # the cell that its instance has left for


class CellEventBatch:
    """The records of a batch as its events leave them, one after the other; and what is published of it."""

    def __init__(
        self,
        builds: dict[str, RecordedBuild],
        actions: dict[str, RecordedAction],
        now: float,
        hosts_of: HostsOf = no_hosts,
    ) -> None:
        self._hosts_of = hosts_of
        self.builds = builds
        self.actions = actions
        self._now = now
        self.timelines: dict[str, list[TimelineEntry]] = {}  # the instances to write, with their new entries
        self.changed: dict[str, RecordedAction] = {}  # the moves to write
        self.messages: list[OutboxMessage] = []

    def apply(self, event: BuildEvent | ActionEvent, cell: str, *, waited: bool = False) -> AppliedEvent:
        """Apply one event. A late or unknown event is ignored, and so is another cell's. waited: it no longer waits for
        an earlier one.
        """
        applied = self._apply(event, cell, waited=waited)
        if not isinstance(event, ActionEvent) or event.transfer is None:
            return applied
        build = self.builds.get(event.instance_uuid)
        if build is None or not is_owner(cell, event.transfer, build):
            return replace(applied, outcome=LATE)
        self._transfer(build, event, event.transfer.cell)
        return AppliedEvent(APPLIED, event, event.transfer.cell)

    def _apply(self, event: BuildEvent | ActionEvent, cell: str, *, waited: bool) -> AppliedEvent:
        build, action = self.builds.get(event.instance_uuid), None
        request: RecordedBuild | RecordedAction | None = build
        if isinstance(event, ActionEvent):
            request = action = self._action_of(event)
        if build is None:
            return AppliedEvent("unknown", event)
        if request is None or request.cell != cell:
            self._about_instance(build, event, cell)
            return AppliedEvent("unknown" if request is None else "foreign", event)
        if action is not None and event.code == OTHER_ATTEMPT:
            return self._retransfer(action, event)
        before = action
        published: BuildEvent | ActionEvent | None
        if isinstance(event, ActionEvent):
            assert action is not None
            action, after, published = apply_action_event(action, build, event)
        elif is_out_of_order(build, event) and not waited:
            return AppliedEvent(OUT_OF_ORDER, event)
        else:
            after, published = apply_build_event(build, event)
            if published is not None and published.stage_times is not None:
                published = replace(published, stage_times=replace(published.stage_times, announced=self._now))
        if published is None:
            # The timeline shows what is no news of its request, too. A repeated entry is shown once.
            self._add(after, timeline_of(replace(event, cell=cell), len(event.history), self._now))
            return AppliedEvent(LATE, event)
        is_shown = action is not None or not is_known(build, after)
        self._add(after, timeline_of(published, len(request.history), self._now) if is_shown else ())
        if action is not None:
            self._change(action)
            if action.terminal and before is not None and (ended := transfer_ended(before)) is not None:
                self.messages.append(ended)
        cause = event.instance_uuid if action is None else action.request_id
        self.messages.append(OutboxMessage(API, published, cause))
        return AppliedEvent(APPLIED, published)

    def _about_instance(self, build: RecordedBuild, event: BuildEvent | ActionEvent, cell: str) -> None:
        """What an event says of its instance that is about no request of this cell. No client hears of it."""
        if (ended := given_up(event, cell, build)) is not None:
            self.messages.append(ended)
        elif build.cell == cell and isinstance(event, ActionEvent) and event.condition is not Condition.MOVING:
            # Schedulers that miss commits have lost the request; or the cell was, to the middle of one that has
            # ended in another cell since.
            self._add(apply_instance_event(build, event, cell, has_ended=True), ())

    def _retransfer(self, action: RecordedAction, event: BuildEvent | ActionEvent) -> AppliedEvent:
        """The cell has another attempt than was to depart: it is asked again for that one."""
        transfer = action.transfer
        if action.terminal or transfer is None or not isinstance(transfer.command, CellTransferOut):
            return AppliedEvent(LATE, event)
        command = replace(transfer.command, attempt=event.attempt)
        self._change(replace(action, transfer=replace(transfer, command=command)))
        self.messages.append(OutboxMessage(action.cell or "", command, action.request_id))
        return AppliedEvent(LATE, event)

    def _transfer(self, build: RecordedBuild, event: ActionEvent, to_cell: str) -> None:
        action, after, commands = transferred(self._action_of(event), build, event, self._hosts_of)
        if action is not None:
            self._change(action)
        actor = f"conductor {build.cell}"
        left = TimelineEntry(at=event.at or self._now, actor=actor, what="transferred", detail=to_cell)
        self._add(after, (left,))
        self.messages += [OutboxMessage(to_cell, command, event.request_id) for command in commands]

    def _action_of(self, event: ActionEvent) -> RecordedAction | None:
        return about(self.actions.get(event.request_id), event.instance_uuid)

    def _add(self, build: RecordedBuild, lines: Sequence[TimelineEntry]) -> None:
        self.builds[build.instance_uuid] = build
        self.timelines.setdefault(build.instance_uuid, []).extend(lines)

    def _change(self, action: RecordedAction) -> None:
        self.actions[action.request_id] = self.changed[action.request_id] = action

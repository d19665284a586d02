"""A batch of what cells report: each record as its events leave it, and what is published of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.contracts.actions import (
    MAX_SELECTIONS,
    OTHER_ATTEMPT,
    ActionEvent,
    ActionKind,
    CellAction,
    CellActionQuery,
    CellTransfer,
    CellTransferOut,
    Condition,
)
from bus.contracts.base import Message
from bus.contracts.build import OFF_RECORD, BuildEvent, BuildState, TimelineEntry
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.records.action_record import (
    HostsOf,
    RecordedAction,
    Transfer,
    about,
    apply_instance_event,
    given_up,
    no_hosts,
    transfer_ended,
)
from scheduler_worker.records.build_record import RecordedBuild, apply_build_event, delete_of, is_known, is_out_of_order
from scheduler_worker.records.request_record import is_newer, timeline_of

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


# --- Requests that end in another cell than they begin in (decision 0021).
#
# The instance's cell is commanded to give it up (`CellTransferOut`), and reports what it had. With that the other cell
# is commanded to build it, and the map names that one, in one transaction. Where it has no host for it, the instance
# comes home in the same way.


def is_owner(cell: str, cell_transfer: CellTransfer, build: RecordedBuild | None) -> bool:
    """Whether a cell has the instance that it gives up: no transfer from before it came there counts."""
    return build is not None and build.cell == cell and cell_transfer.attempt >= build.current.first_attempt


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
    cell_transfer: CellTransfer = replace(event.transfer, spec=spec, sequence=sequence)
    transfer = None if action is None or action.terminal else action.transfer
    commands: list[Message] = []
    if action is not None and transfer is not None and cell_transfer.cell in (transfer.home, transfer.away):
        transfer = _next_of(transfer, cell_transfer, hosts_of)
        # The host that it is to have there: a drain of it waits, also while that cell has not answered.
        first = next(iter(transfer.command.selections if isinstance(transfer.command, CellAction) else ()), None)
        host, host_uuid = (None, None) if first is None else (first.host, first.host_uuid)
        action = replace(action, cell=cell_transfer.cell, host=host, host_uuid=host_uuid, transfer=transfer)
        commands.append(transfer.command)
    else:
        query = CellActionQuery(
            request_id=event.request_id,
            instance_uuid=build.instance_uuid,
            project_id=build.project_id,
            kind=event.kind or ActionKind.UNSHELVE,
            transfer=cell_transfer,
        )
        commands.append(query)
    instance = replace(build.current, first_attempt=cell_transfer.attempt + 1)
    there = replace(build, cell=cell_transfer.cell, host=None, host_uuid=None, sequence=sequence, instance=instance)
    if build.state is BuildState.DELETING:
        commands.append(delete_of(there, may_have_started=False))
    return action, there, commands


def _next_of(transfer: Transfer, cell_transfer: CellTransfer, hosts_of: HostsOf) -> Transfer:
    """The transfer when a cell has given the instance up: built in the other one; or at home again, on the host that it
    had there, or on another one that fits by now.
    """
    build = transfer.build
    if cell_transfer.cell == transfer.away:
        had_host = cell_transfer.kind is not ActionKind.UNSHELVE
        home_hosts = (cell_transfer.last,) if had_host else ()
        command = replace(build, transfer=cell_transfer, sequence=cell_transfer.sequence)
        return replace(transfer, command=command, home_hosts=home_hosts)
    failed = replace(cell_transfer, code=cell_transfer.code or "max_retries_exceeded")
    hosts = {one.host_uuid: one for one in transfer.home_hosts}
    for one in hosts_of((build.request_id, build.instance_uuid), transfer.home):
        hosts.setdefault(one.host_uuid, one)
    selections = tuple(hosts.values())[:MAX_SELECTIONS]
    home = replace(build, spec=None, selections=selections, limits={}, to_cell=None)
    return replace(transfer, command=replace(home, transfer=failed, sequence=cell_transfer.sequence))


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
            # The timeline also shows an event that changes nothing of its request. A repeated entry is shown once.
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

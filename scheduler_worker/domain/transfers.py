"""Requests that end in another cell than they begin in (decision 0021). Pure.

The former cell is commanded to give the instance up (`to_cell`), and states once what it has; with that the next one is
commanded (`arrival`), and the map names it, in one transaction. An instance without a host leaves nothing behind. Of
one with a machine the former cell keeps that, stopped. The next cell gives the instance back the same way when it
cannot be built there; when it is active there for good, the former cell is commanded to destroy what it has kept.

The changes that a batch of a cell's events about requests makes to the records that it names. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.contracts.base import Message
from bus.contracts.build import BuildState, TimelineEntry
from bus.contracts.cell import CellDelete
from bus.contracts.moves import CellMove, CellMoveQuery, Departure, MoveEvent, MoveKind, MoveState
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.recorded_moves import InstanceRecord, MoveContext, RecordedMove, apply_announcement
from scheduler_worker.domain.requests import is_newer


def for_former_cell(command: CellMove) -> CellMove:
    """The command to the cell that the instance leaves: it names the new cell, and no host there."""
    return replace(command, selections=(), server_group=None, limits={})


def by_keeper(command: CellMove, handed: Departure | None, cell: str) -> tuple[str, CellMove] | None:
    """The cell that keeps the machine to which a revert would go back, and the revert as that cell gets it first.

    None: the machine is in the instance's own cell, or an operator has looked at it, and forces the revert.
    """
    kept = None if handed is None else handed.kept
    if command.kind is not MoveKind.REVERT or command.force or kept is None or kept.cell == cell:
        return None
    return kept.cell, replace(command, to_cell=cell, kept_seen=False)


def sent_on(event: MoveEvent, move: RecordedMove | None, cell: str) -> RecordedMove | None:
    """A revert for which the cell that keeps the machine has seen it, as it goes on in the instance's cell; None: the
    announcement is not that.
    """
    if move is None or move.terminal or move.cell != cell or move.kind is not MoveKind.REVERT or event.terminal:
        return None
    if move.command is None or move.command.to_cell is None or event.departure is not None:
        return None
    return replace(move, cell=move.command.to_cell, command=replace(move.command, to_cell=None, kept_seen=True))


class Transfer(Struct, frozen=True):
    """The effect of a departure: the records after it, and the commands to the instance's new cell. handed: the
    departure, if a cell keeps a machine, or gets the instance back.
    """

    build: RecordedBuild
    move: RecordedMove | None
    cell: str
    commands: tuple[Message, ...]
    handed: Departure | None = None


def is_departure(event: MoveEvent, build: RecordedBuild, instance: InstanceRecord, cell: str) -> bool:
    """Whether an announcement of its cell hands the instance on: the cell on record, by news of it."""
    return event.departure is not None and build.cell == cell and is_newer(event, instance)


def transfer(event: MoveEvent, build: RecordedBuild, move: RecordedMove | None) -> Transfer:
    """The instance has left its cell: the next one is commanded what it was requested for, and deleted if it is to be.

    move: as the announcement leaves it. Where no request is under way that leads there (the schedulers' database was
    set back), the next cell is queried, with what the former one has stated: that begins nothing.
    """
    assert event.departure is not None
    departure: Departure = event.departure
    spec = replace(departure.spec, instance_uuid=build.instance_uuid, project_id=build.project_id)
    arrival, cell = replace(departure, spec=spec), departure.cell
    commands: list[Message] = []
    command = None if move is None or move.terminal else _commanded(move, arrival)
    if move is not None and command is not None:
        # The host that is tried first there: a drain of it waits, also while that cell has not answered.
        first = command.selections[0] if command.selections else None
        place = (None, None) if first is None else (first.host, first.host_uuid)
        move = replace(move, cell=cell, host=place[0], host_uuid=place[1], command=command)
        commands.append(command)
    else:
        commands.append(_query(event, build, arrival))
        if move is not None and departure.given_back is not None:
            move = replace(move, cell=cell)  # what becomes of it now is announced there
    if build.state is BuildState.DELETING:
        commands.append(CellDelete(instance_uuid=build.instance_uuid, project_id=build.project_id))
    is_handed = departure.kept is not None or departure.given_back is not None
    build = replace(build, cell=cell, host=None, host_uuid=None)
    return Transfer(build, move, cell, tuple(commands), arrival if is_handed else None)


def _commanded(move: RecordedMove, arrival: Departure) -> CellMove | None:
    """The command to the cell that the instance goes to; None: the request is not known to lead there."""
    if arrival.given_back is not None:
        return CellMove(
            request_id=move.request_id,
            instance_uuid=move.instance_uuid,
            project_id=move.project_id,
            kind=move.kind,
            arrival=arrival,
        )
    if move.command is None or move.command.to_cell != arrival.cell:
        return None
    return replace(move.command, to_cell=None, arrival=arrival)


def _query(event: MoveEvent, build: RecordedBuild, arrival: Departure | None) -> CellMoveQuery:
    return CellMoveQuery(
        request_id=event.request_id,
        instance_uuid=build.instance_uuid,
        project_id=build.project_id,
        kind=event.kind or MoveKind.UNSHELVE,
        arrival=arrival,
    )


def is_for_good(event: MoveEvent, handed: Departure, cell: str) -> bool:
    """Whether the cell that a departure has gone to states that the instance does not go back: by that very migration.

    That no cell is named any more proves nothing: a worker of the version before leaves the name out.
    """
    return handed.kept is not None and handed.cell == cell and event.settled == handed.kept.migration


def settled(handed: Departure) -> Departure:
    """The departure as it stays on record when no cell keeps a machine for it any more: lower numbers are late."""
    return replace(handed, kept=None)


def released(handed: Departure, build: RecordedBuild) -> CellMove | None:
    """The command to destroy the machine that a cell has kept of an instance that is active in another one."""
    if handed.kept is None or build.cell is None:
        return None
    return CellMove(
        request_id=handed.kept.migration,
        instance_uuid=build.instance_uuid,
        project_id=build.project_id,
        kind=handed.kind,
        active_in=build.cell,
        arrival=handed,
    )


def answer_keeper(
    event: MoveEvent, build: RecordedBuild, instance: InstanceRecord, cell: str
) -> tuple[str, Message] | None:
    """The answer to a cell that announces again that it keeps a machine, and the cell that it goes to.

    It is to be destroyed if the instance was deleted. A cell that does not know that it has got the instance back is
    sent that once more. Otherwise the cell that has the instance is queried, with the departure: it states whether it
    has it for good, and if it has never had it, it gives it back. These records alone prove neither: the schedulers'
    database may have been set back. A cell that the departure is not addressed to is queried without it: it would give
    back what it has never had, while the instance runs in the cell that the departure is addressed to.
    """
    departure, handed = event.departure, instance.handed
    if not is_kept_by(departure, cell) or departure is None or build.cell is None:
        return None
    if build.cell == cell:
        return (cell, _query(event, build, handed)) if handed is not None and _is_back(handed, departure) else None
    if build.state is BuildState.DELETED and (command := released(departure, build)) is not None:
        return cell, command
    return build.cell, _query(event, build, departure if departure.cell == build.cell else None)


def _is_back(handed: Departure, kept: Departure) -> bool:
    """Whether what is on record gives back what a cell announces to keep, or what it has kept since: what does neither
    would be answered by the same announcement.
    """
    back = handed.given_back
    if back is None or kept.kept is None:
        return False
    return back.migration == kept.kept.migration or (back.kept is not None and back.kept.number > kept.sequence)


def is_kept_by(departure: Departure | None, cell: str) -> bool:
    """Whether this cell keeps a machine since this departure."""
    return departure is not None and departure.kept is not None and departure.kept.cell == cell


def relearned(event: MoveEvent, build: RecordedBuild, instance: InstanceRecord, cell: str) -> InstanceRecord:
    """The record of an instance of which a cell announces that it keeps the machine, where no departure is on record:
    the next cell's statement about it is awaited (again).

    A departure to another cell than that on record, or from before one that is settled, is late: no cell would ever
    state that it is settled, and the instance could not leave its cell again.
    """
    is_elsewhere = build.cell not in (None, cell) and build.state is not BuildState.DELETED
    departure, handed = event.departure, instance.handed
    if departure is None or not is_elsewhere or not is_kept_by(departure, cell) or departure.cell != build.cell:
        return instance
    if handed is not None and (handed.kept is not None or departure.sequence < handed.sequence):
        return instance
    return replace(instance, handed=departure)


def repeated(move: RecordedMove) -> Message | None:
    """The message to its cell when no event of it comes: the command itself, if a query would end it as lost."""
    if move.command is None:
        return None
    return for_former_cell(move.command) if move.command.to_cell is not None else move.command


class AnnouncedMoves:
    """The records of a batch as its events leave them, one after the other; and what is published of it.

    changed: the requests to write; timelines: the instances to write, with their new entries; departed: {instance: the
    cell that it has left for}.
    """

    def __init__(self, cell: str, known: Mapping[str, MoveContext], now: float) -> None:
        self._cell = cell
        self._now = now
        self.moves = {one: context.move for one, context in known.items() if context.move is not None}
        self.builds = {one.build.instance_uuid: one.build for one in known.values() if one.build is not None}
        self.instances: dict[str, InstanceRecord] = {
            one.build.instance_uuid: one.now for one in known.values() if one.build is not None
        }
        self.timelines: dict[str, list[TimelineEntry]] = {}
        self.changed: dict[str, None] = {}
        self.departed: dict[str, str] = {}
        self.messages: list[OutboxMessage] = []
        self.ignored: list[tuple[MoveEvent, str]] = []

    def apply(self, event: MoveEvent) -> None:
        """Apply one event. A late or unknown event is ignored, and so is another cell's."""
        uuid = event.instance_uuid
        build = self.builds.get(uuid)
        leaves = build is not None and is_departure(event, build, self.instances[uuid], self._cell)
        why = self._apply(event)
        self._send_on(event)
        if leaves:
            self._transfer(event)
        elif why:
            self.ignored.append((event, why))
        if build is not None:
            self._settle(event)
        if build is not None and not leaves:
            self._answer_keeper(event)

    def _send_on(self, event: MoveEvent) -> None:
        """The machine to which a revert goes back was seen: the revert goes on in the instance's cell."""
        move = sent_on(event, self.moves.get(event.request_id), self._cell)
        if move is None or move.cell is None or move.command is None or move.instance_uuid != event.instance_uuid:
            return
        self.moves[event.request_id] = move
        self.changed[event.request_id] = None
        self.messages.append(OutboxMessage(move.cell, move.command, event.request_id))

    def _settle(self, event: MoveEvent) -> None:
        """The instance stays in the cell that has it: what another cell has kept for it is destroyed."""
        uuid = event.instance_uuid
        handed = self.instances[uuid].handed
        if handed is None or not is_for_good(event, handed, self._cell):
            return
        self.instances[uuid] = replace(self.instances[uuid], handed=settled(handed))
        self.timelines.setdefault(uuid, [])
        if (command := released(handed, self.builds[uuid])) is not None and handed.kept is not None:
            self.messages.append(OutboxMessage(handed.kept.cell, command, event.request_id))

    def _answer_keeper(self, event: MoveEvent) -> None:
        uuid = event.instance_uuid
        build = self.builds[uuid]
        instance = relearned(event, build, self.instances[uuid], self._cell)
        if instance is not self.instances[uuid]:
            self.instances[uuid] = instance
            self.timelines.setdefault(uuid, [])
        answer = answer_keeper(event, build, instance, self._cell)
        if answer is not None:
            self.messages.append(OutboxMessage(*answer, event.request_id))
        if event.state is MoveState.SOURCE_GONE and build.cell != self._cell:
            what = f"{event.kind} {event.state}"
            gone = TimelineEntry(at=event.at or self._now, who=f"conductor {self._cell}", what=what)
            self.timelines.setdefault(uuid, []).append(gone)

    def _apply(self, event: MoveEvent) -> str:
        """Apply the event to its request; returns why it is ignored ("": it is not)."""
        uuid = event.instance_uuid
        move, build = self.moves.get(event.request_id), self.builds.get(uuid)
        if move is None or build is None or move.instance_uuid != uuid:
            return "unknown"
        if move.cell != self._cell:
            return "foreign"
        applied = apply_announcement(event, move, self.instances[uuid], build, cell=self._cell, now=self._now)
        if applied.event is None:
            return "late"
        self.moves[event.request_id], self.instances[uuid] = applied.move, applied.instance
        self.builds[uuid] = applied.build
        self.timelines.setdefault(uuid, []).extend(applied.timeline)
        self.changed[event.request_id] = None
        self.messages.append(OutboxMessage(API, applied.event, event.request_id))
        return ""

    def _transfer(self, event: MoveEvent) -> None:
        uuid = event.instance_uuid
        move = self.moves.get(event.request_id)
        gone = transfer(event, self.builds[uuid], move if move is not None and move.instance_uuid == uuid else None)
        self.builds[uuid], self.departed[uuid] = gone.build, gone.cell
        if gone.move is not None:
            self.moves[event.request_id] = gone.move
            self.changed[event.request_id] = None
        instance = self.instances[uuid]
        self.instances[uuid] = replace(
            instance, sequence=max(event.sequence, instance.sequence), handed=gone.handed or instance.handed
        )
        left = TimelineEntry(at=event.at or self._now, who=f"conductor {self._cell}", what="departed", detail=gone.cell)
        self.timelines.setdefault(uuid, []).append(left)
        self.messages += [OutboxMessage(gone.cell, command, event.request_id) for command in gone.commands]

"""The changes that a batch of a cell's events about requests makes to the records that it names. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from bus.bus import API
from bus.contracts.build import TimelineEntry
from bus.contracts.moves import MoveEvent
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.domain.recorded_moves import InstanceRecord, MoveContext, apply_announcement
from scheduler_worker.domain.transfers import is_departure, transfer


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
        if leaves:
            self._transfer(event)
        elif why:
            self.ignored.append((event, why))

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
        self.instances[uuid] = replace(instance, sequence=max(event.sequence, instance.sequence))
        left = TimelineEntry(at=event.at or self._now, who=f"conductor {self._cell}", what="departed", detail=gone.cell)
        self.timelines.setdefault(uuid, []).append(left)
        self.messages += [OutboxMessage(gone.cell, command, event.request_id) for command in gone.commands]

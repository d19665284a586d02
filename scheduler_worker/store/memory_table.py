"""The rows of build requests in memory, and what a committed transaction does to them."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from msgspec.structs import replace

from bus.contracts.build import BuildRecord, TimelineEntry
from bus.persistence.memory_database import MemoryDatabase
from scheduler_worker.domain.builds import BuildDecision, NewBuild, RecordedBuild
from scheduler_worker.domain.drains import DrainMove
from scheduler_worker.domain.recorded_moves import InstanceRecord, RecordedMove
from scheduler_worker.store.objects import MemoryObjects

log = structlog.get_logger(__name__)

OBJECTS = ("objects", "")  # the key of operators' objects, which have one lock


class MemoryBuildTable(MemoryDatabase):
    """The committed requests and the instance-to-cell map; they outlive the schedulers."""

    ROWS = (
        *MemoryDatabase.ROWS,
        "records",
        "recorded",
        "requested",
        "moves",
        "instances",
        "objects",
        "drain_moves",
    )

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self.records: dict[str, BuildRecord] = {}
        self.recorded: dict[str, RecordedBuild] = {}
        self.requested: dict[str, NewBuild] = {}
        self.moves: dict[str, tuple[RecordedMove, float]] = {}  # and when it was last written
        self.instances: dict[str, InstanceRecord] = {}
        self.objects = MemoryObjects()
        self.drain_moves: dict[tuple[str, str], DrainMove] = {}  # by drain and instance


def key_of(uuid: str) -> tuple[str, str]:
    """The key by which a build is locked and its versions are counted."""
    return "build", uuid


def insert_build(table: MemoryBuildTable, new: NewBuild, now: float) -> None:
    """Insert a row with all columns."""
    request = new.request
    uuid = request.instance_uuid
    table.requested[uuid] = new
    table.records[uuid] = BuildRecord(
        instance_uuid=uuid,
        project_id=request.project_id,
        flavor=request.flavor,
        name=request.name,
        state=new.build.state,
        created_at=now,
        updated_at=now,
        gang=new.gang.uuid if new.gang else None,
        gang_min=new.gang.min_count if new.gang else 0,
    )
    update_build(table, new.build, new.timeline, now)


def decide_build(table: MemoryBuildTable, decision: BuildDecision, now: float) -> None:
    """Write a decision."""
    uuid = decision.build.instance_uuid
    update_build(table, decision.build, decision.timeline, now)
    table.records[uuid] = replace(table.records[uuid], funnel=decision.funnel)


def update_build(
    table: MemoryBuildTable, build: RecordedBuild, timeline: tuple[TimelineEntry, ...], now: float
) -> None:
    """Replace a build's record and append to its timeline."""
    record = table.records[build.instance_uuid]
    table.recorded[build.instance_uuid] = build
    table.records[build.instance_uuid] = replace(
        record,
        state=build.state,
        cell=build.cell,
        host=build.host,
        code=build.code,
        reason=build.reason,
        history=build.history,
        timeline=(*record.timeline, *timeline),
        updated_at=now,
    )


def drop_drain_moves(table: MemoryBuildTable, drains: frozenset[str]) -> None:
    """Delete the rows of drains that are over."""
    for key in [key for key in table.drain_moves if key[0] in drains]:
        del table.drain_moves[key]


def delete(table: MemoryBuildTable, builds: Sequence[str], moves: Sequence[str]) -> None:
    """Delete builds with all that belongs to them, and moves."""
    for uuid in builds:
        for column in (table.records, table.recorded, table.requested, table.instances):
            column.pop(uuid, None)
    for one in moves:
        table.moves.pop(one, None)

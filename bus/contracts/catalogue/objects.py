"""The messages about what operators define at run time, a row each."""

from __future__ import annotations

from bus.contracts import cells, objects
from bus.contracts.catalogue.rows import COMMANDS, EVENTS, MessageRow, Where, query

OBJECT_MESSAGES: tuple[MessageRow, ...] = (
    MessageRow(
        message=objects.ObjectsChange,
        owner="scheduler_worker",
        publishers=("operator",),
        where=Where.API,
        exchange=COMMANDS,
        key="objects.change",
        reply=objects.ObjectsChanged,
        public=True,
        max_batch=1,
        idempotency="the message's id",
    ),
    query(objects.ObjectsQuery, objects.ObjectsPage, "objects.query"),
    query(objects.ObjectLogQuery, objects.ObjectLogPage, "objects.log"),
    query(cells.CellsQuery, cells.CellsPage, "cells.query", publishers=("operator", "placement_worker")),
    MessageRow(
        message=objects.ObjectsRevision,
        owner="scheduler_worker",
        publishers=("scheduler_worker",),
        where=Where.API,
        exchange=EVENTS,
        key="objects.revision",
        persistent=False,
        public=True,
        idempotency="revision; a lower one is old",
    ),
)

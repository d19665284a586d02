"""The messages about what operators define at run time, a row each."""

from __future__ import annotations

from bus.contracts import cells, objects
from bus.contracts.catalogue.rows import COMMANDS, EVENTS, MessageRow, Where

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
    MessageRow(
        message=objects.ObjectsQuery,
        owner="scheduler_worker",
        publishers=("operator",),
        where=Where.API,
        exchange=COMMANDS,
        key="objects.query",
        reply=objects.ObjectsPage,
        persistent=False,
        public=True,
        idempotency="reads only",
    ),
    MessageRow(
        message=objects.ObjectLogQuery,
        owner="scheduler_worker",
        publishers=("operator",),
        where=Where.API,
        exchange=COMMANDS,
        key="objects.log",
        reply=objects.ObjectLogPage,
        persistent=False,
        public=True,
        idempotency="reads only",
    ),
    MessageRow(
        message=cells.CellsQuery,
        owner="scheduler_worker",
        publishers=("operator", "placement_worker"),
        where=Where.API,
        exchange=COMMANDS,
        key="cells.query",
        reply=cells.CellsPage,
        persistent=False,
        public=True,
        idempotency="reads only",
    ),
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

"""The messages about an instance after its build, a row each: of clients, to its cell, and to its host."""

from __future__ import annotations

from bus.contracts import moves
from bus.contracts.catalogue.queues import MAX_REQUESTS_PER_MESSAGE
from bus.contracts.catalogue.rows import COMMANDS, EVENTS, MessageRow, Where, query

MOVE_MESSAGES: tuple[MessageRow, ...] = (
    MessageRow(
        message=moves.MoveRequest,
        owner="scheduler_worker",
        publishers=("client", "operator", "scheduler_worker"),
        where=Where.API,
        exchange=COMMANDS,
        key="instance.move.{lane}.{project_id}",
        reply=moves.MoveAccepted,
        public=True,
        max_batch=MAX_REQUESTS_PER_MESSAGE,
        idempotency="request_id; the same id with other content is refused (request.duplicate)",
    ),
    MessageRow(
        message=moves.MoveEvent,
        owner="scheduler_worker",
        publishers=("cell_conductor", "scheduler_worker"),
        where=Where.BOTH,
        exchange=EVENTS,
        key="instance.event.{state}.{project_id}",
        public=True,
        idempotency="instance_uuid and sequence; a terminal one request_id",
    ),
    query(moves.MoveQuery, moves.MovePage, "instance.query"),
)
CELL_MOVE_MESSAGES: tuple[MessageRow, ...] = (
    MessageRow(
        message=moves.CellMove,
        owner="cell_conductor",
        publishers=("scheduler_worker",),
        where=Where.CELL,
        exchange=COMMANDS,
        key="cell.move",
        idempotency="request_id",
    ),
    MessageRow(
        message=moves.CellMoveQuery,
        owner="cell_conductor",
        publishers=("scheduler_worker",),
        where=Where.CELL,
        exchange=COMMANDS,
        key="cell.move.query",
        idempotency="request_id; the answer may be published more than once",
    ),
    MessageRow(
        message=moves.CellCheck,
        owner="cell_conductor",
        publishers=("scheduler_worker",),
        where=Where.CELL,
        exchange=COMMANDS,
        key="cell.check",
        idempotency="order of the change; a check changes nothing",
    ),
    MessageRow(
        message=moves.CellBook,
        owner="cell_conductor",
        publishers=("scheduler_worker",),
        where=Where.CELL,
        exchange=COMMANDS,
        key="cell.book",
        idempotency="consumer and attempt of the question",
    ),
    MessageRow(
        message=moves.CellAsks,
        owner="scheduler_worker",
        publishers=("cell_conductor",),
        where=Where.CELL,
        exchange=EVENTS,
        key="cell.asks",
        idempotency="as the message in it",
    ),
)
MACHINE_MESSAGES: tuple[MessageRow, ...] = (
    MessageRow(
        message=moves.ChangeMachine,
        owner="compute_sim",
        publishers=("cell_conductor",),
        where=Where.CELL,
        exchange=COMMANDS,
        key="compute.change.{service}",
        idempotency="instance_uuid, attempt and order",
    ),
    MessageRow(
        message=moves.MachineChanged,
        owner="compute_sim",
        publishers=("compute_sim",),
        where=Where.CELL,
        exchange=COMMANDS,
        key="compute.changed",
        idempotency="instance_uuid, attempt and order",
    ),
)

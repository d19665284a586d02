"""The messages about drains, a row each."""

from __future__ import annotations

from bus.contracts import drains
from bus.contracts.catalogue.rows import COMMANDS, MessageRow, Where, query

DRAIN_MESSAGES: tuple[MessageRow, ...] = (
    query(drains.DrainQuery, drains.DrainPlan, "hosts.drain.query"),
    MessageRow(
        message=drains.DrainStart,
        owner="scheduler_worker",
        publishers=("operator",),
        where=Where.API,
        exchange=COMMANDS,
        key="drain.start",
        reply=drains.DrainResult,
        public=True,
        max_batch=1,
        idempotency="drain; a drain on record under this id is not begun again",
    ),
    MessageRow(
        message=drains.DrainCommand,
        owner="scheduler_worker",
        publishers=("operator",),
        where=Where.API,
        exchange=COMMANDS,
        key="drain.command",
        reply=drains.DrainResult,
        public=True,
        idempotency="the message's id",
    ),
    query(drains.DrainsQuery, drains.DrainsPage, "drains.query"),
)

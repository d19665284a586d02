"""The rows of the messages about hosts that operators decide about, and about compute services."""

from __future__ import annotations

from bus.contracts import operations
from bus.contracts.catalogue.rows import COMMANDS, MessageRow, Where

HOST_MESSAGES: tuple[MessageRow, ...] = (
    MessageRow(
        message=operations.SetAdminState,
        owner="scheduler_worker",
        publishers=("operator",),
        where=Where.API,
        exchange=COMMANDS,
        key="hosts.set",
        reply=operations.AdminStateSet,
        public=True,
        idempotency="the message's id",
    ),
    MessageRow(
        message=operations.ForgetHost,
        owner="scheduler_worker",
        publishers=("operator",),
        where=Where.API,
        exchange=COMMANDS,
        key="hosts.forget",
        reply=operations.HostForgotten,
        public=True,
        idempotency="the message's id; a host that is forgotten already",
    ),
    MessageRow(
        message=operations.ServicesQuery,
        owner="scheduler_worker",
        publishers=("operator",),
        where=Where.API,
        exchange=COMMANDS,
        key="services.query",
        reply=operations.ServicesPage,
        persistent=False,
        public=True,
        idempotency="reads only",
    ),
)

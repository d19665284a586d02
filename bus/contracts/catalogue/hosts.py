"""The rows of the messages about hosts that operators decide about, and about compute services."""

from __future__ import annotations

from bus.contracts import cell, operations
from bus.contracts.catalogue.rows import COMMANDS, EVENTS, MessageRow, Where, query

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
        message=operations.ForgetService,
        owner="scheduler_worker",
        publishers=("operator",),
        where=Where.API,
        exchange=COMMANDS,
        key="services.forget",
        reply=operations.ServiceForgotten,
        public=True,
        idempotency="the message's id; a service that is forgotten already",
    ),
    MessageRow(
        message=cell.ForgetServiceInCell,
        owner="cell_conductor",
        publishers=("scheduler_worker",),
        where=Where.CELL,
        exchange=COMMANDS,
        key="cell.service.forget",
        reply=cell.ServiceForgottenInCell,
        idempotency="service; one that is forgotten already",
    ),
    MessageRow(
        message=cell.ServiceGone,
        owner="cell_conductor",
        publishers=("cell_conductor",),
        where=Where.CELL,
        exchange=EVENTS,
        key="services.gone",
        persistent=False,
        idempotency="service and at",
    ),
    query(operations.ServicesQuery, operations.ServicesPage, "services.query"),
)

"""The rows of the messages about hosts that two compute services report."""

from __future__ import annotations

from bus.contracts import cell, placement
from bus.contracts.catalogue.rows import COMMANDS, EVENTS, MessageRow, Where

HOST_OWNER_MESSAGES: tuple[MessageRow, ...] = (
    MessageRow(
        message=placement.InventoryTaken,
        owner="placement_worker",
        publishers=("placement_worker",),
        where=Where.BOTH,
        exchange=EVENTS,
        key="inventory.taken.{source}",
        persistent=False,
        idempotency="source, root_uuid and owner",
    ),
    MessageRow(
        message=placement.InventoryReleased,
        owner="placement_worker",
        publishers=("cell_conductor",),
        where=Where.CELL,
        exchange=COMMANDS,
        key="inventory.released",
        persistent=False,
        idempotency="source and roots",
    ),
    MessageRow(
        message=cell.HostsContested,
        owner="cell_conductor",
        publishers=("cell_conductor",),
        where=Where.CELL,
        exchange=EVENTS,
        key="compute.contested.{service}",
        persistent=False,
        idempotency="service, other and hosts",
    ),
    MessageRow(
        message=cell.HostsReleased,
        owner="cell_conductor",
        publishers=("cell_conductor",),
        where=Where.CELL,
        exchange=EVENTS,
        key="compute.released.{service}",
        persistent=False,
        idempotency="service, owner and hosts",
    ),
)

"""Which cells there are and are in use, as a scheduler has it. Placement connects to those."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from .base import Message, Reason, Version
from .objects import CellBus, CellState


class LinkState(StrEnum):
    """Of a worker's connection to the bus of a cell."""

    UP = "up"
    CONNECTING = "connecting"
    CLOSED = "closed"


class CellsQuery(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cells.query.v1"):
    """Query a scheduler for all cells. revision: of the objects, or a later one; 0: the newest on record.

    The scheduler loads it before it answers.
    """

    revision: Version = 0


class CellRecord(Struct, frozen=True, kw_only=True):
    """One cell. in_use: workers connect to its bus.

    configured: the settings of this scheduler name it. by, at: who decided it, seconds since the epoch
    (version 0: no operator did). link, problem: of this scheduler's connection, and why it is not up.
    """

    name: str
    state: CellState = CellState.ENABLED
    reason: Reason = ""
    bus: CellBus | None = None
    configured: bool
    in_use: bool
    by: str = ""
    at: float = 0.0
    version: Version = 0
    link: LinkState = LinkState.CLOSED
    problem: Reason = ""


class CellsPage(Message, frozen=True, kw_only=True, tag="cells.page.v1"):
    """Reply to a CellsQuery, by name. revision: of the objects that it is by."""

    revision: Version
    cells: tuple[CellRecord, ...] = ()

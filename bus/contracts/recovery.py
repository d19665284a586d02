"""What the schedulers and placement have of a cell whose database was restored. The cell asks on its own bus for one
page at a time, and schedulers answer there. Uuids are one order for instances and hosts: a page has all of them up to
its last one, so neither side holds more than a page.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.actions import ActionKind, Condition
from bus.contracts.base import (
    Attempt,
    DatabaseMark,
    ImageName,
    Label,
    Message,
    Resources,
    Sequence,
    Uuid,
    Word,
    matching,
)
from bus.contracts.build import BuildState
from bus.contracts.cell import InstanceSpec
from bus.contracts.operations import CellFence

MAX_ASKED = 500  # instances of one question
MAX_KNOWN = 500  # instances, and fences, of one page
MAX_KNOWN_BYTES = 512 * 1024  # of the instances of one page, as JSON; one instance has less
MAX_PLACES = 16  # of one instance
MAX_PROVIDERS = 64  # of one place, as of a claim

# The name of a process, which is part of the name of its queues.
Process = Annotated[str, matching(r"^[A-Za-z0-9_\-]{1,128}\Z", "1 to 128 letters, digits, _ and -")]


class CellRecovering(Message, frozen=True, kw_only=True, tag="cell.recovering.v1"):
    """A cell's database was restored: its conductor asks for one page of what the schedulers and placement have of it.
    Repeated until it is answered.
    """

    cell: Word
    process: Process  # of this conductor
    query_id: Uuid  # made anew with each page; only its answer is taken
    after: Uuid | Literal[""] = ""  # the uuid behind which the page begins ("": from the first)
    # instead of a page: these instances, wherever they are
    asked: Annotated[tuple[Uuid, ...], Bound(max_length=MAX_ASKED)] = ()


class KnownPlace(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A host where placement has allocations of an instance."""

    host_uuid: Uuid
    host: Label
    service: Word | Literal[""] = ""  # that manages it ("": the scheduler has not heard of one)
    allocations: Annotated[dict[Uuid, Resources], Bound(min_length=1, max_length=MAX_PROVIDERS)]
    migration: Uuid | None = None  # the action that holds them (None: the instance itself)


class KnownRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the schedulers and placement have of one instance."""

    instance_uuid: Uuid
    project_id: Annotated[str, Bound(max_length=255)] = ""  # of its allocations, else of its build
    state: BuildState | None = None  # of its build (None: no build of it is on record)
    condition: Condition = Condition.ACTIVE  # since its build
    cell: Word | None = None  # that the schedulers' map has it in
    attempt: Attempt = 0  # the highest of its build and its allocations
    sequence: Sequence = 0  # of its newest event that the schedulers have had
    spec: InstanceSpec | None = None  # the present one
    snapshot: ImageName = ""  # the image that is kept of a shelved one
    places: Annotated[
        tuple[KnownPlace, ...], Bound(max_length=MAX_PLACES)
    ] = ()  # its own before those of its migrations
    # request_id, kind: of the move under way
    request_id: Uuid | Literal[""] = ""
    kind: ActionKind | None = None
    transferred_in: bool = False  # its move leads here from another cell, which has given the instance up


class CellKnown(Message, frozen=True, kw_only=True, tag="cell.known.v1"):
    """Reply to a CellRecovering, by uuid: everything that the schedulers and placement committed before the query was
    published.
    """

    cell: Word
    process: Process
    query_id: Uuid
    # those with a machine by the schedulers' map, and consumers that hold something in the cell or in none; or those
    # asked for
    instances: Annotated[tuple[KnownRecord, ...], Bound(max_length=MAX_KNOWN)] = ()
    # of hosts of the cell, and of hosts of which the cell is not known
    fences: Annotated[tuple[CellFence, ...], Bound(max_length=MAX_KNOWN)] = ()
    last: Uuid | Literal[""] = ""  # the page ends with this uuid ("": nothing follows)
    # of the cell's database, as placement and the schedulers have heard them (none: of instances that were asked for)
    marks: Annotated[tuple[DatabaseMark, ...], Bound(max_length=2)] = ()

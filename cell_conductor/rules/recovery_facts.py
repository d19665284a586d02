"""What a recovery knows of one instance, and what it makes of it."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from bus.contracts.actions import ActionKind
from bus.contracts.cell import InstanceSpec, Selection
from bus.contracts.listing import ListedMachine
from cell_conductor.state.instance import BlockedReason, EndedAction, Instance, Power

# Of a host whose compute service no scheduler has heard of, in a record. The host's listing names its own.
NO_SERVICE = "unknown"


class KnownInstance(Struct, frozen=True, kw_only=True):
    """The schedulers' record of one instance."""

    exists: bool = True  # whether the schedulers' map has it
    is_active: bool = True
    is_deleted: bool = False
    is_in_other_cell: bool = False
    cell: str = ""  # the cell that has it in the map
    attempt: int = 0  # the highest attempt that map and placement have
    sequence: int = 0  # number of its newest event there
    project_id: str = ""  # the project of the selections
    spec: InstanceSpec | None = None
    selections: tuple[Selection, ...] = ()  # where it has allocations: its own, then those of its migration
    power: Power | None = None  # its power in the map (None: not known)
    snapshot: str = ""  # the image that is kept of a shelved one
    request_id: str = ""  # the request under way
    kind: ActionKind | None = None  # kind of the request under way
    is_transferred_in: bool = False  # whether by that request another cell has given it up for this one
    own_count: int = 0  # how many of the selections the instance holds itself
    migrations: tuple[str, ...] = ()  # the migrations that hold the other selections

    @property
    def is_in_this_cell(self) -> bool:
        """Whether this cell is to have it."""
        return self.exists and not self.is_deleted and not self.is_in_other_cell

    @property
    def hosts_in_this_cell(self) -> set[str]:
        """The hosts where it has allocations, if this cell is to have it."""
        return {one.host_uuid for one in self.selections if self.is_in_this_cell}

    @property
    def is_offloaded(self) -> bool:
        """Whether it has no host by the map. One that boots from a volume has no image then."""
        return self.is_active and self.power is Power.SHELVED and not self.selections


class Verb(StrEnum):
    """What an operator decides about a machine."""

    DESTROY = "destroy"
    ADOPT = "adopt"


class OperatorDecision(Struct, frozen=True):
    """About the machine of the instance on one host."""

    verb: Verb
    host_uuid: str


class RecoveryCommandKind(StrEnum):
    """What becomes of a machine. A start is commanded, and a quarantine is only recorded."""

    DESTROY = "destroy"
    DESTROY_IF_INCOMPLETE = "destroy_if_incomplete"
    START = "start"
    QUARANTINE = "quarantine"


class RecoveryCommand(Struct, frozen=True):
    """One action on one machine."""

    kind: RecoveryCommandKind
    machine: ListedMachine


class Reconciled(Struct, frozen=True):
    """What a recovery decides about one instance."""

    record: Instance | None
    commands: tuple[RecoveryCommand, ...] = ()
    ended: tuple[EndedAction, ...] = ()  # the ends of requests that were under way
    blocked_reason: BlockedReason | None = None  # why nothing is started (None: it goes on as usual)

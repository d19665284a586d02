"""What a recovery knows of one instance, and what it makes of it."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from bus.contracts.cell import InstanceSpec, Selection
from bus.contracts.listing import ListedMachine
from bus.contracts.moves import ActionKind

from .instance import BlockedReason, EndedAction, Instance, Power


class KnownInstance(Struct, frozen=True, kw_only=True):
    """The top's record of one instance. is_old: of a top that was restored itself. exists: the map has it.

    cell: that has it in the map. attempt: the highest that map and placement have. sequence: of its newest event there.
    selections: where it has allocations, its own before those of its migration; project_id: of these. power: in the
    map (None: not known). snapshot: the image that is kept of a shelved one. request_id, kind: of the request under
    way; is_transferred_in: by that another cell has given it up for this one. own_count: how many of the selections the
    instance holds itself; migrations: that hold the others.
    """

    is_old: bool = False
    exists: bool = True
    is_active: bool = True
    is_deleted: bool = False
    is_in_other_cell: bool = False
    cell: str = ""
    attempt: int = 0
    sequence: int = 0
    project_id: str = ""
    spec: InstanceSpec | None = None
    selections: tuple[Selection, ...] = ()
    power: Power | None = None
    snapshot: str = ""
    request_id: str = ""
    kind: ActionKind | None = None
    is_transferred_in: bool = False
    own_count: int = 0
    migrations: tuple[str, ...] = ()

    @property
    def is_in_this_cell(self) -> bool:
        """Whether this cell is to have it."""
        return self.exists and not self.is_deleted and not self.is_in_other_cell

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
    """ended: the requests under way have these ends. blocked_reason: nothing is started (None: it goes on as usual)."""

    record: Instance | None
    commands: tuple[RecoveryCommand, ...] = ()
    ended: tuple[EndedAction, ...] = ()
    blocked_reason: BlockedReason | None = None

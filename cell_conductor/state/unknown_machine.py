"""A machine that a host has and no record explains, and why none does."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class UnknownMachineKind(StrEnum):
    """Why no record explains a machine."""

    FOREIGN = "foreign"  # it has no tag of this database: it is another database's, and never touched
    QUARANTINED = (
        "quarantined"  # with this database's tag, not proved over by the record: kept until an operator decides
    )


class UnknownMachine(Struct, frozen=True):
    """A machine that a host carries and no record explains: reported, and left as it is."""

    uuid: str
    attempt: int
    host_uuid: str
    kind: UnknownMachineKind
    reason: str  # one of WHY


NO_OWNER_TAG = "no tag of this database"
NO_RECORD = "no record"
UNREADABLE = "its record cannot be read"
PROTECTED = "an operator keeps it"
NEWER = "newer than its record"
UNNUMBERED = "its compute service does not know its attempt"
ON_OTHER_HOST = "its record has this attempt on another host"
REUSED_ATTEMPT = "it is from before the cell's database was restored"

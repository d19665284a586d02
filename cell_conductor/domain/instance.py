"""One instance as its cell knows it."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from bus.contracts.build import AttemptRecord
from bus.contracts.cell import InstanceSpec, Selection
from bus.contracts.groups import ServerGroup
from bus.contracts.stages import Stamps


class State(StrEnum):
    """Where an instance stands. What is allocated for it follows from the state alone (docs/reference/states.md)."""

    ABSENT = "absent"  # no record
    TOMBSTONE = "tombstone"  # deleted before its build arrived
    BUILDING = "building"  # a host was commanded to build the current attempt
    RECLAIMING = "reclaiming"  # the attempt is over; placement is to release it and claim an alternate
    ABANDONING = "abandoning"  # as reclaiming, and a delete was requested meanwhile
    ACTIVE = "active"
    GIVING_UP = "giving_up"  # over; the allocation is being released, then it is failed
    FAILED = "failed"
    DELETING = "deleting"  # the host was commanded to destroy; the allocation is held until it has
    RELEASING = "releasing"  # destroyed; the allocation is being released, then it is deleted
    DELETED = "deleted"


# A build goes on: between a backup and its restore it may have moved on, or have become active.
UNDER_WAY = frozenset({State.BUILDING, State.RECLAIMING})

# The announcements of one instance are numbered from here; the numbers below belong to the scheduler.
FIRST_SEQUENCE = 10


class ScanId(Struct, frozen=True, order=True):
    """Names one scan of a compute service over its machines: later ones are greater, also when its clock was set."""

    epoch: int
    number: int


class Instance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a cell has on record about one instance.

    position: the selection of the current attempt. attempt: the fencing number last commanded (or claimed).
    consumer_generation: the consumer's generation in placement as last heard. sequence: the number of the next
    announcement. deadline: when the sweep looks at it again (None: never). since: when the current state was entered.
    up_at, up_scan: when its host was first known to run it, by that host's own clock, and which scan of its
    machines had begun then (None: never, or unknown).
    answered: the build request got its terminal event. cause: the request that last asked for something.
    asked: the attempt's deadline has passed, and its host was queried. doubted: the database was set back while this
    was being built, so only the hosts know what has become of it since. stamps: when each stage of the build ended,
    until it is answered. server_group: whose rule alternates are held to; limits: what its project may hold, which they
    are held to as well.
    """

    uuid: str
    state: State = State.ABSENT
    spec: InstanceSpec | None = None
    selections: tuple[Selection, ...] = ()
    position: int = 0
    attempt: int = 0
    consumer_generation: int | None = None
    sequence: int = FIRST_SEQUENCE
    build_timeout_s: float = 0.0
    requested_at: float = 0.0
    deadline: float | None = None
    since: float = 0.0
    up_at: float | None = None
    up_scan: ScanId | None = None
    answered: bool = False
    asked: bool = False
    doubted: bool = False
    code: str = ""
    reason: str = ""
    history: tuple[AttemptRecord, ...] = ()
    cause: str = ""
    stamps: Stamps | None = None
    server_group: ServerGroup | None = None
    limits: dict[str, int] = {}

    @property
    def here(self) -> Selection:
        """The selection of the current attempt."""
        return self.selections[self.position]

    @property
    def host_uuid(self) -> str | None:
        """The host of the current attempt, once there was one."""
        return self.selections[self.position].host_uuid if self.selections else None

    @property
    def alternates(self) -> tuple[Selection, ...]:
        """The selections not tried yet, in order."""
        return self.selections[self.position + 1 :]

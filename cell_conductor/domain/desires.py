"""The desire of each state: what every machine of the instance is to be, and what is asked of placement.

One row a state, and one for each state that may follow where an answer is waited for; nothing else in the cell lists
states. What a record proves to be over and a report has to show (`report`), what is commanded (`orders`),
what placement is asked (`table.question_of`), what a client sees, and the lists of states in SQL are read from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from bus.contracts.moves import ChangeKind, Condition, MoveState

from .instance import Phase, State


class Wish(StrEnum):
    """What a machine of the instance is to be. Any that is over is destroyed when its host lists it."""

    UNKNOWN = "unknown"  # by the record there is none, and it proves nothing about one
    BUILD = "build"  # its host was commanded to build it; it may not be there yet
    RUN = "run"  # it is there for its client: a report that leaves it out ends what no client has ended
    STAY = "stay"  # it is there, as it is or being changed
    UNCOMMANDED = "uncommanded"  # claimed, and nothing that makes a machine was commanded: one there is unexplained
    DESTROY = "destroy"  # over: its host is commanded until it answers, or a report leaves it out
    GONE = "gone"  # over, and may be there still
    NONE = "none"  # over, and by the record there is none


class Ask(StrEnum):
    """What is asked of placement while the state lasts."""

    CLAIM = "claim"
    RELEASE = "release"
    RELEASE_MIGRATION = "release_migration"
    REVERT = "revert"


class Work(StrEnum):
    """What is under way."""

    BUILD = "build"
    MOVE = "move"


class Desire(Struct, frozen=True, kw_only=True):
    """One row. here: the machine of the current attempt. source: that of the move's source, on another host or, before
    a destination is claimed and when the move is undone in place, the same.

    condition: for clients (None: by its power). progress: of the request under way. change: of one machine,
    commanded and awaited; in `changing` by the request, and a resize only in place.
    elsewhere: another cell has it. ends: a request for it has ended well or not. takes_machine: an operator may give it
    a machine in quarantine. relies_on_fence: an evacuation that has come so far relies on the fence of its host.
    leaves_lost_service: another host is tried when the service of this one is lost.
    """

    here: Wish
    source: Wish = Wish.UNKNOWN
    asks: Ask | None = None
    condition: Condition | None = Condition.MOVING
    progress: MoveState = MoveState.CHANGING
    change: ChangeKind | None = None
    work: Work | None = None
    elsewhere: bool = False
    ends: bool = False
    takes_machine: bool = False
    relies_on_fence: bool = False
    leaves_lost_service: bool = False


_DELETED, _FAILED = Condition.DELETED, Condition.FAILED
DESIRES: Mapping[Phase, Desire] = {
    (State.ABSENT, None): Desire(here=Wish.UNKNOWN),
    (State.TOMBSTONE, None): Desire(here=Wish.NONE, condition=_DELETED),
    (State.BUILDING, None): Desire(here=Wish.BUILD, work=Work.BUILD, leaves_lost_service=True),
    (State.ACTIVE, None): Desire(here=Wish.RUN, condition=None, ends=True, takes_machine=True),
    (State.FAILED, None): Desire(here=Wish.NONE, condition=_FAILED, ends=True, takes_machine=True),
    (State.DELETED, None): Desire(here=Wish.NONE, condition=_DELETED, ends=True),
    # Of placement: an alternate, or one that is not wanted any more; a destination (before it is claimed `here` is the
    # source).
    (State.CLAIMING, State.BUILDING): Desire(here=Wish.GONE, asks=Ask.CLAIM, work=Work.BUILD),
    (State.CLAIMING, State.DELETED): Desire(here=Wish.GONE, asks=Ask.CLAIM, condition=_DELETED),
    (State.CLAIMING, State.PREPARING): Desire(
        here=Wish.NONE, source=Wish.STAY, asks=Ask.CLAIM, progress=MoveState.CLAIMING, work=Work.MOVE
    ),
    # Of hosts: all machines of it, the source of a move that has arrived, the destination of one that is undone, and
    # the machine of one that is shelved.
    (State.DESTROYING, State.DELETED): Desire(here=Wish.DESTROY, source=Wish.DESTROY, condition=_DELETED),
    (State.DESTROYING, State.ACTIVE): Desire(here=Wish.STAY, source=Wish.DESTROY, condition=None, work=Work.MOVE),
    (State.DESTROYING, State.REVERTING): Desire(
        here=Wish.DESTROY, source=Wish.STAY, progress=MoveState.UNDOING, change=ChangeKind.RESIZE, work=Work.MOVE
    ),
    (State.DESTROYING, State.OFFLOADED): Desire(here=Wish.DESTROY, work=Work.MOVE, relies_on_fence=True),
    # Of placement, once that is gone: what the instance holds, or its migration.
    (State.RELEASING, State.FAILED): Desire(here=Wish.GONE, asks=Ask.RELEASE, condition=_FAILED),
    (State.RELEASING, State.DELETED): Desire(here=Wish.GONE, asks=Ask.RELEASE, condition=_DELETED),
    (State.RELEASING, State.OFFLOADED): Desire(here=Wish.NONE, asks=Ask.RELEASE, work=Work.MOVE, relies_on_fence=True),
    (State.RELEASING, State.ACTIVE): Desire(
        here=Wish.STAY, source=Wish.GONE, asks=Ask.RELEASE_MIGRATION, condition=None, work=Work.MOVE
    ),
    # A move.
    (State.PREPARING, None): Desire(
        here=Wish.UNCOMMANDED,
        source=Wish.STAY,
        progress=MoveState.PREPARING,
        change=ChangeKind.CHECK,
        work=Work.MOVE,
        leaves_lost_service=True,
    ),
    (State.HANDING_OVER, None): Desire(
        here=Wish.UNCOMMANDED,
        source=Wish.STAY,
        progress=MoveState.MIGRATING,
        change=ChangeKind.HAND_OVER,
        work=Work.MOVE,
    ),
    (State.FINISHING, None): Desire(
        here=Wish.BUILD, source=Wish.STAY, progress=MoveState.FINISHING, work=Work.MOVE, relies_on_fence=True
    ),
    (State.RESIZING, None): Desire(here=Wish.STAY, change=ChangeKind.RESIZE, work=Work.MOVE),
    (State.RESIZED, None): Desire(here=Wish.RUN, source=Wish.STAY, condition=Condition.RESIZED, work=Work.MOVE),
    (State.REVERTING, None): Desire(
        here=Wish.GONE, source=Wish.STAY, asks=Ask.REVERT, progress=MoveState.UNDOING, work=Work.MOVE
    ),
    (State.RESTARTING, None): Desire(
        here=Wish.STAY, progress=MoveState.UNDOING, change=ChangeKind.START, work=Work.MOVE
    ),
    (State.CHANGING, None): Desire(here=Wish.STAY, work=Work.MOVE),
    (State.OFFLOADED, None): Desire(here=Wish.NONE, condition=Condition.OFFLOADED, ends=True),
    (State.DEPARTED, None): Desire(here=Wish.NONE, elsewhere=True),
    (State.DEPARTED, State.ABSENT): Desire(here=Wish.NONE, elsewhere=True, condition=Condition.UNKNOWN),
}


class Phased(Protocol):
    """What a desire is read of."""

    @property
    def phase(self) -> Phase:
        """The state, and what follows."""


def desire_of(record: Phased) -> Desire:
    """The row of a record."""
    return DESIRES[record.phase]


WANTED = frozenset({Wish.BUILD, Wish.RUN, Wish.STAY})
OVER = frozenset({Wish.DESTROY, Wish.GONE, Wish.NONE})
# It is there, or its host was commanded to destroy it: its orders follow it to another service.
ORDERED = frozenset({Wish.STAY, Wish.RUN, Wish.BUILD, Wish.DESTROY})
# Its host carries it, or may still: one that a report leaves out is a finding.
EXPECTED = frozenset({Wish.RUN, Wish.DESTROY})
# Its host was commanded to make it, and it may be there.
MAY_BE_THERE = WANTED | EXPECTED


def states_where(holds: Callable[[Desire], bool]) -> frozenset[Phase]:
    """The states whose row is so."""
    return frozenset(phase for phase, row in DESIRES.items() if holds(row))


# A client has requested the delete, and nothing revokes that: no attempt is wanted, whatever its number.
DELETE_REQUESTED = states_where(lambda row: row.condition is Condition.DELETED)
# The build is given up, or its client has deleted it since.
REFUSED = states_where(lambda row: row.condition in (Condition.DELETED, Condition.FAILED))
# Nothing is awaited, and by the record there is no machine and no allocation.
AT_REST = states_where(lambda row: row.here is Wish.NONE and row.asks is None)
# These may be forgotten after a time; one that has failed, after a longer one, and one that has left and is built
# elsewhere by now: schedulers that are set back to before that command this cell.
PURGED = AT_REST & states_where(lambda row: row.condition is Condition.DELETED)
PURGED_FAILED = AT_REST & states_where(lambda row: row.condition in (Condition.FAILED, Condition.UNKNOWN))
ELSEWHERE = states_where(lambda row: row.elsewhere)
(BUILT_ELSEWHERE,) = ELSEWHERE & PURGED_FAILED
# In these an evacuation from the host of its source may have a machine at its destination.
EVACUATED = states_where(lambda row: row.source is Wish.STAY and row.here in MAY_BE_THERE)

# What was to be destroyed has been answered for: by its host, or by the host's fence.
ANSWERED_FOR = states_where(lambda row: row.asks not in (None, Ask.CLAIM) and row.condition is not Condition.FAILED)
# A report of its host that leaves it out is compared with the record.
EXPECTED_HERE = states_where(lambda row: row.here in EXPECTED)
NOT_HERE = states_where(lambda row: row.here is Wish.NONE)
LEFT_WITH_ITS_SERVICE = states_where(lambda row: row.leaves_lost_service)


def in_text(phase: Phase) -> str:
    """As the column `state` has it: the state, and behind a slash what follows."""
    return "/".join(state for state in phase if state is not None)


def of_text(text: str) -> Phase:
    """What `in_text` has written."""
    state, _, then = text.partition("/")
    return State(state), State(then) if then else None


def in_sql(phases: frozenset[Phase]) -> str:
    """The states as the list of an SQL condition, in the order of the table."""
    return ", ".join(f"'{in_text(phase)}'" for phase in DESIRES if phase in phases)

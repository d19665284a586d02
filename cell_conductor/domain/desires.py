"""The desire of each state: what every machine of the instance is to be, and what is asked of placement.

One row a state, and nothing else in the cell lists states. What a record proves to be over (`proof`), what a report has
to show (`report`), what is commanded (`orders`), what placement is asked (`table.question_of`), what a client sees, and
the lists of states in SQL are read from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from msgspec import Struct

from bus.contracts.moves import ChangeKind, Condition, MoveState

from .instance import State


class Wish(StrEnum):
    """What a machine of the instance is to be. Any that is over is destroyed when its host lists it."""

    UNKNOWN = "unknown"  # by the record there is none, and it proves nothing about one
    BUILD = "build"  # its host was commanded to build it; it may not be there yet
    RUN = "run"  # it is there for its client: a report that leaves it out ends what no client has ended
    STAY = "stay"  # it is there, as it is or being changed
    UNCOMMANDED = "uncommanded"  # claimed, and nothing that makes a machine was commanded: one there is unexplained
    DESTROY = "destroy"  # over: its host is commanded until it answers, or a report leaves it out
    CLEAR = "clear"  # the same, and no report counts
    GONE = "gone"  # over, and may be there still
    NONE = "none"  # over, and by the record there is none


class Ask(StrEnum):
    """What is asked of placement while the state lasts."""

    CLAIM = "claim"
    RELEASE = "release"
    RELEASE_MIGRATION = "release_migration"
    REVERT = "revert"


class Work(StrEnum):
    """What was under way: after a set-back of the database it may have advanced beyond its record."""

    BUILD = "build"
    MOVE = "move"


class Desire(Struct, frozen=True, kw_only=True):
    """One row. here: the machine of the current attempt. source: that of the move's source, on another host or, before
    a destination is claimed and when the move is undone in place, the same.

    condition: for clients (None: by its power). progress: of the request under way. change: of one machine,
    commanded and awaited; in `changing` by the request, and a resize only in place. work: in doubt after a set-back.
    elsewhere: another cell has it. arrives: it may come from another cell. ends: a request for it has ended well or
    not. takes_machine: an operator may give it a machine in quarantine. relies_on_fence: an evacuation that has come so
    far relies on the fence of its host. leaves_lost_service: another host is tried when the service of this one is
    lost.
    """

    here: Wish
    source: Wish = Wish.UNKNOWN
    asks: Ask | None = None
    condition: Condition | None = Condition.MOVING
    progress: MoveState = MoveState.CHANGING
    change: ChangeKind | None = None
    work: Work | None = None
    elsewhere: bool = False
    arrives: bool = False
    ends: bool = False
    takes_machine: bool = False
    relies_on_fence: bool = False
    leaves_lost_service: bool = False


_DELETED, _FAILED = Condition.DELETED, Condition.FAILED
DESIRES: Mapping[State, Desire] = {
    State.ABSENT: Desire(here=Wish.UNKNOWN, arrives=True),
    State.TOMBSTONE: Desire(here=Wish.NONE, condition=_DELETED, arrives=True),
    State.BUILDING: Desire(here=Wish.BUILD, work=Work.BUILD, leaves_lost_service=True),
    State.ADOPTING: Desire(here=Wish.STAY, asks=Ask.CLAIM),
    State.RECLAIMING: Desire(here=Wish.GONE, asks=Ask.CLAIM, work=Work.BUILD),
    State.ABANDONING: Desire(here=Wish.GONE, asks=Ask.CLAIM, condition=_DELETED),
    State.ACTIVE: Desire(here=Wish.RUN, condition=None, ends=True, takes_machine=True),
    State.GIVING_UP: Desire(here=Wish.GONE, asks=Ask.RELEASE, condition=_FAILED),
    State.FAILED: Desire(here=Wish.NONE, condition=_FAILED, ends=True, takes_machine=True),
    State.DELETING: Desire(here=Wish.DESTROY, source=Wish.DESTROY, condition=_DELETED),
    State.RELEASING: Desire(here=Wish.GONE, asks=Ask.RELEASE, condition=_DELETED),
    State.DELETED: Desire(here=Wish.NONE, condition=_DELETED, ends=True),
    # A move. Before a destination is claimed `here` is the source.
    State.CLAIMING: Desire(
        here=Wish.NONE, source=Wish.STAY, asks=Ask.CLAIM, progress=MoveState.CLAIMING, work=Work.MOVE
    ),
    State.PREPARING: Desire(
        here=Wish.UNCOMMANDED,
        source=Wish.STAY,
        progress=MoveState.PREPARING,
        change=ChangeKind.CHECK,
        work=Work.MOVE,
        leaves_lost_service=True,
    ),
    State.HANDING_OVER: Desire(
        here=Wish.UNCOMMANDED,
        source=Wish.STAY,
        progress=MoveState.MIGRATING,
        change=ChangeKind.HAND_OVER,
        work=Work.MOVE,
    ),
    State.FINISHING: Desire(
        here=Wish.BUILD, source=Wish.STAY, progress=MoveState.FINISHING, work=Work.MOVE, relies_on_fence=True
    ),
    State.RESIZING: Desire(here=Wish.STAY, change=ChangeKind.RESIZE),
    State.RESIZED: Desire(here=Wish.RUN, source=Wish.STAY, condition=Condition.RESIZED, work=Work.MOVE),
    State.CONFIRMING: Desire(here=Wish.STAY, source=Wish.DESTROY, condition=None, work=Work.MOVE),
    State.RELEASING_SOURCE: Desire(
        here=Wish.STAY, source=Wish.GONE, asks=Ask.RELEASE_MIGRATION, condition=None, work=Work.MOVE
    ),
    State.UNDOING: Desire(
        here=Wish.DESTROY, source=Wish.STAY, progress=MoveState.UNDOING, change=ChangeKind.RESIZE, work=Work.MOVE
    ),
    State.REVERTING: Desire(
        here=Wish.GONE, source=Wish.STAY, asks=Ask.REVERT, progress=MoveState.UNDOING, work=Work.MOVE
    ),
    State.RESTARTING: Desire(here=Wish.STAY, progress=MoveState.UNDOING, change=ChangeKind.START, work=Work.MOVE),
    State.CHANGING: Desire(here=Wish.STAY),
    State.OFFLOADING: Desire(here=Wish.DESTROY, relies_on_fence=True),
    State.VACATING: Desire(here=Wish.NONE, asks=Ask.RELEASE, relies_on_fence=True),
    State.OFFLOADED: Desire(here=Wish.NONE, condition=Condition.OFFLOADED, arrives=True, ends=True),
    # Of one that leaves for another cell, and of the machine that is kept for it.
    State.DEPARTED: Desire(here=Wish.NONE, elsewhere=True, arrives=True),
    State.LEAVING: Desire(here=Wish.STAY, progress=MoveState.MIGRATING, change=ChangeKind.SNAPSHOT, work=Work.MOVE),
    State.REASSIGNING: Desire(here=Wish.STAY, asks=Ask.CLAIM, progress=MoveState.MIGRATING, work=Work.MOVE),
    State.KEPT: Desire(here=Wish.STAY, elsewhere=True),
    State.CLEARING: Desire(here=Wish.CLEAR, elsewhere=True),
    State.RELEASING_KEPT: Desire(here=Wish.GONE, asks=Ask.RELEASE_MIGRATION, elsewhere=True),
}

WANTED = frozenset({Wish.BUILD, Wish.RUN, Wish.STAY})
OVER = frozenset({Wish.DESTROY, Wish.CLEAR, Wish.GONE, Wish.NONE})
# Its host carries it, or may still: one that a report leaves out is a finding.
EXPECTED = frozenset({Wish.RUN, Wish.DESTROY})
# Its host was commanded to make it, and it may be there.
MAY_BE_THERE = WANTED | EXPECTED


def states_where(holds: Callable[[Desire], bool]) -> frozenset[State]:
    """The states whose row is so."""
    return frozenset(state for state, row in DESIRES.items() if holds(row))


# A client has requested the delete, and nothing revokes that: no attempt is wanted, whatever its number.
DELETE_REQUESTED = states_where(lambda row: row.condition is Condition.DELETED)
# The build is given up, or its client has deleted it since.
REFUSED = states_where(lambda row: row.condition in (Condition.DELETED, Condition.FAILED))
# Nothing is awaited, and by the record there is no machine and no allocation.
AT_REST = states_where(lambda row: row.here is Wish.NONE and row.asks is None)
# These may be forgotten after a time; one that has failed, after a longer one.
PURGED = AT_REST & states_where(lambda row: row.elsewhere or row.condition is Condition.DELETED)
PURGED_FAILED = AT_REST & states_where(lambda row: row.condition is Condition.FAILED)
ELSEWHERE = states_where(lambda row: row.elsewhere)
IN_DOUBT_AFTER_SET_BACK = states_where(lambda row: row.work is not None)
# In these an evacuation from the host of its source may have a machine at its destination.
EVACUATED = states_where(lambda row: row.source is Wish.STAY and row.here in MAY_BE_THERE)
EVACUATED_IN_DOUBT = states_where(lambda row: row.source is Wish.STAY and row.here is Wish.UNCOMMANDED)


# A report of its host that leaves it out is compared with the record.
EXPECTED_HERE = states_where(lambda row: row.here in EXPECTED)
NOT_HERE = states_where(lambda row: row.here is Wish.NONE)
LEFT_WITH_ITS_SERVICE = states_where(lambda row: row.leaves_lost_service)


def in_sql(states: frozenset[State]) -> str:
    """The states as the list of an SQL condition, in the order of the enumeration."""
    return ", ".join(f"'{state}'" for state in State if state in states)

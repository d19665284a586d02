"""The desired state of each phase: what every machine of the instance is to be, and what is asked of placement. One row
a state, and one for each state that may follow where an answer is waited for. `table` has the effect of each event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.actions import ActionState, ChangeKind, Condition
from cell_conductor.state.instance import MACHINE_EXISTS, Phase, State


class MachineTarget(StrEnum):
    """What a machine of the instance is to be. Any that is over is destroyed when its host lists it."""

    UNKNOWN = "unknown"  # by the record there is none, and it proves nothing about one
    BUILT = "built"  # its host was commanded to build it; it may not be there yet
    RUNNING = "running"  # it is there for its client: a report that leaves it out ends what no client has ended
    PRESENT = "present"  # it is there, as it is or being changed
    NOT_COMMANDED = "not_commanded"  # claimed, and nothing that makes a machine was commanded: one there is unknown
    DESTROYED = "destroyed"  # over: its host is commanded until it answers, or a report leaves it out
    ABSENT_AFTER_DESTROY = "absent_after_destroy"  # over, and may be there still
    ABSENT = "absent"  # over, and by the record there is none


class PlacementCall(StrEnum):
    """What is asked of placement while the state lasts."""

    CLAIM = "claim"
    RELEASE = "release"
    RELEASE_MIGRATION = "release_migration"
    REVERT = "revert"


class Work(StrEnum):
    """What is under way."""

    BUILD = "build"
    ACTION = "action"


class DesiredState(Struct, frozen=True, kw_only=True):
    """One row of the desired states."""

    current: MachineTarget  # the machine of the current attempt
    # The machine of the move's source: on another host, or the same one before a destination is claimed and when the
    # move is rolled back in place.
    source: MachineTarget = MachineTarget.UNKNOWN
    placement_call: PlacementCall | None = None
    condition: Condition | None = Condition.MOVING  # the condition that clients see (None: by its power)
    progress: ActionState = ActionState.CHANGING  # state of the request under way
    # Of one machine, commanded and awaited; in `changing` by the request, and a resize only in place.
    change: ChangeKind | None = None
    work: Work | None = None
    in_other_cell: bool = False  # another cell has it
    ends: bool = False  # a request for it has ended, well or not
    may_adopt: bool = False  # an operator may give it a machine in quarantine
    relies_on_fence: bool = False  # an evacuation that has come so far relies on its host's fence
    abandons_lost_service: bool = False  # another host is tried when the service of this one is lost


_DELETED, _FAILED = Condition.DELETED, Condition.FAILED
DESIRED_STATES: Mapping[Phase, DesiredState] = {
    (State.ABSENT, None): DesiredState(current=MachineTarget.UNKNOWN),
    (State.TOMBSTONE, None): DesiredState(current=MachineTarget.ABSENT, condition=_DELETED),
    (State.BUILDING, None): DesiredState(current=MachineTarget.BUILT, work=Work.BUILD, abandons_lost_service=True),
    (State.ACTIVE, None): DesiredState(current=MachineTarget.RUNNING, condition=None, ends=True, may_adopt=True),
    (State.FAILED, None): DesiredState(current=MachineTarget.ABSENT, condition=_FAILED, ends=True, may_adopt=True),
    (State.DELETED, None): DesiredState(current=MachineTarget.ABSENT, condition=_DELETED, ends=True),
    # Of placement: an alternate, or one that is not wanted any more; a destination (before it is claimed `current` is
    # the source).
    (State.CLAIMING, State.BUILDING): DesiredState(
        current=MachineTarget.ABSENT_AFTER_DESTROY, placement_call=PlacementCall.CLAIM, work=Work.BUILD
    ),
    (State.CLAIMING, State.DELETED): DesiredState(
        current=MachineTarget.ABSENT_AFTER_DESTROY, placement_call=PlacementCall.CLAIM, condition=_DELETED
    ),
    (State.CLAIMING, State.PREPARING): DesiredState(
        current=MachineTarget.ABSENT,
        source=MachineTarget.PRESENT,
        placement_call=PlacementCall.CLAIM,
        progress=ActionState.CLAIMING,
        work=Work.ACTION,
    ),
    # Of hosts: all machines of it, the source of a move that has arrived, the destination of one that is rolled back,
    # and the machine of one that is shelved.
    (State.DESTROYING, State.DELETED): DesiredState(
        current=MachineTarget.DESTROYED, source=MachineTarget.DESTROYED, condition=_DELETED
    ),
    (State.DESTROYING, State.ACTIVE): DesiredState(
        current=MachineTarget.PRESENT, source=MachineTarget.DESTROYED, condition=None, work=Work.ACTION
    ),
    (State.DESTROYING, State.REVERTING): DesiredState(
        current=MachineTarget.DESTROYED,
        source=MachineTarget.PRESENT,
        progress=ActionState.ROLLING_BACK,
        change=ChangeKind.RESIZE,
        work=Work.ACTION,
    ),
    (State.DESTROYING, State.OFFLOADED): DesiredState(
        current=MachineTarget.DESTROYED, work=Work.ACTION, relies_on_fence=True
    ),
    # Of placement, once that is gone: what the instance holds, or its migration.
    (State.RELEASING, State.FAILED): DesiredState(
        current=MachineTarget.ABSENT_AFTER_DESTROY, placement_call=PlacementCall.RELEASE, condition=_FAILED
    ),
    (State.RELEASING, State.DELETED): DesiredState(
        current=MachineTarget.ABSENT_AFTER_DESTROY, placement_call=PlacementCall.RELEASE, condition=_DELETED
    ),
    (State.RELEASING, State.OFFLOADED): DesiredState(
        current=MachineTarget.ABSENT, placement_call=PlacementCall.RELEASE, work=Work.ACTION, relies_on_fence=True
    ),
    (State.RELEASING, State.ACTIVE): DesiredState(
        current=MachineTarget.PRESENT,
        source=MachineTarget.ABSENT_AFTER_DESTROY,
        placement_call=PlacementCall.RELEASE_MIGRATION,
        condition=None,
        work=Work.ACTION,
    ),
    # A move.
    (State.PREPARING, None): DesiredState(
        current=MachineTarget.NOT_COMMANDED,
        source=MachineTarget.PRESENT,
        progress=ActionState.PREPARING,
        change=ChangeKind.CHECK,
        work=Work.ACTION,
        abandons_lost_service=True,
    ),
    (State.HANDING_OVER, None): DesiredState(
        current=MachineTarget.NOT_COMMANDED,
        source=MachineTarget.PRESENT,
        progress=ActionState.MIGRATING,
        change=ChangeKind.HAND_OVER,
        work=Work.ACTION,
    ),
    (State.FINISHING, None): DesiredState(
        current=MachineTarget.BUILT,
        source=MachineTarget.PRESENT,
        progress=ActionState.FINISHING,
        work=Work.ACTION,
        relies_on_fence=True,
    ),
    (State.RESIZING, None): DesiredState(current=MachineTarget.PRESENT, change=ChangeKind.RESIZE, work=Work.ACTION),
    (State.RESIZED, None): DesiredState(
        current=MachineTarget.RUNNING, source=MachineTarget.PRESENT, condition=Condition.RESIZED, work=Work.ACTION
    ),
    (State.REVERTING, None): DesiredState(
        current=MachineTarget.ABSENT_AFTER_DESTROY,
        source=MachineTarget.PRESENT,
        placement_call=PlacementCall.REVERT,
        progress=ActionState.ROLLING_BACK,
        work=Work.ACTION,
    ),
    (State.RESTARTING, None): DesiredState(
        current=MachineTarget.PRESENT, progress=ActionState.ROLLING_BACK, change=ChangeKind.START, work=Work.ACTION
    ),
    (State.CHANGING, None): DesiredState(current=MachineTarget.PRESENT, work=Work.ACTION),
    (State.OFFLOADED, None): DesiredState(current=MachineTarget.ABSENT, condition=Condition.OFFLOADED, ends=True),
    (State.TRANSFERRED, None): DesiredState(current=MachineTarget.ABSENT, in_other_cell=True),
    (State.TRANSFERRED, State.ABSENT): DesiredState(
        current=MachineTarget.ABSENT, in_other_cell=True, condition=Condition.UNKNOWN
    ),
}


# Of a build that was refused because of a machine that may be another project's: it has commanded nothing.
REFUSED_BUILDS = {phase: replace(row, current=MachineTarget.UNKNOWN) for phase, row in DESIRED_STATES.items()}


class Phased(Protocol):
    """What a desired state is read of."""

    @property
    def phase(self) -> Phase:
        """The state, and what follows."""

    @property
    def code(self) -> str:
        """Why it has failed."""


def desired_state_of(record: Phased) -> DesiredState:
    """The row of a record."""
    return (REFUSED_BUILDS if record.code == MACHINE_EXISTS else DESIRED_STATES)[record.phase]


DESIRED = frozenset({MachineTarget.BUILT, MachineTarget.RUNNING, MachineTarget.PRESENT})
ENDED = frozenset({MachineTarget.DESTROYED, MachineTarget.ABSENT_AFTER_DESTROY, MachineTarget.ABSENT})
# It is there, or its host was commanded to destroy it: its commands follow it to another service.
COMMANDED = frozenset({MachineTarget.PRESENT, MachineTarget.RUNNING, MachineTarget.BUILT, MachineTarget.DESTROYED})
# Its host carries it, or may still: one that a report leaves out is a difference.
EXPECTED = frozenset({MachineTarget.RUNNING, MachineTarget.DESTROYED})
# By the record there is none that its host may keep.
NOT_THERE = frozenset({MachineTarget.UNKNOWN, MachineTarget.ABSENT_AFTER_DESTROY, MachineTarget.ABSENT})
# Its host was commanded to make it, and it may be there.
MAY_HAVE_MACHINE = DESIRED | EXPECTED


def phases_matching(matches: Callable[[DesiredState], bool]) -> frozenset[Phase]:
    """The states whose row is so."""
    return frozenset(phase for phase, row in DESIRED_STATES.items() if matches(row))


# A client has requested the delete, and nothing revokes that: no attempt is wanted, whatever its number.
DELETE_REQUESTED = phases_matching(lambda row: row.condition is Condition.DELETED)
# The build has failed, or its client has deleted it since.
ENDED_BY_FAILURE_OR_DELETE = phases_matching(lambda row: row.condition in (Condition.DELETED, Condition.FAILED))
# Nothing is awaited, and by the record there is no machine and no allocation.
AT_REST = phases_matching(lambda row: row.current is MachineTarget.ABSENT and row.placement_call is None)
# These may be deleted after a time; one that has failed, after a longer one, and one that has left and is built
# elsewhere by now: schedulers that are restored to before that command this cell.
PURGEABLE = AT_REST & phases_matching(lambda row: row.condition is Condition.DELETED)
PURGEABLE_FAILED = AT_REST & phases_matching(lambda row: row.condition in (Condition.FAILED, Condition.UNKNOWN))
IN_OTHER_CELL = phases_matching(lambda row: row.in_other_cell)
(BUILT_IN_OTHER_CELL,) = IN_OTHER_CELL & PURGEABLE_FAILED
# In these an evacuation from the host of its source may have a machine at its destination.
EVACUATED = phases_matching(lambda row: row.source is MachineTarget.PRESENT and row.current in MAY_HAVE_MACHINE)

# What was to be destroyed has been answered for: by its host, or by the host's fence.
DESTROY_ANSWERED = phases_matching(
    lambda row: row.placement_call not in (None, PlacementCall.CLAIM) and row.condition is not Condition.FAILED
)
# A report of its host that leaves it out is compared with the record.
EXPECTED_ON_CURRENT = phases_matching(lambda row: row.current in EXPECTED)
ABSENT_ON_CURRENT = phases_matching(lambda row: row.current is MachineTarget.ABSENT)
ABANDONED_WITH_SERVICE = phases_matching(lambda row: row.abandons_lost_service)


def phase_to_text(phase: Phase) -> str:
    """As the column `state` has it: the state, and behind a slash what follows."""
    return "/".join(state for state in phase if state is not None)


def phase_from_text(text: str) -> Phase:
    """What `phase_to_text` has written."""
    state, _, next_state = text.partition("/")
    return State(state), State(next_state) if next_state else None


def phases_as_sql(phases: frozenset[Phase]) -> str:
    """The states as the list of an SQL condition, in the order of the table."""
    return ", ".join(f"'{phase_to_text(phase)}'" for phase in DESIRED_STATES if phase in phases)

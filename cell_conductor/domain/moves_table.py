"""The rows of the state machine's table for instances that a request is about, and the rules that all rows share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from . import (
    arrival_doubts,
    change_rules,
    delete_rules,
    departure_rules,
    fence_rules,
    leave_rules,
    move_doubts,
    move_events,
    move_rules,
    repeat_rules,
    rules,
    undo_rules,
    way_back,
)
from .events import (
    BuildRequested,
    ChangeEnded,
    Claimed,
    ClaimRefused,
    DeleteRequested,
    Destroyed,
    Event,
    HostFenced,
    HostMissing,
    HostRuns,
    MachineFound,
    MoveRequested,
    Released,
    Reverted,
    ServiceLost,
    SourceAnswered,
    Spawned,
    SpawnFailed,
    TimedOut,
)
from .instance import Instance, State
from .steps import Step, StepContext


class Rule(Struct, frozen=True):
    """The effect of an event in a state: the rule, and every state it may lead to besides staying."""

    apply: Callable[[Instance, Any, StepContext], Step]
    to: tuple[State, ...] = ()

    @property
    def name(self) -> str:
        """The function's name, as the table shows it."""
        return self.apply.__name__


IGNORE = Rule(rules.ignore)
DESTROY_ORPHAN = Rule(rules.destroy_orphan)
DESTROY_LEFTOVER = Rule(rules.destroy_leftover)
CONFIRM_RUNNING = Rule(rules.confirm_running)
AGAIN = Rule(rules.repeat_question)
COMMAND_AGAIN = Rule(undo_rules.command_again)
ACTIVE_AGAIN = Rule(repeat_rules.announce_active_again)
REFUSE = Rule(move_events.refuse)
REFUSE_BUSY = Rule(move_events.refuse_busy)
DELETE_MOVING = Rule(delete_rules.delete, (State.DELETING, State.RELEASING, State.UNDOING, State.VACATING))
UNDONE = (State.UNDOING, State.REVERTING, State.VACATING)
NEXT = (State.CLAIMING, *UNDONE)
ARRIVED_CELL = (State.OFFLOADED, State.CLAIMING, State.VACATING, State.RELEASING, State.DEPARTED)
TAKEN_BACK = (State.REVERTING, State.DELETING)
STAYS = (State.RESTARTING, State.ACTIVE)
ARRIVED = (State.RESIZED, State.CONFIRMING, State.RELEASING_SOURCE, State.ACTIVE)


# The effect in every state of a move, unless its row overrides it: none, or the fence of the machine itself.
MOVING: Mapping[type[Event], Rule | None] = {
    BuildRequested: ACTIVE_AGAIN,
    DeleteRequested: DELETE_MOVING,
    Spawned: DESTROY_ORPHAN,
    SpawnFailed: DESTROY_LEFTOVER,
    TimedOut: None,
    Claimed: IGNORE,
    ClaimRefused: IGNORE,
    Destroyed: IGNORE,
    Released: IGNORE,
    HostRuns: DESTROY_ORPHAN,
    HostMissing: IGNORE,
    ServiceLost: IGNORE,
    MoveRequested: REFUSE_BUSY,
    ChangeEnded: IGNORE,
    Reverted: IGNORE,
    HostFenced: IGNORE,
    MachineFound: IGNORE,
    SourceAnswered: IGNORE,
}
ABORT = Rule(move_rules.abort, UNDONE)
ARRIVE = Rule(move_rules.arrive, ARRIVED)
FOLLOW_FOUND = Rule(arrival_doubts.follow_found, (State.UNDOING,))
FOLLOW_UNDONE = Rule(move_doubts.follow_undone, ARRIVED)
FOLLOW_RESIZED = Rule(move_doubts.follow_resized, (State.CONFIRMING, State.ACTIVE))
SEARCH_AGAIN = Rule(arrival_doubts.repeat_in_doubt)
SKIP = Rule(move_rules.skip_destination, NEXT)
MOVES: Mapping[State, Mapping[type[Event], Rule | None]] = {
    State.CLAIMING: {
        **MOVING,
        TimedOut: SEARCH_AGAIN,
        Claimed: Rule(
            move_rules.take_destination, (State.PREPARING, State.RESIZING, *UNDONE, State.DELETING, State.RELEASING)
        ),
        ClaimRefused: Rule(move_rules.run_out_of_hosts, (*UNDONE, State.DELETING, State.RELEASING)),
        MoveRequested: ABORT,
        MachineFound: FOLLOW_FOUND,
    },
    State.PREPARING: {
        **MOVING,
        TimedOut: SKIP,
        ServiceLost: SKIP,
        ChangeEnded: Rule(move_rules.go_on, (State.HANDING_OVER, State.FINISHING, *NEXT)),
        MoveRequested: ABORT,
        HostFenced: Rule(fence_rules.leave_checked_destination, NEXT),
    },
    State.HANDING_OVER: {
        **MOVING,
        TimedOut: Rule(move_rules.give_up_hand_over, UNDONE),
        ChangeEnded: Rule(move_rules.take_over, (State.FINISHING, *NEXT)),
        MoveRequested: ABORT,
        HostFenced: Rule(fence_rules.stay_at_source, UNDONE),
    },
    State.FINISHING: {
        **MOVING,
        Spawned: ARRIVE,
        SpawnFailed: Rule(move_rules.fail_destination, NEXT),
        TimedOut: COMMAND_AGAIN,
        Destroyed: Rule(move_rules.lose_destination, NEXT),
        HostRuns: ARRIVE,
        HostFenced: Rule(fence_rules.give_up_destination, NEXT),
    },
    State.RESIZING: {
        **MOVING,
        Spawned: CONFIRM_RUNNING,
        TimedOut: Rule(move_rules.give_up_in_place, UNDONE),
        HostRuns: CONFIRM_RUNNING,
        ChangeEnded: Rule(move_rules.arrive_in_place, (*ARRIVED, *NEXT)),
        HostFenced: Rule(fence_rules.give_up_destination, UNDONE),
    },
    State.RESIZED: {
        **MOVING,
        Spawned: FOLLOW_RESIZED,
        TimedOut: Rule(move_rules.confirm_in_time, (State.CONFIRMING, State.RELEASING_SOURCE, State.ACTIVE)),
        Destroyed: Rule(move_doubts.note_gone, (State.CONFIRMING, *UNDONE)),
        HostRuns: FOLLOW_RESIZED,
        HostMissing: Rule(move_rules.revert_lost, (*UNDONE, State.GIVING_UP)),
        MoveRequested: Rule(move_rules.end_resized, (State.CONFIRMING, State.RELEASING_SOURCE, State.ACTIVE, *UNDONE)),
        HostFenced: Rule(fence_rules.give_up_destination, UNDONE),
        SourceAnswered: Rule(way_back.go_back, UNDONE),
    },
    State.CONFIRMING: {
        **MOVING,
        Spawned: CONFIRM_RUNNING,
        TimedOut: COMMAND_AGAIN,
        Destroyed: Rule(move_rules.release_source, (State.RELEASING_SOURCE,)),
        HostRuns: CONFIRM_RUNNING,
        HostMissing: Rule(move_rules.release_source, (State.RELEASING_SOURCE,)),
        HostFenced: Rule(fence_rules.release_source, (State.RELEASING_SOURCE,)),
    },
    State.RELEASING_SOURCE: {
        **MOVING,
        Spawned: CONFIRM_RUNNING,
        TimedOut: AGAIN,
        Released: Rule(move_rules.end_source_released, (State.ACTIVE,)),
        HostRuns: CONFIRM_RUNNING,
    },
    State.UNDOING: {
        **MOVING,
        Spawned: FOLLOW_UNDONE,
        TimedOut: COMMAND_AGAIN,
        Destroyed: Rule(undo_rules.revert_destroyed, (State.REVERTING, State.VACATING)),
        HostRuns: FOLLOW_UNDONE,
        HostMissing: Rule(undo_rules.revert_destroyed, (State.REVERTING, State.VACATING)),
        ChangeEnded: Rule(undo_rules.undo_failed_in_place, (State.REVERTING,)),
        HostFenced: Rule(fence_rules.revert, (State.REVERTING, State.VACATING)),
    },
    State.REVERTING: {
        **MOVING,
        TimedOut: SEARCH_AGAIN,
        Reverted: Rule(undo_rules.return_to_source, (State.RESTARTING, State.ACTIVE)),
    },
    State.RESTARTING: {
        **MOVING,
        Spawned: CONFIRM_RUNNING,
        TimedOut: COMMAND_AGAIN,
        HostRuns: CONFIRM_RUNNING,
        ChangeEnded: Rule(undo_rules.restarted, (State.ACTIVE,)),
        HostFenced: Rule(fence_rules.end_unstarted, (State.ACTIVE,)),
    },
    State.CHANGING: {
        **MOVING,
        Spawned: CONFIRM_RUNNING,
        TimedOut: COMMAND_AGAIN,
        HostRuns: CONFIRM_RUNNING,
        ChangeEnded: Rule(change_rules.changed, (State.ACTIVE, State.OFFLOADING)),
        HostFenced: Rule(fence_rules.end_change, (State.ACTIVE,)),
    },
    State.OFFLOADING: {
        **MOVING,
        Spawned: CONFIRM_RUNNING,
        TimedOut: COMMAND_AGAIN,
        Destroyed: Rule(change_rules.vacate, (State.VACATING,)),
        HostRuns: CONFIRM_RUNNING,
        HostMissing: Rule(change_rules.vacate, (State.VACATING,)),
        HostFenced: Rule(fence_rules.vacate, (State.VACATING,)),
    },
    State.VACATING: {
        **MOVING,
        TimedOut: SEARCH_AGAIN,
        Released: Rule(change_rules.end_offloaded, (State.OFFLOADED, State.DEPARTED)),
        MachineFound: FOLLOW_FOUND,
    },
    State.OFFLOADED: {
        **MOVING,
        DeleteRequested: Rule(delete_rules.delete_offloaded, (State.RELEASING,)),
        MoveRequested: Rule(departure_rules.begin_or_depart, (State.CLAIMING, State.VACATING, State.DEPARTED)),
    },
    State.DEPARTED: {
        **MOVING,
        DeleteRequested: Rule(departure_rules.refer),
        MoveRequested: Rule(departure_rules.refer, ARRIVED_CELL),
    },
    State.LEAVING: {
        **MOVING,
        Spawned: CONFIRM_RUNNING,
        TimedOut: Rule(leave_rules.leave_again, STAYS),
        HostRuns: CONFIRM_RUNNING,
        ChangeEnded: Rule(leave_rules.reassign, (State.REASSIGNING, *STAYS)),
        HostFenced: Rule(fence_rules.end_change, (State.ACTIVE,)),
    },
    State.REASSIGNING: {
        **MOVING,
        Spawned: CONFIRM_RUNNING,
        TimedOut: AGAIN,
        Claimed: Rule(leave_rules.hand_over, (State.KEPT, State.DELETING)),
        ClaimRefused: Rule(leave_rules.keep, (State.KEPT, State.DELETING, State.REVERTING)),
        HostRuns: CONFIRM_RUNNING,
    },
    State.KEPT: {
        **MOVING,
        DeleteRequested: Rule(leave_rules.note_delete),
        Spawned: CONFIRM_RUNNING,
        TimedOut: Rule(leave_rules.announce_again),
        HostRuns: CONFIRM_RUNNING,
        MoveRequested: Rule(leave_rules.follow_kept, (State.CLEARING, *TAKEN_BACK)),
        SourceAnswered: Rule(way_back.answer_kept),
    },
    State.CLEARING: {
        **MOVING,
        DeleteRequested: Rule(departure_rules.refer),
        Spawned: CONFIRM_RUNNING,
        TimedOut: COMMAND_AGAIN,
        Destroyed: Rule(leave_rules.clear_destroyed, (State.RELEASING_KEPT,)),
        HostRuns: CONFIRM_RUNNING,
        MoveRequested: Rule(departure_rules.refer),
        HostFenced: Rule(fence_rules.clear, (State.RELEASING_KEPT,)),
    },
    State.RELEASING_KEPT: {
        **MOVING,
        DeleteRequested: Rule(departure_rules.refer),
        TimedOut: AGAIN,
        Released: Rule(leave_rules.end_kept, (State.DEPARTED,)),
        MoveRequested: Rule(departure_rules.refer),
    },
}

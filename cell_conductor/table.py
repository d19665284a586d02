"""The instance state machine: one table, total over states and events. It also draws docs/reference/states.md."""

# Every row has the usual effects of `USUAL`, unless it says otherwise: most events are late, doubled or of no concern
# to a state, and its desired state (`desired_state`) is what a machine that is found and a request of a client are
# judged by. Where an answer is waited for, what follows is taken up here and nowhere else (`ByNextState`).

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from msgspec import Struct

from cell_conductor.rules import (
    action_start_rules,
    blocked_rules,
    build_end_rules,
    build_repeat_rules,
    build_rules,
    cell_transfer_rules,
    delete_rules,
    fence_rules,
    machine_rules,
    move_rules,
    resize_rules,
    rollback_rules,
)
from cell_conductor.state.events import (
    ActionQueried,
    ActionRequested,
    BuildRequested,
    ChangeEnded,
    Claimed,
    ClaimRefused,
    DeleteRequested,
    Destroyed,
    Event,
    HostFenced,
    InstanceTransferredIn,
    MachineDecided,
    MachineMissing,
    MachineRunning,
    Released,
    Reverted,
    RevertRefused,
    ServiceLost,
    SourceAnswered,
    Spawned,
    SpawnFailed,
    TimedOut,
    TransferEnded,
    TransferRequested,
)
from cell_conductor.state.instance import Instance, State
from cell_conductor.state.step import Step, StepContext


class Rule(Struct, frozen=True):
    """The effect of an event in a state."""

    apply: Callable[[Instance, Any, StepContext], Step]
    to: tuple[State, ...] = ()  # every state, besides the present one, that the rule may lead to

    @property
    def name(self) -> str:
        """The function's name, as the table shows it."""
        return self.apply.__name__


class ByNextState(Struct, frozen=True):
    """The rule of each state that may follow."""

    rules: Mapping[State | None, Rule]
    otherwise: Rule | None = None  # of the other states (None: there are none)

    def of(self, next_state: State | None) -> Rule | None:
        """The rule of what follows."""
        return self.rules.get(next_state, self.otherwise)


# None: cannot happen. Events from outside are legal everywhere; TimedOut comes only from a row that has a deadline.
Entry: TypeAlias = Rule | ByNextState | None


def rules_of(entry: Entry) -> tuple[Rule, ...]:
    """Every rule of one event in one state."""
    if isinstance(entry, ByNextState):
        return (*entry.rules.values(), *(() if entry.otherwise is None else (entry.otherwise,)))
    return () if entry is None else (entry,)


def ignore(instance: Instance, event: object, context: StepContext) -> Step:
    """Nothing changes: the event is late, repeated, or already handled."""
    return Step(instance)


IGNORE = Rule(ignore)
DESTROY_SUPERSEDED = Rule(machine_rules.destroy_superseded)
CONFIRM_RUNNING = Rule(machine_rules.confirm_running)
RESEND_REQUEST = Rule(build_rules.repeat_request)
RESEND_COMMANDS = Rule(rollback_rules.resend_commands)
ROLLED_BACK = (State.PREPARING, State.DESTROYING, State.REVERTING, State.RELEASING)
NEXT = (State.CLAIMING, *ROLLED_BACK)
DELETED_UNKNOWN = (State.TOMBSTONE, State.RELEASING)
FAILS_OVER = (State.CLAIMING, State.RELEASING)
COMPLETED = (State.RESIZED, State.DESTROYING, State.RELEASING, State.ACTIVE)
REFUSE = Rule(cell_transfer_rules.refuse_other)
ABORT = Rule(action_start_rules.abort, ROLLED_BACK)
ON_DESTINATION_ACTIVE = Rule(move_rules.on_destination_active, COMPLETED)
SKIP = Rule(move_rules.skip_destination, NEXT)
RELEASE_DESTROYED = Rule(delete_rules.release_destroyed, (State.RELEASING,))
DECIDE = Rule(blocked_rules.decide)

USUAL: Mapping[type[Event], Entry] = {
    BuildRequested: Rule(build_repeat_rules.answer_build),
    DeleteRequested: Rule(delete_rules.delete, (State.PREPARING, State.DESTROYING, State.RELEASING)),
    Spawned: DESTROY_SUPERSEDED,
    SpawnFailed: Rule(machine_rules.destroy_failed_attempt),
    TimedOut: None,
    Claimed: IGNORE,
    ClaimRefused: IGNORE,
    Destroyed: IGNORE,
    Released: IGNORE,
    MachineRunning: DESTROY_SUPERSEDED,
    MachineMissing: IGNORE,
    ServiceLost: IGNORE,
    ActionRequested: REFUSE,
    ActionQueried: Rule(cell_transfer_rules.answer_not_started),
    InstanceTransferredIn: Rule(
        cell_transfer_rules.accept_transfer, (State.CLAIMING, State.RELEASING, State.OFFLOADED)
    ),
    TransferRequested: REFUSE,
    TransferEnded: Rule(cell_transfer_rules.end_transfer, (State.TRANSFERRED,)),
    ChangeEnded: IGNORE,
    Reverted: IGNORE,
    RevertRefused: IGNORE,
    HostFenced: IGNORE,
    MachineDecided: IGNORE,
    SourceAnswered: IGNORE,
}

TABLE: Mapping[State, Mapping[type[Event], Entry]] = {
    State.ABSENT: {
        **USUAL,
        BuildRequested: Rule(build_rules.start_build, (State.BUILDING, *FAILS_OVER, State.FAILED)),
        DeleteRequested: Rule(delete_rules.delete_unknown, DELETED_UNKNOWN),
        Spawned: IGNORE,  # no record is no proof: the database may be new, another's, or older than the machine
        SpawnFailed: IGNORE,
        MachineRunning: IGNORE,
    },
    State.TOMBSTONE: {
        **USUAL,
        BuildRequested: Rule(delete_rules.refuse_build, (State.RELEASING,)),
        DeleteRequested: Rule(delete_rules.delete_unknown, (State.RELEASING,)),
    },
    State.BUILDING: {
        **USUAL,
        Spawned: Rule(build_rules.on_active, (State.ACTIVE,)),
        SpawnFailed: Rule(build_rules.fail_over, FAILS_OVER),
        TimedOut: Rule(build_rules.time_out, FAILS_OVER),
        Destroyed: Rule(build_rules.fail_over_destroyed, FAILS_OVER),
        MachineRunning: Rule(build_rules.on_active, (State.ACTIVE,)),
        MachineMissing: IGNORE,  # it may not have started yet: the deadline decides
        ServiceLost: Rule(build_rules.fail_over_lost_service, (State.CLAIMING,)),
        HostFenced: Rule(fence_rules.fail_over_fenced, FAILS_OVER),
    },
    State.CLAIMING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: RESEND_REQUEST,
        Claimed: ByNextState(
            {
                State.BUILDING: Rule(build_rules.build_on_alternate, (State.BUILDING, State.RELEASING)),
                State.DELETED: Rule(build_rules.release_alternate, (State.RELEASING,)),
                State.PREPARING: Rule(move_rules.take_destination, (State.PREPARING, State.RESIZING, *ROLLED_BACK)),
            }
        ),
        ClaimRefused: ByNextState(
            {
                State.BUILDING: Rule(build_end_rules.no_alternate_left, (State.RELEASING, State.FAILED)),
                State.DELETED: Rule(build_end_rules.end_unclaimed, (State.RELEASING, State.DELETED)),
                State.PREPARING: Rule(move_rules.no_destination_left, ROLLED_BACK),
            }
        ),
        MachineRunning: CONFIRM_RUNNING,
        ActionRequested: ByNextState({State.PREPARING: ABORT}, REFUSE),
        HostFenced: IGNORE,
    },
    State.RELEASING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: RESEND_REQUEST,
        Released: ByNextState(
            {
                State.FAILED: Rule(build_end_rules.end_failed, (State.FAILED,)),
                State.DELETED: Rule(build_end_rules.end_deleted, (State.DELETED,)),
                State.OFFLOADED: Rule(move_rules.end_offloaded, (State.OFFLOADED, State.TRANSFERRED)),
                State.ACTIVE: Rule(move_rules.end_source_released, (State.ACTIVE,)),
            }
        ),
        MachineRunning: CONFIRM_RUNNING,
    },
    State.DESTROYING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        SpawnFailed: Rule(delete_rules.report_destroy_failure),
        TimedOut: RESEND_COMMANDS,
        Destroyed: ByNextState(
            {State.REVERTING: Rule(rollback_rules.revert_destroyed, (State.REVERTING, State.RELEASING))},
            RELEASE_DESTROYED,
        ),
        MachineRunning: CONFIRM_RUNNING,
        MachineMissing: ByNextState(
            {State.REVERTING: Rule(rollback_rules.revert_destroyed, (State.REVERTING, State.RELEASING))},
            RELEASE_DESTROYED,
        ),
        ServiceLost: IGNORE,  # the command waits in its queue, and the allocation with it
        ChangeEnded: Rule(rollback_rules.roll_back_in_place, (State.REVERTING,)),
        HostFenced: ByNextState(
            {State.REVERTING: Rule(fence_rules.revert, (State.REVERTING, State.RELEASING))},
            Rule(fence_rules.end_destroyed, (State.RELEASING,)),
        ),
    },
    State.ACTIVE: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        Destroyed: Rule(
            build_end_rules.mark_lost, (State.RELEASING,)
        ),  # its build was ended just before the late report that it runs
        Released: IGNORE,  # of a migration, once more
        MachineRunning: CONFIRM_RUNNING,
        MachineMissing: Rule(build_end_rules.mark_lost, (State.RELEASING,)),
        ServiceLost: IGNORE,  # its machines may run: only an operator, or a fence, can establish that they do not
        ActionRequested: Rule(
            action_start_rules.start_action, (State.CLAIMING, State.REVERTING, State.CHANGING, State.DESTROYING)
        ),
        TransferRequested: Rule(action_start_rules.start_action, (State.CLAIMING, State.CHANGING, State.DESTROYING)),
        HostFenced: Rule(fence_rules.fail_by_policy, (State.RELEASING,)),
        MachineDecided: DECIDE,
    },
    State.FAILED: {
        **USUAL,
        BuildRequested: Rule(build_repeat_rules.restart_build, FAILS_OVER),
        DeleteRequested: Rule(build_end_rules.end_deleted, (State.DELETED,)),
        MachineDecided: DECIDE,
    },
    State.DELETED: {
        **USUAL,
        BuildRequested: Rule(build_repeat_rules.reemit_deleted),
        DeleteRequested: Rule(build_repeat_rules.reemit_deleted),
    },
    State.PREPARING: {
        **USUAL,
        TimedOut: SKIP,
        ServiceLost: SKIP,
        ChangeEnded: Rule(move_rules.on_check_passed, (State.HANDING_OVER, State.FINISHING, *NEXT)),
        ActionRequested: ABORT,
        HostFenced: Rule(fence_rules.skip_checked_destination, NEXT),
    },
    State.HANDING_OVER: {
        **USUAL,
        TimedOut: Rule(move_rules.abandon_hand_over, ROLLED_BACK),
        ChangeEnded: Rule(move_rules.destination_ready, (State.PREPARING, State.FINISHING, *NEXT)),
        ActionRequested: ABORT,
        HostFenced: Rule(fence_rules.stay_at_source, ROLLED_BACK),
    },
    State.FINISHING: {
        **USUAL,
        Spawned: ON_DESTINATION_ACTIVE,
        SpawnFailed: Rule(move_rules.fail_destination, NEXT),
        TimedOut: RESEND_COMMANDS,
        Destroyed: Rule(move_rules.fail_lost_destination, NEXT),
        MachineRunning: ON_DESTINATION_ACTIVE,
        HostFenced: Rule(fence_rules.abandon_destination, NEXT),
    },
    State.RESIZING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: Rule(resize_rules.abandon_in_place, ROLLED_BACK),
        MachineRunning: CONFIRM_RUNNING,
        ChangeEnded: Rule(resize_rules.on_resized_in_place, (State.RESIZED, State.ACTIVE, *NEXT)),
        HostFenced: Rule(fence_rules.abandon_destination, ROLLED_BACK),
    },
    State.RESIZED: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: Rule(resize_rules.confirm_in_time, (State.DESTROYING, State.RELEASING, State.ACTIVE)),
        MachineRunning: CONFIRM_RUNNING,
        MachineMissing: Rule(resize_rules.revert_lost, ROLLED_BACK),
        ActionRequested: Rule(resize_rules.end_resized, (*ROLLED_BACK, State.ACTIVE)),
        HostFenced: Rule(fence_rules.abandon_destination, ROLLED_BACK),
        SourceAnswered: Rule(rollback_rules.roll_back_to_source, ROLLED_BACK),
    },
    State.REVERTING: {
        **USUAL,
        TimedOut: RESEND_REQUEST,
        Reverted: Rule(rollback_rules.return_to_source, (State.RESTARTING, State.ACTIVE)),
        RevertRefused: Rule(rollback_rules.wait_for_source),
    },
    State.RESTARTING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: RESEND_COMMANDS,
        MachineRunning: CONFIRM_RUNNING,
        ChangeEnded: Rule(rollback_rules.on_restarted, (State.ACTIVE, State.RELEASING)),
        HostFenced: Rule(fence_rules.end_unstarted, (State.ACTIVE,)),
    },
    State.CHANGING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: RESEND_COMMANDS,
        MachineRunning: CONFIRM_RUNNING,
        ChangeEnded: Rule(move_rules.on_changed, (State.ACTIVE, State.DESTROYING, State.RESTARTING)),
        HostFenced: Rule(fence_rules.end_change, (State.ACTIVE,)),
    },
    State.OFFLOADED: {
        **USUAL,
        DeleteRequested: Rule(delete_rules.delete_offloaded, (State.RELEASING,)),
        ActionRequested: Rule(action_start_rules.start_action, (State.CLAIMING, State.RELEASING)),
        TransferRequested: Rule(action_start_rules.start_action, (State.CLAIMING, State.TRANSFERRED)),
    },
    State.TRANSFERRED: {
        **USUAL,
        **dict.fromkeys(
            (BuildRequested, ActionRequested, ActionQueried, TransferRequested),
            Rule(cell_transfer_rules.refer_to_next_cell),
        ),
        DeleteRequested: Rule(delete_rules.delete_transferred, DELETED_UNKNOWN),
        TimedOut: Rule(cell_transfer_rules.reemit_transfer),
    },
}

# Of a record with a blocked reason, whatever its state: the only place where that counts for a step.
BLOCKED: Mapping[type[Event], Entry] = {
    **dict.fromkeys(USUAL, IGNORE),
    **{kind: USUAL[kind] for kind in (BuildRequested, ActionQueried)},
    DeleteRequested: Rule(blocked_rules.delete, (State.DESTROYING, State.RELEASING)),
    TimedOut: Rule(blocked_rules.wait),
    ActionRequested: Rule(blocked_rules.refuse),
    TransferRequested: Rule(blocked_rules.refuse),
    InstanceTransferredIn: Rule(blocked_rules.accept_transfer, (State.CLAIMING, State.RELEASING, State.OFFLOADED)),
}

"""The instance state machine: one table, total over states and events. It also draws docs/reference/states.md."""

# Every row has the usual effects of `USUAL`, unless it says otherwise: most events are late, doubled or of no concern
# to a state, and its desired state (`desires`) is what a machine that is found and a request of a client are judged by.
# Where an answer is waited for, what follows is taken up here and nowhere else (`ByNextState`).

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import Message
from bus.contracts.cell import Destroy, Spawn
from bus.contracts.moves import ChangeKind, ChangeMachine
from bus.contracts.placement import Claim, ClaimOption, Migration, Release, Revert
from bus.faults import BrokenInvariant

from . import blocked_rules, build_repeat_rules, delete_rules, departure_rules, fence_rules, move_rules, rules, way_back
from .desires import DESIRED_STATES, PlacementCall, desired_state_of
from .events import (
    ActionQueried,
    ActionRequested,
    Answer,
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
    SourceQuery,
    Spawned,
    SpawnFailed,
    TimedOut,
    TransferEnded,
    TransferRequested,
)
from .fences import abandoned_services, fenced_hosts
from .instance import PROTECTED, ActionInProgress, Instance, State
from .move_steps import fences_relied_on
from .orders import change_command, change_of, commands_of, with_change_number, with_commands
from .report import is_provably_ended
from .steps import Step, StepContext


class IllegalStep(BrokenInvariant):
    """An event occurred that is impossible in this state. The reason carries the instance's history."""

    code = "instance.illegal_step"


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
Cell: TypeAlias = Rule | ByNextState | None


def rules_of(cell: Cell) -> tuple[Rule, ...]:
    """Every rule of one event in one state."""
    if isinstance(cell, ByNextState):
        return (*cell.rules.values(), *(() if cell.otherwise is None else (cell.otherwise,)))
    return () if cell is None else (cell,)


IGNORE = Rule(rules.ignore)
DESTROY_SUPERSEDED = Rule(rules.destroy_superseded)
CONFIRM_RUNNING = Rule(rules.confirm_running)
RESEND_REQUEST = Rule(rules.repeat_request)
RESEND_COMMANDS = Rule(way_back.resend_commands)
ROLLED_BACK = (State.PREPARING, State.DESTROYING, State.REVERTING, State.RELEASING)
NEXT = (State.CLAIMING, *ROLLED_BACK)
DELETED_UNKNOWN = (State.TOMBSTONE, State.DESTROYING, State.RELEASING)
FAILS_OVER = (State.CLAIMING, State.RELEASING)
COMPLETED = (State.RESIZED, State.DESTROYING, State.RELEASING, State.ACTIVE)
REFUSE = Rule(departure_rules.refuse_other)
ABORT = Rule(move_rules.abort, ROLLED_BACK)
ON_DESTINATION_ACTIVE = Rule(move_rules.on_destination_active, COMPLETED)
SKIP = Rule(move_rules.skip_destination, NEXT)
RELEASE_DESTROYED = Rule(delete_rules.release_destroyed, (State.RELEASING,))
DECIDE = Rule(blocked_rules.decide)

USUAL: Mapping[type[Event], Cell] = {
    BuildRequested: Rule(build_repeat_rules.answer_build),
    DeleteRequested: Rule(delete_rules.delete, (State.PREPARING, State.DESTROYING, State.RELEASING)),
    Spawned: DESTROY_SUPERSEDED,
    SpawnFailed: Rule(rules.destroy_failed_attempt),
    TimedOut: None,
    Claimed: IGNORE,
    ClaimRefused: IGNORE,
    Destroyed: IGNORE,
    Released: IGNORE,
    MachineRunning: DESTROY_SUPERSEDED,
    MachineMissing: IGNORE,
    ServiceLost: IGNORE,
    ActionRequested: REFUSE,
    ActionQueried: Rule(departure_rules.answer_not_started),
    InstanceTransferredIn: Rule(departure_rules.accept_transfer, (State.CLAIMING, State.RELEASING, State.OFFLOADED)),
    TransferRequested: REFUSE,
    TransferEnded: Rule(departure_rules.end_transfer, (State.TRANSFERRED,)),
    ChangeEnded: IGNORE,
    Reverted: IGNORE,
    RevertRefused: IGNORE,
    HostFenced: IGNORE,
    MachineDecided: IGNORE,
    SourceAnswered: IGNORE,
}

TABLE: Mapping[State, Mapping[type[Event], Cell]] = {
    State.ABSENT: {
        **USUAL,
        BuildRequested: Rule(rules.start_build, (State.BUILDING, *FAILS_OVER, State.FAILED)),
        DeleteRequested: Rule(delete_rules.delete_unknown, DELETED_UNKNOWN),
        Spawned: IGNORE,  # no record is no proof: the database may be new, another's, or older than the machine
        SpawnFailed: IGNORE,
        MachineRunning: IGNORE,
    },
    State.TOMBSTONE: {
        **USUAL,
        BuildRequested: Rule(delete_rules.refuse_build, (State.DESTROYING, State.RELEASING)),
        DeleteRequested: Rule(delete_rules.delete_unknown, (State.DESTROYING, State.RELEASING)),
    },
    State.BUILDING: {
        **USUAL,
        Spawned: Rule(rules.on_active, (State.ACTIVE,)),
        SpawnFailed: Rule(rules.fail_over, FAILS_OVER),
        TimedOut: Rule(rules.time_out, FAILS_OVER),
        Destroyed: Rule(rules.fail_over_destroyed, FAILS_OVER),
        MachineRunning: Rule(rules.on_active, (State.ACTIVE,)),
        MachineMissing: IGNORE,  # it may not have started yet: the deadline decides
        ServiceLost: Rule(rules.fail_over_lost_service, (State.CLAIMING,)),
        HostFenced: Rule(fence_rules.fail_over_fenced, FAILS_OVER),
    },
    State.CLAIMING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: RESEND_REQUEST,
        Claimed: ByNextState(
            {
                State.BUILDING: Rule(rules.build_on_alternate, (State.BUILDING, State.RELEASING)),
                State.DELETED: Rule(rules.release_alternate, (State.RELEASING,)),
                State.PREPARING: Rule(move_rules.take_destination, (State.PREPARING, State.RESIZING, *ROLLED_BACK)),
            }
        ),
        ClaimRefused: ByNextState(
            {
                State.BUILDING: Rule(rules.no_alternate_left, (State.RELEASING, State.FAILED)),
                State.DELETED: Rule(rules.end_unclaimed, (State.RELEASING, State.DELETED)),
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
                State.FAILED: Rule(rules.end_failed, (State.FAILED,)),
                State.DELETED: Rule(rules.end_deleted, (State.DELETED,)),
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
            {State.REVERTING: Rule(way_back.revert_destroyed, (State.REVERTING, State.RELEASING))}, RELEASE_DESTROYED
        ),
        MachineRunning: CONFIRM_RUNNING,
        MachineMissing: ByNextState(
            {State.REVERTING: Rule(way_back.revert_destroyed, (State.REVERTING, State.RELEASING))}, RELEASE_DESTROYED
        ),
        ServiceLost: IGNORE,  # the command waits in its queue, and the allocation with it
        ChangeEnded: Rule(way_back.roll_back_in_place, (State.REVERTING,)),
        HostFenced: ByNextState(
            {State.REVERTING: Rule(fence_rules.revert, (State.REVERTING, State.RELEASING))},
            Rule(fence_rules.end_destroyed, (State.RELEASING,)),
        ),
    },
    State.ACTIVE: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        Destroyed: Rule(
            rules.mark_lost, (State.RELEASING,)
        ),  # its build was ended just before the late report that it runs
        Released: IGNORE,  # of a migration, once more
        MachineRunning: CONFIRM_RUNNING,
        MachineMissing: Rule(rules.mark_lost, (State.RELEASING,)),
        ServiceLost: IGNORE,  # its machines may run: only an operator, or a fence, can establish that they do not
        ActionRequested: Rule(
            move_rules.start_action, (State.CLAIMING, State.REVERTING, State.CHANGING, State.DESTROYING)
        ),
        TransferRequested: Rule(move_rules.start_action, (State.CLAIMING, State.CHANGING, State.DESTROYING)),
        HostFenced: Rule(fence_rules.fail_by_policy, (State.RELEASING,)),
        MachineDecided: DECIDE,
    },
    State.FAILED: {
        **USUAL,
        BuildRequested: Rule(build_repeat_rules.restart_build, FAILS_OVER),
        DeleteRequested: Rule(rules.end_deleted, (State.DELETED,)),
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
        TimedOut: Rule(move_rules.abandon_in_place, ROLLED_BACK),
        MachineRunning: CONFIRM_RUNNING,
        ChangeEnded: Rule(move_rules.on_resized_in_place, (State.RESIZED, State.ACTIVE, *NEXT)),
        HostFenced: Rule(fence_rules.abandon_destination, ROLLED_BACK),
    },
    State.RESIZED: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: Rule(move_rules.confirm_in_time, (State.DESTROYING, State.RELEASING, State.ACTIVE)),
        MachineRunning: CONFIRM_RUNNING,
        MachineMissing: Rule(move_rules.revert_lost, ROLLED_BACK),
        ActionRequested: Rule(move_rules.end_resized, (*ROLLED_BACK, State.ACTIVE)),
        HostFenced: Rule(fence_rules.abandon_destination, ROLLED_BACK),
        SourceAnswered: Rule(way_back.roll_back_to_source, ROLLED_BACK),
    },
    State.REVERTING: {
        **USUAL,
        TimedOut: RESEND_REQUEST,
        Reverted: Rule(way_back.return_to_source, (State.RESTARTING, State.ACTIVE)),
        RevertRefused: Rule(way_back.wait_for_source),
    },
    State.RESTARTING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: RESEND_COMMANDS,
        MachineRunning: CONFIRM_RUNNING,
        ChangeEnded: Rule(way_back.on_restarted, (State.ACTIVE, State.RELEASING)),
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
        ActionRequested: Rule(move_rules.start_action, (State.CLAIMING, State.RELEASING)),
        TransferRequested: Rule(move_rules.start_action, (State.CLAIMING, State.TRANSFERRED)),
    },
    State.TRANSFERRED: {
        **USUAL,
        **dict.fromkeys(
            (BuildRequested, ActionRequested, ActionQueried, TransferRequested),
            Rule(departure_rules.refer_to_next_cell),
        ),
        DeleteRequested: Rule(delete_rules.delete_transferred, DELETED_UNKNOWN),
        TimedOut: Rule(departure_rules.reemit_transfer),
    },
}

# Of a record with a blocked reason, whatever its state: the only place where that counts for a step.
BLOCKED: Mapping[type[Event], Cell] = {
    **dict.fromkeys(USUAL, IGNORE),
    **{kind: USUAL[kind] for kind in (BuildRequested, ActionQueried)},
    DeleteRequested: Rule(blocked_rules.delete, (State.DESTROYING,)),
    TimedOut: Rule(blocked_rules.wait),
    ActionRequested: Rule(blocked_rules.refuse),
    TransferRequested: Rule(blocked_rules.refuse),
    InstanceTransferredIn: Rule(blocked_rules.accept_transfer, (State.CLAIMING, State.RELEASING, State.OFFLOADED)),
}


def step(instance: Instance, event: Event, context: StepContext) -> Step:
    """The instance after an event, and the commands that follow. Raises IllegalStep with the history."""
    stepped = _stepped(instance, event, context)
    if stepped.instance.blocked_reason:
        return stepped
    return _without_protected(with_commands(instance, stepped, context), event.at, context)


def _without_protected(stepped: Step, at: float, context: StepContext) -> Step:
    """No host is commanded to destroy what an operator keeps there, nor to build another attempt in its place."""
    # A record does not wait for it, either: it goes on as if the host had answered. But one that wants a machine which
    # its host is to end unless it is complete waits for the host's report, which ends the decision
    # (`ReportGuard.delete_resolved`).
    after, commands = stepped.instance, stepped.commands
    for order in [one for one in commands if _is_protected(one, after, context)]:
        commands = tuple(one for one in commands if one is not order)
        about: dict[str, Any] = {"attempt": order.attempt, "host_uuid": order.host_uuid, "service": order.service}
        if isinstance(order, Spawn):
            answer: Event = SpawnFailed(at=at, code=PROTECTED, **about)
        elif isinstance(order, ChangeMachine):
            answer = ChangeEnded(at=at, change_number=order.change_number, done=False, code=PROTECTED, **about)
        elif order in commands_of(after, context) and is_provably_ended(after, order.attempt, order.host_uuid):
            answer = Destroyed(at=at, **about)
        else:
            continue
        following = step(after, answer, context)
        after, commands = following.instance, (*commands, *following.commands)
    return replace(stepped, instance=after, commands=commands)


def _is_protected(
    order: Message, instance: Instance, context: StepContext
) -> TypeGuard[Spawn | Destroy | ChangeMachine]:
    """Whether it would end what an operator keeps there: it is destroyed, or another attempt is built, or is to be. The
    host of that very attempt has it, and only answers.
    """
    if not isinstance(order, Spawn | Destroy | ChangeMachine):
        return False
    kept = context.protected.get((order.host_uuid, instance.uuid))
    is_built = isinstance(order, Spawn) or (isinstance(order, ChangeMachine) and order.change is ChangeKind.CHECK)
    return kept is not None and (isinstance(order, Destroy) or (is_built and order.attempt != kept))


def _stepped(instance: Instance, event: Event, context: StepContext) -> Step:
    row = BLOCKED if instance.blocked_reason else TABLE[instance.state]
    cell = row[type(event)]
    rule = cell.of(instance.next_state) if isinstance(cell, ByNextState) else cell
    if rule is None:
        raise IllegalStep(f"{type(event).__name__} while {instance.state}: {event!r} on {instance!r}")
    if isinstance(event, DeleteRequested) and delete_rules.is_other_project(instance, event):
        return Step(instance)
    if isinstance(event, Answer | SourceAnswered) and not is_answered_by(instance, event):
        return Step(instance)  # it comes late
    stepped = rule.apply(instance, event, context)
    after = stepped.instance.state
    assert after is instance.state or after in rule.to, (rule.name, instance.state, after)
    assert stepped.instance.phase in DESIRED_STATES, (rule.name, stepped.instance.phase)
    return stepped


AwaitedRequest: TypeAlias = Claim | Release | Revert | SourceQuery


def awaited_request_of(instance: Instance) -> AwaitedRequest | None:
    """The request to placement, or to compute services, while the instance is in this state. It follows from the record
    alone, so a crash at any moment leads to the very same request.
    """
    if instance.blocked_reason:
        return None
    if (query := way_back.source_query_of(instance)) is not None:
        return query
    call, action = desired_state_of(instance).placement_call, instance.action
    if call is PlacementCall.CLAIM:
        return _claim(instance)
    if call is PlacementCall.REVERT:
        assert action is not None
        return Revert(
            consumer=instance.uuid,
            migration=_migration(action),
            source_attempt=action.allocation_attempt,
            attempt=instance.next_attempt,
        )
    is_instance_over = action is not None and action.instance_released
    if call is PlacementCall.RELEASE_MIGRATION or (call is PlacementCall.RELEASE and is_instance_over):
        assert action is not None and instance.spec is not None
        return Release(consumer=action.request_id, project_id=instance.spec.project_id, of_migration=True)
    if call is PlacementCall.RELEASE:
        # One attempt further than the last: a claim that was requested and never answered may still be on its way (a
        # placement worker that waits for its database), and must be refused by the fence.
        return Release(consumer=instance.uuid, attempt=instance.next_attempt)
    return None


def is_answered_by(instance: Instance, answer: Answer | SourceAnswered) -> bool:
    """Whether it answers what is asked now. Another conductor may have asked before it was paused."""
    if isinstance(answer, SourceAnswered):
        asked = way_back.source_query_of(instance)
        return asked is not None and answer.query == asked
    request, names = awaited_request_of(instance), (answer.consumer or instance.uuid, answer.attempt)
    return isinstance(request, Claim | Release | Revert) and names == (request.consumer, request.attempt or 0)


def _claim(instance: Instance) -> Claim:
    assert instance.spec is not None
    action = instance.action
    return Claim(
        consumer=instance.uuid,
        attempt=instance.next_attempt,
        consumer_generation=instance.consumer_generation,
        release_first=action is None or instance.selection_index > 0,
        options=tuple(
            ClaimOption(
                allocations=s.allocations,
                spec_generations=s.spec_generations,
                host=s.host_uuid if instance.server_group else None,
            )
            for s in instance.alternates
        ),
        server_group=instance.server_group,
        fenced_hosts=() if action is None else action.fenced_hosts,
        limits=instance.limits,
        project_id=instance.spec.project_id,
        user_id=instance.spec.user_id,
        migration=None if action is None or action.source is None else _migration(action),
    )


def _migration(action: ActionInProgress) -> Migration:
    assert action.source is not None
    return Migration(uuid=action.request_id, source=action.source.allocations)


# --- The steps that the fences of an instance's hosts lead to, after each of its own steps.

# How many steps in a row one fence may lead to: one for each host of the instance, and those that follow from a
# rollback.
MAX_FENCE_STEPS = 4
# A machine runs after these states, and one whose answer is awaited may run in these.
STARTING = frozenset({ChangeKind.START, ChangeKind.REBUILD, ChangeKind.RESCUE, ChangeKind.UNRESCUE})


class FenceSteps:
    """The effects of fences in one transaction: the hosts, and by host the services of what was abandoned there.
    proofs: those of the hosts from which an evacuation commands a destination.
    """

    def __init__(self) -> None:
        self.hosts: dict[str, None] = {}
        self.abandoned: dict[str, list[str]] = {}
        self.proofs: dict[str, None] = {}

    def apply(self, before: Instance, stepped: Step, event: Event, context: StepContext) -> Step:
        """The step, and those that the fences of the instance's hosts lead to."""
        stepped = _stop_after_fence(before, stepped, event, context)
        after, commands, at = stepped.instance, stepped.commands, event.at
        if isinstance(event, HostFenced) and after is not before:
            self.hosts[event.host_uuid] = None
        for _ in range(MAX_FENCE_STEPS):
            for host in fenced_hosts(after, context.fences):
                following = step(after, HostFenced(at=at, host_uuid=host), context)
                if following.instance is not after:
                    self.hosts[host] = None
                    after, commands = following.instance, (*commands, *following.commands)
        if after is not before:
            self.proofs.update(dict.fromkeys(fences_relied_on(before, after, context)))
            self.hosts.update(self.proofs)
            for host in fenced_hosts(before, context.fences):
                if services := abandoned_services(before, after, host):
                    self.abandoned[host] = [*self.abandoned.get(host, ()), *services]
                    self.hosts[host] = None
        return Step(after, _without_starts(commands, context))


def _stop_after_fence(before: Instance, stepped: Step, event: Event, context: StepContext) -> Step:
    """If the fence ends a change that starts a machine, the change's command may wait in the queue: a later one stops
    the machine.
    """
    is_ended = change_of(before) in STARTING and change_of(stepped.instance) not in STARTING
    if not isinstance(event, HostFenced) or not is_ended:
        return stepped
    stopped = with_change_number(before, event.at)
    after = replace(stepped.instance, change_number=max(stepped.instance.change_number, stopped.change_number))
    return Step(after, (*stepped.commands, change_command(stopped, ChangeKind.STOP, context)))


def _without_starts(commands: Sequence[Message], context: StepContext) -> tuple[Message, ...]:
    """Nothing is started on a fenced host: it may be back before the fence is ended, and its instances may be
    elsewhere.
    """
    # The machine is stopped under the same number, so that a command from before the fence is not carried out either.
    kept: list[Message] = []
    for command in commands:
        is_fenced = isinstance(command, Spawn | ChangeMachine) and command.host_uuid in context.fences
        if not is_fenced:
            kept.append(command)
        elif isinstance(command, ChangeMachine):
            is_start = command.change in STARTING
            kept.append(replace(command, change=ChangeKind.STOP, rescue_password="") if is_start else command)
    return tuple(kept)

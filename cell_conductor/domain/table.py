"""The instance state machine: one table, total over states and events. It also draws docs/reference/states.md.

Every row has the usual effects of `USUAL`, unless it says otherwise: most events are late, doubled or of no concern
to a state, and its desire (`desires`) is what a machine that is found and a request of a client are judged by. Where an
answer is waited for, what follows is taken up here and nowhere else (`ByThen`).
"""

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

from . import (
    blocked_rules,
    build_repeat_rules,
    delete_rules,
    departure_rules,
    fence_rules,
    move_rules,
    rules,
    way_back,
)
from .desires import DESIRES, Ask, desire_of
from .events import (
    Answer,
    BuildRequested,
    ChangeEnded,
    Claimed,
    ClaimRefused,
    DeleteRequested,
    DepartRequested,
    DepartureEnded,
    Destroyed,
    Event,
    HostFenced,
    HostMissing,
    HostRuns,
    InstanceArrives,
    MachineDecided,
    MoveQueried,
    MoveRequested,
    Released,
    Reverted,
    RevertRefused,
    ServiceLost,
    SourceAnswered,
    SourceQuery,
    Spawned,
    SpawnFailed,
    TimedOut,
)
from .fences import fenced_hosts, given_up_on
from .instance import KEPT, Instance, Move, State
from .move_steps import relied_on
from .orders import change_of, change_order, numbered, orders_of, with_orders
from .report import is_over
from .steps import Step, StepContext


class IllegalStep(BrokenInvariant):
    """An event occurred that is impossible in this state. The reason carries the instance's history."""

    code = "instance.illegal_step"


class Rule(Struct, frozen=True):
    """The effect of an event in a state: the rule, and every state it may lead to besides staying."""

    apply: Callable[[Instance, Any, StepContext], Step]
    to: tuple[State, ...] = ()

    @property
    def name(self) -> str:
        """The function's name, as the table shows it."""
        return self.apply.__name__


class ByThen(Struct, frozen=True):
    """The rule of each state that may follow. otherwise: of the others (None: there are none)."""

    rules: Mapping[State | None, Rule]
    otherwise: Rule | None = None

    def of(self, then: State | None) -> Rule | None:
        """The rule of what follows."""
        return self.rules.get(then, self.otherwise)


# None: cannot happen. Events from outside are legal everywhere; TimedOut comes only from a row that has a deadline.
Cell: TypeAlias = Rule | ByThen | None


def rules_of(cell: Cell) -> tuple[Rule, ...]:
    """Every rule of one event in one state."""
    if isinstance(cell, ByThen):
        return (*cell.rules.values(), *(() if cell.otherwise is None else (cell.otherwise,)))
    return () if cell is None else (cell,)


IGNORE = Rule(rules.ignore)
DESTROY_ORPHAN = Rule(rules.destroy_orphan)
CONFIRM_RUNNING = Rule(rules.confirm_running)
ASK_AGAIN = Rule(rules.repeat_question)
COMMAND_AGAIN = Rule(way_back.command_again)
UNDONE = (State.PREPARING, State.DESTROYING, State.REVERTING, State.RELEASING)
NEXT = (State.CLAIMING, *UNDONE)
DELETED_UNKNOWN = (State.TOMBSTONE, State.DESTROYING, State.RELEASING)
FAILS_OVER = (State.CLAIMING, State.RELEASING)
ARRIVED = (State.RESIZED, State.DESTROYING, State.RELEASING, State.ACTIVE)
REFUSE = Rule(departure_rules.refuse_other)
ABORT = Rule(move_rules.abort, UNDONE)
ARRIVE = Rule(move_rules.arrive, ARRIVED)
SKIP = Rule(move_rules.skip_destination, NEXT)
RELEASE_DESTROYED = Rule(delete_rules.release_destroyed, (State.RELEASING,))
DECIDE = Rule(blocked_rules.decide)

USUAL: Mapping[type[Event], Cell] = {
    BuildRequested: Rule(build_repeat_rules.answer_build),
    DeleteRequested: Rule(delete_rules.delete, (State.PREPARING, State.DESTROYING, State.RELEASING)),
    Spawned: DESTROY_ORPHAN,
    SpawnFailed: Rule(rules.destroy_leftover),
    TimedOut: None,
    Claimed: IGNORE,
    ClaimRefused: IGNORE,
    Destroyed: IGNORE,
    Released: IGNORE,
    HostRuns: DESTROY_ORPHAN,
    HostMissing: IGNORE,
    ServiceLost: IGNORE,
    MoveRequested: REFUSE,
    MoveQueried: Rule(departure_rules.answer_unbegun),
    InstanceArrives: Rule(departure_rules.arrive, (State.CLAIMING, State.RELEASING, State.OFFLOADED)),
    DepartRequested: REFUSE,
    DepartureEnded: Rule(departure_rules.end_departure, (State.DEPARTED,)),
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
        HostRuns: IGNORE,
    },
    State.TOMBSTONE: {
        **USUAL,
        BuildRequested: Rule(delete_rules.refuse_build, (State.DESTROYING, State.RELEASING)),
        DeleteRequested: Rule(delete_rules.delete_unknown, (State.DESTROYING, State.RELEASING)),
    },
    State.BUILDING: {
        **USUAL,
        Spawned: Rule(rules.come_up, (State.ACTIVE,)),
        SpawnFailed: Rule(rules.fail_over, FAILS_OVER),
        TimedOut: Rule(rules.time_out, FAILS_OVER),
        Destroyed: Rule(rules.fail_over_destroyed, FAILS_OVER),
        HostRuns: Rule(rules.come_up, (State.ACTIVE,)),
        HostMissing: IGNORE,  # it may not have started yet: the deadline decides
        ServiceLost: Rule(rules.leave_service, (State.CLAIMING,)),
        HostFenced: Rule(fence_rules.leave_host, FAILS_OVER),
    },
    State.CLAIMING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: ASK_AGAIN,
        Claimed: ByThen(
            {
                State.BUILDING: Rule(rules.move_on, (State.BUILDING, State.RELEASING)),
                State.DELETED: Rule(rules.release_alternate, (State.RELEASING,)),
                State.PREPARING: Rule(move_rules.take_destination, (State.PREPARING, State.RESIZING, *UNDONE)),
            }
        ),
        ClaimRefused: ByThen(
            {
                State.BUILDING: Rule(rules.run_out, (State.RELEASING, State.FAILED)),
                State.DELETED: Rule(rules.drop, (State.RELEASING, State.DELETED)),
                State.PREPARING: Rule(move_rules.run_out_of_hosts, UNDONE),
            }
        ),
        HostRuns: CONFIRM_RUNNING,
        MoveRequested: ByThen({State.PREPARING: ABORT}, REFUSE),
        HostFenced: IGNORE,
    },
    State.RELEASING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: ASK_AGAIN,
        Released: ByThen(
            {
                State.FAILED: Rule(rules.end_failed, (State.FAILED,)),
                State.DELETED: Rule(rules.end_deleted, (State.DELETED,)),
                State.OFFLOADED: Rule(move_rules.end_offloaded, (State.OFFLOADED, State.DEPARTED)),
                State.ACTIVE: Rule(move_rules.end_source_released, (State.ACTIVE,)),
            }
        ),
        HostRuns: CONFIRM_RUNNING,
    },
    State.DESTROYING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        SpawnFailed: Rule(delete_rules.report_undestroyed),
        TimedOut: COMMAND_AGAIN,
        Destroyed: ByThen(
            {State.REVERTING: Rule(way_back.revert_destroyed, (State.REVERTING, State.RELEASING))}, RELEASE_DESTROYED
        ),
        HostRuns: CONFIRM_RUNNING,
        HostMissing: ByThen(
            {State.REVERTING: Rule(way_back.revert_destroyed, (State.REVERTING, State.RELEASING))}, RELEASE_DESTROYED
        ),
        ServiceLost: IGNORE,  # the order waits in its queue, and the allocation with it
        ChangeEnded: Rule(way_back.undo_failed_in_place, (State.REVERTING,)),
        HostFenced: ByThen(
            {State.REVERTING: Rule(fence_rules.revert, (State.REVERTING, State.RELEASING))},
            Rule(fence_rules.end_destroyed, (State.RELEASING,)),
        ),
    },
    State.ACTIVE: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        Destroyed: Rule(rules.lose, (State.RELEASING,)),  # its build was ended just before the late word that it runs
        Released: IGNORE,  # of a migration, once more
        HostRuns: CONFIRM_RUNNING,
        HostMissing: Rule(rules.lose, (State.RELEASING,)),
        ServiceLost: IGNORE,  # its machines may run: only an operator, or a fence, can establish that they do not
        MoveRequested: Rule(move_rules.begin, (State.CLAIMING, State.REVERTING, State.CHANGING, State.DESTROYING)),
        DepartRequested: Rule(move_rules.begin, (State.CLAIMING, State.CHANGING, State.DESTROYING)),
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
        BuildRequested: Rule(build_repeat_rules.announce_deleted_again),
        DeleteRequested: Rule(build_repeat_rules.announce_deleted_again),
    },
    State.PREPARING: {
        **USUAL,
        TimedOut: SKIP,
        ServiceLost: SKIP,
        ChangeEnded: Rule(move_rules.go_on, (State.HANDING_OVER, State.FINISHING, *NEXT)),
        MoveRequested: ABORT,
        HostFenced: Rule(fence_rules.leave_checked_destination, NEXT),
    },
    State.HANDING_OVER: {
        **USUAL,
        TimedOut: Rule(move_rules.give_up_hand_over, UNDONE),
        ChangeEnded: Rule(move_rules.take_over, (State.PREPARING, State.FINISHING, *NEXT)),
        MoveRequested: ABORT,
        HostFenced: Rule(fence_rules.stay_at_source, UNDONE),
    },
    State.FINISHING: {
        **USUAL,
        Spawned: ARRIVE,
        SpawnFailed: Rule(move_rules.fail_destination, NEXT),
        TimedOut: COMMAND_AGAIN,
        Destroyed: Rule(move_rules.lose_destination, NEXT),
        HostRuns: ARRIVE,
        HostFenced: Rule(fence_rules.give_up_destination, NEXT),
    },
    State.RESIZING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: Rule(move_rules.give_up_in_place, UNDONE),
        HostRuns: CONFIRM_RUNNING,
        ChangeEnded: Rule(move_rules.arrive_in_place, (State.RESIZED, State.ACTIVE, *NEXT)),
        HostFenced: Rule(fence_rules.give_up_destination, UNDONE),
    },
    State.RESIZED: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: Rule(move_rules.confirm_in_time, (State.DESTROYING, State.RELEASING, State.ACTIVE)),
        HostRuns: CONFIRM_RUNNING,
        HostMissing: Rule(move_rules.revert_lost, UNDONE),
        MoveRequested: Rule(move_rules.end_resized, (*UNDONE, State.ACTIVE)),
        HostFenced: Rule(fence_rules.give_up_destination, UNDONE),
        SourceAnswered: Rule(way_back.go_back, UNDONE),
    },
    State.REVERTING: {
        **USUAL,
        TimedOut: ASK_AGAIN,
        Reverted: Rule(way_back.return_to_source, (State.RESTARTING, State.ACTIVE)),
        RevertRefused: Rule(way_back.wait_for_source),
    },
    State.RESTARTING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: COMMAND_AGAIN,
        HostRuns: CONFIRM_RUNNING,
        ChangeEnded: Rule(way_back.restarted, (State.ACTIVE, State.RELEASING)),
        HostFenced: Rule(fence_rules.end_unstarted, (State.ACTIVE,)),
    },
    State.CHANGING: {
        **USUAL,
        Spawned: CONFIRM_RUNNING,
        TimedOut: COMMAND_AGAIN,
        HostRuns: CONFIRM_RUNNING,
        ChangeEnded: Rule(move_rules.changed, (State.ACTIVE, State.DESTROYING, State.RESTARTING)),
        HostFenced: Rule(fence_rules.end_change, (State.ACTIVE,)),
    },
    State.OFFLOADED: {
        **USUAL,
        DeleteRequested: Rule(delete_rules.delete_offloaded, (State.RELEASING,)),
        MoveRequested: Rule(move_rules.begin, (State.CLAIMING, State.RELEASING)),
        DepartRequested: Rule(move_rules.begin, (State.CLAIMING, State.DEPARTED)),
    },
    State.DEPARTED: {
        **USUAL,
        **dict.fromkeys((BuildRequested, MoveRequested, MoveQueried, DepartRequested), Rule(departure_rules.refer)),
        DeleteRequested: Rule(delete_rules.delete_departed, DELETED_UNKNOWN),
        TimedOut: Rule(departure_rules.tell_again),
    },
}

# Of a record with a blocked reason, whatever its state: the only place where that counts for a step.
BLOCKED: Mapping[type[Event], Cell] = {
    **dict.fromkeys(USUAL, IGNORE),
    **{kind: USUAL[kind] for kind in (BuildRequested, MoveQueried)},
    DeleteRequested: Rule(blocked_rules.delete, (State.DESTROYING,)),
    TimedOut: Rule(blocked_rules.wait),
    MoveRequested: Rule(blocked_rules.refuse),
    DepartRequested: Rule(blocked_rules.refuse),
    InstanceArrives: Rule(blocked_rules.arrive, (State.CLAIMING, State.RELEASING, State.OFFLOADED)),
}


def step(instance: Instance, event: Event, context: StepContext) -> Step:
    """The instance after an event, and the commands that follow. Raises IllegalStep with the history."""
    stepped = _stepped(instance, event, context)
    if stepped.instance.blocked_reason:
        return stepped
    return _without_kept(with_orders(instance, stepped, context), event.at, context)


def _without_kept(stepped: Step, at: float, context: StepContext) -> Step:
    """No host is commanded to destroy what an operator keeps there, nor to build another attempt in its place.

    A record does not wait for it, either: it goes on as if the host had answered. But one that wants a machine which
    its host is to end unless it is complete waits for the host's report, which ends the word (`Guard.forget`).
    """
    after, commands = stepped.instance, stepped.commands
    for order in [one for one in commands if _is_of_kept(one, after, context)]:
        commands = tuple(one for one in commands if one is not order)
        about: dict[str, Any] = {"attempt": order.attempt, "host_uuid": order.host_uuid, "service": order.service}
        if isinstance(order, Spawn):
            answer: Event = SpawnFailed(at=at, code=KEPT, **about)
        elif isinstance(order, ChangeMachine):
            answer = ChangeEnded(at=at, order=order.order, done=False, code=KEPT, **about)
        elif order in orders_of(after, context) and is_over(after, order.attempt, order.host_uuid):
            answer = Destroyed(at=at, **about)
        else:
            continue
        then = step(after, answer, context)
        after, commands = then.instance, (*commands, *then.commands)
    return replace(stepped, instance=after, commands=commands)


def _is_of_kept(order: Message, instance: Instance, context: StepContext) -> TypeGuard[Spawn | Destroy | ChangeMachine]:
    """Whether it would end what an operator keeps there: it is destroyed, or another attempt is built, or is to be. The
    host of that very attempt has it, and only answers.
    """
    if not isinstance(order, Spawn | Destroy | ChangeMachine):
        return False
    kept = context.kept.get((order.host_uuid, instance.uuid))
    is_built = isinstance(order, Spawn) or (isinstance(order, ChangeMachine) and order.change is ChangeKind.CHECK)
    return kept is not None and (isinstance(order, Destroy) or (is_built and order.attempt != kept))


def _stepped(instance: Instance, event: Event, context: StepContext) -> Step:
    row = BLOCKED if instance.blocked_reason else TABLE[instance.state]
    cell = row[type(event)]
    rule = cell.of(instance.then) if isinstance(cell, ByThen) else cell
    if rule is None:
        raise IllegalStep(f"{type(event).__name__} while {instance.state}: {event!r} on {instance!r}")
    if isinstance(event, DeleteRequested) and delete_rules.is_of_another_project(instance, event):
        return Step(instance)
    if isinstance(event, Answer | SourceAnswered) and not is_answered_by(instance, event):
        return Step(instance)  # it comes late
    stepped = rule.apply(instance, event, context)
    after = stepped.instance.state
    assert after is instance.state or after in rule.to, (rule.name, instance.state, after)
    assert stepped.instance.phase in DESIRES, (rule.name, stepped.instance.phase)
    return stepped


Question: TypeAlias = Claim | Release | Revert | SourceQuery


def question_of(instance: Instance) -> Question | None:
    """The request to placement, or to compute services, while the instance is in this state. It follows from the record
    alone, so a crash at any moment leads to the very same request.
    """
    if instance.blocked_reason:
        return None
    if (query := way_back.source_query_of(instance)) is not None:
        return query
    asks, move = desire_of(instance).asks, instance.move
    if asks is Ask.CLAIM:
        return _claim(instance)
    if asks is Ask.REVERT:
        assert move is not None
        return Revert(
            consumer=instance.uuid,
            migration=_migration(move),
            source_attempt=move.book_attempt,
            attempt=instance.next_attempt,
        )
    is_instance_over = move is not None and move.instance_released
    if asks is Ask.RELEASE_MIGRATION or (asks is Ask.RELEASE and is_instance_over):
        assert move is not None and instance.spec is not None
        return Release(consumer=move.request_id, project_id=instance.spec.project_id, of_migration=True)
    if asks is Ask.RELEASE:
        # One attempt further than the last: a claim that was requested and never answered may still be on its way (a
        # placement worker that waits for its database), and must be refused by the fence.
        return Release(consumer=instance.uuid, attempt=instance.next_attempt)
    return None


def is_answered_by(instance: Instance, answer: Answer | SourceAnswered) -> bool:
    """Whether it answers what is asked now. Another conductor may have asked before it was paused."""
    if isinstance(answer, SourceAnswered):
        asked = way_back.source_query_of(instance)
        return asked is not None and answer.query == asked
    question, names = question_of(instance), (answer.consumer or instance.uuid, answer.attempt)
    return isinstance(question, Claim | Release | Revert) and names == (question.consumer, question.attempt or 0)


def _claim(instance: Instance) -> Claim:
    assert instance.spec is not None
    move = instance.move
    return Claim(
        consumer=instance.uuid,
        attempt=instance.next_attempt,
        consumer_generation=instance.consumer_generation,
        release_first=move is None or instance.position > 0,
        options=tuple(
            ClaimOption(allocations=s.allocations, shapes=s.shapes, host=s.host_uuid if instance.server_group else None)
            for s in instance.alternates
        ),
        server_group=instance.server_group,
        fenced_hosts=() if move is None else move.fenced_hosts,
        limits=instance.limits,
        project_id=instance.spec.project_id,
        user_id=instance.spec.user_id,
        migration=None if move is None or move.source is None else _migration(move),
    )


def _migration(move: Move) -> Migration:
    assert move.source is not None
    return Migration(uuid=move.request_id, source=move.source.allocations)


# --- The steps that the fences of an instance's hosts lead to, after each of its own steps.

# How many steps in a row one fence may lead to: one for each host of the instance, and those that follow from undoing.
MAX_FENCE_STEPS = 4
# A machine runs after these states, and one whose answer is awaited may run in these.
STARTING = frozenset({ChangeKind.START, ChangeKind.REBUILD, ChangeKind.RESCUE, ChangeKind.UNRESCUE})


class FenceSteps:
    """The effects of fences in one transaction: the hosts, and by host the services of what was given up there. proofs:
    those of the hosts from which an evacuation commands a destination.
    """

    def __init__(self) -> None:
        self.hosts: dict[str, None] = {}
        self.given_up: dict[str, list[str]] = {}
        self.proofs: dict[str, None] = {}

    def follow(self, before: Instance, stepped: Step, event: Event, context: StepContext) -> Step:
        """The step, and those that the fences of the instance's hosts lead to."""
        stepped = _with_stop(before, stepped, event, context)
        after, commands, at = stepped.instance, stepped.commands, event.at
        if isinstance(event, HostFenced) and after is not before:
            self.hosts[event.host_uuid] = None
        for _ in range(MAX_FENCE_STEPS):
            for host in fenced_hosts(after, context.fences):
                then = step(after, HostFenced(at=at, host_uuid=host), context)
                if then.instance is not after:
                    self.hosts[host] = None
                    after, commands = then.instance, (*commands, *then.commands)
        if after is not before:
            self.proofs.update(dict.fromkeys(relied_on(before, after, context)))
            self.hosts.update(self.proofs)
            for host in fenced_hosts(before, context.fences):
                if services := given_up_on(before, after, host):
                    self.given_up[host] = [*self.given_up.get(host, ()), *services]
                    self.hosts[host] = None
        return Step(after, _without_starts(commands, context))


def _with_stop(before: Instance, stepped: Step, event: Event, context: StepContext) -> Step:
    """If the fence ends a change that starts a machine, the change's order may wait in the queue: a later order stops
    the machine.
    """
    is_ended = change_of(before) in STARTING and change_of(stepped.instance) not in STARTING
    if not isinstance(event, HostFenced) or not is_ended:
        return stepped
    stopped = numbered(before, event.at)
    after = replace(stepped.instance, order=max(stepped.instance.order, stopped.order))
    return Step(after, (*stepped.commands, change_order(stopped, ChangeKind.STOP, context)))


def _without_starts(commands: Sequence[Message], context: StepContext) -> tuple[Message, ...]:
    """Nothing is started on a fenced host: it may be back before the fence is lifted, and its instances may be
    elsewhere.

    The machine is stopped under the same order, so that a command from before the fence is not carried out either.
    """
    kept: list[Message] = []
    for command in commands:
        is_fenced = isinstance(command, Spawn | ChangeMachine) and command.host_uuid in context.fences
        if not is_fenced:
            kept.append(command)
        elif isinstance(command, ChangeMachine):
            is_start = command.change in STARTING
            kept.append(replace(command, change=ChangeKind.STOP, rescue_password="") if is_start else command)
    return tuple(kept)

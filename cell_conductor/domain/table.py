"""The instance state machine: one table, total over states and events. It also draws docs/reference/states.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from msgspec.structs import replace

from bus.contracts.placement import Claim, ClaimOption, Migration, Release, Revert
from bus.faults import BrokenInvariant

from . import adopt_rules, arrival_doubts, delete_rules, departure_rules, fence_rules, leave_rules, repeat_rules, rules
from .desires import DESIRES, OVER, Ask
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
from .instance import Instance, Move, State
from .moves_table import (
    ACTIVE_AGAIN,
    AGAIN,
    ARRIVED_CELL,
    COMMAND_AGAIN,
    CONFIRM_RUNNING,
    DESTROY_LEFTOVER,
    DESTROY_ORPHAN,
    IGNORE,
    MOVES,
    REFUSE,
    Rule,
)
from .orders import with_orders
from .steps import Step, StepContext
from .way_back import SourceQuery, source_query_of

__all__ = ["IGNORE", "TABLE", "IllegalStep", "Rule", "question_of", "step"]


class IllegalStep(BrokenInvariant):
    """An event occurred that is impossible in this state. The reason carries the instance's history."""

    code = "instance.illegal_step"


REPORT_BUILDING = Rule(repeat_rules.report_building)
REPORT_DELETING = Rule(repeat_rules.report_deleting)

# None: cannot happen. Events from outside (requests, hosts) are legal everywhere; TimedOut comes only from a row that
# has a deadline, and Claimed, ClaimRefused and Released only after the state that requests them was once entered.
TABLE: Mapping[State, Mapping[type[Event], Rule | None]] = {
    State.ABSENT: {
        BuildRequested: Rule(
            adopt_rules.start_or_adopt,
            (State.BUILDING, State.ADOPTING, State.RECLAIMING, State.GIVING_UP, State.FAILED),
        ),
        DeleteRequested: Rule(delete_rules.delete_unknown, (State.TOMBSTONE, State.DELETING, State.RELEASING)),
        Spawned: IGNORE,  # no record is no proof: the database may be new, another's, or older than the machine
        SpawnFailed: IGNORE,
        TimedOut: None,
        Claimed: None,
        ClaimRefused: None,
        Destroyed: IGNORE,
        Released: None,
        HostRuns: IGNORE,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
        MoveRequested: Rule(departure_rules.arrive, ARRIVED_CELL),
        ChangeEnded: IGNORE,
        Reverted: IGNORE,
        HostFenced: IGNORE,
        MachineFound: IGNORE,
        SourceAnswered: IGNORE,
    },
    State.TOMBSTONE: {
        BuildRequested: Rule(delete_rules.refuse_build, (State.DELETING, State.RELEASING)),
        DeleteRequested: Rule(delete_rules.delete_unknown, (State.DELETING, State.RELEASING)),
        Spawned: DESTROY_ORPHAN,
        SpawnFailed: DESTROY_LEFTOVER,
        TimedOut: None,
        Claimed: None,
        ClaimRefused: None,
        Destroyed: IGNORE,
        Released: None,
        HostRuns: DESTROY_ORPHAN,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
        MoveRequested: Rule(departure_rules.arrive, ARRIVED_CELL),
        ChangeEnded: IGNORE,
        Reverted: IGNORE,
        HostFenced: IGNORE,
        MachineFound: IGNORE,
        SourceAnswered: IGNORE,
    },
    State.BUILDING: {
        BuildRequested: REPORT_BUILDING,
        DeleteRequested: Rule(rules.destroy, (State.DELETING,)),
        Spawned: Rule(rules.come_up, (State.ACTIVE,)),
        SpawnFailed: Rule(rules.fail_over, (State.RECLAIMING, State.GIVING_UP)),
        TimedOut: Rule(rules.time_out, (State.RECLAIMING, State.GIVING_UP)),
        Claimed: IGNORE,
        ClaimRefused: IGNORE,
        Destroyed: Rule(rules.fail_over_destroyed, (State.RECLAIMING, State.GIVING_UP)),
        Released: None,
        HostRuns: Rule(rules.come_up, (State.ACTIVE,)),
        HostMissing: IGNORE,  # it may not have started yet: the deadline decides
        ServiceLost: Rule(rules.leave_service, (State.RECLAIMING,)),
        MoveRequested: REFUSE,
        ChangeEnded: IGNORE,
        Reverted: IGNORE,
        HostFenced: Rule(fence_rules.leave_host, (State.RECLAIMING, State.GIVING_UP)),
        MachineFound: IGNORE,
        SourceAnswered: IGNORE,
    },
    State.ADOPTING: {
        BuildRequested: REPORT_BUILDING,
        DeleteRequested: Rule(rules.destroy, (State.DELETING,)),
        Spawned: Rule(adopt_rules.note_built),
        SpawnFailed: DESTROY_LEFTOVER,
        TimedOut: AGAIN,
        Claimed: Rule(adopt_rules.end_adopted, (State.ACTIVE, State.BUILDING)),
        ClaimRefused: Rule(adopt_rules.end_adopted, (State.ACTIVE, State.BUILDING)),
        Destroyed: IGNORE,
        Released: None,
        HostRuns: Rule(adopt_rules.note_built),
        HostMissing: IGNORE,  # if it is lost, it is lost as an active one
        ServiceLost: IGNORE,
        MoveRequested: REFUSE,
        ChangeEnded: IGNORE,
        Reverted: IGNORE,
        HostFenced: IGNORE,  # the next events are judged once it is active
        MachineFound: IGNORE,
        SourceAnswered: IGNORE,
    },
    State.RECLAIMING: {
        BuildRequested: REPORT_BUILDING,
        DeleteRequested: Rule(rules.abandon, (State.ABANDONING,)),
        Spawned: DESTROY_ORPHAN,
        SpawnFailed: DESTROY_LEFTOVER,
        TimedOut: AGAIN,
        Claimed: Rule(rules.move_on, (State.BUILDING,)),
        ClaimRefused: Rule(rules.run_out, (State.GIVING_UP, State.FAILED)),
        Destroyed: IGNORE,
        Released: None,
        HostRuns: DESTROY_ORPHAN,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
        MoveRequested: REFUSE,
        ChangeEnded: IGNORE,
        Reverted: IGNORE,
        HostFenced: IGNORE,
        MachineFound: Rule(adopt_rules.adopt_machine, (State.ADOPTING, State.GIVING_UP)),
        SourceAnswered: IGNORE,
    },
    State.ABANDONING: {
        BuildRequested: REPORT_DELETING,
        DeleteRequested: REPORT_DELETING,
        Spawned: DESTROY_ORPHAN,
        SpawnFailed: DESTROY_LEFTOVER,
        TimedOut: AGAIN,
        Claimed: Rule(rules.release_alternate, (State.RELEASING,)),
        ClaimRefused: Rule(rules.drop, (State.RELEASING, State.DELETED)),
        Destroyed: IGNORE,
        Released: None,
        HostRuns: DESTROY_ORPHAN,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
        MoveRequested: REFUSE,
        ChangeEnded: IGNORE,
        Reverted: IGNORE,
        HostFenced: IGNORE,
        MachineFound: IGNORE,
        SourceAnswered: IGNORE,
    },
    State.ACTIVE: {
        BuildRequested: ACTIVE_AGAIN,
        DeleteRequested: Rule(rules.destroy, (State.DELETING,)),
        Spawned: CONFIRM_RUNNING,
        SpawnFailed: DESTROY_LEFTOVER,
        TimedOut: None,
        Claimed: IGNORE,
        ClaimRefused: IGNORE,
        Destroyed: IGNORE,  # we ordered nothing: it is lost when a report, which the breaker judges, leaves it out
        Released: IGNORE,  # of a migration, once more
        HostRuns: CONFIRM_RUNNING,
        HostMissing: Rule(rules.lose, (State.GIVING_UP,)),
        ServiceLost: IGNORE,  # its machines may run: only an operator, or a fence, can establish that they do not
        MoveRequested: Rule(
            leave_rules.begin_or_leave,
            (State.CLAIMING, State.REVERTING, State.CHANGING, State.OFFLOADING, State.LEAVING),
        ),
        ChangeEnded: IGNORE,
        Reverted: IGNORE,
        HostFenced: Rule(fence_rules.fail_by_policy, (State.GIVING_UP,)),
        MachineFound: Rule(adopt_rules.adopt_decided, (State.ADOPTING,)),
        SourceAnswered: IGNORE,
    },
    State.GIVING_UP: {
        BuildRequested: REPORT_BUILDING,
        DeleteRequested: Rule(rules.delete_instead, (State.RELEASING,)),
        Spawned: DESTROY_ORPHAN,
        SpawnFailed: DESTROY_LEFTOVER,
        TimedOut: AGAIN,
        Claimed: IGNORE,
        ClaimRefused: IGNORE,
        Destroyed: IGNORE,
        Released: Rule(rules.end_failed, (State.FAILED,)),
        HostRuns: DESTROY_ORPHAN,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
        MoveRequested: REFUSE,
        ChangeEnded: IGNORE,
        Reverted: IGNORE,
        HostFenced: IGNORE,
        MachineFound: IGNORE,
        SourceAnswered: IGNORE,
    },
    State.FAILED: {
        BuildRequested: Rule(
            repeat_rules.restart_build, (State.BUILDING, State.ADOPTING, State.RECLAIMING, State.GIVING_UP)
        ),
        DeleteRequested: Rule(rules.end_deleted, (State.DELETED,)),
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
        MoveRequested: REFUSE,
        ChangeEnded: IGNORE,
        Reverted: IGNORE,
        HostFenced: IGNORE,
        MachineFound: Rule(adopt_rules.adopt_decided, (State.ADOPTING,)),
        SourceAnswered: IGNORE,
    },
    State.DELETING: {
        BuildRequested: REPORT_DELETING,
        DeleteRequested: REPORT_DELETING,
        Spawned: CONFIRM_RUNNING,
        SpawnFailed: Rule(delete_rules.report_undestroyed),
        TimedOut: COMMAND_AGAIN,
        Claimed: IGNORE,
        ClaimRefused: IGNORE,
        Destroyed: Rule(delete_rules.release_both, (State.RELEASING,)),
        Released: IGNORE,
        HostRuns: CONFIRM_RUNNING,
        HostMissing: Rule(delete_rules.release_both, (State.RELEASING,)),
        ServiceLost: IGNORE,  # the order waits in its queue, and the allocation with it
        MoveRequested: REFUSE,
        ChangeEnded: IGNORE,
        Reverted: IGNORE,
        HostFenced: Rule(fence_rules.end_delete, (State.RELEASING,)),
        MachineFound: IGNORE,
        SourceAnswered: IGNORE,
    },
    State.RELEASING: {
        BuildRequested: REPORT_DELETING,
        DeleteRequested: REPORT_DELETING,
        Spawned: DESTROY_ORPHAN,
        SpawnFailed: DESTROY_LEFTOVER,
        TimedOut: AGAIN,
        Claimed: IGNORE,
        ClaimRefused: IGNORE,
        Destroyed: IGNORE,
        Released: Rule(rules.end_deleted, (State.DELETED,)),
        HostRuns: DESTROY_ORPHAN,
        HostMissing: IGNORE,
        ServiceLost: IGNORE,
        MoveRequested: REFUSE,
        ChangeEnded: IGNORE,
        Reverted: IGNORE,
        HostFenced: IGNORE,
        MachineFound: IGNORE,
        SourceAnswered: IGNORE,
    },
    State.DELETED: {
        BuildRequested: Rule(repeat_rules.announce_deleted_again),
        DeleteRequested: Rule(repeat_rules.announce_deleted_again),
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
        MoveRequested: REFUSE,
        ChangeEnded: IGNORE,
        Reverted: IGNORE,
        HostFenced: IGNORE,
        MachineFound: IGNORE,
        SourceAnswered: IGNORE,
    },
    **MOVES,
}


def step(instance: Instance, event: Event, context: StepContext) -> Step:
    """The instance after an event, and the commands that follow. Raises IllegalStep with the history."""
    return with_orders(instance, _stepped(instance, event, context), context)


def _stepped(instance: Instance, event: Event, context: StepContext) -> Step:
    rule = TABLE[instance.state][type(event)]
    if rule is None:
        raise IllegalStep(f"{type(event).__name__} while {instance.state}: {event!r} on {instance!r}")
    if isinstance(event, Claimed) and event.attempt > instance.last_attempt + _may_be_claimed(instance.state):
        # A claim that no record of ours has requested would leak: no worker would ever release it.
        raise IllegalStep(f"claim of attempt {event.attempt} while {instance.state}: {instance!r}")
    if isinstance(event, DeleteRequested) and delete_rules.is_of_another_project(instance, event):
        return Step(instance)
    if isinstance(event, MoveRequested):
        instance = departure_rules.numbered_above(instance, event.request)
        answered = leave_rules.follow_outdated(instance, event, context)
        answered = answered or arrival_doubts.force_back(instance, event, context)
        answered = answered or departure_rules.answer_unbegun(instance, event, context)
        if answered is not None:
            return answered
    stepped = rule.apply(instance, event, context)
    after = stepped.instance.state
    assert after is instance.state or after in rule.to, (rule.name, instance.state, after)
    return stepped


def _may_be_claimed(state: State) -> bool:
    """Whether an attempt may be claimed for an instance in this state.

    A claim may be sent twice at once (a redelivered message, the sweep), answered "full", and then "claimed" because
    there is room meanwhile. The step after the first answer requests the release, or the revert, of that very attempt:
    nothing leaks.
    """
    return DESIRES[state].asks is Ask.CLAIM or DESIRES[state].here in OVER


Question: TypeAlias = Claim | Release | Revert | SourceQuery


def question_of(instance: Instance) -> Question | None:
    """The request to placement, or to compute services, while the instance is in this state. It follows from the record
    alone, so a crash at any moment leads to the very same request.
    """
    if (query := source_query_of(instance)) is not None:
        return query
    asks, move = DESIRES[instance.state].asks, instance.move
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
        assert move is not None
        assert instance.spec is not None
        return Release(consumer=move.request_id, project_id=instance.spec.project_id, of_migration=True)
    if asks is Ask.RELEASE:
        # One attempt further than the last: a claim that was requested and never answered may still be on its way (a
        # placement worker that waits for its database), and must be refused by the fence.
        return Release(consumer=instance.uuid, attempt=instance.next_attempt)
    return None


def _claim(instance: Instance) -> Claim:
    assert instance.spec is not None
    move = instance.move
    claim = Claim(
        consumer=instance.uuid,
        attempt=instance.next_attempt,
        consumer_generation=instance.consumer_generation,
        release_first=move is None or instance.position > 0,
        options=tuple(
            ClaimOption(allocations=s.allocations, shapes=s.shapes, host=s.host_uuid if instance.server_group else None)
            for s in (instance.alternates if instance.state is not State.ADOPTING else (instance.here,))
        ),
        server_group=instance.server_group,
        limits=instance.limits,
        project_id=instance.spec.project_id,
        user_id=instance.spec.user_id,
        migration=None if move is None or move.source is None else _migration(move),
    )
    return replace(claim, release_first=True) if instance.state is State.REASSIGNING else claim


def _migration(move: Move) -> Migration:
    assert move.source is not None
    return Migration(uuid=move.request_id, source=move.source.allocations)

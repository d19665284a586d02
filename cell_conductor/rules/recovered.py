"""What a recovery makes of one instance, as a step: its record with the times and numbers that follow, the commands to
its hosts, and what its client and the schedulers are told. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum

from msgspec.structs import replace

from bus.contracts.actions import ChangeKind, ChangeMachine, Condition
from bus.contracts.base import Allocations, Message
from bus.contracts.build import BuildState
from bus.contracts.cell import UNKNOWN_ATTEMPT, Destroy
from bus.contracts.listing import ListedMachine
from bus.contracts.placement import MAX_RESTATED, Restate
from cell_conductor.rules.action_events import after, notify_condition, notify_end
from cell_conductor.rules.instance_facts import InstanceFacts
from cell_conductor.rules.reconcile import ATTEMPTS_PER_INCARNATION
from cell_conductor.rules.recovery_facts import KnownInstance, Reconciled, RecoveryCommand, RecoveryCommandKind
from cell_conductor.state.desired_state import (
    DESIRED,
    PURGEABLE,
    PURGEABLE_FAILED,
    MachineTarget,
    Work,
    desired_state_of,
)
from cell_conductor.state.instance import FIRST_SEQUENCE, Instance
from cell_conductor.state.step import Step, StepContext, emit_event


def restatement(result: Reconciled, known: KnownInstance | None) -> Restate | None:
    """What placement is to have of it; None: what it has is released as of any other instance, or was never told."""
    # Of each that has a machine: its generation on record may be from before, and older claims are to be refused.
    record = result.record
    if record is None or record.spec is None or result.blocked_reason or known is None:
        return None
    row, allocations = desired_state_of(record), None
    # A request that goes on releases its own migration.
    moving = "" if record.action is None else record.action.request_id
    migrations = tuple(one for one in known.migrations if one != moving)
    if row.current in DESIRED and row.condition is not Condition.RESIZED:
        # The host may report the same inventories of other providers by now, where placement has moved it to.
        wanted = next(
            (
                one.allocations
                for one in known.selections
                if one.host_uuid == record.host_uuid
                and _amounts(one.allocations) == _amounts(record.current.allocations)
            ),
            record.current.allocations,
        )
        own = [(one.host_uuid, one.allocations) for one in known.selections[: known.own_count]]
        allocations = None if own == [(record.host_uuid, wanted)] else wanted
    elif row.condition is Condition.OFFLOADED:
        allocations = {}
    elif row.in_other_cell or row.condition is Condition.RESIZED:
        return None
    if not migrations and row.current not in DESIRED and not (allocations == {} and known.selections):
        return None
    return Restate(
        consumer=record.uuid,
        attempt=max(1, record.last_attempt),
        project_id=record.spec.project_id,
        user_id=record.spec.user_id,
        allocations=allocations,
        migrations=migrations[:MAX_RESTATED],
    )


def _amounts(allocations: Allocations) -> Counter[str]:
    total = Counter[str]()
    for amounts in allocations.values():
        total.update(amounts)
    return total


class Loss(Enum):
    """What its client has not deleted, and a recovery ends."""

    INSTANCE = "instance"  # it was active, or asleep
    BUILD = "build"


def loss_of(before: Instance | None, result: Reconciled, known: KnownInstance | None) -> Loss | None:
    """What of it is lost. before: on record."""
    record, failed = result.record, Condition.FAILED
    if record is None or result.blocked_reason is not None or desired_state_of(record).condition is not failed:
        return None
    row = None if before is None else desired_state_of(before)
    if row is not None and row.condition is failed:
        return None
    was_active = known is not None and known.is_in_this_cell and known.is_active
    if was_active or (row is not None and row.work is not Work.BUILD and row.current is not MachineTarget.UNKNOWN):
        return Loss.INSTANCE
    return Loss.BUILD


def leftovers(
    record: Instance, machines: Sequence[ListedMachine], protected: Collection[str]
) -> tuple[RecoveryCommand, ...]:
    """Of an instance that goes on as usual: the commands to what a service lists late, is not complete, and is of an
    attempt from before the last recovery, where the record has nothing. Reports judge the rest.
    """
    facts = InstanceFacts(record, machines, None, (), None, protected=protected, off=())
    return tuple(
        one
        for one in facts.commands()
        if one.kind is RecoveryCommandKind.DESTROY_IF_INCOMPLETE
        and one.machine.attempt < record.proves_from
        and one.machine.host_uuid not in facts.places
    )


def recovered(
    before: Instance | None,
    result: Reconciled,
    known: KnownInstance | None,
    at: float,
    context: StepContext,
    *,
    incarnation: int,
) -> Step | None:
    """The step; None: nothing is done. Without a record, it is of an absent instance. before: on record.
    incarnation: of the database.
    """
    record = result.record
    if record is None:
        commanded = [one.machine.instance_uuid for one in result.commands]
        return _with_commands(Instance(uuid=commanded[0]), result.commands, at, context) if commanded else None
    floor = incarnation * ATTEMPTS_PER_INCARNATION
    if result.blocked_reason is not None:
        since = before.since if before is not None and before.blocked_reason else at
        proves_from = max(floor, record.proves_from)
        record = replace(record, blocked_reason=result.blocked_reason.value, since=since, proves_from=proves_from)
        return _with_commands(replace(record, deadline=at + context.destroy_retry_s), result.commands, at, context)
    sequence = max(record.sequence, FIRST_SEQUENCE if known is None else known.sequence + 1, int(at * 1000))
    # Lower attempts are unknown, and what is released is above what a late copy of the restatement states.
    proves_from = max(floor + 1, record.next_attempt)
    record = replace(record, blocked_reason="", sequence=sequence, proves_from=proves_from, queried=False)
    is_new = before is None or before.phase != record.phase or before.host_uuid != record.host_uuid
    if is_new:
        record = replace(record, since=at, requested_at=at if before is None else record.requested_at)
    record = replace(record, deadline=_deadline(record, at, context))
    step = _with_commands(record, result.commands, at, context)
    if (state := _unreported_state(before, record, known)) is not None:
        step = after(step, emit_event(replace(step.instance, answered=True), state, at, context, terminal=True))
    for ended in result.ended if record.spec is not None else ():  # of a tombstone the schedulers ask
        step = after(step, notify_end(step.instance, ended, at, context))
    if not result.ended and _is_otherwise(record, known):
        step = after(step, notify_condition(step.instance, at, context))
    return step


def _is_otherwise(record: Instance, known: KnownInstance | None) -> bool:
    """Whether the map has this instance in another condition than it is in."""
    if known is None or not (known.is_in_this_cell and known.is_active):
        return False
    row = desired_state_of(record)
    if row.condition is Condition.OFFLOADED:
        return not known.is_offloaded
    return row.current is MachineTarget.RUNNING and record.action is None and record.power is not known.power


def _deadline(record: Instance, at: float, context: StepContext) -> float | None:
    row = desired_state_of(record)
    if row.work is Work.BUILD:
        return at + (record.build_timeout_s or context.destroy_retry_s)
    if row.condition is Condition.RESIZED:
        confirm_s = None if record.action is None else record.action.auto_confirm_s
        return None if confirm_s is None else at + confirm_s
    if row.ends or record.phase in PURGEABLE | PURGEABLE_FAILED:
        return None
    return at  # what it waits for is commanded, or asked of placement, once more


def _unreported_state(before: Instance | None, record: Instance, known: KnownInstance | None) -> BuildState | None:
    """What of its build the map does not have. Where the build on record had failed, a newer one may be queued: the
    schedulers ask for that end.
    """
    if record.spec is None or known is None or known.is_deleted:
        return None
    row, host = desired_state_of(record), known.selections[0].host_uuid if known.selections else None
    if row.current is MachineTarget.RUNNING:
        return None if known.is_active and host == record.host_uuid else BuildState.ACTIVE
    if not row.ends or not known.is_in_this_cell:
        return None
    if row.condition is Condition.FAILED:
        had_failed = before is not None and desired_state_of(before).condition is Condition.FAILED
        return BuildState.FAILED if known.is_active or not had_failed else None
    return BuildState.DELETED if row.condition is Condition.DELETED else None


def _with_commands(
    record: Instance, recovery_commands: Sequence[RecoveryCommand], at: float, context: StepContext
) -> Step:
    """A quarantine is no command: what the record does not name stays, and is reported."""
    commands: list[Message] = []
    for command in recovery_commands:
        machine = command.machine
        if (
            command.kind in (RecoveryCommandKind.DESTROY, RecoveryCommandKind.DESTROY_IF_INCOMPLETE)
            and machine.attempt > UNKNOWN_ATTEMPT
        ):
            commands.append(
                Destroy(
                    instance_uuid=machine.instance_uuid,
                    attempt=machine.attempt,
                    host_uuid=machine.host_uuid,
                    service=machine.service,
                    database_id=context.database_id,
                    keep_if_complete=command.kind is RecoveryCommandKind.DESTROY_IF_INCOMPLETE,
                )
            )
        elif command.kind is RecoveryCommandKind.START:
            record, spec = replace(record, change_number=max(record.change_number + 1, int(at * 1000))), record.spec
            assert spec is not None
            commands.append(
                ChangeMachine(
                    change=ChangeKind.START,
                    spec=spec,
                    attempt=machine.attempt,
                    change_number=record.change_number,
                    host_uuid=machine.host_uuid,
                    service=machine.service,
                    allocations=record.current.allocations,
                    database_id=context.database_id,
                    timeout_s=context.destroy_retry_max_s,
                )
            )
    return Step(record, tuple(commands))

"""An instance that goes from one cell to another (decision 0021): how its cell gives it up, what the next cell does
with it, and what the former one answers from then on. Each cell numbers attempts above those of the former one.
"""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import (
    ENDS_OF_ACTIONS,
    OTHER_ATTEMPT,
    ActionEvent,
    ActionKind,
    ActionState,
    CellTransfer,
    Condition,
)
from bus.contracts.base import Refusal
from cell_conductor.rules.action_events import (
    ACTION_LOST,
    DELETED,
    ActionEnd,
    answer_query,
    clear_action,
    close,
    has_ended,
    refuse,
    refuse_busy,
    refuse_dead_lettered,
    refuse_request,
    refuse_unknown,
)
from cell_conductor.rules.move_steps import change, claim, enter_action, offload, roll_back
from cell_conductor.state import step
from cell_conductor.state.commands import next_resend_at
from cell_conductor.state.desired_state import BUILT_IN_OTHER_CELL, MachineTarget, desired_state_of
from cell_conductor.state.events import (
    ActionQueried,
    ActionRequested,
    BuildRequested,
    DeleteRequested,
    InstanceTransferredIn,
    TimedOut,
    TransferEnded,
    TransferRequested,
)
from cell_conductor.state.instance import MAX_ENDED, NO_HOST, EndedAction, Instance, Power, State, action_of
from cell_conductor.state.ownership_proof import next_attempt_record
from cell_conductor.state.step import Step, StepContext

ENDED_IN_OTHER_CELL = "instance.transferred"


def start_transfer(instance: Instance, event: TransferRequested, context: StepContext) -> Step:
    """The image of the instance is kept, its machine destroyed, and what it holds released. One that has no machine has
    left at once.
    """
    started = enter_action(instance, event, source=None, selections=(instance.current,))
    if instance.state is State.OFFLOADED:
        return complete_transfer(started, event.at, context)
    if instance.power is Power.SHELVED:
        return offload(started, event.at, context)
    return change(started, State.CHANGING, event.at, context)


def complete_transfer(instance: Instance, at: float, context: StepContext) -> Step:
    """Nothing of it is left here, neither a machine nor an allocation: that is on record, and published."""
    action = action_of(instance)
    assert action.to_cell is not None
    transfer = CellTransfer(
        cell=action.to_cell,
        spec=action.spec,
        image=instance.image,
        last=instance.selections[0],
        attempt=instance.last_attempt,
        sequence=instance.sequence,
        kind=action.kind,
        is_stopped=action.power is Power.STOPPED,
        at=at,
        code=action.rollback_code,
        reason=action.rollback_reason,
    )
    transferred = _transferred(clear_action(instance), transfer, action.request_id)
    transferred = replace(transferred, deadline=at + context.destroy_retry_s)
    return Step(transferred, (emit_transfer(transferred, at, context),))


def _transferred(instance: Instance, transfer: CellTransfer, request_id: str) -> Instance:
    return replace(
        instance,
        state=State.TRANSFERRED,
        next_state=None,
        spec=transfer.spec,
        selections=(transfer.last,),
        selection_index=0,
        highest_attempt=transfer.attempt,
        transfer=transfer,
        transferred_by=request_id,
        sequence=transfer.sequence + 1,
        deadline=None,
        since=transfer.at,
        queried=False,
    )


def reemit_transfer(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """Its schedulers have not said yet that the build in the next cell has ended."""
    waits = replace(instance, deadline=next_resend_at(instance, event.at, context))
    return Step(waits, (emit_transfer(waits, event.at, context),))


def emit_transfer(instance: Instance, at: float, context: StepContext) -> ActionEvent:
    """That it has left, always under the same number: what comes late or twice changes nothing."""
    transfer = instance.transfer
    assert instance.spec is not None
    assert transfer is not None
    return ActionEvent(
        request_id=instance.transferred_by,
        instance_uuid=instance.uuid,
        project_id=instance.spec.project_id,
        kind=transfer.kind,
        state=ActionState.MIGRATING,
        sequence=transfer.sequence,
        condition=Condition.MOVING,
        cell=context.cell,
        flavor=transfer.spec.flavor,
        image=transfer.spec.image,
        at=at,
        transfer=transfer,
    )


def report_attempt(instance: Instance, event: TransferRequested, context: StepContext) -> Step:
    """Another attempt than this record's newest was to leave: its schedulers ask again for that one."""
    if instance.spec is None:
        return refuse_unknown(instance, event, context)
    request = event.request
    read = ActionEvent(
        request_id=request.request_id,
        instance_uuid=instance.uuid,
        project_id=instance.spec.project_id,
        kind=request.kind,
        state=ActionState.SCHEDULED,
        sequence=instance.sequence,
        condition=Condition.MOVING,
        cell=context.cell,
        attempt=instance.last_attempt,
        code=OTHER_ATTEMPT,
        at=event.at,
    )
    return Step(replace(instance, sequence=instance.sequence + 1), (read,))


def end_transfer(instance: Instance, event: TransferEnded, context: StepContext) -> Step:
    """The build in the next cell has ended. Also a record from before the transfer gives the instance up by it: the
    former one was published by this cell, with nothing left here.
    """
    if instance.spec is None or instance.last_attempt > event.attempt or not instance.selections:
        return Step(instance)
    if desired_state_of(instance).condition is Condition.DELETED:
        return Step(instance)
    transferred = instance
    if instance.transfer is None:
        kind, request_id = event.kind, event.request_id
        transferred = transferred_to(
            instance, event.to_cell, event.attempt, kind=kind, request_id=request_id, at=event.at
        )
    state, next_state = BUILT_IN_OTHER_CELL
    return Step(
        replace(
            transferred,
            state=state,
            next_state=next_state,
            highest_attempt=event.attempt,
            deadline=None,
            since=event.at,
        )
    )


def transferred_to(
    instance: Instance, cell: str, attempt: int, *, kind: ActionKind, request_id: str, at: float
) -> Instance:
    """The record of one that another cell has built, from a record from before it left: what this cell published then
    is lost. attempt: the last one here.
    """
    spec = instance.spec if instance.action is None else instance.action.spec
    assert spec is not None
    transfer = CellTransfer(
        cell=cell,
        spec=spec,
        image=instance.image,
        last=instance.current,
        attempt=attempt,
        sequence=instance.sequence,
        kind=kind,
        is_stopped=instance.power is Power.STOPPED,
        at=at,
    )
    transferred = _transferred(instance if instance.action is None else clear_action(instance), transfer, request_id)
    return replace(transferred, state=BUILT_IN_OTHER_CELL[0], next_state=BUILT_IN_OTHER_CELL[1])


def accept_transfer(instance: Instance, event: InstanceTransferredIn, context: StepContext) -> Step:
    """Record an instance that comes from another cell, and build it from its image on a host that is claimed for it.
    Where no host takes it, it leaves for its former cell again, or is offloaded here.
    """
    # A record of lower attempts is replaced, whatever it says: when the instance left, nothing of it was left here, but
    # perhaps a machine in quarantine, about which this record proves no more than that one (`proves_from`).
    request = event.request
    transfer, desired = request.transfer, desired_state_of(instance)
    assert transfer is not None
    if transfer.attempt < instance.last_attempt:  # it is late: it begins nothing, and refuses nothing either
        if instance.state is State.TOMBSTONE:  # the delete was here first: its end is published
            deleted = step.enter_releasing(_with_transfer(instance, event), State.DELETED, event.at, context)
            return refuse_request(deleted, event, context, DELETED)
        return (refer_to_next_cell if desired.in_other_cell else answer_query)(instance, event, context)
    here = _with_transfer(instance, event)
    started = enter_action(here, event, source=None, selections=(here.current, *request.selections))
    comes_home = request.to_cell is None and transfer.code
    failure = Refusal(code=transfer.code, reason=transfer.reason) if comes_home else None
    answered = has_ended(here, request.request_id)
    started = replace(
        started, action=replace(action_of(started), started_at=transfer.at, answered=answered, failure=failure)
    )
    if action_of(started).answered or event.is_query:
        return roll_back(started, event.at, context, ACTION_LOST, "its next cell has no record of the request")
    if event.dead_letter_reason is not None:
        return roll_back(started, event.at, context, event.dead_letter_reason.code, event.dead_letter_reason.reason)
    if not request.selections:
        rests = replace(started, power=Power.SHELVED)
        return close(rests, ActionEnd(ActionState.FAILED, NO_HOST, "no host was named for it"), event.at, context)
    return claim(started, event.at, context)


def answer_not_started(instance: Instance, event: ActionQueried, context: StepContext) -> Step:
    """The answer to a query, and to a request that its queue has dead-lettered."""
    answers = answer_query if event.is_query else refuse_dead_lettered
    return answers(instance, event, context)


def refer_to_next_cell(
    instance: Instance, event: ActionRequested | DeleteRequested | BuildRequested, context: StepContext
) -> Step:
    """It has left: the scheduler that commands this cell has not received the transfer, which is published again."""
    transfer_event = emit_transfer(instance, event.at, context)
    if not isinstance(event, ActionRequested):
        return Step(instance, (transfer_event,))
    request = event.request
    known = next((one for one in instance.ended if one.request_id == request.request_id), None)
    is_ended = known is not None and known.state in ENDS_OF_ACTIONS
    if request.request_id == instance.transferred_by or (known is not None and not is_ended):
        return Step(instance, (transfer_event,))  # it has left by this one, now or before
    ended = known or EndedAction(request.request_id, request.kind, ActionState.REFUSED, ENDED_IN_OTHER_CELL)
    if event.is_query and known is None:
        ended = replace(ended, state=ActionState.FAILED, code=ACTION_LOST)
    # The transfer is published by its own request, which the schedulers carry on, and with the higher number.
    answer = replace(
        transfer_event,
        request_id=request.request_id,
        kind=request.kind,
        state=ended.state,
        sequence=transfer_event.sequence - 1,
        terminal=True,
        condition=Condition.MOVING,
        code=ended.code,
        reason=ended.reason,
        transfer=None,
    )
    # Kept, so that a query of it has the same end.
    recorded = instance if known else replace(instance, ended=(*instance.ended, ended)[-MAX_ENDED:])
    return Step(recorded, (transfer_event, answer))


def refuse_other(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """A request that cannot be started now: another one is under way, or the instance is not active."""
    is_over = desired_state_of(instance).condition in {Condition.DELETED, Condition.FAILED}
    refuses = refuse if is_over or instance.action is None else refuse_busy
    return refuses(instance, event, context)


def _with_transfer(instance: Instance, event: InstanceTransferredIn) -> Instance:
    request, kept = event.request, next_attempt_record(instance)
    transfer, ended = request.transfer, kept.ended
    assert transfer is not None
    # A machine of an earlier attempt is in quarantine then, or to come.
    proves_nothing = desired_state_of(instance).current is MachineTarget.UNKNOWN
    if instance.transfer is not None and instance.transferred_by != request.request_id:
        # A late copy of the request that it left by is not carried out again.
        ended_transfer = EndedAction(instance.transferred_by, instance.transfer.kind, ActionState.SCHEDULED)
        ended = (*ended, ended_transfer)[-MAX_ENDED:]
    return replace(
        kept,
        state=State.OFFLOADED,
        spec=transfer.spec,
        selections=(*request.selections, *instance.selections[:1], transfer.last)[:1],
        attempt=transfer.attempt,
        sequence=max(transfer.sequence, kept.sequence) + 1,
        requested_at=event.at,
        since=event.at,
        answered=True,
        cause=event.cause,
        highest_attempt=transfer.attempt + 1,
        proves_from=transfer.attempt + 1 if proves_nothing else kept.proves_from,
        power=Power.STOPPED if transfer.is_stopped else Power.SHELVED,
        image=transfer.image,
        ended=ended,
    )

"""The rules of an action, from the claim of its host to its end: `rule(instance, event, context) -> Step`. The table
has the rule of each state and event.
"""

# An instance that moves has two machines, of which at most one runs. `current` is the source until a destination has
# been claimed, and the destination from then on. A move that succeeds advances; every state also goes back: `roll_back`
# gives the destination up, has placement reverted, and starts the source again if it was commanded to stop.

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import UNSUPPORTED, ActionKind, ActionState, ChangeKind
from cell_conductor.rules import cell_transfer_rules, machine_rules
from cell_conductor.rules.action_events import (
    DONE,
    ActionEnd,
    after,
    answer_early,
    answer_other,
    clear_action,
    close,
    report_progress,
    source_of,
)
from cell_conductor.rules.action_start_rules import ABORTED
from cell_conductor.rules.build_repeat_rules import is_allocated
from cell_conductor.rules.move_steps import (
    add_history,
    add_unclaimed,
    after_failed_change,
    change,
    checked_answer,
    complete_at_destination,
    delete_during_action,
    ending_of,
    enter_active,
    finish,
    is_awaited,
    offload,
    roll_back,
    summary_of_hosts,
    try_next,
)
from cell_conductor.state import step
from cell_conductor.state.commands import change_of, resend_sooner, step_s
from cell_conductor.state.evacuation_proof import evacuation_blocker
from cell_conductor.state.events import (
    ChangeEnded,
    Claimed,
    ClaimRefused,
    Destroyed,
    MachineRunning,
    Released,
    ServiceLost,
    Spawned,
    SpawnFailed,
    TimedOut,
)
from cell_conductor.state.instance import Instance, Power, State, action_of, claim_failure_reason
from cell_conductor.state.step import Step, StepContext

TIMED_OUT = "action.timeout"
MIGRATION_IN_USE = "claim.migration_in_use"  # placement's reason for a refused claim


# --- a destination


def take_destination(instance: Instance, event: Claimed, context: StepContext) -> Step:
    """A destination is claimed: query whether it can, or change the size in place."""
    action = action_of(instance)
    outcomes = event.outcomes[: event.option]
    updated = add_unclaimed(instance, outcomes, event.at)
    taken = replace(
        updated,
        selection_index=instance.selection_index + 1 + event.option,
        consumer_generation=event.consumer_generation,
        highest_attempt=event.attempt,
        action=replace(action_of(updated), claimed=action.source is not None),
    )
    taken = replace(taken, attempt=action.source_attempt if taken.is_in_place else event.attempt)
    if action.delete:
        return delete_during_action(taken, event.at, context)
    if action.ending_kind is ActionKind.ABORT:
        return roll_back(taken, event.at, context, ABORTED, "")
    if taken.is_in_place:
        return change(taken, State.RESIZING, event.at, context)
    return change(taken, State.PREPARING, event.at, context)


def no_destination_left(instance: Instance, event: ClaimRefused, context: StepContext) -> Step:
    """No destination could be claimed: back to the source. The revert has a later number than the claim: it ends a
    late copy of that, or takes back what a copy has claimed.
    """
    tried = replace(add_unclaimed(instance, event.outcomes, event.at), highest_attempt=event.attempt)
    action = action_of(instance)
    if action.delete and event.reason.startswith(MIGRATION_IN_USE) and not action.claimed:
        # Another instance keeps its source under this uuid: it is not this one's to release.
        tried = replace(tried, action=replace(action_of(tried), source=None))
    if action.delete:
        return delete_during_action(tried, event.at, context)
    if (known := _with_current_generation(instance, event)) is not None:
        return Step(known)
    if event.consumer_conflict:
        reason = event.reason or "another client holds this instance's allocation"
        return roll_back(tried, event.at, context, "placement.consumer_conflict", reason)
    if action_of(instance).ending_kind is ActionKind.ABORT:
        return roll_back(tried, event.at, context, ABORTED, "")
    return roll_back(tried, event.at, context, *claim_failure_reason(event, event.reason or summary_of_hosts(tried)))


def _with_current_generation(instance: Instance, event: ClaimRefused) -> Instance | None:
    """The claim once more, with the generation that placement has; None: it was refused for another reason."""
    # Placement holds just the source: an audit has claimed it again, or released the other allocation. Once a move,
    # because another client may keep changing it.
    action = action_of(instance)
    if (
        action.refreshed
        or action.ending_kind is ActionKind.ABORT
        or action.source is None
        or instance.selection_index > 0
    ):
        return None
    if not event.consumer_conflict or not is_allocated(action.source, event):
        return None
    return replace(instance, consumer_generation=event.consumer_generation, action=replace(action, refreshed=True))


def on_check_passed(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The destination can, or cannot: have the source hand over, or try the next destination."""
    if not is_awaited(instance, event, instance.current, instance.attempt):
        return Step(instance)
    if not event.done:
        return try_next(add_history(instance, "failed", event.at, event.code, event.reason), event.at, context)
    action = action_of(instance)
    if action.kind is ActionKind.EVACUATE:
        blocker = evacuation_blocker(instance, context, fenced=action.fenced, force=action.force)
        if blocker is not None:
            return roll_back(instance, event.at, context, blocker.code, blocker.reason)
    if action.source is None or action.kind is ActionKind.EVACUATE or action.handed_over:
        return finish(instance, event.at, context)
    earlier = replace(instance, action=replace(action, handed_over=True))
    return change(earlier, State.HANDING_OVER, event.at, context)


def skip_destination(instance: Instance, event: TimedOut | ServiceLost, context: StepContext) -> Step:
    """The destination does not answer, and was commanded nothing yet: the next one is tried."""
    if isinstance(event, ServiceLost):
        if event.service != instance.service:
            return Step(instance)
        code, reason = event.code, event.reason
    else:
        code, reason = "prepare.timeout", "no answer in time"
    return try_next(add_history(instance, "failed", event.at, code, reason), event.at, context)


def destination_ready(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The source has stopped and handed over: the destination starts it. If it could not, the instance stays on the
    source.
    """
    # Where the source refused before it began, the machine was never commanded to stop, and need not be started;
    # another destination is tried only if the source may let it go there.
    action = action_of(instance)
    if not is_awaited(instance, event, source_of(action), action.source_attempt):
        return Step(instance)
    if event.done:
        return finish(instance, event.at, context)
    if not event.refused or not event.runs:
        return roll_back(instance, event.at, context, event.code or "hand-over.failed", event.reason)
    kept = add_history(instance, "failed", event.at, event.code, event.reason)
    kept = replace(kept, action=replace(action_of(kept), handed_over=False))
    if event.retry_other_host:
        return try_next(kept, event.at, context)
    return roll_back(kept, event.at, context, event.code, event.reason)


def abandon_hand_over(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """The source does not answer: the move is rolled back."""
    # The source is started again, which cancels the hand-over that it may have begun.
    kind = change_of(instance)
    assert kind is not None
    reason = f"the source did not hand over within {step_s(action_of(instance), kind, context):g} s"
    return roll_back(instance, event.at, context, TIMED_OUT, reason)


def on_destination_active(instance: Instance, event: Spawned | MachineRunning, context: StepContext) -> Step:
    """The destination has the machine. Only now may the source be abandoned: at once, or when the move is confirmed."""
    if not step.is_current_attempt(instance, event):
        return machine_rules.destroy_superseded(instance, event, context)
    here = step.with_current_service(instance, event)
    if isinstance(event, MachineRunning) and not event.built:
        return Step(here)
    return complete_at_destination(add_history(here, "active", event.at), event.at, context)


def fail_destination(instance: Instance, event: SpawnFailed, context: StepContext) -> Step:
    """The destination could not: its remains are destroyed, and the next one is tried, or the move is rolled back."""
    if not step.is_current(instance, event.attempt, event.host_uuid):
        return machine_rules.destroy_failed_attempt(instance, event, context)
    failed = add_history(instance, "failed", event.at, event.code, event.reason)
    if event.final:
        return roll_back(failed, event.at, context, event.code, event.reason)
    return try_next(failed, event.at, context)


def fail_lost_destination(instance: Instance, event: Destroyed, context: StepContext) -> Step:
    """The destination has ended the attempt: the next one is tried, or the move is rolled back."""
    if not step.current_destroyed(instance, event):
        return Step(instance)
    gone = add_history(
        instance, "timed_out" if instance.queried else "failed", event.at, "spawn.timeout", "no answer in time"
    )
    return try_next(replace(gone, action=replace(action_of(gone), finishing=False)), event.at, context)


def end_source_released(instance: Instance, event: Released, context: StepContext) -> Step:
    """The migration holds no allocation any more: the move is over."""
    earlier = answer_other(enter_active(instance, event.at, context), DONE, event.at, context)
    gone = report_progress(earlier.instance, ActionState.SOURCE_DESTROYED, event.at, context)
    return after(earlier, Step(clear_action(gone.instance), gone.commands))


# By these it is built from its image, and is offloaded again where no host could: in the cell that it has come to.
_FROM_IMAGE = frozenset({ActionKind.UNSHELVE, ActionKind.MIGRATE, ActionKind.RESIZE})


def on_changed(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The host has carried out the command, or reports that it could not; if it does not know, it is queried again."""
    if not is_awaited(instance, event, instance.current, instance.attempt):
        return Step(instance)
    action, event = action_of(instance), checked_answer(instance, event)
    if not event.done:
        ending = ActionEnd(ActionState.FAILED, event.code or "change.failed", event.reason)
        if event.runs is None and event.code != UNSUPPORTED:
            return answer_early(resend_sooner(instance, event.at, context), ending, event.at, context)
        back = after_failed_change(instance, event)
        if change_of(instance) is ChangeKind.SNAPSHOT and (instance.power, back.power) == (
            Power.RUNNING,
            Power.STOPPED,
        ):
            runs = replace(
                action, to_cell=None, rollback_code=ending.code, rollback_reason=step.truncate(ending.reason)
            )
            return change(replace(instance, action=runs), State.RESTARTING, event.at, context)
        return close(enter_active(back, event.at, context), ending, event.at, context)
    if action.kind is ActionKind.SHELVE or action.to_cell is not None:
        kept = replace(instance, power=Power.SHELVED, image=event.image)
        if action.offload and not action.answered:  # its client was told that it had failed: the machine stays
            return offload(kept, event.at, context)
        return close(enter_active(kept, event.at, context), DONE, event.at, context)
    if action.kind in (ActionKind.START, ActionKind.UNSHELVE, ActionKind.REBOOT):
        instance = replace(instance, power=Power.RUNNING, image="")
    if action.kind in (ActionKind.RESCUE, ActionKind.UNRESCUE):
        instance = replace(instance, power=Power.RESCUED if action.kind is ActionKind.RESCUE else Power.RUNNING)
    if action.kind is ActionKind.STOP or (action.kind is ActionKind.REBUILD and event.runs is False):
        instance = replace(instance, power=Power.STOPPED)
    if action.kind is ActionKind.REBUILD and event.runs:  # Ironic switches the node on
        instance = replace(instance, power=Power.RUNNING)
    return close(enter_active(instance, event.at, context), DONE, event.at, context)


def end_offloaded(instance: Instance, event: Released, context: StepContext) -> Step:
    """Nothing is allocated any more: the instance has no host."""
    # A copy of a claim, or of this release, is refused by its attempt.
    action = action_of(instance)
    gone = replace(
        enter_active(instance, event.at, context),
        state=State.OFFLOADED,
        power=Power.SHELVED,
        highest_attempt=instance.next_attempt,
        consumer_generation=None,
    )
    if action.to_cell is not None:
        return cell_transfer_rules.complete_transfer(gone, event.at, context)
    if action.kind in _FROM_IMAGE:
        gone = replace(gone, spec=action.spec)
        return close(gone, ending_of(action), event.at, context)
    return close(gone, DONE, event.at, context)

"""The rule of each transition of an action: `rule(instance, event, context) -> Step`. The table selects the one that
applies.
"""

# An instance that moves has two machines, of which at most one runs. `current` is the source until a destination has
# been claimed, and the destination from then on. A move that succeeds advances; every state also goes back: `roll_back`
# gives the destination up, has placement reverted, and starts the source again if it was commanded to stop.

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.moves import ACROSS_CELLS, MACHINE_ABSENT, UNSUPPORTED, ActionKind, ActionState, ChangeKind

from . import departure_rules, rules, steps, way_back
from .build_repeat_rules import is_allocated
from .events import (
    ActionRequested,
    ChangeEnded,
    Claimed,
    ClaimRefused,
    Destroyed,
    MachineMissing,
    MachineRunning,
    Released,
    ServiceLost,
    Spawned,
    SpawnFailed,
    TimedOut,
    TransferRequested,
)
from .instance import Instance, Power, State, claim_failure_reason
from .move_events import (
    DELETED,
    DONE,
    ENDS_ANOTHER,
    ActionEnd,
    action_of,
    after,
    answer_early,
    answer_other,
    clear_action,
    close,
    has_ended,
    refuse_busy,
    refuse_request,
    repeat_end,
    report_progress,
    report_silent,
    source_of,
)
from .move_steps import (
    CLAIMS,
    add_history,
    add_unclaimed,
    after_failed_change,
    change,
    checked_answer,
    claim,
    complete_at_destination,
    confirm,
    delete_during_action,
    ending_of,
    enter_action,
    enter_active,
    evacuation_blocker,
    finish,
    is_awaited,
    offload,
    roll_back,
    start_in_place,
    start_with_claim,
    summary_of_hosts,
    try_next,
)
from .orders import change_of, resend_sooner, step_s, with_change_number
from .steps import Step, StepContext

ABORTED = "action.aborted"
REVERTED = "action.reverted"
TIMED_OUT = "action.timeout"
MIGRATION_IN_USE = "claim.migration_in_use"  # placement's reason for a refused claim
_OF_SHELVED = frozenset({ActionKind.UNSHELVE, ActionKind.OFFLOAD, ActionKind.SHELVE, ActionKind.EVACUATE})


# --- requests


def start_action(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """A request for an instance that has no request under way: it has a machine, or none, and is unshelved on a host
    that is claimed anew.
    """
    again = repeat_end(instance, event, context)
    if again is not None:
        return again
    if isinstance(event, TransferRequested) and event.attempt != instance.last_attempt:
        return departure_rules.report_attempt(instance, event, context)
    if (refusal := _action_blocker(instance, event.request.kind)) is not None:
        return refuse_request(instance, event, context, *refusal)
    if (refused := _refuse_other_flavor(instance, event, context)) is not None:
        return refused
    if (refused := _refuse_transfer(instance, event, context)) is not None:
        return refused
    if isinstance(event, TransferRequested):
        return departure_rules.start_transfer(instance, event, context)
    if instance.state is State.OFFLOADED:
        if not event.request.selections:
            return refuse_request(instance, event, context, "action.no_host")
        # `current` is the host that it had; no machine is there.
        started = enter_action(instance, event, source=None, selections=(instance.current, *event.request.selections))
        return claim(started, event.at, context)
    if event.request.kind in CLAIMS:
        return start_with_claim(instance, event, context)
    return start_in_place(instance, event, context)


def _action_blocker(instance: Instance, kind: ActionKind) -> tuple[str, str] | None:
    """The code and the reason for which a request of this kind is not begun as the instance is; None: it may be."""
    if instance.state is State.OFFLOADED:
        return None if kind is ActionKind.UNSHELVE else ("instance.offloaded", "unshelve it first")
    if kind is ActionKind.OFFLOAD and instance.power is not Power.SHELVED:
        return "instance.not_shelved", "shelve it first"
    if kind in ENDS_ANOTHER:
        reason = f"no move is there to {kind.value}; one from another cell is over, and migrating it leads back there"
        return "action.none", reason
    if instance.power is Power.SHELVED and kind not in _OF_SHELVED:
        return "instance.shelved", "unshelve or offload it first"
    if instance.power is Power.RESCUED and kind not in (ActionKind.RESCUE, ActionKind.UNRESCUE, ActionKind.EVACUATE):
        return "instance.rescued", "unrescue it first"
    return None


def _refuse_transfer(instance: Instance, event: ActionRequested, context: StepContext) -> Step | None:
    """What has things of its cell stays in it, with a host or without."""
    assert instance.spec is not None
    if event.request.to_cell is None or not (instance.spec.networks or instance.spec.volumes):
        return None
    reason = "its networks and volumes are its cell's own"
    return refuse_request(instance, event, context, ACROSS_CELLS, reason)


def _refuse_other_flavor(instance: Instance, event: ActionRequested, context: StepContext) -> Step | None:
    """Refuse a request whose hosts were chosen for another flavor than the instance has here."""
    # Their claims would have that flavor's amounts. The sender's record is behind (a database was restored); it takes
    # the present flavor from the refusal. For a stop, and other changes on the instance's own host, no hosts were
    # chosen.
    request, expected = event.request, event.request.expected_flavor
    if not request.selections and request.spec is None and request.to_cell is None:
        return None
    assert instance.spec is not None
    if "" in (expected, instance.spec.flavor) or expected == instance.spec.flavor:
        return None
    reason = f"its flavor is {instance.spec.flavor}, and the hosts were chosen for {expected}"
    return refuse_request(instance, event, context, "instance.flavor_changed", reason)


def end_resized(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """Confirm or revert. The second of two finds the state changed and is refused."""
    action = action_of(instance)
    request = event.request
    again = repeat_end(instance, event, context)
    if again is not None:
        return again
    if request.kind not in (ActionKind.CONFIRM, ActionKind.REVERT):
        return refuse_request(instance, event, context, "instance.resized", "confirm or revert it first")
    if request.migration not in (None, action.request_id):
        return refuse_request(instance, event, context, "action.none", "another move is to be confirmed or reverted")
    if (answered := way_back.alternative_ending(instance, event, context)) is not None:
        return answered
    if request.kind is ActionKind.REVERT:
        return way_back.revert(instance, event, context, REVERTED)
    named = replace(action_of(instance), ending_request_id=request.request_id, ending_kind=request.kind)
    confirmed = confirm(way_back.keep_current(replace(instance, action=named, cause=event.cause)), event.at, context)
    source, waits = source_of(action), confirmed.instance.state is State.DESTROYING
    if not waits or source.host_uuid in context.fences or source.service not in context.down:
        return confirmed
    return after(confirmed, report_silent(confirmed.instance, way_back.SOURCE_SILENT, source, event.at, context))


def abort(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """Roll the move back, as no destination has been commanded."""
    # While a request to placement is under way, the move is rolled back once it has answered. An abort that ended
    # before this move, and is delivered again, was not meant for it.
    action, request = action_of(instance), event.request
    is_meant = request.migration in (None, action.request_id) and not has_ended(instance, request.request_id)
    if request.kind is not ActionKind.ABORT or not is_meant or action.ending_request_id or action.source is None:
        return refuse_busy(instance, event, context)
    if action.delete:
        return refuse_request(instance, event, context, DELETED)
    named = replace(
        instance,
        action=replace(action, ending_request_id=request.request_id, ending_kind=request.kind),
        cause=event.cause,
    )
    if instance.state is State.CLAIMING:
        return Step(named)
    return roll_back(named, event.at, context, ABORTED, "")


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
    """No destination could be claimed: back to the source. The revert has a later number than the claim: it fences a
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
        unproved = evacuation_blocker(instance, context, fenced=action.fenced, force=action.force)
        if unproved is not None:
            return roll_back(instance, event.at, context, unproved.code, unproved.reason)
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
    if not steps.is_current_attempt(instance, event):
        return rules.destroy_superseded(instance, event, context)
    here = steps.with_current_service(instance, event)
    if isinstance(event, MachineRunning) and not event.built:
        return Step(here)
    return complete_at_destination(add_history(here, "active", event.at), event.at, context)


def on_resized_in_place(instance: Instance, event: ChangeEnded, context: StepContext) -> Step:
    """The machine has its new size. If not, its host restores the old size, and then the next destination is tried."""
    # A failed resize may have left either size: until the old one is restored, the larger of the two stays claimed
    # here.
    if not is_awaited(instance, event, instance.current, instance.attempt):
        return Step(instance)
    action, is_absent = action_of(instance), event.code == MACHINE_ABSENT
    if action.restoring_size:
        if not event.done and not is_absent:
            return Step(
                instance
            )  # its deadline rolls the move back, and then the command is repeated until it confirms
        return try_next(replace(instance, action=replace(action, restoring_size=False)), event.at, context)
    if not event.done:
        failed = add_history(instance, "failed", event.at, event.code, event.reason)
        if is_absent:
            return try_next(failed, event.at, context)
        back = replace(failed, action=replace(action_of(failed), restoring_size=True))
        return Step(replace(with_change_number(back, event.at), deadline=event.at + action.step_timeout_s))
    return complete_at_destination(add_history(instance, "active", event.at), event.at, context)


def abandon_in_place(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """The host does not answer whether the machine has its new size: it is commanded to restore the old one."""
    return roll_back(
        instance, event.at, context, TIMED_OUT, "the host did not confirm that the machine has its new size"
    )


def fail_destination(instance: Instance, event: SpawnFailed, context: StepContext) -> Step:
    """The destination could not: its remains are destroyed, and the next one is tried, or the move is rolled back."""
    if not steps.is_current(instance, event.attempt, event.host_uuid):
        return rules.destroy_failed_attempt(instance, event, context)
    failed = add_history(instance, "failed", event.at, event.code, event.reason)
    if event.final:
        return roll_back(failed, event.at, context, event.code, event.reason)
    return try_next(failed, event.at, context)


def fail_lost_destination(instance: Instance, event: Destroyed, context: StepContext) -> Step:
    """The destination has ended the attempt: the next one is tried, or the move is rolled back."""
    if not steps.current_destroyed(instance, event):
        return Step(instance)
    gone = add_history(
        instance, "timed_out" if instance.queried else "failed", event.at, "spawn.timeout", "no answer in time"
    )
    return try_next(replace(gone, action=replace(action_of(gone), finishing=False)), event.at, context)


def revert_lost(instance: Instance, event: MachineMissing, context: StepContext) -> Step:
    """The destination is gone before it was confirmed: the source is still there, and is started again."""
    if not steps.current_destroyed(instance, event):
        return Step(instance)
    if instance.is_in_place:
        return rules.mark_lost(instance, event, context)
    reason = f"host {instance.current.host} does not run it any more"
    return roll_back(instance, event.at, context, "instance.lost", reason)


# --- the end of a move


def confirm_in_time(instance: Instance, event: TimedOut, context: StepContext) -> Step:
    """No client has confirmed or reverted in the time that the request allowed: the move is confirmed."""
    # Only while its destination is known to be usable: the source, which is whole, would be abandoned for it by the
    # time alone. And not while the services are queried for the source, in order to go back.
    if way_back.is_waiting(instance):
        return way_back.query_services_again(instance, event.at, context)
    if not instance.is_in_place and not context.is_usable(instance.current):
        return Step(replace(instance, deadline=event.at + context.destroy_retry_s))
    earlier = report_progress(instance, ActionState.CONFIRMED, event.at, context)
    return after(earlier, confirm(earlier.instance, event.at, context))


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
                action, to_cell=None, rollback_code=ending.code, rollback_reason=steps.truncate(ending.reason)
            )
            return change(replace(instance, action=runs), State.RESTARTING, event.at, context)
        return close(enter_active(back, event.at, context), ending, event.at, context)
    if action.kind is ActionKind.SHELVE or action.to_cell is not None:
        kept = replace(instance, power=Power.SHELVED, image=event.image)
        if action.offload and not action.answered:  # its client was told that it had failed: the machine stays
            return offload(kept, event.at, context)
        return close(enter_active(kept, event.at, context), DONE, event.at, context)
    if action.kind in (ActionKind.START, ActionKind.UNSHELVE):
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
    # A copy of a claim, or of this release, is fenced by its attempt.
    action = action_of(instance)
    gone = replace(
        enter_active(instance, event.at, context),
        state=State.OFFLOADED,
        power=Power.SHELVED,
        highest_attempt=instance.next_attempt,
        consumer_generation=None,
    )
    if action.to_cell is not None:
        return departure_rules.complete_transfer(gone, event.at, context)
    if action.kind in _FROM_IMAGE:
        gone = replace(gone, spec=action.spec)
        return close(gone, ending_of(action), event.at, context)
    return close(gone, DONE, event.at, context)

"""What several rules of an action share: the steps forward and of the rollback, and the commands."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import RESCUE_FAILED, ActionKind, ActionState, CellAction, ChangeKind
from bus.contracts.base import Message
from bus.contracts.cell import InstanceSpec, Origin, Selection, Spawn
from bus.contracts.placement import ClaimOutcome
from cell_conductor.rules.action_events import (
    DONE,
    ActionEnd,
    after,
    answer_or_notify,
    close,
    refuse_request,
    report_progress,
)
from cell_conductor.state import step
from cell_conductor.state.commands import change_of, step_s, with_change_number
from cell_conductor.state.desired_state import MAY_HAVE_MACHINE, MachineTarget, PlacementCall, desired_state_of
from cell_conductor.state.evacuation_proof import evacuation_blocker
from cell_conductor.state.events import ActionRequested, ChangeEnded
from cell_conductor.state.instance import NO_HOST, ActionInProgress, Instance, Power, State, action_of
from cell_conductor.state.step import Step, StepContext

LEAVES_HOST = frozenset({ActionKind.MIGRATE, ActionKind.LIVE_MIGRATE, ActionKind.EVACUATE})
CLAIMS = frozenset({*LEAVES_HOST, ActionKind.RESIZE})
AWAITS_CONFIRM = frozenset({ActionKind.MIGRATE, ActionKind.RESIZE})
NO_IMAGE = "snapshot.no_image"


def delete_during_action(instance: Instance, at: float, context: StepContext) -> Step:
    """The instance is deleted in the middle of an action: have both hosts destroy their machines of it. The claims are
    held until they have.
    """
    desired = desired_state_of(instance)
    current_destroyed = not (desired.current in MAY_HAVE_MACHINE or is_at_source(instance))
    source_destroyed = instance.source_host_uuid is None or desired.source is MachineTarget.ABSENT_AFTER_DESTROY
    # A revert that is under way has used the next number: the release comes after it.
    highest = instance.next_attempt if desired.placement_call is PlacementCall.REVERT else instance.highest_attempt
    gone = replace(action_of(instance), current_destroyed=current_destroyed, source_destroyed=source_destroyed)
    enters = step.enter_releasing if current_destroyed and source_destroyed else step.enter_destroying
    return Step(enters(replace(instance, highest_attempt=highest, action=gone), State.DELETED, at, context))


def is_at_source(instance: Instance) -> bool:
    """Whether `current` is the source's own host: no destination on another one has been claimed."""
    return instance.source_host_uuid is None and action_of(instance).source is not None


def start_with_claim(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """A request that needs a destination: the first that fits is requested of placement."""
    request, here = event.request, instance.current
    if request.kind is ActionKind.LIVE_MIGRATE and instance.power is not Power.RUNNING:
        return refuse_request(
            instance, event, context, "instance.not_running", "only a running instance can be live-migrated"
        )
    if request.kind is ActionKind.EVACUATE:
        blocker = evacuation_blocker(instance, context, fenced=request.fenced, force=request.force)
        if blocker is not None:
            return refuse_request(instance, event, context, blocker.code, blocker.reason)
        if instance.power is Power.SHELVED:  # nothing is to be started elsewhere: its image is kept
            return offload(enter_action(instance, event, source=None, selections=(here,)), event.at, context)
    hosts = request.selections
    if request.kind in LEAVES_HOST:
        hosts = tuple(one for one in hosts if one.host_uuid != here.host_uuid)
    if not hosts:
        return refuse_request(instance, event, context, "action.no_host", "no host was named that it can go to")
    return claim(enter_action(instance, event, source=here, selections=(here, *hosts)), event.at, context)


def start_in_place(instance: Instance, event: ActionRequested, context: StepContext) -> Step:
    """A request about the machine on its present host."""
    kind = event.request.kind
    started = enter_action(instance, event, source=None, selections=(instance.current,))
    has_machine = {
        ActionKind.START: instance.power is Power.RUNNING,
        ActionKind.STOP: instance.power is Power.STOPPED,
        ActionKind.UNSHELVE: instance.power is not Power.SHELVED,
        ActionKind.SHELVE: instance.power is Power.SHELVED and not event.request.offload,
        ActionKind.RESCUE: instance.power is Power.RESCUED,
    }
    if kind is ActionKind.UNRESCUE and instance.power is Power.STOPPED:
        return refuse_request(instance, event, context, "instance.not_rescued")
    if kind is ActionKind.REBOOT and event.request.soft and instance.power is not Power.RUNNING:
        reason = "only a running instance can be rebooted softly"
        return refuse_request(instance, event, context, "instance.not_running", reason)
    if has_machine.get(kind):
        if kind is ActionKind.UNSHELVE:
            return refuse_request(instance, event, context, "instance.not_shelved")
        return close(replace(started, spec=instance.spec), DONE, event.at, context)
    if kind is ActionKind.OFFLOAD or (instance.power is Power.SHELVED and kind is ActionKind.SHELVE):
        return offload(started, event.at, context)
    return change(started, State.CHANGING, event.at, context)


def enter_action(
    instance: Instance, event: ActionRequested, *, source: Selection | None, selections: tuple[Selection, ...]
) -> Instance:
    """The request is under way, and the previous state of the instance is kept."""
    # Events are numbered above all that the schedulers have had: its own record may be restored.
    request = event.request
    assert instance.spec is not None
    action = ActionInProgress(
        request_id=request.request_id,
        kind=request.kind,
        source=source,
        source_attempt=instance.attempt if source is not None else 0,
        allocation_attempt=instance.last_attempt,
        spec=instance.spec,
        power=instance.power,
        image=instance.image,
        auto_confirm_s=request.auto_confirm_s,
        step_timeout_s=request.step_timeout_s,
        offload=request.offload,
        soft=request.soft,
        rescue_password=request.rescue_password,
        fenced=request.fenced,
        force=request.force,
        fenced_hosts=request.fenced_hosts,
        started_at=event.at,
        to_cell=request.to_cell,
    )
    return replace(
        instance,
        action=action,
        spec=spec_after(instance.spec, request),
        selections=selections,
        selection_index=0,
        server_group=request.server_group or instance.server_group,
        limits=request.limits if request.kind in CLAIMS or request.kind is ActionKind.UNSHELVE else instance.limits,
        cause=event.cause,
        queried=False,
        sequence=max(instance.sequence, request.sequence + 1),
    )


def spec_after(spec: InstanceSpec, request: CellAction) -> InstanceSpec:
    """What the machine is to be: a rebuild changes its image, and every other request that names a target the flavor,
    which its hosts were chosen for. Its owner, networks and volumes never change.
    """
    target = request.spec
    if target is None:
        return spec
    if request.kind is ActionKind.REBUILD:
        kept = spec.image_source if target.image == spec.image else None
        return replace(spec, image=target.image, image_source=target.image_source or kept)
    return replace(
        spec,
        flavor=target.flavor,
        root_gb=target.root_gb,
        traits=target.traits,
        capabilities=target.capabilities,
        on_host_failure=target.on_host_failure,
    )


def claim(instance: Instance, at: float, context: StepContext) -> Step:
    """Request the first remaining destination of placement, or go back when there is none."""
    action = action_of(instance)
    closed = context.closed
    notes = closed.skipped(instance.alternates, instance.next_attempt, at)
    action = replace(action, history=action.history + notes)
    # A machine that was commanded to stop is handed over, not changed in place.
    kept = tuple(
        one
        for one in instance.alternates
        if closed.closure_of(one) is None
        and not (action.handed_over and action.source is not None and one.host_uuid == action.source.host_uuid)
    )
    tried = instance.selections[: instance.selection_index + 1]
    left = replace(instance, selections=(*tried, *kept), action=action)
    if not kept:
        return roll_back(left, at, context, NO_HOST, summary_of_hosts(left))
    return report_progress(step.enter_claiming(left, State.PREPARING, at, context), ActionState.CLAIMING, at, context)


def try_next(instance: Instance, at: float, context: StepContext) -> Step:
    """After a destination that failed: its remains are destroyed, and the next is claimed, if there is one."""
    action = action_of(instance)
    clean: tuple[Message, ...] = (step.destroy_current(instance, context),) if action.finishing else ()
    claimed = claim(replace(instance, queried=False), at, context)
    if claimed.instance.state is State.CLAIMING:
        left = replace(claimed.instance, action=replace(action_of(claimed.instance), finishing=False))
        return Step(left, (*clean, *claimed.commands))
    return claimed


def finish(instance: Instance, at: float, context: StepContext) -> Step:
    """Command the destination to build and start it."""
    assert instance.spec is not None
    action, here = action_of(instance), instance.current
    handed = action.source if action.handed_over else None
    order = Spawn(
        spec=instance.spec,
        attempt=instance.attempt,
        host_uuid=here.host_uuid,
        allocations=here.allocations,
        service=here.service,
        database_id=context.database_id,
        origin=Origin(
            migration=action.request_id,
            host_uuid=None if handed is None else handed.host_uuid,
            image=instance.image if action.source is None else "",
            runs=action.power is not Power.STOPPED,
        ),
    )
    earlier = replace(
        instance,
        state=State.FINISHING,
        next_state=None,
        deadline=at + action.step_timeout_s,
        since=at,
        queried=False,
        action=replace(action, finishing=True),
    )
    return after(Step(earlier, (order,)), report_progress(earlier, ActionState.FINISHING, at, context))


def complete_at_destination(instance: Instance, at: float, context: StepContext) -> Step:
    """Record the destination as active. The request has its end; the source waits for a confirm, or is abandoned."""
    action = action_of(instance)
    up = replace(
        instance,
        selections=(instance.selections[0], instance.current),  # alternates have no use any more
        selection_index=1,
        deadline=None,
        since=at,
        answered=True,
        queried=False,
        power=Power.STOPPED if action.power is Power.STOPPED else Power.RUNNING,
        image="",
    )
    if action.kind in AWAITS_CONFIRM and action.source is not None and action.auto_confirm_s != 0:
        deadline = None if action.auto_confirm_s is None else at + action.auto_confirm_s
        waiting = replace(up, state=State.RESIZED, next_state=None, deadline=deadline)
        return answer_or_notify(waiting, DONE, at, context)
    if action.source is None:
        return close(enter_active(up, at, context), DONE, at, context)
    earlier = answer_or_notify(step.enter_destroying(up, State.ACTIVE, at, context), DONE, at, context)
    return after(earlier, confirm(earlier.instance, at, context))


def confirm(instance: Instance, at: float, context: StepContext) -> Step:
    """The source is abandoned: destroyed on its host, then released. In place there is no other machine."""
    enters = step.enter_releasing if instance.is_in_place else step.enter_destroying
    return Step(enters(instance, State.ACTIVE, at, context))


def enter_active(instance: Instance, at: float, context: StepContext) -> Instance:
    """At rest: active, on its present host."""
    return replace(
        instance,
        state=State.ACTIVE,
        next_state=None,
        selections=(instance.current,),
        selection_index=0,
        deadline=None,
        since=at,
        queried=False,
    )


def roll_back(instance: Instance, at: float, context: StepContext, code: str, reason: str) -> Step:
    """Give the destination up: its machine, then its allocation; then the source is continued."""
    lost = replace(action_of(instance), rollback_code=code, rollback_reason=step.truncate(reason))
    rolled_back = replace(instance, action=lost, queried=False)
    if rolled_back.is_in_place:
        earlier = restore_size(step.enter_destroying(rolled_back, State.REVERTING, at, context), at, context)
        return after(earlier, report_progress(earlier.instance, ActionState.ROLLING_BACK, at, context))
    if not lost.finishing:  # no destination has a machine
        return report_progress(revert_allocations(rolled_back, at, context), ActionState.ROLLING_BACK, at, context)
    leaving = step.enter_destroying(rolled_back, State.REVERTING, at, context)
    return report_progress(leaving, ActionState.ROLLING_BACK, at, context)


def revert_allocations(instance: Instance, at: float, context: StepContext) -> Instance:
    """Request the source's allocation for the instance again; if there was none, the release of the claim."""
    if action_of(instance).source is None:  # no source to go back to: the claim is released
        return step.enter_releasing(instance, State.OFFLOADED, at, context)
    return step.await_placement(instance, State.REVERTING, at, context)


def restore_size(instance: Instance, at: float, context: StepContext) -> Step:
    """Command the machine's old size, where it is."""
    return Step(replace(with_change_number(instance, at), deadline=at + context.destroy_retry_s))


def end_rolled_back(instance: Instance, at: float, context: StepContext) -> Step:
    """The instance is on its source again, and the request has failed, or was reverted."""
    back = replace(instance, image=action_of(instance).image)
    return close(enter_active(back, at, context), ending_of(action_of(instance)), at, context)


def ending_of(action: ActionInProgress) -> ActionEnd:
    """The end of a move that was rolled back."""
    return ActionEnd(ActionState.FAILED, action.rollback_code, action.rollback_reason)


def offload(instance: Instance, at: float, context: StepContext) -> Step:
    """Have the host destroy the shelved machine."""
    leaving = step.enter_destroying(instance, State.OFFLOADED, at, context)
    return report_progress(leaving, ActionState.CHANGING, at, context)


def change(instance: Instance, state: State, at: float, context: StepContext) -> Step:
    """Enter a state that waits for one change of one machine, under a new number."""
    entered = with_change_number(replace(instance, state=state, next_state=None, since=at, queried=False), at)
    kind = change_of(entered)
    assert kind is not None, state
    waiting = replace(entered, deadline=at + step_s(action_of(entered), kind, context))
    return report_progress(waiting, desired_state_of(waiting).progress, at, context)


def is_awaited(instance: Instance, event: ChangeEnded, where: Selection, attempt: int) -> bool:
    """Whether this answers the change that was last commanded: that of the service that has the host now."""
    answered = (event.change_number, event.attempt, event.host_uuid, event.service)
    return answered == (action_of(instance).change_number, attempt, where.host_uuid, where.service)


def checked_answer(instance: Instance, event: ChangeEnded) -> ChangeEnded:
    """The host's answer to the change that was last commanded. A snapshot that names no image is not done: a machine is
    abandoned for an image that is kept. One that boots from a volume has none.
    """
    if not event.done or event.image or change_of(instance) is not ChangeKind.SNAPSHOT:
        return event
    assert instance.spec is not None
    if any(one.is_root for one in instance.spec.volumes):
        return event
    return replace(event, done=False, code=NO_IMAGE, reason="the host has not named the image that it has kept")


def after_failed_change(instance: Instance, event: ChangeEnded) -> Instance:
    """The instance after a change that was not done. The host's answer about the machine counts: a rebuild that failed
    half-way leaves nothing that runs, and a shelved machine that runs is not shelved any more.
    """
    left = replace(instance, spec=action_of(instance).spec)
    if event.runs is None:  # nothing was started
        return left
    if instance.power is Power.RESCUED or event.code == RESCUE_FAILED:
        return replace(left, power=Power.RESCUED)
    if event.runs:
        return replace(left, power=Power.RUNNING, image="")
    return left if instance.power is Power.SHELVED else replace(left, power=Power.STOPPED)


def add_history(instance: Instance, outcome: str, at: float, code: str = "", reason: str = "") -> Instance:
    """Record how the current destination has ended."""
    action = action_of(instance)
    record = step.attempt_record(instance, instance.last_attempt, outcome, at, code=code, reason=reason)
    return replace(instance, action=replace(action, history=(*action.history, record)))


def add_unclaimed(instance: Instance, outcomes: tuple[ClaimOutcome, ...], at: float) -> Instance:
    """Record the destinations that could not be claimed."""
    action = action_of(instance)
    return replace(
        instance, action=replace(action, history=action.history + step.unclaimed_records(instance, outcomes, at))
    )


def summary_of_hosts(instance: Instance) -> str:
    """One sentence: the tries, and how each ended."""
    tries = "; ".join(
        f"{one.host}: {one.outcome}" + (f" ({one.code})" if one.code else "") for one in action_of(instance).history
    )
    return step.truncate(f"no host is left. {tries}")

"""What several rules of an action share: the steps forward and of the rollback, the commands, and the proofs."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.base import Message
from bus.contracts.cell import InstanceSpec, Origin, Selection, Spawn
from bus.contracts.moves import RESCUE_FAILED, ActionKind, ActionState, CellAction, ChangeKind, Condition
from bus.contracts.placement import ClaimOutcome

from . import steps
from .desires import EVACUATED, MAY_HAVE_MACHINE, MachineTarget, PlacementCall, desired_state_of
from .events import ActionRequested, ChangeEnded
from .fences import Fence, RunningAfterFence
from .instance import FENCED, NO_HOST, ActionInProgress, Instance, Power, State
from .leases import Lease, LeaseState
from .move_events import DONE, ActionEnd, action_of, after, answer_or_notify, close, refuse_request, report_progress
from .orders import change_of, step_s, with_change_number
from .steps import Step, StepContext

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
    enters = steps.enter_releasing if current_destroyed and source_destroyed else steps.enter_destroying
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
        unproved = evacuation_blocker(instance, context, fenced=request.fenced, force=request.force)
        if unproved is not None:
            return refuse_request(instance, event, context, unproved.code, unproved.reason)
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
    closed = context.closed(instance)
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
    return report_progress(steps.enter_claiming(left, State.PREPARING, at, context), ActionState.CLAIMING, at, context)


def try_next(instance: Instance, at: float, context: StepContext) -> Step:
    """After a destination that failed: its remains are destroyed, and the next is claimed, if there is one."""
    action = action_of(instance)
    clean: tuple[Message, ...] = (steps.destroy_current(instance, context),) if action.finishing else ()
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
    earlier = answer_or_notify(steps.enter_destroying(up, State.ACTIVE, at, context), DONE, at, context)
    return after(earlier, confirm(earlier.instance, at, context))


def confirm(instance: Instance, at: float, context: StepContext) -> Step:
    """The source is abandoned: destroyed on its host, then released. In place there is no other machine."""
    enters = steps.enter_releasing if instance.is_in_place else steps.enter_destroying
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
    lost = replace(action_of(instance), rollback_code=code, rollback_reason=steps.truncate(reason))
    undone = replace(instance, action=lost, queried=False)
    if undone.is_in_place:
        earlier = restore_size(steps.enter_destroying(undone, State.REVERTING, at, context), at, context)
        return after(earlier, report_progress(earlier.instance, ActionState.ROLLING_BACK, at, context))
    if not lost.finishing:  # no destination has a machine
        return report_progress(revert_allocations(undone, at, context), ActionState.ROLLING_BACK, at, context)
    leaving = steps.enter_destroying(undone, State.REVERTING, at, context)
    return report_progress(leaving, ActionState.ROLLING_BACK, at, context)


def revert_allocations(instance: Instance, at: float, context: StepContext) -> Instance:
    """Request the source's allocation for the instance again; if there was none, the release of the claim."""
    if action_of(instance).source is None:  # no source to go back to: the claim is released
        return steps.enter_releasing(instance, State.OFFLOADED, at, context)
    return steps.await_placement(instance, State.REVERTING, at, context)


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
    leaving = steps.enter_destroying(instance, State.OFFLOADED, at, context)
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
    record = steps.attempt_record(instance, instance.last_attempt, outcome, at, code=code, reason=reason)
    return replace(instance, action=replace(action, history=(*action.history, record)))


def add_unclaimed(instance: Instance, outcomes: tuple[ClaimOutcome, ...], at: float) -> Instance:
    """Record the destinations that could not be claimed."""
    action = action_of(instance)
    return replace(
        instance, action=replace(action, history=action.history + steps.unclaimed_records(instance, outcomes, at))
    )


def summary_of_hosts(instance: Instance) -> str:
    """One sentence: the tries, and how each ended."""
    tries = "; ".join(
        f"{one.host}: {one.outcome}" + (f" ({one.code})" if one.code else "") for one in action_of(instance).history
    )
    return steps.truncate(f"no host is left. {tries}")


# --- The proof that an evacuation needs: the instance's host is off, so no machine of the instance runs there.
#
# A fence on this cell's own record is the proof, until it is to be ended. Without one, the request's statement and a
# silent service are. The proof is required when the evacuation begins, and once more when a destination is commanded to
# build: the operator may have decided to end the fence, or the service come back, meanwhile.

NOT_FENCED, SERVICE_UP, STILL_RUNNING = "evacuate.not_fenced", "evacuate.service_up", "evacuate.still_running"
_UNPROVED = frozenset({NOT_FENCED, SERVICE_UP, STILL_RUNNING})  # for want of a fence, or of a newer one


class NotProved(Struct, frozen=True):
    """Why the host counts as one that may run the instance."""

    code: str  # stable code
    reason: str  # one sentence


def evacuation_blocker(instance: Instance, context: StepContext, *, fenced: bool, force: bool) -> NotProved | None:
    """Why this instance is not evacuated from its host, or the source of its move; None: the host is proved to be off.
    fenced: the client states that the host is off. force: also if the host has reported the machine since its fence.
    """
    where, attempt = instance.current, instance.attempt
    if (source := instance.separate_source) is not None:
        where, attempt = source, instance.source_attempt
    fence = context.fences.get(where.host_uuid)
    if not context.is_off(where.host_uuid):
        if not fenced:
            return NotProved(NOT_FENCED, "its host may run it")
        lease = context.down.get(where.service)
        if lease is None:
            return NotProved(SERVICE_UP, "the service of its host is up")
        if lease.state is LeaseState.STOPPED:
            # A service that was stopped on purpose is no proof: its machines go on.
            return NotProved(NOT_FENCED, "the service of its host was stopped, and its machines may run")
    found = {} if fence is None or force else fence.running
    if any(_still_runs(one, fence, context.down.get(name), instance, attempt) for name, one in found.items()):
        reason = (
            "its host has reported that it runs since the host was fenced: switch it off, and fence it once more when "
            "its compute service is down"
        )
        return NotProved(STILL_RUNNING, reason)
    return None


def _still_runs(
    found: RunningAfterFence, fence: Fence | None, lease: Lease | None, instance: Instance, attempt: int
) -> bool:
    """Whether a report shows that the host's fence did not hold for this machine."""
    # No more when the host was fenced again while the service that reported was down. A new decision alone does not
    # show that the host is off (its reason may have been corrected), nor does silence that came later (it may be cut
    # off). A report that is newer than the fence counts in any case: a lease is renewed by heartbeats alone.
    if found.attempts.get(instance.uuid) != attempt:
        return False
    if fence is None or fence.unfencing or lease is None:
        return True
    return lease.since > fence.at or found.version == fence.version


def lacks_proof(before: Instance, after: Instance) -> bool:
    """Whether this step has rolled an evacuation back because its host is not proved to be off."""
    return before.state is State.PREPARING and after.action is not None and after.action.rollback_code in _UNPROVED


def may_run_after_evacuation(instance: Instance, host_uuid: str) -> bool:
    """Whether an evacuation from this host has commanded a destination, which may run the instance by now: the fence
    stays until the record abandons the source, or the destination has answered that nothing of it is left there.
    """
    action = instance.action
    is_going = action is not None and action.kind is ActionKind.EVACUATE and instance.phase in EVACUATED
    # Before a destination is claimed it is still at its source.
    return is_going and (instance.source_host_uuid or instance.host_uuid) == host_uuid


def fences_relied_on(before: Instance, after: Instance, context: StepContext) -> Iterable[str]:
    """The fenced hosts whose fence this step relies on."""
    # Of an evacuation that commands a destination, or that gives the host of a shelved instance up; of an instance that
    # was active there, and fails by its policy; and of a move that has arrived there, and is confirmed by no client.
    relied, relies = desired_state_of(before).relies_on_fence, desired_state_of(after).relies_on_fence
    begins = relies and not relied and action_of(after).kind is ActionKind.EVACUATE
    was, now = desired_state_of(before).condition, desired_state_of(after).condition
    fails = desired_state_of(before).current is MachineTarget.RUNNING and now is Condition.FAILED
    stays = was is Condition.RESIZED and now is None and action_of(after).ending_kind is None
    hosts: tuple[str | None, ...] = ()
    if begins:
        hosts = (after.source_host_uuid or after.host_uuid,)
    elif stays or (fails and after.code == FENCED):
        hosts = (after.host_uuid, after.source_host_uuid)
    return [host for host in hosts if host and context.is_off(host)]  # else the client's statement is the proof

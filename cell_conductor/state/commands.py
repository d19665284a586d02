"""The commands of a record: what its hosts are commanded while it stays as it is, and until they have answered."""

# They follow from the record alone. `transition.step` sends all of them when a state is entered, and within a state
# those that have changed: the machine is under another service, or its host is queried now. A deadline sends all once
# more. Three kinds are sent once, and are none of these: `Spawn`, because the number of an attempt is used once; the
# destroy of an attempt that the record leaves behind, which nobody awaits; and that of a machine which a host lists
# though it is over.

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.actions import ActionKind, ChangeKind, ChangeMachine
from bus.contracts.cell import Destroy
from cell_conductor.state.desired_state import MachineTarget, desired_state_of
from cell_conductor.state.instance import ActionInProgress, Instance, Power, State
from cell_conductor.state.step import Step, StepContext, destroy_at

CHANGES = {
    ActionKind.START: ChangeKind.START,
    ActionKind.UNSHELVE: ChangeKind.START,
    ActionKind.STOP: ChangeKind.STOP,
    ActionKind.REBOOT: ChangeKind.REBOOT,
    ActionKind.REBUILD: ChangeKind.REBUILD,
    ActionKind.SHELVE: ChangeKind.SNAPSHOT,
    ActionKind.RESCUE: ChangeKind.RESCUE,
    ActionKind.UNRESCUE: ChangeKind.UNRESCUE,
}
MAX_STEP_S = 86_400.0  # as bus.contracts.actions bounds the time of one step


def commands_of(instance: Instance, context: StepContext) -> tuple[Destroy | ChangeMachine, ...]:
    """The commands, by which a host that was queried is to end its attempt unless it is complete."""
    if (kind := change_of(instance)) is not None:
        return (change_command(instance, kind, context),)
    desired, action = desired_state_of(instance), instance.action
    is_queried = instance.queried and desired.current is MachineTarget.BUILT
    commands: list[Destroy] = []
    if (is_queried or desired.current is MachineTarget.DESTROYED) and not (
        action is not None and action.current_destroyed
    ):
        commands.append(destroy_at(instance, instance.current, instance.attempt, context, keep_if_complete=is_queried))
    if action is None or instance.source_host_uuid is None:
        return tuple(commands)
    assert action.source is not None
    if not action.source_destroyed and desired.source is MachineTarget.DESTROYED:
        commands.append(destroy_at(instance, action.source, action.source_attempt, context))
    return tuple(commands)


def with_commands(before: Instance, stepped: Step, context: StepContext) -> Step:
    """The step with the commands that follow from it, before its other messages."""
    after = stepped.instance
    commands = commands_of(after, context)
    if after.phase == before.phase and not stepped.resend:
        known = commands_of(before, context)
        commands = tuple(one for one in commands if one not in known)
    return replace(stepped, commands=(*commands, *stepped.commands))


def resend_all(instance: Instance, at: float, context: StepContext) -> Step:
    """No answer: every command is sent again, without a limit, a change under a new number."""
    # A new number ends what its host has begun. So the host is given twice the time for a change of a machine that
    # stays, and no other command before that is over: what takes longer than its step comes to its end.
    desired, action = desired_state_of(instance), instance.action
    is_queried = instance.queried or desired.current is MachineTarget.BUILT
    again = replace(instance, queried=is_queried, deadline=next_resend_at(instance, at, context))
    if action is None or change_of(again) is None:
        return Step(again, resend=True)
    if desired.current is MachineTarget.PRESENT:
        longer_s = min(2 * action.step_timeout_s, MAX_STEP_S)
        again = replace(again, action=replace(action, step_timeout_s=longer_s), deadline=at + longer_s)
    return Step(with_change_number(again, at), resend=True)


def resend_sooner(instance: Instance, at: float, context: StepContext) -> Instance:
    """The host has answered that it does not know how the change ended: nothing is under way there, so the change is
    commanded again without waiting for the end of its time.
    """
    again_at = next_resend_at(instance, at, context)
    return replace(instance, deadline=again_at if instance.deadline is None else min(instance.deadline, again_at))


def next_resend_at(instance: Instance, at: float, context: StepContext) -> float:
    """When what has not been answered is sent once more, less and less often."""
    # The commands wait in the service's queue while it is down, so their number has to stay small.
    return at + min(max(context.destroy_retry_s, at - instance.since), context.destroy_retry_max_s)


def change_of(instance: Instance) -> ChangeKind | None:
    """The change of one machine that is awaited in this state; None: none is."""
    action = instance.action
    if action is None:
        return None
    kind = desired_state_of(instance).change
    if instance.state is State.CHANGING:
        if action.kind is ActionKind.REBOOT and action.soft:
            return ChangeKind.REBOOT_SOFT
        return CHANGES[action.kind] if action.to_cell is None else ChangeKind.SNAPSHOT
    if kind is ChangeKind.RESIZE:  # the only one that is undone where it was done
        return kind if instance.is_in_place else None
    if kind is ChangeKind.START and action.power is not Power.RUNNING:  # it is only to be as it was
        return ChangeKind.STOP
    if kind is ChangeKind.HAND_OVER and action.kind is ActionKind.LIVE_MIGRATE:
        return ChangeKind.HAND_OVER_LIVE
    return kind


def with_change_number(instance: Instance, at: float) -> Instance:
    """Number the change that is commanded next above all before: also above those that a restored database has
    lost.
    """
    assert instance.action is not None
    number = max(instance.change_number + 1, int(at * 1000))
    return replace(instance, change_number=number, action=replace(instance.action, change_number=number))


def change_command(instance: Instance, kind: ChangeKind, context: StepContext) -> ChangeMachine:
    """The command of a change, under the number that is on record."""
    action = instance.action
    assert action is not None and instance.spec is not None
    where, attempt, spec = instance.current, instance.attempt, instance.spec
    is_back = kind is ChangeKind.RESIZE and (
        action.restoring_size or desired_state_of(instance).current is MachineTarget.DESTROYED
    )
    is_of_source = desired_state_of(instance).change is ChangeKind.HAND_OVER
    if is_of_source or is_back:
        assert action.source is not None
        # In place, as `current`: under the service that has the host now.
        where = replace(action.source, service=where.service) if is_back else action.source
        attempt, spec = action.source_attempt, action.spec
    return ChangeMachine(
        change=kind,
        spec=spec,
        attempt=attempt,
        change_number=action.change_number,
        host_uuid=where.host_uuid,
        service=where.service,
        allocations=where.allocations,
        database_id=context.database_id,
        to_host=instance.current.host_uuid if is_of_source else None,
        rescue_password=action.rescue_password if kind is ChangeKind.RESCUE else "",
        timeout_s=step_s(action, kind, context),
    )


def step_s(action: ActionInProgress, kind: ChangeKind, context: StepContext) -> float:
    """The most seconds that a host may take for one change: those of one step, and for a live migration those of
    copying the memory that the source holds.
    """
    if kind is not ChangeKind.HAND_OVER_LIVE or action.source is None or not context.live_copy_mb_s:
        return action.step_timeout_s
    memory_mb = sum(amounts.get("MEMORY_MB", 0) for amounts in action.source.allocations.values())
    return min(action.step_timeout_s + memory_mb / context.live_copy_mb_s, MAX_STEP_S)

"""What a host says of a machine, whatever its instance waits for: it is where the record has it, or is over. Pure."""

from __future__ import annotations

from bus.contracts.cell import Destroy
from cell_conductor.state import step
from cell_conductor.state.desired_state import COMMANDED, DELETE_REQUESTED, desired_state_of
from cell_conductor.state.events import MachineRunning, Spawned, SpawnFailed
from cell_conductor.state.instance import Instance
from cell_conductor.state.ownership_proof import is_newer_scan, is_provably_ended
from cell_conductor.state.step import Step, StepContext

DESTROY_CODES = "destroy."  # the prefix of the codes with which a host refuses to destroy


def confirm_running(instance: Instance, event: Spawned | MachineRunning, context: StepContext) -> Step:
    """A machine is where the record has it, perhaps under another service now, which gets its commands. One that is
    over, and that its host was not commanded to destroy, is destroyed.
    """
    desired = desired_state_of(instance)
    is_here = step.is_current_attempt(instance, event) and desired.current in COMMANDED
    if is_here or (step.is_source(instance, event) and desired.source in COMMANDED):
        return Step(step.with_current_service(instance, event))
    return destroy_superseded(instance, event, context)


def destroy_superseded(instance: Instance, event: Spawned | SpawnFailed | MachineRunning, context: StepContext) -> Step:
    """An attempt runs that the record proves to be over: it is destroyed on its host. Without a proof it is kept."""
    if not is_provably_ended(instance, event.attempt, event.host_uuid):
        return Step(instance)
    if (
        isinstance(event, MachineRunning)
        and instance.phase not in DELETE_REQUESTED
        and not is_newer_scan(event, instance)
    ):
        return Step(instance)  # it may be gone by now
    order = Destroy(
        instance_uuid=instance.uuid,
        attempt=event.attempt,
        host_uuid=event.host_uuid,
        service=event.service,
        database_id=context.database_id,
    )
    return Step(instance, (order,))


def destroy_failed_attempt(instance: Instance, event: SpawnFailed, context: StepContext) -> Step:
    """An attempt that is over has failed once more, and may have left a machine again: destroy it."""
    # Its command was delivered again after the answer that no machine is left, perhaps to another process of its
    # service, which has no record of that answer. A host that refuses to destroy is not sent the command again because
    # of its refusal.
    return Step(instance) if event.code.startswith(DESTROY_CODES) else destroy_superseded(instance, event, context)

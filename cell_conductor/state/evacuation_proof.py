"""Whether an instance may be evacuated: its host is fenced and proved to be off. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from bus.contracts.actions import ActionKind, Condition
from cell_conductor.state.desired_state import EVACUATED, MachineTarget, desired_state_of
from cell_conductor.state.fence import Fence, RunningAfterFence
from cell_conductor.state.instance import FENCED, Instance, State, action_of
from cell_conductor.state.lease import Lease, LeaseState
from cell_conductor.state.step import StepContext

# --- The proof that an evacuation needs: the instance's host is off, so no machine of the instance runs there.
#
# A fence on this cell's own record is the proof, until it is to be ended. Without one, the request's statement and a
# silent service are. The proof is required when the evacuation begins, and once more when a destination is commanded to
# build: the operator may have decided to end the fence, or the service come back, meanwhile.

NOT_FENCED, SERVICE_UP, STILL_RUNNING = "evacuate.not_fenced", "evacuate.service_up", "evacuate.still_running"
_WITHOUT_FENCE = frozenset({NOT_FENCED, SERVICE_UP, STILL_RUNNING})  # for want of a fence, or of a newer one


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
    return before.state is State.PREPARING and after.action is not None and after.action.rollback_code in _WITHOUT_FENCE


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

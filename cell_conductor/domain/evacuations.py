"""The proof that an evacuation needs: the instance's host is off, so no machine of the instance runs there.

A fence on this cell's own record is the proof, until it is to be lifted. Without one, the request's statement and a
silent service are. The proof is required when the evacuation begins, and once more when a destination is commanded to
build: the operator may have decided to lift the fence, or the service come back, meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from bus.contracts.moves import MoveKind

from .desires import EVACUATED, EVACUATED_IN_DOUBT, desire_of
from .fences import Fence, RunningAfterFence
from .instance import Instance, State
from .leases import Lease, LeaseState
from .move_events import move_of
from .steps import StepContext

NOT_FENCED, SERVICE_UP, STILL_RUNNING = "evacuate.not_fenced", "evacuate.service_up", "evacuate.still_running"
_UNPROVED = frozenset({NOT_FENCED, SERVICE_UP, STILL_RUNNING})  # for want of a fence, or of a newer one


class NotProved(Struct, frozen=True):
    """Why the host counts as one that may run the instance: a stable code, and a sentence."""

    code: str
    reason: str


def why_not_evacuated(instance: Instance, context: StepContext, *, fenced: bool, force: bool) -> NotProved | None:
    """Why this instance is not evacuated from its host, or the source of its move; None: the host is proved to be off.

    fenced: the client states that the host is off. force: also if the host has reported the machine since its fence.
    """
    where, attempt = instance.here, instance.attempt
    if (source := instance.source_elsewhere) is not None:
        where, attempt = source, instance.source_attempt
    fence = context.fences.get(where.host_uuid)
    if fence is None or fence.lifting:  # a host whose fence is being lifted is on, to destroy its losses
        if not fenced:
            return NotProved(NOT_FENCED, "its host may run it")
        lease = context.down.get(where.service)
        if lease is None:
            return NotProved(SERVICE_UP, "the service of its host is up")
        if lease.state is LeaseState.STOPPED:
            # A service that was stopped on purpose is no proof: its machines go on.
            return NotProved(NOT_FENCED, "the service of its host was stopped, and its machines may run")
    found = {} if force else context.still_running.get(where.host_uuid, {})
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
    """Whether a report shows that the host's fence did not hold for this machine.

    No more when the host was fenced again while the service that reported was down. A new decision alone does not show
    that the host is off (its reason may have been corrected), nor does silence that came later (it may be cut off). A
    report that is newer than the fence counts in any case: a lease is renewed by heartbeats alone.
    """
    if found.attempts.get(instance.uuid) != attempt:
        return False
    if fence is None or fence.lifting or lease is None:
        return True
    return lease.since > fence.at or found.version == fence.version


def misses_proof(before: Instance, after: Instance) -> bool:
    """Whether this step has undone an evacuation because its host is not proved to be off."""
    return before.state is State.PREPARING and after.move is not None and after.move.lost_code in _UNPROVED


def is_evacuated_from(instance: Instance, host_uuid: str) -> bool:
    """Whether an evacuation from this host has commanded a destination, which may run the instance by now: the fence
    stays until the record gives up the source, or the destination has answered that nothing of it is left there.

    A doubted record may have forgotten that it did.
    """
    move = instance.move
    may_run = instance.phase in EVACUATED or (instance.phase in EVACUATED_IN_DOUBT and instance.doubted)
    is_going = move is not None and move.kind is MoveKind.EVACUATE and may_run
    return is_going and instance.source_host_uuid == host_uuid


def relied_on(before: Instance, after: Instance, fences: Mapping[str, Fence]) -> Iterable[str]:
    """The fenced hosts whose fence this step relies on: of an evacuation that commands a destination, or that gives the
    host of a shelved instance up.
    """
    relied, relies = desire_of(before).relies_on_fence, desire_of(after).relies_on_fence
    if relied or not relies or move_of(after).kind is not MoveKind.EVACUATE:
        return ()
    fence = fences.get(after.source_host_uuid or after.here.host_uuid)
    return () if fence is None or fence.lifting else (fence.host_uuid,)  # else the client's statement is the proof

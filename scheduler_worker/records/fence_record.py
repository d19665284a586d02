"""The fence of a host as it is recorded, and its policy for the host's instances. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.objects import FenceRecord, Flavor
from bus.contracts.operations import AdminState, EvacuationPolicy, HostAdminState
from scheduler_worker.selection.flavor import POLICY_SPEC


def fenced(decision: HostAdminState | None, host_uuid: str, fence: FenceRecord) -> HostAdminState:
    """The decision about a host as it is in force while the host has a fence; a fence that was ended by force does not
    count.
    """
    if decision is None:
        decision = HostAdminState(host_uuid=host_uuid, host=fence.host, state=AdminState.ENABLED)
    if fence.forced:
        return decision
    return replace(
        decision,
        state=AdminState.FENCED,
        pending=decision.state if fence.unfencing else None,
        fence=fence.version,
        acknowledged=fence.acknowledged,
        stale_machines=fence.stale_machines,
    )


def is_fenced(decision: HostAdminState | None) -> bool:
    """Whether by this decision in force the host is off, and stays off."""
    return decision is not None and decision.state is AdminState.FENCED and decision.pending is None


def policy_of(requested: EvacuationPolicy | None, flavor: Flavor | None, default: EvacuationPolicy) -> EvacuationPolicy:
    """The policy in force. flavor: the one that the instance has (None: it is not configured any more)."""
    if requested is not None:
        return requested
    spec = None if flavor is None else flavor.extra_specs.get(POLICY_SPEC)
    return default if spec is None else EvacuationPolicy(spec)


def visible_to_cell(policy: EvacuationPolicy) -> EvacuationPolicy | None:
    """The policy in the message to a cell, where None means wait."""
    return None if policy is EvacuationPolicy.WAIT else policy

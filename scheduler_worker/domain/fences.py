"""A fence as the scheduler records it: an object of kind `fence`, made by a decision about a host; and the policy for
the instances of a fenced host. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from bus.contracts.objects import (
    ChangedObject,
    FenceRecord,
    Flavor,
    HostDecision,
    ObjectKind,
    ObjectsChange,
    StoredObject,
)
from bus.contracts.operations import AdminState, CellFence, EvacuationPolicy, FenceState, HostAdminState, HostFence
from scheduler_worker.domain.object_rules import changed_object

Key = tuple[ObjectKind, str]


def fence_of(stored: StoredObject) -> FenceRecord:
    """The fence that an object holds. Raises ValueError when its body is not valid."""
    return msgspec.convert(stored.body, FenceRecord)


def fence_from_decision(change: ObjectsChange) -> list[str]:
    """The uuids of the hosts that a change of objects decides to be fenced."""
    return [
        one.name
        for one in change.changes
        if one.kind is ObjectKind.HOST and one.body is not None and one.body.get("state") == AdminState.FENCED
    ]


def fence_after_change(
    changed: Iterable[ChangedObject],
    present: Mapping[Key, StoredObject],
    revision: int,
    cell_of: Callable[[str], str | None],
    *,
    force: bool = False,
    token: str = "",
) -> tuple[ChangedObject, ...]:
    """The changes of fences that decisions about hosts lead to, under this revision. cell_of: of a host, where known.
    token: random, of a fence that begins. force: the fence ends at once, because its cell may be gone for good.
    """
    # A decision to fence creates a fence. Any other decision, or none, about a fenced host requests that it is lifted:
    # the host stays fenced until its cell has done so.
    found = []
    for one in changed:
        if one.kind is not ObjectKind.HOST:
            continue
        stored = present.get((ObjectKind.FENCE, one.name))
        known = None if stored is None else fence_of(stored)
        decision = None if one.after is None else msgspec.convert(one.after, HostDecision)
        is_fenced = decision is not None and decision.state is AdminState.FENCED
        if known is None and not is_fenced:
            continue
        before = known or FenceRecord(host=one.name, version=0)
        after = replace(
            before,
            host=before.host if decision is None else decision.host,
            cell=cell_of(one.name) or before.cell,
            version=max(revision, before.version + 1),
            unfencing=not is_fenced,
            forced=not is_fenced and (force or before.forced),
            token=before.token or token,
        )
        found.append(changed_object(ObjectKind.FENCE, one.name, known, after))
    return tuple(found)


def acknowledge(host_uuid: str, known: FenceRecord, report: HostFence) -> ChangedObject | None:
    """The change of a fence that a cell's report leads to (None: none). Late reports about older decisions, and those
    of a cell that does not have the host, are ignored. A cell with a later decision than this (restored) record is
    notified with a version above that one.
    """
    if known.cell not in (None, report.cell) or report.version < known.version:
        return None
    if report.version > known.version:
        return changed_object(ObjectKind.FENCE, host_uuid, known, replace(known, version=report.version + 1))
    if report.state is FenceState.UNFENCED:
        # else the cell's record was restored: notified again
        return changed_object(ObjectKind.FENCE, host_uuid, known, None) if known.unfencing else None
    after = replace(known, acknowledged=report.version, stale_machines=report.stale_machines)
    return None if after == known else changed_object(ObjectKind.FENCE, host_uuid, known, after)


def is_told(known: FenceRecord | None, report: HostFence) -> bool:
    """Whether a report about the newest decision tells what is on record already."""
    if known is None or known.version != report.version:
        return False
    return acknowledge(report.host_uuid, known, report) is None


def unfence_unknown(report: HostFence, revision: int, host: str) -> ChangedObject | None:
    """The answer to a cell's fence that is not on record: a request to lift it (None: a fence is on record, or will
    be). A decision is on record before its cell is notified, so this record was restored to before it, or the report is
    late.
    """
    # A fence without a decision is not in force. The cell lifts it when the host has destroyed the machines that it
    # lost by it, and answers a late report's lift with `lifted`.
    if report.state is not FenceState.FENCED:
        return None
    version = max(report.version, revision) + 1
    unknown = FenceRecord(
        host=host,
        cell=report.cell,
        version=version,
        unfencing=True,
        acknowledged=report.version,
        stale_machines=report.stale_machines,
    )
    return changed_object(ObjectKind.FENCE, report.host_uuid, None, unknown)


def command(host_uuid: str, fence: FenceRecord, decision: HostAdminState | None) -> CellFence:
    """The message to the cell of the host. decision: why, and by whom."""
    return CellFence(
        host_uuid=host_uuid,
        host=fence.host,
        version=fence.version,
        unfence=fence.unfencing,
        reason="" if decision is None else decision.reason,
        by="" if decision is None else decision.by,
        at=0.0 if decision is None else decision.at,
    )


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


SPEC = "berth:on_host_failure"  # the extra spec of a flavor


def policy_of(requested: EvacuationPolicy | None, flavor: Flavor | None, default: EvacuationPolicy) -> EvacuationPolicy:
    """The policy in force. flavor: the one that the instance has (None: it is not configured any more)."""
    if requested is not None:
        return requested
    spec = None if flavor is None else flavor.extra_specs.get(SPEC)
    return default if spec is None else EvacuationPolicy(spec)


def visible_to_cell(policy: EvacuationPolicy) -> EvacuationPolicy | None:
    """The policy in the message to a cell, where None means wait."""
    return None if policy is EvacuationPolicy.WAIT else policy

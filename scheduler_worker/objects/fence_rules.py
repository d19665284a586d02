"""A fence as the scheduler records it: an object of kind `fence`, made by a decision about a host. A host whose cell is
not known gets no fence, even by force: a cell that does not have the host acknowledges too, and its own cell would
build on it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from bus.contracts.base import Refusal
from bus.contracts.objects import ChangedObject, FenceRecord, HostDecision, ObjectKind, ObjectsChange, StoredObject
from bus.contracts.operations import AdminState, CellFence, FenceState, HostAdminState, HostFence
from scheduler_worker.hosts.host_table import CELL_UNKNOWN
from scheduler_worker.objects.cell_consequences import known_cells, only_cell
from scheduler_worker.objects.consistency import changed_object
from scheduler_worker.records.object_records import ChangePlan, Key, RecordedObjects, cells_of, fence_of, is_fence


def fence_from_decision(change: ObjectsChange) -> list[str]:
    """The uuids of the hosts that a change of objects decides to be fenced."""
    return [
        one.name
        for one in change.changes
        if one.kind is ObjectKind.HOST and one.body is not None and one.body.get("state") == AdminState.FENCED
    ]


def hosts_fenced(changed: Iterable[ChangedObject], present: Mapping[Key, StoredObject]) -> list[str]:
    """The uuids of the hosts that get a fence and have none that is to stay."""
    kept = {name for (kind, name), one in present.items() if kind is ObjectKind.FENCE and not fence_of(one).unfencing}
    return [one.name for one in changed if one.kind is ObjectKind.HOST and is_fence(one.after) and one.name not in kept]


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
    notified with a version above that one; a fence that it had, and has lifted since, stays lifted.
    """
    if known.cell not in (None, report.cell) or report.version < known.version:
        return None
    if report.version > known.version:
        # The host is in use again. A fence that the cell never had may be newer: its number began again by the restore.
        is_unfenced = known.is_acknowledged and report.state is not FenceState.FENCED
        after = replace(known, version=report.version + 1, unfencing=known.unfencing or is_unfenced)
        return changed_object(ObjectKind.FENCE, host_uuid, known, after)
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


def fence_changes(
    present: RecordedObjects,
    planned: ChangePlan,
    last_cell_of: Callable[[str], str | None],
    *,
    named: str | None,
    settings: Sequence[str],
    force: bool,
) -> Sequence[ChangedObject] | Refusal:
    """The changes of fences, or why there are none. last_cell_of: of a host, where known. named: the cell the operator
    names for a host whose cell nothing shows. settings: the settings' cells; of only one ever, all hosts are in it.
    force: at once.
    """
    decided = cells_of(present.objects)
    known = known_cells(settings, decided)
    only = only_cell(settings, decided)
    cells: dict[str, str] = {}
    for uuid in hosts_fenced(planned.changed, present.objects):
        stored = present.objects.get((ObjectKind.FENCE, uuid))
        shown = last_cell_of(uuid) or (None if stored is None else fence_of(stored).cell)
        cell = shown or named or only
        if shown is None and cell not in known:
            what = f"nothing shows the cell of host {uuid}" if cell is None else f"there is no cell {cell!r}"
            reason = f"{what}, which has to acknowledge the fence: name the cell with the host's UUID (`--cell`)"
            return Refusal(code=CELL_UNKNOWN, reason=reason)
        assert cell is not None
        cells[uuid] = cell
    revision = present.revision + 1
    return fence_after_change(
        planned.changed,
        present.objects,
        revision,
        lambda uuid: last_cell_of(uuid) or cells.get(uuid),
        force=force,
        token=present.token,
    )

"""A fence as the scheduler records it: an object of kind `fence`, made by a decision about a host; and which instances
of fenced hosts are evacuated by their policy, under which request ids. Pure.

The id of a request follows from the fence, the instance and the number of the try, so schedulers that decide the same
make one request of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from uuid import UUID, uuid5

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.build import BuildState
from bus.contracts.moves import Condition, MoveKind, MoveRequest
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
from bus.retrying import doubled_s
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.builds import RecordedBuild
from scheduler_worker.domain.object_rules import changed_object
from scheduler_worker.domain.recorded_moves import MoveContext, flavor_of

Key = tuple[ObjectKind, str]


def fence_of(stored: StoredObject) -> FenceRecord:
    """The fence that an object holds. Raises ValueError when its body is not valid."""
    return msgspec.convert(stored.body, FenceRecord)


def fenced_by(change: ObjectsChange) -> list[str]:
    """The uuids of the hosts that a change of objects decides to be fenced."""
    return [
        one.name
        for one in change.changes
        if one.kind is ObjectKind.HOST and one.body is not None and one.body.get("state") == AdminState.FENCED
    ]


def followed(
    changed: Iterable[ChangedObject],
    present: Mapping[Key, StoredObject],
    revision: int,
    cell_of: Callable[[str], str | None],
    *,
    force: bool = False,
    token: str = "",
) -> tuple[ChangedObject, ...]:
    """The changes of fences that decisions about hosts lead to, under this revision. cell_of: of a host, where it is
    known. token: random, of a fence that begins.

    A decision to fence creates a fence. Any other decision, or none, about a fenced host requests that its fence is
    lifted: the host stays fenced until its cell has done so. force: the fence ends at once, because its cell may be
    gone for good.
    """
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
            lifting=not is_fenced,
            forced=not is_fenced and (force or before.forced),
            token=before.token or token,
        )
        found.append(changed_object(ObjectKind.FENCE, one.name, known, after))
    return tuple(found)


def acknowledge(host_uuid: str, known: FenceRecord, report: HostFence) -> ChangedObject | None:
    """The change of a fence that a cell's report leads to; None: no change.

    A late report about an older decision is ignored, and so is a report of a cell that the host is not in. A cell that
    has a later decision than this record (which was set back) is notified again, with a version above that one.
    """
    if known.cell not in (None, report.cell) or report.version < known.version:
        return None
    if report.version > known.version:
        return changed_object(ObjectKind.FENCE, host_uuid, known, replace(known, version=report.version + 1))
    if report.state is FenceState.LIFTED:
        # else the cell's record was set back: notified again
        return changed_object(ObjectKind.FENCE, host_uuid, known, None) if known.lifting else None
    after = replace(known, acknowledged=report.version, losses=report.losses)
    return None if after == known else changed_object(ObjectKind.FENCE, host_uuid, known, after)


def is_told(known: FenceRecord | None, report: HostFence) -> bool:
    """Whether a report about the newest decision tells what is on record already."""
    if known is None or known.version != report.version:
        return False
    return acknowledge(report.host_uuid, known, report) is None


def lift_of_unknown(report: HostFence, revision: int, host: str) -> ChangedObject | None:
    """The answer to a cell's fence that is not on record: a request to lift it. None: a fence is on record, or will be.

    A decision is on record before its cell is notified, so this record was set back to before the decision, or the
    announcement is late. A fence without a decision is not in force; the cell lifts it when the host has destroyed the
    machines that it lost by it, and answers a late announcement's lift with `lifted`.
    """
    if report.state is not FenceState.FENCED:
        return None
    version = max(report.version, revision) + 1
    unknown = FenceRecord(
        host=host, cell=report.cell, version=version, lifting=True, acknowledged=report.version, losses=report.losses
    )
    return changed_object(ObjectKind.FENCE, report.host_uuid, None, unknown)


def command(host_uuid: str, fence: FenceRecord, decision: HostAdminState | None) -> CellFence:
    """The message to the cell of the host. decision: why, and by whom."""
    return CellFence(
        host_uuid=host_uuid,
        host=fence.host,
        version=fence.version,
        lift=fence.lifting,
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
        pending=decision.state if fence.lifting else None,
        fence=fence.version,
        acknowledged=fence.acknowledged,
        losses=fence.losses,
    )


def is_fenced(decision: HostAdminState | None) -> bool:
    """Whether by this decision in force the host is off, and stays off."""
    return decision is not None and decision.state is AdminState.FENCED and decision.pending is None


USER = "evacuation"  # the user_id of these requests
MAX_TRIES = 24  # failed tries of one instance under one fence; after that it waits for an operator
MAX_REQUESTS = 1000  # with those that were refused because another request was under way: a week  (until: simpler)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 600.0  # between a try that has failed and the next; doubled with each
_NAMESPACE = UUID("6b0f4c9e-3f0e-5d0a-9c55-2f6c8e1d7a41")
# The states of an instance that has a machine, or the claim of one, on its host. A move that has not been confirmed is
# ended by its cell.
_ON_HOST = frozenset({Condition.ACTIVE, Condition.STOPPED, Condition.SHELVED, Condition.RESCUED})


class FencedHost(Struct, frozen=True):
    """A host that its cell has on record as fenced. version: of the decision. token: of the fence (`FenceRecord`)."""

    uuid: str
    name: str
    version: int
    token: str = ""

    def request_id(self, instance_uuid: str, tried: int) -> str:
        """The id of the request for one instance after this many failures."""
        return str(uuid5(_NAMESPACE, f"{self.token} {self.uuid} {self.version} {instance_uuid} {tried}"))


def fenced_hosts(fences: Mapping[str, FenceRecord]) -> frozenset[FencedHost]:
    """The hosts whose instances may be evacuated: their cells have acknowledged their fences, and they are not to be
    used again.
    """
    return frozenset(
        FencedHost(uuid, fence.host, fence.version, fence.token)
        for uuid, fence in fences.items()
        if fence.acknowledged >= fence.version and not fence.lifting
    )


def is_restarted(known: MoveContext, config: SchedulerConfig) -> bool:
    """Whether this instance is on record on its host, and is to be rebuilt elsewhere when that host is fenced."""
    if known.build is None or known.build_request is None or known.build.state is not BuildState.ACTIVE:
        return False
    if known.now.condition not in _ON_HOST:
        return False
    flavor = config.flavors.get(flavor_of(known))
    return policy_of(known.build_request.on_host_failure, flavor, config.on_host_failure) is EvacuationPolicy.RESTART


def evacuation(request_id: str, build: RecordedBuild) -> MoveRequest:
    """The request, the same from every scheduler. It states no fence: its cell's own record of one is the proof.

    Its cell offloads a shelved instance, which has nothing to be started elsewhere.
    """
    return MoveRequest(
        request_id=request_id,
        instance_uuid=build.instance_uuid,
        project_id=build.project_id,
        user_id=USER,
        kind=MoveKind.EVACUATE,
    )


def pause_s(tried: int) -> float:
    """How long the next try waits after this many failures."""
    return doubled_s(FIRST_PAUSE_S, LONGEST_PAUSE_S, tried)


SPEC = "berth:on_host_failure"  # the extra spec of a flavor


def policy_of(requested: EvacuationPolicy | None, flavor: Flavor | None, default: EvacuationPolicy) -> EvacuationPolicy:
    """The policy in force. flavor: the one that the instance has (None: it is not configured any more)."""
    if requested is not None:
        return requested
    spec = None if flavor is None else flavor.extra_specs.get(SPEC)
    return default if spec is None else EvacuationPolicy(spec)


def for_cell(policy: EvacuationPolicy) -> EvacuationPolicy | None:
    """The policy in the message to a cell, where None means wait."""
    return None if policy is EvacuationPolicy.WAIT else policy

"""The conclusion about a build from its host search: the retry of its request, or a decision with the command to its
cell. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.consuming.outcome import Done, Outcome, Retry
from bus.contracts.base import MAX_REASON
from bus.contracts.build import BuildRequest, BuildState, FunnelStep
from bus.contracts.cell import CellBuild, CellBuildQuery, InstanceSpec
from bus.contracts.stages import StageTimes
from bus.persistence.outbox import OutboxMessage
from scheduler_worker.build.gang import needed
from scheduler_worker.build.host_search import (
    ClaimsContended,
    ClaimUnlocatable,
    DecidedResult,
    GangIncomplete,
    HostClaimed,
    HostSearchRefused,
    HostSearchRequest,
    HostSearchResult,
)
from scheduler_worker.build.pending_build import PendingBuild
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.placement_client import PlacementUnavailable
from scheduler_worker.records.build_record import (
    FAILED_OR_REFUSED,
    FIRST_ATTEMPT,
    SCHEDULED,
    UNLOCATABLE,
    Actor,
    BuildUpdate,
    RecordedBuild,
    effects,
)
from scheduler_worker.records.fence_record import policy_of, visible_to_cell
from scheduler_worker.requests.request_delivery import HOSTS_UNKNOWN, waits
from scheduler_worker.selection.explain import NoValidHost, funnel_step, message_of
from scheduler_worker.selection.flavor_query import HOST_UNKNOWN
from scheduler_worker.selection.request_spec import RequestSpec, Unsatisfiable
from scheduler_worker.selection.selector import Selector

NO_HOST = "no_valid_host"
CONTENDED = "claims.contended"
INCOMPLETE = "gang.incomplete"


class PlacedBuild(Struct, frozen=True):
    """A build with the result of its host search."""

    pending: PendingBuild
    request: HostSearchRequest
    result: HostSearchResult


class DecidedBuild(Struct, frozen=True):
    """A decision to write: scheduled, with its claim, or failed."""

    pending: PendingBuild
    decision: BuildUpdate
    claimed: HostClaimed | None = None


Conclusion = DecidedBuild | Outcome


def conclude_unplaced(
    pending: PendingBuild, unsatisfiable: Unsatisfiable | None, selector: Selector, actor: Actor
) -> DecidedBuild | Retry:
    """The conclusion about a build that is not placed: its delivery ends it, or no host can take it as configured.

    unsatisfiable: why no host can take it. actor: who concludes, and when.
    """
    if unsatisfiable is None:
        assert pending.delivery.refusal is not None
        ended = pending.delivery.refusal
        return _decided_of(pending, _failed(pending.request, ended.code, ended.reason, actor))
    if unsatisfiable.code == HOST_UNKNOWN and pending.delivery.awaits_hosts:
        return HOSTS_UNKNOWN
    hosts = int(selector.replica.rows_of_roots().size)
    reason = f"No host can take {pending.request.flavor}: {unsatisfiable.reason}."
    funnel = (funnel_step(unsatisfiable.step, hosts, {unsatisfiable.code: hosts}),)
    return _decided_of(pending, _failed(pending.request, NO_HOST, reason, actor, funnel=funnel))


def _decided_of(pending: PendingBuild, one: BuildUpdate, result: DecidedResult | None = None) -> DecidedBuild:
    """The decision about the record of this claim owner. A claim that was refused may be delivered to placement once
    more.
    """
    claimed = result if isinstance(result, HostClaimed) else None
    was_sent = result is not None and result.claims
    attempt = one.build.attempt or pending.attempt or (FIRST_ATTEMPT if was_sent else 0)
    build = replace(one.build, digest=pending.digest, claim_owner=pending.claim_owner, attempt=attempt)
    return DecidedBuild(pending, replace(one, build=build), claimed)


def end_at_claimed_cell(pending: PendingBuild, claim: ClaimUnlocatable, actor: Actor) -> Conclusion:
    """The conclusion about a build that is not placed, while a claim of it is held, or may be."""
    return _retry_of(pending, claim) or _decided_of(pending, _unlocatable(pending.request, claim, actor))


def group_by_request(placed: Sequence[PlacedBuild]) -> list[list[PlacedBuild]]:
    """The builds, one in a list, and the members of a gang together: they stand side by side."""
    requests: list[list[PlacedBuild]] = []
    for one in placed:
        if one.pending.gang is not None and requests and requests[-1][0].pending.gang == one.pending.gang:
            requests[-1].append(one)
        else:
            requests.append([one])
    return requests


def conclude(members: Sequence[PlacedBuild], actor: Actor) -> list[tuple[PendingBuild, Conclusion]]:
    """The conclusion about a build, or all members of a gang: decisions to write, or the outcome of a retry. A member
    that placement has not answered about leaves the whole gang waiting.
    """
    # If a gang is short and a member has a claim, the cell of that claim is queried: the member may have started. In a
    # gang that is not short, a member that may hold a claim is tried again alone.
    missing = next((one.result for one in members if isinstance(one.result, PlacementUnavailable)), None)
    if missing is not None:
        return [(one.pending, waits(missing)) for one in members]
    gang = members[0].pending.gang
    started = sum(isinstance(one.result, HostClaimed) for one in members)
    is_short = started < (1 if gang is None else needed(gang, [one.result for one in members]))
    tried = [_retry_of(one.pending, one.result) for one in members]
    again: Outcome | None = next((one for one in tried if one is not None), None)
    if is_short and again is not None:
        return [(one.pending, one.pending.accepted if isinstance(again, Done) else again) for one in members]
    concluded: list[tuple[PendingBuild, Conclusion]] = []
    for one, again in zip(members, tried, strict=True):
        result = one.result
        assert not isinstance(result, PlacementUnavailable), result
        if again is not None and isinstance(result, ClaimUnlocatable):  # it may run; the rest of the gang goes on
            concluded.append((one.pending, again))
            continue
        if is_short and isinstance(result, HostClaimed):
            assert gang is not None
            reason = GangIncomplete(gang, started, result.claims).reason
            result = ClaimUnlocatable(reason, result.cell, result.selections[0].host_uuid, result.attempt, result.lost)
        decided = decision(one.pending.request, one.request.spec, result, actor)
        concluded.append((one.pending, _decided_of(one.pending, decided, result)))
    return concluded


def _retry_of(pending: PendingBuild, result: HostSearchResult) -> Outcome | None:
    """How a search is tried again: with its request, or after the last retry of that from its record, which stays
    open (`silence_rules`): what is held on a host that is not reported yet may run there. None: its result is final.
    """
    delivery = pending.delivery
    match result:
        case ClaimUnlocatable() | NoValidHost(may_be_out_of_order=True) if delivery.awaits_hosts:
            return HOSTS_UNKNOWN
        case ClaimsContended() if not delivery.last:
            return Retry(CONTENDED, f"{result.claims} claims were lost to others")
        case ClaimUnlocatable(cell=None) if not delivery.last:  # a known cell is queried at once: its host may be gone
            return Retry(UNLOCATABLE, result.reason)
        case ClaimUnlocatable(cell=None) if delivery.has_dead_letter:
            return pending.accepted
    return None


def decision(request: BuildRequest, spec: RequestSpec, result: DecidedResult, actor: Actor) -> BuildUpdate:
    """The decision that a result leads to."""
    match result:
        case HostClaimed():
            decided = _dispatched(request, result, actor)
        case NoValidHost():
            decided = _failed(request, NO_HOST, message_of(spec, result.funnel), actor, funnel=result.funnel)
        case HostSearchRefused():
            decided = _failed(request, result.code, result.reason, actor)
        case ClaimsContended():
            reason = f"{result.claims} claims in the last delivery alone were lost to others, after every retry"
            decided = _failed(request, CONTENDED, reason, actor)
        case ClaimUnlocatable():
            decided = _unlocatable(request, result, actor)
        case GangIncomplete():
            decided = _failed(request, INCOMPLETE, result.reason, actor)
    lost_at = (result.claimed_at if isinstance(result, HostClaimed) else 0.0) or actor.at
    lost = (
        replace(actor.entry("not_claimed", one.what), at=lost_at, conflicting_consumers=one.conflicting_consumers)
        for one in result.lost
    )
    return replace(decided, timeline=(*lost, *decided.timeline))


def _dispatched(request: BuildRequest, claimed: HostClaimed, actor: Actor) -> BuildUpdate:
    main = claimed.selections[0]
    alternates = ", ".join(selection.host for selection in claimed.selections[1:]) or "none"
    chosen = f"{main.host} of {claimed.passing_hosts} candidates, weight {claimed.score:.4g}"
    # What was chosen after a lost claim has no time of its own: it is that of the claim.
    claimed_at = claimed.claimed_at or actor.at
    chosen_at = claimed_at if claimed.lost else claimed.decided_at or claimed_at
    held = f"{main.host} at try {claimed.claims}; alternates: {alternates}"
    return BuildUpdate(
        build=_scheduled(request, claimed.cell, claimed.attempt, main.host_uuid, main.host),
        timeline=(
            replace(actor.entry("chosen", chosen), at=chosen_at, scores=claimed.scores),
            replace(actor.entry("claimed", held), at=claimed_at),
            actor.entry("dispatched", f"to cell {claimed.cell}"),
        ),
    )


def _unlocatable(request: BuildRequest, claim: ClaimUnlocatable, actor: Actor) -> BuildUpdate:
    """The build is given to the cell of its claim, which is queried: a machine of it is adopted, and without one the
    cell ends it. If its cell stays unknown it fails in the end, and its claim stays.
    """
    if claim.cell is None:
        return _failed(request, UNLOCATABLE, claim.reason, actor)
    return BuildUpdate(
        build=_scheduled(request, claim.cell, claim.attempt, claim.host_uuid),
        timeline=(actor.entry("queried", f"cell {claim.cell}, where a claim is held: {claim.reason}"),),
    )


def _scheduled(
    request: BuildRequest, cell: str, attempt: int, host_uuid: str | None, host: str | None = None
) -> RecordedBuild:
    return RecordedBuild(
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        state=BuildState.SCHEDULED,
        sequence=SCHEDULED,
        attempt=attempt,
        cell=cell,
        host=host,
        host_uuid=host_uuid,
    )


def _failed(
    request: BuildRequest, code: str, reason: str, actor: Actor, *, funnel: tuple[FunnelStep, ...] = ()
) -> BuildUpdate:
    return BuildUpdate(
        build=RecordedBuild(
            instance_uuid=request.instance_uuid,
            project_id=request.project_id,
            state=BuildState.FAILED,
            sequence=FAILED_OR_REFUSED,
            terminal=True,
            code=code,
            reason=reason[:MAX_REASON],
        ),
        funnel=funnel,
        timeline=(actor.entry("failed", f"{code}: {reason}"),),
    )


def add_stage_times(one: BuildUpdate, stage_times: StageTimes) -> BuildUpdate:
    """A failure that the scheduler decides: how long the stages took goes with the last line of the timeline."""
    *before, last = one.timeline
    return replace(one, timeline=(*before, replace(last, stage_times=stage_times)))


def outbox_messages(
    one: DecidedBuild, decided: BuildUpdate, at: float, stage_times: StageTimes, config: SchedulerConfig
) -> list[OutboxMessage]:
    """The messages of a decision that is written: with the command to the cell, or the query of it. decided: as it is
    written.
    """
    command: CellBuild | CellBuildQuery | None = None
    if one.claimed is not None:
        command = cell_build(one.pending.request, one.claimed, at, stage_times, config)
    elif not decided.build.terminal:
        command = build_query(one.pending.request, decided.build, at, config)
    return effects(
        BuildState.ACCEPTED, decided.build, at, command, stage_times, decided.funnel, one.pending.new_claim_owner
    )


# The parts of a flavor's extra specs that concern the node: traits of the whole host (traits of numbered groups are not
# the node's own), and the capabilities that Ironic gets as the instance's.
TRAIT = "trait:"
CAPABILITY = "capabilities:"
NO_FLAVOR = Flavor()


def instance_spec(request: BuildRequest, config: SchedulerConfig) -> InstanceSpec:
    """The parts of the request, and of its flavor as it is now, that the cell needs."""
    flavor = config.flavors.get(request.flavor, NO_FLAVOR)
    specs = flavor.extra_specs
    return InstanceSpec(
        instance_uuid=request.instance_uuid,
        project_id=request.project_id,
        user_id=request.user_id,
        name=request.name,
        image=request.image,
        flavor=request.flavor,
        image_source=request.image_source,
        config_drive=request.config_drive,
        networks=request.networks,
        volumes=request.volumes,
        root_gb=flavor.disk_gb,
        traits=tuple(
            key[len(TRAIT) :] for key, value in specs.items() if key.startswith(TRAIT) and value == "required"
        ),
        capabilities={key[len(CAPABILITY) :]: value for key, value in specs.items() if key.startswith(CAPABILITY)},
        on_host_failure=visible_to_cell(policy_of(request.on_host_failure, flavor, config.on_host_failure)),
    )


def cell_build(
    request: BuildRequest, claimed: HostClaimed, at: float, stage_times: StageTimes, config: SchedulerConfig
) -> CellBuild:
    """The command to the cell."""
    return CellBuild(
        spec=instance_spec(request, config),
        selections=claimed.selections,
        consumer_generation=claimed.consumer_generation,
        build_timeout_s=request.build_timeout_s or config.build_timeout_s,
        requested_at=at,
        server_group=request.server_group,
        limits=dict(claimed.limits),
        stage_times=replace(stage_times, lost_claims=len(claimed.lost)),
        attempt=claimed.attempt,
    )


def build_query(request: BuildRequest, build: RecordedBuild, at: float, config: SchedulerConfig) -> CellBuildQuery:
    """The query of its cell about a build that has had no event for long, or whose claim was found there."""
    return CellBuildQuery(
        spec=instance_spec(request, config),
        attempt=build.attempt or FIRST_ATTEMPT,
        build_timeout_s=request.build_timeout_s or config.build_timeout_s,
        sequence=build.sequence,
        requested_at=at,
    )

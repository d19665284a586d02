"""The end of scheduling as it goes on record, to the cell and to clients: decision, command, event. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.bus import API
from bus.consuming.outcome import Retry
from bus.contracts.base import MAX_REASON, Refusal
from bus.contracts.build import BuildEvent, BuildRequest, BuildState, FunnelStep
from bus.contracts.catalogue import project_of
from bus.contracts.cell import CellBuild, InstanceSpec
from bus.contracts.fences import EvacuationPolicy
from bus.contracts.stages import Stamps
from bus.persistence.outbox import OutboxMessage
from bus.wire import Malformed
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.domain.builds import DECIDED, MALFORMED, SCHEDULED, Author, BuildDecision, RecordedBuild
from scheduler_worker.domain.evacuation_policy import for_cell, policy_of
from scheduler_worker.domain.explain import funnel_step, sentence
from scheduler_worker.domain.placement import (
    FIRST_ATTEMPT,
    ClaimsContended,
    ClaimStranded,
    GangIncomplete,
    HostClaimed,
    PlacementRefused,
    PlacementResult,
    PlacementUnavailable,
)
from scheduler_worker.domain.request_spec import RequestSpec, Unsatisfiable
from scheduler_worker.domain.selector import NoValidHost

NO_HOST = "no_valid_host"
CONTENDED = "claims.contended"
STRANDED = "claim.stranded"
INCOMPLETE = "gang.incomplete"

# Of a flavor's extra specs: traits of the whole host (of numbered groups they are not the node's own), and what Ironic
# gets as the instance's capabilities.
TRAIT = "trait:"
CAPABILITY = "capabilities:"
NO_FLAVOR = Flavor()


def decision(
    request: BuildRequest, spec: RequestSpec, result: PlacementResult, author: Author, *, nearest: int
) -> BuildDecision:
    """The decision that a result means. PlacementUnavailable means none: the request is tried again."""
    match result:
        case HostClaimed():
            return _dispatched(request, result, author)
        case NoValidHost():
            return _failed(request, NO_HOST, sentence(spec, result.funnel, nearest), author, funnel=result.funnel)
        case PlacementRefused():
            return _failed(request, result.code, result.reason, author)
        case ClaimsContended():
            reason = f"{result.claims} claims in the last delivery alone were lost to others, after every retry"
            return _failed(request, CONTENDED, reason, author)
        case ClaimStranded():
            return _failed(request, STRANDED, result.reason, author)
        case GangIncomplete(gang=gang, placed=placed):
            reason = (
                f"{placed} of the {gang.size} members of gang {gang.uuid} had a host, and {gang.min_count} start "
                "together or none; each other member has its own reason"
            )
            return _failed(request, INCOMPLETE, reason, author)
        case PlacementUnavailable():
            raise AssertionError(result)


def retry_of(result: PlacementResult) -> Retry | None:
    """How a result is retried while its queue has retries left; None: it is final."""
    match result:
        case ClaimsContended():
            return Retry(CONTENDED, f"{result.claims} claims were lost to others")
        case ClaimStranded():
            return Retry(STRANDED, result.reason)
    return None


def may_hold_claim(result: PlacementResult) -> bool:
    """Whether a claim was sent: it may be delivered twice, and its second answer be lost."""
    return not isinstance(result, NoValidHost | GangIncomplete) or result.claims > 0


def unsatisfiable(request: BuildRequest, why: Unsatisfiable, hosts: int, author: Author) -> BuildDecision:
    """A request that no host may take as configured: a funnel of one step that rejects all hosts."""
    reason = f"No host can take {request.flavor}: {why.reason}."
    return _failed(request, NO_HOST, reason, author, funnel=(funnel_step(why.step, hosts, {why.code: hosts}),))


def given_up(request: BuildRequest, why: Refusal, author: Author) -> BuildDecision:
    """A request that its queue has given up, or is about to."""
    return _failed(request, why.code, why.reason, author)


def _dispatched(request: BuildRequest, claimed: HostClaimed, author: Author) -> BuildDecision:
    main = claimed.selections[0]
    alternates = ", ".join(selection.host for selection in claimed.selections[1:]) or "none"
    chosen = f"{main.host} of {claimed.passed} candidates, weight {claimed.score:.4g}"
    return BuildDecision(
        build=RecordedBuild(
            instance_uuid=request.instance_uuid,
            project_id=request.project_id,
            state=BuildState.SCHEDULED,
            sequence=SCHEDULED,
            cell=claimed.cell,
            host=main.host,
        ),
        host_uuid=main.host_uuid,
        timeline=(
            *(author.entry("not_claimed", lost) for lost in claimed.lost),
            replace(author.entry("chosen", chosen), scores=claimed.scores),
            author.entry("claimed", f"{main.host} after {claimed.claims} claim(s); alternates: {alternates}"),
            author.entry("dispatched", f"to cell {claimed.cell}"),
        ),
    )


def _failed(
    request: BuildRequest, code: str, reason: str, author: Author, *, funnel: tuple[FunnelStep, ...] = ()
) -> BuildDecision:
    return BuildDecision(
        build=RecordedBuild(
            instance_uuid=request.instance_uuid,
            project_id=request.project_id,
            state=BuildState.FAILED,
            sequence=DECIDED,
            terminal=True,
            code=code,
            reason=reason[:MAX_REASON],
        ),
        funnel=funnel,
        timeline=(author.entry("failed", f"{code}: {reason}"),),
    )


def with_stages(one: BuildDecision, stamps: Stamps) -> BuildDecision:
    """A failure that the scheduler decides: how long the stages took goes with the last line of the timeline."""
    *before, last = one.timeline
    return replace(one, timeline=(*before, replace(last, stamps=stamps)))


def decided_event(one: BuildDecision, at: float, stamps: Stamps | None = None) -> BuildEvent:
    """The event of a decision; with how long the stages took when it is terminal."""
    build = one.build
    return BuildEvent(
        instance_uuid=build.instance_uuid,
        project_id=build.project_id,
        state=build.state,
        sequence=build.sequence,
        terminal=build.terminal,
        cell=build.cell,
        host=build.host,
        attempt=FIRST_ATTEMPT if build.host is not None else 0,
        code=build.code,
        reason=build.reason,
        funnel=one.funnel,
        at=at,
        stamps=stamps if build.terminal else None,
    )


def instance_spec(
    request: BuildRequest, flavor: Flavor, on_host_failure: EvacuationPolicy = EvacuationPolicy.WAIT
) -> InstanceSpec:
    """What the cell needs to know of the request and its flavor. on_host_failure: where neither of them sets it."""
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
        on_host_failure=for_cell(policy_of(request.on_host_failure, flavor, on_host_failure)),
    )


def cell_build(
    request: BuildRequest, claimed: HostClaimed, at: float, stamps: Stamps, config: SchedulerConfig
) -> CellBuild:
    """The command to the cell."""
    return CellBuild(
        spec=instance_spec(request, config.flavors.get(request.flavor, NO_FLAVOR), config.on_host_failure),
        selections=claimed.selections,
        consumer_generation=claimed.consumer_generation,
        build_timeout_s=request.build_timeout_s or config.build_timeout_s,
        requested_at=at,
        server_group=request.server_group,
        limits=config.quota_of(request.project_id),
        stamps=replace(stamps, lost_claims=len(claimed.lost)) if claimed.lost else stamps,
    )


def messages_of(  # noqa: PLR0917  (hot, so no keywords)
    decided: BuildDecision,
    request: BuildRequest,
    claimed: HostClaimed | None,
    at: float,
    stamps: Stamps,
    config: SchedulerConfig,
) -> list[OutboxMessage]:
    """What follows from a decision once it is written: the command to the cell, and the event to clients."""
    event = to_clients(decided_event(decided, at, stamps))
    if claimed is None:
        return [event]
    command = cell_build(request, claimed, at, stamps, config)
    return [OutboxMessage(claimed.cell, command, request.instance_uuid), event]


def to_clients(event: BuildEvent) -> OutboxMessage:
    """An event on the API bus."""
    return OutboxMessage(API, event, event.instance_uuid)


class _Named(Struct):
    """The field of an unreadable request that an answer on the event stream needs."""

    instance_uuid: str


def refused_event(malformed: Malformed) -> Sequence[BuildEvent]:
    """An unreadable request, answered on the event stream of the project whose routing key it came under.

    The broker has let its publisher use that key; the body's project may be forged, so no other project
    gets an event of it. Sequence 0 is below everything that a build on record ever announced, so the event of a clash
    with a good request is outdated for a client that follows that one.
    """
    project_id = project_of(malformed.key)
    if not project_id:
        return ()
    try:
        event = BuildEvent(
            instance_uuid=msgspec.json.decode(malformed.body, type=_Named).instance_uuid,
            project_id=project_id,
            state=BuildState.REFUSED,
            sequence=MALFORMED,
            terminal=True,
            code=malformed.code,
            reason=malformed.reason[:MAX_REASON],
        )
        # Only what the contract allows.
        return (msgspec.convert(msgspec.to_builtins(event), BuildEvent),)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()

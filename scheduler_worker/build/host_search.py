"""The search for the host of one request: its state, its possible results, its claim, and the commands of a step.

A claim that is held ends the search: the build goes to its host, whichever claim owner of the request has made it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.build import HostScore
from bus.contracts.cell import Selection
from bus.contracts.placement import Claim, ClaimOption
from bus.contracts.placement_queries import ConsumerRecord
from bus.faults import Fault, RequestRefused
from scheduler_worker.placement_client import PlacementUnavailable, unavailable_from_fault
from scheduler_worker.records.build_record import FIRST_ATTEMPT, Gang
from scheduler_worker.selection.choice import Choice
from scheduler_worker.selection.explain import FailedClaim, NoValidHost
from scheduler_worker.selection.request_spec import RequestSpec, SchedulableRequest
from scheduler_worker.selection.selector import Selector

IGNORED = "host.ignored"  # as the request wants it


# --- results. Of each that leads to a decision, lost: the claims that got nothing before it, in order; claims: how many
# were sent for it.


class HostClaimed(Struct, frozen=True, kw_only=True):
    """A claim holds."""

    cell: str
    selections: tuple[Selection, ...]  # the host where the claim is, then the alternates
    consumer_generation: int
    passing_hosts: int  # candidates to choose from
    score: float
    claims: int
    decided_at: float = 0.0  # of the first choice
    claimed_at: float = 0.0
    lost: tuple[FailedClaim, ...] = ()
    scores: tuple[HostScore, ...] = ()  # of the selections, where the choice weighed them
    attempt: int = FIRST_ATTEMPT  # that holds the claim: the first, or a later one of a cell that has the build already
    limits: Mapping[str, int] = {}  # that it was held to, as are those of its alternates


class HostSearchRefused(Struct, frozen=True):
    """Placement refused for good; the request must not be tried again."""

    code: str
    reason: str
    lost: tuple[FailedClaim, ...] = ()
    # what was claimed for it has been released, and it holds nothing: it was deleted meanwhile
    was_deleted: bool = False
    claims: int = 0


class ClaimsContended(Struct, frozen=True):
    """The bounds of this delivery are used up, and a host that may fit is left unclaimed."""

    claims: int
    lost: tuple[FailedClaim, ...] = ()


class ClaimUnlocatable(Struct, frozen=True):
    """A claim is held, by this claim owner or an earlier one, but its request is not placed there: no compute service
    reports the host any more, or the request ends. Its machine may run.
    """

    reason: str
    cell: str | None = None  # that can be queried (None: not known)
    # host_uuid, attempt: of the claim
    host_uuid: str | None = None
    attempt: int = FIRST_ATTEMPT
    lost: tuple[FailedClaim, ...] = ()
    claims: int = 0


class GangIncomplete(Struct, frozen=True):
    """The build had a host, but fewer members of its gang had one than must start together."""

    gang: Gang
    placed: int
    claims: int  # submitted for it until then
    lost: tuple[FailedClaim, ...] = ()

    @property
    def reason(self) -> str:
        """In words."""
        return (
            f"{self.placed} of the {self.gang.size} members of gang {self.gang.uuid} had a host, and"
            f" {self.gang.min_count} start together or none; each other member has its own reason"
        )


def result_of_fault(fault: Fault) -> HostSearchRefused | PlacementUnavailable:
    """The result of a search that a message about it has no answer to."""
    return (
        HostSearchRefused(fault.code, fault.reason)
        if isinstance(fault, RequestRefused)
        else unavailable_from_fault(fault)
    )


def unlocatable_after_fault(fault: Fault) -> ClaimUnlocatable | PlacementUnavailable:
    """The result when it is not known what the instance holds, or whether its claim owner has it. If placement refuses
    for good, it ends as if the claim were of no known cell, and nothing is released.
    """
    return ClaimUnlocatable(str(fault)) if isinstance(fault, RequestRefused) else unavailable_from_fault(fault)


DecidedResult = HostClaimed | NoValidHost | HostSearchRefused | ClaimsContended | ClaimUnlocatable | GangIncomplete
HostSearchResult = DecidedResult | PlacementUnavailable


# --- the state


class ExternalClaim(Struct, frozen=True, kw_only=True):
    """The instance is another control plane's, Nova's: its claims are external ones."""

    group_members: tuple[str, ...] = ()  # instances that it counts to the server group, whoever claimed them
    # the generation of what the instance holds and leaves, to which the claim adds; None: nothing, as far as is known
    adds_to: int | None = None


class HostSearchRequest(Struct, frozen=True, kw_only=True):
    """A request for a host."""

    request: SchedulableRequest
    spec: RequestSpec
    claim_owner: str = ""  # its claims are made by it
    limits: Mapping[str, int] = {}  # that its claims are held to
    # it is claimed together with its gang's other members; its min_count leaves out members that were withdrawn
    gang: Gang | None = None
    external: ExternalClaim | None = None  # None: an instance of berth's own


class HostSearch(Struct, frozen=True, kw_only=True):
    """How far the search for one request's host has come."""

    request: SchedulableRequest
    spec: RequestSpec
    claim_owner: str  # claim_owner, limits, gang, external: as in HostSearchRequest
    rejected: Mapping[str, str]  # {host uuid: reason} of hosts that it may not use any more
    max_alternates: int  # hosts to name beside the selected one
    choice: Choice | None = None
    same_host: bool = False  # the chosen host's tree had changed; claim it again
    conflicts: int = 0
    claims: int = 0
    decided_at: float = 0.0
    lost: tuple[FailedClaim, ...] = ()
    partly_used_up: tuple[str, ...] = ()  # hosts of which only some children are known to be full
    # how often nothing fitted and another choice was made on the newest state of the replica, as each later one is
    retried_searches: int = 0
    recovered: str | None = None  # the host where a claim of an earlier claim owner was found
    result: HostSearchResult | None = None
    limits: Mapping[str, int] = {}
    gang: Gang | None = None
    external: ExternalClaim | None = None

    @property
    def needs_refresh(self) -> bool:
        """Whether the next decision has to be made on the newest state: an older state never proves "no host"."""
        return self.same_host or self.retried_searches > 0


def new_host_search(requested: HostSearchRequest, selector: Selector) -> HostSearch:
    """The start: the hosts that the client ignores are rejected; unknown names are left out."""
    request = requested.request
    ignored = dict.fromkeys((uuid for host in request.ignore_hosts for uuid in selector.uuids_of(host)), IGNORED)
    return HostSearch(
        request=request,
        spec=requested.spec,
        claim_owner=requested.claim_owner,
        rejected=ignored,
        # One host fewer than may be tried; a request may ask for fewer.
        max_alternates=(request.max_attempts or selector.config.settings.max_attempts) - 1,
        limits=requested.limits,
        gang=requested.gang,
        external=requested.external,
    )


def has_no_host(state: HostSearch) -> bool:
    """Whether it ends without a host, as far as is known. Then what its instance holds counts: by another claim owner,
    whose record is lost, or by this one.
    """
    return not isinstance(state.result, HostClaimed | PlacementUnavailable)


def matches_allocation(state: HostSearch, consumer: ConsumerRecord) -> bool:
    """Whether it goes where its instance holds something: a claim that was recovered may have been another one's."""
    result, project = state.result, state.request.project_id
    return isinstance(result, HostClaimed) and (consumer.project_id, consumer.attempt, consumer.allocations) == (
        project,
        result.attempt,
        result.selections[0].allocations,
    )


def result_of(state: HostSearch) -> HostSearchResult:
    """The result after the last round, with the claims that got nothing before it."""
    result = state.result or ClaimsContended(state.claims)
    return result if isinstance(result, PlacementUnavailable) else replace(result, lost=state.lost, claims=state.claims)


def build_claim(state: HostSearch) -> Claim:
    """The claim of this round: the options of the chosen host."""
    request = state.request
    assert state.choice is not None
    selected = state.choice.selected
    host = None if request.server_group is None else selected.uuid
    external = state.external
    options = tuple(
        ClaimOption(allocations=one.allocations, spec_generations=one.spec_generations, host=host)
        for one in selected.options
    )
    return Claim(
        consumer=request.instance_uuid,
        attempt=FIRST_ATTEMPT,
        owner=state.claim_owner or None,
        options=options,
        project_id=request.project_id,
        user_id=request.user_id,
        server_group=request.server_group,
        limits=dict(state.limits),
        external=external is not None,
        consumer_generation=None if external is None else external.adds_to,
        group_members=() if external is None or request.server_group is None else external.group_members,
    )


# --- the step after an answer


class ConfirmedClaim(Struct, frozen=True):
    """The chosen claim holds at these generations ({provider: generation}), which the replica assumes until the feed
    has reached them.
    """

    generations: Mapping[str, int]
    sequence: int = 0  # the feed's number of the claim's changes; a replica that is there already counts them
    # those of the option that was granted, where it is not the one that was assumed
    granted_allocations: Mapping[str, Mapping[str, int]] | None = None


class HostSearchStep(Struct, frozen=True):
    """The state afterwards."""

    state: HostSearch
    confirmed: ConfirmedClaim | None = None  # the chosen claim holds; None: it does not; the feed brings the rest

    def carry_out(self, selector: Selector) -> None:
        """Have the replica, and what counts beside it, assume what holds, and nothing else."""
        uuid, concluded, result = self.state.request.instance_uuid, self.confirmed, self.state.result
        if selector.in_flight is not None and isinstance(result, HostClaimed):
            main = result.selections[0]
            selector.in_flight.claimed(uuid, main.host_uuid, self.state.spec, main.mappings)
        if concluded is None:
            selector.drop_assumed(uuid)
            return
        replica = selector.replica
        if concluded.granted_allocations is not None:
            replica.assume(uuid, concluded.granted_allocations)
        replica.confirm(uuid, concluded.generations, concluded.sequence)

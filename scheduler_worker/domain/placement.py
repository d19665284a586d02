"""One request on its way to a host: its state, its possible results, its claim, and the commands of a step.

A claim that holds is the last: the build goes where it is, whichever claim owner of the request has made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.book import ConsumerRecord
from bus.contracts.build import HostScore
from bus.contracts.cell import Selection
from bus.contracts.placement import Claim, ClaimOption, ClaimOutcome, ClaimResult
from bus.faults import Fault, RequestRefused, Transient
from placement_worker.replica.book import Replica
from placement_worker.replica.request import QueryTooWide
from placement_worker.replica.sharing import sharing_of
from scheduler_worker.domain.builds import FIRST_ATTEMPT, Gang
from scheduler_worker.domain.explain import FailedClaim
from scheduler_worker.domain.ranking import Choice, RankedHost, Weights
from scheduler_worker.domain.selector import NoValidHost, Selector
from scheduler_worker.domain.view import RequestSpec, SchedulableRequest, find_matching_option

T = TypeVar("T")

IGNORED = "host.ignored"  # as the request wants it
CONSUMER_CONFLICT = "claim.consumer_conflict"  # the allocation is another client's: the scheduler never releases it

# Outcomes after which the request claims again.
LOST = frozenset(
    {ClaimOutcome.CONFLICT, ClaimOutcome.NO_CAPACITY, ClaimOutcome.POLICY_VIOLATED, ClaimOutcome.PROVIDER_REMOVED}
)


# --- results. Of each that leads to a decision, lost: the claims that got nothing before it, in order; claims: how many
# were sent for it.


class PlacementUnavailable(Transient):
    """Placement does not answer."""

    code = "placement.unavailable"


def unavailable_from_fault(fault: Fault) -> PlacementUnavailable:
    """The fault of an unanswered message, as a result."""
    if isinstance(fault, PlacementUnavailable):
        return fault
    return PlacementUnavailable(f"{fault.code} {fault.reason}".strip())


def answer_or_raise(answer: T | Fault) -> T:
    """The answer to a query. Raises PlacementUnavailable, or RequestRefused: placement has refused it for good."""
    if isinstance(answer, RequestRefused):
        raise answer
    if isinstance(answer, Fault):
        raise unavailable_from_fault(answer) from answer
    return answer


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


class PlacementRefused(Struct, frozen=True):
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


def result_of_fault(fault: Fault) -> PlacementRefused | PlacementUnavailable:
    """The result of a placement that a message about it has no answer to."""
    return (
        PlacementRefused(fault.code, fault.reason)
        if isinstance(fault, RequestRefused)
        else unavailable_from_fault(fault)
    )


def unlocatable_after_fault(fault: Fault) -> ClaimUnlocatable | PlacementUnavailable:
    """The result of a placement of which it is not known what its instance holds, or that its claim owner has it. Where
    placement has refused to tell, for good, it ends as if the claim were of no known cell, and nothing is released.
    """
    return ClaimUnlocatable(str(fault)) if isinstance(fault, RequestRefused) else unavailable_from_fault(fault)


DecidedResult = HostClaimed | NoValidHost | PlacementRefused | ClaimsContended | ClaimUnlocatable | GangIncomplete
PlacementResult = DecidedResult | PlacementUnavailable


# --- the state


class ExternalClaim(Struct, frozen=True, kw_only=True):
    """The instance is another control plane's, Nova's: its claims are external ones."""

    group_members: tuple[str, ...] = ()  # instances that it counts to the server group, whoever claimed them
    # the generation of what the instance holds and leaves, to which the claim adds; None: nothing, as far as is known
    adds_to: int | None = None


class PlacementRequest(Struct, frozen=True, kw_only=True):
    """A request to place."""

    request: SchedulableRequest
    spec: RequestSpec
    claim_owner: str = ""  # its claims are made by it
    limits: Mapping[str, int] = {}  # that its claims are held to
    # it is claimed together with its gang's other members; its min_count leaves out members that were withdrawn
    gang: Gang | None = None
    external: ExternalClaim | None = None  # None: an instance of berth's own


class PlacementState(Struct, frozen=True, kw_only=True):
    """How far one request has come."""

    request: SchedulableRequest
    spec: RequestSpec
    claim_owner: str  # claim_owner, limits, gang, external: as in PlacementRequest
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
    result: PlacementResult | None = None
    limits: Mapping[str, int] = {}
    gang: Gang | None = None
    external: ExternalClaim | None = None

    @property
    def needs_refresh(self) -> bool:
        """Whether the next decision has to be made on the newest state: an older state never proves "no host"."""
        return self.same_host or self.retried_searches > 0


def new_placement_state(placement: PlacementRequest, selector: Selector) -> PlacementState:
    """The start: the hosts that the client ignores are rejected; unknown names are left out."""
    request = placement.request
    ignored = dict.fromkeys((uuid for host in request.ignore_hosts for uuid in selector.uuids_of(host)), IGNORED)
    return PlacementState(
        request=request,
        spec=placement.spec,
        claim_owner=placement.claim_owner,
        rejected=ignored,
        # One host fewer than may be tried; a request may ask for fewer.
        max_alternates=(request.max_attempts or selector.config.max_attempts) - 1,
        limits=placement.limits,
        gang=placement.gang,
        external=placement.external,
    )


def has_no_host(state: PlacementState) -> bool:
    """Whether it ends without a host, as far as is known. Then what its instance holds counts: by another claim owner,
    whose record is lost, or by this one.
    """
    return not isinstance(state.result, HostClaimed | PlacementUnavailable)


def matches_allocation(state: PlacementState, consumer: ConsumerRecord) -> bool:
    """Whether it goes where its instance holds something: a claim that was recovered may have been another one's."""
    result, project = state.result, state.request.project_id
    return isinstance(result, HostClaimed) and (consumer.project_id, consumer.attempt, consumer.allocations) == (
        project,
        result.attempt,
        result.selections[0].allocations,
    )


def result_of(state: PlacementState) -> PlacementResult:
    """The result after the last round, with the claims that got nothing before it."""
    result = state.result or ClaimsContended(state.claims)
    return result if isinstance(result, PlacementUnavailable) else replace(result, lost=state.lost, claims=state.claims)


def build_claim(state: PlacementState) -> Claim:
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


class PlacementStep(Struct, frozen=True):
    """The state afterwards."""

    state: PlacementState
    confirmed: ConfirmedClaim | None = None  # the chosen claim holds; None: it does not; the feed brings the rest

    def carry_out(self, replica: Replica) -> None:
        """Have the replica assume what holds, and nothing else."""
        uuid, concluded = self.state.request.instance_uuid, self.confirmed
        if concluded is None:
            replica.drop_assumed(uuid)
            return
        if concluded.granted_allocations is not None:
            replica.assume(uuid, concluded.granted_allocations)
        replica.confirm(uuid, concluded.generations, concluded.sequence)


# --- a claim that holds


DIGITS = 3  # bound of a weight on record


class RecoveredClaim(Struct, frozen=True):
    """An allocation that a build is given to."""

    allocations: Mapping[str, Mapping[str, int]]
    generation: int
    attempt: int


def claimed(
    state: PlacementState, choice: Choice, option: int, answer: ClaimResult, selector: Selector, *, now: float
) -> PlacementStep:
    """Build where the claim is: on the chosen host, with one of the options that were offered."""
    selected = choice.selected
    result = _host_claimed(
        state,
        selector.selection(selected, option),
        choice.alternates,
        RecoveredClaim({}, answer.consumer_generation or 0, FIRST_ATTEMPT),
        selector,
        now=now,
        passed=choice.passing_hosts,
        score=selected.score,
        weights=choice.weights_of_hosts,
    )
    instead = selected.options[option].allocations if option else None
    return PlacementStep(replace(state, result=result), ConfirmedClaim(answer.generations, answer.sequence, instead))


def recovered(
    state: PlacementState, candidates: Sequence[RankedHost], claim: RecoveredClaim, selector: Selector, *, now: float
) -> PlacementStep:
    """Build where a claim is held: it is what counts."""
    main = _recovered_selection(claim.allocations, selector)
    if main is None:
        reason = "an earlier claim of this request holds a host that no compute service reports"
        return PlacementStep(replace(state, result=ClaimUnlocatable(reason)))
    if state.external is not None and state.spec.query.groups:
        option = _matching_option(state, main.host_uuid, main.allocations, selector)
        if option is None:
            reason = "an earlier claim of this request holds what does not satisfy it any more"
            return PlacementStep(replace(state, result=ClaimUnlocatable(reason)))
        # Nova binds its ports and devices by which provider satisfies which group.
        main = replace(main, mappings=option.mappings)
    cell = selector.cell_of(main.host_uuid)
    alternates = [one for one in candidates if one.uuid != main.host_uuid and selector.cell_of(one.uuid) == cell]
    alternates = alternates[: state.max_alternates]
    passed = len(alternates) + 1
    result = _host_claimed(state, main, alternates, claim, selector, now=now, passed=passed, score=0.0)
    return PlacementStep(replace(state, result=result, recovered=main.host))


def _host_claimed(
    state: PlacementState,
    main: Selection,
    alternates: Sequence[RankedHost],
    claim: RecoveredClaim,
    selector: Selector,
    *,
    now: float,
    passed: int,
    score: float,
    weights: Mapping[str, Weights] | None = None,
) -> PlacementResult:
    cell = selector.cell_of(main.host_uuid)
    if cell is None and state.external is not None and main.service:
        # Where it was chosen: another control plane can release a claim that it is told of, and no other.
        cell = selector.table.last_cell_of(main.host_uuid)
    if cell is None:
        return ClaimUnlocatable("no compute service reports the claimed host any more")
    selections = (main, *(selector.selection(one) for one in alternates if _is_still_in(cell, one, selector)))
    return HostClaimed(
        cell=cell,
        selections=selections,
        consumer_generation=claim.generation,
        passing_hosts=passed,
        score=score,
        claims=state.claims,
        decided_at=state.decided_at,
        claimed_at=now,
        attempt=claim.attempt,
        limits=state.limits,
        scores=scores_of(selections, weights or {}),
    )


def scores_of(selections: Iterable[Selection], weights: Mapping[str, Weights]) -> tuple[HostScore, ...]:
    """What hosts weighed at their choice, as it is put on record."""
    return tuple(
        HostScore(host=one.host, weights={name: round(weight, DIGITS) for name, weight in found.items()})
        for one in selections
        if (found := weights.get(one.host_uuid))
    )


def _is_still_in(cell: str, alternate: RankedHost, selector: Selector) -> bool:
    """Whether an alternate may be named: while the claim was in flight its host may have left, or changed its cell."""
    return selector.replica.row_of(alternate.uuid) is not None and selector.cell_of(alternate.uuid) == cell


def _recovered_selection(allocations: Mapping[str, Mapping[str, int]], selector: Selector) -> Selection | None:
    replica = selector.replica
    rows = {provider: row for provider in sorted(allocations) if (row := replica.row_of(provider)) is not None}
    # A sharing provider is no host: of the trees that take part, only the host's root is in the host table.
    roots = dict.fromkeys(replica.uuid_of(replica.root_of(row)) for row in rows.values())
    hosts = [root for root in roots if selector.table.index_of(root) is not None]
    if len(hosts) != 1:
        return None
    spec_generations: Mapping[str, int] = {provider: replica.spec_generation_of(row) for provider, row in rows.items()}
    return selector.selection_on(hosts[0], allocations, spec_generations)


def _matching_option(
    state: PlacementState, host: str, allocations: Mapping[str, Mapping[str, int]], selector: Selector
) -> ClaimOption | None:
    """The way in which what is held on a host satisfies the request; None: it does not."""
    row = selector.replica.row_of(host)
    assert row is not None
    try:
        return find_matching_option(selector.replica, state.spec, row, allocations, key=state.request.instance_uuid)
    except QueryTooWide:
        return None


def external_part(
    state: PlacementState, allocations: Mapping[str, Mapping[str, int]], selector: Selector
) -> Mapping[str, Mapping[str, int]]:
    """What the instance of a foreign control plane holds for this request: on one host, and of what that shares."""
    # It may also hold what another call has left: the source of an evacuation, which the request ignores; after two of
    # them its first host, which is down; what a failed call claimed. Of several hosts it is the one that the request
    # may have and whose part is what it asks for. A part on an unknown host is never its own.
    replica, spec = selector.replica, state.spec
    named = {*spec.query.only_roots, spec.query.in_tree} - {None}
    rows = {provider: row for provider in sorted(allocations) if (row := replica.row_of(provider)) is not None}
    roots = {provider: replica.uuid_of(replica.root_of(row)) for provider, row in rows.items()}
    shared = set(sharing_of(replica).donors.tolist())
    best: tuple[tuple[bool, bool], Mapping[str, Mapping[str, int]]] = (False, False), {}
    for host in dict.fromkeys(roots.values()):
        if state.rejected.get(host) == IGNORED or selector.table.index_of(host) is None:
            continue
        part = {one: allocations[one] for one, row in rows.items() if roots[one] == host or row in shared}
        cell = selector.cell_of(host)
        is_in_cell = cell is not None and spec.cell in (None, cell)
        is_allowed = is_in_cell and (not named or host in named) and selector.rejects(host, spec) is None
        fits = is_allowed and _matching_option(state, host, part, selector) is not None
        if not best[1] or (is_allowed, fits) > best[0]:
            best = (is_allowed, fits), part
    return best[1]


def unlocatable_claim(consumer: ConsumerRecord, reason: str) -> ClaimUnlocatable:
    """The result of a request that is not placed where its claim is held."""
    return ClaimUnlocatable(reason, consumer.cell, next(iter(consumer.hosts), None), consumer.attempt)

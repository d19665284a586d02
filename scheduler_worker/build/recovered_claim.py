"""A claim that an instance holds already, as the selection that its build takes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.build import HostScore
from bus.contracts.cell import Selection
from bus.contracts.placement import ClaimOption, ClaimResult
from bus.contracts.placement_queries import ConsumerRecord
from placement_worker.replica.request import QueryTooWide
from placement_worker.replica.sharing import sharing_of
from scheduler_worker.build.host_search import (
    IGNORED,
    ClaimUnlocatable,
    ConfirmedClaim,
    HostClaimed,
    HostSearch,
    HostSearchResult,
    HostSearchStep,
)
from scheduler_worker.records.build_record import FIRST_ATTEMPT
from scheduler_worker.selection.choice import Choice, RankedHost, Weights
from scheduler_worker.selection.request_spec import find_matching_option
from scheduler_worker.selection.selector import Selector

DIGITS = 3  # bound of a weight on record


class RecoveredClaim(Struct, frozen=True):
    """An allocation that a build is given to."""

    allocations: Mapping[str, Mapping[str, int]]
    generation: int
    attempt: int


def claimed(
    state: HostSearch, choice: Choice, option: int, answer: ClaimResult, selector: Selector, *, now: float
) -> HostSearchStep:
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
    return HostSearchStep(replace(state, result=result), ConfirmedClaim(answer.generations, answer.sequence, instead))


def recovered(
    state: HostSearch, candidates: Sequence[RankedHost], claim: RecoveredClaim, selector: Selector, *, now: float
) -> HostSearchStep:
    """Build where a claim is held: it is what counts."""
    main = _recovered_selection(claim.allocations, selector)
    if main is None:
        reason = "an earlier claim of this request holds a host that no compute service reports"
        return HostSearchStep(replace(state, result=ClaimUnlocatable(reason)))
    if state.external is not None and state.spec.query.groups:
        option = _matching_option(state, main.host_uuid, main.allocations, selector)
        if option is None:
            reason = "an earlier claim of this request holds what does not satisfy it any more"
            return HostSearchStep(replace(state, result=ClaimUnlocatable(reason)))
        # Nova binds its ports and devices by which provider satisfies which group.
        main = replace(main, mappings=option.mappings)
    cell = selector.cell_of(main.host_uuid)
    alternates = [one for one in candidates if one.uuid != main.host_uuid and selector.cell_of(one.uuid) == cell]
    alternates = alternates[: state.max_alternates]
    passed = len(alternates) + 1
    result = _host_claimed(state, main, alternates, claim, selector, now=now, passed=passed, score=0.0)
    return HostSearchStep(replace(state, result=result, recovered=main.host))


def _host_claimed(
    state: HostSearch,
    main: Selection,
    alternates: Sequence[RankedHost],
    claim: RecoveredClaim,
    selector: Selector,
    *,
    now: float,
    passed: int,
    score: float,
    weights: Mapping[str, Weights] | None = None,
) -> HostSearchResult:
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
    state: HostSearch, host: str, allocations: Mapping[str, Mapping[str, int]], selector: Selector
) -> ClaimOption | None:
    """The way in which what is held on a host satisfies the request; None: it does not."""
    row = selector.replica.row_of(host)
    assert row is not None
    try:
        return find_matching_option(selector.replica, state.spec, row, allocations, key=state.request.instance_uuid)
    except QueryTooWide:
        return None


def external_part(
    state: HostSearch, allocations: Mapping[str, Mapping[str, int]], selector: Selector
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

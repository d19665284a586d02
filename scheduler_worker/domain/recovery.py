"""A claim that holds: the build goes where it is, whichever run of the request has made it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.book import HeldAllocation
from bus.contracts.build import HostScore
from bus.contracts.cell import Selection
from bus.contracts.placement import ClaimResult
from placement_worker.replica.request import QueryTooWide
from placement_worker.replica.search import option_held
from scheduler_worker.domain.builds import FIRST_ATTEMPT
from scheduler_worker.domain.placement import (
    IGNORED,
    Assume,
    ClaimStranded,
    Command,
    Forget,
    HostClaimed,
    PlacementResult,
    PlacementState,
    PlacementStep,
    Settle,
)
from scheduler_worker.domain.ranking import Choice, RankedHost, Weights
from scheduler_worker.domain.selector import Selector

DIGITS = 3  # bound of a weight on record


class HeldByClaim(Struct, frozen=True):
    """An allocation that a build is given to."""

    holding: Mapping[str, Mapping[str, int]]
    generation: int
    attempt: int


def claimed(
    state: PlacementState, choice: Choice, option: int, answer: ClaimResult, selector: Selector, *, now: float
) -> PlacementStep:
    """Build where the claim is: on the chosen host, with one of the options that were offered."""
    selected = choice.selected
    commands: list[Command] = [Assume(selected.options[option].allocations)] if option else []
    result = _host_claimed(
        state,
        selector.selection(selected, option),
        choice.alternates,
        HeldByClaim({}, answer.consumer_generation or 0, FIRST_ATTEMPT),
        selector,
        now=now,
        passed=choice.passed,
        score=selected.score,
        weights=dict(zip((host.uuid for host in (selected, *choice.alternates)), choice.weights, strict=False)),
    )
    return PlacementStep(replace(state, result=result), (*commands, Settle(answer.generations, answer.sequence)))


def recovered(
    state: PlacementState, candidates: Sequence[RankedHost], held: HeldByClaim, selector: Selector, *, now: float
) -> PlacementStep:
    """Build where a claim is held: it is what counts."""
    drop = (Forget(),)
    main = _recovered_selection(held.holding, selector)
    if main is None:
        reason = "an earlier claim of this request holds a host that no compute service announces"
        return PlacementStep(replace(state, result=ClaimStranded(reason)), drop)
    if state.foreign is not None and state.spec.query.groups:
        mappings = _mappings(state, main, selector)
        if mappings is None:
            reason = "an earlier claim of this request holds what does not satisfy it any more"
            return PlacementStep(replace(state, result=ClaimStranded(reason)), drop)
        main = replace(main, mappings=mappings)
    cell = selector.cell_of(main.host_uuid)
    alternates = [one for one in candidates if one.uuid != main.host_uuid and selector.cell_of(one.uuid) == cell]
    alternates = alternates[: state.max_alternates]
    passed = len(alternates) + 1
    result = _host_claimed(state, main, alternates, held, selector, now=now, passed=passed, score=0.0)
    return PlacementStep(replace(state, result=result, recovered=main.host), drop)


def _host_claimed(
    state: PlacementState,
    main: Selection,
    alternates: Sequence[RankedHost],
    held: HeldByClaim,
    selector: Selector,
    *,
    now: float,
    passed: int,
    score: float,
    weights: Mapping[str, Weights] | None = None,
) -> PlacementResult:
    cell = selector.cell_of(main.host_uuid)
    if cell is None:
        return ClaimStranded("no compute service announces the claimed host any more")
    selections = (main, *(selector.selection(one) for one in alternates if _is_still_in(cell, one, selector)))
    return HostClaimed(
        cell=cell,
        selections=selections,
        consumer_generation=held.generation,
        passed=passed,
        score=score,
        claims=state.claims,
        decided_at=state.decided_at,
        claimed_at=now,
        attempt=held.attempt,
        scores=tuple(
            HostScore(host=one.host, weights={name: round(weight, DIGITS) for name, weight in found.items()})
            for one in selections
            if (found := (weights or {}).get(one.host_uuid))
        ),
    )


def _is_still_in(cell: str, alternate: RankedHost, selector: Selector) -> bool:
    """Whether an alternate may be named: while the claim was in flight its host may have left, or changed its cell."""
    return selector.book.row_of(alternate.uuid) is not None and selector.cell_of(alternate.uuid) == cell


def _recovered_selection(holding: Mapping[str, Mapping[str, int]], selector: Selector) -> Selection | None:
    book = selector.book
    rows = {provider: row for provider in sorted(holding) if (row := book.row_of(provider)) is not None}
    # A sharing provider is no host: of the trees that take part, only the host's root is in the host table.
    roots = dict.fromkeys(book.uuid_of(book.root_of(row)) for row in rows.values())
    hosts = [root for root in roots if selector.table.index_of(root) is not None]
    if len(hosts) != 1:
        return None
    shapes: Mapping[str, int] = {provider: book.shape_of(row) for provider, row in rows.items()}
    return selector.selection_on(hosts[0], holding, shapes)


def _mappings(state: PlacementState, main: Selection, selector: Selector) -> Mapping[str, tuple[str, ...]] | None:
    """Which provider of what is held satisfies which numbered group: Nova binds its ports and devices by that."""
    book = selector.book
    row = book.row_of(main.host_uuid)
    assert row is not None
    try:
        option = option_held(book, state.spec.query, row, main.allocations, key=state.request.instance_uuid)
    except QueryTooWide:
        return None
    return None if option is None else option.mappings


def foreign_part(
    state: PlacementState, holding: Mapping[str, Mapping[str, int]], selector: Selector
) -> dict[str, dict[str, int]]:
    """What the instance of a foreign control plane holds elsewhere than on hosts that its request leaves out."""
    book = selector.book
    rows = {provider: book.row_of(provider) for provider in holding}
    roots = {provider: book.uuid_of(book.root_of(row)) for provider, row in rows.items() if row is not None}
    left = {provider for provider, root in roots.items() if state.rejected.get(root) == IGNORED}
    return {provider: dict(amounts) for provider, amounts in holding.items() if provider not in left}


def stranded(held: HeldAllocation, reason: str) -> ClaimStranded:
    """The result of a request that is not placed where its claim is held."""
    return ClaimStranded(reason, held.cell, next(iter(held.hosts), None), held.attempt)

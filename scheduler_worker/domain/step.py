"""The step of a placement: the consequences of finding no host, and of placement's answer to its claim. Pure.

Each outcome of a claim has its own reaction: claimed: done; raced: apply the newer shape and claim the
same host again; full or gone: the next host, down the whole list; ruled out by the server group: the next host,
by the newest members; consumer changed: another client owns this instance, stop.
A missing answer never means "no valid host".

A claim that is held already is recovered, whatever run it is by: the build goes where that claim is. One of another run
was made for a record that is lost, and its machine may run; one of a later attempt only the cell makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.book import HeldAllocation
from bus.contracts.build import HostScore
from bus.contracts.cell import Selection
from bus.contracts.groups import GroupPolicy
from bus.contracts.placement import ClaimOutcome, ClaimResult
from bus.faults import Fault
from scheduler_worker.domain.explain import ClaimLoss
from scheduler_worker.domain.placement import (
    CONSUMER_CHANGED,
    FIRST_ATTEMPT,
    LOST,
    Assume,
    ClaimStranded,
    Command,
    Forget,
    HostClaimed,
    PlacementRefused,
    PlacementResult,
    PlacementState,
    PlacementStep,
    Settle,
    result_after,
)
from scheduler_worker.domain.ranking import Choice, RankedHost, Weights
from scheduler_worker.domain.selector import Selector

ANOTHERS = "another client holds an allocation under this instance's uuid"
FENCED = "what was claimed under this instance's uuid has been released"

# How often a request without any other host looks again at hosts of which only some children were full.
MAX_PARTLY_FULL_RETRIES = 3
DIGITS = 3  # bound of a weight on record


def step(state: PlacementState, answer: ClaimResult | Fault, selector: Selector, *, now: float) -> PlacementStep:
    """Apply the answer to the claim of this placement. now: wall clock."""
    state = replace(state, claims=state.claims + 1)
    choice = state.choice
    assert choice is not None
    if isinstance(answer, Fault):
        return PlacementStep(replace(state, result=result_after(answer)))
    if answer.option is not None:
        return _claimed(state, choice, answer.option, answer, selector, now=now)
    if answer.outcome is ClaimOutcome.CLAIMED or _is_held_elsewhere(answer):
        candidates = (choice.selected, *choice.alternates) if answer.outcome is ClaimOutcome.CLAIMED else ()
        held = _Held(answer.holding, answer.consumer_generation or 0, answer.attempt or FIRST_ATTEMPT)
        return _recover(state, candidates, held, selector, now=now)
    if answer.outcome is ClaimOutcome.INCOMPLETE:
        # The gang stays together, so the host is the other members' too, and one of them did not fit there.
        stays = not state.spec.has_policy(GroupPolicy.AFFINITY)
        return PlacementStep(replace(state, same_host=stays))
    if answer.outcome in LOST:
        return PlacementStep(_after_loss(state, choice, answer, selector))
    return PlacementStep(_after_refusal(state, answer))


def found(state: PlacementState, held: HeldAllocation, selector: Selector, *, now: float) -> PlacementStep:
    """Apply what the instance holds already. now: wall clock."""
    if held.project_id != state.request.project_id or not held.attempt:
        return PlacementStep(replace(state, result=PlacementRefused(CONSUMER_CHANGED, ANOTHERS)))
    stepped = _recover(state, (), _Held(held.holding, held.consumer_generation, held.attempt), selector, now=now)
    result = stepped.state.result
    if isinstance(result, ClaimStranded):
        return replace(stepped, state=replace(stepped.state, result=stranded(held, result.reason)))
    return stepped


def stranded(held: HeldAllocation, reason: str) -> ClaimStranded:
    """The result of a request that is not placed where its claim is held."""
    return ClaimStranded(reason, held.cell, next(iter(held.hosts), None), held.attempt)


class _Held(Struct, frozen=True):
    """An allocation that a build is given to."""

    holding: Mapping[str, Mapping[str, int]]
    generation: int
    attempt: int


def _is_held_elsewhere(answer: ClaimResult) -> bool:
    """Whether another run of this request holds a claim, or its cell, under a later attempt than a scheduler makes.

    An allocation by another client of placement's API has no attempt, unless berth had built an instance of its uuid.
    """
    return answer.outcome is ClaimOutcome.CONSUMER_CHANGED and answer.attempt >= FIRST_ATTEMPT


def nothing_fits(state: PlacementState, selector: Selector) -> PlacementState:
    """No candidate is left: look again on the newest state."""
    if not state.looked_again or (state.partly_full and state.looked_again < MAX_PARTLY_FULL_RETRIES):
        # A full child does not make its host full: another scheduler may have taken the claimed child, and left an
        # equal one beside it. On the newest state the host is either a candidate again, or not.
        rejected = {uuid: reason for uuid, reason in state.rejected.items() if uuid not in state.partly_full}
        return replace(state, rejected=rejected, partly_full=(), looked_again=state.looked_again + 1)
    return no_valid_host(state, selector)


def no_valid_host(state: PlacementState, selector: Selector) -> PlacementState:
    """The end without a host, with the funnel that explains it."""
    explained = selector.explain(state.spec, state.rejected)
    return replace(state, result=replace(explained, claims=state.claims))


def refused(state: PlacementState, code: str, reason: str) -> PlacementState:
    """The end by a refusal."""
    return replace(state, choice=None, result=PlacementRefused(code, reason))


def _after_loss(state: PlacementState, choice: Choice, answer: ClaimResult, selector: Selector) -> PlacementState:
    """The claim was lost: which host may be claimed next."""
    host = choice.selected.uuid
    loss = ClaimLoss(f"{selector.name_of(host)}: {answer.outcome.value}", answer.holders)
    state = replace(state, lost=(*state.lost, loss))
    rejected = {**state.rejected, host: f"claim.{answer.outcome.value}"}
    match answer.outcome:
        case ClaimOutcome.RACED if state.raced < selector.config.raced_retries:
            return replace(state, raced=state.raced + 1, same_host=True)
        case ClaimOutcome.RACED:
            return replace(state, raced=state.raced + 1, rejected=rejected)
        case ClaimOutcome.FULL if _uses_child_providers(choice.selected):
            return replace(state, rejected=rejected, partly_full=(*state.partly_full, host))
        case ClaimOutcome.RULED_OUT:
            # Another member was faster: where the group is now decides which hosts are left.
            return replace(state, rejected=rejected, spec=state.spec.with_members(answer.members))
    return replace(state, rejected=rejected)


def _after_refusal(state: PlacementState, answer: ClaimResult) -> PlacementState:
    """The claim can never be granted: to this project, this consumer, or at all."""
    match answer.outcome:
        case ClaimOutcome.OVER_LIMIT:
            stopped = PlacementRefused("quota.exceeded", f"project {state.request.project_id}, {answer.reason}")
        case ClaimOutcome.CONSUMER_CHANGED:
            is_fenced = answer.consumer_generation is None and not answer.reason
            reason = answer.reason or (FENCED if is_fenced else ANOTHERS)
            stopped = PlacementRefused(CONSUMER_CHANGED, reason, is_fenced=is_fenced)
        case _:
            reason = answer.reason or "placement can never accept this claim"
            stopped = PlacementRefused("claim.invalid", reason)
    return replace(state, result=stopped)


def _uses_child_providers(claimed: RankedHost) -> bool:
    """Whether a provider other than the host's root was to give something."""
    return any(uuid != claimed.uuid for option in claimed.options for uuid in option.allocations)


# --- a claim that holds


def _claimed(
    state: PlacementState, choice: Choice, option: int, answer: ClaimResult, selector: Selector, *, now: float
) -> PlacementStep:
    """Build where the claim is: on the chosen host, with one of the options that were offered."""
    selected = choice.selected
    commands: list[Command] = [Assume(selected.options[option].allocations)] if option else []
    result = _host_claimed(
        state,
        selector.selection(selected, option),
        choice.alternates,
        _Held({}, answer.consumer_generation or 0, FIRST_ATTEMPT),
        selector,
        now=now,
        passed=choice.passed,
        score=selected.score,
        weights=dict(zip((host.uuid for host in (selected, *choice.alternates)), choice.weights, strict=False)),
    )
    return PlacementStep(replace(state, result=result), (*commands, Settle(answer.generations, answer.sequence)))


def _recover(
    state: PlacementState, candidates: Sequence[RankedHost], held: _Held, selector: Selector, *, now: float
) -> PlacementStep:
    """Build where a claim is held: it is what counts."""
    drop = (Forget(),)
    main = _recovered_selection(held.holding, selector)
    if main is None:
        reason = "an earlier claim of this request holds a host that no compute service announces"
        return PlacementStep(replace(state, result=ClaimStranded(reason)), drop)
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
    held: _Held,
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

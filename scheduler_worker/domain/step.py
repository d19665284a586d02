"""The step of an attempt: what follows when no host fits, and what follows from placement's answer to its claim. Pure.

Each outcome of a claim has its own reaction: claimed: done; raced: apply the newer shape and claim the
same host again; full or gone: the next host, down the whole list; ruled out by the server group: the next host,
by the newest members; consumer changed: another client owns this instance, stop.
A missing answer never means "no valid host".

A claim that an earlier run of the same request holds is recovered: the build goes where that claim is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from bus.contracts.base import MAX_AMOUNT
from bus.contracts.build import HostScore
from bus.contracts.cell import Selection
from bus.contracts.groups import GroupPolicy
from bus.contracts.placement import ClaimOption, ClaimOutcome, ClaimResult
from bus.faults import Fault, RequestRefused
from placement_worker.replica.query import total_resources
from scheduler_worker.domain.attempt import (
    CONSUMER_CHANGED,
    LOST,
    Assume,
    Attempt,
    AttemptStep,
    ClaimStranded,
    Command,
    Forget,
    HostClaimed,
    PlacementRefused,
    PlacementResult,
    Settle,
    unavailable_after,
)
from scheduler_worker.domain.ranking import Choice, RankedHost, Weights
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.selector import Selector, recovered_allocations

# How often a request that fits nowhere else looks again at hosts of which only some children were full.
MAX_PARTLY_FULL_RETRIES = 3
DIGITS = 3  # of a weight on record
# Placement counts shapes from 1.
NO_SHAPE = 0


def step(attempt: Attempt, answer: ClaimResult | Fault, selector: Selector, *, now: float) -> AttemptStep:
    """Apply the answer to an attempt's claim. now: wall clock."""
    attempt = replace(attempt, claims=attempt.claims + 1)
    choice = attempt.choice
    if isinstance(answer, Fault):
        return AttemptStep(replace(attempt, result=_after_fault(answer)))
    if answer.outcome is ClaimOutcome.CLAIMED:
        option = None if choice is None else _held_option(choice.selected.options, answer)
        if choice is not None and option is not None:
            return _claimed(attempt, choice, option, answer, selector, now=now)
        candidates = () if choice is None else (choice.selected, *choice.alternates)
        return _recover(attempt, candidates, answer, selector, now=now)
    if choice is None:
        return AttemptStep(no_valid_host(attempt, selector))
    if answer.outcome is ClaimOutcome.INCOMPLETE:
        # Where the gang stays together the host is the others' too, and one of them did not fit there.
        stays = not attempt.spec.has_policy(GroupPolicy.AFFINITY)
        return AttemptStep(replace(attempt, same_host=choice.selected if stays else None))
    if answer.outcome in LOST:
        return AttemptStep(_after_loss(attempt, choice, answer, selector))
    return AttemptStep(_after_refusal(attempt, answer))


def probed(attempt: Attempt, answer: ClaimResult | Fault, selector: Selector, *, now: float) -> AttemptStep:
    """Apply the answer to a probe that was made before the first choice. now: wall clock."""
    attempt = replace(attempt, claims=attempt.claims + 1)
    if isinstance(answer, Fault):
        return AttemptStep(replace(attempt, result=_after_fault(answer)))
    if answer.outcome is ClaimOutcome.CLAIMED:
        return _recover(attempt, (), answer, selector, now=now)
    return AttemptStep(attempt)


def with_probe(attempt: Attempt, selector: Selector) -> Attempt:
    """The attempt with an option that never fits, to see what an earlier run holds; as it is when there is no host."""
    return replace(attempt, probe=_unclaimable(attempt.spec, selector))


def nothing_fits(attempt: Attempt, selector: Selector) -> Attempt:
    """No candidate is left: look again on the newest state; then make sure that no earlier run holds a claim."""
    if not attempt.refreshed or (attempt.partly_full and attempt.retried_partly_full < MAX_PARTLY_FULL_RETRIES):
        # A full child does not make its host full: another scheduler may have taken what was claimed, and left the like
        # of it beside. On the newest state the host is a candidate again, or is none.
        rejected = {uuid: reason for uuid, reason in attempt.rejected.items() if uuid not in attempt.partly_full}
        retried_partly_full = attempt.retried_partly_full + 1
        return replace(
            attempt, rejected=rejected, partly_full=(), retried_partly_full=retried_partly_full, refreshed=True
        )
    if not attempt.first_run and attempt.probe is None:
        # After a crash the only host that fits may be the one that this request holds already, which looks full.
        probe = _unclaimable(attempt.spec, selector)
        if probe is not None:
            return replace(attempt, probe=probe)
    return no_valid_host(attempt, selector)


def no_valid_host(attempt: Attempt, selector: Selector) -> Attempt:
    """The end without a host, with the funnel that explains it."""
    explained = selector.explain(attempt.spec, attempt.rejected)
    return replace(attempt, result=replace(explained, claims=attempt.claims))


def refused(attempt: Attempt, code: str, reason: str) -> Attempt:
    """The end by a refusal."""
    return replace(attempt, choice=None, probe=None, result=PlacementRefused(code, reason))


def _after_fault(fault: Fault) -> PlacementResult:
    """No result of a claim: placement refused the message itself, or nothing answered."""
    if isinstance(fault, RequestRefused):
        return PlacementRefused(fault.code, fault.reason)
    return unavailable_after(fault)


def _after_loss(attempt: Attempt, choice: Choice, answer: ClaimResult, selector: Selector) -> Attempt:
    """The claim was lost: which host may be claimed next."""
    host = choice.selected.uuid
    attempt = replace(attempt, lost=(*attempt.lost, f"{selector.name_of(host)}: {answer.outcome.value}"))
    rejected = {**attempt.rejected, host: f"claim.{answer.outcome.value}"}
    match answer.outcome:
        case ClaimOutcome.RACED if attempt.raced < selector.config.raced_retries:
            return replace(attempt, raced=attempt.raced + 1, same_host=choice.selected)
        case ClaimOutcome.RACED:
            return replace(attempt, raced=attempt.raced + 1, rejected=rejected)
        case ClaimOutcome.FULL if _uses_child_providers(choice.selected):
            return replace(attempt, rejected=rejected, partly_full=(*attempt.partly_full, host))
        case ClaimOutcome.RULED_OUT:
            # Another member was faster: where the group is now decides which hosts are left.
            return replace(attempt, rejected=rejected, spec=attempt.spec.with_members(answer.members))
    return replace(attempt, rejected=rejected)


def _after_refusal(attempt: Attempt, answer: ClaimResult) -> Attempt:
    """The claim can never be granted: to this project, this consumer, or at all."""
    match answer.outcome:
        case ClaimOutcome.OVER_LIMIT:
            stopped = PlacementRefused("quota.exceeded", f"project {attempt.request.project_id}, {answer.reason}")
        case ClaimOutcome.CONSUMER_CHANGED:
            reason = answer.reason or "another client holds an allocation under this instance's uuid"
            stopped = PlacementRefused(CONSUMER_CHANGED, reason)
        case _:
            reason = answer.reason or "placement can never accept this claim"
            stopped = PlacementRefused("claim.invalid", reason)
    return replace(attempt, result=stopped)


def _unclaimable(spec: RequestSpec, selector: Selector) -> ClaimOption | None:
    """An option that never fits: a claim of it only shows whether this consumer holds an allocation already."""
    roots = selector.book.rows_of_roots()
    if not roots.size:
        return None
    resource_class = min(total_resources(spec.query))
    uuid = selector.book.uuid_of(int(roots[0]))
    # A host may have as much as can be requested; none has ever been of shape 0.
    return ClaimOption(allocations={uuid: {resource_class: MAX_AMOUNT}}, shapes={uuid: NO_SHAPE})


def _uses_child_providers(claimed: RankedHost) -> bool:
    """Whether a provider other than the host's root was to give something."""
    return any(uuid != claimed.uuid for option in claimed.options for uuid in option.allocations)


# --- a claim that holds


def _claimed(
    attempt: Attempt, choice: Choice, option: int, answer: ClaimResult, selector: Selector, *, now: float
) -> AttemptStep:
    """Build where the claim is: on the chosen host, with one of the options that were offered."""
    selected = choice.selected
    commands: list[Command] = [Assume(selected.options[option].allocations)] if option else []
    result = _host_claimed(
        attempt,
        selector.selection(selected, option),
        choice.alternates,
        answer,
        selector,
        now=now,
        passed=choice.passed,
        score=selected.score,
        weights=dict(zip((host.uuid for host in (selected, *choice.alternates)), choice.weights, strict=False)),
    )
    return AttemptStep(replace(attempt, result=result), (*commands, Settle(answer.generations, answer.sequence)))


def _recover(
    attempt: Attempt, candidates: Sequence[RankedHost], answer: ClaimResult, selector: Selector, *, now: float
) -> AttemptStep:
    """Build where an earlier run claimed; it crashed before it wrote its decision, and the claim is what counts."""
    drop = (Forget(),)
    main = _recovered_selection(attempt, answer, selector)
    if main is None:
        reason = "an earlier claim of this request holds a host that no compute service announces"
        return AttemptStep(replace(attempt, result=ClaimStranded(reason)), drop)
    cell = selector.cell_of(main.host_uuid)
    alternates = [one for one in candidates if one.uuid != main.host_uuid and selector.cell_of(one.uuid) == cell]
    alternates = alternates[: attempt.max_alternates]
    passed = len(alternates) + 1
    result = _host_claimed(attempt, main, alternates, answer, selector, now=now, passed=passed, score=0.0)
    return AttemptStep(replace(attempt, result=result, recovered=main.host), drop)


def _host_claimed(
    attempt: Attempt,
    main: Selection,
    alternates: Sequence[RankedHost],
    answer: ClaimResult,
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
        consumer_generation=answer.consumer_generation or 0,
        passed=passed,
        score=score,
        claims=attempt.claims,
        decided_at=attempt.decided_at,
        claimed_at=now,
        lost=attempt.lost,
        scores=tuple(
            HostScore(host=one.host, weights={name: round(weight, DIGITS) for name, weight in found.items()})
            for one in selections
            if (found := (weights or {}).get(one.host_uuid))
        ),
    )


def _is_still_in(cell: str, alternate: RankedHost, selector: Selector) -> bool:
    """Whether an alternate may be named: while the claim was in flight its host may have left, or changed its cell."""
    return selector.book.row_of(alternate.uuid) is not None and selector.cell_of(alternate.uuid) == cell


def _held_option(offered: Sequence[ClaimOption], answer: ClaimResult) -> int | None:
    """Which of the offered options is held; None: an allocation that was not offered now."""
    held = set(answer.generations)
    if answer.option is not None and answer.option < len(offered):
        fits = not held or held == set(offered[answer.option].allocations)
        return answer.option if fits else None
    matching = [at for at, option in enumerate(offered) if set(option.allocations) == held]
    return matching[0] if len(matching) == 1 else None


def _recovered_selection(attempt: Attempt, answer: ClaimResult, selector: Selector) -> Selection | None:
    book = selector.book
    providers = sorted(answer.generations)
    held = answer.holding or recovered_allocations(book, total_resources(attempt.spec.query), providers)
    rows = {provider: row for provider in providers if (row := book.row_of(provider)) is not None}
    # A sharing provider is no host: of the trees that give something, only the host's root is in the host table.
    roots = dict.fromkeys(book.uuid_of(book.root_of(row)) for row in rows.values())
    hosts = [root for root in roots if selector.table.index_of(root) is not None]
    if held is None or len(hosts) != 1:
        return None
    shapes: Mapping[str, int] = {provider: book.shape_of(row) for provider, row in rows.items()}
    return selector.selection_on(hosts[0], held, shapes)

"""The step of a host search after the answer to its claim: build, try the next host, search again, or end. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from bus.contracts.placement import ClaimOutcome, ClaimResult, GroupPolicy
from bus.contracts.placement_queries import ConsumerRecord
from bus.faults import Fault
from scheduler_worker.build.host_search import (
    ClaimUnlocatable,
    HostSearch,
    HostSearchRefused,
    HostSearchStep,
    result_of_fault,
)
from scheduler_worker.build.recovered_claim import RecoveredClaim, claimed, external_part, recovered, unlocatable_claim
from scheduler_worker.records.build_record import FIRST_ATTEMPT
from scheduler_worker.selection.choice import Choice, RankedHost
from scheduler_worker.selection.explain import FailedClaim
from scheduler_worker.selection.selector import Selector

CONSUMER_CONFLICT = "claim.consumer_conflict"  # the allocation is another client's: the scheduler never releases it

# Outcomes after which the request claims again.
LOST = frozenset(
    {ClaimOutcome.CONFLICT, ClaimOutcome.NO_CAPACITY, ClaimOutcome.POLICY_VIOLATED, ClaimOutcome.PROVIDER_REMOVED}
)

FOREIGN = "another client holds an allocation under this instance's uuid"
DELETED = "what was claimed under this instance's uuid has been released"

# How often a request without any other host looks again at hosts of which only some children were full.
MAX_PARTLY_USED_UP_RETRIES = 3


def apply_answer(state: HostSearch, answer: ClaimResult | Fault, selector: Selector, *, now: float) -> HostSearchStep:
    """Apply the answer to the claim of this search. now: wall clock."""
    state = replace(state, claims=state.claims + 1)
    choice = state.choice
    assert choice is not None
    if isinstance(answer, Fault):
        return HostSearchStep(replace(state, result=result_of_fault(answer)))
    if state.external is not None and answer.allocations and answer.option is None:
        return _of_external(state, answer, selector, now=now)
    if answer.option is not None:
        return claimed(state, choice, answer.option, answer, selector, now=now)
    if answer.outcome is ClaimOutcome.CLAIMED or _is_claimed_elsewhere(answer):
        candidates = (choice.selected, *choice.alternates) if answer.outcome is ClaimOutcome.CLAIMED else ()
        claim = RecoveredClaim(answer.allocations, answer.consumer_generation or 0, answer.attempt or FIRST_ATTEMPT)
        return recovered(state, candidates, claim, selector, now=now)
    if answer.outcome is ClaimOutcome.INCOMPLETE:
        # The gang stays together, so the host is the other members' too, and one of them did not fit there.
        stays = not state.spec.has_policy(GroupPolicy.AFFINITY)
        return HostSearchStep(replace(state, same_host=stays))
    if answer.outcome in LOST:
        return HostSearchStep(_state_after_loss(state, choice, answer, selector))
    return HostSearchStep(_state_after_refusal(state, answer))


def apply_recovered(state: HostSearch, consumer: ConsumerRecord, selector: Selector, *, now: float) -> HostSearchStep:
    """Apply what the instance holds already. now: wall clock."""
    if state.external is not None:
        part = external_part(state, consumer.allocations, selector)
        if (consumer.claim_owner, consumer.project_id) != (state.claim_owner, state.request.project_id) or not part:
            return HostSearchStep(state)  # the source of an evacuation, or what another call has left
        return recovered(
            state, (), RecoveredClaim(part, consumer.consumer_generation, consumer.attempt), selector, now=now
        )
    if consumer.project_id != state.request.project_id or not consumer.attempt:
        return HostSearchStep(replace(state, result=HostSearchRefused(CONSUMER_CONFLICT, FOREIGN)))
    stepped = recovered(
        state,
        (),
        RecoveredClaim(consumer.allocations, consumer.consumer_generation, consumer.attempt),
        selector,
        now=now,
    )
    result = stepped.state.result
    if isinstance(result, ClaimUnlocatable):
        return replace(stepped, state=replace(stepped.state, result=unlocatable_claim(consumer, result.reason)))
    return stepped


def _of_external(state: HostSearch, answer: ClaimResult, selector: Selector, *, now: float) -> HostSearchStep:
    """Apply what the instance of a foreign control plane holds. What this call has claimed is its host. To all else,
    as an evacuation's source or what another call has left, the next claim adds, as a stock nova-scheduler does: it may
    be on no host that this request may have.
    """
    generation = answer.consumer_generation or 0
    if answer.outcome is ClaimOutcome.CLAIMED:
        assert state.choice is not None
        candidates = (state.choice.selected, *state.choice.alternates)
        part = external_part(state, answer.allocations, selector)
        return recovered(state, candidates, RecoveredClaim(part, generation, answer.attempt), selector, now=now)
    assert state.external is not None
    return HostSearchStep(replace(state, external=replace(state.external, adds_to=generation)))


def _is_claimed_elsewhere(answer: ClaimResult) -> bool:
    """Whether another claim owner of this request holds a claim, or its cell, under a later attempt than a scheduler
    makes. An allocation of another client of placement has no attempt, unless berth had built an instance of its uuid.
    """
    return answer.outcome is ClaimOutcome.CONSUMER_CONFLICT and answer.attempt >= FIRST_ATTEMPT


def search_again_or_end(state: HostSearch, selector: Selector) -> HostSearch:
    """No candidate is left: look again, on the newest state and without what moves hold, which a pass begins with. One
    that was chosen during the pass holds something again.
    """
    is_proved = state.retried_searches > 0 and selector.assumed.next_until is None
    if not is_proved or (state.partly_used_up and state.retried_searches < MAX_PARTLY_USED_UP_RETRIES):
        # A full child does not make its host full: another scheduler may have taken the claimed child, and left an
        # equal one beside it. On the newest state the host is either a candidate again, or not.
        rejected = {uuid: reason for uuid, reason in state.rejected.items() if uuid not in state.partly_used_up}
        return replace(state, rejected=rejected, partly_used_up=(), retried_searches=state.retried_searches + 1)
    return no_valid_host(state, selector)


def no_valid_host(state: HostSearch, selector: Selector) -> HostSearch:
    """The end without a host, with the funnel that explains it."""
    explained = selector.explain(state.spec, state.rejected)
    return replace(state, result=replace(explained, claims=state.claims))


def refusal_step(state: HostSearch, code: str, reason: str) -> HostSearch:
    """The end by a refusal."""
    return replace(state, choice=None, result=HostSearchRefused(code, reason))


def _state_after_loss(state: HostSearch, choice: Choice, answer: ClaimResult, selector: Selector) -> HostSearch:
    """The claim was lost: which host may be claimed next."""
    host = choice.selected.uuid
    loss = FailedClaim(f"{selector.name_of(host)}: {answer.outcome.value}", answer.conflicting_consumers)
    state = replace(state, lost=(*state.lost, loss))
    rejected = {**state.rejected, host: f"claim.{answer.outcome.value}"}
    match answer.outcome:
        case ClaimOutcome.CONFLICT if state.conflicts < selector.config.settings.conflict_retries:
            return replace(state, conflicts=state.conflicts + 1, same_host=True)
        case ClaimOutcome.CONFLICT:
            return replace(state, conflicts=state.conflicts + 1, rejected=rejected)
        case ClaimOutcome.NO_CAPACITY if _uses_child_providers(choice.selected):
            return replace(state, rejected=rejected, partly_used_up=(*state.partly_used_up, host))
        case ClaimOutcome.POLICY_VIOLATED:
            # Another member was faster: where the group is now decides which hosts are left.
            return replace(state, rejected=rejected, spec=state.spec.with_members(answer.members))
    return replace(state, rejected=rejected)


def _state_after_refusal(state: HostSearch, answer: ClaimResult) -> HostSearch:
    """The claim can never be granted: to this project, this consumer, or at all."""
    match answer.outcome:
        case ClaimOutcome.OVER_QUOTA:
            stopped = HostSearchRefused("quota.exceeded", f"project {state.request.project_id}, {answer.reason}")
        case ClaimOutcome.CONSUMER_CONFLICT:
            was_released = answer.consumer_generation is None and not answer.reason
            reason = answer.reason or (DELETED if was_released else FOREIGN)
            stopped = HostSearchRefused(CONSUMER_CONFLICT, reason, was_deleted=was_released)
        case _:
            reason = answer.reason or "placement can never accept this claim"
            stopped = HostSearchRefused("claim.invalid", reason)
    return replace(state, result=stopped)


def _uses_child_providers(claimed: RankedHost) -> bool:
    """Whether a provider other than the host's root was to give something."""
    return any(uuid != claimed.uuid for option in claimed.options for uuid in option.allocations)

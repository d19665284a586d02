"""Chooses hosts on the replica and claims them, for all requests of a batch together, until each has a result."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Protocol

import structlog
from msgspec.structs import replace

from bus.clock import Clock
from bus.contracts.placement import Claim, ClaimAll, ClaimAllResult, ClaimOutcome, ClaimResult, LocatePage
from bus.faults import Fault
from bus.retrying import Retrying, RetryPolicy
from bus.yielding import YieldingParts, yield_to_loop
from scheduler_worker import metrics as metrics_module
from scheduler_worker.build import build_metrics
from scheduler_worker.build.claim_answer import apply_answer, apply_recovered
from scheduler_worker.build.claim_ownership import ClaimOwnership
from scheduler_worker.build.decision_round import DecisionRound
from scheduler_worker.build.gang import apply_gang_results, claimable, merged, within_bounds
from scheduler_worker.build.host_search import (
    HostClaimed,
    HostSearch,
    HostSearchRequest,
    HostSearchResult,
    build_claim,
    has_no_host,
    matches_allocation,
    new_host_search,
    result_of,
    result_of_fault,
    unlocatable_after_fault,
)
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.placement_client import ClaimPort, PlacementUnavailable
from scheduler_worker.selection.choice import CellBatching, Spread
from scheduler_worker.selection.explain import NoValidHost
from scheduler_worker.selection.request_spec import RequestSpec, has_related, joined, locate_requests, related_of
from scheduler_worker.selection.selector import Selector

log = structlog.get_logger(__name__)

CLAIM_DEADLINE_S = 20.0  # after this a delivery makes no further claim, and is retried
FIRST_JITTER_S = 0.002  # the longest wait before the second round of claims; the mean is half of it
ANSWERS_AT_ONCE = 64  # placement's answers that are carried out in one turn of the event loop

CONTENDED = (ClaimOutcome.NO_CAPACITY, ClaimOutcome.CONFLICT)  # another scheduler was faster


class ReplicaFollower(Protocol):
    """The part of the replica's follower that placing uses."""

    async def refresh(self, *, timeout_s: float) -> bool:
        """Apply the newest changes now; False: they did not come in time."""


async def await_newest(follower: ReplicaFollower, timeout_s: float) -> None:
    """Have the replica apply the newest changes. Raises PlacementUnavailable: they did not come in time, and an older
    state never proves "no host". timeout_s: as long as for any answer of placement, or "no host" might never be proved.
    """
    if not await follower.refresh(timeout_s=timeout_s):
        raise PlacementUnavailable("the newest changes of placement did not come in time")


class Placer:
    """Decides and claims for many requests at once. One per scheduler process; it may place several batches at once."""

    # Each choice is assumed in the replica, so that the next sees it. A claim is idempotent by (instance, attempt 1,
    # claim owner).

    def __init__(
        self,
        claims: ClaimPort,
        ownership: ClaimOwnership,
        selector: Selector,
        follower: ReplicaFollower,
        *,
        clock: Clock,
        rng: random.Random,
        config: SchedulerConfig,
    ) -> None:
        self._claims = claims
        self._ownership = ownership
        self._selector = selector
        self._follower = follower
        self._clock = clock
        self._rng = rng
        self._answer_s = config.claim_timeout_s
        self._claim_rounds = RetryPolicy(
            first_s=FIRST_JITTER_S,
            longest_s=config.retry_jitter_s,
            least=0.0,
            max_calls=config.claim_rounds,
            lasts_s=CLAIM_DEADLINE_S,
        )
        self._spread = Spread()
        self._batches = CellBatching(config.equal_hosts_per_cell)
        self._deciding = asyncio.Lock()  # passes in parts one after another: each sees the choices before it

    async def place(self, requests: Sequence[HostSearchRequest]) -> list[HostSearchResult]:
        """Decide and claim in rounds until each request has a result; returns the results in order."""
        states = [new_host_search(one, self._selector) for one in requests]
        states = apply_gang_results(await self._with_related(states))

        async def next_round() -> bool:
            nonlocal states
            states = await self._round(states)
            return all(state.result is not None for state in states)

        await Retrying(self._claim_rounds, self._clock, self._rng).until(next_round)
        if any(has_no_host(one) or one.recovered is not None for one in states):
            states = await self._recover(states)
        return [result_of(state) for state in states]

    async def located(self, requests: Sequence[HostSearchRequest]) -> list[RequestSpec]:
        """The spec of each request, with where the instances are that it depends on. Raises PlacementUnavailable."""
        states = await self._with_related([new_host_search(one, self._selector) for one in requests])
        for state in states:
            if state.result is not None:
                raise PlacementUnavailable(f"the peers of {state.request.instance_uuid} are not known")
        return [state.spec for state in states]

    async def has_claimed(self, claim_owner: str, instances: Sequence[str]) -> bool:
        """Whether an instance of these holds what this claim owner has claimed. Raises PlacementUnavailable,
        RequestRefused.
        """
        return any(one.claim_owner == claim_owner for one in (await self._ownership.allocations_of(instances)).values())

    async def _round(self, states: Sequence[HostSearch]) -> list[HostSearch]:
        """One round for all searches without a result: decide, claim them together, apply the answers."""
        after = list(states)
        try:
            after = await self._decide(states)
            open_ = [one for one in after if one.result is None]
            singles = [one for one in open_ if one.gang is None and one.choice is not None]
            gangs = claimable(open_)
            if singles or gangs:
                with metrics_module.measured("claim", self._clock):
                    claims = [build_claim(one) for one in singles]
                    answers = await (self._with_gangs(claims, gangs) if gangs else self._claims.submit(claims))
                    claimed = [*singles, *itertools.chain.from_iterable(gangs)]
                    now, lost = self._clock.time(), 0
                    answered: list[HostSearch] = []
                    async for part in YieldingParts(zip(claimed, answers, strict=True), ANSWERS_AT_ONCE):
                        for state, answer in part:
                            lost += isinstance(answer, ClaimResult) and answer.outcome in CONTENDED
                            stepped = apply_answer(state, answer, self._selector, now=now)
                            stepped.carry_out(self._selector)
                            answered.append(stepped.state)
                    build_metrics.count_claims(answers)
                    self._spread = self._spread.after(len(claimed), lost)
                    after = apply_gang_results(merged(after, answered))
        finally:
            # However the round ended, by cancellation too: no choice stays assumed that was not claimed.
            for state in after:
                if not isinstance(state.result, HostClaimed):
                    self._selector.drop_assumed(state.request.instance_uuid)
        for before, state in zip(states, after, strict=True):
            if isinstance(state.result, NoValidHost) and before.result is None:
                metrics_module.DECISIONS.labels("no_host").inc()
        return after

    async def _decide(self, states: Sequence[HostSearch]) -> list[HostSearch]:
        """One pass, in parts: each choice is assumed, so that the next one sees it."""
        selector = self._selector
        config = selector.config.settings  # in force: the settings, with the objects that operators have defined since
        selector.assumed.drop_confirmed()
        states = await self._with_newest(states)
        unresolved, decided = [state for state in states if state.result is None], list[HostSearch]()
        subset = self._spread.subset(config.host_subset_size)
        metrics_module.SUBSET.set(subset)
        with metrics_module.measured("decide", self._clock):
            async with self._deciding:
                if any(state.retried_searches for state in unresolved):
                    selector.assumed.release()  # a hold never proves "no host", as an older state does not
                decisions = DecisionRound(selector, self._rng, subset=subset, batching=self._batches)
                for _ in decisions.in_parts(unresolved, decided):
                    await yield_to_loop()
            build_metrics.observe_round(sum(one.choice is not None for one in decided), decisions.candidates)
            decided_at = self._clock.time()
            decided = [one if one.decided_at else replace(one, decided_at=decided_at) for one in decided]
            return apply_gang_results(merged(states, decided))

    async def _with_newest(self, states: Sequence[HostSearch]) -> Sequence[HostSearch]:
        """One round trip, shared by those that need the newest state; without it they are tried again."""
        waiting = [one for one in states if one.result is None and one.needs_refresh]
        if not waiting:
            return states
        try:
            await await_newest(self._follower, self._answer_s)
        except PlacementUnavailable as fault:
            return apply_gang_results(merged(states, [replace(one, result=fault) for one in waiting]))
        return states

    async def _with_gangs(
        self, claims: Sequence[Claim], gangs: Sequence[Sequence[HostSearch]]
    ) -> list[ClaimResult | Fault]:
        """Submit claims, and those of each gang's members together; the answers in order."""
        of_gangs = [[build_claim(one) for one in members] for members in gangs]
        answers, replies = await asyncio.gather(
            self._claims.submit(claims),
            self._claims.submit_gangs([ClaimAll(claims=within_bounds(claims)) for claims in of_gangs]),
        )
        for gang, reply in zip(of_gangs, replies, strict=True):
            answers += reply.results if isinstance(reply, ClaimAllResult) else [reply] * len(gang)
        return answers

    # --- what depends on other instances

    async def _with_related(self, states: list[HostSearch]) -> list[HostSearch]:
        """Query where the instances are that requests depend on; without an answer the request is tried again."""
        to_locate = [state for state in states if has_related(state.request)]
        if not to_locate:
            return states
        members = [None if one.external is None else one.external.group_members for one in to_locate]
        requests = [locate_requests(one.request, named or ()) for one, named in zip(to_locate, members, strict=True)]
        distinct = list(dict.fromkeys(itertools.chain.from_iterable(requests)))
        pages = dict(zip(distinct, await self._claims.locate(distinct), strict=True))
        answered: dict[str, HostSearch] = {}
        for state, asked, named in zip(to_locate, requests, members, strict=True):
            uuid = state.request.instance_uuid
            found_on: list[LocatePage] = []
            for page in (pages[one] for one in asked):
                if isinstance(page, Fault):
                    answered[uuid] = replace(state, result=result_of_fault(page))
                    break
                found_on.append(page)
            else:
                spec = state.spec.with_related(related_of(state.request, joined(found_on), named), uuid)
                answered[uuid] = replace(state, spec=spec)
        return [answered.get(state.request.instance_uuid, state) for state in states]

    async def _recover(self, states: list[HostSearch]) -> list[HostSearch]:
        """The claims that instances hold, where no claim of this pass was granted: by another scheduler, or for a
        request whose record is lost, as after a restore. They may be why there is no room.
        """
        unverified = [one for one in states if has_no_host(one) or one.recovered is not None]
        held = await self._ownership.reassign_to(
            {(one.request.instance_uuid, one.request.project_id): one.claim_owner for one in unverified}
        )
        after: list[HostSearch] = []
        for state in unverified:
            found_now = held.get(state.request.instance_uuid)
            if isinstance(found_now, Fault):
                after.append(replace(state, result=unlocatable_after_fault(found_now)))
            elif found_now is None and state.recovered is not None:
                # The claim owner that had claimed it has released it meanwhile.
                after.append(replace(state, result=PlacementUnavailable("what the instance held is released")))
            elif found_now is not None and not matches_allocation(state, found_now):
                stepped = apply_recovered(state, found_now, self._selector, now=self._clock.time())
                stepped.carry_out(self._selector)
                after.append(stepped.state)
        recovered = merged(states, after)
        for state in recovered:
            if state.recovered is not None:
                log.info("claim.recovered", instance=state.request.instance_uuid, host=state.recovered)
        return recovered

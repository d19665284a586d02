"""DECIDE and CLAIM, in rounds: a round chooses a host for each request that has none, and claims all of them together.

Decide: one pass over the replica, without a message. Each choice is assumed there, so that the next one sees it. A long
pass is made in parts, with a turn of the event loop after each.
Claim: the claims of all requests travel together. The answers step each placement; a placement without a result is
decided and claimed again, within the bounds of one delivery. A claim is idempotent by (instance, attempt 1, run).
Held: of each request that ends without a host placement is asked what its instance holds; the record of an earlier one
may be lost, and not its claim. What another run has claimed is taken over before a cell gets the build.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

import structlog
from msgspec.structs import replace

from bus.clock import Clock
from bus.contracts.placement import (
    Claim,
    ClaimAll,
    ClaimOutcome,
    ClaimResult,
)
from bus.faults import Fault
from bus.retrying import Retrying, RetryPolicy
from bus.turns import InParts, next_turn
from placement_worker.replica.request import QueryTooWide
from scheduler_worker import metrics
from scheduler_worker.claims import ClaimPort, HeldClaims, claim_gangs
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.admission import PendingBuild
from scheduler_worker.domain.decision_round import DecisionRound
from scheduler_worker.domain.gangs import claimable, merged, with_gang_results, within_bounds
from scheduler_worker.domain.placement import (
    Assume,
    Forget,
    HostClaimed,
    PlacementRequest,
    PlacementResult,
    PlacementState,
    PlacementStep,
    PlacementUnavailable,
    Settle,
    claim_of,
    initial_state,
    is_as_held,
    is_lost,
    is_without_host,
    result_after,
    result_of,
    unknown_after,
)
from scheduler_worker.domain.ranking import CellRuns, Spread
from scheduler_worker.domain.selector import NoValidHost, Selector
from scheduler_worker.domain.step import found, step
from scheduler_worker.domain.view import RequestSpec, has_peers, locate_request, peers_of

log = structlog.get_logger(__name__)

FIRST_JITTER_S = 0.002  # the longest wait before the second round of claims; the mean is half of it
ANSWERS_AT_ONCE = 64  # placement's answers that are carried out in one turn of the event loop


class ReplicaFollower(Protocol):
    """The part of the replica's follower that placing uses."""

    async def refresh(self, *, timeout_s: float) -> bool:
        """Apply the newest changes now; False: they did not come in time."""


class Placer:
    """Decides and claims for many requests at once. One per scheduler process; it may place several batches at once."""

    def __init__(
        self,
        claims: ClaimPort,
        held: HeldClaims,
        selector: Selector,
        follower: ReplicaFollower,
        *,
        clock: Clock,
        rng: random.Random,
        config: SchedulerConfig,
    ) -> None:
        self._claims = claims
        self._held = held
        self._selector = selector
        self._follower = follower
        self._clock = clock
        self._rng = rng
        self._claim_rounds = RetryPolicy(
            first_s=FIRST_JITTER_S,
            longest_s=config.retry_jitter_s,
            least=0.0,
            attempts=config.claim_rounds,
            lasts_s=config.claim_deadline_s,
        )
        self._spread = Spread()
        self._runs = CellRuns()
        self._deciding = asyncio.Lock()  # passes in parts one after another: each sees the choices before it

    @property
    def _config(self) -> SchedulerConfig:
        """The configuration in force: the settings, with the objects that operators have defined since."""
        return self._selector.config

    async def place(
        self, requests: Sequence[PlacementRequest], chosen: dict[str, PlacementState] | None = None
    ) -> list[PlacementResult]:
        """Decide and claim in rounds until each request has a result; returns the results in order. chosen: speculative
        choices, of which those of these requests are taken out.
        """
        speculative = chosen or {}
        states = [
            initial_state(one, self._selector) if ahead is None else replace(ahead, run=one.run)
            for one in requests
            for ahead in [speculative.get(one.request.instance_uuid)]
        ]
        states = with_gang_results(await self._with_peers(states))
        rounds = Retrying(self._claim_rounds, self._clock, self._rng)
        for (
            one
        ) in requests:  # from here on each round drops the choices that it does not claim; others stay the caller's
            speculative.pop(one.request.instance_uuid, None)

        async def next_round() -> bool:
            nonlocal states
            states = await self._round(states)
            return all(state.result is not None for state in states)

        await rounds.until(next_round)
        return [result_of(state) for state in await self._recover(states)]

    async def _round(self, states: Sequence[PlacementState]) -> list[PlacementState]:
        """One round for all placements without a result: decide, claim them together, apply the answers."""
        unresolved = [state for state in states if state.result is None]
        after = list(states)
        try:
            self._selector.holds.settle()
            if any(state.needs_refresh for state in unresolved):
                await self._follower.refresh(timeout_s=self._config.raced_wait_s)  # one round trip, shared
            with metrics.timed_stage("decide", self._clock):
                after = with_gang_results(merged(states, await self._decide(unresolved)))
            open_ = [one for one in after if one.result is None]
            singles = [one for one in open_ if one.gang is None and one.choice is not None]
            gangs = claimable(open_)
            if singles or gangs:
                with metrics.timed_stage("claim", self._clock):
                    after = with_gang_results(merged(after, await self._claim(singles, gangs)))
        finally:
            # However the round ended, by cancellation too: no choice stays assumed that was not claimed.
            self.drop(after)
        ended = {one.request.instance_uuid for one in unresolved}
        for state in after:
            if isinstance(state.result, NoValidHost) and state.request.instance_uuid in ended:
                metrics.DECISIONS.labels("no_host").inc()
        return after

    # --- decide

    def choose_speculatively(self, builds: Sequence[PendingBuild]) -> dict[str, PlacementState]:
        """Choices made before it is known whether the requests are new, by instance.

        A request that finds no host at once, or depends on where other instances are, is left to the rounds.
        """
        specs = [(pending, self._selector.request_spec(pending.request)) for pending in builds]
        states = {
            pending.instance_uuid: initial_state(
                PlacementRequest(request=pending.request, spec=spec, run=pending.run), self._selector
            )
            for pending, spec in specs
            if isinstance(spec, RequestSpec) and pending.gang is None and not has_peers(pending.request)
        }
        decisions, chosen = self._decision_round(), dict[str, PlacementState]()
        for uuid, state in states.items():
            with suppress(QueryTooWide):
                choice = decisions.choose(state)
                if choice.choice is not None:
                    chosen[uuid] = replace(choice, speculative=True, decided_at=self._clock.time())
        metrics.observe_round(len(chosen), decisions.candidates)
        return chosen

    async def _decide(self, states: Sequence[PlacementState]) -> list[PlacementState]:
        """One pass, in parts: each choice is assumed, so that the next one sees it."""
        decided: list[PlacementState] = []
        async with self._deciding:
            if any(state.looked_again for state in states):
                self._selector.holds.release()  # a hold never proves "no host", as an older state does not
            decisions = self._decision_round()
            for _ in decisions.in_parts(states, decided):
                await next_turn()
        pairs = zip(states, decided, strict=True)
        chosen = sum(after.choice is not None and not before.speculative for before, after in pairs)
        metrics.observe_round(chosen, decisions.candidates)
        decided_at = self._clock.time()
        return [one if one.decided_at else replace(one, decided_at=decided_at) for one in decided]

    def _decision_round(self) -> DecisionRound:
        subset = self._spread.subset(self._config.host_subset_size, self._config.max_subset_size)
        metrics.SUBSET.set(subset)
        return DecisionRound(self._selector, self._rng, subset=subset, runs=self._runs)

    def drop(self, states: Iterable[PlacementState]) -> None:
        """Forget the assumptions of choices that were not claimed."""
        for state in states:
            if not isinstance(state.result, HostClaimed):
                self._selector.book.forget(state.request.instance_uuid)

    # --- claim

    async def _claim(
        self, singles: Sequence[PlacementState], gangs: Sequence[Sequence[PlacementState]]
    ) -> list[PlacementState]:
        """Submit the claims, those of a gang together, and step each placement by its answer."""
        answers = await self._submit(singles, gangs)
        states = [*singles, *itertools.chain.from_iterable(gangs)]
        now, lost = self._clock.time(), 0
        after: list[PlacementState] = []
        async for part in InParts(zip(states, answers, strict=True), ANSWERS_AT_ONCE):
            for state, answer in part:
                metrics.count_claim(answer, retried=state.choice is not None and is_lost(answer))
                lost += isinstance(answer, ClaimResult) and answer.outcome in (ClaimOutcome.FULL, ClaimOutcome.RACED)
                stepped = step(state, answer, self._selector, now=now)
                self._carry_out(stepped)
                after.append(stepped.state)
        self._spread = self._spread.after(len(states), lost)
        return after

    async def _submit(
        self, singles: Sequence[PlacementState], gangs: Sequence[Sequence[PlacementState]]
    ) -> list[ClaimResult | Fault]:
        """Placement's answers, in order: those of the singles, then those of each gang's members."""
        claims = self._claims_of(singles)
        if not gangs:
            return await self._claims.submit(claims)
        answers, of_gangs = await asyncio.gather(
            self._claims.submit(claims), claim_gangs(self._claims, self._gang_claims(gangs))
        )
        return [*answers, *of_gangs.values()]

    def _carry_out(self, stepped: PlacementStep) -> None:
        """Carry out the replica commands that an answer leads to."""
        uuid = stepped.state.request.instance_uuid
        for command in stepped.commands:
            match command:
                case Assume():
                    self._selector.book.assume(uuid, command.allocations)
                case Settle():
                    self._selector.book.settle(uuid, command.generations, command.sequence)
                case Forget():
                    self._selector.book.forget(uuid)
        if stepped.state.recovered is not None:
            log.info("claim.recovered", instance=uuid, host=stepped.state.recovered)

    def _claims_of(self, states: Sequence[PlacementState]) -> list[Claim]:
        return [claim_of(one, self._config.quota_of(one.request.project_id)) for one in states]

    def _gang_claims(self, gangs: Sequence[Sequence[PlacementState]]) -> list[ClaimAll]:
        return [ClaimAll(claims=within_bounds(self._claims_of(members))) for members in gangs]

    # --- what depends on other instances

    async def _with_peers(self, states: list[PlacementState]) -> list[PlacementState]:
        """Query where the instances are that requests depend on; without an answer the request is tried again."""
        to_locate = [state for state in states if has_peers(state.request)]
        if not to_locate:
            return states
        requests = [locate_request(state.request) for state in to_locate]
        distinct = list(dict.fromkeys(requests))
        pages = dict(zip(distinct, await self._claims.locate(distinct), strict=True))
        answered: dict[str, PlacementState] = {}
        for state, request in zip(to_locate, requests, strict=True):
            page = pages[request]
            uuid = state.request.instance_uuid
            if isinstance(page, Fault):
                answered[uuid] = replace(state, result=result_after(page))
            else:
                spec = state.spec.with_peers(peers_of(state.request, page), uuid)
                answered[uuid] = replace(state, spec=spec)
        return [answered.get(state.request.instance_uuid, state) for state in states]

    async def _recover(self, states: list[PlacementState]) -> list[PlacementState]:
        """The claims that instances hold, where no claim of this pass was granted: by another scheduler, or for a
        request whose record is lost, as after a restore. They may be why there is no room.
        """
        unsure = [one for one in states if is_without_host(one) or one.recovered is not None]
        if not unsure:
            return states
        held = await self._held.given_to(
            {(one.request.instance_uuid, one.request.project_id): one.run for one in unsure}
        )
        after: list[PlacementState] = []
        for state in unsure:
            found_now = held.get(state.request.instance_uuid)
            if isinstance(found_now, Fault):
                after.append(replace(state, result=unknown_after(found_now)))
            elif found_now is None and state.recovered is not None:
                # The run that had claimed it has released it meanwhile.
                after.append(replace(state, result=PlacementUnavailable("what the instance held is released")))
            elif found_now is not None and not is_as_held(state, found_now):
                stepped = found(state, found_now, self._selector, now=self._clock.time())
                self._carry_out(stepped)
                after.append(stepped.state)
        return merged(states, after)

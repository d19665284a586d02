"""Decide, claim and write, for all requests of a batch together: choose hosts on the replica, claim, apply the answers
until each placement has a result, and write the decisions in one transaction, guarded by the state of the record: of
all schedulers one writes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Protocol

import structlog
from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import Outcome, RetryWhenAvailable
from bus.contracts.placement import Claim, ClaimAll, ClaimAllResult, ClaimOutcome, ClaimResult, LocatePage
from bus.contracts.stages import StageTimes
from bus.faults import Fault
from bus.persistence.outbox import OutboxMessage
from bus.retrying import Retrying, RetryPolicy
from bus.turns import YieldingParts, yield_to_loop
from scheduler_worker import metrics
from scheduler_worker.claims import ClaimOwnership, ClaimPort, belongs_to_build
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.admission import PendingBuild
from scheduler_worker.domain.builds import Actor, BuildUpdate, releases_of
from scheduler_worker.domain.decision_round import DecisionRound, apply_recovered, step
from scheduler_worker.domain.decisions import (
    Conclusion,
    DecidedBuild,
    PlacedBuild,
    add_stage_times,
    conclude,
    conclude_unplaced,
    end_at_claimed_cell,
    group_by_request,
    outbox_messages,
)
from scheduler_worker.domain.gangs import apply_gang_results, claimable, merged, within_bounds
from scheduler_worker.domain.placement import (
    HostClaimed,
    PlacementRequest,
    PlacementResult,
    PlacementState,
    PlacementUnavailable,
    build_claim,
    has_no_host,
    matches_allocation,
    new_placement_state,
    result_of,
    result_of_fault,
    unlocatable_after_fault,
    unlocatable_claim,
)
from scheduler_worker.domain.ranking import CellBatching, Spread
from scheduler_worker.domain.requests import waits
from scheduler_worker.domain.selector import NoValidHost, Selector
from scheduler_worker.domain.view import RequestSpec, has_related, joined, locate_requests, related_of
from scheduler_worker.quota import rooms_of
from scheduler_worker.store.port import SchedulerStore, write_decided

log = structlog.get_logger(__name__)

CLAIM_DEADLINE_S = 20.0  # after this a delivery makes no further claim, and is retried
NEWEST_WAIT_S = 0.25  # how long the newest changes of the replica are waited for
FIRST_JITTER_S = 0.002  # the longest wait before the second round of claims; the mean is half of it
ANSWERS_AT_ONCE = 64  # placement's answers that are carried out in one turn of the event loop
# Requests that are recorded, prepared or concluded in one turn of the event loop, each a build or a gang.
BUILDS_AT_ONCE = 64
CONTENDED = (ClaimOutcome.NO_CAPACITY, ClaimOutcome.CONFLICT)  # another scheduler was faster
# The transaction of a record does not wait for the disk, and the database has crashed since: record and decide again.
RECORD_LOST = RetryWhenAvailable("request.record_lost", "it is not on record any more")


class ReplicaFollower(Protocol):
    """The part of the replica's follower that placing uses."""

    async def refresh(self, *, timeout_s: float) -> bool:
        """Apply the newest changes now; False: they did not come in time."""


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
        self._claim_rounds = RetryPolicy(
            first_s=FIRST_JITTER_S,
            longest_s=config.retry_jitter_s,
            least=0.0,
            attempts=config.claim_rounds,
            lasts_s=CLAIM_DEADLINE_S,
        )
        self._spread = Spread()
        self._batches = CellBatching()
        self._deciding = asyncio.Lock()  # passes in parts one after another: each sees the choices before it

    async def place(self, requests: Sequence[PlacementRequest]) -> list[PlacementResult]:
        """Decide and claim in rounds until each request has a result; returns the results in order."""
        states = [new_placement_state(one, self._selector) for one in requests]
        states = apply_gang_results(await self._with_related(states))

        async def next_round() -> bool:
            nonlocal states
            states = await self._round(states)
            return all(state.result is not None for state in states)

        await Retrying(self._claim_rounds, self._clock, self._rng).until(next_round)
        if any(has_no_host(one) or one.recovered is not None for one in states):
            states = await self._recover(states)
        return [result_of(state) for state in states]

    async def located(self, requests: Sequence[PlacementRequest]) -> list[RequestSpec]:
        """The spec of each request, with where the instances are that it depends on. Raises PlacementUnavailable."""
        states = await self._with_related([new_placement_state(one, self._selector) for one in requests])
        for state in states:
            if state.result is not None:
                raise PlacementUnavailable(f"the peers of {state.request.instance_uuid} are not known")
        return [state.spec for state in states]

    async def has_claimed(self, claim_owner: str, instances: Sequence[str]) -> bool:
        """Whether an instance of these holds what this claim owner has claimed. Raises PlacementUnavailable,
        RequestRefused.
        """
        return any(one.claim_owner == claim_owner for one in (await self._ownership.allocations_of(instances)).values())

    async def _round(self, states: Sequence[PlacementState]) -> list[PlacementState]:
        """One round for all placements without a result: decide, claim them together, apply the answers."""
        after = list(states)
        try:
            after = await self._decide(states)
            open_ = [one for one in after if one.result is None]
            singles = [one for one in open_ if one.gang is None and one.choice is not None]
            gangs = claimable(open_)
            if singles or gangs:
                with metrics.measured("claim", self._clock):
                    claims = [build_claim(one) for one in singles]
                    answers = await (self._with_gangs(claims, gangs) if gangs else self._claims.submit(claims))
                    claimed = [*singles, *itertools.chain.from_iterable(gangs)]
                    now, lost = self._clock.time(), 0
                    answered: list[PlacementState] = []
                    async for part in YieldingParts(zip(claimed, answers, strict=True), ANSWERS_AT_ONCE):
                        for state, answer in part:
                            lost += isinstance(answer, ClaimResult) and answer.outcome in CONTENDED
                            stepped = step(state, answer, self._selector, now=now)
                            stepped.carry_out(self._selector.replica)
                            answered.append(stepped.state)
                    metrics.count_claims(answers)
                    self._spread = self._spread.after(len(claimed), lost)
                    after = apply_gang_results(merged(after, answered))
        finally:
            # However the round ended, by cancellation too: no choice stays assumed that was not claimed.
            for state in after:
                if not isinstance(state.result, HostClaimed):
                    self._selector.replica.drop_assumed(state.request.instance_uuid)
        for before, state in zip(states, after, strict=True):
            if isinstance(state.result, NoValidHost) and before.result is None:
                metrics.DECISIONS.labels("no_host").inc()
        return after

    async def _decide(self, states: Sequence[PlacementState]) -> list[PlacementState]:
        """One pass, in parts: each choice is assumed, so that the next one sees it."""
        unresolved, decided = [state for state in states if state.result is None], list[PlacementState]()
        selector = self._selector
        config = selector.config  # in force: the settings, with the objects that operators have defined since
        selector.assumed.drop_confirmed()
        if any(state.needs_refresh for state in unresolved):
            await self._follower.refresh(timeout_s=NEWEST_WAIT_S)  # one round trip, shared
        subset = self._spread.subset(config.host_subset_size)
        metrics.SUBSET.set(subset)
        with metrics.measured("decide", self._clock):
            async with self._deciding:
                if any(state.retried_searches for state in unresolved):
                    selector.assumed.release()  # a hold never proves "no host", as an older state does not
                decisions = DecisionRound(selector, self._rng, subset=subset, batching=self._batches)
                for _ in decisions.in_parts(unresolved, decided):
                    await yield_to_loop()
            metrics.observe_round(sum(one.choice is not None for one in decided), decisions.candidates)
            decided_at = self._clock.time()
            decided = [one if one.decided_at else replace(one, decided_at=decided_at) for one in decided]
            return apply_gang_results(merged(states, decided))

    async def _with_gangs(
        self, claims: Sequence[Claim], gangs: Sequence[Sequence[PlacementState]]
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

    async def _with_related(self, states: list[PlacementState]) -> list[PlacementState]:
        """Query where the instances are that requests depend on; without an answer the request is tried again."""
        to_locate = [state for state in states if has_related(state.request)]
        if not to_locate:
            return states
        members = [None if one.external is None else one.external.group_members for one in to_locate]
        requests = [locate_requests(one.request, named or ()) for one, named in zip(to_locate, members, strict=True)]
        distinct = list(dict.fromkeys(itertools.chain.from_iterable(requests)))
        pages = dict(zip(distinct, await self._claims.locate(distinct), strict=True))
        answered: dict[str, PlacementState] = {}
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

    async def _recover(self, states: list[PlacementState]) -> list[PlacementState]:
        """The claims that instances hold, where no claim of this pass was granted: by another scheduler, or for a
        request whose record is lost, as after a restore. They may be why there is no room.
        """
        unverified = [one for one in states if has_no_host(one) or one.recovered is not None]
        held = await self._ownership.reassign_to(
            {(one.request.instance_uuid, one.request.project_id): one.claim_owner for one in unverified}
        )
        after: list[PlacementState] = []
        for state in unverified:
            found_now = held.get(state.request.instance_uuid)
            if isinstance(found_now, Fault):
                after.append(replace(state, result=unlocatable_after_fault(found_now)))
            elif found_now is None and state.recovered is not None:
                # The claim owner that had claimed it has released it meanwhile.
                after.append(replace(state, result=PlacementUnavailable("what the instance held is released")))
            elif found_now is not None and not matches_allocation(state, found_now):
                stepped = apply_recovered(state, found_now, self._selector, now=self._clock.time())
                stepped.carry_out(self._selector.replica)
                after.append(stepped.state)
        recovered = merged(states, after)
        for state in recovered:
            if state.recovered is not None:
                log.info("claim.recovered", instance=state.request.instance_uuid, host=state.recovered)
        return recovered


class Dispatcher:
    """Decides about builds that are on record, and writes the decisions. One per scheduler process."""

    # Of each request that ends without a host placement is asked what its instance holds: the record of an earlier one
    # may be lost, and not its claim. What another claim owner has claimed is taken over before a cell gets the build.

    def __init__(
        self,
        store: SchedulerStore,
        ownership: ClaimOwnership,
        placer: Placer,
        selector: Selector,
        *,
        clock: Clock,
        process: str,
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._placer = placer
        self._selector = selector
        self._clock = clock
        self._who = process

    async def dispatch(self, builds: Sequence[PendingBuild]) -> dict[int, Outcome]:
        """Decide, claim and write builds: the outcomes by batch index."""
        placing, concluded = await self._prepare(builds)
        results = await self._placer.place([request for _, request in placing])
        placed = [PlacedBuild(*pair, result) for pair, result in zip(placing, results, strict=True)]
        async for requests in YieldingParts(group_by_request(placed), BUILDS_AT_ONCE):
            actor = Actor(self._who, self._clock.time())
            for members in requests:
                concluded += conclude(members, actor)
        outcomes = {pending.batch_index: end for pending, end in concluded if not isinstance(end, DecidedBuild)}
        decided = [end for _, end in concluded if isinstance(end, DecidedBuild)]
        if not decided:
            return outcomes
        now, stages = self._clock.time(), dict[str, StageTimes]()
        writes: list[tuple[BuildUpdate, Sequence[OutboxMessage]]] = []
        async for part in YieldingParts(decided, BUILDS_AT_ONCE):
            for one in part:
                stage_times = stages[one.decision.build.instance_uuid] = one.pending.stage_times(one.claimed, now)
                decision = add_stage_times(one.decision, stage_times) if one.decision.build.terminal else one.decision
                writes.append((decision, outbox_messages(one, decision, now, stage_times, self._selector.config)))
        with metrics.measured("write", self._clock):
            written = await write_decided(self._store, writes, now)
        metrics.observe_decisions([stages[uuid] for uuid in written])
        metrics.count_ended(one.decision.build for one in decided if one.pending.instance_uuid in written)
        unwritten = {uuid: one.pending for one in decided if (uuid := one.pending.instance_uuid) not in written}
        lost = await self._withdraw(unwritten) if unwritten else set()
        for one in decided:
            build = one.decision.build
            uuid = build.instance_uuid
            outcomes[one.pending.batch_index] = RECORD_LOST if uuid in lost else one.pending.accepted
            if build.terminal and uuid in written:
                log.info("build.failed", instance=uuid, cause=uuid, code=build.code, reason=build.reason)
        return outcomes

    async def _prepare(
        self, builds: Sequence[PendingBuild]
    ) -> tuple[list[tuple[PendingBuild, PlacementRequest]], list[tuple[PendingBuild, Conclusion]]]:
        """The builds to place, and the conclusions about the others."""
        actor = Actor(self._who, self._clock.time())
        placing: list[tuple[PendingBuild, PlacementRequest]] = []
        concluded: list[tuple[PendingBuild, Conclusion]] = []
        limits = await rooms_of(self._store, self._selector, {one.request.project_id for one in builds})
        async for some in YieldingParts(builds, BUILDS_AT_ONCE):
            for pending in some:
                spec = self._selector.request_spec(pending.request) if pending.delivery.refusal is None else None
                if isinstance(spec, RequestSpec):
                    request = PlacementRequest(
                        request=pending.request,
                        spec=spec,
                        claim_owner=pending.claim_owner,
                        limits=limits[pending.request.project_id],
                        gang=pending.gang,
                    )
                    placing.append((pending, request))
                else:
                    concluded.append((pending, conclude_unplaced(pending, spec, self._selector, actor)))
        return placing, await self._end_at_claimed_cell(concluded) if concluded else []

    async def _end_at_claimed_cell(
        self, concluded: Sequence[tuple[PendingBuild, Conclusion]]
    ) -> list[tuple[PendingBuild, Conclusion]]:
        """The conclusions about builds that are not placed, where a claim is held: its cell is queried, and ends it."""
        ended = {one.instance_uuid: (one, end) for one, end in concluded if isinstance(end, DecidedBuild)}
        if not ended:
            return list(concluded)
        held = await self._ownership.reassign_to(
            {(uuid, one.request.project_id): one.claim_owner for uuid, (one, _) in ended.items()}
        )
        actor = Actor(self._who, self._clock.time())
        queried: dict[str, Conclusion] = {}
        for uuid, one in held.items():
            pending, end = ended[uuid]
            result = (
                unlocatable_after_fault(one)
                if isinstance(one, Fault)
                else unlocatable_claim(one, end.decision.build.reason)
            )
            if isinstance(result, PlacementUnavailable):
                queried[uuid] = waits(result)
            elif isinstance(one, Fault) or belongs_to_build((uuid, pending.request.project_id), one):
                queried[uuid] = end_at_claimed_cell(pending, result, actor)
        return [(one, queried.get(one.instance_uuid, end)) for one, end in concluded]

    async def _withdraw(self, builds: Mapping[str, PendingBuild]) -> set[str]:
        """Release the claims for builds, by instance, that another scheduler or a delete has ended meanwhile, by this
        decision's claim owner: where the record has another, nothing was dispatched for this one. Returns those whose
        record is gone, or waits.
        """
        # A record of another claim owner that is not decided yet takes the claim first: it may have read that its
        # instance holds nothing before this owner claimed, and its end releases what it has.
        async with self._store.unit() as unit:
            records = list((await unit.read(list(builds))).values())
        open_owners = {
            (one.instance_uuid, one.project_id): one.claim_owner
            for one in records
            if one.awaits_decision and one.claim_owner != builds[one.instance_uuid].claim_owner
        }
        given = await self._ownership.reassign_to(open_owners)
        async with self._store.unit() as unit:
            known = await unit.read(list(builds))
            for uuid, one in known.items():
                for message in releases_of(one, builds[uuid].claim_owner, builds[uuid].new_claim_owner):
                    unit.emit(message)
        waits = {uuid for uuid, one in given.items() if isinstance(one, Fault)}
        return (builds.keys() - known.keys()) | waits

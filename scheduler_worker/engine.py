"""How build requests are scheduled, a whole batch at once: record, decide, claim, write. Each step is safe to repeat.

1. Record: the request goes on record, and a repeated one is recognised there. A few requests choose their hosts
   meanwhile; so far that choice is an assumption of this process alone: it is speculative.
2. Decide: one pass over the replica chooses a host for each request that has none; no message is sent for it.
3. Claim: the claims of all requests travel together. The answers step each placement; one without a result is decided
   and claimed again, round after round, within the bounds of one delivery. A claim is idempotent.
4. Write: one transaction writes the decisions, maps the instances to their cells and keeps the messages to publish.
   It is guarded by the record's state: of all schedulers that process a request, one writes and the others do not.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import structlog
from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Retry
from bus.contracts.base import Refusal
from bus.contracts.build import DeleteRequest
from bus.contracts.catalogue import BY_QUEUE
from bus.contracts.placement import Claim, ClaimAll, ClaimOutcome, ClaimResult
from bus.contracts.stages import Stamps
from bus.faults import Fault
from bus.persistence.unit_of_work import run_optimistic
from bus.retrying import Retrying, RetryPolicy
from placement_worker.replica.request import QueryTooWide
from scheduler_worker import metrics
from scheduler_worker.cancellations import Cancellations
from scheduler_worker.claims import ClaimPort, claim_gangs
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.builds import Author, BuildStatus
from scheduler_worker.domain.decision_round import DecisionRound
from scheduler_worker.domain.decisions import (
    decision,
    given_up,
    may_hold_claim,
    messages_of,
    retry_of,
    to_clients,
    unsatisfiable,
    with_stages,
)
from scheduler_worker.domain.deletes import PendingDelete
from scheduler_worker.domain.flavors import HOST_UNKNOWN
from scheduler_worker.domain.gangs import (
    by_gang,
    claimable,
    is_clash_of_first,
    merged,
    with_gang_results,
    withdrawn_by_gang,
    without_withdrawn,
)
from scheduler_worker.domain.peers import has_peers, locate_request, peers_of
from scheduler_worker.domain.pending import (
    Admission,
    PendingBuild,
    accepted,
    admit_known,
    admit_new,
    admit_repeated,
    admit_without_first,
    first_event,
    new_build,
    stamps_of,
)
from scheduler_worker.domain.placed import PlacedBuild, ScheduledBuild
from scheduler_worker.domain.placement import (
    CONSUMER_CHANGED,
    Assume,
    ClaimsContended,
    Forget,
    GangIncomplete,
    HostClaimed,
    PlacementRequest,
    PlacementResult,
    PlacementState,
    PlacementUnavailable,
    Settle,
    claim_of,
    initial_state,
    is_lost,
    unavailable_after,
)
from scheduler_worker.domain.request_spec import RequestSpec, Unsatisfiable
from scheduler_worker.domain.selector import NoValidHost, Selector
from scheduler_worker.domain.spread import Spread
from scheduler_worker.domain.step import probed, step, with_probe
from scheduler_worker.store.port import BuildUnit, SchedulerStore

log = structlog.get_logger(__name__)

RETRIES = len(BY_QUEUE["scheduler.requests"].retry_s)
# Requests whose processing has not ended, as far as this process knows; those whose handler crashed stay among them.
MAX_IN_PROGRESS = 10_000
# The largest batch that chooses its hosts while it is recorded; choosing for more takes longer than recording.
MAX_SPECULATIVE = 16
FIRST_JITTER_S = 0.002  # the longest wait before the second round of claims; the mean is half of it
HOSTS_UNKNOWN = Retry("hosts.unknown", "not every host has been announced yet")


class ReplicaFollower(Protocol):
    """What the engine needs of the replica's follower."""

    async def refresh(self, *, timeout_s: float) -> bool:
        """Apply the newest changes now; False: they did not come in time."""


class SchedulingEngine:
    """Schedules batches of requests. One per scheduler process; several batches may be in it at once."""

    def __init__(
        self,
        store: SchedulerStore,
        claims: ClaimPort,
        selector: Selector,
        follower: ReplicaFollower,
        *,
        clock: Clock,
        rng: random.Random,
        config: SchedulerConfig,
        process: str = "",
    ) -> None:
        self._store = store
        self._claims = claims
        self._selector = selector
        self._follower = follower
        self._clock = clock
        self._rng = rng
        self._who = process or "scheduler"
        self._cancellations = Cancellations(store, claims, clock=clock, process=self._who)
        self._claim_rounds = RetryPolicy(
            first_s=FIRST_JITTER_S,
            longest_s=config.retry_jitter_s,
            least=0.0,
            attempts=config.claim_rounds,
            lasts_s=config.claim_deadline_s,
        )
        self._spread = Spread()
        self._started_s: float | None = None  # monotonic, of the first batch: there is no event loop before
        self._in_progress: dict[str, None] = {}  # ... by instance, in the order in which they came

    @property
    def _config(self) -> SchedulerConfig:
        """The configuration in force: the settings, with what operators have defined since."""
        return self._selector.config

    async def process(self, builds: Sequence[PendingBuild], deletes: Sequence[PendingDelete]) -> dict[int, Outcome]:
        """Schedule and delete; the outcomes by position. A delete in the batch is in time to stop its build."""
        if self._started_s is None:
            self._started_s = self._clock.monotonic()
        outcomes: dict[int, Outcome] = {}
        chosen: dict[str, PlacementState] = {}  # by instance, assumed in the replica and not claimed yet
        try:
            admissions = await self._record(builds, chosen, speculate=not deletes)
            deleted: set[str] = set()
            if deletes:
                of_deletes, deleted = await self._cancellations.delete(deletes)
                outcomes |= of_deletes
            to_cancel: list[PendingBuild] = []
            to_place: list[tuple[PendingBuild, bool]] = []
            withdrawn = withdrawn_by_gang(builds, admissions, deleted)
            for pending, admission in zip(builds, admissions, strict=True):
                if admission.outcome is not None:
                    outcomes[pending.position] = admission.outcome
                elif admission.cancelled or pending.instance_uuid in deleted:
                    to_cancel.append(pending)
                else:
                    to_place.append((without_withdrawn(pending, withdrawn), admission.first_run))
            outcomes |= await self._cancellations.cancel(to_cancel)
            outcomes |= await self._schedule(to_place, chosen)
        finally:
            self._drop(chosen.values())
        for pending in builds:
            self._in_progress.pop(pending.instance_uuid, None)
        return outcomes

    async def end_deletes(self, deletes: Sequence[tuple[DeleteRequest, Refusal]]) -> None:
        """Publish the end of deletes that their queue has given up and that nothing has carried out."""
        await self._cancellations.refuse(deletes)

    # --- record

    async def _record(
        self, builds: Sequence[PendingBuild], chosen: dict[str, PlacementState], *, speculate: bool
    ) -> Sequence[Admission]:
        """Put requests on record. speculate: a small batch chooses its hosts meanwhile, into `chosen`."""
        if not builds:
            return ()
        started_s = self._clock.monotonic()
        all_new = not any(pending.refusal or self._may_have_run(pending) for pending in builds)
        if speculate and all_new and len(builds) <= MAX_SPECULATIVE:
            recording = asyncio.create_task(self._insert(builds))
            try:
                await asyncio.sleep(0)  # the statement is sent
                chosen |= self._choose_speculatively(builds)
                admissions = await recording
            except BaseException:
                self._drop(chosen.values())
                recording.cancel()
                await asyncio.gather(recording, return_exceptions=True)
                raise
            for pending, admission in zip(builds, admissions, strict=True):
                if admission.outcome is not None or not admission.first_run:
                    self._drop([chosen.pop(pending.instance_uuid)] if pending.instance_uuid in chosen else [])
        else:
            admissions = await self._insert(builds)
        metrics.STAGE_S.labels("record").observe(self._clock.monotonic() - started_s)
        return admissions

    async def _insert(self, builds: Sequence[PendingBuild]) -> list[Admission]:
        """Insert the new requests and separate repeated ones from clashes: one statement each for the whole batch."""
        now = self._clock.time()
        firsts: dict[str, PendingBuild] = {}
        for pending in builds:
            firsts.setdefault(pending.instance_uuid, pending)

        async def record(unit: BuildUnit) -> list[Admission]:
            author = Author(self._who, now)
            new, known = set[str](), dict[str, BuildStatus]()
            for later in (False, True):  # the record of a gang's first member stands for the whole request
                part = {
                    uuid: pending
                    for uuid, pending in firsts.items()
                    if pending.is_later_member is later and not (later and is_clash_of_first(pending, firsts, known))
                }
                new |= await unit.insert([new_build(pending, author) for pending in part.values()], now)
                known |= await unit.read([uuid for uuid in part if uuid not in new])
            for uuid, pending in firsts.items():
                if uuid in new:
                    unit.emit(to_clients(first_event(pending, now)))
            found = [self._admit(pending, firsts, new, known) for pending in builds]
            for admission in found:
                if admission.event is not None:
                    unit.emit(to_clients(admission.event))
            return found

        # Not durable: until a decision is on disk, the unacknowledged message itself survives a crash.
        admissions = await run_optimistic(
            lambda optimistic: self._store.unit(durable=False, optimistic=optimistic), record
        )
        for admission in admissions:
            metrics.count_requests("build", admission.label)
        self._in_progress.update(dict.fromkeys(firsts))
        for oldest in list(itertools.islice(self._in_progress, max(0, len(self._in_progress) - MAX_IN_PROGRESS))):
            del self._in_progress[oldest]
        if any(isinstance(admission.outcome, Done) for admission in admissions):
            await self._store.flush()  # the record acknowledges those, and nothing more is written
        await self._cancellations.release(
            [pending for pending, one in zip(builds, admissions, strict=True) if one.release]
        )
        return admissions

    def _admit(
        self,
        pending: PendingBuild,
        firsts: Mapping[str, PendingBuild],
        new: Collection[str],
        known: Mapping[str, BuildStatus],
    ) -> Admission:
        uuid, first = pending.instance_uuid, firsts[pending.instance_uuid]
        if pending.is_later_member and is_clash_of_first(pending, firsts, known):
            return admit_without_first(pending)
        if first is not pending:
            return admit_repeated(pending, first)
        if uuid in new:
            # The record of an earlier run may be lost, but not its claim: they may be in two databases.
            return admit_new(pending, first_run=not self._may_have_run(pending))
        return admit_known(pending, known.get(uuid))

    def _may_have_run(self, pending: PendingBuild) -> bool:
        """Whether an earlier delivery may have come as far as its claim, here or in another scheduler."""
        return pending.redelivered or pending.instance_uuid in self._in_progress

    # --- decide

    def _choose_speculatively(self, builds: Sequence[PendingBuild]) -> dict[str, PlacementState]:
        """Choices made before it is known whether the requests are new, by instance.

        A request that finds no host at once, or depends on where others are, is left to the rounds.
        """
        started_s = self._clock.monotonic()
        specs = [(pending, self._selector.request_spec(pending.request)) for pending in builds]
        states = {
            pending.instance_uuid: initial_state(PlacementRequest(request=pending.request, spec=spec), self._selector)
            for pending, spec in specs
            if isinstance(spec, RequestSpec) and pending.gang is None and not has_peers(pending.request)
        }
        decisions, chosen = self._decision_round(), dict[str, PlacementState]()
        for uuid, state in states.items():
            with suppress(QueryTooWide):
                choice = decisions.choose(state)
                if choice.choice is not None:
                    chosen[uuid] = replace(choice, speculative=True, decided_at=self._clock.time())
        metrics.observe_round(len(chosen), decisions.rankings.values())
        metrics.STAGE_S.labels("decide").observe(self._clock.monotonic() - started_s)
        return chosen

    def _decide(self, states: Sequence[PlacementState]) -> list[PlacementState]:
        """One synchronous pass: each choice is assumed, so that the next one sees it."""
        started_s = self._clock.monotonic()
        decisions = self._decision_round()
        decided = [
            after
            for members in by_gang(states)
            for after in (map(decisions.decide, members) if members[0].gang is None else decisions.decide_gang(members))
        ]
        pairs = zip(states, decided, strict=True)
        chosen = sum(after.choice is not None and not before.speculative for before, after in pairs)
        metrics.observe_round(chosen, decisions.rankings.values())
        ended_s, decided_at = self._clock.monotonic(), self._clock.time()
        metrics.STAGE_S.labels("decide").observe(ended_s - started_s)
        return [one if one.decided_at else replace(one, decided_at=decided_at) for one in decided]

    def _decision_round(self) -> DecisionRound:
        subset = self._spread.subset(self._config.host_subset_size, self._config.max_subset_size)
        metrics.SUBSET.set(subset)
        return DecisionRound(self._selector, self._rng, subset=subset)

    def _drop(self, states: Iterable[PlacementState]) -> None:
        """Forget the assumptions of choices that were not claimed."""
        for state in states:
            if not isinstance(state.result, HostClaimed):
                self._selector.book.forget(state.request.instance_uuid)

    # --- claim

    async def place(
        self, requests: Sequence[PlacementRequest], chosen: dict[str, PlacementState] | None = None
    ) -> list[PlacementResult]:
        """Decide and claim in rounds until each request has a result; in their order. chosen: speculative choices."""
        speculative = chosen or {}
        states = [speculative.get(one.request.instance_uuid) or initial_state(one, self._selector) for one in requests]
        states = with_gang_results(await self._recover_gangs(await self._with_peers(states)))
        rounds = Retrying(self._claim_rounds, self._clock, self._rng)
        speculative.clear()  # from here on each round drops what it does not claim

        async def next_round() -> bool:
            nonlocal states
            states = await self._round(states)
            return all(state.result is not None for state in states)

        await rounds.until(next_round)
        return [state.result or ClaimsContended(state.claims) for state in states]

    async def _with_peers(self, states: list[PlacementState]) -> list[PlacementState]:
        """Ask where the instances are that requests depend on; without an answer the request is tried again."""
        to_locate = [state for state in states if has_peers(state.request)]
        if not to_locate:
            return states
        requests = [locate_request(state.request, first_run=state.first_run) for state in to_locate]
        distinct = list(dict.fromkeys(requests))
        pages = dict(zip(distinct, await self._claims.locate(distinct), strict=True))
        answered: dict[str, PlacementState] = {}
        for state, request in zip(to_locate, requests, strict=True):
            page = pages[request]
            uuid = state.request.instance_uuid
            if isinstance(page, Fault):
                answered[uuid] = replace(state, result=unavailable_after(page))
            else:
                spec = state.spec.with_peers(peers_of(state.request, page), uuid)
                answered[uuid] = replace(state, spec=spec)
        return [answered.get(state.request.instance_uuid, state) for state in states]

    async def _round(self, states: Sequence[PlacementState]) -> list[PlacementState]:
        """One round for all placements without a result: decide, claim them together, apply the answers."""
        unresolved = [state for state in states if state.result is None]
        after = list(states)
        try:
            if any(state.needs_refresh for state in unresolved):
                await self._follower.refresh(timeout_s=self._config.raced_wait_s)  # one round trip, shared
            after = with_gang_results(merged(states, self._decide(unresolved)))
            open_ = [one for one in after if one.result is None]
            singles = [one for one in open_ if one.gang is None and one.has_claim_to_submit]
            gangs = claimable(open_)
            if singles or gangs:
                after = with_gang_results(merged(after, await self._claim(singles, gangs)))
        finally:
            # Whatever ended the round, a cancelled process too: nothing stays assumed that was not claimed.
            self._drop(after)
        ended = {one.request.instance_uuid for one in unresolved}
        for state in after:
            if isinstance(state.result, NoValidHost) and state.request.instance_uuid in ended:
                metrics.DECISIONS.labels("no_host").inc()
        return after

    async def _recover_gangs(self, states: list[PlacementState]) -> list[PlacementState]:
        """What an earlier run may have claimed for a gang is found before its members choose: all of it at once."""
        again = [one for one in states if one.gang is not None and not one.first_run and one.result is None]
        probing = [one for one in (with_probe(one, self._selector) for one in again) if one.probe is not None]
        if not probing:
            return states
        answers = await claim_gangs(self._claims, self._gang_claims(by_gang(replace(a, choice=None) for a in probing)))
        now = self._clock.time()
        return merged(
            states,
            [probed(one, answers[one.request.instance_uuid], self._selector, now=now).state for one in probing],
        )

    def _claims_of(self, states: Sequence[PlacementState]) -> list[Claim]:
        return [claim_of(one, self._config.quota_of(one.request.project_id)) for one in states]

    def _gang_claims(self, gangs: Sequence[Sequence[PlacementState]]) -> list[ClaimAll]:
        return [ClaimAll(claims=tuple(self._claims_of(members))) for members in gangs]

    async def _claim(
        self, singles: Sequence[PlacementState], gangs: Sequence[Sequence[PlacementState]]
    ) -> list[PlacementState]:
        """Submit the claims, those of a gang together, and step each placement by its answer."""
        started_s = self._clock.monotonic()
        claims = self._claims_of(singles)
        if gangs:
            answers, of_gangs = await asyncio.gather(
                self._claims.submit(claims), claim_gangs(self._claims, self._gang_claims(gangs))
            )
        else:
            answers, of_gangs = await self._claims.submit(claims), {}
        states = [*singles, *itertools.chain.from_iterable(gangs)]
        now, lost = self._clock.time(), 0
        after: list[PlacementState] = []
        for state, answer in zip(states, [*answers, *of_gangs.values()], strict=True):
            metrics.count_claim(answer, retried=state.choice is not None and is_lost(answer))
            lost += isinstance(answer, ClaimResult) and answer.outcome in (ClaimOutcome.FULL, ClaimOutcome.RACED)
            stepped = step(state, answer, self._selector, now=now)
            uuid = state.request.instance_uuid
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
            after.append(stepped.state)
        self._spread = self._spread.after(len(states), lost)
        metrics.STAGE_S.labels("claim").observe(self._clock.monotonic() - started_s)
        return after

    # --- write

    async def _schedule(
        self, builds: Sequence[tuple[PendingBuild, bool]], chosen: dict[str, PlacementState]
    ) -> dict[int, Outcome]:
        """Decide, claim and write builds; each comes with whether nothing can be claimed for it yet (`first_run`)."""
        if not builds:
            return {}
        author = self._author()
        outcomes: dict[int, Outcome] = {}
        scheduled: list[ScheduledBuild] = []
        placing: list[tuple[PendingBuild, PlacementRequest]] = []
        for pending, first_run in builds:
            match self._prepare(pending, chosen.get(pending.instance_uuid), author, first_run=first_run):
                case PlacementRequest() as request:
                    placing.append((pending, request))
                case ScheduledBuild() as failed:
                    scheduled.append(failed)
                case outcome:
                    outcomes[pending.position] = outcome
        results = await self.place([request for _, request in placing], chosen)
        placed = [PlacedBuild(*pair, result) for pair, result in zip(placing, results, strict=True)]
        author = self._author()
        unavailable: PlacementUnavailable | None = None
        for _, grouped in itertools.groupby(placed, key=lambda one: one.pending.gang or one.pending.instance_uuid):
            members = list(grouped)
            missing = next((one.result for one in members if isinstance(one.result, PlacementUnavailable)), None)
            if missing is not None:
                unavailable = missing
                continue
            for pending, concluded in self._conclude(members, author):
                match concluded:
                    case ScheduledBuild() as decided:
                        scheduled.append(decided)
                    case outcome:
                        outcomes[pending.position] = outcome
        outcomes |= await self._write(scheduled)
        if unavailable is not None:
            # After what was decided is written: called again with the same batch, those are repeated requests.
            raise unavailable
        return outcomes

    def _prepare(
        self, pending: PendingBuild, ahead: PlacementState | None, author: Author, *, first_run: bool
    ) -> PlacementRequest | ScheduledBuild | Outcome:
        """What to place for a build; or the end of one that cannot be placed. ahead: a choice made while recording."""
        if pending.given_up is not None:  # an earlier delivery may have claimed for it, and ended its process
            failed = given_up(pending.request, pending.given_up, author)
            return ScheduledBuild(pending=pending, decision=failed, may_hold_claim=True)
        spec = self._selector.request_spec(pending.request) if ahead is None else ahead.spec
        if isinstance(spec, RequestSpec):
            return PlacementRequest(request=pending.request, spec=spec, first_run=first_run, gang=pending.gang)
        if spec.code == HOST_UNKNOWN and self._is_warming_up(pending):
            return HOSTS_UNKNOWN
        return self._unsatisfiable(pending, spec, author, first_run=first_run)

    def _conclude(
        self, placed: Sequence[PlacedBuild], author: Author
    ) -> list[tuple[PendingBuild, ScheduledBuild | Outcome]]:
        """What follows for a build, or for all members of a gang: decisions to write, or the outcome of a retry."""
        gang = placed[0].pending.gang
        started = sum(isinstance(one.result, HostClaimed) for one in placed)
        is_short = started < (1 if gang is None else gang.min_count)
        retry = next((retry for one in placed if (retry := self._retry_of(one)) is not None), None)
        if is_short and retry is not None:
            return [(one.pending, retry) for one in placed]
        concluded: list[tuple[PendingBuild, ScheduledBuild | Outcome]] = []
        for one in placed:
            result = one.result
            if gang is not None and is_short and isinstance(result, HostClaimed):
                result = GangIncomplete(gang, started, result.claims)
            concluded.append((one.pending, self._decided(one, result, author)))
        return concluded

    def _retry_of(self, placed: PlacedBuild) -> Retry | None:
        """How a placement is tried again with its request; None: its result is final."""
        result, pending = placed.result, placed.pending
        if isinstance(result, NoValidHost) and result.may_be_early and self._is_warming_up(pending):
            return HOSTS_UNKNOWN
        return retry_of(result) if pending.delivery < RETRIES else None

    def _decided(self, placed: PlacedBuild, result: PlacementResult, author: Author) -> ScheduledBuild:
        """The decision to write of a placement's result."""
        request = placed.request
        nearest = self._config.max_funnel_nearest
        return ScheduledBuild(
            pending=placed.pending,
            decision=decision(request.request, request.spec, result, author, nearest=nearest),
            claimed=result if isinstance(result, HostClaimed) else None,
            may_hold_claim=not request.first_run or may_hold_claim(result),
        )

    def _unsatisfiable(
        self, pending: PendingBuild, why: Unsatisfiable, author: Author, *, first_run: bool
    ) -> ScheduledBuild:
        hosts = int(self._selector.book.rows_of_roots().size)
        decided = unsatisfiable(pending.request, why, hosts, author)
        return ScheduledBuild(pending=pending, decision=decided, may_hold_claim=not first_run)

    def _is_warming_up(self, pending: PendingBuild) -> bool:
        """Just started: hosts that were not announced yet may still be, and "no host" would be a guess."""
        started_s = self._clock.monotonic() if self._started_s is None else self._started_s
        warm = self._clock.monotonic() - started_s >= self._config.hosts_warmup_s
        return not warm and pending.delivery < RETRIES

    async def _write(self, scheduled: Sequence[ScheduledBuild]) -> dict[int, Outcome]:
        """The decisions, the cell map and the messages to publish, in one transaction."""
        if not scheduled:
            return {}
        started_s, ended_at = self._clock.monotonic(), self._clock.time()
        decisions = [
            with_stages(one.decision, stamps_of(one.pending, None, ended_at))
            if one.decision.build.terminal
            else one.decision
            for one in scheduled
        ]
        stages: list[Stamps] = []

        async def decide(unit: BuildUnit) -> set[str]:
            now = self._clock.time()
            stages.clear()
            written = await unit.decide(decisions, now)
            for one, decided in zip(scheduled, decisions, strict=True):
                if one.pending.instance_uuid in written:
                    stages.append(stamps_of(one.pending, one.claimed, now))
                    for message in messages_of(
                        decided, one.pending.request, one.claimed, now, stages[-1], self._config
                    ):
                        unit.emit(message)
            return written

        written = await run_optimistic(lambda optimistic: self._store.unit(optimistic=optimistic), decide)
        metrics.STAGE_S.labels("write").observe(self._clock.monotonic() - started_s)
        metrics.observe_decisions(stages)
        metrics.count_ended(one.decision.build for one in scheduled if one.pending.instance_uuid in written)
        for one in scheduled:
            build = one.decision.build
            if build.terminal:
                uuid = build.instance_uuid
                log.info("build.failed", instance=uuid, cause=uuid, code=build.code, reason=build.reason)
        # A failed build is dispatched by no scheduler; the release also fences a claim that is still in flight.
        failed = [one for one in scheduled if one.decision.build.terminal and one.pending.instance_uuid in written]
        await self._cancellations.release(
            [one.pending for one in failed if one.may_hold_claim and one.decision.build.code != CONSUMER_CHANGED]
        )
        await self._cancellations.cancel([one.pending for one in scheduled if one.pending.instance_uuid not in written])
        return {one.pending.position: accepted(one.pending.instance_uuid) for one in scheduled}

    def _author(self) -> Author:
        return Author(self._who, self._clock.time())

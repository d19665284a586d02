"""Decide, claim, and decide again: from what is spec to a claimed host, for a whole batch at once.

A round decides every open request on the replica and claims them in one round trip. Each outcome asks for another
reaction (P-63): claimed; raced: fold the newer shape in and ask for the same host again; full or gone: the next
host, down the whole list (P-64); consumer changed: somebody else owns this instance, stop. No answer is never "no
host" (N-23).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

import structlog
from msgspec.structs import replace
from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt, stop_any
from tenacity.stop import stop_base
from tenacity.wait import wait_base

from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.base import MAX_AMOUNT
from bus.contracts.build import BuildRequest
from bus.contracts.placement import Claim, ClaimOption, ClaimOutcome, ClaimResult
from bus.faults import Fault, RequestRefused, Transient
from bus.port import BusError
from placement_worker.replica.query import asked_in_all
from placement_worker.replica.request import QueryTooWide
from placement_worker.replica.search import options
from scheduler_worker import metrics
from scheduler_worker.adoption import Adoption
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.domain.ranking import Candidate, Choice, Ranking
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.spread import Spread
from scheduler_worker.endings import ATTEMPT, CONSUMER_CHANGED, Asking, Away, Contended, Ending, Placed, Stopped, Work
from scheduler_worker.peers import look_up, names_others

log = structlog.get_logger(__name__)

# Placement counts shapes from 1.
NEVER_GIVEN = 0
FIRST_JITTER_S = 0.001  # the most that is waited before the second round, halved


class Refreshes(Protocol):
    """What the loop needs of the replica's follower."""

    async def refresh(self, *, timeout_s: float) -> bool:
        """Fold the newest changes in now; False: they did not come in time."""


NOTHING: Mapping[str, Work] = MappingProxyType({})
# How often a request that fits nowhere else looks again at hosts some children of which were full.
SECOND_CHANCES = 3

# Outcomes after which another claim is made.
LOST = frozenset({ClaimOutcome.RACED, ClaimOutcome.FULL, ClaimOutcome.RULED_OUT, ClaimOutcome.GONE})


class Claiming:
    """The claim loop. One per scheduler process; several batches may be in it at once."""

    def __init__(
        self,
        bus: Bus,
        selector: Selector,
        follower: Refreshes,
        *,
        clock: Clock,
        rng: random.Random,
        config: SchedulerConfig,
    ) -> None:
        self._bus = bus
        self._selector = selector
        self._book = selector.book
        self._adoption = Adoption(selector, clock)
        self._follower = follower
        self._clock = clock
        self._rng = rng
        self._config = config
        self._jitter = _Jitter(rng, config.retry_jitter_s)
        self.spread = Spread()

    def choose(self, spec: Sequence[Asking]) -> dict[str, Work]:
        """Choose hosts before it is known whether the requests are new, by instance: for `place`, or for `drop`.

        Only what is found at once; whoever finds nothing, or has to ask where others are, is left to `place`.
        """
        started = self._clock.monotonic()
        works = {ask.request.instance_uuid: self._work(ask) for ask in spec if not names_others(ask.request)}
        subset, rankings = self._subset(), dict[tuple[str, ...], Ranking]()
        for work in works.values():
            with suppress(QueryTooWide):
                work.is_chosen = self._choose(work, rankings, subset, started)
                work.decided_at = self._clock.time()
        metrics.STAGE_S.labels("decide").observe(self._clock.monotonic() - started)
        return {instance: work for instance, work in works.items() if work.is_chosen}

    def drop(self, works: Iterable[Work]) -> None:
        """Assume no longer what was chosen and not claimed."""
        for work in works:
            if not isinstance(work.ending, Placed):
                self._book.settle(work.request.instance_uuid, None)

    async def place(self, spec: Sequence[Asking], ahead: Mapping[str, Work] = NOTHING) -> list[Ending]:
        """An ending for each, in order. ahead: what `choose` found for some of them."""
        works = [ahead.get(asking.request.instance_uuid) or self._work(asking) for asking in spec]
        await look_up(self._bus, works, timeout_s=self._config.claim_timeout_s)
        deadline = self._clock.monotonic() + self._config.claim_deadline_s
        rounds = AsyncRetrying(
            retry=retry_if_result(bool),
            stop=stop_any(stop_after_attempt(self._config.claim_rounds), _StopAt(self._clock, deadline)),
            wait=self._jitter,
            sleep=self._clock.sleep,
            retry_error_callback=lambda _: True,
        )
        await rounds(self._round, works)
        return [work.ending if work.ending is not None else Contended(work.claims) for work in works]

    async def _round(self, works: list[Work]) -> bool:
        """One round over what is still open. True: something still is."""
        still = [work for work in works if work.ending is None]
        if any(work.again is not None or work.looked_twice for work in still):
            # Never "none" or "the same again" on old news: ask for the newest changes (one shared round trip).
            await self._follower.refresh(timeout_s=self._config.raced_wait_s)
        try:
            await self._decide_and_claim(still)
        finally:
            # Whatever ended the round, a cancelled process too: nothing stays assumed that was not claimed.
            self.drop(still)
        return any(work.ending is None for work in still)

    async def _decide_and_claim(self, works: list[Work]) -> None:
        started = self._clock.monotonic()
        self._decide(works)
        decided = self._clock.monotonic()
        decided_at = self._clock.time()
        for work in works:
            work.decided_at = work.decided_at or decided_at
        metrics.STAGE_S.labels("decide").observe(decided - started)
        claiming = [work for work in works if work.choice is not None or work.probe is not None]
        if claiming:
            await self._claim(claiming)
            metrics.STAGE_S.labels("claim").observe(self._clock.monotonic() - decided)

    # --- deciding

    def _decide(self, works: list[Work]) -> None:
        """One synchronous pass over the book: each choice is assumed, so that the next one sees it (N-18)."""
        subset, rankings = self._subset(), dict[tuple[str, ...], Ranking]()
        now_s = self._clock.monotonic()
        for work in works:
            if work.is_chosen:
                work.is_chosen = False
                continue
            try:
                if not self._choose(work, rankings, subset, now_s):
                    self._nothing(work, now_s)
            except QueryTooWide as error:  # a flavor whose traits combine in too many ways to search them all
                work.choice = work.probe = None
                work.ending = Stopped(error.code, str(error))

    def _subset(self) -> int:
        subset = self.spread.subset(self._config.host_subset_size, self._config.max_subset_size)
        metrics.SUBSET.set(subset)
        return subset

    def _work(self, asking: Asking) -> Work:
        return Work(
            request=asking.request,
            spec=asking.spec,
            most_alternates=self._alternates(asking.request),
            fresh=asking.fresh,
            tried=self._ignored(asking.request),
        )

    def _choose(self, work: Work, rankings: dict[tuple[str, ...], Ranking], subset: int, now_s: float) -> bool:
        """One request's choice, assumed; False: there is none."""
        work.choice = self._same_host(work)
        if work.choice is None:
            ranking = rankings.get(work.spec.key)
            if ranking is None:
                ranking = rankings[work.spec.key] = self._selector.rank(work.spec, now_s, self._rng)
                metrics.CANDIDATES.observe(len(ranking))
            excluded = self._selector.rows_of(work.tried)
            work.choice = ranking.pick(excluded, subset=subset, alternates=work.most_alternates)
            if work.choice is not None:
                self._assume(work, work.choice)
                ranking.consumed(work.choice.selected)
        else:
            self._assume(work, work.choice)
        return work.choice is not None

    def _same_host(self, work: Work) -> Choice | None:
        """The host whose shape had changed, if it still fits as it is now."""
        again, work.again = work.again, None
        if again is None or work.choice is None:
            return None
        row = self._book.row_of(again.uuid)
        found = [] if row is None else options(self._book, work.spec.query, row, limit=self._config.max_options)
        if row is None or not found:
            work.tried[again.uuid] = "claim.raced"
            return None
        return Choice(replace(again, row=row, options=found), work.choice.alternates, work.choice.passed)

    def _ignored(self, request: BuildRequest) -> dict[str, str]:
        """Hosts that the client does not want; names that nobody bears are left out (N-13)."""
        hosts = (uuid for host in request.ignore_hosts for uuid in self._selector.uuids_of(host))
        return dict.fromkeys(hosts, "host.ignored")

    def _alternates(self, request: BuildRequest) -> int:
        """One host fewer than may be tried (C-7); a request may ask for fewer."""
        return (request.max_attempts or self._config.max_attempts) - 1

    def _assume(self, work: Work, choice: Choice) -> None:
        metrics.DECISIONS.labels("chosen").inc()
        self._book.assume(work.request.instance_uuid, choice.selected.options[0].allocations)

    def _nothing(self, work: Work, now_s: float) -> None:
        """Nothing fits: look again at the newest state; then make sure that no earlier run of ours holds a claim."""
        if not work.looked_twice or (work.partly and work.chances < SECOND_CHANCES):
            # A full child does not make its host full: another scheduler may have taken what we asked for, and left
            # the like of it beside. By the newest news it is a candidate again or is none.
            for uuid in work.partly:
                work.tried.pop(uuid, None)
            work.partly = []
            work.chances += 1
            work.looked_twice = True
            return
        if not work.fresh and work.probe is None:
            # After a crash the only host that fits may be the one that we hold already, which looks full.
            work.probe = self._impossible(work.spec)
            if work.probe is not None:
                return
        self._no_host(work, now_s)

    def _no_host(self, work: Work, now_s: float) -> None:
        metrics.DECISIONS.labels("no_host").inc()
        work.ending = replace(self._selector.explain(work.spec, now_s, work.tried), claims=work.claims)

    def _impossible(self, spec: RequestSpec) -> ClaimOption | None:
        """An option that never fits: a claim of it only tells whether this attempt holds an allocation already."""
        roots = self._book.rows_of_roots()
        if not roots.size:
            return None
        resource_class = min(asked_in_all(spec.query))
        uuid = self._book.uuid_of(int(roots[0]))
        # A host may have as much as can be asked for; none has ever been of shape 0.
        return ClaimOption(allocations={uuid: {resource_class: MAX_AMOUNT}}, shapes={uuid: NEVER_GIVEN})

    # --- claiming

    async def _claim(self, works: list[Work]) -> None:
        answers = await self._ask(works)
        lost = 0
        for work, answer in zip(works, answers, strict=True):
            work.claims += 1
            outcome = answer.outcome.value if isinstance(answer, ClaimResult) else answer.code
            metrics.CLAIMS.labels(outcome).inc()
            if isinstance(answer, ClaimResult):
                lost += answer.outcome in (ClaimOutcome.FULL, ClaimOutcome.RACED)
                self._fold(work, answer)
            else:
                work.ending = self._unanswered(answer)
        self.spread = self.spread.after(len(works), lost)

    async def _ask(self, works: list[Work]) -> list[ClaimResult | Fault]:
        claims = [
            Claim(
                consumer=work.request.instance_uuid,
                attempt=ATTEMPT,
                options=(work.probe,) if work.choice is None and work.probe is not None else _options(work),
                project_id=work.request.project_id,
                user_id=work.request.user_id,
                server_group=work.request.server_group,
                limits=self._config.quota_of(work.request.project_id),
            )
            for work in works
        ]
        causes = [claim.consumer for claim in claims]
        try:
            return await self._bus.request_all(
                claims, ClaimResult, timeout_s=self._config.claim_timeout_s, causes=causes
            )
        except (BusError, Transient) as error:
            # Nobody serves claims, or the bus is away: the claims may or may not have been heard.
            return [Away(str(error)) for _ in claims]

    def _unanswered(self, fault: Fault) -> Ending:
        if isinstance(fault, RequestRefused):
            return Stopped(fault.code, fault.reason)
        return Away(f"{fault.code} {fault.reason}".strip())

    def _fold(self, work: Work, answer: ClaimResult) -> None:
        """What one outcome asks for."""
        choice = work.choice
        if choice is None:
            self._probed(work, answer)
            return
        if answer.outcome in LOST:
            work.lost.append(f"{self._name_of(choice.selected.uuid)}: {answer.outcome.value}")
        match answer.outcome:
            case ClaimOutcome.CLAIMED:
                work.ending = self._adoption.claimed(work, choice, answer)
            case ClaimOutcome.RACED:
                work.raced += 1
                metrics.RETRIES.labels("raced").inc()
                if work.raced <= self._config.raced_retries:
                    work.again = choice.selected
                else:
                    work.tried[choice.selected.uuid] = "claim.raced"
            case ClaimOutcome.FULL | ClaimOutcome.GONE:
                metrics.RETRIES.labels(answer.outcome.value).inc()
                work.tried[choice.selected.uuid] = f"claim.{answer.outcome.value}"
                if answer.outcome is ClaimOutcome.FULL and self._is_in_parts(choice.selected):
                    work.partly.append(choice.selected.uuid)
            case ClaimOutcome.RULED_OUT:
                # Another member was faster: where the group is now decides what is left of the hosts.
                metrics.RETRIES.labels("ruled_out").inc()
                work.tried[choice.selected.uuid] = "claim.ruled_out"
                work.spec = work.spec.with_members(answer.members)
            case ClaimOutcome.OVER_LIMIT:
                work.ending = Stopped("quota.exceeded", f"project {work.request.project_id}, {answer.reason}")
            case ClaimOutcome.CONSUMER_CHANGED:
                reason = answer.reason or "somebody else holds an allocation under this instance's uuid"
                work.ending = Stopped(CONSUMER_CHANGED, reason)
            case ClaimOutcome.INVALID:
                work.ending = Stopped("claim.invalid", answer.reason or "the resource book cannot ever accept this")

    def _is_in_parts(self, asked: Candidate) -> bool:
        """Whether anybody but the host's root was to give something."""
        return any(uuid != asked.uuid for option in asked.options for uuid in option.allocations)

    def _name_of(self, host_uuid: str) -> str:
        row = self._book.row_of(host_uuid)
        return host_uuid if row is None else self._book.name_of(row)

    def _probed(self, work: Work, answer: ClaimResult) -> None:
        if answer.outcome is ClaimOutcome.CLAIMED:
            work.ending = self._adoption.adopt(work, (), answer)
        else:
            self._no_host(work, self._clock.monotonic())


def _options(work: Work) -> tuple[ClaimOption, ...]:
    assert work.choice is not None
    selected = work.choice.selected
    if work.request.server_group is None:
        return tuple(selected.options)
    return tuple(replace(option, host=selected.uuid) for option in selected.options)


class _StopAt(stop_base):
    """Tenacity's stop, by our clock."""

    def __init__(self, clock: Clock, at_s: float) -> None:
        self._clock = clock
        self._at_s = at_s

    def __call__(self, retry_state: RetryCallState) -> bool:
        return self._clock.monotonic() >= self._at_s


class _Jitter(wait_base):
    """Tenacity's wait, with our own source of randomness: evenly from nothing to a bound that doubles each round."""

    def __init__(self, rng: random.Random, most_s: float) -> None:
        self._rng = rng
        self._most_s = most_s

    def __call__(self, retry_state: RetryCallState) -> float:
        return self._rng.uniform(0.0, min(self._most_s, FIRST_JITTER_S * 2.0 ** min(retry_state.attempt_number, 16)))

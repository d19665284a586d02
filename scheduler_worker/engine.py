"""How build requests are scheduled, a whole batch at once: record, decide, claim, write. Each step is safe to repeat.

1. Record: the request goes on record, and a repeated one is recognised there. A small batch chooses its
   hosts meanwhile; that choice is speculative: so far only this process assumes it.
2. Decide (`placing`): one pass over the replica chooses a host for each request that has none.
3. Claim (`placing`): the claims of all requests travel together; a request without a result is decided and claimed
   again.
4. Write: one transaction writes the decisions, maps the instances to their cells and keeps the messages to publish.
   It is guarded by the record's state: of all schedulers that process a request, one writes and the others do not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

import structlog
from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome, Wait
from bus.contracts.build import member_uuids
from bus.contracts.stages import Stamps
from bus.faults import Fault
from bus.persistence.unit_of_work import run_optimistic
from bus.turns import InParts
from scheduler_worker import metrics
from scheduler_worker.claims import ClaimPort, HeldClaims, is_claim_of
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.deletes import Deletes
from scheduler_worker.domain.admission import (
    Admission,
    Answered,
    Continue,
    PendingBuild,
    Start,
    admit,
    admit_expired,
    first_of_each,
    is_clash_of_first,
    new_build,
    pending_again,
)
from scheduler_worker.domain.builds import Author, BuildStatus, NewBuild
from scheduler_worker.domain.decisions import (
    Conclusion,
    DecidedBuild,
    PlacedBuild,
    by_request,
    conclude,
    ended_where_held,
    messages_of,
    prepare,
    with_stages,
)
from scheduler_worker.domain.deletes import PendingDelete
from scheduler_worker.domain.effects import effects, releases_of
from scheduler_worker.domain.gangs import withdrawn_by_gang, without_withdrawn
from scheduler_worker.domain.placement import (
    FIRST_ATTEMPT,
    PlacementRequest,
    PlacementState,
    PlacementUnavailable,
    unknown_after,
)
from scheduler_worker.domain.requests import waits
from scheduler_worker.domain.selector import Selector
from scheduler_worker.domain.step import stranded
from scheduler_worker.placing import Placer, ReplicaFollower
from scheduler_worker.store.port import BuildUnit, SchedulerStore

log = structlog.get_logger(__name__)

# The largest batch that chooses its hosts while it is recorded; choosing for more takes longer than recording.
MAX_SPECULATIVE = 16
# Requests that are recorded, prepared or concluded in one turn of the event loop, each a build or a gang.
BUILDS_AT_ONCE = 64
# The transaction of a record does not wait for the disk, and the database has crashed since: record and decide again.
FORGOTTEN = Wait("request.forgotten", "it is not on record any more")


class RequestRecorder:
    """Puts build requests on record, a batch in one transaction. One per scheduler process."""

    def __init__(self, store: SchedulerStore, *, clock: Clock, process: str) -> None:
        self._store = store
        self._clock = clock
        self._who = process

    async def record(self, builds: Sequence[PendingBuild]) -> list[Admission]:
        """Insert the new requests and separate repeated ones from clashes: one statement each for the whole batch."""
        author, firsts = Author(self._who, self._clock.time()), first_of_each(builds)
        records: dict[str, NewBuild] = {}
        async for part in InParts(firsts.items(), BUILDS_AT_ONCE):
            records |= {uuid: new_build(pending, author) for uuid, pending in part}

        async def insert(unit: BuildUnit) -> list[Admission]:
            return await self._insert(unit, builds, firsts, records, author.at)

        # Not durable: until a decision is on disk, the unacknowledged message itself survives a crash.
        admissions = await run_optimistic(
            lambda optimistic: self._store.unit(durable=False, optimistic=optimistic), insert
        )
        answered = [one for one in admissions if isinstance(one, Answered)]
        metrics.count_requests("build", "accepted", sum(isinstance(one, Start) for one in admissions))
        for one in answered:
            metrics.count_requests("build", one.label)
        if any(isinstance(one.outcome, Done) for one in answered):
            await self._store.flush()  # the record acknowledges those, and nothing else is written
        return admissions

    async def _insert(
        self,
        unit: BuildUnit,
        builds: Sequence[PendingBuild],
        firsts: Mapping[str, PendingBuild],
        records: Mapping[str, NewBuild],
        at: float,
    ) -> list[Admission]:
        """The transaction. The record of a gang's first member stands for the whole request, so it goes first."""
        new, known = set[str](), dict[str, BuildStatus]()
        for later in (False, True):
            part = {
                uuid: pending
                for uuid, pending in firsts.items()
                if pending.is_later_member is later and not (later and is_clash_of_first(pending, firsts, known))
            }
            new |= await unit.insert([records[uuid] for uuid in part], at)
            known |= await unit.read([uuid for uuid in part if uuid not in new])
        admissions = [
            admit(pending, firsts, new, known) async for some in InParts(builds, BUILDS_AT_ONCE) for pending in some
        ]
        async for firsts_of_part in InParts(firsts.items(), BUILDS_AT_ONCE):
            for uuid, pending in firsts_of_part:
                if uuid in new:
                    stamps = pending.stamps(None, at)
                    for message in effects(None, records[uuid].build, at, None, stamps):
                        unit.emit(message)
        for admission in admissions:
            if isinstance(admission, Answered) and admission.event is not None:
                unit.emit(admission.event)
            if isinstance(admission, Answered) and admission.ended is not None:
                for message in releases_of(admission.ended):
                    unit.emit(message)
        return admissions


class SchedulingEngine:
    """Schedules batches of requests. One per scheduler process; it may process several batches at once."""

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
        self._selector = selector
        self._clock = clock
        self._who = process or "scheduler"
        self._held = HeldClaims(claims, selector.table.last_cell_of, self._runs_on_record)
        self._deletes = Deletes(store, self._held, clock=clock, process=self._who)
        self._recorder = RequestRecorder(store, clock=clock, process=self._who)
        self._placer = Placer(claims, self._held, selector, follower, clock=clock, rng=rng, config=config)

    async def process(
        self, builds: Sequence[PendingBuild], deletes: Sequence[PendingDelete]
    ) -> tuple[dict[int, Outcome], dict[int, Outcome]]:
        """Schedule and delete; returns the outcomes of each kind by position. A delete in the batch is in time to stop
        its build.
        """
        outcomes: dict[int, Outcome] = {}
        of_deletes: dict[int, Outcome] = {}
        chosen: dict[str, PlacementState] = {}  # by instance, assumed in the replica and not claimed yet
        try:
            admissions = await self._record(builds, chosen, speculate=not deletes)
            deleted: set[str] = set()
            if deletes:
                of_deletes, deleted = await self._deletes.delete(deletes)
            to_place: list[PendingBuild] = []
            withdrawn = withdrawn_by_gang(builds, admissions, deleted)
            for taken, admission in zip(builds, admissions, strict=True):
                pending = taken
                if isinstance(admission, Continue):
                    pending = replace(taken, run=admission.run, attempt=FIRST_ATTEMPT)
                if isinstance(admission, Answered):
                    outcomes[pending.position] = admission.outcome
                elif pending.instance_uuid in deleted:
                    outcomes[pending.position] = pending.accepted
                else:
                    to_place.append(without_withdrawn(pending, withdrawn))
            outcomes |= await self._schedule(to_place, chosen)
        finally:
            if chosen:
                self._placer.drop(chosen.values())
        return outcomes, of_deletes

    async def not_left(self, expired: Mapping[int, PendingBuild]) -> dict[int, PendingBuild | Outcome]:
        """Requests whose time is over, as they are processed; the outcome of one that is not: its time was over before
        it was begun, and its requester has left it, or whether it was begun is not known yet.
        """
        async with self._store.unit() as unit:
            begun = set(await unit.read([one.instance_uuid for one in expired.values()]))
        unknown = {at: one for at, one in expired.items() if one.instance_uuid not in begun}
        try:
            begun |= await self._may_have_claimed(list(unknown.values()))
        except PlacementUnavailable as fault:
            return {at: waits(fault) if at in unknown else one for at, one in expired.items()}
        return {at: admit_expired(one, may_be_begun=one.instance_uuid in begun) for at, one in expired.items()}

    async def _may_have_claimed(self, builds: Sequence[PendingBuild]) -> set[str]:
        """The requests of these of which an instance holds what they may have claimed."""
        looks = {
            one.instance_uuid: [(uuid, one.request.project_id) for uuid in member_uuids(one.request)] for one in builds
        }
        held = await self._held.of_builds({key for keys in looks.values() for key in keys})
        return {uuid for uuid, keys in looks.items() if not held.keys().isdisjoint(keys)}

    async def accepted_before(self, instances: Mapping[str, int]) -> list[list[PendingBuild]]:
        """Builds that are on record and that no message carries on, as they are processed: one in a list, and all
        members of a gang together. instances: {instance: how often this was done before}. Raises Transient.
        """
        now = self._clock.time()
        requests: dict[str, list[PendingBuild]] = {}
        for new in await self._store.requests_of(list(instances)):
            uuid = new.build.instance_uuid
            members = requests.setdefault(uuid if new.gang is None else new.gang.uuid, [])
            members.append(pending_again(new, len(members), tries=instances.get(uuid, 0), now=now))
        # Where the record that stands for a gang is purged, those of its other members are too, in a moment.
        return [members for members in requests.values() if not members[0].is_later_member]

    async def _record(
        self, builds: Sequence[PendingBuild], chosen: dict[str, PlacementState], *, speculate: bool
    ) -> Sequence[Admission]:
        """Put requests on record. speculate: a small batch chooses its hosts meanwhile, into `chosen`."""
        if not builds:
            return ()
        with metrics.timed_stage("record", self._clock):
            all_new = not any(pending.refusal for pending in builds)
            if not (speculate and all_new and len(builds) <= MAX_SPECULATIVE):
                return await self._recorder.record(builds)
            recording = asyncio.create_task(self._recorder.record(builds))
            try:
                await asyncio.sleep(0)  # the statement is sent
                with metrics.timed_stage("decide", self._clock):
                    chosen |= self._placer.choose_speculatively(builds)
                admissions = await recording
            except BaseException:
                self._placer.drop(chosen.values())
                recording.cancel()
                await asyncio.gather(recording, return_exceptions=True)
                raise
            for pending, admission in zip(builds, admissions, strict=True):
                if isinstance(admission, Answered):
                    self._placer.drop([chosen.pop(pending.instance_uuid)] if pending.instance_uuid in chosen else [])
            return admissions

    async def _schedule(self, builds: Sequence[PendingBuild], chosen: dict[str, PlacementState]) -> dict[int, Outcome]:
        """Decide, claim and write builds."""
        if not builds:
            return {}
        author = Author(self._who, self._clock.time())
        concluded: list[tuple[PendingBuild, Conclusion]] = []
        placing: list[tuple[PendingBuild, PlacementRequest]] = []
        async for part in InParts(builds, BUILDS_AT_ONCE):
            for pending in part:
                prepared = prepare(pending, chosen.get(pending.instance_uuid), self._selector, author)
                if isinstance(prepared, PlacementRequest):
                    placing.append((pending, prepared))
                else:
                    concluded.append((pending, prepared))
        if concluded:
            concluded = await self._ended_where_held(concluded)
        results = await self._placer.place([request for _, request in placing], chosen)
        placed = [PlacedBuild(*pair, result) for pair, result in zip(placing, results, strict=True)]
        nearest = self._selector.config.max_funnel_nearest
        async for requests in InParts(by_request(placed), BUILDS_AT_ONCE):
            author = Author(self._who, self._clock.time())
            for members in requests:
                concluded += conclude(members, author, nearest)
        outcomes = {pending.position: end for pending, end in concluded if not isinstance(end, DecidedBuild)}
        return outcomes | await self._write([end for _, end in concluded if isinstance(end, DecidedBuild)])

    async def _ended_where_held(
        self, concluded: Sequence[tuple[PendingBuild, Conclusion]]
    ) -> list[tuple[PendingBuild, Conclusion]]:
        """The conclusions about builds that are not placed, where a claim is held: its cell is queried, and ends it."""
        ended = {one.instance_uuid: (one, end) for one, end in concluded if isinstance(end, DecidedBuild)}
        if not ended:
            return list(concluded)
        held = await self._held.given_to({(uuid, one.request.project_id): one.run for uuid, (one, _) in ended.items()})
        author = Author(self._who, self._clock.time())
        queried: dict[str, Conclusion] = {}
        for uuid, one in held.items():
            pending, end = ended[uuid]
            result = unknown_after(one) if isinstance(one, Fault) else stranded(one, end.decision.build.reason)
            if isinstance(result, PlacementUnavailable):
                queried[uuid] = waits(result)
            elif isinstance(one, Fault) or is_claim_of((uuid, pending.request.project_id), one):
                queried[uuid] = ended_where_held(pending, result, author)
        return [(one, queried.get(one.instance_uuid, end)) for one, end in concluded]

    async def _write(self, scheduled: Sequence[DecidedBuild]) -> dict[int, Outcome]:
        """The decisions, the cell map and the messages to publish, in one transaction."""
        if not scheduled:
            return {}
        ended_at = self._clock.time()
        decisions = [
            with_stages(one.decision, one.pending.stamps(None, ended_at))
            if one.decision.build.terminal
            else one.decision
            for one in scheduled
        ]
        stages: list[Stamps] = []

        async def write_decisions(unit: BuildUnit) -> set[str]:
            now = self._clock.time()
            stages.clear()
            written = await unit.write_decisions(decisions, now)
            async for part in InParts(zip(scheduled, decisions, strict=True), BUILDS_AT_ONCE):
                for one, decided in part:
                    if one.pending.instance_uuid in written:
                        stages.append(one.pending.stamps(one.claimed, now))
                        for message in messages_of(one, decided, now, stages[-1], self._selector.config):
                            unit.emit(message)
            return written

        with metrics.timed_stage("write", self._clock):
            written = await run_optimistic(lambda optimistic: self._store.unit(optimistic=optimistic), write_decisions)
        metrics.observe_decisions(stages)
        ended = [one.decision.build for one in scheduled if one.pending.instance_uuid in written]
        metrics.count_ended(ended)
        for build in ended:
            if build.terminal:
                uuid = build.instance_uuid
                log.info("build.failed", instance=uuid, cause=uuid, code=build.code, reason=build.reason)
        unwritten = {uuid: one.pending.run for one in scheduled if (uuid := one.pending.instance_uuid) not in written}
        forgotten = await self._withdraw(unwritten) if unwritten else set()
        return {
            one.pending.position: FORGOTTEN if one.pending.instance_uuid in forgotten else one.pending.accepted
            for one in scheduled
        }

    async def _withdraw(self, runs: Mapping[str, str]) -> set[str]:
        """Release the claims for builds ({instance: run}) that another scheduler, or a delete, has ended meanwhile. By
        the run of this decision: where the record has another, nothing was ever dispatched for this one. Returns those
        whose record is gone.
        """
        async with self._store.unit() as unit:
            known = await unit.read(list(runs))
            for uuid, one in known.items():
                for message in releases_of(replace(one.build, run=runs[uuid])):
                    unit.emit(message)
        return runs.keys() - known.keys()

    async def _runs_on_record(self, instances: Sequence[str]) -> Mapping[str, str]:
        async with self._store.unit() as unit:
            return {uuid: one.build.run for uuid, one in (await unit.read(instances)).items()}

"""Decides about recorded builds, and writes the decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from bus.clock import Clock
from bus.consuming.outcome import Outcome, RetryWhenAvailable
from bus.contracts.stages import StageTimes
from bus.faults import Fault
from bus.persistence.outbox import OutboxMessage
from bus.yielding import YieldingParts
from scheduler_worker import metrics as metrics_module
from scheduler_worker.build import build_metrics
from scheduler_worker.build.claim_ownership import ClaimOwnership, belongs_to_build
from scheduler_worker.build.decision import (
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
from scheduler_worker.build.host_search import HostSearchRequest, unlocatable_after_fault
from scheduler_worker.build.pending_build import PendingBuild
from scheduler_worker.build.placer import Placer
from scheduler_worker.build.quota import rooms_of
from scheduler_worker.build.recovered_claim import unlocatable_claim
from scheduler_worker.placement_client import PlacementUnavailable
from scheduler_worker.records.build_record import Actor, BuildUpdate, releases_of
from scheduler_worker.requests.request_delivery import waits
from scheduler_worker.selection.request_spec import RequestSpec
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.port import SchedulerStore, write_decided

log = structlog.get_logger(__name__)

# Requests that are recorded, prepared or concluded in one turn of the event loop, each a build or a gang.
BUILDS_AT_ONCE = 64

# The transaction of a record does not wait for the disk, and the database has crashed since: record and decide again.
RECORD_LOST = RetryWhenAvailable("request.record_lost", "it is not on record any more")


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
            settings = self._selector.config.settings
            for one in part:
                stage_times = stages[one.decision.build.instance_uuid] = one.pending.stage_times(one.claimed, now)
                decision = add_stage_times(one.decision, stage_times) if one.decision.build.terminal else one.decision
                writes.append((decision, outbox_messages(one, decision, now, stage_times, settings)))
        with metrics_module.measured("write", self._clock):
            written = await write_decided(self._store, writes, now)
        build_metrics.observe_decisions([stages[uuid] for uuid in written])
        build_metrics.count_ended(one.decision.build for one in decided if one.pending.instance_uuid in written)
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
    ) -> tuple[list[tuple[PendingBuild, HostSearchRequest]], list[tuple[PendingBuild, Conclusion]]]:
        """The builds to place, and the conclusions about the others."""
        actor = Actor(self._who, self._clock.time())
        placing: list[tuple[PendingBuild, HostSearchRequest]] = []
        concluded: list[tuple[PendingBuild, Conclusion]] = []
        limits = await rooms_of(self._store, self._selector, {one.request.project_id for one in builds})
        async for some in YieldingParts(builds, BUILDS_AT_ONCE):
            for pending in some:
                spec = self._selector.request_spec(pending.request) if pending.delivery.refusal is None else None
                if isinstance(spec, RequestSpec):
                    request = HostSearchRequest(
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
        # A record of another claim owner that is not decided yet takes the claim first. It may have found no claim
        # before this owner made one; once the claim is its own, its end releases it.
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
        unknown = {uuid for uuid, one in given.items() if isinstance(one, Fault)}
        return (builds.keys() - known.keys()) | unknown

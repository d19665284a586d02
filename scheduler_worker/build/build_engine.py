"""How build requests are scheduled, a batch at once; each step is safe to repeat: record (repeated requests are
recognised, deletes carried out), then decide, claim and write (`Dispatcher`).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

import structlog
from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome
from bus.contracts.base import Refusal
from bus.contracts.build import BuildAccepted, BuildState, member_uuids
from bus.contracts.placement_queries import ConsumerRecord
from bus.faults import RequestRefused
from bus.persistence.unit_of_work import OptimisticFirst
from bus.yielding import YieldingParts
from scheduler_worker import metrics as metrics_module
from scheduler_worker.build import build_metrics
from scheduler_worker.build.admission import admit, conflicts_with_first
from scheduler_worker.build.claim_ownership import ClaimOwnership
from scheduler_worker.build.delete_rules import (
    UNKNOWN,
    DeletePlan,
    PendingDelete,
    answer_unknown,
    plan_deletes,
    tombstones,
)
from scheduler_worker.build.dispatcher import BUILDS_AT_ONCE, Dispatcher
from scheduler_worker.build.gang import remaining_gangs
from scheduler_worker.build.pending_build import (
    Admission,
    Answered,
    Continue,
    PendingBuild,
    Start,
    admit_expired,
    pending_from_record,
)
from scheduler_worker.build.placer import Placer, ReplicaFollower
from scheduler_worker.config import SchedulerConfig
from scheduler_worker.placement_client import ClaimPort, PlacementUnavailable
from scheduler_worker.records.build_record import FIRST_ATTEMPT, Actor, NewBuild, ProjectsBuild, RecordedBuild, effects
from scheduler_worker.requests.request_delivery import waits
from scheduler_worker.selection.selector import Selector
from scheduler_worker.store.port import BuildUnit, SchedulerStore

log = structlog.get_logger(__name__)

START = Start()


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
        self._clock = clock
        self._who = process or "scheduler"
        self._ownership = ClaimOwnership(claims, selector.table.last_cell_of, self._owners_on_record)
        placer = Placer(claims, self._ownership, selector, follower, clock=clock, rng=rng, config=config)
        self._dispatcher = Dispatcher(store, self._ownership, placer, selector, clock=clock, process=self._who)

    async def process(
        self, builds: Sequence[PendingBuild], deletes: Sequence[PendingDelete]
    ) -> tuple[dict[int, Outcome], dict[int, Outcome]]:
        """Schedule and delete; returns the outcomes of each kind by batch index. A delete in the batch is in time to
        stop its build.
        """
        outcomes: dict[int, Outcome] = {}
        of_deletes: dict[int, Outcome] = {}
        admissions = await self.record(builds) if builds else []
        deleted: set[str] = set()
        if deletes:
            of_deletes, deleted = await self._delete(deletes)
        to_place: list[PendingBuild] = []
        gangs = remaining_gangs(builds, admissions, deleted)
        for taken, admission in zip(builds, admissions, strict=True):
            pending = taken
            if isinstance(admission, Continue):
                pending = replace(
                    taken, claim_owner=admission.claim_owner, new_claim_owner=taken.claim_owner, attempt=FIRST_ATTEMPT
                )
            if isinstance(admission, Answered):
                outcomes[pending.batch_index] = admission.outcome
            elif pending.instance_uuid in deleted:
                outcomes[pending.batch_index] = pending.accepted
            else:
                if pending.gang is not None and pending.gang.uuid in gangs:
                    pending = replace(pending, gang=gangs[pending.gang.uuid])
                to_place.append(pending)
        if to_place:
            outcomes |= await self._dispatcher.dispatch(to_place)
        return outcomes, of_deletes

    async def record(self, builds: Sequence[PendingBuild]) -> list[Admission]:
        """Insert the new requests and separate repeated ones from clashes: one statement each for the whole batch."""
        actor, firsts = Actor(self._who, self._clock.time()), dict[str, PendingBuild]()
        for pending in builds:
            firsts.setdefault(pending.request.instance_uuid, pending)  # a second one in the same batch changes nothing
        records = await self._first_records(firsts, actor)
        with metrics_module.measured("record", self._clock):
            # Not durable: until a decision is on disk, the unacknowledged message itself survives a crash.
            units = OptimisticFirst(lambda optimistic: self._store.unit(durable=False, optimistic=optimistic))
            while units.has_next_try():
                async with units as unit:
                    new, known = set[str](), dict[str, RecordedBuild]()
                    # The record of a gang's first member stands for the whole request, so it goes first.
                    for later in (False, True):
                        part = [
                            uuid
                            for uuid, pending in firsts.items()
                            if pending.is_later_member is later
                            and not (later and conflicts_with_first(pending, firsts, known))
                        ]
                        if part:
                            new |= await unit.insert([records[uuid] for uuid in part], actor.at)
                            known |= await unit.read([uuid for uuid in part if uuid not in new])
                    admissions: list[Admission] = []
                    async for pendings in YieldingParts(builds, BUILDS_AT_ONCE):
                        for pending in pendings:
                            uuid = pending.request.instance_uuid
                            is_new = uuid in new and firsts[uuid] is pending
                            if is_new:
                                stage_times = pending.stage_times(None, actor.at)
                                for message in effects(None, records[uuid].build, actor.at, None, stage_times):
                                    unit.emit(message)
                            if is_new and pending.refusal is None:
                                admissions.append(START)
                            else:
                                admissions.append(_answer(unit, admit(pending, firsts, new, known)))
        build_metrics.count_builds(admissions)
        if any(isinstance(one, Answered) and isinstance(one.outcome, Done) for one in admissions):
            await self._store.flush()  # the record acknowledges those, and nothing else is written
        return admissions

    async def _first_records(self, firsts: Mapping[str, PendingBuild], actor: Actor) -> dict[str, NewBuild]:
        return {
            uuid: pending.first_record(actor)
            async for part in YieldingParts(firsts.items(), BUILDS_AT_ONCE)
            for uuid, pending in part
        }

    async def drop_abandoned(self, unwanted: Mapping[int, PendingBuild]) -> dict[int, PendingBuild | Outcome]:
        """Requests that are not to be begun any more, as they are processed; the outcome of one that is not: its time
        was over before it was begun, and its requester has left it, or whether it was begun is not known yet.
        """
        async with self._store.unit() as unit:
            known = await unit.read([one.instance_uuid for one in unwanted.values()])
        found: dict[int, PendingBuild | Outcome] = {
            at: admit_expired(one, is_recorded=True, has_claim=False)
            for at, one in unwanted.items()
            if one.instance_uuid in known
        }
        unknown = {at: one for at, one in unwanted.items() if at not in found}
        try:
            claimed = await self._may_have_claimed(list(unknown.values()))
        except PlacementUnavailable as fault:
            return found | dict.fromkeys(unknown, waits(fault))
        return found | {
            at: admit_expired(one, is_recorded=False, has_claim=one.instance_uuid in claimed)
            for at, one in unknown.items()
        }

    async def _may_have_claimed(self, builds: Sequence[PendingBuild]) -> set[str]:
        """The requests of these of which an instance holds what they may have claimed; all of them where placement
        refuses to tell, for good: then each ends as one whose claim is of no known cell (`unlocatable_after_fault`).
        """
        looks = {
            one.instance_uuid: [(uuid, one.request.project_id) for uuid in member_uuids(one.request)] for one in builds
        }
        try:
            consumers = await self._ownership.allocations_of_builds({key for keys in looks.values() for key in keys})
        except RequestRefused:
            return set(looks)
        return {uuid for uuid, keys in looks.items() if not consumers.keys().isdisjoint(keys)}

    async def unfinished_builds(self, instances: Collection[str]) -> list[list[PendingBuild]]:
        """Builds that are on record and that no message carries on, as they are processed: one in a list, and all
        members of a gang together. Raises Transient.
        """
        now = self._clock.time()
        requests: dict[str, list[PendingBuild]] = {}
        for new in await self._store.requests_of(list(instances)):
            uuid = new.build.instance_uuid
            members = requests.setdefault(uuid if new.gang is None else new.gang.uuid, [])
            members.append(pending_from_record(new, len(members), now=now))
        return list(requests.values())

    async def _owners_on_record(self, instances: Sequence[str]) -> Mapping[str, str]:
        async with self._store.unit() as unit:
            return {uuid: one.claim_owner for uuid, one in (await unit.read(instances)).items()}

    # --- deletes

    async def _delete(self, deletes: Sequence[PendingDelete]) -> tuple[dict[int, Outcome], set[str]]:
        """Carry out deletes: outcomes by batch index, and the instances to be deleted. One transaction, and one more
        for those of builds that no cell has, which wait until placement has answered. Safe to repeat.
        """
        plan = await self._carry_out(deletes)
        if not plan.without_cell:
            return plan.outcomes, plan.accepted
        try:
            consumers = await self._ownership.allocations_of_builds({one.key for one in plan.without_cell})
        except PlacementUnavailable as fault:
            return plan.outcomes | dict.fromkeys(
                (one.batch_index for one in plan.without_cell), waits(fault)
            ), plan.accepted
        without_cell = await self._carry_out(plan.without_cell, consumers)
        return plan.outcomes | without_cell.outcomes, plan.accepted | without_cell.accepted

    async def _carry_out(
        self, deletes: Sequence[PendingDelete], consumers: Mapping[ProjectsBuild, ConsumerRecord] | None = None
    ) -> DeletePlan:
        """Carry out deletes in one transaction. consumers: as of `plan_deletes`."""
        actor = Actor(self._who, self._clock.time())
        async with self._store.unit() as unit:
            builds = await unit.lock([one.request.instance_uuid for one in deletes])
            plan = plan_deletes(deletes, builds, actor, consumers)
            new_tombstones = tombstones(plan.unknown, builds.keys(), actor)
            inserted = await unit.insert(new_tombstones, actor.at)
            made = {uuid: new.build for new in new_tombstones if (uuid := new.build.instance_uuid) in inserted}
            answer_unknown(plan, {**builds, **made}, actor, consumers or {})
            for message in plan.messages:
                unit.emit(message)
            await unit.update(plan.updates, actor.at)
            for one in plan.updates:
                uuid = one.build.instance_uuid
                claim = (consumers or {}).get((uuid, one.build.project_id))
                if claim is not None and one.build.state is not BuildState.DELETED:
                    log.warning("claim.of_earlier_request", instance=uuid, cause=uuid, cell=claim.cell)
        build_metrics.count_ended(one.build for one in plan.updates if one.build.state is BuildState.DELETED)
        answers = [one.reply if isinstance(one, Done) else one for one in plan.outcomes.values()]
        unknown = [one for one in answers if isinstance(one, Refusal) and one.code == UNKNOWN]
        metrics_module.count_requests("delete", "accepted", sum(isinstance(one, BuildAccepted) for one in answers))
        metrics_module.count_requests("delete", "unknown", len(unknown))
        return plan


def _answer(unit: BuildUnit, admission: Admission) -> Admission:
    """Emit the messages of a request that is not carried on."""
    if isinstance(admission, Answered):
        for message in admission.messages:
            unit.emit(message)
    return admission

"""Deletes: the records are locked, what builds without a cell hold is asked of placement, and the records change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog
from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome
from bus.contracts.book import HeldAllocation
from bus.contracts.build import BuildState
from scheduler_worker import metrics
from scheduler_worker.claims import HeldClaims
from scheduler_worker.domain.builds import Author, ProjectsBuild
from scheduler_worker.domain.deletes import DeletePlan, PendingDelete, answer_unknown, plan_deletes, tombstones
from scheduler_worker.domain.placement import PlacementUnavailable
from scheduler_worker.domain.requests import waits
from scheduler_worker.store.port import SchedulerStore

log = structlog.get_logger(__name__)


class Deletes:
    """Carries out deletes. One per scheduler process."""

    def __init__(
        self,
        store: SchedulerStore,
        held: HeldClaims,
        *,
        clock: Clock,
        process: str,
    ) -> None:
        self._store = store
        self._held = held
        self._clock = clock
        self._who = process

    async def delete(self, deletes: Sequence[PendingDelete]) -> tuple[dict[int, Outcome], set[str]]:
        """Carry out deletes: outcomes by position, and the instances that are to be deleted.

        One transaction; one more for those of builds that no cell has, after placement is queried: they wait while it
        does not answer. Safe to repeat.
        """
        plan = await self._carry_out(deletes)
        if not plan.unbuilt:
            return plan.outcomes, plan.accepted
        try:
            held = await self._held.of_builds({one.key for one in plan.unbuilt})
        except PlacementUnavailable as fault:
            return plan.outcomes | dict.fromkeys((one.position for one in plan.unbuilt), waits(fault)), plan.accepted
        of_unbuilt = await self._carry_out(plan.unbuilt, held)
        return plan.outcomes | of_unbuilt.outcomes, plan.accepted | of_unbuilt.accepted

    async def _carry_out(
        self, deletes: Sequence[PendingDelete], held: Mapping[ProjectsBuild, HeldAllocation] | None = None
    ) -> DeletePlan:
        """Carry out deletes in one transaction. held: as of `plan_deletes`."""
        author = self._author()
        async with self._store.unit() as unit:
            builds = await unit.lock([one.request.instance_uuid for one in deletes])
            plan = plan_deletes(deletes, builds, author, held)
            graves = tombstones(plan.unknown, builds.keys(), author)
            inserted = await unit.insert(graves, author.at)
            made = {uuid: new.build for new in graves if (uuid := new.build.instance_uuid) in inserted}
            unknown = answer_unknown(plan.unknown, {**builds, **made}, author, held or {})
            updates = [*plan.updates, *unknown.updates]
            for message in (*plan.messages, *unknown.messages):
                unit.emit(message)
            await unit.update(updates, author.at)
            for one in updates:
                uuid = one.build.instance_uuid
                claim = (held or {}).get((uuid, one.build.project_id))
                if claim is not None and one.build.state is not BuildState.DELETED:
                    log.warning("claim.of_earlier_request", instance=uuid, cause=uuid, cell=claim.cell)
        metrics.count_ended(one.build for one in updates if one.build.state is BuildState.DELETED)
        answered = [one.reply for one in plan.outcomes.values() if isinstance(one, Done) and one.reply is not None]
        metrics.count_requests("delete", "accepted", len(answered) + len(unknown.accepted))
        metrics.count_requests("delete", "unknown", len(unknown.outcomes) - len(unknown.accepted))
        outcomes, accepted = plan.outcomes | unknown.outcomes, plan.accepted | unknown.accepted
        return replace(plan, outcomes=outcomes, accepted=accepted)

    def _author(self) -> Author:
        return Author(self._who, self._clock.time())

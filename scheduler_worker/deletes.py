"""Deletes, and what placement is told of builds that have ended without a cell: they leave no claim behind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import structlog
from msgspec.structs import replace

from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome
from bus.contracts.book import HeldAllocation
from bus.contracts.build import BuildState, member_uuids
from bus.faults import Fault
from scheduler_worker import metrics
from scheduler_worker.claims import ClaimPort
from scheduler_worker.domain.builds import Author, RecordedBuild
from scheduler_worker.domain.deletes import (
    DeletePlan,
    KeptAllocation,
    PendingDelete,
    plan_deletes,
    refuse_unknown,
    tombstones,
)
from scheduler_worker.domain.effects import release_of
from scheduler_worker.domain.pending import PendingBuild
from scheduler_worker.domain.placement import unavailable_after
from scheduler_worker.store.port import SchedulerStore

log = structlog.get_logger(__name__)


class Deletes:
    """Carries out deletes, and releases the claims of builds that have ended. One per scheduler process."""

    def __init__(
        self,
        store: SchedulerStore,
        claims: ClaimPort,
        cell_of_host: Callable[[str], str | None],
        *,
        clock: Clock,
        process: str,
    ) -> None:
        """`cell_of_host(uuid)`: the cell that last announced a host."""
        self._store = store
        self._claims = claims
        self._cell_of_host = cell_of_host
        self._clock = clock
        self._who = process

    async def delete(self, deletes: Sequence[PendingDelete]) -> tuple[dict[int, Outcome], set[str]]:
        """Carry out deletes: outcomes by position, and the instances that are to be deleted.

        One transaction; one more for those of builds that no cell has, after placement is queried. Safe to repeat.
        Raises Transient when placement does not answer.
        """
        plan = await self._carry_out(deletes)
        if not plan.unbuilt:
            await self.release(plan.ended)
            return plan.outcomes, plan.accepted
        kept = await self._kept({one.request.instance_uuid: one.request.project_id for one in plan.unbuilt})
        of_unbuilt = await self._carry_out(plan.unbuilt, kept)
        await self.release([*plan.ended, *of_unbuilt.ended])
        return plan.outcomes | of_unbuilt.outcomes, plan.accepted | of_unbuilt.accepted

    async def _carry_out(
        self, deletes: Sequence[PendingDelete], kept: Mapping[str, KeptAllocation] | None = None
    ) -> DeletePlan:
        """Carry out deletes in one transaction. kept: as of `plan_deletes`."""
        author = self._author()
        async with self._store.unit() as unit:
            builds = await unit.lock([one.request.instance_uuid for one in deletes])
            plan = plan_deletes(deletes, builds, author, kept)
            for message in plan.messages:
                unit.emit(message)
            await unit.update(plan.updates, author.at)
            for one in plan.updates:
                uuid = one.build.instance_uuid
                if kept and uuid in kept and one.build.state is not BuildState.DELETED:
                    log.warning("claim.of_earlier_request", instance=uuid, cause=uuid, cell=kept[uuid].cell)
            inserted = await unit.insert(tombstones(plan.unknown, builds.keys(), author), author.at)
            refused, messages = refuse_unknown(plan.unknown, inserted | builds.keys(), author)
            for message in messages:
                unit.emit(message)
        metrics.count_ended(one.build for one in plan.updates if one.build.state is BuildState.DELETED)
        accepted = sum(isinstance(one, Done) and one.reply is not None for one in plan.outcomes.values())
        metrics.count_requests("delete", "accepted", accepted)
        metrics.count_requests("delete", "unknown", len(refused))
        return replace(plan, outcomes=plan.outcomes | refused)

    async def may_have_claimed(self, builds: Sequence[PendingBuild]) -> Collection[str]:
        """The requests of these of which an instance holds what they may have claimed. Raises Transient when placement
        does not answer.
        """
        looks = {uuid: one for one in builds for uuid in member_uuids(one.request)}
        held = await self._held({uuid: one.request.project_id for uuid, one in looks.items()})
        return {looks[uuid].instance_uuid for uuid in held}

    async def release(self, builds: Sequence[RecordedBuild]) -> None:
        """Tell placement what these records mean to it. Safe to repeat, and repeated by whoever reads the record again.
        Raises Transient when placement does not answer.
        """
        releases = [release for one in builds if (release := release_of(one)) is not None]
        for answer in await self._claims.release(releases) if releases else ():
            if isinstance(answer, Fault):
                raise unavailable_after(answer) from answer

    async def _held(self, projects: Mapping[str, str]) -> dict[str, HeldAllocation]:
        """What instances hold by a build of their project. projects: {instance: project}. Raises Transient when
        placement does not answer.
        """
        held: dict[str, HeldAllocation] = {}
        for answer in await self._claims.holding(list(projects)) if projects else ():
            if isinstance(answer, Fault):
                raise unavailable_after(answer) from answer
            if answer is not None and answer.attempt and answer.project_id == projects[answer.consumer]:
                held[answer.consumer] = answer
        return held

    async def _kept(self, projects: Mapping[str, str]) -> dict[str, KeptAllocation]:
        """What instances hold by a build of their project, and which cell has the hosts. Raises as `_held`."""
        kept: dict[str, KeptAllocation] = {}
        for uuid, held in (await self._held(projects)).items():
            announced = (cell for host in held.hosts if (cell := self._cell_of_host(host)) is not None)
            kept[uuid] = KeptAllocation(held.run, held.attempt, held.cell or next(announced, None))
        return kept

    def _author(self) -> Author:
        return Author(self._who, self._clock.time())

"""Deletes and cancelled builds: a build that is deleted, or that another scheduler decided, leaves no claim behind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import structlog
from msgspec.structs import replace

from bus.bus import API
from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome
from bus.contracts.base import Refusal
from bus.contracts.book import HeldAllocation
from bus.contracts.build import BuildState, DeleteRequest, member_uuids
from bus.contracts.placement import Release
from bus.faults import Fault, Transient
from bus.persistence.outbox import OutboxMessage
from scheduler_worker import metrics
from scheduler_worker.claims import ClaimPort
from scheduler_worker.domain.admission import is_unused
from scheduler_worker.domain.builds import Author
from scheduler_worker.domain.deletes import (
    DeletePlan,
    KeptAllocation,
    PendingDelete,
    end_without_cell,
    plan_deletes,
    refusal_of,
    refuse_unknown,
    tombstones,
)
from scheduler_worker.domain.pending import PendingBuild, accepted
from scheduler_worker.domain.placement import FIRST_ATTEMPT, unavailable_after
from scheduler_worker.store.port import SchedulerStore

log = structlog.get_logger(__name__)


class Cancellations:
    """Carries out deletes, cancels builds that are not to be dispatched, and releases their claims."""

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
            return plan.outcomes, plan.accepted
        kept = await self._kept({one.request.instance_uuid: one.request.project_id for one in plan.unbuilt})
        of_unbuilt = await self._carry_out(plan.unbuilt, kept)
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
        metrics.count_requests("delete", "accepted", sum(isinstance(one, Done) for one in plan.outcomes.values()))
        metrics.count_requests("delete", "unknown", len(refused))
        return replace(plan, outcomes=plan.outcomes | refused)

    async def refuse(self, deletes: Sequence[tuple[DeleteRequest, Refusal]]) -> None:
        """Publish that these deletes will not be carried out, where they are not under way or over already."""
        if not deletes:
            return
        author = self._author()
        async with self._store.unit() as unit:
            builds = await unit.lock([request.instance_uuid for request, _ in deletes])
            for request, why in deletes:
                event = refusal_of(request, why, builds.get(request.instance_uuid), author)
                if event is not None:
                    unit.emit(OutboxMessage(API, event, request.instance_uuid))

    async def cancel(self, builds: Sequence[PendingBuild]) -> dict[int, Outcome]:
        """Cancel builds that are deleted or that another scheduler decided first: release the claim, unless a cell has
        the build.

        If another scheduler has dispatched the build, the claim is the same one and belongs to the cell until the
        machine is gone. The claim is released before the result is written, so that after a crash all of it is
        repeated. Raises Transient: a record is gone, or placement did not answer.
        """
        if not builds:
            return {}
        async with self._store.unit() as unit:
            known = await unit.read([pending.instance_uuid for pending in builds])
        if len(known) < len({pending.instance_uuid for pending in builds}):
            # The transaction of a record does not wait for the disk, and the database has crashed since: record and
            # decide again.
            raise Transient("a request is not on record any more", code="request.forgotten")
        unused = [pending for pending in builds if is_unused(known[pending.instance_uuid])]
        await self.release(unused)
        deleted = [one for one in unused if known[one.instance_uuid].delete_requested]
        kept = await self._kept({one.instance_uuid: one.request.project_id for one in deleted})
        author = self._author()
        async with self._store.unit() as unit:
            locked = await unit.lock([pending.instance_uuid for pending in unused])
            ended = [
                end_without_cell(build, author, kept, "while it was being scheduled")
                for build in locked.values()
                if build.delete_requested and build.state is BuildState.ACCEPTED
            ]
            for end in ended:
                for message in end.messages:
                    unit.emit(message)
            await unit.update([end.update for end in ended], author.at)
        metrics.count_ended(end.update.build for end in ended)
        return {pending.position: accepted(pending.instance_uuid) for pending in builds}

    async def may_have_claimed(self, builds: Sequence[PendingBuild]) -> Collection[str]:
        """The requests of these of which an instance holds what they may have claimed. Raises Transient when placement
        does not answer.
        """
        looks = {uuid: one for one in builds for uuid in member_uuids(one.request)}
        held = await self._held({uuid: one.request.project_id for uuid, one in looks.items()})
        return {looks[uuid].instance_uuid for uuid in held}

    async def release(self, builds: Sequence[PendingBuild]) -> None:
        """Release the claims of builds that have ended, and fence those that are still in flight. Raises Transient when
        placement does not answer.
        """
        releases = [
            Release(consumer=one.instance_uuid, attempt=FIRST_ATTEMPT, project_id=one.request.project_id, by=one.run)
            for one in builds
        ]
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

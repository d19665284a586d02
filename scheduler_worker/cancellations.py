"""Deletes and cancelled builds: a build that is deleted, or that another scheduler decided, leaves no claim behind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import structlog
from msgspec.structs import replace

from bus.bus import API
from bus.clock import Clock
from bus.consuming.outcome import Done, Outcome
from bus.contracts.base import Refusal
from bus.contracts.build import BuildState, DeleteRequest, member_uuids
from bus.contracts.placement import Release
from bus.faults import Fault, Transient
from bus.persistence.outbox import OutboxMessage
from scheduler_worker import metrics
from scheduler_worker.claims import ClaimPort
from scheduler_worker.domain.admission import is_unused
from scheduler_worker.domain.builds import Author, BuildUpdate
from scheduler_worker.domain.deletes import (
    DeletePlan,
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
        looks = [_look_up(one.request.instance_uuid, one.request.project_id) for one in plan.unbuilt]
        kept = await self._release(looks)
        of_unbuilt = await self._carry_out(plan.unbuilt, kept)
        return plan.outcomes | of_unbuilt.outcomes, plan.accepted | of_unbuilt.accepted

    async def _carry_out(
        self, deletes: Sequence[PendingDelete], kept: Mapping[str, str | None] | None = None
    ) -> DeletePlan:
        """Carry out deletes in one transaction. kept: as of `plan_deletes`."""
        author = self._author()
        async with self._store.unit() as unit:
            builds = await unit.lock([one.request.instance_uuid for one in deletes])
            plan = plan_deletes(deletes, builds, author, kept)
            for message in plan.messages:
                unit.emit(message)
            await unit.update(plan.updates, author.at)
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
        kept = await self.release(unused)
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

    async def doubt(self, instances: Iterable[str]) -> None:
        """Put on record that what these hold may be an earlier request's: their next delivery could not know it.

        until: workers (the release is an effect of the record, in its commit).
        """
        doubted = sorted(instances)
        if not doubted:
            return
        author = self._author()
        async with self._store.unit() as unit:
            builds = await unit.lock(doubted)
            updates = [
                BuildUpdate(build=replace(one, claim_in_doubt=True))
                for one in builds.values()
                if one.awaits_decision and not one.claim_in_doubt
            ]
            await unit.update(updates, author.at)

    async def may_have_claimed(self, builds: Sequence[PendingBuild]) -> Collection[str]:
        """The requests of these of which an instance holds what they may have claimed. Nothing is released. Raises
        Transient when placement does not answer.
        """
        looks = [(one, uuid) for one in builds for uuid in member_uuids(one.request)]
        releases = [_look_up(uuid, one.request.project_id) for one, uuid in looks]
        found: set[str] = set()
        for (one, _), answer in zip(looks, await self._claims.release(releases) if releases else (), strict=True):
            if isinstance(answer, Fault):
                raise unavailable_after(answer) from answer
            within_s = one.claimed_within_s
            if answer.outcome == "older" and (within_s is None or answer.age_s < within_s):
                found.add(one.instance_uuid)
        return found

    async def release(self, builds: Sequence[PendingBuild]) -> Mapping[str, str | None]:
        """Release the claims that earlier runs of builds that have ended may hold, and fence those that they may still
        make. Where it is in doubt whose they are, they are kept. Returns and raises as `_release`.
        """
        return await self._release(
            [
                Release(
                    consumer=pending.instance_uuid,
                    attempt=FIRST_ATTEMPT,
                    project_id=pending.request.project_id,
                    claimed_within_s=0.0 if pending.in_doubt else pending.claimed_within_s,
                )
                for pending in builds
            ]
        )

    async def _release(self, releases: Sequence[Release]) -> Mapping[str, str | None]:
        """Release claims; return the cells of those instances that hold an allocation of an earlier request, which is
        kept.

        The record of that request is lost, as after a restore, and its instance may run. Raises Transient when
        placement does not answer.
        """
        kept: dict[str, str | None] = {}
        for release, answer in zip(releases, await self._claims.release(releases) if releases else (), strict=True):
            if isinstance(answer, Fault):
                raise unavailable_after(answer) from answer
            if answer.outcome == "older":
                uuid = release.consumer
                announced = (cell for host in answer.hosts if (cell := self._cell_of_host(host)) is not None)
                kept[uuid] = answer.cell or next(announced, None)
                log.warning("claim.of_earlier_request", instance=uuid, cause=uuid, cell=kept[uuid])
        return kept

    def _author(self) -> Author:
        return Author(self._who, self._clock.time())


def _look_up(instance: str, project: str) -> Release:
    """A release of what is younger than zero seconds: nothing is, and what the instance holds is named. It fences
    nothing.
    """
    return Release(consumer=instance, project_id=project, claimed_within_s=0.0)

"""Deliberate defects of what schedulers do about instances whose requests they have forgotten. FOUND_BY: the seed of
`requests_forgotten` that finds each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from bus.bus import API
from bus.contracts.base import Refusal
from bus.contracts.book import HeldAllocation
from bus.contracts.build import BuildRequest, BuildState
from bus.contracts.placement import ReleaseRun
from bus.persistence.outbox import OutboxMessage
from scheduler_worker import deletes
from scheduler_worker.domain import decisions
from scheduler_worker.domain.builds import FIRST_ATTEMPT, Author, BuildDecision, ProjectsBuild, RecordedBuild, effects
from scheduler_worker.domain.decisions import NO_HOST, given_up
from scheduler_worker.domain.deletes import DeletePlan, PendingDelete, plan_deletes
from scheduler_worker.domain.placement import ClaimStranded, PlacementState
from scheduler_worker.placing import Placer


@contextmanager
def claims_are_released_without_a_name() -> Iterator[None]:
    """What no host can take fails without a look at what its instance holds, and releases whatever that is (red:
    scheduler 1).
    """

    def nameless(before: BuildState | None, after: RecordedBuild, *more: Any) -> list[OutboxMessage]:
        sent = effects(before, after, *more)
        if after.state is not BuildState.FAILED:
            return sent
        release = ReleaseRun(consumer=after.instance_uuid, attempt=FIRST_ATTEMPT, project_id=after.project_id)
        return [*sent, OutboxMessage(API, release, after.instance_uuid)]

    with full_clouds_are_not_looked_up(), patch.object(decisions, "effects", nameless):
        yield


def full_clouds_are_not_looked_up() -> AbstractContextManager[Any]:
    """A request that no host can take fails, whatever its instance holds."""

    async def unchanged(self: Placer, states: list[PlacementState]) -> list[PlacementState]:
        return states

    return patch.object(Placer, "_recover", unchanged)


def kept_instances_are_called_deleted() -> AbstractContextManager[Any]:
    """A delete that comes before the decision ends the build, though its instance runs."""

    def plan(
        requested: Sequence[PendingDelete],
        builds: Mapping[str, RecordedBuild],
        author: Author,
        held: Mapping[ProjectsBuild, HeldAllocation] | None = None,
    ) -> DeletePlan:
        if held is not None:
            accepted = {uuid for uuid, build in builds.items() if build.state is BuildState.ACCEPTED}
            held = {key: one for key, one in held.items() if key[0] not in accepted}
        return plan_deletes(requested, builds, author, held)

    return patch.object(deletes, "plan_deletes", plan)


def stranded_builds_fail() -> AbstractContextManager[Any]:
    """A build that is not placed where its claim is held fails, and its claim is released: its cell is not queried."""

    def fails(request: BuildRequest, held: ClaimStranded, author: Author) -> BuildDecision:
        failed = given_up(request, Refusal(code=NO_HOST, reason=held.reason), author)
        return replace(failed, build=replace(failed.build, attempt=held.attempt))

    return patch.object(decisions, "_stranded", fails)


MUTANTS_OF_FORGOTTEN_REQUESTS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    claims_are_released_without_a_name,
    full_clouds_are_not_looked_up,
    stranded_builds_fail,
    kept_instances_are_called_deleted,
)
FOUND_BY: dict[str, int] = {
    "claims_are_released_without_a_name": 18,
    "full_clouds_are_not_looked_up": 18,
    "stranded_builds_fail": 18,
    "kept_instances_are_called_deleted": 18,
}
BREAKS: dict[str, str] = {
    "claims_are_released_without_a_name": "never_running_unclaimed",
    "full_clouds_are_not_looked_up": "effects_have_a_cause",
    "stranded_builds_fail": "never_running_unclaimed",
    "kept_instances_are_called_deleted": "effects_have_a_cause",
}

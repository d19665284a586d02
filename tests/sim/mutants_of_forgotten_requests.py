"""Deliberate defects of what schedulers do about instances whose requests they have forgotten. FOUND_BY: the seed of
`requests_forgotten` that finds each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from bus.contracts.book import HeldAllocation
from bus.contracts.build import BuildState
from bus.contracts.placement import Release
from scheduler_worker import deletes
from scheduler_worker.domain.builds import Author, RecordedBuild
from scheduler_worker.domain.deletes import DeletePlan, PendingDelete, plan_deletes
from scheduler_worker.domain.effects import release_of
from scheduler_worker.domain.placement import PlacementState
from scheduler_worker.placing import Placer


def claims_are_released_without_a_name() -> AbstractContextManager[Any]:
    """An allocation is released with the request that has ended, whatever run has claimed it (red: scheduler 1)."""

    def nameless(build: RecordedBuild) -> Release | None:
        release = release_of(build)
        return release and replace(release, by=None)

    return patch.object(deletes, "release_of", nameless)


def full_clouds_are_not_looked_up() -> AbstractContextManager[Any]:
    """A request that no host can take fails, whatever its instance holds."""

    async def unchanged(self: Placer, states: list[PlacementState]) -> list[PlacementState]:
        return states

    return patch.object(Placer, "_recover", unchanged)


def _unless(state: BuildState) -> AbstractContextManager[Any]:
    """Deletes of builds of this state are planned as if their instances held nothing."""

    def plan(
        requested: Sequence[PendingDelete],
        builds: Mapping[str, RecordedBuild],
        author: Author,
        held: Mapping[str, HeldAllocation] | None = None,
    ) -> DeletePlan:
        if held is not None:
            held = {uuid: one for uuid, one in held.items() if builds[uuid].state is not state}
        return plan_deletes(requested, builds, author, held)

    return patch.object(deletes, "plan_deletes", plan)


def failed_builds_are_not_looked_up() -> AbstractContextManager[Any]:
    """A delete ends a failed build, whatever its instance holds."""
    return _unless(BuildState.FAILED)


def kept_instances_are_called_deleted() -> AbstractContextManager[Any]:
    """A delete that comes before the decision ends the build, though its instance runs."""
    return _unless(BuildState.ACCEPTED)


MUTANTS_OF_FORGOTTEN_REQUESTS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    claims_are_released_without_a_name,
    full_clouds_are_not_looked_up,
    failed_builds_are_not_looked_up,
    kept_instances_are_called_deleted,
)
FOUND_BY: dict[str, int] = {
    "claims_are_released_without_a_name": 18,
    "full_clouds_are_not_looked_up": 1,
    "failed_builds_are_not_looked_up": 18,
    "kept_instances_are_called_deleted": 1,
}
BREAKS: dict[str, str] = {
    "claims_are_released_without_a_name": "never_running_unclaimed",
    "full_clouds_are_not_looked_up": "effects_have_a_cause",
    "failed_builds_are_not_looked_up": "effects_have_a_cause",
    "kept_instances_are_called_deleted": "effects_have_a_cause",
}

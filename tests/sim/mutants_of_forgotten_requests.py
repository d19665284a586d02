"""Deliberate defects of what schedulers do about instances whose requests they have forgotten. FOUND_BY: the seed of
`requests_forgotten` that finds each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from bus.contracts.placement import Release
from scheduler_worker import cancellations
from scheduler_worker.domain.builds import Author, RecordedBuild
from scheduler_worker.domain.deletes import (
    BuildEnd,
    DeletePlan,
    KeptAllocation,
    PendingDelete,
    end_without_cell,
    plan_deletes,
)
from scheduler_worker.domain.placement import PlacementState
from scheduler_worker.placing import Placer


def claims_are_released_without_a_name() -> AbstractContextManager[Any]:
    """An allocation is released with the request that has ended, whatever run has claimed it (red: scheduler 1)."""

    def nameless(*, by: str, **fields: Any) -> Release:
        return Release(**fields)

    return patch.object(cancellations, "Release", nameless)


def full_clouds_are_not_looked_up() -> AbstractContextManager[Any]:
    """A request that no host can take fails, whatever its instance holds."""

    async def unchanged(self: Placer, states: list[PlacementState]) -> list[PlacementState]:
        return states

    return patch.object(Placer, "_recover_forgotten", unchanged)


def failed_builds_are_not_looked_up() -> AbstractContextManager[Any]:
    """A delete ends a failed build, whatever its instance holds."""

    def plan(
        deletes: Sequence[PendingDelete],
        builds: Mapping[str, RecordedBuild],
        author: Author,
        kept: Mapping[str, KeptAllocation] | None = None,
    ) -> DeletePlan:
        return plan_deletes(deletes, builds, author, {})

    return patch.object(cancellations, "plan_deletes", plan)


def kept_instances_are_called_deleted() -> AbstractContextManager[Any]:
    """A delete that comes before the decision ends the build, though its instance runs."""

    def end(build: RecordedBuild, author: Author, kept: Mapping[str, KeptAllocation], detail: str) -> BuildEnd:
        return end_without_cell(build, author, {}, detail)

    return patch.object(cancellations, "end_without_cell", end)


MUTANTS_OF_FORGOTTEN_REQUESTS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    claims_are_released_without_a_name,
    full_clouds_are_not_looked_up,
    failed_builds_are_not_looked_up,
    kept_instances_are_called_deleted,
)
FOUND_BY: dict[str, int] = {
    "claims_are_released_without_a_name": 1,
    "full_clouds_are_not_looked_up": 1,
    "failed_builds_are_not_looked_up": 18,
    "kept_instances_are_called_deleted": 7,
}
BREAKS: dict[str, str] = {
    "claims_are_released_without_a_name": "never_running_unclaimed",
    "full_clouds_are_not_looked_up": "effects_have_a_cause",
    "failed_builds_are_not_looked_up": "effects_have_a_cause",
    "kept_instances_are_called_deleted": "effects_have_a_cause",
}

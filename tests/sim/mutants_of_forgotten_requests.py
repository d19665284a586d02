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
from scheduler_worker.cancellations import Cancellations
from scheduler_worker.domain.builds import Author, RecordedBuild
from scheduler_worker.domain.deletes import BuildEnd, end_unbuilt
from scheduler_worker.domain.pending import PendingBuild
from scheduler_worker.domain.placement import PlacementState
from scheduler_worker.placing import Placer


def older_claims_are_released() -> AbstractContextManager[Any]:
    """An allocation is released with its request, however old it is."""

    def undated(*, claimed_within_s: float | None, **fields: Any) -> Release:
        return Release(**fields)

    return patch.object(cancellations, "Release", undated)


def full_clouds_are_not_looked_up() -> AbstractContextManager[Any]:
    """A request that no host can take fails, whatever its instance holds."""

    async def unchanged(self: Placer, states: list[PlacementState]) -> list[PlacementState]:
        return states

    return patch.object(Placer, "_recover_forgotten", unchanged)


def cells_of_kept_claims_are_not_recorded() -> AbstractContextManager[Any]:
    """A failed build whose claim is kept does not get its cell, so that no delete reaches it."""

    async def release(self: Cancellations, builds: Sequence[PendingBuild]) -> None:
        await self._release(builds)

    return patch.object(Cancellations, "release", release)


def kept_instances_are_called_deleted() -> AbstractContextManager[Any]:
    """A delete that comes before the decision ends the build, though its instance runs."""

    def end(build: RecordedBuild, author: Author, kept: Mapping[str, str | None]) -> BuildEnd:
        return end_unbuilt(build, author, "while it was being scheduled")

    return patch.object(cancellations, "end_cancelled", end)


MUTANTS_OF_FORGOTTEN_REQUESTS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    older_claims_are_released,
    full_clouds_are_not_looked_up,
    cells_of_kept_claims_are_not_recorded,
    kept_instances_are_called_deleted,
)
FOUND_BY: dict[str, int] = {
    "older_claims_are_released": 1,
    "full_clouds_are_not_looked_up": 1,
    "cells_of_kept_claims_are_not_recorded": 18,
    "kept_instances_are_called_deleted": 7,
}
BREAKS: dict[str, str] = {
    "older_claims_are_released": "never_running_unclaimed",
    "full_clouds_are_not_looked_up": "effects_have_a_cause",
    "cells_of_kept_claims_are_not_recorded": "effects_have_a_cause",
    "kept_instances_are_called_deleted": "effects_have_a_cause",
}

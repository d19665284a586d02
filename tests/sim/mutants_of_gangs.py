"""Deliberate defects of gangs. FOUND_BY: the seed, with the kind `gangs` alone, that finds each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

from bus.contracts.placement import ClaimAll, ClaimAllResult
from placement_worker.domain import claims
from scheduler_worker import placing
from scheduler_worker.domain import decisions, gangs
from scheduler_worker.domain.placement import PlacementRefused
from scheduler_worker.domain.selector import NoValidHost

REFUSED = PlacementRefused("", "", is_fenced=True)


def gang_claimed_one_by_one() -> AbstractContextManager[Any]:
    """Placement takes of a gang what fits."""

    def claim_all(ledger: Any, item: ClaimAll) -> ClaimAllResult:
        return ClaimAllResult(results=tuple(claims._claim(ledger, claim) for claim in item.claims))

    return patch.object(claims, "_claim_all", claim_all)


def refused_gang_written_all_the_same() -> AbstractContextManager[Any]:
    """The trial of a gang is kept although one of its claims did not hold."""
    trial = claims.ClaimLedger.trial

    def tried(self: Any, gang: Any) -> Any:
        copy = trial(self, gang)
        self.joined, self.changed_consumers, self.used = copy.joined, copy.changed_consumers, copy.used
        self.generations, self._changes = copy.generations, copy._changes
        return copy

    return patch.object(claims.ClaimLedger, "trial", tried)


def too_few_go_on() -> AbstractContextManager[Any]:
    """The members of a gang that have a host are claimed, however few they are."""
    original = gangs.with_gang_results

    def too_soon(states: Any) -> Any:
        lenient = [
            one if one.gang is None else placing.replace(one, gang=placing.replace(one.gang, min_count=1))
            for one in states
        ]
        return [
            placing.replace(after, gang=before.gang) for before, after in zip(states, original(lenient), strict=True)
        ]

    return patch.object(placing, "with_gang_results", too_soon)


def members_without_a_host_are_withdrawn() -> AbstractContextManager[Any]:
    """A gang waits for no member that has no host, as if a delete had fenced each."""
    needed = gangs.needed

    def any_refusal(gang: Any, results: Any) -> int:
        return needed(gang, [REFUSED if isinstance(one, PlacementRefused | NoValidHost) else one for one in results])

    stack = ExitStack()
    stack.enter_context(patch.object(gangs, "needed", any_refusal))
    stack.enter_context(patch.object(decisions, "needed", any_refusal))
    return stack


MUTANTS_OF_GANGS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    gang_claimed_one_by_one,
    refused_gang_written_all_the_same,
    too_few_go_on,
    members_without_a_host_are_withdrawn,
)
FOUND_BY: dict[str, int] = {
    "gang_claimed_one_by_one": 27,
    "refused_gang_written_all_the_same": 27,
    "too_few_go_on": 15,
    "members_without_a_host_are_withdrawn": 11,
}

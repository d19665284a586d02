"""Deliberate defects about server groups, hints and quotas."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from bus.contracts.placement import Claim, ClaimOutcome, LocatePage
from bus.persistence.memory_database import MemoryDatabaseTransaction
from cell_conductor import awaited_request
from placement_worker.domain import claims
from placement_worker.store.memory_table import MemoryPlacementTable
from scheduler_worker.build import claim_answer
from scheduler_worker.build import placer as placing
from scheduler_worker.build.host_search import HostSearchRefused


def group_rule_left_to_filters() -> AbstractContextManager[Any]:
    """A claim does not look at its server group's rule: the scheduler's filters have."""
    return patch.object(claims, "permitted", lambda claim, option, others: ClaimOutcome.CLAIMED)


def group_of_one_transaction_forgotten() -> AbstractContextManager[Any]:
    """A claim sees the members that its server group had before its transaction, and not those of it."""
    counted = claims.ClaimLedger.other_members

    def others(self: Any, claim: Claim, besides: Any = ()) -> dict[str, int]:
        with patch.object(self, "joined", {}):
            return counted(self, claim, besides)

    return patch.object(claims.ClaimLedger, "other_members", others)


def group_not_locked() -> AbstractContextManager[Any]:
    """Two transactions claim for members of one server group at once."""
    return _without_locks("group")


def alternates_without_their_group() -> AbstractContextManager[Any]:
    """A conductor's claims of alternates do not name the server group."""
    requested = awaited_request.awaited_request_of

    def wanted(instance: Any) -> Any:
        message = requested(instance)
        return replace(message, server_group=None) if isinstance(message, Claim) else message

    return patch("cell_conductor.engine.awaited_request_of", wanted)


def alternates_without_limits() -> AbstractContextManager[Any]:
    """A conductor's claims of alternates do not name their project's limits."""
    requested = awaited_request.awaited_request_of

    def wanted(instance: Any) -> Any:
        message = requested(instance)
        return replace(message, limits={}) if isinstance(message, Claim) else message

    return patch("cell_conductor.engine.awaited_request_of", wanted)


def living_members_forgotten() -> AbstractContextManager[Any]:
    """The trimming of placement deletes members of server groups that hold something."""

    purged = MemoryPlacementTable.purge

    def purge(table_: MemoryPlacementTable, *gone: Any) -> None:
        purged(table_, *gone)
        table_.members.clear()

    return patch.object(MemoryPlacementTable, "purge", purge)


def hints_not_looked_up() -> AbstractContextManager[Any]:
    """A scheduler takes those whom a hint names for being nowhere."""
    known = placing.related_of

    def peers_of(request: Any, page: LocatePage, members: Any = None) -> Any:
        found = known(request, page, members)
        return replace(found, different_hosts=found.different_hosts and (), same_hosts=None)

    return patch.object(placing, "related_of", peers_of)


def quota_with_one_more() -> AbstractContextManager[Any]:
    """A project's requests may pass its quota by one."""
    past = claims.ClaimLedger.past_limit

    def past_limit(self: Any, claim: Claim, option: Any, held: Any) -> str:
        more = {name: most + 1 for name, most in claim.limits.items()}
        return past(self, replace(claim, limits=more), option, held)

    return patch.object(claims.ClaimLedger, "past_limit", past_limit)


def quota_never_given_back() -> AbstractContextManager[Any]:
    """A project's former allocations count for ever."""
    counted = MemoryPlacementTable.usage_of
    most: dict[tuple[int, str], Counter[str]] = {}

    def held_by(self: MemoryPlacementTable, project: str) -> dict[str, int]:
        ever = most.setdefault((id(self), project), Counter())
        ever |= Counter(counted(self, project))
        return dict(ever)

    return patch.object(MemoryPlacementTable, "usage_of", held_by)


def quota_not_locked() -> AbstractContextManager[Any]:
    """Two transactions claim for one project at once, each by what it held before."""
    return _without_locks("project")


def quota_of_one_transaction_forgotten() -> AbstractContextManager[Any]:
    """Claims of one transaction are each compared with what the project held before all of them."""
    return patch.object(claims.ClaimLedger, "_count", lambda self, consumer, sign: None)


def quota_reported_as_no_host() -> AbstractContextManager[Any]:
    """A request refused for its quota is answered that no host would do."""

    def refused(_code: str, reason: str, **named: bool) -> HostSearchRefused:
        return HostSearchRefused("no_valid_host", reason, **named)

    return patch.object(claim_answer, "HostSearchRefused", refused)


def _without_locks(kind: str) -> AbstractContextManager[Any]:
    locked = MemoryDatabaseTransaction.lock

    async def lock(self: MemoryDatabaseTransaction, keys: Any) -> None:
        await locked(self, [key for key in keys if key[0] != kind])

    return patch.object(MemoryDatabaseTransaction, "lock", lock)


MUTANTS_OF_PEERS = (
    group_rule_left_to_filters,
    group_of_one_transaction_forgotten,
    alternates_without_their_group,
    living_members_forgotten,
    hints_not_looked_up,
    quota_with_one_more,
    quota_never_given_back,
    quota_of_one_transaction_forgotten,
    quota_reported_as_no_host,
)
UNPROVEN_OF_PEERS = (group_not_locked, quota_not_locked, alternates_without_limits)

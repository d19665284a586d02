"""Applies a few simple claims in one round trip, by an SQL function that applies all of them or changes nothing.

The general path (`claims.py`) takes several round trips, which are most of the latency of a single claim on an idle
system. The claims of a large group share these round trips, so only small groups take the fast path. Nearly every claim
is for a new consumer, fits, and stays within its project's limits: such claims the function `claim_new` (schema.sql)
applies. It checks only whether the first option of each claim can be taken. All other decisions are made by
`domain/claims.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from bus.contracts.placement import Claim, ClaimOutcome
from placement_worker.domain.claim_items import ClaimReply, expected_consumers, projects_of, providers_of, reply
from placement_worker.domain.claim_verdict import ClaimVerdict
from placement_worker.domain.claims import ClaimItem, decide, may_be_new
from placement_worker.domain.moves import MIGRATION_TYPE
from placement_worker.domain.server_groups import held_by_class
from placement_worker.domain.values import Holding
from placement_worker.store import claims, holders, limits
from placement_worker.store.names import NameTable
from placement_worker.store.rows import transposed

# A larger group is as quick on the general path. The bounds also keep the changes within one row of the feed, because
# the function writes one.
MAX_ITEMS = 8
MAX_HELD = 64

TAKE = """
SELECT claimed, read FROM claim_new($1::uuid[], $2::text[], $3::text[], $4::text[], $5::int[],
    $6::uuid[], $7::bigint[], $8::int[],
    $9::int[], $10::int[], $11::text[], $12::bigint[],
    $13::uuid[], $14::int[], $15::int[], $16::bigint[],
    $17::text[], $18::text[], $19::int[], $20::bigint[], $21::bigint[], $22::uuid[])
"""

_CLAIMED = (ClaimOutcome.CLAIMED,)


class _Wanted:
    """The sum of the claims when each takes its first option, in the form of the function's arguments."""

    def __init__(self) -> None:
        self.shapes: dict[str, int | None] = {}
        self.times: dict[str, int] = {}
        self.used: dict[tuple[str, str], int] = {}
        self.held: list[tuple[str, str, str, int]] = []
        self.projects: dict[tuple[str, str], int] = {}
        self.limits: dict[tuple[str, str], int] = {}

    def add(self, claim: Claim) -> bool:
        """Add a claim. Returns False when its first option cannot be taken here; the claim may then be added in
        part.
        """
        if not claim.options:
            return False
        option = claim.options[0]
        for provider, resources in option.allocations.items():
            shape = option.shapes.get(provider)
            known = self.shapes.setdefault(provider, shape)
            if not resources or (known is not None and shape is not None and known != shape):
                return False
            if shape is not None:
                self.shapes[provider] = shape
            self.times[provider] = self.times.get(provider, 0) + 1
            for name, amount in resources.items():
                self.used[provider, name] = self.used.get((provider, name), 0) + amount
                self.held.append((claim.consumer, provider, name, amount))
        self._count(claim, option.allocations)
        return len(self.held) <= MAX_HELD

    def _count(self, claim: Claim, holding: Holding) -> None:
        """Add the claim's amounts to its project's total. When claims state different limits, the lowest is used for
        all.
        """
        counted = {} if claim.consumer_type == MIGRATION_TYPE else held_by_class(holding)
        for name, amount in counted.items():
            key = (claim.project_id, name)
            self.projects[key] = self.projects.get(key, 0) + amount
            if name in claim.limits:
                self.limits[key] = min(self.limits.get(key, claim.limits[name]), claim.limits[name])


def is_small(items: Sequence[ClaimItem]) -> bool:
    """Whether the fast path is worth a try: few claims of different consumers, without server groups and migrations."""
    wanted = {
        item.consumer
        for item in items
        if isinstance(item, Claim) and item.server_group is None and item.migration is None
    }
    return len(items) <= MAX_ITEMS and len(wanted) == len(items)


async def apply(
    connection: asyncpg.Connection, items: Sequence[ClaimItem], names: NameTable
) -> list[ClaimReply] | None:
    """Take the first option of each claim, outside of a transaction. Returns None when the group needs the general
    path.
    """
    wanted = _Wanted()
    for claim in items:
        if not isinstance(claim, Claim) or not may_be_new(claim) or not wanted.add(claim):
            return None
    if not names.class_ids.keys() >= {name for _, name in wanted.used}:
        return None
    try:
        claimed, read = await connection.fetchrow(TAKE, *_arguments(items, wanted, names))
    except asyncpg.RaiseError:
        return None
    if claimed is None:
        return await _refusals(connection, items, read, names)
    return _replies(items, wanted, claimed[0], claimed[1:])


async def _refusals(
    connection: asyncpg.Connection, items: Sequence[ClaimItem], read: str, names: NameTable
) -> list[ClaimReply] | None:
    """Return the refusals when no claim of the group writes anything; None when one does, which needs the
    general path.
    """
    locked, usage = await claims.as_read(connection, read, names)
    projects = {**{project: {} for project in projects_of(items)}, **usage}
    decision = decide(items, locked.found, locked.providers, names.class_ids, projects=projects)
    if decision.consumers:
        return None
    verdicts = await holders.named(connection, items, decision.verdicts, names)
    return [reply(item, verdict, 0) for item, verdict in zip(items, verdicts, strict=True)]


def _arguments(items: Sequence[ClaimItem], wanted: _Wanted, names: NameTable) -> list[object]:
    places = {provider: place for place, provider in enumerate(wanted.times, 1)}
    ids = names.class_ids
    uuids, projects, users, types, _, attempts = claims.columns(sorted(expected_consumers(items).items()))
    used = [(places[uuid], ids[name], name, amount) for (uuid, name), amount in wanted.used.items()]
    usage = [
        (project, limits.class_number(name, names), more, wanted.limits.get((project, name)))
        for (project, name), more in wanted.projects.items()
    ]
    held = [(consumer, places[uuid], ids[name], amount) for consumer, uuid, name, amount in wanted.held]
    return [
        *(uuids, projects, users, types, attempts),
        *(list(places), [wanted.shapes[uuid] for uuid in places], list(wanted.times.values())),
        *transposed(used, 4),
        *transposed(held, 4),
        projects_of(items),
        *transposed(usage, 4),
        list(providers_of(items, {})),
    ]


def _replies(
    items: Sequence[ClaimItem], wanted: _Wanted, sequence: int, generations: Sequence[int]
) -> list[ClaimReply]:
    """Return the replies. Each claim has incremented the generations of its providers by one, in order."""
    now = {
        uuid: generation - times for (uuid, times), generation in zip(wanted.times.items(), generations, strict=True)
    }
    replies: list[ClaimReply] = []
    for claim in items:
        assert isinstance(claim, Claim)
        for uuid in claim.options[0].allocations:
            now[uuid] += 1
        moved = {uuid: now[uuid] for uuid in claim.options[0].allocations}
        verdict = ClaimVerdict(
            outcome=ClaimOutcome.CLAIMED,
            option=0,
            outcomes=_CLAIMED,
            consumer_generation=1,
            generations=moved,
            changed=True,
        )
        replies.append(reply(claim, verdict, sequence))
    return replies

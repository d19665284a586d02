"""A few new claims in one round trip: a function of the schema that applies the claims, or does nothing.

With locks a claim costs eight round trips, and alone on an idle system that is most of its time; in large groups they
are shared by all, so only small groups come here. Nearly every claim is of a new consumer, fits, and stays within its
project's limits. The claims that the function `claim_new` (schema.sql) takes; it knows no more of the rules in
`domain/claims.py` than when a first option is claimed, and everything else is decided there.
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

# More share the way with locks, which is as quick for them; and the function writes its changes as one row of the feed.
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
    """The sum of these claims if each takes its first option: rows of the function's arguments."""

    def __init__(self) -> None:
        self.shapes: dict[str, int | None] = {}
        self.times: dict[str, int] = {}
        self.used: dict[tuple[str, str], int] = {}
        self.held: list[tuple[str, str, str, int]] = []
        self.projects: dict[tuple[str, str], int] = {}
        self.limits: dict[tuple[str, str], int] = {}

    def add(self, claim: Claim) -> bool:
        """Whether its first option can be claimed, judged by the claim alone; otherwise it may be added in part."""
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
        """The amounts that the claim adds to the project's total; of limits that differ from claim to claim the lowest,
        for all of them.
        """
        counted = {} if claim.consumer_type == MIGRATION_TYPE else held_by_class(holding)
        for name, amount in counted.items():
            key = (claim.project_id, name)
            self.projects[key] = self.projects.get(key, 0) + amount
            if name in claim.limits:
                self.limits[key] = min(self.limits.get(key, claim.limits[name]), claim.limits[name])


def is_small(items: Sequence[ClaimItem]) -> bool:
    """Whether it is worth a try: a few claims, each of another consumer, none of a server group or of a move."""
    wanted = {
        item.consumer
        for item in items
        if isinstance(item, Claim) and item.server_group is None and item.migration is None
    }
    return len(items) <= MAX_ITEMS and len(wanted) == len(items)


async def apply(
    connection: asyncpg.Connection, items: Sequence[ClaimItem], names: NameTable
) -> list[ClaimReply] | None:
    """Claim for new consumers, each its first option, outside of a transaction. None: it is not as simple as that."""
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
    """The replies to claims none of which writes anything; None when one does, and needs locks."""
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
    """Each claim moved its providers by one, in order."""
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

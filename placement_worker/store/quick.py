"""A few new claims in two round trips: a look without locks, and one statement that holds only if nothing has moved.

With locks a claim costs eight. Alone on an idle system that is most of its time; in large groups it is shared by all,
and providers move under each other's looks, so only small groups come here. What was looked at is checked in its
version (xmin: the transaction that wrote the row): providers, and the inventories that are taken from. Locks are taken
in the order that all writers keep: consumers, providers by id, the feed's counter last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import asyncpg

from bus.contracts.placement import Claim, ClaimOutcome
from bus.service.once import Mistaken, Once
from placement_worker.domain.claims import Decision, changes_of, decide
from placement_worker.domain.values import ClaimedProvider, Room
from placement_worker.store import claims, feed
from placement_worker.store.names import Names
from placement_worker.store.port import ClaimItem, ClaimReply

MAX_ITEMS = 8

LOOK = """
SELECT p.id, p.uuid, p.generation, p.shape, p.xmin AS version,
       i.class_id, i.capacity, i.min_unit, i.max_unit, i.step_size, i.used, i.xmin AS room_version
FROM providers p LEFT JOIN inventories i ON i.provider_id = p.id
WHERE p.uuid = ANY($1::uuid[])
"""

CONSUMERS = """
INSERT INTO consumers (uuid, project_id, user_id, consumer_type, generation, attempt)
SELECT * FROM unnest({}::uuid[], {}::text[], {}::text[], {}::text[], {}::bigint[], {}::int[])
ON CONFLICT (uuid) DO NOTHING RETURNING 1
"""

HELD = """
SELECT p.id FROM providers p JOIN unnest({}::bigint[], {}::xid[]) AS b (id, version) ON p.id = b.id
WHERE p.xmin = b.version AND (SELECT count(*) FROM named) >= 0
ORDER BY p.id FOR NO KEY UPDATE OF p
"""

MOVED = """
UPDATE providers p SET generation = n.generation, updated_at = now()
FROM unnest({}::bigint[], {}::bigint[]) AS n (id, generation), held
WHERE p.id = n.id AND held.id = n.id RETURNING 1
"""

USED = """
UPDATE inventories i SET used = n.used
FROM unnest({}::bigint[], {}::int[], {}::bigint[], {}::xid[]) AS n (provider_id, class_id, used, version), held
WHERE i.provider_id = n.provider_id AND i.class_id = n.class_id AND held.id = n.provider_id
      AND i.xmin = n.version AND n.used <= i.capacity RETURNING 1
"""

HOLDINGS = """
INSERT INTO allocations (consumer, provider_id, class_id, amount)
SELECT * FROM unnest({}::uuid[], {}::bigint[], {}::int[], {}::bigint[]) RETURNING 1
"""

# The counter is locked here, after all else.
TOLD = """
SELECT append_changes({}::bigint[], {}::bigint[], {}::bytea[]) AS last
WHERE (SELECT count(*) FROM moved) >= 0 AND (SELECT count(*) FROM used) >= 0
"""


class Look:
    """Some providers as one snapshot shows them, with the versions of their rows."""

    def __init__(self, found: Sequence[asyncpg.Record], class_names: Mapping[int, str]) -> None:
        self.ids: dict[str, int] = {}
        self.versions: dict[str, int] = {}
        self.room_versions: dict[tuple[str, str], int] = {}
        self.providers: dict[str, ClaimedProvider] = {}
        for row in found:
            uuid = row["uuid"]
            if uuid not in self.ids:
                self.ids[uuid], self.versions[uuid] = row["id"], row["version"]
                self.providers[uuid] = ClaimedProvider(row["generation"], row["shape"], {})
            if row["class_id"] is not None:
                name = class_names[row["class_id"]]
                self.room_versions[uuid, name] = row["room_version"]
                self.providers[uuid].rooms[name] = Room(
                    row["capacity"], row["min_unit"], row["max_unit"], row["step_size"], row["used"]
                )


def is_small(items: Sequence[ClaimItem]) -> bool:
    """Whether it is worth a try: a few claims, each of another consumer, none of a server group or with limits."""
    wanted = {
        item.consumer for item in items if isinstance(item, Claim) and item.server_group is None and not item.limits
    }
    return len(items) <= MAX_ITEMS and len(wanted) == len(items)


async def apply(connection: asyncpg.Connection, items: Sequence[ClaimItem], names: Names) -> list[ClaimReply] | None:
    """Claim for new consumers, each its first option, outside of a transaction. None: it is not as simple as that."""
    found = await connection.fetch(LOOK, sorted(claims.providers_of(items, {})))
    class_ids = {row["class_id"] for row in found if row["class_id"] is not None}
    look = Look(found, await names.names_of(connection, class_ids))
    decision = decide(items, {}, look.providers, names.class_ids, frozenset())
    if not all(v.outcome == ClaimOutcome.CLAIMED and v.option == 0 for v in decision.verdicts):
        return None
    try:
        sequence = await _write(connection, items, decision, look, names.class_ids)
    except (Mistaken, asyncpg.ForeignKeyViolationError):  # or a class went that this process still knows
        return None
    return [claims.reply(item, verdict, sequence) for item, verdict in zip(items, decision.verdicts, strict=True)]


async def _write(
    connection: asyncpg.Connection,
    items: Sequence[ClaimItem],
    decision: Decision,
    look: Look,
    class_ids: Mapping[str, int],
) -> int:
    """The whole group in one statement; the last number of the feed. Raises Mistaken."""
    once = Once()
    consumers = claims.columns(sorted(claims.expected(items).items()))
    once.part("named", CONSUMERS, *consumers, rows=len(items))
    touched = sorted(decision.generations, key=look.ids.__getitem__)
    ids = [look.ids[uuid] for uuid in touched]
    once.part("held", HELD, ids, [look.versions[uuid] for uuid in touched], rows=len(ids))
    once.part("moved", MOVED, ids, [decision.generations[uuid] for uuid in touched], rows=len(ids))
    used = [
        (look.ids[uuid], class_ids[name], amount, look.room_versions[uuid, name])
        for uuid, amounts in decision.used.items()
        for name, amount in amounts.items()
    ]
    once.part("used", USED, *zip(*used, strict=True), rows=len(used))
    holdings = [
        (uuid, look.ids[provider], class_ids[name], amount)
        for uuid, consumer in decision.consumers.items()
        if consumer is not None
        for provider, amounts in consumer.holding.items()
        for name, amount in amounts.items()
    ]
    once.part("held_now", HOLDINGS, *zip(*holdings, strict=True), rows=len(holdings))
    once.part("told", TOLD, *feed.rows(changes_of(decision)), rows=1)
    once.column("(SELECT last FROM told) AS sequence")
    last: int = (await once.run(connection))["sequence"]
    return last

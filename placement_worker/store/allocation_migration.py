"""Writes allocations that follow their class to another provider, in the transaction of the report that moves the
class.

Every writer locks consumers before providers. Here the consumers to lock are read first, and further ones may appear
before the providers are locked. These are locked without waiting. When one of them is locked by another transaction,
the group is rolled back and retried (HoldersBusy).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import asyncpg
from msgspec.structs import replace

from bus.faults import Transient
from placement_worker.domain.claim_verdict import Decision
from placement_worker.domain.reports import ReportPlan
from placement_worker.domain.values import ConsumerState, Provider
from placement_worker.store import claims
from placement_worker.store.names import NameTable

HOLDERS = """
SELECT DISTINCT a.consumer FROM unnest($1::uuid[], $2::int[]) AS n (provider, class_id)
JOIN providers p ON p.uuid = n.provider JOIN allocations a ON a.provider_id = p.id AND a.class_id = n.class_id
"""
# To wait here could deadlock with a transaction that has locked the consumer and waits for the providers.
LOCK_WITHOUT_WAITING = "SELECT uuid FROM consumers WHERE uuid = ANY($1::uuid[]) FOR NO KEY UPDATE SKIP LOCKED"
READ_IDS = "SELECT uuid, id FROM providers WHERE uuid = ANY($1::uuid[])"

Leaving = tuple[str, str]  # (provider, class)

_NEW_CONSUMER = ConsumerState(0, 0, "", "", "")


class HoldersBusy(Transient):
    """Another transaction is changing allocations that the report moves."""

    code = "inventory.holders_busy"


async def lock_holders(
    connection: asyncpg.Connection, leaving: Sequence[Leaving], names: NameTable
) -> dict[str, ConsumerState]:
    """Lock and return all consumers that hold allocations of these classes of these providers."""
    return await _lock(connection, await _holders(connection, leaving, names), names)


async def lock_late_holders(
    connection: asyncpg.Connection, leaving: Sequence[Leaving], known: Collection[str], names: NameTable
) -> dict[str, ConsumerState]:
    """Lock and return the consumers that appeared between `lock_holders` and the locks of the providers. Raises
    HoldersBusy.
    """
    late = [uuid for uuid in await _holders(connection, leaving, names) if uuid not in known]
    if late and len(await connection.fetch(LOCK_WITHOUT_WAITING, late)) < len(late):
        raise HoldersBusy("an allocation that is to be moved is being changed")
    return await _lock(connection, late, names)


def between(before: Mapping[str, Provider], after: Mapping[str, Provider]) -> dict[str, Provider]:
    """Return the old and the new providers and inventories together, so that allocations can move between them."""
    both = {uuid: _with_old(before.get(uuid), provider) for uuid, provider in after.items()}
    return {**both, **{uuid: provider for uuid, provider in before.items() if uuid not in after}}


async def write(
    connection: asyncpg.Connection,
    plan: ReportPlan,
    before: Mapping[str, Provider],
    consumers: Mapping[str, ConsumerState],
    *,
    ids: Mapping[str, int],
    names: NameTable,
) -> None:
    """Write the new allocations of the consumers, and the usage of the providers. Consumers keep their generation."""
    moved: dict[str, ConsumerState | None] = {
        uuid: replace(consumers[uuid], holding=holding) for uuid, holding in plan.moved.items()
    }
    used, generations = _usage(before, plan.after)
    elsewhere = {provider for holding in plan.moved.values() for provider in holding} - ids.keys()
    everywhere = {**ids, **dict(await connection.fetch(READ_IDS, list(elsewhere)))} if elsewhere else ids
    decision = Decision([], moved, used, generations)
    await claims.write(connection, decision, consumers, {}, ids=everywhere, names=names)


def _usage(
    before: Mapping[str, Provider], after: Mapping[str, Provider]
) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Return the new usage where the amount has changed, and the generations of those providers."""
    used: dict[str, dict[str, int]] = {}
    generations: dict[str, int] = {}
    for uuid in before.keys() | after.keys():
        old, new = before.get(uuid), after.get(uuid)
        was, now = old.used if old is not None else {}, new.used if new is not None else {}
        differs = {name: now.get(name, 0) for name in was.keys() | now.keys() if was.get(name, 0) != now.get(name, 0)}
        if differs:
            used[uuid] = differs
            generations[uuid] = new.generation if new is not None else before[uuid].generation
    return used, generations


async def _holders(connection: asyncpg.Connection, leaving: Sequence[Leaving], names: NameTable) -> list[str]:
    pairs = [(uuid, names.class_ids[name]) for uuid, name in leaving if name in names.class_ids]
    if not pairs:
        return []
    return [row[0] for row in await connection.fetch(HOLDERS, *map(list, zip(*pairs, strict=True)))]


async def _lock(connection: asyncpg.Connection, uuids: Sequence[str], names: NameTable) -> dict[str, ConsumerState]:
    if not uuids:
        return {}
    inserted, found = await claims.lock_consumers(connection, dict.fromkeys(uuids, _NEW_CONSUMER), names)
    if inserted:  # the consumer was deleted after it was read; `lock_consumers` has inserted it again
        await connection.execute(claims.DELETE_CONSUMERS, list(inserted))
    return {uuid: consumer for uuid, consumer in found.items() if consumer.holding}


def _with_old(old: Provider | None, new: Provider) -> Provider:
    if old is None or old.inventories.keys() <= new.inventories.keys():
        return new
    return replace(new, inventories={**old.inventories, **new.inventories})

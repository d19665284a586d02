"""The statements that lock and write trees and the last reports of their sources: a round trip each.

An advisory lock serializes the writers of trees across all processes, so that two of them cannot create providers of
one name or move the same provider at once. Claims run concurrently and wait only for row locks, which both sides take
in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec.structs import asdict

from bus.persistence.tables import UUID
from placement_worker.domain.report_group import RELEASED, TAKEN_OUT, Sources
from placement_worker.domain.values import Provider, StoredInventory
from placement_worker.store.rows import ProviderRows
from placement_worker.store.tables import inventories, providers, sources

ONE_WRITER_OF_TREES = sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended("berth.placement.trees", 0)))

# Functions of 0001_functions.sql.
LOCK_SOURCES = """
SELECT root::text, source, cell, version, digest, settled, providers::text[] FROM lock_sources($1::text[]::uuid[])
"""
REPEAT = "SELECT repeat_reports($1::text[]::uuid[], $2::text[], $3::bigint[])"
LOCK = "SELECT lock_trees($1::text[]::uuid[], $2::text[], $3::text[]::uuid[], $4::text[]::uuid[])"
WRITE = "SELECT write_trees($1, $2::bigint[], $3::bigint[], $4::bytea[])"
READ_IDS = "SELECT uuid, id FROM providers WHERE uuid = ANY($1::uuid[])"


def release(source: str, roots: Sequence[str], cell: str) -> sa.Update:
    """Another compute service may take over these roots of a source, those of the cell."""
    return (
        sa.update(sources)
        .where(
            sources.c.source == source,
            sources.c.root == sa.any_(sa.literal(list(roots), sa.ARRAY(UUID))),
            sources.c.digest != TAKEN_OUT,
            providers.c.uuid == sources.c.root,
            providers.c.cell == cell,
        )
        .values(digest=RELEASED, settled=False)
    )


def retired(limit: int) -> sa.Select[Any]:
    """Sources whose tree was removed while it was in use, is no longer in use, and was reported by no source since."""
    later, every = sources.alias("later"), providers.alias("every")
    is_empty = (
        sa.select(sa.func.bool_and(inventories.c.stranded & (inventories.c.used == 0)))
        .select_from(every.join(inventories, inventories.c.provider_id == every.c.id))
        .where(every.c.root_id == providers.c.id)
        .scalar_subquery()
    )
    reported = sa.exists().where(
        later.c.root == sources.c.root, later.c.digest != TAKEN_OUT, later.c.updated_at >= sources.c.updated_at
    )
    columns = ("root", "source", "version", "digest", "settled", "providers")
    return (
        sa.select(*(sources.c[name] for name in columns))
        .select_from(sources.join(providers, providers.c.uuid == sources.c.root))
        .where(
            providers.c.root_id == providers.c.id,
            sources.c.settled.is_(False),
            sources.c.digest == TAKEN_OUT,
            ~reported,
            is_empty,
        )
        .order_by(sources.c.root, sources.c.source)
        .limit(limit)
    )


HOLDERS = """
SELECT DISTINCT a.consumer FROM unnest($1::uuid[], $2::int[]) AS n (provider, class_id)
JOIN providers p ON p.uuid = n.provider JOIN allocations a ON a.provider_id = p.id AND a.class_id = n.class_id
"""

_decode = msgspec.json.Decoder(tuple[int, list[int], ProviderRows]).decode


def rows_of(
    ids: Mapping[str, int],
    before: Mapping[str, Provider],
    after: Mapping[str, Provider],
    numbers: tuple[Mapping[str, int], Mapping[str, int]],
    *,
    sources: Sources,
    reported: Collection[str],
) -> dict[str, object]:
    """Return the rows for the SQL function `write_trees`, by kind. A kind without rows is left out.

    ids: the row ids of all providers, and of parents and roots of those that are written. numbers: of (classes,
    traits). sources: the last reports to write. reported: roots of which no other settled reports are to be unsettled.
    """
    changed = [(before.get(uuid), new) for uuid, new in after.items() if before.get(uuid) is not new]
    gone = [ids[uuid] for uuid in before if uuid not in after]
    created = [{**_state(ids, new), **_place(ids, new), "uuid": new.uuid} for old, new in changed if old is None]
    kept = [_state(ids, new) for old, new in changed if old is not None]
    moved = [_place(ids, new) for old, new in changed if old is not None and _moves(old, new)]
    dropped, inventories = _inventories(
        [(ids[n.uuid], o.inventories if o else _NO_INVENTORIES, n.inventories) for o, n in changed], numbers[0]
    )
    trait_ids = numbers[1]
    lost, won = difference([(ids[n.uuid], o.traits if o else (), n.traits) for o, n in changed], trait_ids.__getitem__)
    lasting = {(ids[new.uuid], trait_ids[trait]) for _, new in changed for trait in new.lasting}
    won = [row | {"lasting": (row["provider_id"], row["member"]) in lasting} for row in won]
    left, joined = difference([(ids[n.uuid], o.aggregates if o else (), n.aggregates) for o, n in changed], str)
    roots = {new.root for _, new in changed} | {p.root for uuid, p in before.items() if after.get(uuid) is not p}
    rows: dict[str, object] = {
        "created": created,
        "kept": kept,
        "moved": moved,
        "gone": gone,
        "dropped": dropped,
        "inventories": inventories,
        "lost": lost,
        "won": won,
        "left": left,
        "joined": joined,
        "roots": sorted(roots.difference(reported)),
        "sources": _rows_of_sources(sources),
        "names_pass": bool(moved or created),
    }
    return {kind: value for kind, value in rows.items() if value}


_NO_INVENTORIES: Mapping[str, StoredInventory] = {}


def _state(ids: Mapping[str, int], provider: Provider) -> dict[str, object]:
    return {"id": ids[provider.uuid], "generation": provider.generation, "shape": provider.shape}


def _moves(old: Provider, new: Provider) -> bool:
    return old.name != new.name or old.parent != new.parent or old.root != new.root or old.cell != new.cell


def _place(ids: Mapping[str, int], provider: Provider) -> dict[str, object]:
    parent_id = None if provider.parent is None else ids[provider.parent]
    place = {"parent_id": parent_id, "root_id": ids[provider.root], "cell": provider.cell}
    return {"id": ids[provider.uuid], "name": provider.name, **place}


def _inventories(
    rows: Iterable[tuple[int, Mapping[str, StoredInventory], Mapping[str, StoredInventory]]],
    class_ids: Mapping[str, int],
) -> tuple[list[object], list[object]]:
    """Return (inventories to delete, inventories that are new or changed)."""
    dropped: list[object] = []
    stored: list[object] = []
    for number, before, after in rows:
        dropped += [{"provider_id": number, "class_id": class_ids[name]} for name in before if name not in after]
        stored += [
            {"provider_id": number, "class_id": class_ids[name], **asdict(inventory)}
            for name, inventory in after.items()
            if before.get(name) != inventory
        ]
    return dropped, stored


def difference(
    rows: Iterable[tuple[int, Sequence[str], Sequence[str]]], number: Callable[[str], object]
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return (rows to delete, rows to insert) for the traits or aggregates of providers."""
    gone: list[dict[str, object]] = []
    come: list[dict[str, object]] = []
    for provider_id, before, after in rows:
        if before != after:
            old, new = set(before), set(after)  # there may be 26,000: compared pair by pair they took 10 s
            gone += [{"provider_id": provider_id, "member": number(member)} for member in before if member not in new]
            come += [{"provider_id": provider_id, "member": number(member)} for member in after if member not in old]
    return gone, come


def _rows_of_sources(sources: Sources) -> list[dict[str, object]]:
    return [
        {
            "root": root,
            "source": source,
            "version": row.version,
            "digest": row.digest.hex(),
            "settled": row.settled,
            "providers": list(row.providers),
        }
        for (root, source), row in sources.items()
    ]


def named_above(before: Mapping[str, Provider], after: Mapping[str, Provider]) -> set[str]:
    """The parents and roots of the providers that are written."""
    return {
        uuid
        for provider in after.values()
        if before.get(provider.uuid) is not provider
        for uuid in (provider.parent, provider.root)
        if uuid is not None
    }


def loaded(answer: str) -> tuple[int, list[int], dict[str, int], dict[str, Provider]]:
    """Return (the new shape, row ids for new providers, {uuid: row id} of providers, parents and roots, the providers).

    All returned providers are locked.
    """
    shape, fresh_ids, rows = _decode(answer)
    ids: dict[str, int] = {}
    for number, parent_id, root_id, _, uuid, _, parent, root, *_ in rows.providers:
        ids[uuid] = number
        ids[root] = root_id
        if parent is not None and parent_id is not None:
            ids[parent] = parent_id
    return shape, fresh_ids, ids, rows.whole()

"""The statements that lock and write trees and the last reports of their reporters: a round trip each.

An advisory lock serializes the writers of trees across all processes, so that two of them cannot create providers of
one name or move the same provider at once. Claims run concurrently and wait only for row locks, which both sides take
in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from msgspec.structs import asdict

from bus.persistence.tables import UUID
from placement_worker.domain.report_group import RELEASED, WITHDRAWN, LastReports
from placement_worker.domain.values import Provider
from placement_worker.store.port import TreeWrites
from placement_worker.store.rows import ProviderRows
from placement_worker.store.tables import inventories, provider_aggregates, provider_traits, providers, reporters

ONE_WRITER_OF_TREES = sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended("berth.placement.trees", 0)))

Member = TypeVar("Member")

# Functions of 0001_functions.sql.
LOCK_REPORTERS = """
SELECT root::text, reporter, cell, version, digest, complete, providers::text[] FROM lock_reporters($1::text[]::uuid[])
"""
REPEAT = "SELECT repeat_reports($1::text[]::uuid[], $2::text[], $3::bigint[])"
LOCK = "SELECT lock_trees($1::text[]::uuid[], $2::text[], $3::text[]::uuid[], $4::text[]::uuid[])"
WRITE = "SELECT write_trees($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bytea[])"
READ_IDS = "SELECT uuid, id FROM providers WHERE uuid = ANY($1::uuid[])"


def release(reporter: str, roots: Sequence[str], cell: str) -> sa.Update:
    """Another compute service may take over these roots of a reporter, those of the cell."""
    return (
        sa.update(reporters)
        .where(
            reporters.c.reporter == reporter,
            reporters.c.root == sa.any_(sa.literal(list(roots), sa.ARRAY(UUID))),
            reporters.c.digest != WITHDRAWN,
            providers.c.uuid == reporters.c.root,
            providers.c.cell == cell,
        )
        .values(digest=RELEASED, complete=False)
    )


MARK_INCOMPLETE = "UPDATE reporters SET complete = false WHERE root = ANY($1::text[]::uuid[]) AND complete"


def retired(limit: int, keep_given_s: float) -> sa.Select[Any]:
    """Reporters whose tree was removed, is no longer in use, and has no other reporter since (`is_retired`)."""
    every = providers.alias("every")

    def of_tree(table: sa.Table, column: sa.ColumnElement[Any]) -> sa.Select[Any]:
        joined = every.join(table, table.c.provider_id == every.c.id)
        return sa.select(column).select_from(joined).where(every.c.root_id == providers.c.id).correlate(providers)

    is_empty = of_tree(inventories, sa.func.bool_and(inventories.c.orphaned & (inventories.c.used == 0)))
    given = sa.or_(
        of_tree(provider_aggregates, sa.literal(1)).exists(),
        of_tree(provider_traits, sa.literal(1)).where(provider_traits.c.own_trait).exists(),
    )
    long_ago = reporters.c.updated_at < sa.func.now() - timedelta(seconds=keep_given_s)
    waits = sa.or_(~of_tree(inventories, sa.literal(1)).exists(), given)
    columns = ("root", "reporter", "version", "digest", "complete", "providers")
    return (
        sa.select(*(reporters.c[name] for name in columns))
        .select_from(reporters.join(providers, providers.c.uuid == reporters.c.root))
        .where(
            providers.c.root_id == providers.c.id,
            reporters.c.complete.is_(False),
            reporters.c.digest == WITHDRAWN,
            reporters.c.root == sa.any_(reporters.c.providers),
            sa.func.coalesce(is_empty.scalar_subquery(), True),
            sa.or_(~waits, long_ago),
        )
        .order_by(reporters.c.root, reporters.c.reporter)
        .limit(limit)
    )


CONSUMERS = """
SELECT DISTINCT a.consumer FROM unnest($1::uuid[], $2::int[]) AS n (provider, class_id)
JOIN providers p ON p.uuid = n.provider JOIN allocations a ON a.provider_id = p.id AND a.class_id = n.class_id
"""

_decode = msgspec.json.Decoder(tuple[int, list[int], ProviderRows]).decode


def rows_of(
    ids: Mapping[str, int],
    writes: TreeWrites,
    numbers: tuple[Mapping[str, int], Mapping[str, int]],
    reported: Collection[str],
) -> dict[str, list[object]]:
    """Return the rows for the SQL function `write_trees`, by kind. A kind without rows is left out.

    ids: the row ids of all providers, and of parents and roots of those that are written. numbers: of (classes,
    traits). reported: roots of which no other complete reports are to be marked incomplete.
    """
    before, after = writes.before, writes.after
    rows: dict[str, list[object]] = defaultdict(list)
    rows["gone"] += [ids[uuid] for uuid in before if uuid not in after]
    roots = {old.root for uuid, old in before.items() if after.get(uuid) is not old}
    for uuid, new in after.items():
        old = before.get(uuid)
        if old is not new:
            roots.add(new.root)
            _add_provider(rows, ids, old, new)
            _add_parts(rows, ids[uuid], old or _NEW, new, numbers)
    rows["roots"] += sorted(roots.difference(reported))
    rows["reporters"] += _rows_of_reporters(writes.last_reports)
    rows["disowned"] += writes.disowned
    rows["names_pass"] += [True] * bool(rows["moved"] or rows["created"])
    return {kind: of_kind for kind, of_kind in rows.items() if of_kind}


_NEW = Provider("", "", None, "", 0, 0, {}, {}, (), ())


def _add_provider(rows: dict[str, list[object]], ids: Mapping[str, int], old: Provider | None, new: Provider) -> None:
    state = {"id": ids[new.uuid], "generation": new.generation, "spec_generation": new.spec_generation}
    if old is not None:
        rows["kept"].append(state)
        if old.name == new.name and old.parent == new.parent and old.root == new.root and old.cell == new.cell:
            return
    parent_id = None if new.parent is None else ids[new.parent]
    place = {"name": new.name, "parent_id": parent_id, "root_id": ids[new.root], "cell": new.cell}
    rows["moved" if old is not None else "created"].append({**state, **place, "uuid": new.uuid})


def _add_parts(
    rows: dict[str, list[object]],
    number: int,
    old: Provider,
    new: Provider,
    numbers: tuple[Mapping[str, int], Mapping[str, int]],
) -> None:
    class_ids, trait_ids = numbers
    rows["dropped"] += [
        {"provider_id": number, "class_id": class_ids[name]} for name in old.inventories if name not in new.inventories
    ]
    rows["inventories"] += [
        {"provider_id": number, "class_id": class_ids[name], **asdict(inventory)}
        for name, inventory in new.inventories.items()
        if old.inventories.get(name) != inventory
    ]
    lost, won = difference(_marked(old), _marked(new))
    rows["lost"] += [{"provider_id": number, "member": trait_ids[trait]} for trait, _ in lost]
    rows["won"] += [{"provider_id": number, "member": trait_ids[one], "own_trait": lasts} for one, lasts in won]
    left, joined = difference(old.aggregates, new.aggregates)
    rows["left"] += [{"provider_id": number, "member": aggregate} for aggregate in left]
    rows["joined"] += [{"provider_id": number, "member": aggregate} for aggregate in joined]


def _marked(provider: Provider) -> list[tuple[str, bool]]:
    """The traits, each with whether it is lasting."""
    lasting = set(provider.own_traits)
    return [(trait, trait in lasting) for trait in provider.traits]


def difference(before: Sequence[Member], after: Sequence[Member]) -> tuple[list[Member], list[Member]]:
    """Return (the traits or aggregates to delete, those to insert)."""
    if before == after:
        return [], []
    old, new = set(before), set(after)  # there may be 26,000: compared pair by pair they took 10 s
    return [one for one in before if one not in new], [one for one in after if one not in old]


def _rows_of_reporters(reporters: LastReports) -> list[dict[str, object]]:
    return [
        {"root": root, "reporter": reporter, **asdict(row), "digest": row.digest.hex()}
        for (root, reporter), row in reporters.items()
    ]


def ancestors_of(before: Mapping[str, Provider], after: Mapping[str, Provider]) -> set[str]:
    """The parents and roots of the providers that are written."""
    return {
        uuid
        for provider in after.values()
        if before.get(provider.uuid) is not provider
        for uuid in (provider.parent, provider.root)
        if uuid is not None
    }


def loaded(answer: str) -> tuple[int, list[int], dict[str, int], dict[str, Provider]]:
    """Return (the new spec generation, row ids for new providers, {uuid: row id} of providers, parents and roots, the
    providers).

    All returned providers are locked.
    """
    spec_generation, fresh_ids, rows = _decode(answer)
    ids: dict[str, int] = {}
    for number, parent_id, root_id, _, uuid, _, parent, root, *_ in rows.providers:
        ids[uuid] = number
        ids[root] = root_id
        if parent is not None and parent_id is not None:
            ids[parent] = parent_id
    return spec_generation, fresh_ids, ids, rows.whole()

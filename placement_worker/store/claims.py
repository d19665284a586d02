"""Applies a group of claims in one transaction of a few set-based statements.

Every writer takes locks in one order, so that claims and swaps cannot deadlock: server groups, consumers by uuid,
providers by id, projects with limits, the usage of projects by project and class, and the feed's counter last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import asyncpg
import msgspec
from msgspec import Struct

from bus.contracts.placement import (
    Change,
)
from bus.faults import BrokenInvariant
from placement_worker.domain.claim_items import (
    ClaimReply,
    dated_consumers,
    expected_consumers,
    projects_of,
    providers_of,
    reply,
)
from placement_worker.domain.claim_verdict import ClaimVerdict, Decision
from placement_worker.domain.claims import ClaimItem, changes_of, decide
from placement_worker.domain.values import (
    ABOVE_CELLS,
    NOTHING,
    ClaimedProvider,
    ConsumerState,
    InventoryUsage,
    is_closed,
)
from placement_worker.offload import ROW_BYTES, OffloadThread, run_sized
from placement_worker.store import feed, holders, limits, members
from placement_worker.store.names import NameTable
from placement_worker.store.rows import transposed

# Both call functions of schema.sql, so that each takes one round trip.
LOCK = """
SELECT lock_claims($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::int[], $7::uuid[], $8::text[], $9)
"""
WRITE = """
SELECT write_claims($1::uuid[],
    $2::uuid[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::int[], $8::bool[],
    $9::uuid[], $10::uuid[], $11::bigint[], $12::int[], $13::bigint[],
    $14::bigint[], $15::int[], $16::bigint[], $17::bigint[], $18::bigint[],
    $19::bigint[], $20::bigint[], $21::bytea[],
    $22::text[], $23::int[], $24::bigint[], $25::bigint[])
"""

# The rows of one statement's arguments: asyncpg encodes them in one turn of the event loop, a thousand in 1 ms. Only
# requests of the REST API have more.
MAX_ROWS = 2048
MAX_CONSUMERS = 1024
# The columns of each kind of WRITE's rows: consumers to delete, consumers to change, consumers whose allocations are
# deleted, allocations, usage, generations.
WRITTEN = (1, 7, 1, 4, 3, 2)

NO_LIMITS: Mapping[tuple[str, str], int] = {}

AGES = """
SELECT uuid::text, extract(epoch FROM clock_timestamp() - created_at)::float8
FROM consumers WHERE uuid = ANY($1::uuid[])
"""
DELETE_CONSUMERS = "DELETE FROM consumers WHERE uuid = ANY($1::uuid[])"

_ConsumerRow = tuple[str, int, int, str, str, str]
_HoldingRow = tuple[str, str, int, int]
_RoomRow = tuple[int, int, int, int, int, int]
_ProviderRow = tuple[int, str, int, int, str, str | None, list[_RoomRow] | None]
_UsageRow = tuple[str, int, int]
_Rows = tuple[list[_ConsumerRow], list[_HoldingRow], list[_ProviderRow], list[_UsageRow]]
_rows = msgspec.json.Decoder(_Rows).decode


class Locked(Struct, frozen=True):
    """The rows that a group has locked, read after the locks were granted.

    inserted: new consumers, whose rows this transaction has inserted. found: consumers that existed. ids: the row ids
    of the providers that exist. cells: the cell of each provider's root, where it has one. usage: the usage of projects
    with limits, as rows for `limits.by_project`.
    """

    inserted: dict[str, ConsumerState]
    found: dict[str, ConsumerState]
    ids: dict[str, int]
    providers: dict[str, ClaimedProvider]
    cells: dict[str, str]
    usage: Sequence[_UsageRow] = ()


async def apply(
    connection: asyncpg.Connection, items: Sequence[ClaimItem], names: NameTable, bus: str, *, alone: bool = False
) -> list[ClaimReply]:
    """Decide and write one group of claims from one bus, inside the caller's transaction.

    alone: lock projects with limits exclusively instead of shared. Raises PassedMeanwhile when concurrent claims have
    used up a limit since the decision; with `alone` there are none.
    """
    limited = projects_of(items)
    await members.lock(connection, items)
    locked = await lock(
        connection, expected_consumers(items), providers_of(items, {}), names, limited=limited, alone=alone
    )
    holding = {uuid for uuid, consumer in locked.found.items() if consumer.holding}
    groups = await members.read(connection, items, holding)
    held = await limits.by_project(connection, locked.usage, names)
    projects = {project: held.get(project, {}) for project in limited}
    foreign = frozenset(uuid for uuid, cell in locked.cells.items() if is_closed(cell, bus))
    ages_s = await _ages_of(connection, dated_consumers(items))
    decision = decide(
        items, locked.found, locked.providers, names.class_ids, foreign, groups=groups, projects=projects, ages_s=ages_s
    )
    await members.write(connection, decision.joined)  # before `write` locks the feed's counter
    sequence = await write(
        connection,
        decision,
        locked.found,
        locked.inserted,
        ids=locked.ids,
        names=names,
        changes=changes_of(decision),
        most=limits.lowest(items) if limited and not alone else {},
    )
    verdicts: Sequence[ClaimVerdict] = decision.verdicts
    if bus == ABOVE_CELLS:  # a cell learns nothing of other cells' consumers
        verdicts = await holders.named(connection, items, verdicts, names)
    return [reply(item, verdict, sequence, bus, locked.cells) for item, verdict in zip(items, verdicts, strict=True)]


async def _ages_of(connection: asyncpg.Connection, consumers: Sequence[str]) -> Mapping[str, float]:
    return dict(await connection.fetch(AGES, consumers)) if consumers else {}


async def lock(
    connection: asyncpg.Connection,
    expected: Mapping[str, ConsumerState],
    wanted: Collection[str] | None,
    names: NameTable,
    *,
    limited: Sequence[str] = (),
    alone: bool = False,
    offload: OffloadThread | None = None,
) -> Locked:
    """Lock and read consumers by uuid, then providers by id: the wanted ones, and those of the consumers' allocations.

    expected: the row that each consumer most likely gets if it is new. wanted: uuids of providers; None: lock no
    providers. limited: projects whose claims have limits, locked after the providers. alone: lock them exclusively.
    offload: where many rows are worked on.
    """
    named = sorted(expected.items())
    uuids = None if wanted is None else list(wanted)
    read: list[_Rows] = []
    while named and len(expected) > MAX_CONSUMERS:  # ends: each round takes some
        answer = await connection.fetchval(LOCK, *columns(named[:MAX_CONSUMERS]), None, (), False)
        named = named[MAX_CONSUMERS:]
        read.append(await run_sized(offload, len(answer) // ROW_BYTES, partial(_rows, answer)))
    if read and uuids is not None:
        uuids = list({*uuids, *(provider for rows in read for _, provider, _, _ in rows[1])})
    answer = await connection.fetchval(LOCK, *columns(named), uuids, limited, alone)
    size = len(answer) // ROW_BYTES + len(expected)
    rows = await run_sized(offload, size, lambda: _joined([*read, _rows(answer)]))
    used_classes = await run_sized(offload, size, lambda: _classes_used(rows))
    class_names = await names.names_of(connection, used_classes)
    return await run_sized(offload, size, lambda: _as_locked(rows, expected, class_names))


def _joined(read: Sequence[_Rows]) -> _Rows:
    if len(read) == 1:
        return read[0]
    consumers, held, providers, usage = zip(*read, strict=True)
    return [*chain(*consumers)], [*chain(*held)], [*chain(*providers)], [*chain(*usage)]


async def as_read(
    connection: asyncpg.Connection, answer: str, names: NameTable
) -> tuple[Locked, dict[str, dict[str, int]]]:
    """Decode the result of the SQL function `read_claims`: the rows as in `lock`, but not locked, and the projects'
    usage.
    """
    rows = _rows(answer)
    locked = _as_locked(rows, {}, await names.names_of(connection, _classes_used(rows)))
    return locked, await limits.by_project(connection, locked.usage, names)


def _classes_used(rows: _Rows) -> set[int]:
    _, held, providers, _ = rows
    used_classes = {row[2] for row in held}
    used_classes.update(room[0] for row in providers for room in row[6] or ())
    return used_classes


def _as_locked(rows: _Rows, expected: Mapping[str, ConsumerState], class_names: Mapping[int, str]) -> Locked:
    consumers, held, providers, usage = rows
    holdings: dict[str, dict[str, dict[str, int]]] = {}
    for consumer, provider, class_id, amount in held:
        holdings.setdefault(consumer, {}).setdefault(provider, {})[class_names[class_id]] = amount
    found = {row[0]: ConsumerState(*row[1:], holdings.get(row[0], NOTHING)) for row in consumers}
    return Locked(
        inserted={uuid: consumer for uuid, consumer in expected.items() if uuid not in found},
        found=found,
        ids={row[1]: row[0] for row in providers},
        providers={
            row[1]: ClaimedProvider(
                row[2],
                row[3],
                {class_names[inventory[0]]: InventoryUsage(*inventory[1:]) for inventory in row[6] or ()},
                root=row[4],
            )
            for row in providers
        },
        cells={row[1]: row[5] for row in providers if row[5] is not None},
        usage=usage,
    )


async def lock_consumers(
    connection: asyncpg.Connection,
    expected: Mapping[str, ConsumerState],
    names: NameTable,
    *,
    offload: OffloadThread | None = None,
) -> tuple[dict[str, ConsumerState], dict[str, ConsumerState]]:
    """Lock consumers as `lock` does, without providers. Returns (inserted, found) as in Locked."""
    locked = await lock(connection, expected, None, names, offload=offload)
    return locked.inserted, locked.found


async def write(
    connection: asyncpg.Connection,
    decision: Decision,
    found: Mapping[str, ConsumerState],
    inserted: Mapping[str, ConsumerState],
    *,
    ids: Mapping[str, int],
    names: NameTable,
    changes: Sequence[Change] = (),
    most: Mapping[tuple[str, str], int] = NO_LIMITS,
    offload: OffloadThread | None = None,
) -> int:
    """Write a decision and append the changes to the feed. Returns the number of the last change, 0 without changes.

    most: {(project, class): limit}. Raises PassedMeanwhile when the new usage would exceed one. Raises BrokenInvariant
    when the usage would exceed a capacity. offload: where many rows are worked on.
    """
    size = len(decision.consumers) + len(decision.used) + len(inserted)
    columns = await run_sized(offload, size, lambda: _columns(decision, found, inserted, ids, names))
    if not any(columns) and not changes:
        return 0
    usage = transposed(limits.rows_of(found, decision.consumers, names, most), 4)
    answer = await run_sized(offload, size, lambda: feed.rows(changes)) if changes else ([], [], [])
    rest: tuple[Any, ...] = (*answer, *usage)
    nothing: tuple[list[object], ...] = tuple([] for _ in rest)
    *first, last = _in_parts(columns)
    written = 0
    for part in first:
        _, more = await connection.fetchval(WRITE, *part, *nothing)
        written += more
    try:
        sequence, more = await connection.fetchval(WRITE, *last, *rest)
    except asyncpg.RaiseError as error:
        raise limits.PassedMeanwhile from error
    wanted = sum(map(len, decision.used.values()))
    if written + more != wanted:
        raise BrokenInvariant(f"usage past capacity, or an inventory is gone: {written + more} of {wanted}")
    number: int = sequence
    return number


def _columns(
    decision: Decision,
    found: Mapping[str, ConsumerState],
    inserted: Mapping[str, ConsumerState],
    ids: Mapping[str, int],
    names: NameTable,
) -> tuple[list[object], ...]:
    """Return the columns of WRITTEN."""
    used = [
        (ids[provider], names.class_ids[name], amount)
        for provider, resources in decision.used.items()
        for name, amount in resources.items()
    ]
    generations = [(ids[provider], generation) for provider, generation in decision.generations.items()]
    return (
        *_consumer_columns(decision, found, inserted),
        *_holding_columns(decision, found, ids, names),
        *transposed(used, 3),
        *transposed(generations, 2),
    )


def _in_parts(columns: Sequence[list[object]]) -> Iterator[list[list[object]]]:
    """Cut the columns of WRITTEN into those of statements, each of at most MAX_ROWS rows, in this order of rows: a
    consumer's old allocations are deleted before new ones are inserted.
    """
    ends = list(accumulate(WRITTEN))
    groups = [columns[end - width : end] for end, width in zip(ends, WRITTEN, strict=True)]
    starts = list(accumulate((len(group[0]) for group in groups), initial=0))
    for begin in range(0, max(starts[-1], 1), MAX_ROWS):
        part = [
            [column[max(0, begin - start) : max(0, begin + MAX_ROWS - start)] for column in group]
            for start, group in zip(starts, groups, strict=False)
        ]
        *_, used, generations = part
        if used[0] and not generations[0]:  # WRITE changes usage only beside a generation
            part[-1] = [column[:1] for column in groups[-1]]
        yield [column for group in part for column in group]


def columns(rows: Sequence[tuple[str, ConsumerState]]) -> tuple[list[object], ...]:
    """Return consumers as the columns that the statements take."""
    return (
        [uuid for uuid, _ in rows],
        [c.project_id for _, c in rows],
        [c.user_id for _, c in rows],
        [c.consumer_type for _, c in rows],
        [c.generation for _, c in rows],
        [c.attempt for _, c in rows],
    )


def _consumer_columns(
    decision: Decision, found: Mapping[str, ConsumerState], inserted: Mapping[str, ConsumerState]
) -> tuple[list[object], ...]:
    """Return the consumers to delete, and the columns of those whose rows differ from the found or inserted ones."""
    changed = decision.consumers
    gone: list[object] = [uuid for uuid in inserted if changed.get(uuid) is None]
    gone += [uuid for uuid in found if uuid in changed and changed[uuid] is None]
    rows = [
        (uuid, after)
        for uuid, after in changed.items()
        if after is not None and (uuid not in inserted or not after.holding or not _same(after, inserted[uuid]))
    ]
    return (gone, *columns(rows), [not after.holding for _, after in rows])


def _same(a: ConsumerState, b: ConsumerState) -> bool:
    return (a.generation, a.attempt, a.project_id, a.user_id, a.consumer_type) == (
        b.generation,
        b.attempt,
        b.project_id,
        b.user_id,
        b.consumer_type,
    )


def _holding_columns(
    decision: Decision, found: Mapping[str, ConsumerState], ids: Mapping[str, int], names: NameTable
) -> tuple[list[object], ...]:
    """Return the consumers whose allocations are deleted, and the columns of the new allocations."""
    stale: list[object] = [uuid for uuid in decision.consumers if uuid in found and found[uuid].holding]
    class_ids = names.class_ids
    rows = [
        (uuid, ids[provider], class_ids[name], amount)
        for uuid, consumer in decision.consumers.items()
        for provider, resources in (consumer.holding if consumer is not None else NOTHING).items()
        for name, amount in resources.items()
    ]
    return (stale, *transposed(rows, 4))
